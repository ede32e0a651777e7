"""The cache of launch plans: what calls with operands of the same layouts share is computed once, then looked up."""

from __future__ import annotations

from typing import Final, TypeVar

__all__ = ["LaunchPlans"]

_Key = TypeVar("_Key")
_Plan = TypeVar("_Plan")
_MOST: Final = 4096


class LaunchPlans(dict[_Key, _Plan]):
    """Plans by what they depend on. It is a dictionary, since every call of an operation looks one up.

    A program with more kinds of calls than `most` starts with an empty cache again: its plans are made twice, and
    look-ups need not keep track of which plan was used last.
    """

    def __init__(self, most: int = _MOST) -> None:
        super().__init__()
        self._most = most

    def remember(self, key: _Key, plan: _Plan) -> None:
        """Add a plan; drop all others first if there are too many."""
        if len(self) >= self._most:
            self.clear()
        self[key] = plan
