from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from cudatool import analyze
from cudatool.cli import group
from cudatool.cli._snapshot_text import print_report
from cudatool.collect import rmm_log, torch_snapshot
from cudatool.errors import FileFormatError, UsageError
from cudatool.trace.events import FREE_UNKNOWN, Kind, StreamFlag
from cudatool.trace.model import Ending

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"


def log(path: Path, *lines: str, header: str = HEADER) -> Path:
    path.write_text(header + "".join(f"{line}\n" for line in lines))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.csv"


def test_each_line_becomes_the_records_of_a_block(path: Path) -> None:
    trace = rmm_log.read(
        log(
            path,
            "1979932,14:21:19.998533,allocate,0x30a000000,1000,0x2",
            "1980043,14:21:20.000033,free,0x30a000000,1000,0x2",
            "1980043,14:21:20.000034,allocate failure,(nil),4096,(nil)",
        )
    )
    columns = ("kind", "time", "thread", "stream", "address", "size", "aux0")
    assert [
        (Kind.STREAM_CREATE, 0, 0, 1, 2, 0, 0),
        (Kind.STREAM_CREATE, 0, 0, 2, 0, 0, 0),
        (Kind.BLOCK_ALLOC, 0, 0, 1, 0x30A000000, 1000, 1000),
        (Kind.BLOCK_FREE_REQUESTED, 1_500_000, 1, 1, 0x30A000000, 1000, 1000),
        (Kind.BLOCK_FREE_COMPLETED, 1_500_000, 1, 1, 0x30A000000, 1000, 1000),
        (Kind.OOM, 1_501_000, 1, 2, 0, 4096, 0),
    ] == trace.records[list(columns)].tolist()
    assert [StreamFlag.PER_THREAD_DEFAULT, StreamFlag.LEGACY_DEFAULT] == trace.records["flags"][:2].tolist()
    assert ["1979932", "1980043"] == trace.threads


@pytest.mark.parametrize("pointer", ["0x7f8a40000000", "7f8a40000000", "0X7F8A40000000"])
@pytest.mark.parametrize("time", ["14:21:19.998533", "14:21:19:998533", "1634567890.123456", "9:00:00"])
def test_pointers_and_times_are_read_however_they_are_written(path: Path, pointer: str, time: str) -> None:
    trace = rmm_log.read(log(path, f"7, {time}, allocate, {pointer}, 512, 0x0"))
    assert [0x7F8A40000000] == trace.of_kind(Kind.BLOCK_ALLOC)["address"].tolist()


def test_time_goes_on_over_midnight_and_never_back(path: Path) -> None:
    times = ("23:59:59.000000", "00:00:01.000000", "00:00:00.999999", "00:00:02.000000")
    trace = rmm_log.read(log(path, *(f"1,{time},allocate,{i + 1:x},1,0" for i, time in enumerate(times))))
    assert [0, 2 * 10**9, 2 * 10**9, 3 * 10**9] == trace.of_kind(Kind.BLOCK_ALLOC)["time"].tolist()


def test_what_is_held_is_what_the_log_adds_up_to(path: Path) -> None:
    trace = rmm_log.read(
        log(
            path,
            "1,00:00:00.1,allocate,100,300,0",
            "1,00:00:00.2,allocate,900,500,0",
            "1,00:00:00.3,free,100,300,0",
            "1,00:00:00.4,allocate,100,100,0",
        )
    )
    (device,) = analyze.report(trace).summary.devices
    assert (800, 600, 3) == (device.peak_active, device.now.active, device.allocations)
    assert any("no segments" in note for note in trace.notes)


@pytest.mark.parametrize(("name", "device"), [("a.csv", 0), ("a.dev0.csv", 0), ("a.dev3.csv", 3), ("a.csv.dev12", 12)])
def test_the_device_is_the_one_in_the_name_that_rmm_gives_the_file(tmp_path: Path, name: str, device: int) -> None:
    trace = rmm_log.read(log(tmp_path / name, "1,00:00:00.1,allocate,100,300,0"))
    assert [device, device] == trace.records["device"].tolist()


def test_empty_lines_and_repeated_headers_are_passed_over(path: Path) -> None:
    trace = rmm_log.read(log(path, "", HEADER.strip(), "1,00:00:00.1,allocate,100,300,0\r"))
    assert 1 == len(trace.of_kind(Kind.BLOCK_ALLOC))


def test_what_a_run_had_not_freed_is_not_held_by_the_next_run_of_a_log(path: Path) -> None:
    first = ("1,00:00:00.1,allocate,100,300,0", "1,00:00:00.2,free,100,300,0", "1,00:00:00.3,allocate,200,500,0")
    trace = rmm_log.read(log(path, *first, HEADER.strip(), *first[:2], "1,00:00:00.4,allocate,400,7,0"))
    blocks = analyze.blocks(trace)
    assert [7] == blocks[blocks.end == len(trace.records)].size.tolist()
    assert 500 == analyze.timeline(trace, blocks, analyze.segments(trace)).active.max()
    assert any("the log has several runs: 1 block that one had not freed" in note for note in trace.notes)


def test_a_log_without_calls_is_an_empty_trace(path: Path) -> None:
    assert 0 == len(rmm_log.read(log(path)).records)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1,00:00:00.1,allocate,100,300", "5 fields instead of 6"),
        ("1,00:00:00.1,allocate,100,300,0,0", "7 fields instead of 6"),
        ("1,00:00:00.1,realloc,100,300,0", "unknown action 'realloc'"),
        ("1,00:00:00.1,allocate,100,-1,0", "'-1' is not a size"),
        ("1,00:00:00.1,allocate,100,nan,0", "'nan' is not a size"),
        ("1,00:00:00.1,allocate,100,18446744073709551616,0", "18446744073709551616 is too large for a size"),
        ("1,00:00:00.1,allocate,0xffffffffffffffff,1,0", "0xffffffffffffffff is too large for a pointer"),
        ("1,00:00:00.1,allocate,xyz,1,0", "'xyz' is not a pointer"),
        ("1,noon,allocate,100,300,0", "'noon' is not a time"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(path: Path, line: str, reason: str) -> None:
    log(path, "1,00:00:00.0,allocate,100,300,0", line, "1,00:00:00.2,allocate,900,300,0")
    with pytest.raises(FileFormatError) as caught:
        rmm_log.read(path)
    assert f"{path}: line 3 of an RMM log: {reason}" == str(caught.value)


@pytest.mark.parametrize("content", [b"", b"Thread,Time\n", b"\x80\x04}.", b"a,b,c,d,e,f\n", b"\xff" * 10000])
def test_other_files_are_not_taken_for_logs(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert not rmm_log.is_rmm_log(path)
    with pytest.raises(FileFormatError, match="not an RMM log"):
        rmm_log.read(path)


def test_the_header_is_recognized_with_a_byte_order_mark_and_any_case(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbfthread, time, action, pointer, size, stream\r\n")
    assert rmm_log.is_rmm_log(path)


@pytest.mark.parametrize("rest", ["1,00:00:00.2,alloc", "1,00:00:00.2,allocate,200,51", "1", "1,00:00:00.2,alloc\n"])
def test_a_last_line_without_its_end_is_left_out_and_said(path: Path, rest: str) -> None:
    path.write_text(f"{HEADER}1,00:00:00.1,allocate,100,300,0\n{rest}")
    trace = rmm_log.read(path)
    assert [300] == trace.of_kind(Kind.BLOCK_ALLOC)["size"].tolist()
    assert "the log is cut in line 3: what came from then on is missing" == trace.notes[-1]
    assert Ending.CUT is trace.ending


def test_a_failure_of_any_size_is_read(path: Path) -> None:
    huge = 2**64 - 8
    trace = rmm_log.read(log(path, f"1,00:00:00.1,allocate failure,(nil),{huge},0"))
    assert [(huge, FREE_UNKNOWN)] == trace.of_kind(Kind.OOM)[["size", "flags"]].tolist()


def test_an_allocation_beyond_any_memory_is_left_out_and_said(path: Path) -> None:
    huge = 2**64 - 8
    trace = rmm_log.read(
        log(
            path,
            "1,00:00:00.1,allocate,0x100,300,0",
            f"1,00:00:00.2,allocate,0x900,{huge},0",
            f"1,00:00:00.3,free,0x900,{huge},0",
            "1,00:00:00.4,free,0x100,300,0",
        )
    )
    assert [0x100] * 3 == trace.records["address"][trace.records["kind"] != Kind.STREAM_CREATE].tolist()
    expected = (
        "2 lines with a size beyond any GPU's memory left out (the first is line 3, of 18446744073709551608 bytes)"
    )
    assert f"{expected}: totals lack them" == trace.notes[-1]


def test_what_a_log_does_not_say_is_unknown_and_not_nothing(path: Path) -> None:
    lines = ("1,00:00:00.1,allocate,100,4096,0", f"1,00:00:00.2,allocate failure,(nil),{2**64 - 8},0")
    trace = rmm_log.read(log(path, *lines))
    report = analyze.report(trace)
    assert () == report.diagnoses[0].outside.readings
    (device,) = report.summary.devices
    assert (False, 4096, 1) == (device.reserved_known, device.peak_active, device.ooms)
    (plain,) = report.as_dict()["devices"]
    assert [None] * 4 == [
        plain["peak_reserved"],
        *(plain["peak"][k] for k in ("reserved", "largest_free", "fragmentation")),
    ]
    console = Console(file=StringIO(), width=100)
    print_report(console, report)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"^Reserved +unknown +unknown +unknown *$", text, re.MULTILINE)
    assert "Fragmentation" not in text
    assert "the driver had" not in text


def test_a_log_of_failures_alone_does_not_say_that_nothing_was_reserved(path: Path, tmp_path: Path) -> None:
    source, copy = str(log(path, "1,00:00:00.2,allocate failure,(nil),4096,0")), str(tmp_path / "x.pickle")
    assert 0 == CliRunner().invoke(group, ["export", source, "--to", "torch", "-o", copy]).exit_code
    for trace in (rmm_log.read(source), torch_snapshot.read(copy)):
        (device,) = analyze.report(trace).summary.devices
        assert (False, 0, 1) == (device.reserved_known, device.peak_active, device.ooms)
    text = CliRunner().invoke(group, ["snapshot", source]).stdout
    assert re.search(r"^Reserved +unknown +unknown +unknown *$", text, re.MULTILINE)


def test_an_exported_log_is_not_taken_for_pytorchs(path: Path, tmp_path: Path) -> None:
    lines = ("1,00:00:00.1,allocate,0x100,4096,0", f"1,00:00:00.2,allocate failure,(nil),{2**64 - 8},0")
    source, copy, again = str(log(path, *lines)), str(tmp_path / "x.pickle"), str(tmp_path / "y.pickle")
    for read, written in ((source, copy), (copy, again)):
        assert 0 == CliRunner().invoke(group, ["export", read, "--to", "torch", "-o", written]).exit_code
        snapshot = torch_snapshot.read(written)
        assert ({}, 2**64 - 8) == (snapshot.settings, int(snapshot.of_kind(Kind.OOM)["size"][0]))
        done = CliRunner().invoke(group, ["replay", written])
        assert isinstance(done.exception, UsageError | SystemExit)
        assert "made to RMM" in f"{done.output}{done.exception}"
        (device,) = analyze.report(snapshot).summary.devices
        assert (False, 4096) == (device.reserved_known, device.peak_active)


def test_no_table_says_that_nothing_was_reserved(path: Path, tmp_path: Path) -> None:
    lines = ("1,00:00:00.1,allocate,0x100,4096,0", "1,00:00:00.2,allocate,0x2000,4096,1")
    source = str(log(path, *lines))
    report = json.loads(CliRunner().invoke(group, ["snapshot", source, "--json"]).stdout)
    (diagnosis,) = [device["diagnosis"] for device in report["devices"]]
    for usage in (*diagnosis["by_stream"], *diagnosis["by_pool"]):
        assert (None, None) == (usage["reserved_at_peak"], usage["reserved_peak"])
    assert [] == re.findall(r".*\b0 B.*", CliRunner().invoke(group, ["snapshot", source]).stdout)
    text = CliRunner().invoke(group, ["diff", source, source]).stdout
    assert re.search(r"^Reserved, at most +unknown +unknown *$", text, re.MULTILINE)
    (compared,) = json.loads(CliRunner().invoke(group, ["diff", source, source, "--json"]).stdout)["devices"]
    assert (None, None) == (compared["reserved_before"], compared["reserved_after"])
    CliRunner().invoke(group, ["export", source, "--to", "perfetto", "-o", str(tmp_path / "x.json")])
    counters = [e["args"] for e in json.loads((tmp_path / "x.json").read_text())["traceEvents"] if e["ph"] == "C"]
    assert [{"allocated", "active"}] * 2 == [set(counter) for counter in counters]
