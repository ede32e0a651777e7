"""Device memory: one caching allocator a device, what may stand in its place, and what it gives to arrays."""

from __future__ import annotations

import math
import operator
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, SupportsIndex
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from cudatool import _driver
from cudatool.errors import UsageError
from cudatool.memory import CachingAllocator
from cudatool.memory.driver_provider import DriverProvider, device_of_stream, foreign_stream
from cudatool.memory.living import living as living_events
from cudatool.memory.pluggable import CUDAPluggableAllocator, UncachedAllocator
from cudatool.memory.snapshot import SegmentInfo
from cudatool.runtime import calls
from cudatool.runtime._native import Region
from cudatool.runtime.calls import check, operation
from cudatool.runtime.device import DeviceLike, device_index, get_device_properties
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import as_dtype, require_handle, require_int
from cudatool.runtime.stream import Stream, current_stream
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind, float_bits

__all__ = [
    "Layout",
    "Memory",
    "MemoryOwner",
    "Shape",
    "allocate",
    "allocator",
    "array_interface",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "caching_allocator_disabled",
    "caching_allocator_enable",
    "change_current_allocator",
    "current_allocator",
    "extents_of_shape",
    "get_allocator_backend",
    "fractions",
    "living",
    "mem_get_info",
    "note_plan",
    "paused",
    "planned",
    "PlannedMemory",
    "refuse_own",
    "require_pool_id",
    "used_allocators",
]

Shape = SupportsIndex | Iterable[SupportsIndex]

Layout = npt.NDArray[Any]
"""A NumPy array that lies at device addresses: shape, strides and owner of device memory. It is never read."""

_allocators: dict[int, CachingAllocator] = {}
_own: CUDAPluggableAllocator | None = None  # takes their place
_NEVER_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ  # whatever it says, as in PyTorch
_caching = not _NEVER_CACHING
_planned: dict[tuple[int, int], PlannedMemory] = {}  # by thread and device: what it allocates was planned ahead
_plans: WeakKeyDictionary[PlannedMemory, list[Event]] = WeakKeyDictionary()
_uncached: dict[int, UncachedAllocator] = {}  # of the program's own allocator, or of the driver
_lock = threading.Lock()
# What caching_allocator_alloc gave, and from where.
_by_address: dict[int, CachingAllocator | UncachedAllocator | PlannedMemory] = {}


def allocator(device: int) -> CachingAllocator:
    """Return the caching allocator of the device with this ordinal, which is made at first use.

    Raises
    ------
    UsageError
        The program has its own allocator (:func:`change_current_allocator`).
    """
    found = _allocators.get(device)
    if found is None:
        with _lock:
            refuse_own()
            found = _allocators.get(device)
            if found is None:
                found = _allocators[device] = _make(device)
    return found


def refuse_own() -> None:
    """Raise UsageError if the program has its own allocator."""
    if _own is not None:
        raise UsageError(
            f"the program's own allocator {_own.name} is in use, which has no statistics, snapshots, limits or pools; "
            "give it to a MemPool instead of change_current_allocator"
        )


class PlannedMemory(Protocol):
    """What serves the requests of a thread in the place of the allocator: see :func:`planned`."""

    def malloc(self, size: int, stream: int) -> int:
        """Return the address of `size` bytes for use on `stream`."""

    def free(self, address: int) -> None:
        """Take a block back."""

    def record_stream(self, address: int, stream: int) -> None:
        """Note that `stream` uses the block, too."""


@contextmanager
def planned(source: PlannedMemory, device: int) -> Iterator[None]:
    """Let whatever the calling thread allocates on a device inside come from `source`."""
    key = threading.get_ident(), device
    _planned[key] = source
    try:
        yield
    finally:
        del _planned[key]


def note_plan(source: PlannedMemory, events: list[Event]) -> None:
    """Emit the events that tell what was planned, and again when a recording begins while `source` exists."""
    _plans[source] = events
    if hooks.active:
        for event in events:
            hooks.forward(event._replace(time=time.monotonic_ns()))


def current_allocator(device: int) -> CachingAllocator | UncachedAllocator | PlannedMemory:
    """Return what allocates on the device with this ordinal: usually its caching allocator."""
    if _planned and (planned := _planned.get((threading.get_ident(), device))) is not None:
        return planned
    if _caching and _own is None:
        return _allocators.get(device) or allocator(device)
    found = _uncached.get(device)
    if found is None:
        functions = _driver_functions(device) if _own is None else _own
        found = _uncached.setdefault(device, UncachedAllocator(functions, device, guard=on_device))
    return found


def _driver_functions(device: int) -> CUDAPluggableAllocator:
    provider = allocator(device).provider

    def cuMemAlloc(size: int, device: int, stream: int) -> int:
        return provider.allocate(size, stream)

    def cuMemFree(address: int, size: int, device: int, stream: int) -> None:
        provider.free(address)

    return CUDAPluggableAllocator.from_functions(cuMemAlloc, cuMemFree)


def caching_allocator_enable(value: bool = True) -> None:
    """Choose whether memory is cached from now on. If not, every allocation and every free is the driver's.

    For finding errors: an access to memory that was freed is one to memory without an owner, and after an array is not
    the next one. With the environment variable ``PYTORCH_NO_CUDA_MEMORY_CACHING`` nothing ever is.
    """
    global _caching
    _caching = value and not _NEVER_CACHING


@contextmanager
def caching_allocator_disabled() -> Iterator[None]:
    """Do not cache what is allocated inside."""
    before = _caching
    caching_allocator_enable(False)
    try:
        yield
    finally:
        caching_allocator_enable(before)


def change_current_allocator(allocator: CUDAPluggableAllocator) -> None:
    """Let the program's own allocator serve every request, without caching, in the place of the caching allocator.

    Raises
    ------
    UsageError
        Memory was allocated already, or the allocator was changed before.
    """
    global _own
    with _lock:
        if _allocators or _own is not None:
            raise UsageError(
                "the allocator has been used already and cannot be changed; call change_current_allocator once, "
                "before anything allocates memory or asks for its statistics"
            )
        _own = allocator.allocator()


def get_allocator_backend() -> str:
    """Return ``"native"``, which is the caching allocator, or ``"pluggable"``, which is the program's own."""
    return "native" if _own is None else "pluggable"


def _make(device: int) -> CachingAllocator:
    with operation():
        _ = calls.driver
        return CachingAllocator(
            DriverProvider(device),
            device=device,
            stream_id=lambda stream: hooks.stream_id(*device_of_stream(stream, device)),
            processes=lambda: _processes(device),
        )


def _processes(device: int) -> list[tuple[int, int]]:
    """Return id and bytes of the processes on a GPU; none where NVML does not know or there can be no other."""
    choice = _driver.chosen()
    if choice is None or choice.kind == "sim":
        return []
    try:
        return [used for used in _driver.gpu_processes(get_device_properties(device).uuid) if used[1]]
    except UsageError:
        return []


class MemoryOwner(Protocol):
    """What keeps the memory of an array."""

    def record_stream(self, stream: Stream) -> None:
        """Let the memory rest, once it is given back, until what is on `stream` by then has completed."""


class Memory(Region):
    """A block of device memory, which goes back to its allocator when the last array in it is gone.

    NumPy lays arrays over it, which keep it alive. The addresses are the device's: never read through it.

    Parameters
    ----------
    size
        Bytes.
    stream
        What the block may be used on at once; others say so by :meth:`record_stream`.
    """

    __slots__ = ()

    def __init__(self, size: int, stream: Stream) -> None:
        source = current_allocator(stream.device_index)
        super().__init__(source.malloc(size, stream.cuda_stream), size, source)

    def record_stream(self, stream: Stream) -> None:
        """Let the block rest, once it is freed, until what is on `stream` by then has completed."""
        if not self.address:
            return  # an array without elements is nowhere
        number, source = stream.cuda_stream, self.owner
        if isinstance(source, CachingAllocator) and stream.device_index != source.device:
            number = foreign_stream(stream.device_index, number)
        source.record_stream(self.address, number)


def array_interface(address: int, size: int) -> dict[str, Any]:
    """Return bytes in the form of NumPy's array interface."""
    return {"version": 3, "shape": (size,), "typestr": "|u1", "data": (address, False)}


def allocate(shape: Shape, dtype: npt.DTypeLike, stream: Stream) -> tuple[Layout, Memory]:
    """Return new device memory for use on `stream`, and the same as a layout in C order, which keeps it alive.

    Raises
    ------
    OutOfMemoryError
        There is not that much.
    UsageError
        Elements of `dtype` are Python objects, or `shape` is none.
    """
    dtype, extents = as_dtype(dtype), extents_of_shape(shape)
    if dtype.hasobject:
        raise UsageError(f"an array of {dtype} cannot be in device memory: its elements are Python objects")
    size = math.prod(extents) * dtype.itemsize
    if size < 0:
        raise UsageError(f"cannot make an array of shape {extents}: a dimension is negative")
    memory = Memory(size, stream)
    try:
        return np.ndarray(extents, dtype, memory), memory  # type: ignore[arg-type] # its stubs miss buffers
    except ValueError as error:
        raise UsageError(f"cannot make an array of shape {extents}: {error}") from None


def extents_of_shape(shape: Shape) -> tuple[int, ...]:
    """Return the number of elements along each dimension.

    Raises
    ------
    UsageError
        `shape` is neither a whole number nor several.
    """
    if type(shape) is int:  # asking for an Iterable takes its time
        return (shape,)
    several = type(shape) is tuple or isinstance(shape, Iterable)
    try:
        return tuple(map(operator.index, shape if several else (shape,)))  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"a shape is a whole number or several, not {shape!r}") from None


def caching_allocator_alloc(size: int, device: DeviceLike = None, stream: Stream | int | None = None) -> int:
    """Return the address of `size` bytes for use on `stream`, by default the device's current one.

    Parameters
    ----------
    stream
        Also the driver's handle of one.

    Raises
    ------
    OutOfMemoryError
        There is not that much.
    UsageError
        `size` is no whole number, or negative, or `stream` is neither a stream nor a handle.
    """
    if stream is None:
        stream = current_stream(device)
    if isinstance(stream, Stream):
        index, handle = stream.device_index, stream.cuda_stream
    else:
        index, handle = device_index(device), require_handle("stream", stream)
    source = current_allocator(index)
    address = source.malloc(require_int("size", size), handle)
    if address:
        _by_address[address] = source
    return address


def caching_allocator_delete(mem_ptr: int) -> None:
    """Free what :func:`caching_allocator_alloc` returned; for no bytes that is 0, of which nothing is to be freed.

    Raises
    ------
    UsageError
        It did not return `mem_ptr`, or that was freed before.
    """
    address = require_handle("mem_ptr", mem_ptr)
    if not address:
        return
    source = _by_address.pop(address, None)
    if source is None:
        raise UsageError(f"{address:#x} was not returned by caching_allocator_alloc, or was freed before")
    source.free(address)


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return free and total bytes of a device, as the driver sees it."""
    with on_device(device_index(device)):
        free, total = check(calls.driver.cuMemGetInfo())
    return int(free), int(total)


def require_pool_id(pool: Any) -> tuple[int, int]:
    """Return the id of a pool of memory, which `pool` has to be.

    Raises
    ------
    UsageError
        It is something else.
    """
    if not (isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]):
        raise UsageError(f"{pool!r} is not a pool; pass a graph's pool(), a graph_pool_handle() or a MemPool's id")
    return pool


@contextmanager
def paused() -> Iterator[None]:
    """Let other threads wait that take memory of the caching allocators, or give it back."""
    with _lock, ExitStack() as held:
        for _, found in sorted(_allocators.items()):
            held.enter_context(found.paused())
        yield


def living() -> list[Event]:
    """Return what lives now, device by device, as the events that would have reported it: segments, then their blocks.

    For a recording that begins in the middle of a program. They have no stacks, but for what comes last: memory that
    was planned ahead.
    """
    events: list[Event] = []
    for device, found in used_allocators():

        def stream_of(segment: SegmentInfo, own: int = device) -> int:
            return hooks.stream_id(*device_of_stream(segment["stream"], own))

        events += living_events(found.snapshot_segments(), stream_of=stream_of, thread=hooks.thread_id())
    now = time.monotonic_ns()
    return events + [event._replace(time=now) for plan in list(_plans.values()) for event in plan]


def used_allocators() -> list[tuple[int, CachingAllocator]]:
    """Return the caching allocators that the program has used, and the ordinals of their devices, in that order."""
    return sorted(_allocators.copy().items())


def fractions() -> list[Event]:
    """Return the memory fractions that are set now, as the events that would have reported it."""
    return [
        Event(
            time.monotonic_ns(), Kind.MEMORY_FRACTION, device, 0, hooks.thread_id(), 0, 0, 0, "", 0,
            mem_get_info(device)[1], float_bits(found.memory_fraction()), 0,
        )
        for device, found in used_allocators()
        if found.memory_fraction() < 1.0
    ]  # fmt: skip
