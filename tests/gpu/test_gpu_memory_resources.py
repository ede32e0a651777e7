"""What only a GPU can show of pinned memory, pools and buffers: that they wait for work which takes time."""

from __future__ import annotations

import numpy as np
import pytest

import cudatool

pytestmark = [pytest.mark.gpu, pytest.mark.whole_device]

SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
MIB = 1 << 20


@pytest.fixture(autouse=True)
def gpu():
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")


@pytest.fixture
def busy():
    """A stream that works for a while from now on."""
    kernel, stream = cudatool.compile(SPIN, "spin"), cudatool.Stream()
    stream.synchronize()
    with cudatool.stream(stream):
        kernel[1, 1](400_000_000)
    yield stream
    stream.synchronize()


def test_pinned_source_waits_for_its_copy(busy):
    pinned = cudatool.pin_memory(np.full(MIB, 7, np.int32))
    address = pinned.ctypes.data
    array = cudatool.empty(MIB, np.int32)
    with cudatool.stream(busy):
        array.copy_(pinned, non_blocking=True)
    del pinned
    other = cudatool.pin_memory(np.zeros(MIB, np.int32))
    assert not busy.query()
    assert other.ctypes.data != address
    busy.synchronize()
    assert (array.get() == 7).all()
    assert cudatool.empty_pinned(MIB, np.int32).ctypes.data == address


def test_buffer_waits_for_the_stream_it_was_closed_on(busy):
    from cuda import core

    from cudatool.cuda_core import CachingMemoryResource

    resource, stream = CachingMemoryResource(), core.Device().create_stream()
    buffer = resource.allocate(MIB, stream=stream)
    address = int(buffer.handle)
    buffer.close(busy.core)
    with resource.allocate(MIB, stream=stream) as other:
        assert int(other.handle) != address
    assert not busy.query()
    busy.synchronize()
    with resource.allocate(MIB, stream=stream) as other:
        assert int(other.handle) == address


def test_memory_of_a_pool_waits_for_streams_outside_it_too(busy):
    pool = cudatool.MemPool()
    with cudatool.use_mem_pool(pool):
        array = cudatool.empty(MIB)
    address = array.data_ptr()
    array.record_stream(busy)
    del array
    with cudatool.use_mem_pool(pool):
        assert cudatool.empty(MIB).data_ptr() != address
    busy.synchronize()
    cudatool.empty(1)  # outside the pool, freed memory is looked after
    with cudatool.use_mem_pool(pool):
        assert cudatool.empty(MIB).data_ptr() == address


def test_this_process_is_among_those_on_the_gpu():
    cudatool.ones(MIB).get()
    first, *processes = cudatool.list_gpu_processes().splitlines()
    assert first == "GPU:0"
    assert processes  # its id may be another one, as seen from outside a container


def test_dropped_pool_over_own_functions_gives_its_memory_back_to_the_gpu():
    from cuda.bindings import driver

    allocator = cudatool.CUDAPluggableAllocator.from_functions(
        lambda size, device, stream: int(driver.cuMemAlloc(size)[1]),
        lambda address, size, device, stream: driver.cuMemFree(address),
    )
    cudatool.empty_cache()
    free, _ = cudatool.mem_get_info()
    pool = cudatool.MemPool(allocator)
    with cudatool.use_mem_pool(pool):
        cudatool.empty(512 * MIB, np.uint8)
        assert cudatool.mem_get_info()[0] <= free - 512 * MIB
    del pool
    assert cudatool.mem_get_info()[0] == free
