"""Data sets of traces that somebody else made: Parquet files that can be read, and say what no conversion writes."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hostile_traces import ESCAPES, VALUES

from cudatool.cli._sources import read_trace
from cudatool.fleet.convert import Input, convert
from cudatool.fleet.schema import TABLES

__all__ = ["HAS_DUCKDB", "dataset_of", "mutate", "rewrite"]

HAS_DUCKDB = importlib.util.find_spec("duckdb") is not None

_EXPRESSIONS = (
    *("NULL", "-1", "1e999::DOUBLE", "'nan'::DOUBLE", "'x'", "''", "[1, 2]", "{'a': 1}", "true", "DATE '2026-01-01'"),
    *("INTERVAL 1 DAY", "'\\xFF'::BLOB", "TIMESTAMPTZ '2026-01-01'", "-9223372036854775808::BIGINT"),
    *("(2::HUGEINT ** 126)::HUGEINT", "1 / 3::DECIMAL(38, 9)", "uuid()", "CAST(random() * 9 AS INTEGER)"),
)


def dataset_of(traces: Sequence[Path], folder: Path) -> Path:
    """Return the data set of traces, each a rank; those that cannot be converted are not in it."""
    ranks = folder / "ranks"
    ranks.mkdir(parents=True)
    inputs = []
    for rank, trace in enumerate(traces):
        own = ranks / f"rank{rank}{''.join(trace.suffixes[-2:])}"
        shutil.copy(trace, own)
        inputs.append(Input(own, ""))
    for outcome in convert(inputs, folder / "set", read_trace, jobs=1):
        assert not outcome.error.startswith("internal error"), outcome.error
    shutil.rmtree(ranks)
    return folder / "set"


def rewrite(path: Path, select: str) -> None:
    """Put the rows of a question in the place of a Parquet file; the file is ``old`` in it."""
    import duckdb

    quoted = str(path).replace("'", "''")
    with duckdb.connect() as database:
        database.execute(f"CREATE TABLE old AS FROM read_parquet('{quoted}', hive_partitioning = false)")
        database.execute(f"COPY ({select}) TO '{quoted}' (FORMAT parquet)")


def mutate(dataset: Path, chance: random.Random) -> None:
    """Change a few things of a data set in which nothing is changed yet."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        chance.choice((_value, _value, _value, _columns, _bytes, _names, _links, _part))(dataset, chance)


def _file(dataset: Path, chance: random.Random, table: str = "") -> Path | None:
    found = sorted(dataset.glob(f"run=*/rank=*/trace=*/{table or '*'}.parquet"))
    found = [path for path in found if path.is_file() and not path.is_symlink()]
    return chance.choice(found) if found else None


def _literal(chance: random.Random) -> str:
    text = chance.choice(ESCAPES).replace("\0", "").encode("utf-8", "replace").decode().replace("'", "''")
    return chance.choice((*_EXPRESSIONS, f"'{text}'", f"'{text}'", str(chance.choice(VALUES))))


def _value(dataset: Path, chance: random.Random) -> None:
    """Another value or type in a column, in all rows or some of them."""
    table = chance.choice(("ranks", "ranks", "steps", "sites", "leaks", "checkpoints", "allocations", "kernels"))
    if path := _file(dataset, chance, table):
        column = chance.choice(TABLES[table]).name
        value = _literal(chance)
        if chance.random() < 0.5:
            value = f'CASE WHEN random() < 0.5 THEN TRY_CAST({value} AS VARCHAR) ELSE "{column}"::VARCHAR END'
        _try(path, f'SELECT * REPLACE ({value} AS "{column}") FROM old')


def _columns(dataset: Path, chance: random.Random) -> None:
    """Missing, more and other columns; no rows, more rows."""
    if path := _file(dataset, chance):
        column = chance.choice(TABLES[path.stem]).name
        more = f"SELECT *, 1 AS other, {_literal(chance)} AS another FROM old"
        less = f'SELECT * EXCLUDE ("{column}") FROM old'
        rows = ("SELECT * FROM old WHERE false", "FROM old UNION ALL FROM old", "SELECT 1 AS a")
        _try(path, chance.choice((less, less, more, *rows)))


def _try(path: Path, select: str) -> None:
    import duckdb

    try:
        rewrite(path, select)
    except duckdb.Error:  # what was made so before cannot be made so as well
        path.write_bytes(b"PAR1")


def _bytes(dataset: Path, chance: random.Random) -> None:
    if path := _file(dataset, chance):
        data = bytearray(path.read_bytes())
        at = chance.randrange(len(data) + 1)
        end = at + chance.choice((1, 4, 100, len(data)))
        data[at:end] = chance.choice((b"", b"\0", b"\xff" * 9, data[at:end] * 2))
        path.write_bytes(data)


def _names(dataset: Path, chance: random.Random) -> None:
    """Other names of the folders that are columns."""
    places = sorted(dataset.glob(chance.choice(("run=*", "run=*/rank=*", "run=*/rank=*/trace=*"))))
    if places:
        place = chance.choice(places)
        key = place.name.split("=")[0]
        names = [*ESCAPES, "-1", "9" * 40, "1e5", "__HIVE_DEFAULT_PARTITION__", "%00", "%zz", "*", "[a]", "'; SELECT 1"]
        name = chance.choice(names).replace("\0", "").replace("/", "")[:200].encode("utf-8", "replace").decode()
        target = place.with_name(f"{key}={name}")
        if not target.exists():
            os.rename(place, target)


def _links(dataset: Path, chance: random.Random) -> None:
    """A link in the place of a file, or beside it; to what is outside, to itself, to nothing."""
    path = _file(dataset, chance)
    target: Any = chance.choice(("/etc/passwd", "/etc", "/proc/self/environ", "/nowhere", ".", "x"))
    if path and chance.random() < 0.5:
        path.unlink()
        path.symlink_to(target)
    elif not (dataset / "link").is_symlink():
        (dataset / "link").symlink_to(target)


def _part(dataset: Path, chance: random.Random) -> None:
    found = sorted(dataset.glob("run=*/rank=*/trace=*/part.json"))
    if found:
        texts = ("", "[]", "{", '{"schema": "cudatool.dataset/1", "trace": 5}', "[" * 9000, '{"schema": 1e999}', "\xff")
        chance.choice(found).write_bytes(chance.choice(texts).encode("latin-1"))
