"""Graphs that any library captures on a GPU: their nodes are checked at each launch, or the launch is named."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
from cuda.bindings import driver
from cupti_logs import judging_launches, put_code, put_launch

from cudatool.collect.copied_boxes import MEMCPY_2D
from cudatool.collect.gpu_launches import LaunchRowFlag
from cudatool.sanitize import check
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, AccessFlag, GraphLaunchFlag, Kind, WarningCode
from cudatool.trace.model import Trace

BUFFER, OTHER = 0x7F0000000000, 0x7F0000010000
GRAPH, EXECUTABLE = 0x500, 0x600
FIRST, SECOND, EVENT = 0xABC00, 0xABD00, 0xE0


@pytest.fixture
def launching(monkeypatch):
    with judging_launches(monkeypatch) as found:
        log, clock = found.log, itertools.count(1)
        put = log.put
        log.put = lambda what, *words, time=0, **rest: put(what, *words, time=next(clock), **rest)
        log.put("cuMemAlloc_v2", BUFFER, 4096)
        log.put("cuMemAlloc_v2", OTHER, 4096)
        for handle in (FIRST, SECOND):
            log.put("cuStreamCreate", handle, 1)
        put_code(log)
        yield found


def checked(launching):
    launching.collector.flush()
    names = list(dict.fromkeys(["", *(event.name for event in launching.events)]))
    records = np.zeros(len(launching.events), RECORD)
    for record, event in zip(records, launching.events, strict=True):
        for field in RECORD.names:
            record[field] = names.index(event.name) if field == "name" else getattr(event, field, 0)
        record["stack"] = 0
    return check(Trace(records, names, header={"device_kind": "cuda", "watches_launches": True}))


def capture(log, *pointers, adds=False):
    """Capture a launch for each pointer, one after the other."""
    log.put("cuStreamBeginCaptureToGraph" if adds else "cuStreamBeginCapture_v2", FIRST)
    for pointer in pointers:
        put_launch(log, stream=FIRST, pointer=pointer, flags=LaunchRowFlag.CAPTURED)
    log.put("cuStreamEndCapture", FIRST, GRAPH)


def launch(log, *, instantiates=True, then=BUFFER):
    """Launch the graph in one stream, and a kernel in the other."""
    if instantiates:
        log.put("cuGraphInstantiateWithFlags", EXECUTABLE, GRAPH)
    log.put("cuGraphLaunch", EXECUTABLE, FIRST)
    put_launch(log, stream=SECOND, pointer=then)


def kinds(report):
    """Kernels may touch less of an allocation than their code says: what they do is possible, copies are certain."""
    return [finding.kind for finding in (*report.findings, *report.possible)]


def test_work_beside_a_graph_races_with_what_its_nodes_touch(launching):
    capture(launching.log, BUFFER)
    launch(launching.log)
    report = checked(launching)
    assert kinds(report) == ["race-waw"]
    assert report.unchecked_launches == 0


def test_work_beside_a_graph_that_touches_other_memory_is_clean(launching):
    capture(launching.log, BUFFER)
    launch(launching.log, then=OTHER)
    report = checked(launching)
    assert (kinds(report), report.unchecked_launches) == ([], 0)


def test_nothing_runs_when_it_is_captured(launching):
    capture(launching.log, BUFFER)
    put_launch(launching.log, stream=SECOND)
    report = checked(launching)
    assert (kinds(report), report.unchecked_launches) == ([], 0)


@pytest.mark.parametrize("joins", [False, True])
def test_a_stream_that_waits_for_a_captured_event_is_captured_too(launching, joins):
    log = launching.log
    log.put("cuStreamBeginCapture_v2", FIRST)
    log.put("cuEventRecord", EVENT, FIRST)
    put_launch(log, stream=FIRST, flags=LaunchRowFlag.CAPTURED)
    if joins:
        log.put("cuEventRecord", EVENT, FIRST)
    log.put("cuStreamWaitEvent", SECOND, EVENT)
    put_launch(log, stream=SECOND, flags=LaunchRowFlag.CAPTURED)
    log.put("cuEventRecord", EVENT, SECOND)
    log.put("cuStreamWaitEvent", FIRST, EVENT)
    log.put("cuStreamEndCapture", FIRST, GRAPH)
    log.put("cuGraphInstantiate_v2", EXECUTABLE, GRAPH)
    log.put("cuGraphLaunch", EXECUTABLE, FIRST)
    assert kinds(checked(launching)) == ([] if joins else ["race-waw"])


def test_one_capture_ends_while_another_goes_on(launching):
    log = launching.log
    log.put("cuStreamBeginCapture_v2", SECOND)
    put_launch(log, stream=SECOND, pointer=OTHER, flags=LaunchRowFlag.CAPTURED)
    capture(log, BUFFER)
    put_launch(log, stream=SECOND, flags=LaunchRowFlag.CAPTURED)
    launch(log, then=OTHER)  # is captured
    log.put("cuStreamEndCapture", SECOND, 0x501)
    log.put("cuGraphLaunch", EXECUTABLE, FIRST)
    assert kinds(checked(launching)) == []


def test_work_after_a_capture_that_failed_is_work(launching):
    log = launching.log
    log.put("cuStreamBeginCapture_v2", FIRST)
    log.put("cuStreamEndCapture", FIRST, 0, result=901)
    put_launch(log, stream=FIRST)
    put_launch(log, stream=SECOND)
    assert kinds(checked(launching)) == ["race-waw"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuGraphAddKernelNode_v2", (0x70, GRAPH)),
        ("cuGraphAddNode", (0x70, GRAPH)),
        ("cuGraphAddDependencies", (GRAPH,)),
        ("cuGraphKernelNodeSetParams_v2", (0x70,)),
        ("cuGraphDestroyNode", (0x70,)),
        ("cuGraphCreate", (GRAPH,)),  # of a handle that was in use before
    ],
)
def test_a_graph_that_was_changed_after_its_capture_is_named_as_not_checked(launching, call, words):
    capture(launching.log, BUFFER)
    launching.log.put(call, *words)
    launch(launching.log)
    report = checked(launching)
    assert (kinds(report), report.unchecked_launches) == ([], 1)
    assert "cuGraphLaunch" in str(report.gaps)


def test_a_graph_that_existed_before_its_capture_is_named_as_not_checked(launching):
    capture(launching.log, BUFFER, adds=True)
    launch(launching.log)
    report = checked(launching)
    assert (kinds(report), report.unchecked_launches) == ([], 1)


@pytest.mark.parametrize(
    "call", ["cuGraphExecKernelNodeSetParams_v2", "cuGraphExecNodeSetParams", "cuGraphNodeSetEnabled"]
)
def test_an_executable_graph_that_was_changed_is_named_as_not_checked(launching, call):
    capture(launching.log, BUFFER)
    launch(launching.log, then=OTHER)
    launching.log.put(call, EXECUTABLE)
    launching.log.put("cuCtxSynchronize")
    launch(launching.log, instantiates=False)
    report = checked(launching)
    assert (kinds(report), report.unchecked_launches) == ([], 1)


def test_an_update_gives_an_executable_graph_the_nodes_of_another(launching):
    log = launching.log
    capture(log, BUFFER)
    launch(log, then=OTHER)
    log.put("cuCtxSynchronize")
    capture(log, OTHER)
    log.put("cuGraphExecUpdate_v2", EXECUTABLE, GRAPH)
    launch(log, instantiates=False, then=BUFFER)
    put_launch(log, stream=SECOND, pointer=OTHER)
    report = checked(launching)
    assert (kinds(report), report.unchecked_launches) == (["race-waw"], 0)
    assert report.possible[0].start == OTHER


def test_a_clone_has_the_nodes_of_its_original(launching):
    capture(launching.log, BUFFER)
    launching.log.put("cuGraphClone", 0x501, GRAPH)
    launching.log.put("cuGraphInstantiateWithParams", EXECUTABLE, 0x501)
    launch(launching.log, instantiates=False)
    assert kinds(checked(launching)) == ["race-waw"]


def test_of_a_graph_with_a_kernel_without_code_the_others_are_checked(launching):
    log = launching.log
    log.put("cuStreamBeginCapture_v2", FIRST)
    put_launch(log, stream=FIRST, flags=LaunchRowFlag.CAPTURED)
    put_launch(log, stream=FIRST, function=0x99, flags=LaunchRowFlag.CAPTURED)
    log.put("cuStreamEndCapture", FIRST, GRAPH)
    launch(log)
    report = checked(launching)
    assert (kinds(report), report.unchecked_launches) == (["race-waw"], 1)
    assert "fill" in str(report.gaps)


def test_memory_that_a_graph_allocates_is_said_not_to_be_recorded(launching):
    log = launching.log
    log.put("cuStreamBeginCapture_v2", FIRST)
    log.put("cuMemAllocAsync", 0x7F00000F0000, 64, FIRST)
    log.put("cuStreamEndCapture", FIRST, GRAPH)
    checked(launching)
    assert ["cuMemAllocAsync in a graph is not recorded on a GPU"] == [
        event.name for event in launching.events if event.kind == Kind.WARNING
    ]
    assert [event.aux0 for event in launching.events if event.kind == Kind.WARNING] == [WarningCode.CALL_NOT_RECORDED]


# ---- copies and fills of rows ----


def put_rows(log, *, stream=FIRST, x=0, y=0, width=16, height=4):
    """A copy from the host to rows of the buffer, which has 64 bytes in each."""
    given = driver.CUDA_MEMCPY2D()
    given.srcMemoryType, given.srcHost, given.srcPitch = driver.CUmemorytype.CU_MEMORYTYPE_HOST, 0x1000, width
    given.dstMemoryType, given.dstDevice, given.dstPitch = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE, BUFFER, 64
    given.dstXInBytes, given.dstY, given.WidthInBytes, given.Height = x, y, width, height
    log.put("cuMemcpy2DAsync_v2", len(log.blob), stream)
    log.blob += ctypes.string_at(given.getPtr(), MEMCPY_2D.size)


@pytest.mark.parametrize(("second", "expected"), [({"x": 8}, ["race-waw"]), ({"x": 16}, []), ({"y": 4}, [])])
def test_copies_of_rows_race_where_their_rows_meet(launching, second, expected):
    put_rows(launching.log)
    put_rows(launching.log, stream=SECOND, **second)
    assert kinds(checked(launching)) == expected


def test_a_fill_of_rows_touches_its_rows_alone(launching):
    log = launching.log
    put_rows(log)
    log.put("cuMemsetD2D32Async", BUFFER + 16, 64, 0, 4, 4, SECOND)
    assert kinds(checked(launching)) == []
    fill = next(event for event in launching.events if event.kind == Kind.MEMSET)
    assert (fill.size, fill.aux1) == (64, 4)
    row = launching.events[-1]
    assert (row.kind, row.size, row.flags, row.aux0, row.aux1) == (Kind.ACCESS, 16, AccessFlag.WRITE, 64, 4)


def test_a_captured_copy_of_rows_is_a_node(launching):
    log = launching.log
    log.put("cuStreamBeginCapture_v2", FIRST)
    put_rows(log)
    log.put("cuStreamEndCapture", FIRST, GRAPH)
    launch(log)
    assert kinds(checked(launching)) == ["race-waw"]


def test_copies_between_devices_are_recorded_and_those_of_one_call_wait_for_all_work(launching):
    log = launching.log
    put_launch(log, stream=FIRST)
    log.put("cuMemcpyPeer", OTHER, 1, BUFFER, 0, 4096)
    log.put("cuMemcpyPeerAsync", BUFFER, 0, OTHER, 1, 64, SECOND)
    log.put("cuMemcpyPeerAsync", BUFFER + 32, 0, OTHER, 1, 64, FIRST)
    assert kinds(checked(launching)) == ["race-waw"]


# ---- captures of PyTorch ----


def test_a_launch_in_a_capture_that_nothing_tells_of_is_named(launching):
    put_launch(launching.log, stream=FIRST, flags=LaunchRowFlag.CAPTURED)
    put_launch(launching.log, stream=SECOND)
    report = checked(launching)
    assert (kinds(report), report.unchecked_launches) == ([], 1)


@pytest.mark.parametrize("is_known", [True, False])
def test_launches_beside_what_pytorch_captures_are_checked_with_it(launching, is_known):
    launching.pytorch.passes_on = True  # what the hooks are given here
    put_launch(launching.log, stream=FIRST, pointer=OTHER)
    launching.log.put("cuCtxSynchronize")
    launching.collector.flush()
    stream = next(event.stream for event in launching.events if event.kind == Kind.KERNEL_LAUNCH)
    hooks.emit(Kind.GRAPH_CAPTURE_BEGIN, device=0, stream=stream)
    put_launch(launching.log, stream=FIRST, flags=LaunchRowFlag.CAPTURED)
    launching.collector.flush()
    graph = hooks.new_graph()
    hooks.emit(Kind.GRAPH_CAPTURE_END, device=0, stream=stream, aux0=graph)
    replay, beside = hooks.new_correlation(), GraphLaunchFlag.BESIDE_NODES
    hooks.emit(Kind.GRAPH_LAUNCH, device=0, stream=stream, aux0=graph, flags=beside, correlation=replay, name="replay")
    if is_known:
        hooks.emit(Kind.ACCESS, correlation=replay, address=OTHER, size=64, flags=AccessFlag.WRITE)
    put_launch(launching.log, stream=SECOND)
    put_launch(launching.log, stream=SECOND, pointer=OTHER)
    report = checked(launching)
    assert kinds(report) == ["race-waw"] * (1 + is_known)
    assert report.unchecked_launches == (not is_known)
    assert is_known or "replay" in str(report.gaps)
