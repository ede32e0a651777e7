"""The page of a data set of many ranks and runs, in the style of the memory page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cudatool.files import write_whole
from cudatool.fleet.compare import Comparison
from cudatool.fleet.pace import Collectives
from cudatool.fleet.pair import RankPair
from cudatool.fleet.picture import Picture
from cudatool.fleet.words import DIVISIONS, described, described_pair, rank_list
from cudatool.viz.page import assembled, packed
from cudatool.viz.payload import Columns, framed

__all__ = ["SCRIPTS", "fleet_page", "fleet_payload", "write_fleet"]

SCRIPTS = ("words.js", "colours.js", "payload.js", "state.js", "keys.js", "canvas.js", "heat.js", "fleet.js")


def write_fleet(source: str, pictures: Sequence[Picture], compared: Comparison | None, path: str | Path) -> None:
    """Write the page of a data set, whole or not at all.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    write_whole(path, fleet_page(source, pictures, compared))


def fleet_page(source: str, pictures: Sequence[Picture], compared: Comparison | None = None) -> str:
    """Return the page of the data set in the directory `source`."""
    name = Path(source).name or source
    payload = fleet_payload(name, pictures, compared)
    return assembled("fleet.html", SCRIPTS, title=f"{name} - cudatool", payload=packed(payload))


def fleet_payload(name: str, pictures: Sequence[Picture], compared: Comparison | None = None) -> bytes:
    """Return the page's data in the format of :mod:`cudatool.viz.payload`; sizes are bytes, times ns."""
    columns = Columns()
    document = {
        "source": name,
        "runs": [_run(one, columns) for one in pictures],
        "against": None if compared is None else asdict(compared),
    }
    return framed(document, columns)


def _run(picture: Picture, columns: Columns) -> dict[str, Any]:
    report, memory = picture.report, picture.memory
    ranks, steps, met = report.ranks, report.steps, report.collectives
    first = next((end.unix_ns for end in report.ends if end.unix_ns is not None), 0)
    return {
        "run": report.run,
        "compared": report.compared,
        "median_peak": report.median_peak,
        "missing": columns.add(report.missing),
        "not_looked_at": report.not_looked_at,
        "ranks": {
            "rank": columns.add([rank.rank for rank in ranks]),
            "peak": columns.add([rank.peak_active for rank in ranks]),
            "reserved": columns.add([-1 if rank.peak_reserved is None else rank.peak_reserved for rank in ranks]),
            "end": columns.add([rank.end_active for rank in ranks]),
            "ooms": columns.add([rank.ooms for rank in ranks]),
            "host": [rank.host for rank in ranks],
            "ending": [rank.ending for rank in ranks],
        },
        "findings": [{"rank": one.rank, "in": one.difference, "text": described(one)} for one in report.findings],
        "pair": None if report.pair is None else _pair(report.pair),
        "ends": [
            {"rank": end.rank, "in": end.difference, "after": None if end.unix_ns is None else end.unix_ns - first}
            for end in report.ends
        ],
        "memory": None
        if memory is None
        else {"steps": memory.steps, "width": memory.width, "peak": columns.add(memory.peak.ravel())},
        "steps": {
            name: columns.add([getattr(step, name) for step in steps])
            for name in ("step", "ranks", "median", "longest", "longest_rank")
        },
        "collectives": None
        if met is None
        else {
            "compared": met.compared,
            "span": met.span,
            **{
                name: columns.add([getattr(one, name) for one in met.ranks])
                for name in ("rank", "waited", "awaited", "last")
            },
        },
        "groups": [_group(group) for group in report.groups],
        "sites": [asdict(site) for site in picture.sites],
    }


def _pair(pair: RankPair) -> dict[str, Any]:
    return {
        "ranks": pair.ranks,
        "differences": [{"in": one.difference, "text": described_pair(pair, one)} for one in pair.differences],
        "memory": [{"by": DIVISIONS[row.by], "name": row.name, "bytes": row.bytes} for row in pair.memory],
        "libraries": pair.libraries,
    }


def _group(group: Collectives) -> dict[str, Any]:
    latest = max(group.ranks, key=lambda rank: rank.awaited)
    return {
        "ranks": rank_list(one.rank for one in group.ranks),
        "latest": latest.rank,
        "awaited": latest.awaited,
        "waited": latest.waited,
        "compared": group.compared,
        "span": group.span,
    }
