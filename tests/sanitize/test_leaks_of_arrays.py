"""CUDA arrays and memory of cuMemCreate are allocations: what is never given back is a leak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver

import cudatool as ct
from cudatool import _driver
from cudatool.recording import record
from cudatool.sanitize import FindingKind, check
from cudatool.trace import reader


def _ok(result: tuple[Any, ...]) -> Any:
    assert result[0] == driver.CUresult.CUDA_SUCCESS
    return result[1] if len(result) > 1 else None


def test_array_that_is_never_destroyed_leaks(tmp_path: Path) -> None:
    if _driver.initialize().kind != "sim":
        pytest.skip("driver calls are recorded on the software device")
    ct.synchronize()  # makes the context current
    description = driver.CUDA_ARRAY_DESCRIPTOR()
    description.Width, description.Height = 256, 4
    description.Format, description.NumChannels = driver.CUarray_format.CU_AD_FORMAT_FLOAT, 1
    with record(tmp_path / "run.ctrace"):
        _ok(driver.cuArrayDestroy(_ok(driver.cuArrayCreate(description))))
        kept = _ok(driver.cuArrayCreate(description))
    (finding,) = check(reader.read(tmp_path / "run.ctrace"), ["leak"]).on_device
    _ok(driver.cuArrayDestroy(kept))
    assert finding.kind is FindingKind.LEAK
    assert finding.size >= 256 * 4 * 4
    assert finding.stack[0].function.endswith("test_array_that_is_never_destroyed_leaks")


def test_memory_of_mem_create_leaks_until_its_last_handle_and_its_last_mapping_are_gone(tmp_path: Path) -> None:
    if _driver.initialize().kind != "sim":
        pytest.skip("driver calls are recorded on the software device")
    ct.synchronize()
    kind = driver.CUmemAllocationProp()
    kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    page = _ok(driver.cuMemGetAllocationGranularity(kind, driver.CUmemAllocationGranularity_flags(0)))
    with record(tmp_path / "run.ctrace"):
        place = int(_ok(driver.cuMemAddressReserve(3 * page, 0, 0, 0)))
        unmapped, mapped, given_back = (_ok(driver.cuMemCreate(page, kind, 0)) for _ in range(3))
        for index, handle in enumerate((unmapped, mapped, given_back)):
            _ok(driver.cuMemMap(place + index * page, page, 0, handle, 0))
        _ok(driver.cuMemUnmap(place, page))  # its handle is left
        _ok(driver.cuMemRelease(mapped))  # its mapping is left
        _ok(driver.cuMemRelease(given_back))
        _ok(driver.cuMemUnmap(place + 2 * page, page))
    (finding,) = check(reader.read(tmp_path / "run.ctrace"), ["leak"]).on_device
    _ok(driver.cuMemRelease(unmapped))
    _ok(driver.cuMemUnmap(place + page, page))
    _ok(driver.cuMemAddressFree(place, 3 * page))
    assert (2, 2 * page) == (finding.count, finding.size)
