"""Pinned memory: kept for the next array, but not before the copies that use it are done."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.trace.events import Event, Kind


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    cudatool.synchronize()
    gc.collect()
    cudatool.empty_host_cache()
    yield
    cudatool.synchronize()
    gc.collect()
    cudatool.empty_host_cache()
    assert cudatool.host_memory_stats()["allocations.current"] == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (3, 5)])
def test_arrays_have_the_shape_asked_for(shape: tuple[int, ...]) -> None:
    array = cudatool.empty_pinned(shape, np.int16)
    assert (array.shape, array.dtype) == (shape, np.int16)
    array[...] = 5
    assert cudatool.asarray(array).get().tolist() == np.full(shape, 5).tolist()


def test_freed_block_serves_the_next_array_of_its_size() -> None:
    array = cudatool.empty_pinned(1000, np.uint8)
    address = array.ctypes.data
    view = array[10:]
    del array
    assert cudatool.empty_pinned(1000, np.uint8).ctypes.data != address
    del view
    assert cudatool.empty_pinned(520, np.uint8).ctypes.data == address


def test_pinned_source_is_not_overwritten_before_it_was_copied() -> None:
    arrays = []
    with cudatool.stream(cudatool.Stream()):
        for value in range(8):
            pinned = cudatool.pin_memory(np.full(5000, value, np.int32))
            arrays.append(cudatool.empty(4900, np.int32).copy_(pinned[100:], non_blocking=True))
            del pinned
    cudatool.synchronize()
    assert [int(array.get().min()) for array in arrays] == list(range(8))
    assert [int(array.get().max()) for array in arrays] == list(range(8))


def test_pinned_target_is_not_handed_out_before_it_was_written() -> None:
    ones = cudatool.ones(5000)
    cudatool.synchronize()
    with cudatool.stream(cudatool.Stream()):
        out = cudatool.empty_pinned(5000)
        ones.get(out, blocking=False)
        del out
        zeros = cudatool.pin_memory(np.zeros(5000, np.float32))
    cudatool.synchronize()
    assert zeros.max() == 0


def test_block_is_handed_out_again_when_the_copy_is_done() -> None:
    pinned = cudatool.pin_memory(np.zeros(100))
    address = pinned.ctypes.data
    cudatool.empty(100, np.float64).copy_(pinned, non_blocking=True)
    del pinned
    cudatool.synchronize()
    assert cudatool.empty_pinned(100, np.float64).ctypes.data == address


def test_other_uses_can_be_noted() -> None:
    from cudatool.runtime.pinned import note_use

    stream, pinned = cudatool.Stream(), cudatool.empty_pinned(100)
    note_use(pinned.ctypes.data + 40, stream)
    note_use(1234, stream)  # not pinned: nothing to note
    del pinned
    assert cudatool.host_memory_stats()["active_requests.current"] == 1
    stream.synchronize()
    cudatool.empty_host_cache()
    assert cudatool.host_memory_stats()["active_requests.current"] == 0


def test_driver_allocations_and_reuse_are_told_apart(events: list[Event]) -> None:
    for size in (10, 12):
        array = cudatool.empty_pinned(size, np.uint8)
        address = array.ctypes.data
        del array
    cudatool.empty_host_cache()
    found = [event for event in events if event.kind in (Kind.HOST_ALLOC, Kind.HOST_FREE)]
    assert {event.address for event in found} == {address}
    assert [(event.kind, event.size, event.flags, event.name) for event in found] == [
        (Kind.HOST_ALLOC, 16, 0, "cuMemHostAlloc"),
        (Kind.HOST_ALLOC, 10, 3, ""),
        (Kind.HOST_FREE, 10, 3, ""),
        (Kind.HOST_ALLOC, 12, 3, ""),
        (Kind.HOST_FREE, 12, 3, ""),
        (Kind.HOST_FREE, 16, 0, "cuMemFreeHost"),
    ]


def test_emptying_the_device_cache_keeps_pinned_memory() -> None:
    cudatool.empty_pinned(1000)
    cudatool.empty_cache()
    assert cudatool.host_memory_stats()["allocated_bytes.current"] == 4096
    cudatool.empty_host_cache()
    assert cudatool.host_memory_stats()["allocated_bytes.current"] == 0


def test_statistics_can_be_nested_and_reset() -> None:
    array = cudatool.empty_pinned(1000)
    cudatool.reset_peak_host_memory_stats()
    cudatool.reset_accumulated_host_memory_stats()
    nested = cudatool.host_memory_stats_as_nested_dict()
    assert nested["active_bytes"] == {"current": 4096, "peak": 4096, "allocated": 0, "freed": 0}
    assert nested["num_host_alloc"] == 0
    del array
    assert cudatool.host_memory_stats()["active_bytes.freed"] == 4096


def run(program: str, conf: str) -> str:
    done = run_python(program, environment={"CUDATOOL_ALLOC_CONF": conf})
    assert done.returncode == 0, done.stderr
    return done.stdout


_REGISTERED = """
import numpy as np, cudatool as ct
from cuda.bindings import driver
ct.init()
kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
array = ct.pin_memory(np.arange(100_000))
address = array.ctypes.data
print(driver.cuPointerGetAttribute(kind, address)[0].name, address % 4096)
print((ct.asarray(array).get() == array).all())
del array
ct.synchronize()
ct.empty_host_cache()
print(driver.cuPointerGetAttribute(kind, address)[0].name)
"""


@pytest.mark.parametrize("threads", [1, 4])
def test_ordinary_memory_is_registered_on_request(threads: int) -> None:
    """
    Source: test_cuda.py::test_pinned_memory_with_cudaregister
    Source: test_cuda.py::test_pinned_memory_empty_cache
    """
    conf = f"pinned_use_cuda_host_register:True,pinned_num_register_threads:{threads}"
    assert run(_REGISTERED, conf).split() == ["CUDA_SUCCESS", "0", "True", "CUDA_ERROR_INVALID_VALUE"]


def test_blocks_are_cut_from_the_reserve_segment_on_request() -> None:
    program = (
        "import cudatool as ct; a, b = ct.empty_pinned(10), ct.empty_pinned(10); print(b.ctypes.data - a.ctypes.data)"
    )
    assert run(program, "pinned_reserve_segment_size_mb:1").split() == ["4096"]


_BACKGROUND = """
import threading, numpy as np, cudatool as ct
for value in range(50):
    pinned = ct.pin_memory(np.full(1000, value))
    array = ct.empty(1000, np.int64).copy_(pinned, non_blocking=True)
    del pinned
    assert (array.get() == value).all()
print([thread.name for thread in threading.enumerate()][1:])
"""


def test_background_thread_works_and_lets_the_program_end() -> None:
    """Source: test_cuda.py::test_pinned_memory_use_background_threads"""
    assert run(_BACKGROUND, "pinned_use_background_threads:True").strip() == "['cudatool pinned memory']"


def test_bad_setting_is_named() -> None:
    environment = {"CUDATOOL_ALLOC_CONF": "pinned_num_register_threads:3"}
    done = run_python("import cudatool as ct; ct.empty_pinned(1)", environment=environment)
    assert done.stderr.splitlines()[-1] == (
        "cudatool.errors.ConfigError: CUDATOOL_ALLOC_CONF: allocator setting pinned_num_register_threads:3: "
        "must be a power of two of at most 128"
    )


@pytest.mark.parametrize("shape", [-3, (-3, -2), (0, -2)])
def test_pinned_array_has_no_negative_extent(shape: int | tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        cudatool.empty_pinned(shape)


@pytest.mark.parametrize("size", [1 << 50, 1 << 63])
def test_more_pinned_memory_than_there_is_is_out_of_memory(size: int) -> None:
    with pytest.raises(OutOfMemoryError):
        cudatool.empty_pinned(size)
