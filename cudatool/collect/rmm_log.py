"""The allocation log of RMM (RAPIDS), as a trace.

``rmm.mr.LoggingResourceAdaptor`` and the environment variable ``RMM_LOG_FILE`` make RMM write a line of CSV for every
call::

    Thread,Time,Action,Pointer,Size,Stream
    1979932,14:21:19.998533,allocate,0x30a000000,256,0x2
    1979932,14:21:32.661875,free,0x30a000000,256,0x2
    1979932,14:21:32.661901,allocate failure,(nil),4096,0x2

The log does not show what the upstream resource took from the driver, so the trace has no segments; and a free is
completed at once, since the log has no other time for it. The log has only times of day: the trace begins at 0, and its
times continue past midnight. Where logs of several runs follow each other, the header comes again: what a run had not
freed, its end did.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np

from cudatool.errors import FileFormatError
from cudatool.files import open_input
from cudatool.limits import LOG_LINE
from cudatool.text import quoted
from cudatool.trace.events import FREE_UNKNOWN, RECORD, Kind, StreamFlag, join_records
from cudatool.trace.interned import Interned
from cudatool.trace.model import Ending, Trace
from cudatool.units import counted

__all__ = ["is_rmm_log", "read"]

_HEADER: Final = ("thread", "time", "action", "pointer", "size", "stream")
_KINDS: Final = {
    "allocate": (Kind.BLOCK_ALLOC,),
    "free": (Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED),
    "deallocate": (Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED),
    "allocate failure": (Kind.OOM,),
}
_NULLS: Final = frozenset(("(nil)", "(null)", "nullptr", "null", ""))  # what C libraries make of %p
_DEFAULT_STREAMS: Final = {
    0: StreamFlag.LEGACY_DEFAULT,
    1: StreamFlag.LEGACY_DEFAULT,
    2: StreamFlag.PER_THREAD_DEFAULT,
}
_TIME_OF_DAY: Final = re.compile(r"([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:[.:,]([0-9]{1,9}))?")
_SECONDS: Final = re.compile(r"([0-9]{1,10})(?:\.([0-9]{1,9}))?")
_DAY: Final = 24 * 3600 * 10**9
_DEVICE: Final = re.compile(r"\.dev([0-9]{1,2})(?=\.|$)")  # what RMM appends to the file name that it is given
_MAX_SIZE: Final = 1 << 48  # more than any device's address space
_MAX_ADDRESS: Final = 1 << 63
_MAX_THREADS: Final = 1 << 16  # a record's thread is an index of 16 bits
_PIECE: Final = 1 << 16  # rows

_Row = tuple[
    int, int, int, int, int, int, int, int, int
]  # time, kind, device, flags, thread, stream, address, size, aux0


def is_rmm_log(path: str | Path) -> bool:
    """Say whether a file starts with the header of RMM's log, without reading more than its first line."""
    with open_input(path) as file:
        return _is_header(file.readline(LOG_LINE))


def read(path: str | Path) -> Trace:
    """Return the trace in RMM's allocation log.

    Where the file's name says so (``log.dev1.csv``, as RMM itself names them), the records are of that device.

    Raises
    ------
    FileFormatError
        The file is not RMM's log, or one of its lines is invalid; the message names the line.
    OSError
        The file cannot be read.
    """
    path = str(path)
    with open_input(path) as file:
        if not _is_header(file.readline(LOG_LINE)):
            raise FileFormatError(path, "not an RMM log: its first line is not Thread,Time,Action,Pointer,Size,Stream")
        return _Reader(path).trace(file)


def _is_header(line: bytes) -> bool:
    names = line.removeprefix(b"\xef\xbb\xbf").decode("ascii", "replace").strip().lower().split(",")
    return tuple(name.strip() for name in names) == _HEADER


class _Reader:
    """The tables that records point into, while they grow."""

    def __init__(self, path: str) -> None:
        self.path = path
        found = _DEVICE.findall(Path(path).name)
        self.device = int(found[-1]) if found else 0
        self.threads = Interned[str]()
        self.streams = Interned[int](first=1)
        self.day = 0  # ns of the days that have passed
        self.clock = 0
        self.latest = 0
        self.impossible: list[tuple[int, int]] = []  # line and bytes
        self.live: dict[int, _Row] = {}  # by address: what its free will say
        self.ending = Ending.CLOSED
        self.ended = 0  # blocks that a run had not freed when the next one began
        self.notes: list[str] = []

    def trace(self, file: BinaryIO) -> Trace:
        pieces, rows = [np.zeros(0, RECORD)], []
        for row in self._rows(file):
            rows.append(row)
            if len(rows) == _PIECE:
                pieces.append(_records(rows))
                rows = []
        records = join_records([*pieces, _records(rows)])
        if self.impossible:
            number, size = self.impossible[0]
            self.notes.append(
                f"{counted(len(self.impossible), 'line')} with a size beyond any GPU's memory left out "
                f"(the first is line {number}, of {size} bytes): totals lack them"
            )
        if self.ended:
            blocks = counted(self.ended, "block")
            self.notes.append(f"the log has several runs: {blocks} that one had not freed count as freed at its end")
        if len(records):
            records["time"] -= records["time"][0]
        return Trace(
            join_records([self._stream_records(), records]),
            threads=list(self.threads) or ["main"],
            header={"format": "rmm-log", "time_axis": "clock", "requests_to": "rmm"},
            notes=["RMM's log has no segments: what the allocator reserved is not known", *self.notes],
            source=self.path,
            ending=self.ending,
        )

    def _rows(self, file: BinaryIO) -> Iterator[_Row]:
        number = 1
        while line := file.readline(LOG_LINE):
            number += 1
            text = line.decode("utf-8", "replace").strip()
            if not text:
                continue
            if _is_header(line):
                yield from self._run_ended()
                continue
            # RMM writes a line with its newline. Without the newline, even a line that parses may have lost digits.
            is_cut = not line.endswith(b"\n") and len(line) < LOG_LINE
            fields = [field.strip() for field in text.split(",")]
            if is_cut or (len(fields) < len(_HEADER) and not file.read(1)):
                self.notes.append(f"the log is cut in line {number}: what came from then on is missing")
                self.ending = Ending.CUT
                return
            try:
                yield from self._line(fields, number)
            except ValueError as error:
                raise FileFormatError(self.path, f"line {number} of an RMM log: {error}") from None

    def _line(self, fields: Sequence[str], number: int) -> list[_Row]:
        if len(fields) != len(_HEADER):
            raise ValueError(f"{counted(len(fields), 'field')} instead of {len(_HEADER)}")
        thread, time, action, pointer, size, stream = fields
        kinds = _KINDS.get(action.lower())
        if kinds is None:
            raise ValueError(f"unknown action {quoted(action)}")
        failed = kinds == (Kind.OOM,)
        # It may be any number: RMM rounds up whatever a program asked for, valid or not.
        bytes_ = _integer(size, "a size", 10, 1 << 64)
        address = 0 if failed else _integer(pointer, "a pointer", 16, _MAX_ADDRESS)
        now = self._time(time)
        handle = _integer(stream, "a stream", 16, 1 << 64)
        stream_id = self.streams[handle]
        thread_id = self.threads[thread]
        if thread_id >= _MAX_THREADS:
            raise ValueError(f"more than {_MAX_THREADS} threads")
        if not failed and bytes_ >= _MAX_SIZE:  # a resource that rounds up past 2**64 returns a few bytes, or none
            self.impossible.append((number, bytes_))
            return []
        requested = 0 if failed else bytes_
        flags = FREE_UNKNOWN if failed else 0
        rows = [(now, int(k), self.device, flags, thread_id, stream_id, address, bytes_, requested) for k in kinds]
        if kinds == _KINDS["allocate"]:
            self.live[address] = rows[0]
        elif not failed:
            self.live.pop(address, None)
        return rows

    def _run_ended(self) -> Iterator[_Row]:
        """Free what the run before a repeated header had allocated."""
        for _, _, device, flags, thread, stream, address, size, requested in self.live.values():
            for kind in _KINDS["free"]:
                yield self.latest, int(kind), device, flags, thread, stream, address, size, requested
        self.ended += len(self.live)
        self.live.clear()

    def _time(self, text: str) -> int:
        """Return nanoseconds; never less than before, as the log's order is the order of the calls."""
        if match := _TIME_OF_DAY.fullmatch(text):
            hours, minutes, seconds, fraction = match.groups()
            clock = ((int(hours) * 60 + int(minutes)) * 60 + int(seconds)) * 10**9 + _nanoseconds(fraction)
            if clock < self.clock - _DAY // 2:
                self.day += _DAY
            self.clock = clock
            clock += self.day
        elif match := _SECONDS.fullmatch(text):
            clock = int(match[1]) * 10**9 + _nanoseconds(match[2])
        else:
            raise ValueError(f"{quoted(text)} is not a time")
        self.latest = max(self.latest, clock)
        return self.latest

    def _stream_records(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        created = np.zeros(len(self.streams), RECORD)
        for record, (handle, number) in zip(created, self.streams.items(), strict=True):
            record["kind"], record["device"], record["stream"] = Kind.STREAM_CREATE, self.device, number
            record["address"], record["flags"] = handle, _DEFAULT_STREAMS.get(handle, StreamFlag.NON_BLOCKING)
        return created


def _records(rows: list[_Row]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    records = np.zeros(len(rows), RECORD)
    columns = ("time", "kind", "device", "flags", "thread", "stream", "address", "size", "aux0")
    for name, values in zip(columns, zip(*rows, strict=True), strict=bool(rows)):
        records[name] = np.array(values, records.dtype[name])
    return records


def _integer(text: str, what: str, base: int, limit: int) -> int:
    if text.lower() in _NULLS and base == 16:
        return 0
    digits = text.lower().removeprefix("0x") if base == 16 else text
    if not digits.isascii() or not digits.isalnum() or len(digits) > 20:
        raise ValueError(f"{quoted(text)} is not {what}")
    try:
        value = int(digits, base)
    except ValueError:
        raise ValueError(f"{quoted(text)} is not {what}") from None
    if value >= limit:
        raise ValueError(f"{text[:40]} is too large for {what}")
    return value


def _nanoseconds(fraction: str | None) -> int:
    """Return the nanoseconds that the digits after a decimal point mean."""
    return int(fraction.ljust(9, "0")) if fraction else 0
