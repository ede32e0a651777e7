"""Pinned host memory: what the device can copy while the program goes on; and what torch.cuda says about it."""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool import _driver
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.memory import Settings
from cudatool.memory.driver_provider import DriverProvider
from cudatool.memory.host import CachingHostAllocator
from cudatool.runtime import calls
from cudatool.runtime.allocator import Shape, array_interface, extents_of_shape
from cudatool.runtime.calls import check, operation
from cudatool.runtime.capture import capture_of, relaxed
from cudatool.runtime.device import current_device
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import as_dtype
from cudatool.runtime.host_view import HostArray
from cudatool.runtime.memory_statistics import nested
from cudatool.runtime.stream import Stream
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = [
    "empty_host_cache",
    "empty_pinned",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "host_register",
    "is_pinned",
    "is_pinned_address",
    "release",
    "note_use",
    "pin_memory",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
]

_PAGE: Final = 4096


class _Allocation(NamedTuple):
    device: int  # in whose context it was pinned
    size: int
    pages: mmap.mmap | None  # ordinary memory that was registered


class _DriverMemory:
    """Pinned memory and events from the CUDA driver. A stream is a device's ordinal and the stream's handle."""

    def __init__(self, settings: Settings) -> None:
        self._register = settings.pinned_use_cuda_host_register
        self._threads = settings.pinned_num_register_threads
        self._allocations: dict[int, _Allocation] = {}
        self._devices: dict[int, DriverProvider] = {}  # for their events

    def allocate(self, size: int) -> int:
        if size >> 64:
            raise OutOfMemoryError(f"{size} bytes are more than the address space holds")
        device = current_device()
        pages = _touched_pages(size, self._threads) if self._register else None
        with operation() as correlation, relaxed():
            if pages is None:
                name, address = "cuMemHostAlloc", int(check(calls.driver.cuMemHostAlloc(size, 0)))
            else:
                name, address = "cuMemHostRegister", np.frombuffer(pages, np.uint8).ctypes.data
                check(calls.driver.cuMemHostRegister(address, size, 0))
        self._allocations[address] = _Allocation(device, size, pages)
        if correlation:
            hooks.emit(Kind.HOST_ALLOC, device=device, name=name, address=address, size=size)
        return address

    def free(self, address: int) -> None:
        found = self._allocations[address]
        name = "cuMemFreeHost" if found.pages is None else "cuMemHostUnregister"
        with on_device(found.device), operation() as correlation, relaxed():
            check(getattr(calls.driver, name)(address))
        del self._allocations[address]
        if correlation:
            hooks.emit(Kind.HOST_FREE, device=found.device, name=name, address=address, size=found.size)

    def record_event(self, stream: tuple[int, int]) -> tuple[int, Any]:
        device, handle = stream
        if device not in self._devices:
            self._devices[device] = DriverProvider(device)
        return device, self._devices[device].record_event(handle)

    def event_passed(self, token: tuple[int, Any]) -> bool:
        device, event = token
        return self._devices[device].event_passed(event)


def _touched_pages(size: int, threads: int) -> mmap.mmap:
    """Return new memory whose pages all exist, which takes most of the time of pinning them."""
    memory = mmap.mmap(-1, size)
    pages = np.frombuffer(memory, np.uint8)[::_PAGE]
    if threads > 1 and size >= threads * _PAGE:
        with ThreadPoolExecutor(threads) as pool:
            for part in np.array_split(pages, threads):
                pool.submit(part.fill, 0)
    else:
        pages.fill(0)
    return memory


_allocator: CachingHostAllocator | None = None
_lock = threading.Lock()


def _host_allocator() -> CachingHostAllocator:
    """Return the allocator of pinned memory, one for all devices, which is made at first use."""
    global _allocator
    if _allocator is None:
        with _lock:
            if _allocator is None:
                _ = calls.driver
                settings = Settings.from_environment()
                _allocator = CachingHostAllocator(_DriverMemory(settings), settings=settings)
    return _allocator


def note_use(address: int, stream: Stream) -> None:
    """Say that work on `stream` uses the memory at `address`, pinned or not: it rests, once freed, until that is over.

    If the stream is captured, the graph uses it at each replay, and keeps it. The copies of this package do so by
    themselves.
    """
    if _allocator is None:
        return
    capture = capture_of(stream)
    if capture is not None:
        if block := _allocator.hold(address):
            capture.held.append(block)
        return
    if not _allocator.record_event(address, (stream.device_index, stream.cuda_stream)):
        return
    if hooks.active:
        hooks.emit(
            Kind.BLOCK_RECORD_STREAM, device=stream.device_index, stream=stream.trace_id(), address=address, stack=0
        )


def release(blocks: Iterable[int], stream: Stream | None) -> None:
    """Say that a graph does not use these blocks any more, once its last replay, on `stream`, is over."""
    for block in blocks:
        assert _allocator is not None
        # The handle is valid even if the program has closed the stream: the driver's streams are used again.
        _allocator.release(block, None if stream is None else (stream.device_index, stream._handle))


class _PinnedMemory:
    """Pinned memory, freed when the last NumPy array in it is gone."""

    __slots__ = ("__array_interface__", "_allocator", "address")

    def __init__(self, size: int) -> None:
        self._allocator = _host_allocator()
        self.address = self._allocator.allocate(size)
        self.__array_interface__ = array_interface(self.address, size)

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if hasattr(self, "address") and not _finalizing() and _driver.started():
            self._allocator.free(self.address)


def empty_pinned(shape: Shape, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Return a new NumPy array in pinned memory, for copies that do not block; its elements are anything.

    When the last view of it is gone, the memory is kept for the next array of its size, rounded up to a power of
    two, once the copies that used it are done. That holds for the copies of this package: keep the array until others,
    of cuda.core for instance, are done. While accesses are recorded, it is a :class:`cudatool.HostArray`.

    Raises
    ------
    CudaError
        The host has not that much memory to pin.
    UsageError
        `shape` is none, or elements of `dtype` are Python objects, or have no size.
    """
    dtype, extents = as_dtype(dtype), extents_of_shape(shape)
    if min(extents, default=0) < 0:
        raise UsageError(f"cannot make an array of shape {extents}: a dimension is negative")
    if dtype.hasobject or not dtype.itemsize:
        raise UsageError(f"an array of {dtype} cannot be in pinned memory: its elements are no bytes of their own")
    memory = _PinnedMemory(math.prod(extents) * dtype.itemsize)
    array = np.asarray(memory).view(dtype).reshape(extents)
    return array.view(HostArray) if hooks.wants_accesses else array


def pin_memory(array: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return a copy of a host array in pinned memory."""
    source = array if isinstance(array, HostArray) else np.asarray(array)
    pinned = empty_pinned(source.shape, source.dtype)
    pinned[...] = source
    return pinned


def is_pinned(array: npt.NDArray[Any]) -> bool:
    """Return whether a NumPy array lies in memory that CUDA has pinned: ours, registered, or another library's."""
    return is_pinned_address(_require_array("is_pinned", array).ctypes.data)


def _require_array(what: str, array: Any) -> npt.NDArray[Any]:
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{what} takes a NumPy array, not {type(array).__name__}")
    return array


def is_pinned_address(address: int) -> bool:
    """Return whether CUDA knows this host memory."""
    attribute = calls.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    status, _ = calls.driver.cuPointerGetAttribute(attribute, address)
    return not status


class host_register:  # noqa: N801 - reads as a statement
    """Pin the memory of a NumPy array where it lies, until :meth:`close` or the end of the ``with`` block.

    Copies to and from it need not block then. Before it ends, wait for those that use it.

    Parameters
    ----------
    array
        In one piece. It is kept until the block ends.

    Raises
    ------
    UsageError
        It is no NumPy array, or has gaps, or no elements.
    CudaError
        The driver refuses, for instance memory that is pinned already (CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED).
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        _require_array("host_register", array)
        if not (array.flags.c_contiguous or array.flags.f_contiguous) or not array.nbytes:
            raise UsageError(
                f"cannot pin an array of shape {array.shape} and strides {array.strides}: it is not contiguous"
            )
        self.array = array
        self._address = 0
        self._device = current_device()
        address = array.ctypes.data
        with operation() as correlation:
            check(calls.driver.cuMemHostRegister(address, array.nbytes, 0))
        self._address = address
        if correlation:
            hooks.emit(
                Kind.HOST_ALLOC, device=self._device, name="cuMemHostRegister", address=address, size=array.nbytes
            )

    def close(self) -> None:
        """Let the memory be ordinary again. A second time does nothing."""
        if not self.is_closed:
            address, self._address = self._address, 0
            _unregister(address, self.array.nbytes, self._device)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._address

    def __enter__(self) -> npt.NDArray[Any]:
        if self.is_closed:
            raise UsageError("this memory is not pinned any more: make a new host_register")
        return self.array

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if getattr(self, "_address", 0) and not _finalizing() and _driver.started():
            self.close()


def _unregister(address: int, size: int, device: int) -> None:
    with on_device(device), operation() as correlation:
        check(calls.driver.cuMemHostUnregister(address))
    if correlation:
        hooks.emit(Kind.HOST_FREE, device=device, name="cuMemHostUnregister", address=address, size=size)


def empty_host_cache() -> None:
    """Give all pinned memory that is not in use back to the driver; as in torch, `empty_cache` does not."""
    if _allocator is not None:
        _allocator.empty_cache()


def host_memory_stats() -> dict[str, int]:
    """Return the pinned-memory allocator's counters, under the names of ``torch.cuda.host_memory_stats``.

    Sizes are in bytes and count whole blocks, times are in microseconds. ``allocations`` and ``allocated_bytes`` are
    what the allocator holds, in use or not; ``active_requests`` and ``active_bytes`` what the program or a copy uses.
    """
    return _host_allocator().stats()


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """Return the counters of :func:`host_memory_stats`, one dictionary in another."""
    return nested(host_memory_stats())


def reset_peak_host_memory_stats() -> None:
    """Set every peak to the present level."""
    _host_allocator().reset_peak_stats()


def reset_accumulated_host_memory_stats() -> None:
    """Set every total to 0."""
    _host_allocator().reset_accumulated_stats()
