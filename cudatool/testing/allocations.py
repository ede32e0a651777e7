"""How much device memory a stretch of a program took: its peak, and what it did not free, by call sites."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cudatool.testing.past import ALLOCATIONS, Records
from cudatool.trace.events import Kind
from cudatool.trace.model import Frame, Trace
from cudatool.units import counted, format_bytes

__all__ = ["MemoryUse", "describe", "memory_of"]

_ON_DEVICE = {alloc: free for alloc, free in ALLOCATIONS.items() if alloc is not Kind.HOST_ALLOC}
_FREES = {free: alloc for alloc, free in _ON_DEVICE.items()}
_SITES = 5
_FRAMES = 6


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What the allocations within some records came to.

    Attributes
    ----------
    peak
        The most bytes that were allocated at one time.
    at_peak
        The rows of the allocations that lived then.
    left
        The rows of those that still live at the end.
    left_bytes
        Their size.
    """

    peak: int
    at_peak: tuple[int, ...]
    left: tuple[int, ...]
    left_bytes: int


def memory_of(records: Records) -> MemoryUse:
    """Return what the records allocated themselves: blocks of a caching allocator, and device memory of the driver.

    What was there before counts neither as allocated nor as freed.
    """
    living: dict[tuple[int, int], int] = {}
    total = peak = 0
    at_peak: tuple[int, ...] = ()
    grown = False  # whether `total` is a peak whose rows are still to be noted
    columns = (records[name].tolist() for name in ("kind", "address", "size"))
    for row, (kind, address, size) in enumerate(zip(*columns, strict=True)):
        if kind in _ON_DEVICE:
            living[kind, address] = row
            total += size
            grown = grown or total > peak
            peak = max(peak, total)
        elif kind in _FREES and (_FREES[kind], address) in living:
            if grown and total == peak:
                at_peak = tuple(living.values())
            grown = False
            total -= int(records["size"][living.pop((_FREES[kind], address))])
    if grown:
        at_peak = tuple(living.values())
    return MemoryUse(peak, at_peak, tuple(living.values()), total)


def describe(trace: Trace, rows: Iterable[int]) -> str:
    """Return who made these allocations: call sites with their bytes, the largest first."""
    sites: dict[int, list[int]] = {}
    for row in rows:
        sites.setdefault(int(trace.records["stack"][row]), []).append(int(trace.records["size"][row]))
    ordered = sorted(sites.items(), key=lambda site: -sum(site[1]))
    lines = []
    for stack, sizes in ordered[:_SITES]:
        count = counted(len(sizes), "allocation")
        lines.append(f"{format_bytes(sum(sizes)):>12} in {count} at")
        lines += [f"{'':14} {_frame(frame)}" for frame in trace.stack(stack)[:_FRAMES]] or [f"{'':14} an unknown line"]
    if more := ordered[_SITES:]:
        rest = sum(sum(sizes) for _, sizes in more)
        lines.append(f"{format_bytes(rest):>12} at {counted(len(more), 'more call site')}")
    return "\n".join(lines)


def _frame(frame: Frame) -> str:
    return f"{frame.file}:{frame.line} in {frame.function}"
