"""Which settings the search for advice replays, and that it misses nothing by leaving out the others."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from recordings import path_of
from records import MIB, alloc, of_segment, trace
from whatif_truth import Op, Program, record, run

from cudatool.analyze import advise, requests, what_if
from cudatool.analyze.in_use import InUse
from cudatool.collect import torch_snapshot
from cudatool.memory import Settings
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

CONFS = ("", "expandable_segments:True", "roundup_power2_divisions:2", "roundup_power2_divisions:[256:1,>:8]")
NAMES = ("prefetch__default", "graphs__default")


@cache
def read(name: str) -> Trace:
    return torch_snapshot.read(path_of(name))


def packed() -> Trace:
    """Return a recording that has no byte more reserved than in use."""
    sizes = (40 * MIB, 20 * MIB)
    places = [256 * MIB * number for number in range(2)]
    return trace(
        *(
            event
            for place, size in zip(places, sizes, strict=True)
            for event in (of_segment(Kind.SEGMENT_ALLOC, place, size), alloc(place, size))
        )
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("conf", CONFS)
def test_replay_never_has_less_in_use_than_the_blocks_need(name: str, conf: str) -> None:
    recording = read(name)
    (replayed,) = what_if(recording, 0, [conf], recorded=Settings(), recorded_memory=1 << 40)
    needed = InUse(requests(recording, 0)).most(Settings.parse(conf))
    # What is missing: ends of blocks that are too small to be split off, and blocks that wait for another stream.
    assert 0.95 * replayed.active_peak_bytes < needed <= replayed.active_peak_bytes


def test_blocks_from_before_the_recording_count_as_long_as_they_live(tmp_path: Path) -> None:
    steps = [
        ("malloc", 1, 100),
        ("malloc", 2, 30),
        ("free", 1, 0),
        ("malloc", 3, 20),
        ("malloc", 4, 90),
        ("free", 4, 0),
    ]
    made = Program([Op(what, block, size * MIB) for what, block, size in steps], survives=False)
    late, _, _ = record(tmp_path / "snapshot.pickle", made, run(made, "", 1 << 40), "", lost=0.5)
    asked = requests(late, 0)
    assert [30 * MIB, 100 * MIB] == asked.prior_sizes
    assert 140 * MIB == InUse(asked).most(Settings())


@pytest.mark.parametrize("name", NAMES)
def test_settings_that_are_left_out_gain_no_more_than_the_best(name: str) -> None:
    recording = read(name)
    advice = advise(recording, 0, recorded=Settings())
    assert advice.record is not None
    before = advice.record.reserved_peak_bytes
    confs = [left_out.conf for left_out in advice.left_out]
    assert confs
    for left_out, replayed in zip(advice.left_out, what_if(recording, 0, confs, recorded=Settings()), strict=True):
        assert left_out.reserved_least_bytes <= replayed.reserved_peak_bytes
        assert before - replayed.reserved_peak_bytes <= advice.gain_bytes + before // 100


def test_where_nothing_can_be_gained_only_the_recorded_settings_are_replayed() -> None:
    advice = advise(packed(), 0, recorded=Settings())
    assert ([""], None) == ([outcome.conf for outcome in advice.tried], advice.best)
    assert "expandable_segments:True" in [left_out.conf for left_out in advice.left_out]


def test_nothing_is_left_out_where_memory_runs_out() -> None:
    advice = advise(packed(), 0, recorded=Settings(), memory=50 * MIB)
    assert (0, True) == (len(advice.left_out), len(advice.tried) > 4)
