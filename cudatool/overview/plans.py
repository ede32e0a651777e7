"""Memory that was planned ahead: the buffers of a compiled function's graph, as ``cudatool.compiler`` laid them out.

A reservation serves all of them. Buffers whose lifetimes are disjoint have the same place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import Kind, PlanFlag
from cudatool.trace.frames import call_sites, missing_stack
from cudatool.trace.model import Trace

__all__ = ["FusedKernel", "FusedOperation", "MemoryPlan", "PlannedBuffer", "plans"]


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A buffer of a graph.

    Attributes
    ----------
    offset, size
        Where it lies in the reservation, in bytes.
    first, end
        Its lifetime: the index of the first node after its allocation, and of the first after it was freed.
    node
        The operation of the first node, which makes the buffer; cudatool's name of it, or the kernel's.
    label
        The call site that allocates it.
    kept
        Whether it outlives the function: a result, or what the function stores.
    alone
        Whether no other buffer may have its place, since another stream uses it.
    """

    offset: int
    size: int
    first: int
    end: int
    node: str
    label: str
    kept: bool
    alone: bool


@dataclass(frozen=True, slots=True)
class FusedOperation:
    """One of the operations that a kernel computes, and the call site that asked for it."""

    name: str
    label: str


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A node of a graph that computes several operations; what passes between them is not in memory."""

    node: int
    name: str
    operations: tuple[FusedOperation, ...]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one graph.

    Attributes
    ----------
    function
        The name of the function that was compiled.
    label
        The call site at which it was.
    device
        The ordinal of its device.
    nodes
        How many the graph has.
    planned
        Bytes of the reservation.
    ran
        Bytes up to the end of the highest buffer that was in use when the graph was made.
    unshared
        Bytes that the buffers would take if each had a place of its own.
    most_live
        The most bytes that are live at one node: no plan can do with less.
    buffers
        In the order of their allocation; their sizes are rounded to 512 B.
    fused
        The kernels that compute several operations, by their nodes.
    """

    function: str
    label: str
    device: int
    nodes: int
    planned: int
    ran: int
    unshared: int
    most_live: int
    buffers: tuple[PlannedBuffer, ...]
    fused: tuple[FusedKernel, ...] = ()


def plans(trace: Trace) -> tuple[MemoryPlan, ...]:
    """Return the plans of a recording, in its order. Those that were made before it began come first."""
    heads, rows = trace.of_kind(Kind.MEMORY_PLAN), trace.of_kind(Kind.PLANNED_BUFFER)
    if not len(heads):
        return ()
    buffers, operations = _by_plan(heads, rows), _by_plan(heads, trace.of_kind(Kind.FUSED_OPERATION))
    at = _labels(trace, heads["stack"].tolist())
    return tuple(_plan(trace, *parts) for parts in zip(heads, buffers, operations, at, strict=True))


def _by_plan(heads: npt.NDArray[np.void], rows: npt.NDArray[np.void]) -> list[npt.NDArray[np.void]]:
    rows = rows[np.argsort(rows["correlation"], kind="stable")]
    first, last = (np.searchsorted(rows["correlation"], heads["correlation"], side=side) for side in ("left", "right"))
    return [rows[low:high] for low, high in zip(first.tolist(), last.tolist(), strict=True)]


def _plan(
    trace: Trace, head: np.void, rows: npt.NDArray[np.void], operations: npt.NDArray[np.void], label: str
) -> MemoryPlan:
    start, buffers = int(head["address"]), []
    for row, site in zip(rows, _labels(trace, rows["stack"].tolist()), strict=True):
        flags, name = int(row["flags"]), trace.names[row["name"]]
        place = int(row["address"]) - start, int(row["size"]), int(row["aux0"]), int(row["aux1"])
        buffers.append(PlannedBuffer(*place, name, site, bool(flags & PlanFlag.KEPT), bool(flags & PlanFlag.ALONE)))
    return MemoryPlan(
        function=trace.names[head["name"]],
        label=label,
        device=int(head["device"]),
        nodes=int(head["aux1"]),
        planned=int(head["size"]),
        ran=int(head["aux0"]),
        unshared=sum(buffer.size for buffer in buffers),
        most_live=_most_live(buffers),
        buffers=tuple(buffers),
        fused=_fused(trace, operations),
    )


def _fused(trace: Trace, rows: npt.NDArray[np.void]) -> tuple[FusedKernel, ...]:
    kernels: dict[int, str] = {}
    operations: dict[int, list[FusedOperation]] = {}
    for row, site in zip(rows, _labels(trace, rows["stack"].tolist()), strict=True):
        node, name = int(row["aux0"]), trace.names[row["name"]]
        if row["aux1"]:
            operations.setdefault(node, []).append(FusedOperation(name, site))
        else:
            kernels[node] = name
    return tuple(FusedKernel(node, name, tuple(operations.get(node, ()))) for node, name in sorted(kernels.items()))


def _labels(trace: Trace, stacks: list[int]) -> list[str]:
    without = missing_stack(trace).text
    return [label or without for label in call_sites([trace.stack(stack) for stack in stacks])]


def _most_live(buffers: list[PlannedBuffer]) -> int:
    live = most = 0
    for _, change in sorted(part for own in buffers for part in ((own.first, own.size), (own.end, -own.size))):
        live += change  # at one node what ends comes before what begins
        most = max(most, live)
    return most
