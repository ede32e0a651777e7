"""Who touched which bytes: the accesses that still matter, per address range."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudatool.sanitize.ordering import Clock

if TYPE_CHECKING:
    from cudatool.sanitize.lifetimes import Buffer

__all__ = ["ATOMIC", "READ", "WRITE", "Access", "History", "Operation", "overlap"]

READ, WRITE, ATOMIC = 1, 2, 4  # as trace.events.AccessFlag; ATOMIC stands alone


class Operation:
    """Something that an agent does: its epoch, what it is ordered after, and its trace record."""

    __slots__ = ("agent", "clock", "epoch", "record")

    def __init__(self, agent: int, epoch: int, clock: Clock, record: int) -> None:
        self.agent = agent
        self.epoch = epoch
        self.clock = clock
        self.record = record

    @property
    def after(self) -> Clock:
        """The clock of somebody for whom this operation is finished."""
        return (*self.clock[: self.agent], self.epoch, *self.clock[self.agent + 1 :])

    def before(self, agent: int, clock: Clock) -> bool:
        """Whether this earlier operation happens before one of `agent` with `clock`."""
        return self.agent == agent or clock[self.agent] >= self.epoch


_NOBODY = Operation(0, 0, (), -1)


@dataclass(slots=True, eq=False)
class Access:
    """A set of bytes that one operation touches: one run, or rows at equal distances.

    Attributes
    ----------
    start, stop
        First byte and one past the last one.
    mode
        `READ`, `WRITE`, both, or `ATOMIC`.
    row, stride
        Bytes of a row and distance between rows; `stride` is 0 for one run.
    mask
        If not 0, the set is no rows but those elements of `row` bytes from `start` on whose bits are set.
    name
        Index of the argument's or source line's name.
    exact
        False if the operation may touch less.
    node
        The number of the node of a graph that does it, for the accesses of a graph launch; then the record of that node
        (-1 if it is not known, and for work outside of graphs).
    operation, owner
        Who touches them, and the allocation that the first byte lay in. Known when the operation is reached.
    """

    start: int
    stop: int
    mode: int
    row: int = 0
    stride: int = 0
    name: int = 0
    exact: bool = True
    node: int = -1
    mask: int = 0
    operation: Operation = _NOBODY
    owner: Buffer | None = None


def overlap(first: Access, second: Access) -> tuple[int, int] | None:
    """Return (address, size) of the first run of bytes that both touch, None if there is none."""
    if first.mask or second.mask:
        return _overlap_of_masks(first, second)
    if not first.stride and not second.stride:
        start = max(first.start, second.start)
        stop = min(first.stop, second.stop)
        return (start, stop - start) if start < stop else None
    if first.stride == second.stride:
        return _same_stride(first, second)
    fewer, more = sorted((first, second), key=lambda a: (a.stop - a.start) // a.stride if a.stride else 0)
    for start, stop in _rows(fewer, more.start, more.stop):
        if found := _run_in_rows(start, stop, more):
            return found
    return None


def _covers(new: Access, old: Access) -> bool:
    """Whether `new` touches, within one segment of both hulls, every byte that `old` does."""
    if not new.exact and old.exact:
        return False
    if not new.stride and not new.mask:
        return True
    return (new.start, new.stop, new.stride, new.row, new.mask) == (old.start, old.stop, old.stride, old.row, old.mask)


def _rows(access: Access, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The rows of `access` that meet [start, stop), ascending."""
    if access.mask:
        skipped = max(0, (start - access.start) // access.row)
        rest, at = access.mask >> skipped, access.start + skipped * access.row
        while rest and at < stop:
            zeros = (rest & -rest).bit_length() - 1
            rest >>= zeros
            ones = (~rest & (rest + 1)).bit_length() - 1
            rest >>= ones
            low = at + zeros * access.row
            at = low + ones * access.row
            if low < stop:
                yield low, at
        return
    if not access.stride:
        yield access.start, access.stop
        return
    first = max(0, (start - access.start - access.row) // access.stride + 1)
    for row in range(access.start + first * access.stride, min(access.stop, stop), access.stride):
        yield row, row + access.row


def _run_in_rows(start: int, stop: int, access: Access) -> tuple[int, int] | None:
    for low, high in _rows(access, start, stop):
        low, high = max(low, start), min(high, stop)
        if low < high:
            return low, high - low
    return None


def _overlap_of_masks(first: Access, second: Access) -> tuple[int, int] | None:
    if first.mask and second.mask and first.row == second.row and not (first.start - second.start) % first.row:
        start = max(first.start, second.start)
        both = first.mask >> (start - first.start) // first.row & second.mask >> (start - second.start) // first.row
        if not both:
            return None
        meeting = Access(start, start + both.bit_length() * first.row, first.mode, first.row, mask=both)
        low, high = next(_rows(meeting, meeting.start, meeting.stop))
        return low, high - low
    rows, other = (first, second) if first.mask else (second, first)
    for low, high in _rows(rows, other.start, other.stop):
        if found := _run_in_rows(low, high, other):
            return found
    return None


def _same_stride(first: Access, second: Access) -> tuple[int, int] | None:
    """Two strided sets of one matrix: row i of `first` can only meet rows i + shift of `second`, for two shifts."""
    stride = first.stride
    offset = first.start - second.start  # row i of first starts at second.start + offset + i * stride
    rows = (first.stop - first.start - first.row) // stride + 1
    best = None
    for shift in (offset // stride, offset // stride + 1):
        # Row i + shift of `second` starts `apart` bytes after row i of `first`.
        apart = shift * stride - offset
        low, high = max(0, apart), min(first.row, apart + second.row)
        last = (second.stop - second.start - second.row) // stride
        row = max(0, -shift)
        if low < high and row < rows and row + shift <= last:
            start = first.start + row * stride + low
            if best is None or start < best[0]:
                best = (start, high - low)
    return best


class History:
    """The accesses to every byte that a later one could still race with.

    Memory is cut into disjoint segments at the bounds of accesses; each keeps a short list, newest first. An access
    is dropped when a later one dominates it: whoever races with the dropped one then also races with the later one,
    or is ordered after both. So a segment holds a few accesses for each agent, however long the program runs.

    A strided set lies on the segments of its hull; its rows are compared only when its hull collides.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._accesses: list[list[Access]] = []

    def __len__(self) -> int:
        """Number of segments."""
        return len(self._starts)

    def touch(self, new: Access, conflict: Callable[[Access, Access], None]) -> None:
        """Enter `new`; call ``conflict(old, new)`` for every kept access that it collides with in no order."""
        operation, mode = new.operation, new.mode
        agent = operation.agent
        low, high = self._cut(new.start, new.stop)
        alone = high - low > 1
        covers_all = new.exact and not new.stride and not new.mask
        for index in range(low, high):
            kept = [new]
            for old in self._accesses[index]:
                earlier = old.operation
                ordered = earlier.agent == agent or operation.clock[earlier.agent] >= earlier.epoch
                if not ordered and ((old.mode | mode) & WRITE or (old.mode ^ mode) & ATOMIC) and overlap(old, new):
                    conflict(old, new)
                    ordered = operation.clock[earlier.agent] >= earlier.epoch  # `conflict` may have repaired it
                if not (ordered and (mode & WRITE or mode == old.mode) and (covers_all or _covers(new, old))):
                    kept.append(old)
            alone = alone and len(kept) == 1
            self._accesses[index] = kept
        if alone:  # every one of these segments now says the same
            self._starts[low:high] = [new.start]
            self._stops[low:high] = [new.stop]
            self._accesses[low:high] = [[new]]

    def within(self, start: int, stop: int) -> Iterator[Access]:
        """The accesses kept for any byte of [start, stop), the newest first in each segment."""
        seen = set()
        for index in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
            for access in self._accesses[index]:
                if id(access) not in seen:
                    seen.add(id(access))
                    yield access

    def forget(self, start: int, stop: int) -> None:
        """Drop what is known of [start, stop)."""
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        if low < high:
            if self._starts[low] < start or self._stops[high - 1] > stop:
                low, high = self._cut(start, stop)
            del self._starts[low:high], self._stops[low:high], self._accesses[low:high]

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """Make segments that cover exactly [start, stop) and return their index range."""
        starts, stops, accesses = self._starts, self._stops, self._accesses
        low = bisect_right(stops, start)
        if low < len(starts) and starts[low] == start and stops[low] == stop:
            return low, low + 1
        if low < len(starts) and starts[low] < start:
            self._split(low, start)
            low += 1
        high, position = low, start
        while position < stop:
            if high == len(starts) or starts[high] > position:  # a gap: nobody has touched these bytes
                end = stop if high == len(starts) else min(stop, starts[high])
                starts.insert(high, position)
                stops.insert(high, end)
                accesses.insert(high, [])
            elif stops[high] > stop:
                self._split(high, stop)
            position = stops[high]
            high += 1
        return low, high

    def _split(self, index: int, at: int) -> None:
        self._starts.insert(index + 1, at)
        self._stops.insert(index, at)
        self._accesses.insert(index + 1, list(self._accesses[index]))
