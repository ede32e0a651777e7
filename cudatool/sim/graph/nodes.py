"""What each type of graph node does when its graph is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cudatool.loading.late_dataclasses import dataclass, replace
from cudatool.sim import abi, profile
from cudatool.sim import machine as state
from cudatool.sim.graph.model import Condition, Graph, Node, NodeType, Update
from cudatool.sim.launch_config import COOPERATIVE
from cudatool.sim.queue import EventState, Operation
from cudatool.sim.results import DriverError, Result
from cudatool.sim.transfers import fill_row

if TYPE_CHECKING:
    from cudatool.sim.graph.allocations import Slot
    from cudatool.sim.graph.run import GraphRun
    from cudatool.sim.launches import Launch
    from cudatool.sim.machine import Context
    from cudatool.sim.values import Value

__all__ = [
    "Allocate",
    "BatchOfValues",
    "ChildGraph",
    "Conditional",
    "Copy",
    "Empty",
    "Fill",
    "Free",
    "HostFunction",
    "KernelNode",
    "Operand",
    "RecordEvent",
    "WaitForEvent",
    "memory_at",
]

_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE
_ARRAY: Final = 3  # CU_MEMORYTYPE_ARRAY
_IF, _WHILE, _SWITCH = 0, 1, 2  # CUgraphConditionalNodeType
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_READ: Final = 1  # flags of Operation.footprint
_WRITE: Final = 2


class _Leaf:
    """A work without graphs or memory of its own, which copies of a node can share."""

    kind: ClassVar[NodeType]

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return ()

    @property
    def slots(self) -> tuple[Slot, ...]:
        return ()

    def clone(self, node: Node, nodes: dict[Node, Node]) -> Any:
        return self

    def update_to(self, new: Any) -> Update:
        return Update.SUCCESS

    def describe(self) -> str:
        return self.kind.name


@dataclass(frozen=True, eq=False)
class KernelNode(_Leaf):
    """Launches a kernel. `attributes` are CUlaunchAttributeValue by CUlaunchAttributeID."""

    launch: Launch
    context: Context
    attributes: dict[int, bytes]
    kind = NodeType.KERNEL

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        launch = self.launch
        work = run.with_conditions(launch)
        return run.add(
            "kernel",
            launch.function.name,
            after,
            run=work,
            cost=launch.cost,
            context=self.context,
            host_memory=launch.host_memory(),
        )

    def update_to(self, new: KernelNode) -> Update:
        if new.context is not self.context:
            return Update.UNSUPPORTED_FUNCTION_CHANGE
        same = self.attribute(COOPERATIVE) == new.attribute(COOPERATIVE)
        return Update.SUCCESS if same else Update.ATTRIBUTES_CHANGED

    def with_attributes(self, attributes: dict[int, bytes]) -> KernelNode:
        """Return the same with other attributes, of which one makes the launch a cooperative one."""
        kernel = replace(self, attributes=attributes)
        launch = self.launch.like(cooperative=False)
        return replace(kernel, launch=launch.cooperating() if kernel.attribute(COOPERATIVE) else launch)

    def attribute(self, number: int) -> int:
        """Return an attribute that is one 32-bit number, 0 if it is not set."""
        return int.from_bytes(self.attributes.get(number, b"")[:4], "little", signed=True)

    def describe(self) -> str:
        return f"KERNEL {self.launch.function.name} grid {self.launch.grid} block {self.launch.block}"


@dataclass(frozen=True)
class Operand:
    """One side of a copy: rows of bytes, `pitch` apart, in slices, `slice` apart.

    `memory` is its CUmemorytype, and `is_known` whether the driver knew the memory when the node was made; it cannot
    know how long other memory lives.
    """

    address: int
    pitch: int
    slice: int
    memory: int
    is_known: bool


@dataclass(frozen=True, eq=False)
class Copy(_Leaf):
    """Copies a box of bytes. `params` is the CUDA_MEMCPY3D that says so."""

    source: Operand
    target: Operand
    width: int
    height: int
    depth: int
    context: Context
    params: bytes
    kind = NodeType.MEMCPY

    @property
    def is_flat(self) -> bool:
        """Whether it is one-dimensional."""
        return self.height == self.depth == 1

    @property
    def is_pageable(self) -> bool:
        """Whether a side is memory that the driver does not know."""
        return not (self.source.is_known and self.target.is_known)

    def check(self) -> None:
        """Fail with CUDA_ERROR_INVALID_VALUE if it is not a copy that can be made."""
        if not self.width * self.height * self.depth:
            raise DriverError(Result.INVALID_VALUE, "a memcpy node must copy something")
        for operand in (self.source, self.target):
            if not operand.address:
                raise DriverError(Result.INVALID_VALUE, "a memcpy node needs two addresses")
            if (self.height > 1 or self.depth > 1) and operand.pitch < self.width:
                raise DriverError(Result.INVALID_VALUE, f"the pitch {operand.pitch} is less than a row of {self.width}")
            if self.depth > 1 and operand.slice < self.height * operand.pitch:
                raise DriverError(Result.INVALID_VALUE, "the slices of a copy overlap")
            if operand.memory in (_DEVICE, _ARRAY):
                _check_reachable(operand.address, self.span(operand))

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        kinds = memory_at(self.source.address)[0], memory_at(self.target.address)[0]
        from_device, to_device = (kind not in ("", "host", "registered") for kind in kinds)
        engine = "" if to_device == from_device else "h2d" if to_device else "d2h"
        size = self.width * self.height * self.depth
        operation = run.add(
            "memcpy",
            "memcpy node",
            after,
            run=self._run,
            cost=profile.copy_cost(size, on_device=to_device and from_device),
            engine=engine,
            context=self.context,
            footprint=[(a, n, _READ) for a, n in self._runs(self.source)]
            + [(a, n, _WRITE) for a, n in self._runs(self.target)],
            host_memory=[(operand.address, self.span(operand)) for operand in (self.source, self.target)],
        )
        if kinds[0] in ("host", "registered"):
            operation.host_source = self.source.address, self.span(self.source)
        return operation

    def update_to(self, new: Copy) -> Update:
        changed = (
            (self.source.memory, self.target.memory) != (new.source.memory, new.target.memory)
            or memory_at(self.source.address)[1] != memory_at(new.source.address)[1]
            or memory_at(self.target.address)[1] != memory_at(new.target.address)[1]
            or (not self.is_flat and (self.width, self.height, self.depth) != (new.width, new.height, new.depth))
            or self.is_flat != new.is_flat
        )
        return Update.PARAMETERS_CHANGED if changed else Update.SUCCESS

    def describe(self) -> str:
        return f"MEMCPY {self.source.address:#x} -> {self.target.address:#x} {self.width}x{self.height}x{self.depth}"

    def span(self, operand: Operand) -> int:
        return (self.depth - 1) * operand.slice + (self.height - 1) * operand.pitch + self.width

    def _runs(self, operand: Operand) -> Iterator[tuple[int, int]]:
        """Yield address and size of the pieces without gaps."""
        for z in range(self.depth):
            start = operand.address + z * operand.slice
            if operand.pitch == self.width:
                yield start, self.height * self.width
            else:
                yield from ((start + y * operand.pitch, self.width) for y in range(self.height))

    def _rows(self, operand: Operand) -> Iterator[int]:
        """Yield the address of each row."""
        for z in range(self.depth):
            for y in range(self.height):
                yield operand.address + z * operand.slice + y * operand.pitch

    def _run(self, operation: Operation) -> None:
        machine = state.machine
        for operand in (self.source, self.target):
            if operand.is_known:
                _check_live(operand.address, self.span(operand), "memcpy")
        if machine.tape is not None:
            machine.tape.copying(operation, self._rows(self.target), self._rows(self.source), self.width)
        for to, origin in zip(self._rows(self.target), self._rows(self.source), strict=True):
            ctypes.memmove(to, origin, self.width)
        if machine.checkers is not None:
            rows = self._rows(self.target), self._rows(self.source)
            machine.checkers.copied(operation, *rows, self.width)


@dataclass(frozen=True, eq=False)
class Fill(_Leaf):
    """Sets rows of elements of 1, 2 or 4 bytes to a value."""

    address: int
    pitch: int
    value: int
    element: int
    width: int
    height: int
    context: Context
    kind = NodeType.MEMSET

    def check(self) -> None:
        """Fail with CUDA_ERROR_INVALID_VALUE if it cannot be done."""
        if self.element not in (1, 2, 4) or not self.width or not self.height:
            raise DriverError(Result.INVALID_VALUE, "a memset node sets elements of 1, 2 or 4 bytes, one at least")
        if self.address % self.element:
            raise DriverError(Result.INVALID_VALUE, f"{self.address:#x} is not aligned to {self.element} bytes")
        if self.height > 1 and (self.pitch < self.row or self.pitch % self.element):
            raise DriverError(Result.INVALID_VALUE, f"the pitch {self.pitch} does not fit rows of {self.row} bytes")
        _check_reachable(self.address, self.span)

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.width * self.element

    @property
    def span(self) -> int:
        return (self.height - 1) * self.pitch + self.row

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        return run.add(
            "memset",
            "memset node",
            after,
            run=self._run,
            cost=profile.memset_cost(self.row * self.height),
            context=self.context,
            footprint=[(self.address + y * self.pitch, self.row, _WRITE) for y in range(self.height)],
            host_memory=[(self.address, self.span)],
        )

    def update_to(self, new: Fill) -> Update:
        changed = (
            memory_at(self.address)[1] != memory_at(new.address)[1]
            or (self.height == 1) != (new.height == 1)
            or (
                self.height > 1
                and (self.width, self.height, self.element, self.pitch)
                != (new.width, new.height, new.element, new.pitch)
            )
        )
        return Update.PARAMETERS_CHANGED if changed else Update.SUCCESS

    def describe(self) -> str:
        return f"MEMSET {self.address:#x} {self.value:#x} {self.width}x{self.height} of {self.element}"

    def _run(self, operation: Operation) -> None:
        _check_live(self.address, self.span, "memset")
        checkers, tape = state.machine.checkers, state.machine.tape
        mask = (1 << 8 * self.element) - 1
        pattern = (self.value & mask).to_bytes(self.element, "little")
        if tape is not None:
            rows = range(self.address, self.address + self.height * self.pitch, self.pitch or 1)
            tape.filling(operation, rows if self.height > 1 else [self.address], pattern, self.row)
        starts = [self.address + y * self.pitch for y in range(self.height)]
        for start in starts:
            fill_row(start, self.row, pattern)
        if checkers is not None:
            checkers.filled(operation, starts, self.row)


@dataclass(frozen=True, eq=False)
class HostFunction(_Leaf):
    """Calls a function of the program."""

    function: int
    data: int
    kind = NodeType.HOST

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        function = _HostFunction(self.function)
        operation = run.add("host", "host node", after, run=lambda _: function(self.data), cost=5_000)
        state.machine.scheduler.run_soon(operation)
        return operation

    def describe(self) -> str:
        return f"HOST {self.function:#x}({self.data:#x})"


@dataclass(frozen=True, eq=False)
class Empty(_Leaf):
    """Does nothing but order others."""

    kind = NodeType.EMPTY

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        return run.add("graph", "empty node", after)


@dataclass(frozen=True, eq=False)
class BatchOfValues(_Leaf):
    """Writes values to memory and waits for values there, one after the other.

    `operations` are the CUstreamBatchMemOpParams that say so.
    """

    context: Context
    operations: bytes
    values: tuple[Value, ...]
    kind = NodeType.BATCH_MEM_OP

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        if not self.values:
            return run.add("graph", "batch memory operation node", after)
        for value in self.values:
            after = [run.add(value.kind, "batch memory operation node", after, context=self.context, value=value)]
        return after[0]

    def describe(self) -> str:
        return "BATCH_MEM_OP " + ", ".join(f"{value.name} {value.value} {value.address:#x}" for value in self.values)


@dataclass(frozen=True, eq=False)
class RecordEvent(_Leaf):
    """Records an event."""

    event: EventState
    kind = NodeType.EVENT_RECORD

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        record = run.add("record", "event record node", after)
        self.event.recorded, self.event.captured = record, None
        return record

    def describe(self) -> str:
        return f"EVENT_RECORD {self.event.handle:#x}"


@dataclass(frozen=True, eq=False)
class WaitForEvent(_Leaf):
    """Waits for the latest record of an event before the launch."""

    event: EventState
    kind = NodeType.WAIT_EVENT

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        recorded = self.event.recorded
        return run.add("wait", "event wait node", [*after, *([recorded] if recorded else [])])

    def describe(self) -> str:
        return f"WAIT_EVENT {self.event.handle:#x}"


@dataclass(frozen=True, eq=False)
class Allocate(_Leaf):
    """Allocates memory at the address of its slot. `params` is the CUDA_MEM_ALLOC_NODE_PARAMS that asked for it."""

    slot: Slot
    params: bytes
    access: bytes = b""  # the CUmemAccessDesc that it points to
    kind = NodeType.MEM_ALLOC

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.slot,)

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        state.machine.graph_memory.allocate(self.slot)
        whole = [(self.slot.address, self.slot.size, 0)]
        return run.add("alloc", "memory allocation node", after, footprint=whole)

    def update_to(self, new: Allocate) -> Update:
        return Update.SUCCESS if new.slot is self.slot else Update.NOT_SUPPORTED

    def describe(self) -> str:
        return f"MEM_ALLOC {self.slot.size} bytes at {self.slot.address:#x}"


@dataclass(frozen=True, eq=False)
class Free(_Leaf):
    """Frees what an allocation node, of this graph or another one, has allocated."""

    slot: Slot
    kind = NodeType.MEM_FREE

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (self.slot,)

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        memory = state.machine.graph_memory
        slot = memory.will_free(self.slot.address)

        def free(_: Operation) -> None:
            with abi.lock:
                memory.release(slot)

        whole = [(slot.address, slot.size, 0)]
        return run.add("free", "memory free node", after, run=free, footprint=whole)

    def update_to(self, new: Free) -> Update:
        return Update.SUCCESS if new.slot is self.slot else Update.NOT_SUPPORTED

    def describe(self) -> str:
        return f"MEM_FREE {self.slot.address:#x}"


@dataclass(frozen=True, eq=False)
class ChildGraph(_Leaf):
    """Runs a graph inside."""

    graph: Graph
    kind = NodeType.GRAPH

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return (self.graph,)

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        return run.add("graph", "child graph node", run.enqueue(self.graph, after))

    def clone(self, node: Node, nodes: dict[Node, Node]) -> ChildGraph:
        return ChildGraph(self.graph.clone(nodes, node))

    def describe(self) -> str:
        return f"GRAPH {self.graph.id}"


@dataclass(frozen=True, eq=False)
class Conditional(_Leaf):
    """Runs one of its bodies, or its body again and again, or none, by the value of a condition.

    What it will run is known only when it is executed, so that its operations are added then::

        decide  ->  operations of the body  [->  decide  ->  operations of the body ...]  ->  end
    """

    condition: Condition
    type: int  # CUgraphConditionalNodeType
    bodies: tuple[Graph, ...]
    context: Context
    kind = NodeType.CONDITIONAL

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return self.bodies

    @property
    def is_loop(self) -> bool:
        """Whether its body may run more than once in a launch."""
        return self.type == _WHILE

    def enqueue(self, run: GraphRun, after: list[Operation]) -> Operation:
        def decide(operation: Operation) -> None:
            body = self._choose(run.values[self.condition])
            if body is None:
                return
            with abi.lock:
                ends = run.enqueue(body, [operation])
                if self.type == _WHILE:
                    ends = [run.add("graph", "conditional node", ends, run=decide)]
                state.machine.scheduler.order(end, ends)

        first = run.add("graph", "conditional node", after, run=decide)
        end = run.add("graph", "end of conditional node", [first])
        return end

    def _choose(self, value: int) -> Graph | None:
        index = (0 if value else 1) if self.type in (_IF, _WHILE) else value
        return self.bodies[index] if index < len(self.bodies) else None

    def update_to(self, new: Conditional) -> Update:
        same = (self.type, len(self.bodies)) == (new.type, len(new.bodies))
        return Update.SUCCESS if same else Update.PARAMETERS_CHANGED

    def clone(self, node: Node, nodes: dict[Node, Node]) -> Conditional:
        return replace(self, bodies=tuple(body.clone(nodes, node) for body in self.bodies))

    def describe(self) -> str:
        kind = {_IF: "IF", _WHILE: "WHILE", _SWITCH: "SWITCH"}[self.type]
        return f"CONDITIONAL {kind} {self.condition.handle:#x}, bodies {', '.join(str(b.id) for b in self.bodies)}"


def memory_at(address: int) -> tuple[str, int]:
    """Return what kind of memory is at an address, and of which device: "" and -1 for memory unknown to the driver."""
    slot = state.machine.graph_memory.holding(address)
    if slot is not None:
        return "graph", slot.device.ordinal
    found = state.machine.virtual.mapping_at(address) or state.machine.allocations.holding(address)
    return ("", -1) if found is None else (found.kind, found.device)


def _check_reachable(address: int, size: int) -> None:
    """Fail with CUDA_ERROR_INVALID_VALUE for what is neither allocated nor will be by a graph."""
    if state.machine.graph_memory.holding(address, size) is None and state.machine.locate(address, size) is None:
        raise DriverError(Result.INVALID_VALUE, f"{size} bytes at {address:#x} are not device memory", address=address)


def _check_live(address: int, size: int, what: str) -> None:
    """Fail with CUDA_ERROR_ILLEGAL_ADDRESS if memory that the driver knew is gone."""
    try:
        found = state.machine.locate(address, size)
    except DriverError as error:
        raise DriverError(Result.ILLEGAL_ADDRESS, f"{what} node: {error}") from error
    if found is None:
        raise DriverError(Result.ILLEGAL_ADDRESS, f"{what} node accesses freed memory at {address:#x}")
