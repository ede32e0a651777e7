from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from recordings import in_turn
from records import BASE, MIB, RECORDINGS, alloc, free, freed, of_segment, recording, stacks, trace

from cudatool import analyze
from cudatool.analyze import Confidence, Doubt, LeakVerdict
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

Event = tuple[Kind, dict[str, Any]]
STACKS = stacks([("t.py", "leaky", 1)], [("t.py", "fine", 2)])


def steps_of(made: Trace) -> analyze.Steps:
    return analyze.find_steps(made, analyze.blocks(made), 0)


def push(name: str, **more: Any) -> Event:
    return Kind.RANGE_PUSH, {"name": name, **more}


def pop() -> Event:
    return Kind.RANGE_POP, {}


def loop(body: list[list[Event]], name: str = "step {}") -> Trace:
    """Return a trace of steps, each in a range if `name` is given."""
    events: list[Event] = []
    for i, events_of_step in enumerate(body):
        events += [push(name.format(i)), *events_of_step, pop()] if name else events_of_step
    return trace(*events, **STACKS)


def kept(i: int, size: int = 100, stack: int = 1) -> Event:
    return alloc(i * MIB, size, stack=stack)


def temporary(i: int) -> list[Event]:
    at = (1000 + i % 3) * MIB
    return [alloc(at, 7, stack=2), free(at), freed(at)]


def leaks_in(made: Trace) -> list[tuple[str, int, int, int]]:
    (found,) = analyze.leaks_of(made)
    return [(leak.label, leak.per_step, leak.grew, leak.steps) for leak in found.found]


def test_growth_at_one_site_in_every_step_is_a_leak() -> None:
    made = loop([[kept(i), *temporary(i)] for i in range(10)])
    assert [("t.py:1 (leaky)", 100, 8, 8)] == leaks_in(made)
    (leak,) = analyze.leaks_of(made)[0].found
    # Ranges begin steps: at the last of the 10 beginnings 9 steps are over, and the first was left out.
    assert (1, 800, 900, Confidence.HIGH) == (leak.blocks_per_step, leak.growth, leak.live, leak.confidence)


def test_growth_of_a_step_is_a_share_of_it_all_where_few_steps_gain_the_most() -> None:
    """Most steps add a block of 1 byte, and each fourth one a batch."""
    made = loop([[kept(i, 1 if i % 4 else 1000), *temporary(i)] for i in range(21)])
    (leak,) = analyze.leaks_of(made)[0].found
    assert (19, leak.growth // 19) == (leak.grew, leak.per_step)


def test_a_site_that_leaks_several_blocks_of_different_sizes_is_one_leak() -> None:
    made = loop([[kept(2 * i, 100 + i), kept(2 * i + 1, 50)] for i in range(10)])
    assert ["t.py:1 (leaky)"] == [label for label, *_ in leaks_in(made)]
    assert 2 == analyze.leaks_of(made)[0].found[0].blocks_per_step


def test_a_leak_in_most_steps_is_less_sure() -> None:
    made = loop([[*([kept(i)] if i % 4 else []), *temporary(i)] for i in range(20)])
    assert Confidence.MEDIUM == analyze.leaks_of(made)[0].found[0].confidence


@pytest.mark.parametrize(
    "body",
    [
        pytest.param([temporary(i) for i in range(12)], id="nothing is kept"),
        pytest.param([[kept(0)] + [kept(j) for j in range(1, 9)], *[temporary(i) for i in range(12)]], id="set-up"),
        pytest.param([[kept(i), *([free((i - 1) * MIB), freed((i - 1) * MIB)] if i else [])] for i in range(12)],
                     id="one is replaced by the next"),
        pytest.param([[kept(i)] if i < 5 else temporary(i) for i in range(12)], id="a cache that fills"),
        pytest.param([[kept(i)] if i < 11 else [e for j in range(11) for e in (free(j * MIB), freed(j * MIB))]
                      for i in range(14)], id="all is dropped in the end"),
        pytest.param([[kept(i, 100 * i), *([free((i - 1) * MIB), freed((i - 1) * MIB)] if i else [])]
                      for i in range(1, 4)] + [temporary(i) for i in range(9)], id="longer for a while"),
        pytest.param([[kept(i)] for i in range(4)], id="too few steps"),
    ],
)  # fmt: skip
def test_what_does_not_grow_without_end_is_no_leak(body: list[list[Event]]) -> None:
    assert [] == leaks_in(loop(body))


def test_without_stacks_sites_are_sizes() -> None:
    made = trace(*(e for i in range(8) for e in (push(f"step {i}"), alloc(i * MIB, 100), *temporary(i)[:1], pop())))
    made.records["stack"] = 0
    assert ("(no stack in this file), 100 B each", 100, 6, 6) in leaks_in(made)


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (["ProfilerStep#1", "other", "my step"], "ProfilerStep#N"),
        (["epoch", "train step 3"], "train step N"),
        (["load", "compute"], "load"),
        (["compute", "Optimizer.step#SGD.step"], "Optimizer.step#SGD.step"),
    ],
)
def test_the_range_that_is_named_as_a_step_is_taken(names: list[str], source: str) -> None:
    made = trace(*(e for _ in range(4) for name in names for e in (push(name), pop())))
    assert f"from each of the ranges named {source!r} to the next" == steps_of(made).source


def test_a_range_that_returns_outside_of_another_comes_first() -> None:
    made = trace(*(e for _ in range(4) for e in (push("outer"), push("inner"), pop(), push("inner"), pop(), pop())))
    assert ("from each of the ranges named 'outer' to the next", 3) == (steps_of(made).source, len(steps_of(made)))


def test_two_ranges_are_not_yet_steps() -> None:
    assert 0 == len(steps_of(trace(push("step 1"), pop(), push("step 2"), pop())))


def test_without_ranges_the_repeating_sequence_is_the_steps() -> None:
    once = [alloc(i * 512, 9000 + i) for i in range(5)]  # a set-up that does not repeat
    body = [e for i in range(20) for e in (kept(i), *temporary(i), *temporary(i), alloc((i + 200) * MIB, 8, stack=2))]
    made = trace(*once, *body, **STACKS)
    steps = steps_of(made)
    assert "allocations repeat every 4 (100.0 % alike)" == steps.source
    assert Confidence.MEDIUM == steps.confidence
    period = np.diff(steps.bounds)
    assert {8} == set(period[:-1].tolist())  # 4 allocations and two pairs of frees
    assert ("t.py:1 (leaky)", 100) in [row[:2] for row in leaks_in(made)]


def test_what_does_not_repeat_has_no_steps() -> None:
    sizes = np.random.default_rng(3).permutation(200)
    made = trace(*(alloc(i * MIB, 512 * int(size)) for i, size in enumerate(sizes)))
    assert (0, Confidence.LOW) == (len(steps_of(made)), steps_of(made).confidence)
    assert [] == leaks_in(made)


@pytest.mark.parametrize(
    ("body", "doubt"),
    [
        ([[kept(i)] if i % 4 == 0 else temporary(i) for i in range(14)], Doubt.FEW),
        ([[kept(i, 6000 >> i)] if i in (0, 1, 2, 4, 7, 11) else temporary(i) for i in range(15)], Doubt.SLOWS),
    ],
)
def test_growth_that_may_end_is_not_told_apart(body: list[list[Event]], doubt: Doubt) -> None:
    (found,) = analyze.leaks_of(loop(body))
    assert (LeakVerdict.UNCLEAR, [doubt]) == (found.verdict, [one.doubt for one in found.unclear])


def test_tokens_of_one_sequence_are_not_called_a_leak() -> None:
    (found,) = analyze.leaks_of(loop([[kept(i), *temporary(i)] for i in range(20)], "token {}"))
    assert [Doubt.ONE_SEQUENCE] == [one.doubt for one in found.unclear]


def test_a_program_of_three_allocations_is_not_called_clean() -> None:
    (found,) = analyze.leaks_of(trace(kept(0), kept(1), kept(2), **STACKS))
    assert (LeakVerdict.UNCLEAR, Doubt.NOTHING_REPEATS) == (found.verdict, found.doubt)
    assert "could not tell" == found.as_dict()["verdict"]


def lost(made: Trace, blocks: analyze.Lifetimes, rows: Any) -> Trace:
    """Return a recording in which some blocks are never freed, and lie elsewhere."""
    records = made.records.copy()
    frees = np.concatenate([blocks.freed[rows], blocks.end[rows]])
    records["address"][blocks.start[rows]] = (BASE << 4) + np.arange(len(rows)) * (64 * MIB)
    keep = np.ones(len(records), np.bool_)
    keep[frees[frees < len(records)]] = False
    return replace(made, records=records[keep], header={**made.header})


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("prefetch__default", 1),
        ("prefetch__default", 4),
        ("llm__default", 1),
        ("llm__default", 4),
        ("convnet__default", 1),
    ],
)
def test_frees_that_are_left_out_of_a_recording_are_found(name: str, every: int) -> None:
    made = recording(name)
    blocks = analyze.blocks(made).of_device(0)
    steps = analyze.find_steps(made, blocks, 0)
    step = np.searchsorted(steps.bounds, blocks.start, side="right")
    sites, key = analyze.site_keys(blocks)
    rows = np.flatnonzero((blocks.freed < steps.bounds[-1]) & (step > 0) & (blocks.size >= 4096))
    site = int(np.argmax(np.bincount(key[rows])))
    own = rows[key[rows] == site]
    _, first = np.unique(step[own], return_index=True)  # one block of each step
    (found,) = analyze.leaks_of(lost(made, blocks, own[first][::every]))
    expected = analyze.site_labels(made, sites[[site]], np.zeros(1, bool))
    assert expected == [leak.label for leak in found.found]


@in_turn(RECORDINGS)
def test_no_recording_leaks(name: str) -> None:
    assert [] == leaks_in(recording(name))


def test_steps_of_a_recording_are_the_optimizers() -> None:
    assert 24 == len(steps_of(recording("llm__default")))


def layers(function: str) -> Trace:
    """Return a trace whose sequence of two allocations returns 20 times, all under one line of `function`."""
    outer = ("m.py", function, 50)
    tables = stacks([("m.py", "attend", 1), outer], [("m.py", "mix", 2), outer])
    return trace(*(e for i in range(20) for e in (kept(2 * i), kept(2 * i + 1, 200, stack=2))), **tables)


def test_layers_of_one_forward_are_not_steps() -> None:
    assert 19 < len(steps_of(layers("train")))
    assert 0 == len(steps_of(layers("forward")))


@pytest.mark.parametrize(
    ("function", "doubt"),
    [
        ("train", Doubt.NO_WORK),
        ("forward", Doubt.ONE_CALL),
        ("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)", Doubt.ONE_CALL),
    ],
    ids=["a loop", "a forward pass", "a backward pass"],
)
def test_what_only_grows_without_steps_may_be_built_up(function: str, doubt: Doubt) -> None:
    (found,) = analyze.leaks_of(layers(function))
    assert (LeakVerdict.UNCLEAR, ()) == (found.verdict, found.found)
    assert [("m.py:1 (attend)", doubt), ("m.py:2 (mix)", doubt)] == sorted(
        (one.label, one.doubt) for one in found.unclear
    )


def test_what_was_there_before_the_recording_makes_no_steps() -> None:
    made = layers("train")
    made.header["prior_records"] = {0: 40}
    assert 0 == len(steps_of(made))


def test_a_list_that_is_dropped_after_the_last_step_is_not_called_a_leak() -> None:
    model = [kept(1100 + i, 500, stack=2) for i in range(5)]
    fill = [*model, *(e for i in range(20) for e in (*temporary(i), kept(i)))]
    drop = [e for i in range(20) for e in (free(i * MIB), freed(i * MIB))]
    assert 1 == len(leaks_in(trace(*fill, **STACKS)))
    (found,) = analyze.leaks_of(trace(*fill, *drop, **STACKS))
    assert ((), [Doubt.GIVEN_BACK]) == (found.found, [one.doubt for one in found.unclear])


def test_torch_compiles_own_ranges_are_no_steps() -> None:
    made = trace(*(e for _ in range(5) for e in (push("pad_mm_benchmark (dynamo_timed)"), pop())))
    assert 0 == len(steps_of(made))


def test_a_range_of_any_other_name_is_unsure() -> None:
    made = trace(*(e for _ in range(5) for e in (push("work"), pop())))
    assert (4, Confidence.LOW) == (len(steps_of(made)), steps_of(made).confidence)


def segment(i: int, size: int) -> Event:
    return of_segment(Kind.SEGMENT_ALLOC, i * MIB, size)


@pytest.mark.parametrize(
    ("step", "grown", "verdict"),
    [
        (lambda i: [segment(i, MIB), *temporary(i)], 8 * MIB - 7, LeakVerdict.UNCLEAR),
        (lambda i: [segment(i, 100), kept(i), *temporary(i)], 0, LeakVerdict.LEAKS),
        (lambda i: [segment(i, 100), alloc(MIB, 100 * (i + 1), stack=2), free(MIB), freed(MIB)], 0, LeakVerdict.NONE),
        (lambda i: [segment(0, MIB), *temporary(i), of_segment(Kind.SEGMENT_FREE, 0, MIB)], 0, LeakVerdict.NONE),
    ],
    ids=["kept by pools", "full of a leak", "needed at once", "given back"],
)
def test_reserved_memory_that_grows_without_blocks_is_not_called_clean(
    step: Any, grown: int, verdict: LeakVerdict
) -> None:
    (found,) = analyze.leaks_of(loop([step(i) for i in range(10)]))
    assert (grown, verdict) == (found.unused_growth, found.verdict)
    assert (Doubt.UNUSED if grown else None) == found.doubt


def test_smaller_and_smaller_blocks_that_replace_tiny_ones_are_sizes_that_vary() -> None:
    tiny = [kept(100 + i, 1) for i in range(20)]
    body = [[kept(i, 100_000 - 512 * i), free((100 + i) * MIB), freed((100 + i) * MIB)] for i in range(20)]
    (found,) = analyze.leaks_of(trace(*tiny, *(e for one in body for e in (push("step"), *one, pop())), **STACKS))
    assert [Doubt.SIZES_VARY] == [one.doubt for one in found.unclear]
