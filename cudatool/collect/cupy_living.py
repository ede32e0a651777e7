"""What CuPy holds when a recording begins in the middle of a program.

CuPy's pools do not list their memory. Its arrays say where they lie, and the driver what it gave at that address, so
that what holds at least one array is known in full. Of the rest, the pool says how much it is.

Pinned memory is known in full: each allocation is an object of Python's, which the pool keeps when it is free, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from cudatool.collect import _cupti
from cudatool.trace import hooks, stacks
from cudatool.trace.events import LIVED, Event, Kind
from cudatool.trace.libraries import Library
from cudatool.trace.model import Frame
from cudatool.units import format_bytes

__all__ = ["AddressRange", "living", "missing"]

AddressRange = Callable[[int], tuple[int, int] | None]
"""Returns begin and size of what the driver gave at an address of the current device, None if it knows of nothing."""

_POOL: Final = "cupy.cuda.memory"


def living(cupy: Any, address_range: AddressRange, known: Sequence[tuple[int, int]]) -> list[Event]:
    """Return an event for each allocation of the driver's that a CuPy array lies in, then for each block of the pool.

    And at last for all pinned memory of CuPy's.

    Parameters
    ----------
    known
        Begin and size of memory that others have named: arrays may be views of it.
    """
    given: dict[tuple[int, int], int] = {}  # device, begin -> size
    blocks: dict[tuple[int, int], int] = {}
    for device, address, size in sorted(_places(cupy)):
        if any(begin <= address < begin + length for begin, length in known):
            continue
        with cupy.cuda.Device(device):
            found = address_range(address)
        if found is not None:
            given[device, found[0]] = found[1]
            if size:
                blocks[device, address] = size
    stack = stacks.intern([Frame(_POOL, _POOL, 0)])
    return [
        *(_event(Kind.MEM_ALLOC, *place, size, "cuMemAlloc", stack=stack) for place, size in given.items()),
        *(_event(Kind.POOL_ALLOC, *place, size, Library.CUPY, aux0=size) for place, size in blocks.items()),
        *(_event(Kind.HOST_ALLOC, -1, *place, "cuMemHostAlloc", stack=stack) for place in sorted(_pinned(cupy))),
    ]


def _event(kind: Kind, device: int, begin: int, size: int, name: str, *, stack: int = 0, aux0: int = 0) -> Event:
    thread = hooks.thread_id()
    return Event(time.monotonic_ns(), kind, device, LIVED, thread, 0, 0, stack, name, begin, size, aux0, 0)


def _places(cupy: Any) -> set[tuple[int, int, int]]:
    """Return device and address of each live array's memory, and its size if it is a block of a pool, else 0."""
    pooled = cupy.cuda.memory.PooledMemory
    found = [array.data for array in _cupti.instances(cupy.ndarray)]
    return {
        (data.device_id, data.mem.ptr, data.mem.size if isinstance(data.mem, pooled) else 0)
        for data in found
        if data.mem.ptr
    }


def _pinned(cupy: Any) -> set[tuple[int, int]]:
    """Return address and size of the pinned memory that CuPy took, for its pool or not."""
    allocation = cupy.cuda.PinnedMemory  # a block of the pool is of a class below it, and has the same address and size
    return {(one.ptr, one.size) for one in _cupti.instances(allocation) if one.ptr}


def missing(cupy: Any, devices: Iterable[int], found: Sequence[Event]) -> list[str]:
    """Return in words what the pool holds of each device beside what was found.

    Parameters
    ----------
    devices
        Those that the process uses: making another one current would take memory of it.
    """
    said = []
    for device in devices:
        with cupy.cuda.Device(device):  # of which the pool speaks
            held = cupy.get_default_memory_pool().total_bytes()
        given = (event.size for event in found if event.device == device and event.kind is Kind.MEM_ALLOC)
        rest = held - sum(given)
        if rest > 0:
            said.append(f"{format_bytes(rest)} that CuPy's pool held on device {device} when the recording began")
    return said
