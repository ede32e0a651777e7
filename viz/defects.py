"""What the sanitizer found, as the page shows it: in words, and tied to the operations that are drawn."""

from __future__ import annotations

from typing import Any

from cudatool.analyze import Operations
from cudatool.sanitize import AccessSite, BufferSite, Finding, Report
from cudatool.sanitize.findings import DeviceFinding, location
from cudatool.sanitize.kinds import KINDS
from cudatool.sanitize.places import source_line, source_place
from cudatool.sanitize.views import sources
from cudatool.sanitize.witness import witness_lines
from cudatool.trace.model import Frame

__all__ = ["LONGEST_LINE", "defects"]

LONGEST_LINE = 300
"""Characters of a line of source that the page shows."""


def defects(found: Report, drawn: Operations) -> list[dict[str, Any]]:
    """Return findings as plain data, the certain ones first.

    An ``operation`` is an index into the operations that are drawn, -1 for what is not among them: the host, or what
    did not run.
    """
    operation: dict[int, int] = {}
    for index, record in enumerate(drawn.call.tolist()):
        operation.setdefault(record, index)
    return [
        *(_race(finding, True, operation) for finding in found.findings),
        *(_race(finding, False, operation) for finding in found.possible),
        *(_on_device(finding, operation) for finding in found.on_device),
    ]


def _race(finding: Finding, certain: bool, operation: dict[int, int]) -> dict[str, Any]:
    return {
        **_common(finding, certain),
        "bytes": [finding.start, finding.size],
        "sides": [_side(side, operation) for side in (finding.first, finding.second)],
        "why": finding.reason,
        "repair": finding.repair,
        "proof": [f"{label:<8} {text}" for label, text in witness_lines(finding)],
    }


def _side(side: AccessSite, operation: dict[int, int]) -> dict[str, Any]:
    through = f" through {side.argument}" if side.argument else ""
    return {
        "text": f"{side.mode}{'' if side.exact else ' at most'} by {side.operation}{through} on {side.agent}",
        "stack": _stack(side.stack),
        "operation": operation.get(side.record, -1),
    }


def _on_device(finding: DeviceFinding, operation: dict[int, int]) -> dict[str, Any]:
    by = f"{finding.mode} by {finding.operation}" if finding.mode else finding.operation
    on = f" on {finding.agent}" if finding.agent else ""
    threads = [
        [f"{source}, {thread}", source_line(*at)[:LONGEST_LINE] if (at := source_place(source)) else ""]
        for thread, source in sources(finding)
    ]
    side = {
        "text": by + on,
        "stack": [*threads, *_stack(finding.stack)],
        "operation": operation.get(finding.record, -1),
    }
    return {
        **_common(finding, True),
        "bytes": [finding.address, finding.size] if finding.space == "global" else None,
        "sides": [side],
        "why": finding.text,
        "repair": "",
        "proof": [],
    }


def _common(finding: Finding | DeviceFinding, certain: bool) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "title": KINDS[finding.kind].title,
        "certain": certain,
        "count": finding.count,
        "buffer": _buffer(finding.buffer),
        "fingerprint": finding.fingerprint,
    }


def _buffer(buffer: BufferSite | None) -> dict[str, Any] | None:
    if buffer is None:
        return None
    where = location(buffer.stack)
    return {"address": buffer.address, "size": buffer.size, "where": where, "stack": _stack(buffer.stack)}


def _stack(stack: tuple[Frame, ...]) -> list[list[str]]:
    """Return each frame in words, and the line of source that stands there, if it can be read now."""
    return [
        [f"{frame.file}:{frame.line} in {frame.function}", source_line(frame.file, frame.line)[:LONGEST_LINE]]
        for frame in stack
    ]
