"""From a trace to a report: run the engine, try the repairs, and put what it found into words."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable

from cudatool.limits import REPORT_FRAMES
from cudatool.sanitize.advice import CALLS, OrderingCalls
from cudatool.sanitize.callers import Callers
from cudatool.sanitize.coverage import LeftOpen, find_gaps, operations_in
from cudatool.sanitize.defects import Defect, Key, Repairs, Side
from cudatool.sanitize.device import device_findings, leaks
from cudatool.sanitize.effort import Effort
from cudatool.sanitize.engine import Engine
from cudatool.sanitize.findings import (
    AccessSite,
    BufferSite,
    Finding,
    FindingKind,
    Report,
)
from cudatool.sanitize.fingerprints import fingerprint
from cudatool.sanitize.stack_depths import within
from cudatool.trace.events import AccessFlag, Api, Kind, StreamFlag
from cudatool.trace.model import Frame, Trace
from cudatool.trace.streams import thread_names
from cudatool.units import counted

__all__ = ["check"]

_RACES = (FindingKind.RACE_RAW, FindingKind.RACE_WAR, FindingKind.RACE_WAW)
_PLAIN_WORK = frozenset(
    {Kind.KERNEL_LAUNCH, Kind.GEMM, Kind.MEMCPY, Kind.MEMSET}
)  # each is one operation in stream order
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


def check(
    trace: Trace,
    checks: Collection[str] = ("race",),
    *,
    bounded: bool = False,
    beside: Collection[int] = (),
    since: int = 0,
) -> Report:
    """Return every access of `trace` that CUDA's rules leave in no order with another one or with its memory's life.

    Also what the software device's checkers recorded; and, if `checks` has "leak", memory that was never given back.
    Without "race" there is no look at the order of accesses. What `checks` asks for and the trace cannot tell is among
    the report's gaps.

    The findings are independent of each other: what would vanish with an earlier one's repair is only counted.
    The repairs have been applied to the trace and the check repeated, unless it is certain what that would show: a
    repair is named only if its finding is gone with it.
    Nothing depends on the order in which the work happened to run.

    Parameters
    ----------
    trace
        What was recorded.
    checks
        What to look for.
    bounded
        Whether the work is limited by the number of events, and the report in its stacks, for a file that a stranger
        may have made.
    beside
        Ids of the processes that the program started and whose traces are checked, too: they are no gaps.
    since
        The record that the report begins with. What comes before is its past: no findings, and no possible races, whose
        later side is there.

    Raises
    ------
    TraceFormatError
        `bounded`, and the check would take more work.
    """
    report = _report(trace, checks, Effort(trace, bounded=bounded), beside, since)
    return within(report, REPORT_FRAMES) if bounded else report


def _report(trace: Trace, checks: Collection[str], effort: Effort, beside: Collection[int], since: int) -> Report:
    found = device_findings(trace) + (leaks(trace) if "leak" in checks else ())
    on_device = tuple(one for one in found if one.record >= since)
    device = str(trace.header.get("device", ""))
    if "race" not in checks:
        operations = operations_in(trace)
        gaps = find_gaps(trace, checks, operations=operations, beside=beside)
        notes = tuple(trace.notes)
        return Report((), on_device=on_device, device=device, operations=operations, notes=notes, gaps=gaps)
    # With less order nothing is found less: what is sound however the host's threads are ordered needs no other look.
    apart = Engine(trace, one_host=False, go_on_repaired=True, effort=effort)
    apart.run()
    engine = apart
    if apart.threads > 1 and (apart.defects or apart.by_flags):
        engine = Engine(trace, go_on_repaired=True, effort=effort)
        engine.run()
    independent = engine.defects
    cured: set[Key] = set()
    if independent:
        # What is said of a defect is that nothing orders its sides, not even the repair of another one.
        alone = Engine(trace, wanted=independent.keys(), effort=effort)
        alone.run()
        independent = {key: defect.as_seen_by(alone.defects.get(key)) for key, defect in independent.items()}
        cured = _cured(trace, engine, independent, effort)

    words = _Words(trace, engine)
    certain: list[Finding] = []
    possible: list[Finding] = []
    for key, defect in independent.items():
        if defect.second.operation.record < since:
            continue
        finding = words.finding(defect, repaired=key in cured)
        (certain if defect.first.exact and defect.second.exact else possible).append(finding)
    return Report(
        findings=tuple(certain),
        possible=tuple(possible),
        on_device=on_device,
        device=device,
        operations=engine.operations,
        unchecked_launches=engine.unchecked.total(),
        edges=dict(sorted(apart.ordering.edges.items())),
        notes=(*trace.notes, *_notes(engine)),
        gaps=find_gaps(
            trace,
            checks,
            operations=engine.operations,
            left_open=_left_open(trace, engine, apart, since),
            beside=beside,
        ),
    )


def _left_open(trace: Trace, engine: Engine, apart: Engine, since: int) -> LeftOpen:
    return LeftOpen(
        launches=engine.unchecked.total(),
        kernels=_without_arguments(trace.names[name] for name, _ in engine.unchecked.most_common()),
        streams=engine.unknown_streams,
        waits=_ordered_by_unknown(trace, engine, since),
        threads=_thread_pairs(trace, engine, apart, since),
        flags=_lines(trace, (pair for pair in engine.by_flags.values() if pair[1] >= since)),
    )


def _without_arguments(names: Iterable[str]) -> list[str]:
    """Return kernels' names without those of templates, each once: libraries' are some hundred characters long."""
    return list(dict.fromkeys(name.partition("<")[0] for name in names))


def _ordered_by_unknown(trace: Trace, engine: Engine, since: int) -> int:
    """Return how many pairs of call sites would race if waits for what the trace does not show ordered nothing."""
    if not engine.ordering.unknown:
        return 0
    without = Engine(trace, go_on_repaired=True, unknown_orders=False, effort=engine.effort)
    without.run()
    new = without.defects.keys() - engine.defects.keys()
    return sum(without.defects[key].second.operation.record >= since for key in new)


def _notes(engine: Engine) -> list[str]:
    notes = []
    if engine.ordering.unknown:
        waits = counted(engine.ordering.unknown, "wait")
        notes.append(f"{waits} for what the trace does not show, as another process's event")
    if empty := engine.ordering.empty:
        notes.append(f"{counted(empty, 'stream wait')} did nothing: the event had not been recorded")
    return notes


def _thread_pairs(trace: Trace, engine: Engine, apart: Engine, since: int) -> list[str]:
    """Return the lines of each possible race that is none if host threads hand work to each other properly.

    How they do is not in the trace, beyond what is recorded of locks and queues: `apart` has seen no order beyond that.
    """
    new = (defect for key, defect in apart.defects.items() if key not in engine.defects)
    recent = (defect for defect in new if defect.second.operation.record >= since)
    return _lines(trace, ((defect.first.record, defect.second.record) for defect in recent))


def _lines(trace: Trace, pairs: Iterable[tuple[int, int]]) -> list[str]:
    """Return the lines of pairs of records in words."""
    callers = Callers(trace)
    return [f"{callers.line(first, second)} and {callers.line(second, first)}" for first, second in pairs]


def _plan(engine: Engine, defects: Iterable[Defect]) -> Repairs:
    """One change of the program for each defect that a change of order can cure."""
    repairs = Repairs()
    for defect in defects:
        first, second = defect.first, defect.second
        if defect.kind in _NO_REPAIR:
            continue
        if defect.inside:
            repairs.edges |= defect.nodes
        elif defect.grouped:
            repairs.groups.add(int(engine.records["stack"][second.record]))
        elif engine.is_early(defect):
            repairs.serialized.add(int(engine.records["stack"][second.record]))
        elif first.mode == "free" or defect.kind is FindingKind.WAIT_UNRECORDED:
            continue  # no order helps; that of its race is tried
        elif defect.wait >= 0:
            stack = int(engine.records["stack"][defect.wait])
            _let_wait(repairs, stack, defect)
        elif (owner := _forgotten(defect)) is not None:
            stack = int(engine.records["stack"][owner])
            repairs.record_streams.setdefault(stack, set()).update(earlier for earlier, _ in defect.agents)
        else:
            _let_wait(repairs, int(engine.records["stack"][second.operation.record]), defect)
    return repairs


def _cured(trace: Trace, engine: Engine, defects: dict[Key, Defect], effort: Effort) -> set[Key]:
    """Return the defects that are gone with their repairs."""
    if _waits_cure(engine):
        return set(defects)
    repaired = Engine(trace, repairs=_plan(engine, defects.values()), effort=effort)
    repaired.run()
    # In a trace that contradicts itself, a repair may bring up what was hidden before.
    return defects.keys() - repaired.defects.keys()


def _waits_cure(engine: Engine) -> bool:
    """Whether it is certain, without another look at the trace, that all defects are gone with their repairs.

    So it is if each is a race of plain work on streams and is known exactly. The engine went on as if the second side
    had waited for the first one, each time, and found no more: all conflicts are among those. The repair waits, at
    the same call, for all that the first side's stream was given by then, which is at least as much. Order only grows.
    """
    if engine.ordering.unknown:
        return False
    streams = {agent.index for agent in engine.streams.values()}
    for key, defect in engine.defects.items():
        _, exact, _, one, other, *launches = key
        is_plain = exact and not launches and not defect.inside and not defect.grouped and defect.wait < 0
        agents = {agent for pair in defect.agents for agent in pair}
        if not (is_plain and defect.kind in _RACES and {one[0], other[0]} <= _PLAIN_WORK and agents <= streams):
            return False
    return True


def _let_wait(repairs: Repairs, stack: int, defect: Defect) -> None:
    for earlier, later in defect.agents:
        repairs.waits.setdefault((stack, later), set()).add(earlier)


_NO_REPAIR = (FindingKind.CAPTURE_MISSED, FindingKind.CAPTURED_EVENT)


def _forgotten(defect: Defect) -> int | None:
    """The record of the allocation on which record_stream is missing, if that is what is wrong."""
    owner = defect.first.owner
    if defect.kind is FindingKind.REUSE and owner is not None and owner.agent != defect.first.operation.agent:
        return owner.record
    return None


class _Words:
    """Turns records into sentences."""

    def __init__(self, trace: Trace, engine: Engine) -> None:
        self._trace = trace
        self._engine = engine
        self._callers = Callers(trace)
        self._seen: Counter[str] = Counter()

    def finding(self, defect: Defect, *, repaired: bool) -> Finding:
        records = defect.first.record, defect.second.record
        if defect.kind is FindingKind.WAIT_UNRECORDED:  # both sides are the wait; beside it stands the work before it
            records = defect.wait, defect.wait
        first = self._site(defect.first, records[1], defect.second)
        second = self._site(defect.second, records[0], defect.first)
        buffer = None
        if (owned := defect.buffer) is not None:
            place = self._callers.frame(owned.record, defect.second.record)
            buffer = BufferSite(owned.start, owned.stop - owned.start, self._stack(owned.record), place)
        identity = fingerprint(defect.kind, first, second, buffer)
        self._seen[identity] += 1
        if self._seen[identity] > 1:  # the same functions and operations on other lines
            identity += f"-{self._seen[identity]}"
        return Finding(
            kind=defect.kind,
            first=first,
            second=second,
            start=defect.start,
            size=defect.size,
            runs=defect.runs,
            stride=defect.stride,
            buffer=buffer,
            reason=self._reason(defect),
            repair=self._repair(defect) if repaired else "",
            count=defect.count,
            fingerprint=identity,
        )

    def _site(self, side: Side, beside: int, other: Side) -> AccessSite:
        """Return a side of a finding in words; `beside` is the record whose line it must differ from."""
        record = side.record
        made, others = (self._maker(one) for one in (side, other))
        if made is not None and (others is None or self._stack(made) == self._stack(others)):
            others = record
        return AccessSite(
            operation=self._operation(record),
            is_host_access=bool(self._trace.records["kind"][record] == Kind.HOST_ACCESS),
            agent=self._engine.agents[side.operation.agent].label,
            mode=side.mode,
            argument=self._trace.names[side.name],
            stack=self._stack(record),
            record=side.operation.record,
            exact=side.exact,
            launch=self._stack(side.operation.record) if side.node >= 0 else (),
            noticed=self._is_noticed(record),
            place=self._callers.frame(record, beside),
            created=self._stack(made) if made is not None else (),
            created_at=self._callers.frame(made, others) if made is not None and others is not None else None,
        )

    def _maker(self, side: Side) -> int | None:
        """Return the record that made the stream of a side; None for the host and for default streams."""
        return self._callers.made.get(self._engine.agents[side.operation.agent].stream)

    def _stack(self, record: int) -> tuple[Frame, ...]:
        return self._trace.stack(int(self._trace.records["stack"][record]))

    def _operation(self, record: int) -> str:
        row = self._trace.records[record]
        kind, name = Kind(int(row["kind"])), self._trace.names[int(row["name"])]
        if kind in (Kind.GRAPH_NODE_ADDED, Kind.GRAPH_NODE):
            if routine := self._routines.get(int(row["correlation"])):
                return f"{routine} of a graph"
            return f"kernel {name} of a graph" if row["flags"] == _KERNEL_NODE else f"{name} of a graph"
        if kind is Kind.KERNEL_LAUNCH:
            return f"kernel {name}" if name else "a kernel"
        return name or kind.name.lower().replace("_", " ")

    @functools.cached_property
    def _routines(self) -> dict[int, str]:
        """Names of calls of libraries, by correlation: what a node stands for that has no telling name of its own."""
        calls = [self._trace.of_kind(kind) for kind in (Kind.GEMM, Kind.COLLECTIVE)]
        return {int(row["correlation"]): self._trace.names[int(row["name"])] for rows in calls for row in rows}

    def _after(self, defect: Defect) -> str:
        """Return the place after which an event stands for the first side: none can be recorded inside of a launch."""
        launch, other = defect.first.operation.record, defect.second.operation.record
        name = "the launch of the graph" if self._is_graph(launch) else self._operation(launch)
        return f"{name} ({self._callers.line(launch, other)})"

    def _before(self, defect: Defect) -> str:
        """Return the second side with the place before which its stream can be made to wait."""
        side, launch, other = defect.second, defect.second.operation.record, defect.first.operation.record
        if self._is_noticed(launch):
            does = "reads" if side.mode == "read" else "writes"
            return f"the host {does} there (seen at {self._callers.line(launch, other)})"
        if self._is_graph(launch) and side.node >= 0:
            at = self._callers.line(launch, other)
            return f"the launch of the graph at {at}, which runs {self._at(side.record, other)}"
        return f"{self._operation(launch)} at {self._callers.line(launch, other)}"

    @functools.cached_property
    def _apis(self) -> dict[int, int]:
        """Through which library each stream was made."""
        made = self._trace.of_kind(Kind.STREAM_CREATE)
        return dict(zip(made["stream"].tolist(), made["aux1"].tolist(), strict=True))

    def _calls(self, stream: int) -> OrderingCalls:
        return CALLS.get(self._apis.get(stream, Api.UNKNOWN), CALLS[Api.UNKNOWN])  # a newer trace may name others

    def _is_graph(self, record: int) -> bool:
        return bool(self._trace.records["kind"][record] == Kind.GRAPH_LAUNCH)

    def _is_noticed(self, record: int) -> bool:
        row = self._trace.records[record]
        return bool(row["kind"] == Kind.HOST_ACCESS and row["flags"] & AccessFlag.NOTICED)

    def _at(self, record: int, other: int) -> str:
        """Return a call with the line that a report shows for it beside another call."""
        return f"{self._operation(record)} ({self._callers.line(record, other)})"

    def _stream(self, record: int) -> str:
        return self._engine.streams[int(self._trace.records["stream"][record])].label

    def _other_thread(self, defect: Defect) -> str | None:
        """Return the thread whose per-thread default stream the first side is of, if another one made the second."""
        records = self._trace.records
        first, second = (side.operation.record for side in (defect.first, defect.second))
        threads = int(records["thread"][first]), int(records["thread"][second])
        stream = self._engine.agents[defect.first.operation.agent].stream
        if threads[0] == threads[1] or stream not in self._per_thread:
            return None
        return thread_names(self._trace)[threads[0]]

    @functools.cached_property
    def _per_thread(self) -> frozenset[int]:
        made = self._trace.of_kind(Kind.STREAM_CREATE)
        return frozenset(made["stream"][made["flags"] & StreamFlag.PER_THREAD_DEFAULT != 0].tolist())

    def _reason(self, defect: Defect) -> str:
        first, second = defect.first.operation, defect.second.operation
        line, here, there = self._callers.line, defect.second.record, defect.first.record
        earlier, later = (self._engine.agents[side.agent] for side in (first, second))
        if defect.first.mode == "free" and not defect.inside:
            freed = line(first.record, here)
            if defect.second.node >= 0:
                return f"The graph was made for this memory, and it was given back at {freed} before the launch."
            return f"The memory was already given back at {freed}."
        if defect.inside:
            return f"No edge of the graph leads from {self._at(there, here)} to the other."
        if defect.grouped:
            members = "copies of one batch" if self._is_batch(defect) else "operations of one group"
            return f"Both are {members}, which come in no order, even on one stream."
        if self._engine.is_early(defect):
            return (
                f"{self._operation(defect.second.record)} is launched with programmatic stream serialization: it may "
                f"begin as soon as {self._at(there, here)} lets its dependents start, and does not wait for "
                "its end."
            )
        if defect.kind is FindingKind.WAIT_UNRECORDED:
            before = self._at(defect.wait, here)
            return f"The event had not been recorded, so nothing makes {later.label} wait for {before}."
        if defect.kind is FindingKind.CAPTURED_EVENT:
            return "The event was last recorded in a capture, so it is a place in a graph, with no work to wait for."
        if defect.kind is FindingKind.CAPTURE_MISSED:
            return (
                f"{self._at(there, here)} was captured and had not run when {later.label} was given this work, "
                "which is no part of the graph."
            )
        if defect.common:
            met = self._at(earlier.records[defect.common - 1], here)
            order = f"{later.label} is ordered after {earlier.label} only up to {met}"
        else:
            order = f"nothing makes {later.label} wait for {earlier.label}"
        order = order[0].upper() + order[1:] + "."
        if defect.wait >= 0:
            order += f" The wait at {line(defect.wait, here)} did nothing: its event had not been recorded."
        if defect.moved:
            order += f" {self._replaced_record(defect.moved, here)}"
        owner = defect.first.owner
        if defect.kind is FindingKind.REUSE and owner is not None:
            freed = f", was freed at {line(owner.freed, here)}" if owner.freed >= 0 else ""
            return (
                f"The block was allocated at {line(owner.record, here)} for "
                f"{self._engine.agents[owner.agent].label}{freed} and was then given to a new owner. {order}"
            )
        return order

    def _is_batch(self, defect: Defect) -> bool:
        return bool(self._engine.records["kind"][defect.second.record] == Kind.MEMCPY)

    def _replaced_record(self, moved: tuple[int, ...], here: int) -> str:
        """Return that a wait is for another record of its event than the one on the other stream."""
        wait, replaced, latest = moved
        line = self._callers.line
        return (
            f"The wait at {line(wait, here)} is for the record on {self._stream(latest)} "
            f"({line(latest, replaced)}), which replaced the one on {self._stream(replaced)} "
            f"({line(replaced, latest)})."
        )

    def _repair(self, defect: Defect) -> str:
        first, second = defect.first, defect.second
        earlier, later = (self._engine.agents[side.operation.agent] for side in (first, second))
        if defect.inside:
            return self._repair_of_graph(defect)
        if self._engine.is_early(defect):
            return (
                f"Call `cudaGridDependencySynchronize()` in {self._operation(second.record)} before it uses this "
                f"memory, or launch it without the attribute at {self._callers.line(second.record, first.record)}."
            )
        here = self._before(defect)
        if defect.grouped and self._is_batch(defect):
            return f"Make one of the two copies in a call of its own, before or after {here}."
        if defect.grouped:
            return f"End the group before {here}, and begin another one."
        if defect.wait >= 0 and defect.kind is not FindingKind.WAIT_UNRECORDED:
            waited = self._callers.line(defect.wait, second.record)
            return f"Record the event after {self._after(defect)} and before the wait at {waited}."
        if defect.kind is FindingKind.WAIT_UNRECORDED:
            work = f"{self._operation(defect.wait)} ({self._callers.line(defect.wait, second.record)})"
            return f"Record the event after {work} and before this wait."
        if (owner := _forgotten(defect)) is not None:
            return (
                f"Before the block allocated at {self._callers.line(owner, second.record)} is freed, call "
                f"`record_stream` on it for {earlier.label}."
            )
        if (thread := self._other_thread(defect)) is not None:
            calls = self._calls(earlier.stream)
            record = f" (`{calls.record}`)" if calls.record else ""
            waits = "wait for it on the host" if later.is_host else f"make {later.label} wait for it"
            return (
                f"Other threads have no handle of {earlier.label}: in thread {thread}, record an event after "
                f"{self._after(defect)}{record}; when that is done, and before {here}, {waits}"
                f"{'' if later.is_host else f': `{self._calls(later.stream).wait_event}`'}."
            )
        if later.is_host:
            return f"Before {here}, synchronize {earlier.label}: `{self._calls(earlier.stream).synchronize}`."
        others = len(defect.agents) - 1
        return (
            f"Before {here}, make {later.label} wait for {earlier.label}: "
            f"{self._calls(later.stream).after_all(self._after(defect))}."
            + (f" The same for {counted(others, 'more pair')} of streams at this line." if others else "")
        )

    def _repair_of_graph(self, defect: Defect) -> str:
        """Return what orders two nodes of one graph."""
        first, second = defect.first, defect.second
        there = f"{self._operation(first.record)} ({self._callers.line(first.record, second.record)})"
        here = f"{self._operation(second.record)} at {self._callers.line(second.record, first.record)}"
        streams = [int(self._trace.records["stream"][side.record]) for side in (first, second)]
        others = len(defect.nodes) - 1
        more = f" The same for {counted(others, 'more pair')} of nodes from these lines." if others else ""
        if not all(streams):
            return f"Let {here} depend on {there}: `cuGraphAddDependencies`.{more}"
        return (
            f"Before {here} is captured, make stream {streams[1]} wait for stream {streams[0]}: "
            f"{self._calls(streams[1]).after_event(there)}.{more}"
        )
