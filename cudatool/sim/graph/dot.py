"""A graph in the DOT language."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cudatool.sim.graph.model import PLAIN_EDGE, Graph, Node

__all__ = ["to_dot"]

_TOPOLOGY_ONLY: Final = 0
_HANDLES: Final = 1 << 10  # CU_GRAPH_DEBUG_DOT_FLAGS_HANDLES
_VERBOSE: Final = 1


def to_dot(graph: Graph, flags: int) -> str:
    """Return the graph and those inside as clusters. `flags` are of CUgraphDebugDot_flags.

    Nodes are named ``graph_ID_node_NUMBER``, by cuGraphGetId and cuGraphNodeGetLocalId.
    """
    return "\n".join(["digraph dot {", *(line for one in graph.graphs() for line in _cluster(one, flags)), "}", ""])


def _cluster(graph: Graph, flags: int) -> Iterator[str]:
    yield f"subgraph cluster_{graph.id} {{"
    yield f'label="graph_{graph.id}"'
    for node in graph.nodes:
        lines = [str(node.number), node.work.describe() if flags != _TOPOLOGY_ONLY else _short(node)]
        if flags & (_HANDLES | _VERBOSE):
            lines.append(f"node handle: {node.handle:#x}")
        text = "\\n".join(line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
        yield f'"{_name(node)}" [shape="rectangle" label="{text}"];'
    for node in graph.nodes:
        for target, data in node.dependents.items():
            label = "" if data == PLAIN_EDGE else f' [label="port {data[0]}, type {data[2]}"]'
            yield f'"{_name(node)}" -> "{_name(target)}"{label};'
    yield "}"
    for node in graph.nodes:
        yield from (f'"{_name(node)}" -> "{_name(first)}" [style="dashed"];' for first in _first_inside(node))


def _short(node: Node) -> str:
    """The type, and of a kernel its name."""
    return " ".join(node.work.describe().split(" ")[: 2 if node.kind.name == "KERNEL" else 1])


def _first_inside(node: Node) -> Iterator[Node]:
    for inner in node.work.graphs:
        yield from [first for first in inner.nodes if not first.dependencies][:1]


def _name(node: Node) -> str:
    return f"graph_{node.graph.id}_node_{node.number}"
