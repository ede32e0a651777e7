"""Who holds pinned host memory, by library and call site, when most of it is pinned.

What a caching allocator took from the driver is split: blocks in use belong to the call sites that asked for them, the
rest to those at which the allocator grew.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cudatool.overview.ledger import Holder, owner_of
from cudatool.overview.moments import site_labels
from cudatool.trace.events import HostFlag, Kind
from cudatool.trace.lifetimes import Ints, Lifetimes, rows_from
from cudatool.trace.model import Trace, is_of_kind

__all__ = ["PinnedHolders", "PinnedSite", "pinned_blocks", "pinned_holders"]

_CACHING: Final = "cudatool's runtime"  # no other caching allocator of pinned memory tells its blocks


@dataclass(frozen=True, slots=True)
class PinnedSite:
    """Pinned memory of one call site.

    Attributes
    ----------
    holder
        Whether it is blocks in use, the rest that a caching allocator keeps, or memory straight from the driver.
    owner
        The library, or the program itself.
    stack
        Index into the trace's stacks, 0 where none was recorded.
    label
        The call site in words.
    size, count
        Bytes, and the number of blocks or of allocations from the driver.
    """

    holder: Holder
    owner: str
    stack: int
    label: str
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class PinnedHolders:
    """Pinned host memory when most was pinned: of these moments, the first with most of it in use.

    Attributes
    ----------
    index, time
        The record, and its time in ns.
    size, now
        Bytes then, and at the end.
    sites
        The largest first; together they are `size`.
    """

    index: int
    time: int
    size: int
    now: int
    sites: tuple[PinnedSite, ...]


@dataclass(slots=True)
class _Piece:
    """Memory from the driver, or a block."""

    start: int
    address: int
    size: int
    stack: int
    end: int
    is_block: bool
    inside: _Piece | None = None
    is_cache: bool = False


def pinned_holders(trace: Trace) -> PinnedHolders | None:
    """Return who holds pinned host memory at its peak; None if the recording has no event of any."""
    pieces = _pieces(trace)
    if not pieces:
        return None
    never = len(trace.records)
    # A block is inside of what the driver gave; only one from before the recording has to be counted itself.
    level = _level([piece for piece in pieces if piece.inside is None], never)
    # Memory is taken before a block of it is handed out: that is no cached one.
    in_use = _level([piece for piece in pieces if piece.is_block], never)
    most = np.flatnonzero(level == level.max())
    peak = int(most[np.argmax(in_use[most])])
    live = [piece for piece in pieces if piece.start <= peak < piece.end]
    return PinnedHolders(
        index=peak,
        time=int(trace.records["time"][peak]),
        size=int(level[peak]),
        now=int(level[-1]),
        sites=_sites(trace, live),
    )


def pinned_blocks(trace: Trace) -> Lifetimes:
    """Return the blocks of pinned host memory: those of a caching allocator, else what the driver gave."""
    held = [piece for piece in _pieces(trace) if not piece.is_cache]
    start, size, end = np.array([(one.start, one.size, one.end) for one in held], np.int64).reshape(-1, 3).T
    return rows_from(trace, start, size, end, end)


def _level(pieces: Sequence[_Piece], never: int) -> Ints:
    """Return the bytes in `pieces` right after each of `never` records."""
    change = np.zeros(never + 1, np.int64)
    for piece in pieces:
        change[piece.start] += piece.size
        change[piece.end] -= piece.size
    result: Ints = np.cumsum(change[:-1])
    return result


def _pieces(trace: Trace) -> list[_Piece]:
    """Return what was pinned, and the blocks in it, from when to when."""
    records, found = trace.records, list[_Piece]()
    never = len(records)
    index = np.flatnonzero(is_of_kind(records, Kind.HOST_ALLOC, Kind.HOST_FREE))
    # PyTorch's operators name the tensors that they pin, in memory that is of the driver's calls.
    of_driver = np.array([name.startswith("cu") for name in trace.names], np.bool_)
    live: tuple[dict[int, _Piece], dict[int, _Piece]] = {}, {}
    begins: list[int] = []  # of what the driver gave, sorted
    names = ("kind", "flags", "address", "size", "aux0", "stack", "name")
    columns = (records[name][index].tolist() for name in names)
    for i, kind, flags, address, size, rounded, stack, name in zip(index.tolist(), *columns, strict=True):
        is_block = bool(flags & HostFlag.BLOCK)
        if not is_block and not of_driver[name]:
            continue
        gone = live[is_block].pop(address, None)
        if gone is not None:
            gone.end = i
            if not is_block:
                begins.remove(address)
        if kind == Kind.HOST_ALLOC:
            piece = live[is_block][address] = _Piece(i, address, rounded if is_block else size, stack, never, is_block)
            found.append(piece)
            if not is_block:
                insort(begins, address)
            elif at := bisect_right(begins, address):
                around = live[0][begins[at - 1]]
                if address + piece.size <= around.address + around.size:
                    piece.inside, around.is_cache = around, True
    return found


def _sites(trace: Trace, live: Sequence[_Piece]) -> tuple[PinnedSite, ...]:
    sums: dict[tuple[Holder, str, int, int], list[int]] = {}
    for holder, owner, piece, size in _held(trace, live):
        key = holder, owner, piece.stack, 0 if piece.stack else piece.size
        of_site = sums.setdefault(key, [0, 0])
        of_site[0] += size
        of_site[1] += 1
    keys: Ints = np.array([key[2:] for key in sums], np.int64).reshape(-1, 2)
    unique, which = np.unique(keys, axis=0, return_inverse=True)
    words = site_labels(trace, unique, np.zeros(len(unique), np.bool_))
    labels = [words[number] for number in which.reshape(-1).tolist()]
    sites = (
        PinnedSite(holder, owner, stack, label, size, count)
        for ((holder, owner, stack, _), (size, count)), label in zip(sums.items(), labels, strict=True)
    )
    return tuple(sorted(sites, key=lambda site: (-site.size, site.label)))


def _held(trace: Trace, live: Sequence[_Piece]) -> Iterator[tuple[Holder, str, _Piece, int]]:
    """Yield who holds each piece, and how many bytes of it."""
    used: dict[int, int] = {}
    for piece in live:
        if piece.inside is not None:
            used[piece.inside.start] = used.get(piece.inside.start, 0) + piece.size
    for piece in live:
        if piece.is_block:
            yield Holder.BLOCKS, _CACHING, piece, piece.size
        elif not piece.is_cache:
            yield Holder.LIBRARY, owner_of(trace.stack(piece.stack)), piece, piece.size
        elif rest := piece.size - used.get(piece.start, 0):
            yield Holder.CACHED, _CACHING, piece, rest
