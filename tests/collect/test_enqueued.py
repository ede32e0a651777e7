"""Which call enqueued what ran."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from cudatool.collect import _log_rows, cupti_work
from cudatool.collect.cupti_rows import ROW, What
from cudatool.collect.cupti_work import Enqueued


def ran(correlations, what=What.KERNEL):
    rows = np.zeros(len(correlations), ROW)
    rows["correlation"], rows["what"] = correlations, what
    return rows


def noted(calls):
    return np.array([(called, (called + 1000) % 2**32, 7) for called in calls], np.uint32).reshape(-1, 3)


@pytest.mark.parametrize("seed", range(6))
def test_a_call_is_found_until_enough_newer_ones_took_its_place(seed, monkeypatch):
    """Against a search by hand: of the numbers with equal last bits, the four newest are known."""
    monkeypatch.setattr(cupti_work, "_MOST_LAUNCHED", 64)
    draw, enqueued = random.Random(seed), Enqueued()
    newest, of_residue = 1 if seed else 2**32 - 300, defaultdict(list)
    for _ in range(40):
        calls = []
        for _ in range(draw.randrange(12)):
            newest = (newest + draw.choice([1, 1, 1, 3, 16, 17])) % 2**32 or 1
            calls.append(newest)
        draw.shuffle(calls)  # of several threads
        if draw.randrange(2):
            enqueued.add_all(noted(calls))
        else:
            for call in noted(calls).tolist():
                enqueued.add(*call)
        for call in calls:
            places = of_residue[call % 16]
            if len(places) == 4:
                places.remove(max(places, key=lambda one: (call - one + 2**31) % 2**32))
            places.append(call)
        asked = [*calls, *(draw.randrange(2**32) for _ in range(3)), 0, *(newest - back for back in range(0, 300, 7))]
        asked = [one % 2**32 for one in asked]
        found = enqueued.of(ran(asked))
        expected = [(one, (one + 1000) % 2**32, 7) if one in of_residue[one % 16] else (0, 0, 0) for one in asked]
        assert [*map(tuple, found.calls.tolist())] == expected
        assert found.unknown == found.kernels == expected.count((0, 0, 0))


def test_as_many_calls_as_there_is_room_for_are_known(monkeypatch):
    monkeypatch.setattr(cupti_work, "_MOST_LAUNCHED", 64)
    enqueued = Enqueued()
    enqueued.add_all(noted(range(1, 101)))
    found = enqueued.of(ran(range(1, 101)))
    assert found.calls[:, 0].tolist() == [0] * 36 + [*range(37, 101)]


def test_what_a_call_of_an_operation_enqueued_is_counted():
    enqueued = Enqueued()
    enqueued.add_operation(3, 33)
    enqueued.add(4, 44, 9)
    rows = np.concatenate([ran([3, 4, 5]), ran([6], What.COPY)])
    calls, unknown, kernels, operations = enqueued.of(rows)
    assert calls.tolist() == [[3, 33, 0], [4, 44, 9], [0, 0, 0], [0, 0, 0]]
    assert (unknown, kernels, operations) == (2, 1, 1)


def test_calls_of_which_nothing_is_asked_are_forgotten():
    enqueued = Enqueued()
    enqueued.add(4, 44, 9)
    enqueued.add_all(noted([5]))
    enqueued.clear()
    assert not enqueued.of(ran([4, 5])).calls.any()


def test_what_ran_on_a_stream_without_an_id_is_refused():
    rows, calls, records = ran([0]), np.zeros((1, 3), np.uint32), bytearray(128)
    rows["device"], rows["words"][0, 2] = 1, 5
    [number] = np.frombuffer(_log_rows.streams(rows, calls), np.uint64)
    assert number == 1 << 32 | 5
    none = np.empty(0, np.uint32)
    with pytest.raises(ValueError, match="no id"):
        _log_rows.ran(rows, calls, none, none, 1, 0, records)
    with pytest.raises(ValueError, match="room"):
        _log_rows.ran(rows, calls, np.array([number]), np.array([3], np.uint32), 1, 0, records[:64])
    assert 2 == _log_rows.ran(rows, calls, np.array([number]), np.array([3], np.uint32), 1, 0, records)
