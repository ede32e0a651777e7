"""What kernels may access of pinned host memory.

Footprints are measured in the device's memory. A kernel that is passed the address of pinned host memory may use that,
too: then its PTX says which of its arguments it reads and writes, and the allocations that they point to count as a
whole.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from cudatool.ptx import KernelAccesses, Mode, PtxError, accesses_of_launch, infer_accesses

if TYPE_CHECKING:
    from cudatool.sim.api_module import Function, Launch
    from cudatool.sim.memory import Allocations

__all__ = ["host_accesses"]

_FLAGS: Final = {Mode.READ: 1, Mode.WRITE: 2, Mode.ATOMIC: 4}
_INEXACT: Final = 8


def host_accesses(launch: Launch, allocations: Allocations) -> list[tuple[int, int, int]]:
    """Return address, size and flags of the pinned memory that a launch may access, as in ``Operation.footprint``."""

    def pinned(address: int) -> tuple[int, int] | None:
        found = allocations.holding(address)
        return (found.address, found.size) if found is not None and found.device < 0 else None

    values = bytes(launch.params)
    pointers = (values[p.offset : p.offset + 8] for p in launch.kernel.params if p.size == 8)
    if not any(pinned(int.from_bytes(value, "little")) for value in pointers):
        return []
    accesses = _inferred(launch.function)
    if accesses is None:
        return []
    return [
        (part.address, part.size, sum((_FLAGS[mode] for mode in part.mode), _INEXACT))
        for part in accesses_of_launch(accesses, values, pinned).ranges
    ]


@functools.lru_cache(256)
def _inferred(function: Function) -> KernelAccesses | None:
    try:
        return infer_accesses(function.library.parsed, function.name)
    except PtxError:
        return None
