"""Driver entry points: executable graphs ("Graph Management")."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_uint, c_uint64

from cudatool.sim.abi import entry, write
from cudatool.sim.api.graph import graph_object
from cudatool.sim.api.graph_nodes import given, new_work
from cudatool.sim.graph import params
from cudatool.sim.graph.model import Graph, Node, NodeType, Update, Work
from cudatool.sim.graph.nodes import RecordEvent, WaitForEvent
from cudatool.sim.graph.params import BatchParams, HostParams, KernelParams, Memcpy3D, MemsetParams, NodeParams
from cudatool.sim.graph.run import UPLOAD, GraphExec, InstantiateError, Instantiation, Mismatch
from cudatool.sim.machine import stream_of
from cudatool.sim.results import DriverError, Result

# ---- Instantiating ----


@entry("cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)")
def cuGraphInstantiateWithFlags(phGraphExec: int, hGraph: int, flags: int) -> None:
    if not phGraphExec or flags & UPLOAD:  # there is no stream to upload in
        raise DriverError(Result.INVALID_VALUE)
    write(phGraphExec, c_size_t, GraphExec(graph_object(hGraph, Graph), flags).handle)


class _InstantiateParams(ctypes.Structure):
    """CUDA_GRAPH_INSTANTIATE_PARAMS."""

    _fields_ = (("flags", c_uint64), ("hUploadStream", c_size_t), ("hErrNode_out", c_size_t), ("result_out", c_int))


@entry(
    "cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph, "
    "CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)"
)
def cuGraphInstantiateWithParams(phGraphExec: int, hGraph: int, instantiateParams: int) -> None:
    what = given(instantiateParams, _InstantiateParams)
    what.hErrNode_out, what.result_out = 0, Instantiation.ERROR
    try:
        graph = graph_object(hGraph, Graph)
        if not phGraphExec:
            raise DriverError(Result.INVALID_VALUE)
        stream = stream_of(what.hUploadStream) if what.flags & UPLOAD else None
        made = GraphExec(graph, what.flags & ~UPLOAD)
    except InstantiateError as error:
        what.result_out = error.reason
        what.hErrNode_out = error.node.handle if error.node else 0
        raise
    if stream is not None:
        made.upload(stream)
    what.result_out = Instantiation.SUCCESS
    write(phGraphExec, c_size_t, made.handle)


@entry("cuGraphExecDestroy(CUgraphExec hGraphExec)")
def cuGraphExecDestroy(hGraphExec: int) -> None:
    graph_object(hGraphExec, GraphExec).destroy()


@entry("cuGraphExecGetFlags(CUgraphExec hGraphExec, cuuint64_t *flags)")
def cuGraphExecGetFlags(hGraphExec: int, flags: int) -> None:
    write(flags, c_uint64, graph_object(hGraphExec, GraphExec).flags)


@entry("cuGraphExecGetId(CUgraphExec hGraphExec, unsigned int *graphId)")
def cuGraphExecGetId(hGraphExec: int, graphId: int) -> None:
    write(graphId, c_uint, graph_object(hGraphExec, GraphExec).id)


# ---- Launching ----


@entry("cuGraphUpload(CUgraphExec hGraphExec, CUstream hStream)")
def cuGraphUpload(hGraphExec: int, hStream: int) -> None:
    graph_object(hGraphExec, GraphExec).upload(stream_of(hStream))


@entry("cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)")
def cuGraphLaunch(hGraphExec: int, hStream: int) -> None:
    graph_object(hGraphExec, GraphExec).launch(stream_of(hStream))


# ---- Updating ----


class _UpdateResultInfo(ctypes.Structure):
    """CUgraphExecUpdateResultInfo."""

    _fields_ = (("result", c_int), ("errorNode", c_size_t), ("errorFromNode", c_size_t))


@entry("cuGraphExecUpdate(CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo)")
def cuGraphExecUpdate(hGraphExec: int, hGraph: int, resultInfo: int) -> None:
    info = given(resultInfo, _UpdateResultInfo)
    info.result, info.errorNode, info.errorFromNode = Update.ERROR, 0, 0
    try:
        graph_object(hGraphExec, GraphExec).update(graph_object(hGraph, Graph))
    except Mismatch as error:
        info.result = error.reason
        info.errorNode = error.node.handle if error.node else 0
        info.errorFromNode = error.source.handle if error.source else 0
        raise
    info.result = Update.SUCCESS


def _set(hGraphExec: int, hNode: int, kind: int, work: Callable[[Work], Work]) -> None:
    """Set the parameters of a node to what `work` returns, which is called with the present ones."""
    executable, node = graph_object(hGraphExec, GraphExec), graph_object(hNode, Node)
    before = executable.work_of(node)
    executable.set_work(node, new_work(kind, before, lambda: work(before)))


@entry("cuGraphExecNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams)")
def cuGraphExecNodeSetParams(hGraphExec: int, hNode: int, nodeParams: int) -> None:
    what = given(nodeParams, NodeParams)
    if what.type == NodeType.GRAPH:
        cuGraphExecChildGraphNodeSetParams(hGraphExec, hNode, what.graph.graph)
    else:
        _set(hGraphExec, hNode, what.type, lambda _: params.read_work(what))


@entry(
    "cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, "
    "const CUDA_KERNEL_NODE_PARAMS *nodeParams)"
)
def cuGraphExecKernelNodeSetParams(hGraphExec: int, hNode: int, nodeParams: int) -> None:
    what = given(nodeParams, KernelParams)
    _set(hGraphExec, hNode, NodeType.KERNEL, lambda _: params.kernel_of(what))


@entry(
    "cuGraphExecMemcpyNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams, "
    "CUcontext ctx)"
)
def cuGraphExecMemcpyNodeSetParams(hGraphExec: int, hNode: int, copyParams: int, ctx: int) -> None:
    what = given(copyParams, Memcpy3D)
    _set(hGraphExec, hNode, NodeType.MEMCPY, lambda _: params.copy_of(what, params.context_of(ctx)))


@entry(
    "cuGraphExecMemsetNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, "
    "const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)"
)
def cuGraphExecMemsetNodeSetParams(hGraphExec: int, hNode: int, memsetParams: int, ctx: int) -> None:
    what = given(memsetParams, MemsetParams)
    _set(hGraphExec, hNode, NodeType.MEMSET, lambda _: params.fill_of(what, params.context_of(ctx)))


@entry(
    "cuGraphExecBatchMemOpNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, "
    "const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams)"
)
def cuGraphExecBatchMemOpNodeSetParams(hGraphExec: int, hNode: int, nodeParams: int) -> None:
    what = given(nodeParams, BatchParams)
    _set(hGraphExec, hNode, NodeType.BATCH_MEM_OP, lambda _: params.batch_of(what))


@entry(
    "cuGraphExecHostNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams)"
)
def cuGraphExecHostNodeSetParams(hGraphExec: int, hNode: int, nodeParams: int) -> None:
    what = given(nodeParams, HostParams)
    _set(hGraphExec, hNode, NodeType.HOST, lambda _: params.call_of(what.fn, what.userData))


@entry("cuGraphExecChildGraphNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph)")
def cuGraphExecChildGraphNodeSetParams(hGraphExec: int, hNode: int, childGraph: int) -> None:
    executable, node = graph_object(hGraphExec, GraphExec), graph_object(hNode, Node)
    executable.set_child(node, graph_object(childGraph, Graph))


@entry("cuGraphExecEventRecordNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)")
def cuGraphExecEventRecordNodeSetEvent(hGraphExec: int, hNode: int, event: int) -> None:
    _set(hGraphExec, hNode, NodeType.EVENT_RECORD, lambda _: RecordEvent(params.event_of(event)))


@entry("cuGraphExecEventWaitNodeSetEvent(CUgraphExec hGraphExec, CUgraphNode hNode, CUevent event)")
def cuGraphExecEventWaitNodeSetEvent(hGraphExec: int, hNode: int, event: int) -> None:
    _set(hGraphExec, hNode, NodeType.WAIT_EVENT, lambda _: WaitForEvent(params.event_of(event)))


@entry("cuGraphNodeSetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int isEnabled)")
def cuGraphNodeSetEnabled(hGraphExec: int, hNode: int, isEnabled: int) -> None:
    graph_object(hGraphExec, GraphExec).enable(graph_object(hNode, Node), enabled=bool(isEnabled))


@entry("cuGraphNodeGetEnabled(CUgraphExec hGraphExec, CUgraphNode hNode, unsigned int *isEnabled)")
def cuGraphNodeGetEnabled(hGraphExec: int, hNode: int, isEnabled: int) -> None:
    write(isEnabled, c_uint, graph_object(hGraphExec, GraphExec).is_enabled(graph_object(hNode, Node)))
