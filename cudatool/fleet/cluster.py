"""Questions about a data set that several processes answer together: each reads some of its parts, in DuckDB.

The rules ask large tables only what can be asked in pieces (:meth:`~cudatool.fleet.ask.Ask.keep`). Each task opens the
parts of its piece and nothing else, with the same SQL, and answers in Parquet; what is done with the answers is the
same as where one process asked all parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from cudatool.errors import CudatoolError, UsageError
from cudatool.fleet.ask import Keep
from cudatool.fleet.convert import PART
from cudatool.fleet.pieces import check_pieces
from cudatool.fleet.query import MEMORY, PREFIXES, Answer, ask, check_question, opened
from cudatool.text import printable, shortened

__all__ = ["Cluster", "Piece", "answered", "asked_on", "opened_on", "ray_cluster"]

_SMALL: Final = ("ranks", "steps", "sites", "leaks", "checkpoints")
"""Tables that a conversion has summed up: they are read once, and kept where the rules are."""

_TASKS_EACH: Final = 4  # pieces for each worker: the last one to be done is small
_LONGEST: Final = 300  # characters of what Ray says
_EXACT: Final = frozenset(
    (
        *("BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT"),
        *("FLOAT", "DOUBLE", "VARCHAR", "DATE"),
    )
)
_MEMBER: Final = ("run", "rank", "trace", "device")


@dataclass(frozen=True, slots=True)
class Piece:
    """What one task is asked: some parts, and the questions by the names of their answers."""

    dataset: Path
    parts: tuple[Path, ...]
    memory: str
    questions: dict[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    members: tuple[tuple[Any, ...], ...] = ()


def answered(piece: Piece) -> dict[str, bytes]:
    """Return the answers of a piece, as files of Parquet."""
    named = " ".join(piece.questions.values())
    with opened(piece.dataset, memory=piece.memory, tables=named, parts=piece.parts) as database:
        [(folder,)] = database.execute("SELECT current_setting('temp_directory')").fetchall()
        database.execute("CREATE TEMP TABLE member (run VARCHAR, rank INTEGER, trace VARCHAR, device INTEGER)")
        if piece.members:
            database.executemany("INSERT INTO member VALUES (?, ?, ?, ?)", piece.members)
        result = {}
        for name, question in piece.questions.items():
            path = Path(folder) / f"{name}.parquet"
            database.execute(f"CREATE TEMP TABLE answer AS {question}", piece.values)
            database.execute(f"COPY answer TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
            database.execute("DROP TABLE answer")
            result[name] = path.read_bytes()
            path.unlink()
    return result


@dataclass(frozen=True, slots=True)
class Cluster:
    """What answers pieces.

    Attributes
    ----------
    workers
        How many pieces are answered at the same time.
    answers
        Returns the answers of pieces, in their order.
    """

    workers: int
    answers: Callable[[Sequence[Piece]], list[dict[str, bytes]]]

    def pieces(self, dataset: Path, run: str | None, together: int | None) -> Iterator[tuple[Path, ...]]:
        """Yield the parts of each piece: those of a rank are in one, and those of the rank `together` in all."""
        ranks: dict[str, list[Path]] = {}
        for part in sorted(dataset.glob(f"run=*/rank=*/trace=*/{PART}")):
            _, rank, of_run = (folder.name for folder in (part.parent, part.parent.parent, part.parent.parent.parent))
            if run is None or unquote(of_run.removeprefix("run=")) == run:
                ranks.setdefault(rank, []).append(part.parent)
        shared = ranks.get(f"rank={together}", [])
        every = list(ranks.values())
        count = min(len(every), self.workers * _TASKS_EACH)
        for first in range(count):
            own = [part for parts in every[first::count] for part in parts]
            yield (*own, *(part for part in shared if part not in own))


@contextmanager
def opened_on(cluster: Cluster, *datasets: Path, memory: str = MEMORY) -> Iterator[tuple[Any, Keep]]:
    """Return a database as :func:`~cudatool.fleet.query.opened` does, and what keeps answers in it.

    `memory` is that of the database, and of each task.
    """
    with opened(*datasets, memory=memory) as database:
        for dataset, prefix in zip(datasets, PREFIXES, strict=False):
            home = dataset.resolve()
            pieces = [
                Piece(home, parts, memory, {table: f"FROM {table}" for table in _SMALL})
                for parts in cluster.pieces(home, None, None)
            ]
            for table, files in _files(database, cluster.answers(pieces), f"{prefix}all").items():
                database.execute(f"CREATE OR REPLACE VIEW {prefix}{table} AS FROM read_parquet({files})")
        yield database, partial(_keep_in_pieces, cluster, datasets[0].resolve(), memory)


@contextmanager
def asked_on(cluster: Cluster, dataset: Path, question: str, *, memory: str = MEMORY) -> Iterator[Answer]:
    """Return the answer to a question, as :func:`~cudatool.fleet.query.ask` does; its rows come in no order.

    Raises
    ------
    UsageError
        It cannot be asked in pieces, or DuckDB refuses it.
    """
    home = dataset.resolve()
    with opened(home, memory=memory, tables=question) as database:
        check_question(database, question)
        written = check_pieces(database, question)
        described = ask(database, f"DESCRIBE {written}").rows
        names, types = zip(*((str(name), str(type)) for name, type, *_ in described), strict=True)
        own = [f"c{i}" for i in range(len(names))]  # names of a SELECT may be equal
        exact = [c if _is_exact(type) else f"CAST({c} AS VARCHAR) AS {c}" for c, type in zip(own, types, strict=True)]
        asked = f"SELECT {', '.join(exact)} FROM ({written}) AS own({', '.join(own)})"
        pieces = [Piece(home, parts, memory, {"answer": asked}) for parts in cluster.pieces(home, None, None)]
        [files] = _files(database, cluster.answers(pieces), "asked").values()
        back = (f"CAST({c} AS {type}) AS {c}" for c, type in zip(own, types, strict=True))
        answer = ask(database, f"SELECT {', '.join(back)} FROM read_parquet({files})")
        yield replace(answer, columns=names)


def _is_exact(type: str) -> bool:
    """Return whether Parquet has the values of a type as they are; others, such as HUGEINT, go through as texts."""
    return type in _EXACT or type.startswith("DECIMAL(")


def _keep_in_pieces(
    cluster: Cluster,
    dataset: Path,
    memory: str,
    database: Any,
    table: str,
    question: str,
    values: dict[str, Any],
    together: int | None,
) -> None:
    rows = database.execute(f"SELECT {', '.join(_MEMBER)} FROM member WHERE run = $run", {"run": values["run"]})
    member = rows.fetchall()
    pieces = []
    for parts in cluster.pieces(dataset, values["run"], together):
        traces = {part.name.removeprefix("trace=") for part in parts}
        own = tuple(row for row in member if row[_MEMBER.index("trace")] in traces)
        pieces.append(Piece(dataset, parts, memory, {table: question}, values, own))
    [files] = _files(database, cluster.answers(pieces), "kept").values()
    database.execute(f"CREATE OR REPLACE TEMP TABLE {table} AS FROM read_parquet({files})")


def _files(database: Any, answers: list[dict[str, bytes]], name: str) -> dict[str, str]:
    """Write answers to files of the database's own; return the list of the files of each table, as SQL."""
    [(folder,)] = database.execute("SELECT current_setting('temp_directory')").fetchall()
    found: dict[str, list[str]] = {}
    for number, answer in enumerate(answers):
        for table, content in answer.items():
            path = Path(folder) / f"{name}-{table}-{number}.parquet"
            path.write_bytes(content)
            found.setdefault(table, []).append(f"'{path}'")
    return {table: f"[{', '.join(paths)}]" for table, paths in found.items()}


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """Return the Ray cluster that this process or RAY_ADDRESS names, else one of this machine, which ends with this.

    Raises
    ------
    UsageError
        Ray is not installed, or there is no cluster at the address.
    """
    try:
        ray: Any = import_module("ray")  # untyped in parts
    except ImportError as error:
        raise UsageError("--engine ray needs Ray: pip install 'cudatool[ray]'") from error
    is_ours = not ray.is_initialized()
    try:
        if is_ours:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"no Ray cluster could be reached or started: {_said(error)}") from error
    task = ray.remote(answered)

    def answers(pieces: Sequence[Piece]) -> list[dict[str, bytes]]:
        try:
            found: list[dict[str, bytes]] = ray.get([task.remote(piece) for piece in pieces])
        except CudatoolError as error:  # of a task: Ray's error is one of ours, too, with a traceback in its words
            raise UsageError(_said(getattr(error, "cause", error))) from error
        except ray.exceptions.RayError as error:
            raise UsageError(f"a task of the Ray cluster failed: {_said(getattr(error, 'cause', error))}") from error
        return found

    try:
        yield Cluster(workers, answers)
    finally:
        if is_ours:
            ray.shutdown()


def _said(error: BaseException) -> str:
    return shortened(printable(" ".join(str(error).split())), _LONGEST)
