"""``cudatool leaks``: what grows step after step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cudatool import analyze
from cudatool.analyze import LeakVerdict
from cudatool.cli._command import command, option
from cudatool.cli._live_text import ENDINGS
from cudatool.cli._options import range_options, source_argument
from cudatool.cli._part import read_family
from cudatool.cli._recording_files import newest
from cudatool.cli._sources import say_notes
from cudatool.cli._text import counted, echo_json, new_table, plain, print_rest, results
from cudatool.progress import step
from cudatool.text import printable
from cudatool.trace.events import Kind
from cudatool.trace.family import process_name, unread_children
from cudatool.trace.physical import physical_memory
from cudatool.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import Leak, Leaks
    from cudatool.trace.model import Trace

__all__ = ["leaks"]

_MOST = 20  # rows of the table
_UNCLEAR = 4  # exit status
_PHYSICAL = "memory from cuMemCreate"
_LISTED_BY = "sanitize --checks leak lists what is never freed"


@command(
    examples=[
        ("The newest trace in this directory", "cudatool leaks"),
        ("A snapshot of PyTorch", "cudatool leaks snapshot.pickle"),
    ],
)
@source_argument()
@option("--json", "as_json", is_flag=True, help='Print JSON ("schema": "cudatool.leaks/1"); bytes.')
@range_options
def leaks(source: Path | None, as_json: bool, events: str | None, time: str | None) -> None:
    """Find call sites that hold more and more device memory or pinned host memory.

    SOURCE is a trace that `cudatool run` wrote, or a pickle from torch.cuda.memory._dump_snapshot(). Default: the
    newest trace in this directory.

    A leak grows until the end of the recording, at a rate that does not decline, while the same work goes on. Steps
    are the ranges of torch.profiler, of optimizers, or your own (cudatool.range). Without them the recording is cut
    into windows with equal numbers of allocations. Growth that may be something else, such as the cache of a sequence
    that is being generated, is listed with the reason and counts as "could not tell".

    Exit status: 0 nothing grows, 1 something leaks, 2 the file cannot be read, 4 could not tell.
    """

    with step("cudatool leaks"):  # progress shows two seconds from here
        traces = read_family(source or newest(), events, time)
        for trace in traces:
            say_notes(trace)
        found = [analyze.leaks_of(trace) for trace in traces]
        pinned = [analyze.pinned_leaks(trace) for trace in traces]
    unread = [] if events or time else unread_children(traces[0], traces[1:])
    missing = [_missing(trace) + (unread if trace is traces[0] else []) for trace in traces]
    if as_json:
        own, *others = (
            {
                "source": trace.source,
                "devices": [one.as_dict() for one in each],
                "pinned": host and host.as_dict(),
                "not_looked_at": [*([_PHYSICAL] if _has_physical(trace) else []), *left_out],
            }
            for trace, each, host, left_out in zip(traces, found, pinned, missing, strict=True)
        )
        echo_json({"schema": "cudatool.leaks/1", **own, "processes": others})
    else:
        console = results()
        for trace, each, host, left_out in zip(traces, found, pinned, missing, strict=True):
            if len(traces) > 1:
                console.rule(process_name(trace), align="left")
            for one in each:
                _print(console, f"Device {one.device}", one)
            if not each:
                console.print("Could not tell: no device memory was allocated.")
            if host is not None:
                _print(console, "Pinned host memory", host)
            if _has_physical(trace):
                console.print(f"Not looked at: {_PHYSICAL} (cudatool {_LISTED_BY}).")
            for what in left_out:
                console.print(f"Not looked at: {printable(what)}.", markup=False)
    verdicts = [one.verdict for each in found for one in each]
    of_host = [host.verdict for host in pinned if host is not None]
    if LeakVerdict.LEAKS in (*verdicts, *of_host):
        sys.exit(1)
    kept = any(held.now for trace in traces for held in physical_memory(trace).values())
    if not verdicts or LeakVerdict.UNCLEAR in (*verdicts, *of_host) or kept or any(missing):
        sys.exit(_UNCLEAR)


def _has_physical(trace: Trace) -> bool:
    return len(trace.of_kind(Kind.PHYSICAL_ALLOC)) > 0


def _missing(trace: Trace) -> list[str]:
    """Return what a trace lacks of its recording, in words."""
    return [] if trace.ending.is_complete else [f"the rest of the recording: {ENDINGS[trace.ending].partition(';')[0]}"]


def _print(console: Console, memory: str, result: Leaks) -> None:
    title = {
        LeakVerdict.LEAKS: f"{counted(len(result.found), 'call site')} leak{'s' if len(result.found) == 1 else ''}",
        LeakVerdict.UNCLEAR: "could not tell whether anything leaks",
        LeakVerdict.NONE: "no call site leaks",
    }[result.verdict]
    console.print(f"{memory}: {title}", style="bold")
    steps = result.steps
    if len(steps) and result.doubt is None:
        console.print(f"{len(steps):,} steps: {steps.source}; confidence {steps.confidence}", markup=False)
        if any(leak.per_step for leak in (*result.found, *result.unclear)):
            console.print("Growth counts from the second step on: caches fill in the first.")
    if result.doubt is not None:
        console.print(result.doubt.why, markup=False)
    if result.found:
        _print_table(console, result.found)
    for doubt in dict.fromkeys(leak.doubt for leak in result.unclear):
        if doubt is not None:
            console.print(f"\nCould not tell: {doubt.why}", markup=False)
            _print_table(console, [leak for leak in result.unclear if leak.doubt == doubt])
    if result.unused_growth:
        console.print(
            f"\nReserved memory that no block uses grew by {format_bytes(result.unused_growth)}, until the end. Pools, "
            "graphs and streams that are kept hold what they cached, or memory is fragmented: cudatool snapshot names "
            "which."
        )


def _print_table(console: Console, rows: list[Leak] | tuple[Leak, ...]) -> None:

    with_steps = any(leak.per_step for leak in rows)
    table = new_table("Call site", numbers=(*(("A step", "Grew in") if with_steps else ()), "In all", "Confidence"))
    for leak in rows[:_MOST]:
        of_steps = (
            [f"+{format_bytes(leak.per_step)}", f"{leak.grew:,} of {leak.steps:,}"] if leak.per_step else ["", ""]
        )
        label = plain(leak.compiled.described(leak.label))
        table.add_row(label, *(of_steps if with_steps else ()), f"+{format_bytes(leak.growth)}", str(leak.confidence))
    console.print("", table, sep="\n")
    print_rest(console, len(rows), _MOST, "call sites")
