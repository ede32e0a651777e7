"""The sanitizer's findings for the page: in words, and linked to the operations that are drawn."""

from __future__ import annotations

from typing import Any

from cudatool.analyze import Operations
from cudatool.sanitize import AccessSite, BufferSite, Finding, Report
from cudatool.sanitize.findings import DeviceFinding, location
from cudatool.sanitize.kinds import KINDS
from cudatool.sanitize.places import source_line
from cudatool.sanitize.report.views import sources
from cudatool.sanitize.witness import witness_lines
from cudatool.trace.model import Frame

__all__ = ["LONGEST_LINE", "defects"]

LONGEST_LINE = 300
"""Characters of a line of source that the page shows."""


def defects(found: Report, drawn: Operations, recorded_at: float) -> list[dict[str, Any]]:
    """Return findings as plain data, the certain ones first.

    An ``operation`` is an index into the drawn operations, -1 for others: the host's, or those that did not run. Source
    that has changed since `recorded_at` is not quoted.
    """
    words = _Words(drawn, recorded_at)
    return [
        *(words.race(finding, True) for finding in found.findings),
        *(words.race(finding, False) for finding in found.possible),
        *(words.on_device(finding) for finding in (*found.on_device, *found.warnings)),
    ]


class _Words:
    """The page's words for a finding."""

    def __init__(self, drawn: Operations, recorded_at: float) -> None:
        self._recorded_at = recorded_at
        self._operation: dict[int, int] = {}
        for index, record in enumerate(drawn.call.tolist()):
            self._operation.setdefault(record, index)

    def race(self, finding: Finding, certain: bool) -> dict[str, Any]:
        return {
            **self._common(finding, certain),
            "bytes": [finding.start, finding.size],
            "sides": [self._side(side) for side in (finding.first, finding.second)],
            "why": finding.reason,
            "repair": finding.repair,
            "proof": [f"{label:<8} {text}" for label, text in witness_lines(finding)],
        }

    def _side(self, side: AccessSite) -> dict[str, Any]:
        through = f" through {side.argument}" if side.argument else ""
        return {
            "text": f"{side.mode}{'' if side.exact else ' at most'} by {side.operation}{through} on {side.agent}",
            "stack": self._stack(side.stack),
            "operation": self._operation.get(side.record, -1),
        }

    def on_device(self, finding: DeviceFinding) -> dict[str, Any]:
        by = f"{finding.mode} by {finding.operation}" if finding.mode else finding.operation
        on = f" on {finding.agent}" if finding.agent else ""
        threads = [
            [f"{place.source}, {place.text}", self._source(*place.source) if place.source.file else ""]
            for place in sources(finding)
        ]
        side = {
            "text": by + on,
            "stack": [*threads, *self._stack(finding.stack)],
            "operation": self._operation.get(finding.record, -1),
        }
        return {
            **self._common(finding, True),
            "bytes": [finding.address, finding.size] if finding.space == "global" else None,
            "sides": [side],
            "why": finding.text,
            "repair": "",
            "proof": [],
        }

    def _common(self, finding: Finding | DeviceFinding, certain: bool) -> dict[str, Any]:
        return {
            "kind": finding.kind.value,
            "title": KINDS[finding.kind].title,
            "certain": certain,
            "count": finding.count,
            "buffer": self._buffer(finding.buffer),
            "fingerprint": finding.fingerprint,
        }

    def _buffer(self, buffer: BufferSite | None) -> dict[str, Any] | None:
        if buffer is None:
            return None
        where = location((buffer.place,) if buffer.place is not None else buffer.stack)
        return {"address": buffer.address, "size": buffer.size, "where": where, "stack": self._stack(buffer.stack)}

    def _stack(self, stack: tuple[Frame, ...]) -> list[list[str]]:
        """Return each frame in words, and its line of source, if it can still be read."""
        return [
            [f"{frame.file}:{frame.line} in {frame.function}", self._source(frame.file, frame.line)] for frame in stack
        ]

    def _source(self, file: str, line: int) -> str:
        return source_line(file, line, recorded_at=self._recorded_at)[:LONGEST_LINE]
