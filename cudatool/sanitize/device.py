"""What the device's checkers reported, and memory that leaked: from a trace's records to findings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cudatool.sanitize.findings import BufferSite, DeviceFinding, FindingKind, location
from cudatool.sanitize.fingerprints import digest, functions
from cudatool.sanitize.rows import LAUNCHES
from cudatool.source_text import SourceLine
from cudatool.trace.events import ENDED_WITH_CONTEXT, LIVED, Kind
from cudatool.trace.model import Ending, Frame, Trace, recorded_from
from cudatool.trace.streams import stream_names
from cudatool.units import counted, format_bytes

__all__ = ["device_findings", "held_at_end", "leaks", "unread_findings"]

_ALLOCATIONS = (Kind.BLOCK_ALLOC, Kind.MEM_ALLOC)
# By what memory is known until it is freed: its address, or, of cuMemCreate, which gives none, its handle.
_OPENS = {
    Kind.BLOCK_ALLOC: "block",
    Kind.MEM_ALLOC: "address",
    Kind.HOST_ALLOC: "address",
    Kind.PHYSICAL_ALLOC: "handle",
}
_CLOSES = {
    Kind.BLOCK_FREE_REQUESTED: "block",
    Kind.MEM_FREE: "address",
    Kind.HOST_FREE: "address",
    Kind.PHYSICAL_FREE: "handle",
}
_EITHER_FIRST = (FindingKind.KERNEL_RACE, FindingKind.CAS_GUESS)  # of whose two accesses either may come first
_CALLS_WITH_WORK = (Kind.KERNEL_LAUNCH, Kind.GRAPH_LAUNCH, Kind.MEMCPY, Kind.MEMSET)
_MOST_NAMES = 3
_NEAR = 1 << 20  # bytes between an address and the allocation that it is said to be near


@dataclass(frozen=True, slots=True)
class _Said:
    """What the name of a ``FINDING`` record says: the JSON of a :class:`cudatool.sim.observe.checkers.CheckFinding`."""

    kind: FindingKind
    check: str
    text: str
    mode: str = ""
    space: str = ""  # empty: global memory
    kernel: str = ""
    block: tuple[int, ...] = ()
    thread: tuple[int, ...] = ()
    source: SourceLine | None = None
    other_block: tuple[int, ...] = ()
    other_thread: tuple[int, ...] = ()
    other_source: SourceLine | None = None
    pointer: int = 0  # among the kernel's arguments, that the address was computed from; 0: not known
    usable: int = 0  # bytes of the access that could be used when the kernel ran

    @staticmethod
    def parse(text: str) -> _Said:
        """Return what JSON says; what is added to it later is left out.

        Raises
        ------
        ValueError
            It is not of this form, or of a kind that is not known.
        """
        try:
            said = json.loads(text)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(said, dict):
            raise ValueError("not an object")
        facts: dict[str, Any] = {}
        for name in _Said.__dataclass_fields__:
            if name in said:
                facts[name] = _reader(name)(said[name])
        return _Said(**facts | {"kind": FindingKind(facts.get("kind", ""))})


def _reader(name: str) -> Callable[[Any], Any]:
    if name in ("pointer", "usable"):
        return _number
    if name in ("source", "other_source"):
        return _source
    return _coordinates if name in ("block", "thread", "other_block", "other_thread") else _word


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("not an address or a size")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not text")
    return value


def _source(value: Any) -> SourceLine:
    if not isinstance(value, list) or [type(one) for one in value] != [str, int]:
        raise ValueError("not a line of a source")
    return SourceLine(*value)


def _coordinates(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one < 1 << 32 for one in value):
        raise ValueError("not coordinates")
    return tuple(value)


def device_findings(trace: Trace) -> tuple[DeviceFinding, ...]:
    """Return what the checkers saw, one finding for each place in a kernel and call site that launched it.

    Those that :func:`unread_findings` names are left out.
    """
    records = trace.records
    rows = np.flatnonzero(records["kind"] == Kind.FINDING)
    if not len(rows):
        return ()
    launches = np.flatnonzero(np.isin(records["kind"], _CALLS_WITH_WORK))
    launch_of = dict(zip(records["correlation"][launches].tolist(), launches.tolist(), strict=True))
    memory, names = _Memory(trace), stream_names(trace, in_sentences=True)
    found: dict[tuple[Any, ...], DeviceFinding] = {}
    for row in rows.tolist():
        record, said = records[row], _said(trace.names[int(records["name"][row])])
        if said is None:
            continue
        launch = launch_of.get(int(record["correlation"])) if record["correlation"] else None
        suspects = _suspects(trace, row) if said.kind is FindingKind.KERNEL_ERROR and launch is None else ()
        launch = suspects[0] if len(suspects) == 1 else launch
        at = row if launch is None else launch
        stack = trace.stack(int(records["stack"][at]))
        kind, text = said.kind, said.text
        buffer = None
        if said.space in ("", "global") and record["address"]:
            address, size = int(record["address"]), int(record["size"])
            kind, text, buffer = memory.explain(kind, text, address, size, at, said)
        key = (kind, *_place(kind, said), int(records["stack"][at]))
        known = found.get(key)
        if known is not None:
            found[key] = replace(known, count=known.count + int(record["aux0"]))
            continue
        found[key] = DeviceFinding(
            kind=kind,
            check=said.check,
            operation=_one_of(trace, suspects) or _operation(trace, launch, said, kind),
            agent=names[int(record["stream"])] if launch is not None else "the host",
            mode=said.mode,
            space=said.space,
            address=int(record["address"]),
            size=int(record["size"]),
            block=said.block,
            thread=said.thread,
            source=said.source,
            other_block=said.other_block,
            other_thread=said.other_thread,
            other_source=said.other_source,
            text=text,
            stack=stack,
            record=at,
            buffer=buffer,
            count=int(record["aux0"]),
            fingerprint="",
        )
    return _with_fingerprints(list(found.values()))


def _suspects(trace: Trace, row: int) -> tuple[int, ...]:
    """Return the launches before a record, on its device, that no wait shows to have ended: one of them failed.

    A GPU tells of a kernel that failed by the result of some later call, without its name.
    """
    records = trace.records[:row]
    kinds, on_device = records["kind"], records["device"] == trace.records["device"][row]
    waits = np.flatnonzero(on_device & (kinds == Kind.DEVICE_SYNCHRONIZE))
    on_streams = np.flatnonzero(on_device & (kinds == Kind.STREAM_SYNCHRONIZE))
    latest = dict(zip(records["stream"][on_streams].tolist(), on_streams.tolist(), strict=True))
    launches = np.flatnonzero(on_device & np.isin(kinds, LAUNCHES))
    launches = launches[launches > np.max(waits, initial=-1)]
    streams = records["stream"][launches].tolist()
    return tuple(at for at, stream in zip(launches.tolist(), streams, strict=True) if at > latest.get(stream, -1))


def _one_of(trace: Trace, launches: tuple[int, ...]) -> str:
    """Return words for launches one of which failed, ``""`` if there are no two."""
    if len(launches) < 2:
        return ""
    names = list(dict.fromkeys(trace.names[name] for name in trace.records["name"][list(launches)].tolist()))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"one of {len(launches):,} launches of {', '.join(names[:_MOST_NAMES])}{more}"


def _place(kind: FindingKind, said: _Said) -> tuple[Any, ...]:
    """Return what two findings of one defect have in common."""
    # A race is the same whichever of the two threads happened to come first.
    mode = "" if kind in _EITHER_FIRST else said.mode
    return said.kernel, frozenset((said.source, said.other_source)), mode, said.space


def unread_findings(trace: Trace) -> int:
    """Return the number of ``FINDING`` records that are damaged, or of a kind that this cudatool does not know."""
    names = trace.of_kind(Kind.FINDING)["name"].tolist()
    return sum(count for name, count in Counter(names).items() if _said(trace.names[name]) is None)


def _said(text: str) -> _Said | None:
    """Return what the name of a ``FINDING`` record says, None if it cannot be read."""
    try:
        return _Said.parse(text)
    except (TypeError, ValueError):
        return None


def _operation(trace: Trace, launch: int | None, said: _Said, kind: FindingKind) -> str:
    """Return what a report calls the kernel or call that did it, by the record of its launch, or that of its graph."""
    if launch is None:
        return said.kernel
    in_kernel = bool(said.block) or kind is FindingKind.KERNEL_ERROR
    if trace.records["kind"][launch] == Kind.GRAPH_LAUNCH:
        return f"kernel {said.kernel} of a graph" if in_kernel else f"{said.kernel} of a graph"
    if not in_kernel:
        return said.kernel
    return f"kernel {trace.names[int(trace.records['name'][launch])]}"


def leaks(trace: Trace) -> tuple[DeviceFinding, ...]:
    """Return the memory that was never given back: blocks of the caching allocator, and what the driver was asked for.

    That includes memory without an address, of cuMemCreate, until its last handle and mapping are gone, and blocks that
    kernels took from their heap: of these, only how many are left is recorded.

    The allocator's own segments are left out: it keeps them on purpose. So is memory that lived when the recording
    began: who was to give them back is not in it.

    There are none in a recording that was not closed: what a killed program would have freed is not known, see
    :func:`held_at_end`.
    """
    if trace.ending is not Ending.CLOSED:
        return ()
    records = trace.records
    sites: dict[int, list[int]] = {}
    for row in _never_freed(trace):
        sites.setdefault(int(records["stack"][row]), []).append(row)
    found = []
    for stack, rows in sites.items():
        first = rows[0]
        size = int(records["size"][rows].sum())
        site = trace.stack(stack)
        address = int(records["address"][first])
        text = f"{format_bytes(size)} in {counted(len(rows), 'allocation')} never given back"
        buffer = BufferSite(address, int(records["size"][first]), site)
        found.append(_leak(text, first, len(rows), address=address, size=size, stack=site, buffer=buffer))
    for kernels, count in trace.header.get("heap_blocks_left", {}).items():
        text = f"{counted(count, 'block')} of `malloc` in kernels never given to `free`; it is called by {kernels}"
        found.append(_leak(text, len(records) - 1, count))
    return _with_fingerprints(found)


def held_at_end(trace: Trace) -> int:
    """Return the bytes that were allocated where a recording breaks off, 0 for one that was closed."""
    if trace.ending is Ending.CLOSED:
        return 0
    return int(trace.records["size"][_never_freed(trace)].sum())


def _leak(
    text: str,
    record: int,
    count: int,
    *,
    address: int = 0,
    size: int = 0,
    stack: tuple[Frame, ...] = (),
    buffer: BufferSite | None = None,
) -> DeviceFinding:
    return DeviceFinding(
        kind=FindingKind.LEAK,
        check="leak",
        operation="",
        agent="",
        mode="",
        space="global",
        address=address,
        size=size,
        block=(),
        thread=(),
        source=None,
        other_block=(),
        other_thread=(),
        other_source=None,
        text=text,
        stack=stack,
        record=record,
        buffer=buffer,
        count=count,
        fingerprint="",
    )


def _never_freed(trace: Trace) -> list[int]:
    """Return the records of the allocations that no later record frees, but with the whole context."""
    records = trace.records
    begins = {device: recorded_from(trace, device) for device in trace.header.get("prior_records", {})}
    live: dict[tuple[str, int], int] = {}
    never: list[int] = []
    kinds = records["kind"]
    for row in np.flatnonzero(np.isin(kinds, [*_OPENS, *_CLOSES])).tolist():
        kind = Kind(int(kinds[row]))
        column = "aux0" if kind in (Kind.PHYSICAL_ALLOC, Kind.PHYSICAL_FREE) else "address"
        name = int(records[column][row])
        if kind is Kind.BLOCK_ALLOC and row < begins.get(int(records["device"][row]), 0):
            continue
        if kind in (Kind.MEM_ALLOC, Kind.HOST_ALLOC) and records["flags"][row] & LIVED:
            continue
        if kind in _OPENS:
            live[_OPENS[kind], name] = row
            continue
        allocated = live.pop((_CLOSES[kind], name), None)
        if kind is Kind.MEM_FREE and records["flags"][row] & ENDED_WITH_CONTEXT and allocated is not None:
            never.append(allocated)
    return sorted([*never, *live.values()])


def _with_fingerprints(found: list[DeviceFinding]) -> tuple[DeviceFinding, ...]:
    """Name the findings. Those that no name tells apart are counted as their lines follow each other.

    That order is the same when lines move, and in each run: neither kernels nor the threads of one always run alike.
    """
    seen: Counter[str] = Counter()
    result = []
    for one in sorted(found, key=lambda one: (_lines(one), one.record)):
        # Which of two racing threads comes second, and so whether it reads or writes, differs from run to run.
        mode = "" if one.kind in _EITHER_FIRST else one.mode
        parts = (one.kind, one.operation, mode, one.space, functions(one.stack))
        identity = digest(parts)
        seen[identity] += 1
        if seen[identity] > 1:
            identity += f"-{seen[identity]}"
        result.append(replace(one, fingerprint=identity))
    return tuple(sorted(result, key=lambda one: (one.record, _lines(one))))


def _lines(finding: DeviceFinding) -> tuple[Any, ...]:
    """Return where a finding is, for sorting: the calls that led there, outermost first, then the lines in a kernel."""
    calls = [(frame.file, frame.line) for frame in reversed(finding.stack)]
    return calls, sorted(source or SourceLine("", 0) for source in (finding.source, finding.other_source))


class _Memory:
    """The allocations of a trace, to say which one an address belonged to at a moment."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        records = trace.records
        self._rows = np.flatnonzero(np.isin(records["kind"], _ALLOCATIONS))
        made = records[self._rows]
        self._start = made["address"].astype(np.int64)
        asked = np.where(made["kind"] == Kind.BLOCK_ALLOC, made["aux0"], made["size"]).astype(np.int64)
        self._stop = self._start + asked
        self._end = self._start + made["size"].astype(np.int64)
        frees = np.isin(records["kind"], (Kind.BLOCK_FREE_REQUESTED, Kind.MEM_FREE))
        self._frees = np.flatnonzero(frees)

    def explain(
        self, kind: FindingKind, text: str, address: int, size: int, at: int, said: _Said
    ) -> tuple[FindingKind, str, BufferSite | None]:
        """Return what is known of an address when record `at` was made: the allocation it is of, or just beyond.

        That is the allocation of the pointer that the address was computed from, if that is known. An access of which
        some bytes could be used when the kernel ran has crossed its end, whatever became of the memory later.
        """
        pointer = said.pointer
        before = self._rows < at
        inside = np.flatnonzero(before & (self._start <= (pointer or address)) & ((pointer or address) < self._end))
        if len(inside):
            index = int(inside[-1])
        else:
            near = np.flatnonzero(before & (self._end <= address) & (address < self._end + _NEAR))
            if not len(near):
                return kind, text, None
            index = int(near[np.argmax(self._end[near])])
        row = int(self._rows[index])
        records = self._trace.records
        start, stop = int(self._start[index]), int(self._stop[index])
        buffer = BufferSite(start, stop - start, self._trace.stack(int(records["stack"][row])))
        if kind not in (FindingKind.OUT_OF_BOUNDS, FindingKind.USE_AFTER_FREE):
            return kind, text, buffer
        if address < start:
            return (
                FindingKind.OUT_OF_BOUNDS,
                f"{counted(start - address, 'byte')} before the start of {format_bytes(stop - start)}",
                buffer,
            )
        freed = next((int(f) for f in self._frees if row < f and int(records["address"][f]) == start), None)
        if freed is not None and address < stop and not said.usable:
            where = location(self._trace.stack(int(records["stack"][freed])))
            late = "" if freed < at else " before this ran"
            text = f"{counted(address - start, 'byte')} into memory freed at {where}{late}"
            return FindingKind.USE_AFTER_FREE, text, buffer
        if address + size > stop:
            beyond = address - stop
            place = f"{counted(beyond, 'byte')} after" if beyond >= 0 else "across"
            return FindingKind.OUT_OF_BOUNDS, f"{place} the end of {format_bytes(stop - start)}", buffer
        return kind, text, buffer
