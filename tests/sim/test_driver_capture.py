"""Stream capture: what becomes a node, what orders it, and the error of every illegal capture."""

from __future__ import annotations

import ctypes
import threading

import pytest

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NONE, ACTIVE, INVALIDATED = 0, 1, 2
ADD, SET = 0, 1


def name(answer):
    return answer[0].name.removeprefix("CUDA_ERROR_")


class Capture:
    """Streams and events, and short ways to capture in them."""

    def __init__(self, driver, ok, programs):
        self.driver, self.ok = driver, ok
        self.stream = programs.stream
        self.other = ok(driver.cuStreamCreate(1))
        self.events = [ok(driver.cuEventCreate(2)) for _ in range(3)]

    def begin(self, mode=RELAXED, stream=None):
        self.ok(self.driver.cuStreamBeginCapture(stream or self.stream, self.driver.CUstreamCaptureMode(mode)))

    def end(self, stream=None):
        return self.ok(self.driver.cuStreamEndCapture(stream or self.stream))

    def fail(self, stream=None):
        """End a capture that fails, and return the error."""
        code, graph = self.driver.cuStreamEndCapture(stream or self.stream)
        assert graph is None or int(graph) == 0
        return code.name.removeprefix("CUDA_ERROR_")

    def status(self, stream=None):
        return int(self.ok(self.driver.cuStreamIsCapturing(stream or self.stream)))

    def order(self, event, before, after):
        """Let `after` wait for what is in `before` now."""
        self.ok(self.driver.cuEventRecord(event, before))
        self.ok(self.driver.cuStreamWaitEvent(after, event, 0))

    def info(self, stream=None):
        return self.ok(self.driver.cuStreamGetCaptureInfo(stream or self.stream))

    def close(self):
        for stream in (self.stream, self.other):
            self.driver.cuStreamEndCapture(stream)  # what a test left
        self.ok(self.driver.cuStreamDestroy(self.other))
        for event in self.events:
            self.ok(self.driver.cuEventDestroy(event))


@pytest.fixture
def capture(driver, ok, programs):
    made = Capture(driver, ok, programs)
    yield made
    made.close()


def run(driver, ok, programs, graph, times=1):
    executable = programs.instantiate(graph=graph)
    programs.run(executable, times)
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


# ---- What is captured ----


def test_captured_work_does_not_run_until_its_graph_is_launched(driver, ok, programs, capture):
    capture.begin()
    assert ACTIVE == capture.status()
    ok(programs.launch(capture.stream, 1, 5))
    ok(programs.launch(capture.stream, 3, 0))
    graph = capture.end()
    assert NONE == capture.status()
    ok(driver.cuCtxSynchronize())
    assert [0] == programs.numbers()
    run(driver, ok, programs, graph, times=2)
    assert [((0 + 5) * 3 + 5) * 3] == programs.numbers()


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_every_operation_of_a_stream_becomes_its_type_of_node(driver, ok, programs, capture, mode):
    stream, memory = capture.stream, programs.memory
    host = (ctypes.c_int * 2)(7, 8)
    capture.begin(mode)
    ok(driver.cuMemcpyHtoDAsync(memory, ctypes.addressof(host), 8, stream))
    ok(driver.cuMemsetD32Async(memory + 8, 3, 2, stream))
    ok(programs.launch(stream, 2, 1))
    ok(driver.cuLaunchHostFunc(stream, driver.CUhostFn(programs.host_function("h")), 0))
    address = ok(driver.cuMemAllocAsync(64, stream))
    ok(driver.cuMemcpyDtoDAsync(address, memory, 8, stream))
    ok(driver.cuMemcpyDtoDAsync(memory + 16, address, 8, stream))
    ok(driver.cuMemFreeAsync(address, stream))
    ok(driver.cuEventRecordWithFlags(capture.events[0], stream, 1))
    ok(driver.cuStreamWaitEvent(stream, capture.events[1], 1))
    graph = capture.end()
    nodes = ok(driver.cuGraphGetNodes(graph, 20))[0][:10]
    kinds = [int(ok(driver.cuGraphNodeGetType(node))) for node in nodes]
    assert [1, 2, 0, 3, 10, 1, 1, 11, 7, 6] == kinds
    assert 9 == ok(driver.cuGraphGetEdges(graph))[3]
    host[1] = 9  # read when the graph runs
    run(driver, ok, programs, graph)
    assert ([15, 9, 3, 3, 15, 9], ["h"]) == (programs.numbers(6), programs.order)
    assert "CUDA_SUCCESS" == name(driver.cuEventQuery(capture.events[0]))


def test_launch_attributes_are_captured(driver, ok, programs, capture):
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream = capture.stream
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    attribute.value.priority = -2
    config.attrs, config.numAttrs = [attribute], 1
    arguments = (programs.memory, 1, 4), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    capture.begin()
    ok(driver.cuLaunchKernelEx(config, programs.functions["affine"], arguments, 0))
    graph = capture.end()
    (node,), _ = ok(driver.cuGraphGetNodes(graph, 1))
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY
    assert -2 == ok(driver.cuGraphKernelNodeGetAttribute(node, kind)).priority
    run(driver, ok, programs, graph)
    assert [4] == programs.numbers()


@pytest.mark.usefixtures("checked")
def test_cooperative_launches_are_captured_as_such(driver, ok, programs, capture):
    arguments = (programs.memory, 1, 4), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
    launch, kernel = driver.cuLaunchCooperativeKernel, programs.functions["affine"]
    capture.begin()
    ok(launch(kernel, 1, 1, 1, 1, 1, 1, 0, capture.stream, arguments))
    too_large = launch(kernel, 1 << 20, 1, 1, 1, 1, 1, 0, capture.stream, arguments)
    assert "COOPERATIVE_LAUNCH_TOO_LARGE" == name(too_large)
    graph = capture.end()
    (node,), _ = ok(driver.cuGraphGetNodes(graph, 1))
    kind = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert 1 == ok(driver.cuGraphKernelNodeGetAttribute(node, kind)).cooperative
    run(driver, ok, programs, graph)
    assert [4] == programs.numbers()


def test_launch_of_a_graph_is_not_captured(driver, ok, programs, capture):
    """As on a GPU; only a child graph node puts one graph into another."""
    programs.affine(1, 2)
    executable = programs.instantiate()
    capture.begin()
    assert "STREAM_CAPTURE_UNSUPPORTED" == name(driver.cuGraphLaunch(executable, capture.stream))
    assert "STREAM_CAPTURE_INVALIDATED" == name(driver.cuStreamEndCapture(capture.stream))


def test_events_fork_and_join(driver, ok, programs, capture, schedule):
    capture.begin()
    ok(programs.launch(capture.stream, 1, 1))
    capture.order(capture.events[0], capture.stream, capture.other)
    assert ACTIVE == capture.status(capture.other)
    ok(programs.launch(capture.other, 10, 0))
    ok(programs.launch(capture.stream, 0, 5, at=1))
    capture.order(capture.events[1], capture.other, capture.stream)
    ok(programs.launch(capture.stream, 1, 3))
    graph = capture.end()
    assert NONE == capture.status(capture.other)
    assert (4, 4) == (ok(driver.cuGraphGetNodes(graph))[1], ok(driver.cuGraphGetEdges(graph))[3])
    run(driver, ok, programs, graph)
    assert [13, 5] == programs.numbers(2)


def test_forgotten_wait_in_a_capture_shows_under_another_schedule(machine, driver, ok, programs, capture, monkeypatch):
    from cudatool.sim import Schedule

    capture.begin()
    capture.order(capture.events[0], capture.stream, capture.other)
    ok(programs.launch(capture.other, 1, 2))
    ok(programs.launch(capture.stream, 10, 0))  # should come behind the other stream's kernel
    capture.order(capture.events[1], capture.other, capture.stream)
    graph = capture.end()
    executable = programs.instantiate(graph=graph)
    results = {}
    for schedule in (Schedule.FIFO, Schedule.LIFO):
        monkeypatch.setattr(machine.scheduler, "schedule", schedule)
        programs.set(1)
        programs.run(executable)
        results[schedule] = programs.numbers()
    assert {Schedule.FIFO: [30], Schedule.LIFO: [12]} == results
    ok(driver.cuGraphExecDestroy(executable))
    ok(driver.cuGraphDestroy(graph))


def test_work_in_other_streams_runs_during_a_capture(driver, ok, programs, capture):
    capture.begin()
    ok(programs.launch(capture.other, 1, 4))
    ok(driver.cuStreamSynchronize(capture.other))
    assert ACTIVE == capture.status()
    ok(driver.cuGraphDestroy(capture.end()))
    assert [4] == programs.numbers()


def test_capture_into_a_graph_adds_to_what_it_has(driver, ok, programs, capture):
    first = programs.affine(0, 7)
    mode = driver.CUstreamCaptureMode(RELAXED)
    ok(driver.cuStreamBeginCaptureToGraph(capture.stream, programs.graph, [first], None, 1, mode))
    ok(programs.launch(capture.stream, 3, 0))
    assert "INVALID_VALUE" == name(driver.cuGraphInstantiate(programs.graph, 0))  # not while a stream captures
    second = driver.cuStreamBeginCaptureToGraph(capture.other, programs.graph, None, None, 0, mode)
    assert "INVALID_VALUE" == name(second)
    assert int(programs.graph) == int(capture.end())
    programs.run()
    assert [21] == programs.numbers()


def test_capture_info_names_the_graph_and_what_is_next_depends_on(driver, ok, programs, capture):
    assert NONE == int(capture.info()[0])
    capture.begin()
    status, number, graph, nodes, _, count = capture.info()
    assert (ACTIVE, 0) == (int(status), count)
    ok(programs.launch(capture.stream, 1, 1))
    status, again, same, nodes, _, count = capture.info()
    assert (int(number), int(graph), 1) == (int(again), int(same), count)
    found = ok(driver.cuGraphGetNodes(graph, 1))[0]
    assert [int(node) for node in found] == [int(node) for node in nodes]
    assert "INVALID_VALUE" == name(driver.cuGraphDestroy(graph))
    assert "INVALID_VALUE" == name(driver.cuGraphDestroyNode(found[0]))
    assert int(graph) == int(capture.end())
    ok(driver.cuGraphDestroy(graph))


def test_dependencies_of_a_capture_are_changed_by_hand(driver, ok, programs, capture):
    capture.begin()
    ok(programs.launch(capture.stream, 1, 1))
    graph = capture.info()[2]
    host = programs.add_host("h", graph=graph)
    ok(driver.cuStreamUpdateCaptureDependencies(capture.stream, [host], None, 1, ADD))
    assert 2 == capture.info()[5]
    ok(driver.cuStreamUpdateCaptureDependencies(capture.stream, [host], None, 1, SET))
    assert [int(host)] == [int(node) for node in capture.info()[3]]
    refused = driver.cuStreamUpdateCaptureDependencies(capture.stream, [host], None, 1, 7)
    assert "INVALID_VALUE" == name(refused)
    run(driver, ok, programs, capture.end())  # the kernel, unreachable now, was not forgotten by a stream
    assert ([1], ["h"]) == (programs.numbers(), programs.order)
    idle = driver.cuStreamUpdateCaptureDependencies(capture.stream, None, None, 0, ADD)
    assert "ILLEGAL_STATE" == name(idle)


def test_capture_may_end_in_another_thread_only_if_it_is_relaxed(driver, ok, programs, capture):
    context = ok(driver.cuCtxGetCurrent())
    found = []

    def other():
        ok(driver.cuCtxSetCurrent(context))
        found.append(driver.cuStreamEndCapture(capture.stream))

    for mode in (GLOBAL, RELAXED):
        capture.begin(mode)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        if mode == GLOBAL:
            ok(driver.cuGraphDestroy(capture.end()))  # it goes on
    assert ["STREAM_CAPTURE_WRONG_THREAD", "CUDA_SUCCESS"] == [name(answer) for answer in found]
    ok(driver.cuGraphDestroy(found[1][1]))


# ---- What is illegal ----


def test_captures_that_cannot_begin_or_end(driver, ok, capture):
    begin, mode = driver.cuStreamBeginCapture, driver.CUstreamCaptureMode(RELAXED)
    assert "STREAM_CAPTURE_UNSUPPORTED" == name(begin(1, mode))  # the legacy default stream
    assert "ILLEGAL_STATE" == capture.fail()
    capture.begin()
    assert "ILLEGAL_STATE" == name(begin(capture.stream, mode))
    ok(driver.cuGraphDestroy(capture.end()))


def test_mode_that_does_not_exist_is_refused(machine, programs):
    from cudatool.sim.api.capture import cuStreamBeginCapture
    from cudatool.sim.results import DriverError, Result

    with pytest.raises(DriverError) as error:
        cuStreamBeginCapture(int(programs.stream), 3)
    assert Result.INVALID_VALUE is error.value.result


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery"])
def test_waiting_for_a_capturing_stream_invalidates_the_capture(driver, programs, capture, call):
    capture.begin()
    assert "STREAM_CAPTURE_UNSUPPORTED" == name(getattr(driver, call)(capture.stream))
    assert INVALIDATED == capture.status()
    assert "STREAM_CAPTURE_INVALIDATED" == name(programs.launch(capture.stream, 1, 1))
    assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()
    assert NONE == capture.status()
    assert "CUDA_SUCCESS" == name(programs.launch(capture.stream, 1, 1))


def test_waiting_for_the_context_invalidates_its_captures(driver, capture):
    capture.begin()
    assert "STREAM_CAPTURE_UNSUPPORTED" == name(driver.cuCtxSynchronize())
    assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()


def test_callbacks_cannot_be_captured(driver, programs, capture):
    capture.begin()
    callback = driver.CUstreamCallback(programs.host_function("never"))
    assert "STREAM_CAPTURE_UNSUPPORTED" == name(driver.cuStreamAddCallback(capture.stream, callback, 0, 0))
    assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()


def test_capture_ends_in_the_stream_that_it_began_in(driver, ok, capture):
    capture.begin()
    capture.order(capture.events[0], capture.stream, capture.other)
    assert "STREAM_CAPTURE_UNMATCHED" == capture.fail(capture.other)
    assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()


def test_fork_that_is_not_joined(driver, ok, programs, capture):
    capture.begin()
    capture.order(capture.events[0], capture.stream, capture.other)
    ok(programs.launch(capture.other, 1, 1))
    assert "STREAM_CAPTURE_UNJOINED" == capture.fail()
    assert [NONE, NONE] == [capture.status(stream) for stream in (capture.stream, capture.other)]


def test_fork_without_work_of_its_own_needs_no_join(driver, ok, programs, capture):
    capture.begin()
    ok(programs.launch(capture.stream, 1, 1))
    capture.order(capture.events[0], capture.stream, capture.other)
    ok(driver.cuGraphDestroy(capture.end()))


def test_work_of_a_destroyed_stream_must_be_joined_too(driver, ok, programs, capture):
    gone = ok(driver.cuStreamCreate(1))
    for join in (True, False):
        capture.begin()
        stream = ok(driver.cuStreamCreate(1)) if join else gone
        capture.order(capture.events[0], capture.stream, stream)
        ok(programs.launch(stream, 1, 1))
        if join:
            capture.order(capture.events[1], stream, capture.stream)
        ok(driver.cuStreamDestroy(stream))
        if join:
            ok(driver.cuGraphDestroy(capture.end()))
    assert "STREAM_CAPTURE_UNJOINED" == capture.fail()


def test_destroying_the_first_stream_ends_a_capture(driver, ok, programs, capture):
    stream = ok(driver.cuStreamCreate(1))
    capture.begin(stream=stream)
    capture.order(capture.events[0], stream, capture.other)
    ok(driver.cuStreamDestroy(stream))
    assert NONE == capture.status(capture.other)
    ok(driver.cuCtxSynchronize())


def test_wait_for_work_before_the_capture_crosses_its_boundary(driver, ok, programs, capture):
    ok(programs.launch(capture.other, 1, 1))
    ok(driver.cuEventRecord(capture.events[0], capture.other))
    capture.begin()
    assert "STREAM_CAPTURE_ISOLATION" == name(driver.cuStreamWaitEvent(capture.stream, capture.events[0], 0))
    assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()


def test_wait_for_an_event_never_recorded_is_no_wait(driver, ok, capture):
    capture.begin()
    ok(driver.cuStreamWaitEvent(capture.stream, capture.events[0], 0))
    graph = capture.end()
    assert 0 == ok(driver.cuGraphGetNodes(graph))[1]
    ok(driver.cuGraphDestroy(graph))


def test_two_captures_cannot_be_merged(driver, ok, capture):
    capture.begin()
    capture.begin(stream=capture.other)
    ok(driver.cuEventRecord(capture.events[0], capture.other))
    assert "STREAM_CAPTURE_MERGE" == name(driver.cuStreamWaitEvent(capture.stream, capture.events[0], 0))
    assert ["STREAM_CAPTURE_INVALIDATED"] * 2 == [capture.fail(s) for s in (capture.stream, capture.other)]


@pytest.mark.parametrize("mode", [GLOBAL, RELAXED])
@pytest.mark.parametrize("call", ["cuEventQuery", "cuEventSynchronize"])
def test_asking_for_a_captured_event_invalidates_its_capture(driver, ok, capture, call, mode):
    capture.begin(mode)
    ok(driver.cuEventRecord(capture.events[0], capture.stream))
    assert "CAPTURED_EVENT" == name(getattr(driver, call)(capture.events[0]))
    assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()


def test_captured_event_stays_captured_until_it_is_recorded_again(driver, ok, capture):
    event, stream = capture.events[0], capture.stream
    capture.begin()
    ok(driver.cuEventRecord(event, stream))
    ok(driver.cuGraphDestroy(capture.end()))
    timed = ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(timed, stream))
    for answer in (
        driver.cuEventQuery(event),
        driver.cuEventSynchronize(event),
        driver.cuEventElapsedTime(timed, event),
        driver.cuStreamWaitEvent(stream, event, 0),
    ):
        assert "CAPTURED_EVENT" == name(answer)
    ok(driver.cuEventRecord(event, stream))
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuEventDestroy(timed))


def test_external_records_and_waits_are_for_capturing_streams(driver, capture):
    stream, event = capture.stream, capture.events[0]
    assert "INVALID_VALUE" == name(driver.cuEventRecordWithFlags(event, stream, 1))
    assert "INVALID_VALUE" == name(driver.cuStreamWaitEvent(stream, event, 1))


def test_freeing_what_no_graph_allocated_cannot_be_captured(driver, ok, programs, capture):
    address = ok(driver.cuMemAllocAsync(64, capture.other))
    capture.begin()
    assert "INVALID_VALUE" == name(driver.cuMemFreeAsync(address, capture.stream))
    ok(driver.cuGraphDestroy(capture.end()))
    ok(driver.cuMemFreeAsync(address, capture.other))


# ---- The legacy default stream ----


def test_legacy_stream_is_unusable_while_a_blocking_stream_captures(driver, ok, programs, capture):
    blocking = ok(driver.cuStreamCreate(0))
    for use in (
        lambda: programs.launch(1, 1, 1),
        lambda: driver.cuStreamSynchronize(1),
        lambda: driver.cuEventRecord(capture.events[0], 1),
        lambda: driver.cuMemcpyHtoD(programs.memory, (ctypes.c_int * 1)(), 4),
        lambda: driver.cuMemsetD32(programs.memory, 0, 1),
    ):
        capture.begin(stream=blocking)
        assert "STREAM_CAPTURE_IMPLICIT" == name(use())
        assert "STREAM_CAPTURE_INVALIDATED" == capture.fail(blocking)
    ok(driver.cuStreamDestroy(blocking))


def test_asking_whether_the_legacy_stream_captures_invalidates_nothing(driver, ok, capture):
    blocking = ok(driver.cuStreamCreate(0))
    capture.begin(stream=blocking)
    assert "STREAM_CAPTURE_IMPLICIT" == name(driver.cuStreamIsCapturing(1))
    assert "STREAM_CAPTURE_IMPLICIT" == name(driver.cuStreamGetCaptureInfo(1))
    ok(driver.cuGraphDestroy(capture.end(blocking)))
    assert NONE == int(ok(driver.cuStreamIsCapturing(1)))
    ok(driver.cuStreamDestroy(blocking))


def test_non_blocking_streams_capture_beside_the_legacy_stream(driver, ok, programs, capture):
    capture.begin()
    ok(programs.launch(1, 1, 3))
    assert [3] == programs.numbers()
    ok(driver.cuGraphDestroy(capture.end()))


def test_legacy_stream_cannot_join_a_capture(driver, ok, capture):
    capture.begin()
    ok(driver.cuEventRecord(capture.events[0], capture.stream))
    assert "STREAM_CAPTURE_IMPLICIT" == name(driver.cuStreamWaitEvent(1, capture.events[0], 0))
    assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()


# ---- Calls that a capture cannot see ----


@pytest.mark.parametrize(
    ("mode", "own", "elsewhere"), [(GLOBAL, False, False), (THREAD_LOCAL, False, True), (RELAXED, True, True)]
)
def test_modes_say_where_unsafe_calls_are_allowed(driver, ok, capture, mode, own, elsewhere):
    context = ok(driver.cuCtxGetCurrent())
    answers = []

    def allocate():
        ok(driver.cuCtxSetCurrent(context))
        answers.append(driver.cuMemAlloc(64))

    expected = {True: "CUDA_SUCCESS", False: "STREAM_CAPTURE_UNSUPPORTED"}
    for thread, allowed in ((None, own), (threading.Thread(target=allocate), elsewhere)):
        capture.begin(mode)
        if thread is None:
            allocate()
        else:
            thread.start()
            thread.join()
        assert expected[allowed] == name(answers[-1])
        if allowed:
            ok(driver.cuGraphDestroy(capture.end()))
            ok(driver.cuMemFree(answers[-1][1]))
        else:
            assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()


def test_thread_that_is_relaxed_may_call_what_is_unsafe(driver, ok, capture):
    exchange, mode = driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode
    capture.begin(GLOBAL)
    assert mode(GLOBAL) == ok(exchange(mode(RELAXED)))
    ok(driver.cuMemFree(ok(driver.cuMemAlloc(64))))
    assert mode(RELAXED) == ok(exchange(mode(GLOBAL)))
    ok(driver.cuGraphDestroy(capture.end()))


@pytest.mark.parametrize("call", ["host", "event"])
def test_host_allocations_and_event_queries_are_unsafe(driver, ok, capture, call):
    capture.begin(GLOBAL)
    answer = driver.cuMemAllocHost(64) if call == "host" else driver.cuEventQuery(capture.events[0])
    assert "STREAM_CAPTURE_UNSUPPORTED" == name(answer)
    assert "STREAM_CAPTURE_INVALIDATED" == capture.fail()


def test_every_variant_of_a_call_is_of_a_call_that_exists(machine):
    from cudatool.sim.abi import ENTRIES
    from cudatool.sim.api.captured_calls import VARIANTS

    assert set() == VARIANTS.keys() - ENTRIES.keys()


def test_calls_are_looked_at_only_while_there_is_a_capture(driver, ok, capture):
    from cudatool.sim import abi

    def is_guarded():
        ok(driver.cuCtxGetCurrent())
        return abi.guard is not None

    assert not is_guarded()
    capture.begin()
    assert is_guarded()
    ok(driver.cuGraphDestroy(capture.end()))
    assert not is_guarded()
    context = ok(driver.cuCtxCreate(None, 0, 0))
    capture.begin(stream=ok(driver.cuStreamCreate(1)))
    assert is_guarded()
    ok(driver.cuCtxDestroy(context))  # with the stream, and so the capture
    assert not is_guarded()
