"""Reading ``.ctrace`` files: any prefix of one, a damaged one, a hostile one.

The reader trusts nothing. Memory grows with the size of the file and never with a number in it; nothing is
executed; at the first thing that cannot be right it stops, keeps what came before, and says so in ``Trace.notes``.
So the events read are always the first so many of those emitted.

A file that is being written changes under the reader's hands. It first looks how far the records go, then reads the
tables that they point into: the recorder writes in the opposite order, so everything those records need is there. What
was recorded since that first look is left out. A chunk that was caught half-written makes the reader start again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cudatool.errors import CudatoolError, TraceFormatError, UsageError
from cudatool.files import open_input
from cudatool.limits import STACK_FRAMES, TABLES_BYTES
from cudatool.progress import step
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
    DamageError,
    Table,
    aligned,
    is_being_written,
    parse_facts,
)
from cudatool.trace.generated import go_on_in_program
from cudatool.trace.model import Ending, Frame, PackageFrame, Trace
from cudatool.trace.packages import is_part
from cudatool.trace.validate import valid_facts, valid_records
from cudatool.units import counted

__all__ = ["facts", "is_trace", "newest_trace", "read"]

_GROWING = "The program is still running: this is what it has recorded so far."
_KILLED = "The recording was not closed: the program was killed, or left by os._exit. No event is missing."
_CUT = "The file is cut after {size} bytes: what was recorded later is missing."
_STOPPED = "The recording stopped early: {why}. What happened later is missing."
_ATTEMPTS = 20  # to read a file that changes
_PAUSE_S = 0.002


_ZEROS = bytes(1 << 20)


def read(path: str | os.PathLike[str]) -> Trace:
    """Return the trace in a ``.ctrace`` file, or as much of it as there is.

    What is missing, if anything, is said in ``ending`` and ``notes``. The file may still be being written: the trace is
    then what was recorded at the moment of the call.

    Raises
    ------
    TraceFormatError
        The file is not a cudatool trace, is of a version that this cudatool does not know, or its header is damaged.
    UsageError
        The file cannot be opened.
    """
    name = os.fspath(path)
    try:
        with open_input(name, buffered=False) as file:
            for attempt in range(1, _ATTEMPTS + 1):
                file.seek(0)
                trace = _Reader(file, name).read(last=attempt == _ATTEMPTS)
                if trace is not None:
                    go_on_in_program(trace)
                    return trace
                time.sleep(_PAUSE_S)
        raise AssertionError("the last attempt gives a trace")
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from error


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Return whether a file starts as a ``.ctrace`` file does; also False if it cannot be read."""
    try:
        with open_input(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the header of a ``.ctrace`` file says, and no more of it: what was known as the recording began.

    Raises
    ------
    TraceFormatError, UsageError
        See :func:`read`.
    """
    name = os.fspath(path)
    try:
        with open_input(name, buffered=False) as file:
            reader = _Reader(file, name)
            reader._read_header()
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from error
    return valid_facts(reader.header)[0]


def newest_trace(directory: str | os.PathLike[str]) -> Path | None:
    """Return the trace in `directory` (not below it) that was written last, None if there is none.

    Those of processes that a recorded program started count as its own, which lies beside them.
    """
    found = [path for path in Path(directory).glob("*.ctrace") if is_trace(path)]
    newest_first = sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((_of_program(path) for path in newest_first), None)


def _of_program(path: Path) -> Path:
    """Return the trace of the program that started a trace's process, if it lies beside it; else the trace itself."""
    try:
        said = facts(path)
        parent = path.with_name(os.path.basename(said.get("parent_trace", path.name)))
        return parent if facts(parent).get("run") == said.get("run") else path
    except CudatoolError:
        return path


def _in_order(records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return records in the order of their times; those of one time as they are."""
    time = records["time"]
    return records if bool(np.all(time[1:] >= time[:-1])) else records[np.argsort(time, kind="stable")]


class _Reader:
    """One attempt at a file: a look at the headers of its chunks, then a pass over them.

    The file is not buffered. What was read ahead would be older than the look, and names that its events need missing.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name = file, name
        self.growing = is_being_written(file.fileno())
        self.size = self._size_now()
        self.header: dict[str, Any] = {}
        self.notes: list[str] = []
        self.names = [""]
        self.frames: list[Frame] = []
        self.stacks: list[tuple[int, ...]] = [()]
        self.threads: list[str] = []
        self.cut_stacks: set[int] = set()
        self.count = 0
        self.closed = False
        self.stopped = False
        self.open: set[int] = set()  # kinds of chunk that were still being filled
        self.seen: dict[int, tuple[int, int]] = {}  # at the first look: where a chunk starts -> its length, if sealed
        try:
            # Room for as many records as the file could hold. What is not used costs address space only.
            self.records: npt.NDArray[np.void] = np.empty(self.size // RECORD.itemsize, RECORD)
        except MemoryError:
            raise TraceFormatError(name, f"is too large to read into memory ({self.size} bytes)") from None
        self.bytes = self.records.view(np.uint8).data

    def read(self, *, last: bool) -> Trace | None:
        """Return the trace, None if the file changed in a way that needs another attempt; never None if `last`."""
        ending = Ending.CUT
        if self._read_header():
            position = start = self.file.tell()
            self._look(start)
            try:
                with step(f"reading {self.name}", self.size) as shown:
                    while not self.closed and self._read_chunk():
                        position = self.file.tell()
                        shown.update(position)
                ending = self._ending()
            except DamageError as damage:
                ending = Ending.DAMAGED
                self.notes.append(f"The file is damaged at byte {position}: {damage}. Nothing after it was read.")
        if not last and not ending.is_complete and (self.growing or self.size != self._size_now()):
            return None
        header, wrong = valid_facts(self.header)
        if ending is Ending.GROWING:
            self.notes.append(_GROWING)
        elif ending is Ending.KILLED:
            self.notes.append(_KILLED)
        elif ending is Ending.STOPPED:
            self.notes.append(_STOPPED.format(why=header.get("recording_error", "the recorder failed")))
        elif ending is Ending.CUT:
            self.notes.append(_CUT.format(size=self.size))
        self.notes += wrong
        try:
            records, wrong = valid_records(self.records[: self.count])
        except ValueError as error:
            raise TraceFormatError(self.name, str(error)) from None
        self.notes += wrong
        if (self._is_something_missing(records) and ending.is_complete) or wrong:  # of a cut file, that is no wonder
            ending = Ending.DAMAGED
        if self.cut_stacks:
            self.notes.append(
                f"Of {counted(len(self.cut_stacks), 'stack')} only the innermost {STACK_FRAMES:,} frames were read."
            )
        if header.get("kernels_told_late"):  # when they had run, with the time at which they began
            records = _in_order(records)
        return Trace(
            records,
            names=self.names,
            stacks=self.stacks,
            frames=_marked(self.frames, tuple(header.get("installed", ()))),
            threads=self.threads or ["main"],
            header=header,
            notes=self.notes,
            source=self.name,
            ending=ending,
        )

    def _ending(self) -> Ending:
        if self.stopped or "recording_error" in self.header:
            return Ending.STOPPED
        if self.closed:
            return Ending.CLOSED
        if not self.open >= {Chunk.RECORDS, Chunk.TABLES}:
            return Ending.CUT  # a recording always has one open chunk of each kind: more must have followed
        return Ending.GROWING if self.growing else Ending.KILLED

    def _bytes(self, size: int) -> bytes:
        """Read so many bytes, or all that are left."""
        found = self.file.read(size)
        while len(found) < size and (more := self.file.read(size - len(found))):
            found += more
        return found

    def _size_now(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def _look(self, start: int) -> None:
        """Note how far each chunk is filled now. What :meth:`_read_chunk` reads later goes no further."""
        position = start
        while position < self._size_now():
            self.file.seek(position)
            head = self._bytes(CHUNK_HEADER.size)
            if len(head) < CHUNK_HEADER.size:
                break
            magic, _, capacity, length, _, sealed, _stopped = CHUNK_HEADER.unpack(head)
            if magic != CHUNK_MAGIC:
                break
            self.seen[position] = length, sealed
            position += CHUNK_HEADER.size + capacity
        self.size = self._size_now()
        self.file.seek(start)

    def _read_header(self) -> bool:
        """Read the file's header; return whether all of it is there."""
        head = self._bytes(FILE_HEADER.size)
        if not head:
            raise TraceFormatError(self.name, "is empty")
        if not head.startswith(MAGIC[: len(head)]):
            raise TraceFormatError(self.name, "is not a cudatool trace")
        if len(head) < FILE_HEADER.size:
            return False
        _, version, length, checksum = FILE_HEADER.unpack(head)
        if version != VERSION:
            raise TraceFormatError(self.name, f"is a trace of version {version}; this cudatool reads version {VERSION}")
        start = aligned(FILE_HEADER.size + length)
        if start > self.size:
            return False
        payload = self._bytes(min(length, TABLES_BYTES))
        if crc32(payload) != checksum:
            raise TraceFormatError(self.name, "has a damaged header")
        try:
            self.header = parse_facts(payload)
        except DamageError as damage:
            raise TraceFormatError(self.name, f"has a damaged header: {damage}") from None
        self.file.seek(start)
        return True

    def _read_chunk(self) -> bool:
        """Read one chunk; return whether another may follow."""
        start = self.file.tell()
        head = self._bytes(CHUNK_HEADER.size)
        if len(head) < CHUNK_HEADER.size:
            return False
        if not any(head):  # room that was reserved but never used
            return False
        magic, kind, capacity, length, checksum, sealed, stopped = CHUNK_HEADER.unpack(head)
        if magic != CHUNK_MAGIC or length > capacity or sealed > 1:
            raise DamageError("no chunk starts here")
        if start not in self.seen:  # made since the first look
            return False
        if kind != Chunk.TABLES:
            length, sealed = min(length, self.seen[start][0]), self.seen[start][1]
        self.stopped = self.stopped or bool(stopped)
        there = max(0, min(length, self.size - start - CHUNK_HEADER.size))
        payload = self._read_payload(kind, there)
        if there < length:
            sealed = 0  # cut: what there is of it cannot be checked
        if sealed and crc32(payload, crc32(head[:SEALED_BYTES])) != checksum:
            raise DamageError("a checksum is wrong")
        self._take(kind, payload, whole=there == length)
        if there < length or start + CHUNK_HEADER.size + capacity > self.size:
            self.open.clear()
            self.closed = False
            return False
        if not self.seen[start][1]:
            self.open.add(kind)
        self.file.seek(start + CHUNK_HEADER.size + capacity)
        return True

    def _read_payload(self, kind: int, size: int) -> bytes | memoryview:
        if kind != Chunk.RECORDS:
            if size > TABLES_BYTES:
                raise DamageError(f"a chunk of {size} bytes that does not hold events")
            return self._bytes(size)
        at = self.count * RECORD.itemsize
        view = self.bytes[at : at + size]
        done = 0
        while done < size:  # in pieces: a hole in a sparse file takes no room there, and would take some here
            piece = view[done : done + len(_ZEROS)]
            read = self.file.readinto(piece)  # type: ignore[attr-defined]
            if not read:
                break
            if not any(piece[: RECORD.itemsize]) and piece == _ZEROS:
                raise DamageError("there are zeros where events should be")
            done += read
        return view[:done]

    def _take(self, kind: int, payload: bytes | memoryview, *, whole: bool) -> None:
        if kind == Chunk.RECORDS:
            self.count += len(payload) // RECORD.itemsize
        elif kind == Chunk.TABLES:
            self._take_tables(bytes(payload))
        elif kind == Chunk.FACTS and whole:
            self.header |= parse_facts(bytes(payload))
        elif kind == Chunk.END and whole:
            if bytes(payload) != RECORD_COUNT.pack(self.count):
                raise DamageError("the number of events is not the one recorded")
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
                _put(self.stacks, index, self._stack(data[: 4 * STACK_FRAMES]))
                if length > 4 * STACK_FRAMES:
                    self.cut_stacks.add(index)
            elif table == Table.THREADS:
                _put(self.threads, index, data.decode("utf-8", "replace"))
            else:
                raise DamageError(f"there is no table {table}")

    def _frame(self, data: bytes) -> Frame:
        if len(data) != FRAME.size:
            raise DamageError("a frame has the wrong size")
        file, function, line = FRAME.unpack(data)
        if max(file, function) >= len(self.names):
            raise DamageError("a frame has no name")
        return Frame(self.names[file], self.names[function], line)

    def _stack(self, data: bytes) -> tuple[int, ...]:
        if len(data) % 4:
            raise DamageError("a stack has the wrong size")
        stack: list[int] = np.frombuffer(data, "<u4").tolist()
        if stack and max(stack) >= len(self.frames):
            raise DamageError("a stack has no frame")
        return tuple(stack)

    def _is_something_missing(self, records: npt.NDArray[np.void]) -> bool:
        """Let records whose name, stack or thread is missing point to the empty one; say how many there are."""
        is_missing = False
        for field, table in (("name", self.names), ("stack", self.stacks), ("thread", self.threads or [""])):
            column = records[field]
            missing = column >= len(table)
            if missing.any():
                column[missing] = 0
                is_missing = True
                self.notes.append(f"The {field} of {counted(int(missing.sum()), 'event')} is missing from the file.")
        return is_missing


def _marked(frames: list[Frame], installed: tuple[str, ...]) -> list[Frame]:
    """Return the frames, those of installed packages marked as such."""
    if not installed:
        return frames
    return [PackageFrame(*one) if is_part(one.file, installed) else one for one in frames]


def _put(table: list[Any], index: int, value: Any) -> None:
    if index == len(table):
        table.append(value)
    elif index == len(table) - 1:
        table[index] = value
    else:
        raise DamageError("a table has a gap")
