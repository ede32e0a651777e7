"""The log of what a PyTorch program did (:file:`torch_log.cpp`), and what becomes of it: the events of a trace.

A log is a sequence of rows of 64-bit words: kind | length in words << 8 | thread << 40, time in ns, and

========= ============================================================================================
BEGIN     call: an operator that something happened in before it was over
CALL      call, payload (0: it touches no memory of the device), stack
PAYLOAD   number, operator, backward node, extra, number of tensors, and for each tensor: position | result << 8 |
          on device << 16 | pinned << 17 | device << 24 | bytes per element << 32 | dimensions << 48, address,
          storage, bytes of storage, stream handle, sizes, strides
MEMORY    the allocator's action, address, size, stream handle, device, call
TRACE     what, two handles, device, stack
NOTE      stack, what, words
STREAM    handle, device, flags (1 non-blocking)
========= ============================================================================================

An operator is written when it is over. What it does inside, allocations and synchronizations, comes before it, so the
order is put right here::

    BEGIN .. CALL of one thread:  allocations, and what of these is freed again: where they are
                                  the operator's launch
                                  its synchronizations, event records and waits
                                  the launch again, if it went on after a synchronization
                                  frees of what was there before: it may have been used
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from cudatool.collect.torch_accesses import ByteSet, Plan, TensorView, byte_sets
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, CopyFlag, Event, Kind, StreamFlag

__all__ = ["Access", "Note", "RowKind", "TorchEvents", "TraceCall"]

_BETWEEN = CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE
_ANY_KERNEL = Plan(True, True, (), (), ())
_NEEDED = 512  # bytes to which the caching allocator rounds a block
_MOST_ROWS = 64  # of memory that the host touches


class RowKind(IntEnum):
    """Kinds of rows."""

    BEGIN = 1
    CALL = 2
    PAYLOAD = 3
    MEMORY = 4
    TRACE = 5
    NOTE = 6
    STREAM = 7


class TraceCall(IntEnum):
    """What a TRACE row tells: handles in brackets."""

    EVENT_DELETION = 1  # (event)
    EVENT_RECORD = 2  # (event, stream)
    EVENT_WAIT = 3  # (event, stream)
    EVENT_SYNCHRONIZE = 4  # (event)
    STREAM_SYNCHRONIZE = 5  # (stream)
    DEVICE_SYNCHRONIZE = 6


class Note(IntEnum):
    """What a NOTE row tells: its words in brackets."""

    EVENT_QUERY = 1  # (event handle, done)
    STREAM_QUERY = 2  # (stream handle, done, device)
    GRAPH_BEGIN = 3  # (graph, stream handle, device)
    GRAPH_END = 4  # (graph, stream handle, device, done)
    GRAPH_LAUNCH = 5  # (graph, stream handle, device)
    HOST_ACCESS = 6  # (address, size, flags)
    LAUNCH = 7  # (name, stream handle, device, then for each access: address, size, flags)


class _Action(IntEnum):
    """``c10::CachingDeviceAllocator::TraceEntry::Action``."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8


_SEGMENTS = {
    _Action.SEGMENT_ALLOC: Kind.SEGMENT_ALLOC,
    _Action.SEGMENT_FREE: Kind.SEGMENT_FREE,
    _Action.SEGMENT_MAP: Kind.SEGMENT_MAP,
    _Action.SEGMENT_UNMAP: Kind.SEGMENT_UNMAP,
}

Access = tuple[ByteSet, AccessFlag, str]


class _Row(NamedTuple):
    kind: int
    thread: int
    time: int
    words: tuple[int, ...]


@dataclass(slots=True)
class _Open:
    """An operator that is not over: the rows that wait for its end, its frees, and what it has allocated."""

    waiting: list[_Row] = field(default_factory=list)
    frees: list[_Row] = field(default_factory=list)
    made: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Payload:
    """What a call does, worked out once.

    Attributes
    ----------
    name
        Of the operator, and in a backward graph of its node.
    plan
        See :class:`Plan`.
    device, stream
        Where it runs: ordinal and handle.
    accesses, written
        What it touches on the device, and the part of it that it writes.
    on_host
        What the host itself touches of pinned memory.
    made
        New pinned memory: address, size.
    copy
        Flags, destination and source of a copy between the memories.
    goes_on
        Whether it writes memory of the device after it synchronized the stream, if it does that.
    used_on
        Of record_stream: the storage, and the handle of the stream.
    """

    name: str
    plan: Plan
    device: int = 0
    stream: int = 0
    accesses: list[Access] = field(default_factory=list)
    on_host: list[Access] = field(default_factory=list)
    made: list[tuple[int, int]] = field(default_factory=list)
    copy: tuple[CopyFlag, int, int, int] | None = None
    goes_on: bool = False
    used_on: tuple[int, int] | None = None


_NOTHING = _Payload("", _ANY_KERNEL)


class _Captured:
    """What a CUDA graph touches, by what is done: its operators' accesses, once each."""

    def __init__(self) -> None:
        self.accesses: dict[Access, None] = {}
        self.doubtful = False


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
        self._plan_of = plan_of
        self._names = names
        self._known_names: Sequence[str] = ()
        self._payloads: dict[int, _Payload] = {}
        self._streams: dict[tuple[int, int], int] = {}  # device and handle -> id
        self._flags: dict[int, StreamFlag] = {}  # stream handle -> how it was created
        self._open: dict[int, _Open] = {}  # by thread
        self._stacks: dict[int, int] = {}  # call -> stack, of the log being read
        self._blocks: dict[int, tuple[int, int]] = {}  # address -> size asked for, stream id
        self._freeing: dict[int, Event] = {}  # device -> a free that may complete at once
        self._capturing: dict[int, int] = {}  # stream id -> graph
        self._captured_events: dict[int, int] = {}  # event handle -> graph
        self._graphs: dict[int, _Captured] = {}
        self._of_graphs: set[int] = set()  # addresses of blocks that belong to graphs
        self._row = _Row(0, 0, 0, ())

    def read(self, log: bytes) -> None:
        """Pass on the events of a log. Logs must come in order; each begins and ends at a row."""
        rows = list(_rows(log))
        # An allocation has the stack of the operator in which it happens, which is written after it.
        self._stacks = {row.words[0]: row.words[2] for row in rows if row.kind == RowKind.CALL}
        for row in rows:
            self._read(row)

    def finish(self) -> None:
        """Pass on what still waits for something."""
        for thread in list(self._open):
            unfinished = self._open.pop(thread)
            for row in unfinished.waiting + unfinished.frees:
                self._perform(row)
        for device in list(self._freeing):
            self._complete(device, at_once=False)

    # Rows -------------------------------------------------------------------------------------------------------

    def _read(self, row: _Row) -> None:
        self._row = row
        kind = row.kind
        if kind == RowKind.PAYLOAD:
            self._payloads[row.words[0]] = self._payload(row.words)
        elif kind == RowKind.STREAM:
            handle, _, flags = row.words
            self._flags[handle] = StreamFlag.NON_BLOCKING if flags & 1 else StreamFlag(0)
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

    def _call(self, row: _Row) -> None:
        _, number, stack = row.words
        inside = self._open.pop(row.thread, None) or _Open()
        waiting = inside.waiting
        payload = self._payloads.get(number, _NOTHING)
        if payload.copy is not None and payload.copy[0] & _BETWEEN == _BETWEEN:
            # Between two devices: the source's stream first waits for the destination's.
            waits = [index for index, other in enumerate(waiting) if other.words[0] == TraceCall.EVENT_WAIT]
            before = waits[0] + 1 if waits else 0
            for other in waiting[:before]:
                self._perform(other)
            waiting = waiting[before:]
        self._row = row
        self._launch(payload, stack)
        for other in waiting:
            self._perform(other)
        synchronized = (TraceCall.STREAM_SYNCHRONIZE, RowKind.TRACE)
        if payload.goes_on and any((other.words[0], other.kind) == synchronized for other in waiting):
            self._row = row
            self._launch(payload, stack)
        for other in inside.frees:
            self._perform(other)

    def _perform(self, row: _Row) -> None:
        self._row = row
        if row.kind == RowKind.TRACE:
            self._trace(*row.words)
        elif row.kind == RowKind.MEMORY:
            self._memory(*row.words)
        else:
            self._note(*row.words)

    # Operators --------------------------------------------------------------------------------------------------

    def _payload(self, words: tuple[int, ...]) -> _Payload:
        _, operator, node, extra, count = words[:5]
        name = self._name_of(operator)
        plan = self._plan_of(name)
        tensors = list(_tensors(words[5:], count))
        shown = f"{name} ({self._name_of(node).rpartition('::')[2]})" if node else name
        payload = _Payload(shown, plan)
        on_device = [tensor for tensor in tensors if tensor.on_device]
        if name == "aten::record_stream" and on_device:
            payload.used_on = on_device[0].storage, extra
        given = {(tensor.storage, tensor.address) for tensor in tensors if not tensor.is_result}
        for tensor in tensors:
            if tensor.is_pinned and tensor.is_result and (tensor.storage, tensor.address) not in given:
                payload.made.append((tensor.storage, tensor.storage_bytes))
        is_copy = name.startswith(("aten::copy_", "aten::_to_copy")) and not name.startswith("aten::copy_sparse")
        if on_device:
            payload.device, payload.stream = on_device[0].device, on_device[0].stream
        if not plan.runs or not plan.is_known:
            return payload
        for tensor in tensors:
            flags = _flags(plan, tensor, given)
            if not flags:
                continue
            sets, exact = byte_sets(tensor)
            if not exact:
                flags |= AccessFlag.INEXACT
            argument = "" if tensor.is_result else plan.names[tensor.position]
            accesses = [(found, flags, argument) for found in sets]
            if on_device and (tensor.on_device or is_copy):
                payload.accesses += accesses
            elif tensor.is_pinned:
                payload.on_host += accesses
            if tensor.on_device and flags & AccessFlag.WRITE and not is_copy:
                payload.goes_on = True
        if is_copy and on_device:
            self._make_copy(payload, name, tensors)
        return payload

    @staticmethod
    def _make_copy(payload: _Payload, name: str, tensors: list[TensorView]) -> None:
        """A copy between memories, or of one device (which is then a kernel as any other)."""
        inputs = [tensor for tensor in tensors if not tensor.is_result]
        results = [tensor for tensor in tensors if tensor.is_result]
        if name.startswith("aten::_to_copy"):
            pair = (results[:1] + inputs[:1]) if results and inputs else []
        else:
            pair = inputs[:2]
        if len(pair) != 2:
            return
        to, source = pair
        if to.on_device and source.on_device and to.device == source.device:
            return
        flags = CopyFlag.ASYNC  # where the host waits, the synchronization is in the log
        if to.on_device:
            flags |= CopyFlag.DESTINATION_DEVICE
        elif not to.is_pinned:
            flags |= CopyFlag.DESTINATION_PAGEABLE
        if source.on_device:
            flags |= CopyFlag.SOURCE_DEVICE
            payload.device, payload.stream = source.device, source.stream
        elif not source.is_pinned:
            flags |= CopyFlag.SOURCE_PAGEABLE
        size = to.item
        for length in to.sizes:
            size *= length
        payload.copy = flags, to.address, source.address, size

    def _name_of(self, index: int) -> str:
        if index >= len(self._known_names):
            self._known_names = self._names()
        return self._known_names[index]

    def _launch(self, payload: _Payload, stack: int) -> None:
        if payload.used_on is not None:
            self._record_stream(payload, stack)
        for address, size in payload.made:
            self._event(Kind.HOST_ALLOC, address=address, size=size, name=payload.name, stack=stack)
        for found, flags, _ in payload.on_host:
            self._host_access(found, flags, stack)
        if payload.accesses or not payload.plan.is_known:  # else it is of the host alone, or of empty tensors
            self._start(payload, stack)

    def _start(self, payload: _Payload, stack: int) -> None:
        """An operation of the device; of a graph, while that is captured."""
        stream = self._stream(payload.device, payload.stream)
        graph = self._capturing.get(stream)
        if graph is not None:  # captured: it runs when the graph does
            captured = self._graphs[graph]
            captured.accesses.update(dict.fromkeys(payload.accesses))
            captured.doubtful |= not payload.plan.is_known
            return
        correlation = hooks.new_correlation()
        where = {"device": payload.device, "stream": stream, "correlation": correlation}
        if payload.copy is not None:
            copy_flags, to, source, size = payload.copy
            self._event(
                Kind.MEMCPY,
                **where,
                name=payload.name,
                address=to,
                size=size,
                aux0=source,
                flags=copy_flags,
                stack=stack,
            )
        else:
            self._event(Kind.KERNEL_LAUNCH, **where, name=payload.name, aux0=1, aux1=1, stack=stack)
        self._accesses(payload.accesses, where)

    def _accesses(self, accesses: Sequence[Access] | dict[Access, None], where: dict[str, int]) -> None:
        for found, flags, name in accesses:
            self._event(
                Kind.ACCESS,
                **where,
                name=name,
                address=found.address,
                size=found.size,
                flags=flags,
                aux0=found.stride,
                aux1=found.rows if found.stride else 0,
            )

    def _host_access(self, found: ByteSet, flags: AccessFlag, stack: int) -> None:
        if found.rows > _MOST_ROWS:  # a record has one run
            found = ByteSet(found.address, found.stride * (found.rows - 1) + found.size)
            flags |= AccessFlag.INEXACT
        for index in range(found.rows):
            address = found.address + index * found.stride
            self._event(Kind.HOST_ACCESS, address=address, size=found.size, flags=flags, stack=stack)

    def _record_stream(self, payload: _Payload, stack: int) -> None:
        assert payload.used_on is not None
        address, handle = payload.used_on
        size, _ = self._blocks.get(address, (0, 0))
        if size:
            stream = self._stream(payload.device, handle)
            where = {"device": payload.device, "stream": stream, "address": address, "size": size}
            self._event(Kind.BLOCK_RECORD_STREAM, **where, stack=stack)

    # Streams and events -----------------------------------------------------------------------------------------

    def _stream(self, device: int, handle: int) -> int:
        found = self._streams.get((device, handle))
        if found is None:
            flags = self._flags.get(handle, StreamFlag.NON_BLOCKING) if handle > 2 else StreamFlag(0)
            found = self._streams[device, handle] = hooks.stream_id(device, handle, flags=flags)
            if hooks.emitting():  # what hooks emits now is left out
                self._event(
                    Kind.STREAM_CREATE, device=device, stream=found, address=handle or 1, flags=_created(handle, flags)
                )
        return found

    def _trace(self, what: int, first: int, second: int, device: int, stack: int) -> None:
        if what == TraceCall.EVENT_RECORD:
            stream = self._stream(device, second)
            if stream in self._capturing:
                self._captured_events[first] = self._capturing[stream]
            else:
                self._captured_events.pop(first, None)
            event = hooks.event_id(first)
            self._event(Kind.EVENT_RECORD, device=device, stream=stream, aux0=event, stack=stack)
        elif what == TraceCall.EVENT_WAIT:
            stream = self._stream(device, second)
            if first in self._captured_events:
                self._capturing[stream] = self._captured_events[first]
            event = hooks.event_id(first)
            self._event(Kind.STREAM_WAIT_EVENT, device=device, stream=stream, aux0=event, stack=stack)
        elif what == TraceCall.EVENT_SYNCHRONIZE:
            self._event(Kind.EVENT_SYNCHRONIZE, device=device, aux0=hooks.event_id(first), stack=stack)
        elif what == TraceCall.EVENT_DELETION:
            self._captured_events.pop(first, None)
            if event := hooks.close_event(first):
                self._event(Kind.EVENT_DESTROY, device=device, aux0=event)
        elif what == TraceCall.STREAM_SYNCHRONIZE:
            self._event(Kind.STREAM_SYNCHRONIZE, device=device, stream=self._stream(device, first), stack=stack)
        elif what == TraceCall.DEVICE_SYNCHRONIZE:
            self._event(Kind.DEVICE_SYNCHRONIZE, device=device, stack=stack)

    def _note(self, stack: int, what: int, first: int, second: int, third: int = 0, *more: int) -> None:
        if what == Note.EVENT_QUERY:
            self._event(Kind.EVENT_QUERY, aux0=hooks.event_id(first), aux1=second, stack=stack)
            return
        if what == Note.HOST_ACCESS:
            self._host_access(ByteSet(first, second), AccessFlag(third), stack)
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
            self._event(Kind.GRAPH_CAPTURE_END, device=third, stream=stream, aux0=first, stack=stack)
        elif what == Note.GRAPH_LAUNCH:
            self._graph_launch(first, third, stream, stack)
        elif what == Note.LAUNCH:
            accesses = [
                (ByteSet(address, size), AccessFlag(flags), "")
                for address, size, flags in zip(more[::3], more[1::3], more[2::3], strict=True)
            ]
            name = self._name_of(first)
            self._start(_Payload(name, _ANY_KERNEL, third, second, accesses), stack)

    def _graph_launch(self, graph: int, device: int, stream: int, stack: int) -> None:
        captured = self._graphs.get(graph)
        where = {"device": device, "stream": stream, "correlation": hooks.new_correlation()}
        self._event(Kind.GRAPH_LAUNCH, **where, aux0=graph, name="CUDAGraph.replay", stack=stack)
        if captured is not None and not captured.doubtful:
            self._accesses(captured.accesses, where)

    # Memory -----------------------------------------------------------------------------------------------------

    def _order_memory(self, row: _Row) -> None:
        action, address, size = row.words[:3]
        own = self._open.get(row.thread)
        if action in (_Action.FREE_REQUESTED, _Action.FREE_COMPLETED):
            if own is not None and address not in own.made:
                own.frees.append(row)
                return
        elif action == _Action.ALLOC:
            for other in self._open.values():
                if any(
                    free.words[1] < address + size and address < free.words[1] + free.words[2] for free in other.frees
                ):
                    frees, other.frees = other.frees, []  # their memory is needed
                    for free in frees:
                        self._perform(free)
            if own is not None:
                own.made.add(address)
        self._perform(row)

    def _memory(self, action: int, address: int, size: int, handle: int, device: int, call: int) -> None:
        if action in (_Action.SNAPSHOT, _Action.OOM):
            return
        waiting = self._freeing.get(device)
        if waiting is not None:
            self._complete(device, at_once=action == _Action.FREE_COMPLETED and address == waiting.address)
        stream, stack = self._stream(device, handle), self._stacks.get(call, 0)
        if action in _SEGMENTS:
            kind = _SEGMENTS[_Action(action)]
            self._event(kind, device=device, stream=stream, address=address, size=size, stack=stack)
            return
        block = -(-size // _NEEDED) * _NEEDED
        where: dict[str, Any] = {"device": device, "stream": stream, "address": address, "size": block, "aux0": size}
        if action == _Action.ALLOC:
            # A graph keeps its memory: what is freed during capture is free for the same graph alone.
            if stream in self._capturing:
                self._of_graphs.add(address)
                return
            self._of_graphs.discard(address)
            self._blocks[address] = block, stream
            self._event(Kind.BLOCK_ALLOC, **where, stack=stack)
        elif address in self._of_graphs:
            return
        elif action == _Action.FREE_REQUESTED:
            self._blocks.pop(address, None)
            self._freeing[device] = self._make(Kind.BLOCK_FREE_REQUESTED, **where, stack=stack)
        elif action == _Action.FREE_COMPLETED:
            self._event(Kind.BLOCK_FREE_COMPLETED, **where)

    def _complete(self, device: int, *, at_once: bool) -> None:
        """Pass on a free. If it does not complete at once, the allocator waits for streams that used the block.

        Which ones is not said where autograd calls record_stream from inside, so that all of the device count.
        """
        event = self._freeing.pop(device)
        if not at_once:
            for (where, _), stream in self._streams.items():
                if where == device and stream != event.stream:
                    self._emit(event._replace(kind=Kind.BLOCK_RECORD_STREAM, stream=stream, aux0=0))
        self._emit(event)

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

    def _event(self, kind: Kind, **fields: Any) -> None:
        self._emit(self._make(kind, **fields))


def _created(handle: int, flags: StreamFlag) -> StreamFlag:
    """Return the flags of ``STREAM_CREATE``, which say what the default streams are."""
    return {0: StreamFlag.LEGACY_DEFAULT, 1: StreamFlag.LEGACY_DEFAULT, 2: StreamFlag.PER_THREAD_DEFAULT}.get(
        handle, flags
    )


def _rows(log: bytes) -> Iterator[_Row]:
    words = struct.unpack(f"<{len(log) // 8}Q", log)
    at = 0
    while at < len(words):
        head = words[at]
        length = head >> 8 & 0xFFFFFFFF
        yield _Row(head & 0xFF, head >> 40, words[at + 1], words[at + 2 : at + length])
        at += length


def _tensors(words: tuple[int, ...], count: int) -> Iterator[TensorView]:
    at = 0
    for _ in range(count):
        head, address, storage, storage_bytes, stream = words[at : at + 5]
        dimensions = head >> 48
        at += 5
        sizes, strides = words[at : at + dimensions], words[at + dimensions : at + 2 * dimensions]
        at += 2 * dimensions
        yield TensorView(
            position=head & 0xFF,
            is_result=bool(head >> 8 & 1),
            on_device=bool(head >> 16 & 1),
            is_pinned=bool(head >> 17 & 1),
            device=head >> 24 & 0xFF,
            item=head >> 32 & 0xFFFF,
            address=address,
            storage=storage,
            storage_bytes=storage_bytes,
            stream=stream,
            sizes=sizes,
            strides=tuple(s - (1 << 64) if s >> 63 else s for s in strides),
        )


def _flags(plan: Plan, tensor: TensorView, given: set[tuple[int, int]]) -> AccessFlag:
    """Return what the operator does to the tensor; a result that is one of the arguments is no new one."""
    if not tensor.is_result:
        return plan.inputs[tensor.position]
    if (tensor.storage, tensor.address) in given:
        return AccessFlag(0)
    return plan.results[min(tensor.position, len(plan.results) - 1)] if plan.results else AccessFlag(0)
