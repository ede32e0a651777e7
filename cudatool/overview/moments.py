"""Which call sites held memory at the peak, and the layout of segments and blocks at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cudatool.overview.compiled import Compiled, compiled_sites
from cudatool.trace.distinct import distinct
from cudatool.trace.events import Kind
from cudatool.trace.frames import MissingStack, call_site, call_sites, missing_stack
from cudatool.trace.lifetimes import Ints, Lifetimes, Mask, distinct_pairs
from cudatool.trace.model import Trace, recorded_from
from cudatool.units import exact_bytes

__all__ = [
    "Alike",
    "Block",
    "CallSite",
    "Layout",
    "Segment",
    "before_recording",
    "by_call_site",
    "index_at",
    "layout_at",
    "segments_at",
    "site_keys",
    "site_labels",
    "torch_segments",
    "without_stack",
]


def index_at(trace: Trace, time: int) -> int:
    """Return the last record at or before `time` (ns), -1 if all are later."""
    return int(np.searchsorted(np.maximum.accumulate(trace.records["time"]), time, side="right")) - 1


@dataclass(frozen=True, slots=True)
class Alike:
    """Where most requests of one size come from whose stacks are known: `count` of `of` such requests from `label`."""

    label: str
    count: int
    of: int


@dataclass(frozen=True, slots=True)
class CallSite:
    """The memory of one call site.

    Attributes
    ----------
    stack
        Index into the trace's stacks, 0 where none was recorded.
    requested
        The requested bytes of its blocks, together.
    label
        The frame to look at first, as :func:`cudatool.trace.frames.call_sites` chooses it.
    size, count
        Bytes and number of blocks.
    missing_stack
        Why it has no stack, None if it has one.
    compiled
        The compiled code of the site.
    alike
        Of blocks without a stack: where others of their size come from, None if that is not known.
    """

    stack: int
    requested: int
    label: str
    size: int
    count: int
    missing_stack: MissingStack | None = None
    compiled: Compiled = field(default_factory=Compiled)
    alike: Alike | None = None

    @property
    def described(self) -> str:
        """The label, with what is known of compiled code, and of where others of its size come from."""
        text = self.compiled.described(self.label)
        if self.alike is None:
            return text
        return f"{text} [{self.alike.count:,} of {self.alike.of:,} with a stack: {self.alike.label}]"


def site_keys(blocks: Lifetimes) -> tuple[Ints, Ints]:
    """Return the call sites of `blocks`, a row (stack, requested) each, and the number of each block's site."""
    return distinct_pairs(blocks.stack, np.where(blocks.stack == 0, blocks.requested, 0))


def site_labels(trace: Trace, sites: Ints, before: Mask) -> list[str]:
    """Return call sites, a row (stack, requested) each, in words; each distinct from the others.

    Those without a stack say why, and the size of their blocks.

    Parameters
    ----------
    before
        Whether each has only blocks from before the recording.
    """
    labels = call_sites([trace.stack(stack) for stack in sites[:, 0].tolist()])
    return [
        label or without_stack(missing_stack(trace, before=was_there), requested)
        for label, requested, was_there in zip(labels, sites[:, 1].tolist(), before.tolist(), strict=True)
    ]


def without_stack(why: MissingStack, requested: int) -> str:
    """Return a call site without a stack in words."""
    return f"{why.text}, {exact_bytes(requested)} each"


def before_recording(trace: Trace, blocks: Lifetimes) -> Mask:
    """Return whether each block existed before the recording of its device began."""
    begin = {device: recorded_from(trace, device) for device in distinct(blocks.device).tolist()}
    result: Mask = blocks.start < np.array([begin[device] for device in blocks.device.tolist()], np.int64)
    return result


def by_call_site(trace: Trace, blocks: Lifetimes, others: Lifetimes | None = None) -> tuple[CallSite, ...]:
    """Return the bytes in `blocks` by call site, the largest first.

    Parameters
    ----------
    others
        Blocks that may tell where those without a stack come from, as programs ask for one size at few places.
    """
    keys, site = site_keys(blocks)
    size = np.zeros(len(keys), np.int64)
    np.add.at(size, site, blocks.size)
    count = np.bincount(site, minlength=len(keys))
    asked = np.zeros(len(keys), np.int64)
    np.add.at(asked, site, blocks.requested)
    before = np.ones(len(keys), np.bool_)
    np.logical_and.at(before, site, before_recording(trace, blocks))
    stacks = keys[:, 0].tolist()
    missing = [
        None if trace.stacks[stack] else missing_stack(trace, before=was_there)
        for stack, was_there in zip(stacks, before.tolist(), strict=True)
    ]
    columns = (stacks, asked.tolist(), site_labels(trace, keys, before), size.tolist(), count.tolist())
    compiled = compiled_sites(trace, blocks, site, stacks)
    sizes = keys[:, 1].tolist()
    wanted = [one for one, why in zip(sizes, missing, strict=True) if why is not None]
    known = {} if others is None or not wanted else _alike(trace, others, wanted)
    alike = [None if why is None else known.get(one) for one, why in zip(sizes, missing, strict=True)]
    sites = (CallSite(*row) for row in zip(*columns, missing, compiled, alike, strict=True))
    return tuple(sorted(sites, key=lambda site: -site.size))


def _alike(trace: Trace, blocks: Lifetimes, sizes: Sequence[int]) -> dict[int, Alike]:
    """Return by size where most of `blocks`, and of the requests that failed, come from that have a stack."""
    has_stack = np.array([bool(stack) for stack in trace.stacks])
    found: dict[int, Counter[str]] = {size: Counter() for size in sizes}
    known = has_stack[blocks.stack] & np.isin(blocks.requested, sizes)
    pairs, pair = distinct_pairs(blocks.stack[known], blocks.requested[known])
    for (stack, size), count in zip(pairs.tolist(), np.bincount(pair, minlength=len(pairs)).tolist(), strict=True):
        found[size][call_site(trace.stack(stack))] += count
    failed = trace.of_kind(Kind.OOM)
    for stack, size in zip(failed["stack"].tolist(), failed["size"].tolist(), strict=True):
        if has_stack[stack] and size in found:
            found[size][call_site(trace.stack(stack))] += 1
    return {size: Alike(*sites.most_common(1)[0], sites.total()) for size, sites in found.items() if sites}


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments, and the pieces that fill them from the first byte to the last. Columns.

    Attributes
    ----------
    segments
        A row for each segment, by device and address. Neighbouring runs of mapped pages are joined.
    segment
        For each piece, by device and address: its row in `segments`.
    address, size
        Of each piece.
    block
        The row of the piece's block in the lifetimes that the layout was made from, -1 if the piece is free.
    """

    segments: Lifetimes
    segment: Ints
    address: Ints
    size: Ints
    block: Ints


def layout_at(blocks: Lifetimes, segments: Lifetimes, index: int) -> Layout:
    """Return the layout of memory right after record `index`. Blocks outside of every segment are left out."""
    here = _joined_runs(segments.at(index))
    live = np.flatnonzero((blocks.start <= index) & (index < blocks.end))
    live = live[np.lexsort((blocks.address[live], blocks.device[live]))]
    parts = []
    for device in distinct(here.device).tolist():
        own = np.flatnonzero(here.device == device)
        parts.append(_pieces(blocks, live[blocks.device[live] == device], here, own))
    segment, address, size, block = np.concatenate([np.zeros((4, 0), np.int64), *parts], axis=1)
    return Layout(here, segment, address, size, block)


def _joined_runs(segments: Lifetimes) -> Lifetimes:
    """Return segments by device and address, those that are mapped piece by piece joined where they touch."""
    if not len(segments):
        return segments
    segments = segments[np.lexsort((segments.address, segments.device))]
    touch = segments.address[1:] == segments.address[:-1] + segments.size[:-1]
    for column in (segments.device, segments.stream, segments.pool, segments.small):
        touch &= column[1:] == column[:-1]
    first = np.flatnonzero(np.append(True, ~(touch & segments.expandable[1:] & segments.expandable[:-1])))
    return replace(segments[first], size=np.add.reduceat(segments.size, first))


def _pieces(blocks: Lifetimes, live: Ints, segments: Lifetimes, own: Ints) -> Ints:
    """Return segment, address, size and block of the pieces of one device's segments `own`, by address."""
    begin = segments.address[own]
    end = begin + segments.size[own]
    owner = np.searchsorted(begin, blocks.address[live], side="right") - 1
    inside = (owner >= 0) & (blocks.address[live] < end[owner])
    live, owner = live[inside], owner[inside]
    address, size = blocks.address[live], blocks.size[live]
    covered = np.maximum.accumulate(np.minimum(address + size, end[owner]))  # where each block ends
    before = np.maximum(np.append(0, covered)[:-1], begin[owner])
    # Free pieces: in front of each block, and after the last one of each segment.
    last = np.searchsorted(owner, np.arange(len(own)), side="right")
    tail = np.maximum(np.append(0, covered)[last], begin)
    free_owner = np.concatenate([owner, np.arange(len(own))])
    free_address = np.concatenate([before, tail])
    free_size = np.concatenate([address - before, end - tail])
    free = free_size > 0
    pieces = np.concatenate(
        [
            np.stack([own[owner], address, size, live]),
            np.stack([own[free_owner[free]], free_address[free], free_size[free], np.full(free.sum(), -1)]),
        ],
        axis=1,
    )
    result: Ints = pieces[:, np.argsort(pieces[1], kind="stable")]
    return result


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
    layout = layout_at(blocks, segments, index)
    here = layout.segments
    held = layout.block >= 0
    own = blocks[layout.block[held]]
    requested, stack = np.zeros((2, len(held)), np.int64)
    requested[held], stack[held] = own.requested, own.stack
    state = np.full(len(held), "inactive", "<U19")
    state[held] = np.where(index < own.freed, "active_allocated", "active_pending_free")
    filled: list[list[Block]] = [[] for _ in range(len(here))]
    columns = (layout.segment, layout.address, layout.size, requested, state, stack)
    for row, *block in zip(*(column.tolist() for column in columns), strict=True):
        filled[row].append(Block(*block))
    names = ("device", "address", "size", "stream", "pool", "small", "expandable", "stack")
    rows = zip(*(getattr(here, name).tolist() for name in names), strict=True)
    return tuple(
        Segment(**dict(zip(names, row, strict=True)), blocks=tuple(pieces))
        for row, pieces in zip(rows, filled, strict=True)
    )


def torch_segments(trace: Trace, segments: tuple[Segment, ...]) -> list[dict[str, Any]]:
    """Return `segments` in the schema of ``torch.cuda.memory._snapshot()["segments"]``.

    Streams are ids of the trace and pools numbers; :func:`cudatool.export.torch_pickle.write` spells them out.
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
