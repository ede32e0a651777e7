"""What the allocator's policy is made of: sizes, blocks, and the pools of free ones.

All numbers and rules are those of PyTorch's CUDACachingAllocator.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum
from typing import Final

from cudatool.memory.settings import Settings
from cudatool.memory.statistics import PoolStatistics

__all__ = [
    "ALLOCATED",
    "FREE",
    "MIN_BLOCK_SIZE",
    "PENDING",
    "SMALL_LIMIT",
    "Block",
    "BlockPool",
    "State",
    "round_size",
    "segment_size",
]

MIN_BLOCK_SIZE: Final = 512
"""Every block is a multiple of this many bytes."""
SMALL_LIMIT: Final = 1024 * 1024
"""Blocks up to this size live in the small pool."""
_SMALL_SEGMENT: Final = 2 * 1024 * 1024
_LARGE_SEGMENT: Final = 20 * 1024 * 1024
_LARGE_SEGMENT_LIMIT: Final = 10 * 1024 * 1024  # larger requests get a segment of their own size
_SEGMENT_STEP: Final = 2 * 1024 * 1024

_ADDRESS_BITS: Final = 64
_ADDRESS_MASK: Final = (1 << _ADDRESS_BITS) - 1


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


def segment_size(size: int) -> int:
    """Return the size of the segment that is allocated for a block of `size` bytes."""
    if size <= SMALL_LIMIT:
        return _SMALL_SEGMENT
    if size < _LARGE_SEGMENT_LIMIT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_STEP) * _SEGMENT_STEP


class State(Enum):
    """What a block is doing, as snapshots call it."""

    FREE = "inactive"
    ALLOCATED = "active_allocated"
    PENDING = "active_pending_free"


# Plain names, because looking a member up in its enumeration takes as long as the rest of a comparison.
FREE: Final = State.FREE
"""Nobody uses the block."""
ALLOCATED: Final = State.ALLOCATED
"""The program uses it."""
PENDING: Final = State.PENDING
"""Freed by the program, but another stream may still be using it."""


class Block:
    """A contiguous part of a segment. The blocks of a segment are linked in the order of their addresses."""

    __slots__ = (
        "address",
        "key",
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

    state: State
    outstanding_events: int  # while pending: how many must pass
    stack: int  # while allocated or pending: where it was allocated
    key: int  # while free: its place among the free ones
    pool_clock: int  # while free: the pool's clock when it became so

    def __init__(self, address: int, size: int, stream: int, pool: BlockPool, requested_size: int = 0) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.pool = pool
        self.requested_size = requested_size  # of its last allocation, also once it is free
        self.previous: Block | None = None
        self.next: Block | None = None
        self.stream_uses: dict[int, None] | None = None  # other streams that use it, in the order they were recorded


class BlockPool:
    """The free blocks of one size range, found by stream and best fit.

    Free blocks are kept for each stream as one sorted list of integers, size in the upper half and address in the
    lower: the first entry not below ``size << 64`` is the smallest block that fits, at the lowest address.
    """

    __slots__ = (
        "blocks",
        "clock",
        "collects_garbage",
        "free",
        "is_small",
        "levels",
        "max_split_size",
        "max_unsplit_rest",
        "max_unsplit_waste",
    )

    def __init__(
        self, *, is_small: bool, levels: tuple[PoolStatistics, ...], blocks: dict[int, Block], settings: Settings
    ) -> None:
        self.is_small = is_small
        self.levels = levels  # the statistics that count its blocks
        self.blocks = blocks  # all blocks of the allocator by address
        self.free: dict[int, list[int]] = {}
        self.collects_garbage = False
        self.clock = 0  # look-ups since garbage is collected: how long a block has been free is measured in these
        self.max_split_size = settings.max_split_size
        self.max_unsplit_rest = MIN_BLOCK_SIZE - 1 if is_small else SMALL_LIMIT  # what may be left on a block
        self.max_unsplit_waste = settings.max_non_split_rounding_size  # the same for blocks too large to be split

    def add(self, block: Block) -> None:
        """Put a block among the free ones."""
        block.state = FREE
        block.pool_clock = self.clock
        block.key = key = block.size << _ADDRESS_BITS | block.address
        keys = self.free.get(block.stream)
        if keys is None:
            self.free[block.stream] = [key]
        else:
            insort(keys, key)

    def remove(self, block: Block) -> None:
        """Take a certain block out of the free ones."""
        keys = self.free[block.stream]
        del keys[bisect_left(keys, block.key)]

    def take(self, size: int, stream: int) -> Block | None:
        """Take out the smallest free block of `stream` with at least `size` bytes, unless its own size forbids it."""
        if self.collects_garbage:
            self.clock += 1
        keys = self.free.get(stream)
        if not keys:
            return None
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index == len(keys):
            return None
        block = self.blocks[keys[index] & _ADDRESS_MASK]
        limit = self.max_split_size
        if block.size >= limit and (size < limit or block.size >= size + self.max_unsplit_waste):
            return None  # it may not be split, and too much of it would be wasted
        del keys[index]
        return block

    def smallest(self, size: int, stream: int) -> Block | None:
        """Return the smallest free block of `stream` with at least `size` bytes."""
        keys = self.free.get(stream, [])
        index = bisect_left(keys, size << _ADDRESS_BITS)
        return self.blocks[keys[index] & _ADDRESS_MASK] if index < len(keys) else None

    def largest(self, stream: int) -> Block | None:
        """Return the largest free block of `stream`."""
        keys = self.free.get(stream)
        return self.blocks[keys[-1] & _ADDRESS_MASK] if keys else None

    def whole_segments(self) -> Iterator[Block]:
        """Yield the free blocks that are whole segments, by stream, size, address. They may be released meanwhile."""
        for stream in sorted(self.free):
            for key in self.free[stream].copy():
                block = self.blocks[key & _ADDRESS_MASK]
                if block.previous is None and block.next is None:
                    yield block
