"""Operations that come in no order on their own stream: collectives of one NCCL group, copies of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cudatool.sanitize.effort import Effort
from cudatool.sanitize.intervals import Access, History, Operation

__all__ = ["Unordered"]


class _Member(Operation):
    """What an operation touches once, as an agent of its own that comes after no other."""

    __slots__ = ("of",)

    def __init__(self, number: int, clock: tuple[int, ...], of: Operation) -> None:
        super().__init__(number, 1, clock, of.record)
        self.of = of


class Unordered:
    """The operations of one group so far, and what they touch."""

    def __init__(self, effort: Effort) -> None:
        self._history = History(effort)
        self._count = 0
        # One number for each agent, or more: one object for many, as batches may be long.
        self._clock: tuple[int, ...] = (0,) * 8

    def add(self, accesses: Iterable[Access], conflict: Callable[[Access, Access, tuple[int, int]], None]) -> None:
        """Enter the accesses of the next operation; call `conflict` for those of others of its stream that collide."""

        def told(old: Access, new: Access, found: tuple[int, int]) -> None:
            earlier, later = _entered(old), _entered(new)
            one, other = earlier.operation, later.operation
            # Of two streams their order says whether they race.
            if one.record != other.record and one.agent == other.agent:
                conflict(earlier, later, found)

        for access in accesses:
            if self._count == len(self._clock):
                self._clock *= 2
            member = _Member(self._count, self._clock, access.operation)
            self._history.touch(access.of(member, access.node), told)
            self._count += 1


def _entered(access: Access) -> Access:
    """Return an access as it was entered."""
    member = access.operation
    assert isinstance(member, _Member)
    return access.of(member.of, access.node)
