"""The rows of the log that :file:`_cupti.c` writes: of a GPU's driver, and of NVTX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import join_records

__all__ = ["HOW", "LEFT_OUT", "ROW", "WORK", "Row", "What", "joined"]

_MANY: Final = 1024  # records

ROW = np.dtype(
    [
        ("time", "<u8"),
        ("what", "<u2"),
        ("result", "<u2"),
        ("thread", "<u4"),
        ("correlation", "<u4"),
        ("stack", "<u4"),
        ("device", "<u4"),
        ("context", "<u4"),
        ("words", "<u8", 8),
    ]
)


HOW = np.dtype(
    [
        ("kind", "u1"),
        *((name, "i1") for name in ("stream", "event", "flags")),
        *((name, "u1") for name in ("asks", "per_thread", "is_copy", "item", "is_graph", "copy_flags")),
        ("name", "<u4"),
    ]
)
"""How a kind of row becomes a record by itself: see the structure of this name in :file:`_log_rows.c`."""

LEFT_OUT: Final = 255
"""A `kind` of :data:`HOW`: such rows become nothing."""


class What(IntEnum):
    """Kinds of rows that are not driver calls. The words of each are named in :file:`_cupti.c`."""

    KERNEL = 0xFF01
    COPY = 0xFF02
    FILL = 0xFF03
    GRAPH = 0xFF04
    CONTEXT = 0xFF05
    USE = 0xFF06
    OPERATION = 0xFF07
    LAUNCH = 0xFF08
    FAILURE = 0xFF09
    BLOCK = 0xFF10
    POOL_ALLOC = 0xFF11
    POOL_FREE = 0xFF12
    RANGE = 0xFF13


WORK = {What.COPY: "memcpy", What.FILL: "memset", What.GRAPH: "graph"}
"""What ran that has no name of its own; :file:`_log_rows.c` gives it that of its place here."""


class Row(NamedTuple):
    time: int
    what: int
    result: int
    thread: int
    correlation: int
    stack: int
    device: int
    context: int
    words: tuple[int, ...]


def joined(parts: Iterable[npt.NDArray[np.void]]) -> Iterator[npt.NDArray[np.void]]:
    """Join neighbors, but for those that would take longer to copy than to send by themselves."""
    for is_long, run in groupby(parts, lambda part: len(part) >= _MANY):
        if is_long:
            yield from run
        else:
            yield join_records(run)
