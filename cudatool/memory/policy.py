"""The caching allocator of one device, address for address as PyTorch's CUDACachingAllocator.

Segments come from a provider and are cut into blocks. How a request is served::

    malloc(size, stream):
        free the pending blocks whose events have passed
        best fit among the stream's free blocks
        or free-memory callbacks, then best fit again
        or garbage collection, then new memory
        or a free block of a private pool that is there for such cases
        or release oversize cached blocks, then new memory
        or wait for all pending blocks, release everything that is cached, then new memory
        or out of memory
        split off the rest if it is worth it

    free(address):
        if other streams use the block: record an event on each, free it when all have passed
        else merge it with its free neighbours

While requests are redirected to a private pool, as they are while a CUDA graph is captured, no event may be recorded
or waited for: pending blocks wait until that is over, and the last step but one is left out.
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
    UNMAPPED,
    Block,
    BlockPool,
    PoolId,
    round_size,
    segment_size,
)
from cudatool.memory.journal import Journal
from cudatool.memory.oom import out_of_memory_error
from cudatool.memory.pools import BlockState, PoolState, PrivatePool, RestoreResult, blocks_of
from cudatool.memory.provider import SegmentProvider
from cudatool.memory.segments import Segments
from cudatool.memory.settings import Settings
from cudatool.memory.statistics import AllocatorStatistics
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["CachingAllocator", "FreeMemoryCallback", "OutOfMemoryObserver"]

FreeMemoryCallback = Callable[[], bool]
"""Frees what the program can do without; returns whether there was anything."""

OutOfMemoryObserver = Callable[[int, int, int, int], None]
"""Called before an out-of-memory error with device, bytes of the segment asked for, bytes allowed, bytes free."""

_DEFAULT_POOL: PoolId = (0, 0)
_ROUND = MIN_BLOCK_SIZE - 1
_log = logging.getLogger("cudatool.memory")


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
        if settings.backend != "native":
            raise ConfigError(
                f"allocator setting backend:{settings.backend} is not supported by cudatool; use backend:native"
            )
        self.provider = provider
        self.device = device
        self.settings = settings
        self.statistics = AllocatorStatistics(settings.max_split_size)
        self._total_memory = provider.memory_info()[1] if total_memory is None else total_memory
        self._blocks: dict[int, Block] = {}  # every block, free or not, by address
        self._journal = Journal(device, stream_id)
        self._segments = Segments(
            blocks=self._blocks,
            settings=settings,
            statistics=self.statistics,
            journal=self._journal,
            total_memory=self._total_memory,
            unlocked=self._unlocked,
        )
        self._small, self._large = self._block_pools(_DEFAULT_POOL, provider, settings.expandable_segments, True)
        self._private: dict[PoolId, PrivatePool] = {}
        self._redirections: list[tuple[PrivatePool, Callable[[int], bool]]] = []
        # By stream: events of pending blocks, oldest first. A stream's events pass in order.
        self._pending: dict[int, deque[tuple[Any, Block]]] = {}
        self._deferred: list[Block] = []  # pending blocks whose events could not be recorded yet
        self._lock = threading.RLock()
        self._busy = False  # between two consistent states
        self._late_frees: deque[int] = deque()
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
            journal = self._journal
            try:
                if hooks.active:
                    journal.start()
                rounded = (size + _ROUND) & ~_ROUND if self._rounds_to_minimum else round_size(size, self.settings)
                if self._redirections:
                    pool = self._redirected(rounded, stream)
                else:
                    if self._pending or self._deferred:
                        self._free_passed_blocks()
                    pool = self._small if rounded <= SMALL_LIMIT else self._large
                block = pool.take(rounded, stream) or self._take_otherwise(pool, rounded, stream)
                return self._hand_out(block, rounded, size)
            except OutOfMemoryError as error:
                out_of_memory = error
            finally:
                self._busy = False
                if journal.active or self._late_frees:
                    self._settle()
        for observer in list(self._out_of_memory_observers):
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
            journal = self._journal
            try:
                if hooks.active:
                    journal.start()
                self._free(address)
            finally:
                self._busy = False
                if journal.active or self._late_frees:
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
            # What a stream does while it is captured is over when the capture is.
            block.stream_uses.setdefault(stream, bool(self._redirections))
            if self._journal.active:
                self._journal.stream_use(block, stream)

    def empty_cache(self, pool: PoolId = _DEFAULT_POOL) -> None:
        """Wait for pending blocks, then give everything that is wholly free back to the provider.

        Of private pools, only those that nobody uses any more give their memory back. For the default pool that is
        all such pools beside the default one; and while a private pool is in use for new allocations, only them.
        """
        with self._operation():
            self._release_cached(pool)

    def trim(self, bytes_to_keep: int) -> None:
        """Like :meth:`empty_cache`, but stop as soon as no more than `bytes_to_keep` are reserved.

        The name and the rule are those of cuMemPoolTrimTo.
        """
        with self._operation():
            self._release_cached(_DEFAULT_POOL, bytes_to_keep)

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
            self._segments.allowed = int(fraction * self._total_memory) if fraction < 1.0 else None
            for pool in self._all_pools():
                self._set_garbage_collection(pool)

    def memory_fraction(self) -> float:
        """Return the share of the device's memory that may be reserved."""
        allowed = self._segments.allowed
        return 1.0 if allowed is None else allowed / self._total_memory

    def add_free_memory_callback(self, callback: FreeMemoryCallback) -> None:
        """Call `callback` whenever no cached block fits. It may free blocks, but not allocate."""
        self._free_memory_callbacks.append(callback)

    def add_out_of_memory_observer(self, observer: OutOfMemoryObserver) -> None:
        """Call `observer` before an out-of-memory error is raised, with no lock held."""
        self._out_of_memory_observers.append(observer)

    # Private pools.

    def create_or_incref_pool(
        self,
        pool: PoolId,
        *,
        provider: SegmentProvider | None = None,
        use_on_oom: bool = False,
        splits: bool = True,
    ) -> None:
        """Make a private pool, or count one more user of it.

        Parameters
        ----------
        provider
            Where its segments come from; by default where all do. With one of its own they are not expandable.
        use_on_oom
            Its free blocks may serve requests that would find no memory otherwise.
        splits
            Whether its blocks may be split.

        Raises
        ------
        UsageError
            `pool` is the default pool, or it exists and has no user any more.
        """
        with self._operation():
            self._pool_for_use(pool, provider, use_on_oom, splits)

    def begin_allocate_to_pool(self, pool: PoolId, applies_to: Callable[[int], bool]) -> None:
        """Serve requests from a private pool from now on, if ``applies_to(stream)``. Counts as one more user.

        Raises
        ------
        UsageError
            This pool is being allocated to already.
        """
        with self._operation():
            if any(private.id == pool for private, _ in self._redirections):
                raise UsageError(f"pool {pool} is being allocated to already")
            self._redirections.append((self._pool_for_use(pool, None, False, True), applies_to))

    def end_allocate_to_pool(self, pool: PoolId) -> None:
        """Undo :meth:`begin_allocate_to_pool`, except that the pool keeps its user until :meth:`release_pool`.

        Raises
        ------
        UsageError
            This pool is not being allocated to.
        """
        with self._operation():
            for index, (private, _) in enumerate(self._redirections):
                if private.id == pool:
                    del self._redirections[index]
                    return
            raise UsageError(f"pool {pool} is not being allocated to")

    def release_pool(self, pool: PoolId) -> None:
        """Count one user less. Without users, a pool gives its free memory back when the cache is emptied.

        Raises
        ------
        UsageError
            There is no such pool, or it has no user.
        """
        with self._operation():
            private = self._private_pool(pool)
            if private.use_count == 0:
                raise UsageError(f"pool {pool} has no user any more")
            private.use_count -= 1
            if private.use_count == 0 and private.reserved == 0:
                del self._private[pool]

    def pool_use_count(self, pool: PoolId) -> int:
        """Return how many users a private pool has.

        Raises
        ------
        UsageError
            There is no such pool.
        """
        with self._lock:
            return self._private_pool(pool).use_count

    def checkpoint_pool(self, pool: PoolId) -> PoolState:
        """Return how a private pool is cut into blocks, for :meth:`restore_pool`.

        Raises
        ------
        UsageError
            There is no such pool, or it has no user any more.
        """
        with self._operation():
            private = self._private_pool(pool)
            if private.use_count == 0:
                raise UsageError(f"pool {pool} has no user any more")
            return PoolState(
                pool,
                tuple(
                    tuple(
                        BlockState(b.address, b.size, b.state is ALLOCATED) for b in blocks if b.state is not UNMAPPED
                    )
                    for blocks in self._runs(private)
                ),
            )

    def restore_pool(self, pool: PoolId, state: PoolState) -> RestoreResult:
        """Cut a private pool into the blocks that it had at a checkpoint, in use or free as they were.

        What was allocated since is freed. Segments that are new since stay, free.

        Raises
        ------
        UsageError
            `state` is another pool's, a segment has gone since, or a block is still in use by another stream.
        """
        with self._operation():
            private = self._private_pool(pool)
            if private.use_count == 0 or state.id != pool:
                raise UsageError(f"the checkpoint of pool {state.id} does not fit pool {pool}")
            runs = list(self._runs(private))
            if any(block.state is PENDING for blocks in runs for block in blocks):
                raise UsageError(f"pool {pool} has blocks that another stream still uses; synchronize before")
            freed = tuple(block.address for blocks in runs for block in blocks if block.state is ALLOCATED)
            for address in freed:
                self._blocks[address].stream_uses = None
                self._free(address)
            allocated: list[int] = []
            for blocks in state.segments:
                allocated += self._restore_segment(pool, blocks)
            return RestoreResult(freed, tuple(allocated))

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

    def snapshot_segments(
        self, frames: snapshot.FrameLookup | None = None, *, pool: PoolId | None = None
    ) -> list[snapshot.SegmentInfo]:
        """Return all segments with their blocks, by address, in the schema of PyTorch's memory snapshots.

        Parameters
        ----------
        frames
            Gives the frames of a stack id. Without it no stacks are included.
        pool
            Return the segments of this pool alone.
        """
        with self._operation():
            return [
                snapshot.segment(head, self.device, stack, frames)
                for head, stack in self._segments.heads()
                if pool is None or head.pool.id == pool
            ]

    def segment_of(self, address: int) -> tuple[int, int, bool]:
        """Return address and size of the segment that a block in use lies in, and whether it is expandable.

        Raises
        ------
        UsageError
            `address` is not a block in use.
        """
        with self._operation():
            block = self._blocks.get(address)
            if block is None or block.state is not ALLOCATED:
                raise self._not_in_use(address)
            while block.previous is not None:
                block = block.previous
            expandable = block.expandable
            if expandable is not None:
                return expandable.address, expandable.size, True
            return block.address, sum(part.size for part in blocks_of(block)), False

    # One operation. `malloc` and `free` have this written out: calls are a third of what they cost.

    @contextmanager
    def _operation(self) -> Iterator[None]:
        with self._lock:
            if self._busy:
                raise _reentered()
            self._busy = True
            try:
                if hooks.active:
                    self._journal.start()
                yield
            finally:
                self._busy = False
                if self._journal.active or self._late_frees:
                    self._settle()

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Let other threads in, in the middle of an operation; its state must be consistent, and may change."""
        journal = self._journal
        active, stack = journal.active, journal.stack
        self._busy = False
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            self._busy, journal.active, journal.stack = True, active, stack

    def _settle(self) -> None:
        """Emit the operation's events and do the frees that came in its way."""
        while True:
            self._journal.emit()
            if not self._late_frees:
                return
            self._busy, self._journal.active = True, hooks.active
            try:
                self._free(self._late_frees.popleft())
            finally:
                self._busy = False

    # The policy.

    def _redirected(self, size: int, stream: int) -> BlockPool:
        """Return the pool for a request while some are redirected; the last redirection that applies counts."""
        for private, applies_to in reversed(self._redirections):
            if applies_to(stream):
                return private.small if size <= SMALL_LIMIT else private.large
        return self._small if size <= SMALL_LIMIT else self._large

    def _take_otherwise(self, pool: BlockPool, size: int, stream: int) -> Block:
        """Return a block that is in no list, when no cached one fits."""
        segments = self._segments
        block = None
        if self._free_memory_callbacks and self._call_free_memory_callbacks():
            block = pool.take(size, stream)
        if block is None:
            if pool.collects_garbage:
                segments.collect_garbage(self._large)
            block = segments.new(pool, size, stream)
        if block is None and pool.id == _DEFAULT_POOL:
            block = self._take_from_spare_pool(size, stream)
        if block is None and segments.release_oversize(pool, size, stream):
            block = segments.new(pool, size, stream)
        if block is None and not self._redirections:
            self._release_cached(_DEFAULT_POOL)
            self.statistics.num_alloc_retries += 1
            block = segments.new(pool, size, stream)
        if block is None:
            raise self._out_of_memory(pool, size, stream)
        return block

    def _take_from_spare_pool(self, size: int, stream: int) -> Block | None:
        for private in self._private.values():
            if private.use_on_oom:
                block = (private.small if size <= SMALL_LIMIT else private.large).take(size, stream)
                if block is not None:
                    return block
        return None

    def _hand_out(self, block: Block, size: int, requested_size: int, *, exactly: bool = False) -> int:
        """Make a block that is in no list the program's, cut to `size` bytes if the rest is worth it, or `exactly`."""
        pool = block.pool
        rest = block.size - size
        if (rest > pool.max_unsplit_rest and size < pool.split_limit) or (exactly and rest > 0):
            self._split(block, size)
        elif (block.previous is not None or block.next is not None) and not pool.expandable:
            self.statistics.inactive_split_changed(pool.levels, -1, -block.size)
        block.state = ALLOCATED
        block.requested_size = requested_size
        block.stack = self._journal.stack
        self.statistics.block_allocated(pool.levels, block.size, requested_size)
        if self._journal.active:
            self._journal.block(Kind.BLOCK_ALLOC, block, block.stack)
        return block.address

    def _split(self, block: Block, size: int) -> None:
        """Cut a block that is in no list to `size` bytes; the rest is free."""
        pool, rest, following = block.pool, block.size - size, block.next
        # Like PyTorch, show free memory with the requested size of whoever had it last.
        tail = Block(block.address + size, rest, block.stream, pool, block.requested_size, block.expandable)
        was_split = block.previous is not None or following is not None
        tail.previous, tail.next = block, following
        if following is not None:
            following.previous = tail
        block.next = tail
        block.size = size
        self._blocks[tail.address] = tail
        pool.add(tail)
        if pool.expandable:
            return
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
        if self._journal.active:
            self._journal.block(Kind.BLOCK_FREE_REQUESTED, block, self._journal.stack)
        if block.stream_uses is None:
            self.statistics.block_freed(block.pool.levels, block.size, block.requested_size)
            self._merge(block)
            return
        self.statistics.block_freed_later(block.pool.levels, block.size)
        block.state = PENDING
        if self._redirections:
            self._deferred.append(block)
        else:
            self._record_events(block, list(block.stream_uses))

    def _record_events(self, block: Block, streams: list[int]) -> None:
        block.stream_uses = None
        block.outstanding_events = len(streams)
        for stream in streams:
            token = self.provider.record_event(stream)
            self._pending.setdefault(stream, deque()).append((token, block))

    def _record_deferred_events(self) -> None:
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            assert block.stream_uses is not None
            streams = [stream for stream, while_captured in block.stream_uses.items() if not while_captured]
            self._record_events(block, streams)
            if not streams:
                self._nobody_uses(block)

    def _free_passed_blocks(self) -> None:
        if self._deferred:
            self._record_deferred_events()
        for stream, queue in list(self._pending.items()):
            while queue and self.provider.event_passed(queue[0][0]):
                self._event_over(queue.popleft()[1])
            if not queue:
                del self._pending[stream]

    def _free_pending_blocks(self, pool: PoolId | None = None) -> None:
        """Wait until no other stream uses a freed block (of one pool)."""
        self.statistics.num_sync_all_streams += 1
        self._record_deferred_events()
        for stream, queue in list(self._pending.items()):
            others: deque[tuple[Any, Block]] = deque()
            while queue:
                token, block = queue.popleft()
                if pool is not None and block.pool.id != pool:
                    others.append((token, block))
                    continue
                self.provider.synchronize_event(token)
                self._event_over(block)
            if others:
                self._pending[stream] = others
            else:
                del self._pending[stream]

    def _event_over(self, block: Block) -> None:
        block.outstanding_events -= 1
        if block.outstanding_events == 0:
            self._nobody_uses(block)

    def _nobody_uses(self, block: Block) -> None:
        self.statistics.pending_block_freed(block.pool.levels, block.size, block.requested_size)
        self._merge(block)

    def _merge(self, block: Block) -> None:
        """Put a block that nobody uses among the free ones, as one with its free neighbours."""
        if self._journal.active:
            self._journal.block(Kind.BLOCK_FREE_COMPLETED, block, 0)
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
        if pool.expandable:
            return
        if block.previous is not None or block.next is not None:
            self.statistics.inactive_split_changed(pool.levels, 1 - blocks_merged, block.size - bytes_merged)
        elif blocks_merged:
            self.statistics.inactive_split_changed(pool.levels, -blocks_merged, -bytes_merged)

    def _release_cached(self, pool: PoolId, keep: int = 0) -> None:
        segments = self._segments
        if pool == _DEFAULT_POOL and not self._redirections:
            self._free_pending_blocks()
            segments.release_free(self._large, keep)
            segments.release_free(self._small, keep)
        for private in [p for p in self._private.values() if p.use_count == 0 and pool in (_DEFAULT_POOL, p.id)]:
            if pool != _DEFAULT_POOL:
                self._free_pending_blocks(pool)
            segments.release_free(private.small, keep)
            segments.release_free(private.large, keep)
            if private.reserved == 0:
                del self._private[private.id]

    def _call_free_memory_callbacks(self) -> bool:
        """Call them all, between two consistent states: they free blocks of this very allocator."""
        journal = self._journal
        active, stack = journal.active, journal.stack
        self._busy = False
        try:
            return any([callback() for callback in self._free_memory_callbacks])
        finally:
            self._busy, journal.active, journal.stack = True, active, stack

    def _out_of_memory(self, pool: BlockPool, size: int, stream: int) -> OutOfMemoryError:
        free, total = self.provider.memory_info()
        self.statistics.num_ooms += 1
        if self._journal.active:
            self._journal.out_of_memory(size, stream, pool, free)
        return out_of_memory_error(
            wanted=segment_size(size),
            device=self.device,
            free=free,
            total=total,
            allowed=self._segments.allowed,
            statistics=self.statistics,
            settings=self.settings,
            pool=pool,
            stream=stream,
            blocks=self._blocks.values(),
        )

    # Pools.

    def _block_pools(
        self, id: PoolId, provider: SegmentProvider, expandable: bool, splits: bool
    ) -> tuple[BlockPool, BlockPool]:
        pools = [
            BlockPool(
                id,
                provider,
                is_small=level is self.statistics.small_pool,
                expandable=expandable,
                splits=splits,
                levels=(level, self.statistics.all),
                blocks=self._blocks,
                settings=self.settings,
            )
            for level in (self.statistics.small_pool, self.statistics.large_pool)
        ]
        for pool in pools:
            self._set_garbage_collection(pool)
        return pools[0], pools[1]

    def _set_garbage_collection(self, pool: BlockPool) -> None:
        pool.collects_garbage = self._segments.allowed is not None and self.settings.garbage_collection_threshold > 0.0

    def _all_pools(self) -> list[BlockPool]:
        return [self._small, self._large, *(pool for p in self._private.values() for pool in (p.small, p.large))]

    def _pool_for_use(
        self, pool: PoolId, provider: SegmentProvider | None, use_on_oom: bool, splits: bool
    ) -> PrivatePool:
        private = self._private.get(pool)
        if private is None:
            if pool == _DEFAULT_POOL:
                raise UsageError("pool (0, 0) is the default pool, not a private one")
            expandable = self.settings.expandable_segments and provider is None
            small, large = self._block_pools(pool, provider or self.provider, expandable, splits)
            private = self._private[pool] = PrivatePool(pool, small, large, use_on_oom=use_on_oom)
        elif private.use_count == 0:
            raise UsageError(f"pool {pool} has no user any more and is being given back; use another id")
        else:
            private.use_count += 1
        return private

    def _private_pool(self, pool: PoolId) -> PrivatePool:
        private = self._private.get(pool)
        if private is None:
            raise UsageError(f"there is no private pool {pool} on device {self.device}")
        return private

    def _runs(self, private: PrivatePool) -> Iterator[list[Block]]:
        """Yield the blocks of each segment, or of each run of mapped pages, of a private pool."""
        for head, _ in self._segments.heads():
            if head.pool is private.small or head.pool is private.large:
                blocks = blocks_of(head)
                ends = [index for index, block in enumerate(blocks) if block.state is UNMAPPED]
                yield blocks[: ends[0]] if ends else blocks

    def _restore_segment(self, pool: PoolId, states: tuple[BlockState, ...]) -> list[int]:
        """Cut a segment that is wholly free; return the addresses that are in use then."""
        block = self._blocks.get(states[0].address)
        if block is None or block.state is not FREE or block.size < sum(state.size for state in states):
            raise UsageError(f"the segment at {states[0].address:#x} of pool {pool} has changed since the checkpoint")
        for state in states:
            assert block is not None
            block.pool.remove(block)
            self._hand_out(block, state.size, state.size, exactly=True)
            block = block.next
        for state in states:
            if not state.allocated:
                self._free(state.address)
        return [state.address for state in states if state.allocated]


def _reentered() -> RuntimeError:
    return RuntimeError("the allocator was called from within one of its own operations")
