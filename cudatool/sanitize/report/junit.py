"""A report as JUnit XML, which every CI system shows: one failed test for each finding, one passed for each check."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from cudatool.sanitize.coverage import ended, gap_why
from cudatool.sanitize.findings import Finding, Report
from cudatool.sanitize.kinds import CHECKS, KINDS, check_of
from cudatool.sanitize.places import shown_path
from cudatool.sanitize.report.text import render_entry
from cudatool.sanitize.report.views import (
    ReportContext,
    ReportEntry,
    describe,
    entries,
    failure,
    not_asked_for,
    verdict,
    what,
    why_aside,
)
from cudatool.text import printable

__all__ = ["render_junit"]


def render_junit(report: Report, run: ReportContext) -> str:
    """Return the report as JUnit XML, with nothing that the schema of Jenkins' xUnit plugin (junit-10.xsd) lacks.

    It refuses a file with others, such as the file and line of a test: a finding's text says where it is.

    A finding that fails the run is a failure, a warning or a possible one passes with its text as output, and one that
    was set aside is skipped. A workload that failed is an error. What was not checked is a skipped test, and its checks
    are skipped, too; it is an error where nothing was checked or the recording is incomplete.
    """
    listed = list(entries(report))
    suites = ET.Element("testsuites")
    suite = ET.SubElement(suites, "testsuite", name="cudatool sanitize")
    for entry in listed:
        _case(suite, entry, run)
    failed = {check_of(entry.finding) for entry in listed if entry.level == "error"}
    for check in run.checks or CHECKS:
        if check not in failed:
            case = ET.SubElement(suite, "testcase", classname="cudatool.sanitize", name=check)
            if report.gaps:  # no pass: it saw nothing, or not everything
                ET.SubElement(case, "skipped", message=_xml(verdict(report)))
    for gap in report.gaps:
        case = ET.SubElement(suite, "testcase", classname="cudatool.sanitize.coverage", name=gap.kind.value)
        text = _xml(f"Not checked: {gap_why(gap)}")
        if failure(report):
            ET.SubElement(case, "error", type=report.outcome.value, message=text).text = text
        else:
            ET.SubElement(case, "skipped", message=text)
    if run.status:
        case = ET.SubElement(suite, "testcase", classname="cudatool.sanitize", name="workload")
        text = f"the workload itself {ended(run.status)}"
        ET.SubElement(case, "error", type="workload", message=text).text = text
    notes = [
        *report.notes,
        *(f"{shown_path(one.file, run.root)}:{one.line}: {one.text}" for one in report.remarks),
        *filter(None, [not_asked_for(run)]),
        verdict(report),
    ]
    ET.SubElement(suite, "system-out").text = _xml("\n".join(notes))
    counts = {"tests": "", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for attribute, tag in counts.items():
        count = str(len(suite.findall(f"testcase/{tag}" if tag else "testcase")))
        suite.set(attribute, count)
        if tag != "skipped":
            suites.set(attribute, count)
    for element in (suites, suite):
        element.set("time", "0")
    ET.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suites, encoding="unicode")


def _case(suite: ET.Element, entry: ReportEntry, run: ReportContext) -> None:
    finding = entry.finding
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"cudatool.sanitize.{check_of(finding)}",
        name=_xml(f"{finding.kind}: {what(finding)} ({finding.fingerprint})"),
    )
    text = _xml(render_entry(entry, run))
    if entry.level == "error":
        failure = ET.SubElement(case, "failure", type=finding.kind.value, message=_xml(KINDS[finding.kind].title))
        failure.text = text
    elif entry.aside is not None:
        ET.SubElement(case, "skipped", message=_xml(f"{entry.aside.by}: {why_aside(entry.aside, run.root)}"))
    else:
        standing = "Possible" if isinstance(finding, Finding) else "Warning"
        ET.SubElement(case, "system-out").text = f"{standing}: " + _xml(describe(finding))


def _xml(text: str) -> str:
    """Escape what cannot be shown, which is more than what XML cannot hold (XML 1.0, 2.2)."""
    return "\n".join(map(printable, text.split("\n")))
