"""DuckDB, which reads and writes the Parquet files: an optional part of cudatool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cudatool.errors import UsageError
from cudatool.fleet.schema import TABLES
from cudatool.fleet.tables import NULL, Columns

__all__ = ["connect", "write_table"]


def connect(**settings: Any) -> Any:
    """Return a new database in memory.

    Raises
    ------
    UsageError
        DuckDB is not installed.
    """
    try:
        import duckdb
    except ImportError as error:
        raise UsageError("this needs DuckDB: pip install 'cudatool[fleet]'") from error
    return duckdb.connect(":memory:", config={"autoinstall_known_extensions": False, **settings})


def write_table(database: Any, path: Path, table: str, columns: Columns) -> None:
    """Write one table of a part as a Parquet file; no columns are no rows."""
    schema = TABLES[table]
    if not columns:
        nothing = ", ".join(f'CAST(NULL AS {c.type}) AS "{c.name}"' for c in schema)
        source, chosen = "(SELECT 1) WHERE false", nothing
    else:
        database.register("columns", {column.name: columns[column.name] for column in schema})
        chosen = ", ".join(_cast(column.name, column.type, columns) for column in schema)
        source = "columns"
    target = str(path).replace("'", "''")
    database.execute(f"COPY (SELECT {chosen} FROM {source}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")
    if columns:
        database.unregister("columns")


def _cast(name: str, type: str, columns: Mapping[str, Any]) -> str:
    value = f'"{name}"'
    if columns[name].dtype.kind == "i" and columns[name].dtype.itemsize == 8:
        value = f"NULLIF({value}, {NULL + 1} - 1)"  # the smallest number is no literal
    return f'CAST({value} AS {type}) AS "{name}"'
