"""What all tests of a run together came to, from the reports that their processes sent."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cudatool.errors import CudatoolError
from cudatool.sanitize import Gap, GapKind, Outcome, Report, ReportContext, render_json
from cudatool.sanitize.coverage import gap_why, merged_gaps
from cudatool.sanitize.explore import report_from_json
from cudatool.sanitize.places import project_root
from cudatool.sanitize.report.views import failure, verdict_words
from cudatool.testing.options import is_on, options_of
from cudatool.units import counted, format_bytes

__all__ = ["Totals", "packed"]


def packed(report: Report) -> str:
    """Return a report as text in ASCII, for the way from one of pytest's processes to another."""
    return json.dumps(render_json(report))  # ASCII: names of files may hold what UTF-8 cannot


class Totals:
    """What all tests of a run came to."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._device = ""
        self._checked: set[str] = set()
        self._peaks: dict[str, int] = {}
        self._reports: list[tuple[str, Report]] = []
        self._crashed: list[str] = []
        self._written: list[str] = []

    def add_crashed(self, test: str) -> None:
        """Add a test whose process ended in it: nobody knows what it did."""
        self._crashed.append(test)

    def add(self, test: str, result: dict[str, Any]) -> None:
        """Add what a test's report carries; see :meth:`cudatool.testing.session.Session.result`."""
        self._device = result["device"]
        if result["checked"]:
            self._checked.add(test)
        self._peaks[test] = max(result["peak"], self._peaks.get(test, 0))
        if result["report"]:
            self._reports.append((test, report_from_json(json.loads(result["report"]))))

    def finish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the baseline and the files, and fail a run in which nothing was checked."""
        options, report = options_of(self._config), self._together()
        empty = is_on(self._config) and failure(report)
        if empty and exitstatus == pytest.ExitCode.OK and not options.allows_empty:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        try:
            if options.updates_baseline and not empty:
                options.baseline.updated(report, options.checks).write(options.baseline_path)
                self._written.append(f"Wrote {options.baseline_path}")
            run = ReportContext(project_root(), options.checks)
            files = options.outputs.write(report, run, self._written.append)
            self._written += [f"Wrote {path}" for path in files]
        except CudatoolError as error:
            raise pytest.UsageError(str(error)) from error

    def _together(self) -> Report:
        """Return one report of all tests. Findings with the same fingerprint are one; a note names their tests."""
        reports = [report for _, report in self._reports]
        tests: dict[str, dict[str, None]] = {}  # by fingerprint, each once
        for test, report in self._reports:
            for one in report.all:
                tests.setdefault(one.fingerprint, {})[test] = None
        edges: Counter[str] = Counter()
        for report in reports:
            edges.update(report.edges)
        return Report(
            findings=_merged(one for report in reports for one in report.findings),
            possible=_merged(one for report in reports for one in report.possible),
            on_device=_merged(one for report in reports for one in report.on_device),
            warnings=_merged(one for report in reports for one in report.warnings),
            device=self._device,
            operations=sum(report.operations for report in reports),
            unchecked_launches=sum(report.unchecked_launches for report in reports),
            edges=dict(sorted(edges.items())),
            notes=(
                *sorted({note for report in reports for note in report.notes}),
                *(f"{fingerprint} is of {', '.join(names)}" for fingerprint, names in tests.items()),
            ),
            set_aside=tuple({one.finding.fingerprint: one for report in reports for one in report.set_aside}.values()),
            expired=tuple({one.fingerprint: one for report in reports for one in report.expired}.values()),
            remarks=tuple(dict.fromkeys(one for report in reports for one in report.remarks)),
            gaps=self._gaps(),
            dependent=_merged(one for report in reports for one in report.dependent),
        )

    def _gaps(self) -> tuple[Gap, ...]:
        """Return what was not checked in any test, or in all of them."""
        reports = [report for _, report in self._reports]
        crashed = tuple(f"the one that ran {test}" for test in self._crashed)
        ended = (Gap(GapKind.FAILED_PROCESSES, len(crashed), crashed),) if crashed else ()
        gaps = merged_gaps([*(report.gaps for report in reports), ended], add=True)
        if (self._checked or is_on(self._config)) and not any(report.operations or report.all for report in reports):
            return (Gap(GapKind.OPERATIONS, whole=True), *gaps)
        return gaps

    def print(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests were checked, what was found, and who took most memory."""
        write = terminalreporter.write_line
        terminalreporter.section(f"cudatool on {self._device}" if self._device else "cudatool")
        if self._checked or is_on(self._config):
            operations = sum(report.operations for _, report in self._reports)
            write(f"{counted(len(self._checked), 'test')} checked, {counted(operations, 'operation')} on the device")
            self._print_findings(terminalreporter)
        for gap in self._gaps():
            write(f"not checked: {gap_why(gap)}", yellow=True)
        ranking = sorted(self._peaks.items(), key=lambda item: (-item[1], item[0]))[: options_of(self._config).most]
        if ranking and ranking[0][1]:
            write("device memory at the peak of a test:")
        for test, peak in ranking:
            if peak:
                write(f"{format_bytes(peak):>12}  {test}")
        for line in self._written:
            write(line)

    def _print_findings(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        found = [
            (kind, test)
            for test, report in self._reports
            for kind in (*(one.kind for one in report.findings), *(one.kind for one in report.on_device))
        ]
        for kind, count in sorted(Counter(kind for kind, _ in found).items()):
            tests = len({test for one, test in found if one == kind})
            write(f"{count:>6,} {kind} in {counted(tests, 'test')}", red=True)
        warned = Counter(one.kind for _, report in self._reports for one in report.warnings)
        for kind, count in sorted(warned.items()):
            write(f"{count:>6,} {kind}: a warning, of which no test fails", yellow=True)
        if possible := sum(len(report.possible) for _, report in self._reports):
            write(f"{possible:>6,} possible: an operation may access less than is assumed")
        if aside := sum(len(report.set_aside) for _, report in self._reports):
            write(f"{aside:>6,} set aside by comments, rules or the baseline")
        if not found:
            outcome = self._together().outcome
            write(verdict_words(outcome), green=outcome is Outcome.CLEAN, yellow=outcome is not Outcome.CLEAN)


def _merged(findings: Any) -> tuple[Any, ...]:
    """Return the first of each fingerprint, with the number of all."""
    first: dict[str, Any] = {}
    for one in findings:
        known = first.get(one.fingerprint)
        first[one.fingerprint] = one if known is None else replace(known, count=known.count + one.count)
    return tuple(first.values())
