"""The caching allocator as programs use it: from any thread, with events of what it does."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

from cudatool.errors import ConfigError, CudatoolError, OutOfMemoryError, UsageError
from cudatool.memory import observers, snapshot
from cudatool.memory.blocks import PoolId
from cudatool.memory.journal import Journal
from cudatool.memory.observers import OutOfMemoryObserver
from cudatool.memory.policy import DEFAULT_POOL, Policy
from cudatool.memory.pools import PoolState, RestoreResult, blocks_of
from cudatool.memory.provider import SegmentProvider
from cudatool.memory.settings import Settings
from cudatool.trace import hooks

__all__ = ["CachingAllocator", "FreeMemoryCallback", "in_operation"]

FreeMemoryCallback = Callable[[], bool]
"""Frees what the program can do without; returns whether there was anything."""

_log = logging.getLogger("cudatool.memory")


class CachingAllocator:
    """Allocates device memory and keeps what is freed, for the stream it was allocated for.

    Safe to use from several threads. :meth:`free` and :meth:`release_pool` may also be called from finalizers and trace
    subscribers, which run at any time and on any thread, also on one that the device waits for: they never wait. While
    an operation is in progress, on whatever thread, they are put off to its end.

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
    processes
        Gives id and bytes of each process that uses the device, for out-of-memory errors.

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
        processes: Callable[[], Iterable[tuple[int, int]]] = tuple,
    ) -> None:
        settings = Settings.from_environment() if settings is None else settings
        if settings.backend != "native":
            raise ConfigError(
                f"allocator setting backend:{settings.backend} is not supported by cudatool; use backend:native"
            )
        self.provider = provider
        self.device = device
        self.settings = settings
        self._journal = Journal(device, stream_id)
        self._policy = Policy(
            provider,
            device=device,
            settings=settings,
            journal=self._journal,
            total_memory=provider.memory_info()[1] if total_memory is None else total_memory,
            outside=self._outside,
            processes=processes,
        )
        self.statistics = self._policy.statistics
        self._lock = threading.RLock()
        _locks.add(self._lock)
        self._acquire, self._release = self._lock.acquire, self._lock.release  # looking them up takes as long
        self._busy = False  # between two consistent states
        self._late: deque[Callable[[], None]] = deque()  # what was put off
        self._out_of_memory_observers: list[OutOfMemoryObserver] = []

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
        journal = self._journal
        self._acquire()
        try:
            if self._busy:
                raise _reentered()
            if self._late and not hooks.emitting():
                self._settle()
            self._busy = True
            try:
                if hooks.active:
                    journal.start()
                return self._policy.malloc(size, stream)
            except OutOfMemoryError as error:
                out_of_memory = error
            finally:
                self._busy = False
                if journal.active or self._late:
                    self._settle()
        finally:
            self._release()
            if self._late:
                self._catch_up()
        for observer in list(self._out_of_memory_observers):
            try:
                observer(self.device, out_of_memory.wanted, out_of_memory.allowed, out_of_memory.free)
            except Exception:
                _log.exception("out-of-memory observer %r failed", observer)
        try:
            observers.notify(self.device, out_of_memory.wanted, out_of_memory.allowed, out_of_memory.free)
            raise out_of_memory
        finally:
            del out_of_memory  # else it and this frame would keep each other, and the caller's arrays, alive

    def free(self, address: int) -> None:
        """Give a block back. Freeing address 0 does nothing.

        Raises
        ------
        UsageError
            `address` is not a block in use; for instance it was freed before.
        CudaError
            A stream that used the block was destroyed before. The block is not handed out again.
        """
        if not address:
            return
        # Waiting for the lock here could be forever: its owner may be waiting for this subscriber, or for the device,
        # which waits for this thread to collect its garbage.
        if (hooks.active and hooks.emitting()) or not self._acquire(False):
            self._policy.block_in_use(address)  # to tell the caller
            self._put_off(partial(self._policy.free, address))
            return
        journal = self._journal
        try:
            if self._busy:  # a finalizer runs within one of our own operations, on the same thread
                self._late.append(partial(self._policy.free, address))
                return
            self._busy = True
            try:
                if hooks.active:
                    journal.start()
                self._policy.free(address)
            finally:
                self._busy = False
                if journal.active or self._late:
                    self._settle()
        finally:
            self._release()
            if self._late:
                self._catch_up()

    def record_stream(self, address: int, stream: int) -> None:
        """Note that `stream` uses the block too: it is not handed out again before that use is over.

        Raises
        ------
        UsageError
            `address` is not a block in use.
        """
        with self._operation():
            self._policy.record_stream(address, stream)

    def empty_cache(self, pool: PoolId = DEFAULT_POOL) -> None:
        """Wait for pending blocks, then give everything that is wholly free back to the provider.

        Of private pools, only those that are no longer used give their memory back. For the default pool that is
        all such pools beside the default one; and while a private pool is in use for new allocations, only them.
        """
        with self._operation():
            self._policy.release_cached(pool)

    def trim(self, bytes_to_keep: int) -> None:
        """Like :meth:`empty_cache`, but stop as soon as no more than `bytes_to_keep` are reserved.

        The name and the rule are those of cuMemPoolTrimTo.
        """
        with self._operation():
            self._policy.release_cached(DEFAULT_POOL, bytes_to_keep)

    def set_memory_fraction(self, fraction: float) -> None:
        """Reserve no more than this share of the device's memory from now on.

        Raises
        ------
        UsageError
            `fraction` does not lie between 0 and 1.
        """
        with self._operation():
            self._policy.set_memory_fraction(fraction)

    def memory_fraction(self) -> float:
        """Return the share of the device's memory that may be reserved."""
        return self._policy.memory_fraction()

    def add_free_memory_callback(self, callback: FreeMemoryCallback) -> None:
        """Call `callback` whenever no cached block fits. It may free blocks, but not allocate."""
        self._policy.free_memory_callbacks.append(callback)

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
            self._policy.use_pool(pool, provider, use_on_oom=use_on_oom, splits=splits)

    def begin_allocate_to_pool(
        self, pool: PoolId, applies_to: Callable[[int], bool], *, capturing: bool = False
    ) -> None:
        """Serve requests from a private pool from now on, if ``applies_to(stream)``. Counts as one more user.

        Parameters
        ----------
        capturing
            A stream is being captured until :meth:`end_allocate_to_pool`, so that the device must not be waited for.

        Raises
        ------
        UsageError
            This pool is being allocated to already.
        """
        with self._operation():
            self._policy.begin_allocate_to_pool(pool, applies_to, capturing=capturing)

    def end_allocate_to_pool(self, pool: PoolId) -> None:
        """Undo :meth:`begin_allocate_to_pool`, except that the pool keeps its user until :meth:`release_pool`.

        Raises
        ------
        UsageError
            This pool is not being allocated to.
        """
        with self._operation():
            self._policy.end_allocate_to_pool(pool)

    def release_pool(self, pool: PoolId, *, at_once: bool = False) -> None:
        """Count one user less. Without users, a pool gives its free memory back when the cache is emptied.

        Parameters
        ----------
        at_once
            Give it back now, if that was the last user.

        Raises
        ------
        UsageError
            There is no such pool, or it has no user.
        """
        release = partial(self._release_pool, pool, at_once)
        if (hooks.active and hooks.emitting()) or not self._acquire(False):
            self._put_off(release)
            return
        try:
            if self._busy:
                self._late.append(release)
                return
            self._busy = True
            try:
                if hooks.active:
                    self._journal.start()
                release()
            finally:
                self._busy = False
                self._settle()
        finally:
            self._release()
            self._catch_up()

    def _release_pool(self, pool: PoolId, at_once: bool) -> None:
        self._policy.release_pool(pool)
        if at_once:
            self._policy.release_cached(pool)

    def pool_use_count(self, pool: PoolId) -> int:
        """Return how many users a private pool has.

        Raises
        ------
        UsageError
            There is no such pool.
        """
        with self._caught_up():
            return self._policy.private_pool(pool).use_count

    def checkpoint_pool(self, pool: PoolId) -> PoolState:
        """Return how a private pool is cut into blocks, for :meth:`restore_pool`.

        Raises
        ------
        UsageError
            There is no such pool, or it has no user any more.
        """
        with self._operation():
            return self._policy.checkpoint_pool(pool)

    def restore_pool(self, pool: PoolId, state: PoolState) -> RestoreResult:
        """Cut a private pool into the blocks that it had at a checkpoint, in use or free as they were.

        What was allocated since is freed. Segments that are new since stay, free.

        Raises
        ------
        UsageError
            `state` is another pool's, a segment has gone since, or a block is still in use by another stream.
        """
        with self._operation():
            return self._policy.restore_pool(pool, state)

    # What it looks like inside.

    def stats(self) -> dict[str, int]:
        """Return all counters under the names of ``torch.cuda.memory_stats``."""
        with self._caught_up():
            return self.statistics.as_dict()

    def reset_peak_stats(self) -> None:
        """Set every peak to the present level."""
        with self._caught_up():
            self.statistics.reset_peak()

    def reset_accumulated_stats(self) -> None:
        """Set every total and every number of events to 0."""
        with self._caught_up():
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
            segments = self._policy.segments
            return [
                snapshot.segment(head, self.device, segments.stack_of(head), frames)
                for head in segments.heads()
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
            block = self._policy.block_in_use(address)
            while block.previous is not None:
                block = block.previous
            expandable = block.expandable
            if expandable is not None:
                return expandable.address, expandable.size, True
            return block.address, sum(part.size for part in blocks_of(block)), False

    # One operation. `malloc` and `free` have this written out: calls are a third of what they cost; and `release_pool`,
    # which does not wait.

    @contextmanager
    def _operation(self) -> Iterator[None]:
        with self._caught_up():
            if self._busy:
                raise _reentered()
            self._busy = True
            try:
                if hooks.active:
                    self._journal.start()
                yield
            finally:
                self._busy = False
                if self._journal.active or self._late:
                    self._settle()

    def paused(self) -> AbstractContextManager[None]:
        """Return a context in which no other thread takes memory or gives it back: they wait."""
        return self._caught_up()

    @contextmanager
    def _caught_up(self) -> Iterator[None]:
        """Hold the lock; what was put off before is done, and so is what others put off meanwhile, afterwards."""
        try:
            with self._lock:
                if self._late and not self._busy and not hooks.emitting():
                    self._settle()
                yield
        finally:
            self._catch_up()

    @contextmanager
    def _outside(self) -> Iterator[None]:
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

    def _put_off(self, work: Callable[[], None]) -> None:
        self._late.append(work)
        self._catch_up()

    def _catch_up(self) -> None:
        """Do what was put off, unless another thread has the lock: it does so when it releases it."""
        while self._late and self._acquire(False):
            try:
                if self._busy or hooks.emitting():
                    return  # in the middle of an operation, whose end is near
                self._settle()
            finally:
                self._release()

    def _settle(self) -> None:
        """Emit the operation's events and do what came in its way."""
        while True:
            self._journal.emit()
            if not self._late:
                return
            self._busy, self._journal.active = True, hooks.active
            try:
                self._late.popleft()()
            except CudatoolError:  # no caller is left to raise it to
                _log.exception("memory of device %d was given back, but cannot be used again", self.device)
            finally:
                self._busy = False


_locks: WeakSet[Any] = WeakSet()  # of all allocators


def in_operation() -> bool:
    """Return whether the calling thread is within an operation of a caching allocator."""
    return any(lock._is_owned() for lock in tuple(_locks))


def _reentered() -> RuntimeError:
    return RuntimeError("the allocator was called from within one of its own operations")
