"""The calls that a program made to its allocator: columns, of which a part at a time is Python objects."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, repeat
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from cudatool.progress import step
from cudatool.trace.events import Kind

__all__ = [
    "RELEASES",
    "AllocatorCall",
    "AllocatorCalls",
    "Change",
    "Column",
    "Did",
    "Part",
    "Verb",
    "call_time",
    "change_time",
    "columns_with_emptied",
    "stored_once",
]

RELEASES = (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP)
_VERB, _BLOCK, _SIZE, _STREAM, _POOL, _ADDRESS, _EVENT = range(7)  # the columns


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


class AllocatorCall(NamedTuple):
    """One call to the allocator.

    Attributes
    ----------
    block
        Number of the block that is allocated or freed; blocks are numbered in the order of their allocation.
    done
        Numbers of the pending blocks that became free at its beginning.
    changes
        The allocator's changes in it, in order.
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


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive calls, as a list for each column; `first` is the index of the first one."""

    first: int
    mallocs: list[bool]  # else FREE, unless the call is special
    blocks: list[int]
    sizes: list[int]
    streams: list[int]
    addresses: list[int]


Column = npt.NDArray[Any]
Did = tuple[tuple[int, ...], tuple[Change, ...]]  # done and changes of a call
_TYPES = "BqQQQQq"  # of the columns, as array and NumPy call them
_EMPTIED = (int(Verb.EMPTY_CACHE), -1, 0, 0, 0, 0)  # all but the event
_AT_ONCE = 1 << 14  # calls that are Python objects at a time
_NOTHING: Did = (), ()


def call_time(call: AllocatorCall) -> int:
    """Return a number that grows from call to call. One that emptied the cache has the event of the call after it."""
    return 2 * call.event + (call.verb is not Verb.EMPTY_CACHE)


def change_time(change: Change, call: AllocatorCall) -> int:
    """Return the time of a change: releases before an allocation have happened by the time of the allocation."""
    return 2 * call.event if change.kind in RELEASES else call_time(call)


class AllocatorCalls(Sequence[AllocatorCall]):
    """Calls in order. They are kept as columns, which take a quarter of the memory of as many tuples.

    Nearly all calls are mallocs and frees in the default pool that are served from the cache: nothing else happens in
    them. The other calls are :meth:`special`.
    """

    def __init__(self, calls: Iterable[AllocatorCall] = ()) -> None:
        columns = [array(code) for code in _TYPES]
        self._did: dict[int, Did] = {}
        for number, (*row, done, changes, event) in enumerate(calls):
            for column, value in zip(columns, (*row, event), strict=True):
                column.append(value)
            if done or changes:
                self._did[number] = done, changes
        self._columns: list[Column] = [
            np.frombuffer(column, code) for column, code in zip(columns, _TYPES, strict=True)
        ]

    @classmethod
    def of_columns(cls, columns: Sequence[Column], did: dict[int, Did]) -> AllocatorCalls:
        """Return calls from the columns of their attributes, from verb to event, and from what happened in them
        (`did`).

        Parameters
        ----------
        did
            `done` and `changes` of the calls that have any, by index and in order.
        """
        calls = cls()
        calls._columns = list(columns)
        calls._did = did
        return calls

    def __len__(self) -> int:
        return len(self._columns[_VERB])

    def __iter__(self) -> Iterator[AllocatorCall]:
        return chain.from_iterable(self[first : first + _AT_ONCE] for first in range(0, len(self), _AT_ONCE))

    @overload
    def __getitem__(self, index: int) -> AllocatorCall: ...

    @overload
    def __getitem__(self, index: slice) -> list[AllocatorCall]: ...

    def __getitem__(self, index: int | slice) -> AllocatorCall | list[AllocatorCall]:
        if not isinstance(index, slice):
            at = range(len(self))[index]
            verb, block, size, stream, pool, address, event = [column.item(at) for column in self._columns]
            return AllocatorCall(_VERBS[verb], block, size, stream, pool, address, *self._did.get(at, _NOTHING), event)
        verbs, *lists, events = [column[index].tolist() for column in self._columns]
        did = [self._did.get(at, _NOTHING) for at in range(len(self))[index]]
        rows = zip(map(_VERBS.__getitem__, verbs), *lists, *zip(*did, strict=True), events, strict=True)
        # What AllocatorCall._make ends in, without a frame of Python for each call.
        return list(map(tuple.__new__, repeat(AllocatorCall), rows)) if did else []

    def changes(self) -> Iterator[Change]:
        """Return what the allocator did in all calls, in order."""
        return chain.from_iterable(changes for _, changes in self._did.values())

    def with_changes(self) -> Iterator[tuple[int, AllocatorCall]]:
        """Return the calls in which the allocator did something, each with its index, in order."""
        return ((index, self[index]) for index, (_, changes) in self._did.items() if changes)

    def of_verb(self, *verbs: Verb) -> npt.NDArray[np.int64]:
        """Return the indices of the calls of some kinds."""
        return np.flatnonzero(np.isin(self._columns[_VERB], verbs))

    def sizes(self, *verbs: Verb) -> npt.NDArray[np.uint64]:
        """Return the bytes that calls of some kinds asked for."""
        result: npt.NDArray[np.uint64] = self._columns[_SIZE][self.of_verb(*verbs)].astype(np.uint64)
        return result

    def in_use(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return whether each malloc or free, in order, is a malloc, and its block; and the mallocs' sizes."""
        verb, block, size, *_ = self._columns
        kept = np.isin(verb, (Verb.MALLOC, Verb.FREE, Verb.FREE_LATER))
        is_malloc = verb == Verb.MALLOC
        return is_malloc[kept], block[kept], size[is_malloc]

    def number_of(self, *verbs: Verb, before: int | None = None) -> int:
        """Return how many calls before an index are of some kinds."""
        return int(np.count_nonzero(np.isin(self._columns[_VERB][:before], verbs)))

    def last(self, *verbs: Verb) -> int:
        """Return the index of the last call of some kinds, or -1."""
        found = self.of_verb(*verbs)
        return int(found[-1]) if len(found) else -1

    def first_but(self, verb: Verb) -> int:
        """Return the index of the first call of another kind; the number of calls if there is none."""
        is_other = self._columns[_VERB] != verb
        return int(np.argmax(is_other)) if is_other.any() else len(self)

    def addresses(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the addresses of some calls."""
        result: npt.NDArray[np.uint64] = self._columns[_ADDRESS][index].astype(np.uint64)
        return result

    def from_events(self, events: Sequence[int]) -> list[int]:
        """Return the indices of the first calls at or after some events; there is none after the last call."""
        found = np.searchsorted(self._columns[_EVENT], np.array(events, np.int64))
        return [int(index) for index in found if index < len(self)]

    def special(self, also: Iterable[int] = ()) -> list[int]:
        """Return the sorted indices of the special calls and of those in `also`."""
        is_special = self._columns[_POOL] != 0
        is_special |= ~np.isin(self._columns[_VERB], (Verb.MALLOC, Verb.FREE))
        for indices in (self._did, also):
            is_special[np.fromiter(indices, np.int64)] = True
        return np.flatnonzero(is_special).tolist()

    def parts(self) -> Iterator[Part]:
        """Yield all calls, many at a time."""
        for first in range(0, len(self), _AT_ONCE):
            verb, block, size, stream, _, address, _ = [column[first : first + _AT_ONCE] for column in self._columns]
            mallocs = (verb == Verb.MALLOC).tolist()
            yield Part(first, mallocs, block.tolist(), size.tolist(), stream.tolist(), address.tolist())

    def go_through(
        self,
        special: Iterable[int],
        many: Callable[[Part, int, int], int],
        one: Callable[[int, AllocatorCall], bool],
        what: str,
    ) -> bool:
        """Process all calls in order, and return whether none of them stopped the run.

        Parameters
        ----------
        special
            Indices of the calls to take one by one, sorted.
        many
            Takes calls of a part, from an index in it up to another, and returns the index of the first that has to be
            taken by itself: at most the second one.
        one
            Takes a call, and returns whether to go on.
        what
            For the line that shows progress.
        """
        places = chain(special, [len(self)])
        following = next(places)
        with step(what, total=len(self)) as progress:
            for part in self.parts():
                at, end = 0, len(part.mallocs)
                while at < end:
                    plain = min(following - part.first, end)
                    if at < plain:
                        at = many(part, at, plain)
                    if at < end:
                        index = part.first + at
                        if not one(index, self[index]):
                            return False
                        at += 1
                        following = next(places) if index == following else following
                progress.update(part.first + end)
        return True

    def with_sizes(self, index: npt.NDArray[np.int64], sizes: Sequence[int]) -> AllocatorCalls:
        """Return the same calls, some of them with other sizes."""
        columns = list(self._columns)
        columns[_SIZE] = columns[_SIZE].copy()
        columns[_SIZE][index] = sizes
        return AllocatorCalls.of_columns(columns, self._did)

    def mallocs_on(self, stream: int) -> tuple[list[int], list[int], list[int]]:
        """Return events, addresses and pools of the allocations on a stream."""
        verb, _, _, streams, pool, address, event = self._columns
        own = np.flatnonzero((verb == Verb.MALLOC) & (streams == stream))
        return event[own].tolist(), address[own].tolist(), pool[own].tolist()

    def with_pool(self, pool: int, place: range, first: int, last: int) -> AllocatorCalls:
        """Return the same calls, with another pool for those that allocate, or change segments, at a place.

        Parameters
        ----------
        place
            Addresses.
        first, last
            When, as :func:`call_time` says.
        """
        columns = list(self._columns)
        event = columns[_EVENT]
        own = (columns[_VERB] == Verb.MALLOC) & (2 * event + 1 >= first) & (2 * event + 1 <= last)
        own &= (columns[_ADDRESS] >= np.uint64(place.start)) & (columns[_ADDRESS] < np.uint64(place.stop))
        columns[_POOL] = np.where(own, np.uint64(pool), columns[_POOL])
        did = dict(self._did)
        for index, (done, changes) in self._did.items():
            if any(change.address in place for change in changes):
                call = self[index]
                moved = tuple(
                    change._replace(pool=pool)
                    if change.address in place and first <= change_time(change, call) <= last
                    else change
                    for change in changes
                )
                did[index] = done, moved
        return AllocatorCalls.of_columns(columns, did)

    def with_emptied(self, emptied: Mapping[int, int]) -> AllocatorCalls:
        """Return the same calls, with the program's releases at the beginning of some turned into separate calls."""
        before = sorted(emptied)
        did: dict[int, Did] = {}
        for index, (done, changes) in self._did.items():
            shifted = index + bisect_left(before, index)
            if index in emptied:
                count = emptied[index]
                did[shifted], shifted = (done, changes[:count]), shifted + 1
                done, changes = (), changes[count:]
            if done or changes:
                did[shifted] = done, changes
        columns = columns_with_emptied(self._columns, before, self._columns[_EVENT][before])
        return AllocatorCalls.of_columns(columns, did)


def columns_with_emptied(columns: list[Column], places: list[int], events: Any) -> list[Column]:
    """Return the columns of calls with an ``empty_cache`` before some of them, whose events are these."""
    rows: tuple[Any, ...] = (*_EMPTIED, events)
    return [np.insert(column, places, row) for column, row in zip(columns, rows, strict=True)]


def stored_once(column: Column) -> Column:
    """Return a column that stores one value if all rows are equal: most recordings have one stream."""
    if len(column) and column.min() == column.max():
        return np.broadcast_to(column[0], len(column))
    return column
