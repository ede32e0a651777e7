"""What to say when there is no memory: the numbers, who holds it, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterable

from cudatool.errors import OutOfMemoryError
from cudatool.memory.blocks import ALLOCATED, FREE, Block, BlockPool
from cudatool.memory.settings import Settings
from cudatool.memory.statistics import AllocatorStatistics
from cudatool.trace import stacks
from cudatool.trace.frames import cell_name, frame_words
from cudatool.units import counted, format_bytes

__all__ = ["out_of_memory_error"]

_HOLDERS = 3  # how many are named


def out_of_memory_error(
    *,
    wanted: int,
    device: int,
    free: int,
    total: int,
    allowed: int | None,
    statistics: AllocatorStatistics,
    settings: Settings,
    pool: BlockPool,
    stream: int,
    blocks: Iterable[Block],
    processes: Iterable[tuple[int, int]] = (),
) -> OutOfMemoryError:
    """Return the error for a segment of `wanted` bytes for `pool` and `stream` that could not be had.

    Parameters
    ----------
    free, total
        Bytes of the device.
    allowed
        Bytes that may be reserved, if a memory fraction limits them.
    blocks
        All of the allocator.
    processes
        Id and bytes of each process that uses the device, where that is known.
    """
    allocated = statistics.all.allocated_bytes.current
    reserved = statistics.all.reserved_bytes.current
    pending = statistics.all.pending_bytes
    private = elsewhere = 0
    live: list[Block] = []
    for block in blocks:
        if block.state is ALLOCATED:
            live.append(block)
        elif block.state is FREE and block.pool.id != pool.id:
            private += block.size
        elif block.state is FREE and (block.stream != stream or block.pool is not pool):
            elsewhere += block.size
    text = [
        f"tried to allocate {format_bytes(wanted)} on device {device}, which has {format_bytes(total)}, "
        f"of which {format_bytes(free)} are free."
    ]
    for process, used in processes:
        if process == os.getpid():
            outside = f", {format_bytes(used - reserved)} of it outside this allocator" if used > reserved else ""
            text.append(f"This process uses {format_bytes(used)}{outside}.")
        else:
            text.append(f"Process {process} uses {format_bytes(used)}.")
    if allowed is not None:
        text.append(f"The memory fraction allows {format_bytes(allowed)}.")
    text.append(
        f"This allocator has {format_bytes(reserved)} reserved: {format_bytes(allocated)} allocated by the program, "
        f"{format_bytes(reserved - allocated)} reserved but unallocated{_where(pending, private, elsewhere)}."
    )
    if live:
        text.append(f"Most is held by {_holders(live)}.")
    if reserved - allocated >= wanted and not settings.expandable_segments:
        text.append(
            "Unallocated memory lies in pieces between allocated blocks, or belongs to other streams or pools: "
            "CUDATOOL_ALLOC_CONF=expandable_segments:True may keep it in one piece."
        )
    else:
        text.append(
            "Free arrays that are not needed, or work on less at a time; cudatool snapshot shows what holds it."
        )
    error = OutOfMemoryError(" ".join(text))
    error.wanted, error.total, error.free = wanted, total, free
    error.allowed = total if allowed is None else allowed
    error.allocated, error.reserved = allocated, reserved
    return error


def _where(pending: int, private: int, elsewhere: int) -> str:
    parts = [
        f"{format_bytes(size)} {what}"
        for size, what in (
            (pending, "freed but still in use by another stream"),
            (private, "cached in other memory pools"),
            (elsewhere, "cached for other streams or sizes"),
        )
        if size
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _holders(live: list[Block]) -> str:
    """Name the places that allocated most; without stacks, the sizes that take most."""
    groups: dict[tuple[int, int], int] = {}  # how many of one stack and size: there may be many blocks and few groups
    for block in live:
        group = (block.stack, block.size)
        groups[group] = groups.get(group, 0) + 1
    by_place: dict[str, tuple[int, int]] = {}
    for (stack, block_size), number in groups.items():
        frames = stacks.frames(stack)
        if frames:
            place = frame_words(frames[0]._replace(file=cell_name(frames[0].file)))
        else:
            place = f"blocks of {format_bytes(block_size)}"
        count, size = by_place.get(place, (0, 0))
        by_place[place] = (count + number, size + number * block_size)
    largest = sorted(by_place.items(), key=_bytes_held, reverse=True)[:_HOLDERS]
    return ", ".join(f"{place}: {format_bytes(size)} in {counted(count, 'block')}" for place, (count, size) in largest)


def _bytes_held(item: tuple[str, tuple[int, int]]) -> int:
    return item[1][1]
