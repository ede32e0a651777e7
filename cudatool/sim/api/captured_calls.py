"""What driver calls do while a stream captures.

While one does, every driver call goes through :func:`guard`. A call that works in a capturing stream has a variant here
that adds a node; one that has none is refused. The handlers of those calls know nothing of capture.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_uint64
from typing import Any, Final

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import EntryPoint, write
from cudatool.sim.api.copy import batch_of, batch_of_boxes, check_peers, reads_now
from cudatool.sim.api.graph import add_node
from cudatool.sim.boxes import Memcpy3D, read_2d, read_3d
from cudatool.sim.graph import params
from cudatool.sim.graph.capture import Capture, CapturedEvent
from cudatool.sim.graph.model import PLAIN_EDGE, Node, Work
from cudatool.sim.graph.nodes import BatchOfValues, Copy, RecordEvent, WaitForEvent
from cudatool.sim.graph.params import KernelParams, MemAllocParams, MemsetParams
from cudatool.sim.launch_config import COOPERATIVE, LaunchConfig, launch_attributes
from cudatool.sim.machine import context_behind, current_context, stream_of
from cudatool.sim.pool import Pool
from cudatool.sim.queue import EventState, StreamState
from cudatool.sim.results import DriverError, Result
from cudatool.sim.values import BatchMemOp, batch, batch_op, batch_ops_at

__all__ = ["VARIANTS", "guard"]

# Not seen by a capture though it may depend on them, so "potentially unsafe" (cuThreadExchangeStreamCaptureMode).
_UNSAFE: Final = frozenset(
    [
        "cuEventQuery",
        "cuMemAlloc",
        "cuMemAllocHost",
        "cuMemAllocManaged",
        "cuMemAllocPitch",
        "cuMemFree",
        "cuMemFreeHost",
        "cuMemHostAlloc",
        "cuMemHostRegister",
        "cuMemHostUnregister",
    ]
)
_OF_CAPTURE: Final = frozenset(
    [
        "cuStreamBeginCapture",
        "cuStreamBeginCaptureToGraph",
        "cuStreamEndCapture",
        "cuStreamGetCaptureInfo",
        "cuStreamIsCapturing",
        "cuStreamUpdateCaptureDependencies",
    ]
)
# Ask a stream for what it is, and enqueue nothing.
_PROPERTIES: Final = ("cuStreamGet", "cuStreamSetAttribute", "cuStreamCopyAttributes")
_Variant = Callable[..., None]
VARIANTS: Final[dict[str, _Variant]] = {}


def _captured(variant: _Variant) -> _Variant:
    """Register what the entry point of that name does in a capturing stream.

    A variant gets the capture and the stream, and then the arguments of the entry point.
    """
    VARIANTS[variant.__name__.removeprefix("_")] = variant
    return variant


def guard(entry: EntryPoint, arguments: tuple[Any, ...]) -> None:
    """Carry out a driver call while some stream captures."""
    captures = state.machine.captures
    name = entry.name
    if not captures:
        abi.guard = None
    if not captures or name in _OF_CAPTURE:
        entry.handler(*arguments)
        return
    if name in ("cuEventQuery", "cuEventSynchronize") and _invalidate(arguments[0]):
        entry.handler(*arguments)  # refuses it; on an H100 this, too, comes before the call is found to be unsafe
    if name in _UNSAFE:
        captures.check_unsafe()
    if name in ("cuCtxSynchronize", "cuCtxSynchronize_v2"):
        captures.check_context(context_behind(arguments[0]).primary if any(arguments) else current_context())
    stream = _stream(entry, arguments)
    if stream is None:
        entry.handler(*arguments)
        return
    capture = captures.of(stream)
    if capture is None:
        captures.check_implicit(stream)
        if name != "cuStreamWaitEvent" or not _fork(stream, *arguments[1:]):
            entry.handler(*arguments)
    elif name.startswith(_PROPERTIES):
        entry.handler(*arguments)
    elif name == "cuStreamDestroy":
        captures.leave(stream)
        entry.handler(*arguments)
    else:
        capture.check_valid()
        variant = VARIANTS.get(name)
        if variant is None:
            capture.invalidate()
            raise DriverError(Result.STREAM_CAPTURE_UNSUPPORTED, f"{name} cannot be captured")
        variant(capture, stream, *arguments)


def _stream(entry: EntryPoint, arguments: tuple[Any, ...]) -> StreamState | None:
    """Return the stream that a call works in, None if the call has no stream."""
    if entry.name == "cuLaunchKernelEx":
        return stream_of(LaunchConfig.from_address(arguments[0]).hStream) if arguments[0] else None
    if "hStream" in entry.parameters:
        return stream_of(arguments[entry.parameters.index("hStream")])
    # Calls without a stream that copy or set are in the default stream.
    return stream_of(0) if entry.name.startswith(("cuMemcpy", "cuMemset")) else None


def _invalidate(handle: int) -> bool:
    """Invalidate the capture that an event belongs to, as a call asks for its state; return whether it is of one."""
    event = state.machine.objects.get(handle)
    if not isinstance(event, EventState) or event.captured is None:
        return False
    event.captured.capture.invalidate()
    return True


def _fork(stream: StreamState, hEvent: int, Flags: int) -> bool:
    """Let a stream that waits for an event of an active capture join it. Return whether it is such an event."""
    event = state.machine.get(hEvent, EventState)
    captured = event.captured
    if captured is None or captured.capture.is_over:
        return False
    captured.capture.check_valid()
    if stream is stream.context.legacy_stream:
        captured.capture.invalidate()
        raise DriverError(Result.STREAM_CAPTURE_IMPLICIT, "the legacy default stream cannot be captured")
    if Flags:
        raise DriverError(Result.INVALID_VALUE)
    state.machine.captures.join(stream, captured.capture, captured.tail)
    return True


def _add(capture: Capture, stream: StreamState, work: Work | Callable[[Node], Work]) -> None:
    """Capture a node in a stream."""
    kind = getattr(work, "kind", None)
    if kind is not None:
        params.check_place(capture.graph, kind)
    node = add_node(capture.graph, work, capture.tails[stream])
    capture.tails[stream] = {node: PLAIN_EDGE}


# ---- Values in memory ----


def _add_batch(capture: Capture, stream: StreamState, operations: list[BatchMemOp], flags: int = 0) -> None:
    values = tuple(batch(operations, flags))
    _add(capture, stream, BatchOfValues(stream.context, b"".join(map(bytes, operations)), values))


@_captured
def _cuStreamWriteValue32(
    capture: Capture, stream: StreamState, hStream: int, addr: int, value: int, flags: int
) -> None:
    _add_batch(capture, stream, [batch_op(addr, value, flags, 4, waits=False)])


@_captured
def _cuStreamWriteValue64(
    capture: Capture, stream: StreamState, hStream: int, addr: int, value: int, flags: int
) -> None:
    _add_batch(capture, stream, [batch_op(addr, value, flags, 8, waits=False)])


@_captured
def _cuStreamWaitValue32(
    capture: Capture, stream: StreamState, hStream: int, addr: int, value: int, flags: int
) -> None:
    _add_batch(capture, stream, [batch_op(addr, value, flags, 4, waits=True)])


@_captured
def _cuStreamWaitValue64(
    capture: Capture, stream: StreamState, hStream: int, addr: int, value: int, flags: int
) -> None:
    _add_batch(capture, stream, [batch_op(addr, value, flags, 8, waits=True)])


@_captured
def _cuStreamBatchMemOp(
    capture: Capture, stream: StreamState, hStream: int, count: int, paramArray: int, flags: int
) -> None:
    _add_batch(capture, stream, batch_ops_at(paramArray, count), flags)


# ---- Events ----


@_captured
def _cuEventRecord(capture: Capture, stream: StreamState, hEvent: int, hStream: int) -> None:
    _cuEventRecordWithFlags(capture, stream, hEvent, hStream, 0)


@_captured
def _cuEventRecordWithFlags(capture: Capture, stream: StreamState, hEvent: int, hStream: int, flags: int) -> None:
    event = state.machine.get(hEvent, EventState)
    if flags > 1:
        raise DriverError(Result.INVALID_VALUE)
    if event.context is not stream.context:
        raise DriverError(Result.INVALID_HANDLE)
    if flags:  # CU_EVENT_RECORD_EXTERNAL
        _add(capture, stream, RecordEvent(event))
    else:
        event.captured = CapturedEvent(capture, dict(capture.tails[stream]))


@_captured
def _cuStreamWaitEvent(capture: Capture, stream: StreamState, hStream: int, hEvent: int, Flags: int) -> None:
    event = state.machine.get(hEvent, EventState)
    if Flags > 1:
        raise DriverError(Result.INVALID_VALUE)
    captured = event.captured
    if Flags:  # CU_EVENT_WAIT_EXTERNAL
        _add(capture, stream, WaitForEvent(event))
    elif captured is None and event.recorded is None:
        return  # an event that was never recorded counts as complete
    elif captured is None or captured.capture.is_over:
        capture.invalidate()
        raise DriverError(Result.STREAM_CAPTURE_ISOLATION, "the event stands for work outside of the capture")
    elif captured.capture is not capture:
        capture.invalidate()
        captured.capture.invalidate()
        raise DriverError(Result.STREAM_CAPTURE_MERGE, "the event belongs to another capture")
    else:
        state.machine.captures.join(stream, capture, captured.tail)


# ---- Kernels and host functions ----

_TRUE: Final = bytes([1]).ljust(64, b"\0")  # a CUlaunchAttributeValue


@_captured
def _cuLaunchKernel(
    capture: Capture,
    stream: StreamState,
    f: int,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: int,
    kernelParams: int,
    extra: int,
) -> None:
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    what = KernelParams(f, grid, block, sharedMemBytes, kernelParams, extra, 0, stream.context.handle)
    _add(capture, stream, params.kernel_of(what))


@_captured
def _cuLaunchCooperativeKernel(
    capture: Capture,
    stream: StreamState,
    f: int,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: int,
    kernelParams: int,
) -> None:
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    what = KernelParams(f, grid, block, sharedMemBytes, kernelParams, 0, 0, stream.context.handle)
    _add(capture, stream, params.kernel_of(what, {COOPERATIVE: _TRUE}))


@_captured
def _cuLaunchKernelEx(
    capture: Capture, stream: StreamState, config: int, f: int, kernelParams: int, extra: int
) -> None:
    launch = LaunchConfig.from_address(config)
    context = stream.context.handle
    what = KernelParams(f, launch.grid, launch.block, launch.sharedMemBytes, kernelParams, extra, 0, context)
    _add(capture, stream, params.kernel_of(what, launch_attributes(launch)))


@_captured
def _cuLaunchHostFunc(capture: Capture, stream: StreamState, hStream: int, fn: int, userData: int) -> None:
    _add(capture, stream, params.call_of(fn, userData))


# ---- Copies and fills ----


def _capture_copy(capture: Capture, stream: StreamState, dst: int, src: int, ByteCount: int, *rest: int) -> None:
    if ByteCount:
        _add(capture, stream, params.flat_copy(dst, src, ByteCount, stream.context))


for _name in (
    "cuMemcpyAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
):
    VARIANTS[_name] = _capture_copy


@_captured
def _cuMemcpyWithAttributesAsync(
    capture: Capture, stream: StreamState, dst: int, src: int, size: int, attr: int, hStream: int
) -> None:
    reads_now(attr)  # to check it: a graph reads its sources when it runs
    _capture_copy(capture, stream, dst, src, size)


@_captured
def _cuMemcpyBatchAsync(capture: Capture, stream: StreamState, *arguments: int) -> None:
    context = stream.context
    _add_all(capture, stream, [params.flat_copy(to, of, size, context) for to, of, size, _ in batch_of(*arguments)])


@_captured
def _cuMemcpy3DBatchAsync(
    capture: Capture, stream: StreamState, numOps: int, opList: int, flags: int, hStream: int
) -> None:
    copies = batch_of_boxes(numOps, opList, flags)
    _add_all(capture, stream, [params.copy_of(what, stream.context) for what, _ in copies])


@_captured
def _cuMemcpy3DWithAttributesAsync(capture: Capture, stream: StreamState, op: int, flags: int, hStream: int) -> None:
    for what, _ in batch_of_boxes(1, op, flags):
        _add(capture, stream, params.copy_of(what, stream.context))


def _add_all(capture: Capture, stream: StreamState, copies: list[Copy]) -> None:
    """Capture nodes that have no order among each other."""
    before = capture.tails[stream]
    for work in copies:
        params.check_place(capture.graph, work.kind)
    capture.tails[stream] = {add_node(capture.graph, work, before): PLAIN_EDGE for work in copies}


@_captured
def _cuMemcpyPeerAsync(
    capture: Capture,
    stream: StreamState,
    dstDevice: int,
    dstContext: int,
    srcDevice: int,
    srcContext: int,
    ByteCount: int,
    hStream: int,
) -> None:
    check_peers(dstDevice, dstContext, srcDevice, srcContext, ByteCount)
    _capture_copy(capture, stream, dstDevice, srcDevice, ByteCount)


@_captured
def _cuMemcpy2DAsync(capture: Capture, stream: StreamState, pCopy: int, hStream: int) -> None:
    _capture_box(capture, stream, read_2d(pCopy))


@_captured
def _cuMemcpy3DAsync(capture: Capture, stream: StreamState, pCopy: int, hStream: int) -> None:
    _capture_box(capture, stream, read_3d(pCopy))


@_captured
def _cuMemcpy3DPeerAsync(capture: Capture, stream: StreamState, pCopy: int, hStream: int) -> None:
    what = read_3d(pCopy)
    for side in (what.dst, what.src):
        context_behind(side.context)
        side.context = 0  # reserved, in the parameters of a node
    _capture_box(capture, stream, what)


def _capture_box(capture: Capture, stream: StreamState, what: Memcpy3D) -> None:
    if what.extent.size:
        _add(capture, stream, params.copy_of(what, stream.context))


def _capture_fill_2d(width: int) -> _Variant:
    def capture_fill(
        capture: Capture, stream: StreamState, dst: int, pitch: int, value: int, count: int, rows: int, hStream: int
    ) -> None:
        if count and rows:
            what = MemsetParams(dst, pitch, value, width, count, rows, 0)
            _add(capture, stream, params.fill_of(what, stream.context))

    return capture_fill


VARIANTS.update({f"cuMemsetD2D{8 * width}Async": _capture_fill_2d(width) for width in (1, 2, 4)})


def _capture_fill(width: int) -> _Variant:
    def capture_fill(capture: Capture, stream: StreamState, dst: int, value: int, count: int, hStream: int) -> None:
        if count:
            what = MemsetParams(dst, 0, value, width, count, 1, 0)
            _add(capture, stream, params.fill_of(what, stream.context))

    return capture_fill


VARIANTS.update({f"cuMemsetD{8 * width}Async": _capture_fill(width) for width in (1, 2, 4)})

# ---- Memory ----


@_captured
def _cuMemAllocAsync(capture: Capture, stream: StreamState, dptr: int, bytesize: int, hStream: int) -> None:
    _allocate(capture, stream, dptr, bytesize, stream.context.device.ordinal)


@_captured
def _cuMemAllocFromPoolAsync(
    capture: Capture, stream: StreamState, dptr: int, bytesize: int, pool: int, hStream: int
) -> None:
    _allocate(capture, stream, dptr, bytesize, state.machine.get(pool, Pool).device)


def _allocate(capture: Capture, stream: StreamState, dptr: int, bytesize: int, ordinal: int) -> None:
    if not bytesize:
        write(dptr, c_uint64, 0)  # zero bytes make no node, unlike for cuGraphAddMemAllocNode
        return
    if not dptr:
        raise DriverError(Result.INVALID_VALUE)
    what = MemAllocParams(bytesize=bytesize)
    what.poolProps.allocType, what.poolProps.location_type, what.poolProps.location_id = 1, int(ordinal >= 0), ordinal
    _add(capture, stream, params.allocation_of(what))
    write(dptr, c_uint64, what.dptr)


@_captured
def _cuMemFreeAsync(capture: Capture, stream: StreamState, dptr: int, hStream: int) -> None:
    _add(capture, stream, params.free_of(dptr, capture.graph))
