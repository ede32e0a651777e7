"""Driver entry points: stream capture ("Stream Management").

What other calls do in a stream that captures is in :mod:`.captured_calls`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint64

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, write
from cudatool.sim.api.captured_calls import guard
from cudatool.sim.api.graph import edges_from, graph_object
from cudatool.sim.graph.capture import CaptureMode, CaptureStatus
from cudatool.sim.graph.model import PLAIN_EDGE, Graph
from cudatool.sim.machine import stream_of
from cudatool.sim.queue import StreamState
from cudatool.sim.results import DriverError, Result


def _mode(number: int) -> CaptureMode:
    if number not in CaptureMode.__members__.values():
        raise DriverError(Result.INVALID_VALUE, f"{number} is not a capture mode")
    return CaptureMode(number)


@entry("cuStreamBeginCapture(CUstream hStream, CUstreamCaptureMode mode)")
def cuStreamBeginCapture(hStream: int, mode: int) -> None:
    state.machine.captures.begin(stream_of(hStream), _mode(mode), None, {})
    abi.guard = guard


@entry(
    "cuStreamBeginCaptureToGraph(CUstream hStream, CUgraph hGraph, const CUgraphNode *dependencies, "
    "const CUgraphEdgeData *dependencyData, size_t numDependencies, CUstreamCaptureMode mode)"
)
def cuStreamBeginCaptureToGraph(
    hStream: int, hGraph: int, dependencies: int, dependencyData: int, numDependencies: int, mode: int
) -> None:
    graph = graph_object(hGraph, Graph)
    tail = edges_from(graph, dependencies, dependencyData, numDependencies)
    state.machine.captures.begin(stream_of(hStream), _mode(mode), graph, tail)
    abi.guard = guard


@entry("cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)")
def cuStreamEndCapture(hStream: int, phGraph: int) -> None:
    if not phGraph:
        raise DriverError(Result.INVALID_VALUE)
    write(phGraph, c_size_t, 0)
    write(phGraph, c_size_t, state.machine.captures.end(stream_of(hStream)).handle)


@entry("cuStreamIsCapturing(CUstream hStream, int *captureStatus)")
def cuStreamIsCapturing(hStream: int, captureStatus: int) -> None:
    write(captureStatus, c_int, _status(stream_of(hStream)))


def _status(stream: StreamState) -> CaptureStatus:
    captures = state.machine.captures
    captures.check_implicit(stream, invalidates=False)
    capture = captures.of(stream)
    return capture.status if capture else CaptureStatus.NONE


@entry(
    "cuStreamGetCaptureInfo(CUstream hStream, int *captureStatus_out, cuuint64_t *id_out, CUgraph *graph_out, "
    "const CUgraphNode **dependencies_out, const CUgraphEdgeData **edgeData_out, size_t *numDependencies_out)"
)
def cuStreamGetCaptureInfo(
    hStream: int,
    captureStatus_out: int,
    id_out: int,
    graph_out: int,
    dependencies_out: int,
    edgeData_out: int,
    numDependencies_out: int,
) -> None:
    stream = stream_of(hStream)
    if edgeData_out and not dependencies_out:
        raise DriverError(Result.INVALID_VALUE)
    status = _status(stream)
    write(captureStatus_out, c_int, status)
    capture = state.machine.captures.of(stream)
    if capture is None or status is not CaptureStatus.ACTIVE:
        return
    tail = capture.tails[stream]
    if dependencies_out and not edgeData_out and any(data != PLAIN_EDGE for data in tail.values()):
        raise DriverError(Result.LOSSY_QUERY)
    handles = (c_size_t * len(tail))(*(node.handle for node in tail))
    edges = ctypes.create_string_buffer(b"".join(tail.values()), 8 * len(tail)) if tail else None
    capture.kept[stream] = handles, edges
    for address, ctype, value in (
        (id_out, c_uint64, capture.id),
        (graph_out, c_size_t, capture.graph.handle),
        (dependencies_out, c_size_t, ctypes.addressof(handles)),
        (edgeData_out, c_size_t, ctypes.addressof(edges) if edges else 0),
        (numDependencies_out, c_size_t, len(tail)),
    ):
        if address:
            write(address, ctype, value)


@entry(
    "cuStreamUpdateCaptureDependencies(CUstream hStream, CUgraphNode *dependencies, "
    "const CUgraphEdgeData *dependencyData, size_t numDependencies, unsigned int flags)"
)
def cuStreamUpdateCaptureDependencies(
    hStream: int, dependencies: int, dependencyData: int, numDependencies: int, flags: int
) -> None:
    stream = stream_of(hStream)
    capture = state.machine.captures.of(stream)
    if capture is None:
        raise DriverError(Result.ILLEGAL_STATE, "the stream is not capturing")
    capture.check_valid()
    if flags > 1:
        raise DriverError(Result.INVALID_VALUE)
    tail = edges_from(capture.graph, dependencies, dependencyData, numDependencies)
    # CU_STREAM_SET_CAPTURE_DEPENDENCIES replaces the set
    capture.tails[stream] = tail if flags else {**capture.tails[stream], **tail}


@entry("cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)")
def cuThreadExchangeStreamCaptureMode(mode: int) -> None:
    if not mode:
        raise DriverError(Result.INVALID_VALUE)
    thread = state.machine.captures.thread
    before, thread.mode = thread.mode, _mode(c_int.from_address(mode).value)
    write(mode, c_int, before)
