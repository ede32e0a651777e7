"""Events for what a caching allocator holds when a recording begins in the middle of a program."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from cudatool.memory.snapshot import FrameInfo, SegmentInfo
from cudatool.trace.events import Event, Kind, pack_pool

__all__ = ["living"]


def living(
    segments: Iterable[SegmentInfo],
    *,
    stream_of: Callable[[SegmentInfo], int],
    thread: int,
    stack_of: Callable[[Sequence[FrameInfo]], int] = lambda frames: 0,
) -> list[Event]:
    """Return the events that would have reported what an allocator holds: its segments, then their blocks.

    Parameters
    ----------
    segments
        As in a snapshot, of PyTorch or of our allocator.
    stream_of
        Returns the id of a segment's stream.
    thread
        The running thread's id.
    stack_of
        Returns the id of a stack, where the snapshot has stacks.
    """
    found = list(segments)
    now = time.monotonic_ns()

    def event(
        kind: Kind, segment: SegmentInfo, address: int, size: int, *, flags: int = 0, asked: int = 0, stack: int = 0
    ) -> Event:
        pool = pack_pool(segment["segment_pool_id"])
        device, stream = segment["device"], stream_of(segment)
        return Event(now, kind, device, flags, thread, stream, 0, stack, "", address, size, asked, pool)

    events = []
    for segment in found:
        kind = Kind.SEGMENT_MAP if segment["is_expandable"] else Kind.SEGMENT_ALLOC
        small, stack = int(segment["segment_type"] == "small"), stack_of(segment.get("frames") or ())
        events.append(event(kind, segment, segment["address"], segment["total_size"], flags=small, stack=stack))
    for segment in found:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                continue
            place, asked = (segment, block["address"], block["size"]), block["requested_size"]
            stack = stack_of(block.get("frames") or ())
            events.append(event(Kind.BLOCK_ALLOC, *place, asked=asked, stack=stack))
            if block["state"] == "active_pending_free":
                events.append(event(Kind.BLOCK_FREE_REQUESTED, *place, asked=asked))
    return events
