"""Which operations ran on which stream, and when."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from cudatool.trace.captured import CapturedCalls, as_called
from cudatool.trace.distinct import distinct
from cudatool.trace.events import WORK, CopyFlag, Kind
from cudatool.trace.lifetimes import Ints
from cudatool.trace.model import Trace
from cudatool.trace.streams import stream_names

__all__ = ["Copies", "KernelTotal", "Operations", "Stream", "calls", "copies", "kernels", "operations", "streams"]


@dataclass(frozen=True, slots=True)
class Operations:
    """Columns, one row for each execution interval, by start.

    Attributes
    ----------
    call
        Record of the call that enqueued it, -1 if that was not recorded.
    device, stream
        As in the records.
    start, end
        ns on the device's clock.
    name
        What it is called: as the call was, but for what a launch of a graph ran, which has names of its own. Captured
        products and collectives keep theirs.
    """

    call: Ints
    device: Ints
    stream: Ints
    start: Ints
    end: Ints
    name: Ints

    def __len__(self) -> int:
        return len(self.start)


def operations(trace: Trace) -> Operations:
    """Return the operations that the device executed, each tied to the call that enqueued it."""
    records = trace.records
    ran = as_called(trace.of_kind(Kind.EXECUTION), records)
    ran = ran[np.argsort(ran["aux0"], kind="stable")]
    calls = np.flatnonzero(np.isin(records["kind"], WORK))
    calls = calls[np.argsort(records["correlation"][calls], kind="stable")]
    correlation = records["correlation"][calls]
    call = np.full(len(ran), -1, np.int64)
    if len(calls):
        at = np.minimum(np.searchsorted(correlation, ran["correlation"]), len(calls) - 1)
        found = (correlation[at] == ran["correlation"]) & (ran["correlation"] > 0)
        call[found] = calls[at[found]]
    start, end = ran["aux0"].astype(np.int64), ran["aux1"].astype(np.int64)
    own, of_call = ran["name"].astype(np.int64), np.zeros(len(ran), np.int64)
    in_graph = np.zeros(len(ran), np.bool_)
    of_call[call >= 0] = records["name"][call[call >= 0]]
    in_graph[call >= 0] = records["kind"][call[call >= 0]] == Kind.GRAPH_LAUNCH
    name = np.where((in_graph & (own > 0)) | (of_call == 0), own, of_call)
    device, stream = ran["device"].astype(np.int64), ran["stream"].astype(np.int64)
    return Operations(call, device, stream, start, np.maximum(start, end), name)


def calls(trace: Trace) -> Operations:
    """Return the calls that enqueued work as operations without duration, at the host's time of each call."""
    call = _made(trace, *WORK)
    call = call[trace.records["stream"][call] > 0]
    of = trace.records[call]
    time = of["time"].astype(np.int64)
    device, stream = of["device"].astype(np.int64), of["stream"].astype(np.int64)
    return Operations(call, device, stream, time, time, of["name"].astype(np.int64))


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """All launches of one kernel, cuBLAS routine or collective; `time` is their total in ns, None if unknown."""

    name: str
    launches: int
    time: int | None


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies (or fills) in one direction; `time` is their execution time in ns, None if not recorded."""

    direction: str
    count: int
    size: int
    time: int | None


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream: its name, the number of its operations and their total time (ns)."""

    device: int
    id: int
    label: str
    operations: int
    busy: int


def kernels(trace: Trace, ran: Operations) -> tuple[KernelTotal, ...]:
    """Return kernels by execution time (by launches where that is unknown), the largest first.

    A graph launch counts as a launch of its nodes: kernels, and products and collectives that were captured.
    """
    time, seen = _time_by_call(trace, ran)
    calls = _made(trace, Kind.KERNEL_LAUNCH, Kind.GEMM, Kind.COLLECTIVE)
    in_graphs = trace.of_kind(Kind.EXECUTION)
    in_graphs = in_graphs[(in_graphs["flags"] & 1) != 0]
    listed = in_graphs["correlation"][in_graphs["address"] == 0]  # as a GPU's kernels: not by node
    replayed = _replayed(trace, set(listed.tolist()))
    rows = []
    for name in sorted({*trace.records["name"][calls].tolist(), *in_graphs["name"].tolist(), *replayed}):
        own = calls[trace.records["name"][calls] == name]
        graph = in_graphs[in_graphs["name"] == name]
        again, took = replayed.get(name, (0, 0))
        known = len(graph) or took or seen[own].any()
        spent = int(time[own].sum()) + int((graph["aux1"].astype(np.int64) - graph["aux0"].astype(np.int64)).sum())
        rows.append(KernelTotal(trace.names[name], len(own) + len(graph) + again, spent + took if known else None))
    return tuple(sorted(rows, key=lambda row: (-(row.time or 0), -row.launches, row.name)))


def copies(trace: Trace, ran: Operations) -> tuple[Copies, ...]:
    """Return copies and fills by direction, the most bytes first."""
    time, seen = _time_by_call(trace, ran)
    records = trace.records
    calls = _made(trace, Kind.MEMCPY, Kind.MEMSET)
    ends = records["flags"][calls] & int(CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE)
    ends = np.where(records["kind"][calls] == Kind.MEMSET, 16, ends)
    rows = []
    for end in distinct(ends).tolist():
        own = calls[ends == end]
        if end == 16:
            direction = "fill"
        else:
            source = "device" if end & CopyFlag.SOURCE_DEVICE else "host"
            direction = f"{source} to {'device' if end & CopyFlag.DESTINATION_DEVICE else 'host'}"
        size = int(records["size"][own].sum())
        rows.append(Copies(direction, len(own), size, int(time[own].sum()) if seen[own].any() else None))
    return tuple(sorted(rows, key=lambda row: -row.size))


def streams(trace: Trace, ran: Operations) -> tuple[Stream, ...]:
    """Return every stream that the trace names, by id."""
    rows, names = [], stream_names(trace)
    for record in trace.of_kind(Kind.STREAM_CREATE):
        own = ran.stream == record["stream"]
        number = int(record["stream"])
        rows.append(
            Stream(int(record["device"]), number, names[number], int(own.sum()), _union(ran.start[own], ran.end[own]))
        )
    return tuple(sorted(rows, key=lambda row: row.id))


def _replayed(trace: Trace, listed: set[int]) -> dict[int, tuple[int, int]]:
    """Return how many products and collectives graph launches ran, by name, and how long they took (ns).

    Of launches in `listed`, by correlation, the kernels that these calls became are known.
    """
    captured = CapturedCalls()
    captured.add(trace.records)
    counts: Counter[int] = Counter()
    for launch, nodes in captured.launches.items():
        if launch not in listed:
            counts.update(name for _, name in {(call.correlation, call.name) for call in nodes.values()})
    took: Counter[int] = Counter()
    ran = trace.of_kind(Kind.EXECUTION)
    names, _ = captured.of(ran)
    own = np.flatnonzero(names)
    for name, start, end in zip(*(column[own].tolist() for column in (names, ran["aux0"], ran["aux1"])), strict=True):
        took[name] += end - start
    return {name: (count, took[name]) for name, count in counts.items()}


def _made(trace: Trace, *kinds: Kind) -> Ints:
    """Return the records of calls of these kinds, except those that are known to have become nodes of a graph."""
    records = trace.records
    nodes = trace.of_kind(Kind.GRAPH_NODE_ADDED)["correlation"]
    return np.flatnonzero(np.isin(records["kind"], kinds) & ~np.isin(records["correlation"], nodes))


def _time_by_call(trace: Trace, ran: Operations) -> tuple[Ints, Ints]:
    """Return execution time and number of executions for each record."""
    time, count = np.zeros(len(trace.records), np.int64), np.zeros(len(trace.records), np.int64)
    known = ran.call >= 0
    np.add.at(time, ran.call[known], (ran.end - ran.start)[known])
    np.add.at(count, ran.call[known], 1)
    return time, count


def _union(start: Ints, end: Ints) -> int:
    """Return the length of the union of intervals sorted by start."""
    if not len(start):
        return 0
    covered = np.maximum.accumulate(end)
    begin = np.maximum(start[1:], covered[:-1])
    return int((end[0] - start[0]) + np.maximum(end[1:] - begin, 0).sum())
