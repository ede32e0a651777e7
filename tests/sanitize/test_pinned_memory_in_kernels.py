"""What kernels do to the host's memory: races of their threads and of streams, however a kernel finds the memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver

import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.sanitize.findings import GapKind, Outcome, Report
from cudatool.sim import machine as state
from cudatool.trace import reader
from cudatool.trace.events import AccessFlag, Kind

pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

N = 256
SOURCE = """
extern "C" __global__ void mirror(float **table, float *x, int barrier) {
    if (table) x = table[1];
    float mine = x[threadIdx.x];
    if (barrier) __syncthreads();
    x[255 - threadIdx.x] = mine + 1;
}
"""


def ok(result):
    assert not result[0], result[0]
    return result[1] if len(result) > 1 else None


@pytest.fixture(autouse=True)
def context():
    """Calls of the driver's own API need a current context, which an earlier test may have ended."""
    ok(driver.cuCtxPushCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    yield
    ok(driver.cuCtxPopCurrent())
    ok(driver.cuDevicePrimaryCtxRelease(0))


@contextmanager
def _memory(kind: str) -> Iterator[int]:
    """Give 256 numbers in memory of the host that kernels can use."""
    if kind == "pinned":
        address = ok(driver.cuMemHostAlloc(4 * N, 0))
        yield address
        ok(driver.cuMemFreeHost(address))
    elif kind == "registered":
        ordinary = np.zeros(N + 1, np.float32)
        address = ordinary.ctypes.data + 4
        ok(driver.cuMemHostRegister(address, 4 * N, 0))
        yield address
        ok(driver.cuMemHostUnregister(address))
    else:
        address = int(ok(driver.cuMemAllocManaged(4 * N, 1)))
        yield address
        ok(driver.cuMemFree(address))


def _launch(stream: ct.Stream, address: int, *, by_table: bool, barrier: bool = True) -> ct.Array:
    kernel, table = ct.compile(SOURCE, "mirror"), ct.asarray(np.array([0, address], np.uint64))
    ct.synchronize()
    pointers = (table, np.uint64(0)) if by_table else (np.uint64(0), np.uint64(address))
    ct.launch(stream, ct.LaunchConfig(grid=1, block=N), kernel, *pointers, np.int32(barrier))
    return table


def _report(path: Path, *checks: str) -> Report:
    return check(reader.read(path), checks)


@pytest.mark.parametrize("by_table", [False, True], ids=["argument", "table"])
@pytest.mark.parametrize("kind", ["pinned", "registered", "managed"])
@pytest.mark.parametrize("barrier", [False, True], ids=["racy", "clean"])
def test_threads_that_race_in_memory_of_the_host_are_found(tmp_path, kind, by_table, barrier):
    path = tmp_path / "run.ctrace"
    with record(path, checks=["racecheck"]), _memory(kind) as address:
        table = _launch(ct.Stream(), address, by_table=by_table, barrier=barrier)
        ct.synchronize()
        del table
    report = _report(path, "racecheck")
    if barrier:
        assert (Outcome.CLEAN, ()) == (report.outcome, report.gaps)
    else:
        (found,) = report.on_device
        assert "kernel-race" == found.kind.value
        assert address <= found.address < address + 4 * N


@pytest.mark.parametrize("by_table", [False, True], ids=["argument", "table"])
@pytest.mark.parametrize("ordered", [False, True], ids=["racy", "clean"])
def test_streams_that_race_in_pinned_memory_are_found(tmp_path, by_table, ordered):
    path = tmp_path / "run.ctrace"
    one, other = ct.Stream(), ct.Stream()
    with record(path, measure_accesses=True), _memory("pinned") as address:
        tables = [_launch(one, address, by_table=by_table)]
        if ordered:
            other.wait_stream(one)
        target = ct.empty(N)
        ok(driver.cuMemcpyHtoDAsync(target.data_ptr(), address, 4 * N, other.cuda_stream))
        ct.synchronize()
        del tables
    findings = _report(path, "race").findings
    assert ([] if ordered else ["race-raw"]) == [found.kind.value for found in findings]


def test_what_a_kernel_accesses_of_pinned_memory_is_measured_to_the_byte(tmp_path):
    path = tmp_path / "run.ctrace"
    source = 'extern "C" __global__ void some(char **t) { t[0][7] = t[0][9]; }'
    kernel = ct.compile(source, "some")
    with record(path, measure_accesses=True), _memory("pinned") as address:
        table = ct.asarray(np.array([address], np.uint64))
        ct.launch(ct.current_stream(), ct.LaunchConfig(grid=1, block=1), kernel, table)
        ct.synchronize()
    rows = reader.read(path).of_kind(Kind.ACCESS)
    rows = rows[(rows["address"] >= address) & (rows["address"] < address + 4 * N)]
    found = [tuple(row) for row in rows[["address", "size", "flags"]].tolist()]
    assert [(address + 7, 1, AccessFlag.WRITE), (address + 9, 1, AccessFlag.READ)] == found


def test_pinned_memory_for_which_there_is_no_room_is_a_gap(tmp_path, monkeypatch):
    path = tmp_path / "run.ctrace"
    arena = state.machine.arena
    monkeypatch.setattr(arena, "before", range(arena.base - 4096, arena.base))
    monkeypatch.setattr(state.machine, "shadow", None)
    monkeypatch.setattr(state.machine, "footprint", None)
    ordinary = np.zeros(8192, np.uint8)
    ok(driver.cuMemHostRegister(ordinary.ctypes.data, 8192, 0))
    with record(path, measure_accesses=True, checks=["racecheck"]):
        table = _launch(ct.Stream(), ordinary.ctypes.data, by_table=True, barrier=False)
        ct.synchronize()
        del table
    ok(driver.cuMemHostUnregister(ordinary.ctypes.data))
    report = _report(path, "race", "racecheck")
    assert Outcome.PARTLY_CHECKED is report.outcome
    (gap,) = report.gaps
    assert (GapKind.UNSEEN, ("accesses-not-known",)) == (gap.kind, gap.codes)
    assert "mirror" in gap.names[0]
    assert "4 KiB" in gap.names[0]


def test_a_copy_to_pinned_memory_waits_for_a_kernel_that_finds_it_by_a_table():
    stream = ct.Stream()
    with _memory("pinned") as address:
        memory = np.ctypeslib.as_array((ctypes.c_float * N).from_address(address))
        source = ct.zeros(N)
        ct.synchronize()
        memory[:] = 5
        kernel = ct.compile(
            'extern "C" __global__ void add(float **t, float *out) { out[threadIdx.x] = t[0][threadIdx.x] + 1; }', "add"
        )
        table, out = ct.asarray(np.array([address], np.uint64)), ct.zeros(N)
        ct.synchronize()
        ct.launch(stream, ct.LaunchConfig(grid=1, block=N), kernel, table, out)
        ok(driver.cuMemcpyDtoHAsync(address, source.data_ptr(), 4 * N, stream.cuda_stream))
        stream.synchronize()
        assert (6, 0) == (out.get().max(), memory.max())
