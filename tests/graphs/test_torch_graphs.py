"""PyTorch's tests of CUDA graphs (test/test_cuda.py), re-expressed on our arrays.

Each names the test that it comes from. Where PyTorch's allocator counts two blocks for the random generator's seed and
offset, ours has one for both.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import CudatoolError, OutOfMemoryError, UsageError

MIB = 1 << 20
SMALL_BUFFER, LARGE_BUFFER = 2 * MIB, 20 * MIB
SHARING = ["none", "pool()", "graph_pool_handle()"]


@functools.cache
def _kernels() -> tuple[cudatool.Kernel, cudatool.Kernel]:
    source = """
    extern "C" __global__ void plus_value(const float *a, float value, float *out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = a[i] + value;
    }
    extern "C" __global__ void plus(const float *a, const float *b, float *out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = a[i] + b[i];
    }
    """
    return cudatool.compile(source, "plus_value"), cudatool.compile(source, "plus")


def add(a: cudatool.DeviceArray, b: Any, out: cudatool.DeviceArray | None = None) -> cudatool.DeviceArray:
    """Return a + b, in new memory or `out`."""
    plus_value, plus = _kernels()
    out = cudatool.empty(a.shape) if out is None else out
    kernel, other = (plus, b) if isinstance(b, cudatool.DeviceArray) else (plus_value, float(b))
    kernel[-(-a.size // 256), 256](a, other, out, a.size)
    return out


def add_with_temporaries(t: cudatool.DeviceArray, value: float) -> cudatool.DeviceArray:
    return add(add(t.clone(), value), add(t.clone(), value))


def total(a: cudatool.DeviceArray) -> float:
    return float(a.get().sum(dtype=np.float64))


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    _kernels()
    cudatool.synchronize()
    cudatool.empty_cache()


def captured(stream: cudatool.Stream, work: Callable[[], Any], *pool: Any) -> tuple[cudatool.CUDAGraph, Any]:
    """Return a graph of `work`, captured on `stream` by capture_begin and capture_end, and what that returned."""
    graph = cudatool.CUDAGraph()
    stream.wait_stream(cudatool.current_stream())
    with cudatool.stream(stream):
        graph.capture_begin(*pool)
        result = work()
        graph.capture_end()
    cudatool.current_stream().wait_stream(stream)
    return graph, result


def test_captured_stream_is_capturing() -> None:
    """Source: test_cuda.py::test_graph_is_current_stream_capturing"""
    assert not cudatool.is_current_stream_capturing()
    with cudatool.stream(cudatool.Stream()):
        g, a = cudatool.CUDAGraph(), cudatool.zeros(3)
        assert not cudatool.is_current_stream_capturing()
        g.capture_begin()
        assert cudatool.is_current_stream_capturing()
        a.fill_(1)
        g.capture_end()
        assert not cudatool.is_current_stream_capturing()


def test_captured_work_is_done_by_replay() -> None:
    """Source: test_cuda.py::test_graph_capture_simple"""
    a = cudatool.ones(1000)

    def work() -> cudatool.DeviceArray:
        b = a
        for _ in range(10):
            b = add(b, 1)
        return b

    g, b = captured(cudatool.Stream(), work)
    g.replay()
    assert total(b) == 11000


def test_graph_captures_again_after_reset() -> None:
    """Source: test_cuda.py::test_graph_capture_reset_recapture"""
    s, g = cudatool.Stream(), cudatool.CUDAGraph()
    with cudatool.stream(s):
        a = b = cudatool.ones(1000)
        g.capture_begin()
        for _ in range(10):
            b = add(b, 1)
        g.capture_end()
    cudatool.current_stream().wait_stream(s)
    g.replay()
    assert total(b) == 11000
    g.reset()
    with cudatool.stream(s):
        g.capture_begin()
        b.fill_(2)
        for _ in range(10):
            b = add(b, 2)
        g.capture_end()
    cudatool.current_stream().wait_stream(s)
    g.replay()
    assert total(b) == 22000
    assert total(a) == 1000


def test_graph_is_dumped_as_dot(tmp_path: Path) -> None:
    """Source: test_cuda.py::test_graph_debugdump"""
    x, y = cudatool.ones(1000), cudatool.ones(1000)
    g = cudatool.CUDAGraph()
    g.enable_debug_mode()
    s0, s1 = cudatool.Stream(), cudatool.Stream()
    s0.wait_stream(cudatool.current_stream())
    with cudatool.stream(s0):
        g.capture_begin()
        z = add(x, y)
        with cudatool.stream(s1):
            s1.wait_stream(s0)
            add(z, y)
        s0.wait_stream(s1)
        g.capture_end()
    cudatool.synchronize()
    g.debug_dump(tmp_path / "graph.dot")
    text = (tmp_path / "graph.dot").read_text()
    assert text.startswith("digraph")
    assert text.count("->") == 1


def test_events_outside_of_a_graph_time_its_work() -> None:
    """Source: test_cuda.py::test_graph_timing"""
    x, y, g = cudatool.ones(100_000), cudatool.ones(100_000), cudatool.CUDAGraph()
    start, end = (cudatool.Event(enable_timing=True, external=True) for _ in range(2))
    with cudatool.graph(g):
        start.record()
        add(x, y)
        end.record()
    cudatool.synchronize()
    g.replay()
    cudatool.synchronize()
    assert start.elapsed_time(end) > 0


def test_default_stream_is_not_captured() -> None:
    """Source: test_cuda.py::test_graph_error"""
    with pytest.raises(UsageError, match="CUDA graphs must be captured on a non-default stream"):
        cudatool.CUDAGraph().capture_begin()
    with cudatool.graph(cudatool.CUDAGraph()):  # PyTorch's context is "in a bad state" then
        cudatool.zeros(3)


def test_empty_graph_is_warned_of() -> None:
    """Source: test_cuda.py::test_graph_warn_if_has_zero_nodes"""
    g = cudatool.CUDAGraph()
    with cudatool.stream(cudatool.Stream()):
        g.capture_begin()
        with pytest.warns(UserWarning, match="the CUDA graph is empty"):
            g.capture_end()
    g.replay()


def test_out_of_memory_in_a_capture_ends_it() -> None:
    """Source: test_cuda.py::test_graph_capture_oom"""
    g = cudatool.CUDAGraph()
    with pytest.raises(OutOfMemoryError), cudatool.graph(g):
        cudatool.zeros(2**40)
    with cudatool.graph(g):
        a = cudatool.ones(100)
    g.replay()
    assert total(a) == 100


def test_captured_products_take_no_workspace_each() -> None:
    """Source: test_cuda.py::test_repeat_graph_capture_cublas_workspace_memory"""
    a, b = cudatool.ones((64, 32)), cudatool.ones((32, 16))
    cudatool.matmul(a, b)
    used: list[int] = []
    for _ in range(4):
        g = cudatool.CUDAGraph()
        with cudatool.graph(g):
            c = cudatool.matmul(a, b)
        g.replay()
        assert total(c) == 64 * 32 * 16
        del g, c
        cudatool.empty_cache()
        used.append(cudatool.memory_reserved())
    assert used[1:] == used[:1] * 3


def _pools(share: str, g0: cudatool.CUDAGraph | None, handle: tuple[int, int]) -> tuple[Any, ...]:
    """Return the arguments of a capture that shares memory, the first one if there is no graph yet."""
    if share == "none":
        return ()
    if share == "graph_pool_handle()":
        return (handle,)
    return () if g0 is None else (g0.pool(),)


@pytest.mark.parametrize("share", SHARING)
def test_two_graphs_replayed_in_order(share: str) -> None:
    """Source: test_cuda.py::test_graph_two_successive"""
    size, handle, s = 1000, cudatool.graph_pool_handle(), cudatool.Stream()
    a = cudatool.ones(size)
    before = cudatool.memory_reserved()

    def five(b: cudatool.DeviceArray) -> cudatool.DeviceArray:
        for _ in range(5):
            b = add_with_temporaries(b, 1)
        return b

    g0, b0 = captured(s, lambda: five(a.clone()), *_pools(share, None, handle))
    g1, b = captured(s, lambda: five(b0), *_pools(share, g0, handle))
    # One segment more is the ordinary pool's, for the random generator's seeds and offsets.
    assert cudatool.memory_reserved() - before == SMALL_BUFFER * (3 if share == "none" else 2)
    c = a.clone()
    for graph in (g0, g1, None):
        for _ in range(2):
            c = add_with_temporaries(c, 3)
        if graph is not None:
            graph.replay()
    assert (total(b), total(c)) == (size * 3070, size * 442)


def test_graphs_that_share_nothing_are_replayed_at_the_same_time() -> None:
    """Source: test_cuda.py::test_graph_concurrent_replay"""
    size, s, s0, s1 = 100_000, cudatool.Stream(), cudatool.Stream(), cudatool.Stream()
    a = cudatool.ones(size)

    def five(value: float) -> cudatool.DeviceArray:
        b = a.clone()
        for _ in range(5):
            b = add_with_temporaries(b, value)
        return b

    g0, b = captured(s, lambda: five(1))
    g1, c = captured(s, lambda: five(2))
    cudatool.synchronize()
    with cudatool.stream(s0):
        s1.wait_stream(s0)
        g0.replay()
    with cudatool.stream(s1):
        g1.replay()
    cudatool.current_stream().wait_stream(s0)
    cudatool.current_stream().wait_stream(s1)
    assert (total(b), total(c)) == (size * 94, size * 156)


@pytest.mark.parametrize("share", SHARING)
def test_three_graphs_of_one_pool_are_right_in_the_order_of_capture_alone(share: str) -> None:
    """Source: test_cuda.py::test_graph_three_successive"""
    size, handle, s = 1000, cudatool.graph_pool_handle(), cudatool.Stream()
    a = cudatool.ones(size)
    g0, g1, g2 = cudatool.CUDAGraph(), cudatool.CUDAGraph(), cudatool.CUDAGraph()
    s.wait_stream(cudatool.current_stream())
    with cudatool.stream(s):
        g0.capture_begin(*_pools(share, None, handle))
        b = a.clone()
        c = add(b, 1)
        d = add(b, 2)
        g0.capture_end()
        g1.capture_begin(*_pools(share, g0, handle))
        e = add(c, 3)
        del c
        g1.capture_end()
        g2.capture_begin(*_pools(share, g0, handle))
        f = add(d, 4)
        g2.capture_end()
    cudatool.current_stream().wait_stream(s)
    for graph in (g0, g1, g2):
        graph.replay()
    assert (total(e), total(f)) == (size * 5, size * 7)
    for graph in (g0, g2, g1):
        graph.replay()
    # f has the memory of c, where they share a pool; g1 then takes it for c.
    assert (total(e), total(f)) == (size * (5 if share == "none" else 10), size * 7)


STATISTICS = ("segment", "reserved_bytes", "active", "active_bytes")


def statistics(pool: str) -> list[int]:
    stats = cudatool.memory_stats()
    return [stats[f"{name}.{pool}.current"] for name in STATISTICS]


@pytest.mark.parametrize(
    ("numel", "segments", "reserved", "kept", "pool"),
    [
        (512 // 4, 1, SMALL_BUFFER, SMALL_BUFFER, "small_pool"),
        (MIB // 4, 2, 2 * SMALL_BUFFER, SMALL_BUFFER, "small_pool"),
        ((MIB + 512) // 4, 1, LARGE_BUFFER, LARGE_BUFFER, "large_pool"),
        ((10 * MIB - 512) // 4, 2, 2 * LARGE_BUFFER, LARGE_BUFFER, "large_pool"),
        ((10 * MIB + 512) // 4, 3, 3 * 12 * MIB, 12 * MIB, "large_pool"),
    ],
)
def test_statistics_count_a_graphs_pool_and_results_outlive_the_graph(
    numel: int, segments: int, reserved: int, kept: int, pool: str
) -> None:
    """Source: test_cuda.py::test_graph_memory_stats_and_use_result_after_destroy_graph"""
    s = cudatool.Stream()
    with cudatool.stream(s):
        a = cudatool.ones(numel)
        first = statistics(pool)

        def work() -> cudatool.DeviceArray:
            b = a.clone()
            for _ in range(5):
                b = add(b.clone(), 1)
            return b

    g, b = captured(s, work)
    generators = len(g._known) if pool == "small_pool" else 0
    expected = [segments, reserved, 1 + generators, 4 * numel + 512 * generators]
    for _ in range(2):
        assert expected == [now - then for now, then in zip(statistics(pool), first, strict=True)]
        g.replay()
        assert total(b) == 6 * numel
        cudatool.empty_cache()
    del g
    cudatool.empty_cache()
    assert total(b) == 6 * numel
    assert [1, kept, 1, 4 * numel] == [now - then for now, then in zip(statistics(pool), first, strict=True)]


def test_memory_that_other_streams_use_waits_until_the_capture_is_over() -> None:
    """Source: test_cuda.py::test_graph_record_stream"""
    problem, a = cudatool.zeros(3), cudatool.zeros(3)
    s0, s1, s2 = cudatool.Stream(), cudatool.Stream(), cudatool.Stream()
    g = cudatool.CUDAGraph()
    cudatool.synchronize()
    allocated = cudatool.memory_allocated()
    with cudatool.stream(s0):
        problem.record_stream(s0)
        problem.fill_(1)
    del problem
    with cudatool.stream(s1):
        g.capture_begin()
        b = a.clone()  # asking about problem's event now would end the capture
        s2.wait_stream(s1)
        with cudatool.stream(s2):
            b.fill_(1)
            b.record_stream(s2)
            del b
        s1.wait_stream(s2)
        g.capture_end()
    cudatool.synchronize()
    last = cudatool.zeros(3)
    g.replay()
    assert last.nbytes == 12
    assert cudatool.memory_allocated() <= allocated + 512  # b has been freed too


def test_functions_become_graphs() -> None:
    """Source: test_cuda.py::test_graph_make_graphed_callables"""

    def first(inputs: dict[str, cudatool.DeviceArray]) -> dict[str, cudatool.DeviceArray]:
        return {"output": add_with_temporaries(inputs["x"], 1)}

    def second(x: cudatool.DeviceArray, y: cudatool.DeviceArray) -> cudatool.DeviceArray:
        return add(x, y)

    n = 100
    x, unused, y = cudatool.ones(n), cudatool.ones(3), cudatool.ones(n)
    graphed = cudatool.make_graphed_callables((first, second), (({"x": x, "unused": unused},), (y.clone(), y)))
    for value in range(5):
        data, target = cudatool.full(n, value), cudatool.full(n, 2 * value)
        results = [
            second_(first_({"x": data, "unused": unused})["output"], target).get()
            for first_, second_ in (graphed, (first, second))
        ]
        assert results[0].tolist() == results[1].tolist() == [2 * (value + 1) + 2 * value] * n


def test_a_function_without_parameters_becomes_a_graph() -> None:
    """Source: test_cuda.py::test_graph_make_graphed_callables_parameterless_nograd_module"""
    x = cudatool.ones((20, 30))

    def transposed(inputs: dict[str, cudatool.DeviceArray]) -> dict[str, cudatool.DeviceArray]:
        return {"output": inputs["x"].T.contiguous()}

    graphed = cudatool.make_graphed_callables(transposed, ({"x": x},))
    data = np.arange(600, dtype=np.float32).reshape(20, 30)
    assert graphed({"x": cudatool.asarray(data)})["output"].get().tolist() == data.T.tolist()


def test_functions_graphed_one_by_one_share_a_pool() -> None:
    """Source: test_cuda.py::test_graph_make_graphed_callables_same_pool"""
    pool = cudatool.graph_pool_handle()
    graphed = [
        cudatool.make_graphed_callables(functools.partial(add, b=value), (cudatool.zeros(100),), pool=pool)
        for value in (1.0, 2.0, 3.0)
    ]
    results = [function(cudatool.ones(100)) for function in graphed]
    assert [total(result) for result in results] == [200, 300, 400]
    assert len({result.data_ptr() for result in results}) == 3
    assert {s["segment_pool_id"] for s in cudatool.memory_snapshot(pool)} == {pool}


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_other_threads_allocate_during_a_capture(mode: str) -> None:
    """Source: test_cuda.py::test_cuda_graph_error_options"""
    x = cudatool.ones(2000)
    failures: list[Exception] = []

    def allocate() -> None:
        try:
            with cudatool.stream(cudatool.Stream()):
                cudatool.caching_allocator_delete(cudatool.caching_allocator_alloc(30 * MIB))
        except CudatoolError as error:
            failures.append(error)

    g = cudatool.CUDAGraph()
    with cudatool.graph(g, stream=cudatool.Stream(), capture_error_mode=mode):
        y = add(add(x, x), x)
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    g.replay()
    assert failures == []
    assert total(y) == 6000


def test_graph_that_is_not_kept_is_not_shown() -> None:
    """Source: test_cuda.py::test_cuda_graph_raw_graph_keep_graph_false"""
    g = cudatool.CUDAGraph(keep_graph=False)
    with cudatool.graph(g, capture_error_mode="relaxed"):
        cudatool.zeros(2000)
    with pytest.raises(UsageError, match="the captured graph was not kept; make it with keep_graph=True"):
        g.instantiate()
    with pytest.raises(UsageError, match="was not kept"):
        g.raw_cuda_graph()


def test_kept_graph_is_the_drivers() -> None:
    """Source: test_cuda.py::test_cuda_graph_raw_graph"""
    from cuda.bindings import driver

    g = cudatool.CUDAGraph(keep_graph=True)
    x, y = cudatool.zeros(2000), cudatool.ones(2000)
    with cudatool.graph(g, capture_error_mode="relaxed"):
        z = add(x, y)
    status, nodes, count = driver.cuGraphGetNodes(g.raw_cuda_graph(), 16)
    assert (status, count) == (driver.CUresult.CUDA_SUCCESS, 1)
    assert driver.cuGraphNodeGetType(nodes[0])[1] == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    g.replay()
    assert total(z) == 2000


@pytest.mark.parametrize("keep_graph", [True, False])
def test_executable_graph_is_the_drivers(keep_graph: bool) -> None:
    """Source: test_cuda.py::test_cuda_graph_raw_graph_exec"""
    from cuda.bindings import driver

    g = cudatool.CUDAGraph(keep_graph=keep_graph)
    x, y = cudatool.zeros(2000), cudatool.ones(2000)
    with cudatool.graph(g, capture_error_mode="relaxed"):
        z = add(x, y)
    if keep_graph:
        with pytest.raises(UsageError, match="the graph is not instantiated"):
            g.raw_cuda_graph_exec()
        g.instantiate()
    status, _ = driver.cuGraphExecGetFlags(g.raw_cuda_graph_exec())
    assert status == driver.CUresult.CUDA_SUCCESS
    g.replay()
    assert total(z) == 2000


def test_kept_graph_is_instantiated_again_and_captured_again_after_reset() -> None:
    """Source: test_cuda.py::test_cuda_graph_raw_graph_reset_and_recapture"""
    g = cudatool.CUDAGraph(keep_graph=True)
    for step in (1.0, 2.0):
        x = cudatool.zeros(2000)
        with cudatool.graph(g, capture_error_mode="relaxed"):
            add(x, step, out=x)
        found = []
        for again in (True, True, False):
            if again:
                g.instantiate()
            g.replay()
            found.append(total(x) / 2000)
        assert found == [step, 2 * step, 3 * step]
        g.reset()


def test_streams_that_join_a_capture_allocate_from_its_pool() -> None:
    """Source: test_cuda.py::test_cuda_graph_allocator_propagates_stream"""
    x, y = cudatool.ones(1000), cudatool.ones(1000)
    existing = {s["segment_pool_id"] for s in cudatool.memory_snapshot()}
    g, s0, s1 = cudatool.CUDAGraph(), cudatool.Stream(), cudatool.Stream()
    s0.wait_stream(cudatool.current_stream())
    with cudatool.stream(s0):
        g.capture_begin()
        z = add(x, y)
    with cudatool.stream(s1):
        s1.wait_stream(s0)
        add(z, y)
    s0.wait_stream(s1)
    with cudatool.stream(s0):
        g.capture_end()
    found = [s["segment_pool_id"] for s in cudatool.memory_snapshot() if s["segment_pool_id"] not in existing]
    assert found == [g.pool()] * 2


def test_value_is_not_looked_at_during_a_capture() -> None:
    """Source: test_cuda.py::test_cuda_graph_tensor_item_not_allowed"""
    a, g = cudatool.ones(500), cudatool.CUDAGraph()
    with pytest.raises(UsageError, match="while the stream is captured into a graph"), cudatool.graph(g):
        add(a, float(a[0].get()))
    assert not cudatool.is_current_stream_capturing()


_RECLAIM = """
import cudatool as ct
def captured_on(count):
    streams = [ct.Stream() for _ in range(count)]
    graph = ct.CUDAGraph()
    ct.synchronize()
    with ct.stream(streams[0]):
        graph.capture_begin()
        sinks = [ct.zeros(8) for _ in streams]
        data = ct.zeros(8)
        first = data.data_ptr()
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
            with ct.stream(stream):
                ct.empty(8).copy_(data)
                data.record_stream(stream)
        del data
        yield streams, sinks, lambda: before.append(ct.empty(8))
        last = ct.empty(8)
        graph.capture_end()
    graph.replay()
    print([array.data_ptr() == first for array in before], last.data_ptr() == first)

before = []
for streams, sinks, allocate in captured_on(2):
    allocate()
    streams[0].wait_stream(streams[1])
    sinks[0].fill_(1)
before = []
for streams, sinks, allocate in captured_on(4):
    streams[0].wait_stream(streams[1])
    sinks[0].fill_(1)
    streams[2].wait_stream(streams[3])
    with ct.stream(streams[2]):
        sinks[2].fill_(3)
    allocate()  # one half is not waited for yet
    streams[0].wait_stream(streams[2])
    sinks[0].copy_(sinks[2])
"""


@pytest.fixture(scope="module")
def reclaimed() -> list[str]:
    done = run_python(_RECLAIM, environment={"CUDATOOL_ALLOC_CONF": "graph_capture_record_stream_reuse:True"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_memory_that_another_captured_stream_used_is_had_again_when_it_was_waited_for(reclaimed: list[str]) -> None:
    """Source: test_cuda.py::test_graph_capture_reclaim_2_streams"""
    assert reclaimed[0] == "[False] True"


def test_memory_that_several_captured_streams_used_is_had_again_when_all_were_waited_for(
    reclaimed: list[str],
) -> None:
    """Source: test_cuda.py::test_graph_capture_reclaim_4_streams"""
    assert reclaimed[1] == "[False] True"


def test_pinned_memory_that_no_copy_used_is_had_again_in_the_capture() -> None:
    """Source: test_cuda.py::test_pin_memory_no_use"""
    with cudatool.graph(cudatool.CUDAGraph()):
        cudatool.zeros(8)
        first = cudatool.empty_pinned(8).ctypes.data
        assert cudatool.empty_pinned(8).ctypes.data == first


def test_pinned_memory_that_a_captured_copy_uses_is_not_had_again() -> None:
    """Source: test_cuda.py::test_pin_memory_use"""
    g = cudatool.CUDAGraph()
    with cudatool.graph(g):
        pinned = cudatool.pin_memory(np.arange(8, dtype=np.float32))
        array = cudatool.empty(8).copy_(pinned, non_blocking=True)
        first = pinned.ctypes.data
        del pinned
        assert cudatool.empty_pinned(8).ctypes.data != first
    others = [cudatool.empty_pinned(8) for _ in range(4)]
    for other in others:
        other.fill(-1)
    g.replay()
    assert array.get().tolist() == list(range(8))


def test_unpinned_memory_is_not_copied_to_the_device_in_a_capture() -> None:
    """Source: test_cuda.py::test_unpinned_memory_use"""
    with pytest.raises(UsageError, match="use pinned memory"), cudatool.graph(cudatool.CUDAGraph()):
        cudatool.empty(8).copy_(np.ones(8, np.float32), non_blocking=True)


def test_unpinned_memory_is_not_copied_from_the_device_in_a_capture() -> None:
    """Source: test_cuda.py::test_unpinned_memory_use_device_to_host"""
    with pytest.raises(UsageError, match="use pinned memory"), cudatool.graph(cudatool.CUDAGraph()):
        cudatool.zeros(8).get(out=np.empty(8, np.float32), blocking=False)
