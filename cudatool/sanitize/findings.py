"""What the sanitizer has to say, as plain data: a :class:`Report` of :class:`Finding`."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from cudatool.source_text import SourceLine
from cudatool.trace.frames import user_frame
from cudatool.trace.model import Frame

__all__ = [
    "AccessSite",
    "BufferSite",
    "DeviceFinding",
    "Finding",
    "FindingKind",
    "Gap",
    "GapKind",
    "Known",
    "Outcome",
    "Process",
    "Remark",
    "Report",
    "SetAside",
    "ScheduleRun",
    "Witness",
    "WitnessStep",
    "location",
]


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
    WAIT_UNRECORDED = "wait-unrecorded"
    """A wait did nothing, because its event had not been recorded, and what it should have ordered races."""
    CAPTURE_MISSED = "capture-missed"
    """Work done while a graph was captured, but not captured, uses what a captured call has not yet made."""
    CAPTURED_EVENT = "captured-event"
    """A wait, outside of the capture, for an event that was recorded in one: it stands for no work."""
    # What the software device's checkers see inside of kernels and calls.
    OUT_OF_BOUNDS = "out-of-bounds"
    HOST_POINTER = "host-pointer"
    PEER_ACCESS = "peer-access"
    """A kernel uses memory of another device, to which its own has no access."""
    READ_ONLY = "read-only"
    """A kernel writes to memory that it may only read."""
    MISALIGNED = "misaligned"
    UNINITIALIZED = "uninitialized"
    """A read of device memory that nothing was written to."""
    KERNEL_RACE = "kernel-race"
    """Two threads of one launch, with nothing between them that orders their accesses."""
    STALE_READ = "stale-read"
    """A kernel reads, through a cache that does not see what its launch writes, what its launch writes."""
    CAS_GUESS = "cas-guess"
    """A plain read that races with atomic updates; atomicCAS compares its value before anything depends on it."""
    BARRIER_DIVERGENCE = "barrier-divergence"
    """Not all threads come to a barrier that is for all."""
    BAD_MASK = "bad-mask"
    """The member mask of a warp operation lacks a thread that executes it."""
    ABSENT_LANE = "absent-lane"
    """A shuffle from a lane that its mask names, or a matrix operation, though the lane has ended or never was."""
    INVALID_FREE = "invalid-free"
    DOUBLE_FREE = "double-free"
    INVALID_COPY = "invalid-copy"
    """A copy or fill beyond the memory that it begins in."""
    KERNEL_ERROR = "kernel-error"
    """A kernel ended in an error, which ends its context."""
    LEAK = "leak"
    """Memory that was never given back."""


class GapKind(StrEnum):
    """Why something was not checked. The values are part of the JSON report: add, never rename."""

    RECORDING = "recording"
    """Events are missing: the recorder stopped or was interrupted, or the file is cut or damaged."""
    OPERATIONS = "operations"
    """No work on a device was recorded at all."""
    ACCESSES = "accesses"
    """The trace was recorded without what operations access, so that no race can be found in it."""
    LAUNCHES = "launches"
    """Launches whose accesses are not known."""
    CHECKS = "checks"
    """Checks of kernels that were asked for and under which the program did not run."""
    DEVICE_CHECKS = "device-checks"
    """Checks of kernels that were asked for and that no GPU makes, on which the program ran."""
    STREAMS = "streams"
    """Operations that name no stream."""
    CHILD_PROCESSES = "child-processes"
    """Processes that the program started, and that were not recorded."""
    REPLACED = "replaced"
    """The program that took the place of a recorded one (exec), and that was not recorded."""
    UNSEEN = "unseen"
    """What a library or a kernel does beyond what can be recorded."""
    HOST_MEMORY = "host-memory"
    """Pinned memory that copies use, and in which the host's accesses are not seen."""
    HOST_FUNCTIONS = "host-functions"
    """Host functions in streams and graphs that do not say what they access, where the host and the device share
    memory."""
    HOST_READS = "host-reads"
    """Pinned and managed memory that the device writes, in which the host's writes are seen, but not its reads."""
    THREADS = "threads"
    """Pairs of accesses that only an order of host threads puts in order, of which the trace says nothing."""
    WAITS = "waits"
    """Pairs of accesses after waits for what the trace does not show, as another process's event."""
    FLAGS = "flags"
    """Possible races of kernels that may be ordered with the host, or with each other, by flags in memory."""
    WORKLOAD = "workload"
    """What the program would have done after it failed or was ended."""
    FAILED_PROCESSES = "failed-processes"
    """What processes that the program started would have done after they failed or were ended."""
    KERNEL_RACES = "kernel-races"
    """Launches of which racecheck looked at a part, as their history took too much memory."""
    WARPS_IN_STEP = "warps-in-step"
    """Launches with volatile accesses of a warp's lanes that nothing orders: no races, but what is read is open."""
    SHARED_MEMORY = "shared-memory"
    """Memory that other processes can use: what they do with it is not recorded."""
    HELD_AT_END = "held-at-end"
    """Memory that a process held when a signal or ``os._exit`` ended it, or when it was still running: whether it would
    have been freed is not known."""


class Outcome(StrEnum):
    """The verdict. The values are part of the JSON report: add, never rename."""

    FINDINGS = "findings"
    CLEAN = "clean"
    """Nothing was found, and nothing was left out."""
    PARTLY_CHECKED = "partly-checked"
    """Nothing was found in what was checked; the gaps say what was not."""
    NOT_CHECKED = "not-checked"
    """There was nothing to look at."""
    INCOMPLETE = "incomplete"
    """Nothing was found in a recording from which events are missing."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that was not checked.

    Attributes
    ----------
    kind
        Why.
    count
        How many operations, launches, processes ... it concerns; bytes of pinned, shared or held memory.
    names
        Which checks, programs, reasons or pairs of lines.
    whole
        Whether nothing at all was checked because of it.
    codes
        What the names are about, each once, where a kind has several causes: labels of
        :class:`~cudatool.trace.events.WarningCode`, values of :class:`~cudatool.trace.model.Ending`, and
        ``findings-not-read``.
    """

    kind: GapKind
    count: int = 0
    names: tuple[str, ...] = ()
    whole: bool = False
    codes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AccessSite:
    """One side of a finding.

    Attributes
    ----------
    operation
        ``"kernel scale"``, ``"cuMemcpyDtoHAsync"``, ``"host access"``, ``"free"`` ...
    is_host_access
        Whether the program itself made the access, not an operation of the device.
    agent
        Who carries it out: ``"stream 7"``, ``"the default stream"``, ``"the host"``.
    mode
        ``"read"``, ``"write"``, ``"read and write"``, ``"atomic"``, ``"allocate"`` or ``"free"``.
    argument
        The kernel's argument or source line, where known.
    stack
        Host stack of the call, innermost frame first; for a node of a graph, of the call that captured or added it; for
        what a host function does, its own.
    record
        Index of the operation in the trace's records.
    exact
        False for a conservative range: the operation may touch less.
    launch
        Host stack of the launch of the graph, for one of its nodes, and of the call that enqueued a host function; else
        empty.
    noticed
        True for what the host did at an unknown line: it was found by comparing bytes at the call that `stack` is of.
    place
        The frame of `stack` to look at, the one that the repair names: the call that is to be changed, and not a helper
        that both sides came through. None for the innermost one of the user's own.
    created, created_at
        Host stack of the call that made the stream, empty if that was not seen; and its frame to look at, where it
        differs from that of the other side's stream.
    """

    operation: str
    agent: str
    mode: str
    argument: str
    stack: tuple[Frame, ...]
    record: int
    exact: bool = True
    launch: tuple[Frame, ...] = ()
    noticed: bool = False
    place: Frame | None = None
    created: tuple[Frame, ...] = ()
    created_at: Frame | None = None
    is_host_access: bool = False


@dataclass(frozen=True, slots=True)
class BufferSite:
    """The allocation that a finding is about: address and size in bytes, and where it was made.

    `place` is the frame of `stack` to look at; None for the innermost one of the user's own.
    """

    address: int
    size: int
    stack: tuple[Frame, ...]
    place: Frame | None = None


@dataclass(frozen=True, slots=True)
class WitnessStep:
    """An operation of an order: what, on which stream, where it was asked for, and the record that says so.

    Of a node of a graph, `record` and `location` are those of the call that captured or added it.
    """

    operation: str
    agent: str
    location: str
    record: int


@dataclass(frozen=True, slots=True)
class Witness:
    """Two legal orders of the recorded work, and where their results differ.

    Attributes
    ----------
    order_a, order_b
        The operations that matter, out of `steps`. In the first order the finding's first side comes first.
    address, bytes_a, bytes_b
        Device address of the first difference, and what was there: hexadecimal, up to 16 bytes. Empty if what differs
        is that one order fails.
    observed_at
        Who saw it.
    replays
        How many it took to find.
    exchanged
        Records of the two operations that changed places.
    also_exchanged
        How many other racing pairs changed places with them.
    """

    order_a: tuple[WitnessStep, ...]
    order_b: tuple[WitnessStep, ...]
    steps: int
    address: int
    bytes_a: str
    bytes_b: str
    observed_at: str
    replays: int
    exchanged: tuple[int, int]
    also_exchanged: int = 0


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
    runs, stride
        How many runs of bytes both touch, as rows of 2-D copies (4096 stands for that many or more), and how far apart
        they begin (bytes; 0 for one, or if that differs).
    buffer
        The allocation they lie in; None if it was not seen.
    reason
        One sentence: why the two are unordered, with the last common point.
    repair
        One sentence: the smallest change that orders them. The engine has applied it to the trace and seen the
        finding disappear. Empty if no call can repair it.
    count
        How often the same two call sites collided; what would vanish with the repair of an earlier time is not counted.
    fingerprint
        Stays the same when lines move; unique in a report.
    witness, no_witness
        The proof, or why there is none; both empty if none was looked for.
    seen_in
        The schedules that showed it, if there were several.
    processes
        Those in which it occurred, if several were checked, in words; the records are those of the first.
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
    witness: Witness | None = None
    no_witness: str = ""
    runs: int = 1
    stride: int = 0
    seen_in: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceFinding:
    """One defect that a checker saw inside of a kernel or call, or memory that leaked, however often.

    Attributes
    ----------
    check
        ``"memcheck"``, ``"initcheck"``, ``"racecheck"``, ``"synccheck"`` or ``"leak"``.
    operation, agent
        ``"kernel scale"`` or the call's name, and the stream; empty for leaks.
    mode, space, address, size
        Of the access; `address` is an offset in ``"shared"`` and ``"local"`` memory. For a leak, the memory.
    block, thread, source
        The first thread that did it, by its coordinates, and the line of the CUDA source (or of the PTX); None if none.
    other_block, other_thread, other_source
        The earlier access of a race.
    text
        One sentence: what is wrong.
    stack
        Host stack of the launch or call, innermost frame first.
    record
        Index of the launch, the call's finding or the allocation in the trace's records.
    buffer
        The allocation that the address is in or nearest to, None if there is none near.
    count
        How often it happened, in all launches from the same place.
    fingerprint
        Stays the same when lines move; unique in a report.
    seen_in
        The schedules that showed it, if there were several.
    processes
        Those in which it occurred, if several were checked, in words; the records are those of the first.
    """

    kind: FindingKind
    check: str
    operation: str
    agent: str
    mode: str
    space: str
    address: int
    size: int
    block: tuple[int, ...]
    thread: tuple[int, ...]
    source: SourceLine | None
    other_block: tuple[int, ...]
    other_thread: tuple[int, ...]
    other_source: SourceLine | None
    text: str
    stack: tuple[Frame, ...]
    record: int
    buffer: BufferSite | None
    count: int
    fingerprint: str
    seen_in: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """A run of the program under one schedule of the software device.

    Attributes
    ----------
    schedule
        ``"fifo"``, ``"lifo"``, ``"late"`` or ``"random 1"``.
    status
        Exit status of the program; negative: the signal that ended it.
    difference
        How what the program printed differs from what it printed under the first schedule; empty if it does not.
    """

    schedule: str
    status: int
    difference: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the run that was checked.

    Attributes
    ----------
    name
        ``"process 1234 (worker.py), rank 1"``.
    trace
        The file of its trace.
    operations
        Number of operations on streams.
    outcome
        What was found in it, but for what is set aside.
    checked
        The outcome that it has without findings.
    """

    name: str
    trace: str
    operations: int
    outcome: Outcome
    checked: Outcome


@dataclass(frozen=True, slots=True)
class Known:
    """A finding that the baseline names.

    Attributes
    ----------
    fingerprint, kind, check
        Of the finding; the check is the one that found it.
    what
        The operations and functions, in words, for readers of the file.
    reason
        Why it is accepted.
    expires
        ``"2027-01-31"``, the last day on which it is; empty for ever.
    """

    fingerprint: str
    kind: str = ""
    check: str = ""
    what: str = ""
    reason: str = ""
    expires: str = ""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A finding that does not count.

    Attributes
    ----------
    by
        Who said so: ``"baseline"``, ``"rule"`` (of ``--suppress``) or ``"comment"`` (in the source).
    reason
        The baseline's reason, or the rule.
    expires
        Of a baseline's entry, see :class:`Known`.
    comment
        Where the comment is.
    """

    finding: Finding | DeviceFinding
    by: str
    reason: str = ""
    expires: str = ""
    comment: SourceLine | None = None


@dataclass(frozen=True, slots=True)
class Remark:
    """Something wrong with what the user wrote to the sanitizer, and the file and line."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found, and what it looked at.

    Attributes
    ----------
    findings
        Certain ones, in the order of the second side.
    possible
        Those in which a side's byte range is conservative: they may be false alarms.
    on_device
        What the software device's checkers saw inside of kernels and calls, and leaks.
    warnings
        Certain ones, too, that break a rule and yet change no result: they fail no run.
    device
        The device of the recording, in words.
    operations
        Number of operations on streams (kernels, copies, fills, matrix products, host functions, graph launches).
    unchecked_launches
        Launches of kernels and graphs whose accesses are not known.
    edges
        Number of times that each ordering rule applied: the edge set that the report rests on.
    notes
        What limits the report: an incomplete trace, unchecked launches, orderings that cannot be known.
    set_aside
        Findings that are in none of the three lists above, because a baseline, a rule or a comment says so.
    expired, stale
        Entries of the baseline: those of findings that count again, and those of findings that did not occur.
    remarks
        Comments in the source that name no check.
    schedules
        The runs that it joins, if there were several.
    gaps
        What was not checked.
    processes
        The program's own and those that it started, if there were several.
    dependent
        If they were looked for, certain ones that would be gone with the repair of those in `findings`. They are
        findings once one of those is set aside: its repair is not going to be made.
    """

    findings: tuple[Finding, ...]
    possible: tuple[Finding, ...] = ()
    on_device: tuple[DeviceFinding, ...] = ()
    device: str = ""
    operations: int = 0
    unchecked_launches: int = 0
    edges: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    expired: tuple[Known, ...] = ()
    stale: tuple[Known, ...] = ()
    remarks: tuple[Remark, ...] = ()
    schedules: tuple[ScheduleRun, ...] = ()
    gaps: tuple[Gap, ...] = ()
    processes: tuple[Process, ...] = ()
    dependent: tuple[Finding, ...] = ()
    warnings: tuple[DeviceFinding, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The verdict."""
        return Outcome.FINDINGS if self.findings or self.on_device else self.checked

    @property
    def checked(self) -> Outcome:
        """The verdict that there is without findings."""
        if any(gap.kind is GapKind.RECORDING for gap in self.gaps):
            return Outcome.INCOMPLETE
        if any(gap.whole for gap in self.gaps):
            return Outcome.NOT_CHECKED
        return Outcome.PARTLY_CHECKED if self.gaps else Outcome.CLEAN

    @property
    def all(self) -> tuple[Finding | DeviceFinding, ...]:
        """Everything that was found and not set aside: what fails a run, then warnings, then what is only possible."""
        return (*self.findings, *self.on_device, *self.warnings, *self.possible)

    def of_failed(self, how: str) -> Report:
        """Return this as the report on a workload that failed, such as ``"failed with exit status 1"``."""
        gap = Gap(GapKind.WORKLOAD, 1, (how,))
        return self if gap in self.gaps else replace(self, gaps=(*self.gaps, gap))  # a run under a schedule has it


def location(stack: tuple[Frame, ...]) -> str:
    """Return ``"pipeline.py:41"``, the innermost line of the user's own code; ``"an unknown line"`` without a stack."""
    frame = user_frame(stack)
    return f"{os.path.basename(frame.file)}:{frame.line}" if frame else "an unknown line"
