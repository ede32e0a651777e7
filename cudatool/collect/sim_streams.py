"""What calls of the software driver about streams and events are reported as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from cudatool.collect.sim_calls import CallsInProgress, DriverCall, EmitCall, pointed
from cudatool.collect.sim_ids import context_number, id_of_stream
from cudatool.trace import hooks
from cudatool.trace.events import EventFlag, Kind, StreamFlag

__all__ = ["REPORTS", "stream_synchronize"]

_EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL


def _stream_create(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    id_of_stream(calls.machine.objects[pointed(values["phStream"])])


def _stream_destroy(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    device = calls.thread.call.device
    stream = hooks.close_stream(device, values["hStream"])
    if stream:
        hooks.emit(Kind.STREAM_DESTROY, device=device, stream=stream)


def stream_synchronize(calls: CallsInProgress, call: DriverCall, arguments: Sequence[int]) -> None:
    device, stream = calls.stream(arguments[0])
    hooks.emit(Kind.STREAM_SYNCHRONIZE, device=device, stream=stream, aux1=call.began)


def _stream_query(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    device, stream = calls.stream(values["hStream"])
    hooks.emit(Kind.STREAM_QUERY, device=device, stream=stream, aux1=int(calls.thread.call.is_ready))


def _stream_wait_event(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    device, stream = calls.stream(values["hStream"])
    event = hooks.event_id(values["hEvent"])
    hooks.emit(
        Kind.STREAM_WAIT_EVENT,
        device=device,
        stream=stream,
        aux0=event,
        flags=EventFlag.EXTERNAL if values["Flags"] & _EXTERNAL else 0,
        correlation=calls.owner()[0],
    )


def _values(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    device, stream = calls.stream(values["hStream"])
    for operation in calls.thread.call.values:
        address, size, value, flags = operation.value
        hooks.emit(
            Kind.STREAM_WRITE_VALUE if operation.kind == "write_value" else Kind.STREAM_WAIT_VALUE,
            device=device,
            stream=stream,
            address=address,
            size=size,
            aux0=value,
            flags=flags,
            correlation=calls.thread.call.owners[operation.sequence][0],
        )


def _device_synchronize(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    given = calls.machine.objects.get(values.get("ctx", 0))
    device, context = calls.device, calls.context
    if given is not None:
        device, context = given.primary.device.ordinal, context_number(given)
    hooks.emit(Kind.DEVICE_SYNCHRONIZE, device=device, aux0=context, aux1=calls.thread.call.began)


def _event_create(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    handle = pointed(values["phEvent"])
    timed, shared = not values["Flags"] & 2, values["Flags"] & 4
    flags = int(timed) | (2 if shared else 0)
    hooks.emit(Kind.EVENT_CREATE, device=calls.device, aux0=hooks.event_id(handle), address=handle, flags=flags)


def _event_open(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    handle = pointed(values["phEvent"])
    hooks.emit(Kind.EVENT_CREATE, device=calls.device, aux0=hooks.event_id(handle), address=handle, flags=2)


def _event_destroy(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    event = hooks.close_event(values["hEvent"])
    if event:
        hooks.emit(Kind.EVENT_DESTROY, device=calls.device, aux0=event)


def _event_record(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    device, stream = calls.stream(values["hStream"])
    correlation = calls.owner()[0]
    event = hooks.event_id(values["hEvent"])
    flags = EventFlag.EXTERNAL if values.get("flags", 0) & _EXTERNAL else 0
    hooks.emit(Kind.EVENT_RECORD, device=device, stream=stream, aux0=event, flags=flags, correlation=correlation)


def _context_record_event(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    """Report an event that stands for all streams of a context as one of a stream that waits for all of them."""
    context = calls.machine.objects[values["hCtx"]]
    device = context.device.ordinal
    own = hooks.stream_id(device, values["hCtx"], flags=StreamFlag.NON_BLOCKING)
    for stream in calls.machine.streams_of(context):
        part, recording = hooks.event_id(stream.handle), id_of_stream(stream)
        hooks.emit(Kind.EVENT_RECORD, device=device, stream=recording, aux0=part)
        hooks.emit(Kind.STREAM_WAIT_EVENT, device=device, stream=own, aux0=part)
    hooks.emit(Kind.EVENT_RECORD, device=device, stream=own, aux0=hooks.event_id(values["hEvent"]))


def _context_wait_event(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    context = calls.machine.objects[values["hCtx"]]
    device, event = context.device.ordinal, hooks.event_id(values["hEvent"])
    for stream in calls.machine.streams_of(context):
        hooks.emit(Kind.STREAM_WAIT_EVENT, device=device, stream=id_of_stream(stream), aux0=event)


def _event_synchronize(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    event, began = hooks.event_id(values["hEvent"]), calls.thread.call.began
    hooks.emit(Kind.EVENT_SYNCHRONIZE, device=calls.device, aux0=event, aux1=began)


def _event_elapsed_time(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    """Report that two events have completed: only completed events have an elapsed time."""
    for event in (values["hStart"], values["hEnd"]):
        hooks.emit(Kind.EVENT_QUERY, device=calls.device, aux0=hooks.event_id(event), aux1=1)


def _event_query(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    event, is_ready = hooks.event_id(values["hEvent"]), calls.thread.call.is_ready
    hooks.emit(Kind.EVENT_QUERY, device=calls.device, aux0=event, aux1=int(is_ready))


REPORTS: Final[dict[str, EmitCall]] = {
    "cuStreamCreateWithPriority": _stream_create,
    "cuStreamCreate": _stream_create,
    "cuGreenCtxStreamCreate": _stream_create,
    "cuStreamDestroy": _stream_destroy,
    "cuStreamQuery": _stream_query,
    "cuStreamWaitEvent": _stream_wait_event,
    "cuStreamWriteValue32": _values,
    "cuStreamWriteValue64": _values,
    "cuStreamWaitValue32": _values,
    "cuStreamWaitValue64": _values,
    "cuStreamBatchMemOp": _values,
    "cuCtxSynchronize": _device_synchronize,
    "cuCtxSynchronize_v2": _device_synchronize,
    "cuEventCreate": _event_create,
    "cuIpcOpenEventHandle": _event_open,
    "cuEventDestroy": _event_destroy,
    "cuEventRecord": _event_record,
    "cuEventRecordWithFlags": _event_record,
    "cuGreenCtxRecordEvent": _context_record_event,
    "cuCtxRecordEvent": _context_record_event,
    "cuGreenCtxWaitEvent": _context_wait_event,
    "cuCtxWaitEvent": _context_wait_event,
    "cuEventQuery": _event_query,
    "cuEventSynchronize": _event_synchronize,
    "cuEventElapsedTime": _event_elapsed_time,
}
