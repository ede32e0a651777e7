"""The order in which elements are filled, where arrays are not contiguous: PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatool.runtime.array import DeviceArray, check_array, empty

__all__ = ["by_strides", "empty_like", "in_memory_order"]


def by_strides(array: DeviceArray) -> list[int]:
    """Return the dimensions from the one with the largest steps to the one with the smallest.

    Among equal steps, and beside a step of 0, dimensions keep their order, except that of two with equal steps the
    smaller one comes later.
    """
    order = list(reversed(range(array.ndim)))  # the innermost first, while sorting by insertion
    for end in range(1, array.ndim):
        moving = end
        for before in range(end - 1, -1, -1):
            first, second = order[before], order[moving]
            a, b = abs(array.strides[first]), abs(array.strides[second])
            if not a or not b:
                continue
            if a < b:
                break
            if a > b or array.shape[first] > array.shape[second]:
                order[before], order[moving] = second, first
                moving = before
    return order[::-1]


def in_memory_order(array: DeviceArray) -> DeviceArray:
    """Return a view whose C order is that of the elements in memory."""
    return array if array.is_contiguous() else array.transpose(by_strides(array))


def empty_like(array: DeviceArray, dtype: Any = None) -> DeviceArray:
    """Return a new array of the same shape, without gaps, whose dimensions lie in memory in the same order."""
    check_array("this", array)
    order = by_strides(array)
    made = empty([array.shape[d] for d in order], array.dtype if dtype is None else dtype, device=array.device)
    return made.transpose(np.argsort(order)) if order != sorted(order) else made
