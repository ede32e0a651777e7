"""What ``cudatool diff`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from cudatool.cli._text import bytes_or_unknown, counted, new_table, plain, print_rest
from cudatool.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import Diff

__all__ = ["print_diff"]

_MOST: Final = 20  # rows of the table


def print_diff(console: Console, found: Sequence[Diff]) -> None:
    """Print two peaks, call site by call site."""
    for one in found:
        _print(console, one)
    if not found:
        console.print("no device memory was allocated in either")


def _print(console: Console, found: Diff) -> None:

    console.print(f"Device {found.device}", style="bold")
    table = new_table("At the peak", numbers=("Before", "After", "Change", "Blocks"))
    table.add_row(
        "Active", format_bytes(found.before), format_bytes(found.after), _signed(found.after - found.before), ""
    )
    before, after = found.reserved_before, found.reserved_after
    change = "" if before is None or after is None else _signed(after - before)
    table.add_row("Reserved, at most", bytes_or_unknown(before), bytes_or_unknown(after), change)
    table.add_section()
    differing = [row for row in found.rows if row.change or row.count_before != row.count_after]
    for row in differing[:_MOST]:
        blocks = f"{row.count_before:,} to {row.count_after:,}"
        table.add_row(
            plain(row.compiled.described(row.label)),
            format_bytes(row.before),
            format_bytes(row.after),
            _signed(row.change),
            blocks,
        )
    console.print(table)
    print_rest(console, len(differing), _MOST, "differing call sites")
    same = len(found.rows) - len(differing)
    if same:
        console.print(f"{counted(same, 'call site')} {'holds' if same == 1 else 'hold'} the same in both")


def _signed(size: int) -> str:

    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)
