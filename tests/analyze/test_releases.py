"""Releases before an allocation: which were an ``empty_cache`` of the program, and which made room for the allocation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from records import MIB, alloc, free, freed, of_segment, trace
from whatif_truth import CONFS, Op, Program, program, record, run, total_for

from cudatool.analyze import Requests, Verb, check, what_if
from cudatool.analyze.replay import requests_with_pools
from cudatool.errors import FileFormatError
from cudatool.memory import Settings
from cudatool.trace.events import Kind

GIB = 1 << 30


def emptied(asked: Requests) -> int:
    """Return how many calls of ``empty_cache`` gave memory back."""
    return sum(call.verb is Verb.EMPTY_CACHE and bool(call.changes) for call in asked.calls)


@pytest.mark.parametrize("stacks", [False, True], ids=["no stacks", "stacks"])
@pytest.mark.parametrize("conf", CONFS)
@pytest.mark.some_of("seed", [0, 5, 7, 11], 2)
def test_replay_costs_what_the_recording_did_for_releases_of_either_side(
    seed: int, conf: str, stacks: bool, tmp_path: Path
) -> None:
    made = program(seed)
    total = total_for(seed, run(made, "", 1 << 44))
    done = run(made, conf, total)
    snapshot, settings, _ = record(tmp_path / "snapshot.pickle", made, done, conf, stacks=stacks)
    assert check(snapshot, 0, settings, total_memory=total, final=snapshot.segments).is_exact
    (outcome,) = what_if(snapshot, 0, [conf], recorded=settings, recorded_memory=total)
    assert (done.peak, done.retries) == (outcome.reserved_peak_bytes, outcome.retries)


def test_stacks_tell_an_empty_cache_from_a_retry(tmp_path: Path) -> None:
    def steps() -> Iterator[Op]:
        for block in range(1, 9, 2):
            yield Op("malloc", block, 3 * GIB, site=1)
            yield Op("free", block, site=2)
            if block < 4:
                yield Op("empty", site=3)
            yield Op("malloc", block + 1, 3 * GIB + block * 64 * MIB, site=4)
            yield Op("free", block + 1, site=5)

    made = Program(list(steps()), survives=False)
    done = run(made, "", 5 * GIB)
    snapshot, _, _ = record(tmp_path / "snapshot.pickle", made, done, "", stacks=True)
    asked = requests_with_pools(snapshot, 0, Settings())
    assert (2, done.retries) == (emptied(asked), asked.retries)
    assert asked.ceiling is not None
    assert 5 * GIB <= asked.ceiling < 6.5 * GIB


def test_cache_that_could_have_served_the_request_was_emptied_by_the_program() -> None:
    events = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 8 * GIB),
        alloc(0, 8 * GIB),
        free(0),
        freed(0),
        of_segment(Kind.SEGMENT_FREE, 0, 8 * GIB),
        of_segment(Kind.SEGMENT_ALLOC, 0, 7 * GIB),
        alloc(0, 7 * GIB),
    )
    asked = requests_with_pools(events, 0, Settings())
    assert (1, 0, None, None) == (emptied(asked), asked.retries, asked.ceiling, asked.otherwise)


def test_cache_was_emptied_by_the_program_if_the_card_had_room() -> None:
    events = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 7 * GIB),
        alloc(0, 7 * GIB),
        free(0),
        freed(0),
        of_segment(Kind.SEGMENT_FREE, 0, 7 * GIB),
        of_segment(Kind.SEGMENT_ALLOC, 0, 8 * GIB),
        alloc(0, 8 * GIB),
    )
    small, large = (requests_with_pools(events, 0, Settings(), card * GIB) for card in (12, 80))
    assert (0, 1, 15 * GIB - 1) == (emptied(small), small.retries, small.ceiling)
    assert small.otherwise is not None
    assert (1, 0, None) == (emptied(small.otherwise), small.otherwise.retries, small.otherwise.ceiling)
    assert (1, 0, None) == (emptied(large), large.retries, large.ceiling)


def test_recording_that_begins_with_a_free_of_an_unknown_block_leaves_it_out() -> None:
    events = trace(free(0), of_segment(Kind.SEGMENT_ALLOC, 0, 2 * MIB), alloc(0, MIB))
    events.header["prior_records"] = {0: 1}
    assert 1 == requests_with_pools(events, 0, Settings()).unmatched


def test_block_without_bytes_is_refused() -> None:
    events = trace(of_segment(Kind.SEGMENT_ALLOC, 0, 2 * MIB), alloc(0, MIB, aux0=0))
    with pytest.raises(FileFormatError, match="a block of 0 bytes at 0x10000000000"):
        requests_with_pools(events, 0, Settings())


def test_limit_of_the_card_is_what_was_reserved_and_free_when_a_request_failed() -> None:
    events = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 100 * MIB),
        alloc(0, 100 * MIB),
        (Kind.OOM, {"size": 60 * MIB, "aux0": 900 * MIB}),
    )
    asked = requests_with_pools(events, 0, Settings.parse("per_process_memory_fraction:0.15"))
    assert (1000 * MIB, 160 * MIB - 1) == (asked.available, asked.ceiling)
