"""What PyTorch's own tests ask of memory pools, asked of ours. docs/torch-tests.md has the table."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import OutOfMemoryError
from cudatool.memory import CachingAllocator, Settings
from cudatool.memory.snapshot import SegmentInfo

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def empty_at_first() -> Iterator[None]:
    gc.collect()
    cudatool.empty_cache()
    yield
    cudatool.set_per_process_memory_fraction(1.0)
    gc.collect()
    cudatool.empty_cache()


class Own:
    """Functions that take memory from the driver, and count how often they were called."""

    def __init__(self) -> None:
        self.allocated = self.freed = 0
        self.allocator = cudatool.CUDAPluggableAllocator.from_functions(self._alloc, self._free)

    def _alloc(self, size: int, device: int, stream: int) -> int:
        from cuda.bindings import driver

        self.allocated += 1
        status, address = driver.cuMemAlloc(size)
        return 0 if status else int(address)

    def _free(self, address: int, size: int, device: int, stream: int) -> None:
        from cuda.bindings import driver

        self.freed += 1
        assert not driver.cuMemFree(address)[0]

    @property
    def calls(self) -> tuple[int, int]:
        return self.allocated, self.freed


@pytest.fixture
def own() -> Own:
    return Own()


def allow(size: int) -> None:
    """Let `size` bytes more than now be reserved, and no MiB more: a fraction is cut to whole bytes."""
    limit = cudatool.memory_reserved() + size + 1024
    cudatool.set_per_process_memory_fraction(limit / cudatool.mem_get_info()[1])


def allocated(pool: cudatool.MemPool, size: int) -> cudatool.DeviceArray:
    with cudatool.use_mem_pool(pool):
        return cudatool.empty(size, "u1")


# Pools.


def test_every_pool_has_a_new_id() -> None:
    """Source: test_cuda.py::test_mempool_id"""
    ids = [cudatool.graph_pool_handle(), cudatool.MemPool().id, cudatool.graph_pool_handle()]
    assert [0, 0, 0] == [first for first, _ in ids]
    assert sorted({second for _, second in ids}) == [second for _, second in ids]


def test_threads_get_different_pools() -> None:
    """Source: test_cuda.py::test_mempool_multithread"""
    ids: list[tuple[int, int]] = []
    threads = [threading.Thread(target=lambda: ids.append(cudatool.MemPool().id)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 4 == len(set(ids))


def test_a_dropped_pool_leaves_the_other_memory_cached() -> None:
    """Source: test_cuda.py::test_mempool_empty_cache"""
    pool = cudatool.MemPool()
    outside, inside = cudatool.empty(4 * MIB, "u1"), allocated(pool, 4 * MIB)
    id, address = pool.id, outside.data_ptr()
    assert 1 == len(cudatool.memory_snapshot(id))
    del outside, inside, pool
    assert [] == cudatool.memory_snapshot(id)
    assert address in [segment["address"] for segment in cudatool.memory_snapshot()]


def test_an_array_keeps_the_memory_of_its_dropped_pool(own: Own) -> None:
    """Source: test_cuda.py::test_mempool_empty_cache_inactive"""
    array = allocated(cudatool.MemPool(own.allocator), 8 * MIB)
    assert (1, 0) == own.calls
    array.fill_(3)
    assert 3 == array[-1:].get()[0]
    del array
    cudatool.empty_cache()
    assert (1, 1) == own.calls


def test_an_array_outlives_pool_and_allocator(own: Own) -> None:
    """Source: test_cuda.py::test_tensor_delete_after_allocator_delete"""
    pool = cudatool.MemPool(own.allocator)
    array = allocated(pool, 16)
    del pool, own.allocator
    gc.collect()
    assert (1, 0) == own.calls
    del array
    cudatool.empty_cache()
    assert (1, 1) == own.calls


def test_a_pool_with_functions_of_its_own_grows_by_segments(own: Own) -> None:
    """Source: test_cuda.py::test_mempool_with_allocator"""
    assert cudatool.MemPool().allocator is None
    pool = cudatool.MemPool(own.allocator)
    assert (own.allocator.allocator(), 1) == (pool.allocator, pool.use_count())
    assert (0, 0) == own.calls
    arrays = []
    with cudatool.use_mem_pool(pool):
        arrays.append(cudatool.empty(MIB, "u1"))
        assert 2 == pool.use_count()
    assert (1, 1) == (pool.use_count(), own.allocated)
    cudatool.empty(MIB, "u1")
    segments = []
    with cudatool.use_mem_pool(pool):
        for _ in range(2):
            arrays.append(cudatool.empty(MIB, "u1"))
            segments.append(len(pool.snapshot()))
    assert [1, 2] == segments
    arrays.clear()
    del pool
    assert (2, 2) == own.calls


def test_a_spare_pool_serves_what_would_find_no_memory(own: Own) -> None:
    """Source: test_cuda.py::test_mempool_limited_memory_with_allocator"""
    kept, spare = cudatool.MemPool(own.allocator), cudatool.MemPool(own.allocator, use_on_oom=True)
    allow(80 * MIB)
    first, second = allocated(kept, 40 * MIB), allocated(spare, 40 * MIB)
    address = second.data_ptr()
    with pytest.raises(OutOfMemoryError):
        cudatool.empty(40 * MIB, "u1")
    del first, second
    third = cudatool.empty(30 * MIB, "u1")
    assert address == third.data_ptr()
    with pytest.raises(OutOfMemoryError):
        cudatool.empty(30 * MIB, "u1")
    del third
    assert address == allocated(spare, 20 * MIB).data_ptr()


def test_a_deleted_pool_is_no_spare_any_more(own: Own) -> None:
    """Source: test_cuda.py::test_deleted_mempool_not_used_on_oom"""
    allow(40 * MIB)
    for _ in range(5):
        pool = cudatool.MemPool(own.allocator, use_on_oom=True)
        allocated(pool, 40 * MIB)
        del pool
    assert (5, 5) == own.calls
    last = cudatool.MemPool(own.allocator, use_on_oom=True)
    allocated(last, 40 * MIB)
    arrays = [cudatool.empty(20 * MIB, "u1") for _ in range(2)]
    assert [40 * MIB] == [segment["active_size"] for segment in last.snapshot()]
    del arrays


def test_a_pool_that_does_not_split_has_one_block_in_each_segment() -> None:
    """Source: test_cuda.py::test_mempool_no_split"""
    blocks: dict[bool, list[int]] = {}
    for no_split in (False, True):
        pool = cudatool.MemPool(no_split=no_split)
        arrays = [allocated(pool, 4 * MIB) for _ in range(2)]
        blocks[no_split] = [len(segment["blocks"]) for segment in pool.snapshot()]
        del arrays
    assert {False: [3], True: [1, 1]} == blocks


def test_a_pool_in_use_is_not_emptied_by_any_thread() -> None:
    """Source: test_cuda.py::test_mempool_emptycache_multithread"""
    pools = [cudatool.MemPool() for _ in range(4)]

    def program(pool: cudatool.MemPool) -> None:
        with cudatool.use_mem_pool(pool):
            cudatool.empty(4)
            cudatool.empty_cache()

    threads = [threading.Thread(target=program, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [1, 1, 1, 1] == [len(pool.snapshot()) for pool in pools]


def test_the_innermost_pool_serves() -> None:
    """Source: test_cuda.py::test_nested_mempool"""
    pools = [cudatool.MemPool() for _ in range(3)]
    arrays: list[cudatool.DeviceArray] = []

    def allocate_in(depth: int) -> None:
        if depth == len(pools):
            return
        with cudatool.use_mem_pool(pools[depth]):
            arrays.append(cudatool.empty(20 * MIB, "u1"))
            allocate_in(depth + 1)
            if depth + 1 < len(pools):
                arrays.append(cudatool.empty(20 * MIB, "u1"))

    allocate_in(0)
    assert [2, 2, 1] == [len(cudatool.memory_snapshot(pool.id)) for pool in pools]


def test_only_the_thread_that_uses_the_pool_is_served_from_it() -> None:
    """
    Source: test_cuda.py::test_mempool_ctx_multithread
    Source: test_cuda.py::test_allocate_in_thread_to_pool
    """
    pool = cudatool.MemPool()
    inside, elsewhere = threading.Event(), threading.Event()
    active: list[tuple[int, int]] = []

    def active_in(id: tuple[int, int]) -> int:
        segments = [segment for segment in cudatool.memory_snapshot() if segment["segment_pool_id"] == id]
        return sum(segment["active_size"] for segment in segments)

    def here() -> None:
        with cudatool.use_mem_pool(pool):
            for _ in range(3):
                arrays = [cudatool.empty(20 * MIB, "u1") for _ in range(2)]
                del arrays
            inside.set()
            elsewhere.wait(60)

    def there() -> None:
        inside.wait(60)
        before = active_in((0, 0))
        array = cudatool.empty(2 * MIB, "u1")
        active.append((active_in((0, 0)) - before, active_in(pool.id)))
        del array
        elsewhere.set()

    threads = [threading.Thread(target=here), threading.Thread(target=there)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(2 * MIB, 0)] == active
    assert 2 == len(pool.snapshot())


# A pool's state is kept and brought back, on an allocator of the test's own, as PyTorch's compiler does it.


POOL = (0, 1)


class Pool:
    """A private pool of an allocator on the device."""

    def __init__(self, settings: str = "") -> None:
        cudatool.init()
        from cudatool.memory.driver_provider import DriverProvider

        self.allocator = CachingAllocator(DriverProvider(0), device=0, settings=Settings.parse(settings))
        self.allocator.create_or_incref_pool(POOL)

    def malloc(self, *sizes: int) -> list[int]:
        self.allocator.begin_allocate_to_pool(POOL, lambda stream: True)
        try:
            return [self.allocator.malloc(size, 0) for size in sizes]
        finally:
            self.allocator.end_allocate_to_pool(POOL)
            self.allocator.release_pool(POOL)

    def free(self, *addresses: int) -> None:
        for address in addresses:
            self.allocator.free(address)

    @property
    def segments(self) -> list[SegmentInfo]:
        return self.allocator.snapshot_segments(pool=POOL)

    @property
    def shape(self) -> list[object]:
        """How the pool is cut into blocks."""
        names = ("address", "total_size", "allocated_size", "active_size", "segment_type")
        return [
            ([segment[name] for name in names], [(block["size"], block["state"]) for block in segment["blocks"]])  # type: ignore[literal-required]
            for segment in self.segments
        ]

    @property
    def live(self) -> list[int]:
        blocks = [block for segment in self.segments for block in segment["blocks"]]
        return sorted(block["address"] for block in blocks if block["state"] == "active_allocated")


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.free(*made.live)
    made.allocator.release_pool(POOL)
    made.allocator.empty_cache()
    assert [] == made.segments


def program_of_several_sizes(pool: Pool) -> None:
    x, _, *rest = pool.malloc(8 * MIB, 8 * MIB, MIB, MIB, MIB, MIB)
    pool.free(x, rest[0], rest[2])


def keep(*wanted: int) -> Callable[[Pool], None]:
    def program(pool: Pool) -> None:
        blocks = pool.malloc(*[512] * 11)
        pool.free(*[block for number, block in enumerate(blocks) if number not in wanted])

    return program


@pytest.mark.parametrize("program", [program_of_several_sizes, keep(5), keep(5, 8), keep(5, 6)])
def test_a_pool_brought_back_to_where_it_is_stays_as_it_is(pool: Pool, program: Callable[[Pool], None]) -> None:
    """
    Source: test_cuda.py::test_simple
    Source: test_cuda.py::test_allocated_in_middle_of_segment
    Source: test_cuda.py::test_multiple_middle_allocations
    Source: test_cuda.py::test_middle_allocations_contiguous
    """
    program(pool)
    before = pool.shape
    result = pool.allocator.restore_pool(POOL, pool.allocator.checkpoint_pool(POOL))
    assert before == pool.shape
    assert sorted(result.freed) == sorted(result.allocated) == pool.live


def test_what_was_allocated_since_is_freed(pool: Pool) -> None:
    """Source: test_cuda.py::test_additional_free_following_checkpoint"""
    (first,) = pool.malloc(512)
    before, state = pool.shape, pool.allocator.checkpoint_pool(POOL)
    (second,) = pool.malloc(512)
    result = pool.allocator.restore_pool(POOL, state)
    assert before == pool.shape
    assert [first] == pool.live
    assert second in result.freed


def test_what_was_freed_since_is_in_use_again(pool: Pool) -> None:
    """
    Source: test_cuda.py::test_tensor_dies_after_checkpoint
    Source: test_cuda.py::test_assigning_back_deleter_fns_to_tensor
    """
    blocks = pool.malloc(2 * MIB, 2 * MIB, 20 * MIB)
    state = pool.allocator.checkpoint_pool(POOL)
    pool.free(*blocks)
    assert [] == pool.live
    result = pool.allocator.restore_pool(POOL, state)
    assert sorted(blocks) == sorted(result.allocated) == pool.live
    for count in (2, 1, 0):
        pool.free(pool.live[0])
        assert count == len(pool.live)


def test_a_snapshot_tells_which_blocks_of_a_pool_are_in_use() -> None:
    """Source: test_cuda.py::test_check_pool_live_allocations"""
    pool = cudatool.MemPool()

    def live() -> list[int]:
        blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
        return [block["address"] for block in blocks if block["state"] == "active_allocated"]

    array = allocated(pool, 16)
    assert [array.data_ptr()] == live()
    del array
    assert [] == live()


def test_a_pool_with_functions_of_its_own_is_not_expandable(own: Own) -> None:
    """Source: test_cuda.py::test_mempool_expandable"""
    program = """
import cudatool
from cuda.bindings import driver
cudatool.init()
own = cudatool.CUDAPluggableAllocator.from_functions(
    lambda size, device, stream: int(driver.cuMemAlloc(size)[1]),
    lambda address, size, device, stream: driver.cuMemFree(address) and None)
pool = cudatool.MemPool(own)
with cudatool.use_mem_pool(pool):
    inside = cudatool.empty(1 << 18)
outside = cudatool.empty(1 << 18)
print([(segment["segment_pool_id"] == pool.id, segment["is_expandable"]) for segment in cudatool.memory_snapshot()])
"""
    done = run_python(program, environment={"CUDATOOL_ALLOC_CONF": "expandable_segments:True"})
    assert done.returncode == 0, done.stderr
    assert [(False, True), (True, False)] == sorted(eval(done.stdout))


def test_arrays_need_no_other_framework() -> None:
    """Source: test_cuda.py::test_no_triton_on_import"""
    program = "import sys, cudatool; cudatool.ones(2); print(*{'triton', 'torch', 'cupy', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "" == done.stdout.strip()
