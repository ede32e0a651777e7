"""``--events A:B`` and ``--time A:B``: every command that explains a recording takes a part of one."""

from __future__ import annotations

import json
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cudatool import analyze
from cudatool.cli._sources import read_trace

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
