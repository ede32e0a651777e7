"""A call that enqueues work, and that the collector has no report for, is a gap and never nothing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import pytest

from cudatool import recording, sanitize
from cudatool.collect import sim_driver, sim_graph_calls, sim_memory, sim_streams, sim_work
from cudatool.sanitize.findings import GapKind
from cudatool.sim import api
from cudatool.sim.abi import ENTRIES
from cudatool.trace.events import Kind
from cudatool.trace.reader import read

_PTX = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\0"


def ok(result: tuple[Any, ...]) -> Any:
    assert 0 == result[0], result
    return result[1] if len(result) == 2 else None


def gaps_of_a_launch(folder: Path) -> list[tuple[str, ...]]:
    """Return texts and codes of what is a gap in a recording of one launch."""
    path = folder / "t.ctrace"
    with recording.record(path, device="sim"):
        from cuda.bindings import driver

        ok(driver.cuInit(0))
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        stream = ok(driver.cuStreamCreate(1))
        module = ok(driver.cuModuleLoadData(_PTX))
        ok(driver.cuLaunchKernel(ok(driver.cuModuleGetFunction(module, b"nothing")), *[1] * 6, 0, stream, 0, 0))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuStreamDestroy(stream))
        ok(driver.cuModuleUnload(module))
        ok(driver.cuCtxSetCurrent(0))  # else the next test begins with a context that is gone
        ok(driver.cuDevicePrimaryCtxRelease(0))
    gaps = sanitize.check(read(path)).gaps
    return [(*gap.names, *gap.codes) for gap in gaps if gap.kind is GapKind.UNSEEN]


def test_a_call_that_the_collector_reports_is_no_gap(tmp_path: Path) -> None:
    assert [] == gaps_of_a_launch(tmp_path)


def test_a_call_without_a_report_is_a_gap_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sim_driver._REPORT_OFTEN, "cuLaunchKernel")
    said = "cuLaunchKernel: what it enqueues is not recorded", "call-not-recorded"
    assert [said] == gaps_of_a_launch(tmp_path)


def test_each_report_is_of_a_call_that_the_device_has_and_no_call_has_two() -> None:
    tables = (sim_streams.REPORTS, sim_memory.REPORTS, sim_work.REPORTS, sim_graph_calls.REPORTS)
    names = [name for table in (*tables, sim_driver._REPORT_OFTEN) for name in table]
    assert len(names) == len(set(names))
    for module in iter_modules(api.__path__, "cudatool.sim.api."):
        import_module(module.name)
    assert set(names) - ENTRIES.keys() == set()


def test_a_launch_that_is_refused_is_a_gap_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    with recording.record(path, device="sim"):
        from cuda.bindings import driver

        ok(driver.cuInit(0))
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        module = ok(driver.cuModuleLoadData(_PTX))
        function = ok(driver.cuModuleGetFunction(module, b"nothing"))
        assert 1 == driver.cuLaunchKernel(function, 1, 1, 1, 4096, 1, 1, 0, 0, 0, 0)[0]
        ok(driver.cuModuleUnload(module))
        assert driver.cuStreamDestroy(0)[0], "and of this call no more is known than its error code"
        ok(driver.cuCtxSetCurrent(0))
        ok(driver.cuDevicePrimaryCtxRelease(0))
    trace = read(path)
    refused, destroyed = (trace.names[name] for name in trace.of_kind(Kind.WARNING)["name"].tolist())
    assert refused.startswith(
        "cuLaunchKernel returned CUDA_ERROR_INVALID_VALUE: nothing: the block (4096, 1, 1) is not"
    )
    assert "cuStreamDestroy returned CUDA_ERROR_INVALID_HANDLE" == destroyed
    gaps = [(gap.names, gap.codes) for gap in sanitize.check(trace).gaps if gap.kind is GapKind.UNSEEN]
    assert [((refused,), ("call-failed",))] == gaps


def test_discarding_memory_is_a_gap(tmp_path: Path) -> None:
    """Who reads it in no order with that may find anything, but no event says what was discarded."""
    path = tmp_path / "t.ctrace"
    with recording.record(path, device="sim"):
        from cuda.bindings import driver

        ok(driver.cuInit(0))
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        stream, memory = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAllocManaged(4096, 1))
        ok(driver.cuMemDiscardBatchAsync([memory], [4096], 1, 0, stream))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuMemFree(memory))
        ok(driver.cuStreamDestroy(stream))
        ok(driver.cuCtxSetCurrent(0))  # else the next test begins with a context that is gone
        ok(driver.cuDevicePrimaryCtxRelease(0))
    gaps = [(*gap.names, *gap.codes) for gap in sanitize.check(read(path)).gaps if gap.kind is GapKind.UNSEEN]
    assert [("cuMemDiscardBatchAsync: what it enqueues is not recorded", "call-not-recorded")] == gaps


def test_nodes_that_order_by_values_in_memory_are_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "t.ctrace"
    with recording.record(path, device="sim"):
        from cuda.bindings import driver

        ok(driver.cuInit(0))
        ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
        stream, word = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAlloc(4))
        ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        ok(driver.cuStreamWriteValue32(stream, word, 3, 0))
        graph = ok(driver.cuStreamEndCapture(stream))
        executable = ok(driver.cuGraphInstantiate(graph, 0))
        ok(driver.cuGraphLaunch(executable, stream))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuGraphExecDestroy(executable))
        ok(driver.cuGraphDestroy(graph))
        ok(driver.cuMemFree(word))
        ok(driver.cuStreamDestroy(stream))
        ok(driver.cuCtxSetCurrent(0))  # else the next test begins with a context that is gone
        ok(driver.cuDevicePrimaryCtxRelease(0))
    gaps = [(*gap.names, *gap.codes) for gap in sanitize.check(read(path)).gaps if gap.kind is GapKind.UNSEEN]
    text = "batch memory operation nodes: what they write and wait for is not recorded"
    assert [(text, "nodes-not-recorded")] == gaps


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ("trap;", "work after CUDA_ERROR_LAUNCH_FAILED (k: block (0, 0, 0), thread 0: trap at"),
        (
            ".reg .u32 %t; .reg .pred %p; mov.u32 %t, %tid.x; setp.lt.u32 %p, %t, 32; @%p bar.sync 1, 64; @!%p bar.sync 2, 64;",
            "work after CUDA_ERROR_LAUNCH_TIMEOUT (k: no thread can go on: block (0, 0, 0): thread",
        ),
    ],
)
def test_what_a_failed_kernel_keeps_from_running_is_a_gap(tmp_path: Path, body: str, name: str) -> None:
    """The program may go on, its kernels do not: such a recording is not clean."""
    path = tmp_path / "t.ctrace"
    with recording.record(path, device="sim"):
        from cuda.bindings import driver

        ok(driver.cuInit(0))
        context = ok(driver.cuCtxCreate(None, 0, 0))
        module = ok(driver.cuModuleLoadData(_PTX.replace(b"nothing", b"k").replace(b"ret;", f"{body} ret;".encode())))
        kernel = ok(driver.cuModuleGetFunction(module, b"k"))
        ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, 0, 0))
        for _ in range(2):
            assert driver.cuCtxSynchronize()[0] != 0
            driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, 0, 0)
        ok(driver.cuCtxDestroy(context))
    (gap,) = (text for gap in sanitize.check(read(path)).gaps if gap.kind is GapKind.UNSEEN for text in gap.names)
    assert gap.startswith(name)


@pytest.mark.parametrize(
    ("body", "thread", "text"),
    [
        ("setp.eq.u32 %p, %t, 5; @%p trap;", (5, 0, 0), "trap"),
        (
            "setp.lt.u32 %p, %t, 32; @%p bar.sync 1, 64;",
            (),
            "no thread can go on: block (0, 0, 0): threads 0-31 at bar.",
        ),
    ],
)
def test_a_kernel_that_fails_is_a_finding_of_memcheck_though_the_program_goes_on(
    tmp_path: Path, body: str, thread: tuple[int, ...], text: str
) -> None:
    """Its error comes from a later call, which the program may not look at."""
    path, body = tmp_path / "t.ctrace", f".reg .u32 %t; .reg .pred %p; mov.u32 %t, %tid.x; {body} ret;"
    with recording.record(path, device="sim", checks=["memcheck"]):
        from cuda.bindings import driver

        ok(driver.cuInit(0))
        context = ok(driver.cuCtxCreate(None, 0, 0))
        module = ok(driver.cuModuleLoadData(_PTX.replace(b"nothing", b"k").replace(b"ret;", body.encode())))
        kernel = ok(driver.cuModuleGetFunction(module, b"k"))
        ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, 0, 0))
        driver.cuCtxSynchronize()
        ok(driver.cuCtxDestroy(context))
    report = sanitize.check(read(path), ["memcheck"])
    (found,) = report.on_device
    assert ("kernel-error", "kernel k", thread) == (found.kind, found.operation, found.thread)
    assert found.text.startswith(text)
    assert [GapKind.UNSEEN] == [gap.kind for gap in report.gaps]


def test_a_kernel_that_takes_longer_than_it_may_is_no_finding() -> None:
    from cudatool.sim import jit
    from cudatool.sim.observe.checkers import Checkers

    class Memcheck(Checkers):
        def __init__(self) -> None:
            self.shadow = SimpleNamespace(kinds=jit.Instrument.MEMCHECK)

    kernel = SimpleNamespace(name="k", source_of=lambda line: None)
    for error, kinds in ((jit.KernelTimeout("k: too long"), []), (jit.KernelTrap("k: trap"), ["kernel-error"])):
        operation = SimpleNamespace(findings=[])
        Memcheck().ended(operation, error, str(error), kernel, (1, 1, 1))
        assert kinds == [found.kind for found in operation.findings]
