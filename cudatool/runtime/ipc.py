"""Arrays of another process on the same machine, used where they lie."""

from __future__ import annotations

import ctypes
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from cudatool.errors import CudatoolError, DeviceUnavailableError, UsageError
from cudatool.memory.driver_provider import DriverProvider
from cudatool.runtime import calls
from cudatool.runtime.allocator import Memory, allocator, array_interface
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.calls import check, operation
from cudatool.runtime.device import DeviceLike, device_count, device_index, get_device_properties
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import require_int
from cudatool.runtime.stream import current_stream
from cudatool.trace import hooks
from cudatool.trace.events import Kind, WarningFlag

__all__ = [
    "ImportedSegment",
    "IpcArray",
    "IpcHandle",
    "device_of_uuid",
    "ipc_handle",
    "open_ipc_handle",
    "own_memory",
    "segment_handle",
]

_CLOSED: Final = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """What another process needs to use an array where it lies. It can be pickled.

    Attributes
    ----------
    segment
        The driver's handle of the allocator's segment that holds the array (CUipcMemHandle, 64 bytes).
    offset
        Bytes from the segment's beginning to the array's.
    shape, dtype
        Of the array, which is in C order.
    device
        UUID of the device: its ordinal may be another one in another process.
    """

    segment: bytes
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: str


def ipc_handle(source: DeviceArray | int, size: int = 0, *, device: DeviceLike = None) -> IpcHandle:
    """Return what another process needs to use an array where it lies (:func:`open_ipc_handle`).

    Waits for the current stream, so that the other process sees what was written so far. Nothing orders what either
    does later, and the array must be kept for as long as the other process uses it.

    Parameters
    ----------
    source
        The array, or the address that :func:`cudatool.caching_allocator_alloc` returned.
    size, device
        Bytes at that address, and the device that it belongs to, by default the current one.

    Raises
    ------
    UsageError
        The array is not in C order, or not in memory of the caching allocator; or it is in an expandable segment,
        which the driver cannot share so.
    CudaError
        The driver refuses.
    """
    if isinstance(source, DeviceArray):
        address, index = source.data_ptr(), source.device
        if not source.size or not source.is_contiguous():
            raise UsageError("only an array in C order, with elements, can be shared between processes")
        start, shape, dtype = own_memory(source).address, source.shape, source.dtype
    else:
        start = address = require_int("source", source)
        index, shape, dtype = device_index(device), (require_int("size", size),), np.dtype(np.uint8)
        if shape[0] < 0:
            raise UsageError(f"size must not be negative: {size}")
    current_stream(index).synchronize()
    segment, native = segment_handle(start, index)
    return IpcHandle(native, address - segment, shape, dtype, get_device_properties(index).uuid)


def own_memory(array: DeviceArray) -> Memory:
    """Return the block that an array is part of.

    Raises
    ------
    UsageError
        It is in the memory of another process or library.
    """
    block = array._memory
    if not isinstance(block, Memory):
        raise UsageError(
            "only memory of cudatool's own can be shared between processes; this is another library's, or another "
            "process's: pass array.clone()"
        )
    return block


def segment_handle(block: int, device: int) -> tuple[int, bytes]:
    """Return the address of the segment that a block is part of, and the driver's handle of it.

    Raises
    ------
    UsageError
        The driver cannot share it.
    """
    policy = allocator(device)
    segment, _, is_expandable = policy.segment_of(block)
    if is_expandable:
        raise UsageError(
            "memory of an expandable segment cannot be shared between processes; set expandable_segments:False in "
            "CUDATOOL_ALLOC_CONF"
        )
    assert isinstance(policy.provider, DriverProvider)
    with operation():
        native = policy.provider.ipc_handle(segment)
    _emit_shared("cuIpcGetMemHandle", device, segment)
    return segment, native


def _emit_shared(call: str, device: int, segment: int) -> None:
    """Tell that other processes can use a segment, all of which a handle stands for."""
    if hooks.active:
        with on_device(device), operation():
            size = int(check(calls.driver.cuMemGetAddressRange(segment))[1])
        hooks.emit(Kind.WARNING, name=call, device=device, address=segment, size=size, flags=WarningFlag.SHARED)


def open_ipc_handle(handle: IpcHandle) -> IpcArray:
    """Return the array that another process made a handle of, in the memory where it lies.

    Raises
    ------
    CudaError
        The handle was made by this process, or its owner has ended.
    DeviceUnavailableError
        This process does not have the device that the array is on.
    UsageError
        It is no handle.
    """
    if not isinstance(handle, IpcHandle):
        raise UsageError(f"open_ipc_handle takes what ipc_handle() returned, not {type(handle).__name__}")
    return IpcArray(handle, device_of_uuid(handle.device))


def device_of_uuid(uuid: str) -> int:
    """Return the ordinal of a device.

    Raises
    ------
    DeviceUnavailableError
        This process does not have it.
    """
    for index in range(device_count()):
        if get_device_properties(index).uuid == uuid:
            return index
    raise DeviceUnavailableError(f"this process does not have the device with UUID {uuid}")


class IpcArray(DeviceArray):
    """An array in another process's memory, from :func:`open_ipc_handle`. Also a context manager that closes it.

    The memory is unmapped when it is closed or dropped, and no view of it is left. Dropping it waits for no work.
    """

    __slots__ = ()

    def __init__(self, handle: IpcHandle, device: int) -> None:
        size = math.prod(handle.shape) * handle.dtype.itemsize
        mapped = np.asarray(ImportedSegment(handle.segment, handle.offset, size, device))
        super().__init__(mapped.view(handle.dtype).reshape(handle.shape), None, device)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called; then there are no elements."""
        return self.layout is _CLOSED

    def close(self) -> None:
        """Wait for the current stream, then release the memory."""
        if not self.is_closed:
            current_stream(self.device).synchronize()
            self.layout, self._address = _CLOSED, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class ImportedSegment:
    """A segment of another process, and a part of it in the form of NumPy's array interface.

    It is unmapped with the last array in it. Dropping it waits for no work.
    """

    __slots__ = ("__array_interface__", "_device", "_segment")

    def __init__(self, segment: bytes, offset: int, size: int, device: int) -> None:
        self._device = device
        native = calls.driver.CUipcMemHandle()
        ctypes.memmove(native.getPtr(), segment, len(segment))
        flags = calls.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with on_device(device), operation():
            self._segment = int(check(calls.driver.cuIpcOpenMemHandle(native, flags)))
        _emit_shared("cuIpcOpenMemHandle", device, self._segment)
        self.__array_interface__ = array_interface(self._segment + offset, size)

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        # The slot is empty if the driver refused; and the end of the process, or of the context, unmaps everything.
        if hasattr(self, "_segment") and not _finalizing():
            with suppress(CudatoolError), on_device(self._device), operation():
                check(calls.driver.cuIpcCloseMemHandle(self._segment))
