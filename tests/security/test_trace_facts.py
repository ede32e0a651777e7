"""A trace whose checksums are right and whose facts are not: each part of cudatool meets typed values only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hostile_traces import records_of, trace_bytes

from cudatool.analyze import blocks, check, leaks_of, report
from cudatool.cli import group
from cudatool.errors import TraceFormatError
from cudatool.export import perfetto, sqlite, torch_pickle
from cudatool.memory import Settings
from cudatool.sanitize import check as sanitize
from cudatool.sanitize.coverage import gap_why
from cudatool.sanitize.findings import GapKind, Outcome
from cudatool.trace import Trace, reader
from cudatool.trace.events import HostFlag, Kind
from cudatool.trace.validate import FACTS, MAX_ADDRESS, MAX_MEMORY, MAX_TIME

BLOCK = {"kind": Kind.BLOCK_ALLOC, "address": 1 << 21, "size": 512, "aux0": 500}
SOUND = [
    {"kind": Kind.SEGMENT_ALLOC, "address": 1 << 21, "size": 2 << 20, "flags": 1},
    BLOCK,
    {**BLOCK, "kind": Kind.BLOCK_FREE_REQUESTED},
    {**BLOCK, "kind": Kind.BLOCK_FREE_COMPLETED},
]
WRONG: tuple[Any, ...] = (
    None,
    7.5,
    -1,
    1 << 70,
    "x",
    [1],
    [[1]],
    [[1, "x"]],
    ["x", 1],
    {"x": 1},
    {"0": "x"},
    {"0": -1},
)


def read(path: Path, *rows: dict[str, Any], names: tuple[str, ...] = ("",), **header: Any) -> Trace:
    path.write_bytes(trace_bytes(records_of(*rows), header=header, names=names))
    return reader.read(path)


@pytest.mark.parametrize("fact", FACTS)
def test_fact_of_another_type_is_left_out_with_a_note(tmp_path: Path, fact: str) -> None:
    traces = [read(tmp_path / f"{number}.ctrace", *SOUND, **{fact: value}) for number, value in enumerate(WRONG)]
    wrong = [trace for trace in traces if fact not in trace.header]  # other values happen to be of its type
    for trace in wrong:
        assert any(f"The header's {fact!r} is not" in note for note in trace.notes)
        assert (wrong[0].header, wrong[0].notes) == (trace.header, trace.notes)
    # What is read is the same trace, whatever the value was.
    report(wrong[0])
    leaks_of(wrong[0])
    check(wrong[0], 0, Settings())
    perfetto.write(tmp_path / "x.json", wrong[0])
    sqlite.write(tmp_path / "x.sqlite", wrong[0])
    torch_pickle.write(tmp_path / "x.pickle", wrong[0], [])


def test_each_fact_has_a_value_that_is_wrong(tmp_path: Path) -> None:
    for fact in FACTS:
        traces = [read(tmp_path / f"{n}.ctrace", *SOUND, **{fact: value}) for n, value in enumerate(WRONG)]
        assert any(fact not in trace.header for trace in traces), fact


def test_facts_that_only_a_newer_version_knows_are_kept(tmp_path: Path) -> None:
    trace = read(tmp_path / "x.ctrace", *SOUND, invented={"later": [1]})
    assert ({"later": [1]}, []) == (trace.header["invented"], trace.notes)


def test_kinds_that_only_a_newer_version_knows_are_kept_and_said(tmp_path: Path) -> None:
    trace = read(tmp_path / "x.ctrace", *SOUND, {"kind": 250}, {"kind": 250}, {"kind": 251})
    assert 7 == len(trace.records)
    assert ["This cudatool does not know the kind of 3 events (250, 251)."] == trace.notes
    assert tuple(trace.notes) == sanitize(trace).notes


@pytest.mark.parametrize(
    ("field", "limit"),
    [("address", MAX_ADDRESS), ("size", MAX_MEMORY), ("aux0", MAX_MEMORY), ("time", MAX_TIME)],
)
@pytest.mark.parametrize("kind", [Kind.BLOCK_ALLOC, Kind.HOST_ALLOC, Kind.HOST_FREE])
def test_numbers_beyond_their_range_are_left_out_with_a_note(
    tmp_path: Path, field: str, limit: int, kind: Kind
) -> None:
    below = read(tmp_path / "below.ctrace", {**BLOCK, "kind": kind, field: limit - 1})
    assert (1, []) == (len(below.records), below.notes)
    beyond = read(tmp_path / "beyond.ctrace", BLOCK, {**BLOCK, "kind": kind, field: limit})
    assert 1 == len(beyond.records)
    assert ["1 event left out: a time, an address or a size cannot be right."] == beyond.notes


@pytest.mark.parametrize("kind", [Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP, Kind.MEM_ALLOC, Kind.BLOCK_ALLOC])
@pytest.mark.parametrize("address", [(1 << 63) - 512, 1 << 63, (1 << 64) - 512])
def test_addresses_beyond_63_bits_reach_no_analysis(tmp_path: Path, kind: Kind, address: int) -> None:
    trace = read(tmp_path / "x.ctrace", *SOUND, {"kind": kind, "address": address, "size": 512})
    assert 1 == len(blocks(trace))
    report(trace)
    sqlite.write(tmp_path / "x.sqlite", trace)


def test_sizes_whose_sum_no_number_can_hold_are_refused(tmp_path: Path) -> None:
    rows = [{**BLOCK, "address": i << 10, "size": MAX_MEMORY - 1} for i in range(40_000)]
    with pytest.raises(TraceFormatError, match="larger than any number of bytes"):
        read(tmp_path / "x.ctrace", *rows)


@pytest.mark.parametrize(
    "text",
    [
        *("", "nonsense", "[]", "1", "{}", "[" * 100_000, '{"kind": "x", "check": "memcheck", "text": ""}'),
        '{"kind": "out-of-bounds", "check": 1, "text": ""}',
        '{"kind": "out-of-bounds", "check": "memcheck", "text": null}',
        '{"kind": "out-of-bounds", "check": "memcheck", "text": "", "thread": ["x"]}',
        '{"kind": "out-of-bounds", "check": "memcheck", "text": "", "block": 1}',
    ],
    ids=lambda text: text[:60],
)
def test_finding_that_cannot_be_read_is_said_beside_the_others_and_no_report_is_clean(
    tmp_path: Path, text: str
) -> None:
    unread, sound = {"kind": Kind.FINDING, "name": 1}, {"kind": Kind.FINDING, "name": 2, "aux0": 1}
    names = ("", text, '{"kind": "out-of-bounds", "check": "memcheck", "text": "far away"}')
    for checks in (["race"], ["memcheck"]):
        report = sanitize(read(tmp_path / "x.ctrace", *SOUND, unread, unread, names=names), checks)
        (gap,) = (gap for gap in report.gaps if gap.kind is GapKind.RECORDING)
        assert ("2 findings in it cannot be read",) == gap.names
        assert ("findings-not-read",) == gap.codes
        assert report.outcome is Outcome.INCOMPLETE
        report = sanitize(read(tmp_path / "x.ctrace", *SOUND, unread, sound, names=names), checks)
        assert ["far away"] == [found.text for found in report.on_device]
        assert "The recording is incomplete: 1 finding in it cannot be read." in map(gap_why, report.gaps)


def test_finding_with_more_facts_than_this_version_knows_is_reported(tmp_path: Path) -> None:
    text = '{"kind": "out-of-bounds", "check": "memcheck", "text": "far away", "later": [1]}'
    row = {"kind": Kind.FINDING, "name": 1, "address": (1 << 64) - 8, "aux0": 1}
    (found,) = sanitize(read(tmp_path / "x.ctrace", *SOUND, row, names=("", text))).on_device
    assert ("far away", (1 << 64) - 8) == (found.text, found.address)


def test_allocation_of_no_bytes_holds_no_address(tmp_path: Path) -> None:
    empty = {"kind": Kind.MEM_ALLOC, "address": 1 << 21}
    sanitize(read(tmp_path / "x.ctrace", empty, {**empty, "size": 512}, empty, {**empty, "size": 1024}))


@pytest.mark.parametrize("size", [0, 1, MAX_MEMORY - 1])
@pytest.mark.parametrize("condition", range(4))
def test_value_of_any_size_that_a_stream_waits_for_is_one_of_4_or_8_bytes(
    tmp_path: Path, size: int, condition: int
) -> None:
    value = {"stream": 1, "address": 1 << 21, "size": size, "aux0": 7}
    rows = [
        {"kind": Kind.STREAM_CREATE, "stream": 1},
        {**value, "kind": Kind.STREAM_WRITE_VALUE},
        {**value, "kind": Kind.STREAM_WAIT_VALUE, "flags": condition},
    ]
    sanitize(read(tmp_path / "x.ctrace", *rows))


def test_device_below_zero_is_no_place_in_a_list(tmp_path: Path) -> None:
    """As the recorder writes the number of a device that its field cannot hold."""
    pinned = {**BLOCK, "kind": Kind.HOST_ALLOC, "flags": HostFlag.BLOCK}
    rows = [{**row, "device": -46} for row in (*SOUND, pinned)]
    read(tmp_path / "x.ctrace", *rows, total_memory=[1 << 33], pools=[[0, 0]])
    for command in (["replay"], ["replay", "--check"], ["snapshot"], ["leaks"], ["export", "--to", "torch", "-f"]):
        done = CliRunner().invoke(group, [*command, str(tmp_path / "x.ctrace")])
        assert done.exception is None or isinstance(done.exception, SystemExit)
