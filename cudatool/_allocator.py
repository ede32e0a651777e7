"""Device memory: one caching allocator a device, and what torch.cuda says about it."""

from __future__ import annotations

import math
import operator
import sys
import threading
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from cudatool import _cuda
from cudatool._cuda import check, operation
from cudatool._device import DeviceLike, device_count, device_index
from cudatool._device import device as on_device
from cudatool._stream import Stream, current_stream
from cudatool.errors import UsageError
from cudatool.memory import CachingAllocator
from cudatool.memory import memory_summary as _table
from cudatool.memory.snapshot import SegmentInfo
from cudatool.trace import hooks

__all__ = [
    "Layout",
    "Memory",
    "Shape",
    "allocate",
    "allocator",
    "array_interface",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "reset_peak_memory_stats",
]

Shape = SupportsIndex | Iterable[SupportsIndex]

Layout = npt.NDArray[Any]
"""A NumPy array that lies at device addresses: shape, strides and owner of device memory. It is never read."""

_allocators: dict[int, CachingAllocator] = {}
_lock = threading.Lock()
_by_address: dict[int, int] = {}  # device of what caching_allocator_alloc gave


def allocator(device: int) -> CachingAllocator:
    """Return the allocator of the device with this ordinal, which is made at first use."""
    found = _allocators.get(device)
    if found is None:
        with _lock:
            found = _allocators.get(device)
            if found is None:
                found = _allocators[device] = _make(device)
    return found


def _make(device: int) -> CachingAllocator:
    with operation():
        _ = _cuda.driver
        from cudatool.memory.driver_provider import DriverProvider

        return CachingAllocator(
            DriverProvider(device), device=device, stream_id=lambda handle: hooks.stream_id(device, handle)
        )


class Memory:
    """A block of device memory, which goes back to its allocator when the last array in it is gone.

    Parameters
    ----------
    stream
        What the block may be used on at once; others say so by :meth:`record_stream`.

    Attributes
    ----------
    __array_interface__
        Lets NumPy keep the block alive. The addresses are the device's: never read through it.
    """

    __slots__ = ("__array_interface__", "_allocator", "address")

    def __init__(self, size: int, stream: Stream) -> None:
        self._allocator = allocator(stream.device_index)
        self.address = self._allocator.malloc(size, stream.cuda_stream)
        self.__array_interface__ = array_interface(self.address, size)

    def record_stream(self, stream: Stream) -> None:
        """Let the block rest, once it is freed, until what is on `stream` by then has completed."""
        self._allocator.record_stream(self.address, stream.cuda_stream)

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        # The slots are empty if there was not enough memory; and the end of the process frees everything.
        if hasattr(self, "__array_interface__") and not _finalizing():
            self._allocator.free(self.address)


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
        Elements of `dtype` are Python objects.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise UsageError(f"an array of {dtype} cannot be in device memory: its elements are Python objects")
    extents = tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)
    memory = Memory(math.prod(extents) * dtype.itemsize, stream)
    return np.asarray(memory).view(dtype).reshape(extents), memory


def caching_allocator_alloc(size: int, device: DeviceLike = None, stream: Stream | None = None) -> int:
    """Return the address of `size` bytes for use on `stream`, by default the device's current one.

    Raises
    ------
    OutOfMemoryError
        There is not that much.
    """
    index = device_index(device) if stream is None else stream.device_index
    stream = current_stream(index) if stream is None else stream
    address = allocator(index).malloc(size, stream.cuda_stream)
    _by_address[address] = index
    return address


def caching_allocator_delete(mem_ptr: int) -> None:
    """Free what :func:`caching_allocator_alloc` returned.

    Raises
    ------
    UsageError
        It did not return `mem_ptr`, or that was freed before.
    """
    index = _by_address.pop(mem_ptr, None)
    if index is None:
        raise UsageError(f"{mem_ptr:#x} was not returned by caching_allocator_alloc, or was freed before")
    allocator(index).free(mem_ptr)


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """Return the allocator's counters, under the names of ``torch.cuda.memory_stats``. Sizes are in bytes."""
    return allocator(device_index(device)).stats()


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes that the program has allocated, rounded up to whole blocks."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes that were allocated at a time since :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes that the allocator has from the driver, in use or not."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the most bytes that were reserved at a time since :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Set every peak to the present level."""
    allocator(device_index(device)).reset_peak_stats()


def empty_cache() -> None:
    """Give all memory that is reserved but not in use back to the driver, on all devices."""
    for found in list(_allocators.values()):
        found.empty_cache()


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return free and total bytes of a device, as the driver sees it."""
    with on_device(device_index(device)):
        free, total = check(_cuda.driver.cuMemGetInfo())
    return int(free), int(total)


def memory_snapshot() -> list[SegmentInfo]:
    """Return all segments of all devices with their blocks, in PyTorch's schema."""
    return [segment for index in range(device_count()) for segment in allocator(index).snapshot_segments()]


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """Return the allocator's counters as a table for people."""
    index = device_index(device)
    return _table(memory_stats(index), device=index, abbreviated=abbreviated)
