"""A report as GitLab's Code Quality JSON, which merge requests show beside the changed lines."""

from __future__ import annotations

from cudatool.sanitize.coverage import gap_why
from cudatool.sanitize.findings import Report, digest
from cudatool.sanitize.kinds import KINDS
from cudatool.sanitize.places import relative_path
from cudatool.sanitize.report.views import Run, describe, ended, entries, failure, place
from cudatool.text import json_text, printable

__all__ = ["render_gitlab"]


def render_gitlab(report: Report, run: Run) -> str:
    """Return what was found and not set aside, what was not checked, and a workload that failed.

    What has no line in the repository is at line 1 of ``.``: GitLab takes no absolute path.
    """
    found = []
    for entry in entries(report):
        if entry.aside is not None:
            continue
        finding, frame = entry.finding, place(entry.finding)
        path = relative_path(frame.file, run.root) if frame else None
        text = f"{KINDS[finding.kind].title}: {describe(finding)}"
        if frame and path is None:
            text += f" ({frame.file}:{frame.line})"
        found.append(
            {
                "description": printable(text),
                "check_name": finding.kind.value,
                "fingerprint": finding.fingerprint,
                "severity": "critical" if entry.level == "error" else "minor",
                "location": {"path": path or ".", "lines": {"begin": max(frame.line, 1) if frame and path else 1}},
            }
        )
    rest = [
        (f"Not checked: {gap_why(gap)}", f"not-checked-{gap.kind}", "blocker" if failure(report) else "info")
        for gap in report.gaps
    ]
    if run.status:
        rest.append((f"the workload itself {ended(run.status)}", "workload", "blocker"))
    for text, name, severity in rest:
        found.append(
            {
                "description": text,
                "check_name": name,
                "fingerprint": digest((name,)),
                "severity": severity,
                "location": {"path": ".", "lines": {"begin": 1}},
            }
        )
    return json_text(found)
