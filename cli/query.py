"""``cudatool query``: SQL over a data set."""

from __future__ import annotations

import csv
import math
import sys
from contextlib import contextmanager
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cudatool.cli._command import Files, command, option
from cudatool.cli._engine import engine_option, memory_option
from cudatool.cli._text import new_table, plain, results
from cudatool.fleet.cluster import asked_on, ray_cluster
from cudatool.fleet.query import ask, opened
from cudatool.progress import step
from cudatool.text import json_text, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cudatool.fleet.query import Answer

__all__ = ["query"]

_MOST = 1000  # rows of the table
_LEGIBLE = 12  # characters of a column: folded to fewer, names and numbers cannot be read
_GAP = 2  # between columns


@command(
    examples=[
        ("The ranks that need most memory", 'cudatool query DIR "FROM ranks ORDER BY peak_active DESC LIMIT 5"'),
        ("The columns of a table", 'cudatool query DIR "DESCRIBE allocations"'),
    ],
)
@click.argument("dataset", type=Files(path_type=Path), metavar="DIR")
@click.argument("sql", metavar="SQL")
@option(
    "--format",
    "kind",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    group="Output",
    help=f"table: at most {_MOST:,} rows, one below the other if the terminal is too narrow. "
    "csv and json: all; csv has control characters as \\x1b.",
)
@option("--json", "as_json", is_flag=True, help='Short for --format json ("schema": "cudatool.query/1").')
@memory_option
@engine_option
def query(dataset: Path, sql: str, kind: str, as_json: bool, memory: str, engine: str) -> None:
    """Ask a data set of traces one question, in DuckDB's SQL.

    DIR is what `cudatool export --to parquet` wrote. Its tables are ranks, steps, sites, leaks, checkpoints,
    allocations, segments, kernels, stacks and events; `DESCRIBE TABLE` names the columns. Each has the columns run,
    rank and trace. SQL is one SELECT: it reads no other file, writes none, and reaches no network. With --engine ray it
    is about one table, and filters or computes rows, or groups them by rank or trace; the rows come in no order.

    Exit status: 0 answered, 2 it could not be.
    """

    with step("cudatool query"), _answered(engine, dataset, sql, memory) as answer:
        if as_json or kind == "json":
            _print_json(answer)
        elif kind == "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(map(_csv, answer.columns))
            writer.writerows([_csv(value) for value in row] for row in answer.rows)
        else:
            _print_table(answer)


@contextmanager
def _answered(engine: str, dataset: Path, sql: str, memory: str) -> Iterator[Answer]:
    if engine == "duckdb":
        with opened(dataset, memory=memory, tables=sql) as database:
            yield ask(database, sql)
    else:
        with ray_cluster() as cluster, asked_on(cluster, dataset, sql, memory=memory) as answer:
            yield answer


def _print_table(answer: Answer) -> None:
    """Print a table, or the rows one below the other where the terminal is too narrow for all columns."""
    console = results()
    values = list(islice(answer.rows, _MOST + 1))
    rows = [[printable("" if value is None else str(value)) for value in row] for row in values[:_MOST]]
    names = [printable(name) for name in answer.columns]
    widest = (max(map(len, column)) for column in zip(names, *rows, strict=True))
    if sum(min(width, _LEGIBLE) + _GAP for width in widest) - _GAP <= console.width:
        table = new_table()
        for number, name in enumerate(names):
            is_number = all(isinstance(row[number], int | float | None) for row in values)
            table.add_column(plain(name), justify="right" if is_number else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(plain, row))
        console.print(table)
    else:
        longest = max(map(len, names))
        if not rows:
            console.print("No rows.")
        for number, row in enumerate(rows, 1):
            if number > 1:
                click.echo()
            console.print(f"Row {number:,}", style="bold")
            for name, value in zip(names, row, strict=True):
                click.echo(f"  {name:{longest}}  {value}".rstrip())
    if len(values) > _MOST:
        console.print(f"... more than {_MOST:,} rows (--format csv has all)")


def _csv(value: Any) -> Any:
    return (
        printable(value)
        if isinstance(value, str)
        else value
        if isinstance(value, int | float)
        else ""
        if value is None
        else printable(str(value))
    )


def _print_json(answer: Answer) -> None:
    """Print the answer row by row: it may be larger than memory."""
    head = {"schema": "cudatool.query/1", "columns": list(answer.columns), "types": list(answer.types)}
    click.echo(json_text(head, indent=None)[:-1] + ', "rows": [', nl=False)
    for number, row in enumerate(answer.rows):
        click.echo(("," if number else "") + "\n" + json_text([_plain(value) for value in row], indent=None), nl=False)
    click.echo("\n]}")


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: what is no number there, such as a date or infinity, as text."""
    if isinstance(value, Decimal):
        value = float(value)
    is_json = value is None or isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    return value if is_json else str(value)
