"""``cudatool leaks``: what grows step after step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cudatool.cli._command import command, option
from cudatool.cli._options import source_argument

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import Leaks

__all__ = ["leaks"]

_MOST = 20  # rows of the table


@command(
    examples=[
        ("The newest trace in this directory", "cudatool leaks"),
        ("A snapshot of PyTorch", "cudatool leaks snapshot.pickle"),
    ],
)
@source_argument()
@option("--json", "as_json", is_flag=True, help='Print JSON ("schema": "cudatool.leaks/1"); bytes.')
def leaks(source: Path | None, as_json: bool) -> None:
    """Find call sites that hold more memory after every step.

    SOURCE is a trace that `cudatool run` wrote, or a pickle from torch.cuda.memory._dump_snapshot(). Default: the
    newest trace in this directory.

    Steps are the ranges of torch.profiler, of optimizers, or your own (cudatool.range); without any, the sequence of
    allocations itself where it repeats. How sure that is stands with each finding. What grows for two or three steps
    only is not looked at.

    Exit status: 0 nothing grows, 1 something does, 2 the file cannot be read.
    """
    from cudatool import analyze
    from cudatool.cli._sources import newest, read_trace, say_notes
    from cudatool.cli._text import results

    trace = read_trace(source or newest())
    say_notes(trace)
    found = analyze.leaks_of(trace)
    if as_json:
        document = {"schema": "cudatool.leaks/1", "source": trace.source, "devices": [one.as_dict() for one in found]}
        click.echo(json.dumps(document, indent=2))
    else:
        console = results()
        for one in found:
            _print(console, one)
        if not found:
            console.print("no device memory was allocated")
    if any(one.found for one in found):
        sys.exit(1)


def _print(console: Console, found: Leaks) -> None:
    from cudatool.cli._text import new_table, plain, print_rest
    from cudatool.units import format_bytes

    steps = found.steps
    number = len(found.found)
    grow = "1 call site grows" if number == 1 else f"{number or 'no'} call sites grow"
    console.print(f"Device {found.device}: {grow}", style="bold")
    if not len(steps):
        console.print(f"{steps.source}; name the steps of your program with a range to be sure", markup=False)
        return
    console.print(f"{len(steps):,} steps: {steps.source}; confidence {steps.confidence}", markup=False)
    if not found.found:
        return
    table = new_table("Call site", numbers=("A step", "Steps", "In all", "Confidence"))
    for leak in found.found[:_MOST]:
        table.add_row(
            plain(leak.label),
            f"+{format_bytes(leak.per_step)}",
            f"{leak.grew:,} of {leak.steps:,}",
            f"+{format_bytes(leak.growth)}",
            str(leak.confidence),
        )
    console.print("", table, sep="\n")
    print_rest(console, len(found.found), _MOST, "call sites")
