"""What was in memory from when to when: a row for each block and for each segment; and how much it was at each moment.

A birth ends with the first end of its address that comes before the address is born again; where no end was recorded,
with the next birth. What is freed only after its end was freed at its end: the state of a moment does not depend on
events after it. An end without a birth is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from cudatool.trace import _sweep
from cudatool.trace.distinct import distinct
from cudatool.trace.events import SEGMENT_GAINS, Kind
from cudatool.trace.mapped import mapped_runs
from cudatool.trace.model import Trace, recorded_from
from cudatool.trace.pools import pooled

__all__ = [
    "Ints",
    "Lifetimes",
    "Mask",
    "Timeline",
    "blocks",
    "distinct_pairs",
    "freed_while_recorded",
    "held_after",
    "joined",
    "peaks",
    "rows_from",
    "segments",
    "timeline",
]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Columns, one row for each block or segment, in the order of allocation.

    Attributes
    ----------
    address, size, requested
        In bytes. `size` is what is occupied, `requested` what the program asked for.
    start, freed, end
        Indices of the trace's records: allocated, free requested, free completed. What is never freed has the
        number of records. Between `freed` and `end` a block waits for streams that may still use it.
    device, stream, pool, stack
        As in the records.
    small, expandable
        For segments: of the small pool; mapped piece by piece.
    library
        Of a library's own memory pool, such as CuPy's: index of its name; 0 for all others.
    """

    address: Ints
    size: Ints
    requested: Ints
    start: Ints
    freed: Ints
    end: Ints
    device: Ints
    stream: Ints
    pool: Ints
    stack: Ints
    small: Mask
    expandable: Mask
    library: Ints

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, rows: Mask | Ints | slice) -> Lifetimes:
        if isinstance(rows, np.ndarray) and rows.dtype == np.bool_ and rows.all():
            return self  # nothing writes into the columns, of which there may be gigabytes
        return Lifetimes(*(getattr(self, f.name)[rows] for f in fields(self)))

    def of_device(self, device: int) -> Lifetimes:
        """Return the rows of one device."""
        return self[self.device == device]

    def at(self, index: int) -> Lifetimes:
        """Return the rows that occupy memory right after record `index`."""
        return self[(self.start <= index) & (index < self.end)]


def distinct_pairs(first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Return the distinct rows of two columns, in order, and the number of each row's; as np.unique() with an axis.

    That would sort rows of bytes, which takes twenty times as long. `first` is from 0 to below 2**32.
    """
    values = distinct(second)
    pair = first * len(values)
    pair += np.searchsorted(values, second)  # unlike the inverse of unique(), without three more columns
    pairs = distinct(pair)
    rows = np.stack([pairs // max(len(values), 1), values[pairs % max(len(values), 1)]], axis=1)
    return rows, np.searchsorted(pairs, pair)


def held_after(rows: Lifetimes, end: Ints) -> Ints:
    """Return the bytes in `rows` right after each was allocated, if they last until `end`.

    At one record, what ends there goes first.
    """
    return _held(rows.size, rows.start, end)


def peaks(rows: Lifetimes, group: Ints, count: int) -> Ints:
    """Return the most bytes that each of `count` groups had at once; `group` has the group of each row.

    At one record, what ends there goes first.
    """
    most = np.zeros(count, np.int64)
    if len(rows):
        order = np.argsort(group, kind="stable")
        # One sweep for all groups: the time of each begins after the end of the one before. There may be millions of
        # rows: no column stays longer than it is needed.
        begin = group[order].astype(np.int64)
        first = np.flatnonzero(np.diff(begin, prepend=-1))
        found = begin[first]
        begin *= int(rows.end.max()) + 1
        start = rows.start[order]
        start += begin
        begin += rows.end[order]
        size = rows.size[order]
        del order
        most[found] = np.maximum.reduceat(_held(size, start, begin), first)
    return np.maximum(most, 0)


def _held(size: Ints, start: Ints, end: Ints) -> Ints:
    order = np.argsort(end)
    gone = np.zeros(len(end) + 1, np.int64)
    np.cumsum(size[order], out=gone[1:])
    ended = end[order]
    del order  # a column of millions of rows, as the others are
    before = np.searchsorted(ended, start, side="right")
    del ended
    np.take(gone, before, out=before, mode="clip")  # all are in range; the mode "raise" makes a copy
    del gone
    held: Ints = np.cumsum(size)
    held -= before
    return held


_BORN: Final = 1
_FREED: Final = 2
_ENDED: Final = 4


def blocks(trace: Trace) -> Lifetimes:
    """Return every block that an allocator handed out, and every allocation a program took from the driver.

    Allocators are the caching one and libraries' pools (:mod:`cudatool.trace.pools`). What these took from the driver
    are segments, and no blocks.
    """
    roles = {
        Kind.BLOCK_ALLOC: _BORN,
        Kind.BLOCK_FREE_REQUESTED: _FREED,
        Kind.BLOCK_FREE_COMPLETED: _ENDED,
        Kind.MEM_ALLOC: _BORN,
        Kind.MEM_FREE: _FREED | _ENDED,
    }
    own, pools = _paired(trace, roles), pooled(trace.records)
    if pools is None:
        return own
    own = own[~np.isin(own.start, list(pools.chunks))]
    size = trace.records["size"][pools.start].astype(np.int64)
    return joined(own, rows_from(trace, pools.start, size, pools.end, pools.end))


def segments(trace: Trace) -> Lifetimes:
    """Return what was reserved: the caching allocator's segments and allocations a program took from the driver.

    An expandable segment has a row for every run of pages that was mapped at once and unmapped at once.
    """
    whole = _paired(
        trace,
        {
            Kind.SEGMENT_ALLOC: _BORN,
            Kind.SEGMENT_FREE: _FREED | _ENDED,
            Kind.MEM_ALLOC: _BORN,
            Kind.MEM_FREE: _FREED | _ENDED,
        },
    )
    pools = pooled(trace.records)
    if pools is not None:
        library = np.zeros(len(whole), np.int64)
        chunks = list(pools.chunks)
        library[np.searchsorted(whole.start, chunks)] = [pools.chunks[chunk] for chunk in chunks]
        whole = replace(whole, library=library)
    runs = mapped_runs(trace.records)
    if not runs:
        return whole
    start, address, size, end = np.array(runs, np.int64).T
    return joined(whole, rows_from(trace, start, size, end, end, address))


def joined(one: Lifetimes, other: Lifetimes) -> Lifetimes:
    """Return the rows of both, in the order of allocation."""
    both = Lifetimes(*(np.concatenate([getattr(one, f.name), getattr(other, f.name)]) for f in fields(one)))
    return both[np.argsort(both.start, kind="stable")]


def _paired(trace: Trace, roles: dict[Kind, int]) -> Lifetimes:
    """Join each birth with the first free, and the first end, of its address that come before its next birth."""
    records, count = trace.records, len(trace.records)
    role_of_kind = np.zeros(256, np.uint8)
    for kind, role in roles.items():
        role_of_kind[kind] = role
    role_of = role_of_kind[records["kind"]]
    found = np.flatnonzero(role_of)
    role_of = role_of[found]
    start, freed, end = np.empty((3, int(np.count_nonzero(role_of & _BORN))), np.int64)
    _sweep.pair(role_of, records["address"][found], records["device"][found], start, freed, end)
    start = found[start]
    for column in (freed, end):  # the number of all events stands for what never came
        column[:] = np.where(column < len(found), found.take(column, mode="clip"), count) if len(found) else count
    del found, role_of
    return rows_from(trace, start, records["size"][start].astype(np.int64), freed, end)


def rows_from(trace: Trace, start: Ints, size: Ints, freed: Ints, end: Ints, address: Ints | None = None) -> Lifetimes:
    """Return lifetimes whose other columns are those of the record that begins them."""

    def column(name: str) -> Ints:
        result: Ints = trace.records[name][start].astype(np.int64)
        return result

    def mostly_same(name: str) -> Ints:
        """Return a column that holds its value once where all rows have the same: most recordings have one device."""
        values = column(name)
        if len(values) and values.min() == values.max():
            return np.broadcast_to(np.int64(values[0]), len(values))
        return values

    kind = trace.records["kind"][start]
    segment = np.isin(kind, SEGMENT_GAINS)
    is_pooled = kind == Kind.POOL_ALLOC
    return Lifetimes(
        address=column("address") if address is None else address,
        size=size,
        requested=np.where((kind == Kind.BLOCK_ALLOC) | is_pooled, column("aux0"), size),
        start=start,
        freed=freed,
        end=end,
        device=mostly_same("device"),
        stream=mostly_same("stream"),
        pool=mostly_same("aux1"),
        stack=column("stack"),
        small=segment & (trace.records["flags"][start] == 1),
        expandable=kind == Kind.SEGMENT_MAP,
        library=np.where(is_pooled, column("name"), 0) if is_pooled.any() else np.broadcast_to(np.int64(0), len(start)),
    )


def freed_while_recorded(trace: Trace, blocks: Lifetimes) -> Ints:
    """Return `freed` of blocks, but `start` for those that waited for a stream already when the recording began.

    The records of such a block allocate and free it one after the other, in front of the recording: the program did not
    hold it together with the others there.
    """
    freed = blocks.freed
    for device in [one for one, count in trace.header.get("prior_records", {}).items() if count]:
        waited = (freed < recorded_from(trace, device)) & (freed < blocks.end) & (blocks.device == device)
        freed = np.where(waited, blocks.start, freed)
    return freed


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes right after each event that changed them; all columns have the same length.

    Attributes
    ----------
    index, time
        The event's record, and its time in ns.
    allocated
        In blocks that the program holds.
    active
        Also in blocks that it gave back and a stream may still use.
    reserved
        Taken from the driver; all 0 where the recording does not say.
    knows_reserved
        Whether it says: the log of an RMM resource has no segments.
    """

    index: Ints
    time: Ints
    allocated: Ints
    active: Ints
    reserved: Ints
    knows_reserved: bool

    def peak(self) -> int:
        """Return the row of the first moment with the most bytes active, -1 if nothing ever was."""
        return int(np.argmax(self.active)) if len(self.index) else -1


def timeline(trace: Trace, blocks: Lifetimes, segments: Lifetimes) -> Timeline:
    """Return the bytes in `blocks` and `segments` over time."""
    count = len(trace.records)
    spans = [(blocks, freed_while_recorded(trace, blocks)), (blocks, blocks.end), (segments, segments.end)]
    touched = np.zeros(count + 1, np.bool_)
    touched[blocks.freed] = True
    for rows, end in spans:
        touched[rows.start] = touched[end] = True
    index = np.flatnonzero(touched[:count])
    # Where no record in between is left out, columns are views: a recording may have millions of events.
    unbroken = len(index) and int(index[-1] - index[0]) == len(index) - 1
    chosen = slice(int(index[0]), int(index[-1]) + 1) if unbroken else index

    def level(rows: Lifetimes, end: Ints) -> Ints:
        delta = np.zeros(count + 1, np.int64)
        np.add.at(delta, rows.start, rows.size)
        np.subtract.at(delta, end, rows.size)
        np.cumsum(delta, out=delta)
        result: Ints = delta[chosen]
        return result

    allocated, active, reserved = (level(rows, end) for rows, end in spans)
    # Every block is in a segment: where there are blocks alone, segments were not recorded.
    knows_reserved = reserved.any() or not (active.any() or trace.header.get("requests_to") == "rmm")
    return Timeline(index, trace.records["time"][chosen], allocated, active, reserved, bool(knows_reserved))
