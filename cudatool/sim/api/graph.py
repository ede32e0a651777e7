"""Driver entry points: building graphs, as in the CUDA driver API reference, "Graph Management"."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_uint, c_uint64
from typing import TypeVar

from cudatool.sim import machine as state
from cudatool.sim.abi import entry, read_name, write
from cudatool.sim.graph.dot import to_dot
from cudatool.sim.graph.model import PLAIN_EDGE, Condition, Graph, Node, NodeType, UserObject, Work
from cudatool.sim.machine import Context
from cudatool.sim.results import DriverError, Result

__all__ = ["add_node", "edges_from", "graph_object"]

_T = TypeVar("_T")
_EDGE_BYTES = len(PLAIN_EDGE)
_PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


def graph_object(handle: int, kind: type[_T]) -> _T:
    """Return the graph, node or the like of a handle, else fail with CUDA_ERROR_INVALID_VALUE."""
    found = state.machine.objects.get(handle)
    if not isinstance(found, kind):
        raise DriverError(Result.INVALID_VALUE, f"{handle:#x} is not a live {kind.__name__}")
    return found


# ---- Graphs ----


@entry("cuGraphCreate(CUgraph *phGraph, unsigned int flags)")
def cuGraphCreate(phGraph: int, flags: int) -> None:
    if flags or not phGraph:
        raise DriverError(Result.INVALID_VALUE)
    graph = Graph()
    graph.register()
    write(phGraph, c_size_t, graph.handle)


@entry("cuGraphDestroy(CUgraph hGraph)")
def cuGraphDestroy(hGraph: int) -> None:
    graph = graph_object(hGraph, Graph)
    if graph.owner is not None or graph.is_capturing:
        raise DriverError(Result.INVALID_VALUE, "the graph belongs to a node, or to a capture")
    graph.destroy()


@entry("cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)")
def cuGraphClone(phGraphClone: int, originalGraph: int) -> None:
    original = graph_object(originalGraph, Graph)
    if original.has_memory_nodes or any(node.kind is NodeType.CONDITIONAL for node in original.walk()):
        raise DriverError(Result.NOT_SUPPORTED, "graphs with memory or conditional nodes cannot be cloned")
    if not phGraphClone:
        raise DriverError(Result.INVALID_VALUE)
    clone = original.clone({})
    clone.register()
    write(phGraphClone, c_size_t, clone.handle)


@entry("cuGraphGetId(CUgraph hGraph, unsigned int *graphId)")
def cuGraphGetId(hGraph: int, graphId: int) -> None:
    write(graphId, c_uint, graph_object(hGraph, Graph).id)


@entry("cuGraphDebugDotPrint(CUgraph hGraph, const char *path, unsigned int flags)")
def cuGraphDebugDotPrint(hGraph: int, path: int, flags: int) -> None:
    graph = graph_object(hGraph, Graph)
    file = read_name(path)
    try:
        with open(file, "w", encoding="utf-8") as out:
            out.write(to_dot(graph, flags))
    except OSError as error:
        raise DriverError(Result.OPERATING_SYSTEM, f"{file}: {error.strerror}") from error


# ---- Nodes and edges ----


def _nodes_of(graph: Graph, handles: int, count: int) -> list[Node]:
    """Return the nodes of an array of handles, which must all be of `graph`."""
    if count and not handles:
        raise DriverError(Result.INVALID_VALUE)
    nodes = [graph_object(handle, Node) for handle in (c_size_t * count).from_address(handles)] if count else []
    if any(node.graph is not graph for node in nodes):
        raise DriverError(Result.INVALID_VALUE, "a node belongs to another graph")
    return nodes


def edges_from(graph: Graph, handles: int, data: int, count: int) -> dict[Node, bytes]:
    """Return dependencies and the data of their edges, from arrays of CUgraphNode and CUgraphEdgeData."""
    nodes = _nodes_of(graph, handles, count)
    if len(set(nodes)) < count:
        raise DriverError(Result.INVALID_VALUE, "a dependency is given twice")
    return dict(zip(nodes, _edge_data(data, nodes), strict=True))


def _edge_data(data: int, sources: list[Node]) -> list[bytes]:
    found = [ctypes.string_at(data + i * _EDGE_BYTES, _EDGE_BYTES) if data else PLAIN_EDGE for i in range(len(sources))]
    for (from_port, to_port, kind, *reserved), source in zip(found, sources, strict=True):
        # Ports other than 0, and the programmatic type, are of kernel nodes (CUgraphEdgeData).
        if to_port or kind > _PROGRAMMATIC or any(reserved) or from_port > 2:
            raise DriverError(
                Result.INVALID_VALUE,
                "edge data need to_port 0, from_port 0 to 2, a known type, and reserved bytes of 0",
            )
        if (from_port or kind) and source.kind is not NodeType.KERNEL:
            raise DriverError(Result.INVALID_VALUE, f"a {source.kind.name} node has no such port")
    return found


def add_node(graph: Graph, work: Work | Callable[[Node], Work], dependencies: dict[Node, bytes]) -> Node:
    """Add a node that the program can name."""
    node = graph.add(work, dependencies)
    graph.register()
    return node


def _fill(address: int, count: int, handles: Sequence[int], data: Sequence[bytes] = (), edge_data: int = 0) -> int:
    """Store handles, and the data of their edges, in arrays of `count`; return how many there are to store.

    Entries that are left over become NULL.
    """
    for index in range(count):
        write(address + 8 * index, c_size_t, handles[index] if index < len(handles) else 0)
        if edge_data:
            ctypes.memmove(
                edge_data + index * _EDGE_BYTES, data[index] if index < len(data) else PLAIN_EDGE, _EDGE_BYTES
            )
    return min(count, len(handles))


def _list(address: int, number: int, nodes: Sequence[Node], data: Sequence[bytes] = (), edge_data: int = 0) -> None:
    """Answer a call that lists nodes: their number if `address` is NULL, else as many as there is room for."""
    if not number or (edge_data and not address):
        raise DriverError(Result.INVALID_VALUE)
    if not address:
        write(number, c_size_t, len(nodes))
        return
    if not edge_data and any(one != PLAIN_EDGE for one in data):
        raise DriverError(Result.LOSSY_QUERY, "the graph has edges with data; pass an array for the edge data")
    room = c_size_t.from_address(number).value
    write(number, c_size_t, _fill(address, room, [node.handle for node in nodes], data, edge_data))


@entry("cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes)")
def cuGraphGetNodes(hGraph: int, nodes: int, numNodes: int) -> None:
    _list(nodes, numNodes, list(graph_object(hGraph, Graph).nodes))


@entry("cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes)")
def cuGraphGetRootNodes(hGraph: int, rootNodes: int, numRootNodes: int) -> None:
    roots = [node for node in graph_object(hGraph, Graph).nodes if not node.dependencies]
    _list(rootNodes, numRootNodes, roots)


@entry(
    "cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData, size_t *numEdges)"
)
def cuGraphGetEdges(hGraph: int, sources: int, to: int, edgeData: int, numEdges: int) -> None:
    graph = graph_object(hGraph, Graph)
    edges = [(source, node, data) for node in graph.nodes for source, data in node.dependencies.items()]
    if bool(sources) != bool(to):
        raise DriverError(Result.INVALID_VALUE)
    room = c_size_t.from_address(numEdges).value if numEdges and to else 0
    _list(to, numEdges, [node for _, node, _ in edges], [data for _, _, data in edges], edgeData)
    if sources:
        _fill(sources, room, [source.handle for source, _, _ in edges])


@entry("cuGraphNodeGetType(CUgraphNode hNode, int *type)")
def cuGraphNodeGetType(hNode: int, type: int) -> None:
    write(type, c_int, graph_object(hNode, Node).kind)


@entry("cuGraphNodeGetContainingGraph(CUgraphNode hNode, CUgraph *phGraph)")
def cuGraphNodeGetContainingGraph(hNode: int, phGraph: int) -> None:
    write(phGraph, c_size_t, graph_object(hNode, Node).graph.handle)


@entry("cuGraphNodeGetLocalId(CUgraphNode hNode, unsigned int *nodeId)")
def cuGraphNodeGetLocalId(hNode: int, nodeId: int) -> None:
    write(nodeId, c_uint, graph_object(hNode, Node).number)


@entry("cuGraphNodeGetToolsId(CUgraphNode hNode, unsigned long long *toolsNodeId)")
def cuGraphNodeGetToolsId(hNode: int, toolsNodeId: int) -> None:
    node = graph_object(hNode, Node)
    write(toolsNodeId, c_uint64, node.graph.id << 32 | node.number)


@entry("cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph)")
def cuGraphNodeFindInClone(phNode: int, hOriginalNode: int, hClonedGraph: int) -> None:
    original, clone = graph_object(hOriginalNode, Node), graph_object(hClonedGraph, Graph)
    for graph in clone.graphs():
        for node in graph.nodes:
            if graph.origin.get(node) is original:
                write(phNode, c_size_t, node.handle)
                return
    raise DriverError(Result.INVALID_VALUE, "the graph has no copy of that node")


@entry(
    "cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *dependencies, CUgraphEdgeData *edgeData, "
    "size_t *numDependencies)"
)
def cuGraphNodeGetDependencies(hNode: int, dependencies: int, edgeData: int, numDependencies: int) -> None:
    found = graph_object(hNode, Node).dependencies
    _list(dependencies, numDependencies, list(found), list(found.values()), edgeData)


@entry(
    "cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *dependentNodes, CUgraphEdgeData *edgeData, "
    "size_t *numDependentNodes)"
)
def cuGraphNodeGetDependentNodes(hNode: int, dependentNodes: int, edgeData: int, numDependentNodes: int) -> None:
    found = graph_object(hNode, Node).dependents
    _list(dependentNodes, numDependentNodes, list(found), list(found.values()), edgeData)


def _edges(graph: Graph, sources: int, targets: int, data: int, count: int) -> list[tuple[Node, Node, bytes]]:
    from_nodes, to_nodes = _nodes_of(graph, sources, count), _nodes_of(graph, targets, count)
    return list(zip(from_nodes, to_nodes, _edge_data(data, from_nodes), strict=True))


@entry(
    "cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, "
    "const CUgraphEdgeData *edgeData, size_t numDependencies)"
)
def cuGraphAddDependencies(hGraph: int, sources: int, to: int, edgeData: int, numDependencies: int) -> None:
    graph = graph_object(hGraph, Graph)
    edges = _edges(graph, sources, to, edgeData, numDependencies)
    if any(source is node or source in node.dependencies for source, node, _ in edges):
        raise DriverError(Result.INVALID_VALUE, "a dependency exists already, or makes a node depend on itself")
    if len({(source, node) for source, node, _ in edges}) < len(edges):
        raise DriverError(Result.INVALID_VALUE, "a dependency is given twice")
    for edge in edges:
        graph.connect(*edge)


@entry(
    "cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, "
    "const CUgraphEdgeData *edgeData, size_t numDependencies)"
)
def cuGraphRemoveDependencies(hGraph: int, sources: int, to: int, edgeData: int, numDependencies: int) -> None:
    graph = graph_object(hGraph, Graph)
    edges = _edges(graph, sources, to, edgeData, numDependencies)
    if edges and graph.has_memory_nodes:
        raise DriverError(Result.INVALID_VALUE, "edges of a graph with memory nodes cannot be removed")
    if any(node.dependencies.get(source) != data for source, node, data in edges):
        raise DriverError(Result.INVALID_VALUE, "the dependency does not exist")
    for source, node, _ in edges:
        graph.disconnect(source, node)


@entry("cuGraphDestroyNode(CUgraphNode hNode)")
def cuGraphDestroyNode(hNode: int) -> None:
    node = graph_object(hNode, Node)
    if node.graph.has_memory_nodes:
        raise DriverError(Result.NOT_SUPPORTED, "nodes of a graph with memory nodes cannot be removed")
    if node.graph.is_capturing:
        raise DriverError(Result.INVALID_VALUE, "a stream is being captured into the graph; end the capture first")
    node.graph.remove(node)


# ---- Conditional handles ----


@entry(
    "cuGraphConditionalHandleCreate(CUgraphConditionalHandle *pHandle_out, CUgraph hGraph, CUcontext ctx, "
    "unsigned int defaultLaunchValue, unsigned int flags)"
)
def cuGraphConditionalHandleCreate(
    pHandle_out: int, hGraph: int, ctx: int, defaultLaunchValue: int, flags: int
) -> None:
    graph, context = graph_object(hGraph, Graph), graph_object(ctx, Context)
    if flags > 1 or not pHandle_out:
        raise DriverError(Result.INVALID_VALUE)
    condition = Condition(graph, context, defaultLaunchValue if flags else None)
    graph.conditions.append(condition)
    write(pHandle_out, c_uint64, condition.handle)


# ---- User objects ----

_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _check_count(count: int) -> None:
    if not 0 < count < 1 << 31:
        raise DriverError(Result.INVALID_VALUE, f"{count} is not a number of references")


@entry(
    "cuUserObjectCreate(CUuserObject *object_out, void *ptr, CUhostFn destroy, unsigned int initialRefcount, "
    "unsigned int flags)"
)
def cuUserObjectCreate(object_out: int, ptr: int, destroy: int, initialRefcount: int, flags: int) -> None:
    _check_count(initialRefcount)
    if flags != 1 or not destroy or not object_out:  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC is required
        raise DriverError(Result.INVALID_VALUE)
    function = _Destructor(destroy)
    write(object_out, c_size_t, UserObject(lambda: function(ptr), initialRefcount).handle)


@entry("cuUserObjectRetain(CUuserObject object, unsigned int count)")
def cuUserObjectRetain(object: int, count: int) -> None:
    _check_count(count)
    graph_object(object, UserObject).retain(count)


@entry("cuUserObjectRelease(CUuserObject object, unsigned int count)")
def cuUserObjectRelease(object: int, count: int) -> None:
    _check_count(count)
    graph_object(object, UserObject).release(count)


@entry("cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags)")
def cuGraphRetainUserObject(graph: int, object: int, count: int, flags: int) -> None:
    _check_count(count)
    owner, found = graph_object(graph, Graph), graph_object(object, UserObject)
    if flags > 1:
        raise DriverError(Result.INVALID_VALUE)
    if not flags:  # CU_GRAPH_USER_OBJECT_MOVE takes over references that the caller has
        found.retain(count)
    owner.user_objects[found] += count


@entry("cuGraphReleaseUserObject(CUgraph graph, CUuserObject object, unsigned int count)")
def cuGraphReleaseUserObject(graph: int, object: int, count: int) -> None:
    _check_count(count)
    owner, found = graph_object(graph, Graph), graph_object(object, UserObject)
    if owner.user_objects[found] < count:
        raise DriverError(Result.INVALID_VALUE, "the graph holds fewer references to the object")
    owner.user_objects[found] -= count
    if not owner.user_objects[found]:
        del owner.user_objects[found]
    found.release(count)


# ---- Memory of graphs ----

_USED_CURRENT, _USED_HIGH, _RESERVED_CURRENT, _RESERVED_HIGH = range(4)  # CUgraphMem_attribute


@entry("cuDeviceGraphMemTrim(CUdevice device)")
def cuDeviceGraphMemTrim(device: int) -> None:
    state.machine.graph_memory.trim(state.machine.device(device))


@entry("cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)")
def cuDeviceGetGraphMemAttribute(device: int, attr: int, value: int) -> None:
    found, memory = state.machine.device(device), state.machine.graph_memory
    if attr not in range(4):
        raise DriverError(Result.INVALID_VALUE)
    name = "used" if attr in (_USED_CURRENT, _USED_HIGH) else "reserved"
    ask = memory.amount if attr in (_USED_CURRENT, _RESERVED_CURRENT) else memory.high
    write(value, c_uint64, ask(found, name))


@entry("cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)")
def cuDeviceSetGraphMemAttribute(device: int, attr: int, value: int) -> None:
    found = state.machine.device(device)
    # High-water marks can be reset to zero, and nothing else can be set.
    if attr not in (_USED_HIGH, _RESERVED_HIGH) or not value or c_uint64.from_address(value).value:
        raise DriverError(Result.INVALID_VALUE)
    state.machine.graph_memory.reset_high(found, "used" if attr == _USED_HIGH else "reserved")
