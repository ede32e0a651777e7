"""``cudatool replay``: a check of the allocator against a recording, and what other settings would have cost."""

from __future__ import annotations

import json
import lzma
import pickle
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from cudatool.analyze import Advice, Caveat, LeftOut, NoAdvice, OutOfMemory, Record, WhatIfOutcome, diagnosis
from cudatool.analyze.recorded import settings_variable
from cudatool.cli import _replay_text
from cudatool.cli.replay import replay
from cudatool.cli.snapshot import snapshot
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Trace

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
    assert "at the end  no blocks were recorded to compare with\n" in done.stdout
    assert 0 == run_command("export", "own.ctrace", "--to", "torch", "-o", "own.pickle").returncode
    done = run_command("replay", "own.pickle", "--check")  # what was asked for in free blocks, no trace has
    assert 0 == done.returncode
    assert re.search(r"at the end  0 of [1-9]\d* blocks differ\n", done.stdout)


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


@pytest.mark.parametrize(
    ("header", "variable"),
    [
        ({}, "PYTORCH_CUDA_ALLOC_CONF"),  # a snapshot of PyTorch's
        ({"device_kind": "cuda", "libraries": ["PyTorch"]}, "PYTORCH_CUDA_ALLOC_CONF"),
        ({"device_kind": "cuda"}, "CUDATOOL_ALLOC_CONF"),
        ({"device_kind": "sim", "libraries": ["PyTorch"]}, "CUDATOOL_ALLOC_CONF"),  # where PyTorch takes no memory
    ],
)
def test_advice_names_the_variable_that_the_recorded_allocator_reads(header: dict[str, Any], variable: str) -> None:
    assert variable == settings_variable(Trace(np.zeros(0, RECORD), header=header))


def test_advice_is_given_without_any_option(run_command) -> None:
    done = run_command("replay", PREFETCH)
    assert 0 == done.returncode
    assert "Best: PYTORCH_CUDA_ALLOC_CONF=" in done.stdout
    assert "less are reserved" in done.stdout


def test_numbers_that_a_lost_beginning_may_change_are_marked(run_command) -> None:
    arguments = ("replay", PREFETCH, "--events", "2000:9000")
    done = run_command(*arguments, environment={"COLUMNS": "120"})
    assert re.search(r"^expandable\S+ +[\d.]+ MiB to [\d.]+ GiB .* ~[\d.]+ % +~\d+ ", done.stdout, re.MULTILINE)


def test_advice_as_json_marks_the_best(run_command) -> None:
    rows = json.loads(run_command("replay", PREFETCH, "--advise", "--json").stdout)
    (best,) = [row for row in rows if row["best"]]
    assert best["reserved_peak_bytes"] <= 1.01 * min(row["reserved_peak_bytes"] for row in rows)


def final_state(folder: Path) -> Path:
    """Return a snapshot without any history."""
    with lzma.open(PREFETCH) as file:
        snapshot = pickle.load(file)
    path = folder / "final.pickle"
    path.write_bytes(pickle.dumps({"segments": snapshot["segments"], "device_traces": []}))
    return path


def test_check_of_a_file_without_requests_is_not_a_success(run_command, tmp_path: Path) -> None:
    done = run_command("replay", final_state(tmp_path), "--check")
    assert 2 == done.returncode
    assert "Device 0: nothing to check" in done.stdout
    assert "exact" not in done.stdout


@pytest.mark.parametrize("options", [(), ("--conf", "expandable_segments:True")])
def test_no_settings_are_tried_on_requests_whose_order_is_not_known(
    run_command, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run_command("replay", final_state(tmp_path), *options)
    assert (2, "") == (done.returncode, done.stdout)
    assert "no history of requests" in done.stderr


@pytest.mark.parametrize("options", [(), ("--check",), ("--conf", "expandable_segments:True")])
def test_requests_to_another_allocator_are_not_replayed(run_command, tmp_path: Path, options: tuple[str, ...]) -> None:
    log = tmp_path / "rmm.csv"
    log.write_text("Thread,Time,Action,Pointer,Size,Stream\n1,14:21:19.998533,allocate,0x30a000000,256,0x2\n")
    done = run_command("replay", log, *options)
    assert (2, "") == (done.returncode, done.stdout)
    assert "RMM" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("options", [(), ("--check",), ("--conf", "expandable_segments:True")])
def test_memory_of_the_driver_in_an_export_is_not_taken_for_the_allocators(
    run_command, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """PyTorch's format has no event for it, so the export writes it as segments with one block."""
    run_command("run", "--device", "sim", "-o", "own.ctrace", ROOT / "tests" / "programs" / "vector_add.py")
    assert 0 == run_command("export", "own.ctrace", "--to", "torch", "-o", "own.pickle").returncode
    done = run_command("replay", "own.pickle", *options)
    assert (2, "") == (done.returncode, done.stdout)
    assert "took from the driver itself" in done.stderr.splitlines()[-1]
    done = run_command("replay", "own.ctrace", *options)
    assert (2, "") == (done.returncode, done.stdout)
    assert "own.ctrace has no requests to a caching allocator to replay" in done.stderr
    assert "585.94 KiB" in run_command("snapshot", "own.pickle").stdout


@pytest.mark.parametrize(
    ("command", "option"), [("replay", "--memory"), ("replay", "--recorded-memory"), ("snapshot", "--memory")]
)
def test_size_of_a_card_needs_a_unit_and_is_above_0(run_command, command: str, option: str) -> None:
    done = run_command(command, PREFETCH, option, "5")
    assert (2, "") == (done.returncode, done.stdout)
    assert f"{option} 5: say in which unit, for example {option} 5GiB" in done.stderr
    done = run_command(command, PREFETCH, option, "0GiB")
    assert (2, "") == (done.returncode, done.stdout)
    assert f"{option} 0GiB: a device has more memory than that" in done.stderr


def test_replay_of_the_recorded_settings_is_shown(run_command) -> None:
    done = run_command("replay", PREFETCH)
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert "GiB" in rows["as recorded"]
    assert rows["as recorded"][2:4] == rows["replay of that"][3:5]
    (row, *_) = json.loads(run_command("replay", PREFETCH, "--json").stdout)
    assert row["recorded"]["reserved_peak_bytes"] == row["replay_of_recorded"]["reserved_peak_bytes"]


def test_there_is_no_advice_if_the_replay_of_the_recorded_settings_is_off(run_command) -> None:
    arguments = ("replay", PREFETCH, "--recorded-conf", "roundup_power2_divisions:1,max_split_size_mb:21")
    done = run_command(*arguments)
    assert 0 == done.returncode
    assert "No advice: a replay of the recorded settings reserves" in done.stdout
    assert "Best:" not in done.stdout
    rows = json.loads(run_command(*arguments, "--json").stdout)
    assert {"peak-differs"} == {row["withheld"] for row in rows}
    assert not any(row["best"] for row in rows)


def test_every_caveat_and_every_reason_has_words() -> None:
    assert set(Caveat) == set(_replay_text._CAVEATS)
    record, outcome = Record(2, 0, 0, None), WhatIfOutcome("", 1, 1, 0.0, 0, 0, None, 0, 1, 1)
    advice = Advice(record, outcome, None, 0, ())
    reasons = {replace(advice, withheld=reason).why_not() for reason in NoAdvice}
    assert len(reasons) == len(NoAdvice)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.pickle", "--check"], "cannot read missing.pickle"),
        (["text", "--check"], "a PyTorch memory snapshot"),
        ([PREFETCH, "--conf", "max_split_size:1"], "did you mean max_split_size_mb?"),
        ([PREFETCH, "--check", "--conf", ""], "--check"),
        ([PREFETCH, "--check", "--device", "3"], "no requests to a caching allocator on device 3"),
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


def test_setting_that_may_avoid_running_out_of_memory_is_not_said_to_fail(capsys) -> None:
    outcome = WhatIfOutcome("", 100, 90, 0.1, 1, 2, OutOfMemory(0, 1, 50, 100, 90, ""), 0, 100, 100)
    served = replace(outcome, conf="expandable_segments:True", oom=None, caveats=(Caveat.BEGINS_LATE,))
    for tried, said in (((outcome,), "No setting keeps"), ((outcome, served), "is not sure")):
        advice = Advice(Record(100, 1, 1, 120), outcome, None, 0, tried)
        _replay_text.print_advice(Console(), advice, chosen=False)
        assert said in capsys.readouterr().out


def test_prediction_that_may_be_off_is_printed_as_a_range(capsys) -> None:
    size = 1 << 30
    sure = WhatIfOutcome("", 4 * size, size, 0.1, 0, 2, None, 0, 4 * size, 4 * size)
    late = replace(sure, reserved_most_bytes=5 * size, caveats=(Caveat.BEGINS_LATE,))
    endless = replace(late, reserved_least_bytes=3 * size, reserved_most_bytes=None)
    advice = Advice(Record(4 * size, 0, 0, None), sure, None, 0, (sure, late, endless))
    _replay_text.print_outcomes(Console(width=80), 0, advice)
    said = capsys.readouterr().out
    assert [" 4 GiB ", "4 to 5 GiB ", "at least 3 GiB "] == [
        text for text in (" 4 GiB ", "4 to 5 GiB ", "at least 3 GiB ") if text in said
    ]
    assert "; ~ marks what may differ:" in said
    assert (2, 2) == (said.count("~0 "), len(re.findall(r"~\d+\.\d %", said)))
    assert "A range covers all that the recording leaves open" in said


def test_the_place_where_memory_runs_out_is_said_once_if_it_is_always_the_same(capsys) -> None:
    size = 1 << 30
    fails = OutOfMemory(0, 1, 50, 100, 90, "train.py:4 (grow)")
    used = WhatIfOutcome("", size, size, 0.0, 1, 2, fails, 0, size, size)
    others = [replace(used, conf=f"max_split_size_mb:{n}") for n in (32, 64)]
    advice = Advice(Record(size, 1, 1, size), used, None, 0, (used, *others))
    _replay_text.print_outcomes(Console(width=200), 0, advice)
    said = capsys.readouterr().out
    assert "Requests that failed or were retried show that at most 1 GiB could be reserved." in said
    assert 1 == said.count("train.py:4 (grow)")
    other = replace(used, conf="expandable_segments:True", oom=replace(fails, site="eval.py:1"))
    _replay_text.print_outcomes(Console(width=200), 0, replace(advice, tried=(used, other)))
    said = capsys.readouterr().out
    assert "(defaults) runs out at train.py:4 (grow)\nexpandable_segments:True runs out at eval.py:1\n" in said


_LONG = (
    "garbage_collection_threshold:0.8,expandable_segments:True",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "graph_capture_record_stream_reuse:True",
    "pinned_use_cuda_host_register:True,pinned_num_register_threads:16,max_split_size_mb:128",
)


@pytest.mark.parametrize("width", [72, 80, 100, 160])
def test_table_breaks_no_setting_inside_of_a_word(capsys, width: int) -> None:
    size = 1 << 30
    used = WhatIfOutcome("", 4 * size, size, 0.1, 12, 2, None, 0, 4 * size, 4 * size)
    fails = replace(used, oom=OutOfMemory(0, 7116, 25 << 20, 100, 90, ""), reserved_most_bytes=5 * size)
    tried = tuple(replace(fails, conf=conf) for conf in _LONG)
    left_out = (LeftOut("garbage_collection_threshold:0.6", 3 * size),)
    advice = Advice(Record(4 * size, 0, 0, None), used, None, 0, (used, *tried), None, left_out)
    _replay_text.print_outcomes(Console(width=width), 0, advice)
    lines = capsys.readouterr().out.splitlines()
    lines = lines[: next(i for i, line in enumerate(lines) if line.startswith("Left out"))]
    assert width >= max(map(len, lines))
    words = re.split(r"\W+|_", "\n".join(lines))
    for conf in (*_LONG, left_out[0].conf):
        for word in re.findall(r"[a-z\d]+", conf.lower()):
            assert word in map(str.lower, words)
    assert words.count("threshold") == words.count("garbage") == 2


@pytest.mark.parametrize(("caveats", "bound"), [((), ""), ((Caveat.BEGINS_LATE,), "at least ")])
def test_a_gain_is_a_lower_bound_where_the_recording_leaves_something_open(
    capsys, caveats: tuple[Caveat, ...], bound: str
) -> None:
    size = 1 << 30
    used = WhatIfOutcome("", 4 * size, size, 0.1, 0, 2, None, 0, 4 * size, 4 * size)
    best = replace(used, conf="expandable_segments:True", reserved_least_bytes=size, caveats=caveats)
    advice = Advice(Record(4 * size, 0, 0, None), used, best, size, (used, best))
    _replay_text.print_advice(Console(width=200), advice, chosen=False)
    conf = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert f"Best: {conf}: {bound}1 GiB less are reserved.\n" == capsys.readouterr().out
    (remedy,) = diagnosis._of_settings(advice)
    assert f"{bound}1 GiB less would be reserved with {conf}, as a replay of this recording shows" == remedy.text


@pytest.mark.parametrize("caveats", [(Caveat.OTHER_COURSE,), ()])
def test_setting_that_serves_a_failed_request_leaves_open_what_comes_after(capsys, caveats: tuple[Caveat, ...]) -> None:
    """The caveat is about bytes: where all of the memory is reserved anyhow, the outcome has none."""
    size = 1 << 30
    used = WhatIfOutcome("", size, size, 0.1, 1, 2, OutOfMemory(0, 1, 50, 100, 90, ""), 0, size, size)
    best = replace(used, conf="expandable_segments:True", oom=None, caveats=caveats)
    advice = Advice(Record(size, 1, 1, None), used, best, 0, (used, best))
    (remedy,) = diagnosis._of_settings(advice)
    assert remedy.text.startswith("memory would not run out where it did with ")
    assert remedy.text.endswith("; what the program would do after that is not known")
    _replay_text.print_advice(Console(width=200), advice, chosen=False)
    assert capsys.readouterr().out.endswith("; what the program would do after that is not known.\n")


def test_the_memory_that_is_missing_can_be_passed_as_is_said() -> None:
    """The reason stands in the text of both commands, whose options have other names."""
    used = WhatIfOutcome("", 1, 1, 0.1, 0, 2, None, 0, 1, 1)
    said = Advice(Record(1, 0, 3, None), used, None, 0, (used,), NoAdvice.FAILURES_DIFFER).why_not()
    named = re.findall(r"cudatool (\w+) (--[\w-]+)", said)
    assert ["replay", "snapshot"] == sorted(name for name, _ in named)
    for name, option in named:
        command = {"replay": replay, "snapshot": snapshot}[name]
        assert any(option in parameter.opts for parameter in command.params)


def test_a_memory_fraction_that_all_settings_share_is_said_once() -> None:
    limit = "per_process_memory_fraction:0.5"
    arguments = [str(DATA / "streams_default.pickle.xz"), "--recorded-conf", limit, "--recorded-memory", "8GiB"]
    said = CliRunner().invoke(replay, arguments, env={"COLUMNS": "120"})
    assert said.exit_code == 0, said.output
    assert f"All of them with {limit}, as recorded." in said.output
    assert 1 == said.output.count(limit)
    rows = [line.split()[0] for line in said.output.splitlines() if line.startswith("roundup")]
    assert sorted(set(rows)) == sorted(rows)


def test_each_device_is_replayed_with_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    records = np.zeros(2, RECORD)
    records["kind"], records["size"], records["device"] = Kind.OOM, 1 << 20, (0, 1)
    trace = Trace(records, header={"total_memory": [1 << 30, 3 << 30]})
    totals = {}

    def advise(trace: Trace, device: int, confs: Any, *, recorded_memory: int | None, **more: Any) -> Advice:
        totals[device] = recorded_memory
        return Advice(None, None, None, 0, ())

    monkeypatch.setattr("cudatool.cli.replay.read_trace", lambda source: trace)
    monkeypatch.setattr("cudatool.analyze.advise", advise)
    done = CliRunner().invoke(replay, ["two.ctrace", "--json"])
    assert {0: 1 << 30, 1: 3 << 30} == totals, done.output
