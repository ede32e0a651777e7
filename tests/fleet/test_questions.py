"""SQL over a data set reads the data set, and does nothing else; the recipes of the docs run."""

from __future__ import annotations

import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner
from fleet_reference import PAGE

from cudatool.cli import group
from cudatool.errors import UsageError
from cudatool.fleet import query
from cudatool.fleet.query import ask, opened
from cudatool.fleet.report import fleet_report

sys.path.insert(0, str(Path(__file__).parents[1] / "security"))
from hostile_datasets import rewrite

RECIPES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda text: " ".join(text.split())[:40])
def test_recipe_runs(recipe: str, five_ranks: Path) -> None:
    with opened(five_ranks, tables=recipe) as database:
        answer = ask(database, recipe)
        rows = list(answer.rows)
    # No rank of these ran out of memory, and none is incomplete.
    assert bool(rows) == ("ooms > 0" not in recipe and "ending NOT" not in recipe and "FROM leaks" not in recipe)


def test_recipe_of_slow_steps_leaves_out_what_follows_the_last(five_ranks: Path) -> None:
    """The beginning of the last step is known, but not its end: no rank was slowest in it."""
    (recipe,) = [text for text in RECIPES if "slowest" in text]
    with opened(five_ranks, tables=recipe) as database:
        rows = list(ask(database, recipe).rows)
    assert rows
    assert all(value is not None for row in rows for value in row)


def test_the_docs_have_recipes() -> None:
    assert len(RECIPES) >= 8


def test_recipe_names_the_rank_with_most_memory(five_ranks: Path) -> None:
    with opened(five_ranks) as database:
        _, rank, peak, above = next(ask(database, RECIPES[0]).rows)
        assert rank in (3, 4) and (746890240, 746890240 - 23592448) == (peak, above)
        more = list(ask(database, RECIPES[1]).rows)
    assert {3, 4} == {row[1] for row in more} and max(row[3] for row in more) == more[0][3] > 0


@pytest.mark.parametrize(
    "question",
    [
        "COPY (SELECT 1) TO '{data}/x.csv'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{data}/x.csv'",
        "EXPORT DATABASE '{data}/all'",
        "ATTACH '{data}/x.db'",
        "SET enable_external_access = true",
        "RESET lock_configuration",
        "INSTALL httpfs",
        "LOAD httpfs",
        "CREATE TABLE t AS SELECT 1",
        "PRAGMA enable_profiling",
        "SELECT 1; SELECT 2",
        "SELECT 1; COPY (SELECT 1) TO '{data}/x.csv'",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{data}/x.csv''')",
        "SELECT * FROM read_text('{outside}')",
        "SELECT * FROM '{outside}'",
        "SELECT * FROM read_text('{data}/../secret.csv')",
        "SELECT * FROM glob('{data}/../*')",
        "SELECT * FROM sniff_csv('{outside}')",
        "SELECT * FROM 'http://127.0.0.1:9/x.csv'",
        "SELECT * FROM secret_of_the_caller",
        "SELECT getenv('HOME')",
        "SELEC 1",
        "SELECT no_column FROM ranks",
        "SELECT now()",
        "SELECT INTERVAL 9999999 YEAR",
        "SELECT '\udcff'",
        "SELECT error('a' || chr(10) || chr(27) || repeat('x', 5000))",
        "",
    ],
)
def test_question_that_is_not_only_a_look_at_the_data_set_is_refused(question: str, five_ranks: Path) -> None:
    outside = five_ranks.parent / "secret.csv"
    outside.write_text("a,b\n1,2\n")
    secret_of_the_caller = {"a": [1]}
    before = sorted(five_ranks.rglob("*"))
    with opened(five_ranks) as database, pytest.raises(UsageError) as raised:
        text = question.replace("{data}", str(five_ranks).replace("'", "''")).replace(
            "{outside}", str(outside).replace("'", "''")
        )
        list(ask(database, text).rows)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400
    assert before == sorted(five_ranks.rglob("*"))
    assert secret_of_the_caller


def test_same_file_can_be_read_where_access_is_not_refused(five_ranks: Path) -> None:
    """The test above fails for no other reason: the file is there and readable."""
    import duckdb

    outside = five_ranks.parent / "secret.csv"
    outside.write_text("a,b\n1,2\n")
    assert [(1, 2)] == duckdb.connect().execute("SELECT * FROM read_csv(?)", [str(outside)]).fetchall()


def test_errors_of_rows_that_come_late_are_ours(five_ranks: Path) -> None:
    with opened(five_ranks) as database, pytest.raises(UsageError, match="onver"):
        list(ask(database, "SELECT if(event = 9000, 'x', '1')::INTEGER FROM events").rows)


def changed(dataset: Path, folder: Path) -> Path:
    return Path(shutil.copytree(dataset, folder / "changed"))


@pytest.mark.parametrize("place", ["link", "run=x", "{table}"])
def test_a_link_out_of_the_data_set_is_refused(place: str, five_ranks: Path, tmp_path: Path) -> None:
    dataset = changed(five_ranks, tmp_path)
    table = next(dataset.glob("run=*/rank=0/trace=*/ranks.parquet"))
    elsewhere = tmp_path / "elsewhere.parquet"
    table.rename(elsewhere)
    path = dataset / place.format(table=table)
    path.symlink_to(elsewhere)
    with pytest.raises(UsageError, match="leads out of the data set"), opened(dataset):
        pass
    path.unlink()
    elsewhere.rename(table)
    (dataset / "link").symlink_to(table)  # inside
    with opened(dataset) as database:
        assert [(5,)] == list(ask(database, "SELECT count(*) FROM ranks").rows)


def test_a_summary_of_a_part_that_is_nested_too_deeply_counts_as_none(five_ranks: Path, tmp_path: Path) -> None:
    dataset = changed(five_ranks, tmp_path)
    next(dataset.glob("run=*/rank=0/trace=*/part.json")).write_text("[" * 200_000)
    with opened(dataset) as database:
        assert [(5,)] == list(ask(database, "SELECT count(*) FROM ranks").rows)


def test_a_directory_that_is_no_data_set_is_not_to_be_cleaned_up(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to("/etc")
    with pytest.raises(UsageError, match="is no data set; make one"), opened(tmp_path):
        pass


@pytest.mark.parametrize("link", ["run=away", "link.txt"])
def test_duckdb_itself_follows_no_link_out_of_the_data_set(
    link: str, five_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second fence: a link that appears after the look at the folders."""
    if int(metadata.version("duckdb").split(".")[0]) < 2:
        pytest.skip("DuckDB before 2.0 follows links")
    dataset = changed(five_ranks, tmp_path)
    secret = tmp_path / "away" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("secret")
    monkeypatch.setattr(query, "_check_links", lambda home, folders: None)
    (dataset / link).symlink_to(secret.parent if link == "run=away" else secret)
    name = str(dataset / link / ("secret.txt" if link == "run=away" else "")).rstrip("/").replace("'", "''")
    assert "secret" == Path(name.replace("''", "'")).read_text()
    with opened(dataset) as database, pytest.raises(UsageError, match="ermission"):
        list(ask(database, f"SELECT * FROM read_text('{name}')").rows)


@pytest.mark.parametrize(
    ("column", "value"),
    [("peak_active", "NULL"), ("peak_active", "-1"), ("ooms", "NULL"), ("peak_reserved", "1::BIGINT << 62")],
)
def test_numbers_that_no_conversion_writes_are_refused(
    column: str, value: str, five_ranks: Path, tmp_path: Path
) -> None:
    dataset = changed(five_ranks, tmp_path)
    for table in dataset.glob("run=*/rank=*/trace=*/ranks.parquet"):
        rewrite(table, f"SELECT * REPLACE ({value} AS {column}) FROM old")
    with pytest.raises(UsageError, match=f"has the {column}"), opened(dataset) as database:
        fleet_report(database)


def test_a_job_of_billions_of_ranks_names_the_first_that_are_missing(five_ranks: Path, tmp_path: Path) -> None:
    dataset = changed(five_ranks, tmp_path)
    for table in dataset.glob("run=*/rank=*/trace=*/ranks.parquet"):
        rewrite(table, "SELECT * REPLACE (2147483647 AS world_size) FROM old")
    with opened(dataset) as database:
        [run] = fleet_report(database)
    assert (5, 4096) == (run.missing[0], len(run.missing))
    assert any("2,147,483,647" in sentence for sentence in run.not_looked_at)


def test_a_table_of_another_kind_is_refused_with_its_name(five_ranks: Path, tmp_path: Path) -> None:
    dataset = changed(five_ranks, tmp_path)
    for table in dataset.glob("run=*/rank=*/trace=*/steps.parquet"):
        rewrite(table, "SELECT 1 AS a")
    with pytest.raises(UsageError, match=r"the table steps of .*changed cannot be read"), opened(dataset):
        pass


def test_texts_in_csv_are_printable(five_ranks: Path) -> None:
    question = (
        "SELECT chr(27) || '[31m' AS a, chr(10) || '::error::x' AS b, 1.5 AS c, NULL AS d, DATE '2026-01-02' AS e"
    )
    done = CliRunner().invoke(group, ["query", str(five_ranks), question, "--format", "csv"])
    assert ["a,b,c,d,e", r"\x1b[31m,\n:\x3aerror::x,1.5,,2026-01-02"] == done.stdout.splitlines()


@pytest.mark.parametrize("size", ["bogus", "-1", "1", "63MiB", "9" * 400])
def test_memory_that_is_no_size_or_too_little_is_refused(size: str, five_ranks: Path) -> None:
    with pytest.raises(UsageError), opened(five_ranks, memory=size):
        pass
