"""``cudatool run``: record a program."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cudatool.cli._options import device_option, split_workload, workload_arguments

if TYPE_CHECKING:
    from cudatool.trace.model import Trace

__all__ = ["run"]

_MOST = 5  # rows of each part of the table


@click.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
@click.option("-o", "--output", metavar="FILE", help="The trace. Default: NAME.PID.ctrace in this directory.")
@click.option("-f", "--force", is_flag=True, help="Overwrite files that exist.")
@device_option
@click.option("--html", metavar="FILE", help="Also write the page that `cudatool snapshot --html` makes.")
@click.option("--no-stacks", is_flag=True, help="Do not record Python stacks.")
@workload_arguments
def run(
    output: str | None,
    force: bool,
    device: str | None,
    html: str | None,
    no_stacks: bool,
    module: str | None,
    workload: tuple[str, ...],
) -> None:
    """Run a Python program and record what it does on the device.

    The program runs as `python` would run it: arguments, __main__, exit status and tracebacks are its own. Recorded
    are the operations of cudatool's runtime, on a GPU what the program does through PyTorch, and on the software
    device the driver calls of any cuda.core or cuda.bindings program.
    """
    from cudatool.errors import OutputError
    from cudatool.recording import record
    from cudatool.workload import Workload

    program = Workload(*split_workload(module, workload))
    program.check()
    path = os.path.abspath(output or f"{program.name}.{os.getpid()}.ctrace")
    page = os.path.abspath(html) if html else None  # the program may change directory
    if page and os.path.exists(page) and not force:
        raise OutputError(f"{html} exists; add -f to overwrite it")
    if page and not os.path.isdir(os.path.dirname(page)):
        raise OutputError(f"cannot write {html}: its directory does not exist")
    with record(path, device=device, with_stacks=not no_stacks, force=force) as recorder:
        status = program.run()
        recorder.add_facts({"exit_status": status})

    from cudatool.trace.reader import read

    trace = read(path)
    _print_summary(trace, status)
    _wrote(path)
    if page:
        from cudatool import viz

        viz.write_page(trace, page)
        _wrote(page)
    else:
        _say(f"Next: cudatool snapshot {_short(path)} --html")
    sys.exit(status)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _wrote(path: str) -> None:
    from cudatool.units import format_bytes

    _say(f"Wrote {_short(path)} ({format_bytes(Path(path).stat().st_size)})")


def _print_summary(trace: Trace, status: int) -> None:
    """Say on stderr what was recorded: peak memory, allocations, kernels by time, warnings."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from cudatool.analyze import report
    from cudatool.trace.events import Kind
    from cudatool.units import format_bytes, format_time

    summary = report(trace).summary
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("Device", escape(str(trace.header.get("device", ""))))
    if status:
        table.add_row("Exit status", str(status))
    table.add_row("Events", f"{summary.events:,}")
    for device in summary.devices:
        label = f"Device {device.device}" if len(summary.devices) > 1 else "Memory"
        peak = f"peak {format_bytes(device.peak.allocated)} allocated, {format_bytes(device.peak_reserved)} reserved"
        table.add_row(label, f"{peak}; {device.allocations:,} allocations")
        for site in device.still_live[:1]:
            held = f"{format_bytes(device.now.allocated)} at the end, most of it from {site.label}"
            table.add_row("Not freed", escape(held))
    for index, kernel in enumerate(summary.kernels[:_MOST]):
        time = "" if kernel.time is None else f", {format_time(kernel.time)} on the device"
        launches = "1 launch" if kernel.launches == 1 else f"{kernel.launches:,} launches"
        table.add_row("Kernels" if not index else "", escape(f"{kernel.name}: {launches}{time}"))
    if len(summary.kernels) > _MOST:
        table.add_row("", f"and {len(summary.kernels) - _MOST} more")
    warnings = [trace.names[int(name)] for name in trace.of_kind(Kind.WARNING)["name"]]
    for index, text in enumerate([*dict.fromkeys(warnings), *summary.notes][:_MOST]):
        table.add_row("Warnings" if not index else "", escape(text))
    console = Console(stderr=True, highlight=False)
    console.print("", table, sep="\n")
