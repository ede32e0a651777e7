"""Compression of many runs of bytes into few records: strided rows and bit masks.

A kernel that reads a column, or writes wherever a condition holds, touches thousands of short runs. The records say
the same set of bytes, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cudatool.trace.distinct import distinct
from cudatool.trace.events import AccessFlag

__all__ = ["MASK_BITS", "ByteSet", "compress", "rows_of"]

MASK_BITS = 128
"""Elements that one mask is about: 64 bits in ``aux0``, 64 more in ``aux1``."""

ByteSet = tuple[int, int, int, int, int]
"""``(address, size, flags, aux0, aux1)`` as of an ACCESS record."""

_FEW = 16  # so few runs are not compressed
_ROWS = 8  # from so many equal rows on they are recorded as rows
_GRAIN = 16  # largest element of a mask, bytes

_Column = npt.NDArray[np.int64]


def compress(runs: Sequence[tuple[int, int, int]], *, of_boxes: bool = False) -> list[ByteSet]:
    """Return the same bytes as `runs`, ``(address, size, flags)`` in ascending order, in fewer pieces.

    The runs `of_boxes` are the rows of copies and fills: they are kept as rows, even if there are few.
    """
    if len(runs) <= (2 if of_boxes else _FEW):
        return [(address, size, flags, 0, 0) for address, size, flags in runs]
    address, size, flags = np.array(runs, np.int64).T
    sets: list[ByteSet] = []
    for mode in distinct(flags).tolist():
        own = flags == mode
        starts, sizes = address[own], size[own]
        rows, single = _equal_rows(starts, sizes, mode, least=2 if of_boxes else _ROWS)
        sets += rows
        sets += _masks(starts[single], sizes[single], mode)
    return sets


def rows_of(runs: Sequence[tuple[int, int]], flags: int, most: int) -> list[ByteSet]:
    """Return `runs`, address and size in ascending order, as at most `most` rows and single runs; the rest is left out.

    Only single runs are left out.
    """
    if not runs:
        return []
    start, size = np.array(runs, np.int64).T
    sets, single = _equal_rows(start, size, flags, least=_ROWS)
    sets += [(a, n, flags, 0, 0) for a, n in zip(start[single].tolist(), size[single].tolist(), strict=True)]
    return sets[:most]


def _equal_rows(start: _Column, size: _Column, mode: int, *, least: int) -> tuple[list[ByteSet], npt.NDArray[np.bool_]]:
    """Return series of at least `least` runs of one size at one distance, and which runs are in none."""
    single = np.ones(len(start), bool)
    distance = np.diff(start)
    distance[size[1:] != size[:-1]] = 0  # no link between runs of different sizes
    edges = np.concatenate(([0], np.flatnonzero(np.diff(distance)) + 1, [len(distance)]))
    sets: list[ByteSet] = []
    taken = 0  # runs before this one are in a series
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        first, count = max(low, taken), high + 1 - max(low, taken)
        if count >= least and distance[low]:
            taken = high + 1
            single[first:taken] = False
            sets.append((int(start[first]), int(size[first]), mode, int(distance[low]), count))
    return sets, single


def _masks(start: _Column, size: _Column, mode: int) -> list[ByteSet]:
    """Return runs as masks wherever several of them are near each other, else as they are."""
    if len(start) <= _FEW:
        return [(a, n, mode, 0, 0) for a, n in zip(start.tolist(), size.tolist(), strict=True)]
    bits = int(np.bitwise_or.reduce(start | size)) | _GRAIN
    grain = bits & -bits
    window = grain * MASK_BITS
    # A run that shares its only window with others becomes a part of that window's mask.
    at, last = start // window, (start + size - 1) // window
    inside = at == last
    windows, place, count = np.unique(at[inside], return_inverse=True, return_counts=True)
    masked = inside.copy()
    masked[inside] = count[place] > 1
    sets = [(a, n, mode, 0, 0) for a, n in zip(start[~masked].tolist(), size[~masked].tolist(), strict=True)]
    windows, place = np.unique(at[masked], return_inverse=True)
    elements = size[masked] // grain
    first = start[masked] // grain - windows[place] * MASK_BITS
    position = np.repeat(first - np.cumsum(elements) + elements, elements) + np.arange(elements.sum())
    touched = np.zeros((len(windows), MASK_BITS), bool)
    touched[np.repeat(place, elements), position] = True
    words = np.packbits(touched, axis=1, bitorder="little").view("<u8")
    how = mode | AccessFlag.MASK
    for base, (low, high) in zip((windows * window).tolist(), words.tolist(), strict=True):
        sets.append((base, grain, how, low, high))
    return sets
