"""Graphs: nodes that no edge orders, launches, updates, captures; each with the edge there and absent."""

from __future__ import annotations

import pytest
from sanitize_program import BUFFER, SIZE, Program, R, W, kinds

from cudatool.sanitize import Finding, check
from cudatool.trace.events import Kind, StreamFlag

GRAPH, EXEC, OTHER = 1, 2, 3


def diamond(program: Program, stream: int, *edges: tuple[int, int]) -> None:
    """Launch four nodes: 2 writes, 3 reads it, 4 writes again."""
    nodes = [program.node(GRAPH, stream, name) for name in ("first", "left", "right", "last")]
    program.instantiate(EXEC, GRAPH, nodes, *edges)
    program.launch(EXEC, stream, (2, W, BUFFER, SIZE), (3, R, BUFFER, SIZE), (4, W, BUFFER, SIZE))


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        (((1, 2), (2, 3), (3, 4)), []),
        (((1, 2), (1, 3), (3, 4), (2, 4)), ["race-raw"]),
        (((2, 3), (2, 4)), ["race-war"]),
        (((3, 4),), ["race-raw"]),  # what 4 does follows from 3
    ],
)
def test_nodes_of_a_graph_race_unless_a_path_of_edges_orders_them(
    program: Program, edges: tuple[tuple[int, int], ...], expected: list[str]
) -> None:
    diamond(program, program.stream(), *edges)
    assert sorted(expected) == sorted(kinds(program))


def test_race_of_nodes_names_where_they_were_captured_and_the_missing_edge(program: Program) -> None:
    a, b = program.stream(), program.stream()
    nodes = [program.node(GRAPH, a, "write"), program.node(GRAPH, b, "read")]
    program.instantiate(EXEC, GRAPH, nodes)
    program.launch(EXEC, a, (1, W, BUFFER, SIZE), (2, R, BUFFER, SIZE))
    (finding,) = check(program.trace()).findings
    assert ("kernel write of a graph", "kernel read of a graph") == (
        finding.first.operation,
        finding.second.operation,
    )
    assert [3, 4] == [side.stack[0].line for side in (finding.first, finding.second)]
    assert finding.first.launch == finding.second.launch != ()
    assert "No edge of the graph leads from kernel write of a graph (program.py:3) to the other." == finding.reason
    assert finding.repair == (
        "Before kernel read of a graph at program.py:4 is captured, make stream 2 wait for stream 1: "
        "`consumer.wait_event(event)` with the event recorded after kernel write of a graph (program.py:3)."
    )


def test_a_node_has_the_name_of_the_call_that_it_stands_for_and_an_event_goes_behind_its_launch(
    program: Program,
) -> None:
    a, b = program.stream(), program.stream()
    node = program.node(GRAPH, a, "host function")
    program.emit(Kind.GEMM, stream=a, correlation=node, name="sgemm")
    program.instantiate(EXEC, GRAPH, [node])
    program.launch(EXEC, a, (1, W, BUFFER, SIZE), line=20)
    program.kernel(b, (R, BUFFER, SIZE), line=21)
    (finding,) = check(program.trace()).findings
    assert "sgemm of a graph" == finding.first.operation
    assert finding.repair == (
        "Before kernel k at program.py:21, make stream 2 wait for stream 1: `consumer.wait_stream(producer)`, or "
        "`consumer.wait_event(event)` with the event recorded after the launch of the graph (program.py:20)."
    )


def test_repair_of_a_race_with_several_branches_counts_them_all(program: Program) -> None:
    branches = [program.stream() for _ in range(3)]
    nodes = [program.node(GRAPH, branch, "write") for branch in branches]
    for row in program._rows[-3:]:
        row["stack"] = program._rows[-3]["stack"]  # captured by one line
    nodes.append(program.node(GRAPH, branches[0], "read"))
    program.instantiate(EXEC, GRAPH, nodes)
    writes = [(number, W, BUFFER + 8 * number, 8) for number in (1, 2, 3)]
    program.launch(EXEC, branches[0], *writes, (4, R, BUFFER, SIZE))
    (finding,) = check(program.trace()).findings
    assert finding.repair.endswith(" The same for 2 more pairs of nodes from these lines.")


def test_race_of_nodes_that_were_added_by_hand_is_repaired_by_an_edge(program: Program) -> None:
    nodes = [program.node(GRAPH), program.node(GRAPH)]
    program.instantiate(EXEC, GRAPH, nodes)
    program.launch(EXEC, program.stream(), (1, W, BUFFER, SIZE), (2, R, BUFFER, SIZE))
    (finding,) = check(program.trace()).findings
    assert finding.repair.endswith("`cuGraphAddDependencies`.")


def test_race_of_nodes_is_counted_once_for_each_launch(program: Program) -> None:
    stream = program.stream()
    diamond(program, stream, (1, 2), (1, 3), (2, 4), (3, 4))
    for _ in range(4):
        program.launch(EXEC, stream, (2, W, BUFFER, SIZE), (3, R, BUFFER, SIZE))
    (finding,) = check(program.trace()).findings
    assert 5 == finding.count


def test_missing_edge_does_not_show_again_at_what_follows_from_it(program: Program) -> None:
    nodes = [program.node(GRAPH) for _ in range(3)]
    program.instantiate(EXEC, GRAPH, nodes, (2, 3))
    program.launch(EXEC, program.stream(), (1, W, BUFFER, SIZE), (2, R, BUFFER, SIZE), (3, R, BUFFER, SIZE))
    assert ["race-raw"] == kinds(program)


def test_launches_of_one_executable_graph_are_ordered_in_any_streams(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.instantiate(EXEC, GRAPH, [program.node(GRAPH)])
    program.launch(EXEC, a, (1, W, BUFFER, SIZE))
    program.launch(EXEC, b, (1, W, BUFFER, SIZE))
    assert [] == kinds(program)
    program.kernel(a, (R, BUFFER, SIZE))  # which the second launch does not order after itself
    assert ["race-raw"] == kinds(program)


def test_launches_of_two_executable_graphs_are_not_ordered(program: Program) -> None:
    a, b = program.stream(), program.stream()
    node = program.node(GRAPH)
    program.instantiate(EXEC, GRAPH, [node])
    program.instantiate(OTHER, GRAPH, [node])
    program.launch(EXEC, a, (1, W, BUFFER, SIZE))
    program.launch(OTHER, b, (1, W, BUFFER, SIZE))
    assert ["race-waw"] == kinds(program)


def test_nodes_are_ordered_with_work_before_and_behind_the_launch(program: Program) -> None:
    stream = program.stream()
    program.kernel(stream, (W, BUFFER, SIZE))
    diamond(program, stream, (1, 2), (2, 3), (3, 4))
    program.kernel(stream, (W, BUFFER, SIZE))
    assert [] == kinds(program)


def test_race_with_work_outside_names_the_node_and_the_launch(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.instantiate(EXEC, GRAPH, [program.node(GRAPH, a, "write")])
    program.launch(EXEC, a, (1, W, BUFFER, SIZE))
    program.kernel(b, (R, BUFFER, SIZE), name="read")
    (finding,) = check(program.trace()).findings
    assert ("kernel write of a graph", 3) == (finding.first.operation, finding.first.stack[0].line)
    assert 6 == finding.first.launch[0].line
    assert () == finding.second.launch


def test_nodes_after_an_update_are_those_of_the_update(program: Program) -> None:
    stream = program.stream()
    program.instantiate(EXEC, GRAPH, [program.node(GRAPH, name="a"), program.node(GRAPH, name="b")], (1, 2))
    new = [program.node(OTHER, name="c"), program.node(OTHER, name="d")]
    program.emit(Kind.GRAPH_UPDATE, aux0=EXEC)
    program.emit_nodes(EXEC, new)
    program.launch(EXEC, stream, (1, W, BUFFER, SIZE), (2, R, BUFFER, SIZE))  # the edge is still there
    assert [] == kinds(program)
    program.kernel(program.stream(), (W, BUFFER, SIZE))
    (finding,) = check(program.trace()).findings
    assert "kernel d of a graph" == finding.first.operation


def test_graph_of_which_only_launches_are_known_is_one_operation(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.launch(EXEC, a, (7, W, BUFFER, SIZE), (8, W, BUFFER, SIZE))
    assert [] == kinds(program)
    program.kernel(b, (R, BUFFER, SIZE))
    assert ["race-raw"] == kinds(program)


def test_record_of_an_event_inside_a_graph_is_waited_for(program: Program) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    program.emit(Kind.GRAPH_INSTANTIATE, aux0=EXEC, aux1=GRAPH)
    program.emit(Kind.GRAPH_NODE, aux0=EXEC, aux1=1, flags=7, address=event)
    program.emit(Kind.GRAPH_NODE, aux0=EXEC, aux1=2)
    program.emit(Kind.GRAPH_EDGE, aux0=EXEC, address=2, aux1=1)
    program.launch(EXEC, a, (2, W, BUFFER, SIZE))
    program.wait(b, event)
    program.kernel(b, (R, BUFFER, SIZE))
    assert [] == kinds(program)


@pytest.mark.parametrize(("comes_after", "expected"), [(True, []), (False, ["race-raw"])])
def test_wait_for_an_event_inside_a_graph_orders_the_nodes_after_it(
    program: Program, comes_after: bool, expected: list[str]
) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    program.kernel(a, (W, BUFFER, SIZE))
    program.record(event, a)
    program.emit(Kind.GRAPH_INSTANTIATE, aux0=EXEC, aux1=GRAPH)
    program.emit(Kind.GRAPH_NODE, aux0=EXEC, aux1=1, flags=6, address=event)
    program.emit(Kind.GRAPH_NODE, aux0=EXEC, aux1=2)
    if comes_after:
        program.emit(Kind.GRAPH_EDGE, aux0=EXEC, address=1, aux1=2)
    program.launch(EXEC, b, (2, R, BUFFER, SIZE))
    assert expected == kinds(program)
    program.kernel(b, (R, BUFFER, SIZE))  # the whole launch waits
    assert expected == kinds(program)


def test_each_wait_and_record_inside_a_graph_is_at_its_place(program: Program) -> None:
    """read_1, wait for `ready`, read_2, record of `read`, read_3: `read` stands for the first two."""
    a, b, ready, read = program.stream(), program.stream(), program.event(), program.event()
    program.kernel(a, (W, BUFFER + SIZE, SIZE))
    program.record(ready, a)
    program.emit(Kind.GRAPH_INSTANTIATE, aux0=EXEC, aux1=GRAPH)
    events = {2: (6, ready), 4: (7, read)}
    for number in range(1, 6):
        kind, event = events.get(number, (0, 0))
        program.emit(Kind.GRAPH_NODE, aux0=EXEC, aux1=number, flags=kind, address=event)
    for number in range(1, 5):
        program.emit(Kind.GRAPH_EDGE, aux0=EXEC, address=number, aux1=number + 1)
    buffers = [BUFFER + place * SIZE for place in range(3)]
    program.launch(EXEC, b, *((number, R, buffer, SIZE) for number, buffer in zip((1, 3, 5), buffers, strict=True)))
    assert [] == kinds(program)
    program.wait(a, read)
    for buffer in buffers[:2]:
        program.kernel(a, (W, buffer, SIZE))
    assert [] == kinds(program)
    program.kernel(a, (W, buffers[2], SIZE))
    assert ["race-war"] == kinds(program)


# Captures of which only the calls are seen ------------------------------------------------------------------------


def capture(program: Program, a: int, b: int, *, joined: bool) -> None:
    """Stream b forks off, reads what a wrote, and is waited for at the end; `joined`: a writes again only then."""
    fork, join = program.event(), program.event()
    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=a)
    program.kernel(a, (W, BUFFER, SIZE), name="write")
    program.record(fork, a)
    program.wait(b, fork)
    program.kernel(b, (R, BUFFER, SIZE), name="read")
    program.record(join, b)
    if joined:
        program.wait(a, join)
    program.kernel(a, (W, BUFFER, SIZE), name="again")
    program.wait(a, join)
    program.emit(Kind.GRAPH_CAPTURE_END, stream=a, aux0=GRAPH)


@pytest.mark.parametrize(("joined", "expected"), [(True, []), (False, ["race-war"])])
def test_captured_calls_are_nodes_ordered_by_streams_and_events(
    program: Program, joined: bool, expected: list[str]
) -> None:
    a, b = program.stream(), program.stream()
    capture(program, a, b, joined=joined)
    assert [] == kinds(program)
    program.launch(GRAPH, a)
    assert expected == kinds(program)


def test_every_launch_touches_what_the_captured_calls_said(program: Program) -> None:
    a, b = program.stream(), program.stream()
    capture(program, a, b, joined=True)
    program.emit(Kind.GRAPH_INSTANTIATE, aux0=EXEC, aux1=GRAPH)
    for _ in range(3):
        program.launch(EXEC, a, line=1000)
    assert [] == kinds(program)
    program.kernel(b, (R, BUFFER, SIZE))
    (finding,) = check(program.trace()).findings
    assert ("kernel again", 1000) == (finding.first.operation, finding.first.launch[0].line)


def test_launch_of_captured_calls_that_said_nothing_is_unchecked(program: Program) -> None:
    a = program.stream()
    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=a)
    program.kernel(a)
    program.emit(Kind.GRAPH_CAPTURE_END, stream=a, aux0=GRAPH)
    program.launch(GRAPH, a)
    assert 1 == check(program.trace()).unchecked_launches


def test_work_beside_a_capture_that_reads_what_was_captured_is_found(program: Program) -> None:
    a, b = program.stream(), program.stream()
    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=a)
    program.kernel(a, (W, BUFFER, SIZE), name="make")
    program.kernel(b, (R, BUFFER, SIZE), name="use")
    program.emit(Kind.GRAPH_CAPTURE_END, stream=a, aux0=GRAPH)
    program.synchronize(device=0)
    program.launch(GRAPH, a)
    (finding,) = check(program.trace()).findings
    assert ("capture-missed", "kernel make", "kernel use") == (
        finding.kind,
        finding.first.operation,
        finding.second.operation,
    )
    assert "" == finding.repair


@pytest.mark.parametrize("how", ["read first", "other bytes", "other thread", "after the capture"])
def test_work_beside_a_capture_that_needs_nothing_of_it_is_clean(program: Program, how: str) -> None:
    a, b = program.stream(), program.stream()

    def use() -> None:
        program.kernel(b, (R, BUFFER + (SIZE if how == "other bytes" else 0), SIZE))

    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=a)
    if how == "read first":
        use()
    program.kernel(a, (W, BUFFER, SIZE))
    if how == "other thread":
        program.on_thread(1)
    if how in ("other bytes", "other thread"):
        use()
    program.on_thread(0)
    program.emit(Kind.GRAPH_CAPTURE_END, stream=a, aux0=GRAPH)
    if how == "after the capture":
        use()
    program.synchronize(device=0)
    program.launch(GRAPH, a)
    assert [] == kinds(program)


@pytest.mark.parametrize(("again", "expected"), [(True, []), (False, ["captured-event"])])
def test_wait_outside_for_an_event_of_a_capture_is_found(program: Program, again: bool, expected: list[str]) -> None:
    a, b, event = program.stream(), program.stream(), program.event()
    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=a)
    program.record(event, a)
    program.emit(Kind.GRAPH_CAPTURE_END, stream=a, aux0=GRAPH)
    if again:
        program.record(event, a)
    program.wait(b, event)
    assert expected == kinds(program)


# Memory that a graph keeps ----------------------------------------------------------------------------------------


def stale(program: Program, *, free: bool, reallocate: bool = False, update: bool = False) -> list[Finding]:
    stream = program.stream()
    program.alloc(BUFFER, SIZE)
    nodes = [program.node(GRAPH, stream)]
    program.instantiate(EXEC, GRAPH, nodes)
    program.point(EXEC, 1, BUFFER)
    if free:
        program.free(BUFFER, SIZE)
    if reallocate:
        program.alloc(BUFFER, SIZE)
    if update:
        program.emit(Kind.GRAPH_UPDATE, aux0=EXEC)
        program.emit_nodes(EXEC, nodes)
        program.point(EXEC, 1, BUFFER)
    program.launch(EXEC, stream, (1, W, BUFFER, SIZE))
    return list(check(program.trace()).findings)


def test_launch_that_uses_memory_freed_since_the_graph_was_made_is_found(program: Program) -> None:
    (finding,) = stale(program, free=True)
    assert "use-after-free" == finding.kind
    assert finding.reason.startswith("The graph was made for this memory, and it was given back at program.py:")


def test_new_owner_of_the_address_does_not_hide_it(program: Program) -> None:
    (finding,) = stale(program, free=True, reallocate=True)
    assert ("use-after-free", 2) == (finding.kind, finding.buffer and finding.buffer.stack[0].line)


def test_memory_that_lives_or_that_an_update_made_the_graph_for_is_clean() -> None:
    assert [] == stale(Program(), free=False)
    assert [] == stale(Program(), free=True, reallocate=True, update=True)


@pytest.mark.parametrize(("pool", "expected"), [(0, ["use-after-free"]), (7, [])])
def test_blocks_of_a_private_pool_are_the_graphs_even_when_freed(
    program: Program, pool: int, expected: list[str]
) -> None:
    stream = program.stream()
    program.emit(Kind.GRAPH_CAPTURE_BEGIN, stream=stream)
    program.emit(Kind.BLOCK_ALLOC, address=BUFFER, size=SIZE, aux0=SIZE, aux1=pool, stream=stream)
    program.kernel(stream, (W, BUFFER, SIZE))
    program.emit(Kind.GRAPH_CAPTURE_END, stream=stream, aux0=GRAPH)
    program.free_block(BUFFER, SIZE, stream)
    program.launch(GRAPH, stream)
    program.launch(GRAPH, stream)
    assert expected == kinds(program)


def test_legacy_stream_waits_for_a_launch_in_a_blocking_stream(program: Program) -> None:
    legacy, blocking = program.stream(StreamFlag.LEGACY_DEFAULT), program.stream(StreamFlag(0))
    program.instantiate(EXEC, GRAPH, [program.node(GRAPH)])
    program.launch(EXEC, blocking, (1, W, BUFFER, SIZE))
    program.kernel(legacy, (R, BUFFER, SIZE))
    assert [] == kinds(program)
