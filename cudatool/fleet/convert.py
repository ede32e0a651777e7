"""Traces become parts of a data set: in parallel processes, and never twice.

::

    DIR/run=train/rank=3/trace=rank3.ctrace-1f2e3d4c/
        part.json                            what was converted: source, its size and time, rows of each table
        ranks.parquet ... events.parquet     a file for each table

A part is written under a hidden name and then renamed: a conversion that is killed leaves no half of one. An input
whose part has the input's size and time of change is skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from cudatool.errors import CudatoolError, OutputError, UsageError
from cudatool.fleet.database import need_duckdb, write_table, writer
from cudatool.fleet.schema import LAYOUT, NO_RANK, SCHEMA, TABLES
from cudatool.fleet.tables import Tables
from cudatool.progress import step
from cudatool.text import printable
from cudatool.trace.model import Trace

__all__ = ["PART", "Conversion", "Input", "convert", "named_rank", "parts_of"]

PART: Final = "part.json"
"""The small summary in each part."""

_HIDDEN: Final = ".part-"
_RANK: Final = re.compile(r"(?<![a-z])rank[_.=-]?(\d{1,9})(?!\d)", re.IGNORECASE)
_AT_ONCE: Final = 2  # inputs for each process that are handed over ahead
_Reader = Callable[[Path], Trace]


@dataclass(frozen=True, slots=True)
class Input:
    """A file to convert; `folder` is its directory below the one that was named, empty right inside of it."""

    path: Path
    folder: str


@dataclass(frozen=True, slots=True)
class Conversion:
    """What became of one input: its part, and why there is none."""

    path: Path
    part: Path | None
    events: int = 0
    error: str = ""


def named_rank(path: Path) -> int | None:
    """Return the rank in a file's name, else in its directory's: the number after the last ``rank``, as in
    ``rank3.pickle``, ``snapshot_rank-12.pickle`` and ``rank=3/snapshot.pickle``.
    """
    for name in (path.name, path.parent.name):
        if found := _RANK.findall(name):
            return int(found[-1])
    return None


def parts_of(dataset: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Return the parts of a data set by trace: the folder of each, and what its ``part.json`` says."""
    found = {}
    for path in sorted(dataset.glob(f"run=*/rank=*/trace=*/{PART}")):
        try:
            said = json.loads(path.read_bytes())
        except (OSError, RecursionError, ValueError):
            continue
        if isinstance(said, dict) and said.get("schema") == SCHEMA and isinstance(said.get("trace"), str):
            found[said["trace"]] = (path.parent, said)
    return found


def convert(
    inputs: Iterable[Input], dataset: Path, read: _Reader, *, jobs: int, run: str | None = None, again: bool = False
) -> Iterator[Conversion]:
    """Write a part for each input that has none; yield what became of each that was not skipped.

    Parameters
    ----------
    read
        Returns the trace in a file; other processes import it by name.
    jobs
        How many processes convert.
    run
        The run of all inputs; by default each one's own, see docs/fleet.md.
    again
        Convert what has a part, too.

    Raises
    ------
    UsageError
        DuckDB is not installed, or another process writes to the data set.
    OutputError
        The directory cannot be written.
    """
    need_duckdb()
    with _locked(dataset):
        known = parts_of(dataset)
        waiting = []
        for one in inputs:
            trace = _key(one.path)
            folder, said = known.get(trace, (None, {}))
            if again or folder is None or said.get("input") != _state(one.path) or run not in (None, said.get("run")):
                waiting.append(_Task(one.path, one.folder, dataset, trace, folder, run))
        with step(f"converting to {dataset}", total=len(waiting)) as shown:
            for done, outcome in enumerate(_results(waiting, read, jobs), start=1):
                shown.update(done)
                yield outcome


@dataclass(frozen=True, slots=True)
class _Task:
    path: Path
    folder: str
    dataset: Path
    trace: str
    previous: Path | None
    run: str | None


def _results(tasks: list[_Task], read: _Reader, jobs: int) -> Iterator[Conversion]:
    if jobs == 1 or len(tasks) < 2:
        yield from (_converted(task, read) for task in tasks)
        return
    left = tasks
    while left:
        left, suspects = yield from _in_pool(left, read, jobs)
        # A process was killed, perhaps for lack of memory, and the pool with it: one at a time shows by which input.
        for task in suspects:
            _, killed = yield from _in_pool([task], read, 1)
            if killed:
                yield Conversion(task.path, None, error="the process that converted it was killed")


def _in_pool(
    tasks: list[_Task], read: _Reader, jobs: int
) -> Generator[Conversion, None, tuple[list[_Task], list[_Task]]]:
    """Yield the outcomes of tasks; return those that were not begun, and those under way when a process was killed."""
    running: dict[Future[Conversion], _Task] = {}
    left = list(reversed(tasks))
    # Spawned: a fork of a process that has threads, as DuckDB's, may wait forever for a lock.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        while left or running:
            while left and len(running) < jobs * _AT_ONCE:
                task = left.pop()
                running[pool.submit(_converted, task, read)] = task
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                outcome = future.result()
                del running[future]
                yield outcome
    except BrokenProcessPool:
        return left[::-1], list(running.values())
    finally:
        pool.shutdown(cancel_futures=True)
    return [], []


def _converted(task: _Task, read: _Reader) -> Conversion:
    try:
        return _convert(task, read)
    except (CudatoolError, OSError) as error:
        return Conversion(task.path, None, error=printable(str(error)))
    except MemoryError:
        return Conversion(task.path, None, error="out of memory")
    except Exception as error:  # our own bug, or DuckDB's, costs this input only
        return Conversion(task.path, None, error=printable(f"internal error: {type(error).__name__}: {error}"))


def _convert(task: _Task, read: _Reader) -> Conversion:
    before = _state(task.path)
    trace = read(task.path)
    rank = _rank(trace, task.path)
    run = task.run if task.run is not None else _run(trace, task)
    run = run.encode("utf-8", "replace").decode()  # a file's name may be no UTF-8, which Parquet's texts are
    hidden = task.dataset / f"{_HIDDEN}{secrets.token_hex(8)}"
    hidden.mkdir()
    try:
        counts = _write(trace, hidden)
        said = {
            "schema": SCHEMA,
            "layout": LAYOUT,
            "trace": task.trace,
            "run": run,
            "rank": rank,
            "source": str(task.path),
            "input": before,
            "ending": str(trace.ending),
            "notes": trace.notes,
            "rows": counts,
        }
        (hidden / PART).write_text(json.dumps(said, indent=1), "utf-8")
        place = task.dataset / f"run={quote(run, safe='')}" / f"rank={NO_RANK if rank is None else rank}"
        part = place / f"trace={task.trace}"
        place.mkdir(parents=True, exist_ok=True)
        if task.previous is not None:
            os.rename(task.previous, task.dataset / f"{_HIDDEN}{secrets.token_hex(8)}")  # the next run removes it
        os.rename(hidden, part)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return Conversion(task.path, part, len(trace.records))


def _write(trace: Trace, folder: Path) -> dict[str, int]:
    tables, counts = Tables(trace), {}
    database = writer()
    try:
        for name in TABLES:
            columns = getattr(tables, name)
            counts[name] = len(next(iter(columns.values()))) if columns else 0
            write_table(database, folder / f"{name}.parquet", name, columns)
            tables.__dict__.pop(name, None)  # the columns of one table at a time
    finally:
        database.close()
    return counts


def _rank(trace: Trace, path: Path) -> int | None:
    said = str(trace.header.get("rank", ""))
    return int(said) if said.isdecimal() and len(said) < 10 else named_rank(path)


def _run(trace: Trace, task: _Task) -> str:
    """Return which run a trace is of: its job's, else its folder's, else its program's (docs/fleet.md)."""
    header = trace.header
    if header.get("job"):
        return str(header["job"])
    folder = "" if task.folder == "." else task.folder
    program = header.get("parent_trace") or ("" if _rank(trace, task.path) is not None else task.path.name)
    if header.get("format") or not program:
        return folder or task.path.resolve().parent.name or "all"
    return "/".join(filter(None, (folder, str(program).removesuffix(".ctrace"))))


def _key(path: Path) -> str:
    """Return the name of an input's part: readable, and another one for each path."""
    digest = blake2b(os.fsencode(path.resolve()), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', path.name)[-80:]}-{digest}"


def _state(path: Path) -> dict[str, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return {"size": found.st_size, "mtime_ns": found.st_mtime_ns}


@contextmanager
def _locked(dataset: Path) -> Iterator[None]:
    """Be the only process that writes to a data set; remove what killed ones left."""
    try:
        str(dataset.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"cannot write {dataset}: DuckDB needs a name in UTF-8; name another one with -o") from error
    try:
        dataset.mkdir(parents=True, exist_ok=True)
        lock = os.open(dataset / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OutputError(f"cannot write {dataset}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"{dataset}: another process writes to this data set; wait for it") from error
        for rest in dataset.glob(f"{_HIDDEN}*"):
            shutil.rmtree(rest, ignore_errors=True)
        yield
        for rest in dataset.glob(f"{_HIDDEN}*"):
            shutil.rmtree(rest, ignore_errors=True)
    finally:
        os.close(lock)
