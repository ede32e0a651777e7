"""Which memory is allocated at the moment, for sources that are asked whose an address is."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right

__all__ = ["LiveMemory"]


class LiveMemory:
    """Pieces of memory that do not overlap, by address."""

    def __init__(self) -> None:
        self.starts, self.sizes = array("Q"), array("Q")
        """Of each piece, by address: the layout that :file:`_log_rows.c` searches."""

    def __contains__(self, start: int) -> bool:
        at = bisect_left(self.starts, start)
        return at < len(self.starts) and self.starts[at] == start

    def add(self, start: int, size: int) -> None:
        """Note a piece; one that began there before is gone."""
        at = bisect_left(self.starts, start)
        if at < len(self.starts) and self.starts[at] == start:
            self.sizes[at] = size
        else:
            self.starts.insert(at, start)
            self.sizes.insert(at, size)

    def remove(self, start: int) -> int | None:
        """Forget the piece that begins at an address; return its size, or None if there is none."""
        at = bisect_left(self.starts, start)
        if at == len(self.starts) or self.starts[at] != start:
            return None
        del self.starts[at]
        return self.sizes.pop(at)

    def find(self, address: int) -> tuple[int, int] | None:
        """Return start and size of the piece in which an address lies, or None."""
        at = bisect_right(self.starts, address) - 1
        if at < 0 or address >= self.starts[at] + self.sizes[at]:
            return None
        return self.starts[at], self.sizes[at]
