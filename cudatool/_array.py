"""Arrays in device memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from cudatool import _interop, _transfer
from cudatool._allocator import Memory
from cudatool._device import DeviceLike, device_index
from cudatool._stream import Stream, current_stream
from cudatool.errors import UsageError

__all__ = [
    "DeviceArray",
    "Shape",
    "asarray",
    "empty",
    "from_dlpack",
    "full",
    "ones",
    "zeros",
]

Shape = SupportsIndex | Iterable[SupportsIndex]
Index = SupportsIndex | slice | EllipsisType | None


class DeviceArray:
    """An n-dimensional array in device memory; made by :func:`empty`, :func:`asarray` and the like.

    Shapes, strides and views are NumPy's, because a NumPy array holds them: `layout` lies at the device's
    addresses and is never read. It also keeps the memory alive, as long as any view of it exists.

    Everything is enqueued on the current stream of the array's device. An array that is used on another stream than
    the one it was made on must say so (:meth:`record_stream`) before it is dropped.

    Parameters
    ----------
    layout
        Shape, dtype, strides and address.
    memory
        Whose ``record_stream`` is told of other streams; None if the memory is not the allocator's.
    device
        Ordinal of the device that the addresses belong to.
    """

    __slots__ = ("_memory", "device", "layout")

    def __init__(self, layout: npt.NDArray[Any], memory: Memory | None, device: int) -> None:
        self.layout = layout
        self.device = device
        self._memory = memory

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

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in C order."""
        return self.layout.flags.c_contiguous

    def data_ptr(self) -> int:
        """Return the device address of the first element, 0 if there is none."""
        return self.layout.ctypes.data if self.size else 0

    def __len__(self) -> int:
        return len(self.layout)

    def __repr__(self) -> str:
        return f"<DeviceArray shape={self.shape} dtype={self.dtype} device={self.device} at {self.data_ptr():#x}>"

    # Views.

    def __getitem__(self, index: Index | tuple[Index, ...]) -> DeviceArray:
        """Return a view by integers, slices, ``...`` and None; the view of one element has no dimensions."""
        return self._view(self.layout[_basic(index)])

    def __setitem__(self, index: Index | tuple[Index, ...], value: Any) -> None:
        """Copy a scalar or an array into a part, broadcasting it."""
        part = self[index]
        if np.ndim(value) == 0 and not isinstance(value, DeviceArray):
            part.fill_(value)
        else:
            part.copy_(value, non_blocking=True)

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the elements in another shape: a view if that is possible, else a copy."""
        wanted = shape[0] if len(shape) == 1 else shape
        try:
            return self._view(self.layout.reshape(wanted, copy=False))
        except ValueError:
            return self.contiguous()._view(np.empty_like(self.layout, order="C", shape=0)) if False else _reshaped(
                self, wanted
            )

    def ravel(self) -> DeviceArray:
        """Return the elements in one dimension: a view if that is possible, else a copy."""
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> DeviceArray:
        """Return a view with the dimensions in another order, by default reversed."""
        return self._view(self.layout.transpose(*axes))

    @property
    def T(self) -> DeviceArray:  # noqa: N802
        """The transposed view."""
        return self.transpose()

    def _view(self, layout: npt.NDArray[Any]) -> DeviceArray:
        return DeviceArray(layout, self._memory, self.device)
