"""The end of a run, for pytest: nothing until the first report of a test, if tests are to be checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from cudatool.testing.options import is_on

if TYPE_CHECKING:
    from cudatool.testing.totals import Totals

__all__ = ["SummaryPlugin"]

_CRASHED: Final = "???"  # what pytest-xdist gives for the part of a test in which its process ended


class SummaryPlugin:
    """A plugin of its own in each process; the one that prints has heard of every test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._totals: Totals | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what the reports carry."""
        result: dict[str, Any] | None = getattr(report, "cudatool", None)
        if hasattr(self._config, "workerinput") or (result is None and not self._calls_tests()):
            return
        if self._totals is None:
            from cudatool.testing.totals import Totals  # the sanitizer: most of pytest's runs do not need it

            self._totals = Totals(self._config)
        if result is not None:  # else it was skipped, or is not to be checked: if all are, nothing was checked
            self._totals.add(report.nodeid, result)
        elif str(report.when) == _CRASHED:
            self._totals.add_crashed(report.nodeid)

    def _calls_tests(self) -> bool:
        """Return whether tests are to be checked and called: ``--setup-only`` and ``--setup-plan`` call none."""
        return is_on(self._config) and not self._config.getoption("setuponly")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the baseline and the files, and fail a run in which nothing was checked."""
        if self._totals is not None:
            self._totals.finish(session, exitstatus)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests were checked, what was found, and who took most memory."""
        if self._totals is not None:
            self._totals.print(terminalreporter)
