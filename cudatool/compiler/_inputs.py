"""The arrays among a function's arguments: where its graph reads them, and what they must not share memory with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from cudatool.compiler._values import is_constant
from cudatool.errors import GraphBreakError
from cudatool.runtime._native import Region
from cudatool.runtime.array import DeviceArray, empty

__all__ = ["Extents", "borrowed", "placed", "refuse_gaps", "refuse_shared", "refuse_views", "shared", "with_inputs"]


class Extents:
    """The bytes of some arrays, to be asked whether another one meets them."""

    def __init__(self, arrays: Iterable[DeviceArray]) -> None:
        bounds = sorted(np.lib.array_utils.byte_bounds(array.layout) for array in arrays if array.size)
        self._starts = [low for low, _ in bounds]
        self._ends: list[int] = []  # the highest so far
        for _, high in bounds:
            self._ends.append(max(high, self._ends[-1] if self._ends else 0))

    def meet(self, array: DeviceArray) -> bool:
        """Return whether an array may have a byte in common with one of them."""
        if not array.size or not self._starts:
            return False
        low, high = np.lib.array_utils.byte_bounds(array.layout)
        before = bisect_right(self._starts, high - 1)
        return before > 0 and self._ends[before - 1] > low


def shared(arrays: dict[str, DeviceArray], state: dict[str, DeviceArray]) -> tuple[str, str] | None:
    """Return two arrays that may have a byte in common, of which the first is in `arrays`."""
    items = list(arrays.items())
    for index, (path, array) in enumerate(items):
        for other_path, other in [*items[:index], *state.items()]:
            if array.size and other.size and np.may_share_memory(array.layout, other.layout):
                return path, other_path
    return None


def refuse_shared(arrays: dict[str, DeviceArray], state: dict[str, DeviceArray]) -> None:
    """Raise if arguments share memory, for the graph may have its own copy of each.

    Raises
    ------
    GraphBreakError
        They do.
    """
    if found := shared(arrays, state):
        raise GraphBreakError(f"{found[0]} shares memory with {found[1]}, and a graph may copy arguments")


def refuse_gaps(path: str, array: DeviceArray) -> None:
    """Raise if an array cannot have a copy with the same strides.

    Raises
    ------
    GraphBreakError
        There are gaps between the elements, or one is at two places.
    """
    step = array.dtype.itemsize
    for axis in sorted((axis for axis in range(array.ndim) if array.shape[axis] > 1), key=lambda a: array.strides[a]):
        if array.size and array.strides[axis] != step:
            raise GraphBreakError(f"{path} has gaps or repeated elements; pass its contiguous()")
        step *= array.shape[axis]


def _static(array: DeviceArray) -> DeviceArray:
    """Return an array of the same shape and strides, whose content is not set; the array has no gaps."""
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    dense = empty(tuple(array.shape[axis] for axis in order), array.dtype, device=array.device)
    return dense.transpose(*np.argsort(order).tolist()) if array.ndim else dense


def placed(arrays: dict[str, DeviceArray], copied: Collection[str]) -> dict[str, DeviceArray]:
    """Return where a graph reads its arguments: places of its own for those that it copies, and where others are."""
    return {path: _static(array) if path in copied else borrowed(array) for path, array in arrays.items()}


def borrowed(array: DeviceArray) -> DeviceArray:
    """Return an array in the same place that does not keep the memory."""
    low, high = np.lib.array_utils.byte_bounds(array.layout)
    region: Any = Region(low, high - low)
    layout = np.ndarray(array.shape, array.dtype, region, array.data_ptr() - low, array.strides)
    layout.flags.writeable = array.layout.flags.writeable
    return DeviceArray(layout, None, array.device)


def with_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], inputs: dict[str, DeviceArray]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments with the arrays in them replaced by the graph's inputs."""
    return _replaced(args, "args", inputs), {key: _replaced(value, key, inputs) for key, value in kwargs.items()}


def _replaced(value: Any, path: str, inputs: dict[str, DeviceArray]) -> Any:
    if isinstance(value, DeviceArray):
        return inputs[path]
    if type(value) in (list, tuple):
        return type(value)(_replaced(part, f"{path}[{index}]", inputs) for index, part in enumerate(value))
    if type(value) is dict:
        return {key: _replaced(part, f"{path}[{key!r}]", inputs) for key, part in value.items()}
    return value


def refuse_views(outputs: Any, inputs: dict[str, DeviceArray]) -> None:
    """Check what a function returns.

    Raises
    ------
    GraphBreakError
        It returns a part of an argument, which would be a part of the graph's copy; or something that is no array,
        constant or container of them.
    """
    if isinstance(outputs, DeviceArray):
        same = any(outputs is array for array in inputs.values())
        if not same and (path := shared({"the result": outputs}, inputs)):
            raise GraphBreakError(f"the function returns a view of {path[1]}; return a clone()")
    elif type(outputs) in (list, tuple, dict):
        for part in outputs.values() if type(outputs) is dict else outputs:
            refuse_views(part, inputs)
    elif not is_constant(outputs):
        raise GraphBreakError(f"the function returns a {type(outputs).__name__}, which a replay cannot create")
