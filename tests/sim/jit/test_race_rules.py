"""Racecheck on a part of the kernels whose labels follow from CUDA's rules; ``race_rules_run.py`` runs all of them."""

from __future__ import annotations

import pytest
from race_rules import Pair
from race_rules_all import PAIRS
from race_rules_run import Checker

_PART = PAIRS[::7]


@pytest.fixture(scope="module")
def checker(ptx_of) -> Checker:
    return Checker(ptx_of)


@pytest.mark.parametrize("module, pair", _PART, ids=[pair.name for _, pair in _PART])
def test_what_the_rule_forbids_is_reported_and_what_it_allows_is_not(module: str, pair: Pair, checker: Checker) -> None:
    assert "" == checker.difference(module, pair)


def test_there_are_a_hundred_pairs_of_different_names() -> None:
    assert 100 <= len(PAIRS) == len({pair.name for _, pair in PAIRS})
