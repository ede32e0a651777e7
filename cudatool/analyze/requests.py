"""Separates a program's requests to its allocator from what the allocator did for them.

A recording holds both in one sequence. A call's own events follow each other, because they are recorded under the
allocator's lock::

    malloc       free_completed*, releases*, gains*, alloc          (or oom in place of alloc)
    free         free_requested, and free_completed at once if no other stream uses the block
    empty_cache  free_completed*, releases*

Gains are segments allocated and pages mapped, releases are segments freed and pages unmapped. If releases precede an
``alloc`` without any gain, the program emptied the cache before. If there are gains, the allocator may have made room
for them: :mod:`cudatool.analyze.releases` decides from the replay's state at that point.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from cudatool.analyze.calls import (
    RELEASES,
    AllocatorCall,
    AllocatorCalls,
    Change,
    Column,
    Did,
    Verb,
    columns_with_emptied,
    stored_once,
)
from cudatool.errors import ConfigError, FileFormatError, UsageError
from cudatool.memory.blocks import MIN_BLOCK_SIZE
from cudatool.trace import _sweep
from cudatool.trace.distinct import distinct
from cudatool.trace.events import SEGMENT_GAINS, Kind
from cudatool.trace.model import Trace

__all__ = ["Requests", "peak_reserved", "refuses_contradictions", "requests"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_ALLOC, _OOM = int(Kind.BLOCK_ALLOC), int(Kind.OOM)
_FREE_REQUESTED, _FREE_COMPLETED = int(Kind.BLOCK_FREE_REQUESTED), int(Kind.BLOCK_FREE_COMPLETED)
_KINDS = (
    Kind.BLOCK_ALLOC,
    Kind.BLOCK_FREE_REQUESTED,
    Kind.BLOCK_FREE_COMPLETED,
    Kind.OOM,
    *SEGMENT_GAINS,
    *RELEASES,
)


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
        Bytes of hidden tails after some of them, by number: remainders too small to be split off. Only a replay finds
        them.
    prior_pending
        Numbers of those that had been freed, but were still in use by another stream.
    peak_reserved
        The most bytes that were reserved at a time, according to the events.
    unmatched
        The number of frees of blocks that were never allocated; they are left out.
    retries
        How often the allocator released all that was cached to make room. A replay finds this and what follows.
    ceiling
        A number of bytes that could not be reserved, according to requests that failed or made the allocator release
        memory; None if there were none.
    available
        Bytes that could be reserved on the device: the reserved ones plus those that the driver reported as free when a
        request failed; the least of several such sums. A memory fraction may allow less. None if no request failed.
    otherwise
        The same requests if all doubtful releases were the program's; None if there are none.
    """

    device: int
    calls: AllocatorCalls = field(default_factory=AllocatorCalls)
    prior_memory: list[Change] = field(default_factory=list)
    prior_blocks: list[AllocatorCall] = field(default_factory=list)
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
    """Return the program's requests to the allocator of one device.

    Raises
    ------
    FileFormatError
        Two segments share addresses at the same time, or a block has no bytes.
    """
    index = _allocator_events(trace, device)
    prior = int(trace.header.get("prior_records", {}).get(device, 0))
    _check_segments(trace, device)
    found = Requests(device, peak_reserved=peak_reserved(trace, device))
    kind, address = trace.records["kind"][index], trace.records["address"][index]
    block_of = _numbers_of_blocks(kind, address)
    found.blocks = int(np.count_nonzero(kind == _ALLOC))
    pending = _take_prior(found, trace, index[:prior], block_of[:prior])
    frees = kind == _FREE_REQUESTED
    frees[:prior] = False
    at_once = frees.copy()
    at_once[-1:] = False
    at_once[:-1] &= (kind[1:] == _FREE_COMPLETED) & (address[1:] == address[:-1])
    is_known = block_of >= 0
    found.unmatched += int(np.count_nonzero(frees & ~is_known))
    verb_of_kind = np.zeros(256, np.uint8)
    verb_of_kind[[_ALLOC, _OOM]] = Verb.MALLOC, Verb.FAILED_MALLOC
    verb = verb_of_kind[kind]
    verb[frees & is_known] = Verb.FREE_LATER
    verb[at_once & is_known] = Verb.FREE
    verb[:prior] = 0
    apart = _Apart(trace, index, kind, address, block_of, verb, prior)
    apart.gather(pending)
    del frees, at_once, is_known, kind, address
    called = np.flatnonzero(verb)
    found.calls = apart.merged(called, _columns(trace, verb[called], block_of[called], index[called]))
    return found


def _columns(
    trace: Trace, verb: npt.NDArray[np.uint8], block: npt.NDArray[np.int64], event: npt.NDArray[np.int64]
) -> list[Column]:
    """Return the columns of calls, given these columns."""
    records = trace.records
    failed = verb == Verb.FAILED_MALLOC
    size, address = records["aux0"][event], records["address"][event]
    if (empty := np.flatnonzero((verb == Verb.MALLOC) & (size == 0))).size:
        raise FileFormatError(trace.source, f"a block of 0 bytes at {int(address[empty[0]]):#x}")
    size[failed] = records["size"][event[failed]]
    address[failed] = 0
    return [verb, block, size, _stream_handles(trace)(records["stream"][event]), records["aux1"][event], address, event]


def _allocator_events(trace: Trace, device: int) -> npt.NDArray[np.int64]:
    """Return the numbers of the records of the allocator's events on a device."""
    is_of_kind = np.zeros(256, np.bool_)
    is_of_kind[list(_KINDS)] = True
    return np.flatnonzero(is_of_kind[trace.records["kind"]] & (trace.records["device"] == device))


def _numbers_of_blocks(kind: npt.NDArray[np.uint8], address: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the number of the block that each event allocates or is asked to free, -1 for others."""
    numbers = np.full(len(kind), -1, np.int64)
    found = np.flatnonzero((kind == _ALLOC) | (kind == _FREE_REQUESTED))
    is_born = kind[found] == _ALLOC
    start, freed, end = np.empty((3, int(np.count_nonzero(is_born))), np.int64)
    _sweep.pair(
        np.where(is_born, 1, 2).astype(np.uint8), address[found], np.zeros(len(found), np.int8), start, freed, end
    )
    numbers[found[start]] = np.arange(len(start))
    is_freed = freed < len(found)
    is_freed[is_freed] = ~is_born[freed[is_freed]]  # else that is where the next block begins
    numbers[found[freed[is_freed]]] = np.flatnonzero(is_freed)
    return numbers


def _stream_handles(trace: Trace) -> Callable[[npt.NDArray[np.uint32]], npt.NDArray[np.uint64]]:
    """Return a function from streams to their handles: the allocator releases in the order of handles."""
    created = trace.of_kind(Kind.STREAM_CREATE)
    handles = dict(zip(created["stream"].tolist(), created["address"].tolist(), strict=True))

    def of(streams: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        if not handles:
            return streams.astype(np.uint64)
        numbers, which = np.unique(streams, return_inverse=True)
        return np.array([handles.get(number, number) for number in numbers.tolist()], np.uint64)[which]

    return of


class _Apart:
    """Events outside of the program's calls: they belong to the next call, or the cache is emptied."""

    def __init__(
        self,
        trace: Trace,
        index: npt.NDArray[np.int64],
        kind: npt.NDArray[np.uint8],
        address: npt.NDArray[np.uint64],
        block: npt.NDArray[np.int64],
        verb: npt.NDArray[np.uint8],
        prior: int,
    ) -> None:
        self._trace, self._index, self._kind, self._address, self._block = trace, index, kind, address, block
        self._verb = verb
        self._prior = prior
        self._did: list[tuple[int, bool, Did]] = []  # at the event of a call, whether before it, and what

    def gather(self, pending: dict[int, int]) -> None:
        """Collect them; `pending` maps the addresses of blocks that wait for a stream at the start to their numbers."""
        kind, address = self._kind, self._address
        later = self._verb == Verb.FREE_LATER
        waited = distinct(address[later], np.fromiter(pending, np.uint64))
        steps = later | np.isin(kind, [int(change) for change in (*SEGMENT_GAINS, *RELEASES)])
        if len(waited):
            steps |= (kind == _FREE_COMPLETED) & np.isin(address, waited)
        steps[: self._prior] = False
        calls = np.isin(kind, [_ALLOC, _OOM, _FREE_REQUESTED])
        calls[: self._prior] = False
        at = np.flatnonzero(steps)
        calling = np.append(np.flatnonzero(calls), len(kind))
        following = calling[np.searchsorted(calling, at)].tolist()
        rows = zip(following, _changes(self._trace, self._index[at]), self._block[at].tolist(), strict=True)
        done: list[int] = []
        changed: list[Change] = []
        call = -1

        def finish() -> None:
            if done or changed:
                self._add(call, (tuple(done), tuple(changed)))
                done.clear()
                changed.clear()

        for after, change, block in rows:
            is_free = change.kind is Kind.BLOCK_FREE_REQUESTED
            if after != call or is_free:
                finish()
            call = after
            if is_free:
                pending[change.address] = block
            elif change.kind is not Kind.BLOCK_FREE_COMPLETED:
                changed.append(change)
            elif change.address in pending:
                done.append(pending.pop(change.address))
        finish()

    def _add(self, call: int, did: Did) -> None:
        """Note what happened before an event that is a call, or before the end."""
        kind = int(self._kind[call]) if call < len(self._kind) else _FREE_REQUESTED
        releases = bool(did[1]) and all(change.kind in RELEASES for change in did[1])
        self._did.append((call, kind == _FREE_REQUESTED or (kind == _ALLOC and releases), did))

    def merged(self, called: npt.NDArray[np.int64], columns: list[Column]) -> AllocatorCalls:
        """Return all calls, given those that the program made, and their columns."""
        before = np.searchsorted(called, [call for call, _, _ in self._did]).tolist()
        did: dict[int, Did] = {}
        places: list[int] = []
        events: list[int] = []
        for place, (call, is_call, what) in zip(before, self._did, strict=True):
            did[place + len(places)] = what
            if is_call:
                places.append(place)
                events.append(int(self._index[min(call, len(self._index) - 1)]))
        if places:
            columns = columns_with_emptied(columns, places, events)
        return AllocatorCalls.of_columns([stored_once(column) for column in columns], did)


def _take_prior(
    found: Requests, trace: Trace, index: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]
) -> dict[int, int]:
    """Take over the state from before the recording, which precedes it as events.

    Return the number of the block at each address that waits for a stream.
    """
    pending: dict[int, int] = {}
    asked_of = trace.records["aux0"][index].tolist()
    rows = zip(_changes(trace, index), numbers.tolist(), asked_of, index.tolist(), strict=True)
    for change, block, asked, event in rows:
        if change.kind is Kind.BLOCK_ALLOC:
            call = AllocatorCall(Verb.MALLOC, block, asked, change.stream, change.pool, change.address, (), (), event)
            found.prior_blocks.append(call)
            found.prior_sizes.append(change.size)
        elif change.kind is not Kind.BLOCK_FREE_REQUESTED:
            found.prior_memory.append(change._replace(stack=0))
        elif block < 0:
            found.unmatched += 1
        else:
            pending[change.address] = block
            found.prior_pending.append(block)
    return pending


def _changes(trace: Trace, index: npt.NDArray[np.int64]) -> Iterator[Change]:
    """Yield some records of the trace as changes."""
    records = trace.records[index]
    kind, address, size, pool, stack = (records[name].tolist() for name in ("kind", "address", "size", "aux1", "stack"))
    streams = _stream_handles(trace)(records["stream"]).tolist()
    small = (records["flags"] & 1).astype(np.bool_).tolist()
    return map(Change, map(Kind, kind), address, size, streams, pool, small, stack)


def refuses_contradictions(
    function: Callable[Concatenate[Trace, _P], _R],
) -> Callable[Concatenate[Trace, _P], _R]:
    """Make a function that passes a trace's requests to the policy raise FileFormatError if they contradict it.

    Not every contradiction is checked beforehand. A file may lack what the policy assumes, such as a record of each
    segment that has blocks.
    """

    @functools.wraps(function)
    def call(trace: Trace, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(trace, *args, **kwargs)
        except ConfigError:
            raise
        except (AssertionError, KeyError, UsageError) as error:
            said = f" ({error})" if isinstance(error, UsageError) else ""
            if isinstance(error, KeyError) and isinstance(error.args[0], int):
                said = f" (at {error.args[0]:#x})"  # memory that is looked for by its address
            raise FileFormatError(trace.source, f"its events contradict each other{said}") from error

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


def peak_reserved(trace: Trace, device: int) -> int:
    """Return the most bytes that the allocator of a device had reserved at a time, according to the events."""
    kind = trace.records["kind"]
    changes = trace.records[np.isin(kind, SEGMENT_GAINS + RELEASES) & (trace.records["device"] == device)]
    size = changes["size"].astype(np.int64)
    return int(np.cumsum(np.where(np.isin(changes["kind"], SEGMENT_GAINS), size, -size)).max(initial=0))
