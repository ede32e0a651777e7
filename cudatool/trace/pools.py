"""Memory pools of libraries inside of what they took from the driver: which blocks ended when, and whose a chunk is.

A library's hook may miss events: those of threads that it does not know. So a block also ends when its bytes are handed
out again, or when the driver's allocation that contains it, its chunk, is freed. A chunk is the library's from the
first block on that is seen in it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from cudatool.trace.events import Kind

__all__ = ["KINDS", "LibraryPools", "Piece", "Pooled", "pooled"]

KINDS: Final = (Kind.MEM_ALLOC, Kind.MEM_FREE, Kind.POOL_ALLOC, Kind.POOL_FREE)
"""Events that change what :class:`LibraryPools` knows."""


_OF_POOLS: Final = np.isin(np.arange(256), KINDS)


@dataclass(slots=True)
class Piece:
    """A block, or a chunk.

    Attributes
    ----------
    address, size
        In bytes.
    key
        What the caller calls it.
    library
        Index of the name of the library whose pool it is in; 0 for memory of the driver without a known block.
    """

    address: int
    size: int
    key: int
    library: int = 0


class _Places:
    """Pieces that do not overlap, by address."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._at: dict[int, Piece] = {}

    def __iter__(self) -> Iterator[Piece]:
        return iter(self._at.values())

    def put(self, piece: Piece) -> list[Piece]:
        """Add a piece; return those in its place, which are gone."""
        gone = self.take_out(piece.address, piece.size)
        if piece.address not in self._at:
            insort(self._begins, piece.address)
        self._at[piece.address] = piece
        return gone

    def pop(self, address: int) -> Piece | None:
        """Remove the piece that begins at an address."""
        found = self._at.pop(address, None)
        if found is not None:
            del self._begins[bisect_left(self._begins, address)]
        return found

    def containing(self, address: int) -> Piece | None:
        """Return the piece with this byte."""
        at = bisect_right(self._begins, address) - 1
        found = self._at[self._begins[at]] if at >= 0 else None
        return found if found is not None and address < found.address + found.size else None

    def take_out(self, address: int, size: int) -> list[Piece]:
        """Remove the pieces that have a byte in this range."""
        first, last = bisect_left(self._begins, address), bisect_left(self._begins, address + size)
        if first and self.containing(address) is self._at[self._begins[first - 1]]:
            first -= 1
        gone = [self._at.pop(begin) for begin in self._begins[first:last]]
        del self._begins[first:last]
        return gone


class LibraryPools:
    """What the driver's allocations and libraries' pools contain now."""

    def __init__(self) -> None:
        self._chunks: defaultdict[int, _Places] = defaultdict(_Places)
        self._blocks: defaultdict[int, _Places] = defaultdict(_Places)

    def change(
        self, kind: int, device: int, address: int, size: int, key: int, library: int
    ) -> tuple[list[Piece], Piece | None]:
        """Take an event of one of :data:`KINDS`.

        Returns
        -------
        The blocks that end with it, and the chunk that becomes a library's.
        """
        chunks, blocks = self._chunks[device], self._blocks[device]
        if kind == Kind.POOL_FREE:
            freed = blocks.pop(address)
            return ([] if freed is None else [freed]), None
        if kind == Kind.MEM_FREE:
            chunk = chunks.pop(address)
            return ([] if chunk is None else blocks.take_out(chunk.address, chunk.size)), None
        if kind == Kind.MEM_ALLOC:
            chunks.put(Piece(address, size, key))
            return blocks.take_out(address, size), None
        found = chunks.containing(address)
        joins = found is not None and not found.library
        if joins and found is not None:
            found.library = library
        return blocks.put(Piece(address, size, key, library)), found if joins else None

    def as_blocks(self, records: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
        """Take a recording's next events; return those of blocks, and the number of each among `records`.

        ``POOL_FREE`` events are added for the blocks that end with others. A chunk that becomes a library's is no block
        from there on, and never was one if these events have its allocation. Pieces are called by the number of their
        stack.
        """
        before: list[int] = []
        addresses: list[int] = []
        taken: dict[tuple[int, int], int] = {}  # from the driver by these events: device and address -> number
        chunks = []
        for i, (kind, device, address, size, stack, library) in _events(records):
            gone, joined = self.change(kind, device, address, size, stack, library)
            if kind == Kind.MEM_ALLOC:
                taken[device, address] = i
            elif joined is not None and (device, joined.address) in taken:
                chunks.append(taken[device, joined.address])
            elif joined is not None:
                gone = [*gone, joined]
            before += [i] * len(gone)
            addresses += [piece.address for piece in gone]
        number = np.arange(len(records))
        if before:
            frees = records[before]
            frees["kind"], frees["address"] = Kind.POOL_FREE, addresses
            records, number = np.insert(records, before, frees), np.insert(number, before, before)
        if chunks:
            is_block = ~((records["kind"] == Kind.MEM_ALLOC) & np.isin(number, chunks))
            records, number = records[is_block], number[is_block]
        return records, number

    def chunks(self, device: int) -> Iterable[Piece]:
        """Return the chunks of libraries."""
        return [chunk for chunk in self._chunks[device] if chunk.library]

    def blocks(self, device: int) -> Iterable[Piece]:
        """Return the live blocks."""
        return list(self._blocks[device])

    def in_use(self, device: int) -> dict[int, tuple[int, int]]:
        """Return the bytes in blocks and in chunks, by library; without blocks in chunks that are not known."""
        found: dict[int, tuple[int, int]] = {}
        chunks = self._chunks[device]
        for chunk in self.chunks(device):
            used, taken = found.get(chunk.library, (0, 0))
            found[chunk.library] = used, taken + chunk.size
        for block in self._blocks[device]:
            if chunks.containing(block.address) is not None:
                used, taken = found.get(block.library, (0, 0))
                found[block.library] = used + block.size, taken
        return found


def _events(records: npt.NDArray[np.void]) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each event that :meth:`LibraryPools.change` takes, and that; the key is its stack."""
    index = np.flatnonzero(_OF_POOLS[records["kind"]])
    own = records[index]
    names = ("kind", "device", "address", "size", "stack", "name")
    columns: list[list[int]] = [own[name].astype(np.int64).tolist() for name in names]
    for i, *facts in zip(index.tolist(), *columns, strict=True):
        yield i, facts


@dataclass(frozen=True, slots=True)
class Pooled:
    """The blocks of libraries' pools in a recording.

    Attributes
    ----------
    start, end
        The records with which each block began and ended; the number of records for an end that never came.
    chunks
        For the records that began each chunk, in order: index of the library's name.
    """

    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    chunks: dict[int, int]


def pooled(records: npt.NDArray[np.void]) -> Pooled | None:
    """Return the blocks of libraries' pools, in the order of their allocation; None if there is none."""
    start = np.flatnonzero(records["kind"] == Kind.POOL_ALLOC)
    if not len(start):
        return None
    pools, ends, chunks = LibraryPools(), np.full(len(records), len(records), np.int64), {}
    for i, (kind, device, address, size, _, library) in _events(records):
        ended, joined = pools.change(kind, device, address, size, i, library)
        for block in ended:
            ends[block.key] = i
        if joined is not None:
            chunks[joined.key] = joined.library
    return Pooled(start, ends[start], dict(sorted(chunks.items())))
