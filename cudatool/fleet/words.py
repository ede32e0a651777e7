"""What a finding says, in words: the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cudatool.fleet.pair import PairDifference, RankPair
from cudatool.fleet.report import Difference, RankFinding
from cudatool.text import shortened
from cudatool.units import counted, format_bytes, format_time

__all__ = ["DIVISIONS", "ENDS", "described", "described_pair", "rank_list"]

ENDS: Final = {Difference.OOM: "ran out of memory", Difference.ENDED_EARLY: "its recording ended early"}
DIVISIONS: Final = {"site": "Call site", "category": "Category", "library": "Library"}
"""By what the memory of two ranks is divided (:attr:`~cudatool.fleet.pair.MemoryDifference.by`)."""

_LONGEST: Final = 30  # characters of a list of ranks


def described(finding: RankFinding) -> str:
    """Return what is different about a rank; names are as they were recorded."""
    value, usual = finding.value or 0, finding.usual or 0
    size, others = _sizes(value, usual)
    blocks = counted(value, "block")
    at = f"from allocation {finding.sequence or 0:,} on"
    return {
        **ENDS,
        Difference.LEAK: f"{finding.site} leaks {format_bytes(value)}",
        Difference.LIBRARY: f"{at}, {finding.site} reaches the allocator through other library code",
        Difference.SIZE: f"{at}, {finding.site} requests {size}, the others {others}",
        Difference.ORDER: f"{at}, in another order: {finding.site}, where the others have {finding.usual_site}",
        Difference.CALL_SITE: f"{at}, {finding.site}, where the others have {finding.usual_site}",
        Difference.NOT_FREED: f"{finding.site} keeps {blocks}, on the others {usual:,}",
        Difference.FRAGMENTED: f"{size} reserved but unused, on the others {others}",
        Difference.STRAGGLER: f"steps take {format_time(value)}, on the others {format_time(usual)}",
        Difference.AWAITED: f"the other ranks wait {format_time(value)} for it in collectives",
        Difference.CLOCK: f"its clock is {format_time(abs(value))} {'behind' if value < 0 else 'ahead'}",
        Difference.PEAK: f"peak of {size}, median {others}; most of it by {finding.site}",
    }[finding.difference]


def described_pair(pair: RankPair, found: PairDifference) -> str:
    """Return in what two ranks differ, with both named: none of them is the one that is wrong."""
    one, two = (f"rank {rank}" for rank in pair.ranks)
    a, b = (value or 0 for value in found.values)
    sizes, times = _sizes(a, b), (format_time(a), format_time(b))
    more = (one, two) if a > b else (two, one)
    where = f"{found.sites[0]}: "
    at = f"from allocation {found.sequence or 0:,} on{_in_step(found)}"
    calls = [
        f"{rank} allocates at {site}" if size is not None else f"{rank} allocates nothing more"
        for rank, site, size in zip((one, two), found.sites, found.values, strict=True)
    ]
    ended = one if found.values[1] is None else two
    return {
        Difference.OOM: f"{more[0]} ran out of memory, {more[1]} did not",
        Difference.LEAK: f"{found.sites[0]} leaks {format_bytes(max(a, b))} on {more[0]}, nothing on {more[1]}",
        Difference.LIBRARY: f"{at}, {found.sites[0]} reaches the allocator through different library code",
        Difference.SIZE: f"{at}, {where}{one} requests {sizes[0]}, {two} {sizes[1]}",
        Difference.ORDER: f"{at}, in another order: {calls[0]}, {calls[1]}",
        Difference.CALL_SITE: f"{at}, {calls[0]}, {calls[1]}",
        Difference.NOT_FREED: f"{where}{one} keeps {counted(a, 'block')}, {two} {b:,}",
        Difference.FRAGMENTED: f"reserved but unused: {one} {sizes[0]}, {two} {sizes[1]}",
        Difference.STRAGGLER: f"steps take {times[0]} on {one}, {times[1]} on {two}",
        Difference.AWAITED: f"{one} waits {times[0]} in collectives, {two} {times[1]}: {more[1]} comes later",
        Difference.CLOCK: f"steps begin {format_time(abs(a))} earlier on {more[0]} than on {more[1]}, always so",
        Difference.PEAK: f"{one} {sizes[0]}, {two} {sizes[1]}",
        Difference.ENDED_EARLY: f"the recording of {ended} ended early, that of {two if ended == one else one} did not",
    }[found.difference]


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as ``0-3, 8, 12-15``, shortened where they are many."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return shortened(", ".join(words), _LONGEST)


def _in_step(found: PairDifference) -> str:
    known = sorted({step for step in found.steps if step is not None})
    return f" (step {' and '.join(map(str, known))})" if known else ""


def _sizes(one: int, two: int) -> tuple[str, str]:
    """Return two sizes; such that differ are not written alike."""
    words = format_bytes(one), format_bytes(two)
    return words if words[0] != words[1] else (f"{one:,} B", f"{two:,} B")
