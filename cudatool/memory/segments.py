"""The memory that the allocator holds: segments of a fixed size, and expandable ones.

An expandable segment is one range of addresses for each stream and pool, larger than the device's memory. A request
that finds no free block maps pages at the lowest free addresses where it fits, so that what is free at the end of the
range grows instead of a new segment being made. Its blocks are free, in use, or unmapped; neighbours of the same kind
are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

from cudatool.errors import OutOfMemoryError
from cudatool.memory.blocks import (
    FREE,
    SMALL_PAGE,
    UNMAPPED,
    Block,
    BlockPool,
    ExpandableSegment,
    segment_size,
)
from cudatool.memory.journal import Journal
from cudatool.memory.settings import UNLIMITED, Settings
from cudatool.memory.statistics import AllocatorStatistics
from cudatool.trace.events import Kind

__all__ = ["Segments"]


class Segments:
    """What was had from the providers, for all pools of one device.

    Parameters
    ----------
    total_memory
        The device's memory in bytes. It bounds the addresses of an expandable segment.
    outside
        Lets other threads use the allocator; around a provider's ``allocate``, if the settings want that.
    """

    def __init__(
        self,
        *,
        active: dict[int, Block],
        pools: Callable[[], list[BlockPool]],
        settings: Settings,
        statistics: AllocatorStatistics,
        journal: Journal,
        total_memory: int,
        outside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._active = active  # every block in use, by address
        self._pools = pools
        self._settings = settings
        self._statistics = statistics
        self._journal = journal
        self._total_memory = total_memory
        self._around_allocate = outside if settings.release_lock_on_cudamalloc else nullcontext
        self._fixed: dict[int, int] = {}  # address -> stack of its allocation
        self.allowed: int | None = None  # bytes that may be reserved, if that is limited

    def new(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Return a block of at least `size` bytes in new memory, which is in no list; None if there is not enough."""
        wanted = segment_size(size, self._settings)
        if self.allowed is not None and self._statistics.all.reserved_bytes.current + wanted > self.allowed:
            return None
        if pool.expandable:
            return self._expand(pool, size, stream)
        try:
            with self._around_allocate():
                address = pool.provider.allocate(wanted, stream)
        except OutOfMemoryError:
            return None
        block = Block(address, wanted, stream, pool)
        self._add(block)
        return block

    def _add(self, block: Block) -> None:
        pool = block.pool
        self._fixed[block.address] = self._journal.stack
        pool.reserved += block.size
        self._statistics.segment_allocated(pool.level, block.size)
        if self._journal.active:
            self._journal.segment(Kind.SEGMENT_ALLOC, block.address, block.size, block.stream, pool)

    def adopt(self, pool: BlockPool, address: int, size: int, stream: int) -> Block:
        """Take over a segment that exists; return it as a free block."""
        block = Block(address, size, stream, pool)
        self._add(block)
        pool.add(block)
        return block

    def adopt_range(self, pool: BlockPool, address: int, size: int, stream: int) -> None:
        """Take over the addresses of an expandable segment that exists."""
        page = SMALL_PAGE if pool.is_small else self._settings.large_segment_size
        pool.add_unmapped(Block(address, size, stream, pool, 0, ExpandableSegment(address, size, page, 0)))

    def adopt_pages(self, pool: BlockPool, address: int, size: int, stream: int) -> Block | None:
        """Take over mapped pages; return the free block they are in, or None if no expandable segment has them."""
        for block in pool.unmapped.get(stream, ()):
            if block.address <= address and address + size <= block.address + block.size:
                if block.address < address:
                    rest = Block(address, block.address + block.size - address, stream, pool, 0, block.expandable)
                    _insert_after(block, rest)
                    block.size = address - block.address
                    pool.add_unmapped(rest)
                    block = rest
                return block if self._map(block, size) else None
        return None

    def release(self, block: Block) -> None:
        """Give a free block that is a whole segment back to its provider."""
        pool = block.pool
        pool.provider.free(block.address)
        pool.remove(block)
        del self._fixed[block.address]
        pool.reserved -= block.size
        self._statistics.segment_freed(pool.level, block.size)
        if self._journal.active:
            self._journal.segment(Kind.SEGMENT_FREE, block.address, block.size, block.stream, pool)

    def release_free(self, pool: BlockPool, keep: int = 0) -> None:
        """Give back whatever of a pool is wholly free: segments and pages. Stop when only `keep` bytes are reserved."""
        reserved = self._statistics.all.reserved_bytes
        for block in pool.free_blocks():
            if reserved.current <= keep:
                return
            if block.expandable is not None:
                self._unmap(block)
            elif block.previous is None and block.next is None:
                self.release(block)

    def releasable(self, pool: BlockPool) -> Iterator[tuple[int, int]]:
        """Yield address and size of what :meth:`release_free` would give back, in its order."""
        for block in pool.free_blocks():
            if block.expandable is not None:
                start, end = _whole_pages(block, block.expandable)
                if start < end:
                    yield start, end - start
            elif block.previous is None and block.next is None:
                yield block.address, block.size

    def is_releasable(self, block: Block) -> bool:
        """Return whether a free block has anything that :meth:`release_free` would give back."""
        if block.expandable is not None:
            start, end = _whole_pages(block, block.expandable)
            return start < end
        return block.previous is None and block.next is None

    def release_oversize(self, pool: BlockPool, size: int, stream: int) -> bool:
        """Release free segments that may not be split, until `size` bytes are; return whether there were so many."""
        blocks, enough = self.oversize(pool, size, stream)
        for block in blocks:
            self.release(block)
        return enough

    def oversize(self, pool: BlockPool, size: int, stream: int) -> tuple[list[Block], bool]:
        """Return what :meth:`release_oversize` would release, and what it would return."""
        limit = self._settings.max_split_size
        if limit == UNLIMITED or pool.expandable:
            return [], False
        block = pool.smallest(size, stream)  # did not fit, so it is oversize
        if block is not None:
            return [block], True
        found: list[Block] = []
        released = 0
        for block in pool.largest_first(stream):
            if released >= size or block.size < limit:
                break
            released += block.size
            found.append(block)
        return found, released >= size

    def collect_garbage(self, pool: BlockPool) -> None:
        """Release segments of a pool that have been idle for longer than the average, until enough is free."""
        for block in self.garbage(pool):
            self.release(block)

    def garbage(self, pool: BlockPool) -> list[Block]:
        """Return what :meth:`collect_garbage` would release."""
        assert self.allowed is not None
        threshold = int(self._settings.garbage_collection_threshold * self.allowed)
        excess = self._statistics.all.reserved_bytes.current - threshold
        found: list[Block] = []
        if excess <= 0:
            return found
        ages = {block: pool.clock - block.pool_clock for block in pool.whole_segments()}
        while excess > 0 and ages:
            # The oldest is at least of average age, so that every round releases something.
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                excess -= block.size
                del ages[block]
                found.append(block)
        return found

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks that have memory."""
        yield from self._active.values()
        for pool in self._pools():
            yield from pool.free_blocks()

    def heads(self) -> list[Block]:
        """Return the first block of every segment, or of every run of mapped pages, by address."""
        found = [block for block in self.blocks() if block.previous is None or block.previous.state is UNMAPPED]
        return sorted(found, key=_block_address)

    def stack_of(self, head: Block) -> int:
        """Return where a segment was allocated. Like PyTorch, know that of the first run of pages only."""
        if head.expandable is None:
            return self._fixed[head.address]
        return head.expandable.stack if head.previous is None else 0

    # Expandable segments.

    def _expand(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        block = self._room(pool, size, stream)
        if block.state is UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            # Mapping makes one block of both.
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _room(self, pool: BlockPool, size: int, stream: int) -> Block:
        """Return the first of some neighbours, free or unmapped, that have `size` bytes at the lowest addresses."""
        for block in pool.unmapped.get(stream, ()):
            first = block
            if block.previous is not None and block.previous.state is FREE:
                first = block.previous
            room, part = 0, first
            while part.state is FREE or part.state is UNMAPPED:
                room += part.size
                if room >= size:
                    return first
                if part.next is None:
                    break
                part = part.next
        page = SMALL_PAGE if pool.is_small else self._settings.large_segment_size
        # More than there is memory, so that a range can end in pages that were unmapped earlier in it.
        total = -(-(self._total_memory + self._total_memory // 8) // page) * page
        start = pool.provider.reserve(total, stream)
        segment = ExpandableSegment(start, total, page, 0)
        whole = Block(start, total, stream, pool, 0, segment)
        pool.add_unmapped(whole)
        return whole

    def _map(self, block: Block, size: int) -> bool:
        """Map pages for the first `size` bytes of an unmapped block, which becomes one with its free neighbours."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        size = -(-size // segment.page_size) * segment.page_size
        address = block.address
        try:
            pool.provider.map(address, size, segment.page_size)
        except OutOfMemoryError:
            return False
        pool.remove_unmapped(block)
        block.state = FREE
        if size < block.size:
            rest = Block(address + size, block.size - size, block.stream, pool, 0, segment)
            _insert_after(block, rest)
            pool.add_unmapped(rest)
            block.size = size
        _absorb_neighbours(block)
        pool.add(block)
        pool.reserved += size
        self._statistics.pages_mapped(pool.level, size)
        if self._journal.active:
            self._journal.segment(Kind.SEGMENT_MAP, address, size, block.stream, pool)
        if block.previous is None and not segment.stack:
            segment.stack = self._journal.stack
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block, and give its segment back if that was all."""
        segment, pool = block.expandable, block.pool
        assert segment is not None
        start, end = _whole_pages(block, segment)
        if start >= end:
            return
        pool.provider.unmap(start, end - start, segment.page_size)
        pool.remove(block)
        if start > block.address:
            before = Block(block.address, start - block.address, block.stream, pool, 0, segment)
            before.previous, before.next = block.previous, block
            if before.previous is not None:
                before.previous.next = before
            block.previous = before
            pool.add(before)
        if end < block.address + block.size:
            after = Block(end, block.address + block.size - end, block.stream, pool, 0, segment)
            _insert_after(block, after)
            pool.add(after)
        block.address, block.size, block.state = start, end - start, UNMAPPED
        _absorb_neighbours(block)
        pool.add_unmapped(block)
        pool.reserved -= end - start
        self._statistics.pages_unmapped(pool.level, end - start)
        if self._journal.active:
            self._journal.segment(Kind.SEGMENT_UNMAP, start, end - start, block.stream, pool)
        if block.size == segment.size:
            pool.provider.unreserve(segment.address, segment.size)
            pool.remove_unmapped(block)


def _whole_pages(block: Block, segment: ExpandableSegment) -> tuple[int, int]:
    """Return where the pages begin and end that a block fills; the end may be in front of the beginning."""
    page, offset = segment.page_size, block.address - segment.address
    return segment.address + -(-offset // page) * page, segment.address + (offset + block.size) // page * page


def _insert_after(block: Block, new: Block) -> None:
    new.previous, new.next = block, block.next
    if block.next is not None:
        block.next.previous = new
    block.next = new


def _absorb_neighbours(block: Block) -> None:
    """Make one block of it and of its neighbours in the same state, FREE or UNMAPPED. It is in no list."""
    for neighbour in (block.previous, block.next):
        if neighbour is None or neighbour.state is not block.state:
            continue
        if neighbour.state is FREE:
            neighbour.pool.remove(neighbour)
        else:
            neighbour.pool.remove_unmapped(neighbour)
        block.size += neighbour.size
        if neighbour is block.previous:
            block.address = neighbour.address
            block.previous = neighbour.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.previous = block


def _block_address(block: Block) -> int:
    return block.address
