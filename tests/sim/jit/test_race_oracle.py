"""Racecheck's engine against brute force; ``race_oracle.py`` runs as many cases as it is told to."""

from __future__ import annotations

import pytest
from race_oracle import Case, campaign


def test_random_executions_are_judged_as_brute_force_judges_them():
    assert [] == campaign(300)


def test_the_cases_have_races_and_lack_them():
    """A comparison that only ever met one verdict would prove little."""
    cases = [Case(number) for number in range(60)]
    verdicts = []
    for case in cases:
        assert "" == case.difference()
        verdicts.append(bool(case.races()))
    assert {True, False} == set(verdicts)
    assert sum(case.waits_for_reads > 0 for case in cases) >= 5
    assert sum(bool(case.guesses()) for case in cases) >= 5


@pytest.mark.parametrize("seed", [1_000_000, 2_000_000])
def test_other_seeds_too(seed):
    assert [] == campaign(50, seed)
