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

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from cudatool.sanitize.agents import agents_of
from cudatool.sanitize.aliases import Aliases
from cudatool.sanitize.allocations import Memory
from cudatool.sanitize.clocks import Moment
from cudatool.sanitize.defects import Defect, Defects, Key, Repairs, Side, race_of, side_of
from cudatool.sanitize.effort import Effort
from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.graphs import Graphs, Node
from cudatool.sanitize.intervals import READ, WRITE, Access, History, Operation
from cudatool.sanitize.launches import Launches
from cudatool.sanitize.lifetimes import Buffer, Buffers
from cudatool.sanitize.memory_flags import MemoryFlags
from cudatool.sanitize.ordering import Agent, Ordering
from cudatool.sanitize.programmatic import Dependents
from cudatool.sanitize.rows import LAUNCHES, Row, byte_sets, read_rows
from cudatool.sanitize.unordered import Unordered
from cudatool.sanitize.waits import Waits
from cudatool.trace.distinct import distinct
from cudatool.trace.events import WORK, AccessFlag, CopyFlag, Kind, LaunchFlag
from cudatool.trace.model import Trace

__all__ = ["Engine"]

_BETWEEN_DEVICES = int(CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE)
_CAPTURED = int(LaunchFlag.CAPTURED)
_BATCHES = ("cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync")
_SERIALIZED = ("cuMemcpyPeer", "cuMemcpy3DPeer")  # "with respect to all pending and future asynchronous work"


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Rows and accesses come by the million and are in no cycles: looking for some takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# What threads do that one of them may order for another, or order itself.
_OF_THREADS = (
    *(*WORK, Kind.HOST_ACCESS, Kind.MEM_FREE, Kind.EVENT_RECORD, Kind.STREAM_WAIT_EVENT, Kind.EVENT_SYNCHRONIZE),
    *(Kind.EVENT_QUERY, Kind.STREAM_SYNCHRONIZE, Kind.STREAM_QUERY, Kind.DEVICE_SYNCHRONIZE),
)


def _threads(trace: Trace) -> int:
    """Return how many threads of the host use the device."""
    of_host = np.isin(trace.records["kind"], _OF_THREADS)
    return len(distinct(trace.records["thread"][of_host]))


def _named(trace: Trace, names: Collection[str]) -> set[int]:
    """Return the numbers that these names have in a trace."""
    return {index for index, name in enumerate(trace.names) if name in names}


def _first_records(trace: Trace) -> dict[int, int]:
    """Return the stream that each event was first recorded on."""
    recorded = np.flatnonzero(trace.records["kind"] == Kind.EVENT_RECORD)
    events, firsts = np.unique(trace.records["aux0"][recorded], return_index=True)
    streams = trace.records["stream"][recorded[firsts]]
    return dict(zip(events.tolist(), streams.tolist(), strict=True))


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
    wanted
        Stop as soon as these defects were found; None to read the whole trace.
    unknown_orders
        Whether a wait for what the trace does not show counts as one for everything.
    effort
        What is left of the work that the check of this trace may be; None for all of it.

    Attributes
    ----------
    history
        The accesses that still mattered at the end.
    operations, unknown_streams, threads
        Numbers of operations on streams; of operations that name no stream; of host threads that use the device.
    unchecked
        Numbers of launches whose accesses are not known, by the index of their name.
    by_flags
        By call sites, the records of two operations that flags in memory may order.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        one_host: bool = True,
        go_on_repaired: bool = False,
        repairs: Repairs | None = None,
        wanted: Collection[Key] | None = None,
        unknown_orders: bool = True,
        effort: Effort | None = None,
    ) -> None:
        self.effort = Effort(trace) if effort is None else effort
        self.operations = self.unknown_streams = 0
        self.unchecked: Counter[int] = Counter()
        self.by_flags: dict[tuple[int, int], tuple[int, int]] = {}
        self.records = trace.records
        self._memory_flags, self._stacks = MemoryFlags(trace), trace.records["stack"].data
        self._trace = trace
        self.found = Defects(trace.records)
        self.repairs, self._wanted = repairs, wanted
        self.go_on_repaired = go_on_repaired
        self.threads = _threads(trace)
        one_host |= self.threads < 2
        made = agents_of(trace, self.effort, one_host=one_host)
        self.agents, self.hosts, self.streams = made.agents, made.hosts, made.streams
        self.clocks, self._dependents = made.clocks, Dependents(made.dependents)
        self.ordering = Ordering(list(self.streams.values()), self.clocks, self.effort, one_host=one_host)
        self.ordering.unknown_orders = unknown_orders
        self.history = History(self.effort, self.agents[0] if one_host else None)
        self.buffers, self.aliases, self.graphs = Buffers(), Aliases(), Graphs()
        self._memory = Memory(self, trace.names)
        self._launches = Launches(self, trace)
        self._peer_copies, self._batches = _named(trace, _SERIALIZED), _named(trace, _BATCHES)
        handed = trace.of_kind(Kind.HAND_OVER)["correlation"]
        # By correlation, those that hand over an object: when they are done.
        self._host_functions: dict[int, Moment | None] = dict.fromkeys(handed[handed != 0].tolist())
        self._handed_over: dict[int, dict[int, Moment]] = {}  # by object: the latest moment of each agent
        self._early: dict[int, list[int]] = {}  # by correlation: objects that it has handed over before its own record
        self._groups: dict[int, Unordered] = {}  # by thread: its latest group of collectives, or batch of copies
        self._first_records = _first_records(trace)
        self._waits = Waits(trace.records if self.threads > 1 else trace.records[:0], self.streams, self.ordering)
        self._handlers = self._make_handlers()

    def _make_handlers(self) -> dict[int, Callable[[Row], None]]:
        """Return what each kind of record does; the others do nothing."""
        return {
            **dict.fromkeys(WORK, self._work),
            Kind.COLLECTIVE: self._collect,
            Kind.MEMCPY: self._copy,
            Kind.MEMSET: self._fill,
            Kind.EVENT_CREATE: self._create_event,
            Kind.EVENT_DESTROY: self._destroy_event,
            Kind.EVENT_RECORD: self._record_event,
            Kind.STREAM_WAIT_EVENT: self._wait_event,
            Kind.EVENT_SYNCHRONIZE: self._synchronize_event,
            Kind.EVENT_QUERY: self._query_event,
            Kind.STREAM_SYNCHRONIZE: self._synchronize_stream,
            Kind.STREAM_QUERY: self._query_stream,
            Kind.DEVICE_SYNCHRONIZE: self._synchronize_device,
            Kind.STREAM_WRITE_VALUE: self._write_value,
            Kind.STREAM_WAIT_VALUE: self._wait_value,
            Kind.STREAM_WAIT_UNKNOWN: self._wait_unknown,
            Kind.HOST_ACCESS: self._host_access,
            Kind.HAND_OVER: self._hand_over,
            Kind.TAKE_OVER: self._take_over,
            **self._memory.handlers(),
            **self._launches.handlers(),
        }

    @property
    def defects(self) -> dict[Key, Defect]:
        """What was found, by call sites, in order of appearance."""
        return self.found.found

    def run(self) -> None:
        """Read the trace, once."""
        handlers, wanted, waits = self._handlers, self._wanted, self._waits
        found = -1
        with _no_garbage_collection():
            for row in read_rows(self._trace, handlers.keys()):
                if waits.begins:
                    waits.begin(row.record)
                handlers[row.kind](row)
                if wanted is not None and found < len(self.defects):
                    found = len(self.defects)
                    if self.defects.keys() >= set(wanted):
                        break
            else:
                for buffer in self.buffers.suspects():
                    self._memory.report_suspect(buffer)
        # They hold the engine: without them it goes, and the trace with it, when its last user does.
        handlers.clear()
        del self._memory, self._launches

    # Work on streams --------------------------------------------------------------------------------------------

    def _work(self, row: Row) -> None:
        """A kernel launch, matrix product or host function: one operation in stream order (cuLaunchHostFunc)."""
        self._enqueue_work(row, ())

    def _collect(self, row: Row) -> None:
        """A collective operation: others of its group come in no order with it, even on one stream."""
        self._work(row)
        self._check_group(row, joins=bool(row.flags))

    def _check_group(self, row: Row, *, joins: bool) -> None:
        """Look for races of an operation with those of its group or batch; it `joins` that of the one before it."""
        if row.stream in self.graphs.captures or row.stream not in self.streams:
            return
        group = self._groups.get(row.thread)
        if group is None or not joins or (self.repairs is not None and row.stack in self.repairs.groups):
            group = self._groups[row.thread] = Unordered(self.effort)
        conflicts: dict[int, tuple[Access, Access, tuple[int, int]]] = {}  # with each earlier operation: the last told

        def conflict(old: Access, new: Access, found: tuple[int, int]) -> None:
            conflicts[old.operation.record] = old, new, found

        group.add(row.accesses or (), conflict)
        for old, new, found in conflicts.values():
            buffer = self.buffers.find(found[0])
            self.found.report(race_of(old, new), side_of(old), side_of(new), *found, buffer, grouped=True)

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
        stream = self.streams.get(row.stream)
        if stream is None or row.stream in self.graphs.captures:
            self._enqueue_work(row, touched, staged)
            return
        host = self.hosts[row.thread]
        on_device = flags & _BETWEEN_DEVICES
        if flags & CopyFlag.ASYNC:
            self._enqueue_work(row, touched, staged)
            if row.name in self._batches:
                self._check_group(row, joins=bool(flags & CopyFlag.BATCHED))
            # Asynchronous 1: between device and pageable memory it "might be synchronous": no edge. Asynchronous 2:
            # "any host memory to any host memory" is "fully synchronous with respect to the host".
            if not on_device:
                self.ordering.stream_done(host, stream, "copy on the host")
            return
        if row.name in self._peer_copies:
            self.ordering.serialize(stream, row.aux1)
            self._enqueue_work(row, touched, staged)
            self.ordering.serialized(stream, row.aux1)
            if on_device != _BETWEEN_DEVICES:
                self.ordering.stream_done(host, stream, "synchronous copy")
            return
        if flags & CopyFlag.SOURCE_PAGEABLE and flags & CopyFlag.DESTINATION_DEVICE:
            # Synchronous 1: "a stream sync is performed before the copy is initiated"; it returns once staged.
            self.ordering.stream_done(host, stream, "synchronous copy")
            self._enqueue_work(row, touched, staged)
            return
        self._enqueue_work(row, touched, staged)
        # Synchronous 2, 3, 5: blocks until done. 4: between device memories "no host-side synchronization".
        if on_device != _BETWEEN_DEVICES:
            self.ordering.stream_done(host, stream, "synchronous copy")

    def _fill(self, row: Row) -> None:
        """API synchronization behavior, "Memset": asynchronous, except for a target in pinned host memory."""
        self._enqueue_work(row, (Access(row.address, row.address + row.size, WRITE),))
        stream = self.streams.get(row.stream)
        if row.stream in self.graphs.captures or row.flags & (CopyFlag.ASYNC | CopyFlag.DESTINATION_DEVICE):
            return
        if stream is not None:
            self.ordering.stream_done(self.hosts[row.thread], stream, "synchronous fill")

    def _enqueue_work(self, row: Row, known: Sequence[Access], ignored: int = 0) -> None:
        """Append an operation. It touches what its ACCESS records say, or else `known`, except in mode `ignored`."""
        # Once, as reading a named field takes as long as a call.
        record, kind, _, flags, thread, stream_id, correlation, stack, _, _, _, _, _, accesses = row
        if stream_id in self.graphs.captures:  # captured work does not execute now (cuStreamBeginCapture)
            self._launches.capture(row, [access for access in accesses or known if not access.mode & ignored])
            return
        if flags & _CAPTURED and kind == Kind.KERNEL_LAUNCH:  # by a capture that no record tells of
            self.unchecked[int(self.records["name"][record])] += 1
            return
        agent = stream = self.streams.get(stream_id)
        if stream is None or agent is None:
            self.unknown_streams += 1
            return
        if self.repairs is not None:
            self.repair(row, stream)
        self.operations += 1
        host = self.hosts[thread]
        if flags and kind == Kind.KERNEL_LAUNCH:
            serialized = self.repairs is not None and stack in self.repairs.serialized
            agent = self._dependents.enqueue(row, host, stream, self.ordering, serialized=serialized)
        else:
            self.ordering.enqueue(host, stream, record)
        if accesses is not None:
            known = accesses
        elif kind in LAUNCHES:
            self.unchecked[int(self.records["name"][record])] += 1
        if known:
            operation = Operation(agent.index, agent.count, agent.clock, record)
            access = self.access if self.aliases.live else self._access
            for touched in known:
                if not touched.mode & ignored:
                    touched.node = -1
                    access(operation, touched)
            if self.graphs.captures:
                self._launches.note_eager(row, known)
        if agent is not stream:
            self.ordering.merge(stream, agent, record)
        if correlation in self._host_functions:
            moment = self._host_functions[correlation] = stream.done
            for item in self._early.pop(correlation, ()):
                self._handed_over.setdefault(item, {})[moment.agent] = moment

    def _host_access(self, row: Row) -> None:
        """The host itself reads or writes memory that the device can reach."""
        if row.correlation:
            return  # a host function does it: it is an access of that operation
        host = self.hosts[row.thread]
        if self.repairs is not None:
            self.repair(row, host)
        self.ordering.host_step(host, row.record)
        mode = row.flags & (READ | WRITE)
        touched = Access(row.address, row.address + row.size, mode, exact=not row.flags & AccessFlag.INEXACT)
        if row.aux1 > 1:
            (touched,) = byte_sets(self.records[row.record : row.record + 1])
            touched.node = -1
        self.access(Operation(host.index, host.count, host.clock, row.record), touched)

    def access(self, operation: Operation, touched: Access, node: Node | None = None) -> None:
        """Check one byte range of `operation` against the life of its memory and the accesses before it."""
        if self.aliases.live and touched.start < touched.stop:
            for part in self.aliases.resolved(touched):
                self._access(operation, part, node)
        else:
            self._access(operation, touched, node)

    def _access(self, operation: Operation, touched: Access, node: Node | None = None) -> None:
        start = touched.start
        if start >= touched.stop or not touched.mode:
            return
        touched.operation = operation
        touched.owner = buffer = self.buffers.at.get(start) or self.buffers.find(start)
        if buffer is not None:
            if node is not None and (baked := node.freed_memory(touched.start)) is not None:
                side = Side(baked.release, "free")
                size = touched.stop - touched.start
                self.report(FindingKind.USE_AFTER_FREE, side, side_of(touched), touched.start, size, baked)
                return
            # A graph goes on using what was allocated for it in its private pool.
            if buffer.freed >= 0 and not (buffer.of_graphs and (node is not None or self._is_kept_by_graphs(buffer))):
                self.misuse(FindingKind.USE_AFTER_FREE, Side(buffer.release, "free"), touched)
                return
            buffer.suspect = None
            if buffer.born is not None and not buffer.born.before(operation.agent, operation.clock):
                # cuMemAllocAsync: the memory may be used only in stream order after the allocation.
                self.misuse(FindingKind.USE_BEFORE_ALLOC, Side(buffer.born, "allocate"), touched)
        if self.ordering.flags and touched.mode != READ and touched.exact and not (touched.stride or touched.mask):
            self.ordering.overwrite(start, touched.stop, operation)
        self.history.touch(touched, self._conflict)

    def _is_kept_by_graphs(self, buffer: Buffer) -> bool:
        record = self.records[buffer.record]
        return record["kind"] == Kind.BLOCK_ALLOC and int(record["aux1"]) in self.graphs.pools

    # Synchronization --------------------------------------------------------------------------------------------

    def _create_event(self, row: Row) -> None:
        if row.flags & 2:
            self.ordering.foreign_events.add(row.aux0)

    def _destroy_event(self, row: Row) -> None:
        self.ordering.destroy_event(row.aux0)

    def _record_event(self, row: Row) -> None:
        stream = self.streams.get(row.stream)
        if not self.graphs.event_recorded(row) and stream is not None:
            self.ordering.record_event(self.hosts[row.thread], stream, row.aux0, row.record)

    def _wait_event(self, row: Row) -> None:
        stream = self.streams.get(row.stream)
        if self.graphs.event_waited(row) or stream is None:
            return
        if self.repairs is not None:
            self.repair(row, stream)
        host = self.hosts[row.thread]
        captured = self.graphs.captured_record(row.aux0)
        if captured is not None:
            # CUDA_ERROR_CAPTURED_EVENT: "not permitted on an event which was last recorded in a capturing stream".
            self.ordering.enqueue(host, stream, row.record)
            operation = Operation(stream.index, stream.count, stream.clock, row.record)
            first, second = (
                Side(Operation(stream.index, stream.count, stream.clock, captured), "record"),
                Side(operation, "wait"),
            )
            self.found.report(FindingKind.CAPTURED_EVENT, first, second, 0, 0, None)
            return
        self.ordering.wait_event(host, stream, row.aux0, row.record, row.stack)

    def _synchronize_event(self, row: Row) -> None:
        host = self.hosts[row.thread]
        if self.repairs is not None:
            self.repair(row, host)
        covered = self._waits.covered(row.record)
        self.ordering.event_done(host, row.aux0, "event synchronize", row.record, row.stack, covered=covered)

    def _query_event(self, row: Row) -> None:
        if row.aux1:
            self.ordering.event_done(self.hosts[row.thread], row.aux0, "event query")

    def _synchronize_stream(self, row: Row) -> None:
        stream = self.streams.get(row.stream)
        if stream is not None:
            covered = self._waits.covered(row.record)
            self.ordering.stream_done(self.hosts[row.thread], stream, "stream synchronize", covered=covered)

    def _query_stream(self, row: Row) -> None:
        stream = self.streams.get(row.stream)
        if row.aux1 and stream is not None:
            self.ordering.stream_done(self.hosts[row.thread], stream, "stream query")

    def _synchronize_device(self, row: Row) -> None:
        covered = self._waits.covered(row.record)
        self.ordering.context_done(self.hosts[row.thread], row.device, row.aux0, covered=covered)

    def _hand_over(self, row: Row) -> None:
        """A thread, or a host function, releases an object of Python's that threads synchronize by."""
        if row.correlation:
            moment = self._host_functions.get(row.correlation)
            if moment is None:  # it ran, on another thread, before the call that enqueued it came back
                self._early.setdefault(row.correlation, []).append(row.aux0)
                return
        else:
            host = self.hosts[row.thread]
            self.ordering.host_step(host, row.record)
            moment = host.done
        self._handed_over.setdefault(row.aux0, {})[moment.agent] = moment

    def _take_over(self, row: Row) -> None:
        """A thread has acquired the object: its last release came first."""
        if row.correlation:
            return
        host = self.hosts[row.thread]
        learnt = [
            self.ordering.learn(host, moment, row.record) for moment in self._handed_over.get(row.aux0, {}).values()
        ]
        if any(learnt):  # of one's own, or known already, it is no edge
            self.ordering.edges["hand-over"] += 1

    def _write_value(self, row: Row) -> None:
        stream = self.streams.get(row.stream)
        if stream is not None:
            self.ordering.write_value(self.hosts[row.thread], stream, row.address, row.aux0, row.flags, row.record)

    def _wait_value(self, row: Row) -> None:
        stream = self.streams.get(row.stream)
        if stream is not None:
            self.ordering.wait_value(
                self.hosts[row.thread], stream, row.address, row.aux0, row.flags, row.size, row.record
            )

    def _wait_unknown(self, row: Row) -> None:
        stream = self.streams.get(row.stream)
        if stream is not None:
            self.ordering.wait_unknown(self.hosts[row.thread], stream, row.record)

    # Reporting --------------------------------------------------------------------------------------------------

    def _conflict(self, old: Access, new: Access, found: tuple[int, int]) -> None:
        """Two accesses in no order, one of which writes: `found` are address and size of the first bytes of both."""
        earlier, later = old.operation, new.operation
        first, second = self.agents[earlier.agent], self.agents[later.agent]
        if self.ordering.unknown and (first.is_unsure(earlier.epoch) or second.is_unsure(later.epoch)):
            return
        buffer = self.buffers.at.get(found[0]) or self.buffers.find(found[0])
        of_host = first.is_host or second.is_host or old.host >= 0 or new.host >= 0
        flags, both = self._memory_flags, (earlier.record, later.record)
        if any(map(flags.are_used, both)) if of_host else flags.may_order(*both):
            self.by_flags.setdefault((self._stacks[earlier.record], self._stacks[later.record]), both)
            return
        if of_host:
            kind = FindingKind.RACE_HOST
        elif buffer is not None and buffer.record > earlier.record and not (buffer.of_graphs and new.node >= 0):
            kind = FindingKind.REUSE
        else:
            kind = race_of(old, new)
        # Most of a program's races are another round of one that is known.
        empty = later.agent in self.ordering.empty_waits
        if not empty and self.found.counted(kind, old, new, buffer):
            if self.go_on_repaired and old.exact and new.exact:
                self._go_on(earlier, later)
            return
        wait = self._empty_wait(earlier, later) if empty else -1
        moved = self._moved_wait(earlier, later) if self.ordering.moved else ()
        sides = side_of(old), side_of(new)
        self.report(kind, *sides, *found, buffer, wait=wait, moved=moved, touched=(old, new))

    def _moved_wait(self, earlier: Operation, later: Operation) -> tuple[int, ...]:
        """A wait of the later side for an event: its record after the earlier side was replaced by a later record."""
        for record, replaced, first, second in self.ordering.moved.get(later.agent, {}).values():
            follows = replaced.agent == earlier.agent and earlier.epoch <= replaced.epoch
            if follows and earlier.record < record < later.record:
                return record, first, second
        return ()

    def _empty_wait(self, earlier: Operation, later: Operation) -> int:
        """The latest wait of the later side that would have ordered the two, had its event been recorded; else -1."""
        agent = self.agents[earlier.agent]
        for event, record in self.ordering.empty_waits[later.agent].values():
            # By the event's first record it was meant for the earlier side's stream.
            meant_for = self._first_records.get(event, agent.stream)
            if earlier.record < record < later.record and meant_for == agent.stream:
                operation = Operation(later.agent, later.epoch, later.clock, record)
                side = Side(operation, "wait")
                self.found.report(FindingKind.WAIT_UNRECORDED, side, side, 0, 0, None, wait=earlier.record)
                return record
        return -1

    def misuse(self, kind: FindingKind, first: Side, touched: Access) -> None:
        """An access at a time at which its memory is not there for it."""
        buffer = self.buffers.find(touched.start)
        self.report(kind, first, side_of(touched), touched.start, touched.stop - touched.start, buffer)

    def report(
        self,
        kind: FindingKind,
        first: Side,
        second: Side,
        start: int,
        size: int,
        buffer: Buffer | None,
        *,
        wait: int = -1,
        moved: tuple[int, ...] = (),
        touched: tuple[Access, Access] | None = None,
        late: bool = False,
    ) -> None:
        """Enter a defect. `late`: the second side's agent has gone on since."""
        self.found.report(kind, first, second, start, size, buffer, wait=wait, moved=moved, touched=touched)
        if self.go_on_repaired and first.exact and second.exact and first.mode != "free":
            earlier, later = first.operation, second.operation
            agent = self.agents[later.agent]
            if late:
                if self.ordering.learn(agent, earlier, later.record) and not agent.is_host:
                    self.ordering.step(agent, later.record)
                return
            self._go_on(earlier, later)

    def _go_on(self, earlier: Operation, later: Operation) -> None:
        """Go on as if an agent's present operation, which has not been reported yet, came after another one."""
        agent = self.agents[later.agent]
        later.clock = self.clocks.join(agent.index, later.epoch, later.clock, earlier)
        agent.clock = later.clock

    def is_early(self, defect: Defect) -> bool:
        """Whether the second side is a kernel that may begin before the first side's, of the same stream, has ended."""
        first, second = (self.agents[side.operation.agent] for side in (defect.first, defect.second))
        return first is not second and not second.is_host and first.stream == second.stream

    def repair(self, row: Row, agent: Agent) -> None:
        """Let `agent` wait for what the repairs say it should wait for at this call site."""
        assert self.repairs is not None
        for index in self.repairs.waits.get((row.stack, agent.index), ()):
            other = self.agents[index]
            if not other.peers and agent.clock[index] >= other.count:
                continue
            for moment in self.ordering.position(other):
                self.ordering.learn(agent, moment, row.record)
