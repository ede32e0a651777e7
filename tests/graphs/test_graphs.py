"""CUDA graphs: capture, what it forbids and what it survives, replay, memory, events."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_process import run_python

import cudatool
import cudatool.random
from cudatool.errors import CudaError, OutOfMemoryError, UsageError
from cudatool.graphs import CapturableGenerator
from cudatool.runtime.capture import capture_of
from cudatool.sanitize import check
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind, pack_pool
from cudatool.trace.reader import read
from cudatool.trace.recorder import Recorder

MIB = 1 << 20
_SOURCE = """
extern "C" __global__ void increase(const float *a, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] + 1.0f;
}
"""


@pytest.fixture(scope="module")
def increase(device: str) -> cudatool.Kernel:
    return cudatool.compile(_SOURCE, "increase")


@pytest.fixture(autouse=True)
def default_limits() -> Iterator[None]:
    cudatool.synchronize()
    cudatool.empty_cache()
    before = {s["segment_pool_id"] for s in cudatool.memory_snapshot()}
    yield
    cudatool.set_per_process_memory_fraction(1.0)
    assert not cudatool.is_current_stream_capturing()
    gc.collect()
    cudatool.empty_cache()
    assert {s["segment_pool_id"] for s in cudatool.memory_snapshot()} <= {(0, 0), *before}  # pools of graphs are gone


def captured(work: Callable[[], Any], **options: Any) -> tuple[cudatool.CUDAGraph, Any]:
    """Return a graph of `work`, and what that returned."""
    graph = cudatool.CUDAGraph()
    with cudatool.graph(graph, **options):
        result = work()
    return graph, result


def pool_of(array: cudatool.DeviceArray) -> tuple[int, int]:
    """Return the id of the pool that an array lies in."""
    (found,) = [
        segment["segment_pool_id"]
        for segment in cudatool.memory_snapshot()
        if segment["address"] <= array.data_ptr() < segment["address"] + segment["total_size"]
    ]
    return found


# What is captured ---------------------------------------------------------------------------------------------------


def test_each_replay_reads_what_is_in_the_inputs_then(increase: cudatool.Kernel) -> None:
    a = cudatool.zeros(100)

    def work() -> cudatool.DeviceArray:
        out = cudatool.empty(100)
        increase[1, 128](a, out, 100)
        return out

    graph, out = captured(work)
    for value in (3, 7):
        a.fill_(value)
        graph.replay()
        assert out.get().tolist() == [value + 1] * 100


def test_fills_copies_and_casts_are_captured() -> None:
    matrix = cudatool.asarray(np.arange(12, dtype=np.float32).reshape(3, 4))

    def work() -> list[cudatool.DeviceArray]:
        pairs = cudatool.empty((3, 2), np.complex128)
        pairs[:, 1].fill_(1 + 2j)
        pairs[:, 0].fill_(0)
        return [
            matrix.T.contiguous(),
            cudatool.empty((3, 4), np.int32).copy_(matrix),
            cudatool.full(5, 0.1, np.float64),
            pairs,
        ]

    graph, (transposed, cast, filled, pairs) = captured(work)
    matrix.copy_(np.full((3, 4), 5.75))
    graph.replay()
    assert transposed.get().tolist() == [[5.75] * 3] * 4
    assert cast.get().tolist() == [[5] * 4] * 3
    assert filled.get().tolist() == [0.1] * 5
    assert pairs.get().tolist() == [[0, 1 + 2j]] * 3


def test_kernel_is_compiled_and_loaded_during_a_capture() -> None:
    source = 'extern "C" __global__ void seven(int *out) { out[threadIdx.x] = 7; }'

    def work() -> cudatool.DeviceArray:
        out = cudatool.empty(8, np.int32)
        cudatool.compile(source, "seven")[1, 8](out)
        return out

    graph, out = captured(work)
    graph.replay()
    assert out.get().tolist() == [7] * 8


@pytest.mark.parametrize("draws", [False, True])
def test_graph_is_not_replayed_inside_another_capture(draws: bool) -> None:
    inner, array = captured(lambda: cudatool.random.rand(10) if draws else cudatool.full(10, 3))
    with pytest.raises(CudaError, match="cannot be replayed inside of another capture"):
        captured(inner.replay)
    inner.replay()
    assert array.get().min() >= 0


def test_replays_are_in_order_on_whatever_streams(increase: cudatool.Kernel) -> None:
    a = cudatool.zeros(100)
    graph, _ = captured(lambda: increase[1, 128](a, a, 100))
    streams = [cudatool.Stream() for _ in range(3)]
    cudatool.synchronize()
    for stream in streams * 3:
        with cudatool.stream(stream):
            graph.replay()
    for stream in streams:
        cudatool.current_stream().wait_stream(stream)
    assert a.get().tolist() == [9] * 100


def test_pinned_memory_is_copied_at_each_replay_and_kept_by_the_graph() -> None:
    pinned = [cudatool.pin_memory(np.full(1000, 1, np.float32))]
    result = cudatool.empty_pinned(1000)

    def work() -> cudatool.DeviceArray:
        array = cudatool.empty(1000).copy_(pinned[0], non_blocking=True)
        array.get(out=result, blocking=False)
        return array

    graph, _ = captured(work)
    for value in (5, 6):
        pinned[0][...] = value
        graph.replay()
        cudatool.synchronize()
        assert result.tolist() == [value] * 1000
    address = pinned.pop().ctypes.data
    others = [cudatool.empty_pinned(1000) for _ in range(3)]
    assert address not in [other.ctypes.data for other in others]
    graph.replay()
    cudatool.synchronize()
    assert result.tolist() == [6] * 1000
    graph.reset()
    cudatool.synchronize()
    others += [cudatool.empty_pinned(1000) for _ in range(2)]
    assert address in [other.ctypes.data for other in others]


def test_pinned_memory_is_allocated_and_freed_during_a_capture() -> None:
    array = cudatool.ones(100)
    before = cudatool.pin_memory(np.ones(100, np.float32))
    cudatool.empty(100).copy_(before, non_blocking=True)
    active = cudatool.host_memory_stats()["active_requests.current"]

    def work() -> None:
        nonlocal before
        del before
        for _ in range(2):
            array.get(out=cudatool.empty_pinned(100), blocking=False)

    graph, _ = captured(work)
    graph.replay()
    cudatool.synchronize()
    graph.reset()
    cudatool.synchronize()
    cudatool.empty_pinned(100)
    assert cudatool.host_memory_stats()["active_requests.current"] < active + 1


# What is refused ----------------------------------------------------------------------------------------------------


def test_copy_of_pageable_memory_is_refused_and_the_capture_goes_on(increase: cudatool.Kernel) -> None:
    a = cudatool.zeros(100)

    def work() -> None:
        with pytest.raises(UsageError, match="use pinned memory"):
            cudatool.asarray(np.ones(100))
        with pytest.raises(UsageError, match="use pinned memory"):
            a.get()
        increase[1, 128](a, a, 100)

    graph, _ = captured(work)
    graph.replay()
    assert a.get().tolist() == [1] * 100


@pytest.mark.parametrize(
    "wait",
    [
        cudatool.synchronize,
        lambda: cudatool.current_stream().synchronize(),
        lambda: cudatool.current_stream().query(),
        lambda: cudatool.empty(10).copy_(cudatool.empty_pinned(10)),
    ],
    ids=["device", "stream", "query", "copy"],
)
def test_waiting_for_captured_work_fails_and_everything_is_usable_again(
    wait: Callable[[], Any], increase: cudatool.Kernel
) -> None:
    a, graph = cudatool.zeros(100), cudatool.CUDAGraph()
    with pytest.raises(CudaError, match="do this before or after the capture") as raised, cudatool.graph(graph):
        increase[1, 128](a, a, 100)
        wait()
    assert raised.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
    assert not cudatool.is_current_stream_capturing()
    with cudatool.graph(graph):
        increase[1, 128](a, a, 100)
    graph.replay()
    assert a.get().tolist() == [1] * 100


def test_invalidated_capture_gives_no_graph_even_if_the_error_is_caught(increase: cudatool.Kernel) -> None:
    a, graph = cudatool.zeros(100), cudatool.CUDAGraph()

    def work() -> None:
        with pytest.raises(CudaError):
            cudatool.current_stream().synchronize()

    with pytest.raises(CudaError, match="the capture gives no graph") as raised, cudatool.graph(graph):
        work()
    assert raised.value.name == "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
    with pytest.raises(UsageError, match="nothing has been captured"):
        graph.replay()
    with cudatool.graph(graph):
        increase[1, 128](a, a, 100)


def test_captured_event_stands_for_nothing_that_can_be_waited_for() -> None:
    event = cudatool.Event()
    with (
        pytest.raises(CudaError, match="record it again outside of the capture") as raised,
        cudatool.graph(cudatool.CUDAGraph(), capture_error_mode="relaxed"),
    ):
        cudatool.zeros(10)
        event.record()
        event.query()
    assert raised.value.name == "CUDA_ERROR_CAPTURED_EVENT"
    event.record()
    event.synchronize()
    assert event.query()


def test_event_of_the_time_before_a_capture_cannot_be_waited_for_inside() -> None:
    event = cudatool.current_stream().record_event()
    with (
        pytest.raises(CudaError, match="wait for it before the capture begins"),
        cudatool.graph(cudatool.CUDAGraph()),
    ):
        cudatool.zeros(10)
        event.wait()


def test_stream_that_is_not_waited_for_is_an_error() -> None:
    side, graph = cudatool.Stream(), cudatool.CUDAGraph()
    with pytest.raises(CudaError, match="was not waited for") as raised, cudatool.graph(graph):
        a = cudatool.zeros(10)
        side.wait_stream(cudatool.current_stream())
        with cudatool.stream(side):
            a.fill_(1)
    assert raised.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNJOINED"
    a.fill_(2)
    assert a.get().tolist() == [2] * 10


def test_captures_are_not_nested(increase: cudatool.Kernel) -> None:
    a = cudatool.zeros(100)

    def work() -> None:
        with pytest.raises(UsageError, match="captures cannot be nested"), cudatool.graph(cudatool.CUDAGraph()):
            pass
        with cudatool.stream(cudatool.Stream()), pytest.raises(UsageError, match="cannot be nested"):
            cudatool.CUDAGraph().capture_begin()
        increase[1, 128](a, a, 100)

    graph, _ = captured(work)
    graph.replay()
    assert a.get().tolist() == [1] * 100


def test_error_of_the_program_leaves_no_graph_and_is_not_replaced() -> None:
    graph = cudatool.CUDAGraph()
    with pytest.raises(KeyError, match="mine"), cudatool.graph(graph):
        cudatool.zeros(10)
        raise KeyError("mine")
    with pytest.raises(UsageError, match="nothing has been captured"):
        graph.replay()
    with pytest.raises(UsageError, match="there is no pool before a capture has ended"):
        graph.pool()


def test_stream_closed_during_its_capture_ends_it_nevertheless(increase: cudatool.Kernel) -> None:
    stream, a = cudatool.Stream(), cudatool.zeros(4)
    graph = cudatool.CUDAGraph()
    with cudatool.stream(stream):
        graph.capture_begin()
        out = a + 1
        stream.close()
        graph.capture_end()
    graph.replay()
    assert out.get().tolist() == [1] * 4


def test_capture_ends_though_caching_was_turned_off_meanwhile() -> None:
    a = cudatool.zeros(4)
    try:
        graph, _ = captured(lambda: (a + 1, cudatool.caching_allocator_enable(False)))
    finally:
        cudatool.caching_allocator_enable(True)
    pool = graph.pool()
    graph.reset()
    with cudatool.graph(graph, pool=cudatool.graph_pool_handle()):
        out = a + 1
    assert graph.pool() != pool
    graph.replay()
    assert out.get().tolist() == [1] * 4


def test_graph_is_dropped_after_the_stream_of_its_last_replay_was_closed() -> None:
    pinned, a = cudatool.empty_pinned(4), cudatool.zeros(4)
    graph, _ = captured(lambda: a.copy_(pinned, non_blocking=True))
    stream = cudatool.Stream()
    with stream:
        graph.replay()
    stream.close()
    pool = graph.pool()
    graph.reset()
    assert not cudatool.memory_snapshot(pool)
    cudatool.synchronize()


_CLOSED_STREAMS = """
import cudatool as ct
graph = ct.CUDAGraph()
with ct.graph(graph):
    drawn = ct.random.rand(4)
kept = [ct.empty(4) for _ in range(2)]
ct.random.manual_seed(0)
for copy in kept:
    stream = ct.Stream()
    with stream:
        graph.replay()
        copy.copy_(drawn)
    stream.close()
ct.synchronize()
ct.random.manual_seed(0)
assert [copy.get().tolist() for copy in kept] == [ct.random.rand(4).get().tolist() for _ in kept]
"""


def test_each_replay_draws_its_own_numbers_though_the_stream_of_the_one_before_was_closed() -> None:
    environment = {"CUDATOOL_DEVICE": "sim:schedule=late"}  # work begins when somebody waits for it
    done = run_python(_CLOSED_STREAMS, environment=environment)
    assert done.returncode == 0, done.stderr


def test_calls_in_the_wrong_place_are_refused() -> None:
    graph = cudatool.CUDAGraph()
    with pytest.raises(UsageError, match="without capture_begin"):
        graph.capture_end()
    with pytest.raises(UsageError, match="choose one of global, thread_local, relaxed"):
        graph.capture_begin(capture_error_mode="lax")
    first, second = cudatool.Stream(), cudatool.Stream()
    with cudatool.stream(first):
        graph.capture_begin()
        cudatool.zeros(10)
        with pytest.raises(UsageError, match="has been captured already"):
            graph.capture_begin()
        for early in (graph.replay, graph.raw_cuda_graph):
            with pytest.raises(UsageError, match="the capture has not ended yet"):
                early()
        with cudatool.stream(second), pytest.raises(UsageError, match="must end on the stream it began on"):
            graph.capture_end()
        graph.capture_end()
        with pytest.raises(UsageError, match="has been captured already"):
            graph.capture_begin()
    graph.replay()


def test_capture_of_a_stream_that_somebody_else_captures_is_refused() -> None:
    from cuda.bindings import driver

    stream = cudatool.Stream()
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.cuStreamBeginCapture(stream.cuda_stream, mode)
    try:
        with cudatool.stream(stream):
            assert cudatool.is_current_stream_capturing()
            with pytest.raises(UsageError, match="is being captured already"):
                cudatool.CUDAGraph().capture_begin()
    finally:
        assert driver.cuStreamEndCapture(stream.cuda_stream)[0] == driver.CUresult.CUDA_SUCCESS


def test_graphs_need_the_caching_allocator() -> None:
    with (
        cudatool.caching_allocator_disabled(),
        pytest.raises(UsageError, match="graphs need the caching allocator"),
        cudatool.graph(cudatool.CUDAGraph()),
    ):
        pass
    assert cudatool.current_stream() == cudatool.default_stream()


# Threads ------------------------------------------------------------------------------------------------------------


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or the exception that it raises, on a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_other_threads_work_as_ever_during_a_capture(increase: cudatool.Kernel) -> None:
    a = cudatool.zeros(100)

    def eager() -> tuple[tuple[int, int], list[float], bool]:
        with cudatool.stream(cudatool.Stream()):
            b = cudatool.full(40 * MIB // 4, 3)
            increase[1, 128](b, b, 100)
            event = cudatool.current_stream().record_event()
            while not event.query():
                pass
            event.synchronize()
            cudatool.current_stream().synchronize()
            assert cudatool.current_stream().query()
            return pool_of(b), b[:3].get().tolist(), cudatool.is_current_stream_capturing()

    found: list[Any] = []

    def work() -> None:
        increase[1, 128](a, a, 100)
        found.append(in_thread(eager))

    try:
        graph, _ = captured(work)
    finally:
        assert found == [((0, 0), [4, 4, 4], False)]
    graph.replay()
    assert a.get().tolist() == [1] * 100


def test_another_thread_cannot_end_a_capture_nor_begin_one_that_waits_for_the_device(
    increase: cudatool.Kernel,
) -> None:
    a, graph = cudatool.zeros(100), cudatool.CUDAGraph()

    def end() -> None:
        with cudatool.stream(stream):
            graph.capture_end()

    def begin() -> None:
        with cudatool.graph(cudatool.CUDAGraph()):
            pass

    with cudatool.graph(graph):
        stream = cudatool.current_stream()
        increase[1, 128](a, a, 100)
        assert "on the thread it began on" in str(in_thread(end))
        assert "another thread is capturing a graph on device 0" in str(in_thread(begin))
    graph.replay()
    assert a.get().tolist() == [1] * 100


# Memory -------------------------------------------------------------------------------------------------------------


def test_memory_of_a_capture_is_in_a_pool_of_its_own() -> None:
    before = cudatool.empty(100)

    def work() -> list[cudatool.DeviceArray]:
        with cudatool.stream(cudatool.Stream()):
            elsewhere = cudatool.empty(100)  # no part of the capture
        return [cudatool.zeros(100), elsewhere, cudatool.empty(30 * MIB)]

    graph, arrays = captured(work)
    assert [pool_of(array) for array in (before, *arrays)] == [(0, 0), graph.pool(), (0, 0), graph.pool()]
    assert graph.pool()[0] > 0 == graph.pool()[1]


def test_pool_of_a_graph_lives_as_long_as_the_graph() -> None:
    reserved = cudatool.memory_reserved()
    graph, _ = captured(lambda: len(cudatool.zeros(100)))
    cudatool.empty_cache()
    pool = graph.pool()
    assert [segment["total_size"] for segment in cudatool.memory_snapshot(pool)] == [2 * MIB]
    del graph
    assert len(cudatool.memory_snapshot(pool)) == 1  # like torch's, until the cache is emptied
    cudatool.empty_cache()
    assert cudatool.memory_reserved() == reserved


def test_cache_is_emptied_during_a_capture_without_harm() -> None:
    kept, old = cudatool.zeros(100), captured(lambda: len(cudatool.zeros(30 * MIB)))[0]

    def work() -> cudatool.DeviceArray:
        nonlocal old
        first = cudatool.full(30 * MIB, 1, np.uint8)
        del first, old
        cudatool.empty_cache()  # gives the old graph's pool back, and keeps this one's
        return cudatool.full(30 * MIB, 2, np.uint8)

    graph, array = captured(work)
    assert len(cudatool.memory_snapshot(graph.pool())) == 1
    graph.replay()
    assert (array[:5].get().tolist(), kept.get().sum()) == ([2] * 5, 0)


def test_pool_of_the_programs_is_dropped_during_a_capture() -> None:
    pools, stream = [cudatool.MemPool()], cudatool.Stream()
    with cudatool.use_mem_pool(pools[0]):
        array, free = cudatool.zeros(100), cudatool.zeros(30 * MIB)
    array.record_stream(stream)
    del free, array

    def work() -> cudatool.DeviceArray:
        pools.pop()
        return cudatool.full(100, 2)

    graph, result = captured(work)
    graph.replay()
    assert result.get().tolist() == [2] * 100


def test_out_of_memory_during_a_capture_leaves_the_cache_alone() -> None:
    graph = cudatool.CUDAGraph()

    def fill_up() -> None:
        array = cudatool.empty(8 * MIB, np.uint8)
        del array  # cached, and after empty_cache() in graph()
        total = cudatool.mem_get_info()[1]
        cudatool.set_per_process_memory_fraction((cudatool.memory_reserved() + MIB) / total)
        retries = cudatool.memory_stats()["num_alloc_retries"]
        try:
            cudatool.empty(64 * MIB, np.uint8)
        finally:
            assert cudatool.memory_stats()["num_alloc_retries"] == retries

    with pytest.raises(OutOfMemoryError), cudatool.graph(graph):
        fill_up()
    cudatool.set_per_process_memory_fraction(1.0)
    with cudatool.graph(graph):
        array = cudatool.ones(100)
    graph.replay()
    assert array.get().sum() == 100


def test_graph_uses_a_pool_of_the_programs() -> None:
    pool = cudatool.MemPool()
    graph, array = captured(lambda: cudatool.zeros(100), pool=pool)
    assert (pool.use_count(), graph.pool(), pool_of(array)) == (2, pool.id, pool.id)
    graph.reset()
    assert pool.use_count() == 1
    del array


def test_graphs_of_one_pool_have_the_same_addresses_as_eager_work_in_it() -> None:
    pool = cudatool.graph_pool_handle()

    def work() -> list[int]:
        a = cudatool.zeros(1000)
        b = cudatool.zeros(3 * MIB)
        del a
        return [array.data_ptr() for array in (b, cudatool.zeros(500), cudatool.zeros(100))]

    first, addresses = captured(work, pool=pool)
    second, again = captured(work, pool=pool)
    assert addresses == again
    assert first.pool() == second.pool() == pool


def test_reset_in_the_middle_of_a_capture_gives_it_up() -> None:
    graph, stream = cudatool.CUDAGraph(), cudatool.Stream()
    reserved = cudatool.memory_reserved()
    with cudatool.stream(stream):
        graph.capture_begin()
        cudatool.zeros(100)
        graph.reset()
        assert not cudatool.is_current_stream_capturing()
    cudatool.empty_cache()
    assert cudatool.memory_reserved() == reserved


def test_graph_in_a_reference_cycle_gives_everything_back() -> None:
    reserved = cudatool.memory_reserved()
    cycle: list[Any] = [captured(lambda: cudatool.zeros(100))]
    cycle.append(cycle)
    del cycle
    gc.collect()
    cudatool.empty_cache()
    assert cudatool.memory_reserved() == reserved


_TWO_DEVICES = """
import cudatool as ct
with ct.device(1):
    a, graph = ct.zeros(10), ct.CUDAGraph()
    with ct.graph(graph):
        b = ct.full(10, 3)
        a.copy_(b)
    pools = [(s["device"], s["segment_pool_id"]) for s in ct.memory_snapshot(graph.pool())]
graph.replay()
print(a.get()[0], pools, ct.current_device())
"""


def test_graph_lives_on_the_device_that_it_was_captured_on() -> None:
    done = run_python(_TWO_DEVICES, environment={"CUDATOOL_DEVICE": "sim:count=2"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3.0 [(1, (1, 0))] 0\n"


# Random generators --------------------------------------------------------------------------------------------------


class Counting:
    """A generator that keeps a diary. Its state is its offset."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.drawn = 0

    def begin_capture(self, graph: object) -> None:
        self.calls.append("begin_capture")
        assert not cudatool.is_current_stream_capturing()
        assert cudatool.current_stream() != cudatool.default_stream()

    def end_capture(self, graph: object) -> int:
        self.calls.append("end_capture")
        return self.drawn

    def begin_replay(self, graph: object, drawn: int) -> None:
        self.calls.append(("begin_replay", drawn))

    def forget(self, graph: object) -> None:
        self.calls.append("forget")


def test_generators_are_told_of_captures_and_replays() -> None:
    first, second = Counting(), Counting()
    generators: list[CapturableGenerator] = [first, second, first]
    graph, stream = cudatool.CUDAGraph(), cudatool.Stream()
    for generator in generators:
        graph.register_generator_state(generator)
    with cudatool.graph(graph, stream=stream):
        capture = capture_of(stream)
        assert capture is not None
        assert capture.graph is graph
        cudatool.zeros(10)
        first.drawn = 12
        with pytest.raises(UsageError, match="before the capture begins"):
            graph.register_generator_state(Counting())
    graph.replay()
    graph.replay()
    graph.reset()
    assert first.calls == ["begin_capture", "end_capture", ("begin_replay", 12), ("begin_replay", 12), "forget"]
    assert second.calls == ["begin_capture", "end_capture", "forget"]  # it drew nothing
    with cudatool.graph(graph):
        cudatool.zeros(10)
    assert len(second.calls) == 3  # reset() forgets whom it had been told of


def test_generators_are_told_of_captures_that_fail() -> None:
    generator, graph = Counting(), cudatool.CUDAGraph()
    graph.register_generator_state(generator)
    with pytest.raises(KeyError), cudatool.graph(graph):
        raise KeyError
    assert generator.calls == ["begin_capture", "end_capture", "forget"]


def test_each_replay_draws_the_numbers_that_eager_work_would() -> None:
    cudatool.random.manual_seed(5)
    expected = [cudatool.random.rand(8).get().tolist() for _ in range(5)]
    cudatool.random.manual_seed(5)
    graph, arrays = captured(lambda: [cudatool.random.rand(8), cudatool.random.rand(8)])
    found = []
    for _ in range(2):
        graph.replay()
        found += [array.get().tolist() for array in arrays]
    assert [*found, cudatool.random.rand(8).get().tolist()] == expected


# Graphed callables --------------------------------------------------------------------------------------------------


def test_backward_is_a_graph_too(increase: cudatool.Kernel) -> None:
    kept: list[cudatool.DeviceArray] = []

    def forward(x: cudatool.DeviceArray) -> cudatool.DeviceArray:
        kept[:] = [x.clone()]
        out = cudatool.empty(100)
        increase[1, 128](x, out, 100)
        return out

    def backward(gradient: cudatool.DeviceArray) -> tuple[cudatool.DeviceArray, cudatool.DeviceArray]:
        return gradient.clone(), kept[0].clone()

    graphed = cudatool.make_graphed_callables(forward, (cudatool.zeros(100),), backwards=backward)
    assert graphed(cudatool.full(100, 3)).get().tolist() == [4] * 100
    assert graphed.backward is not None
    gradient, x = graphed.backward(cudatool.full(100, 7))
    assert (gradient.get()[0], x.get()[0]) == (7, 3)


def test_functions_are_called_before_they_are_captured_as_often_as_wanted() -> None:
    calls: list[bool] = []

    def function(x: cudatool.DeviceArray) -> cudatool.DeviceArray:
        calls.append(cudatool.is_current_stream_capturing())
        return x.clone()

    cudatool.make_graphed_callables(function, (cudatool.zeros(10),), num_warmup_iters=2)
    assert calls == [False, False, True]


def test_graphed_function_takes_what_it_was_captured_with() -> None:
    graphed = cudatool.make_graphed_callables(lambda x, y: x.clone(), (cudatool.zeros(10), cudatool.zeros(3)))
    with pytest.raises(UsageError, match="captured with 2 arrays, not 1"):
        graphed(cudatool.zeros(10))
    with pytest.raises(UsageError, match=r"array 1 has shape \(4,\).*captured with \(3,\)"):
        graphed(cudatool.zeros(10), cudatool.zeros(4))


def test_graphed_function_takes_its_own_places_in_another_order_or_transposed() -> None:
    a, b = cudatool.zeros((2, 2)), cudatool.zeros((2, 2))
    graphed = cudatool.make_graphed_callables(lambda x, y: x - y, (a, b))
    first, second = np.arange(4.0).reshape(2, 2), np.full((2, 2), 10.0)
    a.copy_(first), b.copy_(second)
    np.testing.assert_array_equal(second - first, graphed(b, a).get())
    a.copy_(first), b.copy_(second)
    np.testing.assert_array_equal(first.T - second, graphed(a.T, b).get())


@pytest.mark.parametrize("pool", [5, ("a", 1), (1,)])
def test_what_is_no_pool_is_refused(pool: Any) -> None:
    with pytest.raises(UsageError, match="is not a pool"), cudatool.graph(cudatool.CUDAGraph(), pool=pool):
        pass


def test_graphed_functions_are_of_device_arrays() -> None:
    with pytest.raises(UsageError, match="not float"):
        cudatool.make_graphed_callables(lambda x, scale: x, (cudatool.zeros(10), 2.0))
    with pytest.raises(UsageError, match="not int"):
        cudatool.make_graphed_callables(lambda x: len(x.fill_(1)), (cudatool.zeros(10),))
    with pytest.raises(UsageError, match="2 callables, but 1 sample_args"):
        cudatool.make_graphed_callables((lambda x: x, lambda x: x), ((cudatool.zeros(10),),))


# Events -------------------------------------------------------------------------------------------------------------

GRAPH_EVENTS = (Kind.GRAPH_CAPTURE_BEGIN, Kind.GRAPH_CAPTURE_END, Kind.GRAPH_INSTANTIATE, Kind.GRAPH_LAUNCH)


def test_captures_and_replays_are_told(events: list[Event], increase: cudatool.Kernel) -> None:
    a = cudatool.zeros(100)
    graph, out = captured(lambda: increase[1, 128](a, a, 100) or cudatool.empty(1000))
    graph.replay()
    cudatool.synchronize()
    begin, end, made, launch = [event for event in events if event.kind in GRAPH_EVENTS]
    assert [event.kind for event in (begin, end, made, launch)] == list(GRAPH_EVENTS)
    (kernel,) = [event for event in events if event.kind == Kind.KERNEL_LAUNCH and event.name == "increase"]
    assert begin.stream == end.stream == kernel.stream != launch.stream == cudatool.default_stream().trace_id()
    assert end.aux0 == made.aux1 > 0
    assert made.aux0 == launch.aux0 > 0
    assert launch.correlation > kernel.correlation
    (block,) = [event for event in events if event.kind == Kind.BLOCK_ALLOC and event.address == out.data_ptr()]
    assert block.aux1 == pack_pool(graph.pool())


def test_failed_capture_is_told(events: list[Event]) -> None:
    with pytest.raises(KeyError), cudatool.graph(cudatool.CUDAGraph()):
        raise KeyError
    with pytest.raises(CudaError), cudatool.graph(cudatool.CUDAGraph()):
        cudatool.synchronize()
    found = [(event.kind, event.aux0 > 0) for event in events if event.kind in GRAPH_EVENTS]
    begin, ended, failed = (
        (Kind.GRAPH_CAPTURE_BEGIN, False),
        (Kind.GRAPH_CAPTURE_END, True),
        (Kind.GRAPH_CAPTURE_END, False),
    )
    assert found == [begin, ended, begin, failed]


def clean(increase: cudatool.Kernel, a: cudatool.DeviceArray, b: cudatool.DeviceArray) -> None:
    """Work on two captured streams in order, and a reader that waits."""
    graph, side = cudatool.CUDAGraph(), cudatool.Stream()
    with cudatool.graph(graph):
        main = cudatool.current_stream()
        increase[1, 128](a, b, 100)
        side.wait_stream(main)
        with cudatool.stream(side):
            increase[1, 128](b, b, 100)
        main.wait_stream(side)
        increase[1, 128](b, b, 100)
    graph.replay()
    increase[1, 128](b, a, 100)
    graph.replay()


def unordered(increase: cudatool.Kernel, a: cudatool.DeviceArray, b: cudatool.DeviceArray) -> None:
    """A reader that does not wait for the replay."""
    graph, stream = cudatool.CUDAGraph(), cudatool.Stream()
    with cudatool.graph(graph):
        increase[1, 128](a, b, 100)
    with cudatool.stream(stream):
        graph.replay()
    increase[1, 128](b, b, 100)


def missed(increase: cudatool.Kernel, a: cudatool.DeviceArray, b: cudatool.DeviceArray) -> None:
    """A kernel on another stream needs, and does not wait for, what was only captured."""
    graph, eager, out = cudatool.CUDAGraph(), cudatool.Stream(), cudatool.zeros(100)
    with cudatool.graph(graph):
        increase[1, 128](a, b, 100)
        with cudatool.stream(eager):
            increase[1, 128](b, out, 100)
    cudatool.synchronize()
    graph.replay()


def freed(increase: cudatool.Kernel, a: cudatool.DeviceArray, b: cudatool.DeviceArray) -> None:
    """An input is freed before the replay."""
    graph, source = cudatool.CUDAGraph(), cudatool.zeros(100)
    with cudatool.graph(graph):
        increase[1, 128](source, b, 100)
    del source
    graph.replay()


def outside(increase: cudatool.Kernel, a: cudatool.DeviceArray, b: cudatool.DeviceArray) -> None:
    """The graph waits for, and records, events of streams beside it, at each launch."""
    graph, first, last = cudatool.CUDAGraph(), cudatool.Stream(), cudatool.Stream()
    filled, increased = cudatool.Event(external=True), cudatool.Event(external=True)
    filled.record(first)
    with cudatool.graph(graph):
        filled.wait()
        increase[1, 128](a, b, 100)
        increased.record()
    with cudatool.stream(first):
        a.fill_(1)
        filled.record()
    graph.replay()
    increased.wait(last)
    with cudatool.stream(last):
        increase[1, 128](b, b, 100)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (clean, []),
        (unordered, ["race-raw"]),
        (missed, ["capture-missed"]),
        (freed, ["use-after-free"]),
        (outside, []),
    ],
)
def test_sanitizer_understands_graphs_from_what_the_runtime_tells(
    work: Callable[..., None],
    expected: list[str],
    increase: cudatool.Kernel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: only the runtime knows the nodes, and kernels' accesses are inferred from PTX."""
    monkeypatch.setattr(hooks, "wants_accesses", True)
    a, b = cudatool.zeros(100), cudatool.zeros(100)
    cudatool.synchronize()
    with Recorder(tmp_path / "t.ctrace", header={}):
        a, b = cudatool.zeros(100), cudatool.zeros(100)
        cudatool.synchronize()
        work(increase, a, b)
        cudatool.synchronize()
    report = check(read(tmp_path / "t.ctrace"))
    assert expected == [str(finding.kind) for finding in (*report.findings, *report.possible)]
    assert report.unchecked_launches == 0


def test_a_graph_that_is_dropped_gives_its_capture_up():
    stream = cudatool.Stream()
    with cudatool.stream(stream):
        graph = cudatool.CUDAGraph()
        graph.capture_begin()
        array = cudatool.empty(3)
        with pytest.warns(UserWarning, match=r"dropped before its capture_end\(\)"):
            del graph
            gc.collect()
        assert not cudatool.is_current_stream_capturing()
        assert array.fill_(2).get().tolist() == [2, 2, 2]
