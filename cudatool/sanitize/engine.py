"""The happens-before check of a recorded trace.

::

    for each record, in the order of emission:
        move the clocks by CUDA's ordering rules          (ordering.py)
        keep track of who owns which memory               (lifetimes.py)
        for each byte range that an operation touches:
            is the memory alive for it?                   -> use-after-free, use-before-alloc
            is every kept access of those bytes that it conflicts with ordered before it?   (intervals.py)
                                                          -> race, reuse

A defect is reported once for each pair of call sites.

Records of what a kernel accessed may come later in the file than its launch: they are tied by correlation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.intervals import ATOMIC, READ, WRITE, Access, History, Operation, overlap
from cudatool.sanitize.lifetimes import Buffer, Buffers
from cudatool.sanitize.ordering import Agent, Ordering, join
from cudatool.sanitize.rows import LAUNCHES, WORK, Row, byte_sets, read_rows
from cudatool.trace.events import AccessFlag, CopyFlag, Kind, StreamFlag
from cudatool.trace.model import Trace

__all__ = ["Defect", "Engine", "Key", "Repairs", "Side"]

Key = tuple[Any, ...]
"""What makes two defects the same: kind, certainty, both call sites and the allocation's."""


class Side(NamedTuple):
    """One of the two operations of a defect and what it does to the memory."""

    operation: Operation
    mode: str
    name: int = 0
    exact: bool = True
    owner: Buffer | None = None


@dataclass(slots=True)
class Defect:
    """The first of a series of equal findings.

    Attributes
    ----------
    kind, first, second
        What is wrong, with the two sides in record order.
    start, size
        The bytes.
    buffer
        Their owner when the second side came; None if not seen.
    common
        The epoch of the first side's agent up to which the second side is ordered after it; 0 for none.
    count, last
        Length of the series, and the records of its latest pair.
    """

    kind: FindingKind
    first: Side
    second: Side
    start: int
    size: int
    buffer: Buffer | None
    common: int
    count: int = 1
    last: tuple[int, int] = (-1, -1)


@dataclass(slots=True)
class Repairs:
    """Changes of the program, to be tried on the trace.

    Attributes
    ----------
    waits
        (stack, agent) -> agents: before whatever it does at that call site, the agent waits for these.
    record_streams
        Stack of an allocation -> agents: ``record_stream`` is called on such blocks for these.
    """

    waits: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    record_streams: dict[int, set[int]] = field(default_factory=dict)


class Engine:
    """One pass over a trace.

    Parameters
    ----------
    trace
        What to check.
    one_host
        Take all host threads for one, in record order. The trace does not show how threads hand work to each
        other; this assumes that they always do it properly, so that nothing is reported that they may have ordered.
    go_on_repaired
        Having met two accesses in no order, go on as if the second one had waited for the first. What is still found
        then are the independent defects: one missing wait does not show again at everything that follows from it.
    repairs
        Orderings to add, to see which defects they remove.

    Attributes
    ----------
    defects
        What was found, by call sites, in order of appearance.
    history
        The accesses that still mattered at the end.
    operations, unchecked, unknown_streams, threads
        Numbers of operations on streams; of launches whose accesses are not known; of operations that name no stream;
        of host threads that use the device.
    """

    def __init__(
        self, trace: Trace, *, one_host: bool = True, go_on_repaired: bool = False, repairs: Repairs | None = None
    ) -> None:
        self.defects: dict[Key, Defect] = {}
        self.operations = 0
        self.unchecked = 0
        self.unknown_streams = 0
        self.records = trace.records
        self._trace = trace
        self._sites = trace.records[["kind", "name", "stack"]]
        self._repairs = repairs
        self._go_on_repaired = go_on_repaired
        self._make_agents(trace, one_host)
        self.ordering = Ordering(list(self._streams.values()))
        self.history = History()
        self._buffers = Buffers()
        self._capturing: dict[int, int] = {}  # stream -> the stream whose capture it takes part in
        self._captured_events: dict[int, int] = {}  # event -> likewise
        self._handlers: dict[int, Callable[[Row], None]] = {
            **dict.fromkeys(WORK, self._work),
            Kind.MEMCPY: self._copy,
            Kind.MEMSET: self._fill,
            Kind.EVENT_RECORD: self._record_event,
            Kind.STREAM_WAIT_EVENT: self._wait_event,
            Kind.EVENT_SYNCHRONIZE: self._synchronize_event,
            Kind.EVENT_QUERY: self._query_event,
            Kind.STREAM_SYNCHRONIZE: self._synchronize_stream,
            Kind.STREAM_QUERY: self._query_stream,
            Kind.DEVICE_SYNCHRONIZE: self._synchronize_device,
            Kind.HOST_ACCESS: self._host_access,
            Kind.MEM_ALLOC: self._memory_alloc,
            Kind.MEM_FREE: self._memory_free,
            Kind.HOST_ALLOC: self._memory_alloc,
            Kind.HOST_FREE: self._host_free,
            Kind.BLOCK_ALLOC: self._block_alloc,
            Kind.BLOCK_RECORD_STREAM: self._block_record_stream,
            Kind.BLOCK_FREE_REQUESTED: self._block_free_requested,
            Kind.BLOCK_FREE_COMPLETED: self._block_free_completed,
            Kind.SEGMENT_ALLOC: self._unmap,
            Kind.SEGMENT_MAP: self._unmap,
            Kind.SEGMENT_UNMAP: self._unmap,
            Kind.SEGMENT_FREE: self._segment_free,
            Kind.GRAPH_CAPTURE_BEGIN: self._capture_begin,
            Kind.GRAPH_CAPTURE_END: self._capture_end,
        }

    def run(self) -> None:
        """Read the whole trace."""
        handlers = self._handlers
        for row in read_rows(self._trace, handlers.keys()):
            handlers[row.kind](row)
        for buffer in self._buffers:
            self._report_suspect(buffer)

    def _make_agents(self, trace: Trace, one_host: bool) -> None:
        records = trace.records
        host_kinds = [*WORK, Kind.HOST_ACCESS, Kind.MEM_FREE]
        self.threads = len(np.unique(records["thread"][np.isin(records["kind"], host_kinds)]))
        threads = np.unique(records["thread"]).tolist()
        streams = [stream for stream in np.unique(records["stream"]).tolist() if stream]
        created = records[records["kind"] == Kind.STREAM_CREATE]
        facts = {int(row["stream"]): (int(row["device"]), int(row["flags"])) for row in created}
        several_devices = len({device for device, _ in facts.values()}) > 1

        hosts = 1 if one_host else len(threads)
        total = hosts + len(streams)
        host_agents = [
            Agent(i, total, "the host" if one_host else f"host thread {trace.threads[threads[i]]}", is_host=True)
            for i in range(hosts)
        ]
        self._hosts = {thread: host_agents[0 if one_host else i] for i, thread in enumerate(threads)}
        self._streams: dict[int, Agent] = {}
        legacy: list[Agent] = []
        blocking: list[Agent] = []
        for index, stream in enumerate(streams, hosts):
            device, flags = facts.get(stream, (-1, 0))
            label = f"stream {stream}"
            if flags & StreamFlag.LEGACY_DEFAULT:
                label = f"the legacy default stream ({label})"
            elif flags & StreamFlag.PER_THREAD_DEFAULT:
                label = f"the per-thread default stream ({label})"
            if several_devices:
                label += f" of device {device}"
            agent = self._streams[stream] = Agent(index, total, label, device=device)
            if flags & StreamFlag.LEGACY_DEFAULT:
                legacy.append(agent)
            elif not flags & StreamFlag.NON_BLOCKING:
                blocking.append(agent)
        for default in legacy:
            # A stream whose creation was not seen may be of any device.
            default.peers = tuple(s for s in blocking if s.device in (default.device, -1))
            for peer in default.peers:
                peer.peers += (default,)
        self.agents = [*host_agents, *self._streams.values()]

    # Work on streams --------------------------------------------------------------------------------------------

    def _work(self, row: Row) -> None:
        """A kernel launch, matrix product, host function or graph launch: one operation in stream order.

        Host functions run in stream order (cuLaunchHostFunc); a graph runs between the stream's earlier and later
        work (cuGraphLaunch).
        """
        self._enqueue_work(row, ())

    def _copy(self, row: Row) -> None:
        """API synchronization behavior, "Memcpy"."""
        flags = row.flags
        touched = (
            Access(row.aux0, row.aux0 + row.size, READ),
            Access(row.address, row.address + row.size, WRITE),
        )
        # When the driver reads or writes the pageable memory of a copy is not promised, because it may be staged.
        staged = (READ if flags & CopyFlag.SOURCE_PAGEABLE else 0) | (
            WRITE if flags & CopyFlag.DESTINATION_PAGEABLE else 0
        )
        stream = self._streams.get(row.stream)
        if stream is None or row.stream in self._capturing or flags & CopyFlag.ASYNC:
            # Asynchronous 1: between device and pageable memory it "might be synchronous": no edge.
            self._enqueue_work(row, touched, staged)
            return
        host = self._hosts[row.thread]
        if flags & CopyFlag.SOURCE_PAGEABLE and flags & CopyFlag.DESTINATION_DEVICE:
            # Synchronous 1: "a stream sync is performed before the copy is initiated"; it returns once staged.
            self.ordering.stream_done(host, stream, "synchronous copy")
            self._enqueue_work(row, touched, staged)
            return
        self._enqueue_work(row, touched, staged)
        # Synchronous 2, 3, 5: blocks until done. 4: between device memories "no host-side synchronization".
        if not (flags & CopyFlag.SOURCE_DEVICE and flags & CopyFlag.DESTINATION_DEVICE):
            self.ordering.stream_done(host, stream, "synchronous copy")

    def _fill(self, row: Row) -> None:
        """API synchronization behavior, "Memset": asynchronous, except for a target in pinned host memory."""
        self._enqueue_work(row, (Access(row.address, row.address + row.size, WRITE),))
        stream = self._streams.get(row.stream)
        if stream is not None and not row.flags & (CopyFlag.ASYNC | CopyFlag.DESTINATION_DEVICE):
            self.ordering.stream_done(self._hosts[row.thread], stream, "synchronous fill")

    def _enqueue_work(self, row: Row, known: Sequence[Access], ignored: int = 0) -> None:
        """Append an operation. It touches what its ACCESS records say, or else `known`, except in mode `ignored`."""
        if row.stream in self._capturing:
            return  # captured work does not execute now (cuStreamBeginCapture)
        stream = self._streams.get(row.stream)
        if stream is None:
            self.unknown_streams += 1
            return
        if self._repairs is not None:
            self._repair(row, stream)
        self.operations += 1
        self.ordering.enqueue(self._hosts[row.thread], stream, row.record)
        if row.accesses is not None:
            known = row.accesses
        elif row.kind in LAUNCHES:
            self.unchecked += 1
        if known:
            operation = Operation(stream.index, stream.count, stream.clock, row.record)
            for touched in known:
                if not touched.mode & ignored:
                    self._access(operation, touched)

    def _host_access(self, row: Row) -> None:
        """The host itself reads or writes memory that the device can reach."""
        host = self._hosts[row.thread]
        if self._repairs is not None:
            self._repair(row, host)
        self.ordering.host_step(host, row.record)
        mode = row.flags & (READ | WRITE)
        touched = Access(row.address, row.address + row.size, mode, exact=not row.flags & AccessFlag.INEXACT)
        if row.aux1 > 1:
            (touched,) = byte_sets(self.records[row.record : row.record + 1])
        self._access(Operation(host.index, host.count, host.clock, row.record), touched)

    def _access(self, operation: Operation, touched: Access) -> None:
        """Check one byte range of `operation` against the life of its memory and the accesses before it."""
        if touched.start >= touched.stop or not touched.mode:
            return
        touched.operation = operation
        touched.owner = buffer = self._buffers.find(touched.start)
        if buffer is not None:
            if buffer.freed is not None:
                self._misuse(FindingKind.USE_AFTER_FREE, Side(buffer.freed, "free"), touched)
                return
            buffer.suspect = None
            if buffer.born is not None and not buffer.born.before(operation.agent, operation.clock):
                # cuMemAllocAsync: the memory may be used only in stream order after the allocation.
                self._misuse(FindingKind.USE_BEFORE_ALLOC, Side(buffer.born, "allocate"), touched)
        self.history.touch(touched, self._conflict)

    # Synchronization --------------------------------------------------------------------------------------------

    def _record_event(self, row: Row) -> None:
        origin = self._capturing.get(row.stream)
        if origin is not None:
            self._captured_events[row.aux0] = origin
            return
        self._captured_events.pop(row.aux0, None)
        stream = self._streams.get(row.stream)
        if stream is not None:
            self.ordering.record_event(self._hosts[row.thread], stream, row.aux0, row.record)

    def _wait_event(self, row: Row) -> None:
        if row.aux0 in self._captured_events:
            # Waiting for a captured event takes the stream into the capture ("Stream Management", stream capture).
            self._capturing[row.stream] = self._captured_events[row.aux0]
        stream = self._streams.get(row.stream)
        if stream is not None and row.stream not in self._capturing:
            self.ordering.wait_event(self._hosts[row.thread], stream, row.aux0, row.record)

    def _synchronize_event(self, row: Row) -> None:
        self.ordering.event_done(self._hosts[row.thread], row.aux0, "event synchronize")

    def _query_event(self, row: Row) -> None:
        if row.aux1:
            self.ordering.event_done(self._hosts[row.thread], row.aux0, "event query")

    def _synchronize_stream(self, row: Row) -> None:
        stream = self._streams.get(row.stream)
        if stream is not None:
            self.ordering.stream_done(self._hosts[row.thread], stream, "stream synchronize")

    def _query_stream(self, row: Row) -> None:
        stream = self._streams.get(row.stream)
        if row.aux1 and stream is not None:
            self.ordering.stream_done(self._hosts[row.thread], stream, "stream query")

    def _synchronize_device(self, row: Row) -> None:
        self.ordering.device_done(self._hosts[row.thread], row.device)

    def _capture_begin(self, row: Row) -> None:
        self._capturing[row.stream] = row.stream

    def _capture_end(self, row: Row) -> None:
        self._capturing = {stream: origin for stream, origin in self._capturing.items() if origin != row.stream}
        self._captured_events = {e: origin for e, origin in self._captured_events.items() if origin != row.stream}

    # Lifetimes --------------------------------------------------------------------------------------------------

    def _memory_alloc(self, row: Row) -> None:
        """cuMemAlloc and the like; cuMemAllocAsync if on a stream.

        What was at these addresses before is over: the driver gives memory out again only when that is in order
        (for a pool, cuMemPoolSetAttribute's three REUSE attributes). A use that was not was reported at the free.
        """
        stop = row.address + row.size
        self.history.forget(row.address, stop)
        buffer = Buffer(row.address, stop, row.record)
        stream = self._streams.get(row.stream)
        if stream is not None and row.stream not in self._capturing:
            self.ordering.enqueue(self._hosts[row.thread], stream, row.record)
            buffer.agent = stream.index
            buffer.born = Operation(stream.index, stream.count, stream.clock, row.record)
        self._own(buffer)

    def _memory_free(self, row: Row) -> None:
        """cuMemFree, or cuMemFreeAsync if on a stream."""
        if row.stream in self._capturing:
            return
        host = self._hosts[row.thread]
        buffer = self._freed_buffer(row)
        stream = self._streams.get(row.stream)
        if stream is None and buffer.born is None:
            self._wait_for_users(host, buffer.start, buffer.stop)
        agent = host if stream is None else stream
        if self._repairs is not None:
            self._repair(row, agent)
        if stream is None:
            self.ordering.host_step(host, row.record)
        else:
            self.ordering.enqueue(host, stream, row.record)
        operation = Operation(agent.index, agent.count, agent.clock, row.record)
        if stream is not None or buffer.born is not None:
            # cuMemFreeAsync: "the allocation must not be accessed after stream execution reaches the free".
            # cuMemFree of stream-ordered memory does not wait: "callers must ensure that all accesses have completed".
            for access in list(self.history.within(buffer.start, buffer.stop)):
                if not access.operation.before(operation.agent, operation.clock):
                    start, stop = max(access.start, buffer.start), min(access.stop, buffer.stop)
                    sides = _side(access), Side(operation, "free")
                    self._report(FindingKind.USE_AFTER_FREE, *sides, start, stop - start)
        buffer.freed = operation
        self.history.forget(buffer.start, buffer.stop)

    def _host_free(self, row: Row) -> None:
        """cuMemFreeHost: whether it waits is not said, and the addresses may soon be pageable: forget them."""
        buffer = self._buffers.find(row.address)
        if buffer is not None:
            self.history.forget(buffer.start, buffer.stop)
            self._buffers.remove(buffer.start, buffer.stop)

    def _unmap(self, row: Row) -> None:
        """Addresses that stand for other memory from now on."""
        self.history.forget(row.address, row.address + row.size)
        for buffer in self._buffers.remove(row.address, row.address + row.size):
            self._report_suspect(buffer)

    def _segment_free(self, row: Row) -> None:
        self._wait_for_users(self._hosts[row.thread], row.address, row.address + row.size)
        self.history.forget(row.address, row.address + row.size)

    def _wait_for_users(self, host: Agent, start: int, stop: int) -> None:
        """cuMemFree "may perform implicit synchronization", and does for memory in use: the host is after its users."""
        for access in self.history.within(start, stop):
            if not access.operation.before(host.index, host.clock):
                host.clock = join(host.clock, access.operation.after)
                self.ordering.edges["free of memory in use"] += 1

    def _block_alloc(self, row: Row) -> None:
        """The caching allocator hands out a block, for use on a stream (torch.cuda.caching_allocator_alloc).

        The old owner's accesses stay in the history: only their order against the new owner's can tell a race.
        """
        buffer = Buffer(row.address, row.address + row.size, row.record)
        stream = self._streams.get(row.stream)
        if stream is not None:
            buffer.agent = stream.index
            clock = join(self.ordering.position(stream), self._hosts[row.thread].clock)
            handing_out = Operation(stream.index, stream.count, clock, row.record)
            for old in self.history.within(buffer.start, buffer.stop):
                if not old.operation.before(stream.index, clock):
                    buffer.suspect = old, handing_out
                    break
        self._own(buffer)

    def _block_record_stream(self, row: Row) -> None:
        buffer = self._buffers.find(row.address)
        stream = self._streams.get(row.stream)
        if buffer is not None and stream is not None:
            buffer.other_streams.add(stream.index)

    def _block_free_requested(self, row: Row) -> None:
        """The owner gave the block back. The allocator records an event on each stream named by record_stream."""
        buffer = self._freed_buffer(row)
        others = set(buffer.other_streams)
        if self._repairs is not None:
            others |= self._repairs.record_streams.get(int(self.records["stack"][buffer.record]), set())
        buffer.releases = [self.ordering.position(self.agents[other]) for other in sorted(others)]
        host = self._hosts[row.thread]
        self.ordering.host_step(host, row.record)
        buffer.freed = Operation(host.index, host.count, host.clock, row.record)

    def _block_free_completed(self, row: Row) -> None:
        """Those events have passed: the allocator has seen it by queries, so the host is after them."""
        buffer = self._buffers.find(row.address)
        if buffer is not None:
            host = self._hosts[row.thread]
            for clock in buffer.releases:
                host.clock = join(host.clock, clock)
                self.ordering.edges["record_stream"] += 1
            buffer.releases = []

    def _freed_buffer(self, row: Row) -> Buffer:
        """What the record frees, entered now if it was allocated before the trace began."""
        buffer = self._buffers.find(row.address)
        if buffer is None or buffer.start != row.address:
            buffer = Buffer(row.address, row.address + row.size, row.record)
            self._own(buffer)
        return buffer

    def _own(self, buffer: Buffer) -> None:
        for replaced in self._buffers.add(buffer):
            self._report_suspect(replaced)

    # Reporting --------------------------------------------------------------------------------------------------

    def _conflict(self, old: Access, new: Access) -> None:
        """Two accesses in no order, one of which writes."""
        found = overlap(old, new)
        assert found is not None
        buffer = self._buffers.find(found[0])
        if self.agents[old.operation.agent].is_host or self.agents[new.operation.agent].is_host:
            kind = FindingKind.RACE_HOST
        elif buffer is not None and buffer.record > old.operation.record:
            kind = FindingKind.REUSE
        elif old.mode & (WRITE | ATOMIC) and new.mode & (READ | ATOMIC):
            kind = FindingKind.RACE_RAW
        elif old.mode & (WRITE | ATOMIC):
            kind = FindingKind.RACE_WAW
        else:
            kind = FindingKind.RACE_WAR
        self._report(kind, _side(old), _side(new), *found)

    def _misuse(self, kind: FindingKind, first: Side, touched: Access) -> None:
        """An access at a time at which its memory is not there for it."""
        self._report(kind, first, _side(touched), touched.start, touched.stop - touched.start)

    def _report_suspect(self, buffer: Buffer) -> None:
        """A block was handed out too early, and no known access of the new owner shows that it did no harm."""
        if buffer.suspect is not None:
            old, handing_out = buffer.suspect
            buffer.suspect = None
            start, stop = max(old.start, buffer.start), min(old.stop, buffer.stop)
            self._report(FindingKind.REUSE, _side(old), Side(handing_out, "allocate"), start, stop - start, buffer)

    def _report(
        self, kind: FindingKind, first: Side, second: Side, start: int, size: int, buffer: Buffer | None = None
    ) -> None:
        """Add a defect, or count it if its call sites are known."""
        buffer = buffer or self._buffers.find(start)
        certain = first.exact and second.exact
        earlier, later = first.operation, second.operation
        sites = self._sites[earlier.record].item(), self._sites[later.record].item()
        key = (kind, certain, *sites, self._stack(buffer))
        defect = self.defects.get(key)
        if defect is None:
            common = later.clock[earlier.agent]
            self.defects[key] = Defect(kind, first, second, start, size, buffer, common)
        elif defect.last != (earlier.record, later.record):
            defect.count += 1
        self.defects[key].last = earlier.record, later.record
        if self._go_on_repaired and certain and first.mode != "free":
            agent = self.agents[later.agent]
            agent.clock = join(agent.clock, earlier.after)
            later.clock = join(later.clock, earlier.after)

    def _stack(self, buffer: Buffer | None) -> int:
        return int(self.records["stack"][buffer.record]) if buffer else 0

    def _repair(self, row: Row, agent: Agent) -> None:
        """Let `agent` wait for what the repairs say it should wait for at this call site."""
        assert self._repairs is not None
        for other in self._repairs.waits.get((row.stack, agent.index), ()):
            agent.clock = join(agent.clock, self.ordering.position(self.agents[other]))


def _mode(mode: int) -> str:
    return {READ: "read", WRITE: "write", READ | WRITE: "read and write"}.get(mode, "atomic")


def _side(access: Access) -> Side:
    return Side(access.operation, _mode(access.mode), access.name, access.exact, access.owner)
