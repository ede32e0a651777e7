"""Memory pools, and the allocator's functions of torch.cuda."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.trace.events import Event, Kind, pack_pool

MIB = 1 << 20


@pytest.fixture(autouse=True)
def default_limits() -> Iterator[None]:
    cudatool.empty_cache()
    yield
    cudatool.set_per_process_memory_fraction(1.0)


def pools() -> set[tuple[int, int]]:
    """Return the ids of the pools that have segments."""
    return {segment["segment_pool_id"] for segment in cudatool.memory_snapshot()}


def pool_of(array: cudatool.DeviceArray) -> tuple[int, int]:
    """Return the id of the pool that an array lies in."""
    (found,) = [
        segment["segment_pool_id"]
        for segment in cudatool.memory_snapshot()
        if segment["address"] <= array.data_ptr() < segment["address"] + segment["total_size"]
    ]
    return found


def test_what_is_allocated_inside_comes_from_the_pool() -> None:
    pool = cudatool.MemPool()
    before = cudatool.empty(100)
    with cudatool.use_mem_pool(pool):
        inside = cudatool.empty(100)
        with cudatool.stream(cudatool.Stream()):
            elsewhere = cudatool.empty(100)
    after = cudatool.empty(100)
    assert [pool_of(array) for array in (before, inside, elsewhere, after)] == [(0, 0), pool.id, pool.id, (0, 0)]


def test_other_threads_allocate_as_before() -> None:
    pool = cudatool.MemPool()
    found = []
    thread = threading.Thread(target=lambda: found.append(cudatool.empty(100)))
    with cudatool.use_mem_pool(pool):
        thread.start()
        thread.join()
    assert pool_of(found.pop()) == (0, 0)


def test_innermost_pool_counts() -> None:
    outer, inner = cudatool.MemPool(), cudatool.MemPool()
    with cudatool.use_mem_pool(outer):
        with cudatool.use_mem_pool(inner):
            first = cudatool.empty(100)
        second = cudatool.empty(100)
    assert [pool_of(first), pool_of(second)] == [inner.id, outer.id]


def test_memory_of_a_pool_is_used_again_by_the_pool_alone() -> None:
    pool = cudatool.MemPool()
    with cudatool.use_mem_pool(pool):
        address = cudatool.empty(100).data_ptr()
    assert cudatool.empty(100).data_ptr() != address
    with cudatool.use_mem_pool(pool):
        assert cudatool.empty(100).data_ptr() == address


def test_users_of_a_pool_are_counted() -> None:
    pool = cudatool.MemPool()
    assert pool.use_count() == 1
    with cudatool.use_mem_pool(pool):
        assert pool.use_count() == 2
    with pytest.raises(KeyError), cudatool.use_mem_pool(pool):
        raise KeyError
    assert pool.use_count() == 1


def test_pool_cannot_be_used_twice_at_a_time() -> None:
    pool = cudatool.MemPool()
    with (
        cudatool.use_mem_pool(pool),
        pytest.raises(UsageError, match="being allocated to already"),
        cudatool.use_mem_pool(pool),
    ):
        pass
    assert pool.use_count() == 1


def test_dropped_pool_gives_its_memory_back() -> None:
    reserved = cudatool.memory_reserved()
    pool = cudatool.MemPool()
    with cudatool.use_mem_pool(pool):
        cudatool.empty(100)
    assert cudatool.memory_reserved() == reserved + 2 * MIB
    del pool
    assert cudatool.memory_reserved() == reserved


def test_pool_in_a_reference_cycle_gives_its_memory_back() -> None:
    reserved = cudatool.memory_reserved()
    cycle: list[object] = [cudatool.MemPool()]
    with cudatool.use_mem_pool(cycle[0]):  # type: ignore[arg-type]
        cudatool.empty(100)
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert cudatool.memory_reserved() == reserved


def test_arrays_outlive_their_pool() -> None:
    pool = cudatool.MemPool()
    with cudatool.use_mem_pool(pool):
        array = cudatool.ones(100)
    id = pool.id
    del pool
    assert array.get().sum() == 100
    assert id in pools()
    del array
    cudatool.empty_cache()
    assert id not in pools()


def test_cached_memory_of_a_pool_in_use_is_kept_by_empty_cache() -> None:
    pool = cudatool.MemPool()
    with cudatool.use_mem_pool(pool):
        cudatool.empty(100)
    cudatool.empty_cache()
    assert pool.id in pools()


def test_snapshot_of_a_pool_has_its_segments_alone() -> None:
    pool, other = cudatool.MemPool(), cudatool.empty(100)
    assert pool.snapshot() == []
    with cudatool.use_mem_pool(pool):
        array = cudatool.empty(1000)
    (segment,) = pool.snapshot()
    assert (segment["segment_pool_id"], segment["address"]) == (pool.id, array.data_ptr())
    assert cudatool.memory_snapshot(pool.id) == [segment]
    assert pool_of(other) == (0, 0)
    assert len(cudatool.memory_snapshot((0, 0))) == len(cudatool.memory_snapshot()) > 1


def test_blocks_of_a_pool_without_splitting_are_whole_segments() -> None:
    pool = cudatool.MemPool(no_split=True)
    with cudatool.use_mem_pool(pool):
        arrays = [cudatool.empty(100), cudatool.empty(100)]
    assert [len(segment["blocks"]) for segment in pool.snapshot()] == [1, 1]
    assert len(arrays) == 2


def test_spare_pool_serves_a_request_that_would_be_out_of_memory() -> None:
    size = 64 * MIB
    spare, strict = cudatool.MemPool(use_on_oom=True), cudatool.MemPool()
    for pool in (spare, strict):
        with cudatool.use_mem_pool(pool):
            cudatool.empty(size, np.uint8)
    total = cudatool.mem_get_info()[1]
    cudatool.set_per_process_memory_fraction((cudatool.memory_reserved() + 16 * MIB) / total)
    array = cudatool.empty(size, np.uint8)
    assert pool_of(array) == spare.id
    with pytest.raises(OutOfMemoryError):
        cudatool.empty(size, np.uint8)


def test_events_say_which_pool(events: list[Event]) -> None:
    pool = cudatool.MemPool()
    with cudatool.use_mem_pool(pool):
        cudatool.empty(100)
    found = [event for event in events if event.kind in (Kind.BLOCK_ALLOC, Kind.SEGMENT_ALLOC)]
    assert [event.aux1 for event in found] == [pack_pool(pool.id)] * 2


def test_every_handle_is_new() -> None:
    handles = [cudatool.graph_pool_handle(), cudatool.MemPool().id, cudatool.graph_pool_handle()]
    assert len(set(handles)) == 3
    assert {first for first, _ in handles} == {0}


def test_memory_fraction_limits_what_is_reserved() -> None:
    total = cudatool.mem_get_info()[1]
    limit = cudatool.memory_reserved() + 32 * MIB
    cudatool.set_per_process_memory_fraction(limit / total)
    assert cudatool.get_per_process_memory_fraction() == pytest.approx(limit / total)
    with pytest.raises(OutOfMemoryError):
        cudatool.empty(64 * MIB, np.uint8)
    cudatool.set_per_process_memory_fraction(1.0)
    assert cudatool.get_per_process_memory_fraction() == 1.0
    cudatool.empty(64 * MIB, np.uint8)
    with pytest.raises(UsageError, match=r"between 0 and 1, not 1\.5"):
        cudatool.set_per_process_memory_fraction(1.5)


def test_nested_statistics_are_the_flat_ones() -> None:
    array = cudatool.empty(1000)
    flat, nested = cudatool.memory_stats(), cudatool.memory_stats_as_nested_dict()
    assert nested["allocated_bytes"]["all"]["current"] == flat["allocated_bytes.all.current"] >= array.nbytes
    assert nested["oversize_segments"]["peak"] == flat["oversize_segments.peak"]
    assert nested["num_ooms"] == flat["num_ooms"]


def test_totals_are_reset() -> None:
    cudatool.empty(1000)
    cudatool.reset_accumulated_memory_stats()
    assert cudatool.memory_stats()["allocation.all.allocated"] == 0
    cudatool.empty(1000)
    stats = cudatool.memory_stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (1, 1)


def test_backend_is_named() -> None:
    assert cudatool.get_allocator_backend() == "native"


def test_processes_on_the_device_are_listed(device: str) -> None:
    array = cudatool.ones(1000)
    lines = cudatool.list_gpu_processes().splitlines()
    assert lines[0] == "GPU:0"
    if device == "sim":
        free, total = cudatool.mem_get_info()
        assert lines[1:] == [f"process {os.getpid()}: {(total - free) // MIB} MiB"]
    assert len(lines) > 1
    assert array.nbytes == 4000


_TWO_DEVICES = """
import numpy as np, cudatool as ct
def reserved(): return [ct.memory_reserved(0), ct.memory_reserved(1)]
pool = ct.MemPool()
with ct.use_mem_pool(pool, device=1):
    here, there = ct.empty(100), ct.empty(100, device=1)
print([segment["device"] for segment in pool.snapshot()], pool.device, reserved())
del here, there
with ct.use_mem_pool(pool, device=1), ct.use_mem_pool(pool):
    ct.empty(100), ct.empty(100, device=1)
print([segment["device"] for segment in pool.snapshot()])
del pool
ct.empty_cache()
print(reserved())
ct.set_per_process_memory_fraction(0.5, 1)
print(ct.get_per_process_memory_fraction(0), ct.get_per_process_memory_fraction(1))
pinned = ct.pin_memory(np.full(5000, 7.0))
with ct.device(1):
    array = ct.empty(5000, np.float64).copy_(pinned, non_blocking=True)
del pinned
ct.pin_memory(np.zeros(5000))
print(array.get().min())
"""


def test_pools_limits_and_pinned_memory_know_devices_apart() -> None:
    done = run_python(_TWO_DEVICES, environment={"CUDATOOL_DEVICE": "sim:count=2"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[1] 0 [2097152, 2097152]",
        "[0, 1]",
        "[0, 0]",
        "1.0 0.5",
        "7.0",
    ]


def test_refusal_of_nvml_is_a_typed_error() -> None:
    from cudatool import _driver

    with pytest.raises(UsageError, match="NVML does not answer for GPU nothing"):
        _driver.gpu_processes("nothing")
