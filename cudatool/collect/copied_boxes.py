"""What copies of rows and boxes touch, from the structures that their calls take.

``CUDA_MEMCPY2D`` and ``CUDA_MEMCPY3D`` (Driver API, ``cuMemcpy2D``, ``cuMemcpy3D``): a box of `WidthInBytes`, `Height`
and `Depth` begins at a position in the source and at one in the destination, each of which has a distance between rows
(`pitch`) and a number of rows in a slice.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

__all__ = ["MEMCPY_2D", "MEMCPY_3D", "BoxSide", "Rows", "copied_box", "rows_of_box"]

MEMCPY_2D: Final = struct.Struct("QQi4xQQQQ QQi4xQQQQ QQ")
"""``CUDA_MEMCPY2D``."""
MEMCPY_3D: Final = struct.Struct("QQQQi4xQQQQQQ QQQQi4xQQQQQQ QQQ")
"""``CUDA_MEMCPY3D``, and ``CUDA_MEMCPY3D_PEER``, which has a context in the reserved place."""
_HOST, _ARRAY, _UNIFIED = 1, 3, 4  # CUmemorytype


class Rows(NamedTuple):
    """Equal runs of bytes at equal distances.

    Attributes
    ----------
    address, size
        Of the first run, in bytes.
    stride
        Bytes from the beginning of one run to that of the next; 0 if there is only one.
    number
        How many runs; 0 if there is only one.
    """

    address: int
    size: int
    stride: int = 0
    number: int = 0


class BoxSide(NamedTuple):
    """The source or the destination.

    Attributes
    ----------
    is_host, is_array, is_unified
        What it is in, as the call says; the device's memory if none is set.
    place
        The address, or the array's handle.
    rows
        What is touched; of an array nothing.
    """

    is_host: bool
    is_array: bool
    is_unified: bool
    place: int
    rows: tuple[Rows, ...]


def copied_box(structure: bytes) -> tuple[BoxSide, BoxSide, int] | None:
    """Return source, destination, and the bytes that are copied; None if it is no such structure."""
    if len(structure) == MEMCPY_2D.size:
        values = MEMCPY_2D.unpack(structure)
        sides, extent = (_side_2d(*values[:7]), _side_2d(*values[7:14])), (*values[14:], 1)
    elif len(structure) == MEMCPY_3D.size:
        values = MEMCPY_3D.unpack(structure)
        sides, extent = (_side_3d(*values[:11]), _side_3d(*values[11:22])), values[22:]
    else:
        return None
    source, target = (_rows_of_side(side, extent) for side in sides)
    return source, target, extent[0] * extent[1] * extent[2]


class _Side(NamedTuple):
    position: tuple[int, int, int]
    kind: int
    places: tuple[int, int, int]
    pitch: int
    height: int


def _side_2d(x: int, y: int, kind: int, host: int, device: int, array: int, pitch: int) -> _Side:
    return _Side((x, y, 0), kind, (host, device, array), pitch, 0)


def _side_3d(
    x: int, y: int, z: int, _level: int, kind: int, host: int, device: int, array: int, _: int, pitch: int, height: int
) -> _Side:
    return _Side((x, y, z), kind, (host, device, array), pitch, height)


def _rows_of_side(side: _Side, extent: tuple[int, int, int]) -> BoxSide:
    (x, y, z), (host, device, array), pitch = side.position, side.places, side.pitch
    if side.kind == _ARRAY:
        return BoxSide(False, True, False, array, ())
    place, slice_ = host if side.kind == _HOST else device, pitch * side.height
    rows = rows_of_box(place + z * slice_ + y * pitch + x, extent, pitch, slice_)
    return BoxSide(side.kind == _HOST, False, side.kind == _UNIFIED, place, tuple(rows))


def rows_of_box(first: int, extent: tuple[int, int, int], pitch: int, slice_: int) -> list[Rows]:
    """Return the bytes of a box, in as few records as they fit into.

    Parameters
    ----------
    first
        Address of its first byte.
    extent
        Bytes of a row, rows, and slices.
    pitch, slice_
        Bytes from one row to the next, and from one slice to the next.
    """
    width, height, depth = extent
    if not width * height * depth:
        return []
    if height == 1:  # slices are rows
        height, depth, pitch = depth, 1, slice_
    elif pitch * height == slice_:
        height, depth = height * depth, 1
    is_run = height == 1 or pitch == width
    row = Rows(first, width * height) if is_run else Rows(first, width, pitch, height)
    return [row._replace(address=first + at * slice_) for at in range(depth)]
