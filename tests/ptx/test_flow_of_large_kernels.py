"""Control flow of kernels with many blocks and registers."""

from __future__ import annotations

import numpy as np

from cudatool.ptx import Flow
from cudatool.ptx import flow as ptx_flow
from cudatool.ptx.flow import reads, writes
from cudatool.ptx.parser import parse


def function_of(body: str):
    registers = ".reg .b32 %r<4000>; .reg .pred %p<4000>;"
    return parse(
        f".version 8.3\n.target sm_90\n.address_size 64\n.visible .entry k() {{\n{registers}\n{body}\n}}\n"
    ).kernels["k"]


def test_many_values_that_live_across_many_branches_are_followed():
    count = 1500  # as an unrolled division has: each a branch, with all results live
    parts = [f"mov.u32 %r{n}, {n};" for n in range(count)]
    for n in range(count):
        parts.append(f"setp.eq.u32 %p{n}, %r{n}, 7; @%p{n} bra L{n}; add.u32 %r{n}, %r{n}, 1; L{n}:")
    parts += [f"add.u32 %r{count}, %r{count}, %r{n};" for n in range(count)]
    flow = Flow(function_of("\n".join([f"mov.u32 %r{count}, 0;", *parts, "ret;"])))
    assert {f"%r{n}" for n in range(count + 1)} == flow.blocks[-2].live_in
    assert f"%p{count - 1}" not in flow.blocks[0].live_out


def test_liveness_is_that_of_a_search_from_each_use():
    random = np.random.default_rng(3)
    for _ in range(20):
        lines = []
        for n in range(12):
            to, a, b = random.integers(0, 5, 3)
            guard = f"@%p{random.integers(0, 2)} " if random.random() < 0.3 else ""
            lines.append(f"L{n}: {guard}add.u32 %r{to}, %r{a}, %r{b};")
            if random.random() < 0.5:
                lines.append(f"@%p{random.integers(0, 2)} bra L{random.integers(0, 12)};")
        flow = Flow(function := function_of("\n".join([*lines, "ret;"])))
        for name in [f"%r{n}" for n in range(5)] + ["%p0", "%p1"]:
            assert searched(flow, function, name) == [name in block.live_in for block in flow.blocks]


def searched(flow, function, name):
    """Return, for each block, whether some way from its beginning reads `name` before it is set."""

    def needed(start):
        pending, seen = [start], set()
        while pending:
            number = pending.pop()
            if number in seen:
                continue
            seen.add(number)
            block = flow.blocks[number]
            for one in function.instructions[block.start : block.stop]:
                if name in reads(one) or (one.guard is not None and name in writes(one)):
                    return True
                if name in writes(one):
                    break
            else:
                pending += block.successors
        return False

    return [needed(number) for number in range(len(flow.blocks))]


def test_a_block_is_in_a_loop_if_it_leads_back_to_itself():
    random = np.random.default_rng(5)
    for _ in range(30):
        lines = [f"L{n}: @%p{n} bra L{random.integers(0, 12)};" for n in range(12)]
        flow = Flow(function_of("\n".join([*lines, "ret;"])))
        every = frozenset(range(len(flow.blocks)))
        for number in every:
            assert (number in flow.reached([number], every)) == (number in flow.innermost_loop(number))


def test_blocks_that_no_loop_can_hold_are_not_searched_for_one():
    count = 1000
    flow = Flow(function_of("\n".join([*(f"L{n}: @%p{n} bra L{n + 1};" for n in range(count)), f"L{count}: ret;"])))
    flow.reached = flow._reached = None  # type: ignore[assignment]  # what a search would call
    assert all(flow.innermost_loop(number) == frozenset() for number in range(count))


def test_what_is_found_of_a_loop_is_found_once_for_all_of_its_blocks(monkeypatch):
    count = 500
    monkeypatch.setattr(ptx_flow, "FLOW_STEPS", 50 * count)
    body = [f"L{n}: @%p{n} bra L{n + 1};" for n in range(count)]
    flow = Flow(function_of("\n".join([*body, f"L{count}: @%p{count} bra L0; ret;"])))
    whole = frozenset(range(count + 1))
    assert all(flow.innermost_loop(number) == whole for number in whole)


def test_loops_in_each_other_are_told_apart_in_any_order():
    body = "mov.u32 %r0, 0; A: @%p0 bra D; B: @%p1 bra B; C: @%p2 bra B; D: @%p3 bra A; ret;"
    for order in ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (3, 0, 2, 1, 4, 5)):
        flow = Flow(function_of(body))
        found = {number: flow.innermost_loop(number) for number in order}
        assert found == {0: set(), 1: {1, 2, 3, 4}, 2: {2}, 3: {2, 3}, 4: {1, 2, 3, 4}, 5: set()}
