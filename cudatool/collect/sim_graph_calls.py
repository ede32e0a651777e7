"""What calls of the software driver that capture, change or launch graphs are reported as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cudatool.collect.sim_calls import CallsInProgress, EmitCall, pointed
from cudatool.trace import hooks
from cudatool.trace.events import Kind

if TYPE_CHECKING:
    from cudatool.sim import Operation

__all__ = ["REPORTS", "REPORTS_ALIKE", "capture_end"]


def _capture_begin(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    device, stream = calls.stream(values["hStream"])
    hooks.emit(Kind.GRAPH_CAPTURE_BEGIN, device=device, stream=stream)


def capture_end(calls: CallsInProgress, arguments: tuple[Any, ...]) -> None:
    device, stream = calls.stream(arguments[0])
    graph = calls.machine.objects.get(pointed(arguments[1]))
    hooks.emit(Kind.GRAPH_CAPTURE_END, device=device, stream=stream, aux0=graph.id if graph is not None else 0)


def _graph_instantiate(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    calls.graphs.instantiated(pointed(values["phGraphExec"]))


def _graph_added(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    if "phGraphNode" in values:  # unlike cuGraphAddDependencies
        calls.graphs.added(pointed(values["phGraphNode"]))


def _graph_update(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    calls.graphs.updated(values["hGraphExec"])


def _graph_launch(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    correlation, device, stream = calls.owner()
    if not correlation:
        return  # captured
    memory = calls.thread.call.memory
    before = [op for op in memory if op.launch is None]  # what the launch frees because an earlier launch did not
    inside = [op for op in memory if op.launch is not None]
    for operation in [*before, *(op for op in inside if op.kind == "alloc")]:
        _graph_memory(calls, operation, device, stream, name)
    graph = calls.machine.objects[values["hGraphExec"]].id
    hooks.emit(Kind.GRAPH_LAUNCH, device=device, stream=stream, correlation=correlation, aux0=graph, name=name)
    for operation in (op for op in inside if op.kind == "free"):
        _graph_memory(calls, operation, device, stream, name)


def _graph_memory(calls: CallsInProgress, operation: Operation, device: int, stream: int, name: str) -> None:
    kind = Kind.MEM_ALLOC if operation.kind == "alloc" else Kind.MEM_FREE
    for address, size, _ in operation.footprint:
        found = calls.allocation_at(address)  # which may be of another device than the stream
        where = device if found is None else found.device
        hooks.emit(kind, device=where, stream=stream, address=address, size=size, name=name)


REPORTS: Final[dict[str, EmitCall]] = {
    "cuStreamBeginCapture": _capture_begin,
    "cuStreamBeginCaptureToGraph": _capture_begin,
    "cuGraphInstantiateWithFlags": _graph_instantiate,
    "cuGraphInstantiateWithParams": _graph_instantiate,
    "cuGraphExecUpdate": _graph_update,
    "cuGraphExecNodeSetParams": _graph_update,
    "cuGraphExecKernelNodeSetParams": _graph_update,
    "cuGraphExecMemcpyNodeSetParams": _graph_update,
    "cuGraphExecMemsetNodeSetParams": _graph_update,
    "cuGraphExecHostNodeSetParams": _graph_update,
    "cuGraphExecBatchMemOpNodeSetParams": _graph_update,
    "cuGraphExecChildGraphNodeSetParams": _graph_update,
    "cuGraphExecEventRecordNodeSetEvent": _graph_update,
    "cuGraphExecEventWaitNodeSetEvent": _graph_update,
    "cuGraphNodeSetEnabled": _graph_update,
    "cuGraphLaunch": _graph_launch,
}
REPORTS_ALIKE: Final[dict[str, EmitCall]] = {"cuGraphAdd": _graph_added}  # all other calls whose names begin so
