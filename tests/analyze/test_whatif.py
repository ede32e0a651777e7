"""The same requests under other settings: what the model predicts is what PyTorch then did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from recordings import path_of
from records import MIB, alloc, free, freed, of_segment, trace

from cudatool.analyze import advise, recorded_limit, what_if
from cudatool.collect import torch_snapshot
from cudatool.errors import ConfigError
from cudatool.memory import Settings
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

DEFAULT = Settings()
GIB = 1 << 30


def recording(name: str) -> tuple[torch_snapshot.MemorySnapshot, dict[str, Any]]:
    path = path_of(name)
    return torch_snapshot.read(path), json.loads((path.parent / f"{name}.stats.json").read_text())


def requested(*sizes_in_mib: int, frees: Sequence[int] = ()) -> Trace:
    """Return a trace that allocates blocks, each in a segment of its own, then frees some, given by their numbers."""
    places = [256 * MIB * number for number in range(len(sizes_in_mib))]
    events = []
    for place, size in zip(places, sizes_in_mib, strict=True):
        events += [of_segment(Kind.SEGMENT_ALLOC, place, size * MIB), alloc(place, size * MIB)]
    for number in frees:
        events += [free(places[number]), freed(places[number])]
    return trace(*events)


@pytest.mark.parametrize(
    "name", ["llm__default", "llm__expandable", "prefetch__default", "prefetch__expandable", "graphs__default"]
)
def test_under_its_own_settings_a_recording_costs_what_it_did(name: str) -> None:
    snapshot, facts = recording(name)
    (outcome,) = what_if(snapshot, 0, [facts["conf"]], recorded=Settings.parse(facts["conf"]))
    stats = facts["stats"]
    assert stats["reserved_bytes.all.peak"] == outcome.reserved_peak_bytes
    assert stats["active_bytes.all.peak"] == outcome.active_peak_bytes
    assert (stats["num_device_alloc"], 0, None) == (outcome.device_allocs, outcome.retries, outcome.oom)


@pytest.mark.parametrize("program", ["llm", "prefetch"])
def test_expandable_segments_are_predicted_from_a_recording_without_them(program: str) -> None:
    snapshot, _ = recording(f"{program}__default")
    _, measured = recording(f"{program}__expandable")
    (outcome,) = what_if(snapshot, 0, ["expandable_segments:True"], recorded=DEFAULT)
    expected = measured["stats"]["reserved_bytes.all.peak"]
    assert abs(outcome.reserved_peak_bytes - expected) < expected / 100


def test_out_of_memory_is_predicted_from_a_recording_with_memory_enough() -> None:
    snapshot, facts = recording("convnet__default")
    limited, facts_limited = recording("convnet__frac0.03")
    conf = "per_process_memory_fraction:0.03"
    total = facts["device_total_bytes"]
    (outcome,) = what_if(snapshot, 0, [conf], recorded=DEFAULT, recorded_memory=total)
    assert outcome.oom is not None
    requests = limited.of_kind(Kind.BLOCK_ALLOC, Kind.OOM)
    failed = np.flatnonzero(requests["kind"] == Kind.OOM)  # all but the last of them in cuDNN's search
    assert int(requests["size"][failed[-1]]) == -(-outcome.oom.size // 512) * 512
    assert abs(outcome.oom.request - int(failed[-1])) < failed[-1] / 100
    assert outcome.survived_ooms > 0
    peak = facts_limited["stats"]["reserved_bytes.all.peak"]
    assert abs(outcome.reserved_peak_bytes - peak) < peak / 100


def test_recorded_out_of_memory_is_found_again_without_knowing_the_card() -> None:
    events = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 100 * MIB),
        alloc(0, 100 * MIB),
        (Kind.OOM, {"size": 60 * MIB, "aux0": 10 * MIB}),
    )
    (outcome,) = what_if(events, 0, [""], recorded=DEFAULT)
    assert outcome.oom is not None
    assert (2, 2, 60 * MIB, 0) == (
        outcome.oom.event,
        outcome.oom.request,
        outcome.oom.size,
        outcome.survived_ooms,
    )


def test_failed_requests_of_a_recording_enclose_its_memory_fraction() -> None:
    snapshot, facts = recording("convnet__frac0.03")
    limit = recorded_limit(snapshot, 0)
    assert limit is not None
    allowed = 0.03 * facts["device_total_bytes"]
    assert facts["stats"]["reserved_bytes.all.peak"] <= allowed <= limit < allowed + 2 * MIB


def test_smaller_card_runs_out_at_the_request_that_is_too_much() -> None:
    events = requested(100, 50, 30)
    enough, too_small = (what_if(events, 0, [""], recorded=DEFAULT, memory=size * MIB)[0] for size in (180, 179))
    assert (None, 180 * MIB) == (enough.oom, enough.reserved_peak_bytes)
    assert too_small.oom is not None
    assert (3, 5, 30 * MIB) == (too_small.oom.request, too_small.oom.event, too_small.oom.size)
    assert (150 * MIB, 150 * MIB) == (too_small.oom.reserved_bytes, too_small.oom.active_bytes)
    assert (150 * MIB, 1) == (too_small.reserved_peak_bytes, too_small.retries)


def test_fragmentation_is_the_unused_share_when_most_was_reserved() -> None:
    (outcome,) = what_if(requested(15), 0, ["expandable_segments:True"], recorded=DEFAULT)
    assert (20 * MIB, 15 * MIB, 0.25) == (
        outcome.reserved_peak_bytes,
        outcome.active_peak_bytes,
        outcome.fragmentation,
    )


def test_fragmentation_is_that_of_the_fullest_moment_of_the_peak() -> None:
    segment = of_segment(Kind.SEGMENT_ALLOC, 0, 2 * MIB)
    (outcome,) = what_if(
        trace(segment, *(alloc(number * 512 * 1024, 512 * 1024) for number in range(3))), 0, [""], recorded=DEFAULT
    )
    assert (2 * MIB, 1.5 * MIB, 0.25) == (
        outcome.reserved_peak_bytes,
        outcome.active_peak_bytes,
        outcome.fragmentation,
    )


def test_block_that_another_stream_used_becomes_free_where_it_did_in_the_recording() -> None:
    first, second = 0, 256 * MIB
    events = trace(
        of_segment(Kind.SEGMENT_ALLOC, first, 100 * MIB),
        alloc(first, 100 * MIB),
        free(first),
        of_segment(Kind.SEGMENT_ALLOC, second, 100 * MIB),
        alloc(second, 100 * MIB),  # the first block is still in use
        freed(first),
        alloc(first, 100 * MIB),
    )
    (outcome,) = what_if(events, 0, [""], recorded=DEFAULT)
    assert (200 * MIB, 200 * MIB) == (outcome.reserved_peak_bytes, outcome.active_peak_bytes)


def test_request_that_failed_when_recorded_is_tried_and_given_back() -> None:
    events = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 100 * MIB),
        alloc(0, 100 * MIB),
        (Kind.OOM, {"size": 60 * MIB, "aux0": 10 * MIB}),
        of_segment(Kind.SEGMENT_ALLOC, 256 * MIB, 10 * MIB),
        alloc(256 * MIB, 10 * MIB),
    )
    survived, served = (what_if(events, 0, [""], recorded=DEFAULT, memory=memory)[0] for memory in (None, GIB))
    assert (None, 1) == (survived.oom, survived.survived_ooms)
    assert (None, 160 * MIB) == (served.oom, served.active_peak_bytes)


@pytest.mark.parametrize(
    ("free_on_the_device", "limit"),
    [(10 * MIB, 110 * MIB), (GIB, 160 * MIB - 1)],
    ids=["the card is full", "a memory fraction"],
)
def test_failed_request_tells_how_much_there_was(free_on_the_device: int, limit: int) -> None:
    events = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 100 * MIB),
        alloc(0, 100 * MIB),
        (Kind.OOM, {"size": 60 * MIB, "aux0": free_on_the_device}),
    )
    assert limit == recorded_limit(events, 0)
    assert None is recorded_limit(requested(10), 0)


def test_advice_names_the_setting_that_reserves_least() -> None:
    snapshot, facts = recording("prefetch__default")
    advice = advise(snapshot, 0, recorded=DEFAULT, recorded_memory=facts["device_total_bytes"])
    assert advice.best is not None
    assert min(outcome.reserved_peak_bytes for outcome in advice.tried) * 1.01 >= advice.best.reserved_peak_bytes
    assert advice.recorded.reserved_peak_bytes - advice.best.reserved_peak_bytes == advice.gain_bytes > 0
    assert facts["stats"]["reserved_bytes.all.peak"] == advice.recorded.reserved_peak_bytes


def test_advice_is_nothing_where_nothing_helps() -> None:
    advice = advise(requested(40, 20), 0, recorded=DEFAULT)
    assert (None, 0) == (advice.best, advice.gain_bytes)


def test_advice_on_a_card_that_is_too_small_for_what_is_in_use_is_nothing() -> None:
    advice = advise(requested(100, 100), 0, recorded=DEFAULT, memory=150 * MIB)
    assert None is advice.best
    assert all(outcome.oom is not None for outcome in advice.tried)


def test_driver_s_own_allocator_cannot_be_modelled() -> None:
    with pytest.raises(ConfigError, match="backend:cudaMallocAsync"):
        what_if(requested(1), 0, ["backend:cudaMallocAsync"], recorded=DEFAULT)


def test_progress_counts_the_settings_tried() -> None:
    told: list[int] = []
    what_if(requested(10), 0, ["", "expandable_segments:True"], recorded=DEFAULT, progress=told.append)
    assert [1, 2] == told


def test_requests_that_failed_are_served_on_a_large_card() -> None:
    snapshot, _ = recording("convnet__frac0.03")
    (outcome,) = what_if(snapshot, 0, [""], recorded=DEFAULT, memory=200 * GIB)
    assert None is outcome.oom
