"""Which memory belongs to whom: allocations and the places where freed ones were."""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cudatool.sanitize.clocks import Moment
from cudatool.sanitize.intervals import Access, Operation

__all__ = ["Buffer", "Buffers"]


@dataclass(slots=True, eq=False)
class Buffer:
    """One allocation from its birth until its addresses are given out again.

    Attributes
    ----------
    start, stop
        First byte and one past the last.
    record
        The trace record of the allocation.
    agent
        The stream that a caching allocator gave it to, or that a stream-ordered allocation runs on; -1 for neither.
    born
        The stream-ordered allocation: only what is ordered after it may use the memory. None if usable at once.
    freed, freed_by
        The trace record of what gave it back, and the agent that did; -1 while it lives.
    other_streams
        Streams that ``record_stream`` named.
    releases
        How far those streams had come when the block was freed: it becomes free again after them.
    of_graphs
        Whether graphs go on using it whenever it is given back: what a graph launch allocates, and blocks of a private
        pool of the caching allocator.
    suspect
        An access for the previous owner, and the handing out that nothing orders after it; until this owner's own
        accesses can tell whether it did harm.
    """

    start: int
    stop: int
    record: int
    agent: int = -1
    born: Operation | None = None
    freed: int = -1
    freed_by: int = -1
    other_streams: frozenset[int] = frozenset()
    releases: Sequence[Moment] = ()
    of_graphs: bool = False
    suspect: tuple[Access, Operation] | None = None

    @property
    def release(self) -> Operation:
        """What gave it back. Only its record and agent are kept (:class:`Buffers`)."""
        return Operation(self.freed_by, 0, (), self.freed)


# Of a freed allocation: stop, record, agent, freed, freed_by, of_graphs.
_FREED = struct.Struct("<Qqqqq?")


class Buffers:
    """Live and freed allocations by address. A new allocation replaces whatever was at its addresses.

    There may be millions of freed ones, of which only what a report on a later access needs is kept, in few bytes.

    Attributes
    ----------
    at
        The live ones by first byte: most accesses begin there.
    """

    def __init__(self) -> None:
        self._starts = array("Q")
        self._buffers: list[Buffer | bytes] = []
        self.at: dict[int, Buffer] = {}
        self._last = 0  # where the last one stops

    def add(self, buffer: Buffer) -> list[Buffer]:
        """Enter `buffer` and return those that it replaces. One without a byte holds no address."""
        if buffer.stop <= buffer.start:
            return []
        if self._last <= buffer.start:  # mostly addresses go up
            self.at[buffer.start] = buffer
            self._starts.append(buffer.start)
            self._buffers.append(buffer)
            self._last = buffer.stop
            return []
        low, high = self._range(buffer.start, buffer.stop)
        replaced = [self._entry(index) for index in range(low, high)]
        for old in replaced:
            self.at.pop(old.start, None)
        self.at[buffer.start] = buffer
        self._starts[low:high] = array("Q", [buffer.start])
        self._buffers[low:high] = [buffer]
        self._last = max(self._last, buffer.stop)
        return replaced

    def end(self, buffer: Buffer, operation: Operation) -> None:
        """An operation gives `buffer` back."""
        buffer.freed, buffer.freed_by = operation.record, operation.agent
        self.at.pop(buffer.start, None)
        if buffer.suspect is None and not buffer.releases and not buffer.other_streams and buffer.stop < 1 << 64:
            index = bisect_left(self._starts, buffer.start)
            if index < len(self._starts) and self._starts[index] == buffer.start:
                self._buffers[index] = _FREED.pack(
                    buffer.stop, buffer.record, buffer.agent, buffer.freed, buffer.freed_by, buffer.of_graphs
                )

    def remove(self, start: int, stop: int) -> list[Buffer]:
        """Forget and return every allocation that has a byte in [start, stop)."""
        low, high = self._range(start, stop)
        removed = [self._entry(index) for index in range(low, high)]
        for buffer in removed:
            self.at.pop(buffer.start, None)
        del self._starts[low:high], self._buffers[low:high]
        return removed

    def find(self, address: int) -> Buffer | None:
        """Return the allocation, live or freed, that holds `address`."""
        found = self.at.get(address)
        if found is not None:
            return found
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._stop(index):
            return self._entry(index)
        return None

    def suspects(self) -> Iterator[Buffer]:
        """Return those that have :attr:`Buffer.suspect`, by address."""
        return (one for one in self._buffers if isinstance(one, Buffer) and one.suspect is not None)

    def _entry(self, index: int) -> Buffer:
        found = self._buffers[index]
        if isinstance(found, Buffer):
            return found
        stop, record, agent, freed, freed_by, of_graphs = _FREED.unpack(found)
        return Buffer(self._starts[index], stop, record, agent, freed=freed, freed_by=freed_by, of_graphs=of_graphs)

    def _stop(self, index: int) -> int:
        found = self._buffers[index]
        return found.stop if isinstance(found, Buffer) else int(_FREED.unpack_from(found)[0])

    def _range(self, start: int, stop: int) -> tuple[int, int]:
        low = bisect_right(self._starts, start) - 1
        if low < 0 or self._stop(low) <= start:
            low += 1
        return low, max(low, bisect_left(self._starts, stop))
