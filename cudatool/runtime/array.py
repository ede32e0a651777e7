"""Arrays in device memory."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Final, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt

from cudatool.errors import ShapeError, UsageError
from cudatool.loading.attached import attached
from cudatool.runtime import interop, peer, transfer
from cudatool.runtime._native import address_of
from cudatool.runtime.allocator import Layout, Memory, MemoryOwner, Shape, allocate
from cudatool.runtime.device import CUDA_KINDS, DeviceLike, device_index
from cudatool.runtime.dtypes import as_dtype
from cudatool.runtime.pinned import empty_pinned, is_pinned
from cudatool.runtime.stream import Stream, as_stream, current_stream
from cudatool.runtime.sync_debug import get_sync_debug_mode, hidden_synchronization

if TYPE_CHECKING:
    from cudatool.array_methods import ArrayMethods
else:
    ArrayMethods = attached("ArrayMethods")

__all__ = [
    "ALIGNMENT",
    "DeviceArray",
    "asarray",
    "check_array",
    "check_writeable",
    "empty",
    "from_dlpack",
    "full",
    "list_of_arrays",
    "may_overlap",
    "ones",
    "signature",
    "zeros",
]

_Index = SupportsIndex | slice | EllipsisType | None


class DeviceArray(ArrayMethods):
    """An n-dimensional array in device memory; made by :func:`empty`, :func:`asarray` and the like.

    Shapes, strides and views are NumPy's, because a NumPy array holds them: `layout` lies at the device's
    addresses and is never read. It also keeps the memory, as long as any view of it exists.

    Everything is enqueued on the current stream of the array's device. If another stream than the one that was
    current when the array was made uses it, say so (:meth:`record_stream`) before the array is dropped.

    Parameters
    ----------
    layout
        Shape, dtype, strides and address.
    memory
        The block it is part of; None if another library keeps the memory.
    device
        Ordinal of the device that the addresses belong to.
    """

    __slots__ = ("__weakref__", "_address", "_memory", "_signature", "device", "layout")

    def __init__(self, layout: Layout, memory: MemoryOwner | None, device: int) -> None:
        self.layout = layout
        self.device = device
        self._memory = memory
        self._address = -1  # not asked for yet
        self._signature: object = None  # see signature()

    # What it is.

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dimension."""
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance in bytes from one element to the next, in each dimension."""
        return self.layout.strides

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.layout.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.layout.size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.layout.nbytes

    def is_contiguous(self) -> bool:
        """Return whether the elements lie one after the other, in C order."""
        return self.layout.flags.c_contiguous

    def data_ptr(self) -> int:
        """Return the device address of the first element, 0 if there is none."""
        if self._address < 0:
            self._address = address_of(self.layout) if self.layout.size else 0
        return self._address

    def __len__(self) -> int:
        return len(self.layout)

    def __iter__(self) -> Iterator[DeviceArray]:
        if not self.ndim:  # without this method Python would index until that fails: at once
            raise TypeError("iteration over an array without dimensions")
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return f"<DeviceArray shape={self.shape} dtype={self.dtype} device={self.device} at {self.data_ptr():#x}>"

    # Views.

    def __getitem__(self, index: _Index | tuple[_Index, ...]) -> DeviceArray:
        """Return a view by integers, slices, ``...`` and None; the view of one element has no dimensions."""
        return self._view(self.layout[_basic(index)])

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the elements in another shape: a view where that is possible, else a copy.

        Raises
        ------
        ShapeError
            The shape has another number of elements.
        """
        try:
            return self._view(self.layout.reshape(*shape, copy=False))
        except (TypeError, ValueError) as error:
            if self.is_contiguous() or isinstance(error, TypeError):
                raise ShapeError(str(error)) from None
            return self.contiguous().reshape(*shape)

    def ravel(self) -> DeviceArray:
        """Return the elements in one dimension: a view where that is possible, else a copy."""
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> DeviceArray:
        """Return a view with the dimensions in another order, by default the reverse.

        Raises
        ------
        ShapeError
            These are not the array's dimensions, each once.
        """
        try:
            view = self._view(self.layout.transpose(*axes))
        except (TypeError, ValueError) as error:
            raise ShapeError(f"shape {self.shape}, axes {axes}: {error}") from None
        view._address = self._address  # it begins where this does
        return view

    @property
    def T(self) -> DeviceArray:
        """The view with the dimensions reversed."""
        return self.transpose()

    def broadcast_to(self, shape: tuple[int, ...]) -> DeviceArray:
        """Return a read-only view with this shape, in which the elements repeat.

        Raises
        ------
        ShapeError
            The shape does not fit.
        """
        return self._view(transfer.broadcast(self.layout, shape))

    def _view(self, layout: Layout) -> DeviceArray:
        return DeviceArray(layout, self._memory, self.device)

    # Copies.

    def contiguous(self) -> DeviceArray:
        """Return the array itself if it is contiguous, else a copy that is."""
        return self if self.is_contiguous() else self.clone()

    def clone(self) -> DeviceArray:
        """Return a contiguous copy on the same device."""
        return empty(self.shape, self.dtype, device=self.device).copy_(self)

    def __copy__(self) -> DeviceArray:
        return self._view(self.layout)  # the same memory, as torch's

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceArray:
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        # By value, for a file or another machine; cudatool.multiprocessing hands over the memory instead.
        return _on_device, (self.get(), self.device)

    def copy_(self, source: Any, non_blocking: bool = False) -> DeviceArray:
        """Copy `source` into this array, broadcast to its shape and cast to its dtype, and return this array.

        Parameters
        ----------
        source
            A device array, on any device and of any library, or anything that NumPy takes for an array.
        non_blocking
            Do not wait for a copy from pinned host memory. That memory must not be changed before the stream has
            reached the copy. Copies between devices never wait.

        Raises
        ------
        ShapeError
            The shapes do not fit.
        UsageError
            This array is read-only, or the device cannot cast between the dtypes.
        """
        check_writeable(self)
        stream = current_stream(self.device)
        found = _from_library(source)
        if found is None:
            if not non_blocking:
                hidden_synchronization(
                    "a copy from the host that blocks; from pinned memory, non_blocking=True does not wait"
                )
            transfer.copy_to_device(self.layout, _host(source), stream)
            if not non_blocking:
                stream.synchronize()
        elif found.device == self.device:
            transfer.copy_on_device(self.layout, found.layout, stream)
        else:
            peer.copy_between([(self, found)])
        return self

    def to(self, dtype: npt.DTypeLike | None = None, *, device: DeviceLike = None, copy: bool = False) -> DeviceArray:
        """Return the array in another dtype, or on another device; the array itself if both are right.

        Parameters
        ----------
        copy
            Return a copy in any case.
        """
        found = asarray(self, dtype, device=self.device if device is None else device)
        return found.clone() if copy and found is self else found

    def astype(self, dtype: npt.DTypeLike) -> DeviceArray:
        """Return the array in another dtype; the array itself if it has it."""
        return self.to(dtype)

    def fill_(self, value: Any) -> DeviceArray:
        """Set every element to `value`, cast to the array's dtype, and return the array."""
        check_writeable(self)
        transfer.fill(self.layout, value, current_stream(self.device))
        return self

    def __setitem__(self, index: _Index | tuple[_Index, ...], value: Any) -> None:
        """Copy a scalar or an array into a part, broadcast and cast."""
        found = _from_library(value)
        if found is not None or np.ndim(value):
            self[index].copy_(value if found is None else found)
        else:
            self[index].fill_(value)

    def get(self, out: npt.NDArray[Any] | None = None, blocking: bool = True) -> npt.NDArray[Any]:
        """Return the elements as a NumPy array.

        Parameters
        ----------
        out
            Where to put them: same shape and dtype, in C order, not read-only. Default: a new array, in pinned memory
            if the copy does not block.
        blocking
            Wait for the copy. If not, the result must not be read before the stream has reached the copy; and if `out`
            is not pinned (:func:`cudatool.empty_pinned`), the driver waits all the same.

        Raises
        ------
        UsageError
            `out` does not fit.
        """
        stream = current_stream(self.device)
        if out is None:
            out = np.empty(self.shape, self.dtype) if blocking else empty_pinned(self.shape, self.dtype)
        elif not isinstance(out, np.ndarray):
            raise UsageError(f"out must be a NumPy array, not {type(out).__name__}")
        elif (out.shape, out.dtype) != (self.shape, self.dtype) or not out.flags.c_contiguous:
            raise UsageError(
                f"out must have shape {self.shape} and dtype {self.dtype}, in C order; "
                f"it has {out.shape} and {out.dtype}"
            )
        elif not out.flags.writeable:
            raise UsageError("out is read-only")
        if get_sync_debug_mode() and (blocking or not is_pinned(out)):
            hidden_synchronization(
                "a copy to the host that blocks; with blocking=False, to pinned memory, it does not wait"
            )
        transfer.copy_to_host(out, self.contiguous().layout, stream)
        if blocking:
            stream.synchronize()
        return out

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a DeviceArray is not converted to a NumPy array by itself; call its get()")

    # Streams and other libraries.

    def record_stream(self, stream: Stream) -> None:
        """Let the memory rest, once freed, until what is on `stream` by then has completed.

        Does nothing for another library's memory.
        """
        if stream is None:
            raise UsageError("record_stream takes a stream, not None")
        if self._memory is not None:
            self._memory.record_stream(as_stream(stream))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return interop.cuda_array_interface(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return interop.CUDA, self.device

    def __dlpack__(self, *, stream: int | None = None, copy: bool | None = None, **options: Any) -> Any:
        return interop.dlpack(self.clone() if copy else self, stream, **options)


ALIGNMENT: Final = 16
"""Bytes that a kernel loads at once at most: what an address is a multiple of makes no difference beyond."""

_signatures: dict[tuple[object, ...], object] = {}
_MOST_SIGNATURES: Final = 65536


def signature(array: DeviceArray) -> object:
    """Return what stands for shape, strides, dtype, device, alignment and whether it can be written.

    If two arrays have the same one, an operation treats them alike; so it is the key of what was computed for one. Of
    the arrays that are alike, a few may have another, which costs time alone. It is compared by identity, and kept
    in ``_signature``, where those look first to whom every call counts.
    """
    layout = array.layout
    alignment = array.data_ptr() % ALIGNMENT
    key = layout.shape, layout.strides, layout.dtype, array.device, alignment, layout.flags.writeable
    found = _signatures.get(key)
    if found is None:
        if len(_signatures) >= _MOST_SIGNATURES:
            _signatures.clear()
        found = _signatures[key] = object()
    array._signature = found
    return found


def may_overlap(a: DeviceArray, b: DeviceArray) -> bool:
    """Return whether two arrays may have bytes in common: False is certain."""
    memory, other = a._memory, b._memory
    if memory is not other and type(memory) is Memory and type(other) is Memory:
        return False  # two blocks: without a look at the bounds, which takes longer
    return np.may_share_memory(a.layout, b.layout)


def _basic(index: _Index | tuple[_Index, ...]) -> tuple[_Index, ...]:
    """Return an index that gives a view of NumPy's, never an element or a copy: both would read device memory."""
    parts = index if isinstance(index, tuple) else (index,)
    basic = tuple(part if part is None or isinstance(part, slice | EllipsisType) else _integer(part) for part in parts)
    return basic if Ellipsis in basic else (*basic, Ellipsis)


def _integer(part: SupportsIndex) -> int:
    try:
        if not isinstance(part, bool | np.bool):  # for NumPy, a mask
            return operator.index(part)
    except TypeError:
        pass
    raise UsageError(f"cannot index with {type(part).__name__}; only integers, slices, ... and None")


def check_array(name: str, array: object) -> None:
    """Raise UsageError if what is passed to the function `name` is not a DeviceArray."""
    if not isinstance(array, DeviceArray):
        raise UsageError(f"{name} takes a DeviceArray, not {type(array).__name__}")


def check_writeable(array: DeviceArray, what: str = "this array") -> None:
    """Raise UsageError if an array, named `what` in words, must not be written to."""
    if not array.layout.flags.writeable:
        raise UsageError(f"{what} is read-only: its owner exported it so, or it is broadcast")


def list_of_arrays(name: str, arrays: Any) -> list[DeviceArray]:
    """Return the arrays that are passed to the function `name`.

    Raises
    ------
    UsageError
        It is not a list, or another iterable, of DeviceArrays.
    """
    if isinstance(arrays, DeviceArray | str) or not isinstance(arrays, Iterable):
        raise UsageError(f"{name} takes a list of DeviceArrays, not {type(arrays).__name__}")
    found = list(arrays)
    for array in found:
        if not isinstance(array, DeviceArray):
            raise UsageError(f"{name} takes a list of DeviceArrays; one of it is {type(array).__name__}")
    return found


def empty(shape: Shape, dtype: npt.DTypeLike = np.float32, *, device: DeviceLike = None) -> DeviceArray:
    """Return a new array, whose elements are anything, for use on the current stream.

    Parameters
    ----------
    device
        Default: the current device.

    Raises
    ------
    OutOfMemoryError
        There is not that much.
    """
    stream = current_stream(device)
    layout, memory = allocate(shape, dtype, stream)
    array = DeviceArray(layout, memory, stream.device_index)
    if layout.size:
        array._address = memory.address  # known: NumPy need not be asked
    return array


def full(shape: Shape, value: Any, dtype: npt.DTypeLike = np.float32, *, device: DeviceLike = None) -> DeviceArray:
    """Return a new array with every element `value`."""
    return empty(shape, dtype, device=device).fill_(value)


def zeros(shape: Shape, dtype: npt.DTypeLike = np.float32, *, device: DeviceLike = None) -> DeviceArray:
    """Return a new array of zeros."""
    return full(shape, 0, dtype, device=device)


def ones(shape: Shape, dtype: npt.DTypeLike = np.float32, *, device: DeviceLike = None) -> DeviceArray:
    """Return a new array of ones."""
    return full(shape, 1, dtype, device=device)


def asarray(
    source: Any, dtype: npt.DTypeLike | None = None, *, device: DeviceLike = None, non_blocking: bool = False
) -> DeviceArray:
    """Return `source` as a device array.

    Parameters
    ----------
    source
        A device array, also of another library, is not copied if dtype and device are right; else anything that
        NumPy takes for an array.
    non_blocking
        Do not wait for a copy from pinned host memory, which must not be changed before the stream has reached it.
    """
    found = _from_library(source)
    if found is None and hasattr(source, "__dlpack_device__") and not isinstance(source, np.ndarray):
        found = from_dlpack(source, device=device)
    if found is None:
        host = _host(source, dtype)
        return empty(host.shape, host.dtype, device=device).copy_(host, non_blocking)
    wanted = found.dtype if dtype is None else as_dtype(dtype)
    index = found.device if device is None else device_index(device)
    if (wanted, index) == (found.dtype, found.device):
        return found
    return empty(found.shape, wanted, device=index).copy_(found)


def from_dlpack(source: Any, *, device: DeviceLike = None) -> DeviceArray:
    """Return any array with ``__dlpack__`` as a device array; one that is on a device already is not copied.

    Parameters
    ----------
    device
        Where a host array is copied to; default: the current device.

    Raises
    ------
    UsageError
        It is on something that is neither host nor CUDA, or its dtype is one that NumPy does not have.
    """
    if not hasattr(source, "__dlpack_device__"):
        raise UsageError(f"from_dlpack takes what has __dlpack__, not {type(source).__name__}; use asarray")
    kind, _ = source.__dlpack_device__()
    if kind in interop.CPU:
        return asarray(np.from_dlpack(source), device=device)
    if kind not in CUDA_KINDS:
        raise UsageError(f"DLPack device type {kind} is neither host nor CUDA")
    return _import(source)


def _from_library(source: Any) -> DeviceArray | None:
    """Return a device array of any library as one of ours; None for anything that is not on a device."""
    if isinstance(source, DeviceArray):
        return source
    if hasattr(source, "__cuda_array_interface__"):
        return _import(source)
    if hasattr(source, "__dlpack_device__") and source.__dlpack_device__()[0] in CUDA_KINDS:
        return _import(source)
    return None


def _host(source: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return as a NumPy array what NumPy takes for one."""
    try:
        return np.asarray(source, None if dtype is None else as_dtype(dtype))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{type(source).__name__} does not become an array: {error}") from None


def _on_device(host: npt.NDArray[Any], device: int) -> DeviceArray:
    """Return a pickled array on the device of that number."""
    return asarray(host, device=device)


def _import(source: Any) -> DeviceArray:
    layout, device = interop.import_array(source)
    return DeviceArray(layout, None, device)
