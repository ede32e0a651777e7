"""Counters of the caching allocator, with PyTorch's names (``torch.cuda.memory_stats``)."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["AllocatorStatistics", "Counter", "PoolStatistics"]


class Counter:
    """A level that goes up and down: how high it is, was at most, and how much was added in all."""

    __slots__ = ("allocated", "base", "current", "peak")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.allocated = 0
        self.base = 0  # the level when `allocated` was last reset; what was taken away since follows from it

    @property
    def freed(self) -> int:
        """How much was taken away in all."""
        return self.base + self.allocated - self.current

    def increase(self, amount: int) -> None:
        self.allocated += amount
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def decrease(self, amount: int) -> None:
        self.current -= amount

    def reset_peak(self) -> None:
        self.peak = self.current

    def reset_accumulated(self) -> None:
        self.allocated = 0
        self.base = self.current


class PoolStatistics:
    """The counters of one pool, or of all of them.

    A block is *allocated* until the program frees it, and *active* until no other stream can be using it either;
    in between it is *pending*. Nearly always nothing is pending and both are the same, so what is counted is
    `allocation` and `pending`, and :meth:`active` is made from them. Its peak needs no care while nothing is pending:
    then the peak of `allocation` is also one of `active`.
    """

    __slots__ = (
        "active_base",
        "active_bytes_base",
        "active_bytes_peak",
        "active_peak",
        "allocated_bytes",
        "allocation",
        "inactive_split",
        "inactive_split_bytes",
        "pending",
        "pending_bytes",
        "requested_bytes",
        "reserved_bytes",
        "segment",
    )

    def __init__(self) -> None:
        self.allocation = Counter()
        self.allocated_bytes = Counter()
        self.requested_bytes = Counter()
        self.segment = Counter()
        self.reserved_bytes = Counter()
        self.inactive_split = Counter()
        self.inactive_split_bytes = Counter()
        self.pending = self.pending_bytes = 0
        self.active_peak = self.active_bytes_peak = 0  # reached while something was pending
        self.active_base = self.active_bytes_base = 0

    def active(self) -> Counter:
        """Return the number of active blocks."""
        return _with_pending(self.allocation, self.pending, self.active_peak, self.active_base)

    def active_bytes(self) -> Counter:
        """Return the bytes of active blocks."""
        return _with_pending(self.allocated_bytes, self.pending_bytes, self.active_bytes_peak, self.active_bytes_base)

    # What every allocation comes by is written out rather than left to the counters.

    def block_allocated(self, size: int, requested_size: int) -> None:
        """Count a block handed out."""
        counter = self.allocation
        counter.allocated += 1
        counter.current += 1
        if counter.current > counter.peak:
            counter.peak = counter.current
        counter = self.allocated_bytes
        counter.allocated += size
        counter.current += size
        if counter.current > counter.peak:
            counter.peak = counter.current
        counter = self.requested_bytes
        counter.allocated += requested_size
        counter.current += requested_size
        if counter.current > counter.peak:
            counter.peak = counter.current
        if self.pending:
            self.active_peak = max(self.active_peak, self.allocation.current + self.pending)
            self.active_bytes_peak = max(self.active_bytes_peak, self.allocated_bytes.current + self.pending_bytes)

    def block_freed(self, size: int, requested_size: int) -> None:
        """Count a block that is free at once."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size
        self.requested_bytes.current -= requested_size

    def block_freed_later(self, size: int) -> None:
        """Count a block that the program has freed while another stream may be using it."""
        self.allocation.current -= 1
        self.allocated_bytes.current -= size
        self.pending += 1
        self.pending_bytes += size

    def pending_block_freed(self, size: int, requested_size: int) -> None:
        """Count a pending block that no stream uses any more."""
        self.pending -= 1
        self.pending_bytes -= size
        self.requested_bytes.current -= requested_size

    def inactive_split_changed(self, blocks: int, size: int) -> None:
        """Count a change in the free blocks that cannot be given back because they are parts of a segment."""
        counter = self.inactive_split
        counter.current += blocks
        if blocks > 0:
            counter.allocated += blocks
            if counter.current > counter.peak:
                counter.peak = counter.current
        counter = self.inactive_split_bytes
        counter.current += size
        if size > 0:
            counter.allocated += size
            if counter.current > counter.peak:
                counter.peak = counter.current

    def counters(self) -> Iterator[tuple[str, Counter]]:
        """Yield the counters under PyTorch's names."""
        yield "allocation", self.allocation
        yield "segment", self.segment
        yield "active", self.active()
        yield "inactive_split", self.inactive_split
        yield "allocated_bytes", self.allocated_bytes
        yield "reserved_bytes", self.reserved_bytes
        yield "active_bytes", self.active_bytes()
        yield "inactive_split_bytes", self.inactive_split_bytes
        yield "requested_bytes", self.requested_bytes

    def reset_peak(self) -> None:
        for _, counter in self.counters():
            counter.reset_peak()
        self.active_peak = self.allocation.current + self.pending
        self.active_bytes_peak = self.allocated_bytes.current + self.pending_bytes

    def reset_accumulated(self) -> None:
        for _, counter in self.counters():
            counter.reset_accumulated()
        self.active_base = self.allocation.current + self.pending
        self.active_bytes_base = self.allocated_bytes.current + self.pending_bytes


def _with_pending(allocated: Counter, pending: int, peak: int, base: int) -> Counter:
    counter = Counter()
    counter.current = allocated.current + pending
    counter.peak = max(allocated.peak, peak)
    counter.allocated = allocated.allocated
    counter.base = base
    return counter


class AllocatorStatistics:
    """All counters of one device's allocator.

    The methods that count take the statistics of the pool that a block belongs to.
    """

    def __init__(self, max_split_size: int) -> None:
        self.all = PoolStatistics()
        self.small_pool = PoolStatistics()
        self.large_pool = PoolStatistics()
        self.oversize_allocations = Counter()  # of blocks that may not be split
        self.oversize_segments = Counter()
        self.num_alloc_retries = 0  # segments asked for again after the cache was emptied
        self.num_ooms = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.max_split_size = max_split_size

    def block_allocated(self, level: PoolStatistics, size: int, requested_size: int) -> None:
        """Count a block handed out."""
        if size >= self.max_split_size:
            self.oversize_allocations.increase(1)
        level.block_allocated(size, requested_size)
        self.all.block_allocated(size, requested_size)

    def block_freed(self, level: PoolStatistics, size: int, requested_size: int) -> None:
        """Count a block that is free at once."""
        if size >= self.max_split_size:
            self.oversize_allocations.decrease(1)
        level.block_freed(size, requested_size)
        self.all.block_freed(size, requested_size)

    def block_freed_later(self, level: PoolStatistics, size: int) -> None:
        """Count a block that the program has freed while another stream may be using it."""
        if size >= self.max_split_size:
            self.oversize_allocations.decrease(1)
        level.block_freed_later(size)
        self.all.block_freed_later(size)

    def pending_block_freed(self, level: PoolStatistics, size: int, requested_size: int) -> None:
        """Count a pending block that no stream uses any more."""
        level.pending_block_freed(size, requested_size)
        self.all.pending_block_freed(size, requested_size)

    def inactive_split_changed(self, level: PoolStatistics, blocks: int, size: int) -> None:
        """Count a change in the free blocks that cannot be given back because they are parts of a segment."""
        level.inactive_split_changed(blocks, size)
        self.all.inactive_split_changed(blocks, size)

    def segment_allocated(self, level: PoolStatistics, size: int) -> None:
        for counted in (level, self.all):
            counted.segment.increase(1)
            counted.reserved_bytes.increase(size)
        if size >= self.max_split_size:
            self.oversize_segments.increase(1)
        self.num_device_alloc += 1

    def segment_freed(self, level: PoolStatistics, size: int) -> None:
        for counted in (level, self.all):
            counted.segment.decrease(1)
            counted.reserved_bytes.decrease(size)
        if size >= self.max_split_size:
            self.oversize_segments.decrease(1)
        self.num_device_free += 1

    def pages_mapped(self, level: PoolStatistics, size: int) -> None:
        """Count pages of an expandable segment, which is no segment to PyTorch's statistics."""
        for counted in (level, self.all):
            counted.reserved_bytes.increase(size)
        self.num_device_alloc += 1

    def pages_unmapped(self, level: PoolStatistics, size: int) -> None:
        for counted in (level, self.all):
            counted.reserved_bytes.decrease(size)
        self.num_device_free += 1

    def reset_peak(self) -> None:
        """Set every peak to the present level."""
        for pool in (self.all, self.small_pool, self.large_pool):
            pool.reset_peak()
        self.oversize_allocations.reset_peak()
        self.oversize_segments.reset_peak()

    def reset_accumulated(self) -> None:
        """Set every total and every number of events to 0."""
        for pool in (self.all, self.small_pool, self.large_pool):
            pool.reset_accumulated()
        self.oversize_allocations.reset_accumulated()
        self.oversize_segments.reset_accumulated()
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0

    def as_dict(self) -> dict[str, int]:
        """Return what ``torch.cuda.memory_stats`` returns: a flat dictionary, sorted by name."""
        flat: dict[str, int] = {}

        def add(name: str, counter: Counter) -> None:
            flat[f"{name}.current"] = counter.current
            flat[f"{name}.peak"] = counter.peak
            flat[f"{name}.allocated"] = counter.allocated
            flat[f"{name}.freed"] = counter.freed

        for pool_name in ("all", "small_pool", "large_pool"):
            pool: PoolStatistics = getattr(self, pool_name)
            for name, counter in pool.counters():
                add(f"{name}.{pool_name}", counter)
        add("oversize_allocations", self.oversize_allocations)
        add("oversize_segments", self.oversize_segments)
        for name in ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"):
            flat[name] = getattr(self, name)
        # PyTorch keeps it as a signed number, in which "unlimited" reads as -1.
        flat["max_split_size"] = self.max_split_size if self.max_split_size < 2**63 else -1
        return dict(sorted(flat.items()))
