"""What the same requests would have cost under other allocator settings, or on another card.

The recorded calls go through the allocator's policy over a model of a card: memory is a number of bytes, and addresses
are counted up. What the program asked for stays as it was, down to the point at which other streams are done with a
block that was freed. What is not known is what a program would have done had it not run out of memory: a recording
that ends so has only the requests until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from cudatool.analyze.card import Card
from cudatool.analyze.memory import call_site
from cudatool.analyze.replay import pool_ids, requests_with_pools
from cudatool.analyze.requests import Call, Requests, Verb
from cudatool.errors import ConfigError, OutOfMemoryError
from cudatool.memory.blocks import PoolId
from cudatool.memory.journal import Journal
from cudatool.memory.policy import DEFAULT_POOL, Policy
from cudatool.memory.settings import Settings
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

__all__ = ["Advice", "Outcome", "OutOfMemory", "advise", "recorded_limit", "what_if"]

_UNKNOWN_CARD = 1 << 44  # more memory than any card has
_MIB = 1024 * 1024
_GAIN_WORTH_NAMING = 0.01  # of what is reserved


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """Where a program would run out of memory.

    Attributes
    ----------
    event
        Index of the request in the trace's records; `request` is its number among the allocations.
    size
        Bytes that were asked for.
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
class Outcome:
    """What requests cost under some settings.

    Attributes
    ----------
    conf
        The settings.
    reserved_peak_bytes, active_peak_bytes
        The most at a time.
    fragmentation
        Share of the reserved bytes that were not in use when most were reserved.
    retries
        How often the cache was emptied to make room.
    device_allocs
        How often the driver was asked for memory; each time costs some 0.1 ms.
    oom
        Where memory would run out; None if it would not.
    survived_ooms
        Requests before that which found no memory either, but which the program can do without: it did so when it was
        recorded, or they were trials of cuDNN's search for algorithms (``torch.backends.cudnn.benchmark``).
    """

    conf: str
    reserved_peak_bytes: int
    active_peak_bytes: int
    fragmentation: float
    retries: int
    device_allocs: int
    oom: OutOfMemory | None
    survived_ooms: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The best of some settings.

    Attributes
    ----------
    best
        None if nothing is better than what was used.
    gain_bytes
        By how much less is reserved; 0 if the gain is that memory does not run out.
    """

    recorded: Outcome
    best: Outcome | None
    gain_bytes: int
    tried: tuple[Outcome, ...]


def what_if(
    trace: Trace,
    device: int,
    confs: Sequence[str],
    *,
    recorded: Settings,
    recorded_memory: int | None = None,
    memory: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Return what the requests on one device cost under each of some settings.

    Parameters
    ----------
    confs
        Settings strings in PyTorch's syntax.
    recorded, recorded_memory
        The settings that were in force, and bytes of the card they were recorded on, if known. They tell the program's
        requests from what the allocator did by itself.
    memory
        Bytes of the card to model; default: `recorded_memory`, else what :func:`recorded_limit` finds, else no limit.
    progress
        Is told the number of settings done.

    Raises
    ------
    ConfigError
        A string cannot be read, or asks for another allocator.
    """
    asked = requests_with_pools(trace, device, recorded, recorded_memory)
    total = memory or recorded_memory or recorded_limit(trace, device)
    outcomes = []
    for conf in confs:
        outcomes.append(_outcome(trace, asked, conf, total))
        if progress is not None:
            progress(len(outcomes))
    return outcomes


def advise(
    trace: Trace,
    device: int,
    *,
    recorded: Settings,
    recorded_memory: int | None = None,
    memory: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Advice:
    """Search the settings that matter, and name the best.

    First each by itself, then the best two together. Better is what does not run out of memory, then what reserves
    less; of about equal ones the one named first, which is the simpler one.
    """
    asked = requests_with_pools(trace, device, recorded, recorded_memory)
    total = memory or recorded_memory or recorded_limit(trace, device)
    limit = _limit_of(recorded)
    done: dict[str, Outcome] = {}

    def outcome(conf: str) -> Outcome:
        if conf not in done:
            done[conf] = _outcome(trace, asked, conf, total)
            if progress is not None:
                progress(len(done))
        return done[conf]

    used = outcome(recorded.text)
    singles = [_joined(conf, limit) for conf in _candidates(asked, recorded)]
    ranked = sorted((outcome(conf) for conf in singles), key=_badness)
    for partner in ("roundup_power2_divisions:4", "roundup_power2_divisions:8"):
        first = ranked[0].conf
        if "roundup" not in first:
            outcome(_joined(first, partner))
    order = list(done)
    best = min(done.values(), key=lambda found: (*_badness(found), order.index(found.conf)))
    # Of those that are as good to within one percent, the simplest.
    good = [
        found
        for found in done.values()
        if (found.oom is None) == (best.oom is None)
        and found.reserved_peak_bytes <= best.reserved_peak_bytes * (1 + _GAIN_WORTH_NAMING)
    ]
    best = min(good, key=lambda found: (found.conf.count(":"), order.index(found.conf)))
    gain = used.reserved_peak_bytes - best.reserved_peak_bytes
    saved = used.oom is not None and best.oom is None
    worth = saved or ((best.oom is None) == (used.oom is None) and gain > used.reserved_peak_bytes * _GAIN_WORTH_NAMING)
    return Advice(used, best if worth else None, max(gain, 0) if worth and not saved else 0, tuple(done.values()))


def recorded_limit(trace: Trace, device: int) -> int | None:
    """Return how many bytes a program could reserve at most, according to its failed requests; None if none failed.

    When one fails, everything cached has been given back: what is reserved then and what is free on the device is all
    there is. If that should have been enough, a memory fraction stood in the way, and all that is known is that the
    request was too much for it.
    """
    records = trace.records[trace.records["device"] == device]
    kind, size = records["kind"], records["size"].astype(np.int64)
    gained = np.isin(kind, (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP))
    reserved = np.cumsum(np.where(gained, size, 0) - np.where(np.isin(kind, _RELEASES), size, 0))
    failed = kind == Kind.OOM
    limits = reserved[failed] + np.minimum(records["aux0"][failed].astype(np.int64), size[failed] - 1)
    return max(int(limits.min()), int(reserved.max())) if len(limits) else None


def _badness(outcome: Outcome) -> tuple[int, int]:
    if outcome.oom is not None:
        return 1, -outcome.oom.request
    return 0, outcome.reserved_peak_bytes


def _joined(*confs: str) -> str:
    return ",".join(conf for conf in confs if conf)


def _limit_of(settings: Settings) -> str:
    """Return the part of settings that is not a choice but a limit."""
    fraction = settings.per_process_memory_fraction
    return "" if fraction is None else f"per_process_memory_fraction:{fraction}"


def _candidates(asked: Requests, recorded: Settings) -> list[str]:
    """Return the settings worth trying: the defaults, and those that this program's sizes make a difference to."""
    found = ["", "expandable_segments:True"]
    large = sorted({call.size for call in asked.calls if call.verb is Verb.MALLOC and call.size >= 20 * _MIB})
    if large:
        # A limit matters only if some blocks lie above it: try those between 20 MiB and the largest, by factors of two.
        limit = 32
        while limit * _MIB < large[-1]:
            found.append(f"max_split_size_mb:{limit}")
            limit *= 2
    found += [f"roundup_power2_divisions:{divisions}" for divisions in (2, 4, 8, 16)]
    if recorded.per_process_memory_fraction is not None:
        found += [f"garbage_collection_threshold:{threshold}" for threshold in (0.6, 0.8)]
    return found


def _outcome(trace: Trace, asked: Requests, conf: str, total: int | None) -> Outcome:
    settings = Settings.parse(conf)
    if settings.backend != "native":
        raise ConfigError(f"backend:{settings.backend} is the driver's own allocator, whose rules are not public")
    return _Model(trace, asked, settings, total).run(conf)


class _Model:
    """One run of the requests."""

    def __init__(self, trace: Trace, asked: Requests, settings: Settings, total: int | None) -> None:
        self.trace = trace
        self.asked = asked
        self.card = Card(total or _UNKNOWN_CARD, asked)
        self.policy = Policy(
            self.card,
            device=asked.device,
            settings=settings,
            journal=Journal(asked.device, None),
            total_memory=self.card.total,
            outside=nullcontext,
        )
        self._pool_id = pool_ids(trace)
        self._pools: set[PoolId] = set()
        self._address: dict[int, int] = {}
        self._peak = 0
        self._active_at_peak = 0
        self._survived = 0

    def run(self, conf: str) -> Outcome:
        out_of_memory = self._out_of_memory()
        statistics = self.policy.statistics
        peak = statistics.all.reserved_bytes.peak
        return Outcome(
            conf=conf,
            reserved_peak_bytes=peak,
            active_peak_bytes=statistics.all.active_bytes().peak,
            fragmentation=1 - self._active_at_peak / peak if peak else 0.0,
            retries=statistics.num_alloc_retries,
            device_allocs=statistics.num_device_alloc,
            oom=out_of_memory,
            survived_ooms=self._survived,
        )

    def _out_of_memory(self) -> OutOfMemory | None:
        """Run all requests, or as far as there is memory; return where that ends."""
        count = 0
        prior = [call for call in self.asked.prior_blocks]
        pending = set(self.asked.prior_pending)
        for call in prior:
            count += 1
            if not self._malloc(call):
                return self._failure(call, count)
            if call.block in pending:
                self._free_later(call.block)
        for index, call in enumerate(self.asked.calls):
            if call.done:
                self.card.passed.update(_own_stream(block) for block in call.done)
                self.policy.free_passed_blocks()
            if call.verb is Verb.MALLOC or call.verb is Verb.FAILED_MALLOC:
                count += 1
                if not self._malloc(call):
                    if not self._can_do_without(index):
                        return self._failure(call, count)
                    self._survived += 1
                elif call.verb is Verb.FAILED_MALLOC:
                    # It failed when it was recorded, and what the program did then shows that it went without.
                    self.policy.free(self._address.pop(call.block))
            elif call.verb is Verb.EMPTY_CACHE:
                self._empty_cache(call)
            elif call.block not in self._address:
                pass  # it was not allocated here
            elif call.verb is Verb.FREE:
                self.policy.free(self._address.pop(call.block))
            else:
                self._free_later(call.block)
        return None

    def _can_do_without(self, index: int) -> bool:
        """Return whether a program goes on when a request fails.

        It did if it had failed when it was recorded and others followed. And cuDNN's search tries algorithms one after
        the other, each with a workspace that is freed at once and a cache that is emptied; what does not fit is out.
        """
        calls = self.asked.calls
        call = calls[index]
        if call.verb is Verb.FAILED_MALLOC:
            return any(later.verb is Verb.MALLOC for later in islice(calls, index + 1, None))
        following = calls[index + 1 : index + 3]
        is_trial = [later.verb for later in following] == [Verb.FREE, Verb.EMPTY_CACHE]
        return is_trial and following[0].block == call.block

    def _malloc(self, call: Call) -> bool:
        id = self._pool_id(call.pool)
        policy = self.policy
        try:
            if id == DEFAULT_POOL:
                self._address[call.block] = policy.malloc(call.size, call.stream)
            else:
                if id not in self._pools:
                    self._pools.add(id)
                    policy.use_pool(id)
                policy.begin_allocate_to_pool(id, _everywhere)
                try:
                    self._address[call.block] = policy.malloc(call.size, call.stream)
                finally:
                    policy.end_allocate_to_pool(id)
                    policy.release_pool(id)
        except OutOfMemoryError:
            return False
        level = policy.statistics.all
        if level.reserved_bytes.peak > self._peak:
            self._peak = level.reserved_bytes.peak
            self._active_at_peak = level.allocated_bytes.current + level.pending_bytes
        return True

    def _free_later(self, block: int) -> None:
        address = self._address.pop(block)
        self.policy.record_stream(address, _own_stream(block))
        self.policy.free(address)

    def _empty_cache(self, call: Call) -> None:
        if not call.changes:
            return  # it had nothing to release; or these were blocks that became free at some other time
        pools = {self._pool_id(change.pool) for change in call.changes if change.kind in _RELEASES}
        for id in pools & self._pools:
            self._pools.discard(id)
            self.policy.release_pool(id)
        only_private = bool(pools) and DEFAULT_POOL not in pools and len(pools) == 1
        self.policy.release_cached(next(iter(pools)) if only_private else DEFAULT_POOL)

    def _failure(self, call: Call, request: int) -> OutOfMemory:
        level = self.policy.statistics.all
        stack = self.trace.stack(int(self.trace.records["stack"][call.event]))
        return OutOfMemory(
            event=call.event,
            request=request,
            size=call.size,
            reserved_bytes=level.reserved_bytes.current,
            active_bytes=level.allocated_bytes.current + level.pending_bytes,
            site=call_site(stack) if stack else "",
        )


_RELEASES: tuple[Any, ...] = (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP)


def _everywhere(stream: int) -> bool:
    return True


def _own_stream(block: int) -> int:
    return -1 - block
