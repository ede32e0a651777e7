"""Events for the software driver's memory that is live when a recording begins in the middle of a program."""

from __future__ import annotations

import time
from collections.abc import Container
from typing import TYPE_CHECKING, Final

from cudatool.trace import hooks
from cudatool.trace.events import LIVED, Event, Kind, WarningFlag

if TYPE_CHECKING:
    from cudatool.sim import Machine
    from cudatool.sim.allocations import Allocation

__all__ = ["in_flight", "living", "shared"]

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

_TOUCHES_MEMORY: Final = frozenset(("host", "kernel", "memcpy", "memset"))
_SHARING: Final = {"device": "cuIpcGetMemHandle", "ipc": "cuIpcOpenMemHandle"}
_SHARED_FROM_POOL: Final = "cuMemPoolExportPointer"


def living(machine: Machine, known: Container[int]) -> list[Event]:
    """Return an allocation event for each live allocation whose address is not in `known`. They have no stacks.

    None names a stream: work from before the recording is unknown and counts as done.
    """
    return [
        _event(found, *_CALLS[found.kind], LIVED)
        for found in machine.allocations
        if found.kind in _CALLS and found.address not in known
    ]


def in_flight(machine: Machine) -> int:
    """Return how many operations that access memory have yet to complete: a recording does not see them."""
    return sum(operation.kind in _TOUCHES_MEMORY for operation in machine.scheduler.pending)


def shared(machine: Machine) -> list[Event]:
    """Return a warning for each live allocation that other processes can use, as if it had been shared now."""
    return [
        _event(found, Kind.WARNING, _SHARING.get(found.kind, _SHARED_FROM_POOL), WarningFlag.SHARED)
        for found in machine.allocations
        if found.is_shared
    ]


def _event(found: Allocation, kind: Kind, name: str, flags: int) -> Event:
    return Event(
        time=time.monotonic_ns(),
        kind=kind,
        device=found.device,
        flags=flags,
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
