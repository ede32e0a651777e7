"""Volatile accesses of a warp's lanes that nothing orders are no race, and are not called clean either."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.sanitize.coverage import gap_what, gap_why
from cudatool.sanitize.findings import GapKind, Outcome, Report
from cudatool.trace import reader

pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

SUM = """
template <class T> __global__ void sum(T *x) {
    __shared__ volatile T part[64];
    int t = threadIdx.x;
    part[t] = x[t];
    __syncthreads();
    if (t < 32) part[t] += part[t + 32];
    %(then)s
    if (t < 16) part[t] += part[t + 16];
    __syncthreads();
    x[t] = part[t];
}"""
BETWEEN_WARPS = """
extern "C" __global__ void turns(float *x) {
    __shared__ volatile int turn;
    if (threadIdx.x == 0) turn = 1;
    if (threadIdx.x == 32) while (!turn) { }
    x[threadIdx.x] = 1;
}"""
SAME_FLAG = """
extern "C" __global__ void is_found(float *x) {
    __shared__ volatile int found;
    if (x[threadIdx.x] == 1) found = 1;
    __syncthreads();
    x[threadIdx.x] = found;
}"""
COUNT = """
extern "C" __global__ void count(float *x) {
    __shared__ volatile int n;
    if (threadIdx.x == 0) n = 0;
    __syncthreads();
    atomicAdd((int *)&n, 1);
    %(then)s
    if (threadIdx.x < 32) x[threadIdx.x] = n;
}"""
RESET = """
extern "C" __global__ void reset(float *x) {
    __shared__ volatile int n;
    if (threadIdx.x == 31) n = 0;
    %(then)s
    if (threadIdx.x < 32) x[threadIdx.x] = atomicAdd((int *)&n, 1);
}"""
COUNT_ALONE = """
extern "C" __global__ void count(float *x) {
    __shared__ int n;
    if (threadIdx.x == 0) n = 0;
    __syncthreads();
    x[threadIdx.x] = atomicAdd(&n, 1) + atomicAdd(&n, 1);
}"""
OWN = """
extern "C" __global__ void own(float *x) {
    __shared__ volatile float part[64];
    part[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = part[threadIdx.x];
}"""


def checked(path: Path, source: str, launches: int = 1) -> Report:
    name = source.split("void ")[1].split("(")[0]
    kernel = ct.compile(source, name if 'extern "C"' in source else f"{name}<float>")
    with record(path, checks=["racecheck"]):
        x = ct.ones(64, np.float32)
        for _ in range(launches):
            ct.launch(ct.current_stream(), ct.LaunchConfig(grid=1, block=64), kernel, x)
        ct.synchronize()
    return check(reader.read(path), ("racecheck",))


def test_volatile_sum_of_a_warp_in_step_is_partly_checked(tmp_path: Path) -> None:
    report = checked(tmp_path / "run.ctrace", SUM % {"then": ""}, launches=2)
    assert (report.outcome, report.on_device) == (Outcome.PARTLY_CHECKED, ())
    (gap,) = report.gaps
    assert (gap.kind, gap.count, gap.whole) == (GapKind.WARPS_IN_STEP, 2, False)
    assert gap_what(gap) == "the order of volatile accesses within warps in 2 launches"
    (name,) = gap.names
    assert name.startswith("lanes of a warp in sum<float> read shared memory that another lane writes")
    assert name in gap_why(gap)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (COUNT % {"then": ""}, {("a volatile read", 8), ("an atomic update", 6)}),
        (RESET % {"then": ""}, {("a volatile write", 4), ("an atomic update", 6)}),
    ],
    ids=["read-after-update", "update-after-write"],
)
def test_volatile_access_and_atomic_update_of_a_warp_in_step_are_partly_checked(
    tmp_path: Path, source: str, words: set[tuple[str, int]]
) -> None:
    report = checked(tmp_path / "run.ctrace", source)
    assert (report.outcome, report.on_device) == (Outcome.PARTLY_CHECKED, ())
    (gap,) = report.gaps
    assert (gap.kind, gap.count) == (GapKind.WARPS_IN_STEP, 1)
    assert words == {(what, int(line)) for what, line in re.findall(r"(an? [a-z ]+) at \S+:(\d+)", gap.names[0])}


@pytest.mark.parametrize(
    "source",
    [
        *(SUM % {"then": "__syncwarp();"}, BETWEEN_WARPS, SAME_FLAG, OWN, COUNT_ALONE),
        *(COUNT % {"then": "__syncthreads();"}, RESET % {"then": "__syncthreads();"}),
    ],
    ids=["sync", "warps", "flag", "own", "atomics", "count-sync", "reset-sync"],
)
def test_volatile_accesses_that_rely_on_no_step_are_clean(tmp_path: Path, source: str) -> None:
    report = checked(tmp_path / "run.ctrace", source)
    assert (report.outcome, report.gaps) == (Outcome.CLEAN, ())
