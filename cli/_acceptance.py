"""Options of ``cudatool sanitize`` for accepted findings: rules, and a baseline of known ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable
from datetime import date
from typing import TYPE_CHECKING, Any, TypeVar

from cudatool.cli._command import Files, option
from cudatool.errors import UsageError
from cudatool.sanitize import Baseline, accepted, accepts_races, known, parse_rules

if TYPE_CHECKING:
    from cudatool.sanitize import Report

__all__ = ["Acceptance", "acceptance_options"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Acceptance:
    """The options, already parsed: every error in them is raised before the workload runs."""

    def __init__(self, *, suppress: tuple[str, ...], baseline: str | None, update_baseline: bool) -> None:

        if update_baseline and not baseline:
            raise UsageError("--update-baseline needs --baseline FILE")
        self._rules = parse_rules(suppress)
        self._baseline = Baseline.read(baseline, may_be_new=update_baseline) if baseline else Baseline({})
        self.written = os.path.abspath(baseline) if baseline and update_baseline else None
        """The file that :meth:`applied` writes."""
        self.read = [text[1:] for text in suppress if text.startswith("@")]
        """The files that were read and that no result may replace."""
        if baseline and not update_baseline:
            self.read.append(baseline)

    def accepts_races(self, report: Report, checks: Collection[str]) -> bool:
        """Return whether races of the report are going to be set aside."""
        return self.written is not None or accepts_races(report, self._rules, self._baseline, checks, date.today())

    def applied(self, report: Report, checks: Collection[str], *, complete: bool, files: Iterable[str] = ()) -> Report:
        """Return the report without accepted findings; a `complete` run first updates the baseline, if requested.

        `files` are the program's sources: mistakes in their comments become remarks.
        """

        report = accepted(report, self._rules, files)
        if self.written and complete:
            self._baseline = self._baseline.updated(report, checks)
            self._baseline.write(self.written)
        return known(report, self._baseline, checks, date.today())


def acceptance_options(function: _F) -> _F:
    """Add the options to a command, which gets an :class:`Acceptance` for them."""

    @option(
        "--suppress",
        multiple=True,
        group="Known findings",
        setting="suppress",
        metavar="RULE|@FILE",
        help="Leave out findings for which every term of a rule holds, for example 'kind=race-* "
        "file=third_party/*.py'; terms are kind, file, function, operation and fingerprint. @FILE has one rule on each "
        "line.",
    )
    @option(
        "--baseline",
        type=Files(".json"),
        metavar="FILE",
        group="Known findings",
        setting="baseline",
        help="Findings that are known, each with a reason and a last day.",
    )
    @option(
        "--update-baseline",
        is_flag=True,
        group="Known findings",
        help="Write what is found now to the --baseline, keeping its reasons.",
    )
    @functools.wraps(function)
    def command(
        *args: Any, suppress: tuple[str, ...], baseline: str | None, update_baseline: bool, **kwargs: Any
    ) -> Any:
        acceptance = Acceptance(suppress=suppress, baseline=baseline, update_baseline=update_baseline)
        return function(*args, acceptance=acceptance, **kwargs)

    return command  # type: ignore[return-value]  # it takes the place of the function for click only
