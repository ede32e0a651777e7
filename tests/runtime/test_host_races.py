"""Host accesses and annotated calls, from the program to the sanitizer's verdict."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, ManagedMemoryResource

import cudatool as ct
from cudatool import _driver
from cudatool.sanitize import Report, check
from cudatool.trace import read

Checked = Callable[..., AbstractContextManager[list[Report]]]


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    """Return a context manager that records what is inside and then holds the report."""

    @contextmanager
    def record(measure: bool = True) -> Iterator[list[Report]]:
        reports: list[Report] = []
        with ct.record(tmp_path / "t.ctrace", measure_accesses=measure, force=True):
            yield reports
        reports.append(check(read(tmp_path / "t.ctrace")))

    return record


def needs_all_driver_calls() -> None:
    """Skip on a GPU: there, only what cudatool's own runtime calls is recorded."""
    ct.zeros(1)
    chosen = _driver.chosen()
    if chosen is None or chosen.machine is None:
        pytest.skip("what a program itself calls of the driver is seen on the software device only")


def kinds(report: Report) -> list[str]:
    return [str(finding.kind) for finding in (*report.findings, *report.possible)]


@pytest.mark.parametrize("synchronized", [False, True])
def test_pinned_buffer_read_too_early(checked: Checked, synchronized: bool) -> None:
    x = ct.ones(64)
    with checked() as reports:
        stream, host = ct.Stream(), ct.empty_pinned(64)
        stream.wait_stream(ct.current_stream())
        with stream:
            x.get(out=host, blocking=False)
        if synchronized:
            stream.synchronize()
        host.sum()
        stream.synchronize()
    assert ([] if synchronized else ["race-host"]) == kinds(reports[0])
    if not synchronized:
        (finding,) = reports[0].findings
        assert ("read", __file__) == (finding.second.mode, finding.second.stack[0].file)
        assert "synchronize" in finding.repair


@pytest.mark.parametrize("synchronized", [False, True])
def test_pinned_buffer_written_again_too_early(checked: Checked, synchronized: bool) -> None:
    with checked() as reports:
        host, x = ct.pin_memory(np.ones(64, np.float32)), ct.empty(64)
        x.copy_(host, non_blocking=True)
        if synchronized:
            ct.synchronize()
        host[10:20] = 2
        ct.synchronize()
    assert ([] if synchronized else ["race-host"]) == kinds(reports[0])
    if not synchronized:
        (finding,) = reports[0].findings
        assert (host.ctypes.data + 40, 40) == (finding.start, finding.size)


@pytest.mark.parametrize(("column", "races"), [(0, False), (1, True)])
def test_columns_beside_those_of_a_copy_do_not_race(checked: Checked, column: int, races: bool) -> None:
    needs_all_driver_calls()
    x = ct.ones((8, 1))
    ct.synchronize()
    with checked() as reports:
        host = ct.empty_pinned((8, 4))
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch = x.data_ptr(), 4
        copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        copy.dstHost, copy.dstPitch = host.ctypes.data + 4, 16
        copy.WidthInBytes, copy.Height = 4, 8
        (status,) = driver.cuMemcpy2DAsync(copy, ct.Stream().cuda_stream)
        assert not status
        host[:, column] = 1
        ct.synchronize()
    assert (["race-host"] if races else []) == kinds(reports[0])


@pytest.mark.parametrize("synchronized", [False, True])
def test_managed_memory_through_host_view(checked: Checked, synchronized: bool) -> None:
    needs_all_driver_calls()
    Device().set_current()
    with checked() as reports:
        buffer = ManagedMemoryResource().allocate(256, stream=ct.current_stream().core)
        host = ct.host_view(np.from_dlpack(buffer))
        ct.synchronize()
        with ct.Stream() as stream:
            (status,) = driver.cuMemsetD8Async(buffer.handle, 1, 256, stream.cuda_stream)
            assert not status
        if synchronized:
            stream.synchronize()
        host[3]
        ct.synchronize()
    assert ([] if synchronized else ["race-host"]) == kinds(reports[0])
    del host
    buffer.close()
    ct.synchronize()


SOURCE = 'extern "C" __global__ void set(float *x) { x[threadIdx.x] = 1; }'


@pytest.mark.parametrize("ordered", [False, True])
def test_annotated_launches_are_checked_where_nothing_is_measured(checked: Checked, ordered: bool) -> None:
    kernel, x = ct.compile(SOURCE, "set"), ct.zeros(64)
    ct.synchronize()
    with checked(measure=False) as reports:
        first, second = ct.Stream(), ct.Stream()
        with first, ct.annotate(writes=[x[:32]]):
            kernel[1, 32](x)
        if ordered:
            second.wait_stream(first)
        with second, ct.annotate(reads=[x[31:]]):
            kernel[1, 1](x)
    (report,) = reports
    assert (2, 0) == (report.operations, report.unchecked_launches)
    assert ([] if ordered else ["race-raw"]) == kinds(report)


def test_launches_without_annotation_are_not_checked_there(checked: Checked) -> None:
    kernel, x = ct.compile(SOURCE, "set"), ct.zeros(64)
    with checked(measure=False) as reports:
        kernel[1, 32](x)
    assert 1 == reports[0].unchecked_launches


@pytest.mark.parametrize("ordered", [False, True])
def test_host_function_that_says_what_it_touches(checked: Checked, ordered: bool) -> None:
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    with checked() as reports:
        host, x = ct.empty_pinned(64), ct.ones(64)
        first, second = ct.Stream(), ct.Stream()
        ct.synchronize()
        with ct.annotate(writes=[host], stream=first):
            pointer = ctypes.cast(run, ctypes.c_void_p).value
            (status,) = driver.cuLaunchHostFunc(first.cuda_stream, driver.CUhostFn(pointer), 0)
            assert not status
        if ordered:
            second.wait_stream(first)
        with second:
            x.copy_(host, non_blocking=True)
        ct.synchronize()
    assert ([] if ordered else ["race-raw"]) == kinds(reports[0])


PAGE = 4096


@contextmanager
def plain_pinned(size: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the address of pinned memory of the driver, and an ordinary view of it."""
    Device().set_current()
    address = int(_ok(driver.cuMemHostAlloc(size, 0)))
    yield address, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    _ok(driver.cuMemFreeHost(address))


def _ok(answer: tuple) -> int:
    assert not answer[0], answer[0]
    return answer[1] if len(answer) > 1 else 0


READS = {
    # bytes that are read while a copy to [0, 2 pages) of 4 pages is pending -> whether that is a race
    "the first byte": (0, 1, True),
    "the last byte": (2 * PAGE - 1, 2 * PAGE, True),
    "all after it": (2 * PAGE, 4 * PAGE, False),
}


@pytest.mark.parametrize("what", READS)
def test_plain_read_of_a_pending_target_races_to_the_page(checked: Checked, what: str) -> None:
    needs_all_driver_calls()
    start, stop, races = READS[what]
    x = ct.ones(4 * PAGE, dtype=np.uint8)
    ct.synchronize()
    with checked() as reports, plain_pinned(4 * PAGE) as (address, view):
        stream = ct.Stream()
        _ok(driver.cuMemcpyDtoHAsync(address, x.data_ptr(), 2 * PAGE, stream.cuda_stream))
        view[start:stop].sum()
        stream.synchronize()
        assert view[: 2 * PAGE].all() and not view[2 * PAGE :].any()
    assert (["race-host"] if races else []) == kinds(reports[0])
    if races:
        (finding,) = reports[0].findings
        assert ("write", "read") == (finding.first.mode, finding.second.mode)
        assert (start // PAGE * PAGE, PAGE) == (finding.start - address, finding.size)


def test_part_of_a_page_that_others_use_is_not_watched(checked: Checked) -> None:
    needs_all_driver_calls()
    x = ct.ones(64)
    ct.synchronize()
    with checked() as reports, plain_pinned(PAGE) as (address, view):
        view[:] = 7
        stream = ct.Stream()
        _ok(driver.cuMemcpyDtoHAsync(address, x.data_ptr(), 256, stream.cuda_stream))
        assert (view[256:] == 7).all()
        stream.synchronize()
    assert [] == kinds(reports[0])


def test_what_other_work_and_the_tool_touch_is_not_the_hosts(checked: Checked) -> None:
    needs_all_driver_calls()
    x, y = ct.ones(2 * PAGE, dtype=np.uint8), ct.zeros(2 * PAGE, dtype=np.uint8)
    copy = ct.compile('extern "C" __global__ void c(char *y, char *x) { y[threadIdx.x] = x[threadIdx.x]; }', "c")
    ct.synchronize()
    with checked() as reports, plain_pinned(4 * PAGE) as (address, view):
        stream, waiting = ct.Stream(), ct.Stream()
        handle = stream.cuda_stream
        for _ in range(3):
            with stream:
                copy[1, 32](y, np.uint64(address + 2 * PAGE))  # keeps all of the allocation to compare it
            _ok(driver.cuMemcpyDtoHAsync(address, x.data_ptr(), PAGE, handle))
            _ok(driver.cuMemcpyDtoHAsync(address + PAGE, x.data_ptr(), PAGE, handle))
            _ok(driver.cuMemcpyHtoDAsync(y.data_ptr(), address, PAGE, handle))
            _ok(driver.cuMemcpyDtoHAsync(address, y.data_ptr(), PAGE, handle))
            waiting.synchronize()
            stream.query()
            stream.synchronize()
            assert view[: 2 * PAGE].all()
        view[:] = 0
    assert [] == kinds(reports[0])


def test_pending_target_keeps_what_earlier_work_still_reads(checked: Checked) -> None:
    needs_all_driver_calls()
    source = 'extern "C" __global__ void c(int *y, const int *x) { y[threadIdx.x] = x[threadIdx.x]; }'
    copy, x, y = ct.compile(source, "c"), ct.zeros(32, dtype=np.int32), ct.zeros(32, dtype=np.int32)
    ct.synchronize()
    with plain_pinned(PAGE) as (address, view):
        view[:] = 1
        stream = ct.Stream()
        with stream:
            copy[1, 32](y, np.uint64(address))
        _ok(driver.cuMemcpyDtoHAsync(address, x.data_ptr(), 128, stream.cuda_stream))
        stream.synchronize()
        assert (y.get() == 0x01010101).all() and not view[:128].any()
