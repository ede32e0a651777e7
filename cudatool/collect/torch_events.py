"""Turns the log of a PyTorch program into the events of a trace.

An operator is logged when it ends, after the allocations and synchronizations inside it. So the order is corrected
here::

    BEGIN .. CALL of one thread:  allocations, and what of these is freed again: where they are
                                  the operator's launch
                                  its synchronizations, event records and waits
                                  the launch again, if it went on after a synchronization
                                  frees of what was there before: it may have been used

A step of a model is some thousand rows, and what is read at a program's end keeps its user waiting. So events are
packed as a trace's records at once, and passed on many together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.collect.torch_accesses import ByteSet, OperatorPlan
from cudatool.collect.torch_calls import OnHost, OperatorCall, TensorAccess, make_call, merged
from cudatool.collect.torch_rows import Action, Note, Row, RowKind, TraceCall, read_rows, read_tensors, stacks_of_calls
from cudatool.memory.blocks import MIN_BLOCK_SIZE
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, AccessFlag, Api, GraphLaunchFlag, Kind, StreamFlag, pack_record

__all__ = ["TorchEvents"]

_MOST_ROWS = 64  # of memory that the host touches
_NOTHING = OperatorCall("")

_SEGMENTS: dict[int, Kind] = {
    Action.SEGMENT_ALLOC: Kind.SEGMENT_ALLOC,
    Action.SEGMENT_FREE: Kind.SEGMENT_FREE,
    Action.SEGMENT_MAP: Kind.SEGMENT_MAP,
    Action.SEGMENT_UNMAP: Kind.SEGMENT_UNMAP,
}
_FREES = frozenset([Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.FREED])
_LAST_DEFAULT = 2  # CU_STREAM_PER_THREAD
_MOST_BYTES = 4 << 20  # of records that are passed on together
# What a record holds after its time, in this order.
_ADDRESS = 9
_Fields = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]


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

    accesses: list[TensorAccess] = field(default_factory=list)
    is_known: bool = True
    waits: list[int] = field(default_factory=list)


class TorchEvents:
    """Reads logs and passes events on.

    Parameters
    ----------
    forward_rows
        Called with records and the names that they refer to, as :func:`~cudatool.trace.hooks.forward_rows`.
    plan_of
        Returns the plan of an operator, by its name with overload.
    names
        Returns the names of operators and nodes, by index.
    """

    def __init__(
        self,
        forward_rows: Callable[[npt.NDArray[np.void], Sequence[str]], None],
        plan_of: Callable[[str], OperatorPlan],
        names: Callable[[], Sequence[str]],
    ) -> None:
        self._forward_rows = forward_rows
        self._records = bytearray()  # not passed on yet
        self._texts = {"": 0}  # that records refer to: their numbers
        self._clock = 0
        self._plan_of = plan_of
        self._names = names
        self._known_names: Sequence[str] = ()
        self._calls: dict[int, tuple[OperatorCall, bytes]] = {}  # by payload, with records of their accesses
        self._streams: dict[tuple[int, int], int] = {}  # device and handle -> id
        self._created: dict[int, tuple[int, StreamFlag]] = {}  # stream handle -> device, and how it was created
        self._open: dict[int, _Open] = {}  # by thread
        self._stacks: dict[int, int] = {}  # call -> stack, of the log being read
        self._blocks: dict[int, tuple[int, int]] = {}  # address -> size asked for, stream id
        self._freeing: dict[int, tuple[int, _Fields]] = {}  # device -> a free that may complete at once, and its time
        self._capturing: dict[int, int] = {}  # stream id -> graph
        self._captured_events: dict[int, int] = {}  # event handle -> graph, while that is captured
        self._recorded_by: dict[int, int] = {}  # event handle -> graph, if it was last recorded in a capture
        self._graphs: dict[int, _Captured] = {}
        self._of_graphs: set[int] = set()  # addresses of blocks that belong to graphs
        self._row = Row(0, 0, 0, ())

    def read(self, log: bytes) -> None:
        """Pass on the events of a log. Logs must come in order; each begins and ends at a row."""
        # An allocation has the stack of the operator in which it happens, which is written after it.
        self._stacks = stacks_of_calls(log)
        for row in read_rows(log):
            self._read(row)
            if len(self._records) > _MOST_BYTES:
                self._pass_on()
        self._pass_on()

    def finish(self) -> None:
        """Pass on what is still held back."""
        for thread in list(self._open):
            unfinished = self._open.pop(thread)
            for row in unfinished.waiting + unfinished.frees:
                self._perform(row)
        for device in list(self._freeing):
            self._complete(device, at_once=False)
        self._pass_on()

    # Rows -------------------------------------------------------------------------------------------------------

    def _read(self, row: Row) -> None:
        self._row = row
        kind = row.kind  # the most frequent ones first
        if kind == RowKind.MEMORY:
            self._order_memory(row)
        elif kind == RowKind.CALL:
            self._call(row)
        elif kind == RowKind.BEGIN:
            self._open[row.thread] = _Open()
        elif kind == RowKind.PAYLOAD:
            call = self._make_call(row.words)
            self._calls[row.words[0]] = call, self._packed(call.accesses)
        elif kind == RowKind.STREAM:
            handle, device, flags = row.words
            self._created[handle] = device, StreamFlag.NON_BLOCKING if flags & 1 else StreamFlag(0)
        elif row.thread in self._open:
            self._open[row.thread].waiting.append(row)
        else:
            self._perform(row)

    def _call(self, row: Row) -> None:
        _, number, stack = row.words
        inside = self._open.pop(row.thread, None) or _Open()
        waiting = inside.waiting
        call, accesses = self._calls.get(number, (_NOTHING, b""))
        if call.is_between_devices or call.is_collective:
            waits = [index for index, other in enumerate(waiting) if _is_trace(other, TraceCall.EVENT_WAIT)]
            # Of a copy, the source's stream first waits for the destination's; a collective runs after all its waits.
            before = waits[-1 if call.is_collective else 0] + 1 if waits else 0
            if call.is_collective:
                call, accesses = _as_it_ran(call, accesses, waiting)
            for other in waiting[:before]:
                self._perform(other)
            waiting = waiting[before:]
        self._row = row
        self._launch(call, accesses, stack)
        for other in waiting:
            self._perform(other)
        synchronized = (TraceCall.STREAM_SYNCHRONIZE, RowKind.TRACE)
        if call.goes_on and any((other.words[0], other.kind) == synchronized for other in waiting):
            self._row = row
            self._launch(call, accesses, stack)
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

    def _make_call(self, words: tuple[int, ...]) -> OperatorCall:
        _, operator, node, extra, count = words[:5]
        name = self._name(operator)
        tensors = list(read_tensors(words[5:], count))
        return make_call(name, self._name(node), self._plan_of(name), tensors, extra)

    def _name(self, index: int) -> str:
        if index >= len(self._known_names):
            self._known_names = self._names()
        return self._known_names[index]

    def _launch(self, call: OperatorCall, accesses: bytes, stack: int) -> None:
        if call.used_on is not None:
            address, handle = call.used_on
            size, _ = self._blocks.get(address, (0, 0))
            if size:
                used_on = self._stream(call.device, handle)
                self._event(
                    Kind.BLOCK_RECORD_STREAM,
                    device=call.device,
                    stream=used_on,
                    address=address,
                    size=size,
                    stack=stack,
                )
        for address, size in call.made:
            self._event(Kind.HOST_ALLOC, address=address, size=size, name=call.name, stack=stack)
        for found in call.on_host:
            self._host_access(found, stack)
        if call.runs:
            self._start(call, accesses, stack)

    def _start(self, call: OperatorCall, accesses: bytes, stack: int) -> None:
        """Record an operation of the device, or of the graph that is being captured."""
        stream = self._stream(call.device, call.stream)
        graph = self._capturing.get(stream)
        if graph is not None:  # it runs when the graph does
            self._graphs[graph].accesses += call.accesses
            self._graphs[graph].is_known &= call.is_known
            return
        row, correlation, name = self._row, hooks.new_correlation(), self._text(call.name)
        # fmt: off
        if call.copy is not None:
            flags, to, source, size = call.copy
            self._put(row.time, (Kind.MEMCPY, call.device, flags, row.thread, 0, stream, correlation, stack, name,
                                 to, size, source, 0))
        else:
            self._put(row.time, (Kind.KERNEL_LAUNCH, call.device, 0, row.thread, 0, stream, correlation, stack, name,
                                 0, 0, 0, 0))
        # fmt: on
        self._records += accesses

    def _packed(self, accesses: Iterable[TensorAccess]) -> bytes:
        """Return records of accesses, without what they have in common with the operation that is to precede them."""
        packed = [
            pack_record(0, Kind.ACCESS, 0, flags, 0, 0, 0, 0, 0, self._text(name), address, size, stride, rows)
            for address, size, flags, stride, rows, name in accesses
        ]
        return b"".join(packed)

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
        created = self._created.get(handle)
        if created is not None:  # a handle belongs to one device; the default streams' handles are the same on each
            device = created[0]
        found = self._streams.get((device, handle))
        if found is None:
            flags = StreamFlag.NON_BLOCKING if handle > _LAST_DEFAULT else StreamFlag(0)
            if created is not None:
                flags = created[1]
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
            where: dict[str, Any] = {"device": third, "stream": stream, "stack": stack}
            self._event(Kind.GRAPH_CAPTURE_END, **where, aux0=first, aux1=more[0])
        elif what == Note.GRAPH_LAUNCH:
            self._graph_launch(first, third, stream, stack)
        elif what == Note.LAUNCH:
            ranges = zip(more[::3], more[1::3], more[2::3], strict=True)
            accesses: list[TensorAccess] = [(address, size, flags, 0, 0, "") for address, size, flags in ranges]
            self._start(
                OperatorCall(self._name(first), third, second, accesses=accesses), self._packed(accesses), stack
            )

    def _graph_launch(self, graph: int, device: int, stream: int, stack: int) -> None:
        captured = self._graphs.get(graph, _Captured(is_known=False))
        correlation = hooks.new_correlation()
        for event in captured.waits:
            self._event(Kind.STREAM_WAIT_EVENT, device=device, stream=stream, aux0=self._event_id(event), stack=stack)
        where = {"device": device, "stream": stream, "correlation": correlation}
        self._event(
            Kind.GRAPH_LAUNCH,
            **where,
            aux0=graph,
            flags=GraphLaunchFlag.BESIDE_NODES,
            name="CUDAGraph.replay",
            stack=stack,
        )
        for handle in [handle for handle, by in self._recorded_by.items() if by == graph]:
            event = hooks.event_id(_as_graphs_record_it(handle))
            self._event(Kind.EVENT_RECORD, device=device, stream=stream, aux0=event, stack=stack)
        if captured.is_known:
            self._records += self._packed(captured.accesses)

    # Memory -----------------------------------------------------------------------------------------------------

    def _order_memory(self, row: Row) -> None:
        action, address, size = row.words[:3]
        own = self._open.get(row.thread)
        if action == Action.ALLOC:
            stop = address + size
            for other in self._open.values():
                for free in other.frees:
                    if free.words[1] < stop and address < free.words[1] + free.words[2]:  # its memory is used again
                        frees, other.frees = other.frees, []
                        for waiting in frees:
                            self._perform(waiting)
                        break
            if own is not None:
                own.made.add(address)
        elif own is not None and action in _FREES and address not in own.made:
            own.frees.append(row)
            return
        self._perform(row)

    def _memory(
        self, action: int, address: int, size: int, handle: int, device: int, call: int, stack: int, pool: int
    ) -> None:
        if action in (Action.SNAPSHOT, Action.OOM):
            return
        waiting = self._freeing.get(device)
        if waiting is not None:
            self._complete(device, at_once=action == Action.FREE_COMPLETED and address == waiting[1][_ADDRESS])
        stream, stack = self._stream(device, handle), stack or self._stacks.get(call, 0)
        if action in _SEGMENTS:
            where: dict[str, Any] = {"device": device, "stream": stream, "address": address, "size": size}
            self._event(_SEGMENTS[action], **where, aux1=pool, stack=stack)
            return
        time, thread, block = self._row.time, self._row.thread, -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        if action == Action.ALLOC:
            # A graph keeps its memory: what is freed during capture is free for the same graph alone.
            if stream in self._capturing:
                self._of_graphs.add(address)
                return
            self._of_graphs.discard(address)
            self._blocks[address] = block, stream
            self._put(time, (Kind.BLOCK_ALLOC, device, 0, thread, 0, stream, 0, stack, 0, address, block, size, pool))
        elif address not in self._of_graphs:
            asked = Kind.BLOCK_FREE_REQUESTED, device, 0, thread, 0, stream, 0, stack, 0, address, block, size, pool
            if action != Action.FREE_COMPLETED:
                self._blocks.pop(address, None)
            if action == Action.FREE_REQUESTED:
                self._freeing[device] = time, asked
                return
            if action == Action.FREED:
                self._put(time, asked)
            done = Kind.BLOCK_FREE_COMPLETED, device, 0, thread, 0, stream, 0, 0, 0, address, block, size, pool
            self._put(time, done)

    def _complete(self, device: int, *, at_once: bool) -> None:
        """Pass on a free. If it does not complete at once, the allocator waits for streams that used the block.

        If autograd calls record_stream internally, the log does not name them, so all streams of the device count.
        """
        time, free = self._freeing.pop(device)
        if not at_once:
            _, _, _, thread, _, own, _, stack, _, address, size, _, _ = free
            for (where, _), stream in self._streams.items():
                if where == device and stream != own:
                    used = Kind.BLOCK_RECORD_STREAM, device, 0, thread, 0, stream, 0, stack, 0, address, size, 0, 0
                    self._put(time, used)
        self._put(time, free)

    # Events -----------------------------------------------------------------------------------------------------

    def _event(
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
    ) -> None:
        row, text = self._row, self._text(name)
        # fmt: off
        self._put(row.time, (kind, device, flags, row.thread, 0, stream, correlation, stack, text, address, size, aux0,
                             aux1))
        # fmt: on

    def _text(self, name: str) -> int:
        return self._texts.setdefault(name, len(self._texts))

    def _put(self, time: int, fields: _Fields) -> None:
        """Make a record. One that waited for its operator's end gets its time: time never runs backwards."""
        self._clock = time = max(self._clock, time)
        self._records += pack_record(time, *fields)

    def _pass_on(self) -> None:
        """Pass on the records so far, and with them what each of the accesses has in common with its operation."""
        if not self._records:
            return
        rows, self._records = np.frombuffer(self._records, RECORD), bytearray()
        is_access = rows["kind"] == Kind.ACCESS
        is_operation = (rows["correlation"] != 0) & ~is_access
        operation = np.maximum.accumulate(np.where(is_operation, np.arange(len(rows)), 0))[is_access]
        for common in ("time", "device", "thread", "stream", "correlation"):
            rows[common][is_access] = rows[common][operation]
        self._forward_rows(rows, list(self._texts))


def _is_trace(row: Row, *what: TraceCall) -> bool:
    return row.kind == RowKind.TRACE and row.words[0] in what


def _as_it_ran(call: OperatorCall, accesses: bytes, inside: Sequence[Row]) -> tuple[OperatorCall, bytes]:
    """Return a collective on the stream that it ran on: that of the last event that it waited for or recorded, the one
    of its end. Without any, nothing is known of it: no accesses.
    """
    streams = [row.words[2] for row in inside if _is_trace(row, TraceCall.EVENT_WAIT, TraceCall.EVENT_RECORD)]
    if not streams:
        return replace(call, is_known=False, accesses=[]), b""
    return replace(call, stream=streams[-1]), accesses


def _as_graphs_record_it(handle: int) -> int:
    """Return the replacement for the handle of an event that graph launches record."""
    return ~handle
