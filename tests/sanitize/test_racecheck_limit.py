"""A launch of which racecheck cannot keep the history is partly checked: never clean, and without false findings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.sanitize.coverage import gap_what, gap_why
from cudatool.sanitize.findings import GapKind, Outcome, Report
from cudatool.sim.jit import Shadow
from cudatool.trace import reader

pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

N = 256
# Every thread reads each element at a moment of its own, so that each read is an entry of a list. Of memory that the
# launch does not write, reads would not be looked at.
SOURCE = """
extern "C" __global__ void gather(int *x, int *y, int n) {
    int sum = 0;
    x[threadIdx.x] = threadIdx.x;
    __syncthreads();
    for (int i = 0; i < n; i++) {
        sum += x[(i + threadIdx.x) % n];
        __threadfence();
    }
    y[threadIdx.x] = sum;
}
extern "C" __global__ void copy(const int *x, int *y, int n) { y[threadIdx.x] = x[threadIdx.x]; }
"""


def checked(path: Path, name: str) -> Report:
    kernel = ct.compile(SOURCE, name)
    with record(path, checks=["racecheck"]):
        x, y = ct.zeros(N, np.int32), ct.zeros(N, np.int32)
        ct.launch(ct.current_stream(), ct.LaunchConfig(grid=1, block=N), kernel, x, y, np.int32(N))
        ct.synchronize()
    return check(reader.read(path), ("racecheck",))


def test_launch_whose_history_is_too_large_is_partly_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shadow, "history_limit", 1 << 20)
    report = checked(tmp_path / "run.ctrace", "gather")
    assert report.outcome is Outcome.PARTLY_CHECKED
    assert report.on_device == ()
    (gap,) = report.gaps
    assert (gap.kind, gap.count, gap.whole) == (GapKind.KERNEL_RACES, 1, False)
    assert gap_what(gap) == "races in a part of 1 launch"
    assert "gather" in gap_why(gap)


def test_the_same_launch_is_clean_within_the_limit(tmp_path: Path) -> None:
    report = checked(tmp_path / "run.ctrace", "gather")
    assert (report.outcome, report.gaps) == (Outcome.CLEAN, ())


def test_usual_launches_need_no_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shadow, "history_limit", 1 << 20)
    report = checked(tmp_path / "run.ctrace", "copy")
    assert (report.outcome, report.gaps) == (Outcome.CLEAN, ())
