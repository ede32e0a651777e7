"""Following a ``.ctrace`` file that a recording process still writes: what is new since the last look, in pieces.

::

    read()   look how far the records go       a chunk that grows is looked at again
             read the tables up to now         the recorder writes them before the records that point into them
             give the records up to that look

Unlike :mod:`cudatool.trace.reader`, nothing is kept of the records, and of the tables only where their entries stand in
the file: 8 bytes for each name, frame and stack. As there, nothing in the file is trusted.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cudatool.errors import TraceFormatError, UsageError
from cudatool.files import open_input
from cudatool.limits import STACK_FRAMES, TABLES_BYTES
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
from cudatool.trace.model import Ending, Frame, PackageFrame
from cudatool.trace.packages import is_part
from cudatool.trace.validate import valid_facts, valid_records

__all__ = ["Follower"]

_PIECE: Final = 1 << 16  # records
_WINDOW: Final = 1 << 18  # bytes of tables that are read at once
_LONGEST_NAME: Final = 16 << 10  # bytes; what follows is cut
_MOST_OPEN: Final = 16  # chunks that are being filled: a recorder has two, and for a moment four
_CHUNKS: Final = 4096  # that are looked at before what they hold is taken
_ATTEMPTS: Final = 5  # to read what a recorder is writing
_NOWHERE: Final = 1 << 64  # after the end of any file
_KEPT: Final = 4096  # names and stacks that are kept as such


class _DamagedChunkError(DamageError):
    """What begins at `offset` is damaged; what comes before it is not."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(message)
        self.offset = offset


@dataclass(slots=True)
class _Part:
    """A chunk that is not read to its end.

    `length` is how far it was filled at the last look, `taken` how much of that was read. `checksum` is that of what
    was taken, None where the chunk was not sealed when its reading began: then there is nothing to compare with.
    """

    offset: int
    kind: int = 0
    capacity: int = 0
    length: int = 0
    taken: int = 0
    sealed: bool = False
    expected: int = 0
    checksum: int | None = None

    @property
    def start(self) -> int:
        return self.offset + CHUNK_HEADER.size

    @property
    def end(self) -> int:
        return self.start + self.capacity

    @property
    def is_done(self) -> bool:
        """Whether nothing can follow in it."""
        return self.taken == self.length and (
            self.sealed or (self.kind == Chunk.RECORDS and self.length > 0 and self.length == self.capacity)
        )


class Follower:
    """Reads a trace file from where it stopped; also a context manager.

    Attributes
    ----------
    path
        As it was given.
    header
        Facts about the recording that were read so far; empty until the recorder has written the first of them.
    events
        Number of events given so far.
    left_out
        Number of events that were not given: their time, address or size cannot be right.
    ending
        ``GROWING`` as long as more may come. Another one is final: everything that the file has was given.
    damage
        For ``DAMAGED``: what cannot be right.

    Raises
    ------
    UsageError
        The file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._file = open_input(self.path)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from error
        self._descriptor = self._file.fileno()
        self.header: dict[str, Any] = {}
        self.events = self.left_out = 0
        self.ending = Ending.GROWING
        self.damage = ""
        self._raw_header: dict[str, Any] = {}
        self._head = b""  # the first bytes of the file
        self._next = 0  # where the first chunk starts that was not looked at
        self._parts: list[_Part] = []  # in the order of the file
        self._count = 0  # of records read, also of those left out
        self._newest: dict[int, _Part] = {}  # the last chunk of each kind
        self._closed = self._stopped = False
        self._failures = 0  # reads in a row that found something wrong
        self._tables = {
            Table.NAMES: array("Q"),
            Table.FRAMES: array("Q"),
            Table.STACKS: array("Q"),
            Table.THREADS: array("Q"),
        }  # where the entries stand in the file
        self._buffer: npt.NDArray[np.void] = np.empty(0, RECORD)
        self._name_at = lru_cache(_KEPT)(self._read_name)
        self._stack_at = lru_cache(_KEPT)(self._read_stack)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Names and stacks can no longer be had."""
        self._file.close()

    @property
    def is_replaced(self) -> bool:
        """Whether another recording stands in the place of this one: under its name, or in the same file."""
        try:
            there, own = os.stat(self.path), os.fstat(self._descriptor)
        except OSError:
            return False  # removed: what is open can still be read
        if not os.path.samestat(there, own):
            return True
        return bool(self._head) and self._bytes(0, FILE_HEADER.size) not in (self._head, b"")

    def read(self, most: int = _PIECE) -> npt.NDArray[np.void]:
        """Return the next events, at most so many; none if there are no more now (see `ending`).

        The array is overwritten by the next call. Indices of names, stacks and threads that the file does not have
        are 0.

        Raises
        ------
        TraceFormatError
            The file is not a cudatool trace, is of a version that this cudatool does not know, or its header is
            damaged.
        UsageError
            The file cannot be read.
        """
        if self.ending is not Ending.GROWING:
            return self._buffer[:0]
        # First: what a recorder that has ended had to write is there by now.
        grows = is_being_written(self._descriptor)
        try:
            records = self._read(most, grows)
            self._failures = 0
            while len(records):
                valid = self._valid(records)
                if len(valid) or self.ending is not Ending.GROWING:
                    return valid
                records = self._read(most, grows)
            return records
        except DamageError as damage:
            self._failures += 1
            if not grows or self._failures > _ATTEMPTS:  # a recorder may be in the middle of writing a chunk
                self.ending, self.damage = Ending.DAMAGED, str(damage)
            return self._buffer[:0]
        except OSError as error:
            raise UsageError(f"{self.path}: cannot be read: {error.strerror}") from error

    def name(self, index: int) -> str:
        """Return a name, empty for one that the file does not have."""
        return self._name_at(self._place(Table.NAMES, index - 1)) if index else ""

    def thread(self, index: int) -> str:
        """Return the name of a thread."""
        return self._name_at(self._place(Table.THREADS, index))

    def stack(self, index: int) -> tuple[Frame, ...]:
        """Return the frames of a stack, innermost first: the same object while it is used."""
        return self._stack_at(self._place(Table.STACKS, index - 1)) if index else ()

    # --- the walk ---

    def _read(self, most: int, grows: bool) -> npt.NDArray[np.void]:
        if not self._next and not self._read_header():
            self.ending = Ending.GROWING if grows else Ending.CUT
            return self._buffer[:0]
        # Damage is reported when all that comes before it, at `end`, was given: by a later call, if there are records.
        # Facts, and the end of the file, are taken after the records before them.
        more = True
        while more:
            damage, end = None, _NOWHERE
            try:
                more = self._look(most)
            except DamageError as error:
                damage, end = error, self._next
            try:
                self._take_tables(end)
            except _DamagedChunkError as error:
                damage, end = error, error.offset
            records = self._take_records(most, end)
            if len(records):
                break
            if damage is not None:
                raise damage
            self._take_rest()
            self._drop_done()
        else:
            if not grows or not self._has_more():
                self.ending = self._ending(grows)
        self._drop_done()
        return records

    def _drop_done(self) -> None:
        self._parts = [part for part in self._parts if not part.is_done]

    def _bytes(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def _read_header(self) -> bool:
        """Read the file's header; return whether all of it is there."""
        head = self._bytes(0, FILE_HEADER.size)
        if not any(head):  # the recorder has made room for it, and not written it
            return False
        if not head.startswith(MAGIC[: len(head)]):
            raise TraceFormatError(self.path, "is not a cudatool trace")
        if len(head) < FILE_HEADER.size:
            return False
        _, version, length, checksum = FILE_HEADER.unpack(head)
        if version != VERSION:
            raise TraceFormatError(self.path, f"is a trace of version {version}; this cudatool reads version {VERSION}")
        payload = self._bytes(FILE_HEADER.size, min(length, TABLES_BYTES))
        if len(payload) < length:
            return False
        if crc32(payload) != checksum:
            raise TraceFormatError(self.path, "has a damaged header")
        try:
            self._add_facts(payload)
        except DamageError as damage:
            raise TraceFormatError(self.path, f"has a damaged header: {damage}") from None
        self._head, self._next = head, aligned(FILE_HEADER.size + length)
        return True

    def _look(self, most: int) -> bool:
        """Note how far the chunks are filled now: of those known, and of so many more that `most` records are there.

        It goes on to the records after these: what they point into stands before the next chunk of records. Return
        whether more chunks may be there.
        """
        for part in self._parts:
            if not part.sealed:
                self._look_at(part)
        waiting = sum(part.length - part.taken for part in self._parts if part.kind == Chunk.RECORDS)
        unfinished = sum(not part.sealed for part in self._parts)
        for _ in range(_CHUNKS):
            part = _Part(self._next)
            if not self._look_at(part):
                return False
            if part.kind == Chunk.RECORDS:
                if waiting >= most * RECORD.itemsize:
                    return True
                waiting += part.length
            unfinished += not part.sealed
            if unfinished > _MOST_OPEN:
                raise DamageError("too many chunks are unfinished")
            self._parts.append(part)
            self._newest[part.kind] = part
            self._next = part.end
        return True

    def _look_at(self, part: _Part) -> bool:
        """Read a chunk's header again, or for the first time; return whether it is there."""
        head = self._bytes(part.offset, CHUNK_HEADER.size)
        if len(head) < CHUNK_HEADER.size or not any(head):
            return False
        magic, kind, capacity, length, expected, sealed, stopped = CHUNK_HEADER.unpack(head)
        if sealed:  # that is written last: what was read before it may be older
            head = self._bytes(part.offset, CHUNK_HEADER.size).ljust(CHUNK_HEADER.size, b"\0")
            magic, kind, capacity, length, expected, sealed, stopped = CHUNK_HEADER.unpack(head)
        if (
            magic != CHUNK_MAGIC
            or length > capacity
            or sealed > 1
            or length < part.taken
            or kind != (part.kind or kind)
        ):
            raise DamageError("no chunk starts here" if not part.kind else "a chunk has changed")
        if part.kind and part.end == self._next:
            self._next = part.start + capacity  # the last chunk gives the room back that it did not need
        if not part.kind and sealed:
            part.checksum = crc32(head[:SEALED_BYTES])
        part.kind, part.capacity, part.length = kind, capacity, length
        part.sealed, part.expected = bool(sealed), expected
        self._stopped = self._stopped or bool(stopped)
        return True

    def _has_more(self) -> bool:
        """Return whether a chunk that is there was not read."""
        return any(part.kind == Chunk.RECORDS and part.taken < part.length for part in self._parts) or (
            len(head := self._bytes(self._next, CHUNK_HEADER.size)) == CHUNK_HEADER.size and any(head)
        )

    def _ending(self, grows: bool) -> Ending:
        size = os.fstat(self._descriptor).st_size
        if self._bytes(0, FILE_HEADER.size) != self._head or size < min(
            (p.start + p.taken for p in self._parts), default=0
        ):
            return Ending.CUT  # what was read is no longer there
        if self._closed or not grows:
            if self._stopped or "recording_error" in self.header:
                return Ending.STOPPED
            if self._closed:
                return Ending.CLOSED
            # A recording always has one open chunk of each kind: else more must have followed.
            last = [self._newest.get(kind) for kind in (Chunk.RECORDS, Chunk.TABLES)]
            whole = all(part is not None and not part.sealed and part.end <= size for part in last)
            return Ending.KILLED if whole else Ending.CUT
        return Ending.GROWING

    # --- what is in the chunks ---

    def _take_tables(self, end: int) -> None:
        """Take the tables that begin before `end`."""
        for part in self._parts:
            if part.kind == Chunk.TABLES and part.offset < end:
                try:
                    if not part.sealed:
                        self._look_at(part)  # it has grown since the first look, before the records did
                    if part.length > TABLES_BYTES:
                        raise DamageError(f"a chunk of {part.length} bytes that does not hold events")
                    self._take_entries(part)
                except DamageError as damage:
                    raise _DamagedChunkError(part.offset, str(damage)) from None

    def _take_entries(self, part: _Part) -> None:
        window, begin = b"", 0  # of the file
        at, end = part.start + part.taken, min(part.start + part.length, os.fstat(self._descriptor).st_size)
        self._check_whole(part)
        while at + ENTRY.size <= end:
            if not begin <= at <= begin + len(window) - ENTRY.size:
                window, begin = self._bytes(at, _WINDOW), at
                if len(window) < ENTRY.size:
                    return  # cut
            table, index, length = ENTRY.unpack_from(window, at - begin)
            if at + ENTRY.size + length > end:
                return
            self._add_entry(table, index, at)
            at += ENTRY.size + length
            part.taken = at - part.start

    def _check_whole(self, part: _Part) -> None:
        """Compare the checksum of a chunk that was sealed before any of it was read."""
        if part.checksum is not None and not part.taken:
            payload = self._bytes(part.start, part.length)
            if len(payload) == part.length and crc32(payload, part.checksum) != part.expected:
                raise DamageError("a checksum is wrong")

    def _add_entry(self, number: int, index: int, offset: int) -> None:
        try:
            places = self._tables[Table(number)]
        except ValueError:
            raise DamageError(f"there is no table {number}") from None
        # The empty name and the empty stack are in no file.
        index -= number in (Table.NAMES, Table.STACKS)
        if index == len(places):
            places.append(offset)
        elif index == len(places) - 1 >= 0:
            places[index] = offset
        elif index >= 0:
            raise DamageError("a table has a gap")

    def _take_records(self, most: int, end: int) -> npt.NDArray[np.void]:
        if len(self._buffer) < most:
            self._buffer = np.empty(most, RECORD)
        room, count = self._buffer.view(np.uint8).data, 0
        for part in self._parts:
            if part.kind == Chunk.RECORDS and count < most and part.offset < end:
                size = min(part.length - part.taken, (most - count) * RECORD.itemsize)
                at = count * RECORD.itemsize
                try:
                    got = self._take_from(part, room[at : at + size - size % RECORD.itemsize])
                except DamageError:
                    if not count:
                        raise
                    break  # the next reading begins with it
                count += got // RECORD.itemsize
                if got < size:
                    break  # cut, or too short for a record
        self._count += count
        return self._buffer[:count]

    def _take_from(self, part: _Part, room: memoryview) -> int:
        """Read records of a chunk; return the number of bytes."""
        got = os.preadv(self._descriptor, [room], part.start + part.taken) if room else 0
        got -= got % RECORD.itemsize
        if got and not any(room[: RECORD.itemsize]):
            raise DamageError("there are zeros where events should be")
        if part.checksum is not None:
            checksum = crc32(room[:got], part.checksum)
            if part.taken + got == part.length and checksum != part.expected:
                raise DamageError("a checksum is wrong")
            part.checksum = checksum
        part.taken += got
        return got

    def _take_rest(self) -> None:
        """Take facts, and the end: after all records before them."""
        for part in self._parts:
            if part.kind in (Chunk.FACTS, Chunk.END) and part.taken < part.length:
                payload = self._bytes(part.start, min(part.length, TABLES_BYTES))
                if len(payload) < part.length or part.end > os.fstat(self._descriptor).st_size:
                    return  # cut
                if crc32(payload, part.checksum or 0) != part.expected:
                    raise DamageError("a checksum is wrong")
                part.taken = part.length
                if part.kind == Chunk.FACTS:
                    self._add_facts(payload)
                elif payload != RECORD_COUNT.pack(self._count):
                    raise DamageError("the number of events is not the one recorded")
                else:
                    self._closed = True

    def _add_facts(self, payload: bytes) -> None:
        self._raw_header |= parse_facts(payload)
        self.header = valid_facts(self._raw_header)[0]

    def _valid(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        try:
            valid, _ = valid_records(records)
        except ValueError as error:
            self.ending, self.damage = Ending.DAMAGED, str(error)
            return records[:0]
        self.left_out += len(records) - len(valid)
        self.events += len(valid)
        for field, table, before in (
            ("name", Table.NAMES, 1),
            ("stack", Table.STACKS, 1),
            ("thread", Table.THREADS, 0),
        ):
            column, known = valid[field], len(self._tables[table]) + before
            if len(column) and int(column.max()) >= known:
                column[column >= known] = 0
        return valid

    # --- entries of the tables ---

    def _place(self, table: Table, index: int) -> int:
        """Return where an entry stands in the file, 0 if there is none."""
        places = self._tables[table]
        return places[index] if 0 <= index < len(places) else 0

    def _entry(self, place: int, most: int) -> bytes:
        head = self._bytes(place, ENTRY.size)
        if not place or len(head) < ENTRY.size:
            return b""
        return self._bytes(place + ENTRY.size, min(ENTRY.unpack(head)[2], most))

    def _read_name(self, place: int) -> str:
        return self._entry(place, _LONGEST_NAME).decode("utf-8", "replace")

    def _read_stack(self, place: int) -> tuple[Frame, ...]:
        data = self._entry(place, 4 * STACK_FRAMES)
        return tuple(self._frame(index) for index in np.frombuffer(data[: len(data) // 4 * 4], "<u4").tolist())

    def _frame(self, index: int) -> Frame:
        data = self._entry(self._place(Table.FRAMES, index), FRAME.size)
        if len(data) < FRAME.size:
            return Frame("", "", 0)
        file, function, line = FRAME.unpack(data)
        path, installed = self.name(file), tuple(self.header.get("installed", ()))
        kind = PackageFrame if installed and is_part(path, installed) else Frame
        return kind(path, self.name(function), line)
