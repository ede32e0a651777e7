"""Who touched which bytes: the accesses that still matter, per address range.

::

    touch(new):
        cut segments at the bounds of `new`: it lies on whole segments
        for each of these, for each access that it keeps:
            not ordered before `new`: keep it; a conflict if one of the two writes, and they share bytes
            ordered before `new`: drop it if `new` dominates it, or the host knows that it is done
        keep `new`

`new` dominates an earlier access to the same bytes if it writes them, or does to them what that one does: whatever is
in no order with the earlier access and conflicts with it then conflicts with `new`, too, or has been reported.

So a few accesses are kept, unless many streams read the same bytes. Of a segment with many, those that only read and
those that only update atomically are put aside (``calm``): another one of their kind need not be compared with them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from cudatool.sanitize.clocks import Clock, Moment

if TYPE_CHECKING:
    from cudatool.sanitize.effort import Effort
    from cudatool.sanitize.lifetimes import Buffer
    from cudatool.sanitize.ordering import Agent

__all__ = [
    "ATOMIC",
    "MOST_RUNS",
    "READ",
    "WRITE",
    "Access",
    "Conflict",
    "History",
    "HistorySegment",
    "Operation",
    "common_runs",
    "overlap",
    "rows_of",
]

_SEGMENT, _PAIR, _ROW, _MASK, _CONFLICT = 30, 8, 30, 60, 400  # units of an effort
_CROWD = 32  # accesses to a segment, beyond which those that cannot race with each other are kept apart
_CONFLICTS = 64  # of one access in one segment that are reported
_MANY = 1 << 13  # segments, beyond which those are looked for that do not matter any more
MOST_RUNS = 4096  # of bytes that two accesses share, that are counted
READ, WRITE, ATOMIC = 1, 2, 4  # as trace.events.AccessFlag; ATOMIC stands alone


class Operation(Moment):
    """Something that an agent does: its epoch, what it is ordered after, and its trace record."""

    __slots__ = ("record",)

    def __init__(self, agent: int, epoch: int, clock: Clock, record: int) -> None:
        self.agent = agent
        self.epoch = epoch
        self.clock = clock
        self.record = record

    def before(self, agent: int, clock: Clock) -> bool:
        """Whether this earlier operation happens before one of `agent` with `clock`."""
        return self.agent == agent or clock[self.agent] >= self.epoch


_NO_OPERATION = Operation(0, 0, (), -1)


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
    host
        The record of the HOST_ACCESS, if a host function does it; else -1.
    operation, owner
        Who touches them, and the allocation that the first byte lay in. Known when the operation is reached.
    """

    __slots__ = (
        "exact",
        "host",
        "mask",
        "mode",
        "name",
        "node",
        "operation",
        "owner",
        "row",
        "start",
        "stop",
        "stride",
    )

    def __init__(
        self,
        start: int,
        stop: int,
        mode: int,
        row: int = 0,
        stride: int = 0,
        name: int = 0,
        exact: bool = True,
        node: int = -1,
        mask: int = 0,
        host: int = -1,
        operation: Operation = _NO_OPERATION,
        owner: Buffer | None = None,
    ) -> None:
        self.start = start
        self.stop = stop
        self.mode = mode
        self.row = row
        self.stride = stride
        self.name = name
        self.exact = exact
        self.node = node
        self.mask = mask
        self.host = host
        self.operation = operation
        self.owner = owner

    def of(self, operation: Operation, node: int) -> Access:
        """Return the same bytes as touched by an operation, or by a node of it."""
        how = (self.mode, self.row, self.stride, self.name, self.exact, node, self.mask, self.host)
        return Access(self.start, self.stop, *how, operation, self.owner)


def overlap(first: Access, second: Access, effort: Effort | None = None) -> tuple[int, int] | None:
    """Return (address, size) of the first run of bytes that both touch, None if there is none."""
    if first.mask or second.mask:
        return _overlap_of_masks(first, second, effort)
    if not first.stride and not second.stride:
        start = max(first.start, second.start)
        stop = min(first.stop, second.stop)
        return (start, stop - start) if start < stop else None
    if first.stride == second.stride:
        return _same_stride(first, second)
    fewer, more = sorted((first, second), key=lambda a: (a.stop - a.start) // a.stride if a.stride else 0)
    for start, stop in _rows(fewer, more.start, more.stop):
        if effort is not None:
            effort.spend(_ROW)
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


def rows_of(access: Access) -> Iterator[tuple[int, int]]:
    """Yield start and end of each run of bytes of an access, ascending."""
    return _rows(access, access.start, access.stop)


def common_runs(first: Access, second: Access) -> tuple[int, int]:
    """Return how many runs of bytes both touch, and the distance between their starts (0 if it is not always the same).

    At most :data:`MOST_RUNS` are counted.
    """
    starts: list[int] = []
    for start, stop in _rows(first, second.start, second.stop):
        starts += [max(low, start) for low, high in _rows(second, start, stop) if max(low, start) < min(high, stop)]
        if len(starts) >= MOST_RUNS:
            break
    apart = {later - earlier for earlier, later in itertools.pairwise(starts)}
    return min(len(starts), MOST_RUNS), apart.pop() if len(apart) == 1 else 0


def _run_in_rows(start: int, stop: int, access: Access) -> tuple[int, int] | None:
    for low, high in _rows(access, start, stop):
        low, high = max(low, start), min(high, stop)
        if low < high:
            return low, high - low
    return None


def _overlap_of_masks(first: Access, second: Access, effort: Effort | None) -> tuple[int, int] | None:
    if effort is not None:
        effort.spend(_MASK)
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
        if effort is not None:
            effort.spend(_ROW)
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


Conflict = Callable[[Access, Access, tuple[int, int]], None]
"""What is reported of an old and a new access in no order, with address and size of the first bytes of both."""


class HistorySegment:
    """A run of bytes and the accesses to it that a later one could still race with.

    Attributes
    ----------
    accesses
        Newest first; all of them while they are few.
    calm
        By mode, the reads and atomic updates of a segment that has many, newest last: they do not race with others of
        their kind, which need not look at them.
    crowd, limit
        The numbers of `accesses`, and of accesses of one kind in `calm`, at which they are sorted out.
    """

    __slots__ = ("accesses", "calm", "crowd", "limit", "start", "stop")

    def __init__(self, start: int, stop: int, accesses: list[Access]) -> None:
        self.start = start
        self.stop = stop
        self.accesses = accesses
        self.calm: dict[int, list[Access]] | None = None
        self.crowd = self.limit = _CROWD

    def from_here(self, start: int) -> HistorySegment:
        """Return the same from a later byte on."""
        part = HistorySegment(start, self.stop, list(self.accesses))
        if self.calm is not None:
            part.calm = {mode: list(kept) for mode, kept in self.calm.items()}
        return part

    def everything(self) -> list[Access]:
        """All accesses."""
        if self.calm is None:
            return self.accesses
        return self.accesses + [access for kept in self.calm.values() for access in reversed(kept)]


class History:
    """The accesses to every byte that a later one could still race with.

    Memory is cut into disjoint segments at the bounds of accesses; each keeps a short list, newest first. An access
    is dropped when a later one dominates it: what races with the dropped one then also races with the later one,
    or is ordered after both. It is also dropped when the host knows that it is done, if all later work comes after the
    host. So a segment holds a few accesses for each agent, however long the program runs.

    A strided set or mask lies on the segments of its hull; its bytes are compared only when its hull collides.

    Parameters
    ----------
    effort
        What comparing is taken from.
    host
        The agent that all later accesses are ordered after; None if there is none.
    """

    def __init__(self, effort: Effort | None = None, host: Agent | None = None) -> None:
        self._effort = effort if effort is not None and effort.counts else None
        self._host = host
        self._starts: list[int] = []
        self._segments: list[HistorySegment] = []
        self._at: dict[int, HistorySegment] = {}  # by first byte
        self._limit = _MANY

    def __len__(self) -> int:
        """Number of segments."""
        return len(self._starts)

    def touch(self, new: Access, conflict: Conflict) -> None:
        """Enter `new`; call `conflict` for kept accesses that it collides with in no order.

        That is every one of up to `_CONFLICTS` in a segment; the others are there for later accesses.
        """
        segment = self._at.get(new.start)
        if segment is not None and segment.stop == new.stop:  # the common case: the bytes of an earlier access
            if segment.calm is None and len(segment.accesses) < _CROWD:
                old = segment.accesses
                if self._effort is not None:
                    self._effort.spend(_SEGMENT + _PAIR * len(old))
                segment.accesses = kept = [new]
                self._keep(kept, old, new, conflict)
            else:
                self._touch(segment, new, conflict)
            return
        if len(self._starts) > self._limit:
            self._sweep()
        low = self._first(new.start)
        if low == len(self._starts) or self._starts[low] >= new.stop:  # bytes that nothing has touched
            segment = self._at[new.start] = HistorySegment(new.start, new.stop, [new])
            self._starts.insert(low, new.start)
            self._segments.insert(low, segment)
            return
        low, high = self._cut(new.start, new.stop)
        alone = high - low > 1
        for segment in self._segments[low:high]:
            self._touch(segment, new, conflict)
            alone = alone and len(segment.accesses) == 1 and segment.calm is None
        if alone:  # every one of these segments now says the same
            for start in self._starts[low:high]:
                del self._at[start]
            self._put(low, high, [HistorySegment(new.start, new.stop, [new])])

    def _touch(self, segment: HistorySegment, new: Access, conflict: Conflict) -> None:
        old = segment.accesses
        if self._effort is not None:
            self._effort.spend(_SEGMENT + _PAIR * len(old))
        segment.accesses = kept = [new]
        if old:
            self._keep(kept, old, new, conflict)
        if segment.calm is not None:
            self._touch_calm(segment, segment.calm, new, conflict)
        if len(kept) > segment.crowd:
            self._sort_out(segment)

    def _keep(self, kept: list[Access], accesses: Iterable[Access], new: Access, conflict: Conflict) -> None:
        """Report what of `accesses` collides with `new`, and append what still matters after it to `kept`.

        This is where most of a check's time goes.
        """
        mode, operation = new.mode, new.operation
        agent, clock = operation.agent, operation.clock
        whole = new.exact and not new.stride and not new.mask
        conflicts = 0
        remaining = iter(accesses)
        for old in remaining:
            earlier = old.operation
            other, epoch = earlier.agent, earlier.epoch
            if other != agent and clock[other] < epoch:
                found = None
                if (old.mode | mode) & WRITE or (old.mode ^ mode) & ATOMIC:
                    if whole and not old.stride and not old.mask:  # both touch all of the segment
                        start, stop = max(old.start, new.start), min(old.stop, new.stop)
                        found = (start, stop - start) if start < stop else None
                    else:
                        found = overlap(old, new, self._effort)
                if found is not None:
                    if self._effort is not None:
                        self._effort.spend(_CONFLICT)
                    conflict(old, new, found)
                    clock = operation.clock  # `conflict` may have repaired it
                    conflicts += 1
                    if conflicts == _CONFLICTS and clock[other] < epoch:
                        kept.append(old)
                        kept += remaining
                        return
                if clock[other] < epoch:  # in no order
                    kept.append(old)
                    continue
            if (mode & WRITE or mode == old.mode) and (whole or _covers(new, old)):
                continue
            if self._host is None or self._host.clock[other] < epoch:
                kept.append(old)

    def _touch_calm(
        self, segment: HistorySegment, calm: dict[int, list[Access]], new: Access, conflict: Conflict
    ) -> None:
        for mode, accesses in calm.items():
            if mode != new.mode and accesses:
                if self._effort is not None:
                    self._effort.spend(_PAIR * len(accesses))
                kept: list[Access] = []
                self._keep(kept, reversed(accesses), new, conflict)
                calm[mode] = kept[::-1]
        if not any(calm.values()):
            segment.calm = None

    def _sort_out(self, segment: HistorySegment) -> None:
        """Move what does not race with its like to where that need not look at it, and drop what no longer matters."""
        calm = segment.calm = segment.calm or {READ: [], ATOMIC: []}
        others: list[Access] = []
        for access in reversed(segment.accesses):
            calm.get(access.mode, others).append(access)
        if max(map(len, calm.values())) > segment.limit:
            for mode, accesses in calm.items():
                calm[mode] = self._thinned(accesses)
            segment.limit = _CROWD + 2 * max(map(len, calm.values()))
        segment.accesses = self._thinned(others)[::-1]
        segment.crowd = _CROWD + 2 * len(segment.accesses)

    def _thinned(self, accesses: list[Access]) -> list[Access]:
        """Return, the newest last, what the host does not know as done and no later access of its agent covers."""
        if self._effort is not None:
            self._effort.spend(_PAIR * len(accesses))
        host = self._host.clock if self._host is not None else None
        covered: dict[int, int] = {}  # agent -> modes in which it has touched the whole segment later
        kept = []
        for access in reversed(accesses):
            done = access.operation
            if host is not None and host[done.agent] >= done.epoch:
                continue
            later = covered.get(done.agent, 0)
            if later & WRITE or later & access.mode == access.mode:
                continue
            kept.append(access)
            if access.exact and not access.stride and not access.mask:
                covered[done.agent] = later | access.mode
        return kept[::-1]

    def _sweep(self) -> None:
        """Drop the segments that no later access can race in."""
        if self._host is not None:
            host = self._host.clock
            self._segments = [
                segment
                for segment in self._segments
                if not all(host[one.operation.agent] >= one.operation.epoch for one in segment.everything())
            ]
            self._starts = [segment.start for segment in self._segments]
            self._at = {segment.start: segment for segment in self._segments}
        self._limit = _MANY + 2 * len(self._starts)

    def within(self, start: int, stop: int) -> Iterator[Access]:
        """The accesses kept for any byte of [start, stop), the newest first in each segment."""
        segment = self._at.get(start)
        if segment is not None and segment.stop >= stop and self._effort is None:
            return iter(segment.everything())
        return self._within(start, stop)

    def _within(self, start: int, stop: int) -> Iterator[Access]:
        seen = set()
        for segment in self._segments[self._first(start) : bisect_left(self._starts, stop)]:
            if self._effort is not None:
                self._effort.spend(_SEGMENT + _PAIR * len(segment.accesses))
            for access in segment.everything():
                if id(access) not in seen:
                    seen.add(id(access))
                    yield access

    def forget(self, start: int, stop: int) -> None:
        """Drop what is known of [start, stop)."""
        low, high = self._first(start), bisect_left(self._starts, stop)
        if low < high:
            if self._starts[low] < start or self._segments[high - 1].stop > stop:
                low, high = self._cut(start, stop)
            for first in self._starts[low:high]:
                del self._at[first]
            del self._segments[low:high], self._starts[low:high]

    def _first(self, address: int) -> int:
        """The index of the segment that holds `address`, or of the next one."""
        index = bisect_right(self._starts, address)
        return index - 1 if index and self._segments[index - 1].stop > address else index

    def _put(self, low: int, high: int, segments: list[HistorySegment]) -> None:
        """Let `segments` stand in the place of those from `low` to `high`."""
        self._segments[low:high] = segments
        self._starts[low:high] = [segment.start for segment in segments]
        for segment in segments:
            self._at[segment.start] = segment

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """Make segments that cover exactly [start, stop) and return their index range."""
        low = self._first(start)
        if low < len(self._starts) and self._starts[low] < start:
            self._split(low, start)
            low += 1
        high, position = low, start
        while position < stop:
            if high == len(self._starts) or self._starts[high] > position:  # a gap: bytes that nothing has touched
                end = stop if high == len(self._starts) else min(stop, self._starts[high])
                self._put(high, high, [HistorySegment(position, end, [])])
            elif self._segments[high].stop > stop:
                self._split(high, stop)
            position = self._segments[high].stop
            high += 1
        return low, high

    def _split(self, index: int, at: int) -> None:
        segment = self._segments[index]
        self._put(index + 1, index + 1, [segment.from_here(at)])
        segment.stop = at
