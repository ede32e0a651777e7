"""The table that ``cudatool run`` prints when the program has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cudatool.cli._text import counted, plain
from cudatool.text import short_names
from cudatool.trace.events import Kind, WarningFlag
from cudatool.units import format_bytes, format_time

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.trace.model import Trace

__all__ = ["print_summary"]

_MOST: Final = 5  # rows of each part of the table


def print_summary(console: Console, trace: Trace, status: int = 0) -> None:
    """Print what was recorded: peak memory, allocations, kernels by time, warnings."""
    from rich.table import Table

    from cudatool.overview.summary import summary_of  # not before the program has ended

    summary = summary_of(trace)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("Device", plain(trace.header.get("device", "")))
    if status:
        table.add_row("Exit status", str(status))
    table.add_row("Events", f"{summary.events:,}")
    for device in summary.devices:
        label = f"Device {device.device}" if len(summary.devices) > 1 else "Memory"
        peak = f"peak {format_bytes(device.peak.allocated)} allocated, {format_bytes(device.peak_reserved)} reserved"
        failed = f", {device.ooms:,} failed: out of memory" if device.ooms else ""
        table.add_row(label, f"{peak}; {counted(device.allocations, 'allocation')}{failed}")
        for site in device.still_live[:1]:
            held = f"{format_bytes(device.now.allocated)} at the end, most of it from {site.label}"
            table.add_row("Not freed", plain(held))
    shown = summary.kernels[:_MOST]
    names = short_names([kernel.name for kernel in shown])
    for index, (kernel, name) in enumerate(zip(shown, names, strict=True)):
        clock = " (simulated)" if summary.simulated else ""
        time = "" if kernel.time is None else f", {format_time(kernel.time)} on the device{clock}"
        text = f"{name}: {counted(kernel.launches, 'launch')}{time}"
        table.add_row("Kernels" if not index else "", plain(text))
    if len(summary.kernels) > _MOST:
        table.add_row("", f"and {counted(len(summary.kernels) - _MOST, 'more kernel')}")
    warned = trace.of_kind(Kind.WARNING)
    warnings = [trace.names[int(name)] for name in warned["name"][warned["flags"] & WarningFlag.SHARED == 0]]
    for index, text in enumerate(list(dict.fromkeys([*warnings, *summary.notes]))[:_MOST]):
        table.add_row("Warnings" if not index else "", plain(text))
    console.print("", table, sep="\n")
