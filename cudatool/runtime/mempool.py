"""Memory pools: device memory that is kept apart from the rest, and may come from the program's own allocator."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cudatool import _driver
from cudatool.errors import UsageError
from cudatool.memory.pluggable import CUDAPluggableAllocator, PluggableProvider
from cudatool.memory.snapshot import SegmentInfo
from cudatool.runtime.allocator import allocator as allocator_of
from cudatool.runtime.device import DeviceLike, current_device, device_index
from cudatool.runtime.device import device as on_device
from cudatool.runtime.handles import Owner
from cudatool.runtime.memory_statistics import memory_snapshot

__all__ = ["MemPool", "graph_pool_handle", "use_mem_pool"]

_handles = itertools.count(1)


class MemPool(Owner):
    """A pool of device memory of its own, for what is allocated inside :func:`use_mem_pool`.

    When the object is gone, so is the pool: what is free in it goes back to where it came from at once, what is still
    in use when it is free and the cache is emptied.

    Parameters
    ----------
    allocator
        Where the pool's segments come from; by default from the driver. Segments of a pool with an allocator of its
        own are not expandable.
    use_on_oom
        Let its free blocks serve a request outside the pool that would be out of memory otherwise.
    no_split
        Never split its blocks, so that each is a segment of its own or one reused whole.
    """

    def __init__(
        self, allocator: CUDAPluggableAllocator | None = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if allocator is not None and not isinstance(allocator, CUDAPluggableAllocator):
            raise UsageError(f"a MemPool's allocator is a CUDAPluggableAllocator, not {type(allocator).__name__}")
        self._allocator = None if allocator is None else allocator.allocator()
        self._use_on_oom = use_on_oom
        self._no_split = no_split
        self._id = graph_pool_handle()
        self._devices: list[int] = []
        self._live_on(current_device())

    @property
    def id(self) -> tuple[int, int]:
        """The pool's id, as in events and snapshots."""
        return self._id

    @property
    def allocator(self) -> CUDAPluggableAllocator | None:
        """What its segments come from, None if from the driver."""
        return self._allocator

    @property
    def device(self) -> int:
        """Ordinal of the device that was current when the pool was made."""
        return self._devices[0]

    def use_count(self) -> int:
        """Return how many users the pool has on its device: this object, contexts that allocate to it, graphs."""
        return allocator_of(self.device).pool_use_count(self.id)

    def snapshot(self, include_traces: bool = True) -> list[SegmentInfo]:
        """Return the pool's segments with their blocks, in PyTorch's schema; see :func:`cudatool.memory_snapshot`."""
        return memory_snapshot(self.id, include_traces=include_traces)

    def _live_on(self, device: int) -> None:
        """Make the pool on the device with this ordinal, if it is not there already."""
        if device in self._devices:
            return
        policy = allocator_of(device)
        provider = None
        if self._allocator is not None:
            provider = PluggableProvider(self._allocator, device, policy.provider, guard=on_device)
        policy.create_or_incref_pool(self.id, provider=provider, use_on_oom=self._use_on_oom, splits=not self._no_split)
        self._devices.append(device)

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if not _finalizing() and _driver.started():  # a forked process has no memory: it is its parent's
            for device in getattr(self, "_devices", ()):
                allocator_of(device).release_pool(self._id, at_once=True)

    def __repr__(self) -> str:
        return f"<MemPool id={self.id} device={self.device}>"


@contextmanager
def use_mem_pool(pool: MemPool, device: DeviceLike = None) -> Iterator[None]:
    """Let whatever the calling thread allocates on a device come from `pool`, on any stream.

    Meanwhile no thread gets memory that a stream still used when it was freed, and out of memory comes before the
    cache is emptied: what holds for allocations while a graph is captured holds here, too.

    Parameters
    ----------
    device
        Default: the current device.

    Raises
    ------
    UsageError
        It is no pool, or in such use already, here or on another thread.
    """
    if not isinstance(pool, MemPool):
        raise UsageError(f"use_mem_pool takes a MemPool, not {type(pool).__name__}")
    index = device_index(device)
    thread = threading.get_ident()
    pool._live_on(index)
    policy = allocator_of(index)
    policy.begin_allocate_to_pool(pool.id, lambda stream: threading.get_ident() == thread)
    try:
        yield
    finally:
        policy.end_allocate_to_pool(pool.id)
        policy.release_pool(pool.id)


def graph_pool_handle() -> tuple[int, int]:
    """Return an id that no pool has yet, for graphs that are to share their memory."""
    return 0, next(_handles)
