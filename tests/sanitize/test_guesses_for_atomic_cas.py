"""The Programming Guide's loop of atomicCAS begins with a plain read: a race by the memory model, and a warning here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cudatool as ct
from cudatool.recording import record
from cudatool.sanitize import check
from cudatool.sanitize.findings import FindingKind, Outcome, Report
from cudatool.sanitize.report.views import entries, verdict
from cudatool.trace import reader

pytestmark = pytest.mark.skipif(not ct.get_device_name().startswith("cudatool"), reason="needs the software device")

ADD = """
extern "C" __global__ void add(double *sum, double *seen) {
    unsigned long long *p = (unsigned long long *)sum, assumed;
    %(before)s
    unsigned long long old = %(read)s;
    %(between)s
    do {
        assumed = old;
        old = atomicCAS%(scope)s(p, assumed, __double_as_longlong(__longlong_as_double(assumed) + 1.0));
    } while (assumed != old);
    %(after)s
}"""
GUIDE = {"read": "*p", "before": "", "between": "", "scope": "", "after": ""}
AGAIN = """
extern "C" __global__ void add(double *sum, double *seen) {
    unsigned *p = (unsigned *)sum, old;
    do old = *p; while (atomicCAS(p, old, old + 1) != old);
}"""
GIVES_UP = """
extern "C" __global__ void add(double *sum, double *seen) {
    unsigned *p = (unsigned *)sum, old = *p, assumed;
    while (old < threadIdx.x) { assumed = old; old = atomicCAS(p, assumed, threadIdx.x); if (old == assumed) break; }
}"""


def checked(path: Path, source: str, grid: int = 2, block: int = 64) -> Report:
    kernel = ct.compile(source, "add")
    with record(path, checks=["racecheck"]):
        total, seen = ct.zeros(64, np.float64), ct.zeros(256, np.float64)
        ct.launch(ct.current_stream(), ct.LaunchConfig(grid=grid, block=block), kernel, total, seen)
        ct.synchronize()
    return check(reader.read(path), ("racecheck",))


@pytest.mark.parametrize(("grid", "block"), [(1, 2), (2, 1), (2, 64)], ids=["lanes", "blocks", "both"])
@pytest.mark.parametrize("after", ["", "seen[threadIdx.x + blockIdx.x * 64] = __longlong_as_double(old);"])
def test_the_guides_loop_is_a_warning_and_fails_no_run(tmp_path: Path, grid: int, block: int, after: str) -> None:
    report = checked(tmp_path / "run.ctrace", ADD % {**GUIDE, "after": after}, grid, block)
    assert (report.outcome, report.findings, report.on_device) == (Outcome.CLEAN, (), ())
    (found,) = report.warnings
    assert (found.kind, found.check, found.size) == (FindingKind.CAS_GUESS, "racecheck", 8)
    assert {5, 9} == {found.source.line, found.other_source.line}
    assert ["warning"] == [entry.level for entry in entries(report)]
    assert verdict(report) == "cudatool sanitize: no findings, 1 warning"


@pytest.mark.parametrize("read", ["*(volatile unsigned long long *)p", "atomicAdd(p, 0)"])
def test_an_atomic_first_read_is_clean(tmp_path: Path, read: str) -> None:
    report = checked(tmp_path / "run.ctrace", ADD % {**GUIDE, "read": read})
    assert (report.outcome, report.all) == (Outcome.CLEAN, ())


def test_one_thread_alone_has_nothing_to_warn_of(tmp_path: Path) -> None:
    assert () == checked(tmp_path / "run.ctrace", ADD % GUIDE, 1, 1).all


@pytest.mark.parametrize(
    "source",
    [
        AGAIN,
        GIVES_UP,
        ADD % {**GUIDE, "scope": "_block"},
        ADD % {**GUIDE, "between": "if (old == 7) return;"},
        ADD % {**GUIDE, "between": "seen[threadIdx.x + blockIdx.x * 64] = old;"},
        ADD % {**GUIDE, "before": "if (threadIdx.x == 3) *p = 0;"},
    ],
    ids=["reads-again", "gives-up", "block-scope", "decides", "stores", "plain-write"],
)
def test_a_read_that_more_depends_on_or_a_plain_write_is_a_race(tmp_path: Path, source: str) -> None:
    report = checked(tmp_path / "run.ctrace", source)
    assert {FindingKind.KERNEL_RACE} == {one.kind for one in report.on_device}
    assert Outcome.FINDINGS is report.outcome
