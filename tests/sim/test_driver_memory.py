"""Copies, fills, host memory, pointers: what is synchronous, what is staged, what is late."""

from __future__ import annotations

import ctypes
import re
import time
from pathlib import Path

import numpy as np
import pytest
from warm_process import run_python


def _pinned(driver, ok, size):
    address = int(ok(driver.cuMemHostAlloc(size, 0)))
    return address, np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))


def test_bytes_survive_the_way_to_the_device_and_back(driver, ok):
    data = np.random.default_rng(1).integers(0, 256, 100_003, dtype=np.uint8)
    back = np.zeros_like(data)
    one, two = ok(driver.cuMemAlloc(data.size)), ok(driver.cuMemAlloc(data.size))
    ok(driver.cuMemcpyHtoD(one, data.ctypes.data, data.size))
    ok(driver.cuMemcpyDtoD(two, one, data.size))
    ok(driver.cuMemcpyDtoH(back.ctypes.data, two, data.size))
    assert np.array_equal(data, back)
    ok(driver.cuMemFree(one))
    ok(driver.cuMemFree(two))


def test_fills_of_every_width(driver, ok):
    address = ok(driver.cuMemAlloc(64))
    for fill, value, count, expected in [
        (driver.cuMemsetD8, 0x12, 64, np.full(64, 0x12, np.uint8)),
        (driver.cuMemsetD16, 0x1234, 31, np.full(31, 0x1234, np.uint16)),
        (driver.cuMemsetD32, 0x12345678, 15, np.full(15, 0x12345678, np.uint32)),
    ]:
        ok(fill(address, value, count))
        back = np.zeros_like(expected)
        ok(driver.cuMemcpyDtoH(back.ctypes.data, address, back.nbytes))
        assert np.array_equal(expected, back)
    ok(driver.cuMemFree(address))


def test_pageable_source_is_read_when_the_copy_is_enqueued(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAlloc(4))
    data, back = np.array([1], np.uint32), np.zeros(1, np.uint32)
    ok(driver.cuMemcpyHtoDAsync(address, data.ctypes.data, 4, stream))
    data[0] = 2
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuMemcpyDtoH(back.ctypes.data, address, 4))
    assert back[0] == 1
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemFree(address))


def test_pinned_buffer_may_be_source_and_then_destination_of_copies_on_one_stream(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    one, two = ok(driver.cuMemAlloc(4)), ok(driver.cuMemAlloc(4))
    pinned, data = _pinned(driver, ok, 4)
    back = np.zeros(4, np.uint8)
    data[:] = 1
    ok(driver.cuMemcpyHtoDAsync(one, pinned, 4, stream))
    ok(driver.cuMemcpyDtoHAsync(pinned, two, 4, stream))  # after the first, so that it reads what was there
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuMemcpyDtoH(back.ctypes.data, one, 4))
    assert back.tolist() == [1, 1, 1, 1]
    ok(driver.cuMemFreeHost(pinned))
    ok(driver.cuMemFree(one))
    ok(driver.cuMemFree(two))
    ok(driver.cuStreamDestroy(stream))


def test_pinned_source_is_read_when_the_copy_runs(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAlloc(4))
    pinned, data = _pinned(driver, ok, 4)
    back = np.zeros(4, np.uint8)
    data[:] = 1
    ok(driver.cuMemcpyHtoDAsync(address, pinned, 4, stream))
    data[:] = 2  # too early: the copy may not have read it yet
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuMemcpyDtoH(back.ctypes.data, address, 4))
    assert back.tolist() == [2, 2, 2, 2]
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemFree(address))
    ok(driver.cuMemFreeHost(pinned))


def test_pinned_destination_is_garbage_until_the_copy_is_waited_for(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAlloc(4))
    pinned, data = _pinned(driver, ok, 4)
    ok(driver.cuMemsetD8Async(address, 7, 4, stream))
    ok(driver.cuMemcpyDtoHAsync(pinned, address, 4, stream))
    assert data.tolist() not in ([0, 0, 0, 0], [7, 7, 7, 7])
    ok(driver.cuStreamSynchronize(stream))
    assert data.tolist() == [7, 7, 7, 7]
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemFree(address))
    ok(driver.cuMemFreeHost(pinned))


def test_pinned_destination_keeps_its_bytes_while_pending_work_may_read_them(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    address = int(ok(driver.cuMemAlloc(8)))
    pinned, data = _pinned(driver, ok, 8)
    data[:] = 3
    ok(driver.cuMemsetD8Async(address, 7, 8, stream))
    ok(driver.cuMemcpyDtoHAsync(pinned + 4, address, 4, stream))
    assert [3, 3, 3, 3] == data[:4].tolist() and 3 not in data[4:]
    ok(driver.cuMemcpyHtoDAsync(address + 4, pinned, 4, stream))  # what reads it comes after one that was looked at
    for _ in range(2):
        ok(driver.cuMemcpyDtoHAsync(pinned, address, 4, stream))
        assert [3, 3, 3, 3] == data[:4].tolist()
    ok(driver.cuStreamSynchronize(stream))
    assert [7] * 8 == data.tolist()
    ok(driver.cuMemcpyDtoHAsync(pinned, address, 4, stream))  # what read it is done
    assert 7 not in data[:4] and [7, 7, 7, 7] == data[4:].tolist()
    ok(driver.cuStreamSynchronize(stream))
    assert [7] * 8 == data.tolist()
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemFree(address))
    ok(driver.cuMemFreeHost(pinned))


def test_stream_ordered_memory_lives_until_its_free_runs(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    free = ok(driver.cuMemGetInfo())[0]
    address = ok(driver.cuMemAllocAsync(4 << 20, stream))
    ok(driver.cuMemsetD8Async(address, 1, 4 << 20, stream))
    ok(driver.cuMemFreeAsync(address, stream))
    assert ok(driver.cuMemGetInfo())[0] == free - (4 << 20)
    ok(driver.cuStreamSynchronize(stream))
    assert ok(driver.cuMemGetInfo())[0] == free
    ok(driver.cuStreamDestroy(stream))


def test_memory_is_given_back_once_though_its_free_has_yet_to_run(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAllocAsync(4096, stream))
    ok(driver.cuMemFreeAsync(address, stream))
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemFreeAsync(address, stream)[0].name
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemFree(address)[0].name
    ok(driver.cuStreamSynchronize(stream))
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemFreeAsync(address, stream)[0].name
    ok(driver.cuStreamDestroy(stream))


def test_memory_from_no_pool_may_be_freed_in_stream_order(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAlloc(8 << 20))
    free = ok(driver.cuMemGetInfo())[0]
    ok(driver.cuMemsetD8Async(address, 1, 8 << 20, stream))
    ok(driver.cuMemFreeAsync(address, stream))
    assert free == ok(driver.cuMemGetInfo())[0]
    ok(driver.cuStreamSynchronize(stream))
    assert free + (8 << 20) == ok(driver.cuMemGetInfo())[0]
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemFree(address)[0].name
    ok(driver.cuStreamDestroy(stream))


def test_managed_and_pinned_memory_is_not_freed_in_stream_order(driver, ok):
    managed = ok(driver.cuMemAllocManaged(4096, 1))
    assert "CUDA_ERROR_NOT_SUPPORTED" == driver.cuMemFreeAsync(managed, 0)[0].name
    ok(driver.cuMemFree(managed))
    pinned = ok(driver.cuMemHostAlloc(4096, 0))
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemFreeAsync(int(pinned), 0)[0].name
    ok(driver.cuMemFreeHost(pinned))


def test_out_of_memory_waits_for_pending_frees(driver, ok):
    stream = ok(driver.cuStreamCreate(1))
    most = ok(driver.cuMemGetInfo())[0] // 4 * 3
    address = ok(driver.cuMemAllocAsync(most, stream))
    ok(driver.cuMemFreeAsync(address, stream))
    again = ok(driver.cuMemAllocAsync(most, stream))
    ok(driver.cuMemFreeAsync(again, stream))
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuStreamDestroy(stream))


def test_small_allocations_share_pages_and_give_them_back(driver, ok, machine):
    free = ok(driver.cuMemGetInfo())[0]
    addresses = [int(ok(driver.cuMemAlloc(1000))) for _ in range(3)]
    assert [a - addresses[0] for a in addresses] == [0, 1024, 2048]
    assert ok(driver.cuMemGetInfo())[0] >= free - (2 << 20)
    for address in addresses:
        ok(driver.cuMemFree(address))
    assert ok(driver.cuMemGetInfo())[0] == free


def _asks_for_large_pages(address: int) -> bool:
    """Return whether the host is to back an address with large pages, as the kernel knows it."""
    there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            there = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif there and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("nothing is mapped there")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the host has no large pages")
def test_allocations_with_pages_of_their_own_ask_the_host_for_large_ones(driver, ok):
    for size, expected in ((1 << 20, True), ((1 << 20) - 1, False)):
        address = int(ok(driver.cuMemAlloc(size)))
        assert _asks_for_large_pages(address) == expected
        ok(driver.cuMemFree(address))


def test_pointer_attributes_of_device_and_host_memory(driver, ok):
    attribute = driver.CUpointer_attribute
    device, pinned = int(ok(driver.cuMemAlloc(100))), int(ok(driver.cuMemHostAlloc(100, 0)))
    kind = attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert ok(driver.cuPointerGetAttribute(kind, device + 50)) == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert ok(driver.cuPointerGetAttribute(kind, pinned)) == driver.CUmemorytype.CU_MEMORYTYPE_HOST
    assert int(ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, device + 50))) == device
    assert ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE, device)) == 100
    assert ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, device)) == 0
    assert driver.cuPointerGetAttribute(kind, device + 100)[0].name == "CUDA_ERROR_INVALID_VALUE"
    ok(driver.cuMemFree(device))
    ok(driver.cuMemFreeHost(pinned))


def test_registered_memory_counts_as_pinned(driver, ok):
    data = np.zeros(4096, np.uint8)
    ok(driver.cuMemHostRegister(data.ctypes.data, data.size, 0))
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert ok(driver.cuPointerGetAttribute(kind, data.ctypes.data)) == driver.CUmemorytype.CU_MEMORYTYPE_HOST
    again = driver.cuMemHostRegister(data.ctypes.data, data.size, 0)[0]
    assert again.name == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    ok(driver.cuMemHostUnregister(data.ctypes.data))
    gone = driver.cuMemHostUnregister(data.ctypes.data)[0]
    assert gone.name == "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"


def test_registration_checks_its_range(driver, ok):
    data = np.zeros(1 << 16, np.uint8)
    middle = data.ctypes.data + 4096
    ok(driver.cuMemHostRegister(middle, 4096, 3))
    overlapping = driver.cuMemHostRegister(data.ctypes.data, data.size, 0)[0]
    assert overlapping.name == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    assert [int(v) for v in ok(driver.cuMemGetAddressRange(middle + 100))] == [middle, 4096]
    inside = driver.cuMemHostUnregister(middle + 100)[0]
    assert inside.name == "CUDA_ERROR_INVALID_VALUE"
    ok(driver.cuMemHostUnregister(middle))
    assert driver.cuMemGetAddressRange(middle)[0].name == "CUDA_ERROR_NOT_FOUND"


def test_only_memory_of_the_host_is_registered(driver, ok):
    address = ok(driver.cuMemAlloc(4096))
    data = np.zeros(4096, np.uint8)
    assert driver.cuMemHostRegister(int(address), 4096, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"
    beyond = int(address) + (64 << 20)  # a device address without an allocation
    assert driver.cuMemHostRegister(beyond, 4096, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuMemHostRegister(4096, 4096, 0)[0].name == "CUDA_ERROR_INVALID_VALUE"  # nothing is mapped there
    assert driver.cuMemHostRegister(data.ctypes.data, data.size, 16)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuMemHostRegister(data.ctypes.data, data.size, 4)[0].name == "CUDA_ERROR_NOT_SUPPORTED"
    ok(driver.cuMemFree(address))


_RESET = """
from cudatool import _driver
_driver.choose("sim")
_driver.initialize()
from cuda.bindings import driver

def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]

ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
ok(driver.cuMemAlloc(4096))
ok(driver.cuDevicePrimaryCtxReset(0))
assert driver.cuMemAlloc(4096)[0].name == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
assert int(ok(driver.cuDevicePrimaryCtxGetState(0))[1]) == 0
ok(driver.cuDevicePrimaryCtxRelease(0))
assert driver.cuDevicePrimaryCtxRelease(0)[0].name == "CUDA_ERROR_INVALID_CONTEXT"
print("done")
"""


def test_reset_of_a_primary_context_does_not_release_it():
    found = run_python(_RESET)
    assert "done\n" == found.stdout, found.stderr


def test_work_on_exported_memory_runs_unasked(driver, ok, machine, monkeypatch):
    monkeypatch.setattr(machine.scheduler, "_is_shared", False)
    props = driver.CUmemPoolProps()
    props.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.handleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    pool = ok(driver.cuMemPoolCreate(props))
    address = ok(driver.cuMemAllocFromPoolAsync(8, pool, 0))
    byte = ctypes.c_ubyte.from_address(int(address))
    ok(driver.cuMemsetD8Async(address, 1, 8, 0))
    assert byte.value == 0
    ok(driver.cuMemPoolExportPointer(address))
    _until(lambda: byte.value == 1)
    ok(driver.cuMemsetD8Async(address, 2, 8, 0))
    _until(lambda: byte.value == 2)
    ok(driver.cuMemFreeAsync(address, 0))
    ok(driver.cuStreamSynchronize(0))
    ok(driver.cuMemPoolDestroy(pool))


def _until(condition):
    """Wait, without asking the driver; fail after a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pool_limits_and_counters(driver, ok):
    props = driver.CUmemPoolProps()
    props.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    props.location.id = 0
    props.maxSize = 1 << 20
    pool = ok(driver.cuMemPoolCreate(props))
    address = ok(driver.cuMemAllocFromPoolAsync(1 << 20, pool, 0))
    assert driver.cuMemAllocFromPoolAsync(1, pool, 0)[0].name == "CUDA_ERROR_OUT_OF_MEMORY"
    used = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
    assert int(ok(driver.cuMemPoolGetAttribute(pool, used))) == 1 << 20
    ok(driver.cuMemFreeAsync(address, 0))
    ok(driver.cuStreamSynchronize(0))
    assert int(ok(driver.cuMemPoolGetAttribute(pool, used))) == 0
    ok(driver.cuMemPoolDestroy(pool))
    assert driver.cuMemPoolDestroy(pool)[0].name == "CUDA_ERROR_INVALID_HANDLE"
