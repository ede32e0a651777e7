"""Reading ``.ctrace`` files: any prefix of one, a damaged one, a hostile one.

The reader trusts nothing. Memory grows with the size of the file and never with a number in it; nothing is
executed; at the first thing that cannot be right it stops, keeps what came before, and says so in ``Trace.notes``.
So the events read are always the first so many of those emitted.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cudatool.errors import TraceFormatError, UsageError
from cudatool.trace.events import RECORD
from cudatool.trace.file import (
    CHUNK_HEADER,
    CHUNK_MAGIC,
    ENTRY,
    FILE_HEADER,
    FRAME,
    MAGIC,
    RECORD_COUNT,
    SEALED_BYTES,
    VERSION,
    Chunk,
    Table,
    aligned,
)
from cudatool.trace.model import Frame, Trace
from cudatool.trace.validate import valid_facts, valid_records

__all__ = ["is_trace", "newest_trace", "read"]

_NOT_CLOSED = "The recording was not closed: the program was killed or is still running. No event emitted is missing."
_CUT = "The file is cut after {size} bytes: what was recorded later is missing."


class _DamageError(Exception):
    """The file says something that cannot be right."""


def read(path: str | os.PathLike[str]) -> Trace:
    """Return the trace in a ``.ctrace`` file, or as much of it as there is.

    What is missing, if anything, is said in ``notes``. The file may still be being written.

    Raises
    ------
    TraceFormatError
        The file is not a cudatool trace, is of a version that this cudatool does not know, or its header is damaged.
    UsageError
        The file cannot be opened.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb", opener=_open_regular) as file:
            return _Reader(file, name).read()
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from error


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Return whether a file starts as a ``.ctrace`` file does; also False if it cannot be read."""
    try:
        with open(path, "rb", opener=_open_regular) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, TraceFormatError):
        return False


def newest_trace(directory: str | os.PathLike[str]) -> Path | None:
    """Return the trace in `directory` (not below it) that was written last, None if there is none."""
    found = [path for path in Path(directory).glob("*.ctrace") if is_trace(path)]
    return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)  # so that a pipe nobody writes to does not block
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TraceFormatError(path, "is not a regular file")
    return descriptor


class _Reader:
    """One pass over a file, chunk by chunk."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        self.size = os.fstat(file.fileno()).st_size  # what a running program adds from now on is left out
        self.header: dict[str, Any] = {}
        self.notes: list[str] = []
        self.names = [""]
        self.frames: list[Frame] = []
        self.stacks: list[tuple[int, ...]] = [()]
        self.threads: list[str] = []
        self.count = 0
        self.closed = False
        self.open: set[int] = set()  # kinds of chunk that were still being filled
        try:
            # Room for as many records as the file could hold. What is not used costs address space only.
            self.records: npt.NDArray[np.void] = np.empty(self.size // RECORD.itemsize, RECORD)
        except MemoryError:
            raise TraceFormatError(name, f"is too large to read into memory ({self.size} bytes)") from None
        self.bytes = self.records.view(np.uint8).data

    def read(self) -> Trace:
        if self._read_header():
            position = self.file.tell()
            try:
                while not self.closed and self._read_chunk():
                    position = self.file.tell()
            except _DamageError as damage:
                self.notes.append(f"The file is damaged at byte {position}: {damage}. Nothing after it was read.")
        if not self.closed and not self.notes:
            # A recording always has one open chunk of each kind; without them, more must have followed.
            self.notes.append(
                _NOT_CLOSED if self.open >= {Chunk.RECORDS, Chunk.TABLES} else _CUT.format(size=self.size)
            )
        header, wrong = valid_facts(self.header)
        self.notes += wrong
        if "recording_error" in header:
            self.notes.append(f"The recording stopped early: {header['recording_error']}.")
        try:
            records, wrong = valid_records(self.records[: self.count])
        except ValueError as error:
            raise TraceFormatError(self.name, str(error)) from None
        self.notes += wrong
        self._check_indices(records)
        return Trace(
            records,
            names=self.names,
            stacks=self.stacks,
            frames=self.frames,
            threads=self.threads or ["main"],
            header=header,
            notes=self.notes,
            source=self.name,
        )

    def _read_header(self) -> bool:
        """Read the file's header; return whether all of it is there."""
        head = self.file.read(FILE_HEADER.size)
        if not head:
            raise TraceFormatError(self.name, "is empty")
        if not head.startswith(MAGIC[: len(head)]):
            raise TraceFormatError(self.name, "is not a cudatool trace")
        if len(head) < FILE_HEADER.size:
            return self._cut()
        _, version, length, checksum = FILE_HEADER.unpack(head)
        if version != VERSION:
            raise TraceFormatError(self.name, f"is a trace of version {version}; this cudatool reads version {VERSION}")
        start = aligned(FILE_HEADER.size + length)
        if start > self.size:
            return self._cut()
        payload = self.file.read(length)
        if crc32(payload) != checksum:
            raise TraceFormatError(self.name, "has a damaged header")
        try:
            self.header = _facts(payload)
        except _DamageError as damage:
            raise TraceFormatError(self.name, f"has a damaged header: {damage}") from None
        self.file.seek(start)
        return True

    def _cut(self) -> bool:
        self.notes.append(_CUT.format(size=self.size))
        return False

    def _read_chunk(self) -> bool:
        """Read one chunk; return whether another may follow."""
        start = self.file.tell()
        head = self.file.read(CHUNK_HEADER.size)
        if len(head) < CHUNK_HEADER.size:
            return self._cut() if head else False
        if not any(head):  # room that was reserved but never used
            return False
        magic, kind, capacity, length, checksum, sealed = CHUNK_HEADER.unpack(head)
        if magic != CHUNK_MAGIC or length > capacity or sealed > 1:
            raise _DamageError("no chunk starts here")
        there = min(length, self.size - start - CHUNK_HEADER.size)
        payload = self._read_payload(kind, there)
        if there < length:
            sealed = 0  # cut: what there is of it cannot be checked
        if sealed and crc32(payload, crc32(head[:SEALED_BYTES])) != checksum:
            raise _DamageError("a checksum is wrong")
        self._take(kind, payload, whole=there == length)
        if there < length or start + CHUNK_HEADER.size + capacity > self.size:
            return self._cut()
        if not sealed:
            self.open.add(kind)
        self.file.seek(start + CHUNK_HEADER.size + capacity)
        return True

    def _read_payload(self, kind: int, size: int) -> bytes | memoryview:
        if kind != Chunk.RECORDS:
            return self.file.read(size)
        at = self.count * RECORD.itemsize
        view = self.bytes[at : at + size]
        return view[: self.file.readinto(view)]  # type: ignore[attr-defined]

    def _take(self, kind: int, payload: bytes | memoryview, *, whole: bool) -> None:
        if kind == Chunk.RECORDS:
            self.count += len(payload) // RECORD.itemsize
        elif kind == Chunk.TABLES:
            self._take_tables(bytes(payload))
        elif kind == Chunk.FACTS and whole:
            self.header |= _facts(bytes(payload))
        elif kind == Chunk.END and whole:
            if bytes(payload) != RECORD_COUNT.pack(self.count):
                raise _DamageError("the number of events is not the one recorded")
            self.closed = True

    def _take_tables(self, payload: bytes) -> None:
        at = 0
        while at + ENTRY.size <= len(payload):
            table, index, length = ENTRY.unpack_from(payload, at)
            data = payload[at + ENTRY.size : at + ENTRY.size + length]
            at += ENTRY.size + length
            if at > len(payload):
                return  # cut
            if table == Table.NAMES:
                _put(self.names, index, data.decode("utf-8", "replace"))
            elif table == Table.FRAMES:
                _put(self.frames, index, self._frame(data))
            elif table == Table.STACKS:
                _put(self.stacks, index, self._stack(data))
            elif table == Table.THREADS:
                _put(self.threads, index, data.decode("utf-8", "replace"))
            else:
                raise _DamageError(f"there is no table {table}")

    def _frame(self, data: bytes) -> Frame:
        if len(data) != FRAME.size:
            raise _DamageError("a frame has the wrong size")
        file, function, line = FRAME.unpack(data)
        if max(file, function) >= len(self.names):
            raise _DamageError("a frame has no name")
        return Frame(self.names[file], self.names[function], line)

    def _stack(self, data: bytes) -> tuple[int, ...]:
        if len(data) % 4:
            raise _DamageError("a stack has the wrong size")
        stack: list[int] = np.frombuffer(data, "<u4").tolist()
        if stack and max(stack) >= len(self.frames):
            raise _DamageError("a stack has no frame")
        return tuple(stack)

    def _check_indices(self, records: npt.NDArray[np.void]) -> None:
        """Let records whose name, stack or thread is missing point to the empty one, and say how many there are."""
        for field, table in (("name", self.names), ("stack", self.stacks), ("thread", self.threads or [""])):
            column = records[field]
            missing = column >= len(table)
            if missing.any():
                column[missing] = 0
                self.notes.append(f"{int(missing.sum())} events have a {field} that is missing from the file.")


def _put(table: list[Any], index: int, value: Any) -> None:
    if index == len(table):
        table.append(value)
    elif index == len(table) - 1:
        table[index] = value
    else:
        raise _DamageError("a table has a gap")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _facts(payload: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(payload, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise _DamageError("facts are not JSON") from None
    if not isinstance(facts, dict):
        raise _DamageError("facts are not a JSON object")
    return facts
