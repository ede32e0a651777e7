"""The page's payload, read by a Python twin of its decoder."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import HOSTILE, layered, program, racy
from twin import decode, payload_of, unpack

from cudatool import analyze, viz
from cudatool.collect import torch_snapshot
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Frame, PinnedMemory, Trace
from cudatool.trace.streams import stream_names
from cudatool.units import exact_bytes
from cudatool.viz.payload import Columns, payload

DATA = Path(__file__).resolve().parents[1] / "data"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-(2**51), 2**51)) | st.lists(st.integers(0, 300))))
def test_columns_decode_to_what_they_were(lists: list[list[int]]) -> None:
    columns = Columns()
    described = [columns.add(values) for values in lists]
    assert lists == [decode(column, columns.bytes()) for column in described]


@pytest.mark.parametrize(
    ("below", "scale", "expected"),
    [
        (1, 1, "u8"),
        (1 << 8, 1, "u8"),
        ((1 << 8) + 1, 1, "u16"),
        (1 << 8, 512, "u8"),
        (1 << 16, 1, "u16"),
        ((1 << 16) + 1, 1, "u32"),
        (1 << 32, 1, "u32"),
        ((1 << 32) + 1, 1, "f64"),
    ],
)
def test_columns_take_the_smallest_type(below: int, scale: int, expected: str) -> None:
    values = np.random.default_rng(1).integers(0, below, 5000)
    values[:2] = 0, below - 1
    assert expected == Columns().add((1 << 40) + scale * values)["d"]


def test_times_that_grow_evenly_are_stored_as_differences() -> None:
    column = Columns().add(np.arange(100_000) * 1700 + np.arange(100_000) % 7)
    assert "u8" == column["d"]
    assert "delta" in column


def test_blocks_and_times_arrive_as_the_analysis_has_them() -> None:
    report = analyze.report(torch_snapshot.read(DATA / "graphs__default.pickle.xz"))
    document = unpack(payload(report))
    (device,), (curve,) = document["devices"], report.timelines
    records = report.trace.records
    assert (curve.time - records["time"].min()).tolist() == device["time"]
    for name in ("address", "size"):
        assert getattr(report.blocks, name).tolist() == device["blocks"][name]
    blocks = {name: np.array(values) for name, values in device["blocks"].items()}
    assert report.blocks.requested.tolist() == (blocks["size"] - blocks["slack"]).tolist()
    # Moments are rows of the timeline; what is never freed has the row after the last.
    rows = np.array([*curve.index.tolist(), len(records)])
    assert report.blocks.start.tolist() == rows[blocks["start"]].tolist()
    assert report.blocks.freed.tolist() == rows[blocks["start"] + blocks["lived"]].tolist()
    assert report.blocks.end.tolist() == rows[blocks["start"] + blocks["lived"] + blocks["waited"]].tolist()
    assert curve.peak() == device["peak"]["row"]


def test_what_waited_for_a_stream_already_is_not_drawn_as_allocated() -> None:
    records = np.zeros(4, RECORD)
    records["kind"] = Kind.BLOCK_ALLOC, Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_ALLOC
    records["address"], records["size"] = (512, 1024, 1024, 2048), 512
    for prior, lived in ((0, [4, 1, 1]), (3, [4, 0, 1])):
        trace = Trace(records, header={"prior_records": {0: prior}})
        blocks = unpack(payload(analyze.report(trace)))["devices"][0]["blocks"]
        assert (lived, [0, 3 - lived[1], 0]) == (blocks["lived"], blocks["waited"])


def test_streams_pools_and_sites_arrive_by_name() -> None:
    report = analyze.report(torch_snapshot.read(DATA / "graphs__default.pickle.xz"))
    (device,) = unpack(payload(report))["devices"]
    trace = report.trace
    streams = stream_names(trace)
    for name, label in (("stream", streams.__getitem__), ("pool", lambda pool: analyze.pool_label(trace, pool))):
        expected = [label(number) for number in getattr(report.blocks, name).tolist()]
        assert expected == [device[f"{name}s"][i] for i in device["blocks"][name]]
    sites = device["sites"]
    expected = [f"{exact_bytes(requested)} each" for requested in report.blocks.requested.tolist()]  # it has no stacks
    assert expected == [sites["label"][i] for i in device["blocks"]["site"]]


def test_modules_arrive_with_what_they_hold_and_that_of_each_block() -> None:
    report = analyze.report(layered())
    (device,) = unpack(payload(report))["devices"]
    assert ["", "layers.0", "layers.1", "layers.1", ""] == [device["modules"][i] for i in device["blocks"]["module"]]
    modules = device["diagnosis"]["modules"]
    assert [("layers.1", 2048, 3072), ("layers.0", 1024, 0)] == [
        (row["path"], row["activations"], row["gradients"]) for row in modules["held"]
    ]
    assert [("layers.*", 2, 6144)] == [(row["path"], row["modules"], row["size"]) for row in modules["merged"]]
    assert list(report.diagnoses[0].modules.sentences()) == modules["sentences"]


def test_a_program_without_modules_has_none() -> None:
    (device,) = unpack(payload(analyze.report(program(repeat=2))))["devices"]
    assert device["diagnosis"]["modules"] is None
    assert {""} == {device["modules"][i] for i in device["blocks"]["module"]}


def test_operations_arrive_with_names_and_times_from_the_first_on() -> None:
    document = unpack(payload(analyze.report(program(repeat=2))))
    operations = document["operations"]
    assert [0, 40, 100, 140] == operations["start"]
    assert ["kernel"] * 4 == [document["names"][i] for i in operations["name"]]


def test_what_a_graph_ran_has_its_own_name() -> None:
    records = np.zeros(4, RECORD)
    records["kind"] = Kind.STREAM_CREATE, Kind.GRAPH_LAUNCH, Kind.EXECUTION, Kind.EXECUTION
    records["stream"], records["correlation"], records["name"] = 1, (0, 7, 7, 7), (0, 1, 2, 0)
    records["aux0"], records["aux1"] = (0, 0, 10, 20), (0, 0, 20, 30)
    trace = Trace(records, ["", "cuGraphLaunch", "scale"], [()], [], ["main"], {"device_kind": "sim"}, [], "x")
    document = unpack(payload(analyze.report(trace)))
    assert ["scale", "cuGraphLaunch"] == [document["names"][i] for i in document["operations"]["name"]]


def test_stacks_arrive_innermost_first() -> None:
    document = unpack(payload(analyze.report(program())))
    offsets, frames = document["stacks"]["offset"], document["stacks"]["frame"]
    functions = [document["frames"]["function"][i] for i in frames[offsets[1] : offsets[2]]]
    assert ["kernel", "<module>"] == [document["strings"][i] for i in functions]


def test_an_empty_trace_has_a_payload() -> None:
    document = unpack(payload(analyze.report(program(repeat=0))))
    assert [] == document["devices"]
    assert [] == document["operations"]["start"]


def test_no_name_stands_in_the_page_as_it_is() -> None:
    text = viz.page(analyze.report(program(HOSTILE)))
    assert HOSTILE in unpack(payload_of(text))["names"]
    title = text.split("<title>")[1].split("</title>")[0]
    assert "<" not in title
    assert "hacked" not in text.replace(title, "")


def test_the_page_names_nothing_to_load() -> None:
    text = viz.page(analyze.report(program()))
    assert "default-src 'none'" in text
    assert [] == re.findall(r"(?:src|href)\s*=\s*[\"']?(?!data:)[^\s\"']*//", text)


@pytest.mark.parametrize("timed", [True, False])
def test_findings_point_at_the_operations_that_are_drawn(timed: bool) -> None:
    trace, found = racy(timed=timed)
    unproven = replace(found.findings[0], no_witness="nothing differs")
    document = unpack(payload(analyze.report(trace), replace(found, findings=(unproven,))))
    assert timed == document["operations"]["timed"]
    (defect,) = document["defects"]
    assert [0, 1] == [side["operation"] for side in defect["sides"]]
    assert ["witness  none: nothing differs"] == defect["proof"]
    assert [["/home/kernel.py:3 in kernel", ""]] == defect["sides"][0]["stack"]
    assert ["stream 1", "stream 2"] == [stream["label"] for stream in document["streams"]]


def test_without_a_check_there_are_no_findings_to_show() -> None:
    document = unpack(payload(analyze.report(program())))
    assert document["defects"] is None


def test_frames_carry_their_source_only_if_it_is_python_and_older_than_the_recording(tmp_path: Path) -> None:
    old, new, other = tmp_path / "old.py", tmp_path / "new.py", tmp_path / "secrets.txt"
    for file in (old, new, other):
        file.write_text("zero\n    one()\n")
        os.utime(file, (1000, 1000))
    os.utime(new, (3000, 3000))
    trace = program()
    trace.frames[:] = [Frame(str(file), "f", 2) for file in (old, new, other, tmp_path / "gone.py")]
    trace.stacks[:] = [(), (0, 1, 2, 3)]

    def code() -> list[str]:
        document = unpack(payload(analyze.report(trace)))
        return [document["strings"][i] for i in document["frames"]["code"]]

    trace.header["start_time"] = "1970-01-01T00:33:20+00:00"  # 2000 s
    assert ["one()", "", "", ""] == code()
    trace.header["start_time"] = "nonsense"
    assert [""] * 4 == code()


def test_a_line_of_source_that_is_too_long_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("x = " + "1" * 100_000)
    os.utime(file, (1000, 1000))
    trace = program()
    trace.frames[:] = [Frame(str(file), "f", 1)] * 2
    trace.header["start_time"] = "1970-01-01T00:33:20+00:00"
    document = unpack(payload(analyze.report(trace)))
    assert ("x = " + "1" * 296) == document["strings"][document["frames"]["code"][0]]


def test_pinned_memory_arrives_as_the_recording_has_it_and_none_where_it_has_none() -> None:
    snapshot = torch_snapshot.read(DATA / "graphs__default.pickle.xz")
    for pinned in (None, PinnedMemory(segments=2, reserved=4096, active=512, peak_active=1024, events=3)):
        document = unpack(payload(analyze.report(replace(snapshot, pinned=pinned))))
        assert (None if pinned is None else asdict(pinned)) == document["pinned"]


def test_a_frame_of_compiled_code_shows_its_node_where_there_is_no_source() -> None:
    snapshot = torch_snapshot.read(DATA / "graphs__default.pickle.xz")
    frames = [Frame("<eval_with_key>.0", "forward", 7), Frame("<eval_with_key>.0", "forward", 8)]
    node = {"fx_node_name": "relu", "fx_node_target": "torch.relu", "fx_original_trace": "File x\n  y = relu(x)\n"}
    trace = replace(snapshot, frames=frames, stacks=[(), (0, 1)], frame_facts={0: node, 1: {"fx_node_name": 5}})
    document = unpack(payload(analyze.report(trace)))
    code = [document["strings"][i] for i in document["frames"]["code"]]
    assert ["FX node relu (torch.relu): y = relu(x)", ""] == code
