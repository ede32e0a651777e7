"""What a PyTorch snapshot says of torch.compile stands at its call sites: in reports, in JSON and on the page."""

from __future__ import annotations

import json
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from snapshot_files import dump, event, segment

from cudatool import analyze
from cudatool.cli.diff import diff
from cudatool.cli.leaks import leaks
from cudatool.cli.snapshot import snapshot as snapshot_command
from cudatool.collect import torch_snapshot
from cudatool.export import perfetto, sqlite
from cudatool.trace.events import Kind
from cudatool.viz.diff_page import diff_payload
from cudatool.viz.payload import payload

BASE = 0x7F0000000000
MIB = 1 << 20
NODE = {"filename": "g.py", "name": "forward", "line": 3, "fx_node_name": "addmm_1", "fx_node_op": "call_function"}
NOT_IN_SNAPSHOTS: dict[str, Any] = {"nodes": [], "module": "", "buffer": "", "reused_by": []}
PLAIN = {"filename": "/home/me/train.py", "name": "step", "line": 12}


def pickle_of(path: Path, events: list[dict[str, Any]]) -> Path:
    """Write what PyTorch's _dump_snapshot() does: every event has a ``compile_context``, "N/A" outside of one."""
    live = [(e["size"], "active_allocated") for e in events]
    return dump({"segments": [segment(BASE, MIB * len(live), *live)], "device_traces": [events]}, path)


def unpack(page: bytes) -> dict[str, Any]:
    """Return the document of a page's payload."""
    (size,) = struct.unpack_from("<I", page)
    document: dict[str, Any] = json.loads(page[4 : 4 + size])
    return document


def alloc(number: int, context: str, *frames: dict[str, Any]) -> dict[str, Any]:
    more = {"compile_context": context, "frames": list(frames), "time_us": 1000 + number}
    return event("alloc", BASE + number * MIB, MIB, **more)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    events = [alloc(0, "0/0", NODE, PLAIN), alloc(1, "1/0", NODE, PLAIN), alloc(2, "N/A", PLAIN)]
    return pickle_of(tmp_path / "x.pickle", events)


def test_a_site_names_its_compilations_and_node(snapshot: Path) -> None:
    (device,) = analyze.report(torch_snapshot.read(snapshot)).summary.devices
    assert [analyze.Compiled(("0/0", "1/0"), "addmm_1"), analyze.Compiled()] == [s.compiled for s in device.at_peak]


def test_one_context_of_all_events_stands_at_every_site(tmp_path: Path) -> None:
    path = pickle_of(tmp_path / "x.pickle", [alloc(i, "7/2", PLAIN) for i in range(3)])
    (device,) = analyze.report(torch_snapshot.read(path)).summary.devices
    assert [analyze.Compiled(("7/2",))] == [site.compiled for site in device.at_peak]


def test_snapshot_prints_them_and_has_them_in_json(snapshot: Path) -> None:
    text = CliRunner().invoke(snapshot_command, [str(snapshot)], terminal_width=300)
    assert "[compiled 0/0, 1/0, FX node addmm_1]" in " ".join(text.output.split())
    document = json.loads(CliRunner().invoke(snapshot_command, [str(snapshot), "--json"]).stdout)
    found = [site["compiled"] for site in document["devices"][0]["at_peak"]]
    assert [
        {"contexts": ["0/0", "1/0"], "fx_node": "addmm_1", **NOT_IN_SNAPSHOTS},
        {"contexts": [], "fx_node": "", **NOT_IN_SNAPSHOTS},
    ] == found


def test_a_leak_of_compiled_code_names_the_compilation(tmp_path: Path) -> None:
    kept = [alloc(i, "3/1", NODE, PLAIN) for i in range(200)]
    (found,) = analyze.leaks_of(torch_snapshot.read(pickle_of(tmp_path / "x.pickle", kept)))
    growing = [*found.found, *found.unclear]
    assert growing
    assert {analyze.Compiled(("3/1",), "addmm_1")} == {leak.compiled for leak in growing}
    result = CliRunner().invoke(leaks, [str(tmp_path / "x.pickle")])
    assert "[compiled 3/1, FX" in result.output
    assert "node addmm_1]" in result.output


COMPILED = "g.py:3 (forward) [compiled 3/1, FX node addmm_1]"
OWN_CODE = {**NODE, "filename": "/home/me/g.py"}


def test_exports_name_compilations_nodes_and_metadata(tmp_path: Path) -> None:
    events = [alloc(0, "0/0", NODE, PLAIN), alloc(1, "N/A", PLAIN) | {"user_metadata": 'a "tag"'}]
    events.append({**event("oom", BASE, MIB), "compile_context": "1/0", "time_us": 1002, "frames": [PLAIN]})
    trace = torch_snapshot.read(pickle_of(tmp_path / "x.pickle", events))
    perfetto.write(tmp_path / "x.json", trace)
    written = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    keys = ("compile_context", "fx_node", "user_metadata")
    said = [{key: e["args"][key] for key in keys if key in e["args"]} for e in written if e["ph"] in "bi"]
    assert [
        {"compile_context": "0/0", "fx_node": "addmm_1"},
        {"user_metadata": 'a "tag"'},
        {"compile_context": "1/0"},
    ] == [args for args in said if args]
    sqlite.write(tmp_path / "x.sqlite", trace)
    with closing(sqlite3.connect(tmp_path / "x.sqlite")) as database:
        rows = database.execute(
            "SELECT e.kind, context FROM compile_contexts c JOIN events e ON e.id = c.event"
        ).fetchall()
        assert [(Kind.BLOCK_ALLOC, "0/0"), (Kind.OOM, "1/0")] == rows
        nodes = database.execute("SELECT function, fx_node FROM frames ORDER BY id").fetchall()
    assert [("forward", "addmm_1"), ("step", None)] == nodes


@pytest.mark.parametrize("frames", [(OWN_CODE,), ()], ids=["stacks", "no stacks"])
def test_every_place_that_names_a_leak_names_its_compilation(tmp_path: Path, frames: tuple[dict[str, Any]]) -> None:
    """Backward passes run on threads without frames: there, the compilation is all that is known."""
    rows = [event("segment_alloc", BASE, 4000 * MIB)]
    for i in range(1200):  # each step keeps a block, and replaces another
        number = 3 * i
        rows += [alloc(number, "3/1", *frames), alloc(number + 1, "N/A", PLAIN)]
        rows += [
            event("free_requested", BASE + (number + 1) * MIB, MIB),
            event("free_completed", BASE + (number + 1) * MIB, MIB),
        ]
    path = dump(
        {"segments": [segment(BASE, 4000 * MIB, (MIB, "active_allocated"))], "device_traces": [rows]},
        tmp_path / "x.pickle",
    )
    report = analyze.report(torch_snapshot.read(path))
    (diagnosis,) = report.diagnoses
    growing = [*diagnosis.leaks.found, *diagnosis.leaks.unclear]
    assert [("3/1",)] == [leak.compiled.contexts for leak in growing]
    said = unpack(payload(report))["devices"][0]["diagnosis"]["leaks"]
    assert all("[compiled 3/1" in leak["label"] for leak in (*said["leaks"], *said["unclear"]))
    assert all("[compiled 3/1" in remedy.text for remedy in diagnosis.advice if remedy.topic == "leak")


def test_a_comparison_names_the_compilations_of_both(tmp_path: Path) -> None:
    old, new = (
        pickle_of(tmp_path / f"{name}.pickle", [alloc(i, name, OWN_CODE, PLAIN) for i in range(count)])
        for name, count in (("1", 2), ("2", 3))
    )
    text = CliRunner().invoke(diff, [str(old), str(new)], terminal_width=300)
    assert "g.py:3 (forward) [compiled 2, 1, FX node addmm_1]" in " ".join(text.output.split())
    document = json.loads(CliRunner().invoke(diff, [str(old), str(new), "--json"]).stdout)
    (row,) = document["devices"][0]["rows"]
    assert {"contexts": ["2", "1"], "fx_node": "addmm_1", **NOT_IN_SNAPSHOTS} == row["compiled"]
    before, after = torch_snapshot.read(old), torch_snapshot.read(new)
    page = unpack(diff_payload(before, after, analyze.diff(before, after)))
    assert ["g.py:3 (forward) [compiled 2, 1, FX node addmm_1]"] == [row["label"] for row in page["devices"][0]["rows"]]


def test_what_pins_a_hole_names_its_compilation(tmp_path: Path) -> None:
    events = [event("segment_alloc", BASE, 64 * MIB), alloc(0, "N/A", PLAIN), alloc(40, "3/1", OWN_CODE)]
    events += [event("free_requested", BASE, MIB), event("free_completed", BASE, MIB)]
    events += [event("segment_alloc", BASE + 64 * MIB, 60 * MIB), alloc(64, "N/A", PLAIN)]
    layout = [(40 * MIB, "inactive"), (MIB, "active_allocated"), (23 * MIB, "inactive")]
    segments = [segment(BASE, 64 * MIB, *layout), segment(BASE + 64 * MIB, 60 * MIB, (MIB, "active_allocated"))]
    path = dump({"segments": segments, "device_traces": [events]}, tmp_path / "x.pickle")
    report = analyze.report(torch_snapshot.read(path))
    text = CliRunner().invoke(snapshot_command, [str(path)], terminal_width=300)
    assert f"pinned by 1 MiB of {COMPILED}" in " ".join(text.output.split())
    (moment,) = unpack(payload(report))["devices"][0]["diagnosis"]["fragmentation"]
    assert COMPILED in [pin["label"] for hole in moment["holes"] for pin in hole["pins"]]


def test_the_page_has_them_in_the_labels_of_sites(snapshot: Path) -> None:
    page = payload(analyze.report(torch_snapshot.read(snapshot)))
    assert b"[compiled 0/0, 1/0, FX node addmm_1]" in page


@pytest.mark.parametrize("value", [5, None, 1.5, "N/A"], ids=repr)
def test_what_is_no_id_is_no_compilation(tmp_path: Path, value: Any) -> None:
    frame = {**PLAIN, "fx_node_name": value if value != "N/A" else 7}
    path = pickle_of(tmp_path / "x.pickle", [alloc(0, value, frame), alloc(1, "1/0", frame)])
    (device,) = analyze.report(torch_snapshot.read(path)).summary.devices
    assert [analyze.Compiled(("1/0",))] == [site.compiled for site in device.at_peak]
