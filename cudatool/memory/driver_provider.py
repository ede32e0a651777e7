"""Segments from the CUDA driver: of a GPU, or of the software device, which has the same interface."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from cudatool.errors import CudaError, OutOfMemoryError
from cudatool.trace import hooks

__all__ = ["DriverProvider", "device_of_stream", "foreign_stream", "free_mutex"]

_freeing = threading.RLock()


@contextmanager
def free_mutex() -> Iterator[None]:
    """Context manager: inside, no other thread gives device memory back to the driver; threads that want to, wait.

    For work that such a free, which waits for the whole device, would bring to a standstill: two threads that each
    launch their part of a collective operation, while a third one frees. Allocate what that needs before: a thread that
    waits to free keeps its allocator meanwhile. It is torch.cuda's free mutex, except that the thread inside may itself
    free, and may enter again.
    """
    with _freeing:
        yield


_LEGACY = (0, 1)  # the default stream, which cannot be captured
_FOREIGN: Final = 1 << 64  # more than any handle


def foreign_stream(device: int, handle: int) -> int:
    """Return the number by which an allocator and its provider know a stream of another device."""
    return (device + 1) * _FOREIGN + handle


def device_of_stream(stream: int, own: int) -> tuple[int, int]:
    """Return the device and the handle of a stream that an allocator of the device `own` knows by this number."""
    device, handle = divmod(stream, _FOREIGN)
    return (device - 1 if device else own), handle


class DriverProvider:
    """Allocates with cuMemAlloc, and maps pages with cuMemCreate and cuMemMap, in a device's primary context.

    Calls may come from any thread, also from finalizers on threads without a context, so each makes the context
    current for its own duration. Driver-level sources of events are told that the calls are ours.

    Parameters
    ----------
    device
        Ordinal of the device. The driver must have been loaded and initialized.

    Raises
    ------
    CudaError
        The driver refused; also from every method.
    """

    def __init__(self, device: int) -> None:
        # Loads the driver's library; which one that is must have been decided before.
        from cuda.bindings import driver

        self._driver = driver
        self._device = _check("cuDeviceGet", driver.cuDeviceGet(device))
        self._context: Any = _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(self._device))
        self._idle_events: list[Any] = []
        self._others: dict[int, DriverProvider] = {}  # for events on streams of other devices
        self._pages: dict[int, Any] = {}  # address of every mapped page -> handle of its memory

    def allocate(self, size: int, stream: int) -> int:
        """Return the address of `size` new bytes; the stream does not matter to the driver."""
        if size >> 64:
            raise OutOfMemoryError(f"{size} bytes are more than the address space holds")
        with self._call(harmless=True) as driver:
            return int(_check(f"cuMemAlloc of {size} bytes", driver.cuMemAlloc(size)))

    def free(self, address: int) -> None:
        """Give back a segment. The driver waits for all work on the device first."""
        with free_mutex(), self._call(harmless=True) as driver:
            _check("cuMemFree", driver.cuMemFree(address))

    def reserve(self, size: int, stream: int) -> int:
        """Return the start of `size` addresses without memory."""
        with self._call() as driver:
            return int(_check("cuMemAddressReserve", driver.cuMemAddressReserve(size, 0, 0, 0)))

    def unreserve(self, address: int, size: int) -> None:
        """Give back a range of addresses."""
        with self._call() as driver:
            _check("cuMemAddressFree", driver.cuMemAddressFree(address, size))

    def map(self, address: int, size: int, page_size: int) -> None:
        """Map memory to a part of a reserved range, that the device can read and write; all of it or none.

        Each page has a handle of its own, because memory can only be unmapped by whole handles.
        """
        location_type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind = self._driver.CUmemAllocationProp()
        kind.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type, kind.location.id = location_type, int(self._device)
        access = self._driver.CUmemAccessDesc()
        access.location.type, access.location.id = location_type, int(self._device)
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        pages = range(address, address + size, page_size)
        handles: list[Any] = []
        with self._call(harmless=True) as driver, ExitStack() as undo:
            for _ in pages:
                what = f"cuMemCreate of {page_size} bytes"
                handles.append(_check(what, driver.cuMemCreate(page_size, kind, 0)))
                undo.callback(driver.cuMemRelease, handles[-1])
            for page, handle in zip(pages, handles, strict=True):
                _check("cuMemMap", driver.cuMemMap(page, page_size, 0, handle, 0))
                undo.callback(driver.cuMemUnmap, page, page_size)
            _check("cuMemSetAccess", driver.cuMemSetAccess(address, size, [access], 1))
            self._pages.update(zip(pages, handles, strict=True))
            undo.pop_all()  # nothing is to be undone

    def unmap(self, address: int, size: int, page_size: int) -> None:
        """Give back whole pages. Waits for all work on the device first, as cuMemFree does."""
        with free_mutex(), self._call() as driver:
            _check("cuCtxSynchronize", driver.cuCtxSynchronize())
            for page in range(address, address + size, page_size):
                _check("cuMemUnmap", driver.cuMemUnmap(page, page_size))
                _check("cuMemRelease", driver.cuMemRelease(self._pages.pop(page)))

    def ipc_handle(self, segment: int) -> bytes:
        """Return the 64 bytes with which another process can open a segment from :meth:`allocate`."""
        with self._call() as driver:
            handle = _check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(segment))
            return ctypes.string_at(handle.getPtr(), 64)

    def record_event(self, stream: int) -> Any:
        """Return an event recorded on a stream, which is its handle, or what :func:`foreign_stream` returns."""
        device, stream = divmod(stream, _FOREIGN)
        if device:
            if device not in self._others:
                self._others[device] = DriverProvider(device - 1)
            other = self._others[device]
            return other, other.record_event(stream)
        with self._call() as driver:
            if self._idle_events:
                event = self._idle_events.pop()
            else:
                flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
                event = _check("cuEventCreate", driver.cuEventCreate(flags))
            try:
                _check("cuEventRecord", driver.cuEventRecord(event, stream))
            except CudaError:  # the program has destroyed the stream
                self._idle_events.append(event)
                raise
            return event

    def event_passed(self, token: Any) -> bool:
        """Return whether an event has passed."""
        if isinstance(token, tuple):
            return bool(token[0].event_passed(token[1]))
        with self._call(harmless=True) as driver:
            (result,) = driver.cuEventQuery(token)
            if result == driver.CUresult.CUDA_ERROR_NOT_READY:
                return False
            _check("cuEventQuery", (result,))
            self._idle_events.append(token)
            return True

    def synchronize_event(self, token: Any) -> None:
        """Wait for an event."""
        if isinstance(token, tuple):
            token[0].synchronize_event(token[1])
            return
        with self._call() as driver:
            _check("cuEventSynchronize", driver.cuEventSynchronize(token))
            self._idle_events.append(token)

    def captured_tail(self, stream: int) -> tuple[int, frozenset[int]] | None:
        """Return the capture that a stream takes part in, and the nodes that what is next in it comes after."""
        if stream in _LEGACY:
            return None
        with self._call() as driver:
            found = _check("cuStreamGetCaptureInfo", driver.cuStreamGetCaptureInfo(stream))
            status, capture, _, nodes, *_ = found
            if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
                return None
            return int(capture), frozenset(map(int, nodes))

    def nodes_before(self, node: int) -> list[int]:
        """Return the nodes directly before one of a graph that is being captured."""
        with self._call() as driver:
            *_, count = _check("cuGraphNodeGetDependencies", driver.cuGraphNodeGetDependencies(node))
            nodes, *_ = _check("cuGraphNodeGetDependencies", driver.cuGraphNodeGetDependencies(node, count))
            return list(map(int, nodes))

    def memory_info(self) -> tuple[int, int]:
        """Return free and total bytes of the device."""
        with self._call() as driver:
            free, total = _check("cuMemGetInfo", driver.cuMemGetInfo())
            return int(free), int(total)

    def close(self) -> None:
        """Destroy the events and release the context. Segments must have been freed."""
        for other in self._others.values():
            other.close()
        if self._context is None:
            return
        with self._call() as driver:
            while self._idle_events:
                _check("cuEventDestroy", driver.cuEventDestroy(self._idle_events.pop()))
        _check("cuDevicePrimaryCtxRelease", self._driver.cuDevicePrimaryCtxRelease(self._device))
        self._context = None

    @contextmanager
    def _call(self, *, harmless: bool = False) -> Iterator[Any]:
        """Give the driver, in our context; also for `harmless` calls that it forbids while something is captured.

        No captured work depends on memory before we have it, nor on events of work outside of the capture.
        """
        driver = self._driver
        hooks.begin()
        try:
            _check("cuCtxPushCurrent", driver.cuCtxPushCurrent(self._context))
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            exchange = driver.cuThreadExchangeStreamCaptureMode
            before = _check("cuThreadExchangeStreamCaptureMode", exchange(mode)) if harmless else None
            try:
                yield driver
            finally:
                if harmless:
                    _check("cuThreadExchangeStreamCaptureMode", exchange(before))
                _check("cuCtxPopCurrent", driver.cuCtxPopCurrent())
        finally:
            hooks.end()


def _check(what: str, result: tuple[Any, ...]) -> Any:
    """Return what a driver call returned after its status: nothing, one value, or a tuple."""
    status, *values = result
    if status != 0:
        error = OutOfMemoryError if status.name == "CUDA_ERROR_OUT_OF_MEMORY" else CudaError
        raise error(f"{what} failed", status.name)
    return values[0] if len(values) == 1 else tuple(values)
