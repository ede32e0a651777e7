"""What _rows.c offers: passes over rows, without the interpreter's lock. ValueError says that arguments do not fit."""

from typing import Any

import numpy.typing as npt

_Bytes = bytes | memoryview | npt.NDArray[Any]

def distinct(rows: _Bytes, size: int, columns: tuple[tuple[int, int], ...], /) -> tuple[bytes, ...]:
    """Return the values of each column, as uint32 in the order of their first rows. A row has `size` bytes.

    A column's values have so many bytes, 2 or 4, from an offset on: `columns` has the offsets, and these numbers.
    """

def write(
    rows: _Bytes, size: int, descriptor: int, at: int, replaced: tuple[tuple[int, int, _Bytes, _Bytes], ...], /
) -> None:
    """Write rows to a place of a file, with the values of some columns replaced.

    Of each column `replaced` has the offset, the number of bytes, the values, and what replaces each (uint32). OSError
    says that the file system does not take them.
    """
