"""Arrays of other libraries: DLPack and the CUDA array interface, in and out."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.runtime import calls
from cudatool.runtime.allocator import Layout
from cudatool.runtime.calls import operation
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import bfloat16
from cudatool.runtime.stream import ExternalStream, current_stream

if TYPE_CHECKING:
    from cudatool.runtime.array import DeviceArray

__all__ = ["CPU", "CUDA", "cuda_array_interface", "dlpack", "import_array"]

CPU: Final = (1, 3)  # kDLCPU, kDLCUDAHost
CUDA: Final = 2  # kDLCUDA
_LEGACY_STREAM: Final = 1  # both protocols forbid 0, which could mean either default stream


def cuda_array_interface(array: DeviceArray) -> dict[str, Any]:
    """Return the array as the CUDA array interface, version 3, describes it."""
    return {
        "version": 3,
        "shape": array.shape,
        "typestr": array.dtype.str,
        "descr": array.dtype.descr,
        "data": (array.data_ptr(), not array.layout.flags.writeable),
        "strides": None if array.is_contiguous() else array.strides,
        "stream": current_stream(array.device).cuda_stream or _LEGACY_STREAM,
    }


def dlpack(array: DeviceArray, stream: int | None, **options: Any) -> Any:
    """Return a DLPack capsule of the array, ready for use on the consumer's `stream` (-1: not asked for).

    Raises
    ------
    BufferError
        DLPack has no such dtype, or the consumer wants another device.
    """
    if stream != -1:
        consumer = ExternalStream(_LEGACY_STREAM if stream is None else stream, array.device)
        producer = current_stream(array.device)
        if consumer.cuda_stream != (producer.cuda_stream or _LEGACY_STREAM):
            consumer.wait_stream(producer)
    from cuda.core.utils import StridedMemoryView

    itemsize = array.dtype.itemsize
    if any(stride % itemsize for stride in array.strides):
        raise BufferError(f"DLPack counts strides in elements; {array.strides} are not multiples of {itemsize}")
    with on_device(array.device), operation():
        start, end = np.lib.array_utils.byte_bounds(array.layout)
        buffer = calls.core.Buffer.from_handle(array.data_ptr(), end - start, owner=array)
        strides = tuple(stride // itemsize for stride in array.strides)
        code = _CODES.get(array.dtype)
        dtype = array.dtype if code is None else np.dtype(f"u{itemsize}")
        view = StridedMemoryView.from_buffer(buffer, array.shape, strides, dtype=dtype)
        capsule = view.__dlpack__(stream=-1, **options)
    if code is not None:
        _set_type_code(capsule, code)
    return capsule


_CODES: Final = {np.dtype(bfloat16): 4}
"""dtype -> DLDataTypeCode, of types that cuda.core (1.2) imports but does not export."""
# In a capsule of this name: where the byte is that says the type's code (DLTensor.dtype.code of dlpack.h).
_TYPE_CODES: Final = {b"dltensor": 20, b"dltensor_versioned": 52}


def _set_type_code(capsule: Any, code: int) -> None:
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.argtypes, name_of.restype = [ctypes.py_object], ctypes.c_char_p
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.argtypes, pointer_of.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    name = name_of(capsule)
    ctypes.c_uint8.from_address(pointer_of(capsule, name) + _TYPE_CODES[name]).value = code


def import_array(foreign: Any) -> tuple[Layout, int]:
    """Return another library's device array as a layout and its device, ready for use on the current stream.

    Raises
    ------
    UsageError
        Its dtype is one that NumPy does not have.
    """
    from cuda.core.utils import StridedMemoryView

    with operation():
        if hasattr(foreign, "__dlpack__"):
            _, index = foreign.__dlpack_device__()
            pointer = current_stream(index).cuda_stream or _LEGACY_STREAM
            view = StridedMemoryView.from_dlpack(foreign, stream_ptr=pointer)
        else:
            pointer = current_stream().cuda_stream or _LEGACY_STREAM
            view = StridedMemoryView.from_cuda_array_interface(foreign, stream_ptr=pointer)
        if view.dtype is None:
            raise UsageError("the array has a dtype that NumPy does not have")
        return np.asarray(_Foreign(view)).view(view.dtype), view.device_id


class _Foreign:
    """Another library's array in the form of NumPy's array interface."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, view: Any) -> None:
        self.owner = view
        dtype = np.dtype(f"u{view.dtype.itemsize}") if view.dtype in _CODES else view.dtype  # NumPy's own interface
        self.__array_interface__ = {
            "version": 3,
            "shape": view.shape,
            "typestr": dtype.str,
            "descr": dtype.descr,
            "data": (view.ptr, view.readonly),
            "strides": None if view.strides is None else tuple(stride * dtype.itemsize for stride in view.strides),
        }
