"""Recording events to a ``.ctrace`` file, so that nothing emitted is lost however the process ends."""

from __future__ import annotations

import json
import os
import stat
import struct
import sys
import threading
import time
import weakref
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self
from zlib import crc32

from cudatool.errors import OutputError
from cudatool.trace import hooks, stacks
from cudatool.trace.events import RECORD_STRUCT, Event
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
from cudatool.trace.model import Frame

__all__ = ["Recorder", "cut_words"]

_RECORD = struct.Struct(RECORD_STRUCT)
_RECORDS_CAPACITY = 4096 * _RECORD.size
_TABLES_CAPACITY = 32 * 1024 - 64
_MAX_THREAD = 0xFFFF

_open: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
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
        self._recorded = 0
        self._failure = ""
        self._names = {"": 0}
        self._stacks = {0: 0}
        self._frames: dict[Frame, int] = {}
        self._threads: dict[int, int] = {}
        self._closed = False
        self._end = 0
        head = _header(header)
        self._descriptor, made = _create(self.path, force=force)
        try:
            self._append(head)
            self._tables = self._open_chunk(Chunk.TABLES, _TABLES_CAPACITY)
            self._records = self._open_chunk(Chunk.RECORDS, _RECORDS_CAPACITY)
            if made != self.path:
                os.replace(made, self.path)  # and not truncated: who reads the old one keeps it
        except OSError as error:
            os.close(self._descriptor)
            os.unlink(made)
            raise OutputError(f"{self.path}: cannot be written: {error.strerror}") from error
        _open.add(self)

    def __enter__(self) -> Self:
        hooks.subscribe(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Recorder {self.path!r}, {self._recorded} events{', closed' if self._closed else ''}>"

    @property
    def is_closed(self) -> bool:
        """Whether the file is finished."""
        return self._closed

    @property
    def recorded(self) -> int:
        """Number of events written so far."""
        return self._recorded

    def __call__(self, event: Event) -> None:
        """Write one event; when this returns, it is in the file. Closed, it does nothing.

        Raises
        ------
        OSError
            The file cannot grow. The hooks then drop the recorder, and the trace says so once it is closed.
        """
        moment, kind, device, flags, thread, stream, correlation, stack, name, address, size, aux0, aux1 = event
        with self._lock:
            if self._closed:
                return
            try:
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
                    full, self._records = self._records, self._open_chunk(Chunk.RECORDS, _RECORDS_CAPACITY)
                    full.seal()
            except OSError as error:
                self._failure = error.strerror or str(error)
                raise
            # fmt: off
            words = (moment, kind, device, flags, thread_index, 0, stream, correlation, stack_index, name_index,
                     address, size, aux0, aux1)
            # fmt: on
            try:
                data = _RECORD.pack(*words)
            except struct.error:  # a value too wide for its field: better cut than lost
                data = _RECORD.pack(*cut_words(words))
            self._records.append(data)
            self._recorded += 1

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
                os.ftruncate(self._descriptor, self._end)  # first: on a full disk this makes room for the rest
                self._write_chunk(Chunk.FACTS, _json(facts))
                self._write_chunk(Chunk.END, RECORD_COUNT.pack(self._recorded))
            except OSError as error:
                raise OutputError(f"{self.path}: cannot be finished: {error.strerror}") from error
            finally:
                os.close(self._descriptor)

    def _abandon(self) -> None:
        """In a forked child: forget the file, which the parent goes on writing."""
        self._lock = threading.RLock()  # another thread of the parent may have held it
        self._closed = True
        hooks.unsubscribe(self)
        self._tables.release()
        self._records.release()
        os.close(self._descriptor)

    def _open_chunk(self, kind: Chunk, capacity: int) -> OpenChunk:
        chunk = OpenChunk(self._descriptor, self._end, kind, capacity)
        self._end = chunk.end
        return chunk

    def _write_chunk(self, kind: Chunk, payload: bytes) -> None:
        self._append(sealed_chunk(kind, payload))

    def _append(self, data: bytes) -> None:
        os.posix_fallocate(self._descriptor, self._end, len(data))  # so that the write below is whole or not at all
        os.pwrite(self._descriptor, data, self._end)
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

    def _add_frame(self, frame: Frame) -> int:
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


def _header(given: dict[str, Any]) -> bytes:
    from importlib.metadata import version  # slow to import, and not needed to emit

    facts = {
        "cudatool": version("cudatool"),
        "python": sys.version.split()[0],
        "pid": os.getpid(),
        "start_time": _now(),
        "start_time_ns": time.monotonic_ns(),
    }
    payload = _json(facts | given)
    head = FILE_HEADER.pack(MAGIC, VERSION, len(payload), crc32(payload)) + payload
    return head.ljust(aligned(len(head)), b"\0")


def _create(path: str, *, force: bool) -> tuple[int, str]:
    """Return a new file and its name: another one than `path` if that exists and is to be replaced."""
    name = path
    if force and os.path.lexists(path):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OutputError(f"{path}: is not a regular file")
        name = f"{path}.{os.getpid()}.tmp"  # the old one stays until there is a new one
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), name
    except FileExistsError:
        raise OutputError(f"{path} exists; add -f (force=True) to overwrite it, or choose another name") from None
    except OSError as error:
        folder = os.path.dirname(path) or os.curdir
        why = error.strerror if os.path.isdir(folder) else "its directory does not exist"
        raise OutputError(f"cannot write {path}: {why}") from error


def cut_words(words: tuple[int, ...]) -> tuple[int, ...]:
    """Return the words of a record, each cut to the width of its field."""
    cut = []
    for word, code in zip(words, RECORD_STRUCT[1:], strict=True):
        bits = struct.calcsize(f"<{code}") * 8
        word &= (1 << bits) - 1
        cut.append(word - (1 << bits) if code.islower() and word >> (bits - 1) else word)
    return tuple(cut)


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
