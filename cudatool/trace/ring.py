"""Keeping the last events in bounded memory, to write them when something happens: for recordings that last for days.

::

    base     what was live before the oldest chunk: segments, blocks, streams, open ranges
    chunks   the events, in order; the newest is being filled

    a chunk is full       ->  another one is begun
    too much is kept      ->  the oldest chunks are folded into the base (:func:`cudatool.trace.window.window`)
    write(path)           ->  a trace that begins with the base, as a part of a recording does

Memory is that of the chunks, of what is live, and of the names that these refer to. Stacks are interned for the whole
process, whatever records.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.trace._append import Tail, Writer
from cudatool.trace.distinct import distinct
from cudatool.trace.events import RECORD, Event, Kind, join_records, pack_record
from cudatool.trace.model import Trace, is_of_kind
from cudatool.trace.recorder import Recorder
from cudatool.trace.window import window

__all__ = ["Ring"]

_CHUNK: Final = 4096  # events
_HEADER: Final = 64  # bytes before them
_THREADS: Final = 1 << 16
_FEW_NAMES: Final = 4096  # that are kept although nothing refers to them any more


class _Chunk(Tail):
    """Events that are being kept, in memory of its own."""

    def __init__(self) -> None:
        self._bytes = np.zeros(_HEADER + _CHUNK * RECORD.itemsize, np.uint8)
        super().__init__(self._bytes.data, _HEADER)

    def records(self) -> npt.NDArray[np.void]:
        """Return a copy of the events."""
        found: npt.NDArray[np.void] = self._bytes[_HEADER : _HEADER + self.used].view(RECORD).copy()
        return found


class Ring(Writer):
    """A subscriber that keeps the last events. Any thread may emit, and any may write.

    Parameters
    ----------
    header
        Facts about the recording, for the traces that are written.
    most_bytes
        Of events, 64 bytes each: at least as many are kept, and at most a chunk of 256 KiB more.
    most_age_ns
        Older events are left out, although there would be room for them. None: none is too old.
    """

    def __init__(self, header: dict[str, Any], *, most_bytes: int, most_age_ns: int | None = None) -> None:
        self.header = header
        self._most = max(-(-most_bytes // (_CHUNK * RECORD.itemsize)), 1)  # chunks
        self._age = most_age_ns
        self._lock = threading.RLock()
        self._chunks: deque[npt.NDArray[np.void]] = deque()
        self._records: _Chunk = _Chunk()
        self._base = np.empty(0, RECORD)
        self._prior: dict[int, int] = {}
        self._folded = 0  # events that are no longer kept
        self._names, self._stacks, self._threads = {"": 0}, {0: 0}, {}

    def __len__(self) -> int:
        """Number of events kept, without the base."""
        with self._lock:
            return sum(map(len, self._chunks)) + self._records.used // RECORD.itemsize

    @property
    def events(self) -> int:
        """Number of events so far, kept or not: also the number of the next one."""
        with self._lock:
            return self._folded + len(self)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the events and of what describes the state before them."""
        with self._lock:
            return len(self) * RECORD.itemsize + self._base.nbytes

    @property
    def names(self) -> int:
        """Number of names in the table."""
        return len(self._names)

    def _write(self, event: Event) -> None:
        """Keep one event that is not like others before it, for the call of a ring."""
        moment, kind, device, flags, thread, stream, correlation, stack, name, address, size, aux0, aux1 = event
        with self._lock:
            kept = self._full_bytes + self._records.used
            if event is self._event:  # given again, because a signal handler's exception came in between
                if kept > self._before:
                    return
            elif self._records.used == self._records.capacity:
                self._close_chunk()
            self._event, self._before = event, kept
            self._stacks[stack] = stack  # those of the process
            of_thread = self._threads.setdefault(thread, thread % _THREADS)
            # fmt: off
            self._records.append(pack_record(
                moment, kind, device, flags, of_thread, 0, stream, correlation, stack, self._name(name),
                address, size, aux0, aux1,
            ))
            # fmt: on

    def write_rows(self, rows: npt.NDArray[np.void], names: Sequence[str]) -> None:
        """Keep many events, as :func:`cudatool.trace.hooks.forward_rows` gives them."""
        with self._lock:
            self._close_chunk()
            rows = rows.copy()
            table = np.array([self._name(name) for name in names], rows["name"].dtype)
            rows["name"] = table[rows["name"]]
            self._chunks.extend(rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK))
            self._fold()

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        facts: dict[str, Any] | None = None,
        first: int = 0,
        until_ns: int | None = None,
        force: bool = False,
    ) -> int:
        """Write what is kept to a trace file, and return the number of events, without those of the base.

        Parameters
        ----------
        facts
            More facts for the header.
        first
            The number of the first event to write, if it is still kept; else the oldest one that is.
        until_ns
            Leave out what happened after this time, but not when work from before it ran, nor what that touched.
        force
            Replace an existing file.

        Raises
        ------
        OutputError
            The file exists and `force` is not set, or it cannot be written.
        """
        with self._lock:
            part = self._part(first, until_ns)
            names = list(self._names)
        start, stop, _ = part.header["window"]
        header = {**part.header, **(facts or {})}
        if start:
            header["unknown_before"] = [f"what {start:,} events before this part of the recording did"]
        with closing(Recorder(path, header=header, force=force)) as recorder:
            recorder.write_rows(part.records, names)
        return int(stop - start)

    def _part(self, first: int, until_ns: int | None) -> Trace:
        """Return what is to be written as a part of a recording; its records refer to the ring's names."""
        kept = join_records([*self._chunks, self._records.records()])
        begin = max(first - self._folded, 0)
        if self._age is not None and len(kept):
            begin = max(begin, int(np.searchsorted(kept["time"], time.monotonic_ns() - self._age)))
        begin = min(begin, len(kept))
        events = self._folded + len(kept)
        if until_ns is not None:
            own = kept[begin:]
            own = own[(own["time"] <= until_ns) | _is_of_work_before(own, until_ns)]
            kept = join_records([kept[:begin], own])
        whole = Trace(join_records([self._base, kept]), header={"prior_records": self._prior})
        part = window(whole, len(self._base) + begin, len(whole.records))
        prior = part.header["prior_records"]
        part.header = {
            **self.header,
            "prior_records": prior,
            "window": [self._folded + begin, self._folded + len(kept), events],
        }
        return part

    def _close_chunk(self) -> None:
        if self._records.used:
            self._chunks.append(self._records.records())
            # One step, which no signal handler can come into the middle of.
            self._full_bytes, self._records = self._full_bytes + self._records.used, _Chunk()
        self._fold()

    def _fold(self) -> None:
        """Put chunks that are too many, or wholly too old, into the base."""
        oldest = time.monotonic_ns() - self._age if self._age is not None else 0
        gone = []
        while len(self._chunks) > self._most or (self._chunks and int(self._chunks[0]["time"][-1]) < oldest):
            gone.append(self._chunks.popleft())
        if not gone:
            return
        whole = Trace(join_records([self._base, *gone]), header={"prior_records": self._prior})
        count = len(whole.records)
        state = window(whole, count, count)
        self._folded += count - len(self._base)
        self._base, self._prior = state.records, state.header["prior_records"]
        if len(self._names) > _FEW_NAMES:
            self._forget_names()

    def _forget_names(self) -> None:
        """Drop the names that nothing kept refers to, once there are many: ranges may be numbered for days."""
        arrays = [self._base, *self._chunks]
        used = distinct(*(array["name"] for array in arrays))
        if 2 * len(used) > len(self._names):
            return
        table = np.zeros(len(self._names), np.uint32)
        used = distinct(used, np.zeros(1, used.dtype))
        table[used] = np.arange(len(used))
        self._chunks = deque(array.copy() for array in self._chunks)
        self._base = self._base.copy()
        for array in (self._base, *self._chunks):
            array["name"] = table[array["name"]]
        names = list(self._names)
        self._names = {names[number]: new for new, number in enumerate(used.tolist())}

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))


def _is_of_work_before(records: npt.NDArray[np.void], time_ns: int) -> npt.NDArray[np.bool_]:
    """Return which records say of work from before a time when it ran and what it touched."""
    says = is_of_kind(records, Kind.EXECUTION, Kind.ACCESS) & (records["correlation"] != 0)
    work = records["correlation"][~says & (records["time"] <= time_ns)]
    found: npt.NDArray[np.bool_] = says & np.isin(records["correlation"], work)
    return found
