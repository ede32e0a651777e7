"""The whole analysis of one trace: its summary, each device's memory explained, and the faults of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from cudatool.analyze.diagnosis import PARTS_OF_DIAGNOSIS, Diagnosis, diagnose
from cudatool.analyze.lint import PARTS_OF_LINT, LintFinding, lint
from cudatool.analyze.recorded import recorded_settings
from cudatool.errors import FileFormatError
from cudatool.memory.settings import Settings
from cudatool.overview.execution import Operations
from cudatool.overview.ledger import Ledger, ledger
from cudatool.overview.summary import Summary, columns_of, summarize
from cudatool.progress import Step, advance, step
from cudatool.trace.lifetimes import Lifetimes, Timeline
from cudatool.trace.model import Trace

__all__ = ["MemoryReport", "report"]


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Everything that the page draws: the summary and the columns that it was made from.

    `timelines`, `diagnoses` and `ledgers` have an entry for each of the summary's devices. `findings` are faults of the
    file itself.
    """

    trace: Trace
    summary: Summary
    blocks: Lifetimes
    segments: Lifetimes
    timelines: tuple[Timeline, ...]
    operations: Operations
    diagnoses: tuple[Diagnosis, ...]
    findings: tuple[LintFinding, ...]
    ledgers: tuple[Ledger | None, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary, each device's diagnosis and the findings as plain data; sizes in bytes, times in ns."""
        result = self.summary.as_dict()
        for plain, diagnosis, own in zip(result["devices"], self.diagnoses, self.ledgers, strict=True):
            plain["diagnosis"] = diagnosis.as_dict()
            plain["ledger"] = None if own is None else own.as_dict()
        result["findings"] = [asdict(finding) for finding in self.findings]
        return result


def report(trace: Trace, *, total: Mapping[int, int | None] | None = None, moment: int | None = None) -> MemoryReport:
    """Analyze a trace.

    Parameters
    ----------
    total
        The memory of each device in bytes, for the devices that the caller knows.
    moment
        A record: the memory right after it is described, too, and the ledgers are of the last reading up to there.
    """
    with step("analyzing", total=1 + _PARTS) as shown:
        return _report(trace, total or {}, moment, shown)


_PARTS: Final = 2 + PARTS_OF_DIAGNOSIS + PARTS_OF_LINT
"""How often :func:`cudatool.progress.advance` is called for a device, after parts of about the same length."""


def _report(trace: Trace, total: Mapping[int, int | None], moment: int | None, shown: Step) -> MemoryReport:
    settings = _settings(trace)
    columns = columns_of(trace)
    blocks, segments, curves = columns.blocks, columns.segments, columns.timelines
    shown.total = 1 + _PARTS * len(curves)
    advance()
    diagnoses, ledgers = [], []
    for device, curve in curves.items():
        own, reserved = blocks.of_device(device), segments.of_device(device)
        ledgers.append(ledger(trace, own, reserved, device, moment=moment))
        advance()
        diagnoses.append(diagnose(trace, own, reserved, curve, device, settings=settings, total=total.get(device)))
    totals = {diagnosis.device: diagnosis.outside.total for diagnosis in diagnoses}
    state = getattr(trace, "segments", ())  # a snapshot's, the only kind of trace that states one
    return MemoryReport(
        trace=trace,
        summary=summarize(trace, columns, moment=moment),
        blocks=blocks,
        segments=segments,
        timelines=tuple(curves.values()),
        operations=columns.operations,
        diagnoses=tuple(diagnoses),
        findings=lint(trace, blocks, segments, curves, final_state=state, total=totals),
        ledgers=tuple(ledgers),
    )


def _settings(trace: Trace) -> Settings:
    """Return the allocator's settings; defaults for those that the recording lacks or that make no sense."""
    try:
        return recorded_settings(trace)[0]
    except FileFormatError:
        return Settings()
