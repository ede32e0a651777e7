"""A report as text for a terminal and as JSON for a program."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from typing import Any

from cudatool.sanitize.coverage import ended, gap_why
from cudatool.sanitize.explore import schedule_lines
from cudatool.sanitize.findings import DeviceFinding, Finding, Outcome, Report, SetAside
from cudatool.sanitize.kinds import KINDS, check_of
from cudatool.sanitize.places import shown_path, source_line
from cudatool.sanitize.report.views import (
    ReportContext,
    ReportEntry,
    Site,
    entries,
    not_asked_for,
    place,
    process_words,
    sites,
    sources,
    times,
    verdict,
    which_bytes,
    why_aside,
)
from cudatool.sanitize.witness import witness_lines
from cudatool.source_text import SourceLine
from cudatool.text import json_text, printable, short_arguments
from cudatool.trace.frames import user_frames
from cudatool.trace.model import Frame
from cudatool.units import counted, format_bytes

__all__ = ["SCHEMA", "render_entry", "render_json", "render_text"]

SCHEMA = "cudatool.sanitize/1"
_FRAMES = 8  # of a stack, in the text report
_LABEL = 8  # columns of what a line is about


def render_json(report: Report, run: ReportContext | None = None) -> str:
    """Return the report as one JSON object, schema ``cudatool.sanitize/1``: raw bytes, addresses as numbers.

    ``cudatool schema sanitize`` describes it.
    """
    payload: dict[str, Any] = {"schema": SCHEMA, "outcome": report.outcome, **_plain(report)}
    payload["findings"] += payload["on_device"]  # everything that fails the run; `on_device` is a part of it
    for gap, data in zip(report.gaps, payload["gaps"], strict=True):
        data["text"] = gap_why(gap)
    if run is not None:
        payload |= {"checks": list(run.checks), "workload_status": run.status}
    return json_text(payload)


def _plain(value: Any) -> Any:
    """Dataclasses, frames and tuples as objects and lists."""
    if isinstance(value, Frame | SourceLine):
        return value._asdict()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def render_text(report: Report, run: ReportContext | None = None, *, color: bool = False, width: int = 80) -> str:
    """Return the report for a terminal of `width` columns; `color` adds ANSI colours, and nothing depends on them.

    The verdict, which comes last, is one line, however long. Source lines are quoted where their files can be read.
    """
    style = _Style(color, max(width, 40), run or ReportContext(os.getcwd()))
    blocks: list[str] = []
    fail = len(report.findings) + len(report.on_device)
    headings = {fail + len(report.warnings): "Possible: an operation below may access less than is assumed."}
    if report.warnings:
        headings[fail] = "Warnings: these break a rule and change no result. They do not fail the run."
    for number, entry in enumerate(entry for entry in entries(report) if entry.aside is None):
        if number in headings:
            blocks.append(style.wrap(headings[number], ""))
        blocks.append(style.entry(entry, f"{number + 1}. "))
    blocks.append(style.summary(report, run))
    return "\n\n".join(blocks)


def render_entry(entry: ReportEntry, run: ReportContext) -> str:
    """Return one finding as the text report has it."""
    return _Style(False, 100, run).entry(entry)


class _Style:
    def __init__(self, color: bool, width: int, run: ReportContext) -> None:
        self._color = color
        self._width = width
        self._root = run.root
        self._recorded_at = run.recorded_at

    def paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._color else text

    def wrap(self, text: str, indent: str, first: str | None = None) -> str:
        start = indent if first is None else first
        return textwrap.fill(
            printable(text), self._width, initial_indent=start, subsequent_indent=indent, break_on_hyphens=False
        )

    def entry(self, entry: ReportEntry, number: str = "") -> str:
        finding = entry.finding
        check = "" if check_of(finding) == "race" else f"{check_of(finding)}: "
        title = f"{number}{check}{KINDS[finding.kind].title} [{finding.kind}]{times(finding)}"
        lines = [self.paint("1;31", self.wrap(title, ""))]
        lines += self._race(finding) if isinstance(finding, Finding) else self._on_device(finding)
        if finding.seen_in:
            lines.append(self._about("seen", f"under {', '.join(finding.seen_in)}"))
        if finding.processes:
            lines.append(self._about("in", ", ".join(finding.processes)))
        if entry.remark:
            lines.append(self._about("known", entry.remark))
        lines.append(self.paint("2", f"   fingerprint: {finding.fingerprint}"))
        return "\n".join(lines)

    def _race(self, finding: Finding) -> list[str]:
        *earlier, last = reversed(sites(finding))
        lines = [line for site in earlier for line in self._site("first", site)]
        lines += self._site("second" if earlier else "what", last)
        if launch := finding.second.launch or finding.first.launch:
            lines += self._site("graph", Site("launched", launch))
        if finding.size:  # of a wait there are none
            lines.append(self._about("bytes", which_bytes(finding)))
        if (buffer := finding.buffer) is not None:
            offset = finding.start - buffer.address
            where = f"from its byte {offset:,} on" if offset >= 0 else "from before its start"
            text = f"{format_bytes(buffer.size)} at 0x{buffer.address:x}, touched {where}, allocated"
            lines += self._site("buffer", Site(text + ("" if buffer.stack else " at an unknown line"), buffer.stack))
        lines.append(self._about("why", finding.reason))
        if finding.repair:
            lines.append(self.paint("32", self._about("repair", finding.repair)))
        lines += [self._about(label, text) for label, text in witness_lines(finding)]
        return lines

    def _on_device(self, finding: DeviceFinding) -> list[str]:
        (site,) = sites(finding)
        lines = []
        if finding.operation:
            lines.append(self.paint("1", self._about("what", site.text)))
        for by in sources(finding):
            label, thread = ("", by.text) if by.relation else ("thread", by.thread)
            lines.append(self._about(label, f"{thread} at {by.source}"))
            if by.source.file:
                lines += self._code(*by.source)
        if finding.mode:
            offset = "offset " if finding.space != "global" else ""
            lines.append(self._about("address", f"{offset}0x{finding.address:x}: {finding.text}"))
        else:
            lines.append(self._about("why", finding.text))
        if finding.stack:
            lines += self._site("from", Site("", finding.stack))
        if finding.buffer is not None and finding.check != "leak":
            text = f"{format_bytes(finding.buffer.size)} at 0x{finding.buffer.address:x}, allocated"
            lines += self._site("buffer", Site(text, finding.buffer.stack))
        return lines

    def _about(self, label: str, text: str) -> str:
        first = f"   {label + ':' if label else '':{_LABEL}} "
        return self.wrap(short_arguments(text), " " * len(first), first)

    def _site(self, label: str, site: Site) -> list[str]:
        lines = self._stack(site.stack)
        if site.text:
            return [self.paint("1", self._about(label, site.text)), *lines]
        lines[0] = self._about(label, lines[0].strip())
        return lines

    def _stack(self, stack: tuple[Frame, ...]) -> list[str]:
        """The frames of the user's own code, innermost first, with their source."""
        indent = " " * (_LABEL + 4)
        own = user_frames(stack)
        lines = []
        for frame in own[:_FRAMES]:
            file = shown_path(frame.file, self._root)
            lines.append(indent + printable(f"{file}:{frame.line} in {frame.function}"))
            lines += self._code(frame.file, frame.line)
        if len(own) > _FRAMES:
            lines.append(f"{indent}... and {len(own) - _FRAMES} more")
        return lines

    def _code(self, file: str, line: int) -> list[str]:
        indent = " " * (_LABEL + 6)
        text = " ".join(printable(source_line(file, line, recorded_at=self._recorded_at)).split())
        most = self._width - len(indent)
        short = text if len(text) <= most else f"{text[: most - 4].rstrip()} ..."
        return [self.paint("2", indent + short)] if short else []

    def summary(self, report: Report, run: ReportContext | None) -> str:
        lines = [self._set_aside(one) for one in report.set_aside]
        lines += [
            self.wrap(f"stale: {known.fingerprint} ({known.what}) did not occur: take it out of the baseline", "  ", "")
            for known in report.stale
        ]
        for one in report.remarks:
            lines.append(self.wrap(f"warning: {shown_path(one.file, self._root)}:{one.line}: {one.text}", "  ", ""))
        device = f" on {report.device}" if report.device else ""
        edges = ", ".join(f"{count:,} {rule}" for rule, count in report.edges.items())
        operations = counted(report.operations, "operation")
        lines.append(self.wrap(f"checked: {operations}{device}", "  ", ""))
        if rest := not_asked_for(run):
            lines.append(self.wrap(rest, "  ", ""))
        lines.append(self.wrap(f"ordering seen: {edges or 'stream order only'}", "  ", ""))
        for process in report.processes:
            lines.append(self.wrap(f"in {process.name}: {process_words(process)}", "  ", ""))
        lines += [self.wrap(text, "  ", "") for text in schedule_lines(report)]
        lines += [self.wrap(f"note: {note}", "  ", "") for note in report.notes]
        lines += [self.wrap(f"not checked: {gap_why(gap)}", "  ", "") for gap in report.gaps]
        if run is not None and run.status:
            lines.append(self.wrap(f"the workload itself {ended(run.status)}", "  ", ""))
        colour = {Outcome.FINDINGS: "1;31", Outcome.CLEAN: "1;32"}.get(report.outcome, "1;33")
        # One line, however long: scripts read the last one.
        lines.append(self.paint(colour, printable(verdict(report))))
        return "\n".join(lines)

    def _set_aside(self, one: SetAside) -> str:
        frame = place(one.finding)
        at = f" at {shown_path(frame.file, self._root)}:{frame.line}" if frame else ""
        until = f" until {one.expires}" if one.expires else ""
        said = {"baseline": "known", "rule": "suppressed", "comment": "ignored"}[one.by]
        why = why_aside(one, self._root)
        reason = f": {why}" if why else ""
        return self.wrap(f"{said}{until}: {one.finding.kind}{at} ({one.finding.fingerprint}){reason}", "  ", "")
