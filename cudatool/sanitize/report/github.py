"""A report for GitHub Actions: annotations on the changed lines, and a page for the job.

Workflow commands: one line of the log each, ``::error file=...,line=...,title=...::message``. The page is Markdown, put
at the end of the file that ``GITHUB_STEP_SUMMARY`` names.
"""

from __future__ import annotations

import html

from cudatool.sanitize.coverage import ended, gap_why
from cudatool.sanitize.findings import Report
from cudatool.sanitize.kinds import KINDS
from cudatool.sanitize.places import shown_path
from cudatool.sanitize.report.text import render_entry
from cudatool.sanitize.report.views import (
    ReportContext,
    ReportEntry,
    describe,
    entries,
    failure,
    not_asked_for,
    place,
    verdict,
    why_aside,
)
from cudatool.text import printable
from cudatool.trace.model import Frame

__all__ = ["render_github", "render_summary"]

_MOST = 50  # findings in full on the page: GitHub refuses pages beyond 1 MiB


def render_github(report: Report, run: ReportContext) -> str:
    """Return workflow commands: an error for each finding that fails the run, a warning for each other one."""
    lines = []
    for entry in entries(report):
        if entry.aside is None:
            text = f"{describe(entry.finding)} {entry.remark}".rstrip()
            title = f"{KINDS[entry.finding.kind].title} [{entry.finding.kind}]"
            lines.append(
                _command(entry.level, title, f"{text} ({entry.finding.fingerprint})", place(entry.finding), run)
            )
    for one in report.remarks:
        lines.append(_command("warning", "comment of cudatool", one.text, Frame(one.file, "", one.line), run))
    for known in report.stale:
        text = f"{known.fingerprint} ({known.what}) did not occur: take it out of the baseline"
        lines.append(_command("notice", "stale in the baseline", text, None, run))
    for gap in report.gaps:
        lines.append(_command("error" if failure(report) else "warning", "not checked", gap_why(gap), None, run))
    if run.status:
        text = f"the workload itself {ended(run.status)}"
        lines.append(_command("error", "cudatool sanitize", text, None, run))
    lines.append(verdict(report))
    return "\n".join(lines)


def _command(level: str, title: str, message: str, frame: Frame | None, run: ReportContext) -> str:
    properties = {}
    if frame is not None:
        properties = {"file": shown_path(frame.file, run.root), "line": str(frame.line)}
    properties["title"] = title
    values = ",".join(f"{name}={_escape(printable(value), ':,')}" for name, value in properties.items())
    return f"::{level} {values}::{_escape(printable(message))}"


def _escape(text: str, more: str = "") -> str:
    """Escape as the runner takes it back: a percent sign first, line ends, and in properties colon and comma."""
    for character in "%\r\n" + more:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def render_summary(report: Report, run: ReportContext) -> str:
    """Return the job's page: a table of all findings, then each that counts in full."""
    listed = list(entries(report))
    lines = [f"### {verdict(report)}", ""]
    if run.status:
        lines += [f"The workload itself {ended(run.status)}.", ""]
    if listed:
        lines += ["| | kind | where | what |", "|---|---|---|---|", *(_row(entry, run.root) for entry in listed), ""]
    in_full = [entry for entry in listed if entry.aside is None]
    for entry in in_full[:_MOST]:
        title = html.escape(f"{entry.finding.kind}: {KINDS[entry.finding.kind].title}")
        text = html.escape(render_entry(entry, run))
        lines += [f"<details><summary>{title}</summary>", "", f"<pre>{text}</pre>", "</details>", ""]
    if len(in_full) > _MOST:
        lines += [f"{len(in_full) - _MOST} more are in the table only.", ""]
    lines += [f"- Not checked: {_cell(gap_why(gap))}" for gap in report.gaps]
    lines += [f"- {_cell(note[:1].upper() + note[1:])}" for note in filter(None, [not_asked_for(run)])]
    lines += [f"- {_cell(note)}" for note in report.notes]
    return "\n".join(lines) + "\n"


def _row(entry: ReportEntry, root: str) -> str:
    frame = place(entry.finding)
    where = f"{shown_path(frame.file, root)}:{frame.line}" if frame else ""
    standing = f"{entry.aside.by}: {why_aside(entry.aside, root)}" if entry.aside else entry.level
    cells = [standing, entry.finding.kind.value, where, KINDS[entry.finding.kind].title]
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Escape for a cell of a Markdown table: what came from a program is text, not markup."""
    escaped = html.escape(printable(text.replace("\n", " "))).replace("|", "&#124;")
    return "".join(f"\\{character}" if character in "\\`*_[]" else character for character in escaped)
