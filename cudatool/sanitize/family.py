"""One report of a program's processes: each is checked by itself, since CUDA orders nothing between two of them."""

from __future__ import annotations

import os
import typing
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from cudatool.sanitize.coverage import merged_gaps
from cudatool.sanitize.findings import DeviceFinding, Finding, Gap, GapKind, Process, Report
from cudatool.trace.family import process_name
from cudatool.trace.model import Ending, Trace

__all__ = ["joined_processes", "of_process"]

_Some = typing.TypeVar("_Some", Finding, DeviceFinding)
_OF_PROCESSES = (GapKind.CHILD_PROCESSES, GapKind.REPLACED)


def joined_processes(traces: Sequence[Trace], reports: Sequence[Report]) -> Report:
    """Return the report of a program, the first, with what was found in the processes that it started.

    A defect that several processes have is one finding.
    """
    if len(reports) == 1:
        return reports[0]
    names = [process_name(trace) for trace in traces]
    processes = tuple(
        Process(name, os.path.basename(trace.source), report.operations, report.outcome, report.checked)
        for name, trace, report in zip(names, traces, reports, strict=True)
    )
    edges = sum((Counter(report.edges) for report in reports), Counter[str]())
    notes = [f"{name}: {note}" for name, report in zip(names, reports, strict=True) for note in report.notes]
    return replace(
        reports[0],
        findings=_union([(name, report.findings) for name, report in zip(names, reports, strict=True)]),
        possible=_union([(name, report.possible) for name, report in zip(names, reports, strict=True)]),
        on_device=_union([(name, report.on_device) for name, report in zip(names, reports, strict=True)]),
        warnings=_union([(name, report.warnings) for name, report in zip(names, reports, strict=True)]),
        operations=sum(report.operations for report in reports),
        unchecked_launches=sum(report.unchecked_launches for report in reports),
        edges=dict(sorted(edges.items())),
        notes=tuple(notes),
        gaps=_gaps(traces, reports),
        processes=processes,
        dependent=_union([(name, report.dependent) for name, report in zip(names, reports, strict=True)]),
    )


def of_process(joined: Report, own: Report) -> Report:
    """Return a process's own report without what the joined one has set aside."""
    left = {finding.fingerprint for finding in joined.all}
    return replace(
        own,
        findings=tuple(finding for finding in (*own.findings, *own.dependent) if finding.fingerprint in left),
        possible=tuple(finding for finding in own.possible if finding.fingerprint in left),
        on_device=tuple(finding for finding in own.on_device if finding.fingerprint in left),
        warnings=tuple(finding for finding in own.warnings if finding.fingerprint in left),
    )


def _union(found: Sequence[tuple[str, Sequence[_Some]]]) -> tuple[_Some, ...]:
    kept: dict[str, _Some] = {}
    seen: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for process, findings in found:
        for finding in findings:
            kept.setdefault(finding.fingerprint, finding)
            seen.setdefault(finding.fingerprint, []).append(process)
            counts[finding.fingerprint] += finding.count
    return tuple(replace(finding, processes=tuple(seen[name]), count=counts[name]) for name, finding in kept.items())


def _gaps(traces: Sequence[Trace], reports: Sequence[Report]) -> tuple[Gap, ...]:
    """Return the gaps of all; one leaves nothing checked if it does so in every process that used a device."""
    groups, worked = [], []
    for index, report in enumerate(reports):
        gaps = report.gaps
        if index and traces[0].ending is Ending.CLOSED:  # the first trace names the processes that they started, too
            gaps = tuple(gap for gap in gaps if gap.kind not in _OF_PROCESSES)
        if report.operations:
            worked.append(gaps)
        groups.append(gaps)
    if not worked:
        return merged_gaps(groups, add=True)
    groups = [tuple(gap for gap in gaps if gap.kind is not GapKind.OPERATIONS) for gaps in groups]
    whole = {gap.kind for gap in merged_gaps(worked, add=True) if gap.whole}
    return tuple(replace(gap, whole=gap.kind in whole) for gap in merged_gaps(groups, add=True))
