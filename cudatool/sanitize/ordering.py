"""CUDA's ordering rules as vector clocks: which operation happens before which.

Agents are host threads and streams. An agent counts what it does; operation ``n`` of agent ``a`` is the epoch
``(a, n)``. A clock says, for every agent, up to which epoch everything is known to be finished::

    X happens before Y   iff   X and Y are of one agent and X came first, or Y.clock[X.agent] >= X.epoch

Clocks are tuples that are replaced, never changed, so operations and events keep the one they saw for free.
Where CUDA promises nothing there is no edge. Quotations are from the CUDA Driver API reference.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

__all__ = ["Agent", "Clock", "Ordering", "join"]

Clock = tuple[int, ...]


class Agent:
    """A host thread or a stream: how far it has come and what it knows of the others.

    Attributes
    ----------
    index
        Its position in clocks.
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
    """

    __slots__ = ("clock", "count", "device", "index", "is_host", "label", "peers", "records", "seen_host")

    def __init__(self, index: int, agents: int, label: str, *, device: int = -1, is_host: bool = False) -> None:
        self.index = index
        self.label = label
        self.device = device
        self.is_host = is_host
        self.peers: tuple[Agent, ...] = ()
        self.count = 0
        self.clock: Clock = (0,) * agents
        self.records = array("q")
        self.seen_host: Clock | None = None

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
    """

    def __init__(self, streams: Sequence[Agent]) -> None:
        self.streams = streams
        self.edges: Counter[str] = Counter()
        self.empty_waits = 0
        self._events: dict[int, Clock] = {}

    def host_step(self, host: Agent, record: int) -> None:
        """`host` does something itself. Work that it enqueues later comes after it, by program order."""
        host.count += 1
        host.records.append(record)
        host.clock = host.done

    def enqueue(self, host: Agent, stream: Agent, record: int) -> None:
        """Append an operation to `stream`; its epoch is then ``stream.count`` and its clock ``stream.clock``.

        It comes after the stream's earlier work ("Stream Management") and after everything that its host thread
        did before the call.
        """
        if stream.seen_host is not host.clock:
            stream.seen_host = host.clock
            stream.clock = join(stream.clock, host.clock)
        for peer in stream.peers:
            if peer.count > stream.clock[peer.index]:
                stream.clock = join(stream.clock, peer.done)
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
        clock = stream.done
        for peer in stream.peers:
            if peer.count > clock[peer.index]:
                clock = join(clock, peer.done)
        return clock

    def record_event(self, host: Agent, stream: Agent, event: int, record: int) -> None:
        """cuEventRecord: "captures in hEvent the contents of hStream" now; a second one moves the event."""
        self.enqueue(host, stream, record)
        self._events[event] = stream.done

    def wait_event(self, host: Agent, stream: Agent, event: int, record: int) -> None:
        """cuStreamWaitEvent: "makes all future work submitted to hStream wait for all work captured in hEvent".

        If cuEventRecord was never called on the event, the call does nothing.
        """
        self.enqueue(host, stream, record)
        captured = self._events.get(event)
        if captured is None:
            self.empty_waits += 1
            return
        stream.clock = join(stream.clock, captured)
        self.edges["event wait"] += 1

    def event_done(self, host: Agent, event: int, rule: str) -> None:
        """cuEventSynchronize, or a cuEventQuery that said so: the host is after the event's latest record, if any."""
        captured = self._events.get(event)
        if captured is not None:
            host.clock = join(host.clock, captured)
            self.edges[rule] += 1

    def stream_done(self, host: Agent, stream: Agent, rule: str) -> None:
        """cuStreamSynchronize, a cuStreamQuery that said so, or a copy that blocks: the host is after its work.

        These calls "use standard default stream semantics": on the legacy stream they cover the blocking streams.
        """
        host.clock = join(host.clock, self.position(stream))
        self.edges[rule] += 1

    def device_done(self, host: Agent, device: int) -> None:
        """cuCtxSynchronize: "blocks until the current context has completed all preceding requested tasks"."""
        for stream in self.streams:
            if stream.device == device or device == -1 or stream.device == -1:
                host.clock = join(host.clock, stream.done)
        self.edges["device synchronize"] += 1
