"""Pinned host memory: what the device can copy while the program goes on."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool import _cuda
from cudatool._allocator import Shape, array_interface
from cudatool._cuda import check, operation
from cudatool._device import current_device
from cudatool._device import device as on_device
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["empty_pinned", "pin_memory"]


class _PinnedMemory:
    """Pinned memory, freed when the last NumPy array in it is gone."""

    __slots__ = ("__array_interface__", "address", "device", "size")

    def __init__(self, size: int) -> None:
        self.device, self.size = current_device(), size
        with operation() as correlation:
            self.address = int(check(_cuda.driver.cuMemHostAlloc(max(size, 1), 0)))
        self.__array_interface__ = array_interface(self.address, size)
        if correlation:
            hooks.emit(Kind.HOST_ALLOC, device=self.device, name="cuMemHostAlloc", address=self.address, size=self.size)

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if not hasattr(self, "address") or _finalizing():
            return
        with on_device(self.device), operation() as correlation:
            check(_cuda.driver.cuMemFreeHost(self.address))
        if correlation:
            hooks.emit(Kind.HOST_FREE, device=self.device, name="cuMemFreeHost", address=self.address, size=self.size)


def empty_pinned(shape: Shape, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Return a new NumPy array in pinned memory, for copies that do not block; its elements are anything."""
    dtype = np.dtype(dtype)
    extents = tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)
    memory = _PinnedMemory(math.prod(extents) * dtype.itemsize)
    return np.asarray(memory).view(dtype).reshape(extents)


def pin_memory(array: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return a copy of a host array in pinned memory."""
    source = np.asarray(array)
    pinned = empty_pinned(source.shape, source.dtype)
    pinned[...] = source
    return pinned
