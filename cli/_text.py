"""What several commands do to print tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["new_table", "plain", "print_rest"]


def new_table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without lines whose first columns hold text, folded where needed, and the others numbers."""
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_rest(console: Console, count: int, shown: int, what: str) -> None:
    """Say how many rows were left out, if any."""
    if count > shown:
        console.print(f"... and {count - shown:,} more {what} (--json has all)")


def plain(name: str) -> str:
    """Return a name from a file as plain text: no markup, no control characters."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in name))
