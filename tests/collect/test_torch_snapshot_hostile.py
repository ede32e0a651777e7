"""Files that were made to do harm, and files that were damaged: refused, without running or reserving anything."""

from __future__ import annotations

import lzma
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generated import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recordings import HERE
from snapshot_files import dump

from cudatool.collect import plain_pickle, torch_snapshot
from cudatool.errors import SnapshotFormatError

DATA = lzma.decompress((HERE / "graphs__default.pickle.xz").read_bytes())


class Runs:
    """A pickle of this runs a command when it is loaded by an ordinary unpickler."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(6))
def test_an_import_is_refused_by_name_and_nothing_runs(tmp_path: Path, protocol: int) -> None:
    path = dump({"segments": [Runs(f"touch {tmp_path}/ran")]}, tmp_path / "x", protocol)
    with pytest.raises(SnapshotFormatError, match=r"tries to import posix\.system"):
        torch_snapshot.read(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"(ios\nsystem\n.",  # INST
        b"Pelsewhere\n.",  # PERSID
        b"\x80\x04\x82\x01.",  # EXT1
        b"\x80\x04]\x94(K\x01K\x02\x91.",  # FROZENSET
    ],
)
def test_other_ways_out_of_plain_data_are_refused(tmp_path: Path, program: bytes) -> None:
    (tmp_path / "x").write_bytes(program)
    with pytest.raises(SnapshotFormatError):
        plain_pickle.load(tmp_path / "x")


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x04]r\xff\xff\xff\xff.",  # a memo of four billion slots
        b"]p4294967295\n.",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a bytearray of a terabyte
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.",  # bytes of a terabyte
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x00.",  # a string of a terabyte
        b"\x80\x02\x8b\xff\xff\xff\x7f.",  # a number of two gigabytes
        b"\x80\x04\x95\xff\xff\xff\xff\xff\x00\x00\x00.",  # a frame of a terabyte
    ],
)
def test_a_small_file_cannot_reserve_much_memory(tmp_path: Path, program: bytes) -> None:
    (tmp_path / "x").write_bytes(program)
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotFormatError):
            plain_pickle.load(tmp_path / "x")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_tuples_whose_hash_takes_forever_are_refused(tmp_path: Path) -> None:
    doubling = b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60))
    (tmp_path / "x").write_bytes(b"\x80\x02})q\x00" + doubling + b"K\x01s.")
    with pytest.raises(SnapshotFormatError):
        plain_pickle.load(tmp_path / "x")


def test_lists_that_would_be_endless_if_copied_are_harmless(tmp_path: Path) -> None:
    laughs: list[Any] = ["ha"]
    for _ in range(60):
        laughs = [laughs] * 10
    with pytest.raises(SnapshotFormatError, match="a segment is a list"):
        torch_snapshot.read(dump({"segments": laughs}, tmp_path / "x"))


_EVENT = {"action": "alloc", "addr": 1, "size": 512, "stream": 0, "time_us": 1}
_SEGMENT = {"device": 0, "address": 1, "total_size": 512, "stream": 0, "segment_type": "small"}


@pytest.mark.parametrize(
    ("snapshot", "said"),
    [
        ({"segments": ["x"]}, "a segment is a str"),
        ({"segments": [_SEGMENT | {"blocks": ["x"]}]}, "a block is a str"),
        ({"segments": [], "device_traces": [["x"]]}, "an event is a str"),
        ({"segments": [], "device_traces": [[_EVENT | {"frames": ["x"]}]]}, "a frame is a str"),
        ({"segments": [], "device_traces": [[_EVENT | {"frames": [None]}]]}, "a frame is a NoneType"),
    ],
)
def test_what_is_of_another_type_is_named(tmp_path: Path, snapshot: dict[str, Any], said: str) -> None:
    with pytest.raises(SnapshotFormatError, match=said):
        torch_snapshot.read(dump(snapshot, tmp_path / "x"))


def test_a_bomb_of_compressed_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "PICKLE_BYTES", 1 << 20)
    (tmp_path / "x").write_bytes(lzma.compress(b"\x80\x04" + b"N0" * (1 << 20)))
    with pytest.raises(SnapshotFormatError, match="holds more than"):
        plain_pickle.load(tmp_path / "x")


@pytest.mark.parametrize("name", ["empty", "text", "json", "truncated xz", "page"])
def test_foreign_files_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    content = {
        "empty": b"",
        "text": b"hello, world\n" * 9,
        "json": b'{"segments": []}',
        "truncated xz": (HERE / "graphs__default.pickle.xz").read_bytes()[:1000],
        "page": b"<!DOCTYPE html>",
    }[name]
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(SnapshotFormatError) as caught:
        torch_snapshot.read(tmp_path / "x")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "x") in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for length in range(0, len(DATA), 97):
        (tmp_path / "x").write_bytes(DATA[:length])
        with pytest.raises(SnapshotFormatError):
            torch_snapshot.read(tmp_path / "x")


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(at=st.lists(st.integers(0, len(DATA) - 1), min_size=1, max_size=4), flip=st.integers(1, 255))
def test_flipped_bytes_give_a_snapshot_or_the_one_error(tmp_path: Path, at: list[int], flip: int) -> None:
    damaged = bytearray(DATA)
    for i in at:
        damaged[i] ^= flip
    (tmp_path / "x").write_bytes(bytes(damaged))
    try:
        torch_snapshot.read(tmp_path / "x")
    except SnapshotFormatError as error:
        assert "\n" not in str(error)


_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=9) | st.integers(-(2**70), 2**70), inner, max_size=5)
        | st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
    ),
    max_leaves=30,
)


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(value=_plain, protocol=st.integers(0, 5))
def test_plain_data_loads_as_it_was(tmp_path: Path, value: Any, protocol: int) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(value, protocol=protocol))
    assert value == plain_pickle.load(tmp_path / "x")


def test_a_frame_may_end_inside_of_a_tuple_of_numbers(tmp_path: Path) -> None:
    value = [(i, i + 1) for i in range(50_000)]  # pickle ends a frame after the first 64 KiB, wherever that is
    path = dump(value, tmp_path / "x", 4)
    assert value == plain_pickle.load(path)


@pytest.mark.parametrize("length", [0, 255, 256, 70000])
@pytest.mark.parametrize("protocol", range(6))
def test_strings_of_every_length_load(tmp_path: Path, length: int, protocol: int) -> None:
    path = dump(["é" + "x" * length, "after"], tmp_path / "x", protocol)
    assert ["é" + "x" * length, "after"] == plain_pickle.load(path)


def test_a_counted_string_may_hold_bytes_that_look_like_opcodes(tmp_path: Path) -> None:
    text = b"cos\nsystem\n" * 40
    (tmp_path / "x").write_bytes(b"\x80\x02X" + struct.pack("<I", len(text)) + text + b".")
    assert text.decode() == plain_pickle.load(tmp_path / "x")


_EVENT = {"action": "alloc", "addr": 1 << 40, "size": 512, "stream": 0, "time_us": 1}


@pytest.mark.parametrize(
    "data",
    [
        {"device_traces": [[_EVENT | {"x": [[_EVENT]]}]]},
        {"device_traces": [[_EVENT | {"user_metadata": {"a": [_EVENT]}}]]},
        {"device_traces": [[{"action": "snapshot", "to": [_EVENT]}]]},
        {"segments": [{"address": 1 << 40, "total_size": 512, "blocks": [], "x": [[_EVENT]]}]},
        {"segments": [], "allocator_settings": {"x": [_EVENT]}},
    ],
    ids=["in an event", "in metadata", "in a mark", "in a segment", "in settings"],
)
def test_events_inside_of_other_things_are_refused(tmp_path: Path, data: dict[str, Any]) -> None:
    with pytest.raises(SnapshotFormatError, match="events inside of other things than lists of events"):
        torch_snapshot.read(dump(data, tmp_path / "x"))


def test_events_that_are_in_a_list_twice_are_two(tmp_path: Path) -> None:
    first, second = ({"action": "alloc", "addr": i, "size": 512, "stream": 0} for i in (0, 512))
    data = {"segments": [], "device_traces": [[first, second, first], [second]]}
    value, rows = plain_pickle.load_rows(dump(data, tmp_path / "x"), "action")
    assert [range(3), range(3, 4)] == value["device_traces"]
    assert isinstance(rows.columns["addr"], np.ndarray)
    assert [0, 512, 0, 512] == [cell >> 1 for cell in rows.columns["addr"].tolist()]


_entries = st.lists(
    st.dictionaries(
        st.sampled_from(["addr", "size", "frames", "user_metadata", "pool_id", "x"]),
        st.integers(-(2**70), 2**70)
        | st.none()
        | st.text(max_size=3)
        | st.lists(st.fixed_dictionaries({"name": st.sampled_from("ab")}), max_size=3)
        | st.tuples(st.integers(0, 3), st.integers(0, 3)),
        max_size=6,
    ).map(lambda entry: {"action": "alloc", **entry}),
    max_size=12,
)


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(traces=st.lists(_entries, max_size=3), protocol=st.integers(0, 5), shared=st.booleans())
def test_columns_say_what_the_dicts_said(tmp_path: Path, traces: Any, protocol: int, shared: bool) -> None:
    traces = [trace + trace[:2] for trace in traces] if shared else traces
    value, rows = plain_pickle.load_rows(dump({"traces": traces}, tmp_path / "x", protocol), "action")

    def entry(row: int) -> dict[str, Any]:
        cells = {key: c if isinstance(c, int) else int(c[row]) for key, c in rows.columns.items()}
        said = {key: c >> 1 if c & 1 else c for key, c in cells.items() if c != plain_pickle.MISSING}
        return {key: c if cells[key] & 1 else rows.objects[c >> 1] for key, c in said.items()}

    read = [list(map(entry, trace)) if isinstance(trace, range) else trace for trace in value["traces"]]
    assert traces == read


def test_an_event_without_an_action_is_named(tmp_path: Path) -> None:
    lacking = {key: value for key, value in _EVENT.items() if key != "action"}
    (tmp_path / "x").write_bytes(pickle.dumps({"segments": [], "device_traces": [[_EVENT, lacking, _EVENT]]}))
    with pytest.raises(SnapshotFormatError, match="an event that has no action"):
        torch_snapshot.read(tmp_path / "x")
