"""Arrays of another process on the same machine, used where they lie."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from cudatool import _cuda
from cudatool._allocator import allocator, array_interface
from cudatool._array import DeviceArray
from cudatool._cuda import check, operation
from cudatool._device import DeviceLike, device_count, device_index, get_device_properties
from cudatool._device import device as on_device
from cudatool._stream import current_stream
from cudatool.errors import CudatoolError, DeviceUnavailableError, UsageError
from cudatool.memory.driver_provider import DriverProvider

__all__ = ["IpcArray", "IpcHandle", "ipc_collect", "ipc_handle", "open_ipc_handle"]

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
        block, address, index = source._memory, source.data_ptr(), source.device
        if block is None or not source.size or not source.is_contiguous():
            raise UsageError("only an array in C order, with memory of cudatool's own, can be shared between processes")
        start, shape, dtype = block.address, source.shape, source.dtype
    else:
        start = address = source
        index, shape, dtype = device_index(device), (size,), np.dtype(np.uint8)
    policy = allocator(index)
    segment, _, is_expandable = policy.segment_of(start)
    if is_expandable:
        raise UsageError(
            "memory of an expandable segment cannot be shared between processes; set expandable_segments:False in "
            "CUDATOOL_ALLOC_CONF"
        )
    assert isinstance(policy.provider, DriverProvider)
    current_stream(index).synchronize()
    native = policy.provider.ipc_handle(segment)
    return IpcHandle(native, address - segment, shape, dtype, get_device_properties(index).uuid)


def ipc_collect() -> None:
    """Let go of other processes' memory that no array of this one stands for any more.

    It goes by itself with the last array, so that this finds only what reference cycles keep.
    """
    gc.collect()


def open_ipc_handle(handle: IpcHandle) -> IpcArray:
    """Return the array that another process made a handle of, in the memory where it lies.

    Raises
    ------
    CudaError
        The handle was made by this process, or its owner has ended.
    DeviceUnavailableError
        This process does not have the device that the array is on.
    """
    for index in range(device_count()):
        if get_device_properties(index).uuid == handle.device:
            return IpcArray(handle, index)
    raise DeviceUnavailableError(f"this process does not have the device with UUID {handle.device}")


class IpcArray(DeviceArray):
    """An array in another process's memory, from :func:`open_ipc_handle`. Also a context manager that closes it.

    The memory is unmapped when it is closed or dropped, and no view of it is left. Dropping it waits for no work.
    """

    __slots__ = ()

    def __init__(self, handle: IpcHandle, device: int) -> None:
        mapped = np.asarray(_Mapping(handle, device))
        super().__init__(mapped.view(handle.dtype).reshape(handle.shape), None, device)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called; then there are no elements."""
        return self.layout is _CLOSED

    def close(self) -> None:
        """Wait for the current stream, then let go of the memory."""
        if not self.is_closed:
            current_stream(self.device).synchronize()
            self.layout, self._address = _CLOSED, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Mapping:
    """The mapped segment, and the part of it that is the array, in the form of NumPy's array interface."""

    __slots__ = ("__array_interface__", "_device", "_segment")

    def __init__(self, handle: IpcHandle, device: int) -> None:
        native = _cuda.driver.CUipcMemHandle()
        ctypes.memmove(native.getPtr(), handle.segment, len(handle.segment))
        flags = _cuda.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self._device = device
        with on_device(device), operation():
            self._segment = int(check(_cuda.driver.cuIpcOpenMemHandle(native, flags)))
        size = math.prod(handle.shape) * handle.dtype.itemsize
        self.__array_interface__ = array_interface(self._segment + handle.offset, size)

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        # The slot is empty if the driver refused; and the end of the process, or of the context, unmaps everything.
        if hasattr(self, "_segment") and not _finalizing():
            with suppress(CudatoolError), on_device(self._device), operation():
                check(_cuda.driver.cuIpcCloseMemHandle(self._segment))
