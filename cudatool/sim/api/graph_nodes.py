"""Driver entry points: adding nodes of each type to a graph, and their parameters ("Graph Management")."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_size_t, c_uint64
from typing import TypeVar

from cudatool.sim.abi import entry, write
from cudatool.sim.api.graph import add_node, edges_from, graph_object
from cudatool.sim.graph import params
from cudatool.sim.graph.model import Graph, Node, NodeType, Work
from cudatool.sim.graph.nodes import ChildGraph, Conditional, Empty, Free, KernelNode, RecordEvent, WaitForEvent
from cudatool.sim.graph.params import (
    BatchParams,
    HostParams,
    KernelParams,
    MemAllocParams,
    Memcpy3D,
    MemsetParams,
    NodeParams,
)
from cudatool.sim.results import DriverError, Result

__all__ = ["given", "new_work"]

_S = TypeVar("_S", bound=ctypes.Structure)


def given(address: int, structure: type[_S]) -> _S:
    """Return the structure at an address that the program gave; NULL is CUDA_ERROR_INVALID_VALUE."""
    if not address:
        raise DriverError(Result.INVALID_VALUE)
    return structure.from_address(address)


# ---- Adding ----


def _add(
    phGraphNode: int,
    hGraph: int,
    dependencies: int,
    count: int,
    kind: int,
    work: Callable[[Graph], Work | Callable[[Node], Work]],
    data: int = 0,
) -> Node:
    """Add the node that `work` describes, once everything else is known to be right."""
    graph = graph_object(hGraph, Graph)
    if not phGraphNode:
        raise DriverError(Result.INVALID_VALUE)
    edges = edges_from(graph, dependencies, data, count)
    params.check_place(graph, kind)
    node = add_node(graph, work(graph), edges)
    write(phGraphNode, c_size_t, node.handle)
    return node


@entry(
    "cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams)"
)
def cuGraphAddNode(
    phGraphNode: int, hGraph: int, dependencies: int, dependencyData: int, numDependencies: int, nodeParams: int
) -> None:
    what = given(nodeParams, NodeParams)
    node = _add(
        phGraphNode,
        hGraph,
        dependencies,
        numDependencies,
        what.type,
        lambda graph: params.read(what, graph),
        dependencyData,
    )
    if isinstance(node.work, Conditional):
        what.conditional.phGraph_out = params.bodies_of(node, node.work)


@entry(
    "cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams)"
)
def cuGraphAddKernelNode(
    phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, nodeParams: int
) -> None:
    what = given(nodeParams, KernelParams)
    kind = NodeType.KERNEL
    _add(phGraphNode, hGraph, dependencies, numDependencies, kind, lambda _: params.kernel_of(what))


@entry(
    "cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, const CUDA_MEMCPY3D *copyParams, CUcontext ctx)"
)
def cuGraphAddMemcpyNode(
    phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, copyParams: int, ctx: int
) -> None:
    what, context = given(copyParams, Memcpy3D), params.context_of(ctx)
    kind = NodeType.MEMCPY
    _add(phGraphNode, hGraph, dependencies, numDependencies, kind, lambda _: params.copy_of(what, context))


@entry(
    "cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)"
)
def cuGraphAddMemsetNode(
    phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, memsetParams: int, ctx: int
) -> None:
    what, context = given(memsetParams, MemsetParams), params.context_of(ctx)
    kind = NodeType.MEMSET
    _add(phGraphNode, hGraph, dependencies, numDependencies, kind, lambda _: params.fill_of(what, context))


@entry(
    "cuGraphAddBatchMemOpNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)"
)
def cuGraphAddBatchMemOpNode(
    phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, nodeParams: int
) -> None:
    what = given(nodeParams, BatchParams)
    kind = NodeType.BATCH_MEM_OP
    _add(phGraphNode, hGraph, dependencies, numDependencies, kind, lambda _: params.batch_of(what))


@entry(
    "cuGraphAddHostNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, const CUDA_HOST_NODE_PARAMS *nodeParams)"
)
def cuGraphAddHostNode(phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, nodeParams: int) -> None:
    what = given(nodeParams, HostParams)
    kind = NodeType.HOST
    _add(phGraphNode, hGraph, dependencies, numDependencies, kind, lambda _: params.call_of(what.fn, what.userData))


@entry(
    "cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, CUgraph childGraph)"
)
def cuGraphAddChildGraphNode(
    phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, childGraph: int
) -> None:
    what = params.ChildParams(childGraph, 0)
    kind = NodeType.GRAPH
    _add(phGraphNode, hGraph, dependencies, numDependencies, kind, lambda graph: params.child_of(what, graph))


@entry(
    "cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies)"
)
def cuGraphAddEmptyNode(phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int) -> None:
    _add(phGraphNode, hGraph, dependencies, numDependencies, NodeType.EMPTY, lambda _: Empty())


@entry(
    "cuGraphAddEventRecordNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, CUevent event)"
)
def cuGraphAddEventRecordNode(
    phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, event: int
) -> None:
    work = RecordEvent(params.event_of(event))
    _add(phGraphNode, hGraph, dependencies, numDependencies, NodeType.EVENT_RECORD, lambda _: work)


@entry(
    "cuGraphAddEventWaitNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, CUevent event)"
)
def cuGraphAddEventWaitNode(phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, event: int) -> None:
    work = WaitForEvent(params.event_of(event))
    _add(phGraphNode, hGraph, dependencies, numDependencies, NodeType.WAIT_EVENT, lambda _: work)


@entry(
    "cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)"
)
def cuGraphAddMemAllocNode(
    phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, nodeParams: int
) -> None:
    what = given(nodeParams, MemAllocParams)
    kind = NodeType.MEM_ALLOC
    _add(phGraphNode, hGraph, dependencies, numDependencies, kind, lambda _: params.allocation_of(what))


@entry(
    "cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, "
    "size_t numDependencies, CUdeviceptr dptr)"
)
def cuGraphAddMemFreeNode(phGraphNode: int, hGraph: int, dependencies: int, numDependencies: int, dptr: int) -> None:
    kind = NodeType.MEM_FREE
    _add(phGraphNode, hGraph, dependencies, numDependencies, kind, lambda graph: params.free_of(dptr, graph))


# ---- Parameters ----


def new_work(kind: int, before: Work, work: Callable[[], Work]) -> Work:
    """Return the work that is to take the place of the one `before`, which must be of the same type.

    Raises
    ------
    DriverError
        CUDA_ERROR_INVALID_VALUE for another type; CUDA_ERROR_NOT_SUPPORTED for one whose parameters cannot be set.
    """
    if before.kind != kind:
        raise DriverError(Result.INVALID_VALUE, f"parameters of type {kind} for a {before.kind.name} node")
    if kind in (NodeType.MEM_ALLOC, NodeType.MEM_FREE, NodeType.CONDITIONAL):
        raise DriverError(Result.NOT_SUPPORTED, f"the parameters of a {before.kind.name} node cannot be set")
    new = work()
    if isinstance(new, KernelNode) and isinstance(before, KernelNode):
        return new.with_attributes(before.attributes)
    return new


def _set(hNode: int, kind: NodeType, work: Callable[[], Work]) -> None:
    node = graph_object(hNode, Node)
    node.work = new_work(kind, node.work, work)


@entry("cuGraphNodeGetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)")
def cuGraphNodeGetParams(hNode: int, nodeParams: int) -> None:
    params.write_node_params(graph_object(hNode, Node), given(nodeParams, NodeParams))


@entry("cuGraphNodeSetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)")
def cuGraphNodeSetParams(hNode: int, nodeParams: int) -> None:
    node, what = graph_object(hNode, Node), given(nodeParams, NodeParams)
    if what.type == node.kind == NodeType.GRAPH:
        child = params.child_of(what.graph, node.graph)(node)
        for inner in node.work.graphs:
            inner.destroy()
        node.work = child
        node.graph.register()
        return
    node.work = new_work(what.type, node.work, lambda: params.read_work(what))


@entry("cuGraphKernelNodeGetParams(CUgraphNode hNode, CUDA_KERNEL_NODE_PARAMS *nodeParams)")
def cuGraphKernelNodeGetParams(hNode: int, nodeParams: int) -> None:
    params.write_params(graph_object(hNode, Node), NodeType.KERNEL, given(nodeParams, KernelParams))


@entry("cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)")
def cuGraphKernelNodeSetParams(hNode: int, nodeParams: int) -> None:
    what = given(nodeParams, KernelParams)
    _set(hNode, NodeType.KERNEL, lambda: params.kernel_of(what))


@entry("cuGraphMemcpyNodeGetParams(CUgraphNode hNode, CUDA_MEMCPY3D *nodeParams)")
def cuGraphMemcpyNodeGetParams(hNode: int, nodeParams: int) -> None:
    params.write_params(graph_object(hNode, Node), NodeType.MEMCPY, given(nodeParams, Memcpy3D))


@entry("cuGraphMemcpyNodeSetParams(CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams)")
def cuGraphMemcpyNodeSetParams(hNode: int, nodeParams: int) -> None:
    what, before = given(nodeParams, Memcpy3D), graph_object(hNode, Node).work
    _set(hNode, NodeType.MEMCPY, lambda: params.copy_of(what, params.context_before(before)))


@entry("cuGraphMemsetNodeGetParams(CUgraphNode hNode, CUDA_MEMSET_NODE_PARAMS *nodeParams)")
def cuGraphMemsetNodeGetParams(hNode: int, nodeParams: int) -> None:
    params.write_params(graph_object(hNode, Node), NodeType.MEMSET, given(nodeParams, MemsetParams))


@entry("cuGraphMemsetNodeSetParams(CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams)")
def cuGraphMemsetNodeSetParams(hNode: int, nodeParams: int) -> None:
    what, before = given(nodeParams, MemsetParams), graph_object(hNode, Node).work
    _set(hNode, NodeType.MEMSET, lambda: params.fill_of(what, params.context_before(before)))


@entry("cuGraphBatchMemOpNodeGetParams(CUgraphNode hNode, CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams_out)")
def cuGraphBatchMemOpNodeGetParams(hNode: int, nodeParams_out: int) -> None:
    params.write_params(graph_object(hNode, Node), NodeType.BATCH_MEM_OP, given(nodeParams_out, BatchParams))


@entry("cuGraphBatchMemOpNodeSetParams(CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)")
def cuGraphBatchMemOpNodeSetParams(hNode: int, nodeParams: int) -> None:
    what = given(nodeParams, BatchParams)
    _set(hNode, NodeType.BATCH_MEM_OP, lambda: params.batch_of(what))


@entry("cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)")
def cuGraphHostNodeGetParams(hNode: int, nodeParams: int) -> None:
    params.write_params(graph_object(hNode, Node), NodeType.HOST, given(nodeParams, HostParams))


@entry("cuGraphHostNodeSetParams(CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)")
def cuGraphHostNodeSetParams(hNode: int, nodeParams: int) -> None:
    what = given(nodeParams, HostParams)
    _set(hNode, NodeType.HOST, lambda: params.call_of(what.fn, what.userData))


@entry("cuGraphChildGraphNodeGetGraph(CUgraphNode hNode, CUgraph *phGraph)")
def cuGraphChildGraphNodeGetGraph(hNode: int, phGraph: int) -> None:
    work = graph_object(hNode, Node).work
    if not isinstance(work, ChildGraph):
        raise DriverError(Result.INVALID_VALUE)
    write(phGraph, c_size_t, work.graph.handle)


@entry("cuGraphEventRecordNodeGetEvent(CUgraphNode hNode, CUevent *event_out)")
def cuGraphEventRecordNodeGetEvent(hNode: int, event_out: int) -> None:
    work = graph_object(hNode, Node).work
    if not isinstance(work, RecordEvent):
        raise DriverError(Result.INVALID_VALUE)
    write(event_out, c_size_t, work.event.handle)


@entry("cuGraphEventRecordNodeSetEvent(CUgraphNode hNode, CUevent event)")
def cuGraphEventRecordNodeSetEvent(hNode: int, event: int) -> None:
    _set(hNode, NodeType.EVENT_RECORD, lambda: RecordEvent(params.event_of(event)))


@entry("cuGraphEventWaitNodeGetEvent(CUgraphNode hNode, CUevent *event_out)")
def cuGraphEventWaitNodeGetEvent(hNode: int, event_out: int) -> None:
    work = graph_object(hNode, Node).work
    if not isinstance(work, WaitForEvent):
        raise DriverError(Result.INVALID_VALUE)
    write(event_out, c_size_t, work.event.handle)


@entry("cuGraphEventWaitNodeSetEvent(CUgraphNode hNode, CUevent event)")
def cuGraphEventWaitNodeSetEvent(hNode: int, event: int) -> None:
    _set(hNode, NodeType.WAIT_EVENT, lambda: WaitForEvent(params.event_of(event)))


@entry("cuGraphMemAllocNodeGetParams(CUgraphNode hNode, CUDA_MEM_ALLOC_NODE_PARAMS *params_out)")
def cuGraphMemAllocNodeGetParams(hNode: int, params_out: int) -> None:
    params.write_params(graph_object(hNode, Node), NodeType.MEM_ALLOC, given(params_out, MemAllocParams))


@entry("cuGraphMemFreeNodeGetParams(CUgraphNode hNode, CUdeviceptr *dptr_out)")
def cuGraphMemFreeNodeGetParams(hNode: int, dptr_out: int) -> None:
    work = graph_object(hNode, Node).work
    if not isinstance(work, Free):
        raise DriverError(Result.INVALID_VALUE)
    write(dptr_out, c_uint64, work.slot.address)


# ---- Attributes of kernel nodes ----

_ATTRIBUTE_BYTES = 64  # sizeof(CUlaunchAttributeValue)
# Access policy window, cooperative, cluster dimensions and their scheduling, priority, memory synchronization
# domains, preferred cluster dimensions, preferred shared memory (CUkernelNodeAttrID).
_ATTRIBUTES = (1, 2, 4, 5, 8, 9, 10, 11, 14)


def _kernel(hNode: int, attr: int = 1) -> tuple[Node, KernelNode]:
    node = graph_object(hNode, Node)
    if not isinstance(node.work, KernelNode) or attr not in _ATTRIBUTES:
        raise DriverError(Result.INVALID_VALUE)
    return node, node.work


@entry("cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out)")
def cuGraphKernelNodeGetAttribute(hNode: int, attr: int, value_out: int) -> None:
    _, work = _kernel(hNode, attr)
    if not value_out:
        raise DriverError(Result.INVALID_VALUE)
    ctypes.memmove(value_out, work.attributes.get(attr, bytes(_ATTRIBUTE_BYTES)), _ATTRIBUTE_BYTES)


@entry("cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value)")
def cuGraphKernelNodeSetAttribute(hNode: int, attr: int, value: int) -> None:
    node, work = _kernel(hNode, attr)
    if not value:
        raise DriverError(Result.INVALID_VALUE)
    node.work = work.with_attributes({**work.attributes, attr: ctypes.string_at(value, _ATTRIBUTE_BYTES)})


@entry("cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src)")
def cuGraphKernelNodeCopyAttributes(dst: int, src: int) -> None:
    (target, work), (_, source) = _kernel(dst), _kernel(src)
    if work.context is not source.context:
        raise DriverError(Result.INVALID_VALUE, "the nodes belong to different contexts")
    target.work = work.with_attributes(dict(source.attributes))
