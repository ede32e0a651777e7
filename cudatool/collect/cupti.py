"""Records what any program does on a GPU, through CUPTI: memory, streams, events, copies, and when kernels ran.

CUPTI is NVIDIA's interface for tools (docs.nvidia.com/cupti). :file:`_cupti.c` notes each chosen call of the driver in
a log, whichever library makes it and on whichever thread, with Python's stack; and the kernels, copies and fills that
ran, with their times. The log is read here, by a thread of its own and before an event of another source. What its
calls become is in :mod:`~cudatool.collect.cupti_events`, what ran in :mod:`~cudatool.collect.cupti_work`.

Calls that other sources report are left out: those of our own runtime, and in a program whose PyTorch is watched
(:mod:`cudatool.collect.torch_program`) PyTorch's, or, where launches are not judged, all but other libraries' memory.
When our runtime's work ran is reported here.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from cudatool.collect import _cupti, _log_rows
from cudatool.collect.cupti_calls import (
    CALLS,
    CALLS_OF_CODE,
    CALLS_OF_MEMORY,
    KERNEL_ERRORS,
    PER_THREAD,
    LoggedCall,
    layout,
)
from cudatool.collect.cupti_events import CallEvents
from cudatool.collect.cupti_log import Tables
from cudatool.collect.cupti_memory import NOTED
from cudatool.collect.cupti_rows import ROW, What
from cudatool.collect.cupti_work import Enqueued, WorkDone
from cudatool.collect.gpu_launches import Launches
from cudatool.collect.levels import Level
from cudatool.collect.torch_rows import Action
from cudatool.loading.shared_libraries import loaded, wheel_folders
from cudatool.trace import hooks
from cudatool.trace.events import WORK, Event, Kind, join_records

__all__ = ["CuptiCollector", "CuptiUnavailable", "find_library"]

_PERIOD = 0.1  # seconds between two reads of the log
_MOST_ROWS = 1 << 22  # rows that wait to be read: 400 MiB
_LIBRARIES = ("libcupti.so.13", "libcupti.so.12")


class _Noted(IntEnum):
    """What the log has of launches; of those of our runtime, nothing."""

    NOT = 0
    WITH_ARGUMENTS = 1
    WITH_STACKS = 2


class CuptiUnavailable(Exception):
    """CUPTI cannot be used here; the message says why."""


def find_library() -> str:
    """Return the libcupti to use: the one already loaded, else NVIDIA's wheel, else the CUDA toolkit's.

    Raises
    ------
    CuptiUnavailable
        There is none.
    """
    for name in _LIBRARIES:
        if loaded(name):
            return name
    wheels = wheel_folders()
    places = [str(path) for folder in wheels for name in _LIBRARIES for path in sorted(folder.glob(f"*/lib/{name}"))]
    for root in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")):
        places += [f"{root}/{lib}/{name}" for lib in ("extras/CUPTI/lib64", "lib64") for name in _LIBRARIES]
    for place in (*filter(os.path.exists, places), *_LIBRARIES):
        if _can_load(place):
            return place
    raise CuptiUnavailable("there is no libcupti.so: pip install nvidia-cuda-cupti")


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


class CuptiCollector:
    """Records the process's use of the driver until :meth:`stop`.

    Parameters
    ----------
    pytorch_is_watched
        Returns whether PyTorch's own source reports the program's work, some time later
        (:mod:`cudatool.collect.torch_program`). Then only what is not PyTorch's is reported here, and of that only
        memory unless there are `launches`.
    level
        How much of the device's work is recorded.
    blocks_are_watched
        Returns whether PyTorch's allocator writes to the log (:mod:`cudatool.collect.torch_blocks`).
    launches
        What infers the accesses of each launch; None to report none. Once our runtime has reported work, only ranges
        are reported in any case; without `launches`, also other libraries' memory.
    pytorch_passes_on
        Returns whether the event that is being passed on is PyTorch's.
    graphs_may_exist
        Whether graphs may have been instantiated before: their launches are then recorded node by node.
    sample
        Called whenever the log is read without another source's event: with false some ten times a second, and with
        true when all that happened so far is asked for.

    Raises
    ------
    CuptiUnavailable
        CUPTI is not installed, another tool holds it, or it refuses.
    """

    def __init__(
        self,
        pytorch_is_watched: Callable[[], bool],
        level: Level = Level.KERNELS,
        blocks_are_watched: Callable[[], bool] = lambda: False,
        *,
        sample: Callable[[bool], None] = lambda last: None,
        launches: Launches | None = None,
        pytorch_passes_on: Callable[[], bool] = lambda: False,
        graphs_may_exist: bool = False,
    ) -> None:
        self._native = _cupti
        self._pytorch_is_watched, self._pytorch_passes_on = pytorch_is_watched, pytorch_passes_on
        self._sample = sample
        self._runtime_works = False
        self._lock = threading.RLock()
        self._reading, self._paused_by = False, 0  # the latter is a thread
        self._waiting: deque[npt.NDArray[np.void]] = deque()  # calls to be passed on, in the order of their times
        self._work_done: list[npt.NDArray[np.void]] = []
        self._stopping = threading.Event()
        self.activity_error = ""
        """Why kernels and the times of copies are missing; empty if they are not."""

        calls = CALLS_OF_MEMORY if level is Level.MEMORY else CALLS
        if launches is not None:
            calls = CALLS | CALLS_OF_CODE
        self.version, numbers = _start(calls)
        self._tables, self._enqueued = Tables(), Enqueued()
        self._calls = CallEvents(
            calls,
            numbers,
            self._tables,
            self._enqueued,
            launches,
            pytorch_is_watched=pytorch_is_watched,
            blocks_are_watched=blocks_are_watched,
            source=self,
        )
        self._work = WorkDone(self._enqueued, self._tables.names, self._calls.streams_of, self)
        self._sees_work = level is not Level.MEMORY and self._watch_activity(
            level is Level.GRAPH_NODES or graphs_may_exist
        )
        self._work.calls_are_noted = self._watch_launches(level) is not _Noted.NOT
        _running.add(self)
        hooks.subscribe(self, first=True)
        hooks.mark = _cupti.mark
        self._thread = threading.Thread(target=self._run, name="cudatool reader of CUPTI's log", daemon=True)
        self._thread.start()

    def _watch_launches(self, level: Level) -> _Noted:
        if self._calls.launches is None and level is not Level.LAUNCHES:
            return _Noted.NOT
        how = _Noted.WITH_STACKS if self._calls.launches is None else _Noted.WITH_ARGUMENTS
        _cupti.watch_launches(how)
        return how

    def _watch_activity(self, inside_graphs: bool) -> bool:
        try:
            _cupti.watch_activity(inside_graphs)
        except OSError as error:
            self.activity_error = str(error)
        return not self.activity_error

    @property
    def watches_launches(self) -> bool:
        """Whether what each launch may access has been reported so far, or that it is not known."""
        return self._calls.launches is not None

    def flush(self) -> None:
        """Pass on all that happened so far."""
        self._native.flush(True)
        self._sample(True)
        self._native.sample_use()
        self._read(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pass on nothing inside of the ``with`` block, but what :meth:`pass_on_snapshot` passes on."""
        self._native.flush(False)  # not what still runs: CUPTI would write to buffers that it gave back
        with self._lock:
            self._read(None)
            self._paused_by = threading.get_ident()  # its own events would pass on what came before them
            try:
                yield
            finally:
                self._paused_by = 0

    def pass_on_snapshot(self) -> bool:
        """Pass on what happened up to a snapshot of PyTorch's allocator that was taken just now.

        Returns whether it is one moment's: no device's blocks changed between its own snapshot and the last device's.
        """
        with self._lock:
            self._read(0)
            rows = join_records([np.empty(0, ROW), *self._waiting])
            rows = rows[rows["what"] == What.BLOCK]
            is_snapshot = rows["words"][:, 0] == Action.SNAPSHOT
            if not is_snapshot.any():
                return False
            taken = rows[is_snapshot]
            last = int(taken["time"].max())
            changes = rows[~is_snapshot & (rows["time"] <= last)]
            self._read(last)
        own = dict(zip(taken["device"].tolist(), taken["time"].tolist(), strict=True))
        return not any(
            own.get(device, last) <= time
            for device, time in zip(changes["device"].tolist(), changes["time"].tolist(), strict=True)
        )

    def pass_on(self, records: npt.NDArray[np.void], names: list[str]) -> None:
        """Pass on records of another source that have one time, and before them what the log has up to then."""
        self._read(int(records["time"][0]))
        hooks.forward_rows(records, names, source=self)

    def note_living(self, events: Iterable[Event]) -> None:
        """Note memory of the driver, and blocks of CuPy's pool, from before the recording: its release is an event."""
        with self._lock:
            for event in events:
                if event.kind is Kind.MEM_ALLOC:
                    self._calls.memory.note_living(event)
                elif event.kind is Kind.HOST_ALLOC:
                    self._calls.memory.host.add(event.address, event.size)
                elif event.kind is Kind.POOL_ALLOC and self._calls.launches is not None:
                    self._calls.launches.blocks.add(event.address, event.size)

    def stop(self) -> None:
        """Stop recording. Stopping again changes nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self.flush()
        self._native.stop()
        hooks.mark = None
        hooks.unsubscribe(self)

    def _forget(self) -> None:
        """Reset in a forked child, where CUDA does not work: another thread of the parent may have held the lock."""
        self._stopping.set()
        self._lock = threading.RLock()
        hooks.mark = None
        hooks.unsubscribe(self)

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD):
            self._native.flush(False)
            self._sample(False)
            self._native.sample_use()
            # What PyTorch did in between is reported later, and with it the calls in between.
            self._read(0 if self._pytorch_is_watched() else None)

    def __call__(self, event: Event) -> None:
        """Pass on the log's calls from before another source's event."""
        if self._paused_by == threading.get_ident():
            return
        if event.kind in WORK and not self._pytorch_passes_on():
            self._runtime_works = True
            self._work.add_operation(event.correlation, event.stream)
        if self._waiting or self._native.is_waiting():
            self._read(event.time)
        if event.kind in NOTED:
            with self._lock:
                self._calls.memory.note(event)

    def before_rows(self, rows: npt.NDArray[np.void]) -> int:
        """Pass on the log's calls from before these events of another source (:func:`.hooks.forward_rows`)."""
        with self._lock:
            if self._paused_by == threading.get_ident() or self._reading:
                return len(rows)
            if self._waiting or self._native.is_waiting():
                self._read(int(rows["time"][0]))
            if not self._waiting:
                return len(rows)
            return int(rows["time"].searchsorted(self._waiting[0]["time"][0]))

    def write_rows(self, rows: npt.NDArray[np.void], names: Sequence[str]) -> None:
        """Note the memory that these events of another source report."""
        if not self._pytorch_passes_on():
            for row in rows[np.isin(rows["kind"], list(WORK))]:
                self._runtime_works = True
                self._work.add_operation(int(row["correlation"]), int(row["stream"]))
        with self._lock:
            self._calls.memory.note_all(rows)

    def _read(self, until: int | None) -> None:
        """Read the log, and pass on the calls up to a time; without a time, also the work that was done."""
        with self._lock:
            if self._reading:  # called by a finalizer during a read
                return
            self._reading = True
            try:
                drained = self._native.drain()
                if drained is not None:
                    self._sort(*drained)
                while self._waiting and (until is None or self._waiting[0]["time"][0] <= until):
                    calls = self._waiting.popleft()
                    later = len(calls) if until is None else int(calls["time"].searchsorted(until, side="right"))
                    if later < len(calls):
                        self._waiting.appendleft(calls[later:])
                    if not self._sees_work:
                        self._enqueued.clear()  # nothing will be said of when it ran
                    self._calls.read(calls[:later])
                self._calls.pass_on()
                if until is None and (self._work_done or self._work.is_waiting):
                    done, self._work_done = self._work_done, []
                    self._work.report(done)
            finally:
                self._reading = False

    def _sort(
        self,
        data: bytes,
        names: list[bytes],
        frames: list[bytes],
        found: list[bytes],
        paths: list[bytes],
        lost: int,
        at: int,
        blob: bytes,
    ) -> None:
        """Sort a part of the log, and drop what is not to be reported. Rows point to the `blob`, which begins `at`."""
        self._calls.pointed.add(at, blob)
        self._tables.add(names, frames, found, paths)
        if lost:
            self._calls.warn_of_lost(lost)
        # Beside launches, what is PyTorch's did not come into the log.
        elsewhere = self._runtime_works or (self._calls.launches is None and self._pytorch_is_watched())
        if elsewhere and self._calls.launches is not None:
            self._calls.leave_out_accesses()
            _cupti.watch_launches(_Noted.NOT)
        is_ours = self._tables.columns()[1]
        calls, work, contexts, operations = _log_rows.sort(
            data, is_ours, self._calls.asks, self._calls.always_reported if elsewhere else None
        )
        for row in np.frombuffer(contexts, ROW):
            self._calls.add_context(int(row["device"]), int(row["words"][0]))
        if calls:
            self._waiting.append(np.frombuffer(calls, ROW))
        marked = np.frombuffer(operations, ROW)
        for called, operation in zip(marked["correlation"].tolist(), marked["words"][:, 0].tolist(), strict=True):
            self._enqueued.add_operation(called, operation)
        if work:
            done = np.frombuffer(work, ROW)
            self._work_done.append(done[self._enqueued.of(done).calls[:, 0] != 0] if elsewhere else done)


_running: weakref.WeakSet[CuptiCollector] = weakref.WeakSet()


def _start(calls: dict[str, LoggedCall]) -> tuple[int, dict[int, str]]:
    """Let CUPTI log these calls; return its version, and the name of each by its number."""
    path = find_library()
    chosen = {
        name + end: (*layout(call), int(call.use), call.read is None, call.enqueues, call.launches)
        for name, call in calls.items()
        for end in ("", *PER_THREAD)
    }
    try:
        return _cupti.open(path), _cupti.start(chosen, _MOST_ROWS, tuple(KERNEL_ERRORS))
    except OSError as error:
        raise CuptiUnavailable(f"{path}: {error}") from error


def _forget_all() -> None:
    for collector in list(_running):
        collector._forget()


os.register_at_fork(after_in_child=_forget_all)
