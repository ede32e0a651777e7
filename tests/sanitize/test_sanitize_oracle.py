"""Random small programs against brute force: a graph of everything that happens, and reachability in it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize_program import ATOMIC, RW, Program, R, W

from cudatool.sanitize import check, checker, clocks, intervals
from cudatool.sanitize.engine import Engine
from cudatool.trace.events import AccessFlag, CopyFlag, Kind, StreamFlag

# Streams 1 to 5: the legacy default stream, two blocking and two non-blocking ones.
FLAGS = (
    StreamFlag.LEGACY_DEFAULT,
    StreamFlag(0),
    StreamFlag.PER_THREAD_DEFAULT,
    StreamFlag.NON_BLOCKING,
    StreamFlag.NON_BLOCKING,
)
STREAMS = range(1, 6)
LEGACY, BLOCKING = 1, (2, 3)
EVENTS = (1, 2)

streams, events = st.sampled_from(STREAMS), st.sampled_from(EVENTS)
runs = st.tuples(st.integers(0, 12), st.integers(1, 6))
rows = st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(4, 6), st.integers(2, 3))
accesses = st.tuples(st.sampled_from([R, W, RW, ATOMIC]), runs | rows).map(lambda item: (item[0], *item[1]))
actions = st.one_of(
    st.tuples(st.just("kernel"), streams, st.lists(accesses, min_size=1, max_size=2)),
    st.tuples(st.just("kernel"), streams, st.lists(accesses, min_size=1, max_size=2)),
    st.tuples(st.just("record"), events, streams),
    st.tuples(st.just("wait"), streams, events),
    st.tuples(st.just("synchronize stream"), streams),
    st.tuples(st.just("query event"), events, st.booleans()),
    st.tuples(st.just("synchronize device")),
    st.tuples(st.just("copy to host"), streams, st.integers(0, 12), st.booleans()),
    st.tuples(st.just("host access"), st.sampled_from([R, W]), runs),
)
edges = st.sets(st.sampled_from([(1, 2), (1, 3), (2, 3)]))  # of a graph of three nodes
more_actions = actions | st.one_of(
    st.tuples(st.just("copy on the host"), streams),
    st.tuples(st.just("copy between devices"), streams),
    st.tuples(st.just("write value"), streams, st.integers(1, 3)),
    st.tuples(st.just("wait for value"), streams, st.integers(1, 3)),
    st.tuples(st.just("replace value"), streams),
    st.tuples(st.just("host function"), streams, accesses),
    st.tuples(st.just("graph"), streams, edges, st.lists(accesses, min_size=3, max_size=3)),
    st.tuples(st.just("launch again"), streams, accesses),
)


class Oracle:
    """The same rules told as edges of a graph; a race is a pair of conflicting accesses with no path between them."""

    def __init__(self) -> None:
        self.after: list[set[int]] = []  # node -> every node before it
        self.host = -1
        self.tail: dict[int, int] = {}
        self.recorded: dict[int, int] = {}
        self.accesses: list[tuple[int, int, set[int], int]] = []  # node, mode, bytes, record
        self.values: list[tuple[int, int]] = []  # written to one address: value (0 for what ends no wait), node
        self.launched = -1  # the end of the latest launch of the latest graph

    def node(self, *before: int) -> int:
        past = {node for node in before if node >= 0}
        self.after.append(past.union(*(self.after[node] for node in past)))
        return len(self.after) - 1

    def tails(self, stream: int) -> list[int]:
        """The nodes before anything that waits for `stream` or is enqueued on it."""
        implied = BLOCKING if stream == LEGACY else (LEGACY,) if stream in BLOCKING else ()
        return [self.tail.get(s, -1) for s in (stream, *implied)]

    def call(self, *before: int) -> None:
        self.host = self.node(self.host, *before)

    def enqueue(self, stream: int, *before: int) -> int:
        self.tail[stream] = self.node(self.host, *self.tails(stream), *before)
        return self.tail[stream]

    def ends_of_wait(self, stream: int, value: int) -> list[set[int]]:
        """For each write that may end a wait: itself and all before it. One that was replaced by then cannot."""
        begin = {self.host, *self.tails(stream)}
        begin = begin.union(*(self.after[node] for node in begin if node >= 0))
        return [
            {node, *self.after[node]}
            for written, node in self.values
            if written >= value and not any(node in self.after[other] and other in begin for _, other in self.values)
        ]

    def touch(self, node: int, mode: int, touched: set[int], record: int) -> None:
        self.accesses.append((node, mode, touched, record))

    def races(self) -> set[tuple[int, int]]:
        found = set()
        for index, (later, mode, touched, record) in enumerate(self.accesses):
            for earlier, other_mode, other_touched, other_record in self.accesses[:index]:
                plain_write = (mode | other_mode) & AccessFlag.WRITE
                one_atomic = (mode ^ other_mode) & AccessFlag.ATOMIC
                if (
                    earlier != later
                    and (plain_write or one_atomic)
                    and touched & other_touched
                    and earlier not in self.after[later]
                ):
                    found.add((other_record, record))
        return found


def byte_set(start: int, size: int, stride: int = 0, count: int = 1) -> set[int]:
    return {byte for row in range(count) for byte in range(start + row * stride, start + row * stride + size)}


def columns(address: int, size: int, stride: int = 0, count: int = 0) -> dict[str, int]:
    return {"address": address, "size": size, "aux0": stride, "aux1": count}


def play(steps: list[Any]) -> tuple[Program, Oracle]:
    program, oracle, graph = Program(), Oracle(), 100
    for flags in FLAGS:
        program.stream(flags)
    for step in steps:
        record = len(program)
        match step:
            case "kernel", stream, touched:
                oracle.call()
                program.kernel(stream, *touched)
                node = oracle.enqueue(stream)
                for mode, *where in touched:
                    oracle.touch(node, mode, byte_set(*where), record)
            case "record", event, stream:
                oracle.call()
                program.record(event, stream)
                oracle.recorded[event] = oracle.enqueue(stream)
            case "wait", stream, event:
                oracle.call()
                program.wait(stream, event)
                oracle.enqueue(stream, oracle.recorded.get(event, -1))
            case "synchronize stream", stream:
                program.synchronize(stream=stream)
                oracle.call(*oracle.tails(stream))
            case "query event", event, done:
                program.query(event=event, done=done)
                oracle.call(oracle.recorded.get(event, -1) if done else -1)
            case ("synchronize device",):
                program.synchronize(device=0)
                oracle.call(*oracle.tail.values())
            case "copy to host", stream, address, asynchronous:
                flags = CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_PAGEABLE
                program.copy(stream, 1000, address, 4, flags | (CopyFlag.ASYNC if asynchronous else 0))
                oracle.call()
                node = oracle.enqueue(stream)
                oracle.touch(node, R, byte_set(address, 4), record)
                if not asynchronous:
                    oracle.call(node)
            case "copy on the host", stream:
                program.copy(stream, 2000, 3000, 4, CopyFlag.ASYNC)
                oracle.call()
                oracle.touch(oracle.enqueue(stream), 0, set(), record)
                oracle.call(*oracle.tails(stream))
            case "copy between devices", stream:
                on_device = CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE
                program.copy(stream, 2000, 3000, 0, on_device, name="cuMemcpyPeer")
                oracle.call()
                node = oracle.enqueue(stream, *oracle.tail.values())
                oracle.tail = dict.fromkeys(STREAMS, node)
            case "write value", stream, value:
                oracle.call()
                program.emit(Kind.STREAM_WRITE_VALUE, stream=stream, address=5000, aux0=value, size=4)
                oracle.values.append((value, oracle.enqueue(stream)))
            case "wait for value", stream, value:
                met = oracle.ends_of_wait(stream, value)
                if met:  # else it is unknown what it waits for
                    oracle.call()
                    program.emit(Kind.STREAM_WAIT_VALUE, stream=stream, address=5000, aux0=value, size=4)
                    oracle.enqueue(stream, *set.intersection(*met))
            case "replace value", stream:
                oracle.call()
                program.kernel(stream, (W, 5000, 4))
                node = oracle.enqueue(stream)
                oracle.touch(node, W, byte_set(5000, 4), record)
                if oracle.values:  # else it replaces none
                    oracle.values.append((0, node))
            case "host function", stream, (mode, *where):
                oracle.call()
                program.emit(Kind.HOST_FUNCTION, stream=stream, correlation=10_000 + record)
                program.emit(Kind.ACCESS, correlation=10_000 + record, flags=mode, **columns(*where))
                oracle.touch(oracle.enqueue(stream), mode, byte_set(*where), record)
            case "graph", stream, edges_, touched:
                graph += 1
                program.instantiate(graph, 0, [program.node(graph) for _ in range(3)], *edges_)
                record = len(program)
                oracle.call()
                begin = oracle.enqueue(stream)
                program.launch(graph, stream, *((n, *access) for n, access in enumerate(touched, 1)))
                nodes = {0: begin}
                for number, (mode, *where) in enumerate(touched, 1):
                    before = [nodes[first] for first, second in edges_ if second == number]
                    nodes[number] = oracle.node(begin, *before)
                    oracle.touch(nodes[number], mode, byte_set(*where), record)
                oracle.launched = oracle.enqueue(stream, *nodes.values())
            case "launch again", stream, (mode, *where):
                oracle.call()
                node = oracle.enqueue(stream, oracle.launched)
                program.launch(graph, stream, (1, mode, *where))
                oracle.touch(node, mode, byte_set(*where), record)
                oracle.launched = node
            case "host access", mode, (address, size):
                program.host(mode, address, size)
                oracle.call()
                oracle.touch(oracle.host, mode, byte_set(address, size), record)
    return program, oracle


@pytest.mark.parametrize("many", [False, True], ids=["few agents", "as of many agents"])
@settings(max_examples=examples(400), deadline=None)
@given(st.lists(more_actions, max_size=30))
def test_engine_agrees_with_reachability(many: bool, steps: list[Any]) -> None:
    program, oracle = play(steps)
    expected = oracle.races()
    with pytest.MonkeyPatch.context() as patch:
        if many:  # what is for thousands of streams, accesses to a byte and segments begins at two
            patch.setattr(clocks, "_BITS", 1)
            patch.setattr(intervals, "_CROWD", 2)
            patch.setattr(intervals, "_MANY", 2)
        engine = Engine(program.trace())
        engine.run()
    found = {(d.first.operation.record, d.second.operation.record) for d in engine.defects.values() if d.size}
    # The engine keeps only the accesses that matter, so it may name fewer partners: never a wrong one, and every
    # operation that races with an earlier one is named.
    assert found <= expected
    assert {second for _, second in found} == {second for _, second in expected}


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(more_actions, max_size=30))
def test_findings_are_true_independent_and_repairable(steps: list[Any]) -> None:
    program, oracle = play(steps)
    expected = oracle.races()
    report = check(program.trace())
    found = {(finding.first.record, finding.second.record) for finding in report.findings if finding.size}
    assert found <= expected
    assert bool(found) == bool(expected)
    assert [finding.repair for finding in report.findings if not finding.repair] == []
    assert len({finding.fingerprint for finding in report.findings}) == len(report.findings)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(more_actions, max_size=30))
def test_repairs_that_count_as_certain_leave_nothing_behind(steps: list[Any]) -> None:
    """Those of plain work on streams: the trace is not read again with them."""
    trace = play(steps)[0].trace()
    engine = Engine(trace, go_on_repaired=True)
    engine.run()
    if not engine.defects:
        return
    if checker._waits_cure(engine):
        repaired = Engine(trace, repairs=checker._plan(engine, engine.defects.values()))
        repaired.run()
        assert {} == repaired.defects


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(more_actions, max_size=8), st.randoms(use_true_random=False))
def test_what_is_sound_without_order_among_threads_is_sound_with_it(steps: list[Any], chance: Random) -> None:
    trace = play(steps)[0].trace()
    trace.records["thread"] = [chance.randrange(3) for _ in range(len(trace.records))]
    apart, whole = Engine(trace, one_host=False, go_on_repaired=True), Engine(trace, go_on_repaired=True)
    apart.run()
    whole.run()
    if not (apart.defects or apart.by_flags):
        assert ({}, {}) == (whole.defects, whole.by_flags)


@pytest.mark.parametrize(("wait", "looks"), [([("wait", 5, 1)], 1), ([], 2)], ids=["sound", "a race"])
def test_a_sound_program_of_several_threads_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch, wait: list[Any], looks: int
) -> None:
    steps = [("kernel", 4, [(W, 0, 4)]), ("record", 1, 4), *wait, ("kernel", 5, [(R, 0, 4)])]
    trace = play(steps)[0].trace()
    trace.records["thread"][1::2] = 1
    made: list[bool] = []
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda self: made.append(self.go_on_repaired) or run(self))
    report = check(trace)
    assert (looks, looks == 1) == (sum(made), not report.findings)


def test_repairs_are_certain_of_some_programs_and_not_of_others() -> None:
    race = [("kernel", 4, [(W, 0, 4)]), ("kernel", 5, [(R, 0, 4)])]
    for steps, expected in ((race, True), ([*race, ("host access", W, (0, 4))], False)):
        engine = Engine(play(steps)[0].trace(), go_on_repaired=True)
        engine.run()
        assert engine.defects
        assert expected == checker._waits_cure(engine)
