"""Legal orders of a trace's operations, against the graph of everything that happens."""

from __future__ import annotations

import random
from typing import Any

from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize_program import Program, R, W
from test_sanitize_oracle import Oracle, actions, play

from cudatool.sanitize.legal import LegalSteps, Order
from cudatool.trace.events import Kind


def violations(steps: LegalSteps, oracle: Oracle, order: Order) -> list[tuple[int, int]]:
    """Return the pairs of records that an order runs against what must come first."""
    node_of = {record: node for node, _, _, record in oracle.accesses}
    records = [steps.all[index].operation.record for index in order]
    return [
        (earlier, later)
        for position, later in enumerate(records)
        for earlier in records[position + 1 :]
        if earlier in node_of and later in node_of and node_of[earlier] in oracle.after[node_of[later]]
    ]


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(actions, max_size=25), st.integers(0, 2**32))
def test_every_order_is_legal(program_steps: list[Any], seed: int) -> None:
    program, oracle = play(program_steps)
    steps = LegalSteps(program.trace())
    choose = random.Random(seed)
    orders = [steps.program_order(), steps.any_order(choose)]
    everything = set(orders[0])
    for base in list(orders):
        for _ in range(2 if base else 0):
            step = choose.choice(base)
            orders.append(steps.advanced(base, step, steps.before(step)))
            free = [x for x in base[base.index(step) + 1 :] if step not in steps.before(x)]
            if free:
                orders.append(steps.delayed(base, step, choose.choice(free)))
    for order in orders:
        assert set(order) == everything
        assert len(order) == len(everything)
        assert violations(steps, oracle, order) == []


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(actions, max_size=25))
def test_before_and_behind_agree_with_reachability(program_steps: list[Any]) -> None:
    program, oracle = play(program_steps)
    steps = LegalSteps(program.trace())
    node_of = {record: node for node, _, _, record in oracle.accesses}
    nodes = [node_of[step.operation.record] for step in steps.all]
    for index, node in enumerate(nodes):
        assert steps.before(index) == {x for x, other in enumerate(nodes) if other in oracle.after[node]}
        assert steps.later(index) == {x for x, other in enumerate(nodes) if node in oracle.after[other]}


def test_unordered_pair_changes_places_in_both_ways() -> None:
    program = Program()
    one, two = program.stream(), program.stream()
    program.kernel(one, (W, 0, 4))
    program.kernel(two, (R, 0, 4))
    program.kernel(one, (R, 64, 4))
    steps = LegalSteps(program.trace())
    assert steps.advanced([0, 1, 2], 1, steps.before(1)) == [1, 0, 2]
    assert steps.delayed([0, 1, 2], 0, 1) == [1, 0, 2]


def test_a_race_is_exchanged_alone_where_that_is_possible() -> None:
    program = Program()
    one, two, three = program.stream(), program.stream(), program.stream()
    program.kernel(one, (W, 0, 4))  # 0 races with 2
    program.kernel(two, (W, 64, 4))  # 1 races with 2
    program.kernel(three, (R, 0, 4), (R, 64, 4))
    steps = LegalSteps(program.trace())
    races = steps.races()
    assert races == [(0, 2), (1, 2)]
    alone = steps.before_but(2, 0, races)
    assert alone == {1}
    assert steps.advanced([0, 1, 2], 2, alone) == [1, 2, 0]


def test_a_race_that_another_one_decides_is_not_exchanged_alone() -> None:
    program = Program()
    one, two = program.stream(), program.stream()
    program.kernel(one, (R, 0, 4))
    program.kernel(one, (W, 64, 4))
    program.kernel(two, (W, 0, 4), (R, 64, 4))
    steps = LegalSteps(program.trace())
    assert 0 in steps.before_but(2, 0, steps.races())


def test_users_of_memory_come_before_those_of_its_next_owner() -> None:
    program = Program()
    one, two = program.stream(), program.stream()
    program.alloc(0, 64, one)
    program.kernel(one, (W, 0, 64))
    program.free(0, 64, one)
    program.alloc(0, 64, two)  # the pool sees to it that the free has run
    program.kernel(two, (W, 0, 64))
    steps = LegalSteps(program.trace())
    assert steps.before(1) == {0}
    assert steps.later(0) == {1}
    assert steps.any_order(random.Random(1)) == [0, 1]


def graph_launches(launches: int) -> Program:
    """Nodes 1, 2 and 3, of which 1 comes before 3, in a graph that is launched so many times in a stream."""
    program = Program()
    stream = program.stream()
    program.emit(Kind.GRAPH_INSTANTIATE, aux0=7)
    for number in (3, 2, 1):
        program.emit(Kind.GRAPH_NODE, aux0=7, aux1=number)
    program.emit(Kind.GRAPH_EDGE, aux0=7, address=1, aux1=3)
    for correlation in range(1001, 1001 + launches):
        program.emit(Kind.GRAPH_LAUNCH, stream=stream, correlation=correlation, aux0=7)
        for node, mode in ((1, W), (2, R), (3, R)):
            program.emit(Kind.ACCESS, stream=node, correlation=correlation, flags=mode, address=0, size=4)
    return program


def test_nodes_of_a_launch_are_ordered_by_the_edges_of_their_graph() -> None:
    steps = LegalSteps(graph_launches(1).trace())
    one, two, three = (next(i for i, step in enumerate(steps.all) if step.node == node) for node in (1, 2, 3))
    assert (steps.before(one), steps.before(two), steps.before(three)) == (set(), set(), {one})
    assert (steps.later(one), steps.later(two), steps.later(three)) == ({three}, set(), set())
    assert steps.races() == [(min(one, two), max(one, two))]
    orders = {tuple(steps.any_order(random.Random(seed))) for seed in range(50)}
    assert orders == {(one, two, three), (one, three, two), (two, one, three)}


def test_launches_of_a_graph_follow_each_other() -> None:
    steps = LegalSteps(graph_launches(2).trace())
    assert len(steps.all) == 6
    assert [steps.before(index) >= {0, 1, 2} for index in range(6)] == [False] * 3 + [True] * 3
    assert all(set(steps.any_order(random.Random(seed))[:3]) == {0, 1, 2} for seed in range(20))


def test_memory_of_its_own_orders_nothing() -> None:
    program = Program()
    one, two = program.stream(), program.stream()
    program.alloc(0, 64, one)
    program.alloc(64, 64, two)
    program.kernel(one, (W, 0, 64))
    program.kernel(two, (W, 64, 64))
    assert LegalSteps(program.trace()).before(1) == set()


def test_written_memory_is_merged_into_runs() -> None:
    program = Program()
    one = program.stream()
    program.kernel(one, (W, 8, 8), (R, 100, 4))
    program.kernel(one, (W, 0, 8), (W, 12, 8))
    assert LegalSteps(program.trace()).memory_written() == [(0, 20)]
