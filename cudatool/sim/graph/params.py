"""The C structures that describe graph nodes, read into works and written from them (cuda.h, CUgraphNodeParams)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import Any, Final

from cudatool.sim import machine as state
from cudatool.sim.boxes import ARRAY, DEVICE, HOST, BoxSide, Memcpy3D, box_of
from cudatool.sim.graph.model import Graph, Node, NodeType, Work
from cudatool.sim.graph.nodes import (
    Allocate,
    BatchOfValues,
    ChildGraph,
    Conditional,
    Copy,
    Empty,
    Fill,
    Free,
    HostFunction,
    KernelNode,
    Operand,
    RecordEvent,
    WaitForEvent,
    memory_at,
)
from cudatool.sim.green import GreenContext
from cudatool.sim.kernels import Function
from cudatool.sim.launches import checked_launch
from cudatool.sim.machine import Context, current_context
from cudatool.sim.queue import EventState
from cudatool.sim.results import DriverError, Result
from cudatool.sim.transfers import CopyExtent
from cudatool.sim.values import BatchMemOp, batch, batch_ops_at

__all__ = [
    "BatchParams",
    "ChildParams",
    "HostParams",
    "KernelParams",
    "MemAllocParams",
    "Memcpy3D",
    "MemsetParams",
    "NodeParams",
    "_conditional_of",
    "allocation_of",
    "batch_of",
    "bodies_of",
    "call_of",
    "check_place",
    "child_of",
    "context_before",
    "context_of",
    "copy_of",
    "event_of",
    "fill_of",
    "flat_copy",
    "free_of",
    "kernel_of",
    "read",
    "read_work",
    "write_node_params",
    "write_params",
]


class KernelParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("func", c_size_t),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("sharedMemBytes", c_uint),
        ("kernelParams", c_size_t),
        ("extra", c_size_t),
        ("kern", c_size_t),
        ("ctx", c_size_t),
    )


class _MemcpyNodeParams(ctypes.Structure):
    _fields_ = (("flags", c_int), ("reserved", c_int), ("copyCtx", c_size_t), ("copyParams", Memcpy3D))


class MemsetParams(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS; version 1 ends before ``ctx``."""

    _fields_ = (
        ("dst", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("elementSize", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
        ("ctx", c_size_t),
    )


class HostParams(ctypes.Structure):
    """CUDA_HOST_NODE_PARAMS; version 1 ends before ``syncMode``."""

    _fields_ = (("fn", c_size_t), ("userData", c_size_t), ("syncMode", c_uint), ("ctx", c_size_t))


class ChildParams(ctypes.Structure):
    """CUDA_CHILD_GRAPH_NODE_PARAMS."""

    _fields_ = (("graph", c_size_t), ("ownership", c_int))


class _EventParams(ctypes.Structure):
    """CUDA_EVENT_RECORD_NODE_PARAMS, and CUDA_EVENT_WAIT_NODE_PARAMS, which ends before ``ctx``."""

    _fields_ = (("event", c_size_t), ("ctx", c_size_t))


class _PoolProps(ctypes.Structure):
    _fields_ = (
        ("allocType", c_int),
        ("handleTypes", c_int),
        ("location_type", c_int),
        ("location_id", c_int),
        ("win32SecurityAttributes", c_size_t),
        ("maxSize", c_size_t),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 54),
    )


class MemAllocParams(ctypes.Structure):
    """CUDA_MEM_ALLOC_NODE_PARAMS."""

    _fields_ = (
        ("poolProps", _PoolProps),
        ("accessDescs", c_size_t),
        ("accessDescCount", c_size_t),
        ("bytesize", c_size_t),
        ("dptr", c_uint64),
    )


class _ConditionalParams(ctypes.Structure):
    """CUDA_CONDITIONAL_NODE_PARAMS."""

    _fields_ = (
        ("handle", c_uint64),
        ("type", c_int),
        ("size", c_uint),
        ("phGraph_out", c_size_t),
        ("ctx", c_size_t),
    )


class BatchParams(ctypes.Structure):
    """CUDA_BATCH_MEM_OP_NODE_PARAMS."""

    _fields_ = (("ctx", c_size_t), ("count", c_uint), ("paramArray", c_size_t), ("flags", c_uint))


class _Union(ctypes.Union):
    _fields_ = (
        ("kernel", KernelParams),
        ("memcpy", _MemcpyNodeParams),
        ("memset", MemsetParams),
        ("host", HostParams),
        ("graph", ChildParams),
        ("event", _EventParams),
        ("alloc", MemAllocParams),
        ("free", c_uint64),
        ("batch", BatchParams),
        ("conditional", _ConditionalParams),
        ("asBytes", c_ubyte * 232),
    )


class NodeParams(ctypes.Structure):
    """CUgraphNodeParams."""

    _anonymous_ = ("u",)
    _fields_ = (("type", c_int), ("reserved0", c_int * 3), ("u", _Union), ("reserved2", ctypes.c_longlong))


assert tuple(map(ctypes.sizeof, (KernelParams, Memcpy3D, NodeParams))) == (72, 200, 256)

_PINNED, _MANAGED = 1, 2  # CUmemAllocationType
_LOCATION_DEVICE: Final = 1
_ACCESS_DESC_BYTES: Final = 12
_CLONE, _MOVE, _INVALID = 0, 1, -1  # CUgraphChildGraphNodeOwnership
_IF, _WHILE, _SWITCH = 0, 1, 2  # CUgraphConditionalNodeType


# ---- reading ----


def context_of(handle: int) -> Context:
    """Return the context that a node runs in: the one it names, or the current one."""
    if not handle:
        return current_context()
    found = state.machine.objects.get(handle)
    if not isinstance(found, Context | GreenContext):
        raise DriverError(Result.INVALID_HANDLE)
    return found.primary


def context_before(work: Work) -> Context:
    """Return the context of a copy or fill, which stays when its parameters are set."""
    return work.context if isinstance(work, Copy | Fill) else current_context()


def kernel_of(params: KernelParams, attributes: dict[int, bytes] | None = None) -> KernelNode:
    """Return what a kernel node does."""
    if params.kernelParams and params.extra:
        raise DriverError(Result.INVALID_VALUE, "kernelParams and extra cannot both be given")
    handle = params.func or params.kern
    if not handle:
        raise DriverError(Result.INVALID_VALUE, "a kernel node needs a kernel")
    # The context is "ignored if func is set", as the function of a module has one ("CUDA_KERNEL_NODE_PARAMS").
    context = state.machine.get(handle, Function).library.context or context_of(params.ctx)
    grid, block = tuple(params.grid), tuple(params.block)
    launch = checked_launch(handle, context, grid, block, params.sharedMemBytes, params.kernelParams, params.extra)
    kernel = KernelNode(launch, context, {})
    return kernel.with_attributes(attributes) if attributes else kernel


def copy_of(params: Memcpy3D, context: Context) -> Copy:
    """Return what a memcpy node does."""
    source, target = _operand(params.src, params.extent), _operand(params.dst, params.extent)
    copy = Copy(source, target, params.WidthInBytes, params.Height, params.Depth, context, bytes(params))
    copy.check()
    return copy


def _operand(side: BoxSide, extent: CopyExtent) -> Operand:
    box = box_of(side, extent)
    is_known = side.MemoryType in (DEVICE, ARRAY) or memory_at(box.address)[0] != ""
    return Operand(box.address, box.pitch, box.slice, side.MemoryType, is_known)


def flat_copy(target: int, source: int, size: int, context: Context) -> Copy:
    """Return what the memcpy node of a captured copy does."""
    params = Memcpy3D(WidthInBytes=size, Height=1, Depth=1)
    for side, address in ((params.src, source), (params.dst, target)):
        side.MemoryType = HOST if memory_at(address)[1] < 0 else DEVICE
        side.Host, side.Device = (address, 0) if side.MemoryType == HOST else (0, address)
    return copy_of(params, context)


def fill_of(params: MemsetParams, context: Context) -> Fill:
    """Return what a memset node does."""
    fill = Fill(params.dst, params.pitch, params.value, params.elementSize, params.width, params.height, context)
    fill.check()
    return fill


def call_of(function: int, data: int) -> HostFunction:
    """Return what a host node does."""
    if not function:
        raise DriverError(Result.INVALID_VALUE, "a host node needs a function")
    return HostFunction(function, data)


def event_of(handle: int) -> EventState:
    """Return the event of an event node."""
    found = state.machine.objects.get(handle)
    if not isinstance(found, EventState):
        raise DriverError(Result.INVALID_VALUE, f"{handle:#x} is not an event")
    return found


def child_of(params: ChildParams, parent: Graph) -> Callable[[Node], Work]:
    """Return what a child graph node does, as a function of the node, which will own the graph."""
    graph = state.machine.objects.get(params.graph)
    if not isinstance(graph, Graph) or graph is parent.outermost or params.ownership not in (_CLONE, _MOVE):
        raise DriverError(Result.INVALID_VALUE, "a child graph node needs another graph")
    if any(node.kind is NodeType.CONDITIONAL for node in graph.walk()):
        raise DriverError(Result.NOT_SUPPORTED, "a child graph cannot have conditional nodes")
    if params.ownership == _MOVE:
        if graph.owner is not None or graph.executables:
            raise DriverError(Result.INVALID_VALUE, "the graph is a child of another one, or has executable graphs")
        return lambda node: ChildGraph(graph.moved_to(node))
    if graph.has_memory_nodes:
        raise DriverError(Result.NOT_SUPPORTED, "a child graph with memory nodes must be moved to its parent")
    return lambda node: ChildGraph(graph.clone({}, node))


def allocation_of(params: MemAllocParams) -> Allocate:
    """Return what a memory allocation node does; its address is stored in `params`."""
    props = params.poolProps
    if not params.bytesize or props.handleTypes:
        raise DriverError(
            Result.INVALID_VALUE, "a memory allocation node needs a size, and handleTypes CU_MEM_HANDLE_TYPE_NONE"
        )
    if props.allocType not in (_PINNED, _MANAGED) or props.location_type != _LOCATION_DEVICE:
        raise DriverError(Result.NOT_SUPPORTED, "the software device allocates only device memory in graphs")
    machine = state.machine
    if params.accessDescCount > len(machine.devices) or (params.accessDescCount and not params.accessDescs):
        raise DriverError(Result.INVALID_VALUE, "more access descriptors than devices")
    device = machine.device(props.location_id)
    access = ctypes.string_at(params.accessDescs, params.accessDescCount * _ACCESS_DESC_BYTES)
    is_managed = props.allocType == _MANAGED
    slot = machine.graph_memory.reserve(params.bytesize, current_context(), device, is_managed=is_managed)
    params.dptr = slot.address
    return Allocate(slot, bytes(params), access)


def free_of(address: int, graph: Graph) -> Free:
    """Return what a memory free node of `graph` does.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE for what cuGraphAddMemFreeNode lists: an address of no allocation node, or one that is
        freed in this graph already; and for memory whose own graph frees it, or must not because another one does.
    """
    slot = state.machine.graph_memory.at(address)
    if slot is None:
        raise DriverError(Result.INVALID_VALUE, f"no node allocates memory at {address:#x}")
    own = {node.graph for node in graph.outermost.walk() if slot in node.work.slots and node.kind is NodeType.MEM_ALLOC}
    if graph in slot.freed_in or (own and slot.freed_in) or slot.is_freed_by_owner:
        raise DriverError(Result.INVALID_VALUE, f"another node already frees the memory at {address:#x}")
    slot.freed_in.add(graph)
    slot.is_freed_by_owner = bool(own)
    return Free(slot)


def _conditional_of(params: _ConditionalParams, graph: Graph) -> Callable[[Node], Work]:
    """Return what a conditional node does, as a function of the node, which will own the bodies.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE for a number of bodies that the type does not have, or a handle that is not of this
        graph or one it is inside of, or has a node already.
    """
    condition = state.machine.conditions.get(params.handle)
    allowed = {_IF: (1, 2), _WHILE: (1,), _SWITCH: range(1, 1 << 31)}.get(params.type, ())
    if condition is None or condition.node is not None or params.size not in allowed:
        raise DriverError(Result.INVALID_VALUE, "a conditional node needs a handle of its own and its type's bodies")
    outer: Graph | None = graph
    while outer is not None and outer is not condition.graph:
        outer = outer.owner.graph if outer.owner else None
    if outer is None:
        raise DriverError(Result.INVALID_VALUE, "the conditional handle belongs to another graph")
    context = context_of(params.ctx)

    def make(node: Node) -> Work:
        condition.node = node
        return Conditional(condition, params.type, tuple(Graph(node) for _ in range(params.size)), context)

    return make


def read(params: NodeParams, graph: Graph) -> Work | Callable[[Node], Work]:
    """Return what a CUgraphNodeParams describes. Out parameters of allocation nodes are stored in it."""
    if params.type == NodeType.GRAPH:
        return child_of(params.graph, graph)
    if params.type == NodeType.MEM_ALLOC:
        return allocation_of(params.alloc)
    if params.type == NodeType.MEM_FREE:
        return free_of(params.free, graph)
    if params.type == NodeType.CONDITIONAL:
        return _conditional_of(params.conditional, graph)
    return read_work(params)


def batch_of(params: BatchParams) -> BatchOfValues:
    """Return what a batch memory operation node does."""
    operations = batch_ops_at(params.paramArray, params.count)
    values = tuple(batch(operations, params.flags))
    return BatchOfValues(context_of(params.ctx), b"".join(map(bytes, operations)), values)


def read_work(params: NodeParams) -> Work:
    """Return what a CUgraphNodeParams describes that says all about a node, wherever it is."""
    kind = params.type
    if kind == NodeType.KERNEL:
        return kernel_of(params.kernel)
    if kind == NodeType.MEMCPY:
        return copy_of(params.memcpy.copyParams, context_of(params.memcpy.copyCtx))
    if kind == NodeType.MEMSET:
        return fill_of(params.memset, context_of(params.memset.ctx))
    if kind == NodeType.HOST:
        return call_of(params.host.fn, params.host.userData)
    if kind == NodeType.EMPTY:
        return Empty()
    if kind == NodeType.WAIT_EVENT:
        return WaitForEvent(event_of(params.event.event))
    if kind == NodeType.EVENT_RECORD:
        return RecordEvent(event_of(params.event.event))
    if kind == NodeType.BATCH_MEM_OP:
        return batch_of(params.batch)
    raise DriverError(Result.NOT_SUPPORTED, f"the software device has no graph nodes of type {kind}")


def check_place(graph: Graph, kind: int) -> None:
    """Fail if a node of type `kind` cannot be added to `graph`, because of what that is inside of."""
    if graph.owner is not None and kind in (NodeType.MEM_ALLOC, NodeType.MEM_FREE):
        raise DriverError(Result.NOT_SUPPORTED, "memory nodes cannot be added to a child graph")


# ---- writing ----


def write_params(node: Node, kind: NodeType, params: Any) -> None:
    """Fill in the structure of the node's type, which `kind` says it has.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE if the node is of another type.
    """
    work = node.work
    if work.kind is not kind:
        raise DriverError(Result.INVALID_VALUE, f"a {work.kind.name} node has no {kind.name} parameters")
    if isinstance(work, KernelNode):
        _write_kernel(node, work, params)
    elif isinstance(work, Copy):
        ctypes.memmove(ctypes.addressof(params), work.params, len(work.params))
    elif isinstance(work, Fill):
        params.dst, params.pitch, params.value, params.elementSize = work.address, work.pitch, work.value, work.element
        params.width, params.height = work.width, work.height
    elif isinstance(work, HostFunction):
        params.fn, params.userData = work.function, work.data
    elif isinstance(work, ChildGraph):
        params.graph, params.ownership = work.graph.handle, _INVALID
    elif isinstance(work, RecordEvent | WaitForEvent):
        params.event = work.event.handle
    elif isinstance(work, Allocate):
        node.kept = ctypes.create_string_buffer(work.access, max(len(work.access), 1))
        ctypes.memmove(ctypes.addressof(params), work.params, len(work.params))
        params.accessDescs = ctypes.addressof(node.kept) if work.access else 0
    elif isinstance(work, BatchOfValues):
        node.kept = ctypes.create_string_buffer(work.operations, max(len(work.operations), 1))
        params.ctx, params.count = work.context.handle, len(work.operations) // ctypes.sizeof(BatchMemOp)
        params.paramArray, params.flags = ctypes.addressof(node.kept), 0
    elif isinstance(work, Conditional):
        params.handle, params.type, params.size = work.condition.handle, work.type, len(work.bodies)
        params.phGraph_out, params.ctx = bodies_of(node, work), work.context.handle


def bodies_of(node: Node, work: Conditional) -> int:
    """Return the address of the handles of a conditional node's bodies, which is the node's."""
    node.kept = (c_size_t * len(work.bodies))(*(body.handle for body in work.bodies))
    return ctypes.addressof(node.kept)


def _write_kernel(node: Node, work: KernelNode, params: KernelParams) -> None:
    launch = work.launch
    start = launch.address
    node.kept = (c_void_p * max(len(launch.kernel.params), 1))(*(start + p.offset for p in launch.kernel.params))
    params.func = params.kern = launch.function.handle
    params.grid[:], params.block[:] = launch.grid, launch.block
    params.sharedMemBytes = launch.shared
    params.kernelParams, params.extra = ctypes.addressof(node.kept), 0
    params.ctx = work.context.handle


def write_node_params(node: Node, params: NodeParams) -> None:
    """Fill in a CUgraphNodeParams."""
    ctypes.memset(ctypes.addressof(params), 0, ctypes.sizeof(params))
    work = node.work
    params.type = work.kind
    part = {
        NodeType.KERNEL: params.kernel,
        NodeType.MEMCPY: params.memcpy.copyParams,
        NodeType.MEMSET: params.memset,
        NodeType.HOST: params.host,
        NodeType.GRAPH: params.graph,
        NodeType.WAIT_EVENT: params.event,
        NodeType.EVENT_RECORD: params.event,
        NodeType.MEM_ALLOC: params.alloc,
        NodeType.BATCH_MEM_OP: params.batch,
        NodeType.CONDITIONAL: params.conditional,
    }.get(work.kind)
    if part is not None:
        write_params(node, work.kind, part)
    if isinstance(work, Copy):
        params.memcpy.copyCtx = work.context.handle
    elif isinstance(work, Fill):
        params.memset.ctx = work.context.handle
    elif isinstance(work, RecordEvent):
        params.event.ctx = work.event.context.handle
    elif isinstance(work, Free):
        params.free = work.slot.address
