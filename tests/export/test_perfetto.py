from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import HERE, converted

from cudatool import analyze
from cudatool.collect import torch_snapshot
from cudatool.errors import OutputError
from cudatool.export import perfetto
from cudatool.trace.events import RECORD, CopyFlag, Kind, StreamFlag, pack_dims, pack_product
from cudatool.trace.model import Frame, Trace

HOST, DEVICE = 1, 1000
PERIOD = 7_889_238 * 10**9  # ns: PyTorch's profiler counts from multiples of it


def trace(*events: tuple[Kind, dict[str, Any]], **more: Any) -> Trace:
    """Return a trace of events given as (kind, fields), one every 10 us from 1 s on."""
    records, names = np.zeros(len(events), RECORD), [""]
    for i, (kind, fields) in enumerate(events):
        records[i]["kind"], records[i]["time"] = kind, 10**9 + 10_000 * i
        for field, value in fields.items():
            if field == "name":
                names.append(value)
                value = len(names) - 1
            records[i][field] = value
    return Trace(records, names=names, **more)


def written(path: Path, trace: Trace) -> list[dict[str, Any]]:
    perfetto.write(path / "x.json", trace)
    assert ["x.json"] == [file.name for file in path.iterdir()]
    events: list[dict[str, Any]] = json.loads((path / "x.json").read_text())["traceEvents"]
    return events


def of_phase(events: list[dict[str, Any]], *phases: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] in phases]


@converted()
def test_counters_are_the_bytes_of_the_analysis_at_every_moment(tmp_path: Path, path: Path) -> None:
    snapshot = torch_snapshot.read(path)
    line = analyze.timeline(snapshot, analyze.blocks(snapshot), analyze.segments(snapshot))
    base = int(snapshot.records["time"].min()) // PERIOD * PERIOD
    expected = [
        ((time - base) / 1000, {"allocated": allocated, "active": active, "reserved": reserved})
        for time, allocated, active, reserved in zip(
            line.time.tolist(), line.allocated.tolist(), line.active.tolist(), line.reserved.tolist(), strict=True
        )
    ]
    if snapshot.header["time_axis"] == "index":
        expected = [(float(i), args) for i, (_, args) in zip(line.index.tolist(), expected, strict=True)]
    assert expected == [(e["ts"], e["args"]) for e in of_phase(written(tmp_path, snapshot), "C")]


def test_each_device_has_its_own_counters(tmp_path: Path) -> None:
    events = written(
        tmp_path,
        trace(
            (Kind.BLOCK_ALLOC, {"address": 512, "size": 100}),
            (Kind.BLOCK_ALLOC, {"address": 512, "size": 7, "device": 1}),
            (Kind.BLOCK_FREE_REQUESTED, {"address": 512, "size": 100}),
            (Kind.BLOCK_FREE_COMPLETED, {"address": 512, "size": 100}),
        ),
    )
    counters = [(e["pid"], e["ts"], e["args"]["allocated"], e["args"]["active"]) for e in of_phase(events, "C")]
    assert [
        (DEVICE, 0.0, 100, 100),
        (DEVICE, 20.0, 0, 100),
        (DEVICE, 30.0, 0, 0),
        (DEVICE + 1, 10.0, 7, 7),
    ] == counters
    assert {1: "program", 1000: "Device 0", 1001: "Device 1"} == {
        e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"
    }


def launch_and_run(**execution: Any) -> Trace:
    return trace(
        (Kind.STREAM_CREATE, {"stream": 5, "address": 0xABC, "flags": StreamFlag.NON_BLOCKING}),
        (
            Kind.KERNEL_LAUNCH,
            {
                "name": "scale",
                "stream": 5,
                "correlation": 9,
                "aux0": pack_dims(4, 2),
                "aux1": pack_dims(256),
                "size": 64,
            },
        ),
        (Kind.EXECUTION, {"stream": 5, "correlation": 9, **execution}),
    )


def test_an_execution_is_a_slice_on_its_stream_named_by_its_launch(tmp_path: Path) -> None:
    start = 10**9 + 30_000
    events = written(tmp_path, launch_and_run(aux0=start, aux1=start + 2500))
    call, ran = of_phase(events, "X")
    assert ("scale", HOST, 10.0, 1.0) == (call["name"], call["pid"], call["ts"], call["dur"])
    assert ("scale", DEVICE, 30.0, 2.5) == (ran["name"], ran["pid"], ran["ts"], ran["dur"])
    expected = {"device": 0, "stream": 5, "grid": [4, 2, 1], "block": [256, 1, 1], "shared_bytes": 64}
    assert expected == ran["args"] == call["args"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "stream 5" == names[ran["pid"], ran["tid"]]


def test_what_a_graph_ran_has_its_own_name(tmp_path: Path) -> None:
    events = written(
        tmp_path,
        trace(
            (Kind.STREAM_CREATE, {"stream": 5}),
            (Kind.GRAPH_LAUNCH, {"name": "cuGraphLaunch", "stream": 5, "correlation": 9}),
            (Kind.EXECUTION, {"stream": 5, "correlation": 9, "name": "scale", "flags": 1, "aux0": 10, "aux1": 20}),
            (Kind.EXECUTION, {"stream": 5, "correlation": 9, "aux0": 20, "aux1": 30}),
        ),
    )
    assert ["scale", "cuGraphLaunch"] == [e["name"] for e in of_phase(events, "X") if e["pid"] == DEVICE]


def test_a_product_has_its_extents(tmp_path: Path) -> None:
    aux0, aux1 = pack_product(8, 128_256, 70_000)
    (call,) = of_phase(written(tmp_path, trace((Kind.GEMM, {"name": "sgemm", "aux0": aux0, "aux1": aux1}))), "X")
    assert [8, 128_256, 70_000] == call["args"]["mnk"]


def test_an_arrow_leads_from_the_launch_to_what_it_ran(tmp_path: Path) -> None:
    start = 10**9 + 30_000
    events = written(tmp_path, launch_and_run(aux0=start, aux1=start + 2500))
    call, ran = of_phase(events, "X")
    begin, end = of_phase(events, "s", "f")
    assert begin["id"] == end["id"]
    assert [(call[k], ran[k]) for k in ("pid", "tid", "ts")] == [(begin[k], end[k]) for k in ("pid", "tid", "ts")]


def test_a_device_clock_of_its_own_is_moved_behind_the_launches(tmp_path: Path) -> None:
    _, ran = of_phase(written(tmp_path, launch_and_run(aux0=700, aux1=3200)), "X")
    assert (10.0, 2.5) == (ran["ts"], ran["dur"])


def test_operations_that_overlap_on_one_stream_get_lanes(tmp_path: Path) -> None:
    events = written(
        tmp_path, trace(*((Kind.EXECUTION, {"stream": 1, "aux0": at, "aux1": at + 20}) for at in (0, 10, 20)))
    )
    first, second, third = of_phase(events, "X")
    assert first["tid"] == third["tid"] != second["tid"]


def test_copies_say_where_to_and_how_much(tmp_path: Path) -> None:
    flags = CopyFlag.DESTINATION_DEVICE | CopyFlag.ASYNC
    (call,) = of_phase(written(tmp_path, trace((Kind.MEMCPY, {"name": "cuMemcpy", "size": 96, "flags": flags}))), "X")
    expected = {"device": 0, "stream": 0, "bytes": 96, "asynchronous": True, "direction": "host to device"}
    assert expected == call["args"]


def balance(events: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """Return how many ranges are open at the end of each thread; check that none ends before it begins."""
    depth: dict[tuple[int, int], int] = defaultdict(int)
    for event in of_phase(events, "B", "E"):
        lane = event["pid"], event["tid"]
        depth[lane] += 1 if event["ph"] == "B" else -1
        assert depth[lane] >= 0
    return depth


@pytest.mark.parametrize("seed", range(5))
def test_ranges_are_balanced_on_every_thread_whatever_was_recorded(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    recorded = [
        (
            chance.choice((Kind.RANGE_PUSH, Kind.RANGE_POP)),
            {"thread": chance.randrange(3), "device": chance.randrange(-1, 2)},
        )
        for _ in range(60)
    ]
    events = written(tmp_path, trace(*recorded, threads=["a", "b", "c"]))
    assert {0} == set(balance(events).values())


def test_a_range_lasts_from_push_to_pop_on_its_thread(tmp_path: Path) -> None:
    events = written(
        tmp_path,
        trace(
            (Kind.RANGE_PUSH, {"name": 'a "step"\n', "device": -1}),
            (Kind.RANGE_PUSH, {"name": "left open", "device": -1}),
            (Kind.RANGE_POP, {"device": -1}),
        ),
    )
    assert [("B", 'a "step"\n', 0.0), ("B", "left open", 10.0), ("E", None, 20.0), ("E", None, 20.0)] == [
        (e["ph"], e.get("name"), e["ts"]) for e in of_phase(events, "B", "E")
    ]


def test_a_mark_is_an_instant_on_its_thread(tmp_path: Path) -> None:
    (mark,) = of_phase(written(tmp_path, trace((Kind.MARK, {"name": "here"}))), "i")
    assert ("here", "t", 0.0) == (mark["name"], mark["s"], mark["ts"])


def test_started_ranges_overlap_and_end_with_the_trace_at_the_latest(tmp_path: Path) -> None:
    events = written(
        tmp_path,
        trace(
            (Kind.RANGE_END, {"aux0": 9}),  # never begun
            (Kind.RANGE_START, {"name": "first", "aux0": 1}),
            (Kind.RANGE_START, {"name": "second", "aux0": 2}),
            (Kind.RANGE_END, {"aux0": 1}),
        ),
    )
    assert [("b", "first", 1, 10.0), ("b", "second", 2, 20.0), ("e", "first", 1, 30.0), ("e", "second", 2, 30.0)] == [
        (e["ph"], e["name"], e["id"], e["ts"]) for e in of_phase(events, "b", "e")
    ]


def test_a_failed_allocation_is_an_instant_with_its_facts(tmp_path: Path) -> None:
    tables = {"frames": [Frame("train.py", "step", 3)], "stacks": [(), (0,)]}
    events = written(tmp_path, trace((Kind.OOM, {"size": 4096, "aux0": 512, "stack": 1}), **tables))
    (failure,) = of_phase(events, "i")
    expected = {"size": 4096, "device_free": 512, "stack": ["step (train.py:3)"]}
    assert ("out of memory", DEVICE, expected) == (failure["name"], failure["pid"], failure["args"])


def test_an_empty_trace_is_a_valid_file(tmp_path: Path) -> None:
    assert {"M"} == {event["ph"] for event in written(tmp_path, trace())}


def test_a_file_that_cannot_be_written_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        perfetto.write(tmp_path / "missing" / "x.json", trace())
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot write"):
        perfetto.write(tmp_path / "folder", torch_snapshot.read(HERE / "graphs__default.pickle.xz"))
    assert ["folder"] == [file.name for file in tmp_path.iterdir()]


def test_part_of_a_rank_in_a_collective_is_told_with_its_communicator(tmp_path: Path) -> None:
    part = {"device": 1, "stream": 2, "correlation": 7, "name": "all_reduce", "size": 64, "aux0": 3}
    ran = {"device": 1, "stream": 2, "correlation": 7, "name": "all_reduce", "aux0": 100, "aux1": 200}
    events = written(
        tmp_path,
        trace(
            (Kind.STREAM_CREATE, {"device": 1, "stream": 2}),
            (Kind.COLLECTIVE, {**part, "aux1": pack_dims(1, 2)}),
            (Kind.EXECUTION, ran),
        ),
    )
    (on_device,) = [event for event in of_phase(events, "X") if event["pid"] >= DEVICE]
    told = {name: on_device["args"][name] for name in ("bytes", "communicator", "rank", "ranks")}
    assert ("all_reduce", {"bytes": 64, "communicator": 3, "rank": 1, "ranks": 2}) == (on_device["name"], told)


def document(path: Path, of: Trace) -> dict[str, Any]:
    perfetto.write(path / "x.json", of)
    content: dict[str, Any] = json.loads((path / "x.json").read_text())
    return content


def test_times_of_a_snapshot_are_those_of_pytorchs_profiler(tmp_path: Path) -> None:
    snapshot = torch_snapshot.read(HERE / "streams_default.pickle.xz")
    content = document(tmp_path, snapshot)
    base = content["baseTimeNanoseconds"]
    assert 0 == base % PERIOD
    first = min(e["ts"] for e in content["traceEvents"] if e["ph"] == "C")
    made = snapshot.of_kind(Kind.BLOCK_ALLOC, Kind.SEGMENT_ALLOC)["time"]
    assert int(made.min()) == base + round(first * 1000)


def test_a_trace_that_knows_both_clocks_has_unix_times(tmp_path: Path) -> None:
    now = 1_795_203_760_097_764_123
    of = trace(
        (Kind.BLOCK_ALLOC, {"address": 512, "size": 100}), header={"start_time_ns": 10**9 - 7, "start_unix_ns": now}
    )
    content = document(tmp_path, of)
    (begin,) = of_phase(content["traceEvents"], "b")
    assert now + 7 == content["baseTimeNanoseconds"] + round(begin["ts"] * 1000)


def test_without_a_known_clock_times_count_from_the_first_event(tmp_path: Path) -> None:
    content = document(tmp_path, trace((Kind.BLOCK_ALLOC, {"address": 512, "size": 100})))
    assert "baseTimeNanoseconds" not in content
    assert [0.0] == [e["ts"] for e in of_phase(content["traceEvents"], "b")]


def test_a_block_is_a_span_named_by_its_call_site(tmp_path: Path) -> None:
    of = trace(
        (Kind.BLOCK_ALLOC, {"address": 512, "size": 1024, "aux0": 1000, "stack": 1, "aux1": 3}),
        (Kind.BLOCK_ALLOC, {"address": 4096, "size": 7}),
        (Kind.BLOCK_FREE_REQUESTED, {"address": 512}),
        (Kind.BLOCK_FREE_COMPLETED, {"address": 512}),
        frames=[Frame("/home/me/train.py", "step", 12)],
        stacks=[(), (0,)],
    )
    events = of_phase(written(tmp_path, of), "b", "e")
    first = [e for e in events if e["id"] == 1]
    assert [("b", 0.0), ("e", 20.0)] == [(e["ph"], e["ts"]) for e in first]
    assert ("train.py:12 (step)", "allocation", DEVICE) == tuple(first[0][k] for k in ("name", "cat", "pid"))
    args = {"address": "0x200", "bytes": 1024, "requested": 1000, "stream": 0, "pool": 3}
    assert args | {"stack": ["step (/home/me/train.py:12)"]} == first[0]["args"]
    assert [("b", 10.0), ("e", 30.0)] == [(e["ph"], e["ts"]) for e in events if e["id"] == 2]


def test_a_block_of_a_librarys_pool_has_its_name(tmp_path: Path) -> None:
    of = trace(
        (Kind.BLOCK_ALLOC, {"address": 0x1000, "size": 512}),
        (Kind.MEM_ALLOC, {"address": 0x8000, "size": 0x2000}),
        (Kind.POOL_ALLOC, {"address": 0x8000, "size": 512, "aux0": 500, "name": 'a "pool"'}),
    )
    begins = of_phase(written(tmp_path, of), "b")
    assert {"0x1000": None, "0x8000": 'a "pool"'} == {
        event["args"]["address"]: event["args"].get("library") for event in begins
    }


def test_stacks_lose_their_outer_frames_where_they_would_fill_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [Frame(f"/home/me/part_{depth}.py", "step", depth) for depth in range(1, 5)]
    blocks = [(Kind.BLOCK_ALLOC, {"address": 512 * i, "size": 512, "stack": 1}) for i in range(1, 101)]
    of = trace(*blocks, frames=frames, stacks=[(), (0, 1, 2, 3)])
    said = len("step (/home/me/part_1.py:1)")
    for limit, kept in ((100 * said * 2, 2), (100 * said * 4 - 1, 3), (0, 1)):
        monkeypatch.setattr(perfetto, "PERFETTO_STACKS", limit)
        assert kept == perfetto.write(tmp_path / "x.json", of)
        args = of_phase(written(tmp_path, of), "b")[0]["args"]
        assert ([f"step (/home/me/part_{n}.py:{n})" for n in range(1, kept + 1)], 4 - kept) == (
            args["stack"],
            args["frames_left_out"],
        )
    monkeypatch.setattr(perfetto, "PERFETTO_STACKS", 100 * said * 4)
    assert perfetto.write(tmp_path / "x.json", of) is None
    assert "frames_left_out" not in of_phase(written(tmp_path, of), "b")[0]["args"]
