"""Memory without an address (cuMemCreate), which the program maps itself: it is neither a block nor a segment."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from cudatool.trace.events import Kind, WarningCode
from cudatool.trace.frames import call_site
from cudatool.trace.model import Trace
from cudatool.units import format_bytes

__all__ = ["PhysicalMemory", "physical_memory", "reset_text", "uncounted"]


class PhysicalMemory(NamedTuple):
    """Bytes of one device's memory without an address: the most at any moment, and at the end of the recording.

    `stack` is of the call site that took most of it, added up over the recording.
    """

    peak: int
    now: int
    stack: int = 0


def physical_memory(trace: Trace) -> dict[int, PhysicalMemory]:
    """Return it by device."""
    rows = trace.of_kind(Kind.PHYSICAL_ALLOC, Kind.PHYSICAL_FREE)
    live: dict[tuple[int, int], int] = {}  # device and handle -> size
    found: dict[int, PhysicalMemory] = {}
    taken: dict[int, Counter[int]] = {}  # device -> bytes by stack
    columns = (rows[name].tolist() for name in ("kind", "device", "aux0", "size", "stack"))
    for kind, device, handle, size, stack in zip(*columns, strict=True):
        peak, now, _ = found.get(device, PhysicalMemory(0, 0))
        if kind == Kind.PHYSICAL_ALLOC:
            live[device, handle] = size
            taken.setdefault(device, Counter())[stack] += size
            now += size
        else:
            now -= live.pop((device, handle), 0)
        found[device] = PhysicalMemory(max(peak, now), now)
    most = {device: sizes.most_common(1)[0][0] for device, sizes in taken.items()}
    return {device: held._replace(stack=most.get(device, 0)) for device, held in found.items()}


def reset_text(device: int) -> str:
    """Return what a ``WARNING`` of a device's reset says."""
    return f"device {device} was reset: memory from before is shown as held after that, though it was given back"


def uncounted(trace: Trace) -> list[str]:
    """Return what the tables of blocks and segments leave out: for each device memory that they do not count, and what
    a reset gave back.
    """
    notes = []
    for device, held in physical_memory(trace).items():
        if held.peak:
            site = call_site(trace.stack(held.stack))
            sizes = f"{format_bytes(held.peak)} at its highest and {format_bytes(held.now)} at the end"
            most = f", most of it from {site}" if site else ""
            notes.append(f"not counted: memory from cuMemCreate on device {device}, {sizes}{most}")
    warnings = trace.of_kind(Kind.WARNING)
    resets = warnings["name"][warnings["aux0"] == WarningCode.DEVICE_RESET].tolist()
    return notes + [trace.names[name] for name in dict.fromkeys(resets)]
