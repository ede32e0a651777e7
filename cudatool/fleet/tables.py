"""A trace as the rows of a data set's tables: columns, not objects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool import analyze
from cudatool.trace.captured import as_called
from cudatool.trace.distinct import distinct
from cudatool.trace.events import FAILED_REQUESTS, WORK, Kind
from cudatool.trace.frames import frame_rank, frame_words, missing_stack, user_frame
from cudatool.trace.lifetimes import Ints, Lifetimes, Timeline, blocks, segments, timeline
from cudatool.trace.model import Frame, Trace, is_of_kind, recorded_from
from cudatool.trace.physical import physical_memory
from cudatool.trace.streams import thread_names

__all__ = ["CHECKPOINT", "NULL", "Columns", "Tables"]

Columns = dict[str, npt.NDArray[Any]]

NULL: Final = -(1 << 63)
"""NULL in a column of numbers; in one of texts it is None."""

CHECKPOINT: Final = 1024
"""Allocations from one row of ``checkpoints`` to the next."""

_CODE: Final = ("own", "library", "C++", "allocator")
_FORMATS: Final = {"pytorch-snapshot": "torch", "rmm-log": "rmm"}
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio: an odd number whose bits are spread
_AFTER_1980: Final = 10 * 365 * 24 * 3600 * 10**9  # ns; clocks that count from a machine's start show less


class Tables:
    """The tables of one trace; each property is one."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._records = trace.records
        self._blocks, self._segments = blocks(trace), segments(trace)
        # Where all requests failed, there is nothing else.
        failed = trace.of_kind(*FAILED_REQUESTS)["device"]
        devices = distinct(self._blocks.device, self._segments.device, failed).tolist()
        self._devices = [_Device.of(trace, self._blocks, self._segments, device) for device in devices]
        self._physical = physical_memory(trace)
        self._timed = trace.header.get("time_axis") != "index"
        time = self._records["time"]
        self._first = int(time.min()) if len(time) else 0
        self._hashes = np.array([_hash(trace.stack(i)) for i in range(len(trace.stacks))] or [NULL], np.int64)
        self._own = np.array([_hash(_own(trace.stack(i))) for i in range(len(trace.stacks))] or [NULL], np.int64)

    @cached_property
    def ranks(self) -> Columns:
        """A row for each device."""
        header, devices = self._trace.header, self._devices
        format = _FORMATS.get(str(header.get("format", "")), "cudatool")
        same: dict[str, Any] = {
            "source": self._trace.source,
            "format": format,
            "world_size": _number(header.get("world_size")),
            "local_rank": _number(header.get("local_rank")),
            "host": header.get("host"),
            "is_child": "parent_trace" in header,
            "events": len(self._records),
            "ending": str(self._trace.ending),
            "notes": "\n".join(self._trace.notes),
            "simulated": header.get("device_kind") == "sim",
            "libraries": ",".join(map(str, header.get("libraries", ()))),
            "unix_start_ns": self._unix_start(format),
            "duration": self._trace.duration if self._timed else NULL,
        }
        rows = [self._of_device(device) for device in devices] or [{"device": NULL, **_NOTHING}]
        return _columns([{**same, **row} for row in rows])

    def _of_device(self, device: _Device) -> dict[str, Any]:
        curve, peak = device.curve, device.curve.peak()
        is_oom = is_of_kind(self._records, *FAILED_REQUESTS) & (self._records["device"] == device.device)
        oom = self._records["time"][is_oom]
        knows = curve.knows_reserved
        return {
            "device": device.device,
            "allocations": len(device.blocks),
            "peak_active": int(curve.active.max(initial=0)),
            "peak_allocated": int(curve.allocated.max(initial=0)),
            "peak_reserved": int(curve.reserved.max(initial=0)) if knows else NULL,
            "end_active": int(curve.active[-1]) if len(curve.active) else 0,
            "reserved_at_peak": int(curve.reserved[peak]) if knows and peak >= 0 else NULL,
            "peak_time": int(curve.time[peak]) - self._first if self._timed and peak >= 0 else NULL,
            "physical_peak": self._physical[device.device].peak if device.device in self._physical else 0,
            "steps": len(device.steps),
            "steps_source": device.steps.source,
            "steps_marked": bool(device.steps.ranges),
            "ooms": len(oom),
            "first_oom_time": int(oom.min()) - self._first if self._timed and len(oom) else NULL,
            "leak_verdict": str(device.leaks.verdict),
        }

    def _unix_start(self, format: str) -> int:
        header = self._trace.header
        if "start_unix_ns" in header and "start_time_ns" in header:
            return int(header["start_unix_ns"]) - int(header["start_time_ns"]) + self._first
        # PyTorch's snapshots have times since 1970.
        return self._first if format == "torch" and self._timed and self._first > _AFTER_1980 else NULL

    @cached_property
    def steps(self) -> Columns:
        """A row for each step of a device, and one for what follows the beginning of the last."""
        rows: list[Columns] = []
        for device in self._devices:
            bounds, curve = device.steps.bounds, device.curve
            if not len(bounds) or not len(curve.index):
                continue
            begin = np.searchsorted(curve.index, bounds)
            level = np.append(0, curve.active)  # before each row, and after the last
            stop = np.append(begin[1:], len(curve.index))
            pairs = zip(begin.tolist(), stop.tolist(), strict=True)
            end = self._time(bounds[1:])
            rows.append(
                {
                    "device": np.full(len(bounds), device.device),
                    "step": np.arange(len(bounds)),
                    "start_time": self._time(bounds),
                    "end_time": np.append(end, NULL),
                    "peak_active": np.array([level[a : b + 1].max() for a, b in pairs], np.int64),
                    "end_active": level[stop],
                    "allocations": np.diff(np.searchsorted(device.blocks.start, [*bounds, len(self._records)])),
                }
            )
        return _joined(rows)

    @cached_property
    def sites(self) -> Columns:
        """Memory by device, call site and category."""
        rows: list[Columns] = []
        labels = self._labels
        for device in self._devices:
            own, never = device.blocks, len(self._records)
            key = self._site_of[own.stack] * 64 + device.category  # a few categories
            distinct, group = np.unique(key, return_inverse=True)
            count = len(distinct)

            def total(of: Lifetimes, chosen: npt.NDArray[np.bool_] | None, group: Ints = group, n: int = count) -> Ints:
                result = np.zeros(n, np.int64)
                np.add.at(result, *((group, of.size) if chosen is None else (group[chosen], of.size[chosen])))
                return result

            never_freed = own.freed == never
            peak = int(device.curve.index[device.curve.peak()]) if len(device.curve.index) else -1
            rows.append(
                {
                    "device": np.full(count, device.device),
                    "site": labels[distinct // 64],
                    "category": _CATEGORIES[distinct % 64],
                    "allocations": np.bincount(group, minlength=count),
                    "bytes": total(own, None),
                    "peak_bytes": total(own, (own.start <= peak) & (peak < own.end)),
                    "end_bytes": total(own, own.end == never),
                    "never_freed": np.bincount(group[never_freed], minlength=count),
                }
            )
        return _joined(rows)

    @cached_property
    def leaks(self) -> Columns:
        """A row for each call site whose memory grows."""
        return _columns(
            [
                {
                    "device": device.device,
                    "site": leak.label,
                    "is_certain": leak.doubt is None,
                    "growth": leak.growth,
                    "per_step": leak.per_step,
                }
                for device in self._devices
                for leak in (*device.leaks.found, *device.leaks.unclear)
            ]
        )

    @cached_property
    def checkpoints(self) -> Columns:
        """Hashes of the first so many allocations of a device: equal where all of those are equal, in order."""
        rows: list[Columns] = []
        for device in self._devices:
            recorded = device.blocks[device.blocks.start >= device.begin]
            count = len(recorded)
            at = np.append(np.arange(CHECKPOINT, count, CHECKPOINT), count)
            own, full = self._identities(recorded)
            rows.append(
                {
                    "device": np.full(len(at), device.device),
                    "sequence": at,
                    "own_hash": np.append(0, _chained(own))[at],
                    "full_hash": np.append(0, _chained(full))[at],
                }
            )
        return _joined(rows)

    @cached_property
    def allocations(self) -> Columns:
        """A row for each block, and for what a program took from the driver itself."""
        own = self._blocks
        sequence, category = np.full(len(own), NULL), np.zeros(len(own), np.int64)
        for device in self._devices:
            recorded = np.flatnonzero((own.device == device.device) & (own.start >= device.begin))
            sequence[recorded] = np.arange(len(recorded))
            category[own.device == device.device] = device.category
        own_hash, full_hash = self._identities(own)
        return {
            "allocation": np.arange(len(own)),
            "sequence": sequence,
            **_memory(own),
            "requested": own.requested,
            "alloc_time": self._time(own.start),
            "free_requested_time": self._time(own.freed),
            "free_completed_time": self._time(own.end),
            "alloc_event": own.start,
            "free_requested_event": self._known(own.freed),
            "free_completed_event": self._known(own.end),
            "step": self._step(own.start, own.device),
            "stack": self._stack(own.stack),
            "site": self._labels[self._site_of[own.stack]],
            "category": _CATEGORIES[category],
            "library": self._names[own.library],
            "own_hash": own_hash,
            "full_hash": full_hash,
        }

    @cached_property
    def segments(self) -> Columns:
        """A row for each segment, or run of mapped pages."""
        own = self._segments
        return {
            "segment": np.arange(len(own)),
            **_memory(own),
            "small": own.small,
            "expandable": own.expandable,
            "alloc_time": self._time(own.start),
            "free_time": self._time(own.end),
            "step": self._step(own.start, own.device),
            "stack": self._stack(own.stack),
            "library": self._names[own.library],
        }

    @cached_property
    def kernels(self) -> Columns:
        """A row for each call that enqueued work, and for each operation that a launch of a graph ran.

        What a capture made a node was not enqueued.
        """
        records = self._records
        calls = np.flatnonzero(is_of_kind(records, *WORK))
        nodes = records["correlation"][records["kind"] == Kind.GRAPH_NODE_ADDED]
        calls = calls[~np.isin(records["correlation"][calls], nodes[nodes > 0])]
        call_start, call_end = _when_run(records, records["correlation"][calls])
        launch, ran = _ran_in_graphs(records)
        own = np.concatenate([records[calls], ran])
        event = np.concatenate([calls, launch])
        is_call = np.arange(len(own)) < len(calls)
        kinds = np.where(is_call, own["kind"], np.where(own["flags"] & 1, Kind.KERNEL_LAUNCH, Kind.EXECUTION))
        columns = {
            "event": event,
            "kind": _KINDS[kinds],
            "name": self._names[own["name"]],
            "device": own["device"].astype(np.int64),
            "stream": own["stream"],
            "size": np.where(is_call, own["size"].astype(np.int64), NULL),
            "time": self._time(event),
            "device_start": np.concatenate([call_start, ran["aux0"].astype(np.int64)]),
            "device_end": np.concatenate([call_end, ran["aux1"].astype(np.int64)]),
            "step": self._step(event, own["device"]),
            "stack": self._stack(records["stack"][event]),
            "in_graph": ~is_call,
        }
        order = np.argsort(event, kind="stable")
        return {name: column[order] for name, column in columns.items()}

    @cached_property
    def stacks(self) -> Columns:
        """A row for each frame of each stack."""
        trace, seen = self._trace, set[int]()
        rows = []
        for i, hash in enumerate(self._hashes.tolist()):
            if hash != NULL and hash not in seen:
                seen.add(hash)
                rows += [(hash, depth, trace.frames[frame]) for depth, frame in enumerate(trace.stacks[i])]
        frames = [frame for _, _, frame in rows]
        return {
            "stack": np.array([hash for hash, _, _ in rows], np.int64),
            "depth": np.array([depth for _, depth, _ in rows], np.int64),
            "file": _texts(frame.file for frame in frames),
            "function": _texts(frame.function for frame in frames),
            "line": np.array([frame.line for frame in frames], np.int64),
            "code": _texts(_CODE[frame_rank(frame)] for frame in frames),
        }

    @cached_property
    def events(self) -> Columns:
        """A row for each record."""
        records, every = self._records, np.arange(len(self._records))
        threads = thread_names(self._trace)
        named = _texts(threads[i] for i in range(len(self._trace.threads)))
        plain = {name: records[name] for name in ("flags", "stream", "correlation", "address", "size", "aux0", "aux1")}
        return {
            "event": every,
            "time": self._time(every),
            "kind": _KINDS[records["kind"]],
            "device": records["device"].astype(np.int64),
            "thread": named[records["thread"]],
            "name": self._names[records["name"]],
            "step": self._step(every, records["device"]),
            "stack": self._stack(records["stack"]),
            **plain,
        }

    @cached_property
    def _names(self) -> npt.NDArray[Any]:
        return _texts(name or None for name in self._trace.names)

    @cached_property
    def _sites(self) -> tuple[Ints, npt.NDArray[Any]]:
        """For each stack the number of its call site, and what the call sites are called."""
        number: dict[str, int] = {}
        of_stack = []
        for i in range(len(self._trace.stacks)):
            own = user_frame(self._trace.stack(i))
            label = frame_words(own) if own else missing_stack(self._trace).text
            of_stack.append(number.setdefault(label, len(number)))
        return np.array(of_stack, np.int64), _texts(number)

    @property
    def _site_of(self) -> Ints:
        return self._sites[0]

    @property
    def _labels(self) -> npt.NDArray[Any]:
        return self._sites[1]

    def _identities(self, own: Lifetimes) -> tuple[Ints, Ints]:
        """Return hashes of what each block is: of the user's own frames, or of all, and of the requested bytes."""
        requested = own.requested.astype(np.uint64)
        one, all = (
            _mixed(table[own.stack].astype(np.uint64) ^ _mixed(requested)) for table in (self._own, self._hashes)
        )
        return one.astype(np.int64), all.astype(np.int64)

    def _time(self, index: Ints) -> Ints:
        """Return when records were; the number of all records stands for what never came."""
        if not self._timed or not len(self._records):
            return np.full(len(index), NULL)
        known = self._records["time"][np.minimum(index, len(self._records) - 1)].astype(np.int64) - self._first
        return np.where(index < len(self._records), known, NULL)

    def _known(self, index: Ints) -> Ints:
        return np.where(index < len(self._records), index, NULL)

    def _stack(self, stack: npt.NDArray[Any]) -> Ints:
        result: Ints = self._hashes[stack]
        return result

    def _step(self, index: Ints, device: npt.NDArray[Any]) -> Ints:
        """Return the steps that records are in: those of their device, for the host's those of the first one."""
        result = np.full(len(index), NULL)
        for place, own in enumerate(self._devices):
            if len(own.steps.bounds):
                chosen = (device == own.device) | ((device < 0) & (place == 0))
                step = np.searchsorted(own.steps.bounds, index[chosen], side="right") - 1
                result[chosen] = np.where(step < 0, NULL, step)
        return result


@dataclass(frozen=True, slots=True)
class _Device:
    """What the analysis says of one device."""

    device: int
    begin: int
    blocks: Lifetimes
    curve: Timeline
    steps: analyze.Steps
    leaks: analyze.Leaks
    category: Ints

    @classmethod
    def of(cls, trace: Trace, all_blocks: Lifetimes, all_segments: Lifetimes, device: int) -> _Device:
        own, reserved = all_blocks.of_device(device), all_segments.of_device(device)
        curve = timeline(trace, own, reserved)
        steps = analyze.find_steps(trace, own, device)
        found = analyze.leaks(trace, own, device, steps)
        peak = int(curve.index[curve.peak()]) if len(curve.index) else -1
        rules = analyze.categorize(trace, own, curve, steps, device, peak).rule
        category = np.array([_ORDER.index(rule.category) for rule in analyze.RULES], np.int64)[rules]
        return cls(device, recorded_from(trace, device), own, curve, steps, found, category)


def _own(stack: Iterable[Frame]) -> tuple[Frame, ...]:
    return tuple(frame for frame in stack if not frame_rank(frame))


def _hash(frames: tuple[Frame, ...]) -> int:
    """Return a hash of frames that is the same in every process; NULL for none."""
    if not frames:
        return NULL
    text = "\0".join(f"{frame.file}\0{frame.function}\0{frame.line}" for frame in frames)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True)


def _mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return well-spread bits: the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    value = value + _MIX
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _chained(own: Ints) -> Ints:
    """Return for each place a hash of all before it and of itself, in this order."""
    place = np.arange(len(own), dtype=np.uint64)
    return np.cumsum(_mixed(own.astype(np.uint64) ^ _mixed(place)), dtype=np.uint64).astype(np.int64)


def _memory(own: Lifetimes) -> Columns:
    return {
        "device": own.device,
        "pool": own.pool.astype(np.uint64),
        "stream": own.stream,
        "address": own.address.astype(np.uint64),
        "size": own.size,
    }


def _ran_in_graphs(records: npt.NDArray[np.void]) -> tuple[Ints, npt.NDArray[np.void]]:
    """Return what launches of graphs ran, by start, and the event of each one's launch."""
    launches = np.flatnonzero((records["kind"] == Kind.GRAPH_LAUNCH) & (records["correlation"] != 0))
    launches = launches[np.argsort(records["correlation"][launches], kind="stable")]
    ran = records[records["kind"] == Kind.EXECUTION]
    ran = as_called(ran[np.isin(ran["correlation"], records["correlation"][launches])], records)
    ran = ran[np.argsort(ran["aux0"], kind="stable")]
    return launches[np.searchsorted(records["correlation"][launches], ran["correlation"])], ran


def _when_run(records: npt.NDArray[np.void], correlation: npt.NDArray[np.uint64]) -> tuple[Ints, Ints]:
    """Return when what calls enqueued began to run and was over; NULL where not recorded.

    A launch of a graph runs as many operations as the graph has.
    """
    start, end = np.full((2, len(correlation)), NULL)
    ran = records[(records["kind"] == Kind.EXECUTION) & (records["correlation"] != 0)]
    if len(ran):
        ran = ran[np.argsort(ran["correlation"], kind="stable")]
        known, first = np.unique(ran["correlation"], return_index=True)
        found = np.minimum(np.searchsorted(known, correlation), len(known) - 1)
        is_known = known[found] == correlation
        start[is_known] = np.minimum.reduceat(ran["aux0"], first).astype(np.int64)[found[is_known]]
        end[is_known] = np.maximum.reduceat(ran["aux1"], first).astype(np.int64)[found[is_known]]
    return start, end


def _number(text: Any) -> int:
    return int(text) if str(text).isdecimal() and len(str(text)) < 10 else NULL


def _texts(values: Iterable[str | None]) -> npt.NDArray[Any]:
    """Return texts as a column; half of a surrogate pair, which a name may hold, is no UTF-8."""
    own = [None if value is None else value.encode("utf-8", "replace").decode() for value in values]
    result = np.empty(len(own), object)
    result[:] = own
    return result


def _columns(rows: list[dict[str, Any]]) -> Columns:
    def column(values: list[Any]) -> npt.NDArray[Any]:
        if all(isinstance(value, bool) for value in values):
            return np.array(values, np.bool_)
        return np.array(values, np.int64) if all(isinstance(value, int) for value in values) else _texts(values)

    return {name: column([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def _joined(rows: list[Columns]) -> Columns:
    return {name: np.concatenate([row[name] for row in rows]) for name in (rows[0] if rows else ())}


_ORDER: Final = tuple(analyze.Category)
_CATEGORIES: Final = _texts(map(str, _ORDER))
_KINDS: Final = _texts(Kind(i).name if i in set(map(int, Kind)) else f"kind {i}" for i in range(256))
_NOTHING: Final[dict[str, Any]] = {
    **dict.fromkeys(
        ("allocations", "peak_active", "peak_allocated", "end_active", "physical_peak", "steps", "ooms"), 0
    ),
    **dict.fromkeys(("peak_reserved", "reserved_at_peak", "peak_time", "first_oom_time"), NULL),
    "steps_source": "no device memory",
    "steps_marked": False,
    "leak_verdict": str(analyze.LeakVerdict.UNCLEAR),
}
