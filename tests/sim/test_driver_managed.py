"""Managed memory: where ranges are said to be, and calls that are refused before anything has changed."""

from __future__ import annotations

import pytest

PAGE = 4096
HOST = (2, 0)  # CU_MEM_LOCATION_TYPE_HOST


@pytest.fixture
def managed(driver, ok):
    """The address of four pages, and what the driver says of each: to which place it was prefetched last."""
    address = int(ok(driver.cuMemAllocManaged(4 * PAGE, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)))
    type_ = driver.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE
    id_ = driver.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_ID

    def places():
        found = []
        for page in range(4):
            at = address + page * PAGE
            kind, number = (int(ok(driver.cuMemRangeGetAttribute(4, one, at, PAGE))) for one in (type_, id_))
            found.append((kind, number if kind == 1 else 0))
        return found

    yield address, places
    ok(driver.cuCtxSynchronize())
    ok(driver.cuMemFree(address))


def pages(driver, address, *numbers):
    return [driver.CUdeviceptr(address + number * PAGE) for number in numbers]


def location(driver, kind, number=0):
    made = driver.CUmemLocation()
    made.type, made.id = driver.CUmemLocationType(kind), number
    return made


@pytest.mark.parametrize("name", ["cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"])
def test_each_range_of_a_batch_goes_to_the_location_whose_index_it_follows(driver, ok, managed, name):
    address, places = managed
    before = places()
    ranges = pages(driver, address, 0, 1, 3)
    to = [location(driver, 1, 0), location(driver, 2)]
    ok(getattr(driver, name)(ranges, [PAGE] * 3, 3, to, [0, 2], 2, 0, 0))
    assert [(1, 0), (1, 0), before[2], HOST] == places()


def test_a_batch_that_is_discarded_is_prefetched_nowhere(driver, ok, managed):
    address, places = managed
    ok(driver.cuMemPrefetchAsync(address, 4 * PAGE, location(driver, 1, 0), 0, 0))
    ok(driver.cuMemDiscardBatchAsync(pages(driver, address, 0, 1), [PAGE] * 2, 2, 0, 0))
    assert [(1, 0)] * 4 == places()


@pytest.mark.parametrize("name", ["cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"])
@pytest.mark.parametrize(
    ("indices", "flags"),
    [([1, 2], 0), ([0, 0], 0), ([0, 3], 0), ([0, 1, 2, 2], 0), ([], 0), ([0, 1], 1)],
    ids=["begin after 0", "do not ascend", "behind the last range", "more than ranges", "none", "flags"],
)
def test_a_batch_whose_locations_fit_no_ranges_is_refused_whole(driver, managed, name, indices, flags):
    address, places = managed
    before = places()
    to = [location(driver, 1, 0) for _ in indices]
    (status,) = getattr(driver, name)(
        pages(driver, address, 0, 1, 2), [PAGE] * 3, 3, to, indices, len(indices), flags, 0
    )
    assert "CUDA_ERROR_INVALID_VALUE" == status.name
    assert before == places()


@pytest.mark.parametrize("name", ["cuMemPrefetchBatchAsync", "cuMemDiscardAndPrefetchBatchAsync"])
def test_no_range_of_a_batch_is_prefetched_if_one_is_not_managed(driver, ok, managed, name):
    address, places = managed
    before, plain = places(), int(ok(driver.cuMemAlloc(PAGE)))
    to, ranges = [location(driver, 1, 0)], [driver.CUdeviceptr(address), driver.CUdeviceptr(plain)]
    (status,) = getattr(driver, name)(ranges, [PAGE] * 2, 2, to, [0], 1, 0, 0)
    assert "CUDA_ERROR_INVALID_VALUE" == status.name
    (status,) = driver.cuMemDiscardBatchAsync(ranges, [PAGE] * 2, 2, 0, 0)
    assert "CUDA_ERROR_INVALID_VALUE" == status.name
    assert before == places()
    ok(driver.cuMemFree(plain))


@pytest.mark.parametrize(("count", "flags"), [(0, 0), (1, 1)])
def test_a_discard_of_nothing_or_with_flags_is_refused(driver, managed, count, flags):
    address, _ = managed
    (status,) = driver.cuMemDiscardBatchAsync(pages(driver, address, 0), [PAGE], count, flags, 0)
    assert "CUDA_ERROR_INVALID_VALUE" == status.name


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [(1, 7, "INVALID_DEVICE"), (3, 5, "INVALID_VALUE"), (3, 0, ""), (4, 0, ""), (2, 0, "")],
    ids=["no such device", "no such node", "the node", "the current node", "the host"],
)
def test_a_place_that_there_is_not_is_refused(driver, ok, managed, kind, number, expected):
    address, places = managed
    before = places()
    (status,) = driver.cuMemPrefetchAsync(address, PAGE, location(driver, kind, number), 0, 0)
    assert (expected or "CUDA_SUCCESS") == status.name.removeprefix("CUDA_ERROR_")
    assert (before == places()) == bool(expected)
