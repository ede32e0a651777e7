"""Leaks are found, and nothing else, in programs that are made up from the definition."""

from __future__ import annotations

import re

import leak_programs_fifth  # noqa: F401  (enters its programs, too)
import leak_programs_fourth  # noqa: F401
import leak_programs_later  # noqa: F401
import leak_programs_third  # noqa: F401
import pytest
from generated import some_of
from leak_programs import LEAKS, MISTAKEN, SOUND, UNDECIDED, VARYING, Program, Scenario

from cudatool import analyze
from cudatool.analyze import Leaks, LeakVerdict

SEEDS = range(3)


def seeds_of(name: str) -> list[int]:
    """Return those of a program in this run."""
    return some_of(SEEDS, 1, name)


# Leaks at random whose first times happen to lie early, as the misses of a cache do: too little to tell.
_LIKE_A_CACHE = {("input_and_mask_of_bad_batches", 1, True)}


@pytest.fixture(params=[True, False], ids=["with ranges", "without ranges"])
def with_ranges(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def result(scenario: Scenario, seed: int, with_ranges: bool) -> Leaks:
    program = Program(seed, with_ranges)
    scenario(program)
    (found,) = analyze.leaks_of(program.trace())
    return found


def functions(found: Leaks) -> set[str]:
    return {re.findall(r"\((\w+)\)", leak.label)[0] for leak in found.found}


def test_the_corpus_has_30_leaks_and_50_others() -> None:
    assert len(LEAKS) >= 30
    assert len(SOUND) >= 50


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_found_at_its_call_site(name: str, with_ranges: bool) -> None:
    scenario, expected = LEAKS[name]
    seeds = [seed for seed in seeds_of(name) if (name, seed, with_ranges) not in _LIKE_A_CACHE]
    found = [result(scenario, seed, with_ranges) for seed in seeds]
    assert [expected] * len(seeds) == [functions(one) for one in found]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("service_over_threads", 110),
        ("exception_that_keeps_a_frame", 110),
        ("graph_for_each_new_shape", 111),
        ("now_and_then", 113),
        ("input_and_mask_of_bad_batches", 113),
        ("session_per_user", 114),
        ("session_per_user", 7),
        ("input_and_mask_of_bad_batches", 1),
    ],
)
def test_a_leak_that_happens_to_be_silent_at_the_end_is_not_called_clean(
    name: str, seed: int, with_ranges: bool
) -> None:
    assert LeakVerdict.NONE != result(LEAKS[name][0], seed, with_ranges).verdict


@pytest.mark.parametrize("name", SOUND)
def test_what_is_no_leak_is_not_called_one(name: str, with_ranges: bool) -> None:
    found = [result(SOUND[name], seed, with_ranges) for seed in seeds_of(name)]
    assert {()} == {tuple(functions(one)) for one in found}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("adapters_loaded_at_first_use", 222),
        ("cache_of_random_keys_that_is_full_midway", 204),
        ("compiled_plans_by_length", 235),
        ("random_lengths_with_a_kept_mask", 5),
        ("replay_buffer_of_variable_items", 201),
        ("results_that_come_back_in_any_order", 7002),
        ("rows_of_an_embedding_at_first_use", 215),
    ],
)
def test_a_few_steady_misses_of_a_cache_and_sizes_that_vary_are_no_leak(name: str, seed: int) -> None:
    found = [result(SOUND[name], seed, with_ranges) for with_ranges in (True, False)]
    assert [set(), set()] == [functions(one) for one in found]


@pytest.mark.parametrize("name", UNDECIDED)
def test_too_little_of_a_leak_is_not_called_clean(name: str, with_ranges: bool) -> None:
    assert {LeakVerdict.UNCLEAR} == {result(UNDECIDED[name], seed, with_ranges).verdict for seed in seeds_of(name)}


@pytest.mark.parametrize("name", VARYING)
def test_a_leak_among_what_comes_and_goes_is_not_called_clean(name: str, with_ranges: bool) -> None:
    assert LeakVerdict.NONE not in {result(VARYING[name], seed, with_ranges).verdict for seed in seeds_of(name)}


@pytest.mark.xfail(strict=True, reason="every event is as in a program that leaks")
@pytest.mark.parametrize("name", MISTAKEN)
def test_what_looks_like_a_leak_in_every_event_is_called_one(name: str, with_ranges: bool) -> None:
    assert set() == functions(result(MISTAKEN[name], 0, with_ranges))
