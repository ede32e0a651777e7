"""The end of a run: what all tests together came to, from the reports that their processes sent."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Final

import pytest

__all__ = ["Summary"]

_LISTS: Final = ("findings", "possible", "on_device")


class Summary:
    """A plugin of its own in each process; the one that prints has heard of every test.

    Parameters
    ----------
    most
        How many tests to list by the memory that they allocated.
    path
        Where to write all findings, empty for nowhere.
    """

    def __init__(self, most: int, path: str) -> None:
        self._most = most
        self._path = path
        self._device = ""
        self._checked: set[str] = set()
        self._peaks: dict[str, int] = {}
        self._reports: list[tuple[str, dict[str, Any]]] = []  # test, what `cudatool sanitize --json` would print

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what the reports carry."""
        told: dict[str, Any] | None = getattr(report, "cudatool", None)
        if told is None:
            return
        self._device = told["device"]
        if told["checked"]:
            self._checked.add(report.nodeid)
        self._peaks[report.nodeid] = max(told["peak"], self._peaks.get(report.nodeid, 0))
        if told["report"]:
            self._reports.append((report.nodeid, json.loads(told["report"])))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests were checked, what was found, and who took most memory."""
        if not self._device:
            return
        from cudatool.units import format_bytes

        write = terminalreporter.write_line
        terminalreporter.section(f"cudatool on {self._device}", sep="=")
        if self._checked:
            operations = sum(report["operations"] for _, report in self._reports)
            write(f"{len(self._checked):,} tests checked, {operations:,} operations on the device")
            self._print_findings(terminalreporter)
        if unchecked := sum(report["unchecked_launches"] for _, report in self._reports):
            write(f"{unchecked:,} launches not checked: what they access is not known")
        ranking = sorted((peak, test) for test, peak in self._peaks.items() if peak)[::-1][: self._most]
        if ranking:
            write("device memory at the peak of a test:")
        for peak, test in ranking:
            write(f"{format_bytes(peak):>12}  {test}")
        if self._path:
            write(f"Wrote {self._path}")

    def _print_findings(self, terminalreporter: pytest.TerminalReporter) -> None:
        certain = [(one["kind"], test) for test, report in self._reports for one in _certain(report)]
        for kind, count in sorted(Counter(kind for kind, _ in certain).items()):
            tests = len({test for one, test in certain if one == kind})
            terminalreporter.write_line(f"{count:>6,} {kind} in {tests:,} test{'' if tests == 1 else 's'}", red=True)
        if possible := sum(len(report["possible"]) for _, report in self._reports):
            terminalreporter.write_line(f"{possible:>6,} possible: an operation may touch less than it is said to")
        if not certain:
            terminalreporter.write_line("no findings", green=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write all findings to one file, as ``cudatool sanitize --json`` prints them; each names its test."""
        if not self._path or hasattr(session.config, "workerinput"):
            return
        together: dict[str, Any] = {
            "schema": "cudatool.sanitize/1",
            "device": self._device,
            "tests": len(self._checked),
            "operations": sum(report["operations"] for _, report in self._reports),
            "unchecked_launches": sum(report["unchecked_launches"] for _, report in self._reports),
        }
        for name in _LISTS:
            together[name] = [{**one, "test": test} for test, report in self._reports for one in report[name]]
        edges: Counter[str] = Counter()
        for _, report in self._reports:
            edges.update(report["edges"])
        together["edges"] = dict(sorted(edges.items()))
        together["notes"] = sorted({note for _, report in self._reports for note in report["notes"]})
        try:
            with open(self._path, "w", encoding="utf-8") as file:
                json.dump(together, file, indent=2)
        except OSError as error:
            raise pytest.UsageError(f"{self._path}: cannot be written: {error.strerror}") from error


def _certain(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [*report["findings"], *report["on_device"]]
