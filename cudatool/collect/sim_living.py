"""What lives of the software driver's memory when a recording begins in the middle of a program, as events."""

from __future__ import annotations

import time
from collections.abc import Container
from typing import TYPE_CHECKING, Final

from cudatool.trace import hooks
from cudatool.trace.events import LIVED, Event, Kind

if TYPE_CHECKING:
    from cudatool.sim import Machine

__all__ = ["living"]

_CALLS: Final = {
    # kind of memory -> the call that makes it, of those calls that are recorded
    "array": (Kind.MEM_ALLOC, "cuArrayCreate"),
    "device": (Kind.MEM_ALLOC, "cuMemAlloc"),
    "graph": (Kind.MEM_ALLOC, "cuGraphLaunch"),
    "managed": (Kind.MEM_ALLOC, "cuMemAllocManaged"),
    "pool": (Kind.MEM_ALLOC, "cuMemAllocAsync"),
    "host": (Kind.HOST_ALLOC, "cuMemHostAlloc"),
    "registered": (Kind.HOST_ALLOC, "cuMemHostRegister"),
}


def living(machine: Machine, told: Container[int]) -> list[Event]:
    """Return an allocation event for each live allocation whose address is not in `told`. They have no stacks.

    None names a stream: what was done on it before the recording began is not known, and counts as done.
    """
    events = []
    for found in machine.allocations:
        if found.kind in _CALLS and found.address not in told:
            kind, name = _CALLS[found.kind]
            events.append(
                Event(
                    time=time.monotonic_ns(),
                    kind=kind,
                    device=found.device,
                    flags=LIVED,
                    thread=hooks.thread_id(),
                    stream=0,
                    correlation=0,
                    stack=0,
                    name=name,
                    address=found.address,
                    size=found.size,
                    aux0=0,
                    aux1=0,
                )
            )
    return events
