"""Two data sets side by side: nightly runs, or two commits; and a limit for CI."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from cudatool.errors import UsageError
from cudatool.text import quoted
from cudatool.units import parse_bytes

__all__ = ["Comparison", "Limit", "Metric", "MetricChange", "SiteChange", "compare", "parse_limit"]


class Metric(StrEnum):
    """What is compared: the most of any rank, in bytes."""

    PEAK = "peak"
    """Bytes active at the peak."""
    RESERVED = "reserved"
    """Most bytes taken from the driver."""
    END = "end"
    """Bytes active after the last event."""


_COLUMNS: Final = {Metric.PEAK: "peak_active", Metric.RESERVED: "peak_reserved", Metric.END: "end_active"}
_SITES: Final = 20


@dataclass(frozen=True, slots=True)
class MetricChange:
    """A metric before and now; None where a data set does not have it for every device of a trace."""

    metric: Metric
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True)
class SiteChange:
    """What a call site holds at the peak of the rank where it holds most; without folder and line, which may change."""

    site: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The data set beside an older one; the call sites whose bytes changed most come first.

    Attributes
    ----------
    against
        The older one.
    metrics, sites
        What changed.
    unfinished
        How many traces of the data set may lack their most: the recording ended early, or memory ran out, which it did
        in none of the older traces. A child process that leaves by ``os._exit`` does not close its recording.
    missing
        Ranks that have a trace in the older data set alone.
    """

    against: str
    metrics: tuple[MetricChange, ...]
    sites: tuple[SiteChange, ...]
    unfinished: int = 0
    missing: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a metric may grow: a share of what it was, or bytes."""

    metric: Metric
    share: float | None
    size: int

    def is_exceeded(self, change: MetricChange) -> bool:
        """Return whether the metric grew by more.

        Raises
        ------
        UsageError
            It is not known for both.
        """
        if change.before is None or change.after is None:
            raise UsageError(f"--fail-on: {self.metric} is not known in both data sets, so it cannot be compared")
        allowed = self.size if self.share is None else change.before * self.share
        return change.after - change.before > allowed


def parse_limit(text: str) -> Limit:
    """Return what ``peak +2%`` or ``reserved +512MiB`` means.

    Raises
    ------
    UsageError
        It means nothing.
    """
    found = re.fullmatch(rf"\s*({'|'.join(Metric)})\s*\+\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]+)\s*", text)
    if not found:
        raise UsageError(f'--fail-on {quoted(text)}: write {", ".join(Metric)} and a growth, such as "peak +2%"')
    metric, number, unit = found.groups()
    is_share = unit == "%"
    return Limit(
        Metric(metric), float(number) / 100 if is_share else None, 0 if is_share else parse_bytes(number + unit)
    )


def compare(database: Any, against: str) -> Comparison:
    """Return how a data set differs from the second one of :func:`~cudatool.fleet.query.opened`."""

    def most(table: str, column: str) -> int | None:
        question = f"SELECT CASE WHEN count({column}) = count(*) THEN max({column}) END FROM {table} "
        [(value,)] = database.execute(f"{question} WHERE device IS NOT NULL").fetchall()
        return None if value is None else int(value)

    metrics = tuple(MetricChange(m, most("against_ranks", c), most("ranks", c)) for m, c in _COLUMNS.items())

    def held(table: str) -> str:
        name = r"regexp_replace(regexp_replace(coalesce(site, ''), '^.*/', ''), ':\d+ ', ' ')"
        own = (
            f"SELECT {name} AS site, run, rank, trace, sum(coalesce(peak_bytes, 0)) AS bytes FROM {table} GROUP BY ALL"
        )
        return f"(SELECT site, max(bytes) AS bytes FROM ({own}) GROUP BY site)"

    rows = database.execute(
        "SELECT site, coalesce(old.bytes, 0) AS before, coalesce(new.bytes, 0) AS after "
        f"FROM {held('against_sites')} old FULL JOIN {held('sites')} new USING (site) "
        f"WHERE before <> after ORDER BY abs(after - before) DESC, site LIMIT {_SITES}"
    ).fetchall()
    sites = tuple(SiteChange(site, int(b), int(a)) for site, b, a in rows)
    [(unfinished,)] = database.execute(_UNFINISHED).fetchall()
    missing = database.execute(_MISSING).fetchall()
    return Comparison(against, metrics, sites, int(unfinished), tuple(int(rank) for (rank,) in missing))


_UNFINISHED: Final = """
SELECT count(DISTINCT (run, rank, trace)) FROM ranks
WHERE NOT (ending IN ('closed', 'growing') OR (is_child AND ending = 'killed'))
OR (ooms > 0 AND (SELECT coalesce(max(ooms), 0) FROM against_ranks) = 0)
"""
_MISSING: Final = """
SELECT DISTINCT rank FROM against_ranks
WHERE rank IS NOT NULL AND rank NOT IN (SELECT rank FROM ranks WHERE rank IS NOT NULL) ORDER BY rank
"""
