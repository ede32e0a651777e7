"""Events: marks in a stream that others can wait for."""

from __future__ import annotations

import ctypes
import sys
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from cudatool import _driver
from cudatool.errors import CudaError, UsageError
from cudatool.runtime import calls
from cudatool.runtime._native import call
from cudatool.runtime.calls import check, entry, operation, raise_status
from cudatool.runtime.capture import beside_captures
from cudatool.runtime.device import DeviceLike, call_on, current_device, device_index
from cudatool.runtime.device import device as on_device
from cudatool.runtime.handles import Owner
from cudatool.trace import hooks
from cudatool.trace.events import EventFlag, Kind

if TYPE_CHECKING:
    from cudatool.runtime.stream import Stream

__all__ = ["Event"]

_TIMING, _SHARED = 1, 2  # EVENT_CREATE's flags
_HANDLE_BYTES = 64  # of a CUipcEventHandle
_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL


class Event(Owner):
    """A mark in a stream. It comes to life on the device of the stream that first records it.

    Parameters
    ----------
    enable_timing
        Measure when it is reached, for :meth:`elapsed_time`.
    blocking
        Let :meth:`synchronize` sleep instead of polling.
    interprocess
        Let other processes wait for it and record it (:meth:`ipc_handle`); without timing.
    external
        While a stream is being captured into a graph, let the graph record the event, or wait for it, each time that it
        runs, so that work outside of the graph can be ordered with it. Else the capture makes a dependency of it.

    Raises
    ------
    UsageError
        An event with timing is to be shared.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        if enable_timing and interprocess:
            raise UsageError("an event with timing cannot be shared; leave enable_timing or interprocess out")
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.interprocess = interprocess
        self.external = external
        self.device_index = -1
        self.cuda_event = 0
        """The driver's handle, 0 before the first record."""

    @classmethod
    def from_ipc_handle(cls, device: DeviceLike, handle: bytes) -> Event:
        """Return the event of another process whose :meth:`ipc_handle` this is, for use on `device`.

        Raises
        ------
        UsageError
            It is no handle.
        CudaError
            The driver refuses it; for instance in the process that it comes from.
        """
        if not isinstance(handle, bytes) or len(handle) != _HANDLE_BYTES:
            raise UsageError(f"the handle of an event is {_HANDLE_BYTES} bytes, not {handle!r}")
        event = cls(interprocess=True)
        index = device_index(device)
        native = calls.driver.CUipcEventHandle()
        ctypes.memmove(native.getPtr(), handle, _HANDLE_BYTES)
        with on_device(index), operation() as correlation:
            event.cuda_event = int(check(calls.driver.cuIpcOpenEventHandle(native)))
        event._made(index, correlation)
        return event

    def ipc_handle(self) -> bytes:
        """Return what another process opens the event with. One never recorded comes to life on the current device.

        Raises
        ------
        UsageError
            The event was not made with ``interprocess=True``.
        """
        if not self.interprocess:
            raise UsageError("only an event made with interprocess=True can be shared")
        if not self.cuda_event:
            self._create(current_device())
        with on_device(self.device_index), operation():
            handle = check(calls.driver.cuIpcGetEventHandle(self.cuda_event))
            return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    @property
    def device(self) -> int | None:
        """Ordinal of the device that the event lives on, None before the first record."""
        return None if self.device_index < 0 else self.device_index

    def record(self, stream: Stream | None = None) -> None:
        """Mark the place that `stream`, by default the current one, has reached.

        Raises
        ------
        UsageError
            It is no stream.
        CudaError
            The event lives on another device, or the stream was closed.
        """
        stream = _current_stream() if stream is None else stream
        try:
            handle, index = stream.native, stream.device_index
        except AttributeError:
            raise _no_stream(stream) from None
        if not self.cuda_event:
            self._create(index)
        elif index != self.device_index:
            raise CudaError(
                f"this event was first recorded on device {self.device_index}, the stream is on device {index}: record "
                "another Event there; streams of any device can wait for it",
                "CUDA_ERROR_INVALID_HANDLE",
            )
        correlation = hooks.begin() if hooks.active else 0
        trace_flags = 0
        try:
            if self.external and _is_capturing(stream):
                trace_flags = EventFlag.EXTERNAL
                function = entry("cuEventRecordWithFlags")
                status = call_on(index, call, function, self.cuda_event, handle, _EXTERNAL)
            else:
                status = call_on(index, call, entry("cuEventRecord"), self.cuda_event, handle)
        finally:
            if correlation:
                hooks.end()
        if status:
            raise_status(status)
        if correlation:
            hooks.emit(
                Kind.EVENT_RECORD,
                device=index,
                stream=stream.trace_id(),
                aux0=hooks.event_id(self.cuda_event),
                flags=trace_flags,
                correlation=correlation,
            )

    def wait(self, stream: Stream | None = None) -> None:
        """Let everything enqueued on `stream`, by default the current one, from now on wait for the event.

        One that was never recorded changes nothing.
        """
        stream = _current_stream() if stream is None else stream
        try:
            handle, index = stream.native, stream.device_index
        except AttributeError:
            raise _no_stream(stream) from None
        correlation = hooks.begin() if hooks.active else 0
        try:
            status = trace_flags = 0
            if self.cuda_event:
                trace_flags = EventFlag.EXTERNAL if self.external and _is_capturing(stream) else 0
                flags = _EXTERNAL if trace_flags else 0
                status = call_on(index, call, entry("cuStreamWaitEvent"), handle, self.cuda_event, flags)
        finally:
            if correlation:
                hooks.end()
        if status:
            raise_status(status)
        if correlation:
            hooks.emit(
                Kind.STREAM_WAIT_EVENT,
                device=index,
                stream=stream.trace_id(),
                aux0=self.trace_id(),
                flags=trace_flags,
                correlation=correlation if self.cuda_event else 0,
            )

    def trace_id(self) -> int:
        """Return the event's id in traces."""
        return hooks.event_id(self.cuda_event or -id(self))

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.cuda_event)  # as an argument of a C function

    def query(self) -> bool:
        """Return whether the work before the latest record has completed; True if it was never recorded."""
        if not self.cuda_event:
            return True
        with on_device(self.device_index), beside_captures(), operation() as correlation:
            (status,) = calls.driver.cuEventQuery(self.cuda_event)
            done = bool(status != calls.driver.CUresult.CUDA_ERROR_NOT_READY)
            if done:
                check((status,))
        if correlation:
            event = hooks.event_id(self.cuda_event)
            hooks.emit(Kind.EVENT_QUERY, device=self.device_index, aux0=event, aux1=int(done))
        return done

    def synchronize(self) -> None:
        """Wait for the work before the latest record; for nothing if it was never recorded."""
        if not self.cuda_event:
            return
        with on_device(self.device_index), beside_captures(), operation() as correlation:
            began = monotonic_ns() if correlation else 0
            check(calls.driver.cuEventSynchronize(self.cuda_event))
        if correlation:
            event = hooks.event_id(self.cuda_event)
            hooks.emit(Kind.EVENT_SYNCHRONIZE, device=self.device_index, aux0=event, aux1=began)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to `end_event`, on the device's clock.

        Raises
        ------
        UsageError
            `end_event` is no event.
        CudaError
            One of them was made without timing, was not recorded or has not completed.
        """
        if not isinstance(end_event, Event):
            raise UsageError(f"elapsed_time takes the Event at the end, not {type(end_event).__name__}")
        if not (self.enable_timing and end_event.enable_timing):
            raise CudaError("both events must be created with enable_timing=True", "CUDA_ERROR_INVALID_HANDLE")
        if not (self.cuda_event and end_event.cuda_event):
            raise CudaError("both events must be recorded before calculating elapsed time", "CUDA_ERROR_INVALID_HANDLE")
        with on_device(self.device_index), operation() as correlation:
            elapsed = float(check(calls.driver.cuEventElapsedTime(self.cuda_event, end_event.cuda_event)))
        if correlation:
            for event in (self, end_event):  # there is a time: a query would say that both have completed
                hooks.emit(Kind.EVENT_QUERY, device=event.device_index, aux0=hooks.event_id(event.cuda_event), aux1=1)
        return elapsed

    def _create(self, device: int) -> None:
        kinds = calls.driver.CUevent_flags
        flags = 0 if self.enable_timing else int(kinds.CU_EVENT_DISABLE_TIMING)
        flags |= int(kinds.CU_EVENT_BLOCKING_SYNC) if self.blocking else 0
        flags |= int(kinds.CU_EVENT_INTERPROCESS) if self.interprocess else 0
        with on_device(device), operation() as correlation:
            self.cuda_event = int(check(calls.driver.cuEventCreate(flags)))
            hooks.close_event(self.cuda_event)  # of one that another library made and destroyed
        self._made(device, correlation)

    def _made(self, device: int, correlation: int) -> None:
        self.device_index = device
        if correlation:
            hooks.emit(
                Kind.EVENT_CREATE,
                device=device,
                address=self.cuda_event,
                aux0=hooks.event_id(self.cuda_event),
                flags=(_TIMING if self.enable_timing else 0) | (_SHARED if self.interprocess else 0),
            )

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if not getattr(self, "cuda_event", 0) or _finalizing() or not _driver.started():
            return  # a forked process has no events: they are its parent's
        event = hooks.close_event(self.cuda_event)  # before the driver gives the handle to a new event
        with operation() as correlation:
            calls.driver.cuEventDestroy(self.cuda_event)  # a context that is gone has taken its events with it
        if correlation:
            hooks.emit(Kind.EVENT_DESTROY, device=self.device_index, aux0=event)

    def __repr__(self) -> str:
        return f"<Event device={self.device_index} cuda_event={self.cuda_event:#x}>"


def _current_stream() -> Stream:
    from cudatool.runtime.stream import current_stream  # streams make events, too

    return current_stream()


def _no_stream(stream: object) -> UsageError:
    return UsageError(f"an event can only be recorded and waited for in a Stream, not {type(stream).__name__}")


def _is_capturing(stream: Stream) -> bool:
    from cudatool.runtime.capture import is_capturing  # captures know streams, too

    return is_capturing(stream)
