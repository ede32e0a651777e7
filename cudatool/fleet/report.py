"""What the ranks of a run have in common, and which rank is different, where and in what.

A rank is compared with the others of its run, never with a fixed number. DuckDB reads the data set; what comes here is
one row for each rank. The rules, for runs of at least three ranks (of two: :mod:`~cudatool.fleet.pair`)::

    out of memory, ended early       as recorded
    leaks                            call sites that `cudatool leaks` finds on less than half of the ranks
    sequence of allocations          a reference rank is chosen: the one whose checkpoints most others share. If more
                                     than half of the ranks go its way to their end, each of the others is named with
                                     its first allocation that differs: the same call site with another size, other
                                     frames of libraries, the same allocations in another order, or another call site
    not freed                        more blocks of a call site than any rank with exactly the same allocations
    peak, fragmentation, step time   far outside of the spread of the others (far_above)
    awaited                          the others wait for it in collectives (pace)
    clock                            steps begin at another time of the world than on the others, always by as much
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from cudatool.errors import UsageError
from cudatool.fleet.ask import Ask, Keep, keep_here
from cudatool.fleet.pace import Collectives, StepTime, awaited, collectives, far_above, step_times
from cudatool.fleet.pair import RankPair, leaks_not_known, pair
from cudatool.fleet.sequence import Difference, first_differences, parting
from cudatool.limits import MISSING_RANKS
from cudatool.text import quoted
from cudatool.units import counted, format_bytes

__all__ = ["Difference", "RankEnd", "RankFinding", "RankMemory", "RunReport", "fleet_report"]


@dataclass(frozen=True, slots=True)
class RankFinding:
    """How one rank differs from the others.

    Attributes
    ----------
    rank, difference
        Which rank, and in what.
    site
        Call site, empty where there is none to name.
    usual_site
        Call site of the other ranks at this place of the sequence.
    value, usual
        Of the rank and of the others: bytes; ns for a straggler's step, a clock, the time for which the others
        wait, and the time since 1970 at which memory ran out; blocks where they are not freed.
    sequence
        Number of the first allocation that differs, None if the sequence does not.
    """

    rank: int
    difference: Difference
    site: str = ""
    usual_site: str = ""
    value: int | None = None
    usual: int | None = None
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank's device, in bytes, and how its recording ended."""

    rank: int
    host: str | None
    peak_active: int
    peak_reserved: int | None
    end_active: int
    ooms: int
    ending: str


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended that did not end as it should.

    Attributes
    ----------
    rank, difference
        Which rank, and whether it ran out of memory or ended early.
    unix_ns
        When, since 1970: the first time that memory ran out, or the last event; None if the recording does not say.
    """

    rank: int
    difference: Difference
    unix_ns: int | None


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run.

    Attributes
    ----------
    run, ranks
        Its name, and its ranks in order.
    missing
        Ranks below the recorded number of ranks that have no trace.
    median_peak
        Of the peaks of active bytes.
    compared
        Whether the ranks could be compared: there are at least two.
    findings
        By rank, the likely cause first. Of two ranks, only what each recorded of itself: how it ended.
    not_looked_at
        What could not be compared, and why; one sentence each.
    ends
        The ranks that ran out of memory or ended early, in this order; those whose time is not known come last.
    steps
        How long the named steps took on the ranks.
    collectives
        Who waits for whom in collectives of all ranks; None if there are none with times.
    groups
        The same for each communicator of fewer ranks, and for further ones of all ranks; the largest first.
    pair
        In what the two ranks of a run of two differ; None of other runs.
    """

    run: str
    ranks: tuple[RankMemory, ...]
    missing: tuple[int, ...]
    median_peak: int
    compared: bool
    findings: tuple[RankFinding, ...]
    not_looked_at: tuple[str, ...]
    ends: tuple[RankEnd, ...]
    steps: tuple[StepTime, ...]
    collectives: Collectives | None
    pair: RankPair | None = None
    groups: tuple[Collectives, ...] = ()

    @property
    def has_differences(self) -> bool:
        """Whether a rank differs from the others, or two ranks from each other."""
        return bool(self.findings) or (self.pair is not None and bool(self.pair.differences))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


_FEWEST: Final = 3  # ranks: of two that differ, neither is the one that does (pair)
_SPREADS_OF_STARTS: Final = 20  # ranks that do not wait for each other begin at times that are not spread evenly
_ORDER: Final = tuple(Difference)
_COMPLETE: Final = ("closed", "growing")
_SIZES: Final = ("peak_active", "end_active", "ooms", "steps", "events")
_NAMED: Final = 8  # ranks in a sentence
_LARGEST: Final = 1 << 62  # of which two still add up

# Each table has a file in each part: what is asked more than once is read once.
_MEMBERS: Final = """
CREATE TEMP TABLE known AS FROM ranks;
CREATE TEMP TABLE member AS SELECT * FROM known WHERE rank IS NOT NULL AND device IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY run, rank ORDER BY peak_active DESC, events DESC, trace) = 1;
CREATE TEMP TABLE member_steps AS FROM steps SEMI JOIN member USING (run, rank, trace, device)
"""


def fleet_report(database: Any, keep: Keep = keep_here) -> tuple[RunReport, ...]:
    """Return a report for each run of a data set, by name.

    Parameters
    ----------
    database, keep
        From :func:`cudatool.fleet.query.opened`; or both from :func:`cudatool.fleet.cluster.opened_on`.
    """
    database.execute(_MEMBERS)
    runs = [run for (run,) in database.execute("SELECT DISTINCT run FROM known ORDER BY run").fetchall()]
    return tuple(_Run(Ask(database, run, keep), run).report() for run in runs)


class _Run:
    """The comparison of one run's ranks."""

    def __init__(self, ask: Ask, run: str) -> None:
        self.ask, self.run = ask, run
        self.rows = [_sound(row) for row in self.ask("SELECT * FROM member WHERE run = $run ORDER BY rank")]
        self.rank = np.array([row["rank"] for row in self.rows], np.int64)
        self.unseen: list[str] = []
        self.steps: tuple[StepTime, ...] = ()
        self.collectives: Collectives | None = None
        self.groups: tuple[Collectives, ...] = ()

    def report(self) -> RunReport:
        compared, both = len(self.rows) >= _FEWEST, None
        missing = self._missing()
        ends = self._ends()
        found = [RankFinding(end.rank, end.difference, value=end.unix_ns) for end in ends]
        self._say_left_out()
        if compared:
            for rule in (self._leaks, self._sequences, self._memory, self._steps, self._awaited):
                found += rule()
        elif len(self.rows) == 2:
            self.steps = step_times(self.ask, 2)
            self._meet()
            both = pair(self.ask, self.rows, _COMPLETE, self.collectives, self.unseen.append)
        else:
            self.unseen.append("Differences: there are no two ranks to compare.")
        peaks = [row["peak_active"] for row in self.rows]
        return RunReport(
            run=self.run,
            ranks=tuple(RankMemory(**{f: row[f] for f in RankMemory.__dataclass_fields__}) for row in self.rows),
            missing=missing,
            median_peak=int(np.median(peaks)) if peaks else 0,
            compared=compared or both is not None,
            findings=tuple(sorted(found, key=lambda one: (one.rank, _ORDER.index(one.difference)))),
            not_looked_at=tuple(self.unseen),
            ends=ends,
            steps=self.steps,
            collectives=self.collectives,
            pair=both,
            groups=self.groups,
        )

    def _missing(self) -> tuple[int, ...]:
        """Return which ranks below the recorded number of ranks have no trace."""
        world = max((row["world_size"] or 0 for row in self.rows), default=0)
        known = set(self.rank.tolist())
        missing = tuple(islice((rank for rank in range(world) if rank not in known), MISSING_RANKS + 1))
        if len(missing) > MISSING_RANKS:
            self.unseen.append(f"More than {MISSING_RANKS:,} ranks of {world:,} have no trace: the first are named.")
        return missing[:MISSING_RANKS]

    def _say_left_out(self) -> None:
        question = "SELECT count({}) AS n FROM known ANTI JOIN member USING (run, trace, device) WHERE run = $run"
        [others] = self.ask(f"{question.format('*')} AND rank IS NOT NULL AND device IS NOT NULL")
        if others["n"]:
            more = counted(others["n"], "more device or trace of ranks", "more devices or traces of ranks")
            self.unseen.append(f"{more}: the one with the largest peak counts.")
        [alone] = self.ask(f"{question.format('DISTINCT trace')} AND (rank IS NULL OR device IS NULL)")
        if alone["n"]:
            self.unseen.append(f"{counted(alone['n'], 'trace')} without a rank or without device memory.")
        if any(row["physical_peak"] for row in self.rows):
            sizes = [row["physical_peak"] or 0 for row in self.rows]
            self.unseen.append(
                f"Memory from cuMemCreate, which no figure counts: from {format_bytes(min(sizes))} to "
                f"{format_bytes(max(sizes))} at its highest, the most on rank {self.rank[int(np.argmax(sizes))]}."
            )
        if any(row["ending"] not in _COMPLETE or row["notes"] for row in self.rows):
            self.unseen.append("Some recordings are not complete: `notes` and `ending` in the table ranks say how.")

    def _ends(self) -> tuple[RankEnd, ...]:
        """Return who ran out of memory and who ended early, in order."""
        ends = []
        for row in self.rows:
            start = row["unix_start_ns"]
            if row["ooms"]:
                after = row["first_oom_time"]
                kind = Difference.OOM
            elif row["ending"] not in _COMPLETE:
                after, kind = row["duration"], Difference.ENDED_EARLY
            else:
                continue
            ends.append(RankEnd(row["rank"], kind, None if start is None or after is None else start + after))
        known = sorted((end for end in ends if end.unix_ns is not None), key=lambda end: (end.unix_ns, end.rank))
        return (*known, *(end for end in ends if end.unix_ns is None))

    def _leaks(self) -> Iterator[RankFinding]:
        rows = self.ask(
            "SELECT coalesce(site, '') AS site, rank, growth, count(*) OVER (PARTITION BY site) AS ranks FROM leaks "
            "JOIN member USING (run, rank, trace, device) WHERE run = $run AND is_certain ORDER BY growth DESC"
        )
        for row in rows:
            if row["ranks"] * 2 < len(self.rank):
                yield RankFinding(row["rank"], Difference.LEAK, row["site"], value=row["growth"], usual=0)
        self.unseen += leaks_not_known(self.rows)

    def _sequences(self) -> Iterator[RankFinding]:
        """Yield where each rank's allocations leave those of the others, and what is not freed where they do not."""
        scores = self.ask(
            "WITH own AS (FROM checkpoints SEMI JOIN member USING (run, rank, trace, device) WHERE run = $run), "
            "shared AS (SELECT *, count(*) OVER (PARTITION BY sequence, full_hash) AS others FROM own) "
            "SELECT rank, trace, device, sum(others - 1) AS score, max(sequence) AS last, "
            "arg_max(full_hash, sequence) AS hash FROM shared GROUP BY ALL ORDER BY score DESC, rank"
        )
        if not scores or not scores[0]["last"]:
            self.unseen.append("The sequence of allocations: none was recorded.")
            return
        reference = scores[0]
        same = [row for row in scores if (row["last"], row["hash"]) == (reference["last"], reference["hash"])]
        others = sorted({row["rank"] for row in scores} - {row["rank"] for row in same})
        first = first_differences(self.ask, reference, others) if others else {}
        if 2 * len(first) >= len(scores):
            at = min(first.values())
            self.unseen.append(f"The sequence of allocations: from number {at:,} on, no majority of ranks shares one.")
            return
        for rank, at in sorted(first.items()):
            yield self._divergence(rank, at, reference)
        if len(same) >= _FEWEST:
            yield from self._not_freed([row["rank"] for row in same])
        else:
            self.unseen.append("Blocks that are not freed: the ranks do not end at the same allocation.")

    def _divergence(self, rank: int, at: int, reference: dict[str, Any]) -> RankFinding:
        found = parting(self.ask, rank, reference["rank"], at)
        return RankFinding(rank, found.difference, *found.sites, *found.requested, at)

    def _not_freed(self, ranks: list[int]) -> Iterator[RankFinding]:
        """Yield call sites of which one rank keeps more blocks, among ranks that allocate exactly the same."""
        own = (
            "FROM sites SEMI JOIN member USING (run, rank, trace, device) "
            "WHERE run = $run AND rank IN (FROM unnest($ranks))"
        )
        # Most sites keep the same on all ranks, or nothing: only of the others, ranks are compared.
        uneven = self.ask(
            f"SELECT coalesce(site, '') AS site {own} AND never_freed > 0 GROUP BY site, category "
            "HAVING min(never_freed) < max(never_freed) OR count(*) < len($ranks)",
            ranks=ranks,
        )
        rows = uneven and self.ask(
            f"WITH own AS (SELECT rank, coalesce(site, '') AS site, sum(never_freed) AS kept {own} "
            "AND coalesce(site, '') IN (FROM unnest($sites)) GROUP BY ALL) "
            "SELECT *, median(kept) OVER (PARTITION BY site) AS usual FROM own QUALIFY kept > usual "
            "ORDER BY kept - usual DESC",
            ranks=ranks,
            sites=sorted({row["site"] for row in uneven}),
        )
        of_site: dict[str, int] = {}
        for row in rows:
            of_site[row["site"]] = of_site.get(row["site"], 0) + 1
        for row in rows:
            if of_site[row["site"]] * 2 < len(ranks):
                yield RankFinding(
                    row["rank"], Difference.NOT_FREED, row["site"], value=int(row["kept"]), usual=int(row["usual"])
                )

    def _memory(self) -> Iterator[RankFinding]:
        peak = np.array([row["peak_active"] for row in self.rows], np.int64)
        for i in np.flatnonzero(far_above(peak, 0.05)).tolist():
            yield RankFinding(
                self.rows[i]["rank"],
                Difference.PEAK,
                self._larger_site(i),
                value=int(peak[i]),
                usual=int(np.median(peak)),
            )
        reserved = [row["peak_reserved"] for row in self.rows]
        if any(value is None for value in reserved):
            self.unseen.append("Fragmentation: not every recording has reserved memory.")
            return
        unused = np.array(reserved, np.int64) - peak
        scale = float(np.median(np.array(reserved, np.int64)))
        for i in np.flatnonzero(far_above(unused, 0.1, scale)).tolist():
            yield RankFinding(
                self.rows[i]["rank"], Difference.FRAGMENTED, value=int(unused[i]), usual=int(np.median(unused))
            )

    def _larger_site(self, place: int) -> str:
        """Return the call site whose share of the peak is most above the median of all ranks."""
        rows = self.ask(
            "WITH own AS (SELECT rank, coalesce(site, '') AS site, sum(peak_bytes) AS bytes FROM sites "
            "SEMI JOIN member USING (run, rank, trace, device) WHERE run = $run GROUP BY ALL), "
            "usual AS (SELECT site, CASE WHEN count(*) * 2 > $ranks THEN median(bytes) ELSE 0 END AS bytes FROM own "
            "GROUP BY site) "
            "SELECT site FROM own JOIN usual USING (site) WHERE rank = $rank "
            "ORDER BY own.bytes - usual.bytes DESC LIMIT 1",
            rank=int(self.rank[place]),
            ranks=len(self.rank),
        )
        return rows[0]["site"] if rows else ""

    def _steps(self) -> Iterator[RankFinding]:
        """Yield stragglers, and clocks that are not the others'."""
        if not all(row["steps_marked"] and row["steps"] for row in self.rows):
            self.unseen.append("Stragglers and clocks: not every rank has named steps; wrap them in cudatool.range.")
            return
        self.steps = step_times(self.ask, _FEWEST)
        rows = self.ask(
            "WITH own AS (SELECT rank, step, end_time - start_time AS took, unix_start_ns + start_time AS began "
            "FROM member_steps JOIN member USING (run, rank, trace, device) "
            "WHERE run = $run AND end_time - start_time >= 0), "
            "usual AS (SELECT step, median(took) AS took, median(began) AS began FROM own GROUP BY step "
            "HAVING count(*) = $ranks) "
            "SELECT rank, median(own.took / greatest(usual.took, 1)) AS ratio, median(own.took) AS took, "
            "median(own.began - usual.began) AS shift, "
            "max(own.began - usual.began) - min(own.began - usual.began) AS drift, median(usual.took) AS usual "
            "FROM own JOIN usual USING (step) GROUP BY rank ORDER BY rank",
            ranks=len(self.rank),
        )
        if len(rows) < len(self.rank):
            self.unseen.append("Stragglers and clocks: the ranks have no step in common that ended.")
            return
        ratio = np.array([row["ratio"] for row in rows])
        for i in np.flatnonzero(far_above(ratio, 0.1)).tolist():
            yield RankFinding(
                rows[i]["rank"], Difference.STRAGGLER, value=int(rows[i]["took"]), usual=int(rows[i]["usual"])
            )
        if any(row["shift"] is None for row in rows):
            self.unseen.append("Clocks: not every recording has the time of the world.")
            return
        shift = np.array([row["shift"] for row in rows], np.float64)
        far = far_above(shift, 0.0, spreads=_SPREADS_OF_STARTS) | far_above(-shift, 0.0, spreads=_SPREADS_OF_STARTS)
        for i in np.flatnonzero(far).tolist():
            row = rows[i]  # ranks may begin at different times, but not by more than a step where they wait for others
            if abs(row["shift"]) > max(row["usual"], 1e8) and row["drift"] < abs(row["shift"]) / 4:
                yield RankFinding(row["rank"], Difference.CLOCK, value=int(row["shift"]), usual=0)

    def _meet(self) -> tuple[Collectives, ...]:
        """Find who waits for whom: in collectives of all ranks, and in those of groups."""
        if any(row["simulated"] for row in self.rows):
            # Its cost model knows the transfer alone: no collective takes longer because a rank comes late.
            self.unseen.append("Who waits for whom: the times of the software device do not show it; a GPU's do.")
            return ()
        found = collectives(self.ask, len(self.rank), self.unseen.append)
        if found and len(found[0].ranks) == len(self.rank):
            self.collectives, self.groups = found[0], found[1:]
        else:
            self.groups = found
        return found

    def _awaited(self) -> Iterator[RankFinding]:
        """Yield the rank for which the others wait in collectives."""
        late = awaited(self._meet())
        if len(late) == 1:
            yield RankFinding(late[0].rank, Difference.AWAITED, value=late[0].awaited, usual=0)
        elif late:
            ranks = ", ".join(str(rank.rank) for rank in late[:_NAMED]) + (" ..." if len(late) > _NAMED else "")
            self.unseen.append(f"Who waits for whom: for ranks {ranks}, or they have faster collectives of their own.")


def _sound(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of ``ranks`` that has what is compared.

    Raises
    ------
    UsageError
        It has not, so no conversion wrote it.
    """
    known = [*_SIZES, *(name for name in ("peak_reserved",) if row[name] is not None)]
    for name in known:
        if row[name] is None or not 0 <= row[name] < _LARGEST:
            raise UsageError(f"{quoted(row['trace'])} has the {name} {row[name]}: convert its trace again")
    return row
