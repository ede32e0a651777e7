"""Which operations flags in memory may order: no event shows that one waits for what another writes.

PTX ISA, Memory Consistency Model: a write that releases and a read that acquires order what comes before the one and
after the other, if both have a scope that contains the other side, in whichever streams they run. Such a program has
no data race, though it ends only if the two run at the same time. A trace says which kernels have accesses of system
scope, but not which of their accesses are flags. So two kernels may be in order if both have such accesses and one
reads what the other writes; the host and a kernel, if the kernel has them.
"""

from __future__ import annotations

from functools import cache, cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import AccessFlag, Kind, LaunchFlag
from cudatool.trace.model import Trace

__all__ = ["MemoryFlags"]

_MASK_LENGTH = 128  # elements: AccessFlag.MASK
_READS, _WRITES = AccessFlag.READ | AccessFlag.ATOMIC, AccessFlag.WRITE | AccessFlag.ATOMIC


class MemoryFlags:
    """Looks at the launches of one trace, and at what they access."""

    def __init__(self, trace: Trace) -> None:
        self._records = trace.records
        self._kinds, self._flags = trace.records["kind"].data, trace.records["flags"].data
        self.may_order = cache(self._may_order)

    def are_used(self, record: int) -> bool:
        """Return whether a record is the launch of a kernel that has accesses of system scope."""
        return bool(self._kinds[record] == Kind.KERNEL_LAUNCH and self._flags[record] & LaunchFlag.SYSTEM_SCOPE)

    def _may_order(self, one: int, other: int) -> bool:
        """Return whether flags in memory may order the launches of two kernels."""
        if not (self.are_used(one) and self.are_used(other)):
            return False
        pairs = product(self._touched(one), self._touched(other))
        return any(
            start < stop_of_other and start_of_other < stop and self._is_flag(flags, flags_of_other)
            for (start, stop, flags), (start_of_other, stop_of_other, flags_of_other) in pairs
        )

    @staticmethod
    def _is_flag(one: int, other: int) -> bool:
        return bool((one & _READS and other & _WRITES) or (one & _WRITES and other & _READS))

    def _touched(self, record: int) -> list[tuple[int, int, int]]:
        """Return where the accesses of an operation begin and end, and their flags."""
        correlations, order = self._accesses
        wanted = self._records["correlation"][record]
        first, last = correlations.searchsorted(wanted), correlations.searchsorted(wanted, side="right")
        rows = self._records[order[first:last]][["address", "size", "flags", "aux0", "aux1"]].tolist()
        found = []
        for address, size, flags, stride, count in rows:
            length = size + stride * max(count - 1, 0)
            if flags & AccessFlag.MASK:
                length = size * _MASK_LENGTH
            found.append((address, address + length, flags))
        return found

    @cached_property
    def _accesses(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The correlations of all accesses, sorted, and their records in this order."""
        rows = np.flatnonzero(self._records["kind"] == Kind.ACCESS)
        correlations = self._records["correlation"][rows]
        order = np.argsort(correlations, kind="stable")
        return correlations[order], rows[order]
