"""Floors: the least bytes that a call site held in each window."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from cudatool.analyze import growth


def test_floors_are_the_least_that_is_held_in_a_window_however_many_are_looked_at_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(growth, "_MOST_BLOCKS", 16)
    random = np.random.default_rng(1)
    for blocks in (0, 1, 40, 120):
        records = 3 * blocks + 8
        start = np.sort(random.choice(records, blocks, replace=False))
        freed = np.minimum(start + 1 + random.integers(0, records, blocks), records)
        site, size = random.integers(0, 3, blocks), random.integers(1, 100, blocks)
        bounds = np.sort(random.choice(records, 8, replace=False))

        found = growth.floors(site, size, start, freed, bounds, 3)

        for number in range(3):
            held = [
                int(size[(site == number) & (start <= at) & (at < freed)].sum()) for at in range(-1, records)
            ]  # after each record; first, before all
            expected = [min(held[a : b + 1]) for a, b in pairwise(bounds)]
            assert expected == found[number].tolist()


def _rising(windows: int, *rises: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return floors that rise by the same after each of the windows `rises`."""
    return np.cumsum(np.isin(np.arange(windows), [rise + 1 for rise in rises]) * 1024)


def test_few_rises_at_one_distance_are_a_steady_rate() -> None:
    assert growth.Trend.GROWS == growth.trend(_rising(20, 0, 4, 8, 12, 16)).trend


def test_few_rises_that_new_maxima_have_as_well_are_no_rate() -> None:
    assert growth.Trend.FEW == growth.trend(_rising(49, 0, 2, 17, 38, 47)).trend


def test_rises_at_growing_distances_are_as_likely_the_misses_of_a_cache() -> None:
    """Those of one seed of the corpus: a tensor of about every sixth batch is kept, at first more often by chance."""
    row = _rising(59, 3, 4, 6, 9, 12, 17, 20, 27, 35, 45, 49, 55)
    assert growth.Trend.FEW == growth.trend(row).trend
    assert 1 < math.exp(growth._evidence(np.flatnonzero(np.diff(row)), 3, 58)) < 8  # 20 are required


def test_bound_on_the_evidence_calls_few_caches_leaks_and_misses_few_leaks() -> None:
    """Of both, 12 rises in 58 windows are seen on average: at a steady rate, and at that of a cache with rare keys."""
    random = np.random.default_rng(1)
    late = 1 / np.arange(1, 59)
    shares = []
    for rate in (12 * late / late.sum(), np.full(58, 12 / 58)):
        rows = 5000 + 1000 * np.cumsum(random.random((1000, 58)) < rate, axis=1)
        shares.append(np.mean([growth.trend(row).trend == growth.Trend.GROWS for row in rows]))
    called_wrongly, found = shares
    assert called_wrongly <= 0.025
    assert found >= 0.75


def test_rises_after_many_early_ones_are_compared_with_a_rate_that_falls_since_then() -> None:
    early = [0, 1, 2, 3, 4, 5, 8, 9, 11, 12, 13]
    late = [15, 26, 30, 35, 39, 41, 48]
    assert growth.Trend.GROWS == growth.trend(_rising(53, *late)).trend
    assert growth.Trend.GROWS != growth.trend(_rising(53, *early, *late)).trend


def test_a_queue_that_happens_to_be_longer_at_the_end_does_not_grow() -> None:
    random = np.random.default_rng(0)
    rows = [np.abs(np.cumsum(random.choice([-1, 1], 64))).astype(np.int64) for _ in range(400)]
    assert [] == [row.tolist() for row in rows if growth.trend(row).trend == growth.Trend.GROWS]
