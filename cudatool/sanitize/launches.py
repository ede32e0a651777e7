"""What a graph launch does: its place in the order of work, races between its nodes, and what its capture missed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from cudatool.sanitize.defects import Side, side_of
from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.graphs import (
    ALLOC,
    EMPTY,
    EVENT_RECORD,
    EVENT_WAIT,
    FREE,
    GRAPH,
    Executable,
    Node,
    Part,
    check_nodes,
)
from cudatool.sanitize.intervals import ATOMIC, READ, WRITE, Access, Operation, overlap
from cudatool.sanitize.lifetimes import Buffer
from cudatool.sanitize.rows import LAUNCHES, Row
from cudatool.trace.events import GraphLaunchFlag, Kind
from cudatool.trace.model import Trace

if TYPE_CHECKING:
    from cudatool.sanitize.engine import Engine

__all__ = ["Launches"]

_TOUCH_NOTHING = frozenset([GRAPH, EMPTY, EVENT_WAIT, EVENT_RECORD, ALLOC, FREE])  # nodes inside have their own rows
_EAGER = 1000  # accesses beside a capture that are looked at


class Launches:
    """Handles graph launches and what belongs to graphs, for an engine."""

    def __init__(self, engine: Engine, trace: Trace) -> None:
        self._engine = engine
        self._faults: dict[int, list[tuple[int, int]]] = {}  # correlation -> address and size of what was not done
        for found in trace.of_kind(Kind.FINDING):
            if found["correlation"] and found["address"]:
                where = int(found["address"]), int(found["size"])
                self._faults.setdefault(int(found["correlation"]), []).append(where)

    def handlers(self) -> dict[int, Callable[[Row], None]]:
        """Return what handles the records of each kind."""
        graphs = self._engine.graphs
        return {
            Kind.GRAPH_LAUNCH: self._launch,
            Kind.GRAPH_CAPTURE_BEGIN: graphs.begin,
            Kind.GRAPH_CAPTURE_END: graphs.end,
            Kind.GRAPH_NODE_ADDED: graphs.node_added,
            Kind.GRAPH_INSTANTIATE: graphs.instantiate,
            Kind.GRAPH_UPDATE: graphs.update,
            Kind.GRAPH_NODE: graphs.node,
            Kind.GRAPH_EDGE: graphs.edge,
            Kind.GRAPH_POINTER: self._pointer,
        }

    def _launch(self, row: Row) -> None:
        """cuGraphLaunch: "ordered behind both any previous work in hStream and any previous launches of hGraphExec".

        The stream's next operation comes after all nodes. What the nodes touch is one operation to all outside, or one
        for each part if nodes wait for external events or record them (:meth:`.graphs.Executable.parts`).
        """
        if row.stream in self._engine.graphs.captures:
            self.capture(row, None)  # a child graph
            return
        stream = self._engine.streams.get(row.stream)
        if stream is None:
            self._engine.unknown_streams += 1
            return
        if self._engine.repairs is not None:
            self._engine.repair(row, stream)
        self._engine.operations += 1
        graph = self._engine.graphs.launched(row.aux0)
        nodes = graph.nodes.values() if graph is not None else ()
        if graph is not None and graph.last is not None:
            self._engine.ordering.learn(stream, graph.last)
            self._engine.ordering.edges["relaunch of a graph"] += 1
        accesses, unknown = self._accesses_of_launch(row, graph)
        for record in unknown:
            self._engine.unchecked[int(self._engine.records["name"][record])] += 1
        for place, (part, touched) in enumerate(self._parts(graph, accesses)):
            for event in part.waits:
                self._engine.ordering.join_event(stream, event)
            self._engine.ordering.enqueue(self._engine.hosts[row.thread], stream, row.record)
            operation = Operation(stream.index, stream.count, stream.clock, row.record)
            if graph is not None:
                graph.last = operation
            if not place:
                for address, size in self._faults.get(row.correlation, ()):
                    self._check_fault(nodes, operation, address, size)
                if graph is not None:
                    self._check_nodes(graph, accesses, operation)
            self._touch(graph, touched, operation)
            if part.record:
                self._engine.ordering.record_here(stream, part.record)

    @staticmethod
    def _parts(graph: Executable | None, accesses: Sequence[Access]) -> list[tuple[Part, Sequence[Access]]]:
        """Return the parts of a launch, each with what it touches."""
        parts = [Part((), None, 0)] if graph is None else graph.parts()
        if len(parts) == 1:
            return [(parts[0], accesses)]
        if graph is not None and all(touched.node in graph.nodes for touched in accesses):
            return [(part, [one for one in accesses if part.nodes and one.node in part.nodes]) for part in parts]
        # Which node touches what is not known: after all waits and before all records, which invents no race.
        waits = tuple(event for part in parts for event in part.waits)
        records = [(Part((), (), part.record), ()) for part in parts if part.record]
        return [(Part(waits, None, 0), accesses), *records]

    def _touch(self, graph: Executable | None, accesses: Sequence[Access], operation: Operation) -> None:
        """Check what the nodes of a part of a launch access."""
        for touched in accesses:
            node_ = graph.nodes.get(touched.node) if graph is not None else None
            touched.node = node_.record if node_ is not None else -1
            self._engine.access(operation, touched, node_)

    def _accesses_of_launch(self, row: Row, graph: Executable | None) -> tuple[list[Access], list[int]]:
        """Return what the nodes touch, each access with its node's number, and the records of what is not known."""
        if graph is None or graph.known:
            types = {node.type for node in graph.nodes.values()} if graph is not None else {-1}
            is_known = row.accesses is not None or types <= _TOUCH_NOTHING
            return row.accesses or [], [] if is_known else [row.record]
        for touched in row.accesses or ():
            touched.node = -1  # what the record says is of another time
        is_beside = row.flags & GraphLaunchFlag.BESIDE_NODES
        if row.accesses is not None and not is_beside:
            return row.accesses, []
        nodes = graph.nodes.items()
        accesses = [access.of(access.operation, number) for number, node in nodes for access in node.baked or ()]
        unknown = [node.record for _, node in nodes if node.baked is None]
        if row.accesses is None and (is_beside or not nodes):
            unknown.append(row.record)
        return accesses + (row.accesses or []), unknown

    def _check_nodes(self, graph: Executable, accesses: list[Access], operation: Operation) -> None:
        """Look for races between the nodes of one launch, and with work that the capture missed."""
        if graph.eager:
            self._check_eager(graph, accesses, operation)
        shape = hash(tuple([(a.node, a.start, a.stop, a.mode, a.row, a.stride) for a in accesses]))
        if shape in graph.clean:
            return
        extra = self._engine.repairs.edges if self._engine.repairs is not None else ()
        found = check_nodes(graph, accesses, extra, self._engine.effort, go_on_repaired=self._engine.go_on_repaired)
        for race in found:
            first, second = (_side_of_node(one, graph.nodes[one.node], operation) for one in (race.first, race.second))
            buffer = self._engine.buffers.find(race.start)
            self._engine.found.report(race.kind, first, second, race.start, race.size, buffer, inside=True)
        if not found:
            graph.clean.add(shape)

    def _check_fault(self, nodes: Collection[Node], operation: Operation, address: int, size: int) -> None:
        """An access that a checker of the device did not let happen: its memory may have been given back."""
        for node in nodes:
            if (buffer := node.freed_memory(address)) is not None:
                first, second = Side(buffer.release, "free"), Side(operation, "access", node=node.record)
                self._engine.report(FindingKind.USE_AFTER_FREE, first, second, address, size, buffer)
                return

    def _check_eager(self, graph: Executable, accesses: list[Access], operation: Operation) -> None:
        """Work in another stream, done while the graph was captured, that uses what a node captured before it makes.

        "The operations are not executed" at capture (cuStreamBeginCapture): it ran without them, and no launch will
        run it again.
        """
        for eager in graph.eager:
            for made in accesses:
                node = graph.nodes.get(made.node)
                if node is None or not made.mode & (WRITE | ATOMIC) or node.record > eager.operation.record:
                    continue
                if (found := overlap(made, eager, self._engine.effort)) is not None:
                    first = side_of(made.of(operation, node.record))
                    buffer = self._engine.buffers.find(found[0])
                    self._engine.found.report(FindingKind.CAPTURE_MISSED, first, side_of(eager), *found, buffer)
        graph.eager = []

    def capture(self, row: Row, known: Sequence[Access] | None) -> None:
        """A call becomes a node. What it said it touches holds for every launch."""
        baked = None if known is None or (row.accesses is None and row.kind in LAUNCHES) else list(known)
        node = Node(row.record, baked=baked)
        for touched in baked or ():
            self._bake(node, self._engine.buffers.find(touched.start))
        self._engine.graphs.captures[row.stream].add(row.stream, node)

    def note_eager(self, row: Row, accesses: Sequence[Access]) -> None:
        """Work is done beside captures."""
        for capture in set(self._engine.graphs.captures.values()):
            if capture.thread == row.thread and len(capture.eager) < _EAGER:
                capture.eager += [access for access in accesses if access.mode & READ]

    def _pointer(self, row: Row) -> None:
        node = self._engine.graphs.node_of(row)
        if node is not None:
            node.memory = row.address, row.address + row.size
            self._bake(node, self._engine.buffers.find(row.address))

    @staticmethod
    def _bake(node: Node, buffer: Buffer | None) -> None:
        """A node will use `buffer` in every launch. Memory of graphs and of private pools is theirs."""
        if buffer is not None and buffer.freed < 0 and not buffer.of_graphs:
            node.pointers.append(buffer)


def _side_of_node(access: Access, node: Node, operation: Operation) -> Side:
    """Return what a node does as a side of a defect. Of a host function it is the node, too: an edge may order that."""
    if not access.mode:
        return Side(operation, "free" if node.type == FREE else "allocate", node=node.record)
    side = side_of(access.of(operation, node.record))
    side.node = node.record
    return side
