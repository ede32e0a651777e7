"""Records the processes that a recorded program starts, one trace each, next to the program's.

::

    the recorded program                          a process that it starts
    --------------------                          ------------------------
    recorded(): makes the journal, and sets
      the variable in the environment
    starts a process: CHILD_PROCESS ----------->  child.start(): notes BEGAN
                                                  imports CUDA: begin()
                                                  first event of a device: makes its trace, notes TRACED
    ends: reads the journal, CHILD_RECORDED       ends: finishes its trace

A forked child keeps its parent's sources of events, and gets a trace of its own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from cudatool import _driver, recording
from cudatool.config import CHILD, QUIET
from cudatool.errors import CudatoolError, OutputError
from cudatool.files import KeptDescriptor
from cudatool.processes import child
from cudatool.processes.ends import Ends, status_of_zombie
from cudatool.processes.journal import (
    BEGAN,
    ENDED,
    IMPORTED,
    REPLACED,
    STARTED,
    TRACED,
    UNRECORDED,
    ProcessJournal,
    identity_of,
)
from cudatool.progress import announce
from cudatool.recording import variables
from cudatool.recording.identity import job_facts
from cudatool.recording.on_oom import OomReport
from cudatool.text import printable
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind, ProcessFlag, WarningCode, WarningFlag
from cudatool.trace.recorder import Recorder

__all__ = ["ChildSettings", "begin", "recorded", "unrecorded"]

_KEPT: Final = (
    *(Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.RANGE_START, Kind.RANGE_END, Kind.CHILD_PROCESS, Kind.WARNING),
    Kind.STREAM_CREATE,  # also for streams that the parent of a forked child had
)
"""Events that come into the trace of a process that uses a device later."""
_NO_USE: Final = frozenset(
    (*_KEPT, Kind.MARK, Kind.CALL, Kind.HAND_OVER, Kind.TAKE_OVER, Kind.HOST_ACCESS, Kind.CHILD_RECORDED)
)
"""Events that are no use of a device."""
_UNSIGNED: Final = (1 << 64) - 1
_MOST_KEPT: Final = 10_000
_MOST_NAMES: Final = 1000  # that are tried for a trace


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """What the processes of a recorded program need to know; JSON can hold it.

    Attributes
    ----------
    path
        The program's own trace.
    run
        An id that only its trace and theirs have in common.
    with_stacks, measure_accesses, checks, level, on_oom
        See :func:`cudatool.recording.record`; and `forget` is its `children_forget`.
    """

    path: str
    run: str
    with_stacks: bool
    measure_accesses: bool
    checks: Sequence[str]
    level: str
    on_oom: bool = False
    forget: bool = False


_Kept = TypeVar("_Kept")

_settings: ChildSettings | None = None
_first: int = 0  # the process id of the recorded program, in itself and in the children that it forks
_recorder: _ChildRecorder | None = None
_had_started_driver = False  # this process or one that it was forked from, when it last forked
_report: OomReport | None = None


@contextmanager
def recorded(settings: ChildSettings, recorder: Recorder) -> Iterator[None]:
    """Record the processes that this one starts inside of the ``with`` block, and list them at its end."""
    global _settings, _first
    before = os.environ.get(CHILD)
    file = KeptDescriptor(os.memfd_create("cudatool journal"))
    number = file.number
    assert number is not None
    journal = ProcessJournal(f"/proc/{os.getpid()}/fd/{number}", identity_of(number))
    _settings, _first = settings, os.getpid()
    os.environ[CHILD] = "\n".join((journal.path, journal.identity, json.dumps(asdict(settings))))
    try:
        with Ends(lambda process, status: journal.note(ENDED, process, str(status))).noticed():
            yield
    finally:
        if os.getpid() == _first:
            _record_children(journal, recorder)
            _settings = None
            _restore(before)
        file.close()


@contextmanager
def unrecorded() -> Iterator[None]:
    """Let the processes that this one starts inside of the ``with`` block use its kind of device without recording
    them.

    This is needed for the software device, whose driver no library finds by itself.
    """
    before = os.environ.get(CHILD)
    os.environ[CHILD] = "\n\n"
    try:
        yield
    finally:
        _restore(before)


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(CHILD, None)
    else:
        os.environ[CHILD] = before


def _record_children(journal: ProcessJournal, recorder: Recorder) -> None:
    """Record what the processes have noted."""
    notes = journal.notes()
    imported = sorted({note.text for note in notes if note.what == IMPORTED})
    if imported and not recorder.is_closed:
        recorder.add_facts({"child_libraries": imported})
    traces = {note.pid: note.text for note in notes if note.what == TRACED}
    missing = {note.pid: note.text for note in notes if note.what == UNRECORDED}
    statuses = {note.pid: int(note.text) for note in notes if note.what == ENDED}
    for note in notes:
        if note.what in (STARTED, REPLACED):
            flags = ProcessFlag.REPLACED if note.what == REPLACED else ProcessFlag(0)
            hooks.emit(Kind.CHILD_PROCESS, name=note.text, aux0=note.pid, aux1=note.by, flags=flags, stack=0)
        elif note.what == BEGAN:
            flags = ProcessFlag.RUNNING if _is_running(note.pid) else ProcessFlag(0)
            if note.pid in missing and note.pid not in traces:
                flags |= ProcessFlag.UNRECORDED
            name = traces.get(note.pid) or missing.get(note.pid, "")
            status = statuses.get(note.pid) or status_of_zombie(note.pid)
            hooks.emit(Kind.CHILD_RECORDED, name=name, aux0=note.pid, aux1=status & _UNSIGNED, flags=flags)


def _is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X") and process != os.getpid()


# ---- in a process that a recorded one started ----


def begin(settings: str) -> None:
    """Record this process from now on until it ends. A failure is reported, and the program continues.

    Without settings, only choose its device.
    """
    global _settings
    if not settings:
        with suppress(CudatoolError):  # the program's import reports that there is no such device
            _driver.initialize()
        return
    _settings = ChildSettings(**json.loads(settings))
    undo = ExitStack()
    was_quiet = QUIET in os.environ
    os.environ[QUIET] = "1"  # the recorded program has already said which device it is
    try:
        header = undo.enter_context(
            recording.sources(
                with_stacks=_settings.with_stacks,
                measure_accesses=_settings.measure_accesses,
                checks=_settings.checks,
                level=_settings.level,
            )
        )
    except CudatoolError as error:
        why = str(error)
    else:
        why = ""
    finally:
        if not was_quiet:
            del os.environ[QUIET]
    if why:
        _unrecorded(why)
    else:
        _record(header, undo)


def _record(header: dict[str, Any], undo: ExitStack, *, is_fork: bool = False) -> None:
    """Give this process a trace of its own."""
    global _recorder, _report
    assert _settings is not None
    _recorder = recorder = _ChildRecorder(_settings, header)
    hooks.subscribe(recorder)
    if _report is not None:
        _report.stop()  # the parent's
    if _settings.on_oom:
        _report = OomReport(recorder.up_to_date)
        _report.start()

    def leave(at_once: bool) -> None:
        with undo:
            if at_once:  # the program frees nothing more, so its recording stays open, as that of one that is killed
                recording.drain()
                recorder.up_to_date()
                hooks.unsubscribe(recorder)
                return
            choice = _driver.chosen()
            if _settings is not None and _settings.forget and not is_fork:  # a fork's variables are its parent's
                variables.drop()
            facts: dict[str, Any] = {}
            if _driver.started() and not (is_fork and choice is not None and choice.machine is None):
                recording.release_caches()
                recording.drain()
                facts = recording.facts_at_the_end()
            # Otherwise the driver, or its watcher, belongs to the parent and does not work here.
            recorder.close(**facts)

    child.leave_by(leave)


def _forked() -> None:
    """Continue with a new trace in a forked child of a recorded process."""
    if _settings is None:
        return
    global _recorder
    if _recorder is not None:
        hooks.unsubscribe(_recorder)
    journal = child.journal()
    if journal is None:
        place, identity, _ = os.environ[CHILD].split("\n", 2)
        journal = ProcessJournal(place, identity)
    header = recording.observing()
    child.noticed_in(journal, began=_sees_all())
    _record(header | {"pid": os.getpid()}, ExitStack(), is_fork=True)


def _forking() -> None:
    """Note whether the driver has started: forked children cannot ask, since it answers them that it has not."""
    global _had_started_driver
    if _settings is not None and not _had_started_driver:
        _had_started_driver = _driver.nvidia_has_started()


def _sees_all() -> bool:
    """Return whether this forked child is recorded completely.

    On a GPU no source of events survives a fork. But where the parent had started the driver, the child cannot use it.
    """
    choice = _driver.chosen()
    return choice is None or choice.machine is not None or _had_started_driver


def _unrecorded(why: str) -> None:
    announce(f"cudatool: process {os.getpid()} is not recorded: {printable(why)}")
    if (journal := child.journal()) is not None:
        journal.note(UNRECORDED, os.getpid(), why)


class _ChildRecorder:
    """A subscriber that makes the process's trace at the first use of a device: most processes get none."""

    def __init__(self, settings: ChildSettings, header: dict[str, Any]) -> None:
        self._settings, self._header = settings, header
        self._lock = threading.RLock()
        self._kept: list[Event] = []
        self._kept_rows: list[tuple[npt.NDArray[np.void], list[str]]] = []
        self._not_kept = 0  # events, or batches of them, as there were too many
        self._recorder: Recorder | None = None
        self._process = os.getpid()
        self._failed = False

    def __call__(self, event: Event) -> None:
        recorder = self._recorder
        if recorder is None:
            with self._lock:
                if self._recorder is None and event.kind in _NO_USE:
                    if event.kind in _KEPT:
                        self._keep(self._kept, event)
                    return
            recorder = self._made()
        if recorder is not None:
            recorder(event)

    def write_rows(self, rows: npt.NDArray[np.void], names: Sequence[str]) -> None:
        """See :meth:`Recorder.write_rows`."""
        recorder = self._recorder
        if recorder is None and np.isin(rows["kind"], list(_NO_USE)).all():
            with self._lock:
                if self._recorder is None:
                    if len(kept := rows[np.isin(rows["kind"], _KEPT)]):
                        self._keep(self._kept_rows, (kept, list(names)))
                    return
        recorder = self._made()
        if recorder is not None:
            recorder.write_rows(rows, names)

    def dropped(self, error: BaseException) -> None:
        """See :meth:`Recorder.dropped`."""
        if self._recorder is not None:
            self._recorder.dropped(error)

    def up_to_date(self) -> str | None:
        """Return the file of the trace with what is known by now, None if there is none."""
        return recording.up_to_date(lambda: self._recorder)

    def close(self, **facts: Any) -> None:
        """Finish the trace, if there is one; its header says these facts, too."""
        hooks.unsubscribe(self)
        recorder = self._recorder
        if self._process != os.getpid():
            return
        if recorder is None:
            if (journal := child.journal()) is not None:
                for name in recording.libraries():
                    journal.note(IMPORTED, os.getpid(), name)
            return
        try:
            recorder.add_facts(facts | {"libraries": recording.libraries()})
            recorder.close()
        except OutputError as error:
            announce(f"cudatool: process {os.getpid()}: {printable(str(error))}")

    def _keep(self, events: list[_Kept], more: _Kept) -> None:
        if len(events) < _MOST_KEPT:
            events.append(more)
        else:
            self._not_kept += 1

    def _made(self) -> Recorder | None:
        with self._lock:
            if self._recorder is None and not self._failed:
                try:
                    self._recorder = self._make()
                except OutputError as error:
                    self._failed = True
                    _unrecorded(str(error))
                else:
                    for event in self._kept:
                        self._recorder(event)
                    for rows, names in self._kept_rows:
                        self._recorder.write_rows(rows, names)
                    if self._not_kept:
                        text = f"{self._not_kept:,} ranges and the like, before the first use of a device, are missing"
                        code = WarningCode.RANGES_NOT_RECORDED
                        self._recorder(hooks.own_event(Kind.WARNING, name=text, flags=WarningFlag.LOST, aux0=code))
                self._kept, self._kept_rows = [], []
            return self._recorder

    def _make(self) -> Recorder:
        path, rank = self._settings.path, os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or ""
        folder, name = os.path.split(path)
        header: dict[str, Any] = (
            self._header
            | job_facts()
            | {
                "argv": sys.argv,
                "pid": os.getpid(),
                "parent_pid": os.getppid(),
                "parent_trace": name,
                "run": self._settings.run,
            }
        )
        if rank:
            header["rank"] = rank
        part = f".rank{rank}" if rank.isdecimal() else ""
        stem = f"{name.removesuffix('.ctrace')}{part}.{os.getpid()}"
        # A process id may come again; a trace of an earlier run may have it in its name.
        names = (f"{stem}.ctrace" if not again else f"{stem}-{again}.ctrace" for again in range(_MOST_NAMES))
        free = next((name for name in names if not os.path.lexists(os.path.join(folder, name))), f"{stem}.ctrace")
        recorder = Recorder(os.path.join(folder, free), header=header)
        if (journal := child.journal()) is not None:
            journal.note(TRACED, os.getpid(), free)
        return recorder


os.register_at_fork(before=_forking, after_in_child=_forked)
