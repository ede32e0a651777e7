"""Floors: the least bytes that a call site held in each window."""

from __future__ import annotations

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
