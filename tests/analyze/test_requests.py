"""The calls of a recording, kept as columns."""

from __future__ import annotations

import tracemalloc

from allocator_program import run

from cudatool.analyze.requests import Call, Calls, Change, Verb, requests
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

CALLS = [
    Call(Verb.MALLOC, 0, (1 << 63) + 1, 7, 3, (1 << 64) - 1, (), (), 5),
    Call(Verb.EMPTY_CACHE, -1, 0, 0, 0, 0, (4, 2), (), 6),
    Call(Verb.FREE, 0, 512, 7, 3, 1 << 40, (), (), 9),
]


def test_columns_give_back_the_calls_they_were_given() -> None:
    calls = Calls(CALLS)
    assert CALLS == list(calls)
    assert (3, CALLS[1], CALLS[-1], CALLS[1:], []) == (len(calls), calls[1], calls[-1], calls[1:], calls[3:])
    assert all(call.verb is same.verb for call, same in zip(calls, CALLS, strict=True))


def test_questions_about_calls_are_answered_from_the_columns() -> None:
    change = Change(Kind.SEGMENT_ALLOC, 1 << 40, 1 << 21, 7, 3, True, 0)
    calls = Calls([*CALLS, CALLS[0]._replace(changes=(change, change))])
    assert [change, change] == list(calls.changes())
    assert [calls[3]] == list(calls.with_changes())
    assert (2, 0) == (calls.number_of(Verb.MALLOC), calls.number_of(Verb.FAILED_MALLOC))
    assert (3, 2, -1) == (calls.last(Verb.FREE, Verb.MALLOC), calls.last(Verb.FREE), calls.last(Verb.FAILED_MALLOC))


def test_calls_take_little_more_memory_than_the_records_they_come_from() -> None:
    trace, _ = run("", [(number % 2, 512 * (1 + number % 90), 0) for number in range(60_000)])
    records = trace.records
    assert requests(Trace(records[:100]), 0).blocks  # what is made once, such as tables of NumPy, is not counted
    tracemalloc.start()
    try:
        found = requests(trace, 0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.calls) == 60_000
    assert most < 2 * records.nbytes
