"""The program's own allocators at work: in a pool, and in the place of the caching allocator."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.trace.events import Event, Kind
from cudatool.trace.reader import read

MIB = 1 << 20


class Own:
    """Allocates from the driver, in Python, and notes what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.fail: BaseException | None = None

    def alloc(self, size: int, device: int, stream: int) -> int:
        from cuda.bindings import driver

        self.calls.append(("alloc", size, device))
        if self.fail is not None:
            raise self.fail
        status, address = driver.cuMemAlloc(size)
        return 0 if status else int(address)

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        from cuda.bindings import driver

        self.calls.append(("free", size, device))
        (status,) = driver.cuMemFree(address)
        assert not status


@pytest.fixture
def own() -> Own:
    return Own()


@pytest.fixture
def pool(own: Own) -> cudatool.MemPool:
    return cudatool.MemPool(cudatool.CUDAPluggableAllocator.from_functions(own.alloc, own.free))


def test_pool_over_own_functions_serves_arrays(own: Own, pool: cudatool.MemPool) -> None:
    with cudatool.use_mem_pool(pool):
        array, small = cudatool.full(3 * MIB, 7, np.int32), cudatool.ones(10)
    assert own.calls == [("alloc", 12 * MIB, 0), ("alloc", 2 * MIB, 0)]
    assert (array.get() == 7).all()
    assert small.get().sum() == 10
    assert sorted(segment["total_size"] for segment in pool.snapshot()) == [2 * MIB, 12 * MIB]


def test_segments_may_go_back_on_a_thread_that_has_used_no_device(own: Own) -> None:
    held = [cudatool.MemPool(cudatool.CUDAPluggableAllocator.from_functions(own.alloc, own.free))]
    with cudatool.use_mem_pool(held[0]):
        cudatool.ones(10)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert own.calls[-1] == ("free", 2 * MIB, 0)


def test_failing_own_function_is_a_typed_error(own: Own, pool: cudatool.MemPool) -> None:
    own.fail = ZeroDivisionError("oops")
    with cudatool.use_mem_pool(pool), pytest.raises(UsageError, match=r"alloc\(.*raised ZeroDivisionError: oops"):
        cudatool.ones(10)
    own.fail = MemoryError()
    with cudatool.use_mem_pool(pool), pytest.raises(OutOfMemoryError):
        cudatool.ones(10)
    own.fail = None
    with cudatool.use_mem_pool(pool):
        assert cudatool.ones(10).get().sum() == 10


def test_pool_dropped_within_an_operation_is_given_back_after_it(own: Own) -> None:
    dropped = [cudatool.MemPool()]
    with cudatool.use_mem_pool(dropped[0]):
        cudatool.ones(10)
    id, alloc = dropped[0].id, own.alloc

    def drop_and_alloc(size: int, device: int, stream: int) -> int:
        dropped.clear()  # as the garbage collector might here
        return alloc(size, device, stream)

    other = cudatool.MemPool(cudatool.CUDAPluggableAllocator.from_functions(drop_and_alloc, own.free))
    with cudatool.use_mem_pool(other):
        cudatool.ones(10)
    assert not dropped
    assert not cudatool.memory_snapshot(id)


def test_own_driver_calls_are_the_allocators_segments_in_a_trace(
    tmp_path: Path, own: Own, pool: cudatool.MemPool
) -> None:
    with cudatool.record(tmp_path / "t.ctrace"), cudatool.use_mem_pool(pool):
        begun = time.monotonic_ns()  # before it: what lives of other tests in this process
        cudatool.ones(10)
    records = read(tmp_path / "t.ctrace").records
    kinds = Counter(records["kind"][records["time"] >= begun].tolist())
    assert kinds[Kind.SEGMENT_ALLOC] == 1
    assert kinds[Kind.MEM_ALLOC] == 0


def test_allocator_cannot_be_changed_after_use(own: Own) -> None:
    cudatool.memory_allocated()
    allocator = cudatool.CUDAPluggableAllocator.from_functions(own.alloc, own.free)
    with pytest.raises(UsageError, match="has been used already and cannot be changed"):
        cudatool.change_current_allocator(allocator)


_CHANGED = """
import sys
import numpy as np
import cudatool as ct
from cuda.bindings import driver
calls = []
def alloc(size, device, stream):
    calls.append(size)
    return int(driver.cuMemAlloc(size)[1])
def free(address, size, device, stream):
    calls.append(-size)
    driver.cuMemFree(address)
own = ct.CUDAPluggableAllocator.from_functions(alloc, free)
ct.change_current_allocator(own)
for attempt in (lambda: ct.change_current_allocator(own), ct.memory_stats, ct.memory_snapshot, ct.MemPool,
                lambda: ct.set_per_process_memory_fraction(0.5)):
    try:
        attempt()
    except ct.CudatoolError as error:
        print(type(error).__name__)
with ct.record(sys.argv[1]):
    x = ct.full(100, 3, np.int32)
    assert (x.get() == 3).all()
    x.record_stream(ct.Stream())
    del x
    address = ct.caching_allocator_alloc(1000)
    ct.caching_allocator_delete(address)
ct.empty_cache()
print(calls, ct.get_allocator_backend())
"""


def test_own_allocator_takes_the_place_of_the_caching_one(tmp_path: Path) -> None:
    done = run_python(_CHANGED, str(tmp_path / "t.ctrace"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["UsageError"] * 5 + ["[400, -400, 1000, -1000] pluggable"]
    trace = read(tmp_path / "t.ctrace")
    assert [int(record["size"]) for record in trace.of_kind(Kind.MEM_ALLOC)] == [400, 1000]
    assert [trace.names[int(record["name"])] for record in trace.of_kind(Kind.MEM_FREE)] == ["free", "free"]


_C_SOURCE = """
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>

static void *entry(const char *name) {
    static int (*get)(const char *, void **, int, unsigned long long, void *);
    void *found = NULL;
    if (!get) *(void **)&get = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
    get(name, &found, 13000, 0, NULL);
    return found;
}
ssize_t allocated;
void *own_alloc(ssize_t size, int device, void *stream) {
    unsigned long long address = 0;
    if (((int (*)(unsigned long long *, size_t))entry("cuMemAlloc"))(&address, size)) return NULL;
    allocated += size;
    return (void *)address;
}
void own_free(void *address, ssize_t size, int device, void *stream) {
    ((int (*)(unsigned long long))entry("cuMemFree"))((unsigned long long)address);
    allocated -= size;
}
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = tmp_path_factory.mktemp("own") / "own.so"
    source = path.with_suffix(".c")
    source.write_text(_C_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl"], check=True)
    return path


def test_pool_over_a_shared_library(library: Path) -> None:
    import ctypes

    allocated = ctypes.c_ssize_t.in_dll(ctypes.CDLL(str(library)), "allocated")
    pool = cudatool.MemPool(cudatool.CUDAPluggableAllocator(library, "own_alloc", "own_free"))
    with cudatool.use_mem_pool(pool):
        array = cudatool.full(3 * MIB, 7, np.int32)
        assert allocated.value == 12 * MIB
        with pytest.raises(OutOfMemoryError):
            cudatool.empty(cudatool.mem_get_info()[1] + MIB, np.uint8)
    assert (array.get() == 7).all()
    del array, pool
    assert allocated.value == 0


def test_blocks_in_a_pool_over_own_functions_are_recorded(pool: cudatool.MemPool, events: list[Event]) -> None:
    with cudatool.use_mem_pool(pool):
        cudatool.empty(10)
    assert [event.kind for event in events] == [
        Kind.SEGMENT_ALLOC,
        Kind.BLOCK_ALLOC,
        Kind.BLOCK_FREE_REQUESTED,
        Kind.BLOCK_FREE_COMPLETED,
    ]


def test_without_caching_every_array_is_a_driver_allocation(events: list[Event]) -> None:
    reserved = cudatool.memory_reserved()
    with cudatool.caching_allocator_disabled():
        array = cudatool.ones(10)
        address = cudatool.caching_allocator_alloc(100)
    assert cudatool.memory_reserved() == reserved
    assert array.get().sum() == 10
    del array
    cudatool.caching_allocator_delete(address)
    found = [event for event in events if event.kind in (Kind.MEM_ALLOC, Kind.MEM_FREE, Kind.BLOCK_ALLOC)]
    assert [(event.kind, event.size, event.name) for event in found] == [
        (Kind.MEM_ALLOC, 40, "cuMemAlloc"),
        (Kind.MEM_ALLOC, 100, "cuMemAlloc"),
        (Kind.MEM_FREE, 40, "cuMemFree"),
        (Kind.MEM_FREE, 100, "cuMemFree"),
    ]


def test_negative_size_is_refused_without_caching_too() -> None:
    with cudatool.caching_allocator_disabled(), pytest.raises(UsageError, match="a dimension is negative"):
        cudatool.empty(-1, np.float32)


def test_caching_can_be_switched_off_and_on() -> None:
    cudatool.caching_allocator_enable(False)
    try:
        before = cudatool.memory_allocated()
        array = cudatool.ones(10)
        assert cudatool.memory_allocated() == before
        with cudatool.caching_allocator_disabled():
            pass
        assert cudatool.ones(10).get().sum() == array.get().sum() == 10
        assert cudatool.memory_allocated() == before
        with pytest.raises(OutOfMemoryError):
            cudatool.empty(cudatool.mem_get_info()[1] + MIB, np.uint8)
    finally:
        cudatool.caching_allocator_enable()
    cudatool.ones(10).get()
    assert cudatool.memory_stats()["allocation.all.allocated"] > 0
