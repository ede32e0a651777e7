"""How commands print: tables, messages, JSON, and text from files, made printable."""

from __future__ import annotations

import functools
import io
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, cast

import click

from cudatool.text import json_text, printable
from cudatool.units import counted, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "bytes_or_unknown",
    "counted",
    "echo_json",
    "html_of",
    "in_colour",
    "messages",
    "new_table",
    "path_from",
    "plain",
    "print_rest",
    "print_rows",
    "print_table",
    "prose_width",
    "results",
    "say",
    "text_of",
]

_NARROWEST = 72  # columns; in fewer, tables would lose text, while a terminal that wraps lines loses nothing
_WIDEST_PROSE = 120  # longer lines are hard to read
_PROSE_IN_A_FILE = 100


def results() -> Console:
    """Return the console for results on stdout; it can print any name on any terminal."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    console = _console_type()(highlight=False, emoji=False)
    console.width = max(console.width, _NARROWEST)
    return console


def in_colour() -> bool:
    """Return whether results on stdout have colours, for text that no console prints."""
    console = results()
    return console.color_system is not None and not console.no_color


def prose_width() -> int:
    """Return how many columns the lines of a text on stdout may have: as ``COLUMNS``, else the terminal, allows."""
    return min(shutil.get_terminal_size((_PROSE_IN_A_FILE, 0)).columns, _WIDEST_PROSE)


def text_of(print_to: Callable[[Console], None], width: int) -> str:
    """Return what a function prints to a console of so many columns, without styles."""
    written = io.StringIO()
    style: dict[str, Any] = {"highlight": False, "emoji": False, "force_jupyter": False}  # else rich shows it itself
    print_to(_console_type()(file=written, width=width, color_system=None, **style))
    return written.getvalue().strip("\n")


def html_of(print_to: Callable[[Console], None], width: int) -> str:
    """Return the same as HTML with the console's styles; what is printed is text in it."""
    style: dict[str, Any] = {"highlight": False, "emoji": False, "force_jupyter": False}
    console = _console_type()(file=io.StringIO(), width=width, record=True, **style)
    print_to(console)
    frame = '<pre style="line-height:1.25;font-family:Menlo,Consolas,monospace;overflow-x:auto">{code}</pre>'
    return console.export_html(inline_styles=True, code_format=frame)


class _Stderr:
    """Standard error as it is now. Where it is full or closed, messages have no reader: the exit status still tells."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            if sys.stderr is not None:
                sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            if sys.stderr is not None:
                sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def messages() -> Console:
    """Return the console for warnings and next steps on stderr, each on one line."""
    return _console_type()(file=cast("IO[str]", _Stderr()), highlight=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    """Print one line to stderr, with any names in it made printable."""
    click.echo(printable(text), file=cast("IO[str]", _Stderr()))


def path_from(folder: str, path: str) -> str:
    """Return an absolute path as it is typed in `folder`: relative if it lies there.

    Commands that run a program pass the directory that they began in: the program may have changed to another one.
    """
    relative = os.path.relpath(path, folder)
    if relative.startswith(".."):
        return path
    return os.path.join(os.curdir, relative) if relative.startswith("-") else relative  # no option


def bytes_or_unknown(size: int | None) -> str:
    """Return bytes with a unit, or a note that the recording does not have them."""
    return "unknown" if size is None else format_bytes(size)


def echo_json(value: Any) -> None:
    """Print a result as JSON."""
    click.echo(json_text(value))


@functools.cache
def _console_type() -> type[Console]:
    """Return the class of our consoles; rich is slow to import."""
    from rich.console import Console
    from rich.text import Text

    class Printable(Console):
        """Makes every printed text printable and puts it on one line, except for leading empty lines."""

        def on_broken_pipe(self) -> None:
            raise

        def render_str(self, text: str, **options: Any) -> Text:
            body = text.lstrip("\n")
            return super().render_str(text[: len(text) - len(body)] + printable(body), **options)

    return Printable


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without lines whose first columns hold text, folded where needed, and the others numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_table(console: Console, title: str, table: Table) -> None:
    """Print a title and a table, if it has rows; rich would make a table's own title as narrow as the table."""
    if table.row_count:
        console.print(f"\n{title}", style="bold")
        console.print(table)


def print_rows(console: Console, table: Table) -> None:
    """Print a table if it has rows."""
    if table.row_count:
        console.print(table)


def print_rest(console: Console, count: int, shown: int, what: str) -> None:
    """Print how many rows of `what` (a plural; its last letter is dropped for one row) were left out, if any."""
    if count > shown:
        console.print(f"... and {count - shown:,} more {what if count - shown > 1 else what[:-1]} (--json has all)")


def plain(name: str) -> str:
    """Return a name from a file as text without markup, on one line and printable."""
    from rich.markup import escape

    return escape(printable(name))
