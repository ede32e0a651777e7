"""Why more is reserved than was asked for: causes that add up, and the blocks that pin each hole."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np

from cudatool.memory.blocks import SMALL_LIMIT, SMALL_PAGE
from cudatool.memory.rounding import round_sizes
from cudatool.memory.settings import Settings
from cudatool.overview.compiled import Compiled, compiled_sites
from cudatool.overview.moments import Layout, before_recording, layout_at, site_keys, site_labels
from cudatool.trace.events import SEGMENT_GAINS, Kind
from cudatool.trace.lifetimes import Ints, Lifetimes, Mask, Timeline, held_after, peaks
from cudatool.trace.model import Trace, is_of_kind, recorded_from

__all__ = [
    "Cause",
    "CauseShare",
    "Fragmentation",
    "Hole",
    "Occasion",
    "Pin",
    "Wanted",
    "fragmentation",
    "fragmentation_at",
]


class Occasion(StrEnum):
    """The moments for which the reserved memory is split by cause."""

    PEAK = "peak of reserved"
    OOM = "out of memory"


class Cause(StrEnum):
    """Why bytes are reserved that the program did not request. Each such byte has one cause."""

    ROUNDING = "rounding"
    """In blocks that the program holds: requests are rounded up."""
    UNSPLIT = "unsplit remainder"
    """In blocks that the program holds: what was left of the free block was too small to be split off."""
    PENDING = "held by stream use"
    """Blocks that the program freed and another stream may still use."""
    OTHER_POOL = "cached in another pool"
    """Free, but in another pool than the request that had to allocate, such as that of a graph."""
    OTHER_STREAM = "cached on another stream"
    """Free, but of another stream than the request that had to allocate."""
    OTHER_SIZE = "cached for other sizes"
    """Free, but in segments for small blocks while the request was a large one, or the other way round."""
    HOLE = "stranded holes"
    """Free, in segments that live blocks keep from being given back."""
    LIBRARY = "cached by another library"
    """Free, in the memory pool of another library than the allocator's, such as CuPy."""
    WHOLE_SEGMENT = "whole free segments"
    """Free segments: ``empty_cache`` would give them back."""
    NEW_SEGMENT = "rest of the new segment"
    """Free, in the segment that was just made for the request: it is larger, and the next requests take the rest."""


@dataclass(frozen=True, slots=True)
class CauseShare:
    """Bytes of one cause, and the number of blocks or free pieces that contain them."""

    cause: Cause
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A live block that prevents the release of a segment.

    Attributes
    ----------
    address, size
        Of the block, in bytes.
    stack, label
        Its allocation site: an index into the trace's stacks, and in words.
    lived
        ns since it was allocated; None where the trace has no clock.
    events
        Number of records since it was allocated.
    compiled
        The compiled code that allocated it.
    """

    address: int
    size: int
    stack: int
    label: str
    lived: int | None
    events: int
    compiled: Compiled = field(default_factory=Compiled)


@dataclass(frozen=True, slots=True)
class Hole:
    """A free piece of a segment that has live blocks.

    Attributes
    ----------
    address, size, cause
        Of the piece.
    segment_address, segment_size, stream, pool
        Of its segment. `pool` as in the records.
    pinned_by
        The number of live blocks in the segment.
    pins
        The oldest of them. For an expandable segment, which releases single pages, only the hole's neighbours.
    """

    address: int
    size: int
    cause: Cause
    segment_address: int
    segment_size: int
    stream: int
    pool: int
    pinned_by: int
    pins: tuple[Pin, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The request that made the allocator request memory from the driver.

    Attributes
    ----------
    size, stream, pool
        Of its block; bytes, and as in the records.
    index
        The record after which the request came.
    """

    size: int
    stream: int
    pool: int
    index: int


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Reserved memory at one moment, split by cause.

    ``reserved == requested + sum(share.size for share in causes)``, exactly.

    Attributes
    ----------
    device, index, time
        Whose memory, right after which record, at what time (ns).
    moment
        The kind of moment.
    reserved, active, requested
        Bytes: of all segments; of blocks not yet given back (with rounding); what the program asked for in the
        blocks that it holds.
    wanted
        The request that needed new memory, None if it was not recorded: then nothing counts as cached elsewhere.
    largest_usable
        The largest free piece that the request could have had, by pool and stream; 0 if none, or not known.
    releasable
        Bytes of segments with holes that could be released if the live blocks of each pool and stream were contiguous.
        0 if their segments of at least 2 MiB each are needed anyway.
    never_used
        Bytes of holes in which no block ever was: no order of the allocations fills them.
    causes
        One for each :class:`Cause`, in that order.
    holes
        The largest holes, the largest first.
    """

    device: int
    index: int
    time: int
    moment: Occasion
    reserved: int
    active: int
    requested: int
    wanted: Wanted | None
    largest_usable: int
    releasable: int
    never_used: int
    causes: tuple[CauseShare, ...]
    holes: tuple[Hole, ...]

    def size_of(self, cause: Cause) -> int:
        """Return the bytes of one cause."""
        return next(share.size for share in self.causes if share.cause == cause)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; bytes and ns."""
        return asdict(self)


_MOST_OOMS = 8
_MOST_HOLES = 20
_MOST_PINS = 8


def fragmentation(
    trace: Trace, blocks: Lifetimes, segments: Lifetimes, curve: Timeline, device: int, settings: Settings
) -> tuple[Fragmentation, ...]:
    """Return the split at the peak of reserved, then at the last 8 failed allocations; nothing without segments.

    Parameters
    ----------
    blocks, segments, curve
        Of this device.
    settings
        How requests were rounded.
    """
    if not curve.reserved.max(initial=0):
        return ()
    on_device = trace.records["device"] == device
    asked = on_device & is_of_kind(trace.records, Kind.BLOCK_ALLOC, Kind.OOM)
    peak = _peak(trace, curve, device, asked)
    request, wanted = _last_growth(trace, on_device, peak, recorded_from(trace, device))
    found = [
        fragmentation_at(
            trace, blocks, segments, device, peak, settings, moment=Occasion.PEAK, wanted=wanted, request=request
        )
    ]
    for index in np.flatnonzero(on_device & is_of_kind(trace.records, Kind.OOM))[-_MOST_OOMS:].tolist():
        wanted = _wanted(trace, index, index)
        found.append(
            fragmentation_at(trace, blocks, segments, device, index, settings, moment=Occasion.OOM, wanted=wanted)
        )
    return tuple(found)


def _peak(trace: Trace, curve: Timeline, device: int, asked: Mask) -> int:
    """Return the record with the most memory in use among those at peak reserved, from the first request on.

    Memory that is cached and unused then is unused at every other time with as much reserved. Memory that was cached
    before the recording and released before the first request is left out.
    """
    # Records that a reader put in front of the recording have no true order: the first moment is after the last of
    # them.
    recorded = recorded_from(trace, device)
    first = max(int(np.searchsorted(curve.index, recorded)) - 1, 0)
    if asked[recorded:].any():
        request = recorded + int(np.argmax(asked[recorded:]))
        first = max(first, min(int(np.searchsorted(curve.index, request)), len(curve.index) - 1))
    reserved, active = curve.reserved[first:], curve.active[first:]
    most = np.flatnonzero(reserved == reserved.max())
    return int(curve.index[first + most[np.argmax(active[most])]])


def _last_growth(trace: Trace, on_device: Mask, peak: int, recorded: int) -> tuple[int, Wanted | None]:
    """Return the record of the last request up to `peak` that needed new memory, and the request; -1 if none did."""
    grows = on_device & is_of_kind(trace.records, *SEGMENT_GAINS)
    growth = np.flatnonzero(grows[recorded : peak + 1])
    if not len(growth):
        return -1, None
    last = recorded + int(growth[-1])
    request = last + 1 + int(np.argmax(on_device[last + 1 :])) if on_device[last + 1 :].any() else -1
    if request < 0 or trace.records["kind"][request] != Kind.BLOCK_ALLOC:
        return -1, None
    others = np.flatnonzero((on_device & ~grows)[:last])
    return request, _wanted(trace, request, int(others[-1]) if len(others) else -1)


def _wanted(trace: Trace, request: int, index: int) -> Wanted:
    record = trace.records[request]
    return Wanted(int(record["size"]), int(record["stream"]), int(record["aux1"]), index)


def fragmentation_at(
    trace: Trace,
    blocks: Lifetimes,
    segments: Lifetimes,
    device: int,
    index: int,
    settings: Settings,
    *,
    moment: Occasion,
    wanted: Wanted | None,
    request: int = -1,
) -> Fragmentation:
    """Return the split of one device's memory right after record `index`; see :func:`fragmentation`.

    `request` is the record of the allocation that was `wanted`, if it is known.
    """
    layout = layout_at(blocks, segments, index)
    here, recorded = layout.segments, recorded_from(trace, device)
    is_block = layout.block >= 0
    live = blocks[layout.block[is_block]]
    held = index < live.freed
    rounded = round_sizes(live.requested, settings)
    rounded = np.minimum(rounded, live.size)  # never more than the block's size, whatever the settings were
    free = ~is_block
    size, segment = layout.size[free], layout.segment[free]
    live_blocks = np.bincount(layout.segment[is_block], minlength=len(here))
    free_in_segment = np.zeros(len(here), np.int64)
    np.add.at(free_in_segment, segment, size)
    cause_of_segment = _causes(here, live_blocks, free_in_segment, wanted, blocks)
    if index == request:  # at any other time its memory is not new
        made_for = is_block & (layout.address == trace.records["address"][index])
        new = layout.segment[made_for]
        cause_of_segment[new[~here.expandable[new]]] = _FREE.index(Cause.NEW_SEGMENT)
    cause_of_piece = cause_of_segment[segment]

    shares = [
        _share(Cause.ROUNDING, (rounded - live.requested)[held]),
        _share(Cause.UNSPLIT, (live.size - rounded)[held]),
        _share(Cause.PENDING, live.size[~held]),
        *(_share(cause, size[cause_of_piece == i]) for i, cause in enumerate(_FREE)),
    ]
    return Fragmentation(
        device=device,
        index=index,
        time=int(trace.records["time"][index]),
        moment=moment,
        reserved=int(here.size.sum()),
        active=int(live.size.sum()),
        requested=int(live.requested[held].sum()),
        wanted=wanted,
        largest_usable=_largest_usable(layout_at(blocks, segments, wanted.index), wanted) if wanted else 0,
        releasable=_releasable(here, free_in_segment, cause_of_segment == _FREE.index(Cause.HOLE)),
        never_used=_never_used(
            blocks, layout, index, np.flatnonzero(free)[cause_of_piece == _FREE.index(Cause.HOLE)], recorded
        ),
        causes=tuple(shares),
        holes=_holes(trace, blocks, layout, live_blocks, cause_of_piece, index),
    )


def _share(cause: Cause, sizes: Ints) -> CauseShare:
    return CauseShare(cause, int(sizes.sum()), int(np.count_nonzero(sizes)))


_FREE: Final = (
    Cause.OTHER_POOL,
    Cause.OTHER_STREAM,
    Cause.OTHER_SIZE,
    Cause.LIBRARY,
    Cause.HOLE,
    Cause.WHOLE_SEGMENT,
    Cause.NEW_SEGMENT,
)


def _causes(here: Lifetimes, live_blocks: Ints, free: Ints, wanted: Wanted | None, blocks: Lifetimes) -> Ints:
    """Return which of `_FREE` applies to the free pieces of each segment.

    Free memory in another pool, of another stream or for other sizes explains the memory taken for a request only up to
    the most that such requests used at any time, a few small blocks do not explain gigabytes; or up to what keeping
    pools, streams or sizes apart takes, as each may hold free what it used at a time of its own.

    Parameters
    ----------
    free
        Bytes that are free in each segment.
    blocks
        All blocks of the recording.
    """
    own = np.where(live_blocks == 0, _FREE.index(Cause.WHOLE_SEGMENT), _FREE.index(Cause.HOLE))
    own = np.where(here.library != 0, _FREE.index(Cause.LIBRARY), own)
    if wanted is None:
        return own
    elsewhere = [
        here.pool != wanted.pool,
        here.stream != wanted.stream,
        here.small != (wanted.size <= SMALL_LIMIT),
    ]
    cause: Ints = np.select(elsewhere, range(len(elsewhere)), default=-1)
    used = max(_most_in_use(blocks, wanted), wanted.size)
    kinds: tuple[Ints, ...] = (blocks.pool, blocks.stream, (blocks.size <= SMALL_LIMIT).astype(np.int64))
    for number, kind in enumerate(kinds):
        found = free[cause == number].sum()
        if found > 2 * used and found > 2 * _taken_by_separation(blocks, kind):
            cause[cause == number] = -1
    result: Ints = np.where((cause < 0) | (here.library != 0), own, cause)
    return result


def _most_in_use(blocks: Lifetimes, wanted: Wanted) -> int:
    """Return the most bytes at a time in blocks of the pool, the stream and the size class of a request."""
    alike = (blocks.pool == wanted.pool) & (blocks.stream == wanted.stream)
    alike &= (blocks.size <= SMALL_LIMIT) == (wanted.size <= SMALL_LIMIT)
    own = blocks[alike]
    return int(held_after(own, own.end).max(initial=0))


def _taken_by_separation(blocks: Lifetimes, kind: Ints) -> int:
    """Return by how much the most that each kind of blocks used at a time exceeds, in sum, the most that all used.

    Each is rounded up to the smallest segment: a pool for one block of 512 bytes reserves one of 2 MiB.
    """
    kinds, group = np.unique(kind, return_inverse=True)
    together = peaks(blocks, np.zeros(len(blocks), np.int64), 1)
    apart = peaks(blocks, group, len(kinds))
    return int((-(-apart // SMALL_PAGE)).sum() + (together // -SMALL_PAGE).sum()) * SMALL_PAGE


def _releasable(here: Lifetimes, free: Ints, has_holes: Mask) -> int:
    """Return the bytes of segments with holes whose live blocks would fit into the other segments."""
    kinds: dict[tuple[int, int, bool, bool], list[tuple[int, int]]] = {}
    columns = (here.stream, here.pool, here.small, here.expandable, here.size, free)
    for *kind, size, room in zip(*(column[has_holes].tolist() for column in columns), strict=True):
        kinds.setdefault(tuple(kind), []).append((size, room))
    found = 0
    for (*_, expandable), own in kinds.items():
        room = sum(room for _, room in own)
        if expandable:
            found += room // SMALL_PAGE * SMALL_PAGE
            continue
        for size, _ in sorted(own, reverse=True):
            if size <= room:
                room -= size
                found += size
    return found


def _never_used(blocks: Lifetimes, layout: Layout, index: int, holes: Ints, recorded: int) -> int:
    """Return the bytes of those pieces that no block had since their segments were made, if that is recorded."""
    here, begin, end = layout.segments, layout.address[holes], (layout.address + layout.size)[holes]
    if not len(holes):
        return 0
    owner = np.searchsorted(here.address, blocks.address, side="right") - 1
    gone = (blocks.end <= index) & (owner >= 0) & (blocks.start >= here.start[owner])
    gone &= blocks.address < (here.address + here.size)[owner]
    address = blocks.address[gone]
    # How many of the blocks that are gone lie in each piece, or reach into it: by the pieces where they begin and stop.
    change = np.zeros(len(holes) + 1, np.int64)
    np.add.at(change, np.searchsorted(end, address, side="right"), 1)
    np.add.at(change, np.searchsorted(begin, address + blocks.size[gone], side="left"), -1)
    never = (np.cumsum(change)[:-1] == 0) & (here.start[layout.segment[holes]] >= recorded)
    never &= ~here.expandable[layout.segment[holes]]  # what is mapped there grows by pages
    return int((end - begin)[never].sum())


def _largest_usable(layout: Layout, wanted: Wanted) -> int:
    here = layout.segments
    usable = (here.pool == wanted.pool) & (here.stream == wanted.stream)
    usable &= (here.small == (wanted.size <= SMALL_LIMIT)) & (here.library == 0)
    free = (layout.block < 0) & usable[layout.segment]
    return int(layout.size[free].max(initial=0))


def _holes(
    trace: Trace, blocks: Lifetimes, layout: Layout, live_blocks: Ints, cause_of_piece: Ints, index: int
) -> tuple[Hole, ...]:
    """Return the largest free pieces of segments that have live blocks."""
    pieces = np.flatnonzero(layout.block < 0)
    pinned = live_blocks[layout.segment[pieces]] > 0
    pinned &= cause_of_piece != _FREE.index(Cause.NEW_SEGMENT)
    pieces, causes = pieces[pinned], cause_of_piece[pinned]
    largest = np.argsort(-layout.size[pieces], kind="stable")[:_MOST_HOLES]
    clock = trace.header.get("time_axis") != "index"
    chosen = pieces[largest].tolist()
    pins = []
    for piece in chosen:
        segment = int(layout.segment[piece])
        first, last = np.searchsorted(layout.segment, [segment, segment + 1])
        if layout.segments.expandable[segment]:
            first, last = max(first, piece - 1), min(last, piece + 2)
        rows = layout.block[first:last]
        rows = rows[rows >= 0]
        pins.append(rows[np.argsort(blocks.start[rows], kind="stable")][:_MOST_PINS].tolist())
    label = _site_labels(trace, blocks, sorted({row for rows in pins for row in rows}))

    def pin(row: int) -> Pin:
        stack, start = int(blocks.stack[row]), int(blocks.start[row])
        lived = int(trace.records["time"][index] - trace.records["time"][start]) if clock else None
        (compiled,) = compiled_sites(trace, blocks[row : row + 1], np.zeros(1, np.int64), [stack])
        address, size = int(blocks.address[row]), int(blocks.size[row])
        return Pin(address, size, stack, label[row], lived, index - start, compiled)

    return tuple(
        Hole(
            address=int(layout.address[piece]),
            size=int(layout.size[piece]),
            cause=_FREE[cause],
            segment_address=int(layout.segments.address[layout.segment[piece]]),
            segment_size=int(layout.segments.size[layout.segment[piece]]),
            stream=int(layout.segments.stream[layout.segment[piece]]),
            pool=int(layout.segments.pool[layout.segment[piece]]),
            pinned_by=int(live_blocks[layout.segment[piece]]),
            pins=tuple(pin(row) for row in rows),
        )
        for piece, cause, rows in zip(chosen, causes[largest].tolist(), pins, strict=True)
    )


def _site_labels(trace: Trace, blocks: Lifetimes, rows: list[int]) -> dict[int, str]:
    """Return the label of the call site of each of these blocks; different sites get distinct labels."""
    own = blocks[np.array(rows, np.int64)]
    keys, site = site_keys(own)
    before = np.ones(len(keys), np.bool_)
    np.logical_and.at(before, site, before_recording(trace, own))
    labels = site_labels(trace, keys, before)
    return {row: labels[number] for row, number in zip(rows, site.tolist(), strict=True)}
