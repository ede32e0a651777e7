"""Reading a snapshot, writing it and reading it again: the same facts."""

from __future__ import annotations

import lzma
import pickle
import re
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generated import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import converted
from rich.console import Console
from snapshot_files import dump, event, plain, segment

from cudatool import analyze
from cudatool.cli._snapshot_text import print_report
from cudatool.cli._sources import read_trace
from cudatool.collect import torch_snapshot
from cudatool.errors import OutputError, SnapshotFormatError
from cudatool.export import torch_pickle
from cudatool.memory.settings import UNLIMITED
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import PinnedMemory, Trace

MIB = 1 << 20
BASE = 1 << 40


def facts(snapshot: torch_snapshot.MemorySnapshot) -> dict[str, Any]:
    """Everything that a snapshot holds, whatever the numbers of its tables' entries."""
    records = snapshot.records
    columns = ("time", "kind", "device", "flags", "address", "size", "aux0", "stream", "aux1")
    said = {}
    for key, fact in snapshot.facts.items():
        numbers = np.broadcast_to(fact.number, len(records)).tolist()
        kinds = records["kind"].tolist()
        said[key] = [
            fact.values[number - 1] if number else None
            for number, kind in zip(numbers, kinds, strict=True)
            if Kind.BLOCK_ALLOC <= kind <= Kind.OOM
        ]
    names = [snapshot.metadata.get(name, snapshot.names[name]) for name in records["name"].tolist()]
    frames = [(*frame, snapshot.frame_facts.get(i, {})) for i, frame in enumerate(snapshot.frames)]
    return {
        "records": records[list(columns)].tolist(),
        "names": names,
        "stacks": [[frames[i] for i in snapshot.stacks[stack]] for stack in records["stack"].tolist()],
        "facts": said,
        "segments": snapshot.segments,
        "settings": snapshot.settings,
        "more": snapshot.more,
        "header": snapshot.header,
        "notes": snapshot.notes,
    }


def again(path: Path, snapshot: torch_snapshot.MemorySnapshot) -> torch_snapshot.MemorySnapshot:
    torch_pickle.write(path, snapshot, [])
    return torch_snapshot.read(path)


@converted()
def test_a_recording_that_was_written_again_holds_the_same_and_replays_as_exactly(path: Path, tmp_path: Path) -> None:
    original = torch_snapshot.read(path)
    copy = again(tmp_path / "x", original)
    expected, found = facts(original), facts(copy)
    # What no record was made of is written by its default.
    del expected["facts"], found["facts"]
    assert expected == found
    (check,) = [analyze.check(copy, 0, analyze.recorded_settings(copy)[0])]
    assert check.is_exact


_frame = st.fixed_dictionaries(
    {"filename": st.sampled_from(["a.py", "b.py"]), "name": st.sampled_from("fg"), "line": st.integers(0, 3)},
    optional={"fx_node_name": st.sampled_from(["relu", "addmm"]), "fx_original_trace": st.just("x = f(y)\n")},
)
_frames = st.lists(_frame, max_size=3)
_metadata = st.sampled_from(["", "step", {"layer": 3, "name": "x"}, {"layer": "3"}])


@st.composite
def _device(draw: st.DrawFn, number: int) -> tuple[list[Any], list[Any]]:
    """A device's ring, which may begin in the middle, and its final state: blocks of 1 MiB in one segment."""
    events: list[dict[str, Any]] = [event("segment_alloc", BASE, 20 * MIB)]
    live: set[int] = set()
    for place in draw(st.lists(st.integers(0, 9), max_size=20)):
        address = BASE + 2 * MIB * place
        if place in live:
            live.remove(place)
            events += [event(action, address, 2 * MIB) for action in ("free_requested", "free_completed")]
        else:
            live.add(place)
            events.append(event("alloc", address, 2 * MIB))
    if draw(st.booleans()):
        entry = event(
            "oom", 0, draw(st.sampled_from([1 << 40, (1 << 63) - 1])), device_free=draw(st.integers(0, 1 << 40))
        )
        del entry["addr"]
        events.append(entry)
    for i, entry in enumerate(events):
        entry |= {"time_us": 1_000_000 + 10 * i + number, "frames": draw(_frames), "user_metadata": draw(_metadata)}
        if draw(st.booleans()):
            entry |= {"compile_context": draw(st.sampled_from(["N/A", "1/0"])), "category": "gradient"}
    pieces = [(2 * MIB, "active_allocated" if place in live else "inactive") for place in range(10)]
    begin = draw(st.integers(0, len(events)))
    return events[begin:], [segment(BASE, 20 * MIB, *pieces, device=number, frames=draw(_frames), is_private=False)]


@st.composite
def _snapshots(draw: st.DrawFn) -> dict[str, Any]:
    devices = [draw(_device(number)) for number in range(draw(st.integers(1, 2)))]
    annotation = {"device": 0, "time_us": 1_000_005, "name": "step", "more": 1}
    return {
        "segments": [one for _, segments in devices for one in segments],
        "device_traces": [ring for ring, _ in devices],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": draw(st.sampled_from([-1, 64 * MIB]))},
        "external_annotations": draw(
            st.sampled_from([[], [{"stage": "START", **annotation}, {"stage": "END", **annotation}]])
        ),
        "host_traces": [[event("alloc", 4096, 100)]],
        "of_tomorrow": {"list": [1, 2, [3]]},
    }


@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=_snapshots())
def test_any_snapshot_reads_back_the_same(tmp_path: Path, data: dict[str, Any]) -> None:
    first = torch_snapshot.read(dump(data, tmp_path / "x"))
    expected, found = facts(first), facts(again(tmp_path / "y", first))
    assert expected == found
    assert data["host_traces"] == first.more["host_traces"]
    assert data["of_tomorrow"] == first.more["of_tomorrow"]


def test_events_that_no_record_has_fields_for_are_written_as_they_were(tmp_path: Path) -> None:
    frames = [{"filename": "a.py", "name": "f", "line": 3}]
    more = {"frames": frames, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
    rings = [
        [
            event("segment_alloc", BASE, 2 * MIB, time_us=10 + i, **more),
            event("snapshot", 0, 123, time_us=11 + i, frames=frames, user_metadata={"of": "a dump"}),
            event("alloc", BASE, 512, time_us=12 + i, **more),
            {"action": "teleport", "addr": "far", "time_us": "soon", "to": [1, {"a": 2}]},
            event("snapshot", 0, 1 << 60, time_us=14 + i),
        ]
        for i in range(2)
    ]
    data = {"segments": [], "device_traces": [rings[0], [], rings[1]], "allocator_settings": {}}
    first = torch_snapshot.read(dump(data, tmp_path / "x"))
    torch_pickle.write(tmp_path / "y", first, [])
    written = pickle.loads((tmp_path / "y").read_bytes())
    assert data["device_traces"] == written["device_traces"]
    index = np.flatnonzero(first.records["kind"] == Kind.MARK)[2:]
    part = first.selecting(first.records[index], index)
    torch_pickle.write(tmp_path / "z", part, [])
    written = pickle.loads((tmp_path / "z").read_bytes())
    assert 4 == sum(map(len, written["device_traces"]))
    assert all(one in rings[0] + rings[1] for ring in written["device_traces"] for one in ring)


@converted()
def test_nothing_of_a_recording_is_lost_when_it_is_written_again(path: Path, tmp_path: Path) -> None:
    data = pickle.loads(lzma.decompress(path.read_bytes()))
    torch_pickle.write(tmp_path / "y", torch_snapshot.read(path), [])
    written = pickle.loads((tmp_path / "y").read_bytes())
    rings, copies = data.pop("device_traces"), written.pop("device_traces")
    assert data == {key: value for key, value in written.items() if key in data}
    assert [len(ring) for ring in rings] == [len(ring) for ring in copies]
    for ring, copy in zip(rings, copies, strict=True):
        assert all(event.items() <= one.items() for event, one in zip(ring, copy, strict=True))


def test_what_compiled_code_says_of_itself_is_kept(tmp_path: Path) -> None:
    node = {"filename": "g.py", "name": "f", "line": 3, "fx_node_name": "relu", "fx_node_op": "call_function"}
    bare = {"filename": "g.py", "name": "f", "line": 3}
    ring = [
        event("alloc", BASE, 512, frames=[node], compile_context="0/0"),
        event("alloc", BASE + 512, 512, frames=[bare], compile_context="N/A"),
    ]
    first = torch_snapshot.read(dump({"segments": [], "device_traces": [ring]}, tmp_path / "x"))
    torch_pickle.write(tmp_path / "y", first, [])
    written = pickle.loads((tmp_path / "y").read_bytes())["device_traces"][0]
    assert [["0/0", [node]], ["N/A", [bare]]] == [[e["compile_context"], e["frames"]] for e in written]


def test_pinned_memory_is_counted_and_shown(tmp_path: Path) -> None:
    ring = [
        event("alloc", 4096, 100),
        event("alloc", 8192, 1000),
        event("free_requested", 4096, 100),
        event("free_completed", 4096, 100),
    ]
    data = {
        "segments": [],
        "device_traces": [],
        "host_segments": [segment(0, 8 * MIB, (MIB, "active_allocated"), (7 * MIB, "inactive"))],
        "host_traces": ring,
    }
    snapshot = torch_snapshot.read(dump(data, tmp_path / "x"))
    assert PinnedMemory(1, 8 * MIB, MIB, MIB + 100, 4) == snapshot.pinned
    report = analyze.report(snapshot)
    assert MIB + 100 == report.as_dict()["pinned"]["peak_active"]
    console = Console(file=StringIO(), width=100)
    print_report(console, report)
    assert re.search(r"In use +1 MiB +1 MiB", console.file.getvalue())  # type: ignore[attr-defined]
    assert snapshot.pinned == again(tmp_path / "y", snapshot).pinned


def test_pinned_memory_of_another_schema_is_said_and_not_shown(tmp_path: Path) -> None:
    data = {"segments": [], "device_traces": [[event("alloc", BASE, 512)]], "host_segments": [{"bytes": 1}]}
    snapshot = torch_snapshot.read(dump(data, tmp_path / "x"))
    assert snapshot.pinned is None
    assert "pinned host memory have an unknown form ('address')" in snapshot.notes[-1]
    assert [{"bytes": 1}] == again(tmp_path / "y", snapshot).more["host_segments"]


def test_lists_without_end_are_refused_and_not_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(SnapshotFormatError, match="nested too deeply"):
        torch_snapshot.read(dump({"segments": [], "device_traces": [], "new": deep}, tmp_path / "x"))
    snapshot = torch_snapshot.MemorySnapshot(np.zeros(0, RECORD), segments=[{"new": _nested(100_000)}])
    with pytest.raises(OutputError, match="cannot write"):
        torch_pickle.write(tmp_path / "y", snapshot, [])
    assert not (tmp_path / "y").exists()


def _nested(depth: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result


def test_settings_and_ranges_of_our_own_traces_are_written(tmp_path: Path) -> None:
    records = np.zeros(3, RECORD)
    records["kind"] = [Kind.RANGE_PUSH, Kind.BLOCK_ALLOC, Kind.RANGE_POP]
    records["time"] = [5000, 6000, 7000]
    records["device"] = [-1, 0, -1]
    records["name"][0] = 1
    records["address"], records["size"], records["aux0"] = BASE, 512, 512
    conf = "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True"
    trace = Trace(records, names=["", "step"], header={"allocator_conf": conf})
    torch_pickle.write(tmp_path / "x", trace, [], analyze.torch_settings(trace))
    copy = torch_snapshot.read(tmp_path / "x")
    expected, _ = analyze.recorded_settings(trace)
    found, _ = analyze.recorded_settings(copy)
    assert expected == found
    assert 64 * MIB == found.max_split_size != UNLIMITED
    said = {"name": "step", "device": 0}
    assert [{"stage": "START", **said, "time_us": 5}, {"stage": "END", **said, "time_us": 7}] == copy.more[
        "external_annotations"
    ]


def test_the_commands_write_what_they_read(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from cudatool.cli.export import export

    source = dump(plain("streams_default"), tmp_path / "x.pickle")
    done = CliRunner().invoke(export, [str(source), "--to", "torch", "-o", str(tmp_path / "y.pickle")])
    assert 0 == done.exit_code, done.output
    first, second = (read_trace(path) for path in (source, tmp_path / "y.pickle"))
    assert first.records.tolist() == second.records.tolist()
