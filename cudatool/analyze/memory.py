"""How much memory there was when, who held it at the peak, and how segments and blocks lay at any moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatool.analyze.lifetimes import Ints, Lifetimes
from cudatool.trace.model import Frame, Trace

__all__ = [
    "Block",
    "CallSite",
    "Segment",
    "Timeline",
    "by_call_site",
    "call_site",
    "index_at",
    "segments_at",
    "timeline",
    "torch_segments",
]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes right after each event that changed them; all columns have the same length.

    Attributes
    ----------
    index, time
        The event's record, and its time in ns.
    allocated
        In blocks that the program holds.
    active
        Also in blocks that it gave back and a stream may still use.
    reserved
        Taken from the driver.
    """

    index: Ints
    time: Ints
    allocated: Ints
    active: Ints
    reserved: Ints

    def peak(self) -> int:
        """Return the row of the first moment with the most bytes allocated, -1 if nothing ever was."""
        return int(np.argmax(self.allocated)) if len(self.index) else -1


def timeline(trace: Trace, blocks: Lifetimes, segments: Lifetimes) -> Timeline:
    """Return the bytes in `blocks` and `segments` over time."""
    count = len(trace.records)
    spans = [(blocks, blocks.freed), (blocks, blocks.end), (segments, segments.end)]
    columns = []
    touched = np.zeros(count + 1, np.bool_)
    for rows, end in spans:
        delta = np.zeros(count + 1, np.int64)
        np.add.at(delta, rows.start, rows.size)
        np.subtract.at(delta, end, rows.size)
        touched[rows.start] = touched[end] = True
        columns.append(np.cumsum(delta))
    index = np.flatnonzero(touched[:count])
    allocated, active, reserved = (column[index] for column in columns)
    return Timeline(index, trace.records["time"][index], allocated, active, reserved)


def index_at(trace: Trace, time: int) -> int:
    """Return the last record at or before `time` (ns), -1 if all are later."""
    return int(np.searchsorted(np.maximum.accumulate(trace.records["time"]), time, side="right")) - 1


@dataclass(frozen=True, slots=True)
class CallSite:
    """What one stack holds.

    Attributes
    ----------
    stack
        Index into the trace's stacks.
    label
        The frame to look at first, as :func:`call_site` chooses it.
    size, count
        Bytes and number of blocks.
    """

    stack: int
    label: str
    size: int
    count: int


def by_call_site(trace: Trace, blocks: Lifetimes) -> tuple[CallSite, ...]:
    """Return the bytes in `blocks` by stack, the largest first."""
    stacks, inverse, count = np.unique(blocks.stack, return_inverse=True, return_counts=True)
    size = np.zeros(len(stacks), np.int64)
    np.add.at(size, inverse, blocks.size)
    sites = (
        CallSite(int(stack), call_site(trace.stack(int(stack))), int(s), int(n))
        for stack, s, n in zip(stacks, size, count, strict=True)
    )
    return tuple(sorted(sites, key=lambda site: -site.size))


_LIBRARIES = ("site-packages/", "dist-packages/", "torch/", "<frozen ", "/lib/python")


def call_site(stack: tuple[Frame, ...]) -> str:
    """Return the innermost frame of the user's own code, as ``"train.py:12 (step)"``.

    Where that is not the innermost of all, the library's is added: ``"train.py:12 (step) via adam.py:178 (init)"``.
    Frames of C++ are passed over as long as there is any other.
    """
    python = [frame for frame in stack if frame.line > 0 and not frame.file.endswith((".cpp", ".cc", ".h", ".c"))]
    innermost = next(iter([*python, *stack]), None)
    if innermost is None:
        return "(no stack recorded)"
    own = next((f for f in python if not any(library in f.file for library in _LIBRARIES)), innermost)
    return _frame(own) if own == innermost else f"{_frame(own)} via {_frame(innermost)}"


def _frame(frame: Frame) -> str:
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} ({frame.function})"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a segment: ``state`` is "active_allocated", "active_pending_free" or "inactive", as in PyTorch."""

    address: int
    size: int
    requested: int
    state: str
    stack: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment with the blocks that fill it from its first byte to its last."""

    device: int
    address: int
    size: int
    stream: int
    pool: int
    small: bool
    expandable: bool
    stack: int
    blocks: tuple[Block, ...]


def segments_at(blocks: Lifetimes, segments: Lifetimes, index: int) -> tuple[Segment, ...]:
    """Return the segments right after record `index`, by device and address; runs of mapped pages are joined."""
    live, reserved = blocks.at(index), segments.at(index)
    live = live[np.lexsort((live.address, live.device))]
    reserved = reserved[np.lexsort((reserved.address, reserved.device))]
    runs: list[tuple[int, int]] = []  # first row of `reserved`, size
    for row in range(len(reserved)):
        if runs and reserved.expandable[row]:
            first, size = runs[-1]
            if (
                reserved.expandable[first]
                and reserved.device[first] == reserved.device[row]
                and reserved.address[first] + size == reserved.address[row]
            ):
                runs[-1] = first, size + int(reserved.size[row])
                continue
        runs.append((row, int(reserved.size[row])))
    result = []
    for row, size in runs:
        own = live.of_device(int(reserved.device[row]))
        begin = int(reserved.address[row])
        first, last = np.searchsorted(own.address, [begin, begin + size])
        result.append(
            Segment(
                device=int(reserved.device[row]),
                address=begin,
                size=size,
                stream=int(reserved.stream[row]),
                pool=int(reserved.pool[row]),
                small=bool(reserved.small[row]),
                expandable=bool(reserved.expandable[row]),
                stack=int(reserved.stack[row]),
                blocks=_filled(own[np.arange(first, last)], begin, size, index),
            )
        )
    return tuple(result)


def _filled(live: Lifetimes, begin: int, size: int, index: int) -> tuple[Block, ...]:
    """Return the live blocks with the free ones between them."""
    result, here = [], begin
    for row in range(len(live)):
        address = int(live.address[row])
        if here < address:
            result.append(Block(here, address - here, 0, "inactive", 0))
        state = "active_allocated" if index < live.freed[row] else "active_pending_free"
        result.append(Block(address, int(live.size[row]), int(live.requested[row]), state, int(live.stack[row])))
        here = max(here, address + int(live.size[row]))
    if here < begin + size:
        result.append(Block(here, begin + size - here, 0, "inactive", 0))
    return tuple(result)


def torch_segments(trace: Trace, segments: tuple[Segment, ...]) -> list[dict[str, Any]]:
    """Return `segments` in the schema of ``torch.cuda.memory._snapshot()["segments"]``.

    Streams are ids of the trace and pools numbers; :func:`cudatool.collect.torch_snapshot.write` spells them out.
    """
    frames = [{"filename": f.file, "name": f.function, "line": f.line} for f in trace.frames]

    def stack(number: int) -> list[dict[str, Any]]:
        return [frames[i] for i in trace.stacks[number]]

    result = []
    for segment in segments:
        allocated = [b for b in segment.blocks if b.state == "active_allocated"]
        active = [b for b in segment.blocks if b.state != "inactive"]
        result.append(
            {
                "device": segment.device,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": sum(b.size for b in allocated),
                "active_size": sum(b.size for b in active),
                "requested_size": sum(b.requested for b in active),
                "stream": segment.stream,
                "segment_type": "small" if segment.small else "large",
                "segment_pool_id": segment.pool,
                "is_expandable": segment.expandable,
                "frames": stack(segment.stack),
                "blocks": [
                    {
                        "address": b.address,
                        "size": b.size,
                        "requested_size": b.requested,
                        "state": b.state,
                        "frames": stack(b.stack),
                    }
                    for b in segment.blocks
                ],
            }
        )
    return result
