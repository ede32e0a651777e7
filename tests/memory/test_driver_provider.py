"""Segments from the driver of whatever device this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cudatool import _driver
from cudatool.errors import CudaError, OutOfMemoryError
from cudatool.memory import CachingAllocator, Settings
from cudatool.memory.driver_provider import DriverProvider
from cudatool.trace import hooks

MIB = 1024 * 1024


@pytest.fixture
def driver_provider() -> Iterator[DriverProvider]:
    _driver.initialize()
    from cuda.bindings import driver

    assert driver.cuInit(0) == (driver.CUresult.CUDA_SUCCESS,)
    provider = DriverProvider(0)
    yield provider
    provider.close()


@pytest.fixture
def stream(driver_provider: DriverProvider) -> Iterator[int]:
    with driver_provider._call() as driver:
        status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        assert status == driver.CUresult.CUDA_SUCCESS
    yield int(stream)
    with driver_provider._call() as driver:
        assert driver.cuStreamDestroy(stream) == (driver.CUresult.CUDA_SUCCESS,)


def test_segment_comes_from_the_driver_and_goes_back(driver_provider: DriverProvider) -> None:
    allocator = CachingAllocator(driver_provider, device=0, settings=Settings())
    before, total = driver_provider.memory_info()
    address = allocator.malloc(30 * MIB, 0)
    assert before - 30 * MIB >= driver_provider.memory_info()[0]
    allocator.free(address)
    allocator.empty_cache()
    assert (before, total) == driver_provider.memory_info()


def test_block_used_on_another_stream_is_free_after_its_event(driver_provider: DriverProvider, stream: int) -> None:
    allocator = CachingAllocator(driver_provider, device=0, settings=Settings())
    addresses = []
    for _ in range(3):
        address = allocator.malloc(100, 0)
        addresses.append(address)
        allocator.record_stream(address, stream)
        allocator.free(address)
        with driver_provider._call() as driver:
            driver.cuStreamSynchronize(stream)
    allocator.empty_cache()
    assert 1 == len(set(addresses))
    assert 1 == len(driver_provider._idle_events)  # one event was enough for all
    assert [] == allocator.snapshot_segments()


def test_too_large_a_request_is_out_of_memory(driver_provider: DriverProvider) -> None:
    allocator = CachingAllocator(driver_provider, device=0, settings=Settings())
    free, total = driver_provider.memory_info()
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(free + 2 * MIB, 0)
    assert total == caught.value.total
    assert free == caught.value.free


def test_other_failures_have_the_drivers_name(driver_provider: DriverProvider) -> None:
    with pytest.raises(CudaError, match="cuMemFree failed") as caught:
        driver_provider.free(0x1234)
    assert "CUDA_ERROR_INVALID_VALUE" == caught.value.name


def test_calls_work_without_a_current_context_and_are_marked_as_ours(driver_provider: DriverProvider) -> None:
    class Spy:
        def __getattr__(self, name: str) -> Any:
            if name.startswith("cuMem"):
                operations.append(hooks.current_operation())
            return getattr(driver, name)

    operations: list[int] = []
    driver, driver_provider._driver = driver_provider._driver, Spy()
    try:
        driver_provider.free(driver_provider.allocate(2 * MIB, 0))
        driver_provider.memory_info()
    finally:
        driver_provider._driver = driver
    assert 3 == len(operations)
    assert 0 not in operations
    assert 0 == hooks.current_operation()


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_pages_that_cannot_all_be_mapped_leave_nothing_behind(driver_provider: DriverProvider, name: str) -> None:
    class LastFails:
        """A driver that refuses the second call of one function, or the first if there is no second."""

        calls = 0

        def __getattr__(self, called: str) -> Any:
            return self.refuse if called == name and self.is_last() else getattr(driver, called)

        def is_last(self) -> bool:
            self.calls += 1
            return self.calls == (1 if name == "cuMemSetAccess" else 2)

        @staticmethod
        def refuse(*_: object) -> tuple[Any, ...]:
            return driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None

    before = driver_provider.memory_info()
    start = driver_provider.reserve(4 * MIB, 0)
    driver = driver_provider._driver
    try:
        driver_provider._driver = LastFails()
        with pytest.raises(CudaError, match=f"{name}.* failed"):
            driver_provider.map(start, 4 * MIB, 2 * MIB)
        driver_provider._driver = driver
        assert before == driver_provider.memory_info()
        driver_provider.map(start, 4 * MIB, 2 * MIB)  # nothing is in the way
        driver_provider.unmap(start, 4 * MIB, 2 * MIB)
    finally:
        driver_provider._driver = driver
        driver_provider.unreserve(start, 4 * MIB)
    assert before == driver_provider.memory_info()


def test_an_event_that_cannot_be_recorded_is_used_again(driver_provider: DriverProvider) -> None:
    class Refuses:
        def __getattr__(self, called: str) -> Any:
            return self.refuse if called == "cuEventRecord" else getattr(driver, called)

        @staticmethod
        def refuse(*_: object) -> tuple[Any, ...]:
            return (driver.CUresult.CUDA_ERROR_INVALID_HANDLE,)

    driver, driver_provider._driver = driver_provider._driver, Refuses()
    try:
        for _ in range(3):
            with pytest.raises(CudaError, match="cuEventRecord failed"):
                driver_provider.record_event(0)
    finally:
        driver_provider._driver = driver
    assert 1 == len(driver_provider._idle_events)
