"""Driver entry points: green contexts, grouped as in the CUDA driver API reference."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import c_size_t, c_uint, c_uint64
from typing import Final

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.green import Descriptor, GreenContext, Resource, SmGroup, split_by_count, split_in_groups
from cudatool.sim.machine import Context, context_behind, current_green, stream_of
from cudatool.sim.queue import EventState, Operation
from cudatool.sim.results import DriverError, Result

_DEFAULT_STREAM: Final = 1  # CU_GREEN_CTX_DEFAULT_STREAM
_NON_BLOCKING: Final = 1
_splits = itertools.count(1)


def _green(handle: int) -> GreenContext:
    """Return the context of a CUgreenCtx."""
    found = state.machine.objects.get(handle)
    if not isinstance(found, GreenContext) or found.green_handle != handle:
        raise DriverError(Result.INVALID_CONTEXT)
    return found


def _store(address: int, resource: Resource) -> None:
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    ctypes.memmove(address, ctypes.addressof(resource), ctypes.sizeof(Resource))


# ---- Resources ----


@entry("cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type)")
def cuDeviceGetDevResource(device: int, resource: int, type: int) -> None:
    _store(resource, Resource.of_device(state.machine.device(device), type))


@entry("cuCtxGetDevResource(CUcontext hCtx, CUdevResource *resource, CUdevResourceType type)")
def cuCtxGetDevResource(hCtx: int, resource: int, type: int) -> None:
    found = context_behind(hCtx)
    kept = found.resource(type) if isinstance(found, GreenContext) else Resource.of_device(found.device, type)
    _store(resource, kept)


@entry("cuGreenCtxGetDevResource(CUgreenCtx hCtx, CUdevResource *resource, CUdevResourceType type)")
def cuGreenCtxGetDevResource(hCtx: int, resource: int, type: int) -> None:
    _store(resource, _green(hCtx).resource(type))


@entry("cuStreamGetDevResource(CUstream hStream, CUdevResource *resource, CUdevResourceType type)")
def cuStreamGetDevResource(hStream: int, resource: int, type: int) -> None:
    stream = stream_of(hStream)
    if type != 1:  # work queues are not a stream's (cuStreamGetDevResource)
        raise DriverError(Result.INVALID_RESOURCE_TYPE)
    green = _green_of(hStream)
    _store(resource, green.resource(type) if green else Resource.of_device(stream.context.device, type))


@entry(
    "cuDevSmResourceSplit(CUdevResource *result, unsigned int nbGroups, const CUdevResource *input, "
    "CUdevResource *remainder, unsigned int flags, CU_DEV_SM_RESOURCE_GROUP_PARAMS *groupParams)"
)
def cuDevSmResourceSplit(result: int, nbGroups: int, input: int, remainder: int, flags: int, groupParams: int) -> None:
    if not nbGroups or not input or not groupParams or flags:
        raise DriverError(Result.INVALID_VALUE)
    groups = (SmGroup * nbGroups).from_address(groupParams)
    wanted = [SmGroup.from_buffer_copy(group) for group in groups]
    parts, rest = split_in_groups(Resource.from_address(input), wanted, next(_splits))
    if result and not all(group.smCount for group in wanted):
        raise DriverError(Result.INVALID_RESOURCE_CONFIGURATION, "each group needs at least one multiprocessor")
    groups[:] = wanted
    _store_split(result, remainder, parts, rest)


@entry(
    "cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *nbGroups, const CUdevResource *input, "
    "CUdevResource *remainder, unsigned int flags, unsigned int minCount)"
)
def cuDevSmResourceSplitByCount(
    result: int, nbGroups: int, input: int, remainder: int, flags: int, minCount: int
) -> None:
    if not nbGroups or not input:
        raise DriverError(Result.INVALID_VALUE)
    limit = c_uint.from_address(nbGroups).value if result else None
    if limit == 0:
        raise DriverError(Result.INVALID_VALUE, "no room for a result")
    parts, rest = split_by_count(Resource.from_address(input), limit, flags, minCount, next(_splits))
    write(nbGroups, c_uint, len(parts))
    _store_split(result, remainder, parts, rest)


def _store_split(result: int, remainder: int, parts: list[Resource], rest: Resource) -> None:
    if result:
        for index, part in enumerate(parts):
            _store(result + index * ctypes.sizeof(Resource), part)
    if remainder:
        _store(remainder, rest)


@entry("cuDevResourceGenerateDesc(CUdevResourceDesc *phDesc, CUdevResource *resources, unsigned int nbResources)")
def cuDevResourceGenerateDesc(phDesc: int, resources: int, nbResources: int) -> None:
    if not phDesc or not resources or not nbResources:
        raise DriverError(Result.INVALID_VALUE)
    given = list((Resource * nbResources).from_address(resources))
    descriptor = Descriptor.of(given, state.machine.new_handle())
    state.machine.objects[descriptor.handle] = descriptor  # "valid for the lifetime of the process"
    write(phDesc, c_size_t, descriptor.handle)


# ---- Contexts ----


@entry("cuGreenCtxCreate(CUgreenCtx *phCtx, CUdevResourceDesc desc, CUdevice dev, unsigned int flags)")
def cuGreenCtxCreate(phCtx: int, desc: int, dev: int, flags: int) -> None:
    machine = state.machine
    device = machine.device(dev)
    descriptor = machine.objects.get(desc)
    if not phCtx or not isinstance(descriptor, Descriptor) or flags & ~_DEFAULT_STREAM or descriptor.ordinal != dev:
        raise DriverError(Result.INVALID_VALUE, "a green context needs a resource descriptor of its own device")
    green = GreenContext(
        machine.new_handle(),
        machine.new_handle(),
        machine.new_serial(),
        device,
        machine.retain_primary(device),
        dict(descriptor.resources),
    )
    machine.objects[green.green_handle] = machine.objects[green.handle] = green
    write(phCtx, c_size_t, green.green_handle)


@entry("cuGreenCtxDestroy(CUgreenCtx hCtx)")
def cuGreenCtxDestroy(hCtx: int) -> None:
    machine = state.machine
    green = _green(hCtx)
    green.is_destroyed = True
    machine.captures.invalidate(machine.streams_of(green))
    del machine.objects[green.green_handle], machine.objects[green.handle]
    machine.release_primary(green.device)


@entry("cuCtxFromGreenCtx(CUcontext *pContext, CUgreenCtx hCtx)")
def cuCtxFromGreenCtx(pContext: int, hCtx: int) -> None:
    write(pContext, c_size_t, _green(hCtx).handle)


@entry("cuGreenCtxGetId(CUgreenCtx greenCtx, unsigned long long *greenCtxId)")
def cuGreenCtxGetId(greenCtx: int, greenCtxId: int) -> None:
    green = _green(greenCtx) if greenCtx else current_green()
    if green is None:
        raise DriverError(Result.INVALID_CONTEXT, "no green context is current")
    write(greenCtxId, c_uint64, green.serial)


# ---- Streams and events ----


@entry("cuGreenCtxStreamCreate(CUstream *phStream, CUgreenCtx greenCtx, unsigned int flags, int priority)")
def cuGreenCtxStreamCreate(phStream: int, greenCtx: int, flags: int, priority: int) -> None:
    green = _green(greenCtx)
    if not phStream or flags != _NON_BLOCKING:
        raise DriverError(Result.INVALID_VALUE, "CU_STREAM_NON_BLOCKING must be specified")
    write(phStream, c_size_t, state.machine.new_stream(green.primary, flags, priority, green).handle)


def _green_of(hStream: int) -> GreenContext | None:
    """Return the green context of a stream; for the default streams, the one that is current."""
    stream = stream_of(hStream)
    if stream.handle in (state.LEGACY_STREAM, state.PER_THREAD_STREAM):
        return current_green()
    green: GreenContext | None = stream.green
    return green


@entry("cuStreamGetGreenCtx(CUstream hStream, CUgreenCtx *phCtx)")
def cuStreamGetGreenCtx(hStream: int, phCtx: int) -> None:
    green = _green_of(hStream)
    write(phCtx, c_size_t, green.green_handle if green else 0)


@entry("cuStreamGetCtx(CUstream hStream, CUcontext *pctx)")
def cuStreamGetCtx(hStream: int, pctx: int) -> None:
    green = _green_of(hStream)
    write(pctx, c_size_t, green.handle if green else stream_of(hStream).context.handle)


@entry("cuStreamGetCtx_v2(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx)")
def cuStreamGetCtx_v2(hStream: int, pCtx: int, pGreenCtx: int) -> None:
    green = _green_of(hStream)
    if green and stream_of(hStream).handle == state.PER_THREAD_STREAM:
        raise DriverError(Result.INVALID_HANDLE, "a green context has no per-thread default stream")
    write(pCtx, c_size_t, stream_of(hStream).context.handle)
    write(pGreenCtx, c_size_t, green.green_handle if green else 0)


def _record(context: Context | GreenContext, hEvent: int, name: str) -> None:
    event = state.machine.get(hEvent, EventState)
    if event.context is not context.primary:
        raise DriverError(Result.INVALID_HANDLE, "the event and the context belong to different primary contexts")
    streams = state.machine.streams_of(context)
    if state.machine.captures.invalidate(streams):
        raise DriverError(Result.STREAM_CAPTURE_UNSUPPORTED, "a stream of the context is being captured")
    record = Operation(context.primary.legacy_stream, "record", name, abi.call.correlation)
    state.machine.scheduler.add(record, cost=0, after=[stream.last for stream in streams])
    event.recorded, event.captured = record, None


def _wait(context: Context | GreenContext, hEvent: int, name: str) -> None:
    event = state.machine.get(hEvent, EventState)
    streams = state.machine.streams_of(context)
    if event.captured is not None:
        event.captured.capture.invalidate()
    if state.machine.captures.invalidate(streams) or event.captured is not None:
        raise DriverError(
            Result.STREAM_CAPTURE_UNSUPPORTED, "the event, or a stream of the context, is part of a capture"
        )
    if event.recorded is None:
        return
    for stream in streams:
        wait = Operation(stream, "wait", name, abi.call.correlation)
        state.machine.scheduler.enqueue(wait, cost=0, after=[event.recorded])
    # Streams that are made later wait for the event, too, and for what such streams had to wait for before.
    barrier = Operation(context.primary.legacy_stream, "wait", name, abi.call.correlation)
    state.machine.scheduler.add(barrier, cost=0, after=[event.recorded, context.barrier])
    context.barrier = barrier


@entry("cuGreenCtxRecordEvent(CUgreenCtx hCtx, CUevent hEvent)")
def cuGreenCtxRecordEvent(hCtx: int, hEvent: int) -> None:
    _record(_green(hCtx), hEvent, "cuGreenCtxRecordEvent")


@entry("cuGreenCtxWaitEvent(CUgreenCtx hCtx, CUevent hEvent)")
def cuGreenCtxWaitEvent(hCtx: int, hEvent: int) -> None:
    _wait(_green(hCtx), hEvent, "cuGreenCtxWaitEvent")


@entry("cuCtxRecordEvent(CUcontext hCtx, CUevent hEvent)")
def cuCtxRecordEvent(hCtx: int, hEvent: int) -> None:
    _record(context_behind(hCtx), hEvent, "cuCtxRecordEvent")


@entry("cuCtxWaitEvent(CUcontext hCtx, CUevent hEvent)")
def cuCtxWaitEvent(hCtx: int, hEvent: int) -> None:
    _wait(context_behind(hCtx), hEvent, "cuCtxWaitEvent")
