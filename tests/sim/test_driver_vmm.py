"""Virtual memory management: ranges, physical memory, mappings, and what misuse is answered with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

PAGE = 2 << 20
Pages = Callable[..., int]


@pytest.fixture
def kind(driver: Any) -> Any:
    """Properties of memory on device 0 that can be shared."""
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


@pytest.fixture
def access(driver: Any) -> Any:
    description = driver.CUmemAccessDesc()
    description.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    description.location.id = 0
    description.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return description


@pytest.fixture
def space(driver: Any, ok: Any) -> Iterator[int]:
    """A range of four pages of addresses, where the test leaves nothing mapped."""
    address = int(ok(driver.cuMemAddressReserve(4 * PAGE, 0, 0, 0)))
    yield address
    ok(driver.cuMemAddressFree(address, 4 * PAGE))


@pytest.fixture
def mapped(driver: Any, ok: Any, kind: Any, access: Any, space: int) -> Iterator[Pages]:
    """Map and open one handle a page; undone at the end."""
    pages: list[int] = []

    def map_pages(first: int, count: int = 1, *, opened: bool = True) -> int:
        for page in range(first, first + count):
            handle = ok(driver.cuMemCreate(PAGE, kind, 0))
            ok(driver.cuMemMap(space + page * PAGE, PAGE, 0, handle, 0))
            ok(driver.cuMemRelease(handle))  # the mapping keeps it
            pages.append(page)
        if opened:
            ok(driver.cuMemSetAccess(space + first * PAGE, count * PAGE, [access], 1))
        return space + first * PAGE

    yield map_pages
    for page in pages:
        driver.cuMemUnmap(space + page * PAGE, PAGE)


def free_bytes(driver: Any, ok: Any) -> int:
    return int(ok(driver.cuMemGetInfo())[0])


def read(driver: Any, ok: Any, address: int, size: int) -> Any:
    back = np.zeros(size, np.uint8)
    ok(driver.cuMemcpyDtoH(back.ctypes.data, address, size))
    return back


def test_reserving_addresses_takes_no_memory(driver: Any, ok: Any) -> None:
    before = free_bytes(driver, ok)
    size = 9 << 30  # more than there is memory
    address = ok(driver.cuMemAddressReserve(size, 0, 0, 0))
    assert before == free_bytes(driver, ok)
    ok(driver.cuMemAddressFree(address, size))


def test_memory_is_taken_when_it_is_created_and_given_back_without_handles_and_mappings(
    driver: Any, ok: Any, kind: Any, space: int
) -> None:
    before = free_bytes(driver, ok)
    handle = ok(driver.cuMemCreate(2 * PAGE, kind, 0))
    assert before - 2 * PAGE == free_bytes(driver, ok)
    ok(driver.cuMemMap(space, 2 * PAGE, 0, handle, 0))
    ok(driver.cuMemRelease(handle))
    assert before - 2 * PAGE == free_bytes(driver, ok)
    ok(driver.cuMemUnmap(space, 2 * PAGE))
    assert before == free_bytes(driver, ok)


def test_more_memory_than_there_is_cannot_be_created(driver: Any, kind: Any) -> None:
    (result, *_) = driver.cuMemCreate(1 << 40, kind, 0)
    assert "CUDA_ERROR_OUT_OF_MEMORY" == result.name


def test_copies_and_fills_reach_across_handles(driver: Any, ok: Any, mapped: Pages) -> None:
    address = mapped(0, 3)
    data = np.arange(2 * PAGE, dtype=np.uint32).view(np.uint8)[: 2 * PAGE]
    ok(driver.cuMemcpyHtoD(address + PAGE // 2, data.ctypes.data, data.size))
    ok(driver.cuMemsetD8(address + PAGE, 7, 10))
    data[PAGE // 2 : PAGE // 2 + 10] = 7
    assert np.array_equal(data, read(driver, ok, address + PAGE // 2, data.size))


def test_memory_mapped_twice_shows_the_same_bytes(driver: Any, ok: Any, kind: Any, access: Any, space: int) -> None:
    handle = ok(driver.cuMemCreate(PAGE, kind, 0))
    for address in (space, space + 2 * PAGE):
        ok(driver.cuMemMap(address, PAGE, 0, handle, 0))
        ok(driver.cuMemSetAccess(address, PAGE, [access], 1))
    ok(driver.cuMemRelease(handle))
    ok(driver.cuMemsetD8(space, 9, 100))
    assert np.array_equal(np.full(100, 9, np.uint8), read(driver, ok, space + 2 * PAGE, 100))
    ok(driver.cuMemUnmap(space, PAGE))
    ok(driver.cuMemUnmap(space + 2 * PAGE, PAGE))


def test_new_mapping_between_two_makes_one_run_of_them(driver: Any, ok: Any, mapped: Pages) -> None:
    mapped(0)
    mapped(2)
    address = mapped(1) - PAGE
    ok(driver.cuMemsetD8(address, 1, 3 * PAGE))
    assert 3 * PAGE == int(read(driver, ok, address, 3 * PAGE).sum())


def test_work_that_is_pending_runs_before_its_memory_goes(
    driver: Any, ok: Any, kind: Any, access: Any, space: int, mapped: Pages
) -> None:
    address = mapped(0, 2)
    target = ok(driver.cuMemAlloc(PAGE))
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuMemsetD8Async(address + PAGE, 5, PAGE, stream))
    ok(driver.cuMemcpyDtoDAsync(target, address + PAGE, PAGE, stream))
    ok(driver.cuMemUnmap(address + PAGE, PAGE))
    ok(driver.cuStreamSynchronize(stream))
    assert 5 == read(driver, ok, int(target), 1)[0]
    ok(driver.cuMemFree(target))
    ok(driver.cuStreamDestroy(stream))


def test_memory_without_access_cannot_be_copied(driver: Any, ok: Any, access: Any, mapped: Pages) -> None:
    address = mapped(0, opened=False)
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemsetD8(address, 0, 1)[0].name
    ok(driver.cuMemSetAccess(address, PAGE, [access], 1))
    ok(driver.cuMemsetD8(address, 0, 1))
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
    ok(driver.cuMemSetAccess(address, PAGE, [access], 1))
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemsetD8(address, 0, 1)[0].name


def test_unmapped_memory_is_out_of_reach(driver: Any, ok: Any, space: int, mapped: Pages) -> None:
    address = mapped(0, 2)
    ok(driver.cuMemUnmap(address, PAGE))
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemsetD8(address, 0, 1)[0].name
    ok(driver.cuMemsetD8(address + PAGE, 0, PAGE))


def test_pointer_knows_its_device_and_its_reserved_range(driver: Any, ok: Any, space: int, mapped: Pages) -> None:
    address = mapped(1, 2)
    attribute = driver.CUpointer_attribute
    kind = ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 5))
    start = ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address + 5))
    assert (2, space) == (int(kind), int(start))
    base, size = ok(driver.cuMemGetAddressRange(address + 5))
    assert (address, PAGE) == (int(base), int(size))


def test_reserved_address_without_memory_has_no_attributes(driver: Any, space: int, mapped: Pages) -> None:
    mapped(1)
    mapping = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuPointerGetAttribute(mapping, space)[0].name


def test_access_and_properties_can_be_asked(driver: Any, ok: Any, kind: Any, mapped: Pages) -> None:
    address = mapped(0)
    assert 3 == ok(driver.cuMemGetAccess(kind.location, address))
    assert PAGE == ok(driver.cuMemGetAllocationGranularity(kind, driver.CUmemAllocationGranularity_flags(0)))
    handle = ok(driver.cuMemRetainAllocationHandle(address))
    properties = ok(driver.cuMemGetAllocationPropertiesFromHandle(handle))
    assert (0, int(kind.type)) == (properties.location.id, int(properties.type))
    ok(driver.cuMemRelease(handle))
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert 1 == ok(driver.cuDeviceGetAttribute(attribute, 0))


MISUSE = {
    "a size that is no multiple of the granularity": lambda d, k, s: d.cuMemCreate(PAGE + 512, k, 0),
    "no size": lambda d, k, s: d.cuMemAddressReserve(0, 0, 0, 0),
    "an alignment that is no power of two": lambda d, k, s: d.cuMemAddressReserve(PAGE, 3 * PAGE, 0, 0),
    "freeing a part of a range": lambda d, k, s: d.cuMemAddressFree(s, PAGE),
    "unmapping what is not mapped": lambda d, k, s: d.cuMemUnmap(s, PAGE),
    "a handle that is none": lambda d, k, s: d.cuMemMap(s, PAGE, 0, 12345, 0),
    "releasing a handle that is none": lambda d, k, s: d.cuMemRelease(12345),
    "asking where nothing is mapped": lambda d, k, s: d.cuMemRetainAllocationHandle(s),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_an_invalid_value(driver: Any, kind: Any, space: int, misuse: str) -> None:
    assert "CUDA_ERROR_INVALID_VALUE" == MISUSE[misuse](driver, kind, space)[0].name


def test_mappings_may_not_overlap_or_leave_their_range(driver: Any, ok: Any, kind: Any, space: int) -> None:
    handle = ok(driver.cuMemCreate(2 * PAGE, kind, 0))
    ok(driver.cuMemMap(space, 2 * PAGE, 0, handle, 0))
    for address in (space, space + PAGE, space + 3 * PAGE):
        assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemMap(address, 2 * PAGE, 0, handle, 0)[0].name
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemUnmap(space, PAGE)[0].name  # half a handle
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemAddressFree(space, 4 * PAGE)[0].name
    ok(driver.cuMemUnmap(space, 2 * PAGE))
    ok(driver.cuMemRelease(handle))
    assert "CUDA_ERROR_INVALID_VALUE" == driver.cuMemRelease(handle)[0].name


READER = """
import sys
import numpy as np
from cudatool import _driver
_driver.choose("sim"); _driver.initialize()
from cuda.bindings import driver
driver.cuInit(0)
context = driver.cuCtxCreate(None, 0, 0)
posix = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
handle = driver.cuMemImportFromShareableHandle(int(sys.argv[1]), posix)[1]
address = driver.cuMemAddressReserve(PAGE, 0, 0, 0)[1]
access = driver.CUmemAccessDesc()
access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
driver.cuMemMap(address, PAGE, 0, handle, 0)
driver.cuMemSetAccess(address, PAGE, [access], 1)
back = np.zeros(4, np.uint8)
print(driver.cuMemcpyDtoH(back.ctypes.data, address, 4)[0].name, back.tolist())
driver.cuMemsetD8(address, 8, 4)
driver.cuCtxSynchronize()
"""


def test_memory_is_shared_with_another_process_by_file_descriptor(
    driver: Any, ok: Any, kind: Any, mapped: Pages
) -> None:
    address = mapped(0)
    ok(driver.cuMemsetD8(address, 7, 4))
    ok(driver.cuCtxSynchronize())
    handle = ok(driver.cuMemRetainAllocationHandle(address))
    posix = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    file = ok(driver.cuMemExportToShareableHandle(handle, posix, 0))
    program = READER.replace("PAGE", str(PAGE))
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, pass_fds=[file], check=False
    )
    os.close(file)
    ok(driver.cuMemRelease(handle))
    assert "CUDA_SUCCESS [7, 7, 7, 7]" == done.stdout.strip(), done.stderr
    assert [8] * 4 == read(driver, ok, address, 4).tolist()
