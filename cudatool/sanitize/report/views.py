"""What every report format needs of a finding, whichever of the two types it has: how it stands, who, where, why."""

from __future__ import annotations

import math
import os.path
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cudatool.sanitize.coverage import gap_what
from cudatool.sanitize.findings import (
    AccessSite,
    DeviceFinding,
    Finding,
    FindingKind,
    GapKind,
    Outcome,
    Process,
    Report,
    SetAside,
    location,
)
from cudatool.sanitize.intervals import MOST_RUNS
from cudatool.sanitize.kinds import CHECKS, check_of
from cudatool.sanitize.places import shown_path
from cudatool.source_text import SourceLine
from cudatool.trace.frames import user_frame
from cudatool.trace.model import Frame
from cudatool.units import counted, format_bytes

__all__ = [
    "ReportContext",
    "ReportEntry",
    "Site",
    "ThreadPlace",
    "around",
    "describe",
    "entries",
    "failure",
    "not_asked_for",
    "place",
    "process_words",
    "sites",
    "sources",
    "times",
    "verdict",
    "verdict_words",
    "what",
    "which_bytes",
    "why_aside",
]


@dataclass(frozen=True, slots=True)
class ReportContext:
    """What a report says beside its findings.

    Attributes
    ----------
    root
        The directory that paths are written relative to.
    checks
        What was looked for.
    status
        Exit status of the workload, negative: the signal that ended it; 0 for a trace from a file.
    recorded_at
        When the recording ended: source that has changed since is not quoted.
    """

    root: str
    checks: tuple[str, ...] = ()
    status: int = 0
    recorded_at: float = math.inf


@dataclass(frozen=True, slots=True)
class ReportEntry:
    """A finding and how it stands.

    Attributes
    ----------
    level
        ``"error"`` if it fails the run, ``"warning"`` if it is a warning or only possible, ``"none"`` if it was set
        aside.
    aside
        Who set it aside and why.
    remark
        One sentence on its baseline entry, if that has expired.
    """

    finding: Finding | DeviceFinding
    level: str
    aside: SetAside | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """One thing that took part: what it is, in words, and the host stack of the call that made it.

    `chosen` is the frame of the stack to look at, if that is not the innermost one of the user's own.
    """

    text: str
    stack: tuple[Frame, ...]
    chosen: Frame | None = None

    @property
    def frame(self) -> Frame | None:
        """The user's line that it is shown at, None if no host stack is known."""
        return self.chosen or user_frame(self.stack)


def entries(report: Report) -> Iterator[ReportEntry]:
    """Yield every finding: those that fail the run, warnings, the possible ones, and those set aside."""
    expired = {known.fingerprint: known for known in report.expired}
    certain = len(report.findings) + len(report.on_device)
    for index, finding in enumerate(report.all):
        remark = ""
        if known := expired.get(finding.fingerprint):
            because = f" ({known.reason})" if known.reason else ""
            remark = f"The baseline knows it{because}, but only until {known.expires}."
        yield ReportEntry(finding, "error" if index < certain else "warning", remark=remark)
    yield from (ReportEntry(aside.finding, "none", aside) for aside in report.set_aside)


def sites(finding: Finding | DeviceFinding) -> tuple[Site, ...]:
    """Return what took part, the site where a repair belongs first, then the earlier access if there is one."""
    if isinstance(finding, Finding):
        return tuple(dict.fromkeys((_side(finding.second), _side(finding.first))))
    if not finding.operation:
        return (Site(finding.text, finding.stack),)
    access = f"{finding.mode} of {format_bytes(finding.size)} in {finding.space} memory by " if finding.mode else ""
    agent = f" on {finding.agent}" if finding.block else ""
    return (Site(f"{access}{finding.operation}{agent}", finding.stack),)


def _side(side: AccessSite) -> Site:
    most = "" if side.exact else " at most"
    if side.is_host_access:
        noticed = ", before this call, which found other bytes there" if side.noticed else ""
        return Site(f"{side.mode}{most} by {side.agent}{noticed}", side.stack, side.place)
    through = f" through {side.argument}" if side.argument else ""
    made = (side.created_at,) if side.created_at is not None else side.created
    created = f" (created at {location(made)})" if made else ""
    return Site(f"{side.mode}{most} by {side.operation}{through} on {side.agent}{created}", side.stack, side.place)


def around(finding: Finding | DeviceFinding) -> tuple[Site, ...]:
    """Return what else there is to look at: where a graph was launched that a side is a node of, and the allocation."""
    found = []
    if isinstance(finding, Finding):
        launches = dict.fromkeys(side.launch for side in (finding.second, finding.first) if side.launch)
        found += [Site("the graph was launched here", launch) for launch in launches]
    if finding.buffer is not None and check_of(finding) != "leak":
        text = f"in a buffer of {format_bytes(finding.buffer.size)}, allocated here"
        found.append(Site(text, finding.buffer.stack, finding.buffer.place))
    return tuple(found)


class ThreadPlace(NamedTuple):
    """A thread of a kernel, and the line of its source.

    Attributes
    ----------
    thread
        Its index in the block and the block's in the grid, in words without a noun.
    source
        The line of its source.
    relation
        What it is to the thread before it in the report; empty for the first.
    """

    thread: str
    source: SourceLine
    relation: str = ""

    @property
    def text(self) -> str:
        return " ".join(filter(None, (self.relation, "thread", self.thread)))


def sources(finding: Finding | DeviceFinding) -> tuple[ThreadPlace, ...]:
    """Return the threads of a kernel that did it, the one that is to blame first.

    Most CUDA sources are strings in a program. Their directory is that of some process which compiled them: left out.
    """
    if isinstance(finding, Finding) or finding.source is None:
        return ()
    threads = [ThreadPlace(f"{finding.thread} of block {finding.block}", _shown(finding.source))]
    if finding.other_source is not None:
        other = f"{finding.other_thread} of block {finding.other_block}"
        relation = "written by" if finding.kind is FindingKind.STALE_READ else "after"
        threads.append(ThreadPlace(other, _shown(finding.other_source), relation))
    return tuple(threads)


def _shown(source: SourceLine) -> SourceLine:
    return source if os.path.isfile(source.file) else source._replace(file=os.path.basename(source.file))


def which_bytes(finding: Finding) -> str:
    """Return the bytes that both sides touch, in words."""
    end = finding.start + (finding.runs - 1) * finding.stride + finding.size - 1
    if finding.runs == 1:
        return f"{format_bytes(finding.size)} at 0x{finding.start:x} to 0x{end:x}"
    count = f"{finding.runs:,}{' or more' if finding.runs == MOST_RUNS else ''}"
    if not finding.stride:
        return f"{count} runs, the first of {format_bytes(finding.size)} at 0x{finding.start:x}"
    apart = f"{format_bytes(finding.size)}, {format_bytes(finding.stride)} apart"
    return f"{count} x {apart}, at 0x{finding.start:x} to 0x{end:x}"


def describe(finding: Finding | DeviceFinding) -> str:
    """Return what happened, why it is wrong and how to repair it, in one line of plain text."""
    first, *others = sites(finding)
    parts = [first.text, *(f"{other.text} ({_at(other)})" for other in others)]
    parts += [f"{place.text} at {place.source}" for place in sources(finding)]
    text = "; ".join(parts)
    if isinstance(finding, DeviceFinding):
        return text if text == finding.text else f"{text}: {finding.text}."
    return f"{text}. {finding.reason}" + (f" Repair: {finding.repair}" if finding.repair else "")


def times(finding: Finding | DeviceFinding) -> str:
    """Return ``", 4 times"`` for what happened more than once; the text of a leak counts for itself."""
    return f", {finding.count:,} times" if finding.count > 1 and check_of(finding) != "leak" else ""


def verdict(report: Report) -> str:
    """Return the one line that sums a report up: what was found, and what was not checked."""
    found = len(report.findings) + len(report.on_device)
    parts = [verdict_words(report.outcome) or counted(found, "finding")]
    said = Counter(one.by for one in report.set_aside)
    counts = {
        "possible": len(report.possible),
        "known": said["baseline"],
        "ignored by comments": said["comment"],
        "suppressed": said["rule"],
        "expired": len(report.expired),
        "stale in the baseline": len(report.stale),
    }
    parts += [counted(len(report.warnings), "warning")] if report.warnings else []
    parts += [f"{count:,} {what}" for what, count in counts.items() if count]
    gaps = [gap_what(gap) for gap in report.gaps if gap.kind is not GapKind.OPERATIONS]
    rest = f"; not checked: {', '.join(gaps)}" if gaps else ""
    return f"cudatool sanitize: {', '.join(parts)}{rest}"


def not_asked_for(run: ReportContext | None) -> str:
    """Return the checks that were not to be made, in words; ``""`` if there are none, or it is not known."""
    if run is None or not run.checks:
        return ""
    rest = [check for check in CHECKS if check not in run.checks]
    return f"not asked for: {', '.join(rest)} (--checks all)" if rest else ""


def verdict_words(outcome: Outcome) -> str:
    """Return the verdict on a report without findings in words, ``""`` if there are some."""
    return {
        Outcome.FINDINGS: "",
        Outcome.CLEAN: "no findings",
        Outcome.PARTLY_CHECKED: "no findings in what was checked",
        Outcome.NOT_CHECKED: "nothing was checked",
        Outcome.INCOMPLETE: "no findings in an incomplete recording",
    }[outcome]


def process_words(process: Process) -> str:
    """Return what was checked of a process and what came of it, in words; one that used no device left nothing out."""
    if process.outcome is Outcome.NOT_CHECKED and not process.operations:
        return "no work on a device"
    return f"{counted(process.operations, 'operation')}, {verdict_words(process.outcome) or 'findings'}"


def failure(report: Report) -> bool:
    """Return whether nothing was checked, or the recording is incomplete: an error. Other gaps are warnings."""
    return report.outcome in (Outcome.NOT_CHECKED, Outcome.INCOMPLETE)


def what(finding: Finding | DeviceFinding) -> str:
    """Return operations and functions, without lines: it stays as it is when code moves."""
    if isinstance(finding, Finding):
        sides = [(finding.first.operation, finding.first.stack), (finding.second.operation, finding.second.stack)]
    else:
        sides = [(finding.operation or "memory", finding.stack)]
    words = []
    for operation, stack in sides:
        frame = user_frame(stack)
        words.append(f"{operation} in {frame.function} ({os.path.basename(frame.file)})" if frame else operation)
    return "; ".join(words)


def _at(site: Site) -> str:
    return location((site.frame,) if site.frame else ())


def why_aside(aside: SetAside, root: str) -> str:
    """Return the reason, the rule, or where the comment is, paths as a report writes them."""
    if aside.comment is None:
        return aside.reason
    return str(aside.comment._replace(file=shown_path(aside.comment.file, root)))


def place(finding: Finding | DeviceFinding) -> Frame | None:
    """Return the user's line that a finding is shown at, None if no host stack is known."""
    return next((site.frame for site in sites(finding) if site.frame), None)
