"""The samples show what their comments promise."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cudatool import analyze
from cudatool.trace.events import Kind
from cudatool.trace.reader import read

_SAMPLES = Path(__file__).parents[2] / "samples"


@pytest.mark.parametrize("sample", ["vector_add", "pipeline_fixed", "mlp", "leak", "fragmentation"])
def test_sample_runs_and_leaves_a_trace(run_warm, tmp_path, sample):
    done = run_warm("run", "-o", "t.ctrace", "--html", "p.html", _SAMPLES / f"{sample}.py")
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "t.ctrace")
    assert trace.notes == []
    assert len(trace.of_kind(Kind.BLOCK_ALLOC)) > 0


def test_every_sample_says_what_to_look_for():
    for path in _SAMPLES.glob("[a-z]*.py"):
        assert path.read_text().startswith("# Look for: "), path


_SCHEDULES = ["fifo", "lifo", "late", "random,seed=1", "random,seed=2", "random,seed=3"]


@pytest.mark.some_of("schedule", _SCHEDULES, 2)
def test_racy_pipeline_is_reported_with_both_stacks_under_every_schedule(run_warm, schedule):
    device = f"sim:schedule={schedule}"
    done = run_warm("sanitize", "--format", "json", "--device", device, _SAMPLES / "pipeline_racy.py")
    assert done.returncode == 1, done.stdout + done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert findings
    lines = (_SAMPLES / "_pipeline.py").read_text().splitlines()
    for finding in findings:
        called = {lines[finding[side]["stack"][0]["line"] - 1].split("[")[0].strip() for side in ("first", "second")}
        assert called == {"make_batch", "accumulate"}


@pytest.mark.some_of("schedule", _SCHEDULES, 2)
def test_fixed_pipeline_is_clean_and_right_under_every_schedule(run_warm, schedule):
    done = run_warm("sanitize", "--device", f"sim:schedule={schedule}", _SAMPLES / "pipeline_fixed.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_racy_pipeline_computes_a_wrong_sum_under_lifo(run_warm):
    totals = {}
    for schedule in ("fifo", "lifo"):
        done = run_warm("run", "--device", f"sim:schedule={schedule}", _SAMPLES / "pipeline_racy.py")
        totals[schedule] = re.search(r"total (\S+),", done.stdout)[1]
    assert totals["fifo"] == "10"
    assert totals["lifo"] != "10"


def test_leak_names_the_line_that_holds_the_memory(run_warm, tmp_path):
    assert run_warm("run", "-o", "t.ctrace", _SAMPLES / "leak.py").returncode == 0
    summary = analyze.report(read(tmp_path / "t.ctrace")).summary
    (site, *_) = summary.devices[0].still_live
    line = (_SAMPLES / "leak.py").read_text().splitlines().index("    activations = ct.zeros((256, 1024), np.float32)")
    assert site.label == f"leak.py:{line + 1} (<module>)"
    assert site.size == 50 << 20


def test_other_samples_are_clean(run_warm):
    for sample in ("vector_add", "mlp"):
        done = run_warm("sanitize", _SAMPLES / f"{sample}.py")
        assert done.returncode == 0, done.stdout + done.stderr


def test_data_parallel_training_gives_on_two_devices_what_it_gives_on_one(run_warm):
    done = run_warm("sanitize", "--device", "sim:count=2", _SAMPLES / "data_parallel.py")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"step +(\d+) on (\d) of 2: loss (\S+)", done.stderr + done.stdout)
    on_two, on_one = ([(step, loss) for step, count, loss in losses if count == wanted] for wanted in "21")
    assert len(on_one) == 4
    assert on_one == on_two
