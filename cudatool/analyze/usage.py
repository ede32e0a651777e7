"""Who holds the memory by stream and by pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cudatool.analyze.lifetimes import Ints, Lifetimes, held_after
from cudatool.trace.events import unpack_pool
from cudatool.trace.model import Trace
from cudatool.trace.streams import stream_names

__all__ = ["Usage", "pool_label", "usage_by_pool", "usage_by_stream"]


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory of one stream, or of one pool.

    Attributes
    ----------
    id, label
        As in the records, and in words.
    at_peak, reserved_at_peak
        Bytes active and reserved when the whole device had the most bytes active.
    peak, reserved_peak
        The most bytes that this stream or pool ever had; not at the same moment as others.
    """

    id: int
    label: str
    at_peak: int
    peak: int
    reserved_at_peak: int
    reserved_peak: int


def usage_by_stream(trace: Trace, blocks: Lifetimes, segments: Lifetimes, index: int) -> tuple[Usage, ...]:
    """Return the memory of each stream, that with the most at record `index` first."""
    return _usage(blocks, segments, blocks.stream, segments.stream, index, stream_names(trace).__getitem__)


def usage_by_pool(trace: Trace, blocks: Lifetimes, segments: Lifetimes, index: int) -> tuple[Usage, ...]:
    """Return the memory of each pool, that with the most at record `index` first."""
    return _usage(blocks, segments, blocks.pool, segments.pool, index, lambda number: pool_label(trace, number))


def pool_label(trace: Trace, pool: int) -> str:
    """Return what a pool is called: ``"default pool"``, or the two parts of its id.

    In a snapshot the records hold an index into the header's table of pools; in a trace of our runtime, the packed id.
    """
    table = trace.header.get("pools")
    first, second = table[pool] if table and 0 <= pool < len(table) else unpack_pool(pool)
    return f"private pool ({first}, {second})" if first or second else "default pool"


def _usage(
    blocks: Lifetimes,
    segments: Lifetimes,
    block_key: Ints,
    segment_key: Ints,
    index: int,
    label: Callable[[int], str],
) -> tuple[Usage, ...]:
    rows = []
    for key in np.union1d(block_key, segment_key).tolist():
        own, reserved = blocks[block_key == key], segments[segment_key == key]
        now, reserved_now = int(own.at(index).size.sum()), int(reserved.at(index).size.sum())
        rows.append(Usage(key, label(key), now, _peak(own), reserved_now, _peak(reserved)))
    return tuple(sorted(rows, key=lambda row: (-row.at_peak, -row.reserved_at_peak, row.id)))


def _peak(rows: Lifetimes) -> int:
    """Return the most bytes that were there at once. At one record, what ends there goes first."""
    return int(held_after(rows, rows.end).max(initial=0))
