"""Turns the log of a PyTorch program into the events of a trace.

An operator is logged when it ends, after the allocations and synchronizations inside it. So the order is corrected
here::

    BEGIN .. CALL of one thread:  allocations, and what of these is freed again: where they are
                                  the operator's launch
                                  its synchronizations, event records and waits
                                  the launch again, if it went on after a synchronization
                                  frees of what was there before: it may have been used
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cudatool.collect.torch_accesses import ByteSet, Plan
from cudatool.collect.torch_calls import Access, Call, OnHost, make_call, merged
from cudatool.collect.torch_rows import Action, Note, Row, RowKind, TraceCall, read_rows, read_tensors
from cudatool.memory.blocks import MIN_BLOCK_SIZE
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Api, Event, Kind, StreamFlag

__all__ = ["TorchEvents"]

_MOST_ROWS = 64  # of memory that the host touches
_NOTHING = Call("")

_SEGMENTS = {
    Action.SEGMENT_ALLOC: Kind.SEGMENT_ALLOC,
    Action.SEGMENT_FREE: Kind.SEGMENT_FREE,
    Action.SEGMENT_MAP: Kind.SEGMENT_MAP,
    Action.SEGMENT_UNMAP: Kind.SEGMENT_UNMAP,
}
_LAST_DEFAULT = 2  # CU_STREAM_PER_THREAD


@dataclass(slots=True)
class _Open:
    """An operator that has not ended: the rows that wait for its end, its frees, and what it has allocated."""

    waiting: list[Row] = field(default_factory=list)
    frees: list[Row] = field(default_factory=list)
    made: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Captured:
    """The accesses of a CUDA graph, whether they are complete, and the events that it waits for and may record when it
    runs.

    PyTorch does not say which events are external. But it reports only calls that succeeded, and only external events
    can be waited for across a graph's border.
    """

    accesses: list[Access] = field(default_factory=list)
    is_known: bool = True
    waits: list[int] = field(default_factory=list)


class TorchEvents:
    """Reads logs and passes events on.

    Parameters
    ----------
    emit
        Called with each event.
    plan_of
        Returns the plan of an operator, by its name with overload.
    names
        Returns the names of operators and nodes, by index.
    """

    def __init__(
        self, emit: Callable[[Event], None], plan_of: Callable[[str], Plan], names: Callable[[], Sequence[str]]
    ) -> None:
        self._emit = emit
        self._clock = 0
        self._plan_of = plan_of
        self._names = names
        self._known_names: Sequence[str] = ()
        self._calls: dict[int, Call] = {}
        self._streams: dict[tuple[int, int], int] = {}  # device and handle -> id
        self._created: dict[int, tuple[int, StreamFlag]] = {}  # stream handle -> device, and how it was created
        self._open: dict[int, _Open] = {}  # by thread
        self._stacks: dict[int, int] = {}  # call -> stack, of the log being read
        self._blocks: dict[int, tuple[int, int]] = {}  # address -> size asked for, stream id
        self._freeing: dict[int, Event] = {}  # device -> a free that may complete at once
        self._capturing: dict[int, int] = {}  # stream id -> graph
        self._captured_events: dict[int, int] = {}  # event handle -> graph, while that is captured
        self._recorded_by: dict[int, int] = {}  # event handle -> graph, if it was last recorded in a capture
        self._graphs: dict[int, _Captured] = {}
        self._of_graphs: set[int] = set()  # addresses of blocks that belong to graphs
        self._row = Row(0, 0, 0, ())

    def read(self, log: bytes) -> None:
        """Pass on the events of a log. Logs must come in order; each begins and ends at a row."""
        rows = list(read_rows(log))
        # An allocation has the stack of the operator in which it happens, which is written after it.
        self._stacks = {row.words[0]: row.words[2] for row in rows if row.kind == RowKind.CALL}
        for row in rows:
            self._read(row)

    def finish(self) -> None:
        """Pass on what is still held back."""
        for thread in list(self._open):
            unfinished = self._open.pop(thread)
            for row in unfinished.waiting + unfinished.frees:
                self._perform(row)
        for device in list(self._freeing):
            self._complete(device, at_once=False)

    # Rows -------------------------------------------------------------------------------------------------------

    def _read(self, row: Row) -> None:
        self._row = row
        kind = row.kind
        if kind == RowKind.PAYLOAD:
            self._calls[row.words[0]] = self._make_call(row.words)
        elif kind == RowKind.STREAM:
            handle, device, flags = row.words
            self._created[handle] = device, StreamFlag.NON_BLOCKING if flags & 1 else StreamFlag(0)
        elif kind == RowKind.BEGIN:
            self._open[row.thread] = _Open()
        elif kind == RowKind.CALL:
            self._call(row)
        elif kind == RowKind.MEMORY:
            self._order_memory(row)
        elif row.thread in self._open:
            self._open[row.thread].waiting.append(row)
        else:
            self._perform(row)

    def _call(self, row: Row) -> None:
        _, number, stack = row.words
        inside = self._open.pop(row.thread, None) or _Open()
        waiting = inside.waiting
        call = self._calls.get(number, _NOTHING)
        if call.is_between_devices:
            # A copy between two devices: the source's stream first waits for the destination's.
            waits = [index for index, other in enumerate(waiting) if other.words[0] == TraceCall.EVENT_WAIT]
            before = waits[0] + 1 if waits else 0
            for other in waiting[:before]:
                self._perform(other)
            waiting = waiting[before:]
        self._row = row
        self._launch(call, stack)
        for other in waiting:
            self._perform(other)
        synchronized = (TraceCall.STREAM_SYNCHRONIZE, RowKind.TRACE)
        if call.goes_on and any((other.words[0], other.kind) == synchronized for other in waiting):
            self._row = row
            self._launch(call, stack)
        for other in inside.frees:
            self._perform(other)

    def _perform(self, row: Row) -> None:
        self._row = row
        if row.kind == RowKind.TRACE:
            self._trace(*row.words)
        elif row.kind == RowKind.MEMORY:
            self._memory(*row.words)
        else:
            self._note(*row.words)

    # Operators --------------------------------------------------------------------------------------------------

    def _make_call(self, words: tuple[int, ...]) -> Call:
        _, operator, node, extra, count = words[:5]
        name = self._name(operator)
        tensors = list(read_tensors(words[5:], count))
        return make_call(name, self._name(node), self._plan_of(name), tensors, extra)

    def _name(self, index: int) -> str:
        if index >= len(self._known_names):
            self._known_names = self._names()
        return self._known_names[index]

    def _launch(self, call: Call, stack: int) -> None:
        if call.used_on is not None:
            address, handle = call.used_on
            size, _ = self._blocks.get(address, (0, 0))
            if size:
                where = {"device": call.device, "stream": self._stream(call.device, handle), "address": address}
                self._event(Kind.BLOCK_RECORD_STREAM, **where, size=size, stack=stack)
        for address, size in call.made:
            self._event(Kind.HOST_ALLOC, address=address, size=size, name=call.name, stack=stack)
        for found in call.on_host:
            self._host_access(found, stack)
        if call.runs:
            self._start(call, stack)

    def _start(self, call: Call, stack: int) -> None:
        """Record an operation of the device, or of the graph that is being captured."""
        stream = self._stream(call.device, call.stream)
        graph = self._capturing.get(stream)
        if graph is not None:  # it runs when the graph does
            self._graphs[graph].accesses += call.accesses
            self._graphs[graph].is_known &= call.is_known
            return
        correlation = hooks.new_correlation()
        where: dict[str, Any] = {"device": call.device, "stream": stream, "correlation": correlation}
        where |= {"name": call.name, "stack": stack}
        if call.copy is not None:
            flags, to, source, size = call.copy
            self._event(Kind.MEMCPY, **where, address=to, size=size, aux0=source, flags=flags)
        else:
            self._event(Kind.KERNEL_LAUNCH, **where)
        self._accesses(call.accesses, call.device, stream, correlation)

    def _accesses(self, accesses: Iterable[Access], device: int, stream: int, correlation: int) -> None:
        time, thread, kind, emit, new = self._clock, self._row.thread, Kind.ACCESS, self._emit, tuple.__new__
        for address, size, flags, stride, rows, name in accesses:
            # fmt: off
            emit(new(Event, (time, kind, device, flags, thread, stream, correlation, 0, name, address, size, stride,
                             rows)))
            # fmt: on

    def _host_access(self, what: OnHost, stack: int) -> None:
        found, flags = what
        if found.rows > _MOST_ROWS:  # a record has one run
            found = ByteSet(found.address, found.stride * (found.rows - 1) + found.size)
            flags |= AccessFlag.INEXACT
        for index in range(found.rows):
            address = found.address + index * found.stride
            self._event(Kind.HOST_ACCESS, address=address, size=found.size, flags=flags, stack=stack)

    # Streams and events -----------------------------------------------------------------------------------------

    def _stream(self, device: int, handle: int) -> int:
        flags = StreamFlag(0)
        if handle > _LAST_DEFAULT:  # a handle belongs to one device; the default streams' handles are the same on each
            device, flags = self._created.get(handle, (device, StreamFlag.NON_BLOCKING))
        found = self._streams.get((device, handle))
        if found is None:
            found = self._streams[device, handle] = hooks.stream_id(
                device, handle, flags=flags, api=lambda: Api.TORCH, report=self._report_stream
            )
        return found

    def _report_stream(self, fields: dict[str, Any]) -> None:
        self._event(Kind.STREAM_CREATE, **fields)

    def _trace(self, what: int, first: int, second: int, device: int, stack: int) -> None:
        if what == TraceCall.EVENT_RECORD:
            stream = self._stream(device, second)
            if stream in self._capturing:
                self._captured_events[first] = self._recorded_by[first] = self._capturing[stream]
            else:
                self._captured_events.pop(first, None)
                self._recorded_by.pop(first, None)
            event = hooks.event_id(first)
            self._event(Kind.EVENT_RECORD, device=device, stream=stream, aux0=event, stack=stack)
        elif what == TraceCall.EVENT_WAIT:
            stream = self._stream(device, second)
            if first in self._captured_events:
                self._capturing[stream] = self._captured_events[first]
            elif stream in self._capturing:
                self._graphs[self._capturing[stream]].waits.append(first)
                return
            event = self._event_id(first)
            self._event(Kind.STREAM_WAIT_EVENT, device=device, stream=stream, aux0=event, stack=stack)
        elif what == TraceCall.EVENT_SYNCHRONIZE:
            self._event(Kind.EVENT_SYNCHRONIZE, device=device, aux0=self._event_id(first), stack=stack)
        elif what == TraceCall.EVENT_DELETION:
            self._captured_events.pop(first, None)
            self._recorded_by.pop(first, None)
            hooks.close_event(_as_graphs_record_it(first))
            if event := hooks.close_event(first):
                self._event(Kind.EVENT_DESTROY, device=device, aux0=event)
        elif what == TraceCall.STREAM_SYNCHRONIZE:
            self._event(Kind.STREAM_SYNCHRONIZE, device=device, stream=self._stream(device, first), stack=stack)
        elif what == TraceCall.DEVICE_SYNCHRONIZE:
            self._event(Kind.DEVICE_SYNCHRONIZE, device=device, stack=stack)

    def _event_id(self, handle: int) -> int:
        """Return the id of an event's latest record, which may be that of a graph's launch."""
        of_launch = handle in self._recorded_by and handle not in self._captured_events
        return hooks.event_id(_as_graphs_record_it(handle) if of_launch else handle)

    def _note(self, stack: int, what: int, first: int, second: int, third: int = 0, *more: int) -> None:
        if what == Note.EVENT_QUERY:
            self._event(Kind.EVENT_QUERY, aux0=self._event_id(first), aux1=second, stack=stack)
            return
        if what == Note.HOST_ACCESS:
            self._host_access((ByteSet(first, second), AccessFlag(third)), stack)
            return
        if what == Note.EMPTY_WAIT:
            unrecorded = hooks.event_id(0)
            hooks.close_event(0)
            stream = self._stream(second, first)
            self._event(Kind.STREAM_WAIT_EVENT, device=second, stream=stream, aux0=unrecorded, stack=stack)
            return
        if what == Note.STREAM_QUERY:
            stream = self._stream(third, first)
            self._event(Kind.STREAM_QUERY, device=third, stream=stream, aux1=second, stack=stack)
            return
        stream = self._stream(third, second)
        if what == Note.GRAPH_BEGIN:
            self._capturing[stream] = first
            self._graphs[first] = _Captured()
            self._event(Kind.GRAPH_CAPTURE_BEGIN, device=third, stream=stream, stack=stack)
        elif what == Note.GRAPH_END:
            self._capturing = {s: graph for s, graph in self._capturing.items() if graph != first}
            self._captured_events = {e: graph for e, graph in self._captured_events.items() if graph != first}
            if first in self._graphs:
                self._graphs[first].accesses = merged(self._graphs[first].accesses)
            self._event(Kind.GRAPH_CAPTURE_END, device=third, stream=stream, aux0=first, stack=stack)
        elif what == Note.GRAPH_LAUNCH:
            self._graph_launch(first, third, stream, stack)
        elif what == Note.LAUNCH:
            ranges = zip(more[::3], more[1::3], more[2::3], strict=True)
            accesses: list[Access] = [(address, size, flags, 0, 0, "") for address, size, flags in ranges]
            self._start(Call(self._name(first), third, second, accesses=accesses), stack)

    def _graph_launch(self, graph: int, device: int, stream: int, stack: int) -> None:
        captured = self._graphs.get(graph, _Captured(is_known=False))
        correlation = hooks.new_correlation()
        for event in captured.waits:
            self._event(Kind.STREAM_WAIT_EVENT, device=device, stream=stream, aux0=self._event_id(event), stack=stack)
        where = {"device": device, "stream": stream, "correlation": correlation}
        self._event(Kind.GRAPH_LAUNCH, **where, aux0=graph, name="CUDAGraph.replay", stack=stack)
        for handle in [handle for handle, by in self._recorded_by.items() if by == graph]:
            event = hooks.event_id(_as_graphs_record_it(handle))
            self._event(Kind.EVENT_RECORD, device=device, stream=stream, aux0=event, stack=stack)
        if captured.is_known:
            self._accesses(captured.accesses, device, stream, correlation)

    # Memory -----------------------------------------------------------------------------------------------------

    def _order_memory(self, row: Row) -> None:
        action, address, size = row.words[:3]
        own = self._open.get(row.thread)
        if action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            if own is not None and address not in own.made:
                own.frees.append(row)
                return
        elif action == Action.ALLOC:
            for other in self._open.values():
                if any(
                    free.words[1] < address + size and address < free.words[1] + free.words[2] for free in other.frees
                ):
                    frees, other.frees = other.frees, []  # their memory is reused
                    for free in frees:
                        self._perform(free)
            if own is not None:
                own.made.add(address)
        self._perform(row)

    def _memory(self, action: int, address: int, size: int, handle: int, device: int, call: int, stack: int) -> None:
        if action in (Action.SNAPSHOT, Action.OOM):
            return
        waiting = self._freeing.get(device)
        if waiting is not None:
            self._complete(device, at_once=action == Action.FREE_COMPLETED and address == waiting.address)
        stream, stack = self._stream(device, handle), stack or self._stacks.get(call, 0)
        if action in _SEGMENTS:
            kind = _SEGMENTS[Action(action)]
            self._event(kind, device=device, stream=stream, address=address, size=size, stack=stack)
            return
        block = -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        where: dict[str, Any] = {"device": device, "stream": stream, "address": address, "size": block, "aux0": size}
        if action == Action.ALLOC:
            # A graph keeps its memory: what is freed during capture is free for the same graph alone.
            if stream in self._capturing:
                self._of_graphs.add(address)
                return
            self._of_graphs.discard(address)
            self._blocks[address] = block, stream
            self._event(Kind.BLOCK_ALLOC, **where, stack=stack)
        elif address in self._of_graphs:
            return
        elif action == Action.FREE_REQUESTED:
            self._blocks.pop(address, None)
            self._freeing[device] = self._make(Kind.BLOCK_FREE_REQUESTED, **where, stack=stack)
        elif action == Action.FREE_COMPLETED:
            self._event(Kind.BLOCK_FREE_COMPLETED, **where)

    def _complete(self, device: int, *, at_once: bool) -> None:
        """Pass on a free. If it does not complete at once, the allocator waits for streams that used the block.

        If autograd calls record_stream internally, the log does not name them, so all streams of the device count.
        """
        event = self._freeing.pop(device)
        if not at_once:
            for (where, _), stream in self._streams.items():
                if where == device and stream != event.stream:
                    self._pass_on(event._replace(kind=Kind.BLOCK_RECORD_STREAM, stream=stream, aux0=0))
        self._pass_on(event)

    # Events -----------------------------------------------------------------------------------------------------

    def _make(
        self,
        kind: Kind,
        *,
        device: int = -1,
        stream: int = 0,
        correlation: int = 0,
        name: str = "",
        address: int = 0,
        size: int = 0,
        flags: int = 0,
        aux0: int = 0,
        aux1: int = 0,
        stack: int = 0,
    ) -> Event:
        row = self._row
        return Event(
            row.time, kind, device, flags, row.thread, stream, correlation, stack, name, address, size, aux0, aux1
        )

    def _pass_on(self, event: Event) -> None:
        """Pass on events. Those that waited for their operator's end get its time: time never runs backwards."""
        self._clock = max(self._clock, event.time)
        self._emit(event if event.time == self._clock else event._replace(time=self._clock))

    def _event(self, kind: Kind, **fields: Any) -> None:
        self._pass_on(self._make(kind, **fields))


def _as_graphs_record_it(handle: int) -> int:
    """Return the replacement for the handle of an event that graph launches record."""
    return ~handle
