"""The bytes of an array, as access records say them: runs, and rows at equal distances."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind

__all__ = ["Extent", "emit_extents", "extents", "extents_of"]

_MOST = 4096  # records for one array; beyond, one range that is marked as inexact


class Extent(NamedTuple):
    """`rows` rows of `size` bytes, `stride` bytes from one to the next; the first is at `address`."""

    address: int
    size: int
    stride: int = 0
    rows: int = 1
    exact: bool = True


def extents(array: npt.NDArray[np.generic]) -> list[Extent]:
    """Return the bytes that the elements of a NumPy array, or of a layout at device addresses, occupy."""
    return extents_of(array.ctypes.data, array.shape, array.strides, array.itemsize)


def extents_of(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> list[Extent]:
    """Return the bytes of a strided array; `strides` are in bytes and may be negative or 0."""
    if 0 in shape or not itemsize:
        return []
    # Every dimension ascending, the closest elements first; what is repeated or alone is no dimension.
    address += sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True) if stride < 0)
    steps = sorted(
        (abs(stride), count) for count, stride in zip(shape, strides, strict=True) if count > 1 and stride != 0
    )
    run = itemsize
    while steps and steps[0][0] <= run:
        stride, count = steps.pop(0)
        run += stride * (count - 1)
    if not steps:
        return [Extent(address, run)]
    merged = [steps[0]]
    for stride, count in steps[1:]:
        inner, rows = merged[-1]
        if stride == inner * rows:  # this dimension goes on where the one inside of it ends
            merged[-1] = inner, rows * count
        else:
            merged.append((stride, count))
    if math.prod(count for _, count in merged) > _MOST * max(count for _, count in merged):
        return [Extent(address, run + sum(step * (count - 1) for step, count in merged), exact=False)]
    stride, rows = merged.pop(max(range(len(merged)), key=lambda index: merged[index][1]))
    offsets = itertools.product(*(range(0, step * count, step) for step, count in reversed(merged)))
    return [Extent(address + sum(offset), run, stride, rows) for offset in offsets]


def emit_extents(kind: Kind, parts: Sequence[Extent], mode: AccessFlag, **fields: int | str) -> None:
    """Record that these bytes are accessed: ``Kind.ACCESS`` or ``Kind.HOST_ACCESS``, with what else it takes."""
    for part in parts:
        strided = {"aux0": part.stride, "aux1": part.rows} if part.rows > 1 else {}
        flags = mode if part.exact else mode | AccessFlag.INEXACT
        hooks.emit(kind, address=part.address, size=part.size, flags=flags, **strided, **fields)  # type: ignore[arg-type]
