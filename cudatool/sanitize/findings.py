"""What the sanitizer has to say, as plain data: a :class:`Report` of :class:`Finding`."""

from __future__ import annotations

import hashlib
import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cudatool.trace.model import Frame

__all__ = ["AccessSite", "BufferSite", "Finding", "FindingKind", "Report", "fingerprint", "location"]


class FindingKind(StrEnum):
    """What is wrong. The values are part of the JSON report: add, never rename."""

    RACE_RAW = "race-raw"
    """A read that nothing orders after the write whose value it should see."""
    RACE_WAR = "race-war"
    """A write that nothing orders after a read of the old value."""
    RACE_WAW = "race-waw"
    """Two writes in no order."""
    RACE_HOST = "race-host"
    """The host touches memory while the device may still use it."""
    REUSE = "reuse"
    """The caching allocator gave a block to a new owner while another stream may still use it for the old one."""
    USE_AFTER_FREE = "use-after-free"
    """An access to memory that was given back, or that may run after it was given back in stream order."""
    USE_BEFORE_ALLOC = "use-before-alloc"
    """An access that nothing orders after the stream-ordered allocation of its memory."""


@dataclass(frozen=True, slots=True)
class AccessSite:
    """One side of a finding.

    Attributes
    ----------
    operation
        ``"kernel scale"``, ``"cuMemcpyDtoHAsync"``, ``"host access"``, ``"free"`` ...
    agent
        Who carries it out: ``"stream 7"``, ``"the legacy default stream (stream 1)"``, ``"the host"``.
    mode
        ``"read"``, ``"write"``, ``"read and write"``, ``"atomic"``, ``"allocate"`` or ``"free"``.
    argument
        The kernel's argument or source line, where known.
    stack
        Host stack of the call, innermost frame first.
    record
        Index of the operation in the trace's records.
    exact
        False for a conservative range: the operation may touch less.
    """

    operation: str
    agent: str
    mode: str
    argument: str
    stack: tuple[Frame, ...]
    record: int
    exact: bool = True


@dataclass(frozen=True, slots=True)
class BufferSite:
    """The allocation that a finding is about: address and size in bytes, and where it was made."""

    address: int
    size: int
    stack: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect, however often it occurred.

    Attributes
    ----------
    kind
        What is wrong.
    first, second
        The two sides, in the order in which the program enqueued them.
    start, size
        The first run of bytes that both touch: device address and number of bytes.
    buffer
        The allocation they lie in; None if it was not seen.
    reason
        One sentence: why the two are unordered, with the last common point.
    repair
        One sentence: the smallest change that orders them. The engine has applied it to the trace and seen the
        finding disappear. Empty if no call can repair it.
    count
        How often the same two call sites collided.
    fingerprint
        Stays the same when lines move; unique in a report.
    """

    kind: FindingKind
    first: AccessSite
    second: AccessSite
    start: int
    size: int
    buffer: BufferSite | None
    reason: str
    repair: str
    count: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found, and what it looked at.

    Attributes
    ----------
    findings
        Certain ones, in the order of the second side.
    possible
        Those in which a side's byte range is conservative: they may be false alarms.
    device
        The device of the recording, in words.
    operations
        Number of operations on streams (kernels, copies, fills, matrix products, host functions, graph launches).
    unchecked_launches
        Launches of kernels and graphs of which nobody knows what they access.
    edges
        Number of times that each ordering rule applied: the edge set that the report rests on.
    notes
        What limits the report: an incomplete trace, unchecked launches, orderings that cannot be known.
    """

    findings: tuple[Finding, ...]
    possible: tuple[Finding, ...] = ()
    device: str = ""
    operations: int = 0
    unchecked_launches: int = 0
    edges: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def location(stack: tuple[Frame, ...]) -> str:
    """Return ``"pipeline.py:41"`` for the innermost frame of `stack`, ``"an unknown line"`` without one."""
    if not stack:
        return "an unknown line"
    return f"{os.path.basename(stack[0].file)}:{stack[0].line}"


def fingerprint(kind: FindingKind, first: AccessSite, second: AccessSite, buffer: BufferSite | None) -> str:
    """Return 16 hexadecimal digits that name a defect by its functions and operations, not by its lines."""

    def functions(stack: tuple[Frame, ...]) -> str:
        return ";".join(f"{os.path.basename(frame.file)}:{frame.function}" for frame in stack)

    parts = [kind.value]
    for side in (first, second):
        parts += [side.operation, side.mode, side.argument, functions(side.stack)]
    parts.append(functions(buffer.stack) if buffer else "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
