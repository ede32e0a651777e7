"""Reads PyTorch's memory snapshots; :mod:`cudatool.export.torch_pickle` writes them.

``torch.cuda.memory._dump_snapshot(FILE)`` writes a pickle with the allocator's *final state* (segments and their
blocks) and, where memory history was recorded, a *ring* of its last events for each device. Reading turns the ring
into the records of an ordinary trace; what was there before the ring began is inferred from the events and the final
state, and comes first in the trace, as if it had just been allocated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect import plain_pickle
from cudatool.collect.plain_pickle import Rows
from cudatool.collect.torch_columns import EventColumns, require
from cudatool.collect.torch_model import (
    ACTIONS,
    BLOCK_KINDS,
    MAP_KINDS,
    MAX_SIZE,
    OTHER_REQUESTS,
    SEGMENT_KINDS,
    WHOLE_EVENT,
    EventFact,
    MemorySnapshot,
    is_live,
)
from cudatool.collect.torch_prior import PriorState
from cudatool.collect.torch_sizes import add_unsplit_tails
from cudatool.collect.torch_tables import MOST_NAME, SnapshotTables
from cudatool.errors import SnapshotFormatError
from cudatool.memory.blocks import SMALL_PAGE
from cudatool.memory.rounding import round_sizes
from cudatool.memory.settings import LARGE_SEGMENT, Settings
from cudatool.memory.snapshot import divisions_of
from cudatool.text import printable
from cudatool.trace.distinct import distinct
from cudatool.trace.events import FREE_UNKNOWN, RECORD, Kind, StreamFlag, join_records
from cudatool.trace.model import PinnedMemory
from cudatool.units import counted, format_share

__all__ = ["EventFact", "MemorySnapshot", "is_snapshot", "read"]

# Actions that are no kind of record: an old file's free, and none at all.
_SINGLE_FREE, _ABSENT = 256, 257

# Keys that records and frames have fields for, and keys read of a whole snapshot; all other keys are kept as facts.
_FIELDS: Final = frozenset(
    ("action", "addr", "size", "stream", "time_us", "frames", "user_metadata", "pool_id", "device_free")
)
_IN_RECORDS: Final = ("action", "addr", "size", "stream", "time_us", "frames", "user_metadata")
_OWN: Final = _FIELDS | {WHOLE_EVENT}
_READ: Final = frozenset(("segments", "device_traces", "allocator_settings"))
_PINNED_CHANGE: Final = {"alloc": 1, "free_completed": -1, "free": -1}  # of the bytes in use
_STAGES: Final = {"START": Kind.RANGE_PUSH, "END": Kind.RANGE_POP}
_MOST_DEPTH: Final = 32

_LEAST_BYTES: Final = 16  # of an event, a block or a segment in a pickle; what is shared has fewer
_MAX_TIME_US: Final = (1 << 63) // 1000
_MAX_DEVICE: Final = 127  # a record's device is a signed byte

_Ints = npt.NDArray[np.int64]


def is_snapshot(path: str | Path) -> bool:
    """Say whether a file looks like a pickle (or a compressed one), without reading more than its first bytes."""
    return plain_pickle.starts_as_pickle(path)


def read(path: str | Path) -> MemorySnapshot:
    """Return the trace and the final state in a PyTorch memory snapshot.

    Reads every pickle protocol and every version of the schema, also compressed with xz or gzip, and runs nothing
    that the file contains.

    Raises
    ------
    SnapshotFormatError
        The file is not a snapshot, is damaged, or would import something when loaded.
    OSError
        The file cannot be read.
    """
    path = str(path)
    data, rows = plain_pickle.load_rows(path, "action")
    if isinstance(data, list):  # torch.cuda.memory_snapshot(): the segments alone
        data = {"segments": data}
    if not isinstance(data, dict) or not ("segments" in data or "device_traces" in data):
        raise SnapshotFormatError(path, "a pickle, but not a PyTorch memory snapshot (no segments, no device_traces)")
    try:
        return _Reader(data).snapshot(path, rows)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        reason = printable(" ".join(what.split())[:200])
        raise SnapshotFormatError(path, f"not a valid PyTorch memory snapshot ({reason})") from error


def _check_numbers(segments: list[Any], rings: list[Any], size: int) -> None:
    """Refuse a file of `size` bytes that could not hold so many events, blocks and segments.

    It has lists in it several times: a few bytes would be millions.
    """
    blocks = sum(len(one.get("blocks") or ()) for one in segments if isinstance(one, dict))
    in_all = len(segments) + blocks + sum(len(ring) for ring in rings if isinstance(ring, list | range))
    if in_all * _LEAST_BYTES > size + (1 << 16):
        raise ValueError(f"{in_all} events, blocks and segments in {size} bytes")


class _Reader:
    """Turns one snapshot into a trace."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.notes: list[str] = []
        self.tables = SnapshotTables(self.notes)
        self.prior = PriorState(self.tables)
        self.facts: dict[str, dict[Any, tuple[int, Any]]] = {}  # key -> what distinguishes a value -> (number, value)
        self.settings: dict[str, Any] = dict(data.get("allocator_settings") or {})

    def snapshot(self, path: str, rows: Rows) -> MemorySnapshot:
        segments = _list(self.data, "segments")
        recorded_rings = _list(self.data, "device_traces")
        _check_numbers(segments, recorded_rings, rows.size)
        segments = [_with_addresses(segment) for segment in segments]
        traces = [EventColumns.of(trace, rows) for trace in _list(self.data, "device_traces")]
        ranges = {(ring.start, ring.stop) for ring in recorded_rings if isinstance(ring, range)}
        more = {key: _with_dicts(value, rows, ranges) for key, value in self.data.items() if key not in _READ}
        if sum(stop - start for start, stop in ranges) < rows.count:
            raise ValueError("events inside of other things than lists of events")
        rows.columns.clear()  # each ring's columns go when its records are there: together they would be twice as large
        timed = any(map(len, traces)) and all(trace.has("time_us") for trace in traces if len(trace))
        recorded = any(map(len, traces))
        parts, facts, prior_records = self._of_devices(traces, segments, rows)
        prior = sum(_blocks(part[:n]) for part, n in zip(parts, prior_records.values(), strict=True))
        annotations = self._annotations(_list(self.data, "external_annotations"))
        lengths = [len(part) for part in parts]
        records = join_records([*parts, annotations]) if len(parts) != 1 or len(annotations) else parts[0]
        del parts
        order = self._in_order_of_time(records, len(annotations)) if timed else slice(len(records) - len(annotations))
        records = records[order]
        if not timed:
            records["time"] = np.arange(len(records))
        streams = self._stream_records(records)
        pinned = self._pinned(more)
        history = self._history(prior, recorded)
        records = join_records([streams, records])
        return MemorySnapshot(
            records,
            names=list(self.tables.names),
            stacks=list(self.tables.stacks),
            frames=[frame for frame, _ in self.tables.frames],
            header={
                "format": "pytorch-snapshot",
                "time_axis": "clock" if timed else "index",
                "pools": [list(pool) for pool in self.tables.pools],
                "prior_records": prior_records,  # how many of a device's first records are inferred
                **history,
                **{key: to for key in ("requests_to",) if (to := self.data.get(key)) in OTHER_REQUESTS},
            },
            notes=self.notes,
            source=path,
            segments=segments,
            settings=self.settings,
            facts=self._facts(facts, [*lengths, len(annotations)], order, len(streams)),
            frame_facts={i: dict(more) for i, (_, more) in enumerate(self.tables.frames) if more},
            metadata=self.tables.metadata,
            more=more,
            pinned=pinned,
        )

    def _history(self, prior: int, recorded: bool) -> dict[str, Any]:
        """Note what the history lacks, and return what the header says of it."""
        kept = self.data.get("history_kept")
        if isinstance(kept, float) and 0 <= kept < 1:
            on = f"on for {format_share(kept)} of the time"
            self.notes.append(f"PyTorch's history was {on}: what was allocated in the rest has no stack")
            return {"history_kept": kept}
        if not recorded:
            self.notes.append("no history was recorded: only the final state is known")
        elif prior:
            text = f"recording began with {counted(prior, 'block')} already allocated, shown from its start on"
            self.notes.append(text)
        return {}

    def _of_devices(
        self, traces: list[EventColumns], segments: list[dict[str, Any]], rows: Rows
    ) -> tuple[list[npt.NDArray[np.void]], list[dict[str, npt.NDArray[np.uint32] | int]], dict[int, int]]:
        """Return what :meth:`_of_device` returns of each device, ascending; the last by device.

        Takes the rings out of `traces`: each one's columns go when its records are there.
        """
        rings = len(traces)
        parts, facts, inferred = [], [], {}
        for device in sorted({int(s.get("device", 0)) for s in segments} | set(range(rings))):
            own = [s for s in segments if int(s.get("device", 0)) == device]
            part, said, inferred[device] = self._of_device(
                traces.pop(0) if device < rings else EventColumns.of([], rows), own, device
            )
            parts.append(part)
            facts.append(said)
        return parts, facts, inferred

    def _of_device(
        self, entries: EventColumns, segments: list[dict[str, Any]], device: int
    ) -> tuple[npt.NDArray[np.void], dict[str, npt.NDArray[np.uint32] | int], int]:
        """Return one device's records, its events' other facts, and how many of the first records are inferred."""
        events, said = self._events(entries, device)
        del entries
        self._set_pools(events, segments)
        before = self.prior.records(events, segments, device)
        records = join_records([before, events])
        del events
        add_unsplit_tails(records, self.settings)
        facts = {
            key: number if isinstance(number, int) else np.append(np.zeros(len(before), np.uint32), number)
            for key, number in said.items()
        }
        return records, facts, len(before)

    def _pinned(self, more: dict[str, Any]) -> PinnedMemory | None:
        """Return the statistics of pinned host memory; note where the file has them in a form that is not known."""
        try:
            return _pinned(more)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:80]
            self.notes.append(f"statistics of pinned host memory have an unknown form ({reason}) and are not shown")
            return None

    def _facts(
        self,
        of_rings: list[dict[str, npt.NDArray[np.uint32] | int]],
        lengths: list[int],
        order: slice | _Ints,
        streams: int,
    ) -> dict[str, EventFact]:
        """Return the other facts of events, in the order of the records."""
        result = {}
        for key, numbers in self.facts.items():
            columns = [said.get(key, 0) for said in of_rings]
            same = {number if isinstance(number, int) else -1 for number in columns}
            values = [value for _, value in numbers.values()]
            if len(same) == 1 and -1 not in same:
                result[key] = EventFact(values, same.pop())
                continue
            parts = [
                np.full(n, c, np.uint32) if isinstance(c, int) else c
                for n, c in zip(lengths, [*columns, 0], strict=True)
            ]
            result[key] = EventFact(values, np.append(np.zeros(streams, np.uint32), np.concatenate(parts)[order]))
        return result

    def _kinds(self, entries: EventColumns) -> tuple[EventColumns, npt.NDArray[np.uint64]]:
        """Return the events and the kind of each, MARK where it is not known; a free of old files is two events."""
        unknown: set[str] = set()

        def kind_of(action: Any) -> int:
            if action not in ACTIONS and action != "free":
                unknown.add(str(require(action, str, "an action"))[:40])
            return int(ACTIONS.get(action, _SINGLE_FREE if action == "free" else Kind.MARK))

        kind = entries.mapped("action", kind_of, absent=_ABSENT)
        if np.any(kind == _ABSENT):
            raise KeyError("action")
        if unknown := unknown - {"snapshot", "annotate"}:
            note = f"events of unknown kinds are kept, but mean nothing here: {', '.join(sorted(unknown))}"
            self.notes += [note] if note not in self.notes else []
        if np.any(kind == _SINGLE_FREE):  # old files: one event for what are two now
            both = np.repeat(np.arange(len(kind)), np.where(kind == _SINGLE_FREE, 2, 1))
            second = np.append(False, both[1:] == both[:-1])
            entries, kind = entries.select(both), kind[both]
            kind[kind == _SINGLE_FREE] = int(Kind.BLOCK_FREE_REQUESTED)
            kind[second] = int(Kind.BLOCK_FREE_COMPLETED)
        return entries, kind

    def _events(
        self, entries: EventColumns, device: int
    ) -> tuple[npt.NDArray[np.void], dict[str, npt.NDArray[np.uint32] | int]]:
        """Return one device's ring as records, and its other facts."""
        entries, kind = self._kinds(entries)
        is_mark = kind == Kind.MARK
        if not np.any(is_mark):
            return self._known_events(entries, kind, device)
        known, said = self._known_events(entries.select(~is_mark), kind[~is_mark], device)
        records = np.zeros(len(entries), RECORD)
        records[~is_mark] = known
        facts: dict[str, npt.NDArray[np.uint32] | int] = {}
        for key, numbers in said.items():
            column = facts[key] = np.zeros(len(entries), np.uint32)
            column[~is_mark] = numbers
        marks = np.flatnonzero(is_mark)
        whole = facts[WHOLE_EVENT] = np.zeros(len(entries), np.uint32)
        table = self.facts.setdefault(WHOLE_EVENT, {})
        whole[marks] = np.arange(len(marks)) + len(table) + 1
        for i, event in zip(marks.tolist(), entries.select(marks).dicts(), strict=True):
            time = event.get("time_us")
            is_known = isinstance(time, int) and 0 <= time < _MAX_TIME_US
            records["time"][i] = int(time or 0) * 1000 if is_known else records["time"][max(i - 1, 0)]
            records["name"][i] = self.tables.names[event["action"][:MOST_NAME]]
            table[len(table)] = len(table) + 1, event
        records["kind"][marks], records["device"][marks] = Kind.MARK, device
        return records, facts

    def _known_events(
        self, entries: EventColumns, kind: npt.NDArray[np.uint64], device: int
    ) -> tuple[npt.NDArray[np.void], dict[str, npt.NDArray[np.uint32] | int]]:
        """Return events of known kinds as records, and their other facts.

        `entries` loses the columns that the records have then. Block sizes follow from the request by PyTorch's
        rounding rules.
        """
        settings = self.settings
        records = np.zeros(len(entries), RECORD)
        records["kind"] = kind
        records["device"] = device
        del kind
        records["address"] = entries.numbers("addr", "an address", 1 << 63)
        records["size"] = entries.numbers("size", "a size", 1 << 64, default=None)
        ooms = records["kind"] == Kind.OOM  # may have requested more than any device has
        if int(records["size"].max(initial=0, where=~ooms)) >= MAX_SIZE:
            raise ValueError(f"an event of {int(records['size'][~ooms].max())} bytes")
        records["stream"] = entries.mapped("stream", lambda handle: self.tables.stream(device, handle or 0), absent=0)
        missing = records["stream"] == 0
        if np.any(missing):
            records["stream"][missing] = self.tables.stream(device, 0)
        records["time"] = entries.numbers("time_us", "a time", _MAX_TIME_US) * np.uint64(1000)
        records["stack"] = entries.mapped("frames", lambda frames: self.tables.stack(frames or ()), absent=0)
        records["name"] = entries.mapped("user_metadata", lambda text: self.tables.name(text or ""), absent=0)

        for key in _IN_RECORDS:  # before the largest temporary columns are made
            entries.drop(key)
        blocks = np.isin(records["kind"], BLOCK_KINDS)
        records["aux0"][blocks] = records["size"][blocks]
        sizes = records["size"][blocks].astype(np.int64)
        records["size"][blocks] = round_sizes(sizes, Settings(roundup_power2_divisions=divisions_of(settings)))
        if np.any(ooms):
            failed = entries.select(ooms)
            records["aux0"][ooms] = failed.numbers("device_free", "a size", 1 << 63)
            records["flags"][ooms] = 0 if failed.has("device_free") else FREE_UNKNOWN
        segments = np.isin(records["kind"], SEGMENT_KINDS)
        # Large segments have at least 20 MiB, or are larger than 10 MiB; mapped pages have 2 or 20 MiB.
        records["flags"][segments] = records["size"][segments] == SMALL_PAGE
        mapped = np.isin(records["kind"], MAP_KINDS)
        records["flags"][mapped] = records["size"][mapped] < LARGE_SEGMENT
        pools = entries.mapped("pool_id", lambda pool: self.tables.pool(pool or (0, 0)), absent=0)
        records["aux1"] = np.where(ooms, np.uint64(0), pools)
        return records, {key: self._fact(entries, key) for key in entries.said() if key not in _OWN}

    def _fact(self, entries: EventColumns, key: str) -> npt.NDArray[np.uint32] | int:
        """Return the numbers of the values that the events of a ring have under `key`."""
        values = self.facts.setdefault(key, {})

        def number(value: Any) -> int:
            if isinstance(value, range):
                raise ValueError("an event with events in it")
            apart = (type(value), value) if isinstance(value, str | int | float) or value is None else id(value)
            return values.setdefault(apart, (len(values) + 1, value))[0]

        return entries.only(key, number, absent=0) or entries.mapped(key, number, absent=0).astype(np.uint32)

    def _set_pools(self, events: npt.NDArray[np.void], segments: list[dict[str, Any]]) -> None:
        """Write the pools that the final state names: a segment has been in its pool since it was last allocated."""
        begun = np.flatnonzero(events["kind"] == Kind.SEGMENT_ALLOC)
        last_begun = dict(zip(events["address"][begun].tolist(), begun.tolist(), strict=True))
        for segment in segments:
            pool = self.tables.pool(segment.get("segment_pool_id") or (0, 0))
            if pool:
                start, size = segment["address"], segment["total_size"]
                since = events[last_begun.get(start, 0) :]
                since["aux1"][(since["address"] >= start) & (since["address"] < start + size)] = pool

    def _annotations(self, annotations: list[Any]) -> npt.NDArray[np.void]:
        """Return ``external_annotations`` (the profiler's ranges) as RANGE_PUSH and RANGE_POP."""
        rows = []
        for annotation in annotations:
            try:
                rows.append(self._annotation(annotation))
            except (KeyError, TypeError, ValueError):
                continue  # of a newer schema; what a file says beside its rings is kept as it is
        if unknown := len(annotations) - len(rows):
            self.notes.append(f"{counted(unknown, 'annotation')} of an unknown form kept, but not shown")
        return np.array(rows, RECORD)

    def _annotation(self, annotation: Any) -> tuple[Any, ...]:
        kind = _STAGES[require(annotation, dict, "an annotation")["stage"]]
        time = require(annotation["time_us"], int, "a time")
        device = require(annotation["device"], int, "a device")
        if not (0 <= time < _MAX_TIME_US and -1 <= device <= _MAX_DEVICE):
            raise ValueError("an annotation out of bounds")
        record = np.zeros((), RECORD)
        record["kind"], record["device"], record["time"] = kind, device, time * 1000
        record["name"] = self.tables.name(annotation["name"]) if kind == Kind.RANGE_PUSH else 0
        return tuple(record.item())

    def _in_order_of_time(self, records: npt.NDArray[np.void], annotations: int) -> slice | _Ints:
        """Merge devices and annotations by time. One device alone keeps its order: that is the allocator's."""
        memory = len(records) - annotations
        if len(distinct(records["device"][:memory])) == 1 and not annotations:
            return slice(None)
        # Clocks are read outside of the allocator's lock: within a device, the ring's order is the true one.
        clock = records["time"].copy()
        for device in distinct(records["device"][:memory]):
            own = np.flatnonzero(records["device"][:memory] == device)
            clock[own] = np.maximum.accumulate(clock[own])
        return np.argsort(clock, kind="stable")

    def _stream_records(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Return the STREAM_CREATE record of every stream that occurs."""
        created = np.zeros(len(self.tables.streams), RECORD)
        for record, ((device, handle), number) in zip(created, self.tables.streams.items(), strict=True):
            record["kind"], record["device"], record["stream"], record["address"] = (
                Kind.STREAM_CREATE,
                device,
                number,
                handle,
            )
            record["flags"] = StreamFlag.LEGACY_DEFAULT if handle == 0 else StreamFlag.NON_BLOCKING
        created["time"] = records["time"][0] if len(records) else 0
        return created


def _with_dicts(
    value: Any, rows: Rows, ranges: set[tuple[int, int]], depth: int = 0, known: dict[int, Any] | None = None
) -> Any:
    """Return the other parts of a snapshot than segments and rings; events in them become dicts again.

    The ranges of rows that these were are added to `ranges`.
    """
    known = {} if known is None else known  # by identity: a small file may hold the same list a billion times
    if isinstance(value, list | dict | range) and id(value) not in known:
        if depth > _MOST_DEPTH:
            raise ValueError("lists are nested too deeply")
        if isinstance(value, range):
            ranges.add((value.start, value.stop))
            made: Any = EventColumns.of(value, rows).dicts()
        elif isinstance(value, list):
            made = [_with_dicts(item, rows, ranges, depth + 1, known) for item in value]
        else:
            made = {key: _with_dicts(item, rows, ranges, depth + 1, known) for key, item in value.items()}
        known[id(value)] = made
    return known.get(id(value), value)


def _pinned(more: dict[str, Any]) -> PinnedMemory | None:
    """Return a snapshot's pinned memory; its lists are like those of a device's memory."""
    segments = [_with_addresses(segment) for segment in _list(more, "host_segments")]
    entries: list[Any] = []
    for item in _list(more, "host_traces"):
        entries += item if isinstance(item, list) else [item]
    if not segments and not entries:
        return None
    active = sum(block["size"] for segment in segments for block in segment["blocks"] if is_live(block))
    levels = [0]
    for entry in entries:
        sign = _PINNED_CHANGE.get(require(require(entry, dict, "an event")["action"], str, "an action"), 0)
        size = require(entry.get("size", 0), int, "a size")
        levels.append(levels[-1] + sign * size)
    # In use before the first event: what is in use at the end, minus the events' changes.
    before = max(active - levels[-1], 0)
    return PinnedMemory(
        segments=len(segments),
        reserved=sum(segment["total_size"] for segment in segments),
        active=active,
        peak_active=before + max(levels),
        events=len(entries),
    )


def _list(data: dict[str, Any], key: str) -> list[Any]:
    return list(require(data.get(key) or [], list, key))


def _blocks(records: npt.NDArray[np.void]) -> int:
    return int(np.count_nonzero(records["kind"] == Kind.BLOCK_ALLOC))


def _with_addresses(segment: Any) -> dict[str, Any]:
    """Return a segment whose blocks have addresses and frames; old files store them in other places."""
    require(segment, dict, "a segment")
    address, total = require(segment["address"], int, "an address"), require(segment["total_size"], int, "a size")
    if not (0 <= address < 1 << 63 and 0 <= total < MAX_SIZE):
        raise ValueError(f"a segment of {total} bytes at address {address}")
    device = require(segment.get("device", 0), int, "a device")
    if not 0 <= device <= _MAX_DEVICE:
        raise ValueError(f"a segment of device {device}")
    blocks = []
    for block in _list(segment, "blocks"):
        size = require(require(block, dict, "a block")["size"], int, "a size")
        if not 0 <= size <= total:
            raise ValueError(f"a block of {size} bytes in a segment of {total}")
        filled = {"address": address, **block}
        if history := block.get("history"):
            filled.setdefault("frames", history[-1].get("frames") or [])
            filled.setdefault("requested_size", history[-1].get("real_size", size))
        require(filled["address"], int, "an address")
        require(filled["state"], str, "a block's state")
        require(filled.get("requested_size", size), int, "a size")
        blocks.append(filled)
        address += size
    return {**segment, "blocks": blocks}
