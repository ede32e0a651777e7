"""What kernels access of pinned host memory.

Footprints are measured in the device's memory. Where a kernel is passed an address of pinned host memory, the memory
that it points into is compared with what it was before. That misses writes of what was there already, and could take
for the kernel's what another thread of the host wrote meanwhile. Whether a kernel reads there is inferred from its PTX,
for the memory as a whole. So all such accesses are marked as inexact.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from cudatool.sim.arena import Allocations
    from cudatool.sim.kernels import Launch

__all__ = ["HostMemoryBefore"]

_READ: Final = 1 | 8  # flags of Operation.footprint: a read, inexact
_WRITTEN: Final = 2 | 8
_LIMIT: Final = 64 << 20  # bytes of an allocation, beyond which it is not compared


class HostMemoryBefore:
    """The pinned memory that the arguments of a launch point into, as it is when this is made."""

    def __init__(self, launch: Launch, allocations: Allocations) -> None:
        self._before: dict[int, npt.NDArray[np.uint8]] = {}
        self._read: list[tuple[int, int, int]] = []
        values = bytes(launch.params)
        for param in launch.kernel.params:
            if param.size != 8:
                continue
            found = allocations.holding(int.from_bytes(values[param.offset : param.offset + 8], "little"))
            if found is not None and found.device < 0 and found.size <= _LIMIT:
                self._before[found.address] = _bytes_at(found.address, found.size).copy()
        if self._before:

            def on_host(address: int) -> tuple[int, int] | None:
                found = allocations.holding(address)
                return (found.address, found.size) if found is not None and found.device < 0 else None

            self._read = [(address, size, _READ) for address, size in launch.kernel.reads(values, on_host)]

    def accesses(self) -> list[tuple[int, int, int]]:
        """Return address, size and flags of what it may have read, and of each run of bytes that are different now."""
        runs = list(self._read)
        for address, before in sorted(self._before.items()):
            changed = np.flatnonzero(before != _bytes_at(address, len(before)))
            for run in np.split(changed, np.flatnonzero(np.diff(changed) > 1) + 1) if len(changed) else ():
                runs.append((address + int(run[0]), len(run), _WRITTEN))
        return runs


def _bytes_at(address: int, size: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
