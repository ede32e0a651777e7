"""A report as GitLab's Code Quality JSON, which merge requests show beside the changed lines."""

from __future__ import annotations

import os
from pathlib import PurePath

from cudatool.sanitize.coverage import ended, gap_why
from cudatool.sanitize.findings import DeviceFinding, Finding, Report
from cudatool.sanitize.fingerprints import digest
from cudatool.sanitize.kinds import KINDS
from cudatool.sanitize.places import relative_path
from cudatool.sanitize.report.views import ReportContext, describe, entries, failure, place, sites
from cudatool.text import json_text, printable
from cudatool.trace.frames import user_frames

__all__ = ["render_gitlab"]


def render_gitlab(report: Report, run: ReportContext) -> str:
    """Return what was found and not set aside, what was not checked, and a workload that failed.

    GitLab asks for "the relative path to the file" and the line. It links to lines of the repository: where the stacks
    have one, it is that. Else it is the finding's own line, at a path that leads out of the repository (``../lib.py``).
    What has no line of a file, as what was not checked, is at line 1 of ``.``.
    """
    found = []
    for entry in entries(report):
        if entry.aside is not None:
            continue
        finding, own = entry.finding, place(entry.finding)
        text = f"{KINDS[finding.kind].title}: {describe(finding)}"
        path, line = _location(finding, run.root)
        if own and relative_path(own.file, run.root) is None:
            text += f" ({own.file}:{own.line})"
        found.append(
            {
                "description": printable(text),
                "check_name": finding.kind.value,
                "fingerprint": finding.fingerprint,
                "severity": "critical" if entry.level == "error" else "minor",
                "location": {"path": path, "lines": {"begin": line}},
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


def _location(finding: Finding | DeviceFinding, root: str) -> tuple[str, int]:
    """Return the path from `root` to the file that a finding is shown at, and the line."""
    own = place(finding)
    frames = [*filter(None, [own]), *(frame for site in sites(finding) for frame in user_frames(site.stack))]
    for frame in frames:
        path = relative_path(frame.file, root)
        if path is not None:
            return path, max(frame.line, 1)
    if own is not None and os.path.isabs(own.file):
        return PurePath(os.path.relpath(own.file, root)).as_posix(), max(own.line, 1)
    return ".", 1
