"""Events: marks in a stream that others can wait for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cudatool import _cuda
from cudatool._cuda import check, operation
from cudatool._device import core_device
from cudatool._device import device as on_device
from cudatool.errors import CudaError
from cudatool.trace import hooks
from cudatool.trace.events import Kind

if TYPE_CHECKING:
    from cudatool._stream import Stream

__all__ = ["Event"]

_TIMING = 1  # of EVENT_CREATE's flags


class Event:
    """A mark in a stream. It comes to life on the device of the stream that first records it.

    Parameters
    ----------
    enable_timing
        Measure when it is reached, for :meth:`elapsed_time`.
    blocking
        Let :meth:`synchronize` sleep instead of polling.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.device_index = -1
        self.cuda_event = 0
        """The driver's handle, 0 before the first record."""
        self.core: Any = None
        """The :class:`cuda.core.Event`, None before the first record."""

    @property
    def device(self) -> int | None:
        """Ordinal of the device that the event lives on, None before the first record."""
        return None if self.device_index < 0 else self.device_index

    def record(self, stream: Stream | None = None) -> None:
        """Mark the place that `stream`, by default the current one, has reached.

        Raises
        ------
        CudaError
            The event lives on another device, or the stream was closed.
        """
        stream = _current_stream() if stream is None else stream
        core_stream, index = stream.core, stream.device_index
        with on_device(index):
            if self.core is None:
                self._create(index)
            with operation() as correlation:
                core_stream.record(self.core)
        if correlation:
            hooks.emit(
                Kind.EVENT_RECORD,
                device=index,
                stream=stream.trace_id(),
                aux0=hooks.event_id(self.cuda_event),
                correlation=correlation,
            )

    def wait(self, stream: Stream | None = None) -> None:
        """Let everything enqueued on `stream`, by default the current one, from now on wait for the event."""
        (_current_stream() if stream is None else stream).wait_event(self)

    def trace_id(self) -> int:
        """Return the event's id in traces."""
        return hooks.event_id(self.cuda_event or -id(self))

    def query(self) -> bool:
        """Return whether the work before the latest record has completed; True if it was never recorded."""
        if not self.cuda_event:
            return True
        with on_device(self.device_index), operation() as correlation:
            (status,) = _cuda.driver.cuEventQuery(self.cuda_event)
            done = bool(status != _cuda.driver.CUresult.CUDA_ERROR_NOT_READY)
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
        with on_device(self.device_index), operation() as correlation:
            check(_cuda.driver.cuEventSynchronize(self.cuda_event))
        if correlation:
            event = hooks.event_id(self.cuda_event)
            hooks.emit(Kind.EVENT_SYNCHRONIZE, device=self.device_index, aux0=event)

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to `end_event`, on the device's clock.

        Raises
        ------
        CudaError
            One of them was made without timing, was not recorded or has not completed.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise CudaError("both events must be created with enable_timing=True", "CUDA_ERROR_INVALID_HANDLE")
        if not (self.cuda_event and end_event.cuda_event):
            raise CudaError("both events must be recorded before calculating elapsed time", "CUDA_ERROR_INVALID_HANDLE")
        with on_device(self.device_index), operation():
            return float(check(_cuda.driver.cuEventElapsedTime(self.cuda_event, end_event.cuda_event)))

    def _create(self, device: int) -> None:
        with operation() as correlation:
            options = _cuda.core.EventOptions(timing_enabled=self.enable_timing, blocking_sync=self.blocking)
            self.core = core_device(device).create_event(options)
        self.cuda_event = int(self.core.handle)
        self.device_index = device
        if correlation:
            hooks.emit(
                Kind.EVENT_CREATE,
                device=device,
                address=self.cuda_event,
                aux0=hooks.event_id(self.cuda_event),
                flags=_TIMING if self.enable_timing else 0,
            )

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if getattr(self, "core", None) is None or _finalizing():
            return
        event = hooks.close_event(self.cuda_event)  # before the driver gives the handle to a new event
        with operation() as correlation:
            self.core.close()
        if correlation:
            hooks.emit(Kind.EVENT_DESTROY, device=self.device_index, aux0=event)

    def __repr__(self) -> str:
        return f"<Event device={self.device_index} cuda_event={self.cuda_event:#x}>"


def _current_stream() -> Stream:
    from cudatool._stream import current_stream  # streams make events, too

    return current_stream()
