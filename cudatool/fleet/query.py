"""SQL over a data set: a view for each table, and nothing else that a question could read, write or change."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from cudatool.errors import UsageError
from cudatool.fleet.convert import PART, parts_of
from cudatool.fleet.database import connect, need_duckdb
from cudatool.fleet.schema import LAYOUT, PARTITIONS, TABLES, Column
from cudatool.limits import QUESTION_MEMORY
from cudatool.text import printable, quoted, shortened
from cudatool.units import format_bytes, parse_bytes

__all__ = ["MEMORY", "PREFIXES", "Answer", "ask", "check_question", "opened"]

MEMORY: Final = f"{QUESTION_MEMORY >> 30}GiB"
"""Of DuckDB, which writes to a temporary directory what does not fit."""

PREFIXES: Final = ("", "against_")
"""Before the names of the tables of each data set."""

_PIECE: Final = 4096  # rows that are Python objects at once
_LONGEST: Final = 300  # characters of what DuckDB says
_LEAST: Final = 64 << 20  # below, DuckDB cannot even open many files
_TYPES: Final = ", ".join(f"'{column.name}': {column.type}" for column in PARTITIONS)


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows as they come: `rows` can be read once, while the data set is open."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def opened(
    *datasets: Path, memory: str = MEMORY, tables: str | None = None, parts: Sequence[Path] | None = None
) -> Iterator[Any]:
    """Return a database with a view for each table; those of a second data set are called ``against_TABLE``.

    It can read the files of the data sets, and cannot load extensions, reach the network, or be set up otherwise. That
    holds before the first file is opened: a stranger may have made the data set.

    Parameters
    ----------
    tables
        A question: only tables with a name that occurs in it get a view. A view costs a look at the names of its files.
    parts
        Folders of parts: the views are of these only.

    Raises
    ------
    UsageError
        DuckDB is not installed, or a directory is no data set, or has what no conversion writes.
    """
    duckdb = need_duckdb()

    for dataset in datasets:
        _check_parts(dataset)
        _check_links(dataset.resolve(), [dataset.resolve()] if parts is None else list(parts))
    with TemporaryDirectory(prefix="cudatool-query-") as spilled:
        settings = {"memory_limit": f"{_memory(memory)}B", "temp_directory": spilled, "preserve_insertion_order": False}
        database = connect(autoload_known_extensions=False, python_enable_replacements=False, **settings)
        try:
            # Files are checked by their names, and patterns as they are written.
            folders_of_all = (*(dataset.resolve() for dataset in datasets), Path(spilled))
            allowed = {f"{name}/" for folder in folders_of_all for name in (folder, _pattern(folder))}
            folders = ", ".join(map(_text, sorted(allowed)))
            database.execute(f"SET allowed_directories = [{folders}]")
            database.execute("SET enable_external_access = false")
            database.execute("SET lock_configuration = true")
            for dataset, prefix in zip(datasets, PREFIXES, strict=False):
                _make_views(database, dataset.resolve(), prefix, tables, parts)
            yield database
        except duckdb.Error as error:
            raise UsageError(_said(error)) from error
        finally:
            database.close()


def ask(database: Any, question: str) -> Answer:
    """Return the answer to one SELECT.

    Raises
    ------
    UsageError
        DuckDB refuses the question, or it is not one SELECT.
    """
    import duckdb

    check_question(database, question)
    try:
        result = database.execute(question)
        described = result.description or ()
    except duckdb.Error as error:
        raise UsageError(_said(error)) from error
    for name, type, *_ in described:
        if "WITH TIME ZONE" in str(type):  # DuckDB needs another package for it
            raise UsageError(f"column {quoted(name)} has a time zone: cast it to VARCHAR")
    return Answer(tuple(str(c[0]) for c in described), tuple(str(c[1]) for c in described), _rows(result))


def check_question(database: Any, question: str) -> None:
    """Check that a question is one SELECT, which only reads.

    Raises
    ------
    UsageError
        It is not.
    """
    import duckdb

    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the question is no UTF-8") from error
    try:
        statements = database.extract_statements(question)
    except duckdb.Error as error:
        raise UsageError(_said(error)) from error
    if [statement.type.name for statement in statements] != ["SELECT"]:
        raise UsageError("a question is one SELECT (or FROM, WITH, DESCRIBE, SHOW TABLES): a data set is only read")


def _rows(result: Any) -> Iterator[tuple[Any, ...]]:
    import duckdb

    try:
        while piece := result.fetchmany(_PIECE):
            yield from piece
    except duckdb.Error as error:
        raise UsageError(_said(error)) from error
    except OverflowError as error:  # an interval of 30,000 centuries
        raise UsageError(f"a value has no equivalent in Python: cast its column to VARCHAR ({error})") from error


def _said(error: Exception) -> str:
    """Return what DuckDB says on one line, without the picture of the place."""
    return shortened(printable(" ".join(str(error).split("\n\n")[0].split("LINE 1:")[0].split())), _LONGEST)


def _memory(text: str) -> int:
    size = parse_bytes(text)
    if size < _LEAST:
        raise UsageError(f"--memory {quoted(text)}: at least {format_bytes(_LEAST)}")
    return size


def _check_parts(dataset: Path) -> None:
    """Refuse a directory that has no part of a data set."""
    if next(dataset.glob(f"run=*/rank=*/trace=*/{PART}"), None) is None:
        has_files = next(dataset.glob("*"), None) is not None
        example = f"{dataset} --to parquet -o DATASET" if has_files else f"TRACES --to parquet -o {dataset}"
        raise UsageError(f"{dataset} is no data set; make one with `cudatool export {example}`")


def _check_links(home: Path, folders: list[Path]) -> None:
    """Refuse a data set with a link out of it: a stranger's would show other files of the user who asks."""
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        if not Path(entry.path).resolve().is_relative_to(home):
                            raise UsageError(f"{quoted(entry.path)} leads out of the data set; remove it")
                    elif entry.is_dir():
                        folders.append(Path(entry.path))
        except OSError:  # DuckDB says why, of what it has to read
            continue


def _make_views(database: Any, dataset: Path, prefix: str, tables: str | None, parts: Sequence[Path] | None) -> None:
    import duckdb

    folder = _pattern(dataset)
    oldest = _oldest_layout(dataset)
    # Looking for columns by their names opens all files: only where some parts may not have all of them.
    more = ", union_by_name = true" if oldest < LAYOUT else ""
    for table in TABLES:
        if tables is None or table in tables.lower() or "show" in tables.lower():
            places = [f"{folder}/run=*/rank=*/trace=*"] if parts is None else map(_pattern, parts)
            files = f"[{', '.join(_text(f'{place}/{table}.parquet') for place in places)}]"
            source = f"read_parquet({files}, hive_partitioning = true, hive_types = {{{_TYPES}}}{more})"
            try:
                there = _columns(database, source) if more else set()
                own = (_cast(c, is_null=c.since > oldest and c.name not in there) for c in TABLES[table])
                names = ", ".join((*(column.name for column in PARTITIONS), *own))
                database.execute(f"CREATE VIEW {prefix}{table} AS SELECT {names} FROM {source} file")
            except duckdb.Error as error:
                raise UsageError(f"the table {table} of {dataset} cannot be read: {_said(error)}") from error


def _cast(column: Column, *, is_null: bool) -> str:
    """Return a column of a view; a cast to the type that it has costs nothing."""
    return f"CAST({'NULL' if is_null else f'file.{column.name}'} AS {column.type}) AS {column.name}"


def _oldest_layout(dataset: Path) -> int:
    """Return the layout of the part that was written first."""
    said = (part.get("layout") for _, part in parts_of(dataset).values())
    return min((layout if isinstance(layout, int) else 1 for layout in said), default=1)


def _columns(database: Any, source: str) -> set[str]:
    return {str(row[0]) for row in database.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()}


def _pattern(folder: Path) -> str:
    """Return a pattern that matches a folder alone: in brackets, a sign stands for itself."""
    return re.sub(r"[*?\[]", lambda sign: f"[{sign[0]}]", str(folder))


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
