"""What a program asked of its allocator, told apart from what the allocator did about it.

A recording holds both in one sequence. A call's own events follow each other, because they are recorded under the
allocator's lock::

    malloc       free_completed*, releases*, gains*, alloc          (or oom in place of alloc)
    free         free_requested, and free_completed at once if no other stream uses the block
    empty_cache  free_completed*, releases*

Gains are segments allocated and pages mapped, releases are segments freed and pages unmapped. Where releases stand
before an ``alloc`` without any gain, the program emptied the cache before. Where there are gains, the allocator may
have made room for them: :mod:`cudatool.analyze.releases` tells, from the state that a replay has then.
"""

from __future__ import annotations

import functools
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, islice, pairwise, repeat
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar, overload

import numpy as np

from cudatool.errors import ConfigError, FileFormatError, UsageError
from cudatool.memory.blocks import MIN_BLOCK_SIZE
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

__all__ = ["RELEASES", "Call", "Calls", "Change", "Requests", "Verb", "refuses_contradictions", "requests"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_GAINS = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP)
RELEASES = (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP)
# Plain numbers: looking a member up in its enumeration and comparing it takes as long as the rest of the loop.
_ALLOC, _OOM = int(Kind.BLOCK_ALLOC), int(Kind.OOM)
_FREE_REQUESTED, _FREE_COMPLETED = int(Kind.BLOCK_FREE_REQUESTED), int(Kind.BLOCK_FREE_COMPLETED)
_KINDS = (
    Kind.BLOCK_ALLOC,
    Kind.BLOCK_FREE_REQUESTED,
    Kind.BLOCK_FREE_COMPLETED,
    Kind.OOM,
    *_GAINS,
    *RELEASES,
)


class Verb(IntEnum):
    """What the program called."""

    MALLOC = 1
    FAILED_MALLOC = 2
    """One that raised an out-of-memory error."""
    FREE = 3
    FREE_LATER = 4
    """A free of a block that another stream was using."""
    EMPTY_CACHE = 5


_VERBS = (Verb.MALLOC, *Verb)  # by number; there is no 0


class Change(NamedTuple):
    """Memory that the allocator got from the driver or gave back to it."""

    kind: Kind
    address: int
    size: int
    stream: int
    pool: int
    is_small: bool
    stack: int


class Call(NamedTuple):
    """One call to the allocator.

    Attributes
    ----------
    block
        Number of the block that is allocated or freed; blocks are numbered in the order of their allocation.
    done
        Numbers of the pending blocks that became free at its beginning.
    changes
        What the allocator did in it, in order.
    event
        Index of the event that names the call, in the trace's records.
    """

    verb: Verb
    block: int
    size: int
    stream: int
    pool: int
    address: int
    done: tuple[int, ...]
    changes: tuple[Change, ...]
    event: int


class Calls(Sequence[Call]):
    """Calls in order. They are kept as columns, which take a quarter of the memory of as many tuples."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self._verb = bytearray()
        self._block, self._event = array("q"), array("q")
        self._size, self._stream, self._pool, self._address = array("Q"), array("Q"), array("Q"), array("Q")
        self._done: list[tuple[int, ...]] = []
        self._changes: list[tuple[Change, ...]] = []
        for call in calls:
            self.append(*call)

    def append(
        self,
        verb: Verb,
        block: int,
        size: int,
        stream: int,
        pool: int,
        address: int,
        done: tuple[int, ...],
        changes: tuple[Change, ...],
        event: int,
    ) -> None:
        """Add a call; the parameters are its attributes."""
        self._verb.append(verb)
        self._block.append(block)
        self._size.append(size)
        self._stream.append(stream)
        self._pool.append(pool)
        self._address.append(address)
        self._done.append(done)
        self._changes.append(changes)
        self._event.append(event)

    def __len__(self) -> int:
        return len(self._verb)

    def __iter__(self) -> Iterator[Call]:
        return self._calls(slice(None))

    @overload
    def __getitem__(self, index: int) -> Call: ...

    @overload
    def __getitem__(self, index: slice) -> list[Call]: ...

    def __getitem__(self, index: int | slice) -> Call | list[Call]:
        if isinstance(index, slice):
            return list(self._calls(index))
        at = range(len(self))[index]
        return next(self._calls(slice(at, at + 1)))

    def changes(self) -> Iterator[Change]:
        """Return what the allocator did in all calls, in order."""
        return chain.from_iterable(self._changes)

    def with_changes(self) -> Iterator[Call]:
        """Return the calls in which the allocator did something, in order."""
        return (self[index] for index, changes in enumerate(self._changes) if changes)

    def number_of(self, verb: Verb) -> int:
        """Return how many calls are of one kind."""
        return self._verb.count(verb)

    def last(self, *verbs: Verb) -> int:
        """Return the index of the last call that is of one of some kinds, or -1."""
        return max(self._verb.rfind(verb) for verb in verbs)

    def _calls(self, part: slice) -> Iterator[Call]:
        columns = (
            self._block,
            self._size,
            self._stream,
            self._pool,
            self._address,
            self._done,
            self._changes,
            self._event,
        )
        if part != slice(None):
            columns = tuple(column[part] for column in columns)  # type: ignore[assignment]  # each keeps its type
        rows = zip(map(_VERBS.__getitem__, self._verb[part]), *columns, strict=True)
        # What Call._make ends in, without a frame of Python for each call.
        return map(tuple.__new__, repeat(Call), rows)


@dataclass(eq=False)
class Requests:
    """The calls on one device. Two are the same only if they are one object.

    Attributes
    ----------
    prior_memory
        Segments and pages that were there before the recording began.
    prior_blocks
        Blocks that were in use then: of each the call that would have allocated it.
    prior_sizes
        Their sizes in bytes, of the whole block.
    tails
        Bytes that some of them hide behind their end, by number: too few to be split off. Only a replay finds them.
    prior_pending
        Numbers of those of them that had been freed, but were still in use by another stream.
    peak_reserved
        The most bytes that were reserved at a time, according to the events.
    unmatched
        Frees of blocks that were never allocated; they are left out.
    retries
        How often the allocator released all that was cached to make room. A replay finds this and what follows.
    ceiling
        A number of bytes that could not be reserved, according to requests that failed or made the allocator release
        memory; None if there were none.
    available
        Bytes that could be reserved on the card: those that were, and those that the driver said were free, when a
        request failed; the least of several. A memory fraction may allow less. None if no request failed.
    otherwise
        The same if all releases that may have been the allocator's or the program's were the program's; None if there
        are no such releases.
    """

    device: int
    calls: Calls = field(default_factory=Calls)
    prior_memory: list[Change] = field(default_factory=list)
    prior_blocks: list[Call] = field(default_factory=list)
    prior_sizes: list[int] = field(default_factory=list)
    tails: dict[int, int] = field(default_factory=dict)
    prior_pending: list[int] = field(default_factory=list)
    blocks: int = 0
    peak_reserved: int = 0
    unmatched: int = 0
    retries: int = 0
    ceiling: int | None = None
    available: int | None = None
    otherwise: Requests | None = None


def requests(trace: Trace, device: int) -> Requests:
    """Return what the program asked of the allocator of one device.

    Raises
    ------
    FileFormatError
        Two segments share addresses at the same time, or a block has no bytes.
    """
    events = _events(trace, device)
    prior_events = int(trace.header.get("prior_records", {}).get(device, 0))
    _check_segments(trace, device)
    found = Requests(device, peak_reserved=_peak_reserved(trace, device))
    stacks = trace.records["stack"]
    live: dict[int, int] = {}  # address -> number of the block
    pending: dict[int, int] = {}
    _take_prior(found, islice(events, prior_events), live, pending)
    done: list[int] = []
    changes: list[Change] = []
    append = found.calls.append

    def call(
        verb: Verb, event: int, block: int = -1, size: int = 0, stream: int = 0, pool: int = 0, at: int = 0
    ) -> None:
        if done or changes:
            append(verb, block, size, stream, pool, at, tuple(done), tuple(changes), event)
            done.clear()
            changes.clear()
        else:
            append(verb, block, size, stream, pool, at, (), (), event)

    def empty_cache(event: int) -> None:
        call(Verb.EMPTY_CACHE, event)

    event = -1
    for (event, kind, address, size, stream, aux0, pool, flags), following in pairwise(chain(events, [_NO_EVENT])):
        if kind in (_ALLOC, _OOM):
            if changes and kind == _ALLOC and all(change.kind in RELEASES for change in changes):
                empty_cache(event)
            if kind == _ALLOC and aux0 <= 0:
                raise FileFormatError(trace.source, f"a block of {aux0} bytes at {address:#x}")
            if kind == _OOM:
                call(Verb.FAILED_MALLOC, event, size=size, stream=stream, pool=pool)
            else:
                live[address] = found.blocks
                call(Verb.MALLOC, event, found.blocks, aux0, stream, pool, address)
                found.blocks += 1
        elif kind == _FREE_REQUESTED:
            if done or changes:
                empty_cache(event)
            block = live.pop(address, -1)
            if block < 0:
                found.unmatched += 1
            elif following[1] == _FREE_COMPLETED and following[2] == address:
                call(Verb.FREE, event, block, aux0, stream, pool, address)
            else:
                pending[address] = block
                call(Verb.FREE_LATER, event, block, aux0, stream, pool, address)
        elif kind == _FREE_COMPLETED:
            if address in pending:
                done.append(pending.pop(address))
        else:
            changes.append(Change(Kind(kind), address, size, stream, pool, bool(flags & 1), int(stacks[event])))
    if done or changes:
        empty_cache(event)
    return found


_Event = tuple[int, int, int, int, int, int, int, int]  # record, kind, address, size, stream, aux0, pool, flags
_NO_EVENT: _Event = (-1, 0, 0, 0, 0, 0, 0, 0)
_AT_ONCE = 1 << 14  # events that are Python objects at a time


def _events(trace: Trace, device: int) -> Iterator[_Event]:
    """Yield the allocator's events on a device."""
    records = trace.records
    index = np.flatnonzero((records["device"] == device) & np.isin(records["kind"], [int(kind) for kind in _KINDS]))
    # Streams by their handles: in their order the allocator goes through what it releases.
    created = trace.of_kind(Kind.STREAM_CREATE)
    handles = dict(zip(created["stream"].tolist(), created["address"].tolist(), strict=True))
    for first in range(0, len(index), _AT_ONCE):
        part = index[first : first + _AT_ONCE]
        kind, address, size, stream, aux0, pool, flags = (
            records[name][part].tolist() for name in ("kind", "address", "size", "stream", "aux0", "aux1", "flags")
        )
        stream = [handles.get(number, number) for number in stream]
        yield from zip(part.tolist(), kind, address, size, stream, aux0, pool, flags, strict=True)


def _take_prior(found: Requests, events: Iterable[_Event], live: dict[int, int], pending: dict[int, int]) -> None:
    """Take over what was there before the recording began, which stands in front of it as events."""
    for event, kind, address, size, stream, aux0, pool, flags in events:
        if kind == Kind.BLOCK_ALLOC:
            live[address] = found.blocks
            found.prior_blocks.append(Call(Verb.MALLOC, found.blocks, aux0, stream, pool, address, (), (), event))
            found.prior_sizes.append(size)
            found.blocks += 1
        elif kind == Kind.BLOCK_FREE_REQUESTED:
            block = live.pop(address, -1)
            if block < 0:
                found.unmatched += 1
                continue
            pending[address] = block
            found.prior_pending.append(block)
        else:
            found.prior_memory.append(Change(Kind(kind), address, size, stream, pool, bool(flags & 1), 0))


def refuses_contradictions(
    function: Callable[Concatenate[Trace, _P], _R],
) -> Callable[Concatenate[Trace, _P], _R]:
    """Let a function that gives the requests of a trace to the policy raise FileFormatError where they contradict it.

    Not every contradiction is looked for beforehand. What the policy takes for granted, such as a record of each
    segment that has blocks, a file of events may lack.
    """

    @functools.wraps(function)
    def call(trace: Trace, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(trace, *args, **kwargs)
        except ConfigError:
            raise
        except (AssertionError, KeyError, UsageError) as error:
            said = str(error) if isinstance(error, UsageError) else repr(error)
            raise FileFormatError(trace.source, f"its events contradict each other ({said})") from error

    return call


def _check_segments(trace: Trace, device: int) -> None:
    """Refuse a recording in which two segments share addresses at the same time, or one is smaller than any block."""
    starts: list[int] = []
    ends: list[int] = []
    events = trace.of_kind(Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE)
    for kind, address, size in events[events["device"] == device][["kind", "address", "size"]].tolist():
        if kind == Kind.SEGMENT_ALLOC:
            if size < MIN_BLOCK_SIZE:
                raise FileFormatError(trace.source, f"a segment of {size} bytes")
            at = bisect_left(starts, address)
            if (at and ends[at - 1] > address) or (at < len(starts) and starts[at] < address + size):
                raise FileFormatError(trace.source, f"two segments at {address:#x} at the same time")
            starts.insert(at, address)
            ends.insert(at, address + size)
        elif kind == Kind.SEGMENT_FREE:
            at = bisect_left(starts, address)
            if at < len(starts) and starts[at] == address:
                del starts[at], ends[at]


def _peak_reserved(trace: Trace, device: int) -> int:
    kind = trace.records["kind"]
    changes = trace.records[np.isin(kind, _GAINS + RELEASES) & (trace.records["device"] == device)]
    size = changes["size"].astype(np.int64)
    return int(np.cumsum(np.where(np.isin(changes["kind"], _GAINS), size, -size)).max(initial=0))
