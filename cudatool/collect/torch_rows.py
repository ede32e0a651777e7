"""The log of what a PyTorch program did, as :file:`torch_log.cpp` writes it.

A log is a sequence of rows of 64-bit words: kind | length in words << 8 | thread << 40, time in ns, and

========= ============================================================================================
BEGIN     call: an operator that something happened in before it was over
CALL      call, payload (0: it touches no memory of the device), stack
PAYLOAD   number, operator, backward node, extra, number of tensors, and for each tensor: position | result << 8 |
          on device << 16 | pinned << 17 | bound << 18 | device << 24 | bytes per element << 32 | dimensions << 48,
          address, storage, bytes of storage, stream handle, sizes, strides
MEMORY    the allocator's action, address, size, stream handle, device, call (0: in none), stack (in none)
TRACE     what, two handles, device, stack
NOTE      stack, what, words
STREAM    handle, device, flags (1 non-blocking)
========= ============================================================================================

"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from cudatool.collect.torch_accesses import TensorView

__all__ = ["Action", "Note", "Row", "RowKind", "TraceCall", "read_rows", "read_tensors", "stacks_of_calls"]


class RowKind(IntEnum):
    """Kinds of rows."""

    BEGIN = 1
    CALL = 2
    PAYLOAD = 3
    MEMORY = 4
    TRACE = 5
    NOTE = 6
    STREAM = 7


class TraceCall(IntEnum):
    """What a TRACE row records: its handles in brackets."""

    EVENT_DELETION = 1  # (event)
    EVENT_RECORD = 2  # (event, stream)
    EVENT_WAIT = 3  # (event, stream)
    EVENT_SYNCHRONIZE = 4  # (event)
    STREAM_SYNCHRONIZE = 5  # (stream)
    DEVICE_SYNCHRONIZE = 6


class Note(IntEnum):
    """What a NOTE row records: its words in brackets."""

    EVENT_QUERY = 1  # (event handle, done)
    STREAM_QUERY = 2  # (stream handle, done, device)
    GRAPH_BEGIN = 3  # (graph, stream handle, device)
    GRAPH_END = 4  # (graph, stream handle, device, packed pool)
    GRAPH_LAUNCH = 5  # (graph, stream handle, device)
    HOST_ACCESS = 6  # (address, size, flags)
    EMPTY_WAIT = 7  # (stream handle, device): for an event that was never recorded
    LAUNCH = 8  # (name, stream handle, device, then for each access: address, size, flags)


class Action(IntEnum):
    """``c10::CachingDeviceAllocator::TraceEntry::Action``."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8
    FREED = 16  # not of PyTorch: a free that was requested and completed at once


class Row(NamedTuple):
    """One row: its kind, the thread that wrote it, the time in ns, and the words after these."""

    kind: int
    thread: int
    time: int
    words: tuple[int, ...]


def read_rows(log: bytes) -> Iterator[Row]:
    """Yield the rows of a log."""
    words, at, new = memoryview(log).cast("Q").tolist(), 0, tuple.__new__
    while at < len(words):
        head = words[at]
        end = at + (head >> 8 & 0xFFFFFFFF)
        yield new(Row, (head & 0xFF, head >> 40, words[at + 1], tuple(words[at + 2 : end])))
        at = end


def stacks_of_calls(log: bytes) -> dict[int, int]:
    """Return the stack of each call of an operator that a log has, by the call's number."""
    words, at, found = memoryview(log).cast("Q"), 0, {}
    while at < len(words):
        head = words[at]
        if head & 0xFF == RowKind.CALL:
            found[words[at + 2]] = words[at + 4]
        at += head >> 8 & 0xFFFFFFFF
    return found


def read_tensors(words: tuple[int, ...], count: int) -> Iterator[TensorView]:
    """Yield the `count` tensors that the words of a payload describe."""
    at = 0
    for _ in range(count):
        head, address, storage, storage_bytes, stream = words[at : at + 5]
        dimensions = head >> 48
        at += 5
        sizes, strides = words[at : at + dimensions], words[at + dimensions : at + 2 * dimensions]
        at += 2 * dimensions
        yield TensorView(
            position=head & 0xFF,
            is_result=bool(head >> 8 & 1),
            on_device=bool(head >> 16 & 1),
            is_pinned=bool(head >> 17 & 1),
            is_bound=bool(head >> 18 & 1),
            device=head >> 24 & 0xFF,
            item=head >> 32 & 0xFFFF,
            address=address,
            storage=storage,
            storage_bytes=storage_bytes,
            stream=stream,
            sizes=sizes,
            strides=tuple(s - (1 << 64) if s >> 63 else s for s in strides),
        )
