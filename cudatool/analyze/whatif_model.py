"""One run of recorded requests through the allocator's policy over a model of a device.

::

    start with the memory that the recording began with, if these settings could have led to it
    for each call of the recorded program:
        free the blocks whose streams have passed by then
        a request: ask the policy, which takes segments from the model of the device
            it fails: go on where the program would, else this is where memory runs out
        a free, or the end of a block that a stream still used: the same
        empty_cache: the same, of the pools that it released

What the program would have done under these settings, where it met with something that it did not meet with in the
recording, is not known. A :class:`Course` is one assumption of that; a :class:`Caveat` says that the numbers depend on
one. :mod:`.whatif_experiment` tries several.

Most calls are plain requests and frees that a cached block fits. The policy serves runs of them in one call
(:meth:`_Model._many`); what is left is done one by one (:meth:`_Model._one`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import heappop, heappush
from itertools import chain

from cudatool.analyze.calls import RELEASES, AllocatorCall, Part, Verb
from cudatool.analyze.modeled_device import ModeledDevice
from cudatool.analyze.replay_pass import pool_ids
from cudatool.analyze.replay_start import own_stream, set_up
from cudatool.analyze.requests import Requests, refuses_contradictions
from cudatool.errors import FileFormatError, OutOfMemoryError
from cudatool.limits import FAILURE_STEPS, GAP_STEPS
from cudatool.memory.blocks import Block, PoolId
from cudatool.memory.journal import Journal
from cudatool.memory.policy import DEFAULT_POOL, Policy
from cudatool.memory.settings import UNLIMITED, Settings
from cudatool.trace.events import Kind
from cudatool.trace.frames import call_site
from cudatool.trace.model import Trace

__all__ = ["Caveat", "Course", "OutOfMemory", "WhatIfOutcome", "check_model", "run_model"]

_UNKNOWN_MEMORY = 1 << 44  # more memory than any device has


class Caveat(StrEnum):
    """Why a prediction may be off."""

    PEAK_DIFFERS = "peak-differs"
    """A replay of the recorded settings does not reserve what was recorded."""
    RETRIES_DIFFER = "retries-differ"
    """It does not empty the cache as often to make room as the recorded allocator did."""
    FAILURES_DIFFER = "failures-differ"
    """Other requests fail in it than were recorded to fail."""
    RUNS_OUT = "runs-out"
    """What the program would have done after the request that fails is not known: numbers are those until then."""
    OTHER_COURSE = "other-course"
    """A request that failed when it was recorded is served here: what the program does with it then is not known."""
    BEGINS_LATE = "begins-late"
    """The recording begins in mid-program: what would have been cached by then is not known. It is taken to be
    what was cached when recorded, if these settings could have led to that, else nothing."""
    CALLS_UNSEEN = "calls-unseen"
    """Calls of ``empty_cache`` that found nothing to give back are not in the file: here they would find something."""
    LIMIT_UNCLEAR = "limit-unclear"
    """It runs into a limit whose size the recording shows only roughly."""
    SIZES_ROUNDED = "sizes-rounded"
    """Of requests that failed the file has the size that the recorded settings rounded them to, which is too much."""
    CALLS_UNCLEAR = "calls-unclear"
    """The recording does not show whether it was the program that emptied the cache, which makes a difference here."""
    ADDRESSES_UNSEEN = "addresses-unseen"
    """Of free blocks of one size the lowest is taken: which addresses the driver gives makes a difference."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Where a program would run out of memory.

    Attributes
    ----------
    event
        Index of the request in the trace's records; `request` is its number among the allocations.
    size
        The requested bytes.
    reserved_bytes, active_bytes
        At that time.
    site
        The call site, if the recording has stacks.
    """

    event: int
    request: int
    size: int
    reserved_bytes: int
    active_bytes: int
    site: str


@dataclass(frozen=True, slots=True)
class WhatIfOutcome:
    """What requests cost under some settings.

    Attributes
    ----------
    conf
        The settings.
    reserved_peak_bytes, active_peak_bytes
        The peaks.
    reserved_least_bytes, reserved_most_bytes
        The bounds of the peak of reserved bytes, over all that the recording leaves open; both are that peak if there
        is no caveat. None if only the device's memory, which is not known, bounds it.
    fragmentation
        Share of the reserved bytes that were not in use, at the peak of reserved bytes; of several such moments the one
        with the most in use. More may have been in use at another moment, when less was reserved.
    retries
        How often the cache was emptied to make room.
    device_allocs
        How often memory was requested from the driver; each time costs about 0.1 ms.
    oom
        The first place where memory would run out; None if it would not.
    survived_ooms
        Earlier requests that also failed, but that the program can survive: it did so in the recording, or they were
        trials of cuDNN's search for algorithms (``torch.backends.cudnn.benchmark``).
    caveats
        Why the numbers may be off; empty if they are as sure as a replay can be.
    """

    conf: str
    reserved_peak_bytes: int
    active_peak_bytes: int
    fragmentation: float
    retries: int
    device_allocs: int
    oom: OutOfMemory | None
    survived_ooms: int
    reserved_least_bytes: int
    reserved_most_bytes: int | None
    caveats: tuple[Caveat, ...] = ()

    @property
    def unused_bytes(self) -> int:
        """Bytes that were reserved and not in use, at the moment of `fragmentation`."""
        return round(self.fragmentation * self.reserved_peak_bytes)

    @property
    def failures(self) -> int:
        """How many requests failed."""
        return self.survived_ooms + (self.oom is not None)


@dataclass(frozen=True, slots=True)
class Course:
    """Assumptions about what a recording does not show: the behaviour of the program and of the driver.

    Attributes
    ----------
    goes_on
        After a failed request the program continues without it, whatever it did in the recording.
    gives_up
        After a failed request the program ends, unless that request also failed in the recording and others followed.
    keeps, frees_at_once
        The program never frees a block whose request failed in the recording, or frees it at once; if neither is set,
        it frees it at the likely time.
    does_without
        The program does not make requests that failed in the recording.
    empties
        Calls, by index, before which the program empties the cache although the recording does not show it. If that
        releases something, the outcome has the caveat CALLS_UNSEEN.
    lowest_first
        The driver gives each segment the lowest address that is free.
    """

    goes_on: bool = False
    gives_up: bool = False
    keeps: bool = False
    frees_at_once: bool = False
    does_without: bool = False
    empties: frozenset[int] = frozenset()
    lowest_first: bool = False


@refuses_contradictions
def run_model(
    trace: Trace,
    asked: Requests,
    settings: Settings,
    conf: str,
    *,
    total: int | None,
    limit: int | None,
    course: Course | None = None,
    frees: Mapping[int, int] | None = None,
    most: int | None = None,
) -> tuple[WhatIfOutcome, bool]:
    """Return the cost of requests under `settings`, whose spelling is `conf`, and whether all of them ran.

    Parameters
    ----------
    course
        The assumptions about what the recording does not show.
    total
        The device's memory in bytes, to which a memory fraction applies; None if not known.
    limit
        Bytes that can be reserved at most; None if there is no limit.
    frees
        For the event of a request that failed in the recording, the event of the call before which its block is likely
        freed; blocks without an entry are freed at once.
    most
        The run ends as soon as more bytes are reserved; None if it does not end early.
    """
    model = _model(trace, asked, settings, total, limit, course)
    model.frees = frees or {}
    model.most = most
    return model.run(conf), not model.is_beyond


@refuses_contradictions
def check_model(
    trace: Trace, asked: Requests, settings: Settings, *, total: int | None, limit: int | None
) -> tuple[WhatIfOutcome, frozenset[int]]:
    """Return the cost of requests under the recorded settings, and the calls before which nothing is cached.

    Before these calls (indices), a program may have emptied the cache without leaving an event. The parameters are
    those of :func:`run_model`.
    """
    model = _model(trace, asked, settings, total, limit, None)
    model.quiet = set()
    return model.run(settings.text), frozenset(model.quiet)


def _model(
    trace: Trace, asked: Requests, settings: Settings, total: int | None, limit: int | None, course: Course | None
) -> _Model:
    return _Model(trace, asked, settings, total or _UNKNOWN_MEMORY, limit or _UNKNOWN_MEMORY, course or Course())


class _Model:
    """One run of the requests."""

    def __init__(
        self, trace: Trace, asked: Requests, settings: Settings, total: int, limit: int, course: Course
    ) -> None:
        self._course = course
        self._pending: set[int] = set()  # numbers of blocks that were freed and are still in use
        self.quiet: set[int] | None = None  # collected if it is not None
        self.frees: Mapping[int, int] = {}
        self.most: int | None = None  # the run ends beyond this many reserved bytes
        self._served: list[tuple[int, int]] = []  # heap: blocks that were refused, as event to free at and address
        self.trace = trace
        self.asked = asked
        self.device = ModeledDevice(limit, asked, lowest_first=course.lowest_first)
        self.policy = Policy(
            self.device,
            device=asked.device,
            settings=settings,
            journal=Journal(asked.device, None),
            total_memory=total,
            outside=nullcontext,
        )
        self._settings = settings
        self._pool_id = pool_ids(trace)
        self._pools: set[PoolId] = set()
        self._default_pools: set[int] = set()  # by their numbers in the recording
        self._level = self.policy.statistics.all
        self._reserved, self._allocated = self._level.reserved_bytes, self._level.allocated_bytes
        self._address: dict[int, int] = {}
        self._fullest = (0, 0)  # bytes reserved, and those in use: when most were reserved and most of these in use
        self._survived = 0
        self._cached: Block | None = None  # one that could be released
        self._last_malloc = asked.calls.last(Verb.MALLOC)
        self._begin = asked.calls.first_but(Verb.EMPTY_CACHE)  # the index of the first request
        self._ended: OutOfMemory | None = None
        self._searched = 0  # blocks visited when requests failed: to find free ones, and for the message
        self._caveats: list[Caveat] = []

    @property
    def is_beyond(self) -> bool:
        """Whether more is, or was, reserved than allowed."""
        return self.most is not None and self._reserved.peak > self.most

    def run(self, conf: str) -> WhatIfOutcome:
        out_of_memory = self._out_of_memory(f"trying {conf}" if conf else "trying the defaults")
        if out_of_memory is not None and Caveat.RUNS_OUT not in self._caveats:
            self._caveats.append(Caveat.RUNS_OUT)
        statistics = self.policy.statistics
        reserved, active = self._fullest
        peak = statistics.all.reserved_bytes.peak
        return WhatIfOutcome(
            conf=conf,
            reserved_peak_bytes=peak,
            reserved_least_bytes=peak,
            reserved_most_bytes=peak,
            active_peak_bytes=statistics.all.active_bytes().peak,
            fragmentation=1 - active / reserved if reserved else 0.0,
            retries=statistics.num_alloc_retries,
            device_allocs=statistics.num_device_alloc,
            oom=out_of_memory,
            survived_ooms=self._survived,
            caveats=tuple(self._caveats),
        )

    def _out_of_memory(self, what: str) -> OutOfMemory | None:
        """Run all requests, or those before memory runs out; return where that ends. `what` is shown as progress."""
        self._take_over()
        if (failed := self._allocate_prior()) is not None:
            return failed
        for number in self.asked.prior_pending:
            if number in self._address:
                self._free_later(number)
        calls = self.asked.calls
        begin = range(self._begin, min(self._begin + 1, len(calls)))
        special = calls.special(chain(self._course.empties, begin, calls.from_events(list(self.frees.values()))))
        calls.go_through(special, self._many, self._one, what)
        return self._ended

    def _many(self, part: Part, start: int, stop: int) -> int:
        """Run calls in which nothing else happens, up to the first that no cached block fits."""
        watched = None
        if self.quiet is not None and not self._pending:
            watched = self._cached
            if watched is None or watched.home is None:
                return start
        lists = part.mallocs, part.blocks, part.sizes, part.streams
        stop, most = self.policy.serve(self._address, *lists, None, start, stop, watched)
        if most:
            self._note_level(most)
        return stop

    def _one(self, index: int, call: AllocatorCall) -> bool:
        """Run a call; return whether to continue."""
        verb, block, addresses = call.verb, call.block, self._address
        self._before(index, call)
        if verb is Verb.FREE:
            if block in addresses:  # else it was not allocated here
                self.policy.free(addresses.pop(block))
        elif verb is Verb.MALLOC:
            if not self._malloc(call) and not self._does_without(index, call):
                return False
        elif verb is Verb.FAILED_MALLOC:
            if self._course.does_without:
                return True
            if self._malloc(call):
                self._serve_what_failed(call)
            elif not self._does_without(index, call):
                return False
        elif verb is Verb.EMPTY_CACHE:
            self._empty_cache(call)
        elif block in addresses:
            self._free_later(block)
        return not self.is_beyond

    def _before(self, index: int, call: AllocatorCall) -> None:
        """Do what comes before a call: streams that have passed, and frees that left no event of their own."""
        if index == self._begin:
            self._begin_to_count()
        if self.quiet is not None and not self._pending and not self._has_cached():
            self.quiet.add(index)
        if call.done:
            self.device.passed.update(own_stream(block) for block in call.done)
            self._pending.difference_update(call.done)
            self.policy.free_passed_blocks()
        while self._served and self._served[0][0] <= call.event:
            self.policy.free(heappop(self._served)[1])
        if index in self._course.empties:
            self._empty_unseen()

    def _does_without(self, index: int, call: AllocatorCall) -> bool:
        """Return whether the program goes on though a request failed; else that is how the run ends."""
        self._searched += len(self._address)
        if self._searched <= FAILURE_STEPS and self._can_do_without(index):
            self._survived += 1
            return True
        earlier = self.asked.calls.number_of(Verb.MALLOC, Verb.FAILED_MALLOC, before=index + 1)
        self._ended = self._failure(call, len(self.asked.prior_blocks) + earlier)
        return False

    def _serve_what_failed(self, call: AllocatorCall) -> None:
        """Decide what becomes of a block that the program did not get in the recording, where it went on without."""
        if Caveat.OTHER_COURSE not in self._caveats:
            self._caveats.append(Caveat.OTHER_COURSE)
        address, until = self._address.pop(call.block), self.frees.get(call.event, 0)
        if until and not (self._course.keeps or self._course.frees_at_once):
            heappush(self._served, (until, address))
        elif not self._course.keeps:
            self.policy.free(address)

    def _take_over(self) -> None:
        """Start with the memory that the recording began with, if these settings could have led to it."""
        asked, settings = self.asked, self._settings
        split_limit = UNLIMITED if settings.expandable_segments else settings.max_split_size
        starts = sorted(change.address for change in asked.prior_memory)
        used: dict[int, list[int]] = {}  # sizes of the blocks in use, by the number of the segment or pages
        for call, size in zip(asked.prior_blocks, asked.prior_sizes, strict=True):
            used.setdefault(bisect_right(starts, call.address), []).append(size + asked.tails.get(call.block, 0))
        kept = []
        for change in asked.prior_memory:
            blocks = used.get(bisect_right(starts, change.address), [])
            is_split = change.size >= split_limit and blocks not in ([], [change.size])
            if (change.kind is Kind.SEGMENT_MAP) is settings.expandable_segments and not is_split:
                kept.append(change)
        if kept:
            self.device.adopt(kept)
            asked = replace(asked, prior_memory=kept)
            self._address, _ = set_up(self.policy, asked, asked.tails, self._pool, self.device.total * 9 // 8)

    def _allocate_prior(self) -> OutOfMemory | None:
        """Allocate the blocks outside of the memory that was taken over; return the first that does not fit, if any."""
        for count, call in enumerate(self.asked.prior_blocks, 1):
            if call.block not in self._address and not self._malloc(call):
                return self._failure(call, count)
        return None

    def _begin_to_count(self) -> None:
        """Leave out memory that was cached before the first request and released by then."""
        self.policy.statistics.reset_peak()
        self._note_level()

    def _note_level(self, allocated: int | None = None) -> None:
        """Note the reserved bytes and those in use: allocated (default: the current ones) and pending."""
        reserved = self._reserved.current
        if reserved >= self._fullest[0]:
            allocated = self._allocated.current if allocated is None else allocated
            self._fullest = max(self._fullest, (reserved, allocated + self._level.pending_bytes))

    def _can_do_without(self, index: int) -> bool:
        """Return whether a program continues when a request fails.

        It does if the request failed in the recording and others followed. And cuDNN's search tries algorithms one
        after the other: each frees its workspace at once and empties the cache; an algorithm that does not fit is
        skipped.
        """
        calls = self.asked.calls
        call = calls[index]
        if self._course.goes_on:
            return True
        if call.verb is Verb.FAILED_MALLOC:
            return index < self._last_malloc
        following = calls[index + 1 : index + 3]
        is_trial = [later.verb for later in following] == [Verb.FREE, Verb.EMPTY_CACHE]
        if not is_trial or following[0].block != call.block or self._course.gives_up:
            return False
        if Caveat.RUNS_OUT not in self._caveats:
            self._caveats.append(Caveat.RUNS_OUT)  # any other program with these calls would have ended
        return True

    def _malloc(self, call: AllocatorCall) -> bool:
        if call.changes:
            self.device.recorded_segments = {c.size: c.address for c in call.changes if c.kind is Kind.SEGMENT_ALLOC}
        before, served = self._reserved.current, True
        try:
            if call.pool in self._default_pools:
                self._address[call.block] = self.policy.malloc(call.size, call.stream)
            else:
                self._address[call.block] = self._malloc_in_pool(call)
        except OutOfMemoryError:
            served = False
        if call.changes:
            self.device.recorded_segments = {}
        if (not served or before != self._reserved.current) and self.device.looked_at > GAP_STEPS:
            raise FileFormatError(self.trace.source, "the gaps between its segments are too many for a replay")
        if served:
            self._note_level()
        return served

    def _malloc_in_pool(self, call: AllocatorCall) -> int:
        """Allocate a block that may be from a private pool; note the pool's number if it is the default one."""
        policy, id = self.policy, self._pool(call.pool)
        if id == DEFAULT_POOL:
            self._default_pools.add(call.pool)
            return policy.malloc(call.size, call.stream)
        policy.begin_allocate_to_pool(id, _everywhere)
        try:
            return policy.malloc(call.size, call.stream)
        finally:
            policy.end_allocate_to_pool(id)
            policy.release_pool(id)

    def _pool(self, number: int) -> PoolId:
        """Return the id of a recorded pool, which is in use from now on."""
        id = self._pool_id(number)
        if id != DEFAULT_POOL and id not in self._pools:
            self._pools.add(id)
            self.policy.use_pool(id)
        return id

    def _has_cached(self) -> bool:
        """Return whether the default pools have something to release."""
        segments = self.policy.segments
        if self._cached is not None and self._cached.home is not None and segments.is_releasable(self._cached):
            return True  # the previous one is still there
        pools = [self.policy.pool_for(DEFAULT_POOL, is_small=is_small) for is_small in (False, True)]
        free = (block for pool in pools for block in reversed(pool.free_blocks()))
        self._cached = next((block for block in free if segments.is_releasable(block)), None)
        return self._cached is not None

    def _free_later(self, block: int) -> None:
        self._pending.add(block)
        address = self._address.pop(block)
        self.policy.record_stream(address, own_stream(block))
        self.policy.free(address)

    def _empty_unseen(self) -> None:
        reserved = self.policy.statistics.all.reserved_bytes
        before = reserved.current
        self.policy.release_cached(DEFAULT_POOL)
        if reserved.current != before and Caveat.CALLS_UNSEEN not in self._caveats:
            self._caveats.append(Caveat.CALLS_UNSEEN)

    def _empty_cache(self, call: AllocatorCall) -> None:
        if not call.changes:
            return  # nothing was released, or these blocks became free at another time
        pools = {self._pool_id(change.pool) for change in call.changes if change.kind in RELEASES}
        for id in pools & self._pools:
            self._pools.discard(id)
            self.policy.release_pool(id)
        only_private = bool(pools) and DEFAULT_POOL not in pools and len(pools) == 1
        self.policy.release_cached(next(iter(pools)) if only_private else DEFAULT_POOL)

    def _failure(self, call: AllocatorCall, request: int) -> OutOfMemory:
        level = self.policy.statistics.all
        stack = self.trace.stack(int(self.trace.records["stack"][call.event]))
        return OutOfMemory(
            event=call.event,
            request=request,
            size=call.size,
            reserved_bytes=level.reserved_bytes.current,
            active_bytes=level.allocated_bytes.current + level.pending_bytes,
            site=call_site(stack),
        )


def _everywhere(stream: int) -> bool:
    return True
