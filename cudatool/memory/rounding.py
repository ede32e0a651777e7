"""Sizes of blocks for whole columns of requests. Apart from :mod:`blocks`, since an allocator needs no NumPy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudatool.memory.blocks import round_size
from cudatool.memory.settings import Settings
from cudatool.trace.distinct import distinct

__all__ = ["round_sizes"]


def round_sizes(requested: npt.NDArray[np.int64], settings: Settings) -> npt.NDArray[np.int64]:
    """Return the size of the block that serves each request, before any remainder that is not split off."""
    sizes = distinct(requested)  # a program asks for the same again and again
    rounded = np.array([round_size(size, settings) for size in sizes.tolist()], np.int64)
    # Unlike the inverse of unique(), this takes no three more columns.
    result: npt.NDArray[np.int64] = rounded[np.searchsorted(sizes, requested)]
    return result
