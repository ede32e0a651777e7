"""Blocks of libraries' pools: what ends them, whose chunks are, and what is counted where."""

from __future__ import annotations

import numpy as np
import pytest

from cudatool.trace.events import RECORD, Kind
from cudatool.trace.lifetimes import blocks, segments, timeline
from cudatool.trace.model import Trace
from cudatool.trace.window import window

CUPY = 1  # the index of its name


def trace(*events: tuple[Kind, int, int] | tuple[Kind, int]) -> Trace:
    records = np.zeros(len(events), RECORD)
    for row, (kind, address, *size) in zip(records, events, strict=True):
        row["kind"], row["address"], row["size"] = kind, address, size[0] if size else 0
        if kind in (Kind.POOL_ALLOC, Kind.POOL_FREE):
            row["name"], row["aux0"] = CUPY, max(int(row["size"]) - 1, 0)
    records["time"] = np.arange(len(events))
    return Trace(records, names=["", "CuPy"])


def spans(rows) -> list[tuple[int, int, int, int]]:
    columns = (rows.address, rows.size, rows.start, rows.end)
    return list(zip(*(column.tolist() for column in columns), strict=True))


TAKEN, GIVEN_BACK, ALLOC, FREE = Kind.MEM_ALLOC, Kind.MEM_FREE, Kind.POOL_ALLOC, Kind.POOL_FREE


def test_a_chunk_is_reserved_and_its_blocks_are_allocated() -> None:
    found = trace((TAKEN, 1000, 100), (ALLOC, 1000, 60), (ALLOC, 1060, 20), (FREE, 1000), (GIVEN_BACK, 1000))
    assert [(1000, 60, 1, 3), (1060, 20, 2, 4)] == spans(blocks(found))
    assert [59, 19] == blocks(found).requested.tolist()
    assert [CUPY, CUPY] == blocks(found).library.tolist()
    assert [(1000, 100, 0, 4)] == spans(segments(found))
    assert [CUPY] == segments(found).library.tolist()
    curve = timeline(found, blocks(found), segments(found))
    assert [0, 60, 80, 20, 0] == curve.allocated.tolist()
    assert [100, 100, 100, 100, 0] == curve.reserved.tolist()


def test_memory_without_a_block_stays_the_programs_own() -> None:
    found = trace((TAKEN, 1000, 100), (TAKEN, 2000, 50), (ALLOC, 2000, 50))
    assert [(1000, 100, 0, 3), (2000, 50, 2, 3)] == spans(blocks(found))
    assert [0, CUPY] == segments(found).library.tolist()


@pytest.mark.parametrize(
    ("address", "ends"), [(1000, True), (1010, True), (1049, True), (990, True), (1050, False), (960, False)]
)
def test_a_block_ends_when_any_of_its_bytes_are_handed_out_again(address: int, ends: bool) -> None:
    found = trace((TAKEN, 900, 400), (ALLOC, 1000, 50), (ALLOC, address, 20))
    assert [(1000, 50, 1, 2 if ends else 3), (address, 20, 2, 3)] == spans(blocks(found))


def test_a_block_ends_with_its_chunk() -> None:
    found = trace((TAKEN, 1000, 100), (ALLOC, 1050, 10), (GIVEN_BACK, 1000), (TAKEN, 1000, 100))
    assert [(1050, 10, 1, 2), (1000, 100, 3, 4)] == spans(blocks(found))
    assert [CUPY, 0] == segments(found).library.tolist()


def test_a_block_ends_when_the_driver_hands_out_its_bytes() -> None:
    """The free of its chunk was not recorded."""
    found = trace((TAKEN, 1000, 100), (ALLOC, 1050, 10), (TAKEN, 1040, 30))
    assert [(1050, 10, 1, 2), (1040, 30, 2, 3)] == spans(blocks(found))


def test_a_free_of_a_block_that_was_not_seen_ends_nothing() -> None:
    found = trace((TAKEN, 1000, 100), (ALLOC, 1000, 10), (FREE, 1010), (FREE, 1000), (FREE, 1000))
    assert [(1000, 10, 1, 3)] == spans(blocks(found))


def test_a_block_of_a_chunk_from_before_the_recording_is_a_block_without_a_segment() -> None:
    found = trace((ALLOC, 1000, 10))
    assert [(1000, 10, 0, 1)] == spans(blocks(found))
    assert not len(segments(found))


def test_devices_have_memory_of_their_own() -> None:
    found = trace((TAKEN, 1000, 100), (TAKEN, 1000, 100), (ALLOC, 1000, 10), (ALLOC, 1000, 20))
    found.records["device"] = [0, 1, 0, 1]
    assert [(1000, 10, 2, 4), (1000, 20, 3, 4)] == spans(blocks(found))


def test_a_window_begins_with_a_chunk_that_is_cached_as_a_chunk() -> None:
    whole = trace((TAKEN, 1000, 100), (ALLOC, 1000, 60), (FREE, 1000), (TAKEN, 5000, 10))
    part = window(whole, 3, 4)
    assert [(5000, 10)] == [(address, size) for address, size, *_ in spans(blocks(part).at(len(part.records) - 1))]
    assert [(100, CUPY), (10, 0)] == list(
        zip(segments(part).size.tolist(), segments(part).library.tolist(), strict=True)
    )


def test_a_window_begins_with_the_chunks_and_blocks_that_live() -> None:
    whole = trace((TAKEN, 1000, 100), (ALLOC, 1000, 60), (ALLOC, 1060, 20), (FREE, 1000), (FREE, 1060))
    part = window(whole, 4, 5)
    live = blocks(part)
    assert [(1060, 20)] == list(zip(live.address.tolist(), live.size.tolist(), strict=True))
    assert [(100, CUPY)] == list(zip(segments(part).size.tolist(), segments(part).library.tolist(), strict=True))
