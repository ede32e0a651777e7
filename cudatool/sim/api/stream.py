"""Driver entry points: streams, events, host functions. Grouped as in the CUDA driver API reference."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_size_t, c_uint, c_uint64
from typing import Final

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.ipc import SharedEvent
from cudatool.sim.machine import current_context, current_green, stream_of
from cudatool.sim.queue import DISABLE_TIMING, INTERPROCESS, EventState, Operation, StreamState
from cudatool.sim.results import DriverError, Result

# ---- Streams ----


@entry("cuStreamCreate(CUstream *phStream, unsigned int Flags)")
def cuStreamCreate(phStream: int, Flags: int) -> None:
    cuStreamCreateWithPriority(phStream, Flags, 0)


@entry("cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)")
def cuStreamCreateWithPriority(phStream: int, flags: int, priority: int) -> None:
    context = current_context()
    if flags > 1:
        raise DriverError(Result.INVALID_VALUE)
    if not phStream:
        raise DriverError(Result.INVALID_VALUE)
    write(phStream, c_size_t, state.machine.new_stream(context, flags, priority, current_green()).handle)


@entry("cuStreamDestroy(CUstream hStream)")
def cuStreamDestroy(hStream: int) -> None:
    if hStream in (0, state.LEGACY_STREAM, state.PER_THREAD_STREAM):
        raise DriverError(Result.INVALID_HANDLE)
    stream = state.machine.get(hStream, StreamState)  # one whose green context is gone, too
    # Returns at once; what is enqueued still completes (cuStreamDestroy).
    del state.machine.objects[hStream], stream.context.streams[hStream]
    if stream.last is not None and not stream.last.done and stream.blocking:
        # The legacy default stream must still wait for that work though the stream is gone.
        legacy = stream.context.legacy_stream
        marker = Operation(legacy, "wait", "cuStreamDestroy", abi.call.correlation)
        state.machine.scheduler.enqueue(marker, cost=0, after=[stream.last])


@entry("cuStreamSynchronize(CUstream hStream)")
def cuStreamSynchronize(hStream: int) -> None:
    stream = stream_of(hStream)
    state.machine.scheduler.wait_all(_last_of(stream))
    state.machine.scheduler.check(stream.context)


@entry("cuStreamQuery(CUstream hStream)")
def cuStreamQuery(hStream: int) -> None:
    stream = stream_of(hStream)
    done = state.machine.scheduler.query(_last_of(stream))
    state.machine.scheduler.check(stream.context)
    if not done:
        raise DriverError(Result.NOT_READY)


def _last_of(stream: StreamState) -> list[Operation | None]:
    """Return the last operations that a wait for a stream covers, and a query of it, which reports the same.

    Work in the legacy stream is after all blocking streams, so is a wait for it.
    """
    if stream is not stream.context.legacy_stream:
        return [stream.last]
    return [stream.last, *state.machine.scheduler.blocking_streams_last(stream.context)]


@entry("cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)")
def cuStreamWaitEvent(hStream: int, hEvent: int, Flags: int) -> None:
    stream = stream_of(hStream)
    event = _executed_event(hEvent)
    if Flags:
        raise DriverError(Result.INVALID_VALUE)  # CU_EVENT_WAIT_EXTERNAL is for capturing streams
    wait = Operation(stream, "wait", "cuStreamWaitEvent", abi.call.correlation)
    shared = event.shared
    if shared is not None and shared.is_pending_elsewhere:
        wait.run = lambda _: shared.wait()
        state.machine.scheduler.enqueue(wait, cost=0)
        return
    if event.recorded is None:
        return  # an event that was never recorded counts as complete
    state.machine.scheduler.enqueue(wait, cost=0, after=[event.recorded])


@entry("cuStreamGetPriority(CUstream hStream, int *priority)")
def cuStreamGetPriority(hStream: int, priority: int) -> None:
    write(priority, c_int, stream_of(hStream).priority)


@entry("cuStreamGetFlags(CUstream hStream, unsigned int *flags)")
def cuStreamGetFlags(hStream: int, flags: int) -> None:
    write(flags, c_uint, stream_of(hStream).flags)


@entry("cuStreamGetId(CUstream hStream, unsigned long long *streamId)")
def cuStreamGetId(hStream: int, streamId: int) -> None:
    write(streamId, c_uint64, stream_of(hStream).serial)


@entry("cuStreamGetDevice(CUstream hStream, CUdevice *device)")
def cuStreamGetDevice(hStream: int, device: int) -> None:
    write(device, c_int, stream_of(hStream).context.device.ordinal)


# CUlaunchAttributeID that streams have: access policy window, synchronization policy, memory synchronization domains,
# NVLink scheduling. They are hints, which nothing here follows; the priority is the stream's own.
_ATTRIBUTES: Final = (1, 3, 9, 10, 16)
_PRIORITY: Final = 8
_VALUE_BYTES: Final = 64  # of a CUlaunchAttributeValue


@entry("cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value_out)")
def cuStreamGetAttribute(hStream: int, attr: int, value_out: int) -> None:
    stream = stream_of(hStream)
    if not value_out or attr not in (*_ATTRIBUTES, _PRIORITY):
        raise DriverError(Result.INVALID_VALUE)
    value = (
        stream.priority.to_bytes(4, "little", signed=True) if attr == _PRIORITY else stream.attributes.get(attr, b"")
    )
    ctypes.memmove(value_out, value.ljust(_VALUE_BYTES, b"\0"), _VALUE_BYTES)


@entry("cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value)")
def cuStreamSetAttribute(hStream: int, attr: int, value: int) -> None:
    stream = stream_of(hStream)
    if not value or attr not in (*_ATTRIBUTES, _PRIORITY):
        raise DriverError(Result.INVALID_VALUE)
    if attr == _PRIORITY:
        stream.priority = state.clamped_priority(c_int.from_address(value).value)
    else:
        stream.attributes[attr] = ctypes.string_at(value, _VALUE_BYTES)


@entry("cuStreamCopyAttributes(CUstream dst, CUstream src)")
def cuStreamCopyAttributes(dst: int, src: int) -> None:
    to, origin = stream_of(dst), stream_of(src)
    if to.context is not origin.context:
        raise DriverError(Result.INVALID_VALUE, "the streams belong to different contexts")
    to.attributes, to.priority = dict(origin.attributes), origin.priority


# ---- Host functions ----

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_StreamCallback = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


@entry("cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)")
def cuLaunchHostFunc(hStream: int, fn: int, userData: int) -> None:
    stream = stream_of(hStream)
    if not fn:
        raise DriverError(Result.INVALID_VALUE)
    function = _HostFunction(fn)
    operation = Operation(stream, "host", "cuLaunchHostFunc", abi.call.correlation)
    operation.run = lambda _: function(userData)
    state.machine.scheduler.enqueue(operation, cost=5_000)
    state.machine.scheduler.run_soon(operation)


@entry("cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)")
def cuStreamAddCallback(hStream: int, callback: int, userData: int, flags: int) -> None:
    stream = stream_of(hStream)
    if not callback or flags:
        raise DriverError(Result.INVALID_VALUE)
    function = _StreamCallback(callback)
    operation = Operation(stream, "host", "cuStreamAddCallback", abi.call.correlation)
    operation.run = lambda _: function(hStream, 0, userData)
    state.machine.scheduler.enqueue(operation, cost=5_000)
    state.machine.scheduler.run_soon(operation)


# ---- Events ----


def _executed_event(handle: int) -> EventState:
    """Return an event whose latest record was not captured: a captured record is executed in launches of its graph."""
    event = state.machine.get(handle, EventState)
    if event.captured is not None:
        raise DriverError(Result.CAPTURED_EVENT, "the event was last recorded in a capturing stream")
    return event


@entry("cuEventCreate(CUevent *phEvent, unsigned int Flags)")
def cuEventCreate(phEvent: int, Flags: int) -> None:
    context = current_context()
    if Flags & ~7:
        raise DriverError(Result.INVALID_VALUE)
    if Flags & INTERPROCESS and not Flags & DISABLE_TIMING:
        raise DriverError(Result.INVALID_VALUE, "interprocess events have no times (CU_EVENT_DISABLE_TIMING)")
    event = EventState(context, state.machine.new_handle(), Flags)
    if Flags & INTERPROCESS:
        event.shared = SharedEvent.create()
    write(phEvent, c_size_t, event.handle)
    state.machine.objects[event.handle] = event


@entry("cuEventDestroy(CUevent hEvent)")
def cuEventDestroy(hEvent: int) -> None:
    event = state.machine.get(hEvent, EventState)
    del state.machine.objects[hEvent]
    event.close()


@entry("cuEventRecord(CUevent hEvent, CUstream hStream)")
def cuEventRecord(hEvent: int, hStream: int) -> None:
    stream = stream_of(hStream)
    event = state.machine.get(hEvent, EventState)
    if event.context is not stream.context:
        raise DriverError(Result.INVALID_HANDLE)  # event and stream must be of one context (cuEventRecord)
    record = Operation(stream, "record", "cuEventRecord", abi.call.correlation)
    shared = event.shared
    if shared is not None:
        number = shared.record()
        record.run = lambda _: shared.finish(number)
    state.machine.scheduler.enqueue(record, cost=0)
    if shared is not None:
        state.machine.scheduler.run_soon(record)
    event.recorded, event.captured = record, None


@entry("cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags)")
def cuEventRecordWithFlags(hEvent: int, hStream: int, flags: int) -> None:
    if flags:
        raise DriverError(Result.INVALID_VALUE)  # CU_EVENT_RECORD_EXTERNAL is for capturing streams
    cuEventRecord(hEvent, hStream)


@entry("cuEventQuery(CUevent hEvent)")
def cuEventQuery(hEvent: int) -> None:
    event = _executed_event(hEvent)
    done = state.machine.scheduler.query([event.recorded])
    if event.shared is not None:
        done = done and not event.shared.is_pending_elsewhere
    state.machine.scheduler.check(event.context)
    if not done:
        raise DriverError(Result.NOT_READY)


@entry("cuEventSynchronize(CUevent hEvent)")
def cuEventSynchronize(hEvent: int) -> None:
    event = _executed_event(hEvent)
    state.machine.scheduler.wait(event.recorded)
    while event.shared is not None and event.shared.is_pending_elsewhere:
        abi.lock.wait(timeout=0.001)  # other threads of this process go on
    state.machine.scheduler.check(event.context)


@entry("cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd)")
def cuEventElapsedTime(pMilliseconds: int, hStart: int, hEnd: int) -> None:
    start, end = _executed_event(hStart), _executed_event(hEnd)
    if not (start.timed and end.timed) or start.recorded is None or end.recorded is None:
        raise DriverError(Result.INVALID_HANDLE)
    if start.context is not end.context:
        raise DriverError(Result.INVALID_HANDLE)
    # Each query lets the host's clock move on, so that a loop of them ends.
    done = [state.machine.scheduler.query([event.recorded]) for event in (start, end)]
    if not all(done):
        raise DriverError(Result.NOT_READY)
    write(pMilliseconds, c_float, (end.recorded.end - start.recorded.end) / 1e6)
