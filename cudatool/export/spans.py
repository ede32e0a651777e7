"""From when to when memory was held, for what is written in other formats.

The rules are those of :mod:`cudatool.analyze`: a birth ends with the first end of its address that comes before the
address is born again; where no end was recorded, with the next birth; an end without a birth is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import Kind
from cudatool.trace.mapped import mapped_runs
from cudatool.trace.model import Trace

__all__ = ["Changes", "Span", "block_spans", "memory_changes", "segment_spans"]

_BORN, _FREED, _ENDED = 1, 2, 4
_DRIVERS: Final = {Kind.MEM_ALLOC: _BORN, Kind.MEM_FREE: _FREED | _ENDED}
_BLOCKS: Final = {
    Kind.BLOCK_ALLOC: _BORN,
    Kind.BLOCK_FREE_REQUESTED: _FREED,
    Kind.BLOCK_FREE_COMPLETED: _ENDED,
    **_DRIVERS,
}
_SEGMENTS: Final = {Kind.SEGMENT_ALLOC: _BORN, Kind.SEGMENT_FREE: _FREED | _ENDED, **_DRIVERS}

_Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Span:
    """One block, segment or run of mapped pages.

    Attributes
    ----------
    address, size
        In bytes.
    start, freed, end
        Records: where it was allocated, its free requested and completed. None where that never came.
    """

    address: int
    size: int
    start: int
    freed: int | None = None
    end: int | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """Columns: what changes at a record, in bytes; by record, of all devices."""

    index: _Ints
    device: _Ints
    allocated: _Ints
    active: _Ints
    reserved: _Ints


def block_spans(trace: Trace) -> list[Span]:
    """Return the blocks of the caching allocator, and what a program took from the driver, by allocation."""
    return _paired(trace, _BLOCKS)


def segment_spans(trace: Trace) -> list[Span]:
    """Return what was reserved: segments, runs of mapped pages, and what a program took from the driver."""
    return sorted(_paired(trace, _SEGMENTS) + _mapped(trace), key=lambda span: span.start)


def memory_changes(trace: Trace) -> Changes:
    """Return by how many bytes each record changed what is allocated, active and reserved."""
    blocks, segments = block_spans(trace), segment_spans(trace)
    rows: list[tuple[int, int, int, int]] = []
    for span in blocks:
        rows.append((span.start, span.size, span.size, 0))
        if span.freed is not None:
            rows.append((span.freed, -span.size, 0, 0))
        if span.end is not None:
            rows.append((span.end, 0, -span.size, 0))
    for span in segments:
        rows.append((span.start, 0, 0, span.size))
        if span.end is not None:
            rows.append((span.end, 0, 0, -span.size))
    index, allocated, active, reserved = np.array(sorted(rows), np.int64).reshape(-1, 4).T
    return Changes(index, trace.records["device"][index].astype(np.int64), allocated, active, reserved)


def _paired(trace: Trace, roles: dict[Kind, int]) -> list[Span]:
    index = np.flatnonzero(np.isin(trace.records["kind"], list(roles)))
    columns = _columns(trace, index)
    latest: dict[tuple[int, int], Span] = {}
    spans = []
    for i, kind, device, address, size in zip(index.tolist(), *columns, strict=True):
        role, span = roles[kind], latest.get((device, address))
        if role == _BORN:
            if span is not None and span.end is None:
                span.end = i
            latest[device, address] = new = Span(address, size, i)
            spans.append(new)
        elif span is not None:
            if role & _FREED and span.freed is None:
                span.freed = i
            if role & _ENDED and span.end is None:
                span.end = i
    for span in spans:
        if span.freed is None:
            span.freed = span.end
        elif span.end is not None:
            span.end = max(span.freed, span.end)
    return spans


def _mapped(trace: Trace) -> list[Span]:
    """Return the runs of mapped pages."""
    never = len(trace.records)
    spans = []
    for start, address, size, end in mapped_runs(trace.records):
        gone = None if end == never else end
        spans.append(Span(address, size, start, gone, gone))
    return spans


def _columns(trace: Trace, index: _Ints) -> list[list[int]]:
    names = ("kind", "device", "address", "size")
    return [trace.records[name][index].astype(np.int64).tolist() for name in names]
