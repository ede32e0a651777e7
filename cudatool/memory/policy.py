"""The caching allocator of one device, address for address as PyTorch's CUDACachingAllocator.

Segments come from a provider and are cut into blocks. How a request is served::

    malloc(size, stream):
        free the pending blocks whose events have passed
        best fit among the stream's free blocks
        or free-memory callbacks, then best fit again
        or garbage collection, then a new segment
        or release oversize cached blocks, then a new segment
        or wait for all pending blocks, release every whole cached segment, then a new segment
        or out of memory
        split off the rest if it is worth it

    free(address):
        if other streams use the block: record an event on each, free it when all have passed
        else merge it with its free neighbours
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cudatool.errors import ConfigError, OutOfMemoryError, UsageError
from cudatool.memory import snapshot
from cudatool.memory.blocks import (
    ALLOCATED,
    FREE,
    MIN_BLOCK_SIZE,
    PENDING,
    SMALL_LIMIT,
    Block,
    BlockPool,
    round_size,
    segment_size,
)
from cudatool.memory.provider import SegmentProvider
from cudatool.memory.settings import UNLIMITED, Settings
from cudatool.memory.statistics import AllocatorStatistics
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Kind
from cudatool.units import format_bytes

__all__ = ["CachingAllocator", "FreeMemoryCallback", "OutOfMemoryObserver"]

FreeMemoryCallback = Callable[[], bool]
"""Frees what the program can do without; returns whether there was anything."""

OutOfMemoryObserver = Callable[[int, int, int, int], None]
"""Called before an out-of-memory error with device, bytes of the segment asked for, bytes allowed, bytes free."""

_log = logging.getLogger("cudatool.memory")
_ROUND = MIN_BLOCK_SIZE - 1
_SMALL_POOL_FLAG = 1  # of SEGMENT_ALLOC and SEGMENT_FREE


class CachingAllocator:
    """Allocates device memory and keeps what is freed, for the stream it was allocated for.

    Safe to use from several threads. :meth:`free` may also be called from finalizers and trace subscribers, which run
    at any time: inside one of the allocator's own operations it is put off to that operation's end.

    While :data:`cudatool.trace.hooks.active`, each operation emits its events when it is done. The lock is still held
    then, so that the order of events is the order of what happened, whichever threads were at it.

    Parameters
    ----------
    provider
        Where segments come from.
    device
        Ordinal of the device, for events, snapshots and messages.
    settings
        Default: :meth:`Settings.from_environment`.
    stream_id
        Gives the trace's id of a stream; default: the stream itself.
    total_memory
        The device's memory in bytes, of which a memory fraction is a part. Default: what the provider says.

    Raises
    ------
    ConfigError
        The settings ask for something that this allocator cannot do.
    """

    def __init__(
        self,
        provider: SegmentProvider,
        *,
        device: int,
        settings: Settings | None = None,
        stream_id: Callable[[int], int] | None = None,
        total_memory: int | None = None,
    ) -> None:
        settings = Settings.from_environment() if settings is None else settings
        _refuse_unsupported(settings)
        self.provider = provider
        self.device = device
        self.settings = settings
        self.statistics = AllocatorStatistics(settings.max_split_size)
        self._stream_id = stream_id
        self._total_memory = total_memory
        self._allowed_memory: int | None = None  # set by a memory fraction
        self._blocks: dict[int, Block] = {}  # every block, free or not, by address
        self._segments: dict[int, int] = {}  # address of every segment -> stack of its allocation
        self._small = BlockPool(
            is_small=True,
            levels=(self.statistics.small_pool, self.statistics.all),
            blocks=self._blocks,
            settings=settings,
        )
        self._large = BlockPool(
            is_small=False,
            levels=(self.statistics.large_pool, self.statistics.all),
            blocks=self._blocks,
            settings=settings,
        )
        # By stream: events of pending blocks, oldest first. A stream's events pass in order.
        self._pending: dict[int, deque[tuple[Any, Block]]] = {}
        self._lock = threading.RLock()
        self._busy = False  # between two consistent states
        self._late_frees: deque[int] = deque()
        self._events: list[tuple[Kind, int, int, int, int, int, int, int]] = []
        self._tracing = False
        self._stack = 0
        self._rounds_to_minimum = not any(divisions > 1 for divisions in settings.roundup_power2_divisions)
        self._free_memory_callbacks: list[FreeMemoryCallback] = []
        self._out_of_memory_observers: list[OutOfMemoryObserver] = []
        if settings.per_process_memory_fraction is not None:
            self.set_memory_fraction(settings.per_process_memory_fraction)

    # The program's side.

    def malloc(self, size: int, stream: int) -> int:
        """Return the address of `size` bytes for use on `stream`. 0 bytes have the address 0.

        Raises
        ------
        OutOfMemoryError
            There is no such block, and none can be made. Everything cached has been given back by then.
        UsageError
            `size` is negative.
        """
        if size <= 0:
            if size < 0:
                raise UsageError(f"cannot allocate {size} bytes")
            return 0
        out_of_memory: OutOfMemoryError | None = None
        with self._lock:
            if self._busy:
                raise _reentered()
            self._busy = True
            try:
                if hooks.active:
                    self._start_tracing()
                if self._pending:
                    self._free_passed_blocks()
                rounded = (size + _ROUND) & ~_ROUND if self._rounds_to_minimum else round_size(size, self.settings)
                pool = self._small if rounded <= SMALL_LIMIT else self._large
                block = pool.take(rounded, stream) or self._take_otherwise(pool, rounded, stream)
                rest = block.size - rounded
                if rest > pool.max_unsplit_rest and rounded < pool.max_split_size:
                    self._split(block, rounded)
                elif block.previous is not None or block.next is not None:
                    self.statistics.inactive_split_changed(pool.levels, -1, -block.size)
                block.state = ALLOCATED
                block.requested_size = size
                block.stack = self._stack
                self.statistics.block_allocated(pool.levels, block.size, size)
                if self._tracing:
                    self._block_event(Kind.BLOCK_ALLOC, block, self._stack)
                return block.address
            except OutOfMemoryError as error:
                out_of_memory = error
            finally:
                self._busy = False
                if self._tracing or self._late_frees:
                    self._settle()
        for observer in self._out_of_memory_observers:
            try:
                observer(self.device, out_of_memory.wanted, out_of_memory.allowed, out_of_memory.free)
            except Exception:
                _log.exception("out-of-memory observer %r failed", observer)
        try:
            raise out_of_memory
        finally:
            del out_of_memory  # else it and this frame would keep each other, and the caller's arrays, alive

    def free(self, address: int) -> None:
        """Give a block back. Freeing address 0 does nothing.

        Raises
        ------
        UsageError
            `address` is not a block in use; for instance it was freed before.
        """
        if not address:
            return
        if hooks.active and hooks.emitting():
            # Waiting for the lock here could be forever: its owner may be waiting for this subscriber.
            self._late_frees.append(address)
            return
        with self._lock:
            if self._busy:  # a finalizer runs within one of our own operations, on the same thread
                self._late_frees.append(address)
                return
            self._busy = True
            try:
                if hooks.active:
                    self._start_tracing()
                self._free(address)
            finally:
                self._busy = False
                if self._tracing or self._late_frees:
                    self._settle()

    def record_stream(self, address: int, stream: int) -> None:
        """Note that `stream` uses the block too: it is not handed out again before that use is over.

        Raises
        ------
        UsageError
            `address` is not a block in use.
        """
        with self._operation():
            block = self._blocks.get(address)
            if block is None or block.state is not ALLOCATED:
                raise self._not_in_use(address)
            if stream == block.stream:
                return
            if block.stream_uses is None:
                block.stream_uses = {}
            block.stream_uses[stream] = None
            if self._tracing:
                self._events.append((Kind.BLOCK_RECORD_STREAM, stream, address, block.size, 0, 0, 0, self._stack))

    def empty_cache(self) -> None:
        """Wait for pending blocks, then give every segment that is wholly free back to the provider."""
        with self._operation():
            self._release_cached_segments()

    def set_memory_fraction(self, fraction: float) -> None:
        """Reserve no more than this share of the device's memory from now on.

        Raises
        ------
        UsageError
            `fraction` does not lie between 0 and 1.
        """
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"a memory fraction lies between 0 and 1, not {fraction}")
        with self._operation():
            total = self.provider.memory_info()[1] if self._total_memory is None else self._total_memory
            self._allowed_memory = int(fraction * total)
            self._small.collects_garbage = self._large.collects_garbage = (
                self.settings.garbage_collection_threshold > 0.0
            )

    def add_free_memory_callback(self, callback: FreeMemoryCallback) -> None:
        """Call `callback` whenever no cached block fits. It may free blocks, but not allocate."""
        self._free_memory_callbacks.append(callback)

    def add_out_of_memory_observer(self, observer: OutOfMemoryObserver) -> None:
        """Call `observer` before an out-of-memory error is raised, with no lock held."""
        self._out_of_memory_observers.append(observer)

    # What it looks like inside.

    def stats(self) -> dict[str, int]:
        """Return all counters under the names of ``torch.cuda.memory_stats``."""
        with self._lock:
            return self.statistics.as_dict()

    def reset_peak_stats(self) -> None:
        """Set every peak to the present level."""
        with self._lock:
            self.statistics.reset_peak()

    def reset_accumulated_stats(self) -> None:
        """Set every total and every number of events to 0."""
        with self._lock:
            self.statistics.reset_accumulated()

    def snapshot_segments(self, frames: snapshot.FrameLookup | None = None) -> list[snapshot.SegmentInfo]:
        """Return all segments with their blocks, by address, in the schema of PyTorch's memory snapshots.

        Parameters
        ----------
        frames
            Gives the frames of a stack id. Without it no stacks are included.
        """
        with self._operation():
            return [
                snapshot.segment(self._blocks[address], self.device, stack, frames)
                for address, stack in sorted(self._segments.items())
            ]

    # One operation. `malloc` and `free` have this written out: calls are a third of what they cost.

    @contextmanager
    def _operation(self) -> Iterator[None]:
        with self._lock:
            if self._busy:
                raise _reentered()
            self._busy = True
            try:
                if hooks.active:
                    self._start_tracing()
                yield
            finally:
                self._busy = False
                if self._tracing or self._late_frees:
                    self._settle()

    def _start_tracing(self) -> None:
        self._tracing = True
        self._stack = stacks.capture()

    def _settle(self) -> None:
        """Emit the operation's events and do the frees that came in its way."""
        while True:
            events, self._events, self._tracing, self._stack = self._events, [], False, 0
            for kind, stream, address, size, flags, aux0, aux1, stack in events:
                hooks.emit(
                    kind,
                    device=self.device,
                    stream=self._stream_id(stream) if self._stream_id else stream,
                    address=address,
                    size=size,
                    flags=flags,
                    aux0=aux0,
                    aux1=aux1,
                    stack=stack,
                )
            if not self._late_frees:
                return
            self._busy, self._tracing = True, hooks.active
            try:
                self._free(self._late_frees.popleft())
            finally:
                self._busy = False

    # The policy.

    def _take_otherwise(self, pool: BlockPool, size: int, stream: int) -> Block:
        """Return a block that is in no list, when no cached one fits."""
        block = None
        if self._free_memory_callbacks and self._call_free_memory_callbacks():
            block = pool.take(size, stream)
        if block is None:
            if pool.collects_garbage:
                self._collect_garbage()
            block = self._new_segment(pool, size, stream)
        if block is None and self._release_oversize_segments(pool, size, stream):
            block = self._new_segment(pool, size, stream)
        if block is None:
            self._release_cached_segments()
            self.statistics.num_alloc_retries += 1
            block = self._new_segment(pool, size, stream)
        if block is None:
            raise self._out_of_memory(size, stream)
        return block

    def _split(self, block: Block, size: int) -> None:
        """Cut a block that is in no list to `size` bytes; the rest is free."""
        pool, rest, following = block.pool, block.size - size, block.next
        # Like PyTorch, show free memory with the requested size of whoever had it last.
        tail = Block(block.address + size, rest, block.stream, pool, block.requested_size)
        was_split = block.previous is not None or following is not None
        tail.previous, tail.next = block, following
        if following is not None:
            following.previous = tail
        block.next = tail
        block.size = size
        self._blocks[tail.address] = tail
        pool.add(tail)
        if was_split:
            self.statistics.inactive_split_changed(pool.levels, 0, -size)
        else:
            self.statistics.inactive_split_changed(pool.levels, 1, rest)

    def _not_in_use(self, address: int) -> UsageError:
        return UsageError(f"0x{address:x} is not a block in use on device {self.device} (was it freed before?)")

    def _free(self, address: int) -> None:
        block = self._blocks.get(address)
        if block is None or block.state is not ALLOCATED:
            raise self._not_in_use(address)
        if self._tracing:
            self._block_event(Kind.BLOCK_FREE_REQUESTED, block, self._stack)
        if block.stream_uses is None:
            self.statistics.block_freed(block.pool.levels, block.size, block.requested_size)
            self._merge(block)
        else:
            self.statistics.block_freed_later(block.pool.levels, block.size)
            self._wait_for_other_streams(block, list(block.stream_uses))

    def _wait_for_other_streams(self, block: Block, streams: list[int]) -> None:
        block.state = PENDING
        block.stream_uses = None
        block.outstanding_events = len(streams)
        for stream in streams:
            token = self.provider.record_event(stream)
            self._pending.setdefault(stream, deque()).append((token, block))

    def _free_passed_blocks(self) -> None:
        for stream, queue in list(self._pending.items()):
            while queue and self.provider.event_passed(queue[0][0]):
                self._event_over(queue.popleft()[1])
            if not queue:
                del self._pending[stream]

    def _free_pending_blocks(self) -> None:
        """Wait until no other stream uses a freed block."""
        self.statistics.num_sync_all_streams += 1
        for stream, queue in list(self._pending.items()):
            while queue:
                self.provider.synchronize_event(queue[0][0])
                self._event_over(queue.popleft()[1])
            del self._pending[stream]

    def _event_over(self, block: Block) -> None:
        block.outstanding_events -= 1
        if block.outstanding_events == 0:
            self.statistics.pending_block_freed(block.pool.levels, block.size, block.requested_size)
            self._merge(block)

    def _merge(self, block: Block) -> None:
        """Put a block that nobody uses among the free ones, as one with its free neighbours."""
        if self._tracing:
            self._block_event(Kind.BLOCK_FREE_COMPLETED, block, 0)
        pool = block.pool
        blocks_merged = bytes_merged = 0
        before, after = block.previous, block.next
        if before is not None and before.state is FREE:
            pool.remove(before)
            del self._blocks[block.address]
            blocks_merged, bytes_merged = 1, before.size
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
            self._blocks[block.address] = block
        if after is not None and after.state is FREE:
            pool.remove(after)
            del self._blocks[after.address]
            blocks_merged, bytes_merged = blocks_merged + 1, bytes_merged + after.size
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        pool.add(block)
        if block.previous is not None or block.next is not None:
            self.statistics.inactive_split_changed(pool.levels, 1 - blocks_merged, block.size - bytes_merged)
        elif blocks_merged:
            self.statistics.inactive_split_changed(pool.levels, -blocks_merged, -bytes_merged)

    # Segments.

    def _new_segment(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        bytes_wanted = segment_size(size)
        reserved = self.statistics.all.reserved_bytes.current
        if self._allowed_memory is not None and reserved + bytes_wanted > self._allowed_memory:
            return None
        try:
            address = self.provider.allocate(bytes_wanted, stream)
        except OutOfMemoryError:
            return None
        block = self._blocks[address] = Block(address, bytes_wanted, stream, pool)
        self._segments[address] = self._stack
        self.statistics.segment_allocated(pool.levels, bytes_wanted)
        if self._tracing:
            self._segment_event(Kind.SEGMENT_ALLOC, block)
        return block

    def _release_segment(self, block: Block) -> None:
        """Give a free block that is a whole segment back to the provider."""
        self.provider.free(block.address)
        block.pool.remove(block)
        del self._blocks[block.address]
        del self._segments[block.address]
        self.statistics.segment_freed(block.pool.levels, block.size)
        if self._tracing:
            self._segment_event(Kind.SEGMENT_FREE, block)

    def _release_cached_segments(self) -> None:
        self._free_pending_blocks()
        for pool in (self._large, self._small):
            for block in pool.whole_segments():
                self._release_segment(block)

    def _release_oversize_segments(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Release cached segments that may not be split, until `size` bytes are; return whether there were so many."""
        limit = self.settings.max_split_size
        if limit == UNLIMITED:
            return False
        block = pool.smallest(size, stream)  # did not fit, so it is oversize
        if block is not None:
            self._release_segment(block)
            return True
        released = 0
        while released < size:
            block = pool.largest(stream)
            if block is None or block.size < limit:
                return False
            released += block.size
            self._release_segment(block)
        return True

    def _collect_garbage(self) -> None:
        """Release large segments that have been idle for longer than the average, until enough is free."""
        assert self._allowed_memory is not None
        threshold = int(self.settings.garbage_collection_threshold * self._allowed_memory)
        excess = self.statistics.all.reserved_bytes.current - threshold
        if excess <= 0:
            return
        clock = self._large.clock
        ages = {block: clock - block.pool_clock for block in self._large.whole_segments()}
        while excess > 0 and ages:
            # The oldest is at least of average age, so that every round releases something.
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                excess -= block.size
                del ages[block]
                self._release_segment(block)

    def _call_free_memory_callbacks(self) -> bool:
        """Call them all, between two consistent states: they free blocks of this very allocator."""
        tracing, stack = self._tracing, self._stack
        self._busy = False
        try:
            return any([callback() for callback in self._free_memory_callbacks])
        finally:
            self._busy, self._tracing, self._stack = True, tracing, stack

    def _out_of_memory(self, size: int, stream: int) -> OutOfMemoryError:
        free, total = self.provider.memory_info()
        self.statistics.num_ooms += 1
        if self._tracing:
            self._events.append((Kind.OOM, stream, 0, size, 0, free, 0, self._stack))
        wanted = segment_size(size)
        allocated = self.statistics.all.allocated_bytes.current
        reserved = self.statistics.all.reserved_bytes.current
        text = (
            f"tried to allocate {format_bytes(wanted)} on device {self.device}, which has {format_bytes(total)}, "
            f"of which {format_bytes(free)} are free. "
        )
        if self._allowed_memory is not None:
            text += f"The memory fraction allows {format_bytes(self._allowed_memory)}. "
        text += (
            f"This allocator has {format_bytes(reserved)} reserved: {format_bytes(allocated)} allocated by the "
            f"program, {format_bytes(reserved - allocated)} reserved but unallocated. "
        )
        if reserved - allocated >= wanted:
            text += (
                "What is unallocated lies in pieces between allocated blocks, or belongs to other streams: "
                "CUDATOOL_ALLOC_CONF=max_split_size_mb:N or roundup_power2_divisions:N may keep it whole."
            )
        else:
            text += "Free arrays that are not needed, or work on less at a time; cudatool snapshot shows what holds it."
        error = OutOfMemoryError(text)
        error.wanted, error.total, error.free = wanted, total, free
        error.allowed = total if self._allowed_memory is None else self._allowed_memory
        error.allocated, error.reserved = allocated, reserved
        return error

    # Events.

    def _block_event(self, kind: Kind, block: Block, stack: int) -> None:
        self._events.append((kind, block.stream, block.address, block.size, 0, block.requested_size, 0, stack))

    def _segment_event(self, kind: Kind, block: Block) -> None:
        flags = _SMALL_POOL_FLAG if block.pool.is_small else 0
        self._events.append((kind, block.stream, block.address, block.size, flags, 0, 0, self._stack))


def _reentered() -> RuntimeError:
    return RuntimeError("the allocator was called from within one of its own operations")


def _refuse_unsupported(settings: Settings) -> None:
    """Raise ConfigError for what would change the result and is not there. Pinned memory is not this allocator's."""
    for key, value, supported in (
        ("expandable_segments", settings.expandable_segments, False),
        ("backend", settings.backend, "native"),
        ("release_lock_on_cudamalloc", settings.release_lock_on_cudamalloc, False),
    ):
        if value != supported:
            raise ConfigError(f"allocator setting {key}:{value} is not supported by cudatool; use {key}:{supported}")
