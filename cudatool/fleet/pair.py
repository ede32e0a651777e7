"""In what the two ranks of a run differ. Of two, neither is the one that does: each difference names both sides.

There is no spread of others to compare with, so the rules need a share that no noise explains, or equality::

    out of memory, ended early    on one of them only
    leaks                         call sites that `cudatool leaks` finds on one of them only
    sequence of allocations       the first allocation that differs; or one ends, and the other goes on
    not freed                     other numbers of blocks of a call site, where the allocations are exactly the same
    peak                          more than 1/20 apart
    fragmentation                 reserved but unused, more than 1/10 of what is reserved apart
    step time                     one is slower by more than 1/10 in three of four steps
    awaited                       one waits for the other in collectives, throughout, for 1/10 of the time (pace)
    clock                         steps begin apart, always by as much: by more than a step if the ranks wait for each
                                  other in collectives, else by more than all their steps take: else one may only have
                                  been started later
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from cudatool.analyze.leak_verdicts import LeakVerdict
from cudatool.fleet.ask import Ask
from cudatool.fleet.pace import Collectives
from cudatool.fleet.sequence import Difference, first_differences, parting
from cudatool.units import counted

__all__ = ["MemoryDifference", "PairDifference", "RankPair", "leaks_not_known", "pair"]

_PEAK: Final = 0.05
_SHARE: Final = 0.1  # of reserved memory, and of a step
_FEWEST_STEPS: Final = 4  # of which three are three of four
_ROWS: Final = 20  # of call sites, of categories and of libraries
_ORDER: Final = tuple(Difference)
_KNOWN: Final = (LeakVerdict.LEAKS, LeakVerdict.NONE)


@dataclass(frozen=True, slots=True)
class PairDifference:
    """In what two ranks differ. Of each pair, the first is of the first rank.

    Attributes
    ----------
    difference
        In what.
    sites
        Call site of each, empty where there is none to name.
    values
        Of each: bytes; ns for the time of a step, for what it waits in collectives, and for a clock how much earlier
        its steps begin than the other's; blocks that are not freed; how often memory ran out. None if it has none: the
        recording had not ended early, or there is no such allocation.
    sequence, steps
        Number of the first allocation that differs, None if the sequence does not; and the step that it is in.
    """

    difference: Difference
    sites: tuple[str, str] = ("", "")
    values: tuple[int | None, int | None] = (None, None)
    sequence: int | None = None
    steps: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True, slots=True)
class MemoryDifference:
    """What two ranks hold at their peaks, by one way to divide it.

    Attributes
    ----------
    by, name
        `site`, `category` or `library`, and which. A library is the one that the call site calls.
    bytes
        Of each rank.
    """

    by: str
    name: str
    bytes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankPair:
    """In what the two ranks of a run differ.

    Attributes
    ----------
    ranks
        The two.
    differences
        The likely cause first.
    memory
        Where the peaks have other bytes, the largest difference first.
    libraries
        Which libraries only the first and only the second one loaded.
    """

    ranks: tuple[int, int]
    differences: tuple[PairDifference, ...]
    memory: tuple[MemoryDifference, ...]
    libraries: tuple[tuple[str, ...], tuple[str, ...]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def pair(
    ask: Ask, rows: list[dict[str, Any]], complete: tuple[str, ...], met: Collectives | None, say: Callable[[str], None]
) -> RankPair:
    """Return in what two ranks differ.

    Parameters
    ----------
    rows
        Their rows of the table ``ranks``.
    complete
        How recordings end that are complete.
    met
        Who waits for whom.
    say
        Takes a sentence on what was not looked at.
    """
    two = _Two(ask, rows, complete, met, say)
    rules = (two.ends, two.leaks, two.sequence, two.memory, two.steps, two.awaited)
    found = [one for rule in rules for one in rule()]
    own = [set(filter(None, (row["libraries"] or "").split(","))) for row in rows]
    return RankPair(
        (rows[0]["rank"], rows[1]["rank"]),
        tuple(sorted(found, key=lambda one: _ORDER.index(one.difference))),
        (*two.held(_BY_SITE), *two.held(_BY_LIBRARY)),
        (tuple(sorted(own[0] - own[1])), tuple(sorted(own[1] - own[0]))),
    )


def leaks_not_known(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield for how many of these ranks it is not known whether they leak, if there are any."""
    unknown = sum(row["leak_verdict"] not in _KNOWN for row in rows)
    if unknown:
        yield f"Leaks: for {unknown:,} of {counted(len(rows), 'rank')} `cudatool leaks` could not tell; it says why."


_BY_SITE: Final = (
    "SELECT CASE grouping(site) WHEN 0 THEN 'site' ELSE 'category' END AS division, "
    "coalesce(site, category, '') AS name, "
    "coalesce(sum(peak_bytes) FILTER (rank = $one), 0)::BIGINT AS one, "
    "coalesce(sum(peak_bytes) FILTER (rank = $two), 0)::BIGINT AS two "
    "FROM sites SEMI JOIN member USING (run, rank, trace, device) WHERE run = $run "
    "GROUP BY GROUPING SETS ((site), (category))"
)
# The library that the call site calls is the outermost of the frames that are inside of the user's innermost one.
_BY_LIBRARY: Final = (
    "WITH frame AS (SELECT rank, trace, stack, depth, code, "
    r"CASE code WHEN 'library' THEN coalesce(nullif(regexp_extract(file, '(?:site|dist)-packages[/\\](\w+)', 1), ''), "
    r"'Python or PyTorch') ELSE 'C++' END AS package "
    "FROM stacks SEMI JOIN member USING (run, rank, trace) WHERE run = $run), "
    "own AS (SELECT rank, trace, stack, min(depth) AS depth FROM frame WHERE code = 'own' GROUP BY ALL), "
    "called AS (SELECT rank, trace, stack, arg_max(package, frame.depth) AS name "
    "FROM frame LEFT JOIN own USING (rank, trace, stack) "
    "WHERE code IN ('library', 'C++') AND (own.depth IS NULL OR frame.depth < own.depth) GROUP BY ALL), "
    "held AS (SELECT a.* FROM allocations a JOIN member m USING (run, rank, trace, device) "
    "WHERE run = $run AND m.peak_time IS NOT NULL AND (a.alloc_time IS NULL OR a.alloc_time <= m.peak_time) "
    "AND (a.free_completed_time IS NULL OR a.free_completed_time > m.peak_time)) "
    "SELECT 'library' AS division, coalesce(called.name, 'none: called directly') AS name, "
    "coalesce(sum(size) FILTER (rank = $one), 0)::BIGINT AS one, "
    "coalesce(sum(size) FILTER (rank = $two), 0)::BIGINT AS two "
    "FROM held LEFT JOIN called USING (rank, trace, stack) GROUP BY called.name"
)


class _Two:
    """The rules, each of which yields differences."""

    def __init__(
        self,
        ask: Ask,
        rows: list[dict[str, Any]],
        complete: tuple[str, ...],
        met: Collectives | None,
        say: Callable[[str], None],
    ) -> None:
        self.ask, self.rows, self.complete, self.met, self.say = ask, rows, complete, met, say
        self.ranks = {"one": rows[0]["rank"], "two": rows[1]["rank"]}

    def of(self, name: str) -> tuple[Any, Any]:
        return self.rows[0][name], self.rows[1][name]

    def ends(self) -> Iterator[PairDifference]:
        one, two = self.of("ooms")
        if bool(one) != bool(two):
            yield PairDifference(Difference.OOM, values=(one, two))
        early = [ending not in self.complete for ending in self.of("ending")]
        if early[0] != early[1]:
            ended = [time if is_early else None for time, is_early in zip(self.of("duration"), early, strict=True)]
            yield PairDifference(Difference.ENDED_EARLY, values=(ended[0], ended[1]))

    def leaks(self) -> Iterator[PairDifference]:
        yield from self._by_site(
            Difference.LEAK, "growth", "leaks", "is_certain", "count(DISTINCT rank) = 1", "greatest(one, two)"
        )
        for sentence in leaks_not_known(self.rows):
            self.say(sentence)

    def sequence(self) -> Iterator[PairDifference]:
        """Yield where the sequences part, and what is not freed where they do not."""
        last = self.ask(
            "SELECT m.rank, m.trace, m.device, coalesce(max(sequence), 0) AS last, "
            "arg_max(full_hash, sequence) AS hash "
            "FROM member m LEFT JOIN checkpoints USING (run, rank, trace, device) WHERE run = $run "
            "GROUP BY ALL ORDER BY m.rank"
        )
        one, two = (row["last"] for row in last)
        if not one or not two:
            self.say("The sequence of allocations: it was not recorded on both ranks.")
            return
        if last[0]["hash"] == last[1]["hash"] and one == two:
            yield from self._by_site(
                Difference.NOT_FREED, "never_freed", "sites", "true", "one <> two", "abs(one - two)"
            )
            return
        self.say("Blocks that are not freed: the ranks do not make the same allocations.")
        other = last[1]["rank"]
        at = first_differences(self.ask, last[0], [other]).get(other, min(one, two))
        if at < min(one, two) or all(ending in self.complete for ending in self.of("ending")):
            found = parting(self.ask, self.ranks["one"], self.ranks["two"], at)
            yield PairDifference(found.difference, found.sites, found.requested, at, found.steps)

    def _by_site(
        self, difference: Difference, column: str, table: str, where: str, having: str, order: str
    ) -> Iterator[PairDifference]:
        """Yield the call sites of a table whose sums of a column meet a condition."""
        rows = self.ask(
            f"SELECT coalesce(site, '') AS site, coalesce(sum({column}) FILTER (rank = $one), 0)::BIGINT AS one, "
            f"coalesce(sum({column}) FILTER (rank = $two), 0)::BIGINT AS two "
            f"FROM {table} SEMI JOIN member USING (run, rank, trace, device) WHERE run = $run AND {where} GROUP BY ALL "
            f"HAVING {having} ORDER BY {order} DESC, site",
            **self.ranks,
        )
        for row in rows:
            yield PairDifference(difference, (row["site"], row["site"]), (row["one"], row["two"]))

    def memory(self) -> Iterator[PairDifference]:
        one, two = self.of("peak_active")
        if abs(one - two) > _PEAK * min(one, two):
            yield PairDifference(Difference.PEAK, values=(one, two))
        reserved = self.of("peak_reserved")
        if None in reserved:
            self.say("Fragmentation: not every recording has reserved memory.")
            return
        unused = reserved[0] - one, reserved[1] - two
        if abs(unused[0] - unused[1]) > _SHARE * min(reserved):
            yield PairDifference(Difference.FRAGMENTED, values=unused)

    def steps(self) -> Iterator[PairDifference]:
        """Yield steps that take longer on one of the ranks, and clocks that differ."""
        if not all(self.of("steps_marked")) or not all(self.of("steps")):
            self.say("Stragglers and clocks: not every rank has named steps; wrap them in cudatool.range.")
            return
        [row] = self.ask(
            "WITH own AS (SELECT rank, step, end_time - start_time AS took, unix_start_ns + start_time AS began "
            "FROM member_steps JOIN member USING (run, rank, trace, device) "
            "WHERE run = $run AND end_time > start_time), "
            "shared AS (SELECT a.took AS one, b.took AS two, b.began - a.began AS shift, a.began AS began "
            "FROM own a JOIN own b USING (step) WHERE a.rank = $one AND b.rank = $two) "
            "SELECT count(*) AS steps, median(one)::BIGINT AS one, median(two)::BIGINT AS two, "
            "quantile_cont(one / two, 0.25) AS low, quantile_cont(one / two, 0.75) AS high, "
            "median(shift)::BIGINT AS shift, max(shift) - min(shift) AS drift, "
            "max(began + one) - min(began) AS span FROM shared",
            **self.ranks,
        )
        if row["steps"] < _FEWEST_STEPS:
            self.say(f"Stragglers and clocks: the ranks have fewer than {_FEWEST_STEPS} steps in common that ended.")
            return
        if row["low"] > 1 + _SHARE or row["high"] < 1 / (1 + _SHARE):
            yield PairDifference(Difference.STRAGGLER, values=(row["one"], row["two"]))
        if row["shift"] is None:
            self.say("Clocks: not every recording has the time of the world.")
            return
        least = max(row["one"], row["two"]) if self.met is not None else row["span"]
        if abs(row["shift"]) > max(least, 1e8) and row["drift"] < abs(row["shift"]) / 4:
            yield PairDifference(Difference.CLOCK, values=(row["shift"], -row["shift"]))

    def awaited(self) -> Iterator[PairDifference]:
        if self.met is not None and self.met.later() is not None:
            waits = [rank.waited for rank in self.met.ranks]
            yield PairDifference(Difference.AWAITED, values=(waits[0], waits[1]))

    def held(self, question: str) -> Iterator[MemoryDifference]:
        """Yield where the bytes at the peaks differ."""
        rows = self.ask(
            f"SELECT * FROM ({question}) WHERE one <> two "
            "QUALIFY row_number() OVER (PARTITION BY division ORDER BY abs(one - two) DESC, name) <= $most "
            "ORDER BY division DESC, abs(one - two) DESC, name",
            most=_ROWS,
            **self.ranks,
        )
        return (MemoryDifference(row["division"], row["name"], (row["one"], row["two"])) for row in rows)
