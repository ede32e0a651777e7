"""The copy that is a kernel: between any strides, and between any two number types."""

from __future__ import annotations

import contextlib
import math
from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.ops._layout import MOST_DIMENSIONS, collapse
from cudatool.ops._pointwise import Pointwise, Types
from cudatool.runtime._native import address_of
from cudatool.runtime.allocator import Layout
from cudatool.runtime.annotate import annotate
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.dtypes import NUMBER_TYPES
from cudatool.runtime.stream import Stream
from cudatool.trace import hooks

__all__ = ["copy"]

_copy: Final = Pointwise("copy(input)", "input", accepts=("bool", "integer", "float8", "float", "complex"))


def copy(target: Layout, source: Layout, stream: Stream) -> None:
    """Enqueue a copy between layouts of one shape that do not overlap.

    Raises
    ------
    UsageError
        The dtypes differ, and the device cannot cast one to the other.
    """
    if len(collapse(target.shape, [target.strides, source.strides], reorder=True)) > MOST_DIMENSIONS - 1:
        for part, given in zip(target, source, strict=True):  # one dimension may become words
            copy(part, given, stream)
        return
    if target.dtype == source.dtype:
        # Words, the largest that fit the elements and their addresses; an element may be several words.
        addresses = address_of(target), address_of(source)
        width = math.gcd(8, target.itemsize, *target.strides, *source.strides, *addresses)
        target, source = (_words(layout, width) for layout in (target, source))
    elif not {target.dtype, source.dtype} <= NUMBER_TYPES.keys():
        raise UsageError(f"cannot cast {source.dtype} to {target.dtype} on the device; copy by way of the host")
    to, from_ = (DeviceArray(layout, None, stream.device_index) for layout in (target, source))
    with contextlib.ExitStack() as annotations:
        if hooks.wants_accesses and not hooks.measures_accesses:
            # PTX does not say that it touches all elements and no others.
            annotations.enter_context(annotate([from_], [to]))
        _copy.launch([to], [from_], {}, Types(source.dtype, target.dtype), stream)


class _Words:
    """Memory in the form of NumPy's array interface."""

    def __init__(self, owner: Layout, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def _words(layout: Layout, width: int) -> Layout:
    """Return the layout with unsigned integers of `width` bytes as elements; larger ones become a dimension."""
    count = layout.itemsize // width
    shape = layout.shape if count == 1 else (*layout.shape, count)
    strides = layout.strides if count == 1 else (*layout.strides, width)
    interface = {**layout.__array_interface__, "shape": shape, "strides": strides, "typestr": f"<u{width}"}
    del interface["descr"]
    return np.asarray(_Words(layout, interface))
