"""Which memory is allocated at the moment, for sources that are asked whose an address is."""

from __future__ import annotations

from bisect import bisect_right, insort

__all__ = ["LiveMemory"]


class LiveMemory:
    """Pieces of memory that do not overlap, by address."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # sorted
        self._sizes: dict[int, int] = {}

    def __contains__(self, start: int) -> bool:
        return start in self._sizes

    def add(self, start: int, size: int) -> None:
        """Note a piece; one that began there before is gone."""
        if start not in self._sizes:
            insort(self._starts, start)
        self._sizes[start] = size

    def remove(self, start: int) -> int | None:
        """Forget the piece that begins at an address; return its size, or None if there is none."""
        size = self._sizes.pop(start, None)
        if size is not None:
            del self._starts[bisect_right(self._starts, start) - 1]
        return size

    def find(self, address: int) -> tuple[int, int] | None:
        """Return start and size of the piece in which an address lies, or None."""
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        start = self._starts[at]
        size = self._sizes[start]
        return (start, size) if address < start + size else None
