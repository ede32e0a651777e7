"""How the ranks of a run keep pace: how long each step takes on them, and who waits for whom in collectives.

Who waits. In an all-reduce, an all-gather and a reduce-scatter the result of every rank depends on the data of all
(NCCL User Guide, Collective Operations), so the kernel of a rank runs from its own beginning until, at the earliest,
the last rank has begun::

    a[r]            when the kernel of rank r begins
    took[r]     =   max over all q of a[q]  -  a[r]  +  what the transfer takes
    waited[r]   =   took[r]  -  least of took            clocks that differ cancel out: only durations are compared
    awaited[r]  =   median of took  -  took[r]           above 0 for a rank that comes later than most

Both are added up over the collectives of a communicator. The k-th of one rank is compared with the k-th of the others,
as long as all run the same operations. A rank that stalls a few times is no straggler: `steady` is `awaited` as if each
eighth of the collectives were like the eighth with the second least of it (not each collective: of those of a step,
often only the first one waits). A rank is late if that is far above the others' and at least a tenth of the time from
the first collective to the last.

Which ranks share a communicator: calls of :mod:`cudatool.nccl` say so. NCCL's kernels do not, so they are only compared
if they can be of all ranks. All ranks leave such a collective together, so from the end of one to the end of the next
as much time passes on each of them, whatever its clock shows. If not, they may be of groups of ranks, such as a mesh's.

A rank may be late in one group because it waited in another one. In a mesh, a rank that is slow in its tensor-parallel
group holds up its peers, and for each of those a data-parallel group waits. The rank named is late in a group of
three or more, and waited elsewhere for less than half as long. If several are left, none is named: ranks that have
collectives of their own, with a faster transfer, look the same. One rank alone cannot have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from cudatool.fleet.ask import Ask
from cudatool.trace.events import SHARED_COMMUNICATOR
from cudatool.trace.lifetimes import Mask

__all__ = [
    "SHARE",
    "SPREADS",
    "Collectives",
    "RankWait",
    "StepTime",
    "awaited",
    "collectives",
    "far_above",
    "step_times",
]

SPREADS: Final = 6  # of the others' spread (median of the distances to the median)
SHARE: Final = 0.1  # of the time, below which a wait is not worth a finding

_PARTS: Final = 8  # of the collectives
_TOGETHER: Final = 0.25  # of what the ranks wait: by less, they leave collectives of all ranks apart
_EQUAL: Final = 0.01  # of the time, below which nothing is made of how far apart they leave

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
    """The collectives that the ranks of a communicator have in common.

    Attributes
    ----------
    compared
        How many there are.
    span
        ns from the beginning of the first to the end of the last one, on the median rank.
    ranks
        Each rank's waits.
    communicator
        Its number; 0 if the trace has none.
    """

    compared: int
    span: int
    ranks: tuple[RankWait, ...]
    communicator: int = 0

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


def awaited(found: Sequence[Collectives]) -> tuple[RankWait, ...]:
    """Return the ranks that are late in a group, and not because they waited in another one; by rank."""
    waited: dict[int, int] = {}
    for one in found:
        for rank in one.ranks:
            waited[rank.rank] = waited.get(rank.rank, 0) + rank.waited
    late: dict[int, RankWait] = {}
    for one in found:
        for rank in one.late():
            if 2 * (waited[rank.rank] - rank.waited) < rank.steady:
                late[rank.rank] = max(rank, late.get(rank.rank, rank), key=lambda wait: wait.steady)
    return tuple(late[rank] for rank in sorted(late))


def collectives(ask: Ask, ranks: int, say: Callable[[str], None]) -> tuple[Collectives, ...]:
    """Return the waits in each communicator, all of whose ranks are among so many; the largest communicators first.

    Parameters
    ----------
    say
        Takes a sentence on what could not be compared.
    """
    timed = (
        "FROM kernels SEMI JOIN member USING (run, rank, trace, device) "
        "WHERE run = $run AND device_end >= device_start AND in_graph IS NOT TRUE"
    )
    ours = ask(f"SELECT 1 {timed} AND kind = 'COLLECTIVE' LIMIT 1")
    # Our own calls say who takes part; NCCL's kernels below them would be the same again.
    chosen = _OUR_CALLS.format(timed=timed) if ours else _NCCL_KERNELS.format(timed=timed)
    ask.keep("met", chosen, ranks=ranks)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in ask(_WAITS):
        groups.setdefault(row["communicator"], []).append(row)
    found, apart = [], False
    names = [field.name for field in fields(RankWait)]
    for communicator, rows in groups.items():
        span = int(np.median([row["span"] for row in rows]))
        waited = sum(row["waited"] for row in rows) / len(rows)
        if not communicator and max(row["apart"] for row in rows) > max(_TOGETHER * waited, _EQUAL * span):
            apart = True
            continue
        waits = tuple(RankWait(**{name: int(row[name]) for name in names}) for row in rows)
        found.append(Collectives(int(rows[0]["compared"]), span, waits, communicator))
    if ours:
        [few] = ask(
            "SELECT count(*) AS n FROM (SELECT communicator FROM met GROUP BY communicator "
            "HAVING count(DISTINCT rank) < max(size))"
        )
        if few["n"]:
            say(f"Who waits for whom: {few['n']:,} of the communicators have ranks without a trace or without times.")
    if apart:
        say(
            "Who waits for whom: the ranks do not leave their collectives together, so these may be of groups of "
            "ranks, and the recording does not say which ranks form a group."
        )
    elif not found:
        say("Who waits for whom: no collectives of the same ranks were recorded with their times.")
    return tuple(sorted(found, key=lambda one: (-len(one.ranks), -one.compared, one.communicator)))


_OUR_CALLS: Final = (
    "SELECT rank, event, name AS operation, device_start AS start, device_end AS stop, size, communicator "
    "FROM (SELECT run, rank, trace, event, name, device_start, device_end {timed} "
    f"AND kind = 'COLLECTIVE' AND name IN ({_SYMMETRIC})) "
    "JOIN (SELECT run, rank, trace, event, ((aux1 >> 32) & 65535)::BIGINT AS size, "
    f"CASE WHEN aux0 >= {SHARED_COMMUNICATOR} THEN aux0::BIGINT ELSE 0 END AS communicator "
    "FROM events WHERE run = $run AND kind = 'COLLECTIVE') USING (run, rank, trace, event) "
    "WHERE communicator > 0 OR size = $ranks"
)
_NCCL_KERNELS: Final = (
    f"SELECT rank, event, regexp_extract(name, '{_KERNELS}', 1) AS operation, "
    "device_start AS start, device_end AS stop, $ranks AS size, 0 AS communicator {timed} "
    f"AND kind = 'KERNEL_LAUNCH' AND regexp_matches(name, '{_KERNELS}')"
)
_WAITS: Final = (
    "WITH numbered AS (SELECT *, stop - start AS took, stop - lag(stop) OVER one AS gap, "
    "row_number() OVER one AS number FROM met WINDOW one AS (PARTITION BY communicator, rank ORDER BY event)), "
    "by_number AS (SELECT communicator, number, count(*) AS ranks, min(size) AS size, "
    "min(operation) <> max(operation) OR min(size) <> max(size) AS differs, "
    "median(took) AS usual, min(took) AS least, median(gap) AS usual_gap FROM numbered GROUP BY ALL), "
    "same AS (SELECT *, min(number) FILTER (differs) OVER (PARTITION BY communicator) AS first FROM by_number), "
    "common AS (FROM same WHERE ranks = size AND number < coalesce(first, 1::BIGINT << 62)), "
    "parts AS (SELECT numbered.*, usual, least, usual_gap, "
    "(row_number() OVER (PARTITION BY communicator, rank ORDER BY number) - 1) * "
    f"{_PARTS} // count(*) OVER (PARTITION BY communicator, rank) AS part "
    "FROM numbered JOIN common USING (communicator, number)), "
    "sums AS (SELECT communicator, rank, count(*) AS compared, sum(took - least) AS waited, "
    "sum(usual - took) AS awaited, count(*) FILTER (took = least) AS last, "
    "sum(abs(gap - usual_gap)) AS apart, min(start) AS start, max(stop) AS stop "
    "FROM parts GROUP BY communicator, rank, part) "
    "SELECT communicator, rank, sum(compared) AS compared, sum(waited) AS waited, sum(awaited) AS awaited, "
    "list(awaited ORDER BY awaited)[greatest(1, count(*) // 4)] * count(*) AS steady, "
    "sum(last) AS last, coalesce(sum(apart), 0) AS apart, max(stop) - min(start) AS span "
    "FROM sums GROUP BY communicator, rank ORDER BY communicator, rank"
)
