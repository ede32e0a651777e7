"""CUDA's ordering rules as vector clocks: which operation happens before which.

Agents are host threads and streams. An agent counts what it does; operation ``n`` of agent ``a`` is the epoch
``(a, n)``. A clock says, for every agent, up to which epoch everything is known to be finished::

    X happens before Y   iff   X and Y are of one agent and X came first, or Y.clock[X.agent] >= X.epoch

Clocks are replaced, never changed, so operations and events keep the one they saw for free (:mod:`clocks`).
Where CUDA promises nothing there is no edge. Quotations are from the CUDA Driver API reference.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cudatool.sanitize.clocks import Clock, Clocks, Moment

if TYPE_CHECKING:
    from cudatool.sanitize.effort import Effort

__all__ = ["Agent", "Ordering"]

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
    device, context
        Ordinal; -1 for a host thread, or if not known. Number of the context; 0 for the primary one, or if not known.
    peers
        Streams that it is implicitly ordered with (see :meth:`Ordering.position`).
    pending
        Of a legacy default stream: those of its peers that got work since it had an operation itself.
    count
        Number of its operations so far. Whenever a host thread learns of other work, that is one, too.
    clock
        What its next operation will be ordered after. The agent's own component may lag behind `count`.
    listed
        Where it stands in the list of streams that got work; -1 for nowhere.
    records
        The trace record of each operation: ``records[epoch - 1]``.
    unsure
        The operations after this epoch come after something that the trace does not show; -1 if there are none.
    """

    __slots__ = (
        "clock",
        "context",
        "count",
        "device",
        "index",
        "is_host",
        "label",
        "listed",
        "peers",
        "pending",
        "records",
        "stream",
        "unsure",
    )

    def __init__(
        self,
        index: int,
        nothing: Clock,
        label: str,
        *,
        device: int = -1,
        context: int = 0,
        stream: int = 0,
        is_host: bool = False,
    ) -> None:
        self.index = index
        self.stream = stream
        self.label = label
        self.device = device
        self.context = context
        self.is_host = is_host
        self.peers: tuple[Agent, ...] = ()
        self.pending: dict[Agent, None] | None = None
        self.listed = -1
        self.count = 0
        self.clock = nothing
        self.records = array("q")
        self.unsure = -1

    def is_unsure(self, epoch: int) -> bool:
        """Whether an operation comes after something that the trace does not show."""
        return 0 <= self.unsure < epoch

    def is_of(self, device: int, context: int) -> bool:
        """Whether it may be a stream of this context. One whose creation was not seen may be of any."""
        return self.device == -1 or (self.device == device and self.context == context)

    @property
    def done(self) -> Moment:
        """The moment at which everything that this agent has begun is finished."""
        return Moment(self.index, self.count, self.clock)


class Ordering:
    """All agents and events, while a trace is read in record order.

    Parameters
    ----------
    streams
        Every stream agent of the trace. Host agents are handed in with each call.
    clocks
        Those of all agents.
    effort
        What looking at streams is taken from.
    one_host
        Whether there is only one host agent.

    Attributes
    ----------
    edges
        How often each rule applied.
    empty_waits
        Agent -> call site -> the latest wait there for an event that was not recorded: event and record.
    empty, unknown
        Numbers of such waits, and of waits for what the trace does not show.
    unknown_orders
        Whether the latter may order anything; without, they order nothing.
    moved
        Agent -> call site -> the latest wait there for an event that was recorded elsewhere before: the wait's record,
        the moment that the earlier record captured, and both records of the event.
    foreign_events
        Events that other processes can record.
    """

    def __init__(self, streams: Sequence[Agent], clocks: Clocks, effort: Effort, *, one_host: bool) -> None:
        self.streams = streams
        self.clocks = clocks
        self._effort = effort
        self._one_host = one_host
        self.edges: Counter[str] = Counter()
        self.empty_waits: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.empty = 0
        self.unknown = 0
        self.unknown_orders = True
        self.moved: dict[int, dict[int, tuple[int, Moment, int, int]]] = {}
        self.foreign_events: set[int] = set()
        self._recorded_at: dict[int, int] = {}  # by event: the trace's record of its latest record
        self._replaced: dict[int, tuple[Moment, int]] = {}  # and what that replaced, of another stream
        self._events: dict[int, Moment] = {}
        # By address, its latest values: what a stream wrote there, or None for what ends no wait and replaces the rest.
        self._values: dict[int, deque[tuple[int | None, Moment]]] = {}
        self.flags: list[int] = []  # these addresses, sorted
        self._worked: list[Agent] = []  # streams, again when they got work after a look
        self._looked: dict[tuple[int, int, int], int] = {}  # by whom, device and context -> how much of the list
        self._seen = 0  # how much of it has been looked at

    def learn(self, agent: Agent, moment: Moment, record: int = -1) -> bool:
        """What `agent` does from now on comes after `moment`. Tell whether that is new."""
        clock = agent.clock
        if moment.agent == agent.index or clock[moment.agent] >= moment.epoch:
            return False
        agent.clock = self.clocks.join(agent.index, agent.count + 1, clock, moment)
        if agent.is_host:
            self.step(agent, record)
        return True

    def step(self, agent: Agent, record: int) -> None:
        """`agent` takes a new epoch: what it does itself, or what it has learnt, is a part of its order."""
        agent.count += 1
        agent.records.append(record)
        if not agent.is_host:
            self._list(agent)

    def _list(self, stream: Agent) -> None:
        stream.listed = len(self._worked)
        self._worked.append(stream)

    def host_step(self, host: Agent, record: int) -> None:
        """`host` does something itself. Work that it enqueues later comes after it, by program order."""
        self.step(host, record)

    def enqueue(self, host: Agent, stream: Agent, record: int) -> None:
        """Append an operation to `stream`; its epoch is then ``stream.count`` and its clock ``stream.clock``.

        It comes after the stream's earlier work ("Stream Management") and after everything that its host thread
        did before the call.
        """
        if stream.clock[host.index] < host.count:
            self.learn(stream, host.done)
        if stream.peers:
            self._follow_peers(stream)
        stream.count += 1
        stream.records.append(record)
        if stream.listed < self._seen:
            self._list(stream)

    def merge(self, stream: Agent, other: Agent, record: int) -> None:
        """What `stream` does from now on, and what waits for it, comes after the work of `other` as well."""
        self.learn(stream, other.done)
        self.step(stream, record)
        for legacy in stream.peers:
            if legacy.pending is not None:
                legacy.pending[stream] = None

    def _follow_peers(self, stream: Agent) -> None:
        for peer in self._waiting(stream):
            self.learn(stream, peer.done)
            self.edges["legacy default stream"] += 1
        if stream.pending is not None:
            stream.pending.clear()
            return
        for legacy in stream.peers:
            assert legacy.pending is not None
            legacy.pending[stream] = None

    def _waiting(self, stream: Agent) -> list[Agent]:
        """The peers that a stream's next operation implicitly waits for."""
        peers = stream.peers if stream.pending is None else stream.pending
        self._effort.spend(2 * len(peers))
        return [peer for peer in peers if peer.count > stream.clock[peer.index]]

    def position(self, stream: Agent) -> list[Moment]:
        """Return the moments at which all present work of `stream` is finished.

        Stream synchronization behavior, "Legacy default stream": an action in the legacy stream first waits on all
        blocking streams of the context, and then all blocking streams wait on the legacy stream. Non-blocking
        streams take no part; the per-thread default stream is a blocking one. `Agent.peers` holds, for the legacy
        stream, the blocking ones, and for each of those the legacy stream.
        """
        if not stream.peers:
            return [stream.done]
        return [stream.done, *(peer.done for peer in self._waiting(stream))]

    def clock_of_next(self, host: Agent, stream: Agent) -> Clock:
        """Return the clock of what `host` would enqueue on `stream` now."""
        clock = self.clocks.peek(stream.index, stream.clock, host.done)
        for moment in self.position(stream)[1:]:
            clock = self.clocks.more(stream.index, clock, moment)
        return clock

    def _since(self, viewer: Agent, device: int = -1, context: int = 0) -> list[Agent]:
        """Return the streams of a device's context (device -1 for all) that got work since `viewer` last asked."""
        key = viewer.index, device, context
        begin = self._looked.get(key, 0)
        self._looked[key] = self._seen = len(self._worked)
        self._effort.spend(2 * (self._seen - begin))
        found = dict.fromkeys(self._worked[begin:])
        return [stream for stream in found if device == -1 or stream.is_of(device, context)]

    def record_event(self, host: Agent, stream: Agent, event: int, record: int) -> None:
        """cuEventRecord: "captures in hEvent the contents of hStream" now; a second one moves the event."""
        self.enqueue(host, stream, record)
        self.record_here(stream, event)

    def record_here(self, stream: Agent, event: int) -> None:
        """An event is recorded after the latest operation of a stream; a part of a graph may be that."""
        before = self._events.get(event)
        if before is not None and before.agent != stream.index:
            self._replaced[event] = before, self._recorded_at[event]
        elif self._replaced:
            self._replaced.pop(event, None)
        self._recorded_at[event] = stream.records[-1]
        self._events[event] = Moment(stream.index, stream.count, stream.clock)

    def destroy_event(self, event: int) -> None:
        """cuEventDestroy: what waited for the event keeps its order, and nothing can wait for it any more."""
        self._events.pop(event, None)
        self._replaced.pop(event, None)

    def wait_event(self, host: Agent, stream: Agent, event: int, record: int, site: int = 0) -> None:
        """cuStreamWaitEvent: "makes all future work submitted to hStream wait for all work captured in hEvent".

        "Before the first call to cuEventRecord(), an event represents an empty set of work".
        """
        if event in self.foreign_events:
            self._unknown(stream)
        elif not self.join_event(stream, event):
            self.empty += 1
            self.empty_waits[stream.index][site] = event, record
        elif event in self._replaced:
            replaced, first = self._replaced[event]
            self.moved.setdefault(stream.index, {})[site] = record, replaced, first, self._recorded_at[event]
        self.enqueue(host, stream, record)

    def join_event(self, stream: Agent, event: int) -> bool:
        """Let `stream` come after an event's latest record, and tell whether there is one."""
        captured = self._events.get(event)
        if captured is None:
            return False
        self.learn(stream, captured)
        self.edges["event wait"] += 1
        return True

    def event_position(self, event: int) -> list[Moment]:
        """Return the moment that the event's latest record captured, if there is one."""
        captured = self._events.get(event)
        return [] if captured is None else [captured]

    def event_done(
        self,
        host: Agent,
        event: int,
        rule: str,
        record: int = -1,
        site: int = 0,
        *,
        covered: Sequence[Moment] | None = None,
    ) -> None:
        """cuEventSynchronize, or a cuEventQuery that said so: the host is after the event's latest record, if any.

        `covered`: what a wait covers that began earlier (:mod:`cudatool.sanitize.waits`), as with those below.
        """
        captured = covered[0] if covered else self._events.get(event)
        if event in self.foreign_events:
            self._unknown(host)
        elif captured is not None:
            self.learn(host, captured, record)
            self.edges[rule] += 1
        elif record >= 0:
            self.empty_waits[host.index][site] = event, record

    def stream_done(self, host: Agent, stream: Agent, rule: str, *, covered: Sequence[Moment] | None = None) -> None:
        """cuStreamSynchronize, a cuStreamQuery that said so, or a copy that blocks: the host is after its work.

        These calls "use standard default stream semantics": on the legacy stream they cover the blocking streams.
        """
        for moment in self.position(stream) if covered is None else covered:
            self.learn(host, moment)
        self.edges[rule] += 1
        if covered is not None:
            return
        if stream.pending is not None and self._one_host:
            stream.pending.clear()  # whatever is enqueued from now on comes after the host
        stream.unsure = -1  # whatever its earlier operations waited for, they are done

    def context_position(self, device: int, context: int) -> list[Moment]:
        """Return the moments at which all present work of a context is finished."""
        self._effort.spend(2 * len(self.streams))
        return [stream.done for stream in self.streams if device == -1 or stream.is_of(device, context)]

    def context_done(self, host: Agent, device: int, context: int, *, covered: Sequence[Moment] | None = None) -> None:
        """cuCtxSynchronize: "blocks until the current context has completed all preceding requested tasks"."""
        if covered is None:
            covered = [stream.done for stream in self._since(host, device, context)]
        for moment in covered:
            self.learn(host, moment)
        self.edges["device synchronize"] += 1

    def serialize(self, stream: Agent, devices: int) -> None:
        """Before cuMemcpyPeer or cuMemcpy3DPeer: the next operation of `stream` comes after all work so far.

        They are "serialized with respect to all pending and future asynchronous work" of the current device and those
        of both sides (`devices`, a bit for each ordinal).
        """
        for other in self._of_devices(stream, devices):
            self.learn(stream, other.done)
        self.edges["copy between devices"] += 1

    def serialized(self, stream: Agent, devices: int) -> None:
        """After such a copy: all later work of these devices comes after it."""
        for other in self._of_devices(stream, devices):
            if self.learn(other, stream.done):
                self.step(other, stream.records[-1])

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
        if address not in self._values:
            insort(self.flags, address)
            self._values[address] = deque(maxlen=_VALUES)
        self._values[address].append((None if flags & 1 else value, stream.done))

    def overwrite(self, start: int, stop: int, moment: Moment) -> None:
        """Other than by cuStreamWriteValue, all these bytes are written: by a fill, a copy, a kernel or the host."""
        for place in range(bisect_left(self.flags, start), len(self.flags)):
            address = self.flags[place]
            if address + 4 > stop:
                break
            self._values[address].append((None, moment))

    def wait_value(
        self, host: Agent, stream: Agent, address: int, value: int, flags: int, size: int, record: int
    ) -> None:
        """cuStreamWaitValue32 and 64: an edge from the write that makes the condition true, if that was seen.

        It comes after whichever of several such writes was first: after what all of them come after.
        """
        written = self._present_values(address, stream.index, self.clock_of_next(host, stream))
        meeting = [moment for one, moment in written if one is not None and _is_met(one, value, flags, size)]
        if not meeting:
            self._unknown(stream)
        elif len(meeting) == 1:
            self.learn(stream, meeting[0])
        else:
            common = functools.reduce(self.clocks.meet, (self.clocks.after(moment) for moment in meeting))
            stream.clock = self.clocks.join_all(stream.index, stream.count + 1, stream.clock, common)
        if meeting:
            self.edges["wait for a value"] += 1
        self.enqueue(host, stream, record)

    def _present_values(self, address: int, agent: int, clock: Clock) -> list[tuple[int | None, Moment]]:
        """Return the values that may be at an address while an operation of `agent` with `clock` waits.

        Not those that another write has replaced before the wait begins, such as a flag's of an earlier round::

            absent   iff   it happens before a later write, which happens before the wait
        """
        values = list(self._values.get(address, ()))
        self._effort.spend(len(values))
        place = len(values) - 1
        while place > 0:
            _, replacing = values[place]
            if _is_before(replacing, agent, clock):
                kept = [one for one in values[:place] if not _is_before(one[1], replacing.agent, replacing.clock)]
                self._effort.spend(place)
                values[:place] = kept
                place = len(kept)
            place -= 1
        return values

    def wait_unknown(self, host: Agent, stream: Agent, record: int) -> None:
        """A wait for what the trace cannot show: an external semaphore, another process's event."""
        self._unknown(stream)
        self.enqueue(host, stream, record)

    def _unknown(self, agent: Agent) -> None:
        """From now on the agent may be after anything. Nothing is reported that may be in order."""
        self.unknown += 1
        if not self.unknown_orders:
            return
        for stream in self._since(agent):
            if stream is not agent:
                self.learn(agent, stream.done)
        if agent.unsure < 0 and not agent.is_host:  # what is enqueued after the host has waited, comes after that
            agent.unsure = agent.count


def _is_before(earlier: Moment, agent: int, clock: Clock) -> bool:
    """Whether what was enqueued earlier happens before an operation of `agent` with `clock`."""
    return earlier.agent == agent or clock[earlier.agent] >= earlier.epoch


def _is_met(written: int, value: int, flags: int, size: int) -> bool:
    """CUstreamWaitValue_flags: GEQ compares cyclically, EQ, AND, NOR."""
    bits = 64 if size == 8 else 32  # a file may say anything, and numbers of as many bits take memory
    match flags & 3:
        case 0:
            return (written - value) & ((1 << bits) - 1) < 1 << (bits - 1)
        case 1:
            return written == value
        case 2:
            return bool(written & value)
        case _:
            return bool(~(written | value) & ((1 << bits) - 1))
