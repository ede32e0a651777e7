"""What any program does on a GPU, as CUPTI tells it: memory, streams, events, copies, and when kernels ran.

CUPTI is NVIDIA's interface for tools (docs.nvidia.com/cupti). :file:`_cupti.c` notes each chosen call of the driver in
a log, whichever library makes it and on whichever thread, with Python's stack; and the kernels, copies and fills that
ran, with their times. The log is read here, by a thread of its own and before an event of another source.

What other sources tell is left out: the calls of our own runtime, and all but the memory of other libraries in a
program whose PyTorch is watched (:mod:`cudatool.collect.torch_program`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import re
import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.collect import _cupti
from cudatool.ptx.kernel_names import kernel_name
from cudatool.trace import hooks, stacks
from cudatool.trace.events import RECORD, WORK, Api, CopyFlag, Event, EventFlag, Kind, StreamFlag, WarningFlag
from cudatool.trace.model import Frame

__all__ = ["ROW", "CuptiCollector", "CuptiUnavailable", "What", "find_library"]

_log = logging.getLogger("cudatool.collect")
_MOST_LAUNCHED = 1 << 18  # calls whose work may still be reported
_PERIOD = 0.05  # seconds between two readings of the log
_MOST_ROWS = 1 << 22  # that wait to be read: 400 MiB
_LIBRARIES = ("libcupti.so.13", "libcupti.so.12")
_CALLED_THROUGH = ("/cuda/bindings/", "/_ctypes.", "/libffi", "/cudatool/", "/bin/python", "/libpython")
"""Libraries through which Python code calls the driver: whose call it is, Python's stack says."""

_EXTENSION = re.compile(r"\.(cpython-[^/]*|abi3)\.so$")
"""A module of Python: the frame that called it says more."""

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


_HEAD = [name for name in ROW.names or () if name != "words"]


class What(IntEnum):
    """What a row tells that is no call of the driver. The words of each are named in :file:`_cupti.c`."""

    KERNEL = 0xFF01
    COPY = 0xFF02
    FILL = 0xFF03
    CONTEXT = 0xFF05


class CuptiUnavailable(Exception):
    """CUPTI cannot be used here; the text says why."""


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


class _Call(NamedTuple):
    """How a call is recorded: its arguments as :file:`_cupti.c` spells them, and what reads them."""

    arguments: str
    read: str
    at_enter: bool = False
    with_library: bool = False
    with_stream_id: bool = False


_NEW, _OLD = {"with_library": True}, {"at_enter": True}
_CALLS: dict[str, _Call] = {
    "cuMemAlloc_v2": _Call("Pq", "_alloc", **_NEW),
    "cuMemAllocManaged": _Call("Pq", "_alloc", **_NEW),
    "cuMemAllocPitch_v2": _Call("PPqqi", "_alloc_pitch", **_NEW),
    "cuMemAllocAsync": _Call("Pqq", "_alloc_async", **_NEW),
    "cuMemAllocFromPoolAsync": _Call("Pq.q", "_alloc_from_pool", **_NEW),
    "cuMemFree_v2": _Call("q", "_free", **_OLD),
    "cuMemFreeAsync": _Call("qq", "_free_async", **_OLD),
    "cuMemMap": _Call("qqqqq", "_map", **_NEW),
    "cuMemUnmap": _Call("qq", "_unmap", **_OLD),
    "cuMemAllocHost_v2": _Call("Pq", "_host_alloc", **_NEW),
    "cuMemHostAlloc": _Call("Pq", "_host_alloc", **_NEW),
    "cuMemHostRegister_v2": _Call("qq", "_host_alloc", **_NEW),
    "cuMemFreeHost": _Call("q", "_host_free", **_OLD),
    "cuMemHostUnregister": _Call("q", "_host_free", **_OLD),
    "cuStreamCreate": _Call("Pi", "_stream_create", with_stream_id=True),
    "cuStreamCreateWithPriority": _Call("Pii", "_stream_create", with_stream_id=True),
    "cuStreamDestroy_v2": _Call("q", "_stream_destroy", **_OLD),
    "cuStreamSynchronize": _Call("q", "_stream_synchronize"),
    "cuStreamQuery": _Call("q", "_stream_query"),
    "cuStreamWaitEvent": _Call("qqi", "_stream_wait_event"),
    "cuStreamBeginCapture_v2": _Call("qi", "_capture_begin"),
    "cuStreamEndCapture": _Call("qP", "_capture_end"),
    "cuEventCreate": _Call("Pi", "_event_create"),
    "cuEventRecord": _Call("qq", "_event_record"),
    "cuEventRecordWithFlags": _Call("qqi", "_event_record"),
    "cuEventSynchronize": _Call("q", "_event_synchronize"),
    "cuEventQuery": _Call("q", "_event_query"),
    "cuEventDestroy_v2": _Call("q", "_event_destroy", **_OLD),
    "cuCtxSynchronize": _Call("", "_device_synchronize"),
    "cuCtxSynchronize_v2": _Call("q", "_device_synchronize"),
    "cuMemcpyHtoD_v2": _Call("qqq", "_copy"),
    "cuMemcpyDtoH_v2": _Call("qqq", "_copy"),
    "cuMemcpyDtoD_v2": _Call("qqq", "_copy"),
    "cuMemcpy": _Call("qqq", "_copy"),
    "cuMemcpyHtoDAsync_v2": _Call("qqqq", "_copy"),
    "cuMemcpyDtoHAsync_v2": _Call("qqqq", "_copy"),
    "cuMemcpyDtoDAsync_v2": _Call("qqqq", "_copy"),
    "cuMemcpyAsync": _Call("qqqq", "_copy"),
    "cuMemsetD8_v2": _Call("qbq", "_fill"),
    "cuMemsetD16_v2": _Call("qhq", "_fill"),
    "cuMemsetD32_v2": _Call("qiq", "_fill"),
    "cuMemsetD8Async": _Call("qbqq", "_fill"),
    "cuMemsetD16Async": _Call("qhqq", "_fill"),
    "cuMemsetD32Async": _Call("qiqq", "_fill"),
    "cuGraphLaunch": _Call("qq", "_graph_launch"),
}
_UNKNOWN = 1 << 56
"""What stands for the handle of a stream that was made before anything was recorded, with CUPTI's number added."""
_streams: dict[tuple[int, int], int] = {}  # device and CUPTI's number of a stream -> handle, as long as the process
_COPIES = ("memcpy", "memset")
_QUESTIONS = ("cuStreamQuery", "cuEventQuery")
_BLOCKING = StreamFlag(0)
_OF_MEMORY = ("cuMemAlloc", "cuMemFree", "cuMemMap", "cuMemUnmap")
_PER_THREAD = ("_ptsz", "_ptds")
"""Ends of the names of calls in programs compiled for default streams of each thread."""


def find_library() -> str:
    """Return the libcupti to use: one that the process has loaded, NVIDIA's wheel, the CUDA toolkit's.

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
        Returns whether PyTorch's own source tells of the program's work, some time later
        (:mod:`cudatool.collect.torch_program`). Then only memory of other libraries is told here; likewise once our
        runtime has told of work.

    Raises
    ------
    CuptiUnavailable
        CUPTI is not installed, another tool holds it, or it refuses.
    """

    def __init__(self, pytorch_is_watched: Callable[[], bool]) -> None:
        self._native = _cupti
        self._pytorch_is_watched = pytorch_is_watched
        self._runtime_works = False
        self._lock = threading.RLock()
        self._reading = False
        self._calls: deque[_Row] = deque()  # that wait to be told, in the order of their times
        self._work_done: list[npt.NDArray[np.void]] = []
        self._told: list[tuple[int, ...]] = []  # of RECORD; a name is its index in the texts
        self._texts = {"": 0}
        self._names = ["", *_COPIES]  # of the log's, the numbers begin after these
        self._frames: list[Frame | None] = [None]
        self._stacks = [_Stack(0, False, "")]
        self._launched: dict[int, tuple[int, int]] = {}  # CUPTI's correlation -> ours and the stream
        self._sizes: dict[int, int] = {}
        self._device_memory: list[int] = []  # addresses of what lives, sorted
        self._mapped: dict[int, int] = {}  # memory of cuMemCreate -> the first place where it is mapped
        self._capturing: set[tuple[int, int]] = set()
        self._captured_events: set[int] = set()
        self._readers: dict[int, tuple[str, Callable[[_Row, str], None]]] = {}
        self._stopping = threading.Event()
        self._row = _Row(0, 0, 0, 0, 0, 0, 0, 0, ())
        self._called = self._stacks[0]
        self.activity_error = ""
        """Why kernels and the times of copies are missing; empty if they are not."""

        path = find_library()
        try:
            self.version = _cupti.open(path)
            chosen = {
                name + end: (call.arguments or ".", call.at_enter, call.with_library, call.with_stream_id)
                for name, call in _CALLS.items()
                for end in ("", *_PER_THREAD)
            }
            numbers = _cupti.start(chosen, _MOST_ROWS)
        except OSError as error:
            raise CuptiUnavailable(f"{path}: {error}") from error
        for number, name in numbers.items():
            self._readers[number] = name, getattr(self, _CALLS[_plain(name)].read)
        try:
            _cupti.watch_activity()
        except OSError as error:
            self.activity_error = str(error)
        _running.add(self)
        hooks.subscribe(self._before_event, first=True)
        self._thread = threading.Thread(target=self._run, name="cudatool reader of CUPTI's log", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Pass on all that happened so far."""
        self._native.flush(True)
        self._read(None)

    def stop(self) -> None:
        """End. Stopping again changes nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self.flush()
        self._native.stop()
        hooks.unsubscribe(self._before_event)

    def _forget(self) -> None:
        """In a forked child, which has no CUDA of its own: another thread of the parent may have held the locks."""
        self._native.forget()
        self._stopping.set()
        self._lock = threading.RLock()
        hooks.unsubscribe(self._before_event)

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD):
            self._native.flush(False)
            # What PyTorch did meanwhile is told later, and with it what was between.
            self._read(0 if self._pytorch_is_watched() else None)

    def _before_event(self, event: Event) -> None:
        """Another source's event: what the log has from before it comes first."""
        self._runtime_works = self._runtime_works or event.kind in WORK
        self._read(event.time)

    def _read(self, until: int | None) -> None:
        """Read the log, and pass on the calls until a time; without one, also the work that was done."""
        with self._lock:
            if self._reading:  # a finalizer, in the middle of it
                return
            self._reading = True
            try:
                drained = self._native.drain()
                if drained is not None:
                    self._sort(*drained)
                while self._calls and (until is None or self._calls[0].time <= until):
                    row = self._row = self._calls.popleft()
                    self._called = self._stacks[row.stack]
                    name, read = self._readers[row.what]
                    read(row, name)
                self._called = self._stacks[0]
                self._send()
                if until is None and self._work_done:
                    done, self._work_done = np.concatenate(self._work_done), []
                    self._ran(done)
            finally:
                self._reading = False

    def _sort(self, data: bytes, names: list[bytes], frames: list[bytes], found: list[bytes], lost: int) -> None:
        """Keep what is to be told of a part of the log."""
        self._names += [kernel_name(name.decode("utf-8", "replace")) for name in names]
        self._frames += map(_frame, frames)
        self._stacks += map(self._stack, found)
        if lost:
            text = f"{lost:,} records of CUPTI were lost: there was no memory for them"
            self._row = self._row._replace(time=monotonic_ns(), thread=0)
            self._tell(Kind.WARNING, name=text, flags=WarningFlag.LOST)
        told = self._runtime_works or self._pytorch_is_watched()
        rows = np.frombuffer(data, ROW)
        is_work = np.isin(rows["what"], (What.KERNEL, What.COPY, What.FILL))
        if not told and is_work.any():
            self._work_done.append(rows[is_work])
        calls = rows[~is_work]
        for values, words in zip(calls[_HEAD].tolist(), calls["words"].tolist(), strict=True):
            row = _Row._make((*values, tuple(words)))
            if row.what == What.CONTEXT:
                _streams[row.device, row.words[0]] = 0
                continue
            name = self._readers[row.what][0]
            answered = row.result == 0 or name.startswith(_QUESTIONS)
            if answered and not self._stacks[row.stack].is_ours and (not told or name.startswith(_OF_MEMORY)):
                self._calls.append(row)

    def _stack(self, numbers: bytes) -> _Stack:
        library, *python = np.frombuffer(numbers, np.uint32).tolist()
        of_library = self._frames[library]
        through_python = of_library is None or any(part in of_library.file for part in _CALLED_THROUGH)
        called = [frame for number in python if (frame := self._frames[number]) is not None]
        ours = through_python and _is_of_our_runtime(called)
        if not through_python and of_library is not None and not _EXTENSION.search(of_library.file):
            called.insert(0, of_library)
        return _Stack(stacks.intern(called), ours, "" if of_library is None else of_library.file)

    def _tell(
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
        self._told.append((row.time, kind, row.device, flags, thread, 0, stream, correlation, self._called.id, text,
                           address, size, aux0, aux1))
        # fmt: on

    def _send(self) -> None:
        """Pass on what was told."""
        if self._told:
            told, self._told = self._told, []
            hooks.forward_rows(np.array(told, RECORD), list(self._texts), source=self._before_event)

    # ---- streams ----

    def _stream(self, handle: int, name: str = "", flags: StreamFlag = _BLOCKING, priority: int = 0) -> int:
        if handle == 0 and name.endswith(_PER_THREAD):
            handle = 2  # CU_STREAM_PER_THREAD
        return hooks.stream_id(
            self._row.device,
            handle,
            flags=flags,
            priority=priority,
            thread=hooks.native_thread(self._row.thread),
            api=lambda: Api.UNKNOWN,
            tell=self._tell_stream,
        )

    def _tell_stream(self, fields: dict[str, Any]) -> None:
        self._tell(Kind.STREAM_CREATE, **{key: value for key, value in fields.items() if key != "device"})

    def _stream_create(self, row: _Row, name: str) -> None:
        _streams[row.device, row.words[7]] = row.words[0]
        priority = row.words[2] - (1 << 32) if row.words[2] >> 31 else row.words[2]
        self._stream(row.words[0], "", StreamFlag.NON_BLOCKING if row.words[1] & 1 else StreamFlag(0), priority)

    def _stream_destroy(self, row: _Row, name: str) -> None:
        if stream := hooks.close_stream(row.device, row.words[0]):
            self._tell(Kind.STREAM_DESTROY, stream=stream)

    def _stream_synchronize(self, row: _Row, name: str) -> None:
        self._tell(Kind.STREAM_SYNCHRONIZE, stream=self._stream(row.words[0], name))

    def _stream_query(self, row: _Row, name: str) -> None:
        self._tell(Kind.STREAM_QUERY, stream=self._stream(row.words[0], name), aux1=int(row.result == 0))

    def _stream_wait_event(self, row: _Row, name: str) -> None:
        stream, event, flags, *_ = row.words
        if event in self._captured_events:
            self._capturing.add((row.device, stream))
        external = EventFlag.EXTERNAL if flags & 1 else EventFlag(0)
        event = hooks.event_id(event)
        self._tell(Kind.STREAM_WAIT_EVENT, stream=self._stream(stream, name), aux0=event, flags=external)

    def _capture_begin(self, row: _Row, name: str) -> None:
        self._capturing.add((row.device, row.words[0]))
        self._tell(Kind.GRAPH_CAPTURE_BEGIN, stream=self._stream(row.words[0], name))

    def _capture_end(self, row: _Row, name: str) -> None:
        self._capturing.clear()
        self._captured_events.clear()
        self._tell(Kind.GRAPH_CAPTURE_END, stream=self._stream(row.words[0], name), aux0=row.words[1])

    def _device_synchronize(self, row: _Row, name: str) -> None:
        self._tell(Kind.DEVICE_SYNCHRONIZE)

    # ---- events ----

    def _event_create(self, row: _Row, name: str) -> None:
        handle, flags, *_ = row.words
        timed, shared = not flags & 2, flags & 4
        bits = int(timed) | (2 if shared else 0)
        self._tell(Kind.EVENT_CREATE, aux0=hooks.event_id(handle), address=handle, flags=bits)

    def _event_record(self, row: _Row, name: str) -> None:
        handle, stream, flags, *_ = row.words
        if (row.device, stream) in self._capturing:
            self._captured_events.add(handle)
        external = EventFlag.EXTERNAL if flags & 1 else EventFlag(0)
        stream = self._stream(stream, name)
        self._tell(Kind.EVENT_RECORD, stream=stream, aux0=hooks.event_id(handle), flags=external)

    def _event_synchronize(self, row: _Row, name: str) -> None:
        self._tell(Kind.EVENT_SYNCHRONIZE, aux0=hooks.event_id(row.words[0]))

    def _event_query(self, row: _Row, name: str) -> None:
        self._tell(Kind.EVENT_QUERY, aux0=hooks.event_id(row.words[0]), aux1=int(row.result == 0))

    def _event_destroy(self, row: _Row, name: str) -> None:
        if event := hooks.close_event(row.words[0]):
            self._tell(Kind.EVENT_DESTROY, aux0=event)

    # ---- memory ----

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
            return  # a node of a graph: no memory yet
        if self._is_pytorchs():
            return
        if address not in self._sizes:
            insort(self._device_memory, address)
        self._sizes[address] = size
        id_ = 0 if stream is None else self._stream(stream, name)
        self._tell(Kind.MEM_ALLOC, stream=id_, address=address, size=size, name=_plain(name))

    def _free(self, row: _Row, name: str) -> None:
        self._freed(row.words[0], name)

    def _free_async(self, row: _Row, name: str) -> None:
        self._freed(row.words[0], name, row.words[1])

    def _freed(self, address: int, name: str, stream: int | None = None) -> None:
        size = self._sizes.pop(address, None)
        if size is None:  # not seen, or PyTorch's
            return
        del self._device_memory[bisect_right(self._device_memory, address) - 1]
        id_ = 0 if stream is None else self._stream(stream, name)
        self._tell(Kind.MEM_FREE, stream=id_, address=address, size=size, name=_plain(name))

    def _map(self, row: _Row, name: str) -> None:
        address, size, _, handle, *_ = row.words
        if self._is_pytorchs():
            return
        elsewhere = self._mapped.get(handle)
        if elsewhere is None:  # the memory of cuMemCreate is of use from here on
            self._mapped[handle] = address
            self._allocated(address, size, name)
        else:
            self._tell(Kind.MEM_MAP, address=address, size=size, aux0=elsewhere, name=_plain(name))

    def _unmap(self, row: _Row, name: str) -> None:
        address, size, *_ = row.words
        handle = next((handle for handle, at in self._mapped.items() if at == address), None)
        if handle is not None:
            del self._mapped[handle]
            self._freed(address, name)
        elif not self._pytorch_is_watched():
            self._tell(Kind.MEM_UNMAP, address=address, size=size, name=_plain(name))

    def _host_alloc(self, row: _Row, name: str) -> None:
        self._sizes[row.words[0]] = row.words[1]
        self._tell(Kind.HOST_ALLOC, address=row.words[0], size=row.words[1], name=_plain(name))

    def _host_free(self, row: _Row, name: str) -> None:
        size = self._sizes.pop(row.words[0], 0)
        self._tell(Kind.HOST_FREE, address=row.words[0], size=size, name=_plain(name))

    def _is_pytorchs(self) -> bool:
        """Whether PyTorch's caching allocator makes the call: its segments are told by PyTorch's own source."""
        return self._pytorch_is_watched() and "libc10_cuda" in self._called.library

    def _is_on_device(self, address: int) -> bool:
        at = bisect_right(self._device_memory, address) - 1
        return at >= 0 and address < self._device_memory[at] + self._sizes[self._device_memory[at]]

    # ---- work ----

    def _copy(self, row: _Row, name: str) -> None:
        target, source, size, stream, *_ = row.words
        is_async = "Async" in name
        if not is_async:
            stream = 0
        if (row.device, stream) in self._capturing:
            return
        plain = _plain(name)
        flags = CopyFlag.ASYNC if is_async else CopyFlag(0)
        if "DtoH" in plain or "DtoD" in plain or ("to" not in plain and self._is_on_device(source)):
            flags |= CopyFlag.SOURCE_DEVICE
        if "HtoD" in plain or "DtoD" in plain or ("to" not in plain and self._is_on_device(target)):
            flags |= CopyFlag.DESTINATION_DEVICE
        id_, correlation = self._work(row, stream, name)
        what: dict[str, Any] = {"stream": id_, "correlation": correlation, "flags": flags, "name": plain}
        self._tell(Kind.MEMCPY, address=target, size=size, aux0=source, **what)

    def _fill(self, row: _Row, name: str) -> None:
        target, value, count, stream, *_ = row.words
        is_async = "Async" in name
        if not is_async:
            stream = 0
        if (row.device, stream) in self._capturing:
            return
        item = int(_plain(name).removeprefix("cuMemsetD").removesuffix("_v2").removesuffix("Async")) // 8
        id_, correlation = self._work(row, stream, name)
        flags = CopyFlag.DESTINATION_DEVICE | (CopyFlag.ASYNC if is_async else CopyFlag(0))
        what: dict[str, Any] = {"stream": id_, "correlation": correlation, "flags": flags, "name": _plain(name)}
        self._tell(Kind.MEMSET, address=target, size=count * item, aux0=value, aux1=item, **what)

    def _graph_launch(self, row: _Row, name: str) -> None:
        graph, stream, *_ = row.words
        id_, correlation = self._work(row, stream, name)
        self._tell(Kind.GRAPH_LAUNCH, stream=id_, correlation=correlation, aux0=graph, name=_plain(name))

    def _work(self, row: _Row, stream: int, name: str) -> tuple[int, int]:
        """Return the stream's id and a correlation for what the call enqueues."""
        found = self._stream(stream, name), hooks.new_correlation()
        self._launched[row.correlation] = found[1], found[0]
        if len(self._launched) > _MOST_LAUNCHED:
            del self._launched[next(iter(self._launched))]
        return found

    def _ran(self, rows: npt.NDArray[np.void]) -> None:
        """Tell when kernels, copies and fills ran, and of kernels outside of graphs that they were launched."""
        words, what = rows["words"], rows["what"]
        is_kernel = what == What.KERNEL
        known = [self._launched.get(correlation) for correlation in rows["correlation"].tolist()]
        is_known = np.array([one is not None for one in known])
        rows, words, is_kernel = (column[is_kernel | is_known] for column in (rows, words, is_kernel))
        known = [one for one, kept in zip(known, (what == What.KERNEL) | is_known, strict=True) if kept]
        is_launch = is_kernel & np.array([one is None for one in known])
        of_stream = self._streams_of(rows)
        owners = np.array(
            [
                (hooks.new_correlation(), stream) if one is None else one
                for one, stream in zip(known, of_stream, strict=True)
            ],
            np.uint32,
        ).reshape(-1, 2)

        ran = np.zeros(len(rows), RECORD)
        ran["device"] = rows["device"]
        ran["correlation"], ran["stream"] = owners.T
        ran["name"] = np.where(is_kernel, words[:, 3] + len(_COPIES), np.where(rows["what"] == What.COPY, 1, 2))
        launched = ran[is_launch]
        launched["kind"] = Kind.KERNEL_LAUNCH
        launched["time"] = words[is_launch, 0]
        launched["aux0"], launched["aux1"], launched["size"] = words[is_launch, 4:7].T
        ran["kind"], ran["time"] = Kind.EXECUTION, monotonic_ns()  # it is known now
        ran["aux0"], ran["aux1"] = words[:, :2].T
        ran["flags"] = is_kernel & ~is_launch & (words[:, 7] != 0)
        hooks.forward_rows(np.concatenate([launched, ran]), self._names, source=self._before_event)

    def _streams_of(self, rows: npt.NDArray[np.void]) -> list[int]:
        """Return the id of the stream of each row, which CUPTI gives a number of its own."""
        keys = rows["device"].astype(np.uint64) << np.uint64(32) | rows["words"][:, 2]
        values, inverse = np.unique(keys, return_inverse=True)
        ids = []
        for device, number in ((key >> 32, key & 0xFFFFFFFF) for key in values.tolist()):
            self._row = self._row._replace(device=device, time=monotonic_ns(), thread=0)
            handle = _streams.get((device, number))
            flags = StreamFlag.NON_BLOCKING if handle is None else _BLOCKING  # no order is invented
            ids.append(self._stream(_UNKNOWN + number if handle is None else handle, "", flags))
        self._send()
        found: list[int] = np.array(ids, np.int64)[inverse].tolist()
        return found


_running: weakref.WeakSet[CuptiCollector] = weakref.WeakSet()


def _forget_all() -> None:
    for collector in list(_running):
        collector._forget()


os.register_at_fork(after_in_child=_forget_all)


def _plain(name: str) -> str:
    """Return a call's name without what says that default streams are those of each thread."""
    return name.removesuffix("_ptsz").removesuffix("_ptds")


def _frame(key: bytes) -> Frame:
    """Return the frame that a key of the log's table stands for: the line in 4 bytes, the file, 0, the function."""
    line = int.from_bytes(key[:4], "little")
    file, _, function = key[4:].decode("utf-8", "replace").partition("\0")
    return Frame(file, function or os.path.basename(file), line)


def _is_of_our_runtime(frames: list[Frame]) -> bool:
    """Whether our runtime makes a call, or has a function of the program make it, as an allocator of its own."""
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
