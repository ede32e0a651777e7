"""An armed process: it keeps its last events in bounded memory, and writes them when something happens.

::

    every event     -> Ring: the last so many, and what was live before them
                    -> Watch: a condition on memory, or a range                      -> a request
    SIGUSR2, clock, trigger()                                                        -> a request
    a request       -> the writer's thread: NAME.PID.1.ctrace, NAME.PID.2.ctrace ...; the oldest files beyond so many go
    memory runs out -> the same at once, and NAME.PID.1.oom.txt (cudatool.recording.on_oom)

A forked child is not armed: it calls :func:`arm` itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from queue import Empty, SimpleQueue
from types import FrameType, TracebackType
from typing import Any, Final, Self

from cudatool import _driver, recording
from cudatool.errors import ConfigError, OutputError, UsageError, unknown
from cudatool.progress import announce
from cudatool.recording import children
from cudatool.recording.on_oom import OomReport
from cudatool.recording.triggers import RangeOf, Reason, TriggerCondition, Watch
from cudatool.text import printable, quoted
from cudatool.trace import hooks
from cudatool.trace.ring import Ring
from cudatool.units import counted, parse_bytes, parse_time

__all__ = ["ArmOptions", "Armed", "arm", "armed_sources", "program_name", "trigger"]

_DEFAULT_BYTES: Final = 64 << 20
_MOST_FILES: Final = 8
_MOST_NAMES: Final = 10_000  # that are tried for a file
_CLOSING_S: Final = 60.0
_UNHANDLED: Final = (signal.SIG_DFL, signal.SIG_IGN)


@dataclass(frozen=True, slots=True)
class ArmOptions:
    """What to keep, and when to write it.

    Attributes
    ----------
    directory, name
        Of the files ``NAME.PID.NUMBER.ctrace``; default: the working directory, the program's name.
    keep
        How much to keep: a size (``"64MiB"``), a time (``"10min"``), or both (``"10min,256MiB"``).
    when
        ``"allocated > 90%"``: a condition on ``allocated`` or ``reserved``, with a share of the device or a size.
    every
        A time, such as ``"1h"`` or ``"30s"``; 0 for never.
    ranges
        ``"step:10-20"``: from the beginning of the tenth range of that name to the end of the twentieth.
    on_signal
        Whether SIGUSR2 is a request. A program that handles it itself keeps its handler; one that ignores it, as all
        programs under ``perf record`` do, ignores it again once this is closed.
    on_oom
        Whether to write, and to explain, the first failed allocation.
    history
        Whether PyTorch keeps the history of its allocator, with the stack of each allocation, in a process that is not
        recorded. Without it being armed costs a PyTorch program nothing, and its report names no call sites.
    history_share
        The share of the program's time that the history may cost, about: it is on for a part of the time where it would
        cost more all the time (:mod:`cudatool.collect.torch_history`). 1 keeps it on.
    most_files
        How many traces to leave on disk; the oldest go. Those of memory that ran out stay.
    """

    directory: str | os.PathLike[str] = ""
    name: str = ""
    keep: str = "64MiB"
    when: str = ""
    every: str = ""
    ranges: str = ""
    on_signal: bool = True
    on_oom: bool = True
    history: bool = True
    history_share: float = 0.01
    most_files: int = _MOST_FILES

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            kinds = {float: (float, int), str: (str, os.PathLike) if field.name == "directory" else str}.get(kind, kind)
            if not isinstance(value, kinds):
                example = f", such as {field.default!r}" if field.default else ""
                raise UsageError(f"{field.name} must be {_WORDS[kind]}{example}, not {value!r}")

    @classmethod
    def of(cls, given: dict[str, Any]) -> ArmOptions:
        """Return the options that `given` has by name.

        Raises
        ------
        UsageError
            There is no such option, or one is of another type.
        """
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise UsageError(unknown("option to arm a process", name, names))
        return cls(**given)


_WORDS: Final = {str: "a text", bool: "True or False", float: "a number", int: "a whole number"}
_armed: weakref.WeakSet[Armed] = weakref.WeakSet()


class Armed:
    """Keeps the last events of this process until :meth:`close`; also a context manager.

    Raises
    ------
    UsageError
        An option makes no sense.
    """

    def __init__(self, options: ArmOptions, header: dict[str, Any] | None = None) -> None:
        self.options = options
        condition = TriggerCondition.parse(options.when) if options.when else None
        ranges = RangeOf.parse(options.ranges) if options.ranges else None
        self._every = _seconds(options.every) if options.every else None
        size, age = _kept(options.keep)
        if options.most_files < 1:
            raise UsageError(f"most_files is at least 1, not {options.most_files}")
        if not 0 < options.history_share <= 1:
            raise UsageError(f"history_share is above 0 and at most 1, not {options.history_share}")
        self._header = header
        self._folder = os.path.abspath(options.directory or os.curdir)
        self._stem = f"{options.name or program_name()}.{os.getpid()}"
        self._process = os.getpid()
        self._files: list[str] = []  # written and not removed, the oldest first, without those of memory that ran out
        self.written: list[str] = []
        """Every file that was written, in order."""
        self._number = 0
        self._first = 0  # the event that the ranges began with
        self._ended_ns = 0  # when they ended: they are written a little later
        self._writing = threading.Lock()
        self._requests: SimpleQueue[tuple[Reason, str] | None] = SimpleQueue()  # a signal handler may put into it
        self._asked: set[Reason] = set()  # requests that wait: more of the same add nothing
        self._is_closed = False
        self._ring = Ring({}, most_bytes=size, most_age_ns=age)
        self.watch: Watch | None = None
        """What looks at conditions and ranges, where there are some."""
        if condition is not None or ranges is not None:
            self.watch = Watch(
                condition,
                ranges,
                total_of=self._total_memory,
                met=self._request,
                began=self._ranges_began,
            )
        self._report = None
        if options.on_oom and not recording.is_reporting():
            has_torch = recording.is_observing()
            snapshot = None if has_torch else self._snapshot_name
            self._report = OomReport(
                self._out_of_memory, snapshot=snapshot, history_share=options.history_share if options.history else 0.0
            )
        self._handler_before: Any = None
        self._thread = threading.Thread(target=self._serve, name="cudatool triggers", daemon=True)
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def events(self) -> int:
        """Number of events so far, kept or not."""
        return self._ring.events

    @property
    def kept_bytes(self) -> int:
        """Bytes of the events that are kept now, and of the state before them."""
        return self._ring.kept_bytes

    def trigger(self, text: str = "") -> str:
        """Write what is kept now, and return the path of the trace.

        Parameters
        ----------
        text
            Why, for the trace's header.

        Raises
        ------
        OutputError
            It cannot be written.
        UsageError
            This was closed.
        """
        if self._is_closed:
            raise UsageError("it is closed and keeps no events; call cudatool.arm() again")
        recording.flush()
        return self._write(Reason.CALL, text)

    def close(self) -> None:
        """Carry out what was requested, and keep events no longer. Closing again changes nothing."""
        if self._is_closed or os.getpid() != self._process:
            return
        recording.flush()
        self._is_closed = True
        if self._report is not None:
            self._report.stop()
        if self.watch is not None:
            self.watch.settle()
        if self.watch is not None and self.watch.is_inside:
            self._request(Reason.RANGE, f"{self.options.ranges}, of which the last did not end")
        self._requests.put(None)
        self._thread.join(_CLOSING_S)
        self._unsubscribe()
        if threading.current_thread() is threading.main_thread():
            self._restore_handler()
        _armed.discard(self)

    def _start(self) -> None:
        with recording.paused():  # what other threads do now would be neither in what lives nor among the events
            for event in recording.living()[0]:
                self._ring(event)
                if self.watch is not None:
                    self.watch(event)
            hooks.subscribe(self._ring)
            if self.watch is not None:
                hooks.subscribe(self.watch)
        if self._report is not None:
            self._report.start()
        is_main = threading.current_thread() is threading.main_thread()
        if self.options.on_signal and is_main and signal.getsignal(signal.SIGUSR2) in _UNHANDLED:
            self._handler_before = signal.signal(signal.SIGUSR2, self._signalled)
        _armed.add(self)
        self._thread.start()

    def _unsubscribe(self) -> None:
        hooks.unsubscribe(self._ring)
        if self.watch is not None:
            hooks.unsubscribe(self.watch)

    def _abandon(self) -> None:
        """In a forked child: what is kept is the parent's."""
        self._is_closed = True
        self._unsubscribe()
        if self._report is not None:
            self._report.stop()
        self._restore_handler()

    def _restore_handler(self) -> None:
        if self._handler_before is not None and signal.getsignal(signal.SIGUSR2) == self._signalled:
            signal.signal(signal.SIGUSR2, self._handler_before)

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self._request(Reason.SIGNAL, "SIGUSR2")

    def _request(self, reason: Reason, text: str) -> None:
        if reason is Reason.RANGE:
            self._ended_ns = time.monotonic_ns()
        if reason not in self._asked:
            self._asked.add(reason)
            self._requests.put((reason, text))

    def _total_memory(self, device: int) -> int | None:
        total = _total_memory(device)
        if total is None:
            why = f"how much memory device {device} has is not known; give a size in its place"
            announce(printable(f"cudatool: {quoted(self.options.when)} never becomes true: {why}"))
        return total

    def _ranges_began(self) -> None:
        self._first = self._ring.events - 1

    def _serve(self) -> None:
        """Carry out requests, on a thread of its own: a signal handler or a subscriber must not write."""
        last = time.monotonic()
        while True:
            rest = None if self._every is None else max(last + self._every - time.monotonic(), 0.0)
            try:
                request = self._requests.get(timeout=rest)
            except Empty:
                last = time.monotonic()
                request = Reason.INTERVAL, f"every {self.options.every}"
            if request is None:
                return
            self._asked.discard(request[0])
            try:
                recording.flush()
                self._write(*request)
            except OutputError as error:
                announce(printable(f"cudatool: {error}"))
            except Exception as error:  # the next trigger must still be served
                what = f"{type(error).__name__}: {error}"
                announce(printable(f"cudatool: {request[1] or request[0]}: nothing was written: {what}"))

    def _write(self, reason: Reason, text: str, *, stays: bool = False) -> str:
        with self._writing:
            facts = self._facts() | {"trigger": str(reason), "trigger_text": text}
            path = self._free_name()
            is_range = reason is Reason.RANGE
            first, until_ns = (self._first, self._ended_ns) if is_range else (0, None)
            count = self._ring.write(path, facts=facts, first=first, until_ns=until_ns)
            self.written.append(path)
            if not stays:
                self._files.append(path)
            while len(self._files) > self.options.most_files:
                try:
                    os.unlink(self._files.pop(0))
                except OSError:
                    pass  # the program removed it
        which = f"{'' if is_range else 'the last '}{counted(count, 'event')}"
        announce(printable(f"cudatool: wrote {os.path.basename(path)}: {text or reason}, {which}"))
        return path

    def _out_of_memory(self) -> str | None:
        recording.flush()
        return self._write(Reason.OOM, "memory ran out", stays=True)

    def _snapshot_name(self) -> str:
        with self._writing:
            path = self._free_name(".pickle")
            self.written.append(path)
        return path

    def _free_name(self, ending: str = ".ctrace") -> str:
        while self._number < _MOST_NAMES:
            self._number += 1
            path = os.path.join(self._folder, f"{self._stem}.{self._number}{ending}")
            if not os.path.lexists(path):
                return path
        raise OutputError(f"{self._folder} has {_MOST_NAMES:,} files of this process; remove some")

    def _facts(self) -> dict[str, Any]:
        """Return what a trace's header says of the recording; a device may have been chosen by now."""
        return dict(self._header) if self._header is not None else recording.present_header()


@contextmanager
def armed_sources(
    options: ArmOptions, *, device: str | None, with_stacks: bool, measure_accesses: bool, level: str
) -> Iterator[Armed]:
    """Keep what :func:`cudatool.record` would record inside of the ``with`` block; child processes are not armed."""
    with (
        recording.sources(
            device=device, with_stacks=with_stacks, measure_accesses=measure_accesses, level=level
        ) as header,
        children.unrecorded(),
        Armed(options, header) as armed,
    ):
        yield armed


def arm(options: ArmOptions | None = None, **given: Any) -> Armed:
    """Keep the last events of this process from now on, and write them when a trigger says so, or when memory runs out.

    What is kept is what cudatool's runtime reports: blocks, segments, kernels and copies, each with its Python stack;
    inside of :func:`record`, or under ``cudatool run``, all that these record.

    Parameters
    ----------
    options, given
        An :class:`ArmOptions`, or its fields by name: ``cudatool.arm(when="allocated > 90%", keep="10min")``.

    Raises
    ------
    UsageError
        An option makes no sense.
    """
    if options is not None and given:
        raise UsageError("give an ArmOptions or single options, not both")
    if options is not None and not isinstance(options, ArmOptions):
        raise UsageError(f"arm takes an ArmOptions or options by name, not {type(options).__name__}")
    return Armed(options or ArmOptions.of(given))


def trigger(text: str = "") -> list[str]:
    """Let everything that :func:`arm` made in this process write its events; return the paths of the traces.

    Raises
    ------
    OutputError
        One cannot be written.
    """
    return [armed.trigger(text) for armed in list(_armed)]


def program_name() -> str:
    """Return the name of the running program, as in the names of its traces."""
    return os.path.splitext(os.path.basename(sys.argv[0] if sys.argv else ""))[0].strip("-") or "python"


def _total_memory(device: int) -> int | None:
    """Return the bytes of a device, None if they are not known."""
    choice = _driver.chosen()
    if choice is not None and choice.machine is not None:
        return int(choice.machine.options.memory)
    uuid = _driver.nvidia_uuid(device)
    if uuid is None:
        return None
    try:
        with _driver.nvml(uuid) as (pynvml, handle):
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except UsageError:  # NVML does not say
        return None


def _kept(text: str) -> tuple[int, int | None]:
    """Return the bytes and the nanoseconds in ``"10min,256MiB"``."""
    size, age = _DEFAULT_BYTES, None
    for part in text.split(","):
        try:
            size = parse_bytes(part)
        except ConfigError:
            try:
                age = parse_time(part)
            except ConfigError:
                raise UsageError(
                    f"{quoted(part)} is neither a size nor a time; write for example 64MiB, 10min or 10min,256MiB"
                ) from None
    return size, age


def _seconds(text: str) -> float | None:
    try:
        return parse_time(text) / 1e9 or None
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _forked() -> None:
    for armed in list(_armed):
        armed._abandon()
    _armed.clear()


os.register_at_fork(after_in_child=_forked)
