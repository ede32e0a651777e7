"""A report as text for a terminal and as JSON for a program."""

from __future__ import annotations

import dataclasses
import json
import linecache
import textwrap
from typing import Any

from cudatool.sanitize.findings import AccessSite, DeviceFinding, Finding, FindingKind, Report
from cudatool.trace.model import Frame
from cudatool.units import format_bytes

__all__ = ["SCHEMA", "TITLES", "render_json", "render_text"]

SCHEMA = "cudatool.sanitize/1"
_FRAMES = 8  # of a stack, in the text report

TITLES = {
    FindingKind.RACE_RAW: "race: a read that may come before the write",
    FindingKind.RACE_WAR: "race: a write that may come before the read",
    FindingKind.RACE_WAW: "race: two writes in no order",
    FindingKind.RACE_HOST: "race: the host and the device, in no order",
    FindingKind.REUSE: "memory given to a new owner while a stream may still use it",
    FindingKind.USE_AFTER_FREE: "use of memory after it was freed",
    FindingKind.USE_BEFORE_ALLOC: "use of memory before its stream-ordered allocation",
    FindingKind.WAIT_UNRECORDED: "a wait for an event that was not recorded yet",
    FindingKind.CAPTURE_MISSED: "work beside a capture that needs what was captured",
    FindingKind.CAPTURED_EVENT: "a wait for an event that belongs to a captured graph",
    FindingKind.OUT_OF_BOUNDS: "access out of bounds",
    FindingKind.HOST_POINTER: "a kernel uses a pointer of the host",
    FindingKind.MISALIGNED: "misaligned access",
    FindingKind.UNINITIALIZED: "read of memory that was never written",
    FindingKind.KERNEL_RACE: "race between threads of a kernel",
    FindingKind.BARRIER_DIVERGENCE: "a barrier that not all threads come to",
    FindingKind.BAD_MASK: "a warp operation with a wrong member mask",
    FindingKind.INVALID_FREE: "free of what is no allocation",
    FindingKind.DOUBLE_FREE: "memory freed twice",
    FindingKind.INVALID_COPY: "copy or fill beyond its memory",
    FindingKind.LEAK: "memory never given back",
}


def render_json(report: Report) -> str:
    """Return the report as one JSON object, schema ``cudatool.sanitize/1``: raw bytes, addresses as numbers."""
    payload: dict[str, Any] = {"schema": SCHEMA, **_plain(report)}
    return json.dumps(payload, indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Dataclasses, frames and tuples as objects and lists."""
    if isinstance(value, Frame):
        return value._asdict()
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def render_text(report: Report, *, color: bool = False, width: int = 80) -> str:
    """Return the report for a terminal of `width` columns; `color` adds ANSI colours, and nothing depends on them.

    Source lines are quoted where their files can be read.
    """
    style = _Style(color, max(width, 40))
    blocks = [style.finding(finding, number) for number, finding in enumerate(report.findings, 1)]
    if report.possible:
        blocks.append(style.wrap("Possible: an operation below may touch less than it is said to.", ""))
        blocks += [
            style.finding(finding, number) for number, finding in enumerate(report.possible, len(report.findings) + 1)
        ]
    first = len(report.findings) + len(report.possible) + 1
    blocks += [style.device_finding(finding, number) for number, finding in enumerate(report.on_device, first)]
    blocks.append(style.summary(report))
    return "\n\n".join(blocks)


class _Style:
    def __init__(self, color: bool, width: int) -> None:
        self._color = color
        self._width = width

    def paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._color else text

    def wrap(self, text: str, indent: str) -> str:
        return textwrap.fill(text, self._width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)

    def finding(self, finding: Finding, number: int) -> str:
        title = f"{number}. {TITLES[finding.kind]} [{finding.kind}]"
        if finding.count > 1:
            title += f", {finding.count:,} times"
        lines = [self.paint("1;31", self.wrap(title, ""))]
        for side in (finding.first, finding.second):
            lines += self._side(side)
        end = finding.start + finding.size - 1
        lines.append(self.wrap(f"bytes: {format_bytes(finding.size)} at 0x{finding.start:x} to 0x{end:x}", "   "))
        if finding.buffer is not None:
            offset = finding.start - finding.buffer.address
            where = f"at its byte {offset:,}" if offset >= 0 else "from before its start"
            lines.append(
                self.wrap(
                    f"in: a buffer of {format_bytes(finding.buffer.size)} at 0x{finding.buffer.address:x}, {where}, "
                    "allocated at" + ("" if finding.buffer.stack else " an unknown line"),
                    "   ",
                )
            )
            lines += self._stack(finding.buffer.stack)
        lines.append(self.wrap(f"why: {finding.reason}", "   "))
        if finding.repair:
            lines.append(self.paint("32", self.wrap(f"repair: {finding.repair}", "   ")))
        lines.append(self.paint("2", f"   fingerprint: {finding.fingerprint}"))
        return "\n".join(lines)

    def device_finding(self, finding: DeviceFinding, number: int) -> str:
        title = f"{number}. {finding.check}: {TITLES[finding.kind]} [{finding.kind}]"
        if finding.count > 1:
            title += f", {finding.count:,} times"
        lines = [self.paint("1;31", self.wrap(title, ""))]
        if finding.operation:
            what = (
                f"{finding.mode} of {format_bytes(finding.size)} in {finding.space} memory by " if finding.mode else ""
            )
            where = f" on {finding.agent}" if finding.block else ""
            lines.append(self.paint("1", self.wrap(f"{what}{finding.operation}{where}", "   ")))
        if finding.block:
            lines.append(self._thread(finding.block, finding.thread, finding.source))
        if finding.other_thread:
            lines.append(self._thread(finding.other_block, finding.other_thread, finding.other_source, "after "))
        if finding.mode:
            offset = "offset " if finding.space != "global" else ""
            lines.append(self.wrap(f"address: {offset}0x{finding.address:x}: {finding.text}", "   "))
        else:
            lines.append(self.wrap(f"why: {finding.text}", "   "))
        if finding.stack:
            lines.append(self.wrap("launched at" if finding.block else "at", "   "))
            lines += self._stack(finding.stack)
        if finding.buffer is not None and finding.check != "leak":
            size = format_bytes(finding.buffer.size)
            lines.append(self.wrap(f"memory: {size} at 0x{finding.buffer.address:x}, allocated at", "   "))
            lines += self._stack(finding.buffer.stack)
        lines.append(self.paint("2", f"   fingerprint: {finding.fingerprint}"))
        return "\n".join(lines)

    def _thread(self, block: tuple[int, ...], thread: tuple[int, ...], source: str, before: str = "") -> str:
        text = self.wrap(f"{before}thread {thread} of block {block} at {source}", "   ")
        file, _, line = source.rpartition(":")
        if line.isdigit() and (code := linecache.getline(file, int(line)).strip()):
            text += "\n" + self.paint("2", "       " + textwrap.shorten(code, self._width - 7, placeholder=" ..."))
        return text

    def _side(self, side: AccessSite) -> list[str]:
        argument = f" through {side.argument}" if side.argument else ""
        inexact = "" if side.exact else " at most"
        text = f"{side.mode}{inexact} by {side.operation}{argument} on {side.agent}"
        if side.operation == "host access":
            text = f"{side.mode}{inexact} by {side.agent}"
        return [self.paint("1", self.wrap(text, "   ")), *self._stack(side.stack)]

    def _stack(self, stack: tuple[Frame, ...]) -> list[str]:
        lines = []
        for frame in stack[:_FRAMES]:
            lines.append(f"     {frame.file}:{frame.line} in {frame.function}")
            if source := linecache.getline(frame.file, frame.line).strip():
                lines.append(self.paint("2", "       " + textwrap.shorten(source, self._width - 7, placeholder=" ...")))
        if len(stack) > _FRAMES:
            lines.append(f"     ... and {len(stack) - _FRAMES} more")
        return lines

    def summary(self, report: Report) -> str:
        found = len(report.findings) + len(report.on_device)
        verdict = "no findings" if not found else "1 finding" if found == 1 else f"{found:,} findings"
        if report.possible:
            verdict += f", {len(report.possible):,} possible"
        lines = [self.paint("1;31" if found else "1;32", f"cudatool sanitize: {verdict}")]
        device = f" on {report.device}" if report.device else ""
        edges = ", ".join(f"{count:,} {rule}" for rule, count in report.edges.items())
        lines.append(
            self.wrap(f"checked {report.operations:,} operation{'' if report.operations == 1 else 's'}{device}", "  ")
        )
        lines.append(self.wrap(f"ordering seen: {edges or 'stream order only'}", "  "))
        lines += [self.wrap(f"note: {note}", "  ") for note in report.notes]
        return "\n".join(lines)
