"""What a report does not cover, and so what its verdict is worth.

A check that looked at nothing finds nothing. So everything that was not looked at is a :class:`Gap`, and a report with
gaps is never called clean: :attr:`Report.outcome <cudatool.sanitize.findings.Report.outcome>` is the one verdict, which
every format and the exit status show.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from cudatool.sanitize.device import held_at_end, unread_findings
from cudatool.sanitize.findings import Gap, GapKind, location
from cudatool.text import first_names, printable
from cudatool.trace.distinct import distinct
from cudatool.trace.events import (
    ALLOCATIONS,
    WORK,
    AccessFlag,
    CopyFlag,
    HostFlag,
    Kind,
    ProcessFlag,
    WarningCode,
    WarningFlag,
)
from cudatool.trace.libraries import Library, libraries_of, unrecorded_libraries, why_unrecorded
from cudatool.trace.model import Ending, Trace
from cudatool.units import counted, format_bytes

__all__ = ["LeftOpen", "ended", "find_gaps", "gap_what", "gap_why", "merged_gaps", "operations_in"]

_MANAGED: Final = "cuMemAllocManaged"
_HOST_NODE: Final = 3  # CU_GRAPH_NODE_TYPE_HOST
_ON_TRACES = ("race", "leak")  # the other checks are made while the program runs


@dataclass(frozen=True, slots=True)
class LeftOpen:
    """What a look at the order of accesses could not decide.

    Attributes
    ----------
    launches, kernels
        Number of launches whose accesses are not known, and what they run.
    streams
        Number of operations whose stream is not known.
    waits
        Number of pairs of accesses that a wait for what the trace does not show may have ordered.
    threads, flags
        For each possible race that only host threads, or flags in memory, may have ordered, its lines in words.
    """

    launches: int = 0
    kernels: Collection[str] = ()
    streams: int = 0
    waits: int = 0
    threads: Sequence[str] = ()
    flags: Sequence[str] = ()

    def gaps(self, operations: int) -> Iterator[Gap]:
        """Yield the gaps that these are, but for launches; beside so many operations that were looked at."""
        if self.streams:
            yield Gap(GapKind.STREAMS, self.streams, whole=not operations)
        if self.waits:
            yield Gap(GapKind.WAITS, self.waits)
        if self.threads:
            yield Gap(GapKind.THREADS, len(self.threads), tuple(dict.fromkeys(self.threads)))
        if self.flags:
            yield Gap(GapKind.FLAGS, len(self.flags), tuple(dict.fromkeys(self.flags)))


def find_gaps(
    trace: Trace,
    checks: Collection[str],
    *,
    operations: int,
    left_open: LeftOpen | None = None,
    beside: Collection[int] = (),
) -> tuple[Gap, ...]:
    """Return what of `trace` was not checked.

    Parameters
    ----------
    checks
        Those that were asked for.
    operations
        Number of operations on streams that are known.
    left_open
        What the look at the order of accesses could not decide; None if there was none, or it decided all.
    beside
        Ids of the processes whose traces are checked, too.
    """
    left_open = left_open or LeftOpen()
    header, races = trace.header, "race" in checks
    in_kernels = {check for check in checks if check not in _ON_TRACES}
    made = in_kernels.intersection(header.get("checks", ()))
    gaps = []
    if lost := _lost(trace):
        gaps.append(_gap(GapKind.RECORDING, lost))
    if not operations + left_open.streams and not ("leak" in checks and len(trace.of_kind(*ALLOCATIONS))):
        why = unrecorded_libraries(trace) if trace.ending.is_complete else ()  # else the recorder may be to blame
        gaps.append(Gap(GapKind.OPERATIONS, 0, why, whole=True))
    if races and operations and header.get("records_accesses") is False:
        gaps.append(Gap(GapKind.ACCESSES, operations, whole=not made))
    elif left_open.launches:
        whole = left_open.launches >= operations and not made
        gaps.append(Gap(GapKind.LAUNCHES, left_open.launches, tuple(filter(None, left_open.kernels)), whole=whole))
    if missing := sorted(in_kernels - made):
        kind = GapKind.DEVICE_CHECKS if header.get("device_kind") == "cuda" else GapKind.CHECKS
        gaps.append(Gap(kind, len(missing), tuple(missing), whole=len(missing) == len(checks)))
    gaps += left_open.gaps(operations)
    warnings = trace.of_kind(Kind.WARNING)
    for flag, kind in ((WarningFlag.RACES, GapKind.KERNEL_RACES), (WarningFlag.IN_STEP, GapKind.WARPS_IN_STEP)):
        if len(of_launches := warnings[warnings["flags"] & flag != 0]):
            names = tuple(dict.fromkeys(trace.names[int(name)] for name in of_launches["name"]))
            gaps.append(Gap(kind, len(of_launches), names))
    gaps += _processes(trace, beside)
    gaps += _failed_processes(trace)
    if races or in_kernels:
        gaps += _shared_memory(trace)
    if "leak" in checks and (size := held_at_end(trace)):
        codes = (str(trace.ending),)
        gaps.append(Gap(GapKind.HELD_AT_END, size, whole=set(checks) == {"leak"}, codes=codes))
    if unseen := _unseen(trace):
        gaps.append(_gap(GapKind.UNSEEN, unseen))
    if races:
        gaps += _of_the_host(trace)
    return tuple(gaps)


def _of_the_host(trace: Trace) -> Iterator[Gap]:
    """Yield what the host may access without an event."""
    if functions := _silent_host_functions(trace):
        yield Gap(GapKind.HOST_FUNCTIONS, len(functions), tuple(dict.fromkeys(functions)))
    if not trace.header.get("watches_host_memory"):
        if size := _unwatched_host_memory(trace, reads_only=False):
            yield Gap(GapKind.HOST_MEMORY, size)
        return
    sees_copies = bool(trace.header.get("watches_host_reads"))
    if size := _unwatched_host_memory(trace, reads_only=True, sees_copies=sees_copies):
        yield Gap(GapKind.HOST_READS, size)


def merged_gaps(of_reports: Sequence[Iterable[Gap]], *, add: bool) -> tuple[Gap, ...]:
    """Return the gaps of several reports as those of one; `add` their counts, or take the largest (the same run again).

    Gaps leave nothing checked only if nothing was checked in any of the reports, for whatever reasons.
    """
    groups = [tuple(gaps) for gaps in of_reports]
    merged: dict[GapKind, Gap] = {}
    for gap in (gap for gaps in groups for gap in gaps):
        known = merged.get(gap.kind, Gap(gap.kind))
        count = known.count + gap.count if add else max(known.count, gap.count)
        names, codes = (tuple(dict.fromkeys(both)) for both in ((*known.names, *gap.names), (*known.codes, *gap.codes)))
        merged[gap.kind] = Gap(gap.kind, count, names, codes=codes)
    whole = [{gap.kind for gap in gaps if gap.whole} for gaps in groups]
    nowhere = set[GapKind]().union(*whole) if all(whole) else set()
    return tuple(replace(gap, whole=gap.kind in nowhere) for gap in merged.values())


_Cause = tuple[str, str]  # code, and what people read


def _gap(kind: GapKind, causes: Sequence[_Cause]) -> Gap:
    names = tuple(dict.fromkeys(name for _, name in causes))
    return Gap(kind, len(names), names, codes=tuple(dict.fromkeys(code for code, _ in causes)))


def _warned(trace: Trace, flags: int) -> list[_Cause]:
    """Return the warnings that have one of some flags."""
    warnings = trace.of_kind(Kind.WARNING)
    found = warnings[warnings["flags"] & flags != 0]
    return [
        ((WarningCode(code) if code in _CODES else WarningCode.NOT_SAID).label, trace.names[name])
        for code, name in zip(found["aux0"].tolist(), found["name"].tolist(), strict=True)
    ]


_CODES: Final = frozenset(WarningCode)  # a newer recorder may write others
_NEWER_FLAGS: Final = 0xFFFF & ~sum(WarningFlag)  # what they mean for the trace is not known
_UNREAD: Final = "findings-not-read"  # beside the labels of WarningCode and the values of Ending


def _lost(trace: Trace) -> list[_Cause]:
    """Return why events are missing, or findings."""
    causes = [] if trace.ending.is_complete else [(str(trace.ending), f"it was {trace.ending}")]
    causes += _warned(trace, WarningFlag.LOST)
    if count := unread_findings(trace):
        causes.append((_UNREAD, f"{counted(count, 'finding')} in it cannot be read"))
    return causes


def _processes(trace: Trace, beside: Collection[int]) -> list[Gap]:
    """Return the processes that the program started, and the programs that took a process's place, but for those that
    were recorded: they did not use a device, or their traces are checked, too.
    """
    recorded: Counter[int] = Counter()
    why: dict[int, str] = {}
    for row in trace.of_kind(Kind.CHILD_RECORDED):
        process, flags, name = int(row["aux0"]), int(row["flags"]), trace.names[int(row["name"])]
        if flags & ProcessFlag.UNRECORDED:
            why[process] = name
        elif flags & ProcessFlag.RUNNING:
            why[process] = "still running"
        elif not name or process in beside:
            recorded[process] += 1
    if trace.ending is not Ending.CLOSED:  # its end would have listed them
        recorded.update(dict.fromkeys(beside, 1))
    missing: dict[bool, list[str]] = {False: [], True: []}
    for row in trace.of_kind(Kind.CHILD_PROCESS):
        process = int(row["aux0"])
        if process and recorded[process]:  # a process may be started and replaced: each time it starts again
            recorded[process] -= 1
            continue
        name = trace.names[int(row["name"])]
        name += f": {why[process]}" if process in why else ""
        missing[bool(row["flags"] & ProcessFlag.REPLACED)].append(name)
    children, successors = missing[False], missing[True]
    gaps = []
    if children:
        gaps.append(Gap(GapKind.CHILD_PROCESSES, len(children), tuple(dict.fromkeys(children))))
    if successors:
        gaps.append(Gap(GapKind.REPLACED, len(successors), tuple(successors)))
    return gaps


def ended(status: int) -> str:
    """Return how a process ended: its exit status, or the signal (a negative status)."""
    if status >= 0:
        return f"failed with exit status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _failed_processes(trace: Trace) -> list[Gap]:
    """Return the recorded processes that failed or were ended: the program may go on, and what they had yet to do is
    not known. Programs end by SIGTERM what waits for more work, such as ``multiprocessing.Pool`` its workers.
    """
    names = {int(row["aux0"]): trace.names[int(row["name"])] for row in trace.of_kind(Kind.CHILD_PROCESS)}
    failed = {}
    for row in trace.of_kind(Kind.CHILD_RECORDED):
        process, status = int(row["aux0"]), int(row["aux1"].astype(np.int64))
        if status and status != -signal.SIGTERM:
            failed[process] = f"{names.get(process) or f'process {process}'} {ended(status)}"
    return [Gap(GapKind.FAILED_PROCESSES, len(failed), tuple(dict.fromkeys(failed.values())))] if failed else []


def _shared_memory(trace: Trace) -> list[Gap]:
    warnings = trace.of_kind(Kind.WARNING)
    shared = warnings[warnings["flags"] & WarningFlag.SHARED != 0]
    if not len(shared):
        return []
    pieces = dict.fromkeys(zip(shared["address"].tolist(), shared["size"].tolist(), strict=True))
    calls = tuple(dict.fromkeys(trace.names[int(name)] for name in shared["name"]))
    return [Gap(GapKind.SHARED_MEMORY, sum(size for _, size in pieces), calls)]


def _unseen(trace: Trace) -> list[_Cause]:
    """Return what the program did on the device without events that describe it, or all of it."""
    causes = _warned(trace, WarningFlag.UNSEEN | _NEWER_FLAGS)
    causes += [(WarningCode.HELD_BEFORE.label, what) for what in trace.header.get("unknown_before", ())]
    if count := trace.header.get("in_flight_before", 0):
        what = f"the accesses of {counted(count, 'operation')} in flight when the recording began"
        causes.append((WarningCode.IN_FLIGHT_BEFORE.label, what))
    if trace.header.get("device_kind") == "cuda" and not trace.header.get("watches_launches"):
        others = [library for library in libraries_of(trace) if library != Library.PYTORCH]
        causes += [(WarningCode.LIBRARY_NOT_WATCHED.label, f"{one} is not watched on a GPU") for one in others]
    return causes


def _silent_host_functions(trace: Trace) -> list[str]:
    """Return the line of each call for a host function that declared no access, if there is memory to share.

    The host functions of a graph are called by its launch.
    """
    records, kinds = trace.records, trace.records["kind"]
    managed = _numbered(trace, _MANAGED)
    if not np.any((kinds == Kind.HOST_ALLOC) | (kinds == Kind.MEM_ALLOC) & np.isin(records["name"], managed)):
        return []
    with_nodes = records["aux0"][(kinds == Kind.GRAPH_NODE) & (records["flags"] == _HOST_NODE)]
    calls = (kinds == Kind.HOST_FUNCTION) | (kinds == Kind.GRAPH_LAUNCH) & np.isin(records["aux0"], with_nodes)
    # Of a graph, accesses of its other nodes have the same number.
    declares = kinds == Kind.HOST_ACCESS
    functions = records["correlation"][kinds == Kind.HOST_FUNCTION]
    declares |= (kinds == Kind.ACCESS) & np.isin(records["correlation"], functions)
    silent = records[calls & ~np.isin(records["correlation"], records["correlation"][declares])]
    return [location(trace.stack(stack)) for stack in silent["stack"].tolist()]


def _unwatched_host_memory(trace: Trace, *, reads_only: bool, sees_copies: bool = False) -> int:
    """Return the bytes of pinned and managed memory that the device uses and that the host can touch without an event.

    Of copies the asynchronous ones count: the host waits for the others. With `reads_only`, it is what the device
    writes and the host can read without an event; `sees_copies` says that such reads are seen in pinned memory that
    copies fill.
    """
    records, kinds, names = trace.records, trace.records["kind"], trace.records["name"]
    registered, managed = (_numbered(trace, name) for name in ("cuMemHostRegister", _MANAGED))
    is_pinned = (kinds == Kind.HOST_ALLOC) & (records["flags"] & HostFlag.BLOCK == 0)
    is_managed = (kinds == Kind.MEM_ALLOC) & np.isin(names, managed)
    if not (is_pinned | is_managed).any():
        return 0
    modes = AccessFlag.WRITE | AccessFlag.ATOMIC | (AccessFlag(0) if reads_only else AccessFlag.READ)
    copies = records[(kinds == Kind.MEMCPY) & (records["flags"] & CopyFlag.ASYNC != 0)]
    copied = np.sort(np.concatenate([copies["address"], *(() if reads_only else (copies["aux0"],))]))
    accesses = (kinds == Kind.ACCESS) & (records["flags"] & modes != 0)
    touched = np.sort(records["address"][accesses | (kinds == Kind.MEMSET)])
    used = np.sort(np.concatenate([touched, copied]))
    by_itself = records["flags"] & AccessFlag.NOTICED == 0
    seen = np.sort(records["address"][(kinds == Kind.HOST_ACCESS) & by_itself])
    total = 0
    for row in distinct(records[is_pinned | is_managed][["address", "size", "kind", "name"]]):
        start, size = int(row["address"]), int(row["size"])
        is_seen = sees_copies and row["kind"] == Kind.HOST_ALLOC and row["name"] not in registered
        uses = touched if is_seen else used
        if _holds_any(uses, start, size) and not _holds_any(seen, start, size):
            total += size
    return total


def _numbered(trace: Trace, wanted: str) -> list[int]:
    return [number for number, name in enumerate(trace.names) if name == wanted]


def _holds_any(places: npt.NDArray[np.uint64], start: int, size: int) -> bool:
    """Whether one of some sorted addresses lies in a range."""
    first, stop = np.searchsorted(places, np.array([start, start + size], np.uint64))
    return bool(first < stop)


def operations_in(trace: Trace) -> int:
    """Return the number of calls in a trace that enqueue work."""
    return int(np.isin(trace.records["kind"], WORK).sum())


# ---- in words ----


def _amount(gap: Gap) -> str:
    """Return how many bytes, if that is known: of what other libraries share on a GPU it is not."""
    return f"{format_bytes(gap.count)} of " if gap.count else ""


def gap_what(gap: Gap) -> str:
    """Return what was not checked in a few words, for the line that sums up."""
    return _WORDS[gap.kind].what(gap)


def gap_why(gap: Gap) -> str:
    """Return in a sentence why something was not checked, and what to do."""
    return _WORDS[gap.kind].why(gap)


def _how_ended(endings: Sequence[str]) -> str:
    """Return how processes ended in words, from the :class:`Ending` of their recordings."""
    words = {
        Ending.KILLED: "a process was ended by a signal or os._exit",
        Ending.GROWING: "a process was still running",
    }
    known = [words[Ending(ending)] for ending in endings if ending in words]
    return ", ".join(known) or "events are missing"


class _Words(NamedTuple):
    """What is said of a kind of gap: what was not checked, and why."""

    what: Callable[[Gap], str]
    why: Callable[[Gap], str]


_WORDS: Final[dict[GapKind, _Words]] = {
    GapKind.OPERATIONS: _Words(
        lambda gap: "anything",
        lambda gap: " ".join(["No work on a CUDA device was recorded.", *why_unrecorded(gap.names)]),
    ),
    GapKind.RECORDING: _Words(
        lambda gap: "events that are missing from the recording",
        lambda gap: f"The recording is incomplete: {first_names(gap.names)}.",
    ),
    GapKind.LAUNCHES: _Words(
        lambda gap: counted(gap.count, "launch"),
        lambda gap: (
            f"What {counted(gap.count, 'launch accesses', 'launches access')} is not known"
            f"{f': {first_names(gap.names)}' if gap.names else ''}."
        ),
    ),
    GapKind.ACCESSES: _Words(
        lambda gap: counted(gap.count, "operation"),
        lambda gap: "The trace does not say what operations access: record it with `cudatool run --accesses`.",
    ),
    GapKind.STREAMS: _Words(
        lambda gap: counted(gap.count, "operation on an unknown stream", "operations on unknown streams"),
        lambda gap: f"The stream of {counted(gap.count, 'operation')} is not known.",
    ),
    GapKind.CHECKS: _Words(
        lambda gap: ", ".join(gap.names),
        lambda gap: (
            f"The recording was made without {', '.join(gap.names)}: run the program itself under "
            "`cudatool sanitize`, on the software device."
        ),
    ),
    GapKind.DEVICE_CHECKS: _Words(
        lambda gap: f"{', '.join(gap.names)} (software device only)",
        lambda gap: f"On the software device only: {', '.join(gap.names)}.",
    ),
    GapKind.CHILD_PROCESSES: _Words(
        lambda gap: f"{counted(gap.count, 'child process')} ({first_names(gap.names)})",
        lambda gap: (
            f"{counted(gap.count, 'process')} that the program started ({first_names(gap.names)}) "
            f"{'was' if gap.count == 1 else 'were'} not recorded. Only Python processes that find this "
            "cudatool and its environment variables as they start are recorded, until the program ends."
        ),
    ),
    GapKind.REPLACED: _Words(
        lambda gap: f"what ran after exec ({first_names(gap.names)})",
        lambda gap: f"The program replaced itself by {first_names(gap.names)}, which is not recorded.",
    ),
    GapKind.UNSEEN: _Words(
        lambda gap: first_names(gap.names),
        lambda gap: f"{printable('; '.join(gap.names))}.",
    ),
    GapKind.HOST_MEMORY: _Words(
        lambda gap: f"the host's accesses to {format_bytes(gap.count)} of pinned memory",
        lambda gap: (
            "The host may read and write pinned memory unseen: use `cudatool.host_view`, or the software "
            "device, which watches it."
        ),
    ),
    GapKind.HOST_FUNCTIONS: _Words(
        lambda gap: f"what {counted(gap.count, 'host function')} accesses",
        lambda gap: (
            f"What {counted(gap.count, 'host function')} of pinned and managed memory reads and writes is not known "
            f"({first_names(gap.names)}): use `cudatool.host_view` in it, or `cudatool.annotate` around the call."
        ),
    ),
    GapKind.HOST_READS: _Words(
        lambda gap: f"the host's reads of {format_bytes(gap.count)} of pinned or managed memory",
        lambda gap: (
            "cudatool does not see the host's reads of pinned or managed memory that kernels write, of managed or "
            "registered memory that copies fill, and, without `/proc/self/pagemap`, of any memory that copies fill: "
            "use `cudatool.host_view`."
        ),
    ),
    GapKind.THREADS: _Words(
        lambda gap: f"{counted(gap.count, 'possible race')} between Python threads",
        lambda gap: (
            f"{counted(gap.count, 'possible race')}: {'its two' if gap.count == 1 else 'their'} Python threads "
            f"may synchronize in ways that the trace does not record ({first_names(gap.names, '; ')})."
        ),
    ),
    GapKind.FLAGS: _Words(
        lambda gap: f"{counted(gap.count, 'possible race')} of kernels that use flags in memory",
        lambda gap: (
            f"{counted(gap.count, 'possible race')}: kernels with volatile or system-scope accesses, and the host, may "
            f"order each other by flags in memory ({first_names(gap.names, '; ')})."
        ),
    ),
    GapKind.WAITS: _Words(
        lambda gap: f"{counted(gap.count, 'pair of accesses', 'pairs of accesses')} after waits for unknown events",
        lambda gap: (
            f"{counted(gap.count, 'pair of accesses', 'pairs of accesses')} may be ordered by a wait for what "
            "the trace does not show, as another process's event."
        ),
    ),
    GapKind.WORKLOAD: _Words(
        lambda gap: f"what the workload would have done: it {first_names(gap.names)}",
        lambda gap: f"The workload itself {first_names(gap.names)}; what it would have done after that is not known.",
    ),
    GapKind.FAILED_PROCESSES: _Words(
        lambda gap: f"what {counted(gap.count, 'child process')} would have done ({first_names(gap.names)})",
        lambda gap: (
            f"{counted(gap.count, 'process')} that the program started failed or ended early "
            f"({first_names(gap.names)}); what {'it' if gap.count == 1 else 'they'} would have done after that is not "
            "known."
        ),
    ),
    GapKind.KERNEL_RACES: _Words(
        lambda gap: f"races in a part of {counted(gap.count, 'launch')}",
        lambda gap: f"{printable('; '.join(gap.names))}. Launch fewer blocks, or use a smaller input.",
    ),
    GapKind.WARPS_IN_STEP: _Words(
        lambda gap: f"the order of volatile accesses within warps in {counted(gap.count, 'launch')}",
        lambda gap: (
            f"{printable('; '.join(gap.names))}. This is no data race, but what is read depends on which lane comes "
            "first: the result may differ from that of a GPU. Put `__syncwarp()` between the accesses."
        ),
    ),
    GapKind.SHARED_MEMORY: _Words(
        lambda gap: f"races with other processes in {_amount(gap)}shared memory",
        lambda gap: (
            f"Other processes can use {_amount(gap)}memory ({first_names(gap.names)}): their accesses "
            "are not compared with those of this process. Run in one process what uses it."
        ),
    ),
    GapKind.HELD_AT_END: _Words(
        lambda gap: f"whether {format_bytes(gap.count)} leaked",
        lambda gap: (
            f"{format_bytes(gap.count)} were still allocated where a recording breaks off: {_how_ended(gap.codes)}. "
            "Whether the program would have freed them is not known. Let each process end by itself, a "
            "`multiprocessing.Pool` with `close()` and `join()`."
        ),
    ),
}
