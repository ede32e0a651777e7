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
or waited for: pending blocks wait until that is over (or see capture_reuse.py), and the last step but one is left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from cudatool.errors import CudatoolError, OutOfMemoryError, UsageError
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
from cudatool.memory.capture_reuse import CaptureReuse
from cudatool.memory.journal import Journal
from cudatool.memory.oom import out_of_memory_error
from cudatool.memory.pools import BlockState, PoolState, PrivatePool, RestoreResult, blocks_of
from cudatool.memory.provider import SegmentProvider
from cudatool.memory.segments import Segments
from cudatool.memory.settings import Settings
from cudatool.memory.statistics import AllocatorStatistics
from cudatool.trace.events import Kind

__all__ = ["DEFAULT_POOL", "Policy"]

DEFAULT_POOL: Final[PoolId] = (0, 0)
"""The pool of everything that is not kept apart."""

_ROUND: Final = MIN_BLOCK_SIZE - 1


class Policy:
    """Serves requests, one after the other: it takes no lock, and what it says of them stays in the journal.

    Parameters
    ----------
    provider
        Where segments come from, except those of private pools with a provider of their own.
    device
        Ordinal of the device, for messages.
    journal
        Gets the events of what happens.
    total_memory
        The device's memory in bytes, of which a memory fraction is a part.
    outside
        Lets the program and its other threads use the allocator, in the middle of an operation.
    processes
        Gives id and bytes of each process on the device, for messages.
    """

    def __init__(
        self,
        provider: SegmentProvider,
        *,
        device: int,
        settings: Settings,
        journal: Journal,
        total_memory: int,
        outside: Callable[[], AbstractContextManager[None]],
        processes: Callable[[], Iterable[tuple[int, int]]] = tuple,
    ) -> None:
        self._processes = processes
        self.free_memory_callbacks: list[Callable[[], bool]] = []
        self.statistics = AllocatorStatistics(settings.max_split_size)
        self._provider = provider
        self._device = device
        self._settings = settings
        self._journal = journal
        self._total_memory = total_memory
        self._outside = outside
        self._rounds_to_minimum = not any(divisions > 1 for divisions in settings.roundup_power2_divisions)
        self._active: dict[int, Block] = {}  # every block in use, if only by other streams, by address
        self._private: dict[PoolId, PrivatePool] = {}
        self._by_address: list[Block] | None = None  # the free blocks, once someone looks for an address
        self._redirections: list[tuple[PrivatePool, Callable[[int], bool]]] = []
        self._capturing: set[PoolId] = set()  # those of streams that are captured: waiting would end that
        # By stream: events of pending blocks, oldest first. A stream's events pass in order.
        self._pending: dict[int, deque[tuple[Any, Block]]] = {}
        self._deferred: deque[Block] = deque()  # pending blocks whose events could not be recorded yet
        self._capture_reuse = CaptureReuse(provider) if settings.graph_capture_record_stream_reuse else None
        self.segments = Segments(
            active=self._active,
            pools=self._all_pools,
            settings=settings,
            statistics=self.statistics,
            journal=journal,
            total_memory=total_memory,
            outside=outside,
        )
        self._small, self._large = self._block_pools(DEFAULT_POOL, provider, settings.expandable_segments, True)
        if settings.per_process_memory_fraction is not None:
            self.set_memory_fraction(settings.per_process_memory_fraction)

    # Requests.

    def malloc(self, size: int, stream: int) -> int:
        """Return the address of `size` > 0 bytes for use on `stream`.

        Raises
        ------
        OutOfMemoryError
            There is no such block, and none can be made.
        """
        rounded = (size + _ROUND) & ~_ROUND if self._rounds_to_minimum else round_size(size, self._settings)
        if self._redirections:
            if self._capture_reuse is not None:
                self._free_blocks_behind(stream, self._capture_reuse)
            pool = self._redirected(rounded, stream)
        else:
            if self._pending or self._deferred:
                self.free_passed_blocks()
            pool = self._small if rounded <= SMALL_LIMIT else self._large
        block = pool.take(rounded, stream)
        if block is None:
            block = self._take_otherwise(pool, rounded, stream)
        return self._hand_out(block, rounded, size)

    def free(self, address: int) -> None:
        """Give a block back.

        Raises
        ------
        UsageError
            `address` is not a block in use.
        CudatoolError
            A stream that used the block was destroyed.
        """
        block = self.block_in_use(address)
        if self._journal.active:
            self._journal.block(Kind.BLOCK_FREE_REQUESTED, block, self._journal.stack)
        if block.stream_uses is None:
            self.statistics.block_freed(block.pool.level, block.size, block.requested_size)
            self._merge(block)
            return
        self.statistics.block_freed_later(block.pool.level, block.size)
        block.state = PENDING
        if self._redirections:
            self._deferred.append(block)
            if self._capture_reuse is not None:
                self._capture_reuse.freed(block)
        else:
            self._record_events(block, list(block.stream_uses))

    def serve(
        self,
        live: dict[int, int],
        mallocs: list[bool],
        blocks: list[int],
        sizes: list[int],
        streams: list[int],
        addresses: list[int] | None,
        start: int,
        stop: int,
        watched: Block | None = None,
    ) -> tuple[int, int]:
        """Serve recorded requests, many at a time, as long as nothing but a cached block is needed for them.

        It ends before a request that no cached block fits, that another block than the recorded one fits best, that
        frees what is not in use, or what other streams use: :meth:`malloc` and :meth:`free` do the rest of it. While
        it lasts no event passes, none is journaled, and no request is redirected.

        Parameters
        ----------
        live
            The address of each numbered block in use; what is served is put in and taken out. A block that is not
            there is not freed.
        mallocs, blocks, sizes, streams, addresses
            Of each request whether it is one, otherwise it is a free; the number of the block; the bytes and the stream
            asked for; and the recorded address, None if any will do.
        start, stop
            Which of them to serve.
        watched
            A free block, before whose last moment as a whole segment it ends.

        Returns
        -------
        tuple
            Where it ended, and the most bytes allocated right after one of these requests.
        """
        if self._pending or self._deferred:
            self.free_passed_blocks()
        allocated, most, active = self.statistics.all.allocated_bytes, 0, self._active
        for at in range(start, stop):
            if watched is not None and (watched.home is None or not self.segments.is_releasable(watched)):
                return at, most
            if not mallocs[at]:
                address = live.get(blocks[at])
                if address is None:
                    continue
                held = active.get(address)
                if held is None or held.state is not ALLOCATED or held.stream_uses is not None:
                    return at, most
                del live[blocks[at]]
                self.statistics.block_freed(held.pool.level, held.size, held.requested_size)
                self._merge(held)
                continue
            size = sizes[at]
            rounded = (size + _ROUND) & ~_ROUND if self._rounds_to_minimum else round_size(size, self._settings)
            pool = self._small if rounded <= SMALL_LIMIT else self._large
            block = pool.fit(rounded, streams[at])
            if block is None or (addresses is not None and block.address != addresses[at]):
                return at, most
            if pool.collects_garbage:
                pool.clock += 1
            pool.remove(block)
            live[blocks[at]] = self._hand_out(block, rounded, size)
            if allocated.current > most:
                most = allocated.current
        return stop, most

    def record_stream(self, address: int, stream: int) -> None:
        """Note that `stream` uses a block too.

        Raises
        ------
        UsageError
            `address` is not a block in use.
        """
        block = self.block_in_use(address)
        if stream == block.stream:
            return
        if block.stream_uses is None:
            block.stream_uses = {}
        # What a stream does while it is captured is over when the capture is.
        block.stream_uses.setdefault(stream, bool(self._redirections))
        if self._journal.active:
            self._journal.stream_use(block, stream)

    def block_in_use(self, address: int) -> Block:
        """Return the block that the program has at `address`.

        Raises
        ------
        UsageError
            There is none.
        """
        block = self._active.get(address)
        if block is None or block.state is not ALLOCATED:
            raise UsageError(f"0x{address:x} is not a block in use on device {self._device} (was it freed before?)")
        return block

    def release_cached(self, pool: PoolId, keep: int = 0) -> None:
        """Wait for pending blocks, then give back what is wholly free until no more than `keep` bytes are reserved.

        While a stream is captured, nothing is waited for, as unmapping pages of an expandable segment would.
        """
        segments = self.segments
        if pool == DEFAULT_POOL and not self._redirections:
            self._free_pending_blocks()
            segments.release_free(self._large, keep)
            segments.release_free(self._small, keep)
        for private in [p for p in self._private.values() if p.use_count == 0 and pool in (DEFAULT_POOL, p.id)]:
            if self._capturing and private.small.expandable:
                continue
            if pool != DEFAULT_POOL and not self._capturing:
                self._free_pending_blocks(pool)
            segments.release_free(private.small, keep)
            segments.release_free(private.large, keep)
            if private.reserved == 0:
                del self._private[private.id]

    def set_memory_fraction(self, fraction: float) -> None:
        """Reserve no more than this share of the device's memory from now on; see :class:`CachingAllocator`."""
        if not 0.0 <= fraction <= 1.0:
            raise UsageError(f"a memory fraction lies between 0 and 1, not {fraction}")
        self.segments.allowed = int(fraction * self._total_memory) if fraction < 1.0 else None
        for pool in self._all_pools():
            self._set_garbage_collection(pool)
        if self._journal.active:
            self._journal.memory_fraction(fraction, self._total_memory)

    def memory_fraction(self) -> float:
        """Return the share of the device's memory that may be reserved."""
        allowed = self.segments.allowed
        return 1.0 if allowed is None else allowed / self._total_memory

    # Private pools.

    def use_pool(
        self,
        pool: PoolId,
        provider: SegmentProvider | None = None,
        *,
        use_on_oom: bool = False,
        splits: bool = True,
    ) -> PrivatePool:
        """Make a private pool, or count one more user of it."""
        private = self._private.get(pool)
        if private is not None and private.use_count == 0:
            if private.reserved:
                raise UsageError(f"pool {pool} has no user any more and is being given back; use another id")
            private = None  # nothing is left of it
        if private is None:
            if pool == DEFAULT_POOL:
                raise UsageError("pool (0, 0) is the default pool, not a private one")
            expandable = self._settings.expandable_segments and provider is None
            small, large = self._block_pools(pool, provider or self._provider, expandable, splits)
            private = self._private[pool] = PrivatePool(pool, small, large, use_on_oom=use_on_oom)
        else:
            private.use_count += 1
        return private

    def begin_allocate_to_pool(
        self, pool: PoolId, applies_to: Callable[[int], bool], *, capturing: bool = False
    ) -> None:
        """Serve requests from a private pool if ``applies_to(stream)``."""
        if any(private.id == pool for private, _ in self._redirections):
            raise UsageError(f"pool {pool} is being allocated to already")
        self._redirections.append((self.use_pool(pool), applies_to))
        if capturing:
            self._capturing.add(pool)

    def end_allocate_to_pool(self, pool: PoolId) -> None:
        """Undo :meth:`begin_allocate_to_pool`, except that the pool keeps its user."""
        for index, (private, _) in enumerate(self._redirections):
            if private.id == pool:
                del self._redirections[index]
                self._capturing.discard(pool)
                return
        raise UsageError(f"pool {pool} is not being allocated to")

    def release_pool(self, pool: PoolId) -> None:
        """Count one user of a private pool less. Without users it is forgotten when its memory is given back."""
        self._used_pool(pool).use_count -= 1

    def private_pool(self, pool: PoolId) -> PrivatePool:
        """Return a private pool."""
        private = self._private.get(pool)
        if private is None:
            raise UsageError(f"there is no private pool {pool} on device {self._device}")
        return private

    def _used_pool(self, pool: PoolId) -> PrivatePool:
        private = self.private_pool(pool)
        if private.use_count == 0:
            raise UsageError(f"pool {pool} has no user any more")
        return private

    def checkpoint_pool(self, pool: PoolId) -> PoolState:
        """Return how a private pool is cut into blocks."""
        runs = self._runs(self._used_pool(pool))
        return PoolState(
            pool, tuple(tuple(BlockState(b.address, b.size, b.state is ALLOCATED) for b in r) for r in runs)
        )

    def restore_pool(self, pool: PoolId, state: PoolState) -> RestoreResult:
        """Cut a private pool into the blocks that it had at a checkpoint, in use or free as they were."""
        private = self._used_pool(pool)
        if state.id != pool:
            raise UsageError(f"the checkpoint of pool {state.id} does not fit pool {pool}")
        runs = list(self._runs(private))
        if any(block.state is PENDING for blocks in runs for block in blocks):
            raise UsageError(f"pool {pool} has blocks that another stream still uses; synchronize before")
        freed = tuple(block.address for blocks in runs for block in blocks if block.state is ALLOCATED)
        for address in freed:
            self._active[address].stream_uses = None
            self.free(address)
        allocated: list[int] = []
        for blocks in state.segments:
            allocated += self._restore_segment(pool, blocks)
        return RestoreResult(freed, tuple(allocated))

    def _runs(self, private: PrivatePool) -> Iterator[list[Block]]:
        """Yield the blocks of each segment, or of each run of mapped pages, of a private pool."""
        for head in self.segments.heads():
            if head.pool is private.small or head.pool is private.large:
                blocks = blocks_of(head)
                ends = [index for index, block in enumerate(blocks) if block.state is UNMAPPED]
                yield blocks[: ends[0]] if ends else blocks

    def _restore_segment(self, pool: PoolId, states: tuple[BlockState, ...]) -> list[int]:
        """Cut a segment that is wholly free; return the addresses that are in use then."""
        heads = {head.address: head for head in self.segments.heads() if head.pool.id == pool}
        block = heads.get(states[0].address)
        if block is None or block.state is not FREE or block.size < sum(state.size for state in states):
            raise UsageError(f"the segment at {states[0].address:#x} of pool {pool} has changed since the checkpoint")
        for state in states:
            assert block is not None
            block.pool.remove(block)
            self._hand_out(block, state.size, state.size, exactly=True)
            block = block.next
        for state in states:
            if not state.allocated:
                self.free(state.address)
        return [state.address for state in states if state.allocated]

    # A state that came about elsewhere, for replaying what happened after it.

    def pool_for(self, id: PoolId, *, is_small: bool) -> BlockPool:
        """Return a pool, which is made if it does not exist."""
        if id == DEFAULT_POOL:
            return self._small if is_small else self._large
        private = self._private.get(id) or self.use_pool(id)
        return private.small if is_small else private.large

    def carve(self, block: Block, live: Sequence[tuple[int, int, int]]) -> None:
        """Cut a free block so that some blocks in it are in use.

        Parameters
        ----------
        live
            Address, size and requested size of each, by address, inside of `block` and apart from each other.
        """
        rest: Block | None = block
        for address, size, requested_size in live:
            assert rest is not None
            rest = self._take_at(rest, address, size, requested_size, exactly=True).next

    def allocate_at(self, address: int, size: int, requested_size: int) -> bool:
        """Hand out the block at an address, if that is free and has `size` bytes; return whether it is."""
        if self._by_address is None:
            blocks = [block for pool in self._all_pools() for block in pool.free_blocks()]
            self._by_address = sorted(blocks, key=lambda block: block.address)
            for pool in self._all_pools():
                pool.by_address = self._by_address
        index = bisect_right(self._by_address, address, key=lambda block: block.address) - 1
        if index < 0 or address + size > self._by_address[index].address + self._by_address[index].size:
            return False
        self._take_at(self._by_address[index], address, size, requested_size, exactly=False)
        return True

    def _take_at(self, block: Block, address: int, size: int, requested_size: int, *, exactly: bool) -> Block:
        block.pool.remove(block)
        if block.address < address:
            self._split(block, address - block.address)
            front, after = block, block.next
            assert after is not None
            block.pool.remove(after)
            front.pool.add(front)
            if not front.pool.expandable:
                self.statistics.inactive_split_changed(front.pool.level, 1, front.size)
            block = after
        self._hand_out(block, size, requested_size, exactly=exactly)
        return block

    # How it is done.

    def _redirected(self, size: int, stream: int) -> BlockPool:
        """Return the pool for a request while some are redirected; the last redirection that applies counts."""
        for private, applies_to in reversed(self._redirections):
            if applies_to(stream):
                return private.small if size <= SMALL_LIMIT else private.large
        return self._small if size <= SMALL_LIMIT else self._large

    def _take_otherwise(self, pool: BlockPool, size: int, stream: int) -> Block:
        """Return a block that is in no list, when no cached one fits."""
        segments = self.segments
        block = None
        if self.free_memory_callbacks and self._call_free_memory_callbacks():
            block = pool.take(size, stream)
        if block is None:
            if pool.collects_garbage:
                segments.collect_garbage(self._large)
            block = segments.new(pool, size, stream)
        if block is None and pool.id == DEFAULT_POOL:
            block = self._take_from_spare_pool(size, stream)
        if block is None and segments.release_oversize(pool, size, stream):
            block = segments.new(pool, size, stream)
        if block is None and not self._redirections:
            self.release_cached(DEFAULT_POOL)
            self.statistics.num_alloc_retries += 1
            block = segments.new(pool, size, stream)
        if block is None:
            raise self._out_of_memory(pool, size, stream)
        return block

    def _call_free_memory_callbacks(self) -> bool:
        with self._outside():
            return any([callback() for callback in self.free_memory_callbacks])

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
            self.statistics.inactive_split_changed(pool.level, -1, -block.size)
        self._active[block.address] = block
        block.state = ALLOCATED
        block.requested_size = requested_size
        block.stack = self._journal.stack
        self.statistics.block_allocated(pool.level, block.size, requested_size)
        if self._journal.active:
            self._journal.block(Kind.BLOCK_ALLOC, block, block.stack)
        return block.address

    def _split(self, block: Block, size: int) -> None:
        """Cut a block that is in no list to `size` bytes; the rest is free."""
        pool, rest, following = block.pool, block.size - size, block.next
        # Like PyTorch, show free memory with the requested size of its last owner.
        tail = Block(block.address + size, rest, block.stream, pool, block.requested_size, block.expandable)
        was_split = block.previous is not None or following is not None
        tail.previous, tail.next = block, following
        if following is not None:
            following.previous = tail
        block.next = tail
        block.size = size
        pool.add(tail)
        if pool.expandable:
            return
        if was_split:
            self.statistics.inactive_split_changed(pool.level, 0, -size)
        else:
            self.statistics.inactive_split_changed(pool.level, 1, rest)

    def _record_events(self, block: Block, streams: list[int]) -> None:
        """Let a freed block wait for what is on these streams now.

        Raises
        ------
        CudatoolError
            One of them was destroyed. The block is never handed out again: nothing tells when that stream is done.
        """
        try:
            tokens = [self._provider.record_event(stream) for stream in streams]
        except CudatoolError:
            raise
        except BaseException:  # Ctrl-C: the next request tries again
            self._deferred.append(block)
            raise
        block.stream_uses = None
        block.outstanding_events = len(tokens)
        for stream, token in zip(streams, tokens, strict=True):
            self._pending.setdefault(stream, deque()).append((token, block))

    def _free_blocks_behind(self, stream: int, reuse: CaptureReuse) -> None:
        """Free the pending blocks of a captured stream that the graph has no use for from here on."""
        for block in reuse.take_reusable(stream):
            self._deferred.remove(block)
            block.stream_uses = None
            self._complete_free(block)

    def _record_deferred_events(self) -> None:
        if self._capture_reuse is not None:
            self._capture_reuse.clear()
        while self._deferred:  # an error leaves the others there
            block = self._deferred.popleft()
            assert block.stream_uses is not None
            streams = [stream for stream, while_captured in block.stream_uses.items() if not while_captured]
            self._record_events(block, streams)
            if not streams:
                self._complete_free(block)

    def free_passed_blocks(self) -> None:
        """Free the pending blocks whose events have passed."""
        if self._deferred:
            self._record_deferred_events()
        for stream, queue in list(self._pending.items()):
            while queue and self._provider.event_passed(queue[0][0]):
                self._event_over(queue.popleft()[1])
            if not queue:
                del self._pending[stream]

    def _free_pending_blocks(self, pool: PoolId | None = None) -> None:
        """Wait until no other stream uses a freed block (of one pool)."""
        self.statistics.num_sync_all_streams += 1
        self._record_deferred_events()
        for stream, queue in list(self._pending.items()):
            for entry in [entry for entry in queue if pool is None or entry[1].pool.id == pool]:
                token, block = entry
                self._provider.synchronize_event(token)
                queue.remove(entry)  # not before: the wait may be interrupted (Ctrl-C), and the block is pending still
                self._event_over(block)
            if not queue:
                del self._pending[stream]

    def _event_over(self, block: Block) -> None:
        block.outstanding_events -= 1
        if block.outstanding_events == 0:
            self._complete_free(block)

    def _complete_free(self, block: Block) -> None:
        self.statistics.pending_block_freed(block.pool.level, block.size, block.requested_size)
        self._merge(block)

    def _merge(self, block: Block) -> None:
        """Put an unused block among the free ones, as one with its free neighbours."""
        if self._journal.active:
            self._journal.block(Kind.BLOCK_FREE_COMPLETED, block, 0)
        del self._active[block.address]
        pool = block.pool
        blocks_merged = bytes_merged = 0
        before, after = block.previous, block.next
        if before is not None and before.state is FREE:
            pool.remove(before)
            blocks_merged, bytes_merged = 1, before.size
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.state is FREE:
            pool.remove(after)
            blocks_merged, bytes_merged = blocks_merged + 1, bytes_merged + after.size
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        pool.add(block)
        if pool.expandable:
            return
        if block.previous is not None or block.next is not None:
            self.statistics.inactive_split_changed(pool.level, 1 - blocks_merged, block.size - bytes_merged)
        elif blocks_merged:
            self.statistics.inactive_split_changed(pool.level, -blocks_merged, -bytes_merged)

    def _out_of_memory(self, pool: BlockPool, size: int, stream: int) -> OutOfMemoryError:
        free, total = self._provider.memory_info()
        self.statistics.num_ooms += 1
        if self._journal.active:
            self._journal.out_of_memory(size, stream, pool, free)
        return out_of_memory_error(
            wanted=segment_size(size, self._settings),
            device=self._device,
            free=free,
            total=total,
            allowed=self.segments.allowed,
            statistics=self.statistics,
            settings=self._settings,
            pool=pool,
            stream=stream,
            blocks=self.segments.blocks(),
            processes=self._processes(),
        )

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
                level=level,
                settings=self._settings,
            )
            for level in (self.statistics.small_pool, self.statistics.large_pool)
        ]
        for pool in pools:
            pool.by_address = self._by_address
            self._set_garbage_collection(pool)
        return pools[0], pools[1]

    def _set_garbage_collection(self, pool: BlockPool) -> None:
        pool.collects_garbage = self.segments.allowed is not None and self._settings.garbage_collection_threshold > 0.0

    def _all_pools(self) -> list[BlockPool]:
        return [self._small, self._large, *(pool for p in self._private.values() for pool in (p.small, p.large))]
