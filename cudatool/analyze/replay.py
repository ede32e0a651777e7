"""Replays recorded requests through our own allocator, and compares its decisions with the recorded ones.

Each decision is compared separately. If the allocator decides differently, it is first put into the recorded state
(where possible) before it continues, so that one difference does not cause all later ones. A recording is reproduced
exactly if there is no difference at all.

A recording that begins in mid-program starts from the state that can be inferred for that time. Only one thing about it
is unknown: whether a large block contains a remainder that was too small to be split off. The address of the next block
after it shows this; without a next block, a block that is too small for a request that should have fit may show it.
Then the remainder is assumed to be the missing bytes, and the replay starts again, as long as all passes together cost
at most three times as much as one without differences. A call that differs costs as much as several that do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudatool.analyze.calls import Verb
from cudatool.analyze.replay_pass import ALONE, Divergence, ReplayPass
from cudatool.analyze.replay_pools import UnnamedPools
from cudatool.analyze.requests import Requests, refuses_contradictions, requests
from cudatool.memory.blocks import SMALL_LIMIT
from cudatool.memory.settings import Settings
from cudatool.trace.model import Trace
from cudatool.units import counted

__all__ = ["ReplayCheck", "check", "requests_with_pools"]

# Costs are in calls that are served many at a time.
_TIMES = 3  # as much as an exact replay may an inexact one cost
_SHORT = 5000  # which take some hundredths of a second: may be spent on guesses in any case
_PREPARED = 100  # to prepare a pass of no calls


@dataclass(frozen=True, slots=True)
class ReplayCheck:
    """The comparison of one device's recording with its replay.

    Attributes
    ----------
    calls
        Calls of the allocator.
    allocs, exact
        Allocations, and how many got the recorded address.
    segments, segments_exact
        Segments allocated or freed and runs of pages mapped or unmapped, and how many of these happened at the same
        point.
    final_blocks, final_blocks_differ
        Blocks at the end, and how many differ in address, size, requested size or state; where it is recorded.
    reserved_peak_bytes, active_peak_bytes
        The most at a time, in the replay.
    first_divergence
        None if there is none.
    initial_state
        ``"empty"``, ``"inferred"``, ``"ambiguous"`` if something about it had to be guessed, or ``"unknown"`` if the
        recording lacks a part of it.
    stats_differ
        Counters with recorded and actual value, where statistics were given to compare with.
    notes
        What was inferred, one sentence each.
    """

    device: int
    calls: int
    allocs: int
    exact: int
    segments: int
    segments_exact: int
    final_blocks: int
    final_blocks_differ: int
    reserved_peak_bytes: int
    active_peak_bytes: int
    first_divergence: Divergence | None
    initial_state: str
    stats_differ: dict[str, tuple[int, int]]
    notes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the file has nothing to compare, because it has no call of the allocator."""
        return self.calls == 0

    @property
    def is_exact(self) -> bool:
        """Whether something was compared, and there is no difference."""
        if self.is_empty:
            return False
        same = self.allocs == self.exact and self.segments == self.segments_exact
        return same and not self.final_blocks_differ and not self.stats_differ and self.first_divergence is None


def check(
    trace: Trace,
    device: int,
    settings: Settings,
    *,
    total_memory: int | None = None,
    final: list[dict[str, Any]] | None = None,
    stats: Mapping[str, int] | None = None,
) -> ReplayCheck:
    """Replay what was recorded on one device, and compare.

    Parameters
    ----------
    settings
        Those that were in force.
    total_memory
        The device's memory in bytes, of which the settings' memory fraction is a part.
    final
        Segments with their blocks at the end, in PyTorch's schema; all devices'.
    stats
        Counters at the end under the names of ``torch.cuda.memory_stats``. Only a recording that begins with the
        program can agree with them.
    """
    replay = _best_replay(trace, device, settings, total_memory)
    asked, guessed = replay.asked, bool(replay.guesses)
    differ, blocks = replay.compare_final(final)
    return ReplayCheck(
        device=device,
        calls=len(asked.calls),
        allocs=replay.allocs,
        exact=replay.exact,
        segments=replay.changes,
        segments_exact=replay.changes_exact,
        final_blocks=blocks,
        final_blocks_differ=differ,
        reserved_peak_bytes=replay.policy.statistics.all.reserved_bytes.peak,
        active_peak_bytes=replay.policy.statistics.all.active_bytes().peak,
        first_divergence=replay.first,
        initial_state=_initial_state(trace, asked, is_guessed=bool(guessed or replay.first)),
        stats_differ=_compare_stats(replay.policy.statistics.as_dict(), stats or {}),
        notes=tuple(_notes(replay)),
    )


def _initial_state(trace: Trace, asked: Requests, *, is_guessed: bool) -> str:
    if trace.header.get("unknown_before"):
        return "unknown"
    return "empty" if not asked.prior_memory else "ambiguous" if is_guessed else "inferred"


def requests_with_pools(trace: Trace, device: int, settings: Settings, total_memory: int | None = None) -> Requests:
    """Return the program's requests, with the private pools and ``empty_cache`` calls that only a replay can infer."""
    return _best_replay(trace, device, settings, total_memory).separated()


@refuses_contradictions
def _best_replay(trace: Trace, device: int, settings: Settings, total_memory: int | None) -> ReplayPass:
    """Replay repeatedly, each time with a guess from the first difference, until there is no difference or no guess.

    Guesses are dropped if they make an earlier difference, or more of them; guessed pools, unless they explain
    everything. All passes together cost at most three times an exact one, or the first one and some hundredths
    of a second.
    """
    asked = requests(trace, device)
    tails, pools = _visible_tails(asked), UnnamedPools(asked)
    plain = ReplayPass(trace, asked, settings, total_memory, dict(tails), set(), pools)
    plain.run(goes_on=True)
    if not plain.guessed or plain.first is None:
        return plain
    with_guess, guesses = plain.tails, plain.guesses
    plain.tails, plain.guesses, plain.unnamed_pools = tails, set(), None
    prepared = len(asked.calls) // 8 + _PREPARED
    exact = len(asked.calls) + ALONE * len(asked.calls.special())
    left = max(_TIMES * exact - plain.cost, _SHORT)
    while left > prepared:
        left -= prepared
        replay = ReplayPass(trace, pools.asked, settings, total_memory, with_guess, guesses, pools)
        finished = replay.run(at_most=left, not_before=plain.first.event)
        left -= replay.cost
        if finished:
            return replay if replay.exact >= plain.exact else plain
        if not replay.guessed:
            break
    return plain


def _visible_tails(asked: Requests) -> dict[int, int]:
    """Return the hidden tails of blocks from before the recording, if a later allocation shows them.

    A block is allocated at the front of a free one. So if a gap without blocks separates a block from the next one, the
    gap belongs to the former: it is a remainder that was too small to be split off.
    """
    if not asked.prior_blocks:
        return {}
    sizes = {call.address: size for call, size in zip(asked.prior_blocks, asked.prior_sizes, strict=True)}
    block_at = {call.address: call.block for call in asked.prior_blocks}
    starts = np.array(sorted(sizes), np.uint64)
    size = np.array([sizes[start] for start in starts.tolist()], np.uint64)
    calls = asked.calls
    mallocs, frees = calls.of_verb(Verb.MALLOC), calls.of_verb(Verb.FREE, Verb.FREE_LATER)
    where = calls.addresses(mallocs)
    before = np.searchsorted(starts, where, side="right") - 1
    mallocs, where, before = mallocs[before >= 0], where[before >= 0], before[before >= 0]
    end = starts[before] + size[before]
    beyond = (size[before] > SMALL_LIMIT) & (where >= end) & (where - end <= SMALL_LIMIT)
    which, first = np.unique(before[beyond], return_index=True)
    call, gap = mallocs[beyond][first], (where - end)[beyond][first]
    freed, first = np.unique(calls.addresses(frees), return_index=True)
    gone = dict(zip(freed.tolist(), frees[first].tolist(), strict=True))
    found = zip(starts[which].tolist(), call.tolist(), gap.tolist(), strict=True)
    return {block_at[start]: gap for start, index, gap in found if gap and index < gone.get(start, len(calls))}


def _compare_stats(actual: Mapping[str, int], recorded: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    # An empty_cache with nothing to release leaves no event, so not every call is known.
    return {
        name: (value, actual[name])
        for name, value in recorded.items()
        if name in actual and value != actual[name] and name != "num_sync_all_streams"
    }


def _notes(replay: ReplayPass) -> Iterator[str]:
    asked = replay.asked
    if asked.prior_memory:
        yield f"the recording begins with {counted(len(asked.prior_blocks), 'block')} in use"
    if replay.tails:
        guessed = f", {len(replay.guesses):,} by a guess" if replay.guesses else ""
        which = "1 of them is" if len(replay.tails) == 1 else f"{len(replay.tails):,} of them are"
        yield f"{which} taken to be larger than requested{guessed}"
    if replay.unnamed_pools:
        segments = counted(len(replay.unnamed_pools), "freed segment")
        yield f"taken to have been in private pools: {segments}"
    if asked.unmatched:
        yield f"left out: {counted(asked.unmatched, 'free')} of blocks that were never allocated"
    if replay.misplaced:
        yield f"left out: {counted(replay.misplaced, 'block')} in no segment, or in each other"
