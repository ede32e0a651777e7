"""One run of a function without executing anything: its nodes, its buffers and their lifetimes.

The function runs while a stream is captured: arrays have shapes, dtypes and addresses, and no values. What it enqueues
is known from the events that the runtime emits, so tracing costs nothing when nothing is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, Final

import numpy as np

from cudatool.amp import get_autocast_dtype, is_autocast_enabled
from cudatool.compiler._accesses import BEFORE, NodeWork, PointwiseCall, RowsCall, Span, described, described_rows
from cudatool.compiler._plan import Buffer, PlanArena, rounded
from cudatool.errors import CudaError, GraphBreakError, OutOfMemoryError, UsageError
from cudatool.graphs import CUDAGraph, graph
from cudatool.ops._pointwise import PointwiseLaunch
from cudatool.ops._rows import RowCall
from cudatool.runtime.annotate import annotating
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.capture import captured_nodes
from cudatool.runtime.kernel import Kernel, memory_of_launch, watched
from cudatool.runtime.stream import Stream
from cudatool.trace import hooks, stacks
from cudatool.trace.events import AccessFlag, Event, Kind, PlanFlag

__all__ = ["ORDERS", "EventCollector", "Graph", "Node", "captured", "line_of_error", "plan_events", "traced_nodes"]

_NODES: Final = {
    Kind.KERNEL_LAUNCH: "kernel",
    Kind.MEMCPY: "copy",
    Kind.MEMSET: "fill",
    Kind.GEMM: "product",
    Kind.HOST_FUNCTION: "host function",
    Kind.EVENT_RECORD: "record_event",
    Kind.STREAM_WAIT_EVENT: "wait_event",
}
ORDERS: Final = ("record_event", "wait_event", "host function")
"""Kinds of nodes that other streams or the host wait for."""

_NOT_CAPTURED: Final = (Kind.EVENT_RECORD, Kind.STREAM_WAIT_EVENT)  # edges of the CUDA graph, not nodes


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
    parts
        The nodes that are one kernel here, which is the name's and is enqueued at the line of the last of them.
    """

    kind: str
    name: str
    op: str
    stream: int
    autocast: str
    line: str
    parts: tuple[Node, ...] = ()


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


class EventCollector:
    """Collects the events of one run.

    Attributes
    ----------
    buffers
        Allocations in their order, from the first node after it to the last before its free; the inputs come first.
    inputs
        How many of them are inputs.
    stacks
        Where each was made.
    work
        What is known of each node's accesses.
    calls
        The launches of elementwise functions, in their order.
    rows
        The same of kernels that work on rows.
    numbers
        The numbers that fills and elementwise functions are given, and the floating-point numbers among the arguments
        of other kernels, as text.
    ends_unseen
        Work without an event was enqueued after the last node.
    same, repeated
        Allocations that are others, and which of `calls` are not done since they would write these: see
        :mod:`cudatool.compiler._common`.
    """

    def __init__(self, device: int, stream: Stream, inputs: Mapping[str, DeviceArray] | None = None) -> None:
        self._device = device
        self._origin = stream  # of the capture
        self._captured = 0  # nodes of the CUDA graph
        self._before_product = -1  # how many there were when a product began that has no event yet
        self._owed = 0  # nodes whose event came before they were captured
        self._of_operation: dict[int, int] = {}  # correlation -> node
        self._thread = hooks.thread_id()
        self._nodes: list[tuple[int, Node]] = []  # with their time
        self._streams: dict[int, int] = {}
        self._live: dict[int, int] = {}  # address -> buffer
        self._calls: list[str] = []  # that enqueued nothing
        self._allocated: list[int] = []  # times
        self.buffers: list[Buffer] = []
        self.stacks: list[int] = []
        self.work: list[NodeWork] = []
        self.calls: list[PointwiseCall] = []
        self.rows: list[RowsCall] = []
        self.numbers: list[str] = []
        self.ends_unseen = False
        self.same: dict[int, int] = {}
        self.repeated: frozenset[int] = frozenset()
        self._launch = -1  # the node whose kernel's accesses are asked for
        for path, array in (inputs or {}).items():
            if array.size:
                self._live[array.data_ptr()] = len(self.buffers)
                number = self._streams.setdefault(stream.trace_id(), len(self._streams))
                self.buffers.append(Buffer(rounded(array.nbytes), 0, -1, True, number, True, path))
                self.stacks.append(0)
        self.inputs = len(self.buffers)

    def __call__(self, event: Event) -> None:
        if event.thread != self._thread:
            return
        if event.kind in _NODES:
            self._launch = -1  # also for one that is no node of this trace, being on another device
        if event.kind is Kind.CALL:
            self._call(event)
        elif event.kind is Kind.ACCESS:
            self._access(event)  # some say no device
        elif event.device == self._device or event.kind is Kind.STREAM_WAIT_EVENT:
            if event.kind in _NODES:
                self._node(event)
            elif event.kind is Kind.BLOCK_ALLOC:
                self._allocate(event)
            elif event.kind is Kind.BLOCK_FREE_REQUESTED and event.address in self._live:
                index = self._live.pop(event.address)
                self.buffers[index] = replace(self.buffers[index], last=len(self._nodes) - 1, kept=False)
            elif event.kind is Kind.BLOCK_RECORD_STREAM and event.address in self._live:
                index = self._live[event.address]
                self.buffers[index] = replace(self.buffers[index], shares=False)
        elif event.kind in _NODES:
            self._captured = -1  # work on another device, of which no node tells

    def launched(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        """Note what a kernel that was just launched may access, and what numbers it was given."""
        self.note_numbers(arguments)
        node, self._launch = self._launch, -1
        if node >= 0 and (found := memory_of_launch(kernel, arguments)) is not None:
            self.work[node].spans = [self._span(area.address, area.size, area.mode) for area in found]

    def take(self, call: PointwiseLaunch) -> Any:
        """Do the launch of an elementwise function, and note what it is."""
        found, before = described(call, self.place), len(self.work)
        with watched(_ignore):  # its accesses are known
            done = call.run()
        self.calls.append(found)
        self.note_scalars(call)
        if len(self.work) == before + 1:
            work = self.work[-1]
            work.call = found
            work.spans = [view.span(writes=True) for view in found.writes]
            work.spans += [view.span(writes=False) for view in found.reads if not isinstance(view, type)]
        return done

    def take_rows(self, call: RowCall) -> None:
        """Do the launch of a kernel that works on rows, and note what it is."""
        found, before = described_rows(call, self.place), len(self.work)
        call.run()
        self.rows.append(found)
        if len(self.work) == before + 1 and not annotating():
            self.work[-1].rows = found

    def note_scalars(self, call: PointwiseLaunch) -> None:
        """Note the numbers of an elementwise function, which must be the same in each run."""
        self.numbers += map(repr, call.pointwise.scalars(call))

    def note_numbers(self, values: Sequence[Any]) -> None:
        """Note numbers that must be the same in each run; integers may be addresses, which need not be."""
        self.numbers += [repr(value) for value in values if isinstance(value, float | complex | np.floating)]

    def place(self, address: int) -> tuple[int, int]:
        """Return which allocation an address is in, and how far."""
        for start, index in self._live.items():
            if start <= address < start + self.buffers[index].size:
                return index, address - start
        return BEFORE, address

    def _span(self, address: int, size: int, flags: int) -> Span:
        buffer, low = self.place(address)
        atomic = bool(flags & AccessFlag.ATOMIC)
        reads, writes = bool(flags & AccessFlag.READ) or atomic, bool(flags & AccessFlag.WRITE) or atomic
        return Span(buffer, low, low + size, reads, writes)

    def _access(self, event: Event) -> None:
        node = self._of_operation.get(event.correlation)
        if node is None:
            return
        work = self.work[node]
        size = event.size + event.aux0 * max(event.aux1 - 1, 0)  # of rows, from the first to the last
        work.spans = [*(work.spans or ()), self._span(event.address, size, event.flags)]

    def _stream(self, event: Event) -> int:
        return self._streams.setdefault(event.stream, len(self._streams))

    def _node(self, event: Event) -> None:
        autocast = str(get_autocast_dtype()) if is_autocast_enabled() else ""
        node = Node(_NODES[event.kind], event.name, "", self._stream(event), autocast, _line())
        if event.correlation:
            self._of_operation[event.correlation] = len(self._nodes)
        self._nodes.append((event.time, node))
        if event.kind is Kind.MEMSET:
            self.numbers.append(f"fill {event.aux0}")
        edge = event.kind in _NOT_CAPTURED
        self._launch = len(self.work) if event.kind is Kind.KERNEL_LAUNCH else -1
        early = event.kind is Kind.MEMCPY  # whose event comes before the call
        if event.kind is Kind.GEMM and self._before_product >= 0:
            unseen = self._unseen(self._owed, until=self._before_product)
        else:
            unseen = self._unseen(self._owed + (not edge and not early))
        self._before_product = -1
        self._owed = int(early)
        self.work.append(NodeWork([] if edge else None, after_unseen=unseen, stack=event.stack))

    def product_begins(self) -> None:
        """Note that all that is captured until the next node is a product's, which may fill memory first."""
        with suppress(CudaError):  # the capture has failed, which its end will say
            self._before_product = captured_nodes(self._origin)

    def _unseen(self, expected: int, until: int = -1) -> bool:
        """Return whether more was captured since the last node than `expected`: by others than cudatool.

        Parameters
        ----------
        until
            How many nodes there were when what the event tells of began; until now if it is negative.
        """
        before = self._captured
        try:
            self._captured = captured_nodes(self._origin)
        except CudaError:  # the capture has failed, which its end will say
            return True
        return before < 0 or (self._captured if until < 0 else until) - before > expected

    def _allocate(self, event: Event) -> None:
        self._live[event.address] = len(self.buffers)
        size = rounded(event.aux0)
        self.buffers.append(Buffer(size, len(self._nodes), -1, True, self._stream(event), True, _line()))
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

    def replace_last(self, node: Node) -> None:
        """Say what the last node is, of which the event did not tell all."""
        time, last = self._nodes[-1]
        self._nodes[-1] = time, replace(node, stream=last.stream)

    def keep(self, nodes: Sequence[int]) -> None:
        """Forget all nodes but these."""
        self._nodes = [self._nodes[index] for index in nodes]

    def end(self) -> None:
        """Note that nothing more will be enqueued."""
        self.ends_unseen = self._unseen(self._owed)

    def graph(self) -> Graph:
        """Return what was traced."""
        return Graph(tuple(node for _, node in self._nodes), tuple(dict.fromkeys(self._calls)))

    def finished(self) -> list[Buffer]:
        """Return the buffers; what still exists lasts to the end."""
        last = len(self._nodes) - 1
        return [replace(b, last=last) if b.kept else b for b in self.buffers]


def _ignore(kernel: Kernel, arguments: tuple[Any, ...]) -> None:
    pass


@contextmanager
def captured(cuda_graph: CUDAGraph, stream: Stream, trace: EventCollector) -> Iterator[None]:
    """Capture what is enqueued inside into `cuda_graph`, and let `trace` have its events.

    Raises
    ------
    GraphBreakError
        Something inside needs a value, or waits for the device; or nothing was enqueued.
    """
    try:
        # What other threads do is no concern of the function: the default mode would refuse it, and end the capture.
        with graph(cuda_graph, stream=stream, capture_error_mode="thread_local"):
            hooks.subscribe(trace)
            try:
                yield
                trace.end()
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


def plan_events(
    name: str,
    device: int,
    graph: Graph,
    arena: PlanArena,
    allocated_at: Sequence[int],
    fused_at: Mapping[int, Sequence[int]],
) -> list[Event]:
    """Return the events that describe where the buffers of a graph lie.

    Parameters
    ----------
    name
        The function's.
    allocated_at
        The stack of each buffer's allocation.
    fused_at
        For each node that has parts, the stacks of these.
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
        name_of_buffer = node.op or node.name if stack else buffer.line  # an argument was allocated by no node
        events.append(
            Event(0, Kind.PLANNED_BUFFER, device, flags, thread, 0, number, stack or here, name_of_buffer,
                  start + offset, buffer.size, buffer.first, buffer.last + 1)
        )
    # fmt: on
    for index, at in fused_at.items():
        node = graph.nodes[index]
        names = [node.name, *(part.op or part.name for part in node.parts)]
        events += [
            Event(0, Kind.FUSED_OPERATION, device, 0, thread, 0, number, stack, of, 0, 0, index, place)
            for place, (of, stack) in enumerate(zip(names, [at[-1], *at], strict=True))
        ]
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
