"""Recording events in memory: for who wants to look at them while the program goes on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.trace import hooks, stacks
from cudatool.trace.events import RECORD, Event, pack_record
from cudatool.trace.model import Frame, Trace

__all__ = ["EventLog"]

_THREADS = 1 << 16


class EventLog:
    """A subscriber that keeps every event, 64 bytes each. Any thread may emit.

    Parameters
    ----------
    header
        Facts about the recording, for :attr:`Trace.header <cudatool.trace.model.Trace>`.
    """

    def __init__(self, header: dict[str, Any]) -> None:
        self.header = header
        self._lock = threading.RLock()
        self._data = bytearray()
        self._names, self._name_index = [""], {"": 0}
        self._stacks: list[tuple[int, ...]] = [()]
        self._stack_index = {0: 0}
        self._frames: list[Frame] = []
        self._frame_index: dict[Frame, int] = {}
        self._last_thread = 0
        self._event: Event | None = None  # the last one given, and how many bytes there were before it
        self._before = 0

    def __len__(self) -> int:
        """Number of events kept."""
        return len(self._data) // RECORD.itemsize

    def __call__(self, event: Event) -> None:
        """Keep one event."""
        moment, kind, device, flags, thread, stream, correlation, stack, name, address, size, aux0, aux1 = event
        with self._lock:
            if event is self._event:  # given again, because a signal handler's exception came in between
                if len(self._data) > self._before:
                    return
            else:
                self._event, self._before = event, len(self._data)
            name_index = self._name_index.get(name)
            if name_index is None:
                name_index = self._name_index[name] = len(self._names)
                self._names.append(name)
            stack_index = self._stack_index.get(stack)
            if stack_index is None:
                stack_index = self._add_stack(stack)
            self._last_thread = max(self._last_thread, thread)
            # fmt: off
            self._data += pack_record(
                moment, kind, device, flags, thread % _THREADS, 0, stream, correlation, stack_index, name_index,
                address, size, aux0, aux1,
            )
            # fmt: on

    def records(self, start: int = 0) -> npt.NDArray[np.void]:
        """Return a copy of the records from number `start` on, of dtype :data:`cudatool.trace.events.RECORD`."""
        with self._lock:
            return np.frombuffer(bytes(memoryview(self._data)[start * RECORD.itemsize :]), RECORD)

    def clear(self) -> None:
        """Forget the events. What :meth:`records` returned can still be made a trace."""
        with self._lock:
            self._data.clear()

    def trace(self, records: npt.NDArray[np.void]) -> Trace:
        """Return records of this log as a trace."""
        threads = [hooks.thread_name(thread) for thread in range(min(self._last_thread + 1, _THREADS))]
        return Trace(records, self._names, self._stacks, self._frames, threads, self.header)

    def _add_stack(self, stack: int) -> int:
        indices = []
        for frame in stacks.frames(stack):
            index = self._frame_index.get(frame)
            if index is None:
                index = self._frame_index[frame] = len(self._frames)
                self._frames.append(frame)
            indices.append(index)
        self._stacks.append(tuple(indices))
        self._stack_index[stack] = len(self._stacks) - 1
        return self._stack_index[stack]
