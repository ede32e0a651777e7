"""How the ranks of a run keep pace: how long each step takes on them, and who waits for whom in collectives.

Who waits. In an all-reduce, an all-gather and a reduce-scatter the result of every rank depends on the data of all
(NCCL User Guide, Collective Operations), so the kernel of a rank runs from its own beginning until, at the earliest,
the last rank has begun::

    a[r]            when the kernel of rank r begins
    took[r]     =   max over all q of a[q]  -  a[r]  +  what the transfer takes
    waited[r]   =   took[r]  -  least of took            clocks that differ cancel out: only durations are compared
    awaited[r]  =   median of took  -  took[r]           above 0 for a rank that comes later than most

Both are added up over the collectives. The k-th of one rank is compared with the k-th of the others, as long as all run
the same operations in the same order. A rank that stalls a few times is no straggler: `steady` is `awaited` as if each
eighth of the collectives were like the eighth with the second least of it (not each collective: of those of a step,
often only the first one waits). A rank is named if that is far above the others' and at least a tenth of the time from
the first collective to the last. If two or more ranks are far above, none is named: ranks that have collectives of
their own, with a faster transfer, look the same. One rank alone cannot have them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from cudatool.fleet.sequence import Ask
from cudatool.trace.lifetimes import Mask

__all__ = ["SHARE", "SPREADS", "Collectives", "RankWait", "StepTime", "collectives", "far_above", "step_times"]

SPREADS: Final = 6  # of the others' spread (median of the distances to the median)
SHARE: Final = 0.1  # of the time, below which a wait is not worth a finding

_PARTS: Final = 8  # of the collectives

_SYMMETRIC: Final = "'all_reduce', 'all_gather', 'reduce_scatter'"
# "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclKernel_AllGather_RING_LL_Sum_int8_t", "ncclReduceScatterRingLLKernel".
# Where NCCL runs several operations in one kernel, it has the name of one of them (NVIDIA/nccl, issue 739).
_KERNELS: Final = r"^nccl\w*?(AllReduce|AllGather|ReduceScatter)"


@dataclass(frozen=True, slots=True)
class StepTime:
    """How long a step took on the ranks that have its end, in ns.

    Attributes
    ----------
    step, ranks
        Number of the step, and how many ranks have its end.
    median, longest
        Over these ranks.
    longest_rank
        Which rank took longest.
    """

    step: int
    ranks: int
    median: int
    longest: int
    longest_rank: int


@dataclass(frozen=True, slots=True)
class RankWait:
    """How long a rank waited for others in collectives, and the others for it, in ns.

    Attributes
    ----------
    rank
        Which rank.
    waited
        Time in collectives beyond that of the rank that came last.
    awaited
        How long the median rank waited for it, less than 0 where it came earlier than most.
    steady
        The same without what is not so throughout: as if each eighth of the collectives had the second least of it.
    last
        In how many collectives it was the last to come.
    """

    rank: int
    waited: int
    awaited: int
    steady: int
    last: int


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of a run that all ranks have in common.

    Attributes
    ----------
    compared
        How many there are.
    span
        ns from the beginning of the first to the end of the last one, on the median rank.
    ranks
        Each rank's waits.
    """

    compared: int
    span: int
    ranks: tuple[RankWait, ...]

    def late(self) -> tuple[RankWait, ...]:
        """Return the ranks that are far later than the others; one alone is who they wait for."""
        steady = np.array([rank.steady for rank in self.ranks], np.float64)
        return tuple(self.ranks[i] for i in np.flatnonzero(far_above(steady, SHARE, float(self.span))).tolist())

    def later(self) -> RankWait | None:
        """Return for which of two ranks the other one waits; None if for neither, or not throughout."""
        # Half of what one of two waits more than the other lies between each and their median.
        late = [rank for rank in self.ranks if 2 * rank.steady > SHARE * self.span]
        return late[0] if len(self.ranks) == 2 and late else None


def far_above(values: Any, share: float, scale: float | None = None, spreads: int = SPREADS) -> Mask:
    """Return which values are above the others: by `share` of the median (or `scale`), and six of their spreads."""
    middle = float(np.median(values))
    distance = values - middle
    spread = float(np.median(np.abs(distance)))
    result: Mask = distance > max(share * (abs(middle) if scale is None else scale), spreads * spread)
    return result


def step_times(ask: Ask, fewest: int) -> tuple[StepTime, ...]:
    """Return how long each step took that at least `fewest` ranks have."""
    rows = ask(
        "WITH own AS (SELECT rank, step, end_time - start_time AS took FROM member_steps "
        "WHERE run = $run AND end_time >= start_time) "
        "SELECT step, count(*) AS ranks, median(took) AS median, max(took) AS longest, arg_max(rank, took) AS rank "
        "FROM own WHERE step IS NOT NULL GROUP BY step HAVING ranks >= $fewest ORDER BY step",
        fewest=fewest,
    )
    return tuple(StepTime(r["step"], r["ranks"], int(r["median"]), r["longest"], r["rank"]) for r in rows)


def collectives(ask: Ask, ranks: int) -> Collectives | None:
    """Return the waits in collectives of all of so many ranks; None if no such collective was timed."""
    timed = (
        "FROM kernels SEMI JOIN member USING (run, rank, trace, device) WHERE run = $run AND device_end >= device_start"
    )
    ours = ask(f"SELECT 1 {timed} AND kind = 'COLLECTIVE' LIMIT 1")
    if ours:  # our own calls say how many ranks take part; NCCL's kernels below them would be the same again
        chosen = (
            f"SELECT rank, event, name AS operation, device_start AS start, device_end AS stop {timed} "
            f"AND kind = 'COLLECTIVE' AND name IN ({_SYMMETRIC}) AND (rank, trace, event) IN "
            "(SELECT (rank, trace, event) FROM events WHERE run = $run AND kind = 'COLLECTIVE' "
            "AND (aux1 >> 32) & 65535 = $ranks)"
        )
    else:
        chosen = (
            f"SELECT rank, event, regexp_extract(name, '{_KERNELS}', 1) AS operation, device_start AS start, "
            f"device_end AS stop {timed} AND kind = 'KERNEL_LAUNCH' AND regexp_matches(name, '{_KERNELS}')"
        )
    rows = ask(
        f"WITH own AS ({chosen}), "
        "numbered AS (SELECT *, stop - start AS took, row_number() OVER (PARTITION BY rank ORDER BY event) AS number "
        "FROM own), "
        "by_number AS (SELECT number, count(*) AS ranks, min(operation) <> max(operation) AS differs, "
        "median(took) AS usual, min(took) AS least FROM numbered GROUP BY number), "
        "common AS (FROM by_number WHERE ranks = $ranks AND number < "
        "coalesce((SELECT min(number) FROM by_number WHERE differs), 1::BIGINT << 62)), "
        f"parts AS (SELECT *, (row_number() OVER (PARTITION BY rank ORDER BY number) - 1) * {_PARTS} "
        "// count(*) OVER (PARTITION BY rank) AS part FROM numbered JOIN common USING (number)), "
        "sums AS (SELECT rank, count(*) AS compared, sum(took - least) AS waited, sum(usual - took) AS awaited, "
        "count(*) FILTER (took = least) AS last, min(start) AS start, max(stop) AS stop "
        "FROM parts GROUP BY rank, part) "
        "SELECT rank, sum(compared) AS compared, sum(waited) AS waited, sum(awaited) AS awaited, "
        "list(awaited ORDER BY awaited)[greatest(1, count(*) // 4)] * count(*) AS steady, "
        "sum(last) AS last, max(stop) - min(start) AS span "
        "FROM sums GROUP BY rank ORDER BY rank",
        ranks=ranks,
    )
    if not rows:
        return None
    names = [field.name for field in fields(RankWait)]
    waits = (RankWait(**{name: int(row[name]) for name in names}) for row in rows)
    return Collectives(int(rows[0]["compared"]), int(np.median([row["span"] for row in rows])), tuple(waits))
