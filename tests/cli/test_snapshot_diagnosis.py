from __future__ import annotations

import io
import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from cudatool import analyze
from cudatool.cli._snapshot_text import print_report
from cudatool.cli.snapshot import snapshot
from cudatool.collect import nvml
from cudatool.errors import ConfigError
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Trace

DATA = Path(__file__).resolve().parents[1] / "data"
STREAMS, PREFETCH = DATA / "streams_default.pickle.xz", DATA / "prefetch__default.pickle.xz"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(nvml, "devices", tuple)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(snapshot, [str(a) for a in arguments], catch_exceptions=False)


def words(result: Result) -> str:
    """Return what was printed with every run of white space as one blank: lines break where the width wants it."""
    return " ".join(result.stdout.split())


def failing(tmp_path: Path) -> Path:
    """Write a snapshot of a program that ran out of memory."""
    trace = [
        {"action": "segment_alloc", "addr": 1 << 30, "size": 20 * MIB, "stream": 0},
        {"action": "alloc", "addr": 1 << 30, "size": 5 * MIB, "stream": 0},
        {"action": "oom", "device_free": 6 * MIB, "size": 40 * MIB, "stream": 0},
    ]
    block = {"size": 5 * MIB, "requested_size": 5 * MIB, "state": "active_allocated", "frames": []}
    hole = {**block, "size": 15 * MIB, "state": "inactive"}
    segment = {"device": 0, "address": 1 << 30, "total_size": 20 * MIB, "stream": 0, "segment_type": "large"}
    path = tmp_path / "failed.pickle"
    path.write_bytes(
        pickle.dumps({"segments": [{**segment, "blocks": [block, hole]}], "device_traces": [trace]}, protocol=4)
    )
    return path


def test_what_to_do_stands_before_what_is_held_and_why_after_it() -> None:
    text = words(run(PREFETCH))
    order = [
        "What to do - 800 MiB less would be reserved with",
        "Held at the peak Call site",
        "Held at the peak, by purpose (inferred)",
        "Reserved but unused, at the peak of reserved",
        "whole free segments 26 766 MiB 48.4 %",
        "A request of 62 MiB found no reusable free block; the largest had 32 MiB.",
        "By stream At the peak Highest Reserved then Highest reserved",
        "Never freed",
    ]
    assert sorted(order, key=text.index) == order


@pytest.mark.parametrize("source", [STREAMS, PREFETCH, DATA / "graphs__default.pickle.xz"])
def test_everything_fits_80_columns(source: Path) -> None:
    assert [] == [line for line in run(source).stdout.splitlines() if len(line) > 80 and str(source) not in line]


def test_json_has_the_diagnosis_of_each_device() -> None:
    document = json.loads(run(PREFETCH, "--json").stdout)
    (device,) = document["devices"]
    diagnosis = device["diagnosis"]
    assert device["peak_active"] == diagnosis["tree"]["total_size"][0]
    assert diagnosis["categories"]["inferred"] is True
    (moment,) = diagnosis["fragmentation"]
    assert moment["reserved"] - moment["requested"] == sum(share["size"] for share in moment["causes"])
    assert ([], []) == (document["findings"], document["cards"])


def test_memory_that_is_wholly_in_use_gives_no_empty_table(run_warm) -> None:
    program = "import cudatool as ct\nkeep = []\nwhile True: keep.append(ct.empty(20 << 20, 'u1'))\n"
    run_warm("run", "--device", "sim:memory=64MiB", "-o", "full.ctrace", "-c", program)
    for command in ("snapshot", "oom"):
        said = run_warm(command, "full.ctrace").stdout
        assert "When memory ran out, all that was reserved was in use" in said
        assert "Reserved but unused" not in said
        assert "0 B were neither" not in said


def test_the_size_of_the_card_tells_what_others_held(tmp_path: Path) -> None:
    path = failing(tmp_path)
    assert "6 MiB free (pass the GPU's memory with --memory" in words(run(path))
    text = words(run(path, "--memory", "80MiB"))
    assert "54 MiB were neither free nor reserved here: contexts, libraries, other processes" in text


def test_a_size_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        run(failing(tmp_path), "--memory", "lots")


def test_a_card_that_is_too_small_for_the_file_is_an_error_in_the_report() -> None:
    text = run(STREAMS, "--memory", "10MiB").stdout
    assert "error: 66 MiB reserved is more than the GPU has (10 MiB)" in text


def test_doubts_about_the_file_stand_on_top(tmp_path: Path) -> None:
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    trace = [{"action": "alloc", "addr": 4096, "size": 300 << 30, "stream": 0, "frames": frames}]
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))
    lines = run(path).stdout.splitlines()
    assert lines[1] == "error: 300 GiB active is more than any GPU has (288 GiB) (confidence medium)"


def test_cards_of_this_machine_are_shown_with_their_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    card = nvml.NvmlDevice(0, "NVIDIA [bold]X", 100 * MIB, 30 * MIB, {41: 50 * MIB})
    monkeypatch.setattr(nvml, "devices", lambda: (card,))
    text = words(run(STREAMS))
    assert "On this machine now, GPU 0: NVIDIA [bold]X 70 MiB of 100 MiB are used" in text
    assert "process 41 50 MiB" in text
    assert "the driver itself, and what it does not show 20 MiB" in text
    (plain,) = json.loads(run(STREAMS, "--json").stdout)["cards"]
    assert {"41": 50 * MIB} == plain["processes"]


def test_a_card_is_split_up_for_a_program_that_still_runs() -> None:
    records = np.zeros(1, RECORD)
    records["kind"], records["size"] = Kind.SEGMENT_ALLOC, 20 * MIB
    report = analyze.report(Trace(records, header={"pid": 41}))
    out = io.StringIO()
    print_report(
        Console(file=out, width=80), report, [nvml.NvmlDevice(0, "X", 100 * MIB, 30 * MIB, {41: 50 * MIB, 42: MIB})]
    )
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert [
        "reserved by this program's allocator 20 MiB",
        "this program, not its allocator: context, kernels, libraries 30 MiB",
        "other processes 1 MiB",
        "the driver itself, and what it does not show 19 MiB",
    ] == lines[-4:]


@pytest.mark.parametrize(
    ("devices", "processes", "is_split"),
    [
        ([1], [{}, {41: 50 * MIB}], True),
        ([0], [{}, {41: 50 * MIB}], True),
        ([0, 1], [{}, {41: 50 * MIB}], False),
        ([0], [{41: MIB}, {41: 50 * MIB}], False),
    ],
    ids=["same number", "other number", "devices", "cards"],
)
def test_a_card_is_split_up_where_it_alone_can_be_the_device_of_the_trace(
    devices: list[int], processes: list[dict[int, int]], is_split: bool
) -> None:
    """CUDA_VISIBLE_DEVICES and the order of CUDA make its numbers others than NVML's."""
    records = np.zeros(len(devices), RECORD)
    records["kind"], records["size"], records["device"] = Kind.SEGMENT_ALLOC, 20 * MIB, devices
    records["address"] = np.arange(len(devices)) * 100 * MIB
    report, out = analyze.report(Trace(records, header={"pid": 41})), io.StringIO()
    cards = [nvml.NvmlDevice(index, "X", 100 * MIB, 30 * MIB, found) for index, found in enumerate(processes)]
    print_report(Console(file=out, width=80), report, cards)
    text = " ".join(out.getvalue().partition("GPU 1: X")[2].split())
    assert is_split == ("reserved by this program's allocator 20 MiB" in text)
    assert is_split != ("process 41 50 MiB" in text)


def test_a_recording_of_the_software_device_knows_its_memory_and_asks_no_card(
    run_warm: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = DATA.parents[1] / "samples" / "vector_add.py"
    run_warm("run", "--device", "sim:memory=64MiB", "-o", "t.ctrace", sample)
    monkeypatch.setattr(nvml, "devices", lambda: (nvml.NvmlDevice(0, "X", 100, 30, {}),))
    document = json.loads(run(tmp_path / "t.ctrace", "--json").stdout)
    assert 64 * MIB == document["devices"][0]["diagnosis"]["outside"]["total"]
    assert ([], []) == (document["cards"], document["findings"])


def test_a_failure_shows_the_split_when_it_happened(tmp_path: Path) -> None:
    text = words(run(failing(tmp_path)))
    assert "1 failed: out of memory" in text
    assert "when memory ran out" in text
    assert "A request of 40 MiB found no reusable free block; the largest had 15 MiB." in text
    assert "a hole of 15 MiB in a segment of 20 MiB: pinned by 5 MiB of (no stack in this file), 5 MiB each" in text


def test_a_program_that_wastes_nothing_gets_no_table_of_causes() -> None:
    """Memory that the program takes from the driver itself is reserved and used at once."""
    records = np.zeros(1, RECORD)
    records[0]["kind"], records[0]["address"], records[0]["size"] = Kind.MEM_ALLOC, 1 << 40, MIB
    console = Console(file=io.StringIO(), width=100)
    print_report(console, analyze.report(Trace(records)))
    assert "Held at the peak" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "Cause" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_final_state_alone_calls_for_nothing_but_a_history(tmp_path: Path) -> None:
    """What is free at the end may have been in use before."""
    block = {"size": MIB, "requested_size": MIB, "state": "active_allocated", "frames": []}
    free = {"size": 20 * MIB, "state": "inactive"}
    state = [
        {"address": 1 << 30, "total_size": 2 * MIB, "blocks": [block, {"size": MIB, "state": "inactive"}]},
        {"address": 1 << 31, "total_size": 20 * MIB, "blocks": [free]},
    ]
    segments = [{"stream": 0, "segment_type": "large", "device": 0, **one} for one in state]
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [[]]}))
    document = json.loads(run(path, "--json").stdout)
    topics = [remedy["topic"] for remedy in document["devices"][0]["diagnosis"]["remedies"]]
    assert set(topics) <= {"setting"}
    assert "whole free segments" in words(run(path))


def test_planned_memory_is_told_with_its_buffers_and_what_a_plan_saves(run_warm) -> None:
    program = """
import cudatool as ct
from cudatool import ops
from cudatool.compiler import compile

@compile(fullgraph=True, options={"max_fusion_size": 1})
def double(x):
    for _ in range(4):
        x = ops.softmax(x, -1)
    return x

for _ in range(2):
    double(ct.ones(1000))
"""
    run_warm("run", "-o", "planned.ctrace", "-c", program)
    said = " ".join(run_warm("snapshot", "planned.ctrace").stdout.split())
    assert "Planned memory of double" in said
    assert "4 nodes; 8 KiB planned, 8 KiB used, 8 KiB live at once at most; 20 KiB if no buffers shared" in said
    (plan,) = json.loads(run_warm("snapshot", "planned.ctrace", "--json").stdout)["plans"]
    assert [0, 4096, 0, 4096, 0] == [buffer["offset"] for buffer in plan["buffers"]]
    assert ["args[0]", *["cudatool.ops.softmax"] * 4] == [buffer["node"] for buffer in plan["buffers"]]
    assert [] == plan["fused"]
    assert "Fused kernels" not in said


def test_fused_kernels_are_shown_with_their_operations(run_warm) -> None:
    program = """
import cudatool as ct
from cudatool.compiler import compile

@compile(fullgraph=True)
def double(x):
    return x * 2.0 + 1.0

for _ in range(2):
    double(ct.ones(1000))
"""
    run_warm("run", "-o", "fused.ctrace", "-c", program)
    said = " ".join(run_warm("snapshot", "fused.ctrace").stdout.split())
    assert "1 node; 4 KiB planned" in said
    assert all(word in said for word in ("Fused kernels of double", "0 fused_mul_add", "cudatool.ops.mul <string>:7"))
    (plan,) = json.loads(run_warm("snapshot", "fused.ctrace", "--json").stdout)["plans"]
    (kernel,) = plan["fused"]
    assert ["cudatool.ops.mul", "cudatool.ops.add"] == [operation["name"] for operation in kernel["operations"]]
