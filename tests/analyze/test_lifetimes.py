from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from records import BASE, alloc, free, freed, of_segment, trace

from cudatool import analyze
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.lifetimes import Lifetimes, peaks
from cudatool.trace.model import Trace


def spans(rows: analyze.Lifetimes) -> list[tuple[int, int, int, int]]:
    columns = (rows.address - BASE, rows.start, rows.freed, rows.end)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_block_lives_from_alloc_to_free_completed() -> None:
    rows = analyze.blocks(trace(alloc(0, 512), free(0), freed(0)))
    assert [(0, 0, 1, 2)] == spans(rows)


def test_what_is_never_freed_ends_after_the_last_record() -> None:
    rows = analyze.blocks(trace(alloc(0, 512), alloc(512, 512), free(512)))
    assert [(0, 0, 3, 3), (512, 1, 2, 3)] == spans(rows)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 12), st.integers(1, 99)), max_size=20))
def test_peaks_of_groups_equal_those_of_each_alone(made: list[tuple[int, int, int, int]]) -> None:
    made.sort(key=lambda row: row[1])
    group, start, length, size = np.array(made, np.int64).reshape(-1, 4).T
    zeros = np.zeros(len(made), np.int64)
    columns = dict.fromkeys(analyze.Lifetimes.__dataclass_fields__, zeros)
    rows = analyze.Lifetimes(**{**columns, "start": start, "end": start + length, "size": size})
    alone = [rows[group == one] for one in range(4)]
    at = [[own.size[(own.start <= now) & (now < own.end)].sum() for now in range(60)] for own in alone]
    assert [max(levels) for levels in at] == peaks(rows, group, 4).tolist()


def test_peaks_of_groups_take_few_columns() -> None:
    """A recording may have millions of blocks: each column of numbers that is kept for a while counts."""
    count = 100_000
    start = np.arange(count)
    same = np.ones(count, np.int64)
    none = np.zeros(count, np.bool_)
    rows = Lifetimes(same, same, same, start, start + 5, start + 5, same, same, same, same, none, none, same)
    group = (start % 3).astype(np.int32)
    tracemalloc.start()
    try:
        found = peaks(rows, group, 3)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [2, 2, 2] == found.tolist()
    assert most < 6.5 * 8 * count


def test_an_address_used_again_is_another_block() -> None:
    rows = analyze.blocks(trace(alloc(0, 512), free(0), freed(0), alloc(0, 1024), free(0)))
    assert [(0, 0, 1, 2), (0, 3, 4, 5)] == spans(rows)


def test_a_lost_free_ends_where_the_address_is_handed_out_again() -> None:
    rows = analyze.blocks(trace(alloc(0, 512), alloc(0, 512), free(0), alloc(0, 512)))
    assert [(0, 0, 1, 1), (0, 1, 2, 3), (0, 3, 4, 4)] == spans(rows)


def test_a_free_without_an_alloc_ends_no_block() -> None:
    assert [(512, 2, 3, 3)] == spans(analyze.blocks(trace(free(0), freed(0), alloc(512, 512))))


def test_one_address_on_two_devices_is_two_blocks() -> None:
    rows = analyze.blocks(
        trace(
            alloc(0, 512, device=0),
            alloc(0, 512, device=1),
            (Kind.BLOCK_FREE_REQUESTED, {"address": BASE, "device": 1}),
        )
    )
    assert [(0, 0, 3, 3), (0, 1, 2, 3)] == spans(rows)


def test_memory_from_the_driver_counts_as_block_and_as_segment() -> None:
    made = trace(
        (Kind.MEM_ALLOC, {"address": BASE, "size": 100}),
        (Kind.MEM_FREE, {"address": BASE, "size": 100}),
        (Kind.HOST_ALLOC, {"address": 5, "size": 100}),
    )
    assert [(0, 0, 1, 1)] == spans(analyze.blocks(made)) == spans(analyze.segments(made))
    assert [100] == analyze.blocks(made).requested.tolist()


def test_an_unmap_cuts_what_was_mapped() -> None:
    rows = analyze.segments(
        trace(
            of_segment(Kind.SEGMENT_MAP, 0, 300),
            of_segment(Kind.SEGMENT_MAP, 300, 100),
            of_segment(Kind.SEGMENT_UNMAP, 100, 250),
        )
    )
    found = sorted(zip((rows.address - BASE).tolist(), rows.size.tolist(), rows.end.tolist(), strict=True))
    assert [(0, 100, 3), (100, 200, 2), (300, 50, 2), (350, 50, 3)] == found
    assert rows.expandable.all()


def test_a_map_ends_what_was_mapped_there() -> None:
    rows = analyze.segments(
        trace(
            of_segment(Kind.SEGMENT_MAP, 0, 300),
            of_segment(Kind.SEGMENT_MAP, 100, 100),
            of_segment(Kind.SEGMENT_MAP, 0, 300),
        )
    )
    found = zip(rows.start.tolist(), (rows.address - BASE).tolist(), rows.size.tolist(), rows.end.tolist(), strict=True)
    assert [(0, 0, 100, 2), (0, 100, 100, 1), (0, 200, 100, 2), (1, 100, 100, 2), (2, 0, 300, 3)] == sorted(found)


def test_an_empty_trace_has_no_rows() -> None:
    empty = Trace(np.zeros(0, RECORD))
    assert [0, 0] == [len(analyze.blocks(empty)), len(analyze.segments(empty))]


_KINDS = (Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 3), st.integers(0, 1)), max_size=40))
def test_pairing_equals_a_walk_over_the_events(events: list[tuple[Kind, int, int]]) -> None:
    made = trace(*((kind, {"address": BASE + address, "device": device}) for kind, address, device in events))
    expected: list[list[int]] = []
    open_rows: dict[tuple[int, int], list[int]] = {}
    never = len(events)
    for i, (kind, address, device) in enumerate(events):
        row = open_rows.get((address, device))
        if kind == Kind.BLOCK_ALLOC:
            if row and row[3] == never:  # its end was not recorded
                row[3] = i
            open_rows[address, device] = row = [address, i, never, never]
            expected.append(row)
        elif row:
            at = 2 if kind == Kind.BLOCK_FREE_REQUESTED else 3
            row[at] = min(row[at], i)
    for row in expected:  # what ended was freed at the latest then
        row[2] = min(row[2], row[3])
    assert [tuple(row) for row in expected] == spans(analyze.blocks(made))


def test_recording_begins_after_what_a_reader_put_in_front() -> None:
    prior = [alloc(0, 512), (Kind.RANGE_PUSH, {}), alloc(512, 512, device=1), alloc(1024, 512)]
    made = trace(*prior, free(0), header={"prior_records": {0: 2, 1: 1}})
    assert [4, 5, 0] == [analyze.recorded_from(made, device) for device in (0, 1, 2)]
