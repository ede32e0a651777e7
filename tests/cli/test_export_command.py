from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cudatool.cli.export import export
from cudatool.collect import torch_snapshot
from cudatool.errors import FileFormatError, OutputError, UsageError

DATA = Path(__file__).resolve().parents[1] / "data"
ENDINGS = {"torch": "run.pickle", "perfetto": "run.perfetto.json", "sqlite": "run.sqlite"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Path(shutil.copy(DATA / "streams_default.pickle.xz", tmp_path / "run.pickle.xz"))


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(export, [str(a) for a in arguments], catch_exceptions=False)


@pytest.mark.parametrize("kind", ENDINGS)
def test_the_file_lies_beside_the_source_and_is_named_on_stderr(source: Path, kind: str) -> None:
    result = run(source, "--to", kind)
    written = source.with_name(ENDINGS[kind])
    assert (0, "") == (result.exit_code, result.stdout)
    wrote, following = result.stderr.splitlines()[-2:]
    assert wrote.startswith(f"Wrote {written} (")
    assert following.startswith("Next: ")
    assert {source.name, written.name} == {file.name for file in source.parent.iterdir()}


def test_perfetto_output_is_json_with_events(source: Path) -> None:
    run(source, "--to", "perfetto")
    assert 0 < len(json.loads(source.with_name("run.perfetto.json").read_text())["traceEvents"])


def test_sqlite_output_answers_the_query_it_is_offered_with(source: Path) -> None:
    result = run(source, "--to", "sqlite")
    path = source.with_name("run.sqlite")
    query = result.stderr.split("'")[1]
    assert f"Next: sqlite3 {path} '{query}'" == result.stderr.splitlines()[-1]
    with closing(sqlite3.connect(path)) as database:
        assert 0 < len(database.execute(query).fetchall())


def test_torch_output_reads_back_with_the_same_blocks(source: Path) -> None:
    run(source, "--to", "torch")
    before, after = torch_snapshot.read(source), torch_snapshot.read(source.with_name("run.pickle"))

    def blocks(snapshot: torch_snapshot.MemorySnapshot) -> list[tuple[int, int]]:
        live = [(b["address"], b["size"]) for s in snapshot.segments for b in s["blocks"] if b["state"] != "inactive"]
        return sorted(live)

    assert blocks(before) == blocks(after)


def test_the_log_of_rmm_is_exported_like_any_trace(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00.000001,allocate,0x100,64,0x0\n")
    assert 0 == run(log, "--to", "sqlite").exit_code
    with closing(sqlite3.connect(tmp_path / "log.sqlite")) as database:
        assert [(64,)] == database.execute("SELECT size FROM allocations").fetchall()


def test_output_names_the_file(source: Path, tmp_path: Path) -> None:
    run(source, "--to", "perfetto", "-o", tmp_path / "other")
    assert {"run.pickle.xz", "other"} == {file.name for file in tmp_path.iterdir()}


def test_a_file_that_exists_is_overwritten_only_by_force(source: Path) -> None:
    path = source.with_name("run.sqlite")
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists; add -f"):
        run(source, "--to", "sqlite")
    assert "precious" == path.read_text()
    run(source, "--to", "sqlite", "-f")
    assert path.read_bytes().startswith(b"SQLite format 3")


def test_the_source_is_never_overwritten(source: Path) -> None:
    plain = source.rename(source.with_name("run.pickle"))
    before = plain.read_bytes()
    with pytest.raises(UsageError, match="this command reads that file"):
        run(plain, "--to", "torch", "-f")
    assert before == plain.read_bytes()


def test_what_cannot_be_read_or_written_is_one_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(FileFormatError, match="neither a cudatool trace"):
        run(tmp_path / "text", "--to", "sqlite")
    with pytest.raises(UsageError, match="cannot read"):
        run(tmp_path / "missing", "--to", "sqlite")
    with pytest.raises(OutputError, match="cannot write"):
        run(source, "--to", "sqlite", "-o", tmp_path / "missing" / "x")


def test_a_format_must_be_named(source: Path) -> None:
    result = CliRunner().invoke(export, [str(source)])
    assert 2 == result.exit_code
    assert "--to" in result.stderr


def test_the_newest_trace_is_exported_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no trace"):
        run("--to", "perfetto")
