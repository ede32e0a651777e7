"""DuckDB, which reads and writes the Parquet files: an optional part of cudatool."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cudatool.errors import OutputError, UsageError
from cudatool.fleet.schema import TABLES
from cudatool.fleet.tables import NULL, Columns

__all__ = ["connect", "need_duckdb", "write_table", "writer"]


def need_duckdb() -> Any:
    """Return the module.

    Raises
    ------
    UsageError
        DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise UsageError("this needs DuckDB: pip install 'cudatool[fleet]'") from error
    return duckdb


def connect(**settings: Any) -> Any:
    """Return a new database in memory; raise UsageError if DuckDB is not installed."""
    return need_duckdb().connect(":memory:", config={"autoinstall_known_extensions": False, **settings})


def writer() -> Any:
    """Return a connection to write tables with. All are to one database: a new one costs as much as four tables."""
    return _written_from().cursor()


@cache
def _written_from() -> Any:
    return connect(threads=1)


def write_table(database: Any, path: Path, table: str, columns: Columns) -> None:
    """Write one table of a part as a Parquet file; no columns are no rows, too."""
    if not any(map(len, columns.values())):  # most tables of most traces, and the same bytes each time
        path.write_bytes(_empty(table))
        return
    schema = TABLES[table]
    database.register("columns", {column.name: columns[column.name] for column in schema})
    _copy(database, f"{', '.join(_cast(column.name, column.type, columns) for column in schema)} FROM columns", path)
    database.unregister("columns")


@cache
def _empty(table: str) -> bytes:
    """Return a Parquet file that has the columns of a table and no rows."""
    names = ", ".join(f'CAST(NULL AS {column.type}) AS "{column.name}"' for column in TABLES[table])
    with closing(writer()) as database, TemporaryDirectory(prefix="cudatool-empty-") as folder:
        path = Path(folder) / "empty.parquet"
        _copy(database, f"{names} WHERE false", path)
        return path.read_bytes()


def _copy(database: Any, selected: str, path: Path) -> None:
    target = str(path).replace("'", "''")
    try:
        database.execute(f"COPY (SELECT {selected}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")
    except need_duckdb().IOException as error:  # such as a full disk
        raise OutputError(f"DuckDB cannot write {path}: {error}") from error


def _cast(name: str, type: str, columns: Mapping[str, Any]) -> str:
    value = f'"{name}"'
    column = columns[name]
    # DuckDB takes longer to plan NULLIF than to write a short column: only where there is a NULL.
    if column.dtype.kind == "i" and column.dtype.itemsize == 8 and (column == NULL).any():
        value = f"NULLIF({value}, {NULL + 1} - 1)"  # the smallest number is no literal
    return f'CAST({value} AS {type}) AS "{name}"'
