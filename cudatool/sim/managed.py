"""What programs say about managed memory: advice on ranges of it, and where ranges were prefetched to.

Memory has one home here, so advice moves nothing. It is kept so that it can be asked for, as the driver keeps it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import IntEnum

from cudatool.loading.late_dataclasses import dataclass, replace

__all__ = ["NOWHERE", "Advised", "Location", "ManagedState", "MemoryAdvice"]

Location = tuple[int, int]
"""CUmemLocationType and id."""
NOWHERE: Location = (0, 0)


class MemoryAdvice(IntEnum):
    """CUmem_advise."""

    SET_READ_MOSTLY = 1
    UNSET_READ_MOSTLY = 2
    SET_PREFERRED_LOCATION = 3
    UNSET_PREFERRED_LOCATION = 4
    SET_ACCESSED_BY = 5
    UNSET_ACCESSED_BY = 6


@dataclass(frozen=True)
class ManagedState:
    """What was said about a page."""

    read_mostly: bool = False
    preferred: Location = NOWHERE
    accessed_by: frozenset[Location] = frozenset()
    prefetched: Location = NOWHERE

    def advised(self, advice: MemoryAdvice, location: Location) -> ManagedState:
        """Return the state after a piece of advice."""
        match advice:
            case MemoryAdvice.SET_READ_MOSTLY | MemoryAdvice.UNSET_READ_MOSTLY:
                return replace(self, read_mostly=advice is MemoryAdvice.SET_READ_MOSTLY)
            case MemoryAdvice.SET_PREFERRED_LOCATION:
                return replace(self, preferred=location)
            case MemoryAdvice.UNSET_PREFERRED_LOCATION:
                return replace(self, preferred=NOWHERE)
            case MemoryAdvice.SET_ACCESSED_BY:
                return replace(self, accessed_by=self.accessed_by | {location})
            case MemoryAdvice.UNSET_ACCESSED_BY:
                return replace(self, accessed_by=self.accessed_by - {location})


class Advised:
    """The states of all pages of an allocation: intervals without gaps, each with one state."""

    def __init__(self, start: int, end: int) -> None:
        self._parts: list[tuple[int, int, ManagedState]] = [(start, end, ManagedState())]

    def states(self, start: int, end: int) -> list[ManagedState]:
        """Return the states that occur in a range."""
        return [state for low, high, state in self._parts if low < end and start < high]

    def advise(self, start: int, end: int, advice: MemoryAdvice, location: Location) -> None:
        """Apply advice to a range."""
        self._update(start, end, lambda state: state.advised(advice, location))

    def prefetch(self, start: int, end: int, location: Location) -> None:
        """Say that a range was last prefetched to `location`."""
        self._update(start, end, lambda state: replace(state, prefetched=location))

    def _update(self, start: int, end: int, change: Callable[[ManagedState], ManagedState]) -> None:
        parts: list[tuple[int, int, ManagedState]] = []
        for low, high, state in self._parts:
            cuts = sorted({low, high, *(cut for cut in (start, end) if low < cut < high)})
            for one, other in itertools.pairwise(cuts):
                new = change(state) if start <= one < end else state
                if parts and parts[-1][2] == new:
                    parts[-1] = (parts[-1][0], other, new)
                else:
                    parts.append((one, other, new))
        self._parts = parts
