"""Memory without an address (cuMemCreate), which the program maps itself: it is neither a block nor a segment."""

from __future__ import annotations

from typing import NamedTuple

from cudatool.trace.events import Kind
from cudatool.trace.model import Trace
from cudatool.units import format_bytes

__all__ = ["PhysicalMemory", "physical_memory", "uncounted"]


class PhysicalMemory(NamedTuple):
    """Bytes of one device's memory without an address: the most at any moment, and at the end of the recording."""

    peak: int
    now: int


def physical_memory(trace: Trace) -> dict[int, PhysicalMemory]:
    """Return it by device. Of what was taken before a part of a recording, nothing is known."""
    rows = trace.of_kind(Kind.PHYSICAL_ALLOC, Kind.PHYSICAL_FREE)
    live: dict[tuple[int, int], int] = {}  # device and handle -> size
    found: dict[int, PhysicalMemory] = {}
    columns = (rows[name].tolist() for name in ("kind", "device", "aux0", "size"))
    for kind, device, handle, size in zip(*columns, strict=True):
        peak, now = found.get(device, PhysicalMemory(0, 0))
        if kind == Kind.PHYSICAL_ALLOC:
            live[device, handle] = size
            now += size
        else:
            now -= live.pop((device, handle), 0)
        found[device] = PhysicalMemory(max(peak, now), now)
    return found


def uncounted(trace: Trace) -> list[str]:
    """Return a sentence for each device on memory that no table of blocks and segments counts."""
    return [
        f"not counted: memory from cuMemCreate on device {device}, {format_bytes(held.peak)} at its highest and "
        f"{format_bytes(held.now)} at the end"
        for device, held in physical_memory(trace).items()
        if held.peak
    ]
