"""Replaces functions of other libraries during a recording, and restores them at its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

__all__ = ["Replaced"]


class Replaced:
    """The replaced attributes, until :meth:`put_back`."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Give an attribute of `owner` another value."""
        # As it stands there: a class method that getattr() gives is bound.
        own = vars(owner)
        self._originals.append((owner, name, own[name] if name in own else getattr(owner, name)))
        setattr(owner, name, new)

    def around_backward(self, torch: ModuleType, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Have `begin` called before PyTorch runs a backward graph, and `end` after it."""
        backward = torch.autograd.graph._engine_run_backward

        @wraps(backward)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return backward(*args, **kwargs)
            finally:
                end()

        for module in (torch.autograd.graph, torch.autograd):
            if getattr(module, "_engine_run_backward", None) is backward:
                self.replace(module, "_engine_run_backward", run_backward)

    def put_back(self) -> None:
        """Restore everything, in reverse order. A second call changes nothing."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)
