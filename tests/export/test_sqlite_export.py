from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import HERE, converted

from cudatool import analyze
from cudatool.collect import torch_snapshot
from cudatool.errors import OutputError
from cudatool.export import perfetto, sqlite
from cudatool.trace.events import RECORD, Kind, StreamFlag
from cudatool.trace.model import Frame, Trace
from cudatool.trace.streams import stream_names, thread_names

STREAMS = HERE / "streams_default.pickle.xz"


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(sql).fetchall()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[torch_snapshot.MemorySnapshot, Path]]:
    snapshot = torch_snapshot.read(STREAMS)
    sqlite.write(tmp_path / "x.sqlite", snapshot)
    assert ["x.sqlite"] == [file.name for file in tmp_path.iterdir()]
    yield snapshot, tmp_path / "x.sqlite"


@converted()
def test_sums_are_those_of_the_analysis(tmp_path: Path, path: Path) -> None:
    snapshot = torch_snapshot.read(path)
    sqlite.write(tmp_path / "x", snapshot)
    line = analyze.timeline(snapshot, analyze.blocks(snapshot), analyze.segments(snapshot))
    peak = int(line.active.max())
    assert [(peak,)] == query(tmp_path / "x", "SELECT sum(size) FROM live_at_peak")
    assert [(peak,)] == query(tmp_path / "x", "SELECT sum(peak_bytes) FROM by_call_site")
    assert [(int(line.active[-1]) or None, int(line.reserved[-1]))] == query(
        tmp_path / "x",
        "SELECT (SELECT sum(size) FROM allocations WHERE free_completed_time IS NULL),"
        "(SELECT sum(size) FROM segments WHERE free_time IS NULL)",
    )


def test_call_sites_are_those_of_the_analysis(written: tuple[Trace, Path]) -> None:
    trace, path = written
    blocks = analyze.blocks(trace)
    line = analyze.timeline(trace, blocks, analyze.segments(trace))
    sites = analyze.by_call_site(trace, blocks.at(int(line.index[line.peak()])))
    expected = sorted((site.size, site.stack) for site in sites)
    assert expected == sorted(query(path, "SELECT peak_bytes, stack FROM by_call_site WHERE peak_bytes > 0"))
    assert {("train.py", "<module>")} == set(
        query(path, "SELECT file, function FROM by_call_site WHERE peak_bytes > 0")
    )


def test_every_record_is_an_event(written: tuple[Trace, Path]) -> None:
    trace, path = written
    columns = ("kind", "device", "stream", "stack", "name", "address", "size", "aux0", "aux1")
    events = query(path, f"SELECT {', '.join(columns)} FROM events ORDER BY id")
    assert trace.records[list(columns)].tolist() == events
    times = (trace.records["time"] - trace.records["time"].min()).tolist()
    assert times == [time for (time,) in query(path, "SELECT time FROM events ORDER BY id")]
    assert [(int(kind), kind.name) for kind in Kind] == query(path, "SELECT id, name FROM kinds ORDER BY id")


def test_stacks_are_joined_from_the_innermost_frame_on(written: tuple[Trace, Path]) -> None:
    trace, path = written
    stack = int(trace.of_kind(Kind.BLOCK_ALLOC)["stack"].max())
    sql = (
        "SELECT file, function, line FROM stacks JOIN frames ON frames.id = stacks.frame "
        f"WHERE stacks.id = {stack} ORDER BY depth"
    )
    assert list(trace.stack(stack)) == query(path, sql)


def test_meta_says_what_the_recording_says(written: tuple[Trace, Path]) -> None:
    trace, path = written
    meta = {key: json.loads(value) for key, value in query(path, "SELECT key, value FROM meta")}
    assert ("pytorch-snapshot", trace.notes, trace.source) == (meta["format"], meta["notes"], meta["source"])


def small(*events: tuple[Kind, dict[str, int]], **more: Any) -> Trace:
    records = np.zeros(len(events), RECORD)
    for i, (kind, fields) in enumerate(events):
        records[i]["kind"], records[i]["time"] = kind, 100 + i
        for field, value in fields.items():
            records[i][field] = value
    return Trace(records, **more)


def test_an_allocation_has_its_times_and_what_it_never_saw_is_null(tmp_path: Path) -> None:
    trace = small(
        (Kind.BLOCK_ALLOC, {"address": 512, "size": 512, "aux0": 100, "aux1": 7, "stream": 2}),
        (Kind.BLOCK_FREE_REQUESTED, {"address": 512}),
        (Kind.BLOCK_ALLOC, {"address": 1024, "size": 1024, "aux0": 1000}),
        (Kind.BLOCK_FREE_COMPLETED, {"address": 512}),
    )
    sqlite.write(tmp_path / "x", trace)
    sql = (
        "SELECT address, size, requested, pool, stream, alloc_time, free_requested_time, free_completed_time,"
        "alloc_event, free_requested_event, free_completed_event FROM allocations ORDER BY id"
    )
    assert [
        (512, 512, 100, 7, 2, 0, 1, 3, 0, 1, 3),
        (1024, 1024, 1000, 0, 0, 2, None, None, 2, None, None),
    ] == query(tmp_path / "x", sql)
    assert [(512,), (1024,)] == query(tmp_path / "x", "SELECT address FROM live_at_peak ORDER BY id")


def test_blocks_and_chunks_of_a_librarys_pool_have_its_name(tmp_path: Path) -> None:
    trace = small(
        (Kind.SEGMENT_ALLOC, {"address": 0x1000, "size": 0x1000}),
        (Kind.BLOCK_ALLOC, {"address": 0x1000, "size": 512}),
        (Kind.MEM_ALLOC, {"address": 0x8000, "size": 0x2000}),
        (Kind.POOL_ALLOC, {"address": 0x8000, "size": 512, "aux0": 500, "name": 1}),
        (Kind.POOL_ALLOC, {"address": 0x9000, "size": 1024, "aux0": 1000, "name": 1}),
        (Kind.POOL_FREE, {"address": 0x8000, "size": 512, "name": 1}),
        names=["", "CuPy"],
    )
    sqlite.write(tmp_path / "x", trace)
    named = "LEFT JOIN names n ON n.id = library ORDER BY address"
    assert [(0x1000, None), (0x8000, "CuPy"), (0x9000, "CuPy")] == query(
        tmp_path / "x", f"SELECT address, n.name FROM allocations {named}"
    )
    assert [(0x1000, None), (0x8000, "CuPy")] == query(tmp_path / "x", f"SELECT address, n.name FROM segments {named}")


def test_numbers_and_names_that_sqlite_has_no_room_for_are_written_nevertheless(tmp_path: Path) -> None:
    trace = small(
        (Kind.BLOCK_ALLOC, {"address": 2**64 - 1, "size": 512, "aux0": 2**64 - 2}),
        names=["", "half \ud800"],
        frames=[Frame("a\0b", "f", -1)],
        header={"odd": {1, 2}},
    )
    sqlite.write(tmp_path / "x", trace)
    assert [(-1, -2)] == query(tmp_path / "x", "SELECT address, aux0 FROM events")
    assert [("half ?",)] == query(tmp_path / "x", "SELECT name FROM names WHERE id = 1")


def test_an_empty_trace_is_an_empty_database(tmp_path: Path) -> None:
    sqlite.write(tmp_path / "x", small())
    for table in ("events", "allocations", "segments", "peaks", "live_at_peak", "by_call_site"):
        assert [(0,)] == query(tmp_path / "x", f"SELECT count(*) FROM {table}")


def test_the_docstring_names_every_table_and_column(written: tuple[Trace, Path]) -> None:
    _, path = written
    said = set(re.findall(r"\w+", sqlite.__doc__ or ""))
    tables = [name for (name,) in query(path, "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
    columns = {column for table in tables for _, column, *_ in query(path, f"PRAGMA table_info({table})")}
    assert set() == ({*tables} | columns) - said


def test_the_queries_in_the_docstring_run(written: tuple[Trace, Path]) -> None:
    _, path = written
    queries = re.findall(r"SELECT [^;]*;", sqlite.__doc__ or "")
    assert 2 == len(queries)
    assert 0 < len(query(path, queries[0]))
    query(path, queries[1])


def test_streams_and_threads_are_called_as_in_all_reports(tmp_path: Path) -> None:
    records = np.zeros(7, RECORD)
    records["kind"] = [*[Kind.STREAM_CREATE] * 4, *[Kind.MARK] * 3]
    records["stream"], records["thread"] = [1, 2, 3, 4, 0, 0, 0], [0, 1, 2, 0, 0, 1, 2]
    per_thread = StreamFlag.PER_THREAD_DEFAULT
    records["flags"][:4] = [StreamFlag.LEGACY_DEFAULT, per_thread, per_thread, StreamFlag.NON_BLOCKING]
    trace = Trace(records, names=["", "step"], threads=["main", "worker", "worker"])
    records["name"][4:] = 1
    streams = [
        "default stream",
        "per-thread default stream of thread worker (thread 1)",
        "per-thread default stream of thread worker (thread 2)",
        "stream 4",
    ]
    threads = ["main", "worker (thread 1)", "worker (thread 2)"]
    assert (streams, threads) == ([stream_names(trace)[i] for i in (1, 2, 3, 4)], list(thread_names(trace).values()))
    sqlite.write(tmp_path / "x.sqlite", trace)
    assert [(name,) for name in streams] == query(tmp_path / "x.sqlite", "SELECT name FROM streams ORDER BY id")
    assert [(name,) for name in threads] == query(tmp_path / "x.sqlite", "SELECT name FROM threads ORDER BY id")
    perfetto.write(tmp_path / "x.json", trace)
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert set(threads) <= lanes


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("not a database")
    sqlite.write(tmp_path / "x", small())
    assert [(0,)] == query(tmp_path / "x", "SELECT count(*) FROM events")


def test_a_file_that_cannot_be_written_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        sqlite.write(tmp_path / "missing" / "x", small())
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot write"):
        sqlite.write(tmp_path / "folder", small())
    assert ["folder"] == [file.name for file in tmp_path.iterdir()]
