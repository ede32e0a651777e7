"""CUDA's ordering rules as vector clocks: which operation happens before which.

Agents are host threads and streams. An agent counts what it does; operation ``n`` of agent ``a`` is the epoch
``(a, n)``. A clock says, for every agent, up to which epoch everything is known to be finished::

    X happens before Y   iff   X and Y are of one agent and X came first, or Y.clock[X.agent] >= X.epoch

Clocks are tuples that are replaced, never changed, so operations and events keep the one they saw for free.
Where CUDA promises nothing there is no edge. Quotations are from the CUDA Driver API reference.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudatool.sanitize.effort import Effort

__all__ = ["Agent", "Clock", "Ordering", "join"]

Clock = tuple[int, ...]

_VALUES = 64  # of one address that are remembered


class Agent:
    """A host thread or a stream: how far it has come and what it knows of the others.

    Attributes
    ----------
    index
        Its position in clocks.
    stream
        The stream's id; 0 for a host thread.
    label
        ``"stream 7"``, ``"host thread main"``.
    device
        Ordinal; -1 for a host thread, or if not known.
    peers
        Streams that it is implicitly ordered with (see :meth:`Ordering.position`).
    count
        Number of its operations so far.
    clock
        What its next operation will be ordered after. The agent's own component may lag behind `count`.
    records
        The trace record of each operation: ``records[epoch - 1]``.
    unsure
        The operations after this epoch come after something that the trace does not show; -1 if there are none.
    """

    __slots__ = (
        "clock",
        "count",
        "device",
        "index",
        "is_host",
        "label",
        "peers",
        "records",
        "seen_host",
        "stream",
        "unsure",
    )

    def __init__(
        self, index: int, nothing: Clock, label: str, *, device: int = -1, stream: int = 0, is_host: bool = False
    ) -> None:
        self.index = index
        self.stream = stream
        self.label = label
        self.device = device
        self.is_host = is_host
        self.peers: tuple[Agent, ...] = ()
        self.count = 0
        self.clock = nothing
        self.records = array("q")
        self.seen_host: Clock | None = None
        self.unsure = -1

    def is_unsure(self, epoch: int) -> bool:
        """Whether an operation comes after something that the trace does not show."""
        return 0 <= self.unsure < epoch

    @property
    def done(self) -> Clock:
        """The clock of somebody for whom everything that this agent has begun is finished."""
        return (*self.clock[: self.index], self.count, *self.clock[self.index + 1 :])


def join(first: Clock, second: Clock) -> Clock:
    """Return the clock that is after both."""
    return tuple(map(max, first, second))


class Ordering:
    """All agents and events, while a trace is read in record order.

    Parameters
    ----------
    streams
        Every stream agent of the trace. Host agents are handed in with each call.
    effort
        What moving clocks is taken from.

    Attributes
    ----------
    edges
        How often each rule applied.
    empty_waits
        Agent -> call site -> the latest wait there for an event that was not recorded: event and record.
    empty, unknown
        Numbers of such waits, and of waits for what the trace does not show.
    foreign_events
        Events that other processes can record.
    """

    def __init__(self, streams: Sequence[Agent], effort: Effort) -> None:
        self.streams = streams
        self._effort = effort
        self.edges: Counter[str] = Counter()
        self.empty_waits: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.empty = 0
        self.unknown = 0
        self.foreign_events: set[int] = set()
        self._events: dict[int, Clock] = {}
        self._values: dict[int, deque[tuple[int, Clock]]] = {}  # address -> the latest values that streams wrote there

    def host_step(self, host: Agent, record: int) -> None:
        """`host` does something itself. Work that it enqueues later comes after it, by program order."""
        host.count += 1
        host.records.append(record)
        host.clock = self._effort.kept(host.done)

    def enqueue(self, host: Agent, stream: Agent, record: int) -> None:
        """Append an operation to `stream`; its epoch is then ``stream.count`` and its clock ``stream.clock``.

        It comes after the stream's earlier work ("Stream Management") and after everything that its host thread
        did before the call.
        """
        if stream.seen_host is not host.clock:
            stream.seen_host = host.clock
            stream.clock = self._effort.join(stream.clock, host.clock)
        self._effort.spend(2 * len(stream.peers))
        for peer in stream.peers:
            if peer.count > stream.clock[peer.index]:
                stream.clock = self._effort.join(stream.clock, peer.done)
                self.edges["legacy default stream"] += 1
        stream.count += 1
        stream.records.append(record)

    def position(self, stream: Agent) -> Clock:
        """Return the clock of somebody who has waited for all present work of `stream`.

        Stream synchronization behavior, "Legacy default stream": an action in the legacy stream first waits on all
        blocking streams of the context, and then all blocking streams wait on the legacy stream. Non-blocking
        streams take no part; the per-thread default stream is a blocking one. `Agent.peers` holds, for the legacy
        stream, the blocking ones, and for each of those the legacy stream.
        """
        clock = self._effort.kept(stream.done)
        self._effort.spend(2 * len(stream.peers))
        for peer in stream.peers:
            if peer.count > clock[peer.index]:
                clock = self._effort.join(clock, peer.done)
        return clock

    def record_event(self, host: Agent, stream: Agent, event: int, record: int) -> None:
        """cuEventRecord: "captures in hEvent the contents of hStream" now; a second one moves the event."""
        self.enqueue(host, stream, record)
        self.record_here(stream, event)

    def record_here(self, stream: Agent, event: int) -> None:
        """An event is recorded behind the stream's latest operation, or by a node of the graph that this is.

        A node is taken for the last one of its graph: an edge too many hides a race, one too few invents one.
        """
        self._events[event] = self._effort.kept(stream.done)

    def destroy_event(self, event: int) -> None:
        """cuEventDestroy: what waited for the event keeps its order, and nothing can wait for it any more."""
        self._events.pop(event, None)

    def wait_event(self, host: Agent, stream: Agent, event: int, record: int, site: int = 0) -> None:
        """cuStreamWaitEvent: "makes all future work submitted to hStream wait for all work captured in hEvent".

        "Before the first call to cuEventRecord(), an event represents an empty set of work".
        """
        self.enqueue(host, stream, record)
        if event in self.foreign_events:
            self._unknown(stream)
        elif not self.join_event(stream, event):
            self.empty += 1
            self.empty_waits[stream.index][site] = event, record

    def join_event(self, stream: Agent, event: int) -> bool:
        """Let `stream` come after an event's latest record, and tell whether there is one."""
        captured = self._events.get(event)
        if captured is None:
            return False
        stream.clock = self._effort.join(stream.clock, captured)
        self.edges["event wait"] += 1
        return True

    def event_done(self, host: Agent, event: int, rule: str, record: int = -1, site: int = 0) -> None:
        """cuEventSynchronize, or a cuEventQuery that said so: the host is after the event's latest record, if any."""
        captured = self._events.get(event)
        if event in self.foreign_events:
            self._unknown(host)
        elif captured is not None:
            host.clock = self._effort.join(host.clock, captured)
            self.edges[rule] += 1
        elif record >= 0:
            self.empty_waits[host.index][site] = event, record

    def stream_done(self, host: Agent, stream: Agent, rule: str) -> None:
        """cuStreamSynchronize, a cuStreamQuery that said so, or a copy that blocks: the host is after its work.

        These calls "use standard default stream semantics": on the legacy stream they cover the blocking streams.
        """
        host.clock = self._effort.join(host.clock, self.position(stream))
        self.edges[rule] += 1
        stream.unsure = -1  # whatever its earlier operations waited for, they are done

    def device_done(self, host: Agent, device: int) -> None:
        """cuCtxSynchronize: "blocks until the current context has completed all preceding requested tasks"."""
        self._effort.spend(2 * len(self.streams))
        for stream in self.streams:
            if stream.device == device or device == -1 or stream.device == -1:
                host.clock = self._effort.join(host.clock, stream.done)
        self.edges["device synchronize"] += 1

    def serialize(self, stream: Agent, devices: int) -> None:
        """Before cuMemcpyPeer or cuMemcpy3DPeer: the next operation of `stream` comes after all work so far.

        They are "serialized with respect to all pending and future asynchronous work" of the current device and those
        of both sides (`devices`, a bit for each ordinal).
        """
        for other in self._of_devices(stream, devices):
            stream.clock = self._effort.join(stream.clock, other.done)
        self.edges["copy between devices"] += 1

    def serialized(self, stream: Agent, devices: int) -> None:
        """Behind such a copy: all later work of these devices comes after it."""
        for other in self._of_devices(stream, devices):
            other.clock = self._effort.join(other.clock, stream.done)

    def _of_devices(self, stream: Agent, devices: int) -> list[Agent]:
        self._effort.spend(4 * len(self.streams))
        return [
            other
            for other in self.streams
            if other is not stream
            and (other.device in (-1, stream.device) or stream.device == -1 or devices >> other.device & 1)
        ]

    # What goes through memory, or comes from elsewhere

    def write_value(self, host: Agent, stream: Agent, address: int, value: int, flags: int, record: int) -> None:
        """cuStreamWriteValue32 and 64: the value is there when the stream's earlier work is done.

        With CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER it may be there before: it orders nothing.
        """
        self.enqueue(host, stream, record)
        if flags & 1:
            return
        written = self._values.setdefault(address, deque(maxlen=_VALUES))
        written.append((value, self._effort.kept(stream.done)))

    def wait_value(
        self, host: Agent, stream: Agent, address: int, value: int, flags: int, size: int, record: int
    ) -> None:
        """cuStreamWaitValue32 and 64: an edge from the write that makes the condition true, if that was seen.

        It comes after whichever of several such writes was first: after what all of them come after.
        """
        self.enqueue(host, stream, record)
        meeting: Clock | None = None
        for written, clock in self._values.get(address, ()):
            if _is_met(written, value, flags, size):
                meeting = clock if meeting is None else self._effort.kept(tuple(map(min, meeting, clock)))
        if meeting is None:
            self._unknown(stream)
            return
        stream.clock = self._effort.join(stream.clock, meeting)
        self.edges["wait for a value"] += 1

    def wait_unknown(self, host: Agent, stream: Agent, record: int) -> None:
        """A wait for what the trace cannot show: an external semaphore, another process's event."""
        self.enqueue(host, stream, record)
        self._unknown(stream)

    def _unknown(self, agent: Agent) -> None:
        """From now on the agent may be after anything. Nothing is reported that may be in order."""
        self.unknown += 1
        for stream in self.streams:
            if stream is not agent:
                agent.clock = self._effort.join(agent.clock, stream.done)
        if agent.unsure < 0 and not agent.is_host:  # what is enqueued after the host has waited, comes after that
            agent.unsure = agent.count


def _is_met(written: int, value: int, flags: int, size: int) -> bool:
    """CUstreamWaitValue_flags: GEQ compares cyclically, EQ, AND, NOR."""
    bits = 8 * size
    match flags & 3:
        case 0:
            return (written - value) & ((1 << bits) - 1) < 1 << (bits - 1)
        case 1:
            return written == value
        case 2:
            return bool(written & value)
        case _:
            return bool(~(written | value) & ((1 << bits) - 1))
