"""Recording events to a ``.ctrace`` file, so that nothing emitted is lost however the process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import numpy as np
import numpy.typing as npt

from cudatool.errors import OutputError
from cudatool.files import KeptDescriptor, temporary_name
from cudatool.trace import _rows, hooks, stacks
from cudatool.trace._append import Writer
from cudatool.trace.events import RECORD, Event, pack_record
from cudatool.trace.file import (
    ENTRY,
    FILE_HEADER,
    FRAME,
    MAGIC,
    RECORD_COUNT,
    VERSION,
    Chunk,
    OpenChunk,
    Table,
    aligned,
    sealed_chunk,
)
from cudatool.trace.frames import is_installed
from cudatool.trace.model import Frame
from cudatool.trace.packages import package_of

__all__ = ["Recorder"]

_RECORDS_CAPACITY = 4096 * RECORD.itemsize
_MOST_AT_ONCE = 65536 * RECORD.itemsize
_TABLES_CAPACITY = 32 * 1024 - 64
_MAX_THREAD = 0xFFFF
_OFFSETS = {column: offset for column, (_, offset, *_) in (RECORD.fields or {}).items()}
_INTERNED = tuple((_OFFSETS[column], RECORD[column].itemsize) for column in ("name", "stack", "thread"))
"""Offset and bytes of the columns that are indices into the file's tables."""

_Replaced = tuple[int, int, bytes, npt.NDArray[np.uint32]]

_open: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder(Writer):
    """A subscriber that writes every event to a file.

    ::

        with Recorder("out.ctrace", header={"argv": sys.argv}):
            ...                            # everything emitted here is recorded

    Entering subscribes; leaving closes. Any thread may emit. A forked child does not record: the file is its
    parent's.

    Parameters
    ----------
    path
        The file to write.
    header
        Facts about the recording that JSON can hold, for example ``device`` and ``argv``. Python's and cudatool's
        version, the process id and the start time are added.
    force
        Replace an existing file.

    Raises
    ------
    OutputError
        The file exists and `force` is not set, or it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, header: dict[str, Any], force: bool = False) -> None:
        self.path = os.fspath(path)
        self._lock = threading.RLock()
        self._failure = ""
        self._names = {"": 0}
        self._stacks = {0: 0}
        self._frames: dict[Frame, int] = {}
        self._installed: tuple[str, ...] = ()
        self._threads = {}
        self._end = 0
        head = _header(header)
        self._descriptor, made = _create(self.path, force=force)
        self._place = os.path.abspath(self.path)  # the program may change directory
        try:
            _lock(self._file())
            self._append(head)
            self._tables = self._open_chunk(Chunk.TABLES, _TABLES_CAPACITY)
            self._records: OpenChunk = self._open_chunk(Chunk.RECORDS, _RECORDS_CAPACITY)
            if made != self.path:
                os.replace(made, self.path)  # and not truncated: who reads the old one keeps it
        except OSError as error:
            self._descriptor.close()
            os.unlink(made)
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error
        _open.add(self)

    def __enter__(self) -> Self:
        hooks.subscribe(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._closed and not hooks.is_subscribed(self):
            self._failure = self._failure or "the program removed the recorder from those that receive events"
        self.close()

    def __repr__(self) -> str:
        return f"<Recorder {self.path!r}, {self.recorded} events{', closed' if self._closed else ''}>"

    @property
    def is_closed(self) -> bool:
        """Whether the file is finished."""
        return self._closed

    @property
    def place(self) -> str:
        """The absolute path of the file, wherever the program is by now."""
        return self._place

    @property
    def recorded(self) -> int:
        """Number of events written so far."""
        return self._written // RECORD.itemsize

    @property
    def _written(self) -> int:
        return self._full_bytes + self._records.used

    def _write(self, event: Event) -> None:
        """Write one event that is not like others before it, for the call of a recorder; closed, do nothing.

        An exception that a signal handler raises in the middle does no harm: given the same event again, this goes on.

        Raises
        ------
        OSError
            The file cannot grow. The hooks then drop the recorder (:meth:`dropped`).
        """
        moment, kind, device, flags, thread, stream, correlation, stack, name, address, size, aux0, aux1 = event
        with self._lock:
            if self._closed:
                return
            written = self._full_bytes + self._records.used
            if event is self._event:  # given again
                if written > self._before:
                    return
            else:
                self._event, self._before = event, written
            # Tables first: a record must never be in the file before what it points to.
            name_index = self._names.get(name)
            if name_index is None:
                name_index = self._add_name(name)
            stack_index = self._stacks.get(stack)
            if stack_index is None:
                stack_index = self._add_stack(stack)
            thread_index = self._threads.get(thread)
            if thread_index is None:
                thread_index = self._add_thread(thread)
            if self._records.used == self._records.capacity:
                full, more = self._records, self._open_chunk(Chunk.RECORDS, _RECORDS_CAPACITY)
                # One step, which no signal handler can come into the middle of.
                self._full_bytes, self._records = self._full_bytes + full.used, more
                full.seal()
            # fmt: off
            self._records.append(pack_record(
                moment, kind, device, flags, thread_index, 0, stream, correlation, stack_index, name_index,
                address, size, aux0, aux1,
            ))
            # fmt: on

    def write_rows(self, rows: npt.NDArray[np.void], names: Sequence[str]) -> None:
        """Write many events, as :func:`cudatool.trace.hooks.forward_rows` gives them.

        Raises
        ------
        OSError
            The file cannot grow.
        """
        with self._lock:
            if self._closed:
                return
            rows = np.ascontiguousarray(rows, RECORD)
            replaced = self._replaced(rows, names)
            while len(rows):
                if self._records.used == self._records.capacity:
                    room = min(max(rows.nbytes, _RECORDS_CAPACITY), _MOST_AT_ONCE)  # many are one chunk
                    full, more = self._records, self._open_chunk(Chunk.RECORDS, room)
                    self._full_bytes, self._records = self._full_bytes + full.used, more
                    full.seal()
                chunk = self._records
                part = rows[: (chunk.capacity - chunk.used) // RECORD.itemsize]
                _rows.write(part, RECORD.itemsize, self._file(), chunk.at, replaced)
                chunk.filled(part.nbytes)
                rows = rows[len(part) :]

    def _replaced(self, rows: npt.NDArray[np.void], names: Sequence[str]) -> tuple[_Replaced, ...]:
        """Return what the file has for the values of columns, for ``_rows.write``; new ones get into its tables."""
        indices_of: list[Callable[[int], int]] = [lambda name: self._name(names[name]), self._stack, self._thread]
        found = _rows.distinct(rows, RECORD.itemsize, _INTERNED)
        return tuple(
            (*column, values, np.array([index_of(value) for value in memoryview(values).cast("I")], np.uint32))
            for column, values, index_of in zip(_INTERNED, found, indices_of, strict=True)
        )

    def dropped(self, error: BaseException) -> None:
        """Note in the file that events are missing from here on: the hooks have removed this subscriber."""
        with self._lock:
            if not self._closed:
                self._failure = getattr(error, "strerror", None) or str(error) or type(error).__name__
                self._records.mark_stopped()

    def add_facts(self, facts: dict[str, Any]) -> None:
        """Add to the facts in the header, or replace some: an exit status, a warning. They are written at once.

        Raises
        ------
        OutputError
            The file cannot grow.
        """
        payload = _json(facts)
        with self._lock:
            if not self._closed:
                try:
                    self._write_chunk(Chunk.FACTS, payload)
                except OSError as error:
                    raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Stop recording and finish the file. Closing again changes nothing.

        Raises
        ------
        OutputError
            The end of the file could not be written. What was recorded is in it.
        """
        interruption = hooks.deliver_waiting()
        hooks.unsubscribe(self)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _open.discard(self)
            facts = {"end_time": _now()}
            if self._failure:
                facts["recording_error"] = self._failure
            try:
                for chunk in (self._tables, self._records):
                    last = chunk.end == self._end
                    chunk.seal(shrink=last)
                    self._end = chunk.end if last else self._end
                os.ftruncate(self._file(), self._end)  # first: on a full disk this makes room for the rest
                self._write_chunk(Chunk.FACTS, _json(facts))
                self._write_chunk(Chunk.END, RECORD_COUNT.pack(self.recorded))
            except OSError as error:
                raise OutputError(f"{self.path}: cannot be finished: {error.strerror}") from error
            finally:
                self._descriptor.close()
        if interruption is not None:
            raise interruption

    def _abandon(self) -> None:
        """In a forked child: forget the file, which the parent goes on writing."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._closed = True
        hooks.unsubscribe(self)
        self._tables.release()
        self._records.release()
        self._descriptor.close()

    def _file(self) -> int:
        """Return the descriptor of the file, opened again if the program closed it: its number may be another file's.

        Raises
        ------
        OSError
            The program closed it, and the file is no longer where it was.
        """
        number = self._descriptor.number
        if number is None:
            again = KeptDescriptor(os.open(self._place, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
            number = again.number
            if number is None or again.identity != self._descriptor.identity:
                again.close()
                raise OSError(errno.EBADF, "the program closed the descriptor of the trace and replaced its file")
            self._descriptor = again
            _lock(number)
        return number

    def _open_chunk(self, kind: Chunk, capacity: int) -> OpenChunk:
        chunk = OpenChunk(self._file(), self._end, kind, capacity)
        self._end = chunk.end
        return chunk

    def _write_chunk(self, kind: Chunk, payload: bytes) -> None:
        self._append(sealed_chunk(kind, payload))

    def _append(self, data: bytes) -> None:
        descriptor = self._file()
        os.posix_fallocate(descriptor, self._end, len(data))  # so that the write below is whole or not at all
        os.pwrite(descriptor, data, self._end)
        self._end += len(data)

    def _add_entry(self, table: Table, index: int, data: bytes) -> None:
        entry = ENTRY.pack(table, index, len(data)) + data
        if self._tables.used + len(entry) > self._tables.capacity:
            capacity = max(_TABLES_CAPACITY, aligned(len(entry)))
            full, self._tables = self._tables, self._open_chunk(Chunk.TABLES, capacity)
            full.seal()
        self._tables.append(entry)

    def _add_name(self, name: str) -> int:
        index = len(self._names)
        self._add_entry(Table.NAMES, index, _utf8(name))
        self._names[name] = index
        return index

    def _name(self, name: str) -> int:
        index = self._names.get(name)
        return self._add_name(name) if index is None else index

    def _stack(self, stack: int) -> int:
        index = self._stacks.get(stack)
        return self._add_stack(stack) if index is None else index

    def _thread(self, thread: int) -> int:
        index = self._threads.get(thread)
        return self._add_thread(thread) if index is None else index

    def _add_frame(self, frame: Frame) -> int:
        package = "" if is_installed(frame.file) else package_of(frame.file)
        if package and package not in self._installed:
            self._write_chunk(Chunk.FACTS, _json({"installed": [*self._installed, package]}))
            self._installed = (*self._installed, package)
        index = len(self._frames)
        file, function = self._name(frame.file), self._name(frame.function)
        self._add_entry(Table.FRAMES, index, FRAME.pack(file, function, frame.line))
        self._frames[frame] = index
        return index

    def _add_stack(self, stack: int) -> int:
        indices = []
        for frame in stacks.frames(stack):
            index = self._frames.get(frame)
            indices.append(self._add_frame(frame) if index is None else index)
        index = len(self._stacks)
        self._add_entry(Table.STACKS, index, struct.pack(f"<{len(indices)}I", *indices))
        self._stacks[stack] = index
        return index

    def _add_thread(self, thread: int) -> int:
        index = min(len(self._threads), _MAX_THREAD)
        name = hooks.thread_name(thread) if len(self._threads) < _MAX_THREAD else "other threads"
        self._add_entry(Table.THREADS, index, _utf8(name))
        self._threads[thread] = index
        return index


@cache
def _own_version() -> str:
    """Return cudatool's version, which to read takes as long as a short recording."""
    from importlib.metadata import version  # slow to import, and not needed to emit

    return version("cudatool")


def _header(given: dict[str, Any]) -> bytes:
    facts = {
        "cudatool": _own_version(),
        "python": sys.version.split()[0],
        "pid": os.getpid(),
        "start_time": _now(),
        "start_time_ns": time.monotonic_ns(),  # the clock of events, and at the same moment the one of the world
        "start_unix_ns": time.time_ns(),
    }
    payload = _json(facts | given)
    head = FILE_HEADER.pack(MAGIC, VERSION, len(payload), crc32(payload)) + payload
    return head.ljust(aligned(len(head)), b"\0")


def _create(path: str, *, force: bool) -> tuple[KeptDescriptor, str]:
    """Return a new file and its name: another one than `path` if that exists and is to be replaced."""
    name = path
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OutputError(f"cannot write {path}: a trace is a regular file")
    if force and os.path.lexists(path):
        name = temporary_name(path)  # the old one stays until there is a new one
    try:
        return KeptDescriptor(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)), name
    except FileExistsError:
        raise OutputError(f"{path} exists; add -f (force=True) to overwrite it, or choose another name") from None
    except OSError as error:
        folder = os.path.dirname(path) or os.curdir
        why = error.strerror if os.path.isdir(folder) else "its directory does not exist"
        raise OutputError(f"cannot write {path}: {why}") from error


def _lock(descriptor: int) -> None:
    """Show readers, as long as the file is open here, that it is still being written (:func:`reader.read`)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass  # a file system without locks: readers then take the program for ended


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, default=str).encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _abandon_all() -> None:
    for recorder in list(_open):
        recorder._abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)
