"""The calls of a recording, kept as columns."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from allocator_program import run

from cudatool.analyze import check, what_if
from cudatool.analyze.calls import AllocatorCall, AllocatorCalls, Change, Part, Verb
from cudatool.analyze.requests import requests
from cudatool.memory import Settings
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

CALLS = [
    AllocatorCall(Verb.MALLOC, 0, (1 << 63) + 1, 7, 3, (1 << 64) - 1, (), (), 5),
    AllocatorCall(Verb.EMPTY_CACHE, -1, 0, 0, 0, 0, (4, 2), (), 6),
    AllocatorCall(Verb.FREE, 0, 512, 7, 3, 1 << 40, (), (), 9),
]


def test_columns_give_back_the_calls_they_were_given() -> None:
    calls = AllocatorCalls(CALLS)
    assert CALLS == list(calls)
    assert (3, CALLS[1], CALLS[-1], CALLS[1:], []) == (len(calls), calls[1], calls[-1], calls[1:], calls[3:])
    assert all(call.verb is same.verb for call, same in zip(calls, CALLS, strict=True))


def test_questions_about_calls_are_answered_from_the_columns() -> None:
    change = Change(Kind.SEGMENT_ALLOC, 1 << 40, 1 << 21, 7, 3, True, 0)
    calls = AllocatorCalls([*CALLS, CALLS[0]._replace(changes=(change, change))])
    assert [change, change] == list(calls.changes())
    assert [(3, calls[3])] == list(calls.with_changes())
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


def test_calls_are_taken_many_at_a_time_and_special_ones_by_themselves() -> None:
    plain = [AllocatorCall(Verb.MALLOC, number, 512, 0, 0, 512 * number, (), (), number) for number in range(40_000)]
    calls = AllocatorCalls([*plain[:20_000], plain[0]._replace(done=(1,)), *plain[20_000:]])
    taken: list[int] = []

    def many(part: Part, start: int, stop: int) -> int:
        stop = min(stop, start + 30_000 if taken else 7)  # the eighth has to be taken by itself
        assert [call.block for call in calls[part.first + start : part.first + stop]] == part.blocks[start:stop]
        taken.extend(range(part.first + start, part.first + stop))
        return stop

    def one(index: int, call: AllocatorCall) -> bool:
        assert call == calls[index]
        taken.append(-index)
        return index < 30_000

    assert not calls.go_through(calls.special([30_000]), many, one, "testing")
    assert [*range(7), -7, *range(8, 20_000), -20_000, *range(20_001, 30_000), -30_000] == taken


def test_releases_of_the_program_become_calls_of_their_own() -> None:
    change = Change(Kind.SEGMENT_FREE, 1 << 40, 1 << 21, 7, 0, True, 0)
    gain = change._replace(kind=Kind.SEGMENT_ALLOC)
    whole = CALLS[0]._replace(done=(3,), changes=(change, gain))
    calls = AllocatorCalls([CALLS[2], whole, CALLS[1]]).with_emptied({1: 1})
    emptied = AllocatorCall(Verb.EMPTY_CACHE, -1, 0, 0, 0, 0, (3,), (change,), whole.event)
    assert [CALLS[2], emptied, whole._replace(done=(), changes=(gain,)), CALLS[1]] == list(calls)


@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "garbage_collection_threshold:0.5,max_split_size_mb:32"]
)
def test_calls_that_are_taken_many_at_a_time_cost_what_they_do_one_by_one(
    conf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(5)
    sizes = [chance.choice((600, 40_000, 3 << 20, 50 << 20)) * chance.randrange(1, 4) for _ in range(600)]
    trace, _ = run(conf, [(chance.randrange(40), size, chance.randrange(3)) for size in sizes])
    settings = Settings.parse(f"{conf},per_process_memory_fraction:0.9" if "garbage" in conf else conf)

    def results() -> list[object]:
        options = {"recorded": settings, "recorded_memory": 4 << 30}
        confs = [conf, "max_split_size_mb:64", "expandable_segments:True,roundup_power2_divisions:4"]
        return [check(trace, 0, settings, total_memory=4 << 30), what_if(trace, 0, confs, **options)]

    many = results()
    monkeypatch.setattr(AllocatorCalls, "special", lambda calls, also=(): list(range(len(calls))))
    assert results() == many
