"""What _rows.c offers: passes over rows, without the interpreter's lock. ValueError says that arguments do not fit."""

from typing import Any

import numpy.typing as npt

_Bytes = bytes | memoryview | npt.NDArray[Any]

def distinct(rows: _Bytes, size: int, offset: int, width: int, /) -> bytes:
    """Return the values of a column, as uint32 in the order of their first rows. A row has `size` bytes.

    The column's values have `width` bytes, 2 or 4, from `offset` on.
    """

def copy(rows: _Bytes, out: memoryview, size: int, replaced: tuple[tuple[int, int, _Bytes, _Bytes], ...], /) -> None:
    """Copy rows, with the values of some columns replaced: offset, width, values, and what replaces each (uint32)."""
