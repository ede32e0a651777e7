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
from dataclasses import replace

import numpy as np

from cudatool.sanitize.defects import Defect, Defects, Key, Repairs, Side, race_of, side_of
from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.graphs import Executable, Graphs, Node, races_between_nodes
from cudatool.sanitize.intervals import ATOMIC, READ, WRITE, Access, History, Operation, overlap
from cudatool.sanitize.lifetimes import Buffer, Buffers
from cudatool.sanitize.ordering import Agent, Ordering, join
from cudatool.sanitize.rows import LAUNCHES, WORK, Row, byte_sets, read_rows
from cudatool.trace.events import AccessFlag, CopyFlag, Kind, StreamFlag
from cudatool.trace.model import Trace

__all__ = ["Engine"]

_SERIALIZED = ("cuMemcpyPeer", "cuMemcpy3DPeer")  # "with respect to all pending and future asynchronous work"
_EAGER = 1000  # accesses beside a capture that are looked at


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
    history
        The accesses that still mattered at the end.
    operations, unchecked, unknown_streams, unsure, threads
        Numbers of operations on streams; of launches whose accesses are not known; of operations that name no stream;
        of pairs of accesses whose order depends on what no trace can show; of host threads that use the device.
    """

    def __init__(
        self, trace: Trace, *, one_host: bool = True, go_on_repaired: bool = False, repairs: Repairs | None = None
    ) -> None:
        self.operations = 0
        self.unchecked = 0
        self.unknown_streams = 0
        self.unsure = 0
        self.records = trace.records
        self._trace = trace
        self._defects = Defects(trace.records)
        self._repairs = repairs
        self._go_on_repaired = go_on_repaired
        self._make_agents(trace, one_host)
        self.ordering = Ordering(list(self._streams.values()))
        self.history = History()
        self._buffers = Buffers()
        self._graphs = Graphs()
        self._graph_memory = {index for index, name in enumerate(trace.names) if name == "cuGraphLaunch"}
        self._peer_copies = {index for index, name in enumerate(trace.names) if name in _SERIALIZED}
        records = trace.records[trace.records["kind"] == Kind.EVENT_RECORD]
        events, firsts = np.unique(records["aux0"], return_index=True)
        self._first_records = dict(zip(events.tolist(), records["stream"][firsts].tolist(), strict=True))
        self._handlers: dict[int, Callable[[Row], None]] = {
            **dict.fromkeys(WORK, self._work),
            Kind.MEMCPY: self._copy,
            Kind.MEMSET: self._fill,
            Kind.GRAPH_LAUNCH: self._launch_graph,
            Kind.EVENT_CREATE: self._create_event,
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
            Kind.GRAPH_CAPTURE_BEGIN: self._graphs.begin,
            Kind.GRAPH_CAPTURE_END: self._graphs.end,
            Kind.GRAPH_NODE_ADDED: self._graphs.node_added,
            Kind.GRAPH_INSTANTIATE: self._graphs.instantiate,
            Kind.GRAPH_UPDATE: self._graphs.update,
            Kind.GRAPH_NODE: self._graphs.node,
            Kind.GRAPH_EDGE: self._graphs.edge,
            Kind.GRAPH_POINTER: self._graph_pointer,
        }

    @property
    def defects(self) -> dict[Key, Defect]:
        """What was found, by call sites, in order of appearance."""
        return self._defects.found

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
            agent = self._streams[stream] = Agent(index, total, label, device=device, stream=stream)
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
        """A kernel launch, matrix product or host function: one operation in stream order (cuLaunchHostFunc)."""
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
        if stream is None or row.stream in self._graphs.captures:
            self._enqueue_work(row, touched, staged)
            return
        host = self._hosts[row.thread]
        on_device = flags & (CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE)
        if flags & CopyFlag.ASYNC:
            self._enqueue_work(row, touched, staged)
            # Asynchronous 1: between device and pageable memory it "might be synchronous": no edge. Asynchronous 2:
            # "any host memory to any host memory" is "fully synchronous with respect to the host".
            if not on_device:
                self.ordering.stream_done(host, stream, "copy on the host")
            return
        if row.name in self._peer_copies:
            self.ordering.serialize(stream, row.aux1)
            self._enqueue_work(row, touched, staged)
            self.ordering.serialized(stream, row.aux1)
            if on_device != CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE:
                self.ordering.stream_done(host, stream, "synchronous copy")
            return
        if flags & CopyFlag.SOURCE_PAGEABLE and flags & CopyFlag.DESTINATION_DEVICE:
            # Synchronous 1: "a stream sync is performed before the copy is initiated"; it returns once staged.
            self.ordering.stream_done(host, stream, "synchronous copy")
            self._enqueue_work(row, touched, staged)
            return
        self._enqueue_work(row, touched, staged)
        # Synchronous 2, 3, 5: blocks until done. 4: between device memories "no host-side synchronization".
        if on_device != CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE:
            self.ordering.stream_done(host, stream, "synchronous copy")

    def _fill(self, row: Row) -> None:
        """API synchronization behavior, "Memset": asynchronous, except for a target in pinned host memory."""
        self._enqueue_work(row, (Access(row.address, row.address + row.size, WRITE),))
        stream = self._streams.get(row.stream)
        if stream is not None and not row.flags & (CopyFlag.ASYNC | CopyFlag.DESTINATION_DEVICE):
            self.ordering.stream_done(self._hosts[row.thread], stream, "synchronous fill")

    def _enqueue_work(self, row: Row, known: Sequence[Access], ignored: int = 0) -> None:
        """Append an operation. It touches what its ACCESS records say, or else `known`, except in mode `ignored`."""
        if row.stream in self._graphs.captures:  # captured work does not execute now (cuStreamBeginCapture)
            self._capture(row, [access for access in row.accesses or known if not access.mode & ignored])
            return
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
                    touched.node = -1
                    self._access(operation, touched)
            if self._graphs.captures:
                self._note_eager(row, known)

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

    def _access(self, operation: Operation, touched: Access, node: Node | None = None) -> None:
        """Check one byte range of `operation` against the life of its memory and the accesses before it."""
        if touched.start >= touched.stop or not touched.mode:
            return
        touched.operation = operation
        touched.owner = buffer = self._buffers.find(touched.start)
        if buffer is not None:
            if node is not None and (baked := node.freed_memory(touched.start)) is not None:
                assert baked.freed is not None
                side = Side(baked.freed, "free")
                size = touched.stop - touched.start
                self._report(FindingKind.USE_AFTER_FREE, side, side_of(touched), touched.start, size, baked)
                return
            if buffer.freed is not None:
                if node is not None and buffer.of_graphs:
                    return  # a graph goes on using what was allocated for it in its private pool
                self._misuse(FindingKind.USE_AFTER_FREE, Side(buffer.freed, "free"), touched)
                return
            buffer.suspect = None
            if buffer.born is not None and not buffer.born.before(operation.agent, operation.clock):
                # cuMemAllocAsync: the memory may be used only in stream order after the allocation.
                self._misuse(FindingKind.USE_BEFORE_ALLOC, Side(buffer.born, "allocate"), touched)
        self.history.touch(touched, self._conflict)

    # Graphs -----------------------------------------------------------------------------------------------------

    def _launch_graph(self, row: Row) -> None:
        """cuGraphLaunch: "ordered behind both any previous work in hStream and any previous launches of hGraphExec".

        The stream's next operation comes behind all nodes. What the nodes touch is one operation to all outside.
        """
        if row.stream in self._graphs.captures:
            self._capture(row, None)  # a child graph
            return
        stream = self._streams.get(row.stream)
        if stream is None:
            self.unknown_streams += 1
            return
        if self._repairs is not None:
            self._repair(row, stream)
        self.operations += 1
        graph = self._graphs.launched(row.aux0)
        nodes = graph.nodes.values() if graph is not None else ()
        if graph is not None and graph.last is not None:
            stream.clock = join(stream.clock, graph.last)
            self.ordering.edges["relaunch of a graph"] += 1
        for node in nodes:
            if node.event and not node.records_event:  # an external wait; when in the launch does not matter here
                self.ordering.join_event(stream, node.event)
        self.ordering.enqueue(self._hosts[row.thread], stream, row.record)
        operation = Operation(stream.index, stream.count, stream.clock, row.record)
        if graph is not None:
            graph.last = operation.after
        for node in nodes:
            if node.event and node.records_event:
                self.ordering.record_here(stream, node.event)
        accesses = self._accesses_of_launch(row, graph)
        if accesses is None:
            self.unchecked += 1
            return
        if graph is not None:
            self._check_nodes(graph, accesses, operation)
        for touched in accesses:
            node_ = graph.nodes.get(touched.node) if graph is not None else None
            touched.node = node_.record if node_ is not None else -1
            self._access(operation, touched, node_)

    def _accesses_of_launch(self, row: Row, graph: Executable | None) -> list[Access] | None:
        """Return what the nodes touch, each access with its node's number; None if not everything is known."""
        if graph is None or graph.known:
            return row.accesses
        if row.accesses is not None:
            for touched in row.accesses:
                touched.node = -1  # what the record says is of another time
            return row.accesses
        told: list[Access] = []
        for number, node in graph.nodes.items():
            if node.baked is None:
                return None
            told += [replace(access, node=number) for access in node.baked]
        return told if graph.nodes else None

    def _check_nodes(self, graph: Executable, accesses: list[Access], operation: Operation) -> None:
        """Look for races between the nodes of one launch, and with work that the capture missed."""
        if graph.eager:
            self._check_eager(graph, accesses, operation)
        shape = hash(tuple([(a.node, a.start, a.stop, a.mode, a.row, a.stride) for a in accesses]))
        if shape in graph.clean:
            return
        extra = self._repairs.edges if self._repairs is not None else ()
        found = False
        for old, new in races_between_nodes(graph, accesses, extra, go_on_repaired=self._go_on_repaired):
            meeting = overlap(old, new)
            assert meeting is not None
            first, second = (replace(one, operation=operation, node=graph.nodes[one.node].record) for one in (old, new))
            buffer = self._buffers.find(meeting[0])
            self._defects.report(race_of(old, new), side_of(first), side_of(second), *meeting, buffer, inside=True)
            found = True
        if not found:
            graph.clean.add(shape)

    def _check_eager(self, graph: Executable, accesses: list[Access], operation: Operation) -> None:
        """Work in another stream, done while the graph was captured, that uses what a node captured before it makes.

        "The operations are not executed" at capture (cuStreamBeginCapture): it ran without them, and no launch will
        run it again.
        """
        for eager in graph.eager:
            for made in accesses:
                node = graph.nodes.get(made.node)
                if node is None or not made.mode & (WRITE | ATOMIC) or node.record > eager.operation.record:
                    continue
                if (found := overlap(made, eager)) is not None:
                    first = side_of(replace(made, operation=operation, node=node.record))
                    buffer = self._buffers.find(found[0])
                    self._defects.report(FindingKind.CAPTURE_MISSED, first, side_of(eager), *found, buffer)
        graph.eager = []

    def _capture(self, row: Row, known: Sequence[Access] | None) -> None:
        """A call becomes a node. What it said it touches holds for every launch."""
        baked = None if known is None or (row.accesses is None and row.kind in LAUNCHES) else list(known)
        node = Node(row.record, baked=baked)
        for touched in baked or ():
            self._bake(node, self._buffers.find(touched.start))
        self._graphs.captures[row.stream].add(row.stream, node)

    def _note_eager(self, row: Row, accesses: Sequence[Access]) -> None:
        """Work is done beside captures."""
        for capture in set(self._graphs.captures.values()):
            if capture.thread == row.thread and len(capture.eager) < _EAGER:
                capture.eager += [access for access in accesses if access.mode & READ]

    def _graph_pointer(self, row: Row) -> None:
        node = self._graphs.node_of(row)
        if node is not None:
            self._bake(node, self._buffers.find(row.address))

    @staticmethod
    def _bake(node: Node, buffer: Buffer | None) -> None:
        """A node will use `buffer` in every launch. Memory of graphs and of private pools is theirs."""
        if buffer is not None and buffer.freed is None and not buffer.of_graphs:
            node.pointers.append(buffer)

    # Synchronization --------------------------------------------------------------------------------------------

    def _create_event(self, row: Row) -> None:
        if row.flags & 2:
            self.ordering.foreign_events.add(row.aux0)

    def _record_event(self, row: Row) -> None:
        stream = self._streams.get(row.stream)
        if not self._graphs.event_recorded(row) and stream is not None:
            self.ordering.record_event(self._hosts[row.thread], stream, row.aux0, row.record)

    def _wait_event(self, row: Row) -> None:
        stream = self._streams.get(row.stream)
        if self._graphs.event_waited(row) or stream is None:
            return
        if self._repairs is not None:
            self._repair(row, stream)
        host = self._hosts[row.thread]
        captured = self._graphs.captured_record(row.aux0)
        if captured is not None:
            # CUDA_ERROR_CAPTURED_EVENT: "not permitted on an event which was last recorded in a capturing stream".
            self.ordering.enqueue(host, stream, row.record)
            operation = Operation(stream.index, stream.count, stream.clock, row.record)
            first, second = (
                Side(Operation(stream.index, stream.count, stream.clock, captured), "record"),
                Side(operation, "wait"),
            )
            self._defects.report(FindingKind.CAPTURED_EVENT, first, second, 0, 0, None)
            return
        self.ordering.wait_event(host, stream, row.aux0, row.record, row.stack)

    def _synchronize_event(self, row: Row) -> None:
        host = self._hosts[row.thread]
        if self._repairs is not None:
            self._repair(row, host)
        self.ordering.event_done(host, row.aux0, "event synchronize", row.record, row.stack)

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

    def _write_value(self, row: Row) -> None:
        stream = self._streams.get(row.stream)
        if stream is not None:
            self.ordering.write_value(self._hosts[row.thread], stream, row.address, row.aux0, row.record)

    def _wait_value(self, row: Row) -> None:
        stream = self._streams.get(row.stream)
        if stream is not None:
            self.ordering.wait_value(
                self._hosts[row.thread], stream, row.address, row.aux0, row.flags, row.size, row.record
            )

    def _wait_unknown(self, row: Row) -> None:
        stream = self._streams.get(row.stream)
        if stream is not None:
            self.ordering.wait_unknown(self._hosts[row.thread], stream, row.record)

    # Lifetimes --------------------------------------------------------------------------------------------------

    def _memory_alloc(self, row: Row) -> None:
        """cuMemAlloc and the like; cuMemAllocAsync if on a stream.

        What was at these addresses before is over: the driver gives memory out again only when that is in order
        (for a pool, cuMemPoolSetAttribute's three REUSE attributes). A use that was not was reported at the free.
        """
        stop = row.address + row.size
        self.history.forget(row.address, stop)
        buffer = Buffer(row.address, stop, row.record, of_graphs=row.name in self._graph_memory)
        stream = self._streams.get(row.stream)
        if stream is not None and row.stream not in self._graphs.captures:
            self.ordering.enqueue(self._hosts[row.thread], stream, row.record)
            buffer.agent = stream.index
            buffer.born = Operation(stream.index, stream.count, stream.clock, row.record)
        self._own(buffer)

    def _memory_free(self, row: Row) -> None:
        """cuMemFree, or cuMemFreeAsync if on a stream."""
        if row.stream in self._graphs.captures:
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
                    sides = side_of(access), Side(operation, "free")
                    self._report(FindingKind.USE_AFTER_FREE, *sides, start, stop - start, buffer)
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
        buffer = Buffer(row.address, row.address + row.size, row.record, of_graphs=row.aux1 != 0)
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
        first, second = self.agents[old.operation.agent], self.agents[new.operation.agent]
        if first.is_unsure(old.operation.epoch) or second.is_unsure(new.operation.epoch):
            self.unsure += 1
            return
        buffer = self._buffers.find(found[0])
        if first.is_host or second.is_host:
            kind = FindingKind.RACE_HOST
        elif buffer is not None and buffer.record > old.operation.record:
            kind = FindingKind.REUSE
        else:
            kind = race_of(old, new)
        wait = self._empty_wait(old.operation, new.operation)
        self._report(kind, side_of(old), side_of(new), *found, buffer, wait=wait)

    def _empty_wait(self, earlier: Operation, later: Operation) -> int:
        """The latest wait of the later side that would have ordered the two, had its event been recorded; else -1."""
        agent = self.agents[earlier.agent]
        for event, record in self.ordering.empty_waits[later.agent].values():
            # It was meant for the earlier side's stream, as far as the event's first record can tell.
            meant_for = self._first_records.get(event, agent.stream)
            if earlier.record < record < later.record and meant_for == agent.stream:
                operation = Operation(later.agent, later.epoch, later.clock, record)
                side = Side(operation, "wait")
                self._defects.report(FindingKind.WAIT_UNRECORDED, side, side, 0, 0, None, wait=earlier.record)
                return record
        return -1

    def _misuse(self, kind: FindingKind, first: Side, touched: Access) -> None:
        """An access at a time at which its memory is not there for it."""
        buffer = self._buffers.find(touched.start)
        self._report(kind, first, side_of(touched), touched.start, touched.stop - touched.start, buffer)

    def _report_suspect(self, buffer: Buffer) -> None:
        """A block was handed out too early, and no known access of the new owner shows that it did no harm."""
        if buffer.suspect is not None:
            old, handing_out = buffer.suspect
            buffer.suspect = None
            start, stop = max(old.start, buffer.start), min(old.stop, buffer.stop)
            self._report(FindingKind.REUSE, side_of(old), Side(handing_out, "allocate"), start, stop - start, buffer)

    def _report(
        self, kind: FindingKind, first: Side, second: Side, start: int, size: int, buffer: Buffer | None, wait: int = -1
    ) -> None:
        self._defects.report(kind, first, second, start, size, buffer, wait=wait)
        if self._go_on_repaired and first.exact and second.exact and first.mode != "free":
            earlier, later = first.operation, second.operation
            agent = self.agents[later.agent]
            agent.clock = join(agent.clock, earlier.after)
            later.clock = join(later.clock, earlier.after)

    def _repair(self, row: Row, agent: Agent) -> None:
        """Let `agent` wait for what the repairs say it should wait for at this call site."""
        assert self._repairs is not None
        for other in self._repairs.waits.get((row.stack, agent.index), ()):
            agent.clock = join(agent.clock, self.ordering.position(self.agents[other]))
