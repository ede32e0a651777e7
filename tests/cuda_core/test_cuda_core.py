"""Programs written to cuda.core, with memory from the caching allocator."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatool
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.trace.events import Event, Kind
from cudatool.trace.reader import read

SOURCE = """
extern "C" __global__ void twice(int *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
"""


@pytest.fixture
def core() -> Any:
    cudatool.init()
    from cuda import core

    return core


@pytest.fixture
def gpu(core: Any) -> Iterator[Any]:
    """The current device, whose memory is the caching allocator's during the test."""
    from cudatool.cuda_core import CachingMemoryResource

    device = core.Device()
    device.set_current()
    before = device.memory_resource
    device.memory_resource = CachingMemoryResource(device)
    yield device
    device.memory_resource = before


def active() -> tuple[int, int]:
    """Return the blocks that the program has, and those that may not be handed out."""
    stats = cudatool.memory_stats()
    return stats["allocation.all.current"], stats["active.all.current"]


def test_kernel_works_on_a_buffer(core: Any, gpu: Any) -> None:
    stream, n = gpu.create_stream(), 1000
    kernel = (
        core.Program(SOURCE, "c++", core.ProgramOptions(arch=f"sm_{gpu.arch}")).compile("cubin").get_kernel("twice")
    )
    source, result = cudatool.pin_memory(np.arange(n, dtype=np.int32)), cudatool.empty_pinned(n, np.int32)
    from_host, to_host = (core.Buffer.from_handle(a.ctypes.data, a.nbytes, owner=a) for a in (source, result))
    buffer = gpu.allocate(4 * n, stream=stream)
    buffer.copy_from(from_host, stream=stream)
    core.launch(stream, core.LaunchConfig(grid=8, block=128), kernel, buffer, np.int32(n))
    buffer.copy_to(to_host, stream=stream)
    buffer.close()
    stream.sync()
    assert (result == 2 * source).all()


def test_buffer_says_what_it_is(gpu: Any) -> None:
    resource = gpu.memory_resource
    with gpu.allocate(1000, stream=gpu.create_stream()) as buffer:
        assert (buffer.size, buffer.device_id, buffer.memory_resource) == (1000, gpu.device_id, resource)
        assert (buffer.is_device_accessible, buffer.is_host_accessible, buffer.is_managed) == (True, False, False)
        blocks = {
            (block["address"], block["requested_size"])
            for segment in cudatool.memory_snapshot()
            for block in segment["blocks"]
        }
        assert (int(buffer.handle), 1000) in blocks
    assert resource.device_id == gpu.device_id


def test_closed_buffer_serves_the_next_request_on_its_stream(gpu: Any) -> None:
    before, (stream, other) = active(), (gpu.create_stream(), gpu.create_stream())
    buffer = gpu.allocate(1000, stream=stream)
    address = int(buffer.handle)
    assert active() == (before[0] + 1, before[1] + 1)
    buffer.close()
    buffer.close()
    assert active() == before
    with gpu.allocate(1000, stream=other) as elsewhere, gpu.allocate(1000, stream=stream) as again:
        assert int(elsewhere.handle) != address == int(again.handle)


def test_dropped_buffer_is_freed(gpu: Any) -> None:
    before, stream = active(), gpu.create_stream()
    cycle = [gpu.allocate(1000, stream=stream)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert active() == before


def test_block_rests_until_the_closing_stream_is_done(gpu: Any) -> None:
    before, (stream, other) = active(), (gpu.create_stream(), gpu.create_stream())
    buffer = gpu.allocate(1000, stream=stream)
    address = int(buffer.handle)
    stream.sync()
    buffer.fill(7, stream=other)
    buffer.close(other)
    assert active() == (before[0], before[1] + 1)
    other.sync()
    with gpu.allocate(1000, stream=stream) as again:
        assert int(again.handle) == address


def test_empty_buffer_takes_no_memory(gpu: Any) -> None:
    before = active()
    with gpu.allocate(0, stream=gpu.create_stream()) as buffer:
        assert (buffer.size, active()) == (0, before)


def test_default_stream_is_the_one_of_the_package(core: Any, gpu: Any) -> None:
    address = cudatool.empty(250).data_ptr()
    with gpu.allocate(1000, stream=core.LEGACY_DEFAULT_STREAM) as buffer:
        assert int(buffer.handle) == address


def test_our_streams_are_accepted(gpu: Any) -> None:
    stream = cudatool.Stream()
    with gpu.memory_resource.allocate(1000, stream=stream.core) as buffer:
        address = int(buffer.handle)
    with cudatool.stream(stream):
        assert cudatool.empty(250).data_ptr() == address


def test_buffers_come_from_the_pool_in_use(gpu: Any) -> None:
    pool = cudatool.MemPool()
    with cudatool.use_mem_pool(pool), gpu.allocate(1000, stream=gpu.create_stream()) as buffer:
        (segment,) = pool.snapshot()
        assert segment["address"] == int(buffer.handle)


def test_too_much_is_an_out_of_memory_error(gpu: Any) -> None:
    with pytest.raises(OutOfMemoryError):
        gpu.allocate(cudatool.mem_get_info()[1] + 1, stream=gpu.create_stream())


def test_stream_lives_on_while_memory_may_be_cached_for_it(gpu: Any) -> None:
    from cuda.bindings import driver

    stream = gpu.create_stream()
    gpu.allocate(1000, stream=stream).close()
    handle = int(stream.handle)
    del stream
    gc.collect()
    assert [status.name for status in driver.cuStreamSynchronize(handle)] == ["CUDA_SUCCESS"]


def test_buffer_may_be_closed_on_the_per_thread_default_stream(core: Any, gpu: Any) -> None:
    before, stream = active(), gpu.create_stream()
    gpu.allocate(1000, stream=stream).close(core.PER_THREAD_DEFAULT_STREAM)
    core.PER_THREAD_DEFAULT_STREAM.sync()
    gpu.allocate(1000, stream=stream).close()
    assert active() == before


def test_streams_whose_memory_cannot_be_cached_are_refused(core: Any, gpu: Any) -> None:
    before = active()
    with pytest.raises(UsageError, match="another one on each thread"):
        gpu.allocate(1000, stream=core.PER_THREAD_DEFAULT_STREAM)
    with pytest.raises(UsageError, match="memory for a graph"):
        gpu.memory_resource.allocate(1000, stream=gpu.create_graph_builder())
    with pytest.raises(UsageError, match="is not a stream"):
        gpu.memory_resource.allocate(1000, stream=12)
    assert active() == before


def test_double_deallocation_is_refused(gpu: Any) -> None:
    stream = gpu.create_stream()
    buffer = gpu.allocate(1000, stream=stream)
    address = int(buffer.handle)
    buffer.close()
    with pytest.raises(UsageError, match="freed before"):
        gpu.memory_resource.deallocate(address, 1000, stream=stream)
    gpu.memory_resource.deallocate(0, 0, stream=stream)


def test_life_of_a_buffer_is_that_of_one_block(gpu: Any, events: list[Event]) -> None:
    stream = gpu.create_stream()
    buffer = gpu.allocate(1000, stream=stream)
    address = int(buffer.handle)
    buffer.close()
    of_blocks = [event for event in events if event.address == address and event.kind != Kind.SEGMENT_ALLOC]
    assert [(event.kind, event.aux0) for event in of_blocks] == [
        (Kind.BLOCK_ALLOC, 1000),
        (Kind.BLOCK_FREE_REQUESTED, 1000),
        (Kind.BLOCK_FREE_COMPLETED, 1000),
    ]
    assert all(event.stack for event in of_blocks[:2])


def test_nothing_is_counted_twice_in_a_trace(core: Any, gpu: Any, tmp_path: Path) -> None:
    with cudatool.record(tmp_path / "t.ctrace"):
        begun = time.monotonic_ns()  # before it: what lives of other tests in this process
        stream, other = gpu.create_stream(), gpu.create_stream()
        buffer = gpu.allocate(1000, stream=stream)
        buffer.fill(1, stream=stream)
        stream.sync()
        buffer.close(other)
        other.sync()
        gpu.allocate(1000, stream=stream).close()
        cudatool.empty_cache()
    records = read(tmp_path / "t.ctrace").records
    kinds = Counter(records["kind"][records["time"] >= begun].tolist())
    assert kinds[Kind.BLOCK_ALLOC] == kinds[Kind.BLOCK_FREE_COMPLETED] == 2
    assert kinds[Kind.SEGMENT_ALLOC] <= 1
    for kind in (Kind.MEM_ALLOC, Kind.MEM_FREE, Kind.EVENT_RECORD, Kind.EVENT_QUERY):  # the allocator's own
        assert kinds[kind] == 0


def test_buffer_goes_back_to_where_it_came_from(gpu: Any) -> None:
    before, stream = active(), gpu.create_stream()
    cached = gpu.allocate(1000, stream=stream)
    with cudatool.caching_allocator_disabled():
        uncached = gpu.allocate(1000, stream=stream)
        assert active() == (before[0] + 1, before[1] + 1)
        cached.close()
    assert active() == before
    uncached.close()
    assert active() == before
