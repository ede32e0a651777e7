"""The caching allocator of pinned host memory, after PyTorch's CachingHostAllocator.

Memory comes from a provider in powers of two and is never split. How a request is served::

    allocate(size):
        put the blocks whose events have passed among the free ones, oldest event first, up to one that has not passed
        the block of that size that became free last
        or new memory: from the reserve segment if there is one and it has room, else from the provider

    free(address):
        if streams used the block: record an event on each; it is free when all have passed
        else it is free

With ``pinned_use_background_threads:True`` a thread looks after the events, and no request does.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from cudatool.errors import CudatoolError, UsageError
from cudatool.memory.settings import Settings
from cudatool.memory.statistics import Counter
from cudatool.trace import hooks
from cudatool.trace.events import HostFlag, Kind

__all__ = ["CachingHostAllocator", "HostProvider"]

_CACHED: Final = HostFlag.BLOCK | HostFlag.REPORTS_USES
_MIB: Final = 1024 * 1024
_RESERVE_STEP: Final = 4096  # what a block takes of the reserve segment is a multiple of this
_POLL_INTERVAL_S: Final = 100e-6
_log = logging.getLogger("cudatool.memory")


class HostProvider(Protocol):
    """Gives the allocator its memory, and says when streams have caught up. Streams are opaque to the policy."""

    def allocate(self, size: int) -> int:
        """Return the address of `size` new bytes of pinned memory."""

    def free(self, address: int) -> None:
        """Give memory back. No stream uses it any more."""

    def record_event(self, stream: Any) -> Any:
        """Return a token for everything enqueued on `stream` so far."""

    def event_passed(self, token: Any) -> bool:
        """Return whether the work before `token` is done. A token that has passed is not asked about again."""


class _Block:
    """One piece of pinned memory."""

    __slots__ = ("address", "holders", "in_use", "is_kept", "outstanding_events", "requested_size", "size", "streams")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.requested_size = 0
        self.in_use = False  # by the program
        self.holders = 0  # graphs that use it at each replay
        self.is_kept = False  # freed, but a graph may use it
        self.streams: dict[Hashable, None] = {}  # those that used it since it was handed out, in that order
        self.outstanding_events = 0  # once it is freed


class _Bucket:
    """The blocks of one size."""

    __slots__ = ("active", "active_bytes", "free")

    def __init__(self) -> None:
        self.free: list[_Block] = []  # last in, first out
        self.active = Counter()
        self.active_bytes = Counter()


class _Durations:
    """How long calls of the provider took, in microseconds."""

    __slots__ = ("count", "max", "min", "total")

    def __init__(self) -> None:
        self.total = self.max = self.min = self.count = 0

    def add(self, nanoseconds: int) -> None:
        """Count one call."""
        duration = nanoseconds // 1000
        self.total += duration
        self.count += 1
        self.max = max(self.max, duration)
        self.min = min(self.min, duration) if self.min else duration

    def as_dict(self) -> dict[str, int]:
        """Return the numbers under PyTorch's names."""
        average = self.total // self.count if self.count else 0
        return {"total": self.total, "max": self.max, "min": self.min, "count": self.count, "avg": average}


class CachingHostAllocator:
    """Allocates pinned host memory and keeps what is freed.

    Safe to use from several threads. :meth:`free` never waits, so that finalizers and trace subscribers may call it
    at any time: where the allocator is busy it only takes note, and the next call does the work.

    While :data:`cudatool.trace.hooks.active`, handing out a block and taking it back are ``HOST_ALLOC`` and
    ``HOST_FREE`` events with the flag BLOCK. What is had from the driver is the provider's to tell.

    Parameters
    ----------
    provider
        Where memory comes from.
    settings
        Default: :meth:`Settings.from_environment`.
    """

    def __init__(self, provider: HostProvider, *, settings: Settings | None = None) -> None:
        self.provider = provider
        self.settings = Settings.from_environment() if settings is None else settings
        self._blocks: dict[int, _Block] = {}  # every block by address
        self._addresses: list[int] = []  # of the same, sorted
        self._buckets: dict[int, _Bucket] = {}  # by size
        self._freed: deque[_Block] = deque()  # by the program, but not taken back yet
        self._released: deque[tuple[int, Hashable | None]] = deque()  # by graphs, likewise: address and last stream
        self._events: deque[tuple[Any, _Block]] = deque()  # of blocks taken back, oldest first
        self._reserved: range | None = None  # the addresses of the reserve segment; None before it was made
        self._reserve = range(0)  # what is left of it
        self._lock = threading.RLock()
        self._busy = False
        self._failure: CudatoolError | None = None  # for the next call
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()  # there are events to look after, or the thread is to end
        self._closed = False
        self._allocations = Counter()
        self._allocated_bytes = Counter()
        self._alloc_time = _Durations()
        self._free_time = _Durations()

    def allocate(self, size: int) -> int:
        """Return the address of `size` bytes, or more. 0 bytes have the address 0.

        Raises
        ------
        CudaError
            The provider has none.
        UsageError
            `size` is negative.
        """
        if size <= 0:
            if size < 0:
                raise UsageError(f"cannot allocate {size} bytes")
            return 0
        rounded = 1 << (size - 1).bit_length()
        with self._operation():
            if not self.settings.pinned_use_background_threads:
                self._process_events()
            bucket = self._buckets.setdefault(rounded, _Bucket())
            if bucket.free:
                block = bucket.free.pop()
            else:
                if self.settings.pinned_use_background_threads:
                    self._start_thread()
                block = self._new_block(rounded)
            block.in_use = True
            block.requested_size = size
            bucket.active.increase(1)
            bucket.active_bytes.increase(rounded)
            if hooks.active:
                hooks.emit(Kind.HOST_ALLOC, address=block.address, size=size, flags=_CACHED, aux0=rounded)
            return block.address

    def free(self, address: int) -> None:
        """Give a block back. Freeing address 0 does nothing.

        Raises
        ------
        UsageError
            `address` is not a block in use; for instance it was freed before.
        CudaError
            The work of the streams that used it cannot be waited for; the block is not handed out again. Only logged
            with ``pinned_free_catch_all:True``. If the allocator was busy, the next call raises the error.
        """
        if not address:
            return
        block = self._blocks.get(address)
        if block is None or not block.in_use:
            raise UsageError(f"{address:#x} is not a pinned block in use (was it freed before?)")
        block.in_use = False
        if hooks.active and not block.holders:
            self._emit_free(block)
        self._freed.append(block)
        self._take_back_unless_busy()

    def record_event(self, address: int, stream: Hashable) -> bool:
        """Note that `stream` uses the block which `address` lies in: it is not handed out again before that is over.

        Returns
        -------
        bool
            False if the address is in no block in use.
        """
        with self._lock:
            block = self._holding(address)
            if block is None or not block.in_use:
                return False
            block.streams[stream] = None
            return True

    def hold(self, address: int) -> int:
        """Keep the block which `address` lies in, even if it is freed, until :meth:`release`; return its own address.

        Returns
        -------
        int
            0 if the address is in no block in use.
        """
        with self._lock:
            block = self._holding(address)
            if block is None or not block.in_use:
                return 0
            block.holders += 1
            return block.address

    def release(self, address: int, stream: Hashable | None) -> None:
        """Undo :meth:`hold`. What is on `stream` by now still uses the block. Never waits, like :meth:`free`."""
        self._released.append((address, stream))
        self._take_back_unless_busy()

    def _release_held(self, address: int, stream: Hashable | None) -> None:
        block = self._blocks[address]
        block.holders -= 1
        if stream is not None:
            block.streams[stream] = None
        if block.is_kept and not block.holders:
            block.is_kept = False
            if hooks.active:
                self._emit_free(block)
            self._freed.append(block)

    @staticmethod
    def _emit_free(block: _Block) -> None:
        hooks.emit(Kind.HOST_FREE, address=block.address, size=block.requested_size, flags=_CACHED, aux0=block.size)

    def empty_cache(self) -> None:
        """Give every free block back to the provider. What is part of the reserve segment is not used again."""
        with self._operation():
            self._process_events()
            for bucket in self._buckets.values():
                while bucket.free:
                    self._release(bucket.free.pop())

    def stats(self) -> dict[str, int]:
        """Return all counters under the names of ``torch.cuda.host_memory_stats``; sizes in bytes, times in us.

        Notes
        -----
        ``active_requests`` and ``active_bytes`` are what PyTorch's documentation says: blocks in the program's hands,
        or freed but still in use by a stream. PyTorch 2.11 itself does not count down for a block that no stream used.
        As there, their peaks are the sum of the peaks of each block size.
        """
        with self._operation():
            flat: dict[str, int] = {}
            active, active_bytes = Counter(), Counter()
            for bucket in self._buckets.values():
                _add(active, bucket.active)
                _add(active_bytes, bucket.active_bytes)
            for name, counter in (
                ("allocations", self._allocations),
                ("allocated_bytes", self._allocated_bytes),
                ("active_requests", active),
                ("active_bytes", active_bytes),
            ):
                for column in ("current", "peak", "allocated", "freed"):
                    flat[f"{name}.{column}"] = getattr(counter, column)
            for name, durations in (("host_alloc_time", self._alloc_time), ("host_free_time", self._free_time)):
                flat |= {f"{name}.{key}": value for key, value in durations.as_dict().items()}
            flat["num_host_alloc"] = self._allocations.allocated
            flat["num_host_free"] = self._allocations.freed
            return dict(sorted(flat.items()))

    def reset_peak_stats(self) -> None:
        """Set every peak to the present level, and forget the shortest and the longest call."""
        with self._operation():
            for counter in self._counters():
                counter.reset_peak()
            for durations in (self._alloc_time, self._free_time):
                durations.max = durations.min = 0

    def reset_accumulated_stats(self) -> None:
        """Set every total to 0."""
        with self._operation():
            for counter in self._counters():
                counter.reset_accumulated()
            for durations in (self._alloc_time, self._free_time):
                durations.total = durations.count = 0

    def close(self) -> None:
        """End the thread that looks after the events, if there is one."""
        self._closed = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Hold the lock; before and after, take back what was freed.

        If that fails afterwards, the operation is done all the same, and the next one has the error.
        """
        with self._lock:
            if self._busy:
                raise RuntimeError("the pinned-memory allocator was called from within one of its own operations")
            self._busy = True
            try:
                failure, self._failure = self._failure, None
                if failure is not None:
                    raise failure
                self._take_back_freed()
                yield
                self._settle()
            finally:
                self._busy = False

    def _settle(self) -> None:
        """Take back what was freed. If that fails, the program's next call has the error."""
        try:
            self._take_back_freed()
        except CudatoolError as error:
            self._failure = error.with_traceback(None)  # which would keep what the caller has

    def _take_back_unless_busy(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                if not self._busy:
                    with self._operation():
                        pass
            finally:
                self._lock.release()

    def _take_back_freed(self) -> None:
        while self._released:
            self._release_held(*self._released.popleft())
        while self._freed:
            block = self._freed.popleft()
            try:
                self._take_back(block)
            except CudatoolError:
                if not self.settings.pinned_free_catch_all:
                    raise
                _log.exception("pinned memory at %#x was freed, but cannot be used again", block.address)

    def _take_back(self, block: _Block) -> None:
        if block.holders:
            block.is_kept = True
            return
        streams, block.streams = block.streams, {}
        block.outstanding_events = len(streams)
        for stream in streams:
            self._events.append((self.provider.record_event(stream), block))
            self._wanted.set()
        if not streams:
            self._release_to_cache(block)

    def _process_events(self) -> None:
        while self._events and self.provider.event_passed(self._events[0][0]):
            _, block = self._events.popleft()
            block.outstanding_events -= 1
            if block.outstanding_events == 0:
                self._release_to_cache(block)

    def _release_to_cache(self, block: _Block) -> None:
        bucket = self._buckets[block.size]
        bucket.free.append(block)
        bucket.active.decrease(1)
        bucket.active_bytes.decrease(block.size)

    def _new_block(self, size: int) -> _Block:
        block = _Block(self._from_reserve(size) or self._from_provider(size), size)
        self._blocks[block.address] = block
        insort(self._addresses, block.address)
        self._allocations.increase(1)
        self._allocated_bytes.increase(size)
        return block

    def _from_provider(self, size: int) -> int:
        start = time.perf_counter_ns()
        address = self.provider.allocate(size)
        self._alloc_time.add(time.perf_counter_ns() - start)
        return address

    def _from_reserve(self, size: int) -> int:
        """Return an address in the reserve segment, 0 if it has no room or there is none."""
        if self._reserved is None:
            reserved = self.settings.pinned_reserve_segment_size_mb * _MIB
            start = self._from_provider(reserved) if reserved else 0
            self._reserved = self._reserve = range(start, start + reserved)
        taken = -(-size // _RESERVE_STEP) * _RESERVE_STEP
        if taken > len(self._reserve):
            return 0
        address = self._reserve.start
        self._reserve = self._reserve[taken:]
        return address

    def _release(self, block: _Block) -> None:
        if block.address not in (self._reserved or ()):
            start = time.perf_counter_ns()
            self.provider.free(block.address)
            self._free_time.add(time.perf_counter_ns() - start)
        del self._blocks[block.address]
        self._addresses.remove(block.address)
        self._allocations.decrease(1)
        self._allocated_bytes.decrease(block.size)

    def _holding(self, address: int) -> _Block | None:
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        block = self._blocks[self._addresses[index]]
        return block if address < block.address + block.size else None

    def _counters(self) -> Iterator[Counter]:
        yield self._allocations
        yield self._allocated_bytes
        for bucket in self._buckets.values():
            yield bucket.active
            yield bucket.active_bytes

    # The thread of pinned_use_background_threads. It runs while there are events to look after.

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._look_after_events, name="cudatool pinned memory", daemon=True)
            self._thread.start()

    def _look_after_events(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            while not self._closed and (self._events or self._freed or self._released):
                with self._lock:
                    self._busy = True
                    try:
                        self._settle()
                        self._process_events()
                    except CudatoolError:
                        _log.exception("events of pinned memory cannot be queried any more")
                        return
                    finally:
                        self._busy = False
                time.sleep(_POLL_INTERVAL_S)


def _add(total: Counter, part: Counter) -> None:
    total.current += part.current
    total.peak += part.peak
    total.allocated += part.allocated
    total.base += part.base
