"""Records what any program does on a GPU, through CUPTI: memory, streams, events, copies, and when kernels ran.

CUPTI is NVIDIA's interface for tools (docs.nvidia.com/cupti). :file:`_cupti.c` notes each chosen call of the driver in
a log, whichever library makes it and on whichever thread, with Python's stack; and the kernels, copies and fills that
ran, with their times. The log is read here, by a thread of its own and before an event of another source.

Calls that other sources report are left out: those of our own runtime, and all but other libraries' memory in a
program whose PyTorch is watched (:mod:`cudatool.collect.torch_program`). When our runtime's work ran is reported here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.collect import _cupti
from cudatool.collect.cupti_calls import (
    CALLS,
    CALLS_OF_CODE,
    PER_THREAD,
    Call,
    Order,
    fill_item,
    layout,
    plain_name,
    sides,
)
from cudatool.collect.gpu_launches import Judged, Launches, Pointed
from cudatool.collect.live_memory import LiveMemory
from cudatool.collect.torch_rows import Action
from cudatool.memory.blocks import MIN_BLOCK_SIZE
from cudatool.ptx.kernel_names import kernel_name
from cudatool.trace import hooks, stacks
from cudatool.trace.events import (
    RECORD,
    WORK,
    Api,
    CopyFlag,
    Event,
    EventFlag,
    Kind,
    StreamFlag,
    WarningCode,
    WarningFlag,
)
from cudatool.trace.libraries import Library
from cudatool.trace.model import Frame

__all__ = ["HOW", "ROW", "CuptiCollector", "CuptiUnavailable", "Level", "What", "find_library"]

_log = logging.getLogger("cudatool.collect")
_MOST_LAUNCHED = 1 << 18  # calls whose work may still be reported
_MOST_NUMBERS = 1 << 16  # of calls, and of What
_PERIOD = 0.1  # seconds between two reads of the log
_MOST_ROWS = 1 << 22  # rows that wait to be read: 400 MiB
_LIBRARIES = ("libcupti.so.13", "libcupti.so.12")
_CALLED_THROUGH = ("/cuda/bindings/", "/_ctypes.", "/libffi", "/cudatool/", "/bin/python", "/libpython")
"""Libraries through which Python code calls the driver: whose call it is, Python's stack says."""

_EXTENSION = re.compile(r"\.(cpython-[^/]*|abi3)\.so$")
"""A module of Python."""

_FOLDER_OF_MODULES = re.compile(r"^.*/(site|dist)-packages/|^.*/lib-dynload/")

ROW = np.dtype(
    [
        ("time", "<u8"),
        ("what", "<u2"),
        ("result", "<u2"),
        ("thread", "<u4"),
        ("correlation", "<u4"),
        ("stack", "<u4"),
        ("device", "<u4"),
        ("context", "<u4"),
        ("words", "<u8", 8),
    ]
)


HOW = np.dtype(
    [
        ("kind", "u1"),
        *((name, "i1") for name in ("stream", "event", "flags")),
        *((name, "u1") for name in ("asks", "per_thread", "is_copy", "item", "copy_flags")),
        ("name", "<u4"),
    ]
)
"""How a kind of row becomes a record by itself: see the structure of this name in :file:`_cupti.c`."""


class What(IntEnum):
    """Kinds of rows that are not driver calls. The words of each are named in :file:`_cupti.c`."""

    KERNEL = 0xFF01
    COPY = 0xFF02
    FILL = 0xFF03
    GRAPH = 0xFF04
    CONTEXT = 0xFF05
    USE = 0xFF06
    OPERATION = 0xFF07
    LAUNCH = 0xFF08
    BLOCK = 0xFF10
    POOL_ALLOC = 0xFF11
    POOL_FREE = 0xFF12


class Level(StrEnum):
    """How much of the device's own work a recording on a GPU contains: more detail costs more time."""

    MEMORY = "memory"
    """Memory, streams, events and the calls that enqueue copies and graphs; no kernels, no times on the device."""
    KERNELS = "kernels"
    """Also kernels, and when they, copies, fills and launches of graphs ran. For graphs that may have been instantiated
    earlier this is not safe: CUPTI ends the process when they are launched."""
    GRAPH_NODES = "graph-nodes"
    """Also each kernel inside of a graph's launch, in place of the launch as a whole."""
    LAUNCHES = "launches"
    """Those of KERNELS, and each launch when the program makes it, with its thread; of up to 5,000 launches a second
    the Python stack."""


class _Noted(IntEnum):
    """What the log has of launches; of those of our runtime, nothing."""

    NOT = 0
    WITH_ARGUMENTS = 1
    WITH_STACKS = 2


class CuptiUnavailable(Exception):
    """CUPTI cannot be used here; the message says why."""


class _Row(NamedTuple):
    time: int
    what: int
    result: int
    thread: int
    correlation: int
    stack: int
    device: int
    context: int
    words: tuple[int, ...]


class _Stack(NamedTuple):
    """A stack of the log: its id in traces, whether our runtime makes the call, and the library that does."""

    id: int
    is_ours: bool
    library: str


_OF_OPERATION = 0
"""What stands for the stream of an operation of our runtime, which reports that itself."""
_UNKNOWN = 1 << 56
"""What stands for the handle of a stream that was made before anything was recorded, with CUPTI's number added."""
_streams: dict[tuple[int, int], int] = {}  # device and CUPTI's number of a stream -> handle, never removed
_WORK = {What.COPY: "memcpy", What.FILL: "memset", What.GRAPH: "graph"}
"""What ran that has no name of its own."""
_BLOCKING = StreamFlag(0)
_SHARES = ("cuIpc", "cuMemExport", "cuMemImport", "cuMemPool")
_OF_MEMORY = ("cuMemAlloc", "cuMemFree", "cuMemMap", "cuMemUnmap", *_SHARES)
_PER_THREAD_STREAM = 2  # CU_STREAM_PER_THREAD


def find_library() -> str:
    """Return the libcupti to use: the one already loaded, else NVIDIA's wheel, else the CUDA toolkit's.

    Raises
    ------
    CuptiUnavailable
        There is none.
    """
    for name in _LIBRARIES:
        if _can_load(name, os.RTLD_NOLOAD):
            return name
    places: list[str] = []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        places += [str(path) for name in _LIBRARIES for path in sorted(Path(folder).glob(f"*/lib/{name}"))]
    for root in filter(None, (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")):
        places += [f"{root}/{lib}/{name}" for lib in ("extras/CUPTI/lib64", "lib64") for name in _LIBRARIES]
    for place in (*filter(os.path.exists, places), *_LIBRARIES):
        if _can_load(place):
            return place
    raise CuptiUnavailable("there is no libcupti.so: pip install nvidia-cuda-cupti")


def _can_load(library: str, mode: int = 0) -> bool:
    try:
        ctypes.CDLL(library, mode=mode | os.RTLD_NOW)
    except OSError:
        return False
    return True


class CuptiCollector:
    """Records the process's use of the driver until :meth:`stop`.

    Parameters
    ----------
    pytorch_is_watched
        Returns whether PyTorch's own source reports the program's work, some time later
        (:mod:`cudatool.collect.torch_program`). Then only other libraries' memory is reported here; likewise once our
        runtime has reported work.
    level
        How much of the device's work is recorded.
    blocks_are_watched
        Returns whether PyTorch's allocator writes to the log (:mod:`cudatool.collect.torch_blocks`).
    launches
        What infers the accesses of each launch; None to report none. Then nothing at all is reported once another
        source reports the program's work.
    graphs_may_exist
        Whether graphs may have been instantiated before: their launches are then recorded node by node.
    sample
        Called whenever the log is read without another source's event, some ten times a second.

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
        sample: Callable[[], None] = lambda: None,
        launches: Launches | None = None,
        graphs_may_exist: bool = False,
    ) -> None:
        self._native = _cupti
        self._pytorch_is_watched = pytorch_is_watched
        self._blocks_are_watched = blocks_are_watched
        self._sample = sample
        self._of_graphs: set[int] = set()  # addresses of PyTorch's blocks that belong to graphs
        self._runtime_works = False
        self._lock = threading.RLock()
        self._reading, self._paused_by = False, 0  # the latter is a thread
        self._calls: deque[npt.NDArray[np.void]] = deque()  # that wait to be passed on, in the order of their times
        self._work_done: list[npt.NDArray[np.void]] = []
        self._reported: list[tuple[int, ...]] = []  # of RECORD; a name is its index in the texts
        self._texts = {"": 0}
        self._names = ["", *_WORK.values()]  # of the log's, the numbers begin after these
        self._frames: list[Frame | None] = [None]
        self._stacks = [_Stack(0, False, "")]
        self._stack_ids, self._stack_is_ours = np.zeros(1, np.uint32), np.zeros(1, np.bool_)
        self._launched = np.empty((0, 3), np.uint32)  # CUPTI's correlation, ours, the stream; sorted
        self._launched_now: list[tuple[int, int, int]] = []
        self._streams_of_operations: dict[int, int] = {}  # of our runtime, by correlation
        self._work_to_look_at = np.empty(0, ROW)  # that ran before what enqueued it was reported
        self._device_memory, self._host_memory = LiveMemory(), LiveMemory()
        self._launches, self._pointed = launches, Pointed()
        self._native_names = [""]  # as the driver spells them
        self._mapped: dict[int, int] = {}  # memory of cuMemCreate -> the first place where it is mapped
        self._capturing: set[tuple[int, int]] = set()
        self._captured_events: set[int] = set()
        self._names_of_calls: dict[int, str] = {}
        self._readers: dict[int, Callable[[_Row, str], None]] = {}
        self._how = np.zeros(_MOST_NUMBERS, HOW)
        self._how["stream"] = self._how["event"] = self._how["flags"] = -1
        self._stream_of: dict[int, int] = {}  # what `_cupti.translate` needs to know of streams
        self._out: list[npt.NDArray[np.void]] = []  # what goes to the subscribers
        self._stopping = threading.Event()
        self._row = _Row(0, 0, 0, 0, 0, 0, 0, 0, ())
        self._called = self._stacks[0]
        self.activity_error = ""
        """Why kernels and the times of copies are missing; empty if they are not."""

        self._calls_read = CALLS if launches is None else CALLS | CALLS_OF_CODE
        self.version, numbers = _start(self._calls_read)
        self._choose_readers(numbers)
        self._sees_work = level is not Level.MEMORY and self._watch_activity(
            level is Level.GRAPH_NODES or graphs_may_exist
        )
        self._notes = self._watch_launches(level)
        _running.add(self)
        hooks.subscribe(self._before_event, first=True)
        hooks.mark = _cupti.mark
        self._thread = threading.Thread(target=self._run, name="cudatool reader of CUPTI's log", daemon=True)
        self._thread.start()

    def _watch_launches(self, level: Level) -> _Noted:
        if self._launches is None and level is not Level.LAUNCHES:
            return _Noted.NOT
        how = _Noted.WITH_STACKS if self._launches is None else _Noted.WITH_ARGUMENTS
        _cupti.watch_launches(how)
        return how

    def _watch_activity(self, inside_graphs: bool) -> bool:
        try:
            _cupti.watch_activity(inside_graphs)
        except OSError as error:
            self.activity_error = str(error)
        return not self.activity_error

    def _choose_readers(self, numbers: dict[int, str]) -> None:
        """Choose by the name of each call who makes its record: C, by a row of :data:`HOW`, or a method."""
        for number, name in numbers.items():
            self._names_of_calls[number] = name
            read = self._calls_read[plain_name(name)].read
            if read is not None:
                self._readers[number] = self._report_order if isinstance(read, Order) else getattr(self, read)
            self._how[number] = self._translation(name)
        for number, reader in ((What.USE, self._use), (What.BLOCK, self._block), (What.LAUNCH, self._launch)):
            self._names_of_calls[number], self._readers[number] = "", reader
        self._how[What.BLOCK]["kind"], self._how[What.BLOCK]["stream"] = Kind.BLOCK_ALLOC, 3
        for number, kind in ((What.POOL_ALLOC, Kind.POOL_ALLOC), (What.POOL_FREE, Kind.POOL_FREE)):
            self._names_of_calls[number], self._readers[number] = "", self._pooled
            self._how[number]["kind"] = kind if self._launches is None else 0
            self._how[number]["name"] = self._texts.setdefault(Library.CUPY, len(self._texts))
        self._nothing_by_itself = np.zeros(1, HOW)
        self._is_work = (self._how["is_copy"] | self._how["item"]) != 0
        self._asks = np.ascontiguousarray(self._how["asks"])
        self._always_reported = np.zeros(_MOST_NUMBERS, np.uint8)
        of_memory = [number for number, name in numbers.items() if name.startswith(_OF_MEMORY)]
        if self._launches is None:
            self._always_reported[[*of_memory, What.USE, What.BLOCK, What.POOL_ALLOC, What.POOL_FREE]] = 1

    @property
    def watches_launches(self) -> bool:
        """Whether what each launch may access has been reported so far, or that it is not known."""
        return self._launches is not None

    def flush(self) -> None:
        """Pass on all that happened so far."""
        self._native.flush(True)
        self._sample()
        self._native.sample_use()
        self._read(None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pass on nothing inside of the ``with`` block, but what :meth:`pass_on_snapshot` passes on."""
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
            rows = np.concatenate([np.empty(0, ROW), *self._calls])
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

    def note_living(self, events: Iterable[Event]) -> None:
        """Note memory of the driver, and blocks of CuPy's pool, from before the recording: its release is an event."""
        with self._lock:
            for event in events:
                if event.kind is Kind.MEM_ALLOC:
                    self._device_memory.add(event.address, event.size)
                elif self._launches is not None:
                    self._launches.blocks.add(event.address, event.size)

    def stop(self) -> None:
        """Stop recording. Stopping again changes nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self.flush()
        self._native.stop()
        hooks.mark = None
        hooks.unsubscribe(self._before_event)

    def _forget(self) -> None:
        """Reset in a forked child, where CUDA does not work: another thread of the parent may have held the locks."""
        self._native.forget()
        self._stopping.set()
        self._lock = threading.RLock()
        hooks.mark = None
        hooks.unsubscribe(self._before_event)

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD):
            self._native.flush(False)
            self._sample()
            self._native.sample_use()
            # What PyTorch did meanwhile is reported later, and with it the calls in between.
            self._read(0 if self._pytorch_is_watched() else None)

    def _before_event(self, event: Event) -> None:
        """Pass on the log's calls from before another source's event."""
        if self._paused_by == threading.get_ident():
            return
        if event.kind in WORK:
            self._runtime_works = True
            if len(self._streams_of_operations) > _MOST_LAUNCHED:
                self._streams_of_operations.clear()
            self._streams_of_operations[event.correlation] = event.stream
        if self._calls or self._native.is_waiting():
            self._read(event.time)

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
                while self._calls and (until is None or self._calls[0]["time"][0] <= until):
                    calls = self._calls.popleft()
                    later = len(calls) if until is None else int(calls["time"].searchsorted(until, side="right"))
                    if later < len(calls):
                        self._calls.appendleft(calls[later:])
                    self._report_calls(calls[:later])
                self._pass_on()
                if until is None and (self._work_done or len(self._work_to_look_at)):
                    done, self._work_done = np.concatenate([self._work_to_look_at, *self._work_done]), []
                    self._ran(done)
            finally:
                self._reading = False

    def _sort(
        self, data: bytes, names: list[bytes], frames: list[bytes], found: list[bytes], lost: int, at: int, blob: bytes
    ) -> None:
        """Sort a part of the log, and drop what is not to be reported. Rows point to the `blob`, which begins `at`."""
        self._pointed.add(at, blob)
        texts = [name.decode("utf-8", "replace") for name in names]
        self._native_names += texts
        self._names += map(kernel_name, texts)
        self._frames += map(_frame, frames)
        self._stacks += map(self._stack, found)
        if lost:
            text = f"{lost:,} records of CUPTI were lost: there was no memory for them"
            self._row = self._row._replace(time=monotonic_ns(), thread=0)
            self._report(Kind.WARNING, name=text, flags=WarningFlag.LOST, aux0=WarningCode.CUPTI_RECORDS_LOST)
        elsewhere = self._runtime_works or self._pytorch_is_watched()
        if elsewhere and self._launches is not None:
            self._launches = None
            _cupti.watch_launches(_Noted.NOT)
        is_ours = self._columns()[1]
        calls, work, contexts, operations = self._native.sort(
            data, is_ours, self._asks, self._always_reported if elsewhere else None
        )
        for row in np.frombuffer(contexts, ROW):
            _streams[int(row["device"]), int(row["words"][0])] = 0
        if calls:
            self._calls.append(np.frombuffer(calls, ROW))
        marked = np.frombuffer(operations, ROW)
        for called, operation in zip(marked["correlation"].tolist(), marked["words"][:, 0].tolist(), strict=True):
            self._launched_now.append((called, operation, _OF_OPERATION))
        if work:
            done = np.frombuffer(work, ROW)
            self._work_done.append(done[self._launches_of(done)[:, 0] != 0] if elsewhere else done)

    def _translation(self, name: str) -> tuple[int, ...]:
        """Return how C turns a call into a record, as a row of :data:`HOW`."""
        plain = plain_name(name)
        order, per_thread = self._calls_read[plain].read, name.endswith(PER_THREAD)
        if isinstance(order, Order):
            return order.kind, order.stream, order.event, order.flags, order.asks, per_thread, 0, 0, 0, 0
        text = self._texts.setdefault(plain, len(self._texts))
        is_async = CopyFlag.ASYNC if "Async" in plain else CopyFlag(0)
        if order == "_copy" and "to" in plain and is_async:
            return Kind.MEMCPY, 3, -1, -1, 0, per_thread, 1, 0, is_async | sides(plain), text
        if order == "_fill" and is_async:
            flags = is_async | CopyFlag.DESTINATION_DEVICE
            return Kind.MEMSET, 3, -1, -1, 0, per_thread, 0, fill_item(plain), flags, text
        return 0, -1, -1, -1, 0, 0, 0, 0, 0, 0

    def _report_calls(self, calls: npt.NDArray[np.void]) -> None:
        """Report calls: most in C, others through their reader, which may change what is known of streams."""
        self._stream_of.clear()
        if not self._sees_work:
            self._launched_now.clear()  # nothing will be said of when it ran
        ids = self._columns()[0]
        works = int(np.count_nonzero(self._is_work[calls["what"]]))
        correlations = np.array(hooks.new_correlations(works), np.uint32)
        records = np.empty(len(calls), RECORD)
        at = 0
        while at < len(calls):
            how = self._nothing_by_itself if self._capturing else self._how
            first = at
            # fmt: off
            at, made, works = self._native.translate(
                calls, first, how, ids, correlations, self._stream_of, hooks.event_ids(), hooks.native_threads(),
                self._of_graphs, records,
            )
            # fmt: on
            if made:
                self._send()
                self._out.append(records[:made])
                if works:
                    done = calls[first:at][self._is_work[calls["what"][first:at]]]
                    streams = records["stream"][:made][records["correlation"][:made] != 0]
                    self._launched_now += zip(
                        done["correlation"].tolist(), correlations[:works].tolist(), streams.tolist(), strict=True
                    )
                records, correlations = records[made:], correlations[works:]
            if at < len(calls):
                *head, words = calls[at].item()
                row = self._row = _Row._make((*head, tuple(words.tolist())))
                self._called = self._stacks[row.stack]
                self._readers[row.what](row, self._names_of_calls[row.what])
                records = records[1:]
                at += 1
        self._called = self._stacks[0]

    def _columns(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Return the id of each stack, and whether our runtime makes the call."""
        if len(self._stack_ids) != len(self._stacks):
            self._stack_ids = np.array([stack.id for stack in self._stacks], np.uint32)
            self._stack_is_ours = np.array([stack.is_ours for stack in self._stacks])
        return self._stack_ids, self._stack_is_ours

    def _stack(self, numbers: bytes) -> _Stack:
        library, *python = np.frombuffer(numbers, np.uint32).tolist()
        of_library = self._frames[library]
        through_python = of_library is None or any(part in of_library.file for part in _CALLED_THROUGH)
        called = [frame for number in python if (frame := self._frames[number]) is not None]
        ours = through_python and _is_of_our_runtime(called)
        if not through_python and of_library is not None:
            called.insert(0, of_library)
        return _Stack(stacks.intern(called), ours, "" if of_library is None else of_library.file)

    def _report(
        self,
        kind: Kind,
        *,
        stream: int = 0,
        correlation: int = 0,
        name: str = "",
        address: int = 0,
        size: int = 0,
        flags: int = 0,
        aux0: int = 0,
        aux1: int = 0,
    ) -> None:
        row, text = self._row, self._texts.setdefault(name, len(self._texts))
        thread = hooks.native_thread(row.thread) if row.thread else 0
        # fmt: off
        self._reported.append((row.time, kind, row.device, flags, thread, 0, stream, correlation, self._called.id, text,
                           address, size, aux0, aux1))
        # fmt: on

    def _send(self) -> None:
        """Append the reported records to those that will be passed on."""
        if self._reported:
            self._out.append(np.array(self._reported, RECORD))
            self._reported = []

    def _pass_on(self) -> None:
        """Pass on the reported records."""
        self._send()
        if self._out:
            out, self._out = self._out, []
            rows = out[0] if len(out) == 1 else np.concatenate(out)
            hooks.forward_rows(rows, list(self._texts), source=self._before_event)

    # ---- what orders work ----

    def _report_order(self, row: _Row, name: str) -> None:
        order = self._calls_read[plain_name(name)].read
        assert isinstance(order, Order)
        handle = row.words[order.event] if order.event >= 0 else 0
        if order.kind == Kind.STREAM_WAIT_EVENT and handle in self._captured_events:
            self._capturing.add((row.device, row.words[order.stream]))
        elif order.kind == Kind.EVENT_RECORD and (row.device, row.words[order.stream]) in self._capturing:
            self._captured_events.add(handle)
        is_external = order.flags >= 0 and row.words[order.flags] & 1
        self._report(
            order.kind,
            stream=self._stream(row.words[order.stream], name) if order.stream >= 0 else 0,
            aux0=hooks.event_id(handle) if order.event >= 0 else 0,
            aux1=int(order.asks and row.result == 0),
            flags=EventFlag.EXTERNAL if is_external else EventFlag(0),
        )

    # ---- streams ----

    def _stream(self, handle: int, name: str = "", flags: StreamFlag = _BLOCKING, priority: int = 0) -> int:
        if handle == 0 and name.endswith(PER_THREAD):
            handle = _PER_THREAD_STREAM
        own = self._row.thread << 8 if handle == _PER_THREAD_STREAM else 0
        found = self._stream_of[handle | own | self._row.device << 56] = hooks.stream_id(
            self._row.device,
            handle,
            flags=flags,
            priority=priority,
            thread=hooks.native_thread(self._row.thread),
            api=lambda: Api.UNKNOWN,
            report=self._report_stream,
        )
        return found

    def _report_stream(self, fields: dict[str, Any]) -> None:
        self._report(Kind.STREAM_CREATE, **{key: value for key, value in fields.items() if key != "device"})

    def _stream_create(self, row: _Row, name: str) -> None:
        _streams[row.device, row.words[7]] = row.words[0]
        priority = row.words[2] - (1 << 32) if row.words[2] >> 31 else row.words[2]
        self._stream(row.words[0], "", StreamFlag.NON_BLOCKING if row.words[1] & 1 else StreamFlag(0), priority)

    def _stream_destroy(self, row: _Row, name: str) -> None:
        self._stream_of.clear()
        if stream := hooks.close_stream(row.device, row.words[0]):
            self._report(Kind.STREAM_DESTROY, stream=stream)

    def _capture_begin(self, row: _Row, name: str) -> None:
        self._capturing.add((row.device, row.words[0]))
        self._report(Kind.GRAPH_CAPTURE_BEGIN, stream=self._stream(row.words[0], name))

    def _capture_end(self, row: _Row, name: str) -> None:
        self._capturing.clear()
        self._captured_events.clear()
        self._report(Kind.GRAPH_CAPTURE_END, stream=self._stream(row.words[0], name), aux0=row.words[1])

    # ---- events ----

    def _event_create(self, row: _Row, name: str) -> None:
        handle, flags, *_ = row.words
        timed, shared = not flags & 2, flags & 4
        bits = int(timed) | (2 if shared else 0)
        self._report(Kind.EVENT_CREATE, aux0=hooks.event_id(handle), address=handle, flags=bits)

    def _event_destroy(self, row: _Row, name: str) -> None:
        if event := hooks.close_event(row.words[0]):
            self._report(Kind.EVENT_DESTROY, aux0=event)

    # ---- memory ----

    def _block(self, row: _Row, name: str) -> None:
        """PyTorch's allocator."""
        action, address, size, handle, captured, *pool = row.words[:7]
        if action == Action.SNAPSHOT or not self._is_no_graphs(action, address, captured):
            return
        rounded = -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        stream, of_pool = self._stream(handle), pool[0] & 0xFFFFFFFF | (pool[1] & 0xFFFFFFFF) << 32
        if action == Action.OOM:
            self._report(Kind.OOM, stream=stream, size=rounded, aux0=address, aux1=of_pool)
        elif action > Action.FREE_COMPLETED:
            self._report(Kind[Action(action).name], stream=stream, address=address, size=size, aux1=of_pool)
        else:
            kind = Kind[f"BLOCK_{Action(action).name}"]
            self._report(kind, stream=stream, address=address, size=rounded, aux0=size, aux1=of_pool)

    def _pooled(self, row: _Row, name: str) -> None:
        """CuPy's pool."""
        kind = Kind.POOL_ALLOC if row.what == What.POOL_ALLOC else Kind.POOL_FREE
        address, size, asked = row.words[:3]
        if self._launches is not None and kind is Kind.POOL_ALLOC:
            self._launches.blocks.add(address, size)
        elif self._launches is not None:
            self._launches.blocks.remove(address)
        self._report(kind, address=address, size=size, aux0=asked, name=Library.CUPY)

    def _is_no_graphs(self, action: int, address: int, captured: int) -> bool:
        """Return whether to report what the allocator did: blocks of a graph are not reported."""
        if action == Action.ALLOC:
            if captured:
                self._of_graphs.add(address)
            else:
                self._of_graphs.discard(address)
            return not captured
        return action > Action.FREE_COMPLETED or address not in self._of_graphs

    def _alloc(self, row: _Row, name: str) -> None:
        self._allocated(row.words[0], row.words[1], name)

    def _alloc_pitch(self, row: _Row, name: str) -> None:
        address, pitch, _, height, *_ = row.words
        self._allocated(address, pitch * height, name)

    def _alloc_async(self, row: _Row, name: str) -> None:
        address, size, stream, *_ = row.words
        self._allocated(address, size, name, stream)

    def _alloc_from_pool(self, row: _Row, name: str) -> None:
        address, size, _, stream, *_ = row.words
        self._allocated(address, size, name, stream)

    def _allocated(self, address: int, size: int, name: str, stream: int | None = None) -> None:
        if stream is not None and (self._row.device, stream) in self._capturing:
            return  # a node of a graph, which has no memory yet
        if self._is_pytorchs():
            return
        self._device_memory.add(address, size)
        id_ = 0 if stream is None else self._stream(stream, name)
        self._report(Kind.MEM_ALLOC, stream=id_, address=address, size=size, name=plain_name(name))

    def _use(self, row: _Row, name: str) -> None:
        process, used, total, causes, *_ = row.words
        self._report(Kind.DEVICE_USE, size=process, address=used, aux0=total, flags=causes)

    def _free(self, row: _Row, name: str) -> None:
        self._freed(row.words[0], name)

    def _free_async(self, row: _Row, name: str) -> None:
        self._freed(row.words[0], name, row.words[1])

    def _freed(self, address: int, name: str, stream: int | None = None) -> None:
        size = self._device_memory.remove(address)
        if size is None:  # not seen, or PyTorch's
            return
        id_ = 0 if stream is None else self._stream(stream, name)
        self._report(Kind.MEM_FREE, stream=id_, address=address, size=size, name=plain_name(name))

    def _map(self, row: _Row, name: str) -> None:
        address, size, _, handle, *_ = row.words
        if self._is_pytorchs():
            return
        elsewhere = self._mapped.get(handle)
        if elsewhere is None:  # the memory of cuMemCreate can be used from here on
            self._mapped[handle] = address
            self._allocated(address, size, name)
        else:
            self._report(Kind.MEM_MAP, address=address, size=size, aux0=elsewhere, name=plain_name(name))

    def _unmap(self, row: _Row, name: str) -> None:
        address, size, *_ = row.words
        handle = next((handle for handle, at in self._mapped.items() if at == address), None)
        if handle is not None:
            del self._mapped[handle]
            self._freed(address, name)
        elif not self._pytorch_is_watched():
            self._report(Kind.MEM_UNMAP, address=address, size=size, name=plain_name(name))

    def _host_alloc(self, row: _Row, name: str) -> None:
        self._host_memory.add(row.words[0], row.words[1])
        self._report(Kind.HOST_ALLOC, address=row.words[0], size=row.words[1], name=plain_name(name))

    def _host_free(self, row: _Row, name: str) -> None:
        size = self._host_memory.remove(row.words[0]) or 0
        self._report(Kind.HOST_FREE, address=row.words[0], size=size, name=plain_name(name))

    def _give(self, row: _Row, name: str) -> None:
        self._shared(row.words[1], name)

    def _take(self, row: _Row, name: str) -> None:
        self._shared(row.words[0], name)

    def _shared(self, place: int, name: str) -> None:
        """Report that other processes can use memory: at an address, or what the driver has a handle of."""
        address = 0 if "ShareableHandle" in name else place
        address, size = self._device_memory.find(address) or (address, 0)  # a handle stands for all of it
        text = plain_name(name).removesuffix("_v2")
        self._report(Kind.WARNING, name=text, address=address, size=size, flags=WarningFlag.SHARED)

    def _is_pytorchs(self) -> bool:
        """Whether PyTorch's caching allocator makes the call: PyTorch's own source reports its segments."""
        return "libc10_cuda" in self._called.library and (self._pytorch_is_watched() or self._blocks_are_watched())

    # ---- work ----

    def _copy(self, row: _Row, name: str) -> None:
        target, source, size, stream, *_ = row.words
        is_async = "Async" in name
        if not is_async:
            stream = 0
        if (row.device, stream) in self._capturing:
            return
        plain = plain_name(name)
        flags = sides(plain) | (CopyFlag.ASYNC if is_async else CopyFlag(0))
        if "to" not in plain:
            flags |= CopyFlag.SOURCE_DEVICE if self._device_memory.find(source) else CopyFlag(0)
            flags |= CopyFlag.DESTINATION_DEVICE if self._device_memory.find(target) else CopyFlag(0)
        id_, correlation = self._work(row, stream, name)
        what: dict[str, Any] = {"stream": id_, "correlation": correlation, "flags": flags, "name": plain}
        self._report(Kind.MEMCPY, address=target, size=size, aux0=source, **what)

    def _fill(self, row: _Row, name: str) -> None:
        target, value, count, stream, *_ = row.words
        is_async = "Async" in name
        if not is_async:
            stream = 0
        if (row.device, stream) in self._capturing:
            return
        item = fill_item(plain_name(name))
        id_, correlation = self._work(row, stream, name)
        flags = CopyFlag.DESTINATION_DEVICE | (CopyFlag.ASYNC if is_async else CopyFlag(0))
        what: dict[str, Any] = {"stream": id_, "correlation": correlation, "flags": flags, "name": plain_name(name)}
        self._report(Kind.MEMSET, address=target, size=count * item, aux0=value, aux1=item, **what)

    def _graph_launch(self, row: _Row, name: str) -> None:
        graph, stream, *_ = row.words
        id_, correlation = self._work(row, stream, name)
        self._report(Kind.GRAPH_LAUNCH, stream=id_, correlation=correlation, aux0=graph, name=plain_name(name))

    # ---- launches, and the code that they run ----

    def _code(self, row: _Row, name: str) -> None:
        module, what, digest, offset, *_ = row.words
        if self._launches is not None:
            kind, length = what & 0xFF, what >> 8
            self._launches.code.loaded(module, kind, digest, self._pointed.find(offset, length))

    def _code_file(self, row: _Row, name: str) -> None:
        if self._launches is not None:
            self._launches.code.loaded_from(row.words[0], self._native_names[row.words[1]], self._native.digest)

    def _function(self, row: _Row, name: str) -> None:
        if self._launches is not None:
            self._launches.code.found(row.words[0], row.words[1], self._native_names[row.words[2]])

    def _same_code(self, row: _Row, name: str) -> None:
        if self._launches is not None:
            self._launches.code.same(row.words[0], row.words[1])

    def _code_unloaded(self, row: _Row, name: str) -> None:
        if self._launches is not None:
            self._launches.code.unloaded(row.words[0])

    def _unseen(self, row: _Row, name: str) -> None:
        """A call that moves or orders data in ways that no event describes."""
        if self._launches is not None and self._launches.is_first(plain_name(name)):
            text = f"{plain_name(name)} is not recorded on a GPU"
            self._report(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.CALL_NOT_RECORDED)

    def _launch(self, row: _Row, name: str) -> None:
        _, stream, grid, block, shared, _, _, number = row.words
        if (row.device, stream) in self._capturing:
            return
        found = self._judged(row)
        id_, correlation = self._work(row, stream, "_ptsz" if found.per_thread else "")
        what: dict[str, Any] = {"aux0": grid, "aux1": block, "size": shared & 0xFFFFFFFF, "flags": found.flags}
        kernel = self._names[len(_WORK) + number]
        self._report(Kind.KERNEL_LAUNCH, stream=id_, correlation=correlation, name=kernel, **what)
        plain = kernel.partition("<")[0]
        if found.doubts and self._launches is not None and self._launches.is_first(plain + found.doubts):
            text = f"{plain} may access more than its arguments say: {found.doubts}"
            self._report(Kind.WARNING, name=text, flags=WarningFlag.UNSEEN, aux0=WarningCode.ACCESSES_NOT_KNOWN)
        self._called = self._stacks[0]  # an access has the stack of its launch
        for address, size, flags in found.accesses:
            self._report(Kind.ACCESS, stream=id_, correlation=correlation, address=address, size=size, flags=flags)

    def _judged(self, row: _Row) -> Judged:
        function, _, _, _, shared, offset, length, number = row.words
        if self._launches is None:
            return Judged.of(shared >> 32)
        memory = self._device_memory, self._host_memory
        return self._launches.judge(
            function, self._native_names[number], shared >> 32, self._pointed.find(offset, length), memory
        )

    def _work(self, row: _Row, stream: int, name: str) -> tuple[int, int]:
        """Return the stream's id and a correlation for what the call enqueues."""
        found = self._stream(stream, name), hooks.new_correlation()
        self._launched_now.append((row.correlation, found[1], found[0]))
        return found

    def _launches_of(self, rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint32]:
        """Return the calls that enqueued what ran, as rows of ``_launched``; zeros where no call is known."""
        if self._launched_now:
            known = np.concatenate([self._launched[-_MOST_LAUNCHED:], np.array(self._launched_now, np.uint32)])
            self._launched, self._launched_now = known[np.argsort(known[:, 0], kind="stable")], []
        found = np.zeros((len(rows), 3), np.uint32)
        if len(self._launched):
            at = np.minimum(self._launched[:, 0].searchsorted(rows["correlation"]), len(self._launched) - 1)
            is_known = self._launched[at, 0] == rows["correlation"]
            found[is_known] = self._launched[at[is_known]]
        return found

    def _ran(self, rows: npt.NDArray[np.void]) -> None:
        """Report when kernels, copies, fills and graphs ran, and the launches of kernels outside of graphs."""
        launches = self._launches_of(rows)
        is_known = launches[:, 0] != 0
        kept = is_known | (rows["what"] == What.KERNEL)
        is_ours = is_known & (launches[:, 2] == _OF_OPERATION)
        # A kernel may end before the call that launches it does.
        is_early = ~is_known & kept if self._notes else np.zeros(len(rows), np.bool_)
        if is_ours.any() or is_early.any() or len(self._work_to_look_at):
            kept &= self._find_streams(rows, launches, is_ours, is_early)
        rows, launches, is_known = rows[kept], launches[kept], is_known[kept]
        words, what = rows["words"], rows["what"]
        is_kernel, is_launch = what == What.KERNEL, ~is_known
        launches[is_launch, 1] = hooks.new_correlations(int(np.count_nonzero(is_launch)))
        launches[is_launch, 2] = self._streams_of(rows[is_launch])

        ran = np.zeros(len(rows), RECORD)
        ran["device"] = rows["device"]
        ran["correlation"], ran["stream"] = launches[:, 1:].T
        ran["name"] = words[:, 3] + len(_WORK)
        for name, one in enumerate(_WORK, start=1):
            ran["name"][what == one] = name
        launched = ran[is_launch]
        launched["kind"] = Kind.KERNEL_LAUNCH
        launched["time"] = words[is_launch, 0]
        launched["aux0"], launched["aux1"], launched["size"] = words[is_launch, 4:7].T
        ran["kind"], ran["time"] = Kind.EXECUTION, monotonic_ns()  # it is known now
        ran["aux0"], ran["aux1"] = words[:, :2].T
        ran["flags"] = is_kernel & ~is_launch & (words[:, 7] != 0)
        hooks.forward_rows(np.concatenate([launched, ran]), self._names, source=self._before_event)

    def _find_streams(
        self,
        rows: npt.NDArray[np.void],
        launches: npt.NDArray[np.uint32],
        is_ours: npt.NDArray[np.bool_],
        is_early: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Set the streams of our runtime's work in `launches`; return false for what waits until its call is reported.

        That is looked at once more the next time. Our runtime's work that is not reported then failed; a kernel that is
        still early was launched in a way that is not watched.
        """
        streams = self._streams_of_operations
        launches[is_ours, 2] = [streams.get(operation, _OF_OPERATION) for operation in launches[is_ours, 1].tolist()]
        is_unknown: npt.NDArray[np.bool_] = is_ours & (launches[:, 2] == _OF_OPERATION)
        is_new = np.arange(len(rows)) >= len(self._work_to_look_at)
        self._work_to_look_at = rows[(is_unknown | is_early) & is_new]
        return np.logical_not(is_unknown | (is_early & is_new))

    def _streams_of(self, rows: npt.NDArray[np.void]) -> list[int]:
        """Return the id of the stream of each row, which CUPTI gives a number of its own."""
        keys = rows["device"].astype(np.uint64) << np.uint64(32) | rows["words"][:, 2]
        values, inverse = np.unique(keys, return_inverse=True)
        ids = []
        for device, number in ((key >> 32, key & 0xFFFFFFFF) for key in values.tolist()):
            self._row = self._row._replace(device=device, time=monotonic_ns(), thread=0)
            handle = _streams.get((device, number))
            flags = StreamFlag.NON_BLOCKING if handle is None else _BLOCKING  # do not invent an order
            ids.append(self._stream(_UNKNOWN + number if handle is None else handle, "", flags))
        self._pass_on()
        found: list[int] = np.array(ids, np.int64)[inverse].tolist()
        return found


_running: weakref.WeakSet[CuptiCollector] = weakref.WeakSet()


def _start(calls: dict[str, Call]) -> tuple[int, dict[int, str]]:
    """Let CUPTI log these calls; return its version, and the name of each by its number."""
    path = find_library()
    chosen = {
        name + end: (*layout(call), int(call.use), call.read is None, call.enqueues, call.launches)
        for name, call in calls.items()
        for end in ("", *PER_THREAD)
    }
    try:
        return _cupti.open(path), _cupti.start(chosen, _MOST_ROWS)
    except OSError as error:
        raise CuptiUnavailable(f"{path}: {error}") from error


def _forget_all() -> None:
    for collector in list(_running):
        collector._forget()


os.register_at_fork(after_in_child=_forget_all)


def _frame(key: bytes) -> Frame:
    """Return the frame that a key of the log's table stands for: the line in 4 bytes, the file, 0, the function."""
    line = int.from_bytes(key[:4], "little")
    file, _, function = key[4:].decode("utf-8", "replace").partition("\0")
    return Frame(file, function or _library_name(file), line)


def _library_name(file: str) -> str:
    """Return the name of a library; of a Python extension module the module's name, ``cupy.cuda.memory``."""
    name = _EXTENSION.sub("", file)
    if name == file:
        return os.path.basename(file)
    return _FOLDER_OF_MODULES.sub("", name).strip("/").replace("/", ".")


def _is_of_our_runtime(frames: list[Frame]) -> bool:
    """Whether our runtime makes a call, directly or through a function of the program, such as a custom allocator."""
    for frame in frames:
        path = os.path.realpath(frame.file)
        if path.startswith(_OURS) and not path.startswith(_RUN_PROGRAMS):
            return True
    return False


_OURS = os.path.join(os.path.realpath(Path(__file__).parent.parent), "")
_RUN_PROGRAMS = tuple(
    _OURS + name for name in ("__main__.py", "workload.py", "cli/", "recording/", "testing/", "sanitize/")
)
"""Those of our files that have a program run, and are on the stack of all that it does."""
