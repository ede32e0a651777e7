"""What a finding says, in words: the same on a terminal and on a page."""

from __future__ import annotations

from typing import Final

from cudatool.fleet.report import Difference, Finding
from cudatool.units import format_bytes, format_time

__all__ = ["ENDS", "described"]

ENDS: Final = {Difference.OOM: "ran out of memory", Difference.ENDED_EARLY: "its recording ended early"}


def described(finding: Finding) -> str:
    """Return what is different about a rank; names are as they were recorded."""
    value, usual = finding.value or 0, finding.usual or 0
    size, others = format_bytes(value), format_bytes(usual)
    if size == others:  # two sizes that differ are not written alike
        size, others = f"{value:,} B", f"{usual:,} B"
    blocks = f"{value:,} block{'' if value == 1 else 's'}"
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
