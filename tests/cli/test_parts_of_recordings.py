"""``--events A:B`` and ``--time A:B``: every command that explains a recording takes a part of one."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cudatool import analyze
from cudatool.cli._part import moment_of, part_of
from cudatool.cli._sources import read_trace
from cudatool.errors import UsageError

RECORDING = Path(__file__).resolve().parents[1] / "data" / "prefetch__default.pickle.xz"


def test_a_part_replays_address_for_address_from_what_was_there(run_command) -> None:
    done = run_command("replay", RECORDING, "--events", "300:1200", "--check", "--json")
    assert (0, "") == (done.returncode, done.stderr)
    (checked,) = json.loads(done.stdout)
    assert checked["is_exact"]
    assert 0 < checked["allocs"] < 900


def test_what_is_exported_of_a_part_begins_with_what_was_there(run_command, tmp_path: Path) -> None:
    done = run_command("export", RECORDING, "--events", "300:1200", "--to", "torch", "-o", "part.pickle")
    assert 0 == done.returncode, done.stderr
    part = pickle.loads((tmp_path / "part.pickle").read_bytes())
    (ring,), annotations = part["device_traces"], part["external_annotations"]
    whole = run_command("export", RECORDING, "--events", "300:1200", "--to", "sqlite", "-o", "part.sqlite")
    assert 0 == whole.returncode, whole.stderr
    with closing(sqlite3.connect(tmp_path / "part.sqlite")) as database:
        ((events,),) = database.execute("SELECT count(*) FROM events")
    assert 900 == len(ring) + len(annotations)
    assert 900 + 87 < events  # what was there: streams, segments and blocks


def test_diff_takes_a_part_of_both(run_command) -> None:
    (device,) = json.loads(run_command("diff", RECORDING, RECORDING, "--events", ":300", "--json").stdout)["devices"]
    (whole,) = json.loads(run_command("diff", RECORDING, RECORDING, "--json").stdout)["devices"]
    assert device["before"] == device["after"] < whole["before"]


@pytest.mark.parametrize(
    "words",
    [("leaks",), ("replay",), ("diff", RECORDING), ("export", "--to", "sqlite"), ("snapshot",)],
    ids=lambda w: w[0],
)
def test_a_range_without_events_is_refused(run_command, tmp_path: Path, words: tuple[str, ...]) -> None:
    command, *more = words
    done = run_command(command, RECORDING, *more, "--events", "9000000:")
    assert 2 == done.returncode
    assert "no event is in that range" in done.stderr
    assert [] == list(tmp_path.iterdir())


def test_snapshot_shows_who_held_the_memory_at_a_chosen_time(run_command) -> None:
    trace = read_trace(RECORDING)
    blocks = analyze.blocks(trace)
    start, middle = int(trace.records["time"].min()), trace.duration // 3
    held = blocks.at(analyze.index_at(trace, start + middle))
    done = run_command("snapshot", RECORDING, "--at", f"{middle}ns", "--json")
    assert (0, "") == (done.returncode, done.stderr)
    (device,) = json.loads(done.stdout)["devices"]
    assert int(held.size.sum()) == device["chosen"]["active"] == sum(site["size"] for site in device["at_chosen"])
    assert device["chosen"]["active"] < device["peak"]["active"]
    (plain,) = json.loads(run_command("snapshot", RECORDING, "--json").stdout)["devices"]
    assert (None, []) == (plain["chosen"], plain["at_chosen"])
    assert plain["peak"] == device["peak"]
    text = run_command("snapshot", RECORDING, "--at", f"{middle}ns").stdout
    assert "At that time" in text
    assert "Held at that time" in text


@pytest.mark.parametrize(("time", "says"), [("5", "is not a time"), ("9h", "the recording has ")])
def test_time_that_is_none_or_after_the_recording_is_refused(run_command, time: str, says: str) -> None:
    done = run_command("snapshot", RECORDING, "--at", time)
    assert (2, True) == (done.returncode, says in done.stderr)


def test_a_part_by_time_has_the_events_from_its_first_moment_to_its_last() -> None:
    trace = read_trace(RECORDING)
    times = trace.records["time"] - trace.records["time"].min()
    first, last = (int(times[len(times) * part // 4]) for part in (1, 3))
    for text, begin, end in (
        (f"{first}ns:{last}ns", first, last),
        (f"{first + 1}ns:{last - 1}ns", first + 1, last - 1),
        (f"{first}ns:", first, trace.duration),
        (f":{last}ns", 0, last),
    ):
        start, stop = (int(times.searchsorted(end, side)) for end, side in ((begin, "left"), (end, "right")))
        assert part_of(trace, None, text).header["window"] == [start, stop, len(times)], text
    start, stop = (int(times.searchsorted(end, side)) for end, side in ((first, "left"), (last, "right")))
    both = part_of(trace, f"{start + 10}:", f":{last}ns")
    assert [start + 10, stop, len(times)] == both.header["window"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--events", "300"], "--events '300': write a range such as 1000:2000; either side may be left out"),
        (["--time", "1s"], "--time '1s': write a range such as 1.5s:2s; either side may be left out"),
        (["--events", "9:5"], "--events '9:5': the range ends before it begins; write '5:9'"),
        (["--time", "2s : 900ms"], "--time '2s : 900ms': the range ends before it begins; write '900ms:2s'"),
    ],
)
def test_what_is_no_range_is_refused_with_an_example(run_here, words: list[str], message: str) -> None:
    done = run_here("leaks", RECORDING, *words)
    assert 2 == done.returncode
    assert message in " ".join(done.stderr.split())


def test_a_recording_without_times_has_no_part_by_time() -> None:
    """Those of PyTorch before 2.2 have events, and no clock."""
    trace = read_trace(RECORDING)
    trace = dataclasses.replace(trace, header=trace.header | {"time_axis": "index"})
    with pytest.raises(UsageError, match="--time: this recording has no times; use --events"):
        part_of(trace, None, "1ms:2ms")
    with pytest.raises(UsageError, match="--at: this recording has no times"):
        moment_of(trace, "1ms")
