"""``cudatool replay``: a check of the allocator against a recording, and what other settings would have cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PREFETCH = DATA / "prefetch__default.pickle.xz"
CHECK_KEYS = {
    *("device", "allocs", "exact", "segments", "segments_exact", "final_blocks", "final_blocks_differ"),
    *("reserved_peak_bytes", "active_peak_bytes", "first_divergence", "initial_state"),
}
ROW_KEYS = {"conf", "reserved_peak_bytes", "active_peak_bytes", "fragmentation", "retries", "oom"}


@pytest.mark.parametrize("name", ["graphs__default", "prefetch__default", "streams_default"])
def test_check_of_a_recording_is_exact(run_command, name: str) -> None:
    done = run_command("replay", DATA / f"{name}.pickle.xz", "--check", "--json")
    assert (0, "") == (done.returncode, done.stderr)
    (device,) = json.loads(done.stdout)
    assert CHECK_KEYS <= device.keys()
    assert (device["allocs"], device["segments"]) == (device["exact"], device["segments_exact"])
    assert (None, "empty", 0) == (device["first_divergence"], device["initial_state"], device["final_blocks_differ"])
    assert {} == device["stats_differ"]


def test_check_of_our_own_trace_is_exact(run_command) -> None:
    run_command("run", "-o", "own.ctrace", ROOT / "samples" / "fragmentation.py")
    done = run_command("replay", "--check")
    assert 0 == done.returncode
    assert "Device 0: exact" in done.stdout


def test_check_under_other_settings_says_where_it_differs_and_why(run_command) -> None:
    arguments = ("replay", PREFETCH, "--check", "--recorded-conf", "expandable_segments:True")
    done = run_command(*arguments)
    assert 1 == done.returncode
    assert "Device 0: not exact" in done.stdout
    assert "probably" in done.stdout
    (device,) = json.loads(run_command(*arguments, "--json").stdout)
    first = device["first_divergence"]
    assert {"event", "what", "size", "expected", "actual", "reason"} == first.keys()
    assert "settings" in first["reason"]


def test_rows_tell_what_settings_would_have_cost(run_command) -> None:
    done = run_command("replay", PREFETCH, "--conf", "", "--conf", "expandable_segments:True", "--json")
    assert (0, "") == (done.returncode, done.stderr)
    as_recorded, expandable = json.loads(done.stdout)
    assert as_recorded.keys() >= ROW_KEYS
    stats = json.loads((DATA / "prefetch__default.stats.json").read_text())["stats"]
    assert stats["reserved_bytes.all.peak"] == as_recorded["reserved_peak_bytes"]
    assert ("expandable_segments:True", None) == (expandable["conf"], expandable["oom"])
    assert expandable["reserved_peak_bytes"] < as_recorded["reserved_peak_bytes"]


def test_table_says_where_a_smaller_card_runs_out(run_command) -> None:
    run_command("run", "-o", "own.ctrace", ROOT / "samples" / "fragmentation.py")
    done = run_command("replay", "--conf", "expandable_segments:True", "--memory", "64MiB")
    assert 0 == done.returncode
    assert "fragmentation.py:" in done.stdout
    assert [] == [line for line in done.stdout.splitlines() if len(line.rstrip()) > 80]


def test_advice_is_given_without_any_option(run_command) -> None:
    done = run_command("replay", PREFETCH)
    assert 0 == done.returncode
    assert "Best: PYTORCH_CUDA_ALLOC_CONF=" in done.stdout
    assert "less are reserved" in done.stdout


def test_advice_as_json_marks_the_best(run_command) -> None:
    rows = json.loads(run_command("replay", PREFETCH, "--advise", "--json").stdout)
    (best,) = [row for row in rows if row["best"]]
    assert best["reserved_peak_bytes"] <= 1.01 * min(row["reserved_peak_bytes"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.pickle", "--check"], "cannot read missing.pickle"),
        (["text", "--check"], "a PyTorch memory snapshot"),
        ([PREFETCH, "--conf", "max_split_size:1"], "did you mean max_split_size_mb?"),
        ([PREFETCH, "--check", "--conf", ""], "--check"),
        ([PREFETCH, "--check", "--device", "3"], "no allocations on device 3"),
        ([PREFETCH, "--conf", "", "--memory", "much"], "'much' is not a size"),
        ([PREFETCH, "--conf", "backend:cudaMallocAsync"], "backend:cudaMallocAsync"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(
    run_command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "text").write_text("text")
    done = run_command("replay", *arguments)
    assert (2, "") == (done.returncode, done.stdout)
    lines = [line for line in done.stderr.splitlines() if line.startswith("cudatool: error:")]
    assert 1 == len(lines)
    assert message in lines[0]
    assert "Traceback" not in done.stderr
