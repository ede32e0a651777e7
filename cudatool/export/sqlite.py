"""Traces as SQLite databases, for questions that no report answers.

Sizes are bytes, times are ns since the first event; both are NULL where they are not known. A record's number is its
place in the trace, from 0. Addresses, and numbers that do not fit SQLite's 64 bits with a sign, are as if they were
signed.

::

    meta         key, value                         what the recording says of itself; values in JSON
    events       id, time, kind, device, flags, thread, stream, correlation, stack, name, address, size, aux0, aux1
                                                    every record; kinds.fields says what the fields of a kind mean
    kinds        id, name, fields
    allocations  id, device, pool, stream, address, size, requested, alloc_time, free_requested_time,
                 free_completed_time, stack, alloc_event, free_requested_event, free_completed_event, library
                                                    a row for each block that was handed out; the library (in names)
                                                    whose own pool it is in, NULL for a caching allocator's
    segments     id, device, pool, stream, address, size, small, expandable, alloc_time, free_time, stack,
                 alloc_event, free_event, library   a row for each segment, or run of mapped pages, or chunk of a
                                                    library's pool
    streams      id, device, handle, flags, name
    threads      id, name
    names        id, name
    frames       id, file, function, line, rank, fx_node
                                                    rank 0 the user's own code, 1 a library's, 2 C++, 3 the allocator's
                                                    C++; the node of an FX graph where torch.compile made the code
    stacks       id, depth, frame                   depth 0 is the innermost frame
    compile_contexts  event, context                of the events that PyTorch says a compilation's id of, such as 0/0
    peaks        device, event, active              the first event after which the most bytes were active

    live_at_peak the allocations of each device that were active then
    by_call_site device, stack, file, function, line, allocations, bytes, peak_bytes
                                                    by stack, with its innermost Python frame (outside of libraries
                                                    where there is one); peak_bytes is its part of live_at_peak

For example, who held the memory at the peak::

    SELECT file, line, function, peak_bytes FROM by_call_site ORDER BY peak_bytes DESC LIMIT 10;

and what was allocated while one kernel was being launched again and again::

    SELECT a.* FROM allocations a JOIN events e ON a.alloc_event > e.id JOIN names n ON n.id = e.name
    WHERE n.name = 'my_kernel' AND a.alloc_event < e.id + 10;
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudatool.errors import OutputError
from cudatool.export.pieces import pieces, rows, signed
from cudatool.files import replacing
from cudatool.progress import step
from cudatool.trace.distinct import distinct
from cudatool.trace.events import FIELDS, RECORD, Kind
from cudatool.trace.frames import frame_rank
from cudatool.trace.lifetimes import Ints, Lifetimes, blocks, segments, timeline
from cudatool.trace.model import Trace
from cudatool.trace.streams import stream_names, thread_names

__all__ = ["write"]

_COLUMNS: Final = tuple(name for name in RECORD.names or () if name != "reserved")
_AT_ONCE: Final = 8  # rows for each run of a statement: three fifths of the time of a run for each
_TABLES: Final = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE kinds (id INTEGER PRIMARY KEY, name TEXT, fields TEXT);
CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE threads (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE frames (id INTEGER PRIMARY KEY, file TEXT, function TEXT, line INTEGER, rank INTEGER, fx_node TEXT);
CREATE TABLE stacks (id INTEGER, depth INTEGER, frame INTEGER REFERENCES frames, PRIMARY KEY (id, depth)) WITHOUT ROWID;
CREATE TABLE streams (id INTEGER PRIMARY KEY, device INTEGER, handle INTEGER, flags INTEGER, name TEXT);
CREATE TABLE events (id INTEGER PRIMARY KEY, {", ".join(f"{name} INTEGER" for name in _COLUMNS)});
CREATE TABLE allocations (
    id INTEGER PRIMARY KEY, device INTEGER, pool INTEGER, stream INTEGER, address INTEGER, size INTEGER,
    requested INTEGER, alloc_time INTEGER, free_requested_time INTEGER, free_completed_time INTEGER, stack INTEGER,
    alloc_event INTEGER REFERENCES events, free_requested_event INTEGER REFERENCES events,
    free_completed_event INTEGER REFERENCES events, library INTEGER REFERENCES names
);
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, device INTEGER, pool INTEGER, stream INTEGER, address INTEGER, size INTEGER,
    small INTEGER, expandable INTEGER, alloc_time INTEGER, free_time INTEGER, stack INTEGER,
    alloc_event INTEGER REFERENCES events, free_event INTEGER REFERENCES events, library INTEGER REFERENCES names
);
CREATE TABLE compile_contexts (event INTEGER PRIMARY KEY REFERENCES events, context TEXT);
CREATE TABLE peaks (device INTEGER PRIMARY KEY, event INTEGER REFERENCES events, active INTEGER);
"""
_VIEWS: Final = """
CREATE INDEX events_by_kind ON events (kind);
CREATE INDEX events_by_correlation ON events (correlation) WHERE correlation > 0;
CREATE INDEX allocations_by_stack ON allocations (stack);
CREATE VIEW live_at_peak AS
    SELECT a.* FROM allocations a JOIN peaks p ON p.device = a.device
    WHERE a.alloc_event <= p.event AND (a.free_completed_event IS NULL OR a.free_completed_event > p.event);
CREATE VIEW by_call_site AS
    SELECT a.device, a.stack, f.file, f.function, f.line, count(*) AS allocations, sum(a.size) AS bytes,
        sum(CASE WHEN a.alloc_event <= p.event AND (a.free_completed_event IS NULL OR a.free_completed_event > p.event)
            THEN a.size ELSE 0 END) AS peak_bytes
    FROM allocations a
    LEFT JOIN peaks p ON p.device = a.device
    LEFT JOIN stacks s ON s.id = a.stack AND s.depth = (
        SELECT depth FROM stacks t JOIN frames g ON g.id = t.frame WHERE t.id = a.stack
        ORDER BY g.rank, depth
        LIMIT 1)
    LEFT JOIN frames f ON f.id = s.frame
    GROUP BY a.device, a.stack;
"""


def write(path: str | Path, trace: Trace) -> None:
    """Write a trace as an SQLite database; the module says what is in it.

    Parameters
    ----------
    path
        Written whole or not at all; replaced if it exists.
    trace
        Any trace.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    try:
        with replacing(path) as name, closing(sqlite3.connect(name, isolation_level=None)) as database:
            # No other process sees the file before it is complete: there is nothing to protect from a crash.
            database.execute("PRAGMA journal_mode = OFF")
            database.execute("PRAGMA synchronous = OFF")
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("BEGIN")
            what = f"writing {path}"
            with step(what):
                _run(database, _TABLES, f"{what}: tables")
                _fill(database, trace, what)
                _run(database, f"{_VIEWS}; COMMIT", f"{what}: indices")
    except sqlite3.Error as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def _run(database: sqlite3.Connection, script: str, what: str) -> None:
    statements = script.split(";")  # executescript() would end the transaction
    with step(what, total=len(statements)) as shown:
        for done, statement in enumerate(statements):
            shown.update(done)
            database.execute(statement)


def _fill(database: sqlite3.Connection, trace: Trace, what: str) -> None:
    def insert(table: str, values: Iterable[tuple[Any, ...]]) -> None:
        width = len(database.execute(f"PRAGMA table_info({table})").fetchall())
        database.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * width)})", values)

    facts = {**trace.header, "notes": trace.notes, "source": trace.source}
    insert("meta", ((_text(key), json.dumps(value, default=str)) for key, value in facts.items()))
    insert("kinds", ((int(kind), kind.name, FIELDS.get(kind, "")) for kind in Kind))
    insert("names", ((i, _text(name)) for i, name in enumerate(trace.names)))
    of_thread, of_stream = thread_names(trace), stream_names(trace)
    insert("threads", ((i, _text(of_thread[i])) for i in range(len(trace.threads))))
    insert("frames", _frames(trace))
    insert("stacks", ((i, depth, f) for i, frames in enumerate(trace.stacks) for depth, f in enumerate(frames)))
    created = trace.of_kind(Kind.STREAM_CREATE)
    streams = rows(*(signed(created[name]) for name in ("stream", "device", "address", "flags")))
    insert("streams", ((*row, _text(of_stream[row[0]])) for row in streams))
    clock, lived, reserved = _Clock(trace.records), blocks(trace), segments(trace)
    _insert_numbers(database, "events", _events(trace.records, clock, f"{what}: events"))
    _insert_numbers(database, "allocations", _allocations(lived, clock, f"{what}: allocations"))
    _insert_numbers(database, "segments", _segments(reserved, clock, f"{what}: segments"))
    insert("compile_contexts", _contexts(trace, f"{what}: compile contexts"))
    insert("peaks", _peaks(trace, lived, reserved))


def _insert_numbers(database: sqlite3.Connection, table: str, columns: Iterable[list[_Column]]) -> None:
    """Insert rows of numbers, whose columns come a piece at a time."""
    for piece in columns:
        numbers = np.stack([column if isinstance(column, np.ndarray) else column.value for column in piece], axis=1)
        count, width = numbers.shape
        at_once = _AT_ONCE if count % _AT_ONCE == 0 else 1  # only the last piece may have an odd number of rows
        each: list[list[Any]] = numbers.reshape(-1, width * at_once).tolist()
        for place, column in enumerate(piece):
            if isinstance(column, _Nullable):
                for row in np.flatnonzero(~column.known).tolist():
                    each[row // at_once][row % at_once * width + place] = None
        one = f"({', '.join('?' * width)})"
        database.executemany(f"INSERT INTO {table} VALUES {', '.join([one] * at_once)}", each)


def _frames(trace: Trace) -> Iterator[tuple[Any, ...]]:
    for i, frame in enumerate(trace.frames):
        where = (_text(frame.file), _text(frame.function), frame.line)
        yield i, *where, frame_rank(frame), _text(trace.fx_node(i)) or None


def _events(records: npt.NDArray[np.void], clock: _Clock, what: str) -> Iterator[list[_Column]]:
    for piece in pieces(len(records), what):
        number = np.arange(piece.start, piece.stop)
        yield [number, clock.at(number), *(signed(records[name][piece]) for name in _COLUMNS[1:])]


def _allocations(lived: Lifetimes, clock: _Clock, what: str) -> Iterator[list[_Column]]:
    for piece in pieces(len(lived), what):
        own = lived[piece]
        where = (own.device, own.pool, own.stream, own.address, own.size, own.requested)
        times = (clock.at(own.start), clock.at_known(own.freed), clock.at_known(own.end))
        records = (own.stack, own.start, clock.known(own.freed), clock.known(own.end))
        yield [np.arange(piece.start, piece.stop), *where, *times, *records, _library(own)]


def _contexts(trace: Trace, what: str) -> Iterator[tuple[int, str]]:
    for piece in pieces(len(trace.records), what):
        number = np.arange(piece.start, piece.stop)
        ids, which = trace.compile_contexts(number)
        said = np.flatnonzero(which)
        yield from zip(number[said].tolist(), (_text(ids[i - 1]) for i in which[said].tolist()), strict=True)


def _segments(reserved: Lifetimes, clock: _Clock, what: str) -> Iterator[list[_Column]]:
    for piece in pieces(len(reserved), what):
        own = reserved[piece]
        where = (own.device, own.pool, own.stream, own.address, own.size, signed(own.small), signed(own.expandable))
        times = (clock.at(own.start), clock.at_known(own.end))
        records = (own.stack, own.start, clock.known(own.end))
        yield [np.arange(piece.start, piece.stop), *where, *times, *records, _library(own)]


def _library(own: Lifetimes) -> _Nullable:
    return _Nullable(own.library, own.library != 0)


@dataclass(frozen=True, slots=True)
class _Nullable:
    """A column that is NULL where its values are not known."""

    value: Ints
    known: npt.NDArray[np.bool_]


_Column: TypeAlias = Ints | _Nullable


class _Clock:
    """When records were, in ns since the first; their number stands for what never came."""

    def __init__(self, records: npt.NDArray[np.void]) -> None:
        self.time, self.never = records["time"], len(records)
        self.first = int(self.time.min()) if self.never else 0

    def at(self, index: Ints) -> Ints:
        return signed(self.time[index] - self.first)

    def at_known(self, index: Ints) -> _Nullable:
        # take(mode="clip") would copy all times, which lie apart in the records, for each piece.
        return _Nullable(self.at(np.minimum(index, self.never - 1)), index < self.never)

    def known(self, index: Ints) -> _Nullable:
        return _Nullable(index, index < self.never)


def _peaks(trace: Trace, lived: Lifetimes, reserved: Lifetimes) -> Iterator[tuple[int, int, int]]:
    """Yield for each device the first record after which the most bytes were active, and how many."""
    for device in distinct(lived.device, reserved.device).tolist():
        curve = timeline(trace, lived.of_device(device), reserved.of_device(device))
        peak = curve.peak()
        yield device, int(curve.index[peak]), int(curve.active[peak])


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()  # a name may hold half of a surrogate pair
