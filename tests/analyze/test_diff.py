from __future__ import annotations

from recordings import in_turn
from records import RECORDINGS, alloc, free, freed, of_segment, recording, stacks, trace

from cudatool import analyze
from cudatool.analyze import Match
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

Row = tuple[str, Match, int, int]


def rows(before: Trace, after: Trace) -> list[Row]:
    (found,) = analyze.diff(before, after)
    return [(row.label, row.matched_by, row.before, row.after) for row in found.rows]


def test_the_largest_difference_comes_first_whichever_its_sign() -> None:
    tables = stacks([("a.py", "f", 1)], [("a.py", "g", 2)], [("a.py", "h", 3)])
    before = trace(alloc(0, 100, stack=1), alloc(500, 100, stack=2), alloc(1000, 5, stack=3), **tables)
    after = trace(alloc(0, 150, stack=1), alloc(500, 20, stack=2), alloc(1000, 5, stack=3), **tables)
    assert [
        ("a.py:2 (g)", Match.FUNCTIONS, 100, 20),
        ("a.py:1 (f)", Match.FUNCTIONS, 100, 150),
        ("a.py:3 (h)", Match.FUNCTIONS, 5, 5),
    ] == rows(before, after)


def test_peaks_are_compared_not_ends() -> None:
    before = trace(alloc(0, 100), free(0), freed(0))
    after = trace(alloc(0, 70), alloc(100, 50), free(0), freed(0), free(100), freed(100))
    (found,) = analyze.diff(before, after)
    assert (100, 120) == (found.before, found.after)


def test_lines_that_shift_keep_their_partners_in_order() -> None:
    before = trace(alloc(0, 100, stack=1), alloc(500, 7, stack=2), **stacks([("a.py", "f", 10)], [("a.py", "f", 12)]))
    after = trace(alloc(0, 100, stack=1), alloc(500, 7, stack=2), **stacks([("a.py", "f", 12)], [("a.py", "f", 14)]))
    assert [("a.py:12 (f)", Match.FUNCTIONS, 100, 100), ("a.py:14 (f)", Match.FUNCTIONS, 7, 7)] == rows(before, after)


def test_sites_that_cannot_be_told_apart_are_one_row() -> None:
    before = trace(alloc(0, 100, stack=1), **stacks([("a.py", "f", 10)]))
    after = trace(alloc(0, 60, stack=1), alloc(500, 60, stack=2), **stacks([("a.py", "f", 10)], [("a.py", "f", 11)]))
    ((_, match, old, new),) = rows(before, after)
    assert (Match.FUNCTIONS, 100, 120) == (match, old, new)


def test_a_moved_folder_is_matched_by_names() -> None:
    before = trace(alloc(0, 100, stack=1), **stacks([("/old/a.py", "f", 10)]))
    after = trace(alloc(0, 60, stack=1), **stacks([("/new/a.py", "f", 99)]))
    assert [("a.py:99 (f)", Match.NAMES, 100, 60)] == rows(before, after)


def test_another_way_to_the_same_line_is_matched_by_its_function() -> None:
    before = trace(alloc(0, 100, stack=1), **stacks([("a.py", "f", 10), ("main.py", "main", 1)]))
    after = trace(alloc(0, 60, stack=1), **stacks([("a.py", "f", 11), ("test.py", "test", 1)]))
    assert [("a.py:11 (f)", Match.FUNCTION, 100, 60)] == rows(before, after)


def test_sizes_match_where_there_are_no_stacks() -> None:
    assert [
        ("(no stack in this file), 1 KiB each", Match.SIZE, 1024, 2048),
        ("(no stack in this file), 512 B each", Match.NONE, 512, 0),
    ] == rows(trace(alloc(0, 1024), alloc(5000, 512)), trace(alloc(0, 1024), alloc(5000, 1024)))


def test_a_device_of_only_one_trace_is_compared_with_nothing() -> None:
    before = trace(alloc(0, 100))
    after = trace(alloc(0, 100), alloc(0, 30, device=1), of_segment(Kind.SEGMENT_ALLOC, 0, 50, device=1))
    first, second = analyze.diff(before, after)
    assert (0, 0, 1, 0, 30, 50) == (
        first.device,
        first.after - first.before,
        second.device,
        second.before,
        second.after,
        second.reserved_after,
    )


def test_two_empty_traces_have_nothing_to_compare() -> None:
    assert () == analyze.diff(trace(), trace())


@in_turn(RECORDINGS)
def test_a_recording_does_not_differ_from_itself(name: str) -> None:
    made = recording(name)
    (found,) = analyze.diff(made, made)
    assert [] == [row for row in found.rows if row.change or row.matched_by == Match.NONE]
    assert found.before == sum(row.before for row in found.rows) == sum(row.after for row in found.rows)


def test_rows_of_different_programs_still_add_up() -> None:
    (found,) = analyze.diff(recording("gpt_default"), recording("resnet_default"))
    assert (found.before, found.after) == (sum(r.before for r in found.rows), sum(r.after for r in found.rows))
