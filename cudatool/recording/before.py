"""What other libraries hold on a GPU when a recording begins in the middle of a program."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from cudatool import _driver
from cudatool.collect import cupy_living, torch_living
from cudatool.collect.cupti import CuptiCollector
from cudatool.trace.events import Event, Kind

__all__ = ["Before", "held_by_libraries"]

_SEGMENTS = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)


@dataclass(slots=True)
class Before:
    """What is there.

    Attributes
    ----------
    blocks
        Of PyTorch's caching allocator: its segments, then their blocks.
    allocations
        Memory that the driver gave to others.
    unknown
        What is there and cannot be listed, in words.
    """

    blocks: list[Event] = field(default_factory=list)
    allocations: list[Event] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def held_by_libraries(collector: CuptiCollector | None, ours: Iterable[Event], *, sees_blocks: bool) -> Before:
    """Return what PyTorch and CuPy hold; nothing on the software device.

    Parameters
    ----------
    collector
        What records the driver's calls, where something does. It must be paused.
    ours
        Segments of our allocator, among other events.
    sees_blocks
        Whether the collector has the blocks of PyTorch's allocator.
    """
    choice, found = _driver.chosen(), Before()
    if choice is None or choice.machine is not None:
        return found
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        if collector is not None and sees_blocks:
            found.blocks, found.unknown = torch_living.living(torch, collector.pass_on_snapshot)
        else:
            found.unknown = torch_living.missing(torch)
    if cupy is not None:
        devices = _driver.nvidia_devices_in_use()
        if collector is not None:
            known = [(event.address, event.size) for event in (*ours, *found.blocks) if event.kind in _SEGMENTS]
            found.allocations = cupy_living.living(cupy, _driver.nvidia_address_range, known)
            collector.note_living(found.allocations)
        found.unknown += cupy_living.missing(cupy, devices, found.allocations)
    return found
