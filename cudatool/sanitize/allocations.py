"""What allocations and frees mean for the order of work, and for the memory's users."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from cudatool.sanitize.clocks import Moment
from cudatool.sanitize.defects import Side, side_of
from cudatool.sanitize.findings import FindingKind
from cudatool.sanitize.intervals import Operation
from cudatool.sanitize.lifetimes import Buffer
from cudatool.sanitize.ordering import Agent
from cudatool.sanitize.rows import Row
from cudatool.trace.events import HostFlag, Kind

if TYPE_CHECKING:
    from cudatool.sanitize.engine import Engine

__all__ = ["Memory"]


class Memory:
    """Handles the records of allocations and frees for an engine."""

    def __init__(self, engine: Engine, names: list[str]) -> None:
        self._engine = engine
        self._of_graphs = {index for index, name in enumerate(names) if name == "cuGraphLaunch"}
        self._unregister = {index for index, name in enumerate(names) if name == "cuMemHostUnregister"}

    def handlers(self) -> dict[int, Callable[[Row], None]]:
        """Return what handles the records of each kind."""
        return {
            Kind.MEM_ALLOC: self._alloc,
            Kind.MEM_FREE: self._free,
            Kind.HOST_ALLOC: self._host_alloc,
            Kind.HOST_FREE: self._host_free,
            Kind.BLOCK_ALLOC: self._block_alloc,
            Kind.BLOCK_RECORD_STREAM: self._block_record_stream,
            Kind.BLOCK_FREE_REQUESTED: self._block_free_requested,
            Kind.BLOCK_FREE_COMPLETED: self._block_free_completed,
            Kind.MEM_MAP: self._mem_map,
            Kind.MEM_UNMAP: self._mem_unmap,
            Kind.SEGMENT_ALLOC: self._unmap,
            Kind.SEGMENT_MAP: self._unmap,
            Kind.SEGMENT_UNMAP: self._unmap,
            Kind.SEGMENT_FREE: self._segment_free,
        }

    def _alloc(self, row: Row) -> None:
        """cuMemAlloc and the like; cuMemAllocAsync if on a stream.

        What was at these addresses before is over: the driver gives memory out again only when that is in order
        (for a pool, cuMemPoolSetAttribute's three REUSE attributes). A use that was not was reported at the free.
        """
        stop = row.address + row.size
        self._engine.history.forget(row.address, stop)
        buffer = Buffer(row.address, stop, row.record, of_graphs=row.name in self._of_graphs)
        stream = self._engine.streams.get(row.stream)
        if stream is not None and row.stream not in self._engine.graphs.captures:
            self._engine.ordering.enqueue(self._engine.hosts[row.thread], stream, row.record)
            buffer.agent = stream.index
            buffer.born = Operation(stream.index, stream.count, stream.clock, row.record)
        self._own(buffer)

    def _free(self, row: Row) -> None:
        """cuMemFree, or cuMemFreeAsync if on a stream."""
        if row.stream in self._engine.graphs.captures:
            return
        host = self._engine.hosts[row.thread]
        buffer = self._freed_buffer(row)
        stream = self._engine.streams.get(row.stream)
        if stream is None and buffer.born is None:
            self._wait_for_users(host, buffer.start, buffer.stop, row.record)
        agent = host if stream is None else stream
        if self._engine.repairs is not None:
            self._engine.repair(row, agent)
        if stream is None:
            self._engine.ordering.host_step(host, row.record)
        else:
            self._engine.ordering.enqueue(host, stream, row.record)
        operation = Operation(agent.index, agent.count, agent.clock, row.record)
        if stream is not None or buffer.born is not None:
            # cuMemFreeAsync: "the allocation must not be accessed after stream execution reaches the free".
            # cuMemFree of stream-ordered memory does not wait: "callers must ensure that all accesses have completed".
            self._report_users(buffer, operation)
        if stream is not None and buffer.born is not None and not buffer.born.before(stream.index, stream.clock):
            # "The user must guarantee that the free operation will happen after the allocation operation".
            sides = Side(buffer.born, "allocate"), Side(operation, "free")
            self._engine.report(FindingKind.USE_BEFORE_ALLOC, *sides, buffer.start, buffer.stop - buffer.start, buffer)
        self._engine.buffers.end(buffer, operation)
        self._engine.history.forget(buffer.start, buffer.stop)

    def _report_users(self, buffer: Buffer, free: Operation) -> None:
        """Report what may still use memory when it is given back."""
        for access in list(self._engine.history.within(buffer.start, buffer.stop)):
            if not access.operation.before(free.agent, free.clock):
                start, stop = max(access.start, buffer.start), min(access.stop, buffer.stop)
                sides = side_of(access), Side(free, "free")
                self._engine.report(FindingKind.USE_AFTER_FREE, *sides, start, stop - start, buffer)

    def _host_alloc(self, row: Row) -> None:
        """Pinned memory from the driver, or a block of it from a caching allocator."""
        engine = self._engine
        buffer = Buffer(row.address, row.address + row.size, row.record)
        if row.flags & HostFlag.REPORTS_USES:
            # The allocator hands a block out again when the streams that it knows of have got past their uses, which
            # it has seen by queries. Accesses that were not reported to it stay in the history.
            old = engine.buffers.find(row.address)
            host = engine.hosts[row.thread]
            for moment in old.releases if old is not None and old.start == row.address else ():
                engine.ordering.learn(host, moment, row.record)
                engine.ordering.edges["record_stream"] += 1
        else:
            engine.history.forget(buffer.start, buffer.stop)
        self._own(buffer)

    def _host_free(self, row: Row) -> None:
        """cuMemFreeHost, cuMemHostUnregister, or the end of a block.

        Whether cuMemFreeHost waits is not said: nothing is reported, and nothing is taken for finished. After
        cuMemHostUnregister the memory is pageable, and the device must not use it any more.
        """
        engine = self._engine
        buffer = engine.buffers.find(row.address)
        if buffer is None:
            return
        if row.flags & HostFlag.REPORTS_USES:
            buffer.releases = self._positions(buffer.other_streams)
            return
        if row.name in self._unregister:
            host = engine.hosts[row.thread]
            if engine.repairs is not None:
                engine.repair(row, host)
            engine.ordering.host_step(host, row.record)
            self._report_users(buffer, Operation(host.index, host.count, host.clock, row.record))
        engine.history.forget(buffer.start, buffer.stop)
        engine.buffers.remove(buffer.start, buffer.stop)

    def _unmap(self, row: Row) -> None:
        """Addresses that stand for other memory from now on."""
        self._engine.history.forget(row.address, row.address + row.size)
        for buffer in self._engine.buffers.remove(row.address, row.address + row.size):
            self.report_suspect(buffer)

    def _mem_map(self, row: Row) -> None:
        """cuMemMap: memory has an address, or one more. From here on it is new if it had none before."""
        if row.aux0:
            self._engine.aliases.map(row.address, row.size, row.aux0)
        self._own(Buffer(row.address, row.address + row.size, row.record))

    def _mem_unmap(self, row: Row) -> None:
        """cuMemUnmap: the addresses are free for other memory."""
        self._unmap(row)
        self._engine.aliases.unmap(row.address, row.size)

    def _segment_free(self, row: Row) -> None:
        self._wait_for_users(self._engine.hosts[row.thread], row.address, row.address + row.size, row.record)
        self._engine.history.forget(row.address, row.address + row.size)

    def _wait_for_users(self, host: Agent, start: int, stop: int, record: int) -> None:
        """cuMemFree "may perform implicit synchronization", and does for memory in use: the host is after its users."""
        for access in self._engine.history.within(start, stop):
            if not access.operation.before(host.index, host.clock):
                self._engine.ordering.learn(host, access.operation, record)
                self._engine.ordering.edges["free of memory in use"] += 1

    def _block_alloc(self, row: Row) -> None:
        """The caching allocator hands out a block, for use on a stream (torch.cuda.caching_allocator_alloc).

        The old owner's accesses stay in the history: only their order against the new owner's can tell a race.
        """
        buffer = Buffer(row.address, row.address + row.size, row.record, of_graphs=row.aux1 != 0)
        stream = self._engine.streams.get(row.stream)
        if stream is not None:
            buffer.agent = stream.index
        if stream is not None and row.stream not in self._engine.graphs.captures:  # a capture uses it in a launch
            clock = self._engine.ordering.clock_of_next(self._engine.hosts[row.thread], stream)
            handing_out = Operation(stream.index, stream.count, clock, row.record)
            for old in self._engine.history.within(buffer.start, buffer.stop):
                if not old.operation.before(stream.index, clock):
                    buffer.suspect = old, handing_out
                    break
        self._own(buffer)

    def _block_record_stream(self, row: Row) -> None:
        buffer = self._engine.buffers.find(row.address)
        stream = self._engine.streams.get(row.stream)
        if buffer is not None and stream is not None:
            buffer.other_streams |= {stream.index}

    def _block_free_requested(self, row: Row) -> None:
        """The owner gave the block back. The allocator records an event on each stream named by record_stream."""
        buffer = self._freed_buffer(row)
        others = set(buffer.other_streams)
        if self._engine.repairs is not None:
            others |= self._engine.repairs.record_streams.get(int(self._engine.records["stack"][buffer.record]), set())
        buffer.releases = self._positions(others)
        host = self._engine.hosts[row.thread]
        self._engine.ordering.host_step(host, row.record)
        self._engine.buffers.end(buffer, Operation(host.index, host.count, host.clock, row.record))

    def _block_free_completed(self, row: Row) -> None:
        """Those events have passed: the allocator has seen it by queries, so the host is after them."""
        buffer = self._engine.buffers.find(row.address)
        if buffer is not None:
            host = self._engine.hosts[row.thread]
            for moment in buffer.releases:
                self._engine.ordering.learn(host, moment, row.record)
                self._engine.ordering.edges["record_stream"] += 1
            buffer.releases = ()

    def _positions(self, agents: Collection[int]) -> list[Moment]:
        """How far these agents have come."""
        ordering = self._engine.ordering
        return [moment for agent in sorted(agents) for moment in ordering.position(self._engine.agents[agent])]

    def _freed_buffer(self, row: Row) -> Buffer:
        """What the record frees, entered now if it was allocated before the trace began."""
        buffer = self._engine.buffers.find(row.address)
        if buffer is None or buffer.start != row.address:
            buffer = Buffer(row.address, row.address + row.size, row.record)
            self._own(buffer)
        return buffer

    def _own(self, buffer: Buffer) -> None:
        for replaced in self._engine.buffers.add(buffer):
            self.report_suspect(replaced)

    def report_suspect(self, buffer: Buffer) -> None:
        """A block was handed out too early, and no known access of the new owner shows that it did no harm."""
        if buffer.suspect is not None:
            old, handing_out = buffer.suspect
            buffer.suspect = None
            start, stop = max(old.start, buffer.start), min(old.stop, buffer.stop)
            sides = side_of(old), Side(handing_out, "allocate")
            self._engine.report(FindingKind.REUSE, *sides, start, stop - start, buffer, late=True)
