"""Which functions call themselves, directly or through others."""

from __future__ import annotations

import random

import pytest

from cudatool.ptx import ModuleCalls, parse
from cudatool.ptx.calls import recursive

HEADER = ".version 8.3\n.target sm_90\n.address_size 64\n"


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ({}, ""),
        ({"a": {"b"}, "b": set()}, ""),
        ({"a": {"a"}}, "a"),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, "bc"),
        ({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}, ""),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c"}}, "abcd"),
    ],
)
def test_functions_on_a_cycle_are_recursive(calls: dict[str, set[str]], expected: str) -> None:
    assert set(expected) == recursive(calls)


def reached(calls: dict[int, set[int]], start: int) -> set[int]:
    found: set[int] = set()
    waiting = [*calls[start]]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += calls[one]
    return found


def test_any_graph_gives_what_a_search_from_each_function_gives() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        number = chance.randrange(1, 9)
        calls = {i: {chance.randrange(number) for _ in range(chance.randrange(3))} for i in range(number)}
        named = {str(i): {str(j) for j in to} for i, to in calls.items()}
        assert {str(i) for i in calls if i in reached(calls, i)} == recursive(named)


def test_a_chain_of_thousands_needs_no_stack() -> None:
    chain = {str(i): {str(i + 1)} for i in range(50_000)}
    assert frozenset() == recursive({**chain, "50000": set()})
    assert 50_001 == len(recursive({**chain, "50000": {"0"}}))


def test_a_module_says_what_its_pointers_lead_to() -> None:
    text = ".func f();\n.func g() { call f; ret; }\n.func f() { call g; ret; }\n.func h() { ret; }\n"
    text += ".visible .entry k() { .reg .b64 %d<2>; mov.u64 %d1, h; ret; }"
    calls = ModuleCalls.of(parse(HEADER + text))
    assert {"f", "g"} == calls.recursive
    assert ("h",) == calls.pointed_to
    assert {"f", "g", "h"} == calls.addresses.keys()
