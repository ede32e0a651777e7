"""CUDA graphs: nodes, edges, and what a graph owns.

A node knows its work only through :class:`Work` (cudatool/sim/graph/nodes.py has one for each type of node), so
building, cloning and comparing graphs is the same for all of them.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.graph.allocations import Slot
    from cudatool.sim.graph.run import GraphRun
    from cudatool.sim.machine import Context
    from cudatool.sim.queue import Operation

__all__ = ["PLAIN_EDGE", "Condition", "Graph", "Node", "NodeType", "Update", "UserObject", "Work", "unregister"]

PLAIN_EDGE = bytes(8)
"""CUgraphEdgeData of an ordinary dependency."""


class NodeType(IntEnum):
    """CUgraphNodeType."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    HOST = 3
    GRAPH = 4
    EMPTY = 5
    WAIT_EVENT = 6
    EVENT_RECORD = 7
    MEM_ALLOC = 10
    MEM_FREE = 11
    BATCH_MEM_OP = 12
    CONDITIONAL = 13


class Update(IntEnum):
    """CUgraphExecUpdateResult."""

    SUCCESS = 0
    ERROR = 1
    TOPOLOGY_CHANGED = 2
    NODE_TYPE_CHANGED = 3
    FUNCTION_CHANGED = 4
    PARAMETERS_CHANGED = 5
    NOT_SUPPORTED = 6
    UNSUPPORTED_FUNCTION_CHANGE = 7
    ATTRIBUTES_CHANGED = 8


class Work(Protocol):
    """What a node does. It never changes: other parameters are another work."""

    @property
    def kind(self) -> NodeType: ...

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs inside: of a child graph node, and the bodies of a conditional one."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The memory that it allocates, or frees."""

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        """Add the operations of one launch, ordered after `after`, and return the last one."""

    def update_to(self, new: Any) -> Update:
        """Return whether a node of an executable graph can do `new`, a work of the same type, instead."""

    def clone(self, node: Node, nodes: dict[Node, Node]) -> Work:
        """Return the same for a copy of its `node`; the nodes inside are added to `nodes`."""

    def describe(self) -> str:
        """Return what it does, for people."""


class Node:
    """A node of a graph. Edges are kept in the order in which they were made, at both ends."""

    def __init__(self, graph: Graph, work: Work | None, number: int, added_by: int) -> None:
        self.graph = graph
        self.number = number  # within the graph, never given twice (cuGraphNodeGetLocalId)
        self.added_by = added_by  # correlation of the driver call; a copy has the one of what it copies
        self.handle = 0
        self.dependencies: dict[Node, bytes] = {}
        self.dependents: dict[Node, bytes] = {}
        self.kept: Any = None  # C data that the program was given pointers to
        self._work = work

    @property
    def work(self) -> Work:
        """What the node does."""
        assert self._work is not None
        return self._work

    @work.setter
    def work(self, work: Work) -> None:
        self._work = work
        self.kept = None

    @property
    def kind(self) -> NodeType:
        """Its type."""
        return self.work.kind


class Condition:
    """The value that a conditional node looks at, and kernels set.

    Its handle is the address of a 32-bit word, so that cudaGraphSetConditional is a store. Executable graphs have
    values of their own, which are there while they run.
    """

    def __init__(self, graph: Graph, context: Context, default: int | None) -> None:
        self.graph = graph
        self.context = context
        self.default = default  # assigned when a launch begins, if given
        self.node: Node | None = None
        self.value = ctypes.c_uint32()
        state.machine.conditions[self.handle] = self

    @property
    def handle(self) -> int:
        """What the program names it by."""
        return ctypes.addressof(self.value)


class UserObject:
    """Something of the program's that lives as long as graphs need it."""

    def __init__(self, destroy: Callable[[], None], references: int) -> None:
        self.handle = state.machine.new_handle()
        state.machine.objects[self.handle] = self
        self.references = references
        self._destroy = destroy

    def retain(self, count: int) -> None:
        """Add references."""
        self.references += count

    def release(self, count: int) -> None:
        """Drop references; with the last one the program's destructor is called, when the driver call is over."""
        self.references -= count
        if self.references <= 0 and state.machine.objects.pop(self.handle, None):
            abi.after_call(self._destroy)


class Graph:
    """A graph.

    Attributes
    ----------
    nodes
        In the order in which they were added.
    owner
        The node that it is inside of.
    origin
        For a clone, the node that each of its nodes is a copy of.
    user_objects
        References that it holds.
    is_capturing
        Whether a stream captures into it.
    executables
        Executable graphs made from it that exist.
    """

    _ids = itertools.count(1)

    def __init__(self, owner: Node | None = None) -> None:
        self.id = next(self._ids)
        self.handle = 0
        self.owner = owner
        self.nodes: dict[Node, None] = {}
        self.origin: dict[Node, Node] = {}
        self.conditions: list[Condition] = []
        self.user_objects: Counter[UserObject] = Counter()
        self.is_capturing = False
        self.executables = 0
        self._numbers = itertools.count()

    # ---- looking ----

    def walk(self) -> Iterator[Node]:
        """Yield its nodes, and those of the graphs inside."""
        for node in self.nodes:
            yield node
            for inner in node.work.graphs:
                yield from inner.walk()

    def graphs(self) -> Iterator[Graph]:
        """Yield it and all graphs inside."""
        yield self
        for node in self.nodes:
            for inner in node.work.graphs:
                yield from inner.graphs()

    @property
    def outermost(self) -> Graph:
        """The graph that it is, at some depth, inside of; itself if it is in none."""
        return self if self.owner is None else self.owner.graph.outermost

    @property
    def has_memory_nodes(self) -> bool:
        """Whether there are allocation or free nodes in it or inside of it."""
        return any(node.kind in (NodeType.MEM_ALLOC, NodeType.MEM_FREE) for node in self.walk())

    @property
    def ends(self) -> list[Node]:
        """The nodes that nothing depends on."""
        return [node for node in self.nodes if not node.dependents]

    def ordered(self) -> list[Node]:
        """Return the nodes, each after its dependencies.

        Raises
        ------
        DriverError
            CUDA_ERROR_INVALID_VALUE if there is a cycle.
        """
        order = self._order()
        if len(order) < len(self.nodes):
            raise DriverError(Result.INVALID_VALUE, "the graph has a cycle")
        return order

    def find_cycle(self) -> Node | None:
        """Return a node on a cycle or after one, None if there is none."""
        done = set(self._order())
        return next((node for node in self.nodes if node not in done), None)

    def _order(self) -> list[Node]:
        missing = {node: len(node.dependencies) for node in self.nodes}
        order = [node for node in self.nodes if not missing[node]]
        for node in order:  # grows while it is read
            for dependent in node.dependents:
                missing[dependent] -= 1
                if not missing[dependent]:
                    order.append(dependent)
        return order

    # ---- changing ----

    def add(self, work: Work | Callable[[Node], Work], dependencies: dict[Node, bytes]) -> Node:
        """Add a node. A work that contains graphs is made by a function of the node that will own them."""
        node = Node(self, None, next(self._numbers), abi.call.correlation)
        node.work = work(node) if callable(work) else work
        self.nodes[node] = None
        for dependency, data in dependencies.items():
            self.connect(dependency, node, data)
        for slot in node.work.slots:
            slot.holders += 1
        return node

    def connect(self, source: Node, target: Node, data: bytes) -> None:
        """Add an edge."""
        source.dependents[target] = target.dependencies[source] = data

    def disconnect(self, source: Node, target: Node) -> None:
        """Remove an edge."""
        del source.dependents[target], target.dependencies[source]

    def remove(self, node: Node) -> None:
        """Remove a node and its edges."""
        for source in list(node.dependencies):
            self.disconnect(source, node)
        for target in list(node.dependents):
            self.disconnect(node, target)
        del self.nodes[node]
        unregister(node)

    def clone(self, nodes: dict[Node, Node], owner: Node | None = None) -> Graph:
        """Return a copy, with copies of the graphs inside. The copy of each node is entered in `nodes`."""
        copy = Graph(owner)
        for node in self.nodes:
            twin = nodes[node] = Node(copy, None, node.number, node.added_by)
            copy.nodes[twin] = None
            twin.work = node.work.clone(twin, nodes)
            for slot in twin.work.slots:
                slot.holders += 1
        for node in self.nodes:
            nodes[node].dependencies = {nodes[source]: data for source, data in node.dependencies.items()}
            nodes[node].dependents = {nodes[target]: data for target, data in node.dependents.items()}
        copy._numbers = itertools.count(max((node.number for node in self.nodes), default=-1) + 1)
        copy.origin = {nodes[node]: node for node in self.nodes}
        for user_object, count in self.user_objects.items():
            user_object.retain(count)
            copy.user_objects[user_object] += count
        return copy

    def moved_to(self, owner: Node) -> Graph:
        """Return the graph, now inside of a node."""
        self.owner = owner
        return self

    def register(self) -> None:
        """Give handles to the graph, its nodes, and all inside, so that the program can name them."""
        objects, new_handle = state.machine.objects, state.machine.new_handle
        if not self.handle:
            self.handle = new_handle()
            objects[self.handle] = self
        for node in self.nodes:
            if not node.handle:
                node.handle = new_handle()
                objects[node.handle] = node
                for inner in node.work.graphs:
                    inner.register()

    def destroy(self) -> None:
        """End the graph and all inside: handles, references, claims on memory."""
        for node in self.nodes:
            unregister(node)
        state.machine.objects.pop(self.handle, None)
        for condition in self.conditions:
            state.machine.conditions.pop(condition.handle, None)
        for user_object, count in self.user_objects.items():
            user_object.release(count)
        self.user_objects.clear()


def unregister(node: Node) -> None:
    """End a node's handle, what it claims, and the graphs inside."""
    state.machine.objects.pop(node.handle, None)
    for slot in node.work.slots:
        if node.kind is NodeType.MEM_FREE:
            slot.freed_in.discard(node.graph)
        state.machine.graph_memory.drop(slot)
    for condition in state.machine.conditions.values():
        if condition.node is node:
            condition.node = None  # another node may have it
    for inner in node.work.graphs:
        inner.destroy()
