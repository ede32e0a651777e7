"""Rows go to a file a piece at a time: what a piece needs as Python objects does not grow with the recording."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.progress import step
from cudatool.trace.lifetimes import Ints

__all__ = ["pieces", "rows", "signed"]

_ROWS: Final = 8192
"""Rows of a piece."""


def pieces(count: int, what: str) -> Iterator[slice]:
    """Yield where each piece of `count` rows lies; shows how far that is while each is written."""
    with step(what, total=count) as shown:
        for begin in range(0, count, _ROWS):
            shown.update(begin)
            yield slice(begin, min(begin + _ROWS, count))


def rows(*columns: npt.NDArray[Any] | list[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of columns of one piece, as Python's numbers."""
    return zip(*(c if isinstance(c, list) else c.tolist() for c in columns), strict=True)


def signed(column: npt.NDArray[Any]) -> Ints:
    """Return numbers of 64 bits without a sign as if they had one."""
    return column.astype(np.int64)
