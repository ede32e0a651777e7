"""What the allocator's policy is made of: sizes, blocks, and the pools of free ones.

All numbers and rules are those of PyTorch's CUDACachingAllocator.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum
from typing import Final

from cudatool.memory.provider import SegmentProvider
from cudatool.memory.settings import UNLIMITED, Settings
from cudatool.memory.statistics import PoolStatistics

__all__ = [
    "ALLOCATED",
    "FREE",
    "MIN_BLOCK_SIZE",
    "PENDING",
    "SMALL_LIMIT",
    "SMALL_PAGE",
    "UNMAPPED",
    "Block",
    "BlockPool",
    "ExpandableSegment",
    "PoolId",
    "State",
    "round_size",
    "segment_size",
]

MIN_BLOCK_SIZE: Final = 512
"""Every block is a multiple of this many bytes."""
SMALL_LIMIT: Final = 1024 * 1024
"""Blocks up to this size live in the small pool."""
SMALL_PAGE: Final = 2 * 1024 * 1024
"""Segments of the small pool, and the pages of its expandable segments."""
_LARGE_SEGMENT_LIMIT: Final = 10 * 1024 * 1024  # larger requests get a segment of their own size
_SEGMENT_STEP: Final = 2 * 1024 * 1024
_FEW: Final = 8  # sizes without blocks that a search may pass before it clears them away

PoolId = tuple[int, int]
"""Names a pool: ``(0, 0)`` is the default one, ``(n, 0)`` and ``(0, n)`` are private."""


def round_size(size: int, settings: Settings) -> int:
    """Return the size of the block that serves a request of `size` bytes."""
    if size < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    size_class = size.bit_length() - 21  # 0 below 2 MiB
    divisions = settings.roundup_power2_divisions[min(max(size_class, 0), 15)]
    if divisions > 1 and size > MIN_BLOCK_SIZE * divisions:
        step = (1 << (size.bit_length() - 1)) // divisions
        return -(-size // step) * step
    return -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE


def segment_size(size: int, settings: Settings) -> int:
    """Return the size of the segment that is allocated for a block of `size` bytes."""
    if size <= SMALL_LIMIT:
        return SMALL_PAGE
    if size < _LARGE_SEGMENT_LIMIT:
        return settings.large_segment_size
    return -(-size // _SEGMENT_STEP) * _SEGMENT_STEP


class State(Enum):
    """What a block is doing, as snapshots call it."""

    FREE = "inactive"
    ALLOCATED = "active_allocated"
    PENDING = "active_pending_free"
    UNMAPPED = "unmapped"


# Plain names, because looking a member up in its enumeration takes as long as the rest of a comparison.
FREE: Final = State.FREE
"""The block is not in use."""
ALLOCATED: Final = State.ALLOCATED
"""The program uses it."""
PENDING: Final = State.PENDING
"""Freed by the program, but another stream may still be using it."""
UNMAPPED: Final = State.UNMAPPED
"""Addresses of an expandable segment that no memory is mapped to."""


class ExpandableSegment:
    """A range of addresses, larger than the device's memory, that gets memory page by page.

    Attributes
    ----------
    address, size
        The whole range.
    page_size
        Memory comes and goes in pages of this many bytes.
    stack
        Where its first page was mapped.
    """

    __slots__ = ("address", "page_size", "size", "stack")

    def __init__(self, address: int, size: int, page_size: int, stack: int) -> None:
        self.address = address
        self.size = size
        self.page_size = page_size
        self.stack = stack


class Block:
    """A contiguous part of a segment. The blocks of a segment are linked in the order of their addresses."""

    __slots__ = (
        "address",
        "expandable",
        "home",
        "next",
        "outstanding_events",
        "pool",
        "pool_clock",
        "previous",
        "requested_size",
        "size",
        "stack",
        "state",
        "stream",
        "stream_uses",
    )

    def __init__(
        self,
        address: int,
        size: int,
        stream: int,
        pool: BlockPool,
        requested_size: int = 0,
        expandable: ExpandableSegment | None = None,
    ) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.requested_size = requested_size  # of its last allocation, also once it is free
        self.expandable = expandable
        self.state = FREE
        self.previous: Block | None = None
        self.next: Block | None = None
        self.stream_uses: dict[int, bool] | None = None  # other streams, as recorded; true: only while capturing
        self.outstanding_events = 0  # while pending: how many must pass
        self.stack = 0  # while allocated or pending: where it was allocated
        self.home: _SameSize | None = None  # while free: the list it is in
        self.pool_clock = 0  # while free: the pool's clock when it became so


class _SameSize:
    """Free blocks of one stream and size, by address."""

    __slots__ = ("addresses", "blocks")

    def __init__(self, block: Block) -> None:
        self.addresses = [block.address]
        self.blocks = [block]

    def add(self, block: Block) -> None:
        address = block.address
        if not self.addresses or address > self.addresses[-1]:
            self.addresses.append(address)
            self.blocks.append(block)
        else:
            index = bisect_left(self.addresses, address)
            self.addresses.insert(index, address)
            self.blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        if len(self.blocks) == 1:
            self.addresses.pop()
            self.blocks.pop()
        else:
            index = bisect_left(self.addresses, block.address)
            del self.addresses[index]
            del self.blocks[index]


class _FreeBlocks:
    """The free blocks of one stream, by size. Sizes that have run out stay until a search stumbles on them."""

    __slots__ = ("by_size", "sizes")

    def __init__(self) -> None:
        self.sizes: list[int] = []  # sorted
        self.by_size: dict[int, _SameSize] = {}

    def smallest(self, size: int) -> Block | None:
        """Return the smallest block with at least `size` bytes, at the lowest address."""
        index = self._filled(bisect_left(self.sizes, size))
        return self.by_size[self.sizes[index]].blocks[0] if index < len(self.sizes) else None

    def least_room(self, best: Block) -> Block:
        """Return the best fit in expandable segments, where a block counts with what it can grow by.

        The search begins at `best`, the smallest block that is large enough, and ends at the first larger block that
        has no less room.
        """
        room = _room(best)
        index = self._filled(bisect_left(self.sizes, best.size))
        while index < len(self.sizes):
            for block in self.by_size[self.sizes[index]].blocks:
                if block is not best:
                    larger = _room(block)
                    if larger >= room:
                        return best
                    best, room = block, larger
            index = self._filled(index + 1)
        return best

    def _filled(self, index: int) -> int:
        """Return the index of the first size from `index` on that has blocks; many on the way that have none go."""
        sizes, start = self.sizes, index
        while index < len(sizes) and not self.by_size[sizes[index]].blocks:
            index += 1
        if index - start <= _FEW:
            return index
        for empty in sizes[start:index]:
            del self.by_size[empty]
        del sizes[start:index]
        return start

    def at_least(self, size: int) -> Iterator[Block]:
        """Yield the blocks with at least `size` bytes, by size and address."""
        for larger in self.sizes[bisect_left(self.sizes, size) :]:
            yield from self.by_size[larger].blocks


class BlockPool:
    """The blocks of one size range, and the free ones among them by stream and best fit.

    The best fit is the smallest free block of the stream that is large enough, at the lowest address. In steady state
    programs ask for sizes they have used before, so that it is found without a search.

    Attributes
    ----------
    id
        The pool it is a part of.
    provider
        Where its segments come from.
    expandable
        Whether they are expandable.
    level
        The statistics that count its blocks.
    reserved
        Bytes that it has from the provider.
    by_address
        The free blocks of all pools in the order of their addresses, if someone looks for addresses; else None.
    """

    __slots__ = (
        "by_address",
        "clock",
        "collects_garbage",
        "expandable",
        "free",
        "id",
        "is_small",
        "level",
        "max_split_size",
        "max_unsplit_rest",
        "max_unsplit_waste",
        "provider",
        "reserved",
        "split_limit",
        "unmapped",
    )

    def __init__(
        self,
        id: PoolId,
        provider: SegmentProvider,
        *,
        is_small: bool,
        expandable: bool,
        splits: bool = True,
        level: PoolStatistics,
        settings: Settings,
    ) -> None:
        self.id = id
        self.provider = provider
        self.is_small = is_small
        self.expandable = expandable
        self.level = level
        self.free: dict[int, _FreeBlocks] = {}
        self.by_address: list[Block] | None = None
        self.unmapped: dict[int, list[Block]] = {}  # by stream, in the order of their addresses
        self.reserved = 0
        self.collects_garbage = False
        self.clock = 0  # look-ups since garbage is collected: how long a block has been free is measured in these
        self.max_split_size = settings.max_split_size
        # A block is split if more than this remains, and if the request is below the limit.
        self.max_unsplit_rest = MIN_BLOCK_SIZE - 1 if is_small or expandable else SMALL_LIMIT
        self.split_limit = 0 if not splits else UNLIMITED if is_small or expandable else settings.max_split_size
        self.max_unsplit_waste = settings.max_non_split_rounding_size  # the same for blocks too large to be split

    def add(self, block: Block) -> None:
        """Put a block among the free ones."""
        block.state = FREE
        block.pool_clock = self.clock
        free = self.free.get(block.stream)
        if free is None:
            free = self.free[block.stream] = _FreeBlocks()
        home = free.by_size.get(block.size)
        if home is None:
            home = free.by_size[block.size] = _SameSize(block)
            insort(free.sizes, block.size)
        else:
            home.add(block)
        block.home = home
        if self.by_address is not None:
            insort(self.by_address, block, key=_address)

    def remove(self, block: Block) -> None:
        """Take a certain block out of the free ones."""
        assert block.home is not None
        block.home.remove(block)
        block.home = None
        if self.by_address is not None:
            index = bisect_left(self.by_address, block.address, key=_address)
            while self.by_address[index] is not block:  # blocks of one address are in a replay of what never was
                index += 1
            del self.by_address[index]

    def take(self, size: int, stream: int) -> Block | None:
        """Take out the block that :meth:`fit` returns."""
        if self.collects_garbage:
            self.clock += 1
        block = self.fit(size, stream)
        if block is not None:
            self.remove(block)
        return block

    def fit(self, size: int, stream: int) -> Block | None:
        """Return the smallest free block of `stream` with at least `size` bytes, unless its own size forbids it."""
        free = self.free.get(stream)
        if free is None:
            return None
        same = free.by_size.get(size)
        block = same.blocks[0] if same is not None and same.blocks else free.smallest(size)
        if block is None:
            return None
        if self.expandable:
            block = free.least_room(block)
        limit = self.max_split_size
        if block.size >= limit and (size < limit or block.size >= size + self.max_unsplit_waste):
            return None  # it may not be split, and too much of it would be wasted
        return block

    def smallest(self, size: int, stream: int) -> Block | None:
        """Return the smallest free block of `stream` with at least `size` bytes."""
        free = self.free.get(stream)
        return None if free is None else free.smallest(size)

    def largest_first(self, stream: int) -> Iterator[Block]:
        """Yield the free blocks of `stream`, the largest first, and of one size the highest address first."""
        free = self.free.get(stream)
        if free is not None:
            for size in reversed(free.sizes):
                yield from reversed(free.by_size[size].blocks)

    def free_blocks(self, size: int = 0) -> list[Block]:
        """Return the free blocks with at least `size` bytes, by stream, size, address."""
        return [block for stream in sorted(self.free) for block in self.free[stream].at_least(size)]

    def whole_segments(self) -> list[Block]:
        """Return the free blocks that are whole segments, by stream, size, address."""
        return [
            block
            for block in self.free_blocks()
            if block.previous is None and block.next is None and block.expandable is None
        ]

    def add_unmapped(self, block: Block) -> None:
        """Put a block among those that have no memory."""
        block.state = UNMAPPED
        insort(self.unmapped.setdefault(block.stream, []), block, key=_address)

    def remove_unmapped(self, block: Block) -> None:
        """Take a block out of those that have no memory."""
        self.unmapped[block.stream].remove(block)


def _address(block: Block) -> int:
    return block.address


def _room(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state is UNMAPPED else 0)
