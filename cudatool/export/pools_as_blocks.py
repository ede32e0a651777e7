"""Spells memory pools of libraries as PyTorch's allocator is recorded, for files that know one allocator only."""

from __future__ import annotations

import numpy as np

from cudatool.trace import lifetimes
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace, is_of_kind

__all__ = ["pools_as_blocks"]


def pools_as_blocks(trace: Trace) -> Trace:
    """Return a trace whose libraries' chunks are segments, and whose libraries' blocks are blocks of these.

    The free of a block that was not recorded comes right before the event that shows it. Other events stay as they are.
    """
    if not is_of_kind(trace.records, Kind.POOL_ALLOC).any():
        return trace
    records, blocks, chunks = trace.records, lifetimes.blocks(trace), lifetimes.segments(trace)
    blocks, chunks = blocks[blocks.library != 0], chunks[chunks.library != 0]
    spelled = records.copy()
    begins, ends = chunks.start, chunks.end[chunks.end < len(records)]
    spelled["kind"][begins] = Kind.SEGMENT_ALLOC
    spelled["kind"][ends[records["kind"][ends] == Kind.MEM_FREE]] = Kind.SEGMENT_FREE
    spelled["kind"][records["kind"] == Kind.POOL_ALLOC] = Kind.BLOCK_ALLOC

    freed = blocks[blocks.end < len(records)]
    freed = freed[np.argsort(freed.end, kind="stable")]
    at, born = np.repeat(freed.end, 2), np.repeat(freed.start, 2)  # for the request and its completion
    frees = records[born]
    frees["kind"] = np.tile([Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED], len(freed))
    frees["time"], frees["thread"] = records["time"][at], records["thread"][at]
    frees["stack"] = np.where(records["kind"][at] == Kind.POOL_FREE, records["stack"][at], 0)

    whole, source = np.insert(spelled, at, frees), np.insert(np.arange(len(records)), at, at)
    kept = whole["kind"] != Kind.POOL_FREE
    return trace.selecting(whole[kept], source[kept])
