"""Tells releases by the allocator, which made room for a request, from those by the program's ``empty_cache``.

A recording shows both as segments that were released right before an allocation. These facts distinguish them::

    stacks     the allocator's have the stack of the request that they made room for
    a fit      a free block fits: the allocator had no reason to release anything
    order      it collects garbage by age, then releases oversize blocks, then everything that is cached;
               empty_cache releases everything
    demand     it releases because there is no memory for a new segment: not if more was reserved at another time

Releases that fit both are attributed to the allocator if the new segment would have needed more than half of what may
be reserved, and are counted as doubtful.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cudatool.analyze.calls import RELEASES, AllocatorCall, Change
from cudatool.memory.blocks import BlockPool
from cudatool.memory.policy import DEFAULT_POOL, Policy
from cudatool.memory.settings import Settings

__all__ = ["Share", "leading_releases", "share_of_program"]

_SMALL_DEVICE: Final = 4 << 30  # a device of unknown size has more


@dataclass(frozen=True, slots=True)
class Share:
    """The number of a call's first releases that are the program's.

    Attributes
    ----------
    by_program
        The number; the other releases are the allocator's.
    demand
        Bytes that would have been reserved with the new segment, if that was found to be too much; else 0.
    doubtful
        Whether the other explanation is possible too.
    """

    by_program: int
    demand: int = 0
    doubtful: bool = False


def leading_releases(call: AllocatorCall) -> tuple[Change, ...]:
    """Return the releases that a call begins with."""
    changes = call.changes
    count = next((i for i, change in enumerate(changes) if change.kind not in RELEASES), len(changes))
    return changes[:count]


def share_of_program(
    call: AllocatorCall,
    size: int,
    policy: Policy,
    pool: BlockPool,
    settings: Settings,
    *,
    stack: int,
    frees_have_stacks: bool,
    fits: bool,
    peak_reserved: int,
    total_memory: int | None,
) -> Share:
    """Return which of the releases that an allocation begins with are the program's.

    Parameters
    ----------
    size, pool
        Bytes of the block, and the pool that the request is for.
    policy
        The allocator in the state before the releases.
    stack, frees_have_stacks
        Of the request; whether stacks were recorded for calls that are no allocations, too.
    fits
        Whether a free block fits.
    peak_reserved
        The most bytes that were ever reserved.
    total_memory
        The device's memory in bytes, if known.
    """
    released = leading_releases(call)
    gained = sum(change.size for change in call.changes if change.kind not in RELEASES)
    demand = policy.statistics.all.reserved_bytes.current + gained
    allowed = policy.segments.allowed if total_memory else None  # a part of the device
    places = [(change.address, change.size) for change in released if not change.pool]
    everything = _everything(policy)
    collects_as_known = pool.collects_garbage and allowed is not None
    garbage = _garbage(policy) if collects_as_known else []
    collects_unseen = settings.garbage_collection_threshold > 0 and not collects_as_known
    if stack and frees_have_stacks:
        count = next((i for i, change in enumerate(released) if change.stack == stack), len(released))
        only_garbage = places != everything if collects_unseen else places == garbage
        return Share(count, 0 if count or only_garbage else demand)
    if fits or (stack and any(change.stack not in (0, stack) for change in released)):
        return Share(len(released))
    if garbage and places[: len(garbage)] == garbage and (places == garbage or places != everything):
        return Share(0, 0 if places == garbage else demand)
    if collects_unseen and places != everything:
        return Share(0)
    if demand <= peak_reserved or (allowed is not None and demand <= allowed):
        return Share(len(released))  # there was memory for the segment
    oversize = [(block.address, block.size) for block in policy.segments.oversize(pool, size, call.stream)[0]]
    if oversize and places[: len(oversize)] == oversize and places != everything:
        return Share(0, demand)
    if places != everything:
        return Share(len(released))
    likely = allowed or (total_memory // 2 if total_memory else _SMALL_DEVICE)
    return Share(0, demand, True) if demand > likely else Share(len(released))


def _garbage(policy: Policy) -> list[tuple[int, int]]:
    large = policy.pool_for(DEFAULT_POOL, is_small=False)
    return [(block.address, block.size) for block in policy.segments.garbage(large)]


def _everything(policy: Policy) -> list[tuple[int, int]]:
    """Return what is released when the whole cache is emptied."""
    pools = [policy.pool_for(DEFAULT_POOL, is_small=is_small) for is_small in (False, True)]
    return [place for pool in pools for place in policy.segments.releasable(pool)]
