"""Memory that has several addresses: what is mapped again by virtual memory management.

CUDA Driver API, "Virtual Memory Management", cuMemMap: one handle may be mapped at several addresses. Accesses through
any of them are accesses to the same bytes. One of the mappings stands for all: accesses count as made there.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from cudatool.sanitize.intervals import Access, rows_of

__all__ = ["Aliases"]


@dataclass(slots=True)
class _Alias:
    """Addresses from `start` to `stop` stand for those from `original` on."""

    start: int
    stop: int
    original: int


class Aliases:
    """The mappings of memory that is mapped at lower or higher addresses as well.

    Attributes
    ----------
    live
        Those that there are now, by address.
    """

    def __init__(self) -> None:
        self.live: list[_Alias] = []

    def map(self, address: int, size: int, elsewhere: int) -> None:
        """`size` bytes at `address` are those that are mapped at `elsewhere` already."""
        known = self._at(elsewhere)
        original = elsewhere if known is None else known.original + elsewhere - known.start
        if original != address:
            self.live.append(_Alias(address, address + size, original))
            self.live.sort(key=lambda alias: alias.start)

    def unmap(self, address: int, size: int) -> None:
        """What was mapped there stands for nothing; another mapping takes the place of one that others stood for."""
        stop = address + size
        self.live = [alias for alias in self.live if alias.stop <= address or stop <= alias.start]
        heirs: dict[int, _Alias] = {}
        for alias in self.live:
            if address <= alias.original < stop:
                alias.original = heirs.setdefault(alias.original, alias).start
        self.live = [alias for alias in self.live if alias.original != alias.start]

    def resolved(self, access: Access) -> Iterator[Access]:
        """Yield an access as made at the addresses that stand for all; in parts, where it is of several mappings."""
        edges = [edge for alias in self.live for edge in (alias.start, alias.stop)]
        if not any(access.start < edge < access.stop for edge in edges):
            yield self._moved(access)
            return
        cuts = sorted(edge for edge in set(edges) if access.start < edge < access.stop)
        for low, high in rows_of(access):
            inside = [low, *(cut for cut in cuts if low < cut < high), high]
            for start, stop in itertools.pairwise(inside):
                part = access.of(access.operation, access.node)
                part.start, part.stop, part.row, part.stride, part.mask = start, stop, 0, 0, 0
                yield self._moved(part)

    def _moved(self, access: Access) -> Access:
        alias = self._at(access.start)
        if alias is not None:
            access.stop += alias.original - alias.start
            access.start += alias.original - alias.start
        return access

    def _at(self, address: int) -> _Alias | None:
        index = bisect_right(self.live, address, key=lambda alias: alias.start) - 1
        return self.live[index] if index >= 0 and address < self.live[index].stop else None
