"""Findings in words: what the two sides of a defect are, why nothing orders them, and what call would."""

from __future__ import annotations

import functools
from collections import Counter

from cudatool.sanitize.advice import CALLS, OrderingCalls
from cudatool.sanitize.callers import Callers
from cudatool.sanitize.defects import Defect, Side
from cudatool.sanitize.engine import Engine
from cudatool.sanitize.findings import AccessSite, BufferSite, Finding, FindingKind
from cudatool.sanitize.fingerprints import fingerprint
from cudatool.trace.events import AccessFlag, Api, Kind, StreamFlag
from cudatool.trace.model import Frame, Trace
from cudatool.trace.streams import thread_names
from cudatool.units import counted

__all__ = ["Words"]

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class Words:
    """Puts the defects that an engine found in a trace into sentences."""

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
        if (owner := defect.forgotten) is not None:
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
