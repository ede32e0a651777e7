"""Programs written to cuda.core and cuda.bindings alone run unchanged, are recorded and checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudatool.trace.events import Kind
from cudatool.trace.reader import read

_PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.mark.parametrize(
    ("program", "kernels"), [("vector_add.py", 1), ("saxpy_cubin.py", 2)], ids=["vector_add", "saxpy_cubin"]
)
def test_program_runs_right_and_its_kernels_and_copies_are_in_the_trace(run_warm, tmp_path, program, kernels):
    done = run_warm("run", "-o", "t.ctrace", _PROGRAMS / program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": right\n")
    trace = read(tmp_path / "t.ctrace")
    launches = trace.of_kind(Kind.KERNEL_LAUNCH)
    assert len(launches) == kernels
    assert len(trace.of_kind(Kind.MEMCPY)) == 3 * kernels
    ran = set(trace.of_kind(Kind.EXECUTION)["correlation"].tolist())
    assert set(launches["correlation"].tolist()) <= ran
    for launch in launches:
        assert trace.stack(int(launch["stack"]))[0].file == str(_PROGRAMS / program)


def test_correct_foreign_programs_are_clean(run_warm):
    for program in ("vector_add.py", "saxpy_cubin.py"):
        done = run_warm("sanitize", "--format", "json", _PROGRAMS / program)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mode", ["fixed", "halves"])
def test_ordered_streams_and_disjoint_writers_are_clean(run_warm, mode):
    done = run_warm("sanitize", _PROGRAMS / "two_streams.py", mode)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "late", "random"])
def test_missing_wait_is_found_with_both_stacks_under_every_schedule(run_warm, schedule):
    done = run_warm(
        "sanitize", "--format", "json", "--device", f"sim:schedule={schedule}", _PROGRAMS / "two_streams.py", "racy"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    (finding,) = report["findings"]
    assert finding["kind"] == "race-raw"
    lines = (_PROGRAMS / "two_streams.py").read_text().splitlines()
    sites = [lines[finding[side]["stack"][0]["line"] - 1] for side in ("first", "second")]
    assert "fill" in sites[0]
    assert "twice" in sites[1]


def test_one_shared_element_is_found_and_its_bytes_named(run_warm):
    done = run_warm("sanitize", "--format", "json", _PROGRAMS / "two_streams.py", "overlap")
    assert done.returncode == 1, done.stdout + done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert finding["kind"] == "race-waw"
    assert finding["size"] == 4
