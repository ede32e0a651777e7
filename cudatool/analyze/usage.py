"""Memory by stream and by pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatool.trace.distinct import distinct
from cudatool.trace.events import unpack_pool
from cudatool.trace.lifetimes import Ints, Lifetimes, peaks
from cudatool.trace.model import Trace
from cudatool.trace.streams import stream_names

__all__ = ["Usage", "is_private_pool", "pool_label", "usage_by_pool", "usage_by_stream"]


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory of one stream, or of one pool.

    Attributes
    ----------
    id, label
        As in the records, and in words.
    at_peak, reserved_at_peak
        Bytes active and reserved when the whole device had the most bytes active; reserved is None if the recording
        does not have it.
    peak, reserved_peak
        The peaks of this stream or pool; others peak at other moments.
    """

    id: int
    label: str
    at_peak: int
    peak: int
    reserved_at_peak: int | None
    reserved_peak: int | None


def usage_by_stream(trace: Trace, blocks: Lifetimes, segments: Lifetimes, index: int) -> tuple[Usage, ...]:
    """Return the memory of each stream, the one with the most at record `index` first."""
    return _usage(blocks, segments, blocks.stream, segments.stream, index, stream_names(trace).__getitem__)


def usage_by_pool(trace: Trace, blocks: Lifetimes, segments: Lifetimes, index: int) -> tuple[Usage, ...]:
    """Return the memory of each pool, the one with the most at record `index` first.

    A private pool in which code of PyTorch's compiler allocated says so: CUDA graphs of ``mode="reduce-overhead"`` have
    such pools.
    """
    generated = np.isin(blocks.stack, list(trace.generated.at))
    compiled = set(distinct(blocks.pool[generated]).tolist())

    def label(pool: int) -> str:
        words = pool_label(trace, pool)
        return f"{words} of compiled code" if pool in compiled and is_private_pool(trace, pool) else words

    return _usage(blocks, segments, blocks.pool, segments.pool, index, label)


def pool_label(trace: Trace, pool: int) -> str:
    """Return the name of a pool: ``"default pool"``, or the two parts of its id.

    In a snapshot the records hold an index into the header's table of pools; in a trace of our runtime, the packed id.
    """
    first, second = _pool_id(trace, pool)
    return f"private pool ({first}, {second})" if first or second else "default pool"


def is_private_pool(trace: Trace, pool: int) -> bool:
    """Return whether a pool of the records is not the default one."""
    return any(_pool_id(trace, pool))


def _pool_id(trace: Trace, pool: int) -> tuple[int, int]:
    table = trace.header.get("pools")
    first, second = table[pool] if table and 0 <= pool < len(table) else unpack_pool(pool)
    return first, second


def _usage(
    blocks: Lifetimes,
    segments: Lifetimes,
    block_key: Ints,
    segment_key: Ints,
    index: int,
    label: Callable[[int], str],
) -> tuple[Usage, ...]:
    keys = distinct(block_key, segment_key)
    levels: list[list[Any]] = [
        column.tolist()
        for rows, key in ((blocks, block_key), (segments, segment_key))
        for column in _now_and_peak(rows, np.searchsorted(keys, key).astype(np.int32), len(keys), index)
    ]
    if not len(segments):
        levels[2:] = [[None] * len(keys)] * 2
    found = [Usage(key, label(key), *figures) for key, *figures in zip(keys.tolist(), *levels, strict=True)]
    return tuple(sorted(found, key=lambda row: (-row.at_peak, -(row.reserved_at_peak or 0), row.id)))


def _now_and_peak(rows: Lifetimes, group: Ints, count: int, index: int) -> tuple[Ints, Ints]:
    """Return the bytes of each of `count` groups right after record `index`, and the most it ever had."""
    now = np.zeros(count, np.int64)
    there = (rows.start <= index) & (index < rows.end)
    np.add.at(now, group[there], rows.size[there])
    return now, peaks(rows, group, count)
