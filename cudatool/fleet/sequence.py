"""Where the sequences of allocations of two ranks part, and in what they then differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from cudatool.fleet.ask import Ask

__all__ = ["Difference", "Parting", "first_differences", "parting"]


class Difference(StrEnum):
    """In what a rank is different; the likely cause of others comes first."""

    OOM = "out-of-memory"
    LEAK = "leak"
    LIBRARY = "library"
    SIZE = "size"
    ORDER = "order"
    CALL_SITE = "call-site"
    NOT_FREED = "not-freed"
    FRAGMENTED = "fragmented"
    STRAGGLER = "straggler"
    AWAITED = "awaited"
    CLOCK = "clock"
    PEAK = "peak"
    ENDED_EARLY = "ended-early"


_LOOK_AHEAD: Final = 256  # allocations in which another order has the same ones


@dataclass(frozen=True, slots=True)
class Parting:
    """The first allocation that differs between two ranks; of each pair, the first is of the rank named first.

    Attributes
    ----------
    difference
        Other frames of libraries, another size, another order, or another call site.
    sequence
        Its number.
    sites, requested, steps
        Call site, bytes that were requested, and step; None where a rank has no such allocation, or no step.
    """

    difference: Difference
    sequence: int
    sites: tuple[str, str]
    requested: tuple[int | None, int | None]
    steps: tuple[int | None, int | None]


def first_differences(ask: Ask, reference: dict[str, Any], ranks: Sequence[int]) -> dict[int, int]:
    """Return the first allocation of each of some ranks that differs from that of the reference, by rank.

    Parameters
    ----------
    ranks
        Those whose checkpoints are not all the reference's: only their allocations are read.
    """
    ask.keep(
        "differing",
        "WITH usual AS (SELECT sequence, full_hash FROM allocations "
        "WHERE run = $run AND rank = $rank AND trace = $trace AND device = $device AND sequence IS NOT NULL) "
        "SELECT a.rank, min(a.sequence) AS at FROM allocations a JOIN usual USING (sequence) "
        "SEMI JOIN member m ON (m.run, m.rank, m.trace, m.device) = (a.run, a.rank, a.trace, a.device) "
        "WHERE a.run = $run AND list_contains($ranks, a.rank) AND a.full_hash <> usual.full_hash GROUP BY a.rank",
        together=reference["rank"],
        ranks=list(ranks),
        **{name: reference[name] for name in ("rank", "trace", "device")},
    )
    return {row["rank"]: row["at"] for row in ask("SELECT * FROM differing")}


def parting(ask: Ask, rank: int, other: int, at: int) -> Parting:
    """Return in what two ranks differ whose allocations are the same up to number `at`."""

    def following(rank: int) -> list[dict[str, Any]]:
        return ask(
            "SELECT coalesce(site, '') AS site, requested, coalesce(own_hash, 0) AS own_hash, step "
            "FROM allocations SEMI JOIN member USING (run, rank, trace, device) "
            "WHERE run = $run AND rank = $rank AND sequence BETWEEN $at AND $last ORDER BY sequence",
            rank=rank,
            at=at,
            last=at + _LOOK_AHEAD - 1,
        )

    own, usual = following(rank), following(other)
    one, two = (rows[0] if rows else _NOTHING for rows in (own, usual))
    hashes = [sorted(row["own_hash"] for row in rows) for rows in (own, usual)]
    if own and usual and one["own_hash"] == two["own_hash"]:
        difference = Difference.LIBRARY
    elif hashes[0] == hashes[1]:
        difference = Difference.ORDER
    else:
        difference = Difference.SIZE if one["site"] == two["site"] else Difference.CALL_SITE
    return Parting(
        difference,
        at,
        (one["site"], two["site"]),
        (one["requested"], two["requested"]),
        (one["step"], two["step"]),
    )


_NOTHING: Final[dict[str, Any]] = {"site": "", "requested": None, "own_hash": None, "step": None}
