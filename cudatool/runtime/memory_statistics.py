"""What torch.cuda says about device memory: statistics, limits, snapshots and other processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cudatool import _driver
from cudatool.memory import memory_summary as _table
from cudatool.memory.snapshot import SegmentInfo
from cudatool.runtime.allocator import allocator, mem_get_info, refuse_own, require_pool_id, used_allocators
from cudatool.runtime.device import DeviceLike, device_index, get_device_properties
from cudatool.runtime.dtypes import real
from cudatool.units import format_bytes

__all__ = [
    "empty_cache",
    "get_per_process_memory_fraction",
    "list_gpu_processes",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "nested",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
]


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """Return the allocator's counters, under the names of ``torch.cuda.memory_stats``. Sizes are in bytes."""
    return allocator(device_index(device)).stats()


def memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, Any]:
    """Return the counters of :func:`memory_stats`, one dictionary in another."""
    return nested(memory_stats(device))


def nested(flat: Mapping[str, int]) -> dict[str, Any]:
    """Return what is under ``"a.b"`` as the ``"b"`` of the dictionary ``"a"``."""
    result: dict[str, Any] = {}
    for path, value in flat.items():
        *outer, name = path.split(".")
        inner = result
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[name] = value
    return result


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes that the program has allocated, rounded up to whole blocks."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the most bytes that were allocated at a time since :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes that the allocator has from the driver, in use or not."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the most bytes that were reserved at a time since :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def memory_cached(device: DeviceLike = None) -> int:
    """Return what :func:`memory_reserved` does; the name that torch.cuda had for it."""
    return memory_reserved(device)


def max_memory_cached(device: DeviceLike = None) -> int:
    """Return what :func:`max_memory_reserved` does; the name that torch.cuda had for it."""
    return max_memory_reserved(device)


def reset_max_memory_allocated(device: DeviceLike = None) -> None:
    """Do what :func:`reset_peak_memory_stats` does, for every peak."""
    reset_peak_memory_stats(device)


def reset_max_memory_cached(device: DeviceLike = None) -> None:
    """Do what :func:`reset_peak_memory_stats` does, for every peak."""
    reset_peak_memory_stats(device)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Set every peak to the present level."""
    allocator(device_index(device)).reset_peak_stats()


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Set every total and every number of events to 0."""
    allocator(device_index(device)).reset_accumulated_stats()


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Reserve no more than this share of a device's memory from now on: what goes beyond is out of memory.

    Raises
    ------
    UsageError
        `fraction` is no number between 0 and 1.
    """
    allocator(device_index(device)).set_memory_fraction(real("fraction", fraction))


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """Return the share of a device's memory that may be reserved."""
    return allocator(device_index(device)).memory_fraction()


def empty_cache() -> None:
    """Give all memory that is reserved but not in use back to the driver, on all devices."""
    for _, found in used_allocators():
        found.empty_cache()


def memory_snapshot(mempool_id: tuple[int, int] | None = None, include_traces: bool = True) -> list[SegmentInfo]:
    """Return all segments of all devices with their blocks, in PyTorch's schema.

    Parameters
    ----------
    mempool_id
        Return the segments of this pool alone; ``(0, 0)`` is none in particular, as in torch.
    include_traces
        Changes nothing: traces are recorded by :func:`cudatool.record`.

    Raises
    ------
    UsageError
        `mempool_id` is no id of a pool, or the program has its own allocator.
    """
    refuse_own()
    pool = None if mempool_id is None else require_pool_id(mempool_id)
    pool = None if pool == (0, 0) else pool
    # Not of all devices: asking one starts its context, which takes memory.
    return [segment for _, found in used_allocators() for segment in found.snapshot_segments(pool=pool)]


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """Return the allocator's counters as a table for people."""
    index = device_index(device)
    return _table(memory_stats(index), device=index, abbreviated=abbreviated)


def list_gpu_processes(device: DeviceLike = None) -> str:
    """Return the processes that use a device and their memory, one a line, as NVML knows them.

    Only this process uses its software device.

    Raises
    ------
    UsageError
        NVML refuses; for instance the container hides other processes.
    """
    index = device_index(device)
    choice = _driver.chosen()
    assert choice is not None  # or there would be no index
    if choice.kind == "sim":
        free, total = mem_get_info(index)
        used = [(os.getpid(), total - free)]
    else:
        used = _driver.gpu_processes(get_device_properties(index).uuid)
    lines = [f"process {pid}: {format_bytes(size)}" for pid, size in used]
    return "\n".join([f"GPU:{index}", *(lines or ["no process is running"])])
