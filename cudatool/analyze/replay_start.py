"""Puts an allocator into the state that a recording begins with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from cudatool.analyze.calls import Change
from cudatool.analyze.requests import Requests
from cudatool.memory.blocks import SMALL_PAGE, Block, PoolId
from cudatool.memory.policy import Policy
from cudatool.memory.settings import Settings
from cudatool.trace.events import Kind

__all__ = ["own_stream", "set_up", "with_start_in"]

_MADE_UP: Final = 1 << 56  # addresses beyond those of any device
_ADDRESS_SPACE: Final = 1 << 47  # more than an expandable segment has


def own_stream(block: int) -> int:
    """Return the assumed stream of a numbered block's use: a recording does not name the streams that used it."""
    return -1 - block


def with_start_in(asked: Requests, settings: Settings) -> Requests:
    """Return the same requests, starting with the same amount of memory, in the kind that the given settings use.

    The contents of segments keep their order in the pages of an expandable segment, and vice versa.
    """
    alike: dict[tuple[int, int, bool], list[Change]] = {}
    for change in sorted(asked.prior_memory, key=lambda change: change.address):
        alike.setdefault((change.stream, change.pool, change.is_small), []).append(change)
    memory: list[Change] = []
    moved = {0: 0}  # by how much everything from an address on is moved
    for number, (key, changes) in enumerate(alike.items()):
        if settings.expandable_segments:
            page = SMALL_PAGE if key[2] else settings.large_segment_size
            end = begin = _MADE_UP + number * _ADDRESS_SPACE
            for change in changes:
                moved[change.address] = end - change.address
                end += change.size
            size = -(-(end - begin) // page) * page
            memory.append(changes[0]._replace(kind=Kind.SEGMENT_MAP, address=begin, size=size))
            continue
        runs: list[Change] = []
        for change in changes:
            if runs and runs[-1].address + runs[-1].size == change.address:
                runs[-1] = runs[-1]._replace(size=runs[-1].size + change.size)
            else:
                runs.append(change._replace(kind=Kind.SEGMENT_ALLOC))
        memory += runs
    starts = sorted(moved)
    blocks = [
        call._replace(address=call.address + moved[starts[bisect_right(starts, call.address) - 1]])
        for call in asked.prior_blocks
    ]
    return replace(asked, prior_memory=memory, prior_blocks=blocks)


def set_up(
    policy: Policy, asked: Requests, tails: Mapping[int, int], pool_of: Callable[[int], PoolId], address_space: int
) -> tuple[dict[int, int], int]:
    """Take over the segments, pages and blocks from before a recording.

    Parameters
    ----------
    tails
        Bytes of hidden tails after blocks, by number.
    pool_of
        Returns the id of a recorded pool, which is in use from then on.
    address_space
        Bytes of addresses of an expandable segment.

    Returns
    -------
    tuple
        The address of each block in use by its number, and how many blocks are in no segment or overlap: these are left
        out.
    """
    pages: dict[tuple[PoolId, bool, int], list[Change]] = {}
    free: list[Block] = []
    for change in asked.prior_memory:
        pool = policy.pool_for(pool_of(change.pool), is_small=change.is_small)
        if change.kind is Kind.SEGMENT_ALLOC:
            free.append(policy.segments.adopt(pool, change.address, change.size, change.stream))
        else:
            pages.setdefault((pool.id, pool.is_small, change.stream), []).append(change)
    first = {key: min(change.address for change in runs) for key, runs in pages.items()}
    for key, runs in pages.items():
        id, is_small, stream = key
        pool = policy.pool_for(id, is_small=is_small)
        after = min((address for address in first.values() if address > first[key]), default=None)
        size = address_space if after is None else min(address_space, after - first[key])
        policy.segments.adopt_range(pool, first[key], size, stream)
        for change in sorted(runs, key=lambda change: change.address):
            block = policy.segments.adopt_pages(pool, change.address, change.size, stream)
            if block is not None and block not in free:
                free.append(block)
    free.sort(key=lambda block: block.address)
    live, addresses, misplaced = _live(asked, tails, free)
    for home, blocks in live.items():
        apart = _apart(sorted(blocks), free[home])
        misplaced += len(blocks) - len(apart)
        policy.carve(free[home], apart)
    policy.statistics.reset_peak()
    policy.statistics.reset_accumulated()
    return addresses, misplaced


def _live(
    asked: Requests, tails: Mapping[int, int], free: list[Block]
) -> tuple[dict[int, list[tuple[int, int, int]]], dict[int, int], int]:
    """Return the blocks in use by the free block that contains them, their addresses, and how many are in none."""
    starts = [block.address for block in free]
    live: dict[int, list[tuple[int, int, int]]] = {}
    addresses: dict[int, int] = {}
    misplaced = 0
    for call, size in zip(asked.prior_blocks, asked.prior_sizes, strict=True):
        home = bisect_right(starts, call.address) - 1
        if home < 0 or call.address + size > starts[home] + free[home].size:
            misplaced += 1
            continue
        size += tails.get(call.block, 0)
        live.setdefault(home, []).append((call.address, size, call.size))
        addresses[call.block] = call.address
    return live, addresses, misplaced


def _apart(blocks: list[tuple[int, int, int]], home: Block) -> list[tuple[int, int, int]]:
    """Return blocks, given by address, without those that overlap the previous one or extend beyond their segment."""
    apart: list[tuple[int, int, int]] = []
    end = home.address
    for address, size, asked in blocks:
        if end <= address and address + size <= home.address + home.size:
            apart.append((address, size, asked))
            end = address + size
    return apart
