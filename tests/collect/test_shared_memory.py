"""Memory that other processes can use: a race with them is not recorded, and no check says that there is none."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudatool
from cudatool import recording, sanitize
from cudatool.sanitize.findings import Gap, GapKind, Outcome
from cudatool.trace.reader import read

_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_SIZE = 1 << 21


def ok(result: tuple[Any, ...]) -> Any:
    assert 0 == result[0], result
    return result[1] if len(result) == 2 else None


@pytest.fixture(autouse=True)
def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests want work to wait for them."""
    from cudatool import _driver

    _driver.choose("sim")
    machine = _driver.initialize().machine
    assert machine is not None
    monkeypatch.setattr(machine.scheduler, "_is_shared", False)


@pytest.fixture
def driver() -> Any:
    from cuda.bindings import driver

    ok(driver.cuInit(0))
    ok(driver.cuCtxPushCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    yield driver
    ok(driver.cuCtxPopCurrent())
    ok(driver.cuDevicePrimaryCtxRelease(0))


def by_ipc(driver: Any) -> None:
    address = ok(driver.cuMemAlloc(1000))
    ok(driver.cuIpcGetMemHandle(address))
    ok(driver.cuMemsetD8(address, 0, 1000))
    ok(driver.cuMemFree(address))


def by_a_generic_handle(driver: Any) -> None:
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.requestedHandleTypes = driver.CUmemAllocationHandleType(_DESCRIPTOR)
    handle = ok(driver.cuMemCreate(_SIZE, wanted, 0))
    kind = driver.CUmemAllocationHandleType(_DESCRIPTOR)
    opened = ok(driver.cuMemExportToShareableHandle(handle, kind, 0))
    ok(driver.cuMemRelease(ok(driver.cuMemImportFromShareableHandle(opened, kind))))
    os.close(opened)
    ok(driver.cuMemRelease(handle))


def from_a_pool(driver: Any) -> None:
    wanted = driver.CUmemPoolProps()
    wanted.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.handleTypes = driver.CUmemAllocationHandleType(_DESCRIPTOR)
    pool = ok(driver.cuMemPoolCreate(wanted))
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAllocFromPoolAsync(1000, pool, stream))
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuMemPoolExportPointer(address))
    ok(driver.cuMemFreeAsync(address, stream))
    ok(driver.cuStreamSynchronize(stream))
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemPoolDestroy(pool))


def shared(path: Path, program: Callable[[], None]) -> Gap:
    """Return what a recording of a program says of shared memory."""
    with recording.record(path, device="sim", measure_accesses=True):
        program()
    found = (gap for gap in sanitize.check(read(path)).gaps if gap.kind is GapKind.SHARED_MEMORY)
    return next(found, Gap(GapKind.SHARED_MEMORY, 0, ()))


@pytest.mark.parametrize(
    ("share", "size", "calls"),
    [
        (by_ipc, 1000, ("cuIpcGetMemHandle",)),
        (by_a_generic_handle, _SIZE, ("cuMemExportToShareableHandle", "cuMemImportFromShareableHandle")),
        (from_a_pool, 1000, ("cuMemPoolExportPointer",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_memory_that_a_program_shares_is_a_gap(
    tmp_path: Path, driver: Any, share: Callable[[Any], None], size: int, calls: tuple[str, ...]
) -> None:
    before = shared(tmp_path / "before.ctrace", lambda: None)  # by other tests of this process
    path = tmp_path / "t.ctrace"
    with recording.record(path, device="sim", measure_accesses=True):
        share(driver)
        stream = ok(driver.cuStreamCreate(1))
        address = ok(driver.cuMemAlloc(8))
        ok(driver.cuMemsetD8Async(address, 0, 8, stream))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuMemFree(address))
        ok(driver.cuStreamDestroy(stream))
    report = sanitize.check(read(path))
    (gap,) = report.gaps
    assert gap.kind is GapKind.SHARED_MEMORY
    assert gap.count == size + before.count
    assert set(gap.names) == {*calls, *before.names}
    assert Outcome.PARTLY_CHECKED is report.outcome


def test_an_array_that_is_lent_is_a_gap_once(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    with recording.record(path, device="sim", measure_accesses=True):
        array = cudatool.zeros(10, dtype=np.float32)
        cudatool.ipc_handle(array)
        cudatool.ipc_handle(array)
        del array
    (gap,) = (gap for gap in sanitize.check(read(path)).gaps if gap.kind is GapKind.SHARED_MEMORY)
    assert (1 << 21, ("cuIpcGetMemHandle",)) == (gap.count, gap.names)


def test_memory_shared_before_the_recording_is_a_gap(tmp_path: Path, driver: Any) -> None:
    address = ok(driver.cuMemAlloc(1000))
    ok(driver.cuIpcGetMemHandle(address))
    path = tmp_path / "t.ctrace"
    with recording.record(path, device="sim", measure_accesses=True):
        ok(driver.cuMemsetD8(address, 0, 1000))
    (gap,) = (gap for gap in sanitize.check(read(path)).gaps if gap.kind is GapKind.SHARED_MEMORY)
    assert gap.count >= 1000
    assert "cuIpcGetMemHandle" in gap.names
    ok(driver.cuMemFree(address))


def test_initcheck_takes_memory_that_others_may_write_as_written(tmp_path: Path, driver: Any) -> None:
    path = tmp_path / "t.ctrace"
    found = []
    for is_shared in (False, True):
        with recording.record(path, device="sim", checks=["initcheck"], force=True):
            address = ok(driver.cuMemAlloc(1000))
            if is_shared:
                ok(driver.cuIpcGetMemHandle(address))
            target = (ctypes.c_char * 1000)()
            ok(driver.cuMemcpyDtoH(ctypes.addressof(target), address, 1000))
            ok(driver.cuMemFree(address))
        found.append([one.kind.value for one in sanitize.check(read(path), ["initcheck"]).on_device])
    assert [["uninitialized"], []] == found
