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
