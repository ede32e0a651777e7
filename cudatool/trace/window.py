"""Cuts a part out of a trace; the part begins with the state before its first event."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from cudatool.trace import lifetimes
from cudatool.trace.distinct import distinct
from cudatool.trace.events import HostFlag, Kind, join_records
from cudatool.trace.lifetimes import Ints, Lifetimes, Mask
from cudatool.trace.model import Trace, is_of_kind, recorded_from
from cudatool.trace.module_tensors import tensors_in

__all__ = ["window"]

_OPENED: Final = {
    # what opens something that other events refer to -> what closes it, and the field that says which it is
    Kind.STREAM_CREATE: (Kind.STREAM_DESTROY, "stream"),
    Kind.HOST_ALLOC: (Kind.HOST_FREE, "address"),
    Kind.PHYSICAL_ALLOC: (Kind.PHYSICAL_FREE, "aux0"),
}
_GENERATED: Final = (Kind.GENERATED_FILE, Kind.GENERATED_LINE, Kind.GENERATED_FACT)


def window(trace: Trace, start: int, stop: int) -> Trace:
    """Return the events from `start` to before `stop`, after events that lead to the state right before `start`.

    These describe the segments, mapped pages, blocks, tensors of modules, pinned memory, memory without an address,
    streams, open ranges and generated files that existed: each by the event that made it, and blocks that wait for a
    stream also by the requested free. Like the state that a reader infers for the time before a recording, they are not
    part of what happened: :func:`recorded_from` returns where that begins. They have the time of `start`.

    Parameters
    ----------
    start, stop
        Numbers of records.
    """
    records = trace.records
    start = min(max(start, 0), len(records))
    stop = min(max(stop, start), len(records))
    time = records["time"][min(start, len(records) - 1)] if len(records) else 0
    before, source = _state(trace, start)
    before["time"] = time
    whole = join_records([before, records[start:stop]])
    prior = {}
    for device in distinct(whole["device"]).tolist():
        of_allocator = (whole["device"] == device) & (whole["kind"] >= Kind.BLOCK_ALLOC) & (whole["kind"] <= Kind.OOM)
        inferred = max(recorded_from(trace, device) - start, 0)  # of the part itself, if it begins that early
        prior[device] = int(np.count_nonzero(of_allocator[: len(before) + inferred]))
    header = {**trace.header, "prior_records": prior, "window": [start, stop, len(records)]}
    part = trace.selecting(whole, np.append(source, np.arange(start, stop)))
    return replace(part, header=header)


def _state(trace: Trace, start: int) -> tuple[npt.NDArray[np.void], Ints]:
    """Return records that lead to the state right before a record, and from which records they are."""
    all_blocks = lifetimes.blocks(trace)
    blocks = all_blocks.at(start - 1)
    segments = lifetimes.segments(trace).at(start - 1)
    of_driver = trace.records["kind"][blocks.start] == Kind.MEM_ALLOC  # it is both a block and a segment: list it once
    waiting = blocks[blocks.freed < start]
    opened = _opened(trace, start)
    idle = _idle_chunks(trace, all_blocks, blocks, segments, start)
    tensors = np.array([record for _, record in tensors_in(trace, blocks)], np.int64)
    tensors = np.sort(tensors[tensors < start])
    source = np.concatenate([opened, segments.start, idle, blocks.start[~of_driver], waiting.freed, tensors])
    records = trace.records[source]
    first = len(opened)
    # The remainder of mapped pages.
    runs = slice(first, first + len(segments))
    records["address"][runs], records["size"][runs] = segments.address, segments.size
    return records, source


def _idle_chunks(trace: Trace, every: Lifetimes, live: Lifetimes, segments: Lifetimes, start: int) -> Ints:
    """Return, for each chunk of a library's pool without a live block, a block that shows whose it is, and its free."""
    found: list[int] = []
    every, live = (rows[rows.library != 0] for rows in (every, live))
    for row in np.flatnonzero(segments.library):
        chunk = segments[row : row + 1]
        if _inside(live, chunk).any():
            continue
        past = every[_inside(every, chunk) & (every.end < start)]
        past = past[trace.records["kind"][past.end] == Kind.POOL_FREE]
        found += [int(index) for index in (*past.start[-1:], *past.end[-1:])]
    return np.array(found, np.int64)


def _inside(blocks: Lifetimes, chunk: Lifetimes) -> Mask:
    """Return which blocks are, or were, in a chunk."""
    inside: Mask = (blocks.address >= chunk.address) & (blocks.address < chunk.address + chunk.size)
    inside &= (blocks.device == chunk.device) & (blocks.start > chunk.start) & (blocks.start < chunk.end)
    return inside


def _opened(trace: Trace, start: int) -> Ints:
    """Return the streams, pinned memory, memory without an address, ranges, memory fractions and generated files right
    before a record.
    """
    records = trace.records[:start]
    fractions = np.flatnonzero(records["kind"] == Kind.MEMORY_FRACTION)
    last = dict(zip(records["device"][fractions].tolist(), fractions.tolist(), strict=True))
    found: list[int] = [*last.values(), *np.flatnonzero(is_of_kind(records, *_GENERATED)).tolist()]
    for opens, (closes, key) in _OPENED.items():
        index = np.flatnonzero(np.isin(records["kind"], (opens, closes)))
        live: dict[tuple[int, int, int], int] = {}
        columns = (records[name][index].tolist() for name in ("kind", key, "flags", "device"))
        for i, kind, what, flags, device in zip(index.tolist(), *columns, strict=True):
            # A block may begin where the memory does that the driver gave for it.
            is_block = flags & HostFlag.BLOCK if opens == Kind.HOST_ALLOC else 0
            place = what, is_block, device if opens == Kind.PHYSICAL_ALLOC else 0
            if kind == opens:
                live[place] = i
            else:
                live.pop(place, None)
        found += live.values()
    index = np.flatnonzero(np.isin(records["kind"], (Kind.RANGE_PUSH, Kind.RANGE_POP)))
    inside: dict[tuple[int, int], list[int]] = {}
    columns = (records[name][index].tolist() for name in ("kind", "thread", "device"))
    for i, kind, thread, device in zip(index.tolist(), *columns, strict=True):
        pushed = inside.setdefault((thread, device), [])
        if kind == Kind.RANGE_PUSH:
            pushed.append(i)
        elif pushed:
            pushed.pop()
    for pushed in inside.values():
        found += pushed
    return np.array(sorted(found), np.int64)
