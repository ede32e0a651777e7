from __future__ import annotations

import gzip
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import HERE, SHARED, all_of_them, converted, read, report_of
from snapshot_files import dump, event, plain, segment, stats_of

from cudatool import analyze
from cudatool.collect import plain_pickle, torch_snapshot
from cudatool.collect.torch_columns import EventColumns
from cudatool.errors import OutputError, SnapshotFormatError
from cudatool.export import torch_pickle
from cudatool.memory.rounding import round_sizes
from cudatool.memory.settings import Settings
from cudatool.trace.events import Kind, StreamFlag
from cudatool.trace.model import Frame

MIB = 1 << 20
BASE = 1 << 40


def live(snapshot: torch_snapshot.MemorySnapshot, index: int = -1) -> list[tuple[int, int, str]]:
    """Address, size and state of every block that occupies memory right after a record."""
    blocks, segments = analyze.blocks(snapshot), analyze.segments(snapshot)
    at = analyze.segments_at(blocks, segments, index % len(snapshot.records))
    return [(b.address, b.size, b.state) for s in at for b in s.blocks if b.state != "inactive"]


def final(snapshot: torch_snapshot.MemorySnapshot) -> list[tuple[int, int, str]]:
    """The same from the snapshot's own final state."""
    blocks = [b for s in snapshot.segments for b in s["blocks"] if b["state"] != "inactive"]
    return sorted((b["address"], b["size"], b["state"]) for b in blocks)


@converted()
def test_a_recording_gives_the_bytes_that_pytorch_counted(path: Path) -> None:
    snapshot = read(path)
    device = report_of(path).summary.devices[0]
    stats = stats_of(path)
    expected = {key: stats[f"{key}.all.peak"] for key in ("allocated_bytes", "active_bytes", "reserved_bytes")}
    assert expected == {
        "allocated_bytes": device.peak.allocated,
        "active_bytes": device.peak_active,
        "reserved_bytes": device.peak_reserved,
    }
    assert stats["active_bytes.all.current"] == device.now.active
    assert stats["reserved_bytes.all.current"] == device.now.reserved
    assert stats["active.all.allocated"] == device.allocations
    assert stats["num_ooms"] == device.ooms
    assert final(snapshot) == live(snapshot)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the larger recordings are not on this machine")
def test_all_recordings_are_there() -> None:
    assert 12 == len(all_of_them())


@pytest.mark.parametrize("protocol", range(6))
def test_every_pickle_protocol_reads_the_same(tmp_path: Path, protocol: int) -> None:
    original = torch_snapshot.read(HERE / "streams_default.pickle.xz")
    copy = torch_snapshot.read(dump(plain("streams_default"), tmp_path / "x.pickle", protocol))
    assert original.records.tolist() == copy.records.tolist()
    assert original.frames == copy.frames
    assert original.segments == copy.segments


def test_gzip_reads_as_plain_does(tmp_path: Path) -> None:
    packed = tmp_path / "x.pickle.gz"
    packed.write_bytes(gzip.compress(lzma.decompress((HERE / "graphs__default.pickle.xz").read_bytes())))
    expected = torch_snapshot.read(HERE / "graphs__default.pickle.xz").records.tolist()
    assert expected == torch_snapshot.read(packed).records.tolist()


def test_streams_are_ids_that_carry_their_handles(tmp_path: Path) -> None:
    events = [event("alloc", BASE, 512, stream=0), event("alloc", BASE + 512, 512, stream=0xABC)]
    snapshot = torch_snapshot.read(dump({"segments": [], "device_traces": [events]}, tmp_path / "x"))
    streams = snapshot.of_kind(Kind.STREAM_CREATE)
    assert [(1, 0), (2, 0xABC)] == list(zip(streams["stream"].tolist(), streams["address"].tolist(), strict=True))
    assert [StreamFlag.LEGACY_DEFAULT, StreamFlag.NON_BLOCKING] == streams["flags"].tolist()
    assert [1, 2] == snapshot.of_kind(Kind.BLOCK_ALLOC)["stream"].tolist()


def test_stacks_are_interned_innermost_first(tmp_path: Path) -> None:
    frames = [{"filename": "a.py", "line": 3, "name": "inner"}, {"filename": "b.py", "line": 9, "name": "<module>"}]
    events = [event("alloc", BASE + 512 * i, 512, frames=[dict(f) for f in frames]) for i in range(3)]
    snapshot = torch_snapshot.read(dump({"segments": [], "device_traces": [events]}, tmp_path / "x"))
    assert [1, 1, 1] == snapshot.of_kind(Kind.BLOCK_ALLOC)["stack"].tolist()
    assert (Frame("a.py", "inner", 3), Frame("b.py", "<module>", 9)) == snapshot.stack(1)


def test_annotations_become_ranges(tmp_path: Path) -> None:
    data = {
        "segments": [],
        "device_traces": [[event("alloc", BASE, 512, time_us=5), event("alloc", BASE + 512, 512, time_us=9)]],
        "external_annotations": [
            {"stage": "START", "name": "step", "device": 0, "time_us": 7},
            {"stage": "END", "name": "step", "device": 0, "time_us": 8},
        ],
    }
    snapshot = torch_snapshot.read(dump(data, tmp_path / "x"))
    kinds = [Kind.STREAM_CREATE, Kind.BLOCK_ALLOC, Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.BLOCK_ALLOC]
    assert kinds == snapshot.records["kind"].tolist()
    assert ["step"] == [snapshot.names[i] for i in snapshot.of_kind(Kind.RANGE_PUSH)["name"]]


def test_without_times_the_order_is_the_axis(tmp_path: Path) -> None:
    events = [event("alloc", BASE, 512), event("free_requested", BASE, 512), event("free_completed", BASE, 512)]
    snapshot = torch_snapshot.read(dump({"segments": [], "device_traces": [events]}, tmp_path / "x"))
    assert "index" == snapshot.header["time_axis"]
    assert [0, 1, 2] == snapshot.records["time"][1:].tolist()


def test_old_single_free_event_means_both(tmp_path: Path) -> None:
    events = [event("alloc", BASE, 512), event("free", BASE, 512)]
    snapshot = torch_snapshot.read(dump({"segments": [], "device_traces": [events]}, tmp_path / "x"))
    expected = [Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED]
    assert expected == snapshot.records["kind"][1:].tolist()


def test_unknown_events_are_marks_and_named(tmp_path: Path) -> None:
    events = [event("alloc", BASE, 512), event("teleport", BASE, 512), event("snapshot", 0, 512)]
    snapshot = torch_snapshot.read(dump({"segments": [], "device_traces": [events]}, tmp_path / "x"))
    assert ["events of unknown kinds are kept, but mean nothing here: teleport"] == snapshot.notes
    assert [Kind.BLOCK_ALLOC, Kind.MARK, Kind.MARK] == snapshot.records["kind"][-3:].tolist()
    assert ["teleport", "snapshot"] == [snapshot.names[name] for name in snapshot.records["name"][-2:].tolist()]


def test_old_list_of_segments_reads_with_frames_from_history(tmp_path: Path) -> None:
    frame = {"filename": "a.py", "line": 3, "name": "f"}
    block = {"size": 512, "state": "active_allocated", "history": [{"real_size": 100, "frames": [frame]}]}
    old = {"address": BASE, "total_size": 2 * MIB, "segment_type": "small", "device": 0, "stream": 0}
    rest = {"size": 2 * MIB - 512, "state": "inactive"}
    snapshot = torch_snapshot.read(dump([{**old, "blocks": [rest, block]}], tmp_path / "x"))
    alloc = snapshot.of_kind(Kind.BLOCK_ALLOC)
    assert [(BASE + 2 * MIB - 512, 512, 100)] == alloc[["address", "size", "aux0"]].tolist()
    assert (Frame("a.py", "f", 3),) == snapshot.stack(int(alloc["stack"][0]))
    assert ["no history was recorded: only the final state is known"] == snapshot.notes


def test_devices_are_merged_by_time(tmp_path: Path) -> None:
    traces = [
        [event("alloc", BASE, 512, time_us=t) for t in (1, 4)],
        [event("alloc", BASE, 512, time_us=t) for t in (2, 3)],
    ]
    snapshot = torch_snapshot.read(dump({"segments": [], "device_traces": traces}, tmp_path / "x"))
    assert [0, 1, 1, 0] == snapshot.of_kind(Kind.BLOCK_ALLOC)["device"].tolist()


@pytest.mark.parametrize("name", ["streams_default", "graphs__default"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_state_at_a_ring_start_is_inferred(tmp_path: Path, name: str, share: float) -> None:
    whole = torch_snapshot.read(HERE / f"{name}.pickle.xz")
    data = plain(name)
    trace = data["device_traces"][0]
    data["device_traces"] = [trace[int(len(trace) * share) :]]
    part = torch_snapshot.read(dump(data, tmp_path / "x"))
    assert final(part) == live(part)
    # The ring's first event: everything that was live right before it in the whole recording is there.
    kept = len(data["device_traces"][0])
    if kept:
        assert live(whole, len(whole.records) - kept - 1) == live(part, len(part.records) - kept - 1)
        assert bool(share) == any("already allocated" in note for note in part.notes)


def test_mapped_pages_at_a_ring_start_are_inferred(tmp_path: Path) -> None:
    # Before: pages 0-3 mapped. In the ring: page 1 goes, page 4 comes. At the end: 0, 2, 3, 4.
    page = 2 * MIB
    events = [event("segment_unmap", BASE + page, page), event("segment_map", BASE + 4 * page, page)]
    more: dict[str, Any] = {"is_expandable": True, "segment_type": "small"}
    segments = [
        segment(BASE, page, (page, "inactive"), **more),
        segment(BASE + 2 * page, 3 * page, (3 * page, "inactive"), **more),
    ]
    snapshot = torch_snapshot.read(dump({"segments": segments, "device_traces": [events]}, tmp_path / "x"))
    mapped = snapshot.records[1:-2]
    assert [(Kind.SEGMENT_MAP, BASE, 4 * page)] == mapped[["kind", "address", "size"]].tolist()
    reserved = analyze.segments(snapshot).at(len(snapshot.records) - 1)
    assert 4 * page == int(reserved.size.sum())


def test_a_block_waiting_for_a_stream_before_the_ring_keeps_waiting(tmp_path: Path) -> None:
    data = {
        "segments": [segment(BASE, 20 * MIB, (4 * MIB, "active_pending_free"), (16 * MIB, "inactive"))],
        "device_traces": [[event("free_completed", BASE + 8 * MIB, 2 * MIB)]],
    }
    snapshot = torch_snapshot.read(dump(data, tmp_path / "x"))
    assert [(BASE, 4 * MIB, "active_pending_free")] == live(snapshot)
    before = live(snapshot, len(snapshot.records) - 2)
    assert [(BASE, 4 * MIB, "active_pending_free"), (BASE + 8 * MIB, 2 * MIB, "active_pending_free")] == before


@pytest.mark.parametrize(
    ("request_bytes", "size"),
    [(19 * MIB, 20 * MIB), (19 * MIB - 512, 19 * MIB - 512)],
    ids=["1 MiB left", "more than 1 MiB left"],
)
def test_an_unsplit_tail_belongs_to_its_block(tmp_path: Path, request_bytes: int, size: int) -> None:
    events = [event("segment_alloc", BASE, 20 * MIB), event("alloc", BASE, request_bytes)]
    snapshot = torch_snapshot.read(dump({"segments": [], "device_traces": [events]}, tmp_path / "x"))
    alloc = snapshot.of_kind(Kind.BLOCK_ALLOC)
    assert [(size, request_bytes)] == alloc[["size", "aux0"]].tolist()


@pytest.mark.parametrize(
    ("divisions", "request_bytes", "size"),
    [
        (0, 1, 512),
        (0, 513, 1024),
        (4, 1200, 1536),
        (4, 3 * MIB - 1, 3 * MIB),
        (4, 5 * MIB + 1, 6 * MIB),
        (4, 4 * MIB, 4 * MIB),
    ],
)
def test_sizes_are_rounded_as_the_settings_say(tmp_path: Path, divisions: int, request_bytes: int, size: int) -> None:
    settings = {"roundup_power2_divisions": {str(1 << i): divisions for i in range(16)}}
    data = {"segments": [], "device_traces": [[event("alloc", BASE, request_bytes)]], "allocator_settings": settings}
    snapshot = torch_snapshot.read(dump(data, tmp_path / "x"))
    assert [size] == snapshot.of_kind(Kind.BLOCK_ALLOC)["size"].tolist()


@pytest.mark.parametrize("name", ["streams_default", "graphs__default"])
def test_written_snapshots_read_back_the_same(tmp_path: Path, name: str) -> None:
    original = torch_snapshot.read(HERE / f"{name}.pickle.xz")
    report = analyze.report(original)
    state = analyze.segments_at(report.blocks, report.segments, len(original.records) - 1)
    torch_pickle.write(tmp_path / "x", original, analyze.torch_segments(original, state))
    copy = torch_snapshot.read(tmp_path / "x")
    columns = ["time", "kind", "device", "address", "size", "aux0", "aux1"]
    assert original.records[columns].tolist() == copy.records[columns].tolist()
    assert [original.stack(i) for i in original.records["stack"]] == [copy.stack(i) for i in copy.records["stack"]]
    for before, after in zip(original.segments, copy.segments, strict=True):
        same = before.keys() & after.keys() - {"frames", "blocks", "requested_size"}
        assert {key: before[key] for key in same} == {key: after[key] for key in same}
        keys = ("address", "size", "state")
        assert [[b[k] for k in keys] for b in before["blocks"]] == [[b[k] for k in keys] for b in after["blocks"]]


def test_an_unwritable_place_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    trace = torch_snapshot.read(HERE / "graphs__default.pickle.xz")
    with pytest.raises(OutputError, match="cannot write"):
        torch_pickle.write(tmp_path / "missing" / "x", trace, [])
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"weights": [1, 2]}, "not a PyTorch memory snapshot"),
        ("text", "not a PyTorch memory snapshot"),
        ([1, 2], "a segment is a int"),
        ({"segments": 3}, "segments is a int"),
        ({"segments": [], "device_traces": [[3]]}, "not a valid"),
        ({"segments": [], "device_traces": [[{"addr": 1}]]}, "no 'action'"),
        ({"segments": [], "device_traces": [[event("alloc", BASE, -1)]]}, "out of bounds"),
        ({"segments": [], "device_traces": [[event("alloc", 1 << 64, 1)]]}, "not a valid"),
        ({"segments": [], "device_traces": [[event("alloc", BASE, 1 << 60)]]}, "an event of"),
        ({"segments": [], "device_traces": [[event("segment_map", BASE, 1 << 47)]]}, "more memory mapped"),
        ([segment(BASE, 512, (1024, "inactive"))], "a block of 1024 bytes in a segment of 512"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_what_is_not_a_snapshot_is_refused_in_one_line(tmp_path: Path, data: Any, reason: str) -> None:
    with pytest.raises(SnapshotFormatError, match=reason) as caught:
        torch_snapshot.read(dump(data, tmp_path / "x"))
    assert "\n" not in str(caught.value)


def test_records_have_no_negative_sizes_or_lost_times() -> None:
    snapshot = torch_snapshot.read(HERE / "streams_default.pickle.xz")
    assert np.all(np.diff(snapshot.records["time"]) >= 0)
    assert int(snapshot.records["size"].max()) < 1 << 40


def test_annotations_of_another_form_are_kept_and_said(tmp_path: Path) -> None:
    good = [{"stage": stage, "name": "step", "device": 0, "time_us": 7} for stage in ("START", "END")]
    odd = [{**good[0], "stage": "INSTANT"}, {"name": "x"}, ["step"], {**good[0], "time_us": "soon"}]
    odd.append({**good[0], "stage": []})
    data = {
        "segments": [],
        "device_traces": [[event("alloc", BASE, 512, time_us=8)]],
        "external_annotations": good + odd,
    }
    snapshot = torch_snapshot.read(dump(data, tmp_path / "x"))
    assert "5 annotations of an unknown form kept, but not shown" == snapshot.notes[0]
    assert [1, 1] == [len(snapshot.of_kind(kind)) for kind in (Kind.RANGE_PUSH, Kind.RANGE_POP)]
    assert good + odd == snapshot.more["external_annotations"]


def test_columns_of_a_ring_are_released_while_its_records_are_made(tmp_path: Path) -> None:
    """A ring may have millions of events. A column of the file takes 8 bytes for each, beside a record of 64."""
    ring = [event("alloc", BASE, 512, stream=0, time_us=1, frames=[]), event("free_completed", BASE, 512, time_us=2)]
    path = dump({"segments": [], "device_traces": [ring]}, tmp_path / "ring.pickle")
    data, rows = plain_pickle.load_rows(path, "action")
    columns = EventColumns.of(data["device_traces"][0], rows)
    records, _ = torch_snapshot._Reader(data)._events(columns, 0)
    assert [512, 512] == records["size"].tolist()
    assert not [key for key in ("action", "addr", "size", "stream", "time_us", "frames") if columns.has(key)]


def test_rounding_a_column_of_sizes_takes_few_others() -> None:
    sizes = np.arange(100_000, dtype=np.int64) % 7 * 1000 + 1
    tracemalloc.start()
    try:
        found = round_sizes(sizes, Settings())
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [512, 1024, 2048] == found[:3].tolist()
    assert most < 2.5 * sizes.nbytes
