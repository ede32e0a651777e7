"""The passes in C, beside the rules in plain Python."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

import numpy as np
import pytest
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.trace import _sweep

BORN, FREED, ENDED = 1, 2, 4
NEVER = -1


def ranks(addresses: list[int]) -> np.ndarray:
    return np.unique(np.array(addresses, np.int64), return_inverse=True)[1].reshape(-1).astype(np.int64)


def pair(events: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Start, free and end of each birth; events are (role, address, device)."""
    births = [i for i, (role, *_) in enumerate(events) if role & BORN]
    rows = []
    for i in births:
        later = [j for j in range(i + 1, len(events)) if events[j][1:] == events[i][1:]]
        limit = next((j for j in later if events[j][0] & BORN), len(events))
        end = next((j for j in later if j < limit and events[j][0] & ENDED), limit)
        free = next((j for j in later if j < limit and events[j][0] & FREED), end)
        rows.append((i, min(free, end), end))
    return rows


event = st.tuples(
    st.sampled_from([BORN, FREED, ENDED, FREED | ENDED]),
    st.sampled_from([0, 512, 1 << 63, 2**64 - 1]),
    st.sampled_from([0, 1, -1]),
)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(event, max_size=40))
def test_births_are_joined_with_the_first_free_and_end_before_the_next_birth(
    events: list[tuple[int, int, int]],
) -> None:
    births = sum(role & BORN for role, *_ in events)
    columns = np.empty((3, births), np.int64)
    roles, addresses, devices = ([e[i] for e in events] for i in range(3))
    _sweep.pair(np.array(roles, np.uint8), np.array(addresses, np.uint64), np.array(devices, np.int8), *columns)
    assert pair(events) == [tuple(row) for row in columns.T.tolist()]


def test_pairs_of_more_addresses_than_the_table_begins_with() -> None:
    count = 5000
    roles = np.repeat(np.array([BORN, ENDED], np.uint8), count)
    addresses = np.tile(np.arange(count, dtype=np.uint64) * np.uint64(512), 2)
    start, freed, end = np.empty((3, count), np.int64)
    _sweep.pair(roles, addresses, np.zeros(2 * count, np.int8), start, freed, end)
    assert np.array_equal(np.arange(count), start)
    assert np.array_equal(np.arange(count, 2 * count), end)
    assert np.array_equal(end, freed)


def overlaps(events: list[int], rows: list[tuple[int, int]]) -> tuple[int, int]:
    live: dict[int, tuple[int, int]] = {}
    count, first = 0, -1
    for i, event in enumerate(events):
        row = ~event if event < 0 else event
        address, size = rows[row]
        if event < 0:
            live.pop(row, None)
        elif any(address < a + s and a < address + size for a, s in live.values()):
            count, first = count + 1, i if first < 0 else first
        else:
            live[row] = (address, size)
    return count, first


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=150), st.randoms())
def test_overlaps_are_counted_as_by_comparing_each_with_all(rows: list[tuple[int, int]], chance: object) -> None:
    deaths = [chance.randrange(i, len(rows)) for i in range(len(rows))]  # type: ignore[attr-defined]
    events = []
    for i in range(len(rows)):
        events.append(i)
        events += [~j for j, death in enumerate(deaths) if death == i]
    addresses, sizes = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    found = _sweep.overlaps(np.array(events, np.int64), ranks(addresses.tolist()), addresses, sizes)
    assert overlaps(events, rows) == found


BLOCK, BLOCK_FREE, BLOCK_GONE, SEGMENT, SEGMENT_GONE = range(1, 6)


def tails(events: list[tuple[int, int, int]], limit: int, remainder: int) -> list[int]:
    starts: list[int] = []
    sizes: dict[int, int] = {}
    segments: dict[int, int] = {}
    result = []
    for what, address, size in events:
        if what == BLOCK:
            below = [start for start in segments if start <= address]
            end = segments[max(below)] if below else 0
            at = bisect_right(starts, address)
            if address < end:
                free = min(end, starts[at] if at < len(starts) else end) - address
                if free > size and not (size < limit and free - size > remainder):
                    size = free
            if address not in sizes:
                insort(starts, address)
            sizes[address] = size
        elif what == BLOCK_FREE:
            size = sizes.get(address, size)
        elif what == BLOCK_GONE and address in sizes:
            size = sizes.pop(address)
            del starts[bisect_left(starts, address)]
        elif what == SEGMENT:
            segments[address] = address + size
        elif what == SEGMENT_GONE:
            segments.pop(address, None)
        result.append(size)
    return result


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 400), st.integers(1, 100)), max_size=200))
def test_unsplit_tails_are_those_of_the_sorted_list(events: list[tuple[int, int, int]]) -> None:
    what, addresses, sizes = (np.array([e[i] for e in events], np.int64) for i in range(3))
    given_sizes = sizes.copy()
    _sweep.add_tails(what.astype(np.uint8), ranks(addresses.tolist()), addresses, given_sizes, 60, 10)
    assert tails(events, 60, 10) == given_sizes.tolist()


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    two, three = np.zeros(2, np.int64), np.zeros(3, np.int64)
    with pytest.raises(ValueError, match="different lengths"):
        _sweep.overlaps(two, two, three, two)
    with pytest.raises(ValueError, match="not there"):
        _sweep.overlaps(np.array([5]), two, two, two)
    with pytest.raises(ValueError, match="not there"):
        _sweep.add_tails(np.zeros(2, np.uint8), np.array([0, 7]), two, two.copy(), 1, 1)
    with pytest.raises(ValueError, match="births"):
        _sweep.pair(np.ones(2, np.uint8), two.astype(np.uint64), np.zeros(2, np.int8), *np.zeros((3, 1), np.int64))


SEEDS = (*range(6), 20_261_122)  # a campaign's finding is kept by its seed
MANY = 5000  # more than 64 * 64: the sets then have several levels


@pytest.mark.parametrize("seed", SEEDS)
def test_thousands_of_events_give_what_plain_python_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    addresses = random.integers(0, 64 * MANY, MANY)
    sizes = random.integers(1, 96, MANY)
    deaths = np.minimum(np.arange(MANY) + random.integers(0, 60, MANY), MANY - 1)
    dying: list[list[int]] = [[] for _ in range(MANY)]
    for row, death in enumerate(deaths.tolist()):
        dying[death].append(row)
    events = [event for row in range(MANY) for event in (row, *(~gone for gone in dying[row]))]
    rows = list(zip(addresses.tolist(), sizes.tolist(), strict=True))
    found = _sweep.overlaps(np.array(events, np.int64), ranks(addresses.tolist()), addresses, sizes)
    assert overlaps(events, rows) == found

    what = random.choice(
        [BLOCK, BLOCK, BLOCK_FREE, BLOCK_GONE, SEGMENT, SEGMENT_GONE], MANY, p=[0.3, 0.3, 0.1, 0.28, 0.01, 0.01]
    )
    sizes[what == SEGMENT] *= 1000
    corrected = sizes.copy()
    _sweep.add_tails(what.astype(np.uint8), ranks(addresses.tolist()), addresses, corrected, 60, 10)
    told = list(zip(what.tolist(), addresses.tolist(), sizes.tolist(), strict=True))
    assert tails(told, 60, 10) == corrected.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_no_number_that_a_file_may_have_reaches_beyond_an_array(seed: int) -> None:
    """What it proves, it proves under AddressSanitizer: without, a read beyond an array may go unnoticed."""
    random = np.random.default_rng(seed)
    extremes = np.array([0, 1, -1, 63, 64, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63)], np.int64)

    def numbers(count: int, below: int) -> np.ndarray:
        near = random.integers(-1, below + 1, count)
        return np.where(random.random(count) < 0.05, random.choice(extremes, count), near)

    refused = 0
    for _ in range(200):
        count, rows = (int(n) for n in random.integers(0, 200, 2))
        roles, devices = (
            random.integers(0, 256, count).astype(np.uint8),
            random.integers(-128, 128, count).astype(np.int8),
        )
        births = int(np.count_nonzero(roles & BORN)) + int(random.integers(-1, 2))
        columns = np.empty((3, max(births, 0)), np.int64)
        wild = random.random() < 0.5  # else all that is checked is right, and the rest is not
        here, places = (numbers(n, rows) if wild else random.integers(0, max(rows, 1), n) for n in (count, rows))
        spots = numbers(count, count) if wild else random.integers(0, max(count, 1), count)
        half = roles[: count // 2]
        for function, arguments in (
            (_sweep.pair, (roles, numbers(count, 9).astype(np.uint64), devices, *columns)),
            (_sweep.overlaps, (here, places, numbers(rows, 99), numbers(rows, 99))),
            (_sweep.add_tails, (roles % 7, spots, numbers(count, 99), numbers(count, 99), 60, 10)),
            (_sweep.add_tails, (half, spots, numbers(count, 99), numbers(count, 99), 60, 10)),
        ):
            try:
                function(*arguments)
            except ValueError:
                refused += 1
        assert ((columns >= 0) & (columns <= count)).all() or births != np.count_nonzero(roles & BORN)
    assert 200 < refused < 800
