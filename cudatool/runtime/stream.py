"""Streams: queues of work on a device, and which one is current."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from time import monotonic_ns
from types import TracebackType
from typing import Any, NamedTuple

from cudatool.errors import CudaError, UsageError
from cudatool.runtime import calls
from cudatool.runtime.calls import check, operation
from cudatool.runtime.capture import beside_captures
from cudatool.runtime.device import DeviceLike, core_device, current_device, device_index, set_device
from cudatool.runtime.device import device as on_device
from cudatool.runtime.dtypes import require_handle, require_int
from cudatool.runtime.event import Event
from cudatool.runtime.handles import Owner
from cudatool.trace import hooks
from cudatool.trace.events import Kind, StreamFlag

__all__ = [
    "ExternalStream",
    "Stream",
    "StreamContext",
    "as_stream",
    "current_stream",
    "default_stream",
    "get_stream_from_external",
    "set_stream",
    "stream",
    "stream_on",
]


class _Pool:
    """The driver's streams of one device and priority, which are used again rather than destroyed.

    Cached memory belongs to the stream that it was freed on, so a stream must outlive the :class:`Stream` that used
    it (PyTorch's streams live for ever too). The first 32 are new, so that programs that make few streams never
    see two that are secretly one.
    """

    FRESH = 32

    def __init__(self) -> None:
        self.made = 0
        self.idle: deque[Any] = deque()

    def take(self) -> Any:
        """Return a stream to use again, None if a new one is to be made."""
        try:
            if self.made >= self.FRESH:
                return self.idle.popleft()
        except IndexError:
            pass
        self.made += 1
        return None


_pools: dict[tuple[int, int], _Pool] = {}


class Stream(Owner):
    """A new stream, which runs at the same time as others, also as the default stream.

    Streams are context managers: inside, the stream is current, and so is its device.

    Parameters
    ----------
    device
        Default: the current device.
    priority
        0 is the lowest, -1 and below are higher; the driver cuts what is out of its range.
    """

    def __init__(self, device: DeviceLike = None, priority: int = 0) -> None:
        index, priority = device_index(device), require_int("priority", priority)
        with on_device(index), operation():
            lowest, highest = check(calls.driver.cuCtxGetStreamPriorityRange())
            priority = max(highest, min(lowest, priority))
            pool = _pools.setdefault((index, priority), _Pool())
            found = pool.take()
            if found is None:
                options = calls.core.StreamOptions(nonblocking=True, priority=priority)
                found = core_device(index).create_stream(options=options)
                hooks.close_stream(index, int(found.handle))  # of one that another library made and destroyed
        self._set(found, index, int(found.handle), priority)
        hooks.stream_id(index, self._handle, flags=StreamFlag.NON_BLOCKING, priority=priority)
        self._pool: _Pool | None = pool

    def _set(self, core: Any, device: int, handle: int, priority: int) -> None:
        self._core = core
        self._handle = handle
        self._native = int(core.handle)  # never 0
        self._pool = None
        # What to make current again, by host thread, as each has its own current stream: one for each time it entered.
        self._entered: dict[int, list[_Before]] = {}
        self.device_index = device
        self.priority = priority

    @staticmethod
    def priority_range(device: DeviceLike = None) -> tuple[int, int]:
        """Return the lowest and the highest priority of a device's streams; the higher one is the lower number."""
        with on_device(device_index(device)), operation():
            lowest, highest = check(calls.driver.cuCtxGetStreamPriorityRange())
        return int(lowest), int(highest)

    @classmethod
    def from_handle(cls, handle: int, device: DeviceLike = None) -> ExternalStream:
        """Return the stream that the driver knows as `handle`; its maker keeps it alive and destroys it."""
        return ExternalStream(handle, device)

    def close(self) -> None:
        """Give the stream up. What is on it still runs; nothing more can be enqueued through this object."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.idle.append(self._core)
        self._core = None
        if _defaults.get(self.device_index) is self:
            del _defaults[self.device_index]  # the next who asks gets a new object for it

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if getattr(self, "_pool", None) is not None and not _finalizing():
            self.close()

    @property
    def device(self) -> int:
        """Ordinal of the device that the stream is on."""
        return self.device_index

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._core is None

    @property
    def core(self) -> Any:
        """The :class:`cuda.core.Stream`; its ``handle`` is never 0, which could mean either default stream.

        Raises
        ------
        CudaError
            The stream was closed.
        """
        if self._core is None:
            raise CudaError(f"the stream {self._handle:#x} was closed", "CUDA_ERROR_INVALID_HANDLE")
        return self._core

    @property
    def native(self) -> int:
        """The driver's handle; unlike :attr:`cuda_stream` never 0, which could mean either default stream.

        Raises
        ------
        CudaError
            The stream was closed.
        """
        return self._native if self._core is not None else int(self.core.handle)

    @property
    def cuda_stream(self) -> int:
        """The driver's handle; 0 is the legacy default stream."""
        return self._handle if self._core is not None else int(self.core.handle)

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_stream)  # as an argument of a C function

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.cuda_stream

    def query(self) -> bool:
        """Return whether everything enqueued so far has completed."""
        handle = self.native
        with on_device(self.device_index), beside_captures(), operation() as correlation:
            (status,) = calls.driver.cuStreamQuery(handle)
            done = bool(status != calls.driver.CUresult.CUDA_ERROR_NOT_READY)
            if done:
                check((status,))
        if correlation:
            self._emit(Kind.STREAM_QUERY, aux1=int(done))
        return done

    def synchronize(self) -> None:
        """Wait for everything enqueued so far."""
        handle = self.native
        with on_device(self.device_index), beside_captures(), operation() as correlation:
            began = monotonic_ns() if correlation else 0
            check(calls.driver.cuStreamSynchronize(handle))
        if correlation:
            self._emit(Kind.STREAM_SYNCHRONIZE, aux1=began)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, by default a new one, and return it."""
        event = Event() if event is None else event
        if not isinstance(event, Event):
            raise UsageError(f"record_event takes an Event, not {type(event).__name__}")
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let everything enqueued from now on wait for `event`; one that was never recorded changes nothing."""
        if not isinstance(event, Event):
            raise UsageError(f"wait_event takes an Event, not {type(event).__name__}")
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Let everything enqueued from now on wait for what has been enqueued on `stream` so far.

        Raises
        ------
        UsageError
            It is no stream, neither ours nor another library's.
        """
        if stream is None:
            raise UsageError("wait_stream takes a stream, not None")
        self.wait_event(as_stream(stream).record_event())

    def trace_id(self) -> int:
        """Return the stream's id in traces."""
        return hooks.stream_id(self.device_index, self._handle)

    def _emit(self, kind: Kind, *, aux1: int = 0) -> None:
        hooks.emit(kind, device=self.device_index, stream=self.trace_id(), aux1=aux1)

    def __enter__(self) -> Stream:
        device = on_device(self.device_index)
        before = _Before(device, _current.streams.get(self.device_index))
        device.__enter__()
        try:
            set_stream(self)
        except BaseException as error:  # it was closed
            device.__exit__(type(error), error, error.__traceback__)
            raise
        self._entered.setdefault(threading.get_ident(), []).append(before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        thread = threading.get_ident()
        entered = self._entered.get(thread)
        if entered is None:
            raise UsageError("this thread did not enter the stream that it leaves; enter and leave it on one thread")
        device, previous = entered.pop()
        if not entered:
            del self._entered[thread]
        if previous is None:
            _current.streams.pop(self.device_index, None)
        else:
            _current.streams[self.device_index] = previous
        device.__exit__(kind, error, traceback)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stream):
            return NotImplemented
        return (self.device_index, self._handle) == (other.device_index, other._handle)

    def __hash__(self) -> int:
        return hash((self.device_index, self._handle))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} device={self.device_index} cuda_stream={self._handle:#x}>"


class ExternalStream(Stream):
    """A stream that another library made and destroys.

    Parameters
    ----------
    stream_ptr
        The driver's handle, a number or a ``CUstream`` of cuda.bindings; 0 and 1 are the legacy default stream, 2 the
        per-thread default stream.
    device
        The stream's device; default: the current one.

    Raises
    ------
    UsageError
        `stream_ptr` is no handle.
    """

    def __init__(self, stream_ptr: int, device: DeviceLike = None) -> None:
        index, stream_ptr = device_index(device), require_handle("stream_ptr", stream_ptr)
        with on_device(index), operation():
            # cuda.core takes 0 for "no stream"; the driver knows the legacy default stream as 1 too.
            found = calls.core.Stream.from_handle(stream_ptr or 1)
            flags = StreamFlag.NON_BLOCKING if found.is_nonblocking else StreamFlag(0)
            self._set(found, index, stream_ptr, found.priority)
        hooks.stream_id(index, stream_ptr, flags=flags, priority=self.priority)


def get_stream_from_external(data_ptr: int, device: DeviceLike = None) -> ExternalStream:
    """Return the stream that the driver knows as `data_ptr`; its maker keeps it alive and destroys it."""
    return ExternalStream(data_ptr, device)


def as_stream(stream: Any) -> Stream:
    """Return anything with ``__cuda_stream__`` as a stream of ours; None is the current stream.

    Raises
    ------
    UsageError
        It is no stream.
    """
    if stream is None:
        return current_stream()
    if isinstance(stream, Stream):
        return stream
    try:
        _, handle = stream.__cuda_stream__()
    except AttributeError:
        raise UsageError(f"{type(stream).__name__} is not a stream: it has no __cuda_stream__") from None
    return ExternalStream(handle)


class _Current(threading.local):
    """The calling thread's current stream of each device, where it is not the default stream."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}


_current = _Current()
_defaults: dict[int, Stream] = {}


def default_stream(device: DeviceLike = None) -> Stream:
    """Return the legacy default stream of a device: it waits for all blocking streams, and they for it."""
    index = device_index(device)
    found = _defaults.get(index)
    if found is None:
        found = _defaults[index] = ExternalStream(0, index)
    return found


def current_stream(device: DeviceLike = None) -> Stream:
    """Return the stream of a device on which the calling thread enqueues."""
    return stream_on(current_device() if device is None else device_index(device))


def stream_on(index: int) -> Stream:
    """Return the current stream of a device that is known to exist, by its ordinal."""
    return _current.streams.get(index) or _defaults.get(index) or default_stream(index)


def set_stream(stream: Stream | None) -> None:
    """Make `stream` current, and its device; None changes nothing. Prefer the :class:`stream` context manager."""
    if stream is None:
        return
    if not isinstance(stream, Stream):
        raise UsageError(
            f"set_stream takes a Stream, not {type(stream).__name__}; wrap a handle with Stream.from_handle"
        )
    if stream.core is not None:
        set_device(stream.device_index)
        if stream == default_stream(stream.device_index):
            _current.streams.pop(stream.device_index, None)
        else:
            _current.streams[stream.device_index] = stream


class _Before(NamedTuple):
    """What was current when a thread entered a stream."""

    device: on_device
    stream: Stream | None


class StreamContext:
    """Context manager that makes a stream and its device current, and afterwards those that were.

    It can be entered again while it is open, and by several threads; each leaves what it entered.

    Parameters
    ----------
    stream
        None changes nothing.

    Raises
    ------
    UsageError
        `stream` is no stream, or a thread leaves it that did not enter it.
    """

    def __init__(self, stream: Stream | None) -> None:
        if stream is not None and not isinstance(stream, Stream):
            raise UsageError(
                f"only a Stream can be made current, not {type(stream).__name__}; wrap a handle with Stream.from_handle"
            )
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, traceback)


stream = StreamContext
"""``with cudatool.stream(s):``, as in torch.cuda."""
