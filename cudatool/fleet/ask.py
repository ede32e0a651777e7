"""How the rules ask a data set about one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Ask", "Keep", "keep_here"]

Keep = Callable[[Any, str, str, dict[str, Any], int | None], None]
"""Makes a temporary table of the answer to a question, as :meth:`Ask.keep` says: ``(database, table, question, values,
together)``.
"""


def keep_here(database: Any, table: str, question: str, values: dict[str, Any], together: int | None) -> None:
    """Ask all parts at once, in this process."""
    database.execute(f"CREATE OR REPLACE TEMP TABLE {table} AS {question}", values)


class Ask:
    """Asks questions about a run, which they call ``$run``."""

    def __init__(self, database: Any, run: str, keep: Keep) -> None:
        self._database, self._run, self._keep = database, run, keep

    def __call__(self, question: str, **values: Any) -> list[dict[str, Any]]:
        """Return the rows of the answer; a question about kept tables need not name the run."""
        of_run = {"run": self._run} if "$run" in question else {}
        result = self._database.execute(question, of_run | values)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row, strict=True)) for row in result.fetchall()]

    def keep(self, table: str, question: str, *, together: int | None = None, **values: Any) -> None:
        """Keep the answer as a temporary table.

        The answer for all parts must be the answers for some parts each, one after the other, as of a filter or a
        grouping by rank: several processes may be asked, each about all parts of some ranks (:mod:`~.cluster`).

        Parameters
        ----------
        together
            A rank whose parts each of them needs beside its own.
        """
        self._keep(self._database, table, question, {"run": self._run, **values}, together)
