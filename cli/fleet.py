"""``cudatool fleet``: which rank is different, and in what."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cudatool.cli._command import Files, command, option
from cudatool.cli._engine import engine_option, memory_option
from cudatool.cli._options import force_option, page_option
from cudatool.cli._pages import open_page
from cudatool.cli._text import (
    bytes_or_unknown,
    counted,
    echo_json,
    messages,
    new_table,
    plain,
    print_rest,
    print_table,
    results,
)
from cudatool.errors import UsageError
from cudatool.files import check_outputs
from cudatool.fleet.ask import keep_here
from cudatool.fleet.cluster import opened_on, ray_cluster
from cudatool.fleet.compare import Limit, compare, parse_limit
from cudatool.fleet.picture import picture
from cudatool.fleet.query import opened
from cudatool.fleet.report import fleet_report
from cudatool.fleet.words import DIVISIONS, ENDS, described, described_pair, rank_list
from cudatool.progress import step
from cudatool.text import printable
from cudatool.units import format_bytes, format_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from cudatool.fleet.ask import Keep
    from cudatool.fleet.compare import Comparison
    from cudatool.fleet.pair import RankPair
    from cudatool.fleet.report import RunReport

__all__ = ["fleet"]

_MOST = 20  # rows of a table
_APART = 5  # steps, and ranks that come late
_UNCLEAR = 4  # exit status


@command(
    examples=[
        ("Which rank is different", "cudatool fleet traces.dataset"),
        ("The same as a page", "cudatool fleet traces.dataset --html fleet.html"),
        ("A gate for CI", "cudatool fleet new.dataset --against old.dataset --fail-on 'peak +2%'"),
    ],
)
@click.argument("dataset", type=Files(path_type=Path), metavar="DIR")
@option("--against", type=Files(path_type=Path), metavar="DIR", group="Comparison", help="An older data set.")
@option(
    "--fail-on",
    "limits",
    multiple=True,
    metavar="LIMIT",
    group="Comparison",
    help='Exit with status 1 if this grew by more: peak, reserved or end, such as "peak +2%" or "reserved +1GiB". '
    "Needs --against; the differences between ranks then do not count. Can be repeated.",
)
@page_option("Write a page of all runs; it needs no network.")
@force_option
@option("--json", "as_json", is_flag=True, group="Output", help='Print JSON ("schema": "cudatool.fleet/1").')
@memory_option
@engine_option
def fleet(
    dataset: Path,
    against: Path | None,
    limits: tuple[str, ...],
    html: str | None,
    opens: bool,
    force: bool,
    as_json: bool,
    memory: str,
    engine: str,
) -> None:
    """Find the ranks of a run that differ from the others, and in what.

    DIR is what `cudatool export --to parquet` wrote. The ranks of a run are compared with each other: memory, sequence
    of allocations, leaks, blocks that are not freed, fragmentation, time of steps, clocks, waits in collectives. Of two
    ranks, it says in what they differ, not which one is wrong.

    Exit status: 0 compared, and no rank differs; 1 one does, or a limit of --fail-on is exceeded; 2 it could not be
    read or compared, or no limit is exceeded but a rank ended early, ran out of memory or left no trace; 4 no run has
    ranks that could be compared.
    """

    if limits and against is None:
        raise click.UsageError("--fail-on needs --against")
    check_outputs([html] if html else [], [], force=force)
    wanted = [parse_limit(text) for text in limits]
    sets = [dataset] if against is None else [dataset, against]
    with step("cudatool fleet"), _opened(engine, sets, memory) as (database, keep):
        runs = fleet_report(database, keep)
        compared = None if against is None else compare(database, str(against))
        pictures = [picture(database, run) for run in runs] if html else []
    if html:
        from cudatool import viz  # only a page needs it

        with step(f"writing {html}"):
            viz.write_fleet(str(dataset), pictures, compared, html)
        messages().print(f"Wrote {html} ({format_bytes(Path(html).stat().st_size)})", markup=False)
        if opens:
            open_page(html)
    if as_json:
        beside = None if compared is None else compared.as_dict()
        rows = [run.as_dict() for run in runs]
        echo_json({"schema": "cudatool.fleet/1", "dataset": str(dataset), "runs": rows, "against": beside})
    else:
        console = results()
        for run in runs:
            _print_run(console, run)
        if compared is not None:
            _print_comparison(console, compared)
    sys.exit(_status(runs, compared, wanted))


@contextmanager
def _opened(engine: str, datasets: list[Path], memory: str) -> Iterator[tuple[Any, Keep]]:
    """Return what the report is made with: a database, and what keeps answers of large tables in it."""
    if engine == "duckdb":
        with opened(*datasets, memory=memory) as database:
            yield database, keep_here
        return
    with ray_cluster() as cluster, opened_on(cluster, *datasets, memory=memory) as answering:
        yield answering


def _status(runs: tuple[RunReport, ...], compared: Comparison | None, limits: list[Limit]) -> int:
    if limits and compared is not None:
        changes = {change.metric: change for change in compared.metrics}
        if any([limit.is_exceeded(changes[limit.metric]) for limit in limits]):
            return 1
        _check_finished(compared)
        return 0
    if any(run.has_differences for run in runs):
        return 1
    return 0 if any(run.compared for run in runs) else _UNCLEAR


def _check_finished(compared: Comparison) -> None:
    """Refuse to let a gate pass what was not recorded."""
    causes = []
    if compared.unfinished:
        causes.append(f"{counted(compared.unfinished, 'trace')} ended early or ran out of memory")
    if compared.missing:
        causes.append(f"{counted(len(compared.missing), 'rank')} of the older data set left no trace")
    if causes:
        raise UsageError(f"--fail-on: {' and '.join(causes)}, so the most memory of all ranks is not known")


def _print_run(console: Console, run: RunReport) -> None:
    console.print(f"Run {run.run}: {counted(len(run.ranks), 'rank')}", style="bold", markup=False)
    if run.missing:
        console.print(f"no trace of rank {', '.join(map(str, run.missing[:_MOST]))}", markup=False)
    table = new_table("Rank", "Host", numbers=("Peak", "Beside median", "Reserved", "At the end", "OOM"))
    for rank in sorted(run.ranks, key=lambda rank: -rank.peak_active)[:_MOST]:
        above = rank.peak_active - run.median_peak
        beside = f"{'-' if above < 0 else '+'}{format_bytes(abs(above))}"
        memory = (format_bytes(rank.peak_active), beside, bytes_or_unknown(rank.peak_reserved))
        table.add_row(str(rank.rank), plain(rank.host or ""), *memory, format_bytes(rank.end_active), str(rank.ooms))
    print_table(console, "Memory by rank", table)
    print_rest(console, len(run.ranks), _MOST, "ranks")
    if run.pair is not None:
        _print_pair(console, run.pair)
    elif run.findings:
        console.print("\nDifferent from the other ranks", style="bold")
        for finding in run.findings[: 3 * _MOST]:
            console.print(f"rank {finding.rank}: {described(finding)}", markup=False)
        print_rest(console, len(run.findings), 3 * _MOST, "differences")
    elif run.compared:
        console.print("\nNo rank differs from the others in what was compared.")
    else:
        console.print("\nCould not tell: the ranks were not compared.")
    _print_order(console, run)
    _print_pace(console, run)
    for sentence in run.not_looked_at:
        console.print(f"Not looked at: {sentence}", markup=False)
    console.print()


def _print_pair(console: Console, pair: RankPair) -> None:
    one, two = (f"Rank {rank}" for rank in pair.ranks)
    if pair.differences:
        console.print(f"\n{one} and rank {pair.ranks[1]} differ; which one is wrong is not known", style="bold")
        for found in pair.differences:
            console.print(f"{found.difference}: {described_pair(pair, found)}", markup=False)
    else:
        console.print("\nThe two ranks do not differ in what was compared.")
    for rank, only in zip(pair.ranks, pair.libraries, strict=True):
        if only:
            console.print(f"Loaded by rank {rank} only: {printable(', '.join(only))}", markup=False)
    for by, title in DIVISIONS.items():
        table = new_table(title, numbers=(one, two))
        for row in [row for row in pair.memory if row.by == by][:_MOST]:
            table.add_row(plain(row.name), *map(format_bytes, row.bytes))
        print_table(console, f"At the peak, by {title.lower()}: where the ranks differ", table)


def _print_order(console: Console, run: RunReport) -> None:
    table = new_table("Rank", "", numbers=("After the first",))
    known = [end.unix_ns for end in run.ends if end.unix_ns is not None]
    for end in run.ends[:_MOST]:
        after = "unknown" if end.unix_ns is None else format_time(end.unix_ns - known[0])
        table.add_row(str(end.rank), ENDS[end.difference], after)
    if len(run.ends) > 1:
        print_table(console, "Order in which ranks ended", table)
        print_rest(console, len(run.ends), _MOST, "ranks")


def _print_pace(console: Console, run: RunReport) -> None:
    table = new_table("Step", numbers=("Median", "Longest", "Rank"))
    for one in sorted(run.steps, key=lambda one: one.median - one.longest)[:_APART]:
        table.add_row(str(one.step), format_time(one.median), format_time(one.longest), str(one.longest_rank))
    print_table(console, "Steps in which the ranks are furthest apart", table)
    if (found := run.collectives) is not None:
        table = new_table("Rank", numbers=("Others wait for it", "It waits", "Came last"))
        for rank in sorted(found.ranks, key=lambda rank: -rank.awaited)[:_APART]:
            last = f"{rank.last:,} of {found.compared:,}"
            table.add_row(str(rank.rank), format_time(max(rank.awaited, 0)), format_time(rank.waited), last)
        print_table(console, f"Collectives, within {format_time(found.span)}", table)
    table = new_table("Ranks", "Latest", numbers=("Others wait for it", "It waits", "Collectives", "Within"))
    latest = [(max(group.ranks, key=lambda rank: rank.awaited), group) for group in run.groups]
    for rank, group in sorted(latest, key=lambda pair: -pair[0].awaited)[:_APART]:
        waits = format_time(max(rank.awaited, 0)), format_time(rank.waited)
        table.add_row(
            rank_list(one.rank for one in group.ranks),
            *(str(rank.rank), *waits, f"{group.compared:,}", format_time(group.span)),
        )
    print_table(console, "Collectives of groups of ranks", table)
    print_rest(console, len(run.groups), _APART, "groups")


def _print_comparison(console: Console, compared: Comparison) -> None:
    console.print(f"Compared with {compared.against}", style="bold", markup=False)
    table = new_table("Most of any rank", numbers=("Before", "Now"))
    for change in compared.metrics:
        table.add_row(str(change.metric), bytes_or_unknown(change.before), bytes_or_unknown(change.after))
    console.print(table)
    table = new_table("Call site", numbers=("Before", "Now"))
    for site in compared.sites:
        table.add_row(plain(site.site), format_bytes(site.before), format_bytes(site.after))
    print_table(console, "At the peak, by call site", table)
