"""Which questions can be asked in pieces: their answer for all parts is the answers for some parts each, together.

That is so of a SELECT from one table that keeps, drops and computes rows one by one, and of one that groups them by the
rank or by the trace: the parts of a rank are in one piece. What is not known to be harmless is refused, such as a class
of expressions that a later DuckDB may have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from cudatool.errors import UsageError
from cudatool.fleet.schema import TABLES

__all__ = ["check_pieces"]

_WHOLE: Final = ("rank", "trace")
"""Columns by which rows are grouped that lie in one piece."""

_BY_ROW: Final = frozenset(
    (
        *("BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION"),
        *("OPERATOR", "STAR", "TYPE"),
    )
)
"""Classes of expressions whose value needs no other row; of functions, see :func:`_check_functions`."""


def check_pieces(database: Any, question: str) -> str:
    """Check that a question can be asked in pieces; return it as it can stand inside of another one.

    Raises
    ------
    UsageError
        It cannot, and why.
    """
    [(text,)] = database.execute("SELECT json_serialize_sql(?)", [question]).fetchall()
    try:
        [statement] = json.loads(text)["statements"]
    except (KeyError, ValueError) as error:  # not one, or no SELECT
        raise _refused("it is not one SELECT") from error
    node = statement["node"]
    table = node.get("from_table") or {}
    if node.get("type") != "SELECT_NODE" or table.get("type") != "BASE_TABLE" or table.get("table_name") not in TABLES:
        raise _refused("it is not about one table of the data set")
    if node.get("modifiers") or node.get("qualify") or node.get("sample") or node.get("cte_map", {}).get("map"):
        raise _refused("it has ORDER BY, LIMIT, DISTINCT, QUALIFY, WITH or a sample")
    if table.get("sample") or table.get("at_clause") or table.get("column_name_alias"):
        raise _refused("it renames the columns of its table, or samples it")
    is_grouped = _is_grouped(node)
    if not is_grouped and (node.get("group_expressions") or node.get("having") or _groups_all(node)):
        raise _refused("it groups rows, but not by rank or trace")
    expressions = [
        one
        for name in ("select_list", "where_clause", "group_expressions", "having")
        for one in _expressions(node.get(name))
    ]
    if others := {one["class"] for one in expressions} - _BY_ROW:
        raise _refused(f"it has {', '.join(sorted(others))}")
    _check_functions(database, expressions, is_grouped=is_grouped)
    [(written,)] = database.execute("SELECT json_deserialize_sql(?)", [text]).fetchall()
    return str(written)


def _groups_all(node: dict[str, Any]) -> bool:
    return bool(node.get("aggregate_handling") != "STANDARD_HANDLING")  # GROUP BY ALL


def _is_grouped(node: dict[str, Any]) -> bool:
    """Return whether the rows are grouped by a rank or a trace."""
    if any(one.get("alias") in _WHOLE for one in node["select_list"]):
        return False  # it may be the name of something else
    grouped = node["select_list"] if _groups_all(node) else node["group_expressions"]
    sets = node.get("group_sets") or []
    return len(sets) < 2 and any(
        one.get("class") == "COLUMN_REF" and one["column_names"][-1] in _WHOLE for one in grouped
    )


def _check_functions(database: Any, expressions: list[dict[str, Any]], *, is_grouped: bool) -> None:
    names = {one["function_name"] for one in expressions if one["class"] == "FUNCTION"}
    rows = database.execute(
        "SELECT DISTINCT function_name, function_type FROM duckdb_functions() WHERE function_name IN (FROM unnest(?))",
        [sorted(names)],
    ).fetchall()
    kinds: dict[str, set[str]] = {name: set() for name in names}
    for name, kind in rows:
        kinds[name].add(kind)
    for name, of_name in sorted(kinds.items()):
        if of_name == {"aggregate"} and not is_grouped:
            raise _refused(f"{name} is over all rows; group them by rank or trace")
        if of_name not in ({"scalar"}, {"aggregate"}):
            raise _refused(f"{name} may need other rows")


def _expressions(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the expressions in a part of a statement."""
    if isinstance(tree, list):
        for one in tree:
            yield from _expressions(one)
    elif isinstance(tree, dict):
        if isinstance(tree.get("class"), str):
            yield tree
        for one in tree.values():
            yield from _expressions(one)


def _refused(why: str) -> UsageError:
    return UsageError(f"--engine ray cannot ask this in pieces: {why}; leave --engine out")
