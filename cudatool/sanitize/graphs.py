"""Graphs: which of their nodes are ordered, what the nodes will use, and captures in progress.

What a graph consists of is known in one of two ways. A device that knows its graphs tells their nodes and edges when
they are instantiated (``GRAPH_NODE``, ``GRAPH_EDGE``), and at each launch which node touched what. Elsewhere only the
calls are seen that are captured, as records of work in a capturing stream: they are the nodes, their order in the
streams and their events are the edges, and what they say they touch holds for every launch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from cudatool.sanitize.clocks import Clocks, Moment
from cudatool.sanitize.defects import race_of
from cudatool.sanitize.effort import Effort
from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.intervals import Access, History, Operation, overlap
from cudatool.sanitize.lifetimes import Buffer
from cudatool.sanitize.rows import Row
from cudatool.trace.events import EventFlag

__all__ = [
    "ALLOC",
    "EMPTY",
    "EVENT_RECORD",
    "EVENT_WAIT",
    "FREE",
    "GRAPH",
    "Capture",
    "Executable",
    "Graphs",
    "Node",
    "NodeRace",
    "Part",
    "check_nodes",
]

_EXTERNAL = int(EventFlag.EXTERNAL)
GRAPH, EMPTY, EVENT_WAIT, EVENT_RECORD, ALLOC, FREE = 4, 5, 6, 7, 10, 11  # CUgraphNodeType


class Node:
    """A node of a graph.

    Attributes
    ----------
    record
        The trace record that says what it is and where it was captured or added.
    after
        Numbers of the nodes directly before it.
    type
        CUgraphNodeType.
    event
        The CUDA event of an event node, 0 for others.
    memory
        First byte and one past the last of what it allocates or frees.
    baked
        What a captured call said it touches; None if it said nothing.
    pointers
        The live allocations that addresses among its parameters were in.
    """

    __slots__ = ("after", "baked", "event", "memory", "pointers", "record", "type")

    def __init__(
        self, record: int, after: Collection[int] = (), baked: list[Access] | None = None, type_: int = -1
    ) -> None:
        self.record = record
        self.after = list(after)
        self.type = type_
        self.event = 0
        self.memory = (0, 0)
        self.baked = baked
        self.pointers: list[Buffer] = []

    def freed_memory(self, address: int) -> Buffer | None:
        """Return the allocation at `address` that the node was made for, if it was given back since."""
        for buffer in self.pointers:
            if buffer.freed >= 0 and buffer.start <= address < buffer.stop:
                return buffer
        return None


class Capture:
    """A capture in progress.

    Attributes
    ----------
    thread
        The host thread that began it.
    nodes
        The captured calls that were seen, by number from 1 on.
    tails
        For each stream that takes part, the nodes that its next one comes after.
    eager
        Work of the same thread in other streams during the capture, which is no part of the graph.
    """

    def __init__(self, stream: int, thread: int) -> None:
        self.thread = thread
        self.nodes: dict[int, Node] = {}
        self.tails: dict[int, frozenset[int]] = {stream: frozenset()}
        self.eager: list[Access] = []

    def add(self, stream: int, node: Node) -> None:
        """Append a node to a stream."""
        number = len(self.nodes) + 1
        node.after = sorted(self.tails[stream])
        self.nodes[number] = node
        self.tails[stream] = frozenset([number])


class Part(NamedTuple):
    """A part of a launch, which is one operation to all outside: what `nodes` touch, all nodes' if None.

    It comes after the `waits` of external events, and the event `record` is recorded after it, if not 0.
    """

    waits: tuple[int, ...]
    nodes: Collection[int] | None
    record: int


class Executable:
    """What can be launched: an executable graph, or a captured one that is launched directly.

    Attributes
    ----------
    nodes
        By number.
    last
        Its latest launch.
    eager
        As of its capture; emptied when it has been looked at.
    known
        Whether each access of a launch names its node.
    clean
        Sets of accesses of a launch in which no two nodes were found to race.
    """

    def __init__(self, nodes: dict[int, Node], eager: list[Access], *, known: bool) -> None:
        self.nodes = nodes
        self.last: Moment | None = None
        self.eager = eager
        self.known = known
        self.clean: set[int] = set()
        self._order: list[int] | None = None
        self._parts: list[Part] | None = None

    def changed(self) -> None:
        """Forget what follows from nodes and edges."""
        self._order = self._parts = None

    def connect(self, first: int, second: int) -> None:
        """Add an edge."""
        if first in self.nodes and second in self.nodes:
            self.nodes[second].after.append(first)
            self.changed()

    def chains(self) -> tuple[dict[int, int], int]:
        """Return the chain of each node and the number of chains: nodes that follow each other, which cover the graph.

        They are the agents of the graph's order.
        """
        order = self._sorted()
        chains: dict[int, int] = {}
        ends: dict[int, int] = {}  # last node of a chain -> the chain
        width = 0
        for number in order:
            before = next((n for n in self.nodes[number].after if n in ends), None)
            if before is None:
                chains[number] = width
                width += 1
            else:
                chains[number] = ends.pop(before)
            ends[number] = chains[number]
        return chains, width

    def positions(
        self, chains: dict[int, int], clocks: Clocks, effort: Effort, extra: Collection[tuple[int, int]] = ()
    ) -> Iterator[tuple[int, Operation]]:
        """Yield all nodes, each after those that it depends on, with its place in the graph's order.

        `extra` are edges to add, as pairs of records. A node's clock may be changed before the next one is asked for.
        """
        made: dict[int, Operation] = {}
        latest = dict.fromkeys(chains.values(), clocks.nothing)
        epochs = dict.fromkeys(chains.values(), 0)
        for number in self._sorted():
            node, chain = self.nodes[number], chains[number]
            epochs[chain] += 1
            clock = latest[chain]
            for before in node.after:
                if before in made:
                    clock = clocks.join(chain, epochs[chain], clock, made[before])
            effort.spend(4 * len(extra))
            for first, second in extra:
                if second == node.record:
                    effort.spend(4 * len(made))
                    for other in made.values():
                        if other.record == first:
                            clock = clocks.join(chain, epochs[chain], clock, other)
            made[number] = operation = Operation(chain, epochs[chain], clock, node.record)
            yield number, operation
            latest[chain] = operation.clock

    def parts(self) -> list[Part]:
        """Return the parts of a launch, cut where nodes wait for external events or record them.

        The parts are in order, the nodes of a graph need not be. So a wait comes as late as it can, and a record as
        early: after what it depends on alone. Where several event nodes are on branches of their own, what is left
        is an edge too many, which hides a race; one too few would invent one.
        """
        if self._parts is None:
            self._parts = self._cut()
        return self._parts

    def _cut(self) -> list[Part]:
        order = self._sorted()
        waits = [number for number in order if self.nodes[number].type == EVENT_WAIT]
        records = [number for number in order if self.nodes[number].type == EVENT_RECORD]
        needs: dict[int, frozenset[int]] = {}  # the waits that a node comes after
        for number in order:
            before = [needs[other] for other in self.nodes[number].after if other in needs]
            needs[number] = frozenset({number} & set(waits)).union(*before) if waits else frozenset()
        done: set[int] = set()
        joined: set[int] = set()
        joining: list[int] = []
        parts: list[Part] = []

        def add(nodes: set[int], record: int) -> None:
            parts.append(Part(tuple(joining), nodes, record))
            joining.clear()
            done.update(nodes)

        for wait in (*waits, None):
            for number in [number for number in records if number not in done and needs[number] <= joined]:
                add(self._before(number, done), self.nodes[number].event)
            add({number for number in order if number not in done and needs[number] <= joined}, 0)
            if wait is not None:
                joined.add(wait)
                joining.append(self.nodes[wait].event)
        return [part for part in parts if part.nodes or part.waits or part.record] or [Part((), None, 0)]

    def _before(self, number: int, done: Collection[int]) -> set[int]:
        """Return a node and those that it depends on, but for what is `done`."""
        found, waiting = {number}, [number]
        while waiting:
            for other in self.nodes[waiting.pop()].after:
                if other in self.nodes and other not in found and other not in done:
                    found.add(other)
                    waiting.append(other)
        return found

    def _sorted(self) -> list[int]:
        """The numbers of the nodes, each after those that it depends on; what is on a cycle last."""
        if self._order is None:
            missing = {number: len(node.after) for number, node in self.nodes.items()}
            later: dict[int, list[int]] = {}
            for number, node in self.nodes.items():
                for before in node.after:
                    later.setdefault(before, []).append(number)
            order = [number for number, count in missing.items() if not count]
            for number in order:  # grows while it is read
                for other in later.get(number, ()):
                    missing[other] -= 1
                    if not missing[other]:
                        order.append(other)
            done = set(order)
            self._order = order + [number for number in self.nodes if number not in done]
        return self._order


class Graphs:
    """All graphs of a trace, while it is read, and the captures in progress.

    Attributes
    ----------
    captures
        By stream that takes part.
    pools
        The caching allocator's, that graphs were captured into: for blocks of these a free is a note to the allocator.
        Who keeps the graphs goes on using them by address (PyTorch's ``cudagraph_trees``).
    """

    def __init__(self) -> None:
        self.captures: dict[int, Capture] = {}
        self.pools: set[int] = set()
        self._events: dict[int, tuple[Capture, frozenset[int], int]] = {}  # what events stand for that were captured
        self._calls: dict[int, int] = {}  # correlation -> record of GRAPH_NODE_ADDED
        self._captured: dict[int, Capture] = {}  # graph -> its capture
        self._executables: dict[int, Executable] = {}

    # Captures ---------------------------------------------------------------------------------------------------

    def begin(self, row: Row) -> None:
        """A stream begins to capture."""
        self.captures[row.stream] = Capture(row.stream, row.thread)

    def end(self, row: Row) -> None:
        """The capture that began in this stream is over; its graph is 0 if it failed."""
        ended = self.captures.get(row.stream)
        self.captures = {stream: capture for stream, capture in self.captures.items() if capture is not ended}
        if ended is not None and row.aux0:
            self._captured[row.aux0] = ended
        if row.aux1:
            self.pools.add(row.aux1)

    def event_recorded(self, row: Row) -> bool:
        """Tell whether the record of an event was captured, and is therefore none."""
        capture = self.captures.get(row.stream)
        if capture is None:
            if self._events:
                self._events.pop(row.aux0, None)
            return False
        if row.flags & _EXTERNAL:
            self._events.pop(row.aux0, None)  # from a launch on it stands for work
            self._add_event_node(capture, row, EVENT_RECORD)
            return True
        self._events[row.aux0] = capture, capture.tails[row.stream], row.record
        return True

    def event_waited(self, row: Row) -> bool:
        """Tell whether a wait was captured, and is therefore none.

        "Stream Management", stream capture: a wait for an event of a capture takes the stream into it.
        """
        if not self.captures:
            return False
        if row.flags & _EXTERNAL and row.stream in self.captures:
            self._add_event_node(self.captures[row.stream], row, EVENT_WAIT)
            return True
        capture, tails, _ = self._events.get(row.aux0, (None, frozenset(), 0))
        if capture is not None and capture in self.captures.values():
            capture.tails[row.stream] = capture.tails.get(row.stream, frozenset()) | tails
            self.captures[row.stream] = capture
        return row.stream in self.captures

    @staticmethod
    def _add_event_node(capture: Capture, row: Row, type_: int) -> None:
        node = Node(row.record, baked=[], type_=type_)
        node.event = row.aux0
        capture.add(row.stream, node)

    def captured_record(self, event: int) -> int | None:
        """Return the record by which an event became a part of a capture, None if it stands for real work."""
        found = self._events.get(event)
        return None if found is None else found[2]

    # Structure --------------------------------------------------------------------------------------------------

    def node_added(self, row: Row) -> None:
        """A call that adds a node, by capture or by hand."""
        self._calls[row.correlation] = row.record

    def instantiate(self, row: Row) -> None:
        """An executable graph is made. Its nodes are those of the capture until the trace says otherwise."""
        capture = self._captured.get(row.aux1)
        self._executables[row.aux0] = (
            Executable(capture.nodes, capture.eager, known=False) if capture else Executable({}, [], known=False)
        )

    def update(self, row: Row) -> None:
        """An executable graph gets new parameters: its nodes follow, or it has those of a captured graph now."""
        executable = self._executables.get(row.aux0)
        if executable is None:
            return
        executable.clean.clear()
        if row.aux1:
            capture = self._captured.get(row.aux1)
            executable.nodes = capture.nodes if capture is not None else {}
            executable.changed()

    def node(self, row: Row) -> None:
        """A node of an executable graph, new or with new parameters."""
        executable = self._executables.get(row.aux0)
        if executable is None:  # instantiated before the trace began: its edges are not known
            return
        if not executable.known:
            executable.known, executable.nodes = True, {}
        old = executable.nodes.get(row.aux1)
        node = Node(self._calls.get(row.correlation, row.record), old.after if old is not None else (), None, row.flags)
        node.event = row.address
        executable.nodes[row.aux1] = node
        executable.changed()

    def edge(self, row: Row) -> None:
        """An edge of an executable graph."""
        executable = self._executables.get(row.aux0)
        if executable is not None:
            executable.connect(row.address, row.aux1)

    def node_of(self, row: Row) -> Node | None:
        """Return the node that a record names, None if it is not known."""
        executable = self._executables.get(row.aux0)
        return None if executable is None else executable.nodes.get(row.aux1)

    def launched(self, graph: int) -> Executable | None:
        """Return what a launch runs, without nodes if nothing is known of it; None if the launch names no graph."""
        found = self._executables.get(graph)
        if found is None and graph:
            capture = self._captured.get(graph)
            nodes, eager = (capture.nodes, capture.eager) if capture is not None else ({}, [])
            found = self._executables[graph] = Executable(nodes, eager, known=False)
        return found


class NodeRace(NamedTuple):
    """Two nodes of one launch that no edge orders. One of them may allocate or free what the other one uses.

    `first` and `second` say what they do by ``Access.node``, the number of the node.
    """

    kind: FindingKind
    first: Access
    second: Access
    start: int
    size: int


def check_nodes(
    graph: Executable,
    accesses: list[Access],
    extra: Collection[tuple[int, int]],
    effort: Effort,
    *,
    go_on_repaired: bool,
) -> list[NodeRace]:
    """Return what is in no order among the nodes of one launch, even with the edges `extra`."""
    of_node: dict[int, list[Access]] = {}
    for access in accesses:
        of_node.setdefault(access.node, []).append(access)
    found: list[NodeRace] = []
    chains, width = graph.chains()
    clocks = Clocks(width, effort)
    history = History(effort)
    given: list[Access] = []  # by allocation nodes; their mode is 0
    freed: list[Access] = []

    def add(kind: FindingKind, old: Access, new: Access) -> None:
        meeting = overlap(old, new, effort)
        assert meeting is not None
        found.append(NodeRace(kind, old, new, *meeting))
        if go_on_repaired and old.exact and new.exact:
            later = new.operation
            later.clock = clocks.join(later.agent, later.epoch, later.clock, old.operation)

    def conflict(old: Access, new: Access, found: tuple[int, int]) -> None:
        add(race_of(old, new), old, new)

    for number, operation in graph.positions(chains, clocks, effort, extra):
        node = graph.nodes[number]
        if node.type in (ALLOC, FREE):
            whole = Access(*node.memory, 0, node=number, operation=operation)
            for access in list(history.within(*node.memory)):
                if not access.operation.before(operation.agent, operation.clock) and overlap(access, whole, effort):
                    kind = FindingKind.USE_AFTER_FREE if node.type == FREE else FindingKind.USE_BEFORE_ALLOC
                    add(kind, access, whole)
            (freed if node.type == FREE else given).append(whole)
        for access in of_node.get(number, ()):
            placed = access.of(operation, number)
            effort.spend(20 * (len(freed) + len(given)))
            for free in freed:
                if overlap(free, placed, effort):
                    add(FindingKind.USE_AFTER_FREE, free, placed)
            for alloc in given:
                if overlap(alloc, placed, effort) and not alloc.operation.before(operation.agent, operation.clock):
                    add(FindingKind.USE_BEFORE_ALLOC, alloc, placed)
            history.touch(placed, conflict)
    return found
