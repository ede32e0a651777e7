"""``cudatool snapshot``: where the memory went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import DeviceMemory, Moment, Summary
    from cudatool.trace.model import Trace

__all__ = ["snapshot"]

_BESIDE = "\0beside"  # --html without a value: no file can have this name
_MOST = 8  # rows of each table


@click.command()
@click.argument("source", required=False, type=click.Path(path_type=Path))
@click.option(
    "--html",
    "html",
    is_flag=False,
    flag_value=_BESIDE,
    metavar="[FILE]",
    help="Write a page that needs no network. Default: beside SOURCE, with the ending .html.",
)
@click.option("--json", "as_json", is_flag=True, help='Print JSON ("schema": "cudatool.snapshot/1"); bytes and ns.')
@click.option("--torch", type=click.Path(path_type=Path), metavar="FILE", help="Write a pickle for PyTorch's viewer.")
@click.option("-f", "--force", is_flag=True, help="Overwrite files that exist.")
def snapshot(source: Path | None, html: str | None, as_json: bool, torch: Path | None, force: bool) -> None:
    """Show where the memory went.

    SOURCE is a trace that `cudatool run` wrote, or a pickle from torch.cuda.memory._dump_snapshot(), also
    compressed with xz or gzip. Default: the newest trace in this directory.
    """
    from rich.console import Console

    from cudatool import analyze
    from cudatool.errors import UsageError
    from cudatool.units import format_bytes

    if source is None and html and html != _BESIDE and not html.lower().endswith((".html", ".htm")):
        source, html = Path(html), _BESIDE  # `cudatool snapshot --html SOURCE`: the option took the argument
    if source is None:
        from cudatool.trace.reader import newest_trace

        source = newest_trace(Path())
        if source is None:
            raise UsageError("no trace (*.ctrace) in this directory; make one with `cudatool run WORKLOAD.py`")
    page = _page_path(source, html)
    for path in (page, torch):
        if path is not None and path.exists() and not force:
            raise UsageError(f"{path} exists; add -f to overwrite it")

    report = analyze.report(_read(source))
    if as_json:
        document = {"schema": "cudatool.snapshot/1", **report.summary.as_dict()}
        click.echo(json.dumps(document, indent=2))
    else:
        _print(Console(highlight=False), report.summary)

    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    if page is not None:
        from cudatool import viz

        viz.write_report(report, page)
        messages.print(f"Wrote {page} ({format_bytes(page.stat().st_size)})", markup=False)
        messages.print("Next: open it in a browser; it needs no network", markup=False)
    if torch is not None:
        from cudatool.collect import torch_snapshot

        state = analyze.segments_at(report.blocks, report.segments, len(report.trace.records) - 1)
        torch_snapshot.write(torch, report.trace, analyze.torch_segments(report.trace, state))
        messages.print(f"Wrote {torch} ({format_bytes(torch.stat().st_size)})", markup=False)
        messages.print("Next: drop it on https://pytorch.org/memory_viz", markup=False)
    if page is None and torch is None and not as_json:
        messages.print(f"Next: cudatool snapshot {source} --html", markup=False)


def _page_path(source: Path, html: str | None) -> Path | None:
    if html is None:
        return None
    if html != _BESIDE:
        return Path(html)
    name = source.name
    for ending in (".xz", ".gz", ".ctrace", ".pickle", ".pkl"):
        name = name.removesuffix(ending)
    return source.with_name(f"{name}.html")


def _read(source: Path) -> Trace:
    """Return the trace in a file of either kind."""
    from cudatool.collect import torch_snapshot
    from cudatool.errors import FileFormatError, UsageError
    from cudatool.trace import reader

    try:
        if reader.is_trace(source):
            return reader.read(source)
        if torch_snapshot.is_snapshot(source):
            return torch_snapshot.read(source)
    except OSError as error:
        raise UsageError(f"cannot read {source}: {error.strerror}") from error
    raise FileFormatError(str(source), "neither a cudatool trace nor a PyTorch memory snapshot")


def _print(console: Console, summary: Summary) -> None:
    from rich.table import Table

    from cudatool.units import format_bytes, format_time

    took = f", {format_time(summary.duration)}" if summary.duration else ""
    where = f", {summary.recorded_on}" if summary.recorded_on else ""
    console.print(f"{summary.source}: {summary.events:,} events{took}{where}", markup=False, soft_wrap=True)
    for note in summary.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if not summary.devices:
        console.print("no device memory was allocated")
    for device in summary.devices:
        _print_device(console, device)
    if summary.kernels:
        table = Table("Kernel", title="Kernels", title_justify="left", box=None, pad_edge=False)
        table.add_column("Launches", justify="right")
        table.add_column("Device time", justify="right")
        for kernel in summary.kernels[:_MOST]:
            time = "not recorded" if kernel.time is None else format_time(kernel.time)
            table.add_row(_text(kernel.name), f"{kernel.launches:,}", time)
        console.print("", table, sep="\n")
        _print_rest(console, len(summary.kernels), "kernels")
    if summary.copies:
        table = Table("Copy", title="Copies", title_justify="left", box=None, pad_edge=False)
        for column in ("Count", "Bytes", "Device time"):
            table.add_column(column, justify="right")
        for copies in summary.copies:
            time = "not recorded" if copies.time is None else format_time(copies.time)
            table.add_row(copies.direction, f"{copies.count:,}", format_bytes(copies.size), time)
        console.print("", table, sep="\n")


def _print_device(console: Console, device: DeviceMemory) -> None:
    from rich.table import Table

    from cudatool.units import format_bytes

    failed = f", {device.ooms} failed: out of memory" if device.ooms else ""
    console.print(f"\nDevice {device.device}: {device.allocations:,} allocations{failed}", style="bold")
    table = Table("", box=None, pad_edge=False)
    table.add_column("At the peak", justify="right")
    table.add_column("At the end", justify="right")
    table.add_column("Highest", justify="right")

    def row(name: str, attribute: str, highest: int | None) -> None:
        at = [format_bytes(getattr(moment, attribute)) for moment in (device.peak, device.now)]
        table.add_row(name, *at, "" if highest is None else format_bytes(highest))

    row("Allocated", "allocated", device.peak.allocated)
    row("  of it requested", "requested", None)
    row("Active", "active", device.peak_active)
    row("Reserved", "reserved", device.peak_reserved)
    row("Largest free block", "largest_free", None)

    def share(moment: Moment) -> str:
        return f"{moment.fragmentation:.1%}"

    table.add_row("Fragmentation", share(device.peak), share(device.now), "")
    console.print(table)
    for title, sites in (("Held at the peak", device.at_peak), ("Never freed", device.still_live)):
        if not sites:
            continue
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("Call site", overflow="fold")
        table.add_column("Blocks", justify="right")
        table.add_column("Bytes", justify="right")
        for site in sites[:_MOST]:
            table.add_row(_text(site.label), f"{site.count:,}", format_bytes(site.size))
        console.print("", table, sep="\n")
        _print_rest(console, len(sites), "call sites")


def _print_rest(console: Console, count: int, what: str) -> None:
    if count > _MOST:
        console.print(f"... and {count - _MOST} more {what} (--json has all)")


def _text(name: str) -> str:
    """Return a name from a file as plain text: no markup, no control characters."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in name))
