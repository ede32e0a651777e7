"""What ``cudatool replay`` prints."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import TYPE_CHECKING, Final

from cudatool.cli._text import counted, plain
from cudatool.memory.settings import setting_texts
from cudatool.units import bytes_range_parts, format_bytes, format_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from cudatool.analyze import Advice, ReplayCheck, WhatIfOutcome

__all__ = ["print_advice", "print_check", "print_outcomes"]

_COLUMNS: Final = (
    "Reserved and in use: the most at any time, which need not be the same time.",
    "Unused: of the most reserved, at the time when most of that was in use.",
)
_Cell = tuple[str, ...]  # parts that may stand on lines of their own
_NAMES: Final = ("Settings", "Reserved", "In use", "Unused", "Retries", "Runs out")
_WORD: Final = re.compile(r"\s*(?:\[?[\d>]+:[^,\]]*[,\]]*|[^\s_:,]+[_:,]*)")  # size and number in a list stay together
_MOST_COUNTERS = 5  # differences to list
_BEGINNINGS = {
    "empty": "nothing: recorded from the beginning",
    "inferred": "what its events and its end show was there before",
    "unknown": "more than the recording shows",
    "ambiguous": "what was there before, of which a part is guessed",
}


def print_check(console: Console, result: ReplayCheck) -> None:
    if result.is_empty:
        text = f"Device {result.device}: nothing to check: the file has no history of requests, only "
        console.print(f"{text}{counted(result.final_blocks, 'block')} at the end", markup=False, soft_wrap=True)
        return
    end = f"{result.final_blocks_differ:,} of {result.final_blocks:,} blocks differ"
    share = format_share(result.exact / result.allocs) if result.allocs else "no allocation"
    verdict = "exact" if result.is_exact else "not exact"
    lines = [
        f"Device {result.device}: {verdict}",
        f"  addresses   {result.exact:,} of {result.allocs:,} the same ({share})",
        f"  segments    {result.segments_exact:,} of {result.segments:,} the same",
        f"  at the end  {end if result.final_blocks else 'no blocks were recorded to compare with'}",
        f"  peaks       {format_bytes(result.reserved_peak_bytes)} reserved, "
        f"{format_bytes(result.active_peak_bytes)} in use",
        f"  began with  {_BEGINNINGS[result.initial_state]}",
    ]
    for name, (recorded, actual) in list(result.stats_differ.items())[:_MOST_COUNTERS]:
        lines.append(f"  {name}: recorded {recorded:,}, here {actual:,}")
    if len(result.stats_differ) > _MOST_COUNTERS:
        lines.append(
            f"  ... and {len(result.stats_differ) - _MOST_COUNTERS} more counters that differ (--json has all)"
        )
    if result.first_divergence is not None:
        first = result.first_divergence
        lines.append(
            f"  first difference at event {first.event}, a {first.what} of {first.size:,} bytes: "
            f"recorded {first.expected}, here {first.actual}"
        )
        lines.append(f"  probably    {first.reason}")
    lines += [f"  {note}" for note in result.notes]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def print_outcomes(console: Console, device: int, advice: Advice) -> None:
    """Print the recorded cost, that of its replay, and those of the other settings."""
    from rich.table import Table

    record, check = advice.record, advice.recorded
    assert record is not None
    console.print(f"Device {device}: the same requests under other settings", markup=False, soft_wrap=True)
    failed = f"{record.failures:,} failed" if record.failures else "no"
    recorded = format_bytes(record.reserved_peak_bytes), "", "", f"{record.retries:,}", failed
    rows: list[tuple[str, list[_Cell]]] = [("as recorded", [(text,) for text in recorded])]
    if check is not None:
        rows.append(("replay of that", _cells(check)))
    tried = [(outcome.conf, _cells(outcome)) for outcome in advice.tried]
    for left_out in advice.left_out:
        least = bytes_range_parts(left_out.reserved_least_bytes, None)
        tried.append((left_out.conf, [least, ("",), ("",), ("",), ("left out",)]))
    in_all = _in_all([conf for conf, _ in tried])
    for conf, cells in tried:
        own = [part for part in setting_texts(conf).values() if part not in in_all]
        rows.append((",\n  ".join(own) or "(defaults)", cells))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in _NAMES:
        table.add_column(name, justify="left" if name == _NAMES[0] else "right", no_wrap=True)
    for row in _in_width(rows, console.width):
        for lines in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            table.add_row(*map(plain, lines))
    console.print(table)
    if advice.left_out:
        more = " more than the best one" if advice.best is not None else ""
        text = f"Left out: settings that cannot save 1 %{more}; --conf tries one to the end."
        console.print(text, markup=False, soft_wrap=True)
    if in_all:
        console.print(f"All of them with {', '.join(in_all)}, as recorded.", markup=False, soft_wrap=True)
    for text in _COLUMNS:
        console.print(text, markup=False, soft_wrap=True)
    if record.limit_bytes is not None:
        text = f"Requests that failed or were retried show that at most {format_bytes(record.limit_bytes)} could be "
        console.print(f"{text}reserved.", markup=False, soft_wrap=True)
    if any(outcome.caveats for outcome in advice.tried):
        text = "A range covers all that the recording leaves open; ~ marks what may differ:"
        console.print(text, markup=False, soft_wrap=True)
    for caveat in dict.fromkeys(caveat for outcome in advice.tried for caveat in outcome.caveats):
        console.print(f"- {_CAVEATS[caveat]}", markup=False, soft_wrap=True)
    sites = {outcome.conf: outcome.oom.site for outcome in advice.tried if outcome.oom is not None}
    where = [f"{conf or '(defaults)'} runs out at {site}" for conf, site in sites.items() if site]
    if len(where) > 1 and len(set(sites.values())) == 1:
        where = [f"Where memory runs out, it does so at {site}" for site in set(sites.values())]
    for text in where:
        console.print(text, markup=False, soft_wrap=True)


def _in_width(rows: list[tuple[str, list[_Cell]]], width: int) -> list[list[str]]:
    """Return the rows of the table with lines broken where it is too wide: numbers before settings, never in a word."""
    found = [[first, *map(" ".join, cells)] for first, cells in rows]
    if sum(_widths(found)) > width:
        found = [[first, *map("\n".join, cells)] for first, cells in rows]
    left = width - sum(_widths(found)[1:])
    return [["\n".join(_in_lines(row[0], left)), *row[1:]] for row in found]


def _widths(rows: list[list[str]]) -> list[int]:
    """Return the width of each column, with the space after it."""
    columns = zip(_NAMES, *rows, strict=True)
    return [1 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns]


def _in_lines(settings: str, width: int) -> Iterator[str]:
    for line in settings.split("\n"):
        part = ""
        for word in _WORD.findall(line):
            if part.strip() and len(part) + len(word) + 1 > width:
                yield part
                part = "  "
            part += word
        yield part


def _in_all(confs: list[str]) -> list[str]:
    """Return the setting that is a limit, not a choice, if all of several settings have it."""
    limits = {setting_texts(conf).get("per_process_memory_fraction", "") for conf in confs}
    return sorted(limits - {""}) if len(limits) == 1 and len(confs) > 1 else []


def _cells(outcome: WhatIfOutcome) -> list[_Cell]:
    oom, about = outcome.oom, "~" if outcome.caveats else ""
    runs_out: _Cell = ("no",) if oom is None else (f"request {oom.request:,}:", format_bytes(oom.size))
    if oom is None and outcome.survived_ooms:
        runs_out = (f"{outcome.survived_ooms:,} failed",)
    return [
        bytes_range_parts(outcome.reserved_least_bytes, outcome.reserved_most_bytes),
        (format_bytes(outcome.active_peak_bytes),),
        (f"{about}{format_share(outcome.fragmentation)}",),
        (f"{about}{outcome.retries:,}",),
        runs_out,
    ]


def print_advice(console: Console, advice: Advice, *, chosen: bool) -> None:
    """Print the best setting, or why none is recommended; nothing if the user has `chosen` the settings."""
    if advice.withheld is not None:
        console.print(f"No advice: {advice.why_not()}", markup=False, soft_wrap=True)
        return
    if chosen:
        return
    if advice.best is None:
        text = "No other setting makes a difference worth naming."
        if advice.recorded is not None and advice.recorded.oom is not None:
            text = "No setting keeps the program from running out of memory: it needs less at a time, or a larger GPU."
            if any(outcome.oom is None for outcome in advice.tried):
                text = "Whether a setting keeps the program from running out of memory is not sure."
    else:
        bound = "at least " if advice.best.caveats else ""
        gain = f"{bound}{format_bytes(advice.gain_bytes)} less are reserved"
        if not advice.gain_bytes:
            gain = "memory does not run out where it did; what the program would do after that is not known"
        conf = advice.best.conf
        text = f"Best: {advice.variable}={conf}: {gain}." if conf else f"Best: the defaults: {gain}."
    console.print(text, markup=False, soft_wrap=True)


_CAVEATS = {
    "peak-differs": "a replay of the recorded settings does not reserve what was recorded.",
    "retries-differ": "a replay of the recorded settings empties the cache more or less often to make room.",
    "failures-differ": "other requests fail in a replay of the recorded settings.",
    "runs-out": "memory runs out; what the program does then is not known.",
    "other-course": "a request that failed when recorded is served; what the program does then is not known.",
    "begins-late": "the recording begins in mid-program, so what was cached by then is not known.",
    "calls-unseen": "calls of empty_cache that found nothing to give back are not in the file, and matter here.",
    "limit-unclear": "the memory of the recorded GPU is not known exactly; pass it with --recorded-memory.",
    "addresses-unseen": "which addresses the driver would have given is not known.",
    "sizes-rounded": "of failed requests the file has only the rounded size.",
    "calls-unclear": "whether the program emptied the cache or the allocator made room does not show.",
}
