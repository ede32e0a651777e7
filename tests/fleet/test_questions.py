"""SQL over a data set reads the data set, and does nothing else; the recipes of the docs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fleet_reference import PAGE

from cudatool.errors import UsageError
from cudatool.fleet.query import ask, opened

RECIPES = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda text: " ".join(text.split())[:40])
def test_recipe_runs(recipe: str, five_ranks: Path) -> None:
    with opened(five_ranks, tables=recipe) as database:
        answer = ask(database, recipe)
        rows = list(answer.rows)
    # No rank of these ran out of memory, and none is incomplete.
    assert bool(rows) == ("ooms > 0" not in recipe and "ending NOT" not in recipe and "FROM leaks" not in recipe)


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
        "PRAGMA database_list",
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
    assert "\n" not in str(raised.value)
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
