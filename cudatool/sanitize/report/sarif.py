"""A report in the Static Analysis Results Interchange Format, SARIF 2.1.0 (OASIS), as code scanning services read it.

A kind of finding is a rule, a finding a result: its location is the line where the repair belongs, the other access
and the allocation are related locations (the message links to them), the host stacks are stacks. What was set aside
is there too, as suppressed. Paths are relative to ``%SRCROOT%``.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from cudatool.sanitize.coverage import gap_why
from cudatool.sanitize.findings import DeviceFinding, Finding, Report, SetAside
from cudatool.sanitize.kinds import KINDS, check_of, help_url
from cudatool.sanitize.places import relative_path
from cudatool.sanitize.report.views import ReportContext, ReportEntry, Site, around, entries, failure, sites, sources
from cudatool.source_text import SourceLine
from cudatool.text import json_text
from cudatool.trace.model import Frame

__all__ = ["FINGERPRINT", "render_sarif"]

FINGERPRINT = "cudatool/v1"
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "%SRCROOT%"
_KINDS = list(KINDS)


def render_sarif(report: Report, run: ReportContext) -> str:
    """Return the report as a SARIF log with one run."""
    log = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": _driver()},
                "originalUriBaseIds": {_ROOT: {"uri": f"file://{_quoted(run.root.rstrip(os.sep))}/"}},
                "invocations": [_invocation(report, run)],
                "results": [_Result(run.root).of(entry) for entry in entries(report)],
                "properties": {
                    "device": report.device,
                    "outcome": report.outcome,
                    "checks": list(run.checks),
                    "operations": report.operations,
                    "uncheckedLaunches": report.unchecked_launches,
                    "edges": dict(report.edges),
                },
            }
        ],
    }
    return json_text(log)


def _driver() -> dict[str, Any]:
    return {"name": "cudatool", "semanticVersion": version("cudatool"), "rules": [_rule(kind) for kind in _KINDS]}


def _rule(kind: Any) -> dict[str, Any]:
    text, url = KINDS[kind], help_url(kind)
    level = "error" if text.fails else "warning"
    rule = {
        "id": kind.value,
        "name": "".join(word.capitalize() for word in kind.value.split("-")),
        "shortDescription": {"text": text.title[0].upper() + text.title[1:] + "."},
        "fullDescription": {"text": text.help},
        "help": {
            "text": f"{text.help} See docs/findings.md, {kind}.",
            "markdown": f"{text.help}\n\n"
            + (f"[More on {kind}]({url})" if url else f"See `docs/findings.md`, {kind}."),
        },
        "defaultConfiguration": {"level": level},
        "properties": {"tags": ["cuda"], "precision": "high", "problem.severity": level},
    }
    return rule | ({"helpUri": url} if url else {})


def _invocation(report: Report, run: ReportContext) -> dict[str, Any]:
    notes = [{"level": "note", "message": {"text": note}} for note in report.notes]
    for gap in report.gaps:
        level = "error" if failure(report) else "warning"
        text = f"Not checked: {gap_why(gap)}"
        notes.append({"level": level, "descriptor": {"id": f"not-checked/{gap.kind}"}, "message": {"text": text}})
    for known in report.stale:
        text = f"Stale in the baseline: {known.fingerprint} ({known.what}) did not occur."
        notes.append({"level": "note", "message": {"text": text}})
    remarks = [
        {
            "level": "warning",
            "message": {"text": one.text},
            "locations": [_location(Frame(one.file, "", one.line), run.root)],
        }
        for one in report.remarks
    ]
    successful = not run.status and not failure(report)
    return {"executionSuccessful": successful, "toolExecutionNotifications": notes + remarks}


class _Result:
    """One finding on its way into a result; related locations get the numbers that its message links to."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._related: list[dict[str, Any]] = []

    def of(self, entry: ReportEntry) -> dict[str, Any]:
        finding = entry.finding
        shown, *others = sites(finding)
        parts = [_plain(shown.text)]
        parts += [self._link(other.text, other.frame) for other in others]
        parts += [self._source(place.text, place.source) for place in sources(finding)]
        if isinstance(finding, Finding):
            parts.append(_plain(finding.reason))
        elif finding.text != shown.text:
            parts.append(_plain(finding.text))
        parts += [self._link(site.text, site.frame) for site in around(finding)]
        message = ". ".join(_sentence(part) for part in parts) + "."
        if isinstance(finding, Finding) and finding.repair:
            message += f" Repair: {_plain(finding.repair)}"
        if entry.remark:
            message += f" {_plain(entry.remark)}"
        frame = shown.frame
        stacks = [self._stack(site) for site in (shown, *others, *around(finding)) if site.stack]
        result = {
            "ruleId": finding.kind.value,
            "ruleIndex": _KINDS.index(finding.kind),
            "level": ("error" if KINDS[finding.kind].fails else "warning") if entry.level == "none" else entry.level,
            "message": {"text": message},
            "locations": [_location(frame, self._root)] if frame else [],
            "relatedLocations": self._related,
            "stacks": [stack for index, stack in enumerate(stacks) if stack not in stacks[:index]],  # a set
            "occurrenceCount": finding.count,
            "partialFingerprints": {FINGERPRINT: finding.fingerprint},
            "suppressions": [_suppression(entry.aside, self._root)] if entry.aside else [],
            "properties": _properties(finding),
        }
        return result

    def _link(self, text: str, frame: Frame | None) -> str:
        if frame is None:
            return _plain(text)
        number = len(self._related) + 1
        location = _location(frame, self._root)
        self._related.append({"id": number, **location, "message": {"text": text}})
        return f"[{_plain(text)}]({number})"

    def _source(self, text: str, source: SourceLine) -> str:
        """A line of CUDA source: a link only if the file is there, most sources are strings in a program."""
        file = os.path.join(self._root, source.file)
        at = Frame(file, "", source.line) if os.path.isfile(file) else None
        return self._link(f"{text} at {source}", at)

    def _stack(self, site: Site) -> dict[str, Any]:
        frames = [{"location": _location(frame, self._root)} for frame in site.stack]
        return {"message": {"text": site.text}, "frames": frames}


@lru_cache(4096)
def _location(frame: Frame, root: str) -> dict[str, Any]:
    relative = relative_path(frame.file, root)
    location: dict[str, Any] = {}
    if relative is not None:
        location["physicalLocation"] = {"artifactLocation": {"uri": _quoted(relative), "uriBaseId": _ROOT}}
    elif os.path.isabs(frame.file):
        location["physicalLocation"] = {"artifactLocation": {"uri": f"file://{_quoted(frame.file)}"}}
    if location and frame.line > 0:
        location["physicalLocation"]["region"] = {"startLine": frame.line}
    if frame.function:
        location["logicalLocations"] = [{"fullyQualifiedName": frame.function, "kind": "function"}]
    return location


def _quoted(path: str) -> str:
    """Return a path as part of a URI, whatever bytes its names are made of."""
    return quote(path, errors="backslashreplace")


def _suppression(aside: SetAside, root: str) -> dict[str, Any]:
    """Who set a result aside: a comment is in the source, all else outside of it."""
    until = f" (until {aside.expires})" if aside.expires else ""
    reason = f"{aside.comment or aside.reason}{until}"
    said: dict[str, Any] = {"kind": "external", "status": "accepted", "justification": reason}
    if aside.comment is not None:
        said |= {"kind": "inSource", "location": _location(Frame(aside.comment.file, "", aside.comment.line), root)}
    return said


def _properties(finding: Finding | DeviceFinding) -> dict[str, Any]:
    facts: dict[str, Any] = {"check": check_of(finding), "bytes": finding.size}
    if isinstance(finding, Finding):
        facts |= {"address": hex(finding.start), "repair": finding.repair}
        if finding.witness is not None:
            facts["witness"] = f"two legal orders of the work differ in {finding.witness.observed_at}"
    else:
        facts |= {"address": hex(finding.address), "space": finding.space}
    if finding.buffer is not None:
        facts |= {"bufferAddress": hex(finding.buffer.address), "bufferBytes": finding.buffer.size}
    return facts


def _sentence(text: str) -> str:
    """Begin with a capital, also inside of a link, and leave out the full stop."""
    return re.sub(r"^\[?\w", lambda match: match[0].upper(), text).rstrip(".")


def _plain(text: str) -> str:
    """Escape what would be a link in a message (SARIF 2.1.0, 3.11.6)."""
    return text.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
