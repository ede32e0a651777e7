"""One run of a function without executing anything: its nodes, its buffers and their lifetimes.

The function runs while a stream is captured: arrays have shapes, dtypes and addresses, and no values. What it enqueues
is known from the events that the runtime emits, so tracing costs nothing when nothing is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Final

from cudatool.amp import get_autocast_dtype, is_autocast_enabled
from cudatool.compiler._plan import Arena, Buffer, rounded
from cudatool.errors import CudaError, GraphBreakError, OutOfMemoryError, UsageError
from cudatool.graphs import CUDAGraph, graph
from cudatool.runtime.stream import Stream
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Event, Kind, PlanFlag

__all__ = ["Graph", "Node", "Trace", "captured", "line_of_error", "plan_events", "traced_nodes"]

_NODES: Final = {
    Kind.KERNEL_LAUNCH: "kernel",
    Kind.MEMCPY: "copy",
    Kind.MEMSET: "fill",
    Kind.GEMM: "product",
    Kind.HOST_FUNCTION: "host function",
    Kind.EVENT_RECORD: "record_event",
    Kind.STREAM_WAIT_EVENT: "wait_event",
}


@dataclass(frozen=True, slots=True)
class Node:
    """One thing that a graph does.

    Attributes
    ----------
    kind
        ``"kernel"``, ``"product"``, ``"copy"``, ``"fill"``, ``"host function"``, ``"record_event"``, ``"wait_event"``.
    name
        The kernel, the routine or the driver's function.
    op
        The public function that enqueued it, such as ``cudatool.ops.softmax``; empty if it was enqueued directly.
    stream
        Number of its stream, in order of appearance.
    autocast
        The dtype of the autocast region around it; empty outside of one.
    line
        The program's line, as ``file.py:12``.
    """

    kind: str
    name: str
    op: str
    stream: int
    autocast: str
    line: str


@dataclass(frozen=True, slots=True)
class Graph:
    """What a traced function does.

    Attributes
    ----------
    nodes
        In the order in which they were enqueued.
    folded
        Public functions that were called and enqueued nothing: their results are constants of the graph.
    """

    nodes: tuple[Node, ...]
    folded: tuple[str, ...]


class Trace:
    """Collects the events of one run.

    Attributes
    ----------
    buffers, lifetimes
        Allocations in their order, and when each was made and freed, on a clock of allocations and frees.
    stacks
        Where each was made.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._thread = hooks.thread_id()
        self._nodes: list[tuple[int, Node]] = []  # with their time
        self._streams: dict[int, int] = {}
        self._live: dict[int, int] = {}  # address -> buffer
        self._calls: list[str] = []  # that enqueued nothing
        self._allocated: list[int] = []  # times
        self._clock = 0
        self.buffers: list[Buffer] = []
        self.lifetimes: list[tuple[int, int]] = []
        self.stacks: list[int] = []

    def __call__(self, event: Event) -> None:
        if event.thread != self._thread:
            return
        if event.kind is Kind.CALL:
            self._call(event)
        elif event.device == self._device or event.kind is Kind.STREAM_WAIT_EVENT:
            if event.kind in _NODES:
                self._node(event)
            elif event.kind is Kind.BLOCK_ALLOC:
                self._allocate(event)
            elif event.kind is Kind.BLOCK_FREE_REQUESTED and event.address in self._live:
                index = self._live.pop(event.address)
                self.buffers[index] = replace(self.buffers[index], last=len(self._nodes) - 1, kept=False)
                self.lifetimes[index] = self.lifetimes[index][0], self._tick()
            elif event.kind is Kind.BLOCK_RECORD_STREAM and event.address in self._live:
                index = self._live[event.address]
                self.buffers[index] = replace(self.buffers[index], shares=False)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _stream(self, event: Event) -> int:
        return self._streams.setdefault(event.stream, len(self._streams))

    def _node(self, event: Event) -> None:
        autocast = str(get_autocast_dtype()) if is_autocast_enabled() else ""
        node = Node(_NODES[event.kind], event.name, "", self._stream(event), autocast, _line())
        self._nodes.append((event.time, node))

    def _allocate(self, event: Event) -> None:
        self._live[event.address] = len(self.buffers)
        size = rounded(event.aux0)
        self.buffers.append(Buffer(size, len(self._nodes), -1, True, self._stream(event), True, _line()))
        self.lifetimes.append((self._tick(), sys.maxsize))
        self._allocated.append(event.time)
        self.stacks.append(event.stack)

    def _call(self, event: Event) -> None:
        """Name the nodes that a public function has enqueued; the outermost one ends last and has the last word."""
        start = event.time - event.aux0
        index = len(self._nodes)
        while index and self._nodes[index - 1][0] >= start:
            index -= 1
            time, node = self._nodes[index]
            self._nodes[index] = time, replace(node, op=event.name)
        if index == len(self._nodes) and not event.aux1 and not (self._allocated and self._allocated[-1] >= start):
            self._calls.append(event.name)

    def graph(self) -> Graph:
        """Return what was traced."""
        return Graph(tuple(node for _, node in self._nodes), tuple(dict.fromkeys(self._calls)))

    def finished(self) -> tuple[list[Buffer], list[tuple[int, int]]]:
        """Return buffers and lifetimes; what still exists lasts to the end."""
        last = len(self._nodes) - 1
        return [replace(b, last=last) if b.kept else b for b in self.buffers], list(self.lifetimes)


@contextmanager
def captured(cuda_graph: CUDAGraph, stream: Stream, trace: Trace) -> Iterator[None]:
    """Capture what is enqueued inside into `cuda_graph`, and let `trace` have its events.

    Raises
    ------
    GraphBreakError
        Something inside needs a value, or waits for the device; or nothing was enqueued.
    """
    try:
        with graph(cuda_graph, stream=stream):
            hooks.subscribe(trace)
            try:
                yield
                if not trace.graph().nodes:
                    raise GraphBreakError("the function enqueues nothing")
            finally:
                hooks.unsubscribe(trace)
    except OutOfMemoryError:
        raise
    except GraphBreakError as error:
        raise GraphBreakError(error.reason, error.line or line_of_error(error.__traceback__)) from error
    except (CudaError, UsageError) as error:
        # The function has run eagerly before, without this: it does something that only a capture refuses.
        reason = f"this cannot be part of a graph: {error}"
        raise GraphBreakError(reason, line_of_error(error.__traceback__)) from error


def traced_nodes(graph: Graph) -> list[tuple[str, str, int]]:
    """Return what two runs of one function have in common."""
    return [(node.kind, node.name, node.stream) for node in graph.nodes]


def plan_events(name: str, device: int, graph: Graph, arena: Arena, allocated_at: Sequence[int]) -> list[Event]:
    """Return the events that describe where the buffers of a graph lie.

    Parameters
    ----------
    name
        The function's.
    allocated_at
        The stack of each buffer's allocation.
    """
    number, thread, planned = hooks.new_correlation(), hooks.thread_id(), arena.plan
    start, here = arena.address, stacks.capture()
    # fmt: off
    events = [
        Event(0, Kind.MEMORY_PLAN, device, 0, thread, 0, number, here, name, start, planned.peak, arena.peak,
              len(graph.nodes))
    ]
    for buffer, offset, stack in zip(planned.buffers, planned.offsets, allocated_at, strict=True):
        flags = (PlanFlag.KEPT if buffer.kept else 0) | (0 if buffer.shares else PlanFlag.ALONE)
        node = graph.nodes[min(buffer.first, len(graph.nodes) - 1)]
        events.append(
            Event(0, Kind.PLANNED_BUFFER, device, flags, thread, 0, number, stack, node.op or node.name,
                  start + offset, buffer.size, buffer.first, buffer.last + 1)
        )
    # fmt: on
    return events


def _is_ours(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name.partition(".")[0] == "cudatool" or name == "contextlib"


def _line() -> str:
    """Return the innermost line of the program that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return "" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno)


def line_of_error(traceback: TracebackType | None) -> str:
    """Return the innermost line of the program that an exception passed."""
    found = ""
    while traceback is not None:
        if not _is_ours(traceback.tb_frame):
            found = _place(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _place(filename: str, line: int) -> str:
    return f"{filename.rpartition('/')[2]}:{line}"
