"""The reference of a data set's tables in docs/fleet.md: `python tests/fleet_reference.py` writes it again."""

from __future__ import annotations

from pathlib import Path

from cudatool.fleet.schema import PARTITIONS, TABLES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fleet.md"
START = "## Tables\n"


def reference() -> str:
    """Return a section for the folders and for each table."""
    parts = []
    for name, columns in {"every table": PARTITIONS, **TABLES}.items():
        rows = "\n".join(f"| `{column.name}` | {column.type} | {column.meaning} |" for column in columns)
        parts.append(f"### {name}\n\n| column | type | what |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def page() -> str:
    """Return the page with the reference as it should be."""
    before, _, after = PAGE.read_text().partition(START)
    return before + START + after.partition("\n### ")[0] + "\n" + reference()


if __name__ == "__main__":
    PAGE.write_text(page())
