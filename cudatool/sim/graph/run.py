"""Executable graphs: made from a graph, updated from another, launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from cudatool.loading.late_dataclasses import dataclass, field, replace
from cudatool.sim import abi, signals
from cudatool.sim import machine as state
from cudatool.sim.graph.model import Condition, Graph, Node, NodeType, Update, Work
from cudatool.sim.graph.nodes import Conditional, Copy, Fill, KernelNode
from cudatool.sim.queue import Operation, StreamState
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.graph.allocations import Slot
    from cudatool.sim.machine import Context
    from cudatool.sim.values import Value

__all__ = [
    "AUTO_FREE",
    "DEVICE_LAUNCH",
    "UPLOAD",
    "USE_NODE_PRIORITY",
    "GraphExec",
    "GraphRun",
    "InstantiateError",
    "Instantiation",
    "Mismatch",
]

AUTO_FREE, UPLOAD, DEVICE_LAUNCH, USE_NODE_PRIORITY = 1, 2, 4, 8  # CUDA_GRAPH_INSTANTIATE_FLAG_*
_CAN_BE_DISABLED: Final = (NodeType.KERNEL, NodeType.MEMCPY, NodeType.MEMSET)
_IN_BODIES: Final = (*_CAN_BE_DISABLED, NodeType.EMPTY, NodeType.GRAPH, NodeType.CONDITIONAL)
_PROGRAMMATIC_PORT: Final = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC: until the kernel lets others begin
_PRIORITY: Final = 8  # CU_LAUNCH_ATTRIBUTE_PRIORITY


class Instantiation:
    """CUgraphInstantiateResult."""

    SUCCESS, ERROR, INVALID_STRUCTURE, OPERATION_NOT_SUPPORTED, MULTIPLE_CONTEXTS, CONDITION_UNUSED = range(6)


class InstantiateError(DriverError):
    """A graph cannot be instantiated: `reason` is a CUgraphInstantiateResult, `node` the one it is about."""

    def __init__(
        self, reason: int, message: str, node: Node | None = None, result: Result = Result.INVALID_VALUE
    ) -> None:
        super().__init__(result, message)
        self.reason = reason
        self.node = node


class Mismatch(DriverError):
    """A graph cannot update an executable one: why, at which of its nodes, and from which dependency of that."""

    def __init__(self, reason: Update, node: Node | None = None, source: Node | None = None) -> None:
        words = reason.name.lower().replace("_", " ")
        super().__init__(Result.GRAPH_EXEC_UPDATE_FAILURE, f"the graph does not fit the executable one: {words}")
        self.reason = reason
        self.node = node
        self.source = source


class GraphRun:
    """One launch of an executable graph: what its nodes need to enqueue their operations.

    `values` are those of the conditions, `numbers` those of the nodes, and `disabled` does nothing this time.
    """

    def __init__(
        self,
        stream: StreamState,
        begin: Operation,
        values: dict[Condition, int],
        numbers: dict[Node, int],
        disabled: frozenset[Node],
    ) -> None:
        self._stream = stream
        self._begin = begin
        self.values = values
        self._numbers = numbers
        self._disabled = disabled
        self._node = 0  # the number of the one that adds its operations now
        self._copies: list[Operation] = []
        self._drops_copies = False

    def add(
        self,
        kind: str,
        name: str,
        after: Iterable[Operation],
        *,
        run: Callable[[Operation], None] | None = None,
        cost: int = 0,
        engine: str = "",
        context: Context | None = None,
        footprint: Iterable[tuple[int, int, int]] = (),
        host_memory: Iterable[tuple[int, int]] = (),
        value: Value | None = None,
    ) -> Operation:
        """Add an operation that is ordered after `after` alone."""
        stream = self._stream
        if context is not None and context is not stream.context:
            stream = context.legacy_stream  # only says where it runs: it takes no place in a stream
        operation = Operation(stream, kind, name, self._begin.correlation)
        operation.launch, operation.node = self._begin, self._node
        operation.run = run
        operation.footprint = list(footprint)
        operation.host_memory = list(host_memory)
        if value is not None:
            value.assign(operation)
        state.machine.scheduler.add(operation, cost=cost, engine=engine, after=after)
        if value is not None:
            value.added(operation)
        if kind == "memcpy":
            self._copies.append(operation)
            if self._drops_copies:
                state.machine.scheduler.drop([operation])
        return operation

    def drop_copies(self) -> None:
        """Leave out the copies of this launch, also those in bodies of conditional nodes that have not begun."""
        self._drops_copies = True
        state.machine.scheduler.drop(self._copies)

    def enqueue(self, graph: Graph, after: list[Operation]) -> list[Operation]:
        """Add all nodes of a graph after `after`, and return the operations that nothing in the graph depends on."""
        done: dict[Node, Operation] = {}
        for node in graph.ordered():
            earlier = [done[dependency] for dependency in node.dependencies] or after
            self._node = self._numbers[node]
            if node in self._disabled:
                done[node] = self.add("graph", "disabled node", earlier)
            else:
                done[node] = node.work.enqueue(self, earlier)
        return [done[node] for node in graph.ends] or after

    def with_conditions(self, work: Callable[[Operation], None]) -> Callable[[Operation], None]:
        """Return `work` with the conditions' words holding this launch's values while it runs."""
        if not self.values:
            return work

        def run(operation: Operation) -> None:
            if state.machine.tape is not None:
                state.machine.tape.refuse("a graph with conditional nodes decides what runs when it runs")
            for condition, value in self.values.items():
                condition.value.value = value
            work(operation)
            for condition in self.values:
                self.values[condition] = condition.value.value

        return run


class GraphExec:
    """An executable graph.

    It has a copy of the graph, made when it was instantiated. The program names the nodes of the copy by those of the
    original (`_twins`).
    """

    def __init__(self, source: Graph, flags: int) -> None:
        _check_instantiable(source, flags)
        self.flags = flags
        self.handle = state.machine.new_handle()
        self._source = source
        self._twins: dict[Node, Node] = {}
        self._graph = source.clone(self._twins)
        self._numbers = {node: number for number, node in enumerate(self._graph.walk(), 1)}
        self._disabled: set[Node] = set()
        self._values: dict[Condition, int] = {}
        self._find_conditions()
        self._last: Operation | None = None  # the end of the latest launch
        self._leaving: list[Callable[[], None]] = []  # what ends when all launches that need it are over
        source.executables += 1
        state.machine.objects[self.handle] = self

    @property
    def id(self) -> int:
        """A number unique among graphs and executable ones."""
        return self._graph.id

    @property
    def source(self) -> Graph:
        """The graph that it was made of."""
        return self._source

    def nodes(self) -> Iterator[tuple[int, Node, bool]]:
        """Yield all nodes, those of graphs inside too, with their numbers, and whether they are on."""
        for node, number in self._numbers.items():
            yield number, node, node not in self._disabled

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs of numbers of nodes that are ordered directly.

        A node that contains graphs comes after them, and they after what it depends on. The nodes of a loop's body
        are in one line, because its rounds order each of them with all.
        """
        yield from self._edges(self._graph, [])[0]

    def _edges(self, graph: Graph, after: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
        """Return the edges of `graph` after the nodes `after`, and the nodes that it ends with."""
        edges: list[tuple[int, int]] = []
        for node in graph.ordered():
            number = self._numbers[node]
            earlier = [self._numbers[dependency] for dependency in dict.fromkeys(_before(node))] or after
            ends = list(earlier)
            for inner in node.work.graphs:
                inside, inner_ends = self._edges(inner, earlier)
                if isinstance(node.work, Conditional) and node.work.is_loop:
                    line = list(self._in_order(inner))
                    inside, inner_ends = [*inside, *pairwise(line)], line[-1:]
                edges += inside
                ends += inner_ends
            edges += [(end, number) for end in dict.fromkeys(ends)]
        return edges, [self._numbers[node] for node in graph.ends] or after

    def _in_order(self, graph: Graph) -> Iterator[int]:
        """Yield the numbers of all nodes of `graph`, each after what it depends on."""
        for node in graph.ordered():
            for inner in node.work.graphs:
                yield from self._in_order(inner)
            yield self._numbers[node]

    # ---- launching ----

    def upload(self, stream: StreamState) -> None:
        """Map memory to the addresses of its allocations, in stream order."""
        self._back_memory()
        operation = Operation(stream, "graph", "cuGraphUpload", abi.call.correlation)
        state.machine.scheduler.enqueue(operation, cost=0, after=[self._last] if self._last else [])

    def launch(self, stream: StreamState) -> None:
        """Enqueue all nodes, after the work in the stream and earlier launches.

        Raises
        ------
        DriverError
            CUDA_ERROR_INVALID_VALUE if it would allocate what an earlier launch left unfreed, or free what is not
            allocated. CUDA_ERROR_OUT_OF_MEMORY. Nothing is enqueued then.
        """
        scheduler = state.machine.scheduler
        unfreed = self._check_memory()
        self._back_memory()
        for slot in unfreed:
            self._free(slot, stream)
        begin = Operation(stream, "graph", "cuGraphLaunch", abi.call.correlation)
        begin.launch = begin
        values = self._values

        def assign_defaults(_: Operation) -> None:
            values.update({c: c.default for c in values if c.default is not None})

        begin.run = assign_defaults
        scheduler.enqueue(begin, cost=0, after=[self._last] if self._last else [])
        run = GraphRun(stream, begin, values, self._numbers, frozenset(self._disabled))
        ends = run.enqueue(self._graph, [begin])
        end = Operation(stream, "graph_end", "cuGraphLaunch", abi.call.correlation)
        end.launch, end.run = begin, self._ended
        scheduler.enqueue(end, cost=0, after=ends)
        self._last = end
        if any(isinstance(node.work, Copy) and node.work.is_pageable for node in self._graph.walk()):
            try:
                scheduler.wait(end)  # it is not known how long such memory lives (see :mod:`cudatool.sim.transfers`)
            except signals.Interrupted:
                run.drop_copies()
                raise

    def _ended(self, operation: Operation) -> None:
        with abi.lock:
            if operation is self._last:
                leaving, self._leaving = self._leaving, []
                for leave in leaving:
                    leave()

    def _leave(self, leave: Callable[[], None]) -> None:
        """Call `leave` when no launch is pending."""
        if self._last is None or self._last.done:
            leave()
        else:
            self._leaving.append(leave)

    def destroy(self) -> None:
        """Destroy it when its launches are done (cuGraphExecDestroy)."""
        del state.machine.objects[self.handle]
        self._source.executables -= 1
        self._leave(self._graph.destroy)

    # ---- memory ----

    def _check_memory(self) -> list[Slot]:
        """Return the slots that are freed automatically before a launch."""
        unfreed, own = [], set()
        for node in self._graph.walk():
            for slot in node.work.slots:
                if node.kind is NodeType.MEM_ALLOC:
                    own.add(slot)
                    if slot.is_unfreed:
                        unfreed.append(slot)
                elif slot not in own and not slot.is_unfreed:
                    raise DriverError(Result.INVALID_VALUE, f"the memory at {slot.address:#x} is not allocated")
        if unfreed and not self.flags & AUTO_FREE:
            raise DriverError(
                Result.INVALID_VALUE, f"the memory at {unfreed[0].address:#x} of an earlier launch was not freed"
            )
        return unfreed

    def _back_memory(self) -> None:
        for node in self._graph.walk():
            if node.kind is NodeType.MEM_ALLOC:
                for slot in node.work.slots:
                    state.machine.graph_memory.back(slot)

    @staticmethod
    def _free(slot: Slot, stream: StreamState) -> None:
        memory = state.machine.graph_memory
        memory.will_free(slot.address)

        def free(_: Operation) -> None:
            with abi.lock:
                memory.release(slot)

        operation = Operation(stream, "free", "cuGraphLaunch", abi.call.correlation)
        operation.run, operation.footprint = free, [(slot.address, slot.size, 0)]
        state.machine.scheduler.enqueue(operation, cost=0)

    # ---- changing ----

    def work_of(self, node: Node) -> Work:
        """Return what a node of the original graph does here."""
        return self._twin(node).work

    def set_work(self, node: Node, work: Work) -> None:
        """Let a node do something else in future launches. Fails with CUDA_ERROR_INVALID_VALUE if it cannot."""
        twin = self._twin(node)
        if twin.kind is not work.kind:
            raise DriverError(Result.INVALID_VALUE, f"{work.kind.name} parameters for a {twin.kind.name} node")
        if isinstance(work, Copy) and isinstance(twin.work, Copy) and not (work.is_flat and twin.work.is_flat):
            raise DriverError(Result.INVALID_VALUE, "only one-dimensional copies of an executable graph can be updated")
        if twin.work.update_to(work) is not Update.SUCCESS:
            raise DriverError(Result.INVALID_VALUE, "the node of an executable graph cannot change to that")
        twin.work = work

    def set_child(self, node: Node, graph: Graph) -> None:
        """Let the graph inside a child graph node have the parameters of the nodes of `graph`."""
        twin = self._twin(node)
        if twin.kind is not NodeType.GRAPH:
            raise DriverError(Result.INVALID_VALUE, f"a {twin.kind.name} node has no child graph")
        try:
            self._update(_pairs(twin.work.graphs[0], graph))
        except Mismatch as error:
            raise DriverError(Result.INVALID_VALUE, str(error)) from error

    def update(self, graph: Graph) -> None:
        """Take all parameters from `graph`, which has the same shape. Fails with :class:`Mismatch`, then unchanged."""
        self._update(_pairs(self._graph, graph))

    def _update(self, pairs: _Pairs) -> None:
        for mine, new in pairs.nodes:
            reason = mine.work.update_to(new.work)
            if (
                reason is Update.SUCCESS
                and self.flags & USE_NODE_PRIORITY
                and isinstance(mine.work, KernelNode)
                and isinstance(new.work, KernelNode)
                and mine.work.attribute(_PRIORITY) != new.work.attribute(_PRIORITY)
            ):
                reason = Update.ATTRIBUTES_CHANGED
            if reason is not Update.SUCCESS:
                raise Mismatch(reason, new)
        for mine, new in pairs.nodes:
            if isinstance(mine.work, Conditional) and isinstance(new.work, Conditional):
                mine.work = replace(mine.work, condition=new.work.condition)
            elif not mine.work.graphs:
                mine.work, mine.added_by = new.work, new.added_by
        self._find_conditions()
        for own, other in pairs.graphs:
            before, own.user_objects = own.user_objects, other.user_objects.copy()
            for user_object, count in own.user_objects.items():
                user_object.retain(count)
            for user_object, count in before.items():
                self._leave(partial(user_object.release, count))

    def enable(self, node: Node, *, enabled: bool) -> None:
        """Switch a node on or off for future launches."""
        twin = self._switchable(node)
        if enabled:
            self._disabled.discard(twin)
        else:
            self._disabled.add(twin)

    def is_enabled(self, node: Node) -> bool:
        """Return whether a node is on."""
        return self._switchable(node) not in self._disabled

    def _switchable(self, node: Node) -> Node:
        twin = self._twin(node)
        if twin.kind not in _CAN_BE_DISABLED:
            raise DriverError(Result.INVALID_VALUE, f"a {twin.kind.name} node cannot be switched off")
        return twin

    def _twin(self, node: Node) -> Node:
        found = self._twins.get(node)
        if found is None:
            raise DriverError(Result.INVALID_VALUE, "the executable graph was not made from the graph of that node")
        return found

    def _find_conditions(self) -> None:
        """Keep a value for each condition. A launch keeps the mapping that was there when it was enqueued."""
        works = [node.work for node in self._graph.walk()]
        self._values = {w.condition: self._values.get(w.condition, 0) for w in works if isinstance(w, Conditional)}


def _check_instantiable(graph: Graph, flags: int) -> None:
    """Fail with :class:`InstantiateError` if no executable graph can be made of `graph`."""
    if flags & ~15 or (flags & DEVICE_LAUNCH and flags & AUTO_FREE):
        raise InstantiateError(Instantiation.ERROR, f"{flags} are not flags of cuGraphInstantiate")
    if graph.executables and graph.has_memory_nodes:
        text = "a graph with memory nodes has an executable graph already"
        raise InstantiateError(Instantiation.ERROR, text, result=Result.NOT_SUPPORTED)  # as an H200 answers
    for inner in graph.graphs():
        if inner.is_capturing:
            raise InstantiateError(Instantiation.ERROR, "a stream captures into the graph; end the capture first")
        cycle = inner.find_cycle()
        if cycle is not None:
            raise InstantiateError(Instantiation.INVALID_STRUCTURE, "the graph has a cycle", cycle)
        if any(condition.node is None for condition in inner.conditions):
            raise InstantiateError(Instantiation.CONDITION_UNUSED, "no node uses a conditional handle of the graph")
    for node in graph.walk():
        if isinstance(node.work, Conditional):
            _check_bodies(node.work)
    if flags & DEVICE_LAUNCH:
        _check_device_launch(graph)


def _check_bodies(work: Conditional) -> None:
    """Check what CUDA_CONDITIONAL_NODE_PARAMS says of the graphs of a conditional node."""
    for node in (node for body in work.bodies for node in body.walk()):
        if node.kind not in _IN_BODIES:
            message = f"a {node.kind.name} node cannot be in the body of a conditional node"
            raise InstantiateError(Instantiation.OPERATION_NOT_SUPPORTED, message, node)


def _check_device_launch(graph: Graph) -> None:
    """Check what cuGraphInstantiate says of graphs that can be launched from the device."""
    contexts = set()
    for node in graph.walk():
        if isinstance(node.work, KernelNode | Copy | Fill):
            contexts.add(node.work.context)
        elif node.kind is not NodeType.GRAPH:
            message = f"a {node.kind.name} node cannot be in a graph for device launch"
            raise InstantiateError(Instantiation.OPERATION_NOT_SUPPORTED, message, node)
        if len(contexts) > 1:
            message = "a graph for device launch is in one context"
            raise InstantiateError(Instantiation.MULTIPLE_CONTEXTS, message, node)
    if not contexts:
        raise InstantiateError(Instantiation.ERROR, "a graph for device launch needs a kernel, memcpy or memset node")


@dataclass()
class _Pairs:
    """What corresponds to what in an executable graph and a graph that is to update it."""

    graphs: list[tuple[Graph, Graph]] = field(default_factory=list)
    nodes: list[tuple[Node, Node]] = field(default_factory=list)


def _pairs(own: Graph, new: Graph) -> _Pairs:
    """Pair the nodes of two graphs, from the last ones on against the edges (cuGraphExecUpdate)."""
    pairs = _Pairs()
    _pair(own, new, pairs)
    return pairs


def _pair(own: Graph, new: Graph, pairs: _Pairs) -> None:
    if len(own.nodes) != len(new.nodes):
        raise Mismatch(Update.TOPOLOGY_CHANGED)
    if len(own.ends) != len(new.ends):
        raise Mismatch(Update.TOPOLOGY_CHANGED, new.ends[-1] if len(new.ends) > len(own.ends) else None)
    pairs.graphs.append((own, new))
    partners: dict[Node, Node] = {}  # both ways
    waiting = list(zip(own.ends, new.ends, strict=True))
    for mine, other in waiting:
        partners[mine], partners[other] = other, mine
    for mine, other in waiting:  # grows while it is read
        if mine.kind is not other.kind:
            raise Mismatch(Update.NODE_TYPE_CHANGED, other)
        if list(mine.dependencies.values()) != list(other.dependencies.values()):
            raise Mismatch(Update.TOPOLOGY_CHANGED, other)
        if len(mine.work.graphs) != len(other.work.graphs):
            raise Mismatch(Update.PARAMETERS_CHANGED, other)
        pairs.nodes.append((mine, other))
        for source, other_source in zip(mine.dependencies, other.dependencies, strict=True):
            if source not in partners and other_source not in partners:
                partners[source], partners[other_source] = other_source, source
                waiting.append((source, other_source))
            elif partners.get(source) is not other_source:
                raise Mismatch(Update.TOPOLOGY_CHANGED, other, other_source)
        for inner, other_inner in zip(mine.work.graphs, other.work.graphs, strict=True):
            _pair(inner, other_inner, pairs)
    if len(waiting) != len(new.nodes):
        raise Mismatch(Update.TOPOLOGY_CHANGED)  # the rest is a cycle


def _before(node: Node) -> Iterator[Node]:
    """Yield the nodes after whose end a node comes. Here that is all of its dependencies.

    On a GPU a kernel may begin early: its edge names a port of the kernel before it, and it has no griddepcontrol.wait.
    """
    for dependency, data in node.dependencies.items():
        early = data[0] and not (isinstance(node.work, KernelNode) and node.work.launch.function.orders_others[0])
        if early and data[0] == _PROGRAMMATIC_PORT:
            assert isinstance(dependency.work, KernelNode)  # others have no such port
            early = dependency.work.launch.function.orders_others[1]
        if early:
            yield from _before(dependency)
        else:
            yield dependency
