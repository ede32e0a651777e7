"""What a page draws of a run beside its report: memory by rank and step, and the call sites of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.fleet.report import RunReport

__all__ = ["Picture", "SiteBytes", "StepMemory", "picture"]

_CELLS: Final = 400_000  # of ranks and columns
_COLUMNS: Final = 2000  # more than a screen has pixels
_FEWEST_COLUMNS: Final = 64
_RANKS: Final = 64  # whose call sites are listed
_SITES: Final = 12


@dataclass(frozen=True, slots=True, eq=False)
class StepMemory:
    """The most bytes active in each step of each rank.

    Attributes
    ----------
    steps, width
        Number of steps, and how many of them a column stands for.
    peak
        A row for each rank in the order of the report; -1 where a rank has none of the steps.
    """

    steps: int
    width: int
    peak: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SiteBytes:
    """What a call site holds at a rank's peak, and what is usual: at the median rank's peak, or at the other of two."""

    rank: int
    site: str
    bytes: int
    usual: int


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """A run's report with what only a page shows; `memory` is None where no rank has steps."""

    report: RunReport
    memory: StepMemory | None
    sites: tuple[SiteBytes, ...]


def picture(database: Any, report: RunReport) -> Picture:
    """Return what a page draws of a run; `database` is that of :func:`~cudatool.fleet.report.fleet_report`."""
    ranks = np.array([rank.rank for rank in report.ranks], np.int64)
    shown = dict.fromkeys((*(finding.rank for finding in report.findings), *ranks.tolist()))
    if len(ranks) > _RANKS:
        shown = dict.fromkeys(finding.rank for finding in report.findings)
    sites = tuple(_sites(database, report.run, list(shown)[:_RANKS], len(ranks)))
    return Picture(report, _memory(database, report.run, ranks), sites)


def _memory(database: Any, run: str, ranks: npt.NDArray[np.int64]) -> StepMemory | None:
    columns = database.execute(
        "SELECT rank, step, peak_active FROM member_steps WHERE run = $run AND step >= 0 AND peak_active >= 0",
        {"run": run},
    ).fetchnumpy()
    rank, step, peak = (np.asarray(columns[name]).astype(np.int64) for name in ("rank", "step", "peak_active"))
    if not len(step):
        return None
    steps = int(step.max()) + 1
    width = -(-steps // min(_COLUMNS, max(_FEWEST_COLUMNS, _CELLS // len(ranks))))
    result = np.full((len(ranks), -(-steps // width)), -1, np.int64)
    np.maximum.at(result, (np.searchsorted(ranks, rank), step // width), peak)
    return StepMemory(steps, width, result)


def _sites(database: Any, run: str, shown: list[int], ranks: int) -> Iterable[SiteBytes]:
    rows = database.execute(
        "WITH own AS (SELECT rank, coalesce(site, '') AS site, sum(peak_bytes)::BIGINT AS bytes FROM sites "
        "SEMI JOIN member USING (run, rank, trace, device) WHERE run = $run GROUP BY ALL), "
        "site_of_run AS (SELECT site, sum(bytes) AS of_all, "
        "CASE WHEN count(*) * 2 > $ranks THEN median(bytes) ELSE 0 END AS median FROM own GROUP BY site), "
        "beside AS (SELECT rank, site, coalesce(own.bytes, 0)::BIGINT AS bytes, "
        "(CASE WHEN $ranks = 2 THEN of_all - coalesce(own.bytes, 0) ELSE median END)::BIGINT AS usual "
        "FROM (SELECT unnest($shown) AS rank) CROSS JOIN site_of_run LEFT JOIN own USING (rank, site)) "
        "SELECT rank, site, bytes, usual FROM beside WHERE bytes > 0 OR usual > 0 "
        "QUALIFY row_number() OVER (PARTITION BY rank ORDER BY abs(bytes - usual) DESC, bytes DESC, site) <= $most "
        "ORDER BY rank, abs(bytes - usual) DESC, bytes DESC, site",
        {"run": run, "shown": shown, "ranks": ranks, "most": _SITES},
    ).fetchall()
    return (SiteBytes(*row) for row in rows)
