"""PyTorch's memory snapshots, in and out.

``torch.cuda.memory._dump_snapshot(FILE)`` writes a pickle with the allocator's *final state* (segments and their
blocks) and, where memory history was recorded, a *ring* of its last events for each device. Reading turns the ring
into the records of an ordinary trace; what was there before the ring began is inferred from the events and the
final state, and stands at the start of the trace as if it had just been allocated.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect import plain_pickle
from cudatool.collect.plain_pickle import Rows
from cudatool.collect.torch_columns import EventColumns, require
from cudatool.errors import SnapshotFormatError
from cudatool.files import replacing
from cudatool.trace import _sweep
from cudatool.trace.events import FREE_UNKNOWN, RECORD, Kind, StreamFlag
from cudatool.trace.model import Frame, Trace

__all__ = ["MemorySnapshot", "is_snapshot", "read", "write"]

_ACTIONS: Final = {
    "alloc": Kind.BLOCK_ALLOC,
    "free_requested": Kind.BLOCK_FREE_REQUESTED,
    "free_completed": Kind.BLOCK_FREE_COMPLETED,
    "segment_alloc": Kind.SEGMENT_ALLOC,
    "segment_free": Kind.SEGMENT_FREE,
    "segment_map": Kind.SEGMENT_MAP,
    "segment_unmap": Kind.SEGMENT_UNMAP,
    "oom": Kind.OOM,
}
_ACTION_OF_KIND: Final[dict[Kind, tuple[str, ...]]] = {kind: (action,) for action, kind in _ACTIONS.items()}
_BLOCK_KINDS: Final = (Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED)
_SEGMENT_KINDS: Final = (Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE)
_MAP_KINDS: Final = (Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP)

# Of actions, beside the kinds of records: an old file's free, what is left out, and none at all.
_SINGLE_FREE, _NO_KIND, _ABSENT = 256, 257, 258

# How _sweep.add_tails() calls what a record says.
_PARTS_IN_TAILS: Final = np.zeros(256, np.uint8)
_PARTS_IN_TAILS[[*_BLOCK_KINDS, *_SEGMENT_KINDS]] = 1, 2, 3, 4, 5

_MIN_BLOCK: Final = 512
_PAGE: Final = 2 << 20  # expandable segments are mapped in multiples of this
_SMALL_SEGMENT: Final = 2 << 20
_LARGE_SEGMENT: Final = 20 << 20
_LARGE_REMAINDER: Final = 1 << 20  # small requests are up to this, and large blocks are split if more than this remains
_MAX_SIZE: Final = 1 << 48  # more than any card's address space
_MAX_PAGES: Final = 1 << 24
_MAX_TIME_US: Final = (1 << 63) // 1000
_MAX_DEVICE: Final = 127  # a record's device is a signed byte

_Ints = npt.NDArray[np.int64]


@dataclass
class MemorySnapshot(Trace):
    """A trace read from a PyTorch snapshot.

    Attributes
    ----------
    segments
        The final state in PyTorch's own schema: plain dicts, each block with its address.
    settings
        The allocator's settings as the snapshot states them; empty for old files.
    """

    segments: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


def is_snapshot(path: str | Path) -> bool:
    """Say whether a file looks like a pickle (or a compressed one), without reading more than its first bytes."""
    with open(path, "rb") as file:
        head = file.read(6)
    return head.startswith((b"\xfd7zXZ\x00", b"\x1f\x8b", b"\x80", b"(d", b"}", b"]", b"(l"))


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
        reason = " ".join(what.split())[:200]
        raise SnapshotFormatError(path, f"not a valid PyTorch memory snapshot ({reason})") from error


def write(path: str | Path, trace: Trace, segments: Sequence[Mapping[str, Any]]) -> None:
    """Write a trace as a PyTorch memory snapshot, which PyTorch's own viewer reads.

    Parameters
    ----------
    path
        Written whole or not at all; replaced if it exists.
    trace
        Its allocator events become ``device_traces``. Memory that a program took from the driver itself becomes a
        segment with one block.
    segments
        The final state as :func:`cudatool.analyze.torch_segments` returns it.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    streams = trace.of_kind(Kind.STREAM_CREATE)
    handles = dict(zip(streams["stream"].tolist(), streams["address"].tolist(), strict=True))
    pools = [tuple(pool) for pool in trace.header.get("pools", ())]

    def pool_id(number: int) -> tuple[int, int]:
        return pools[number] if 0 <= number < len(pools) else (number, 0)

    frames = [{"filename": frame.file, "name": frame.function, "line": frame.line} for frame in trace.frames]
    stacks = [[frames[i] for i in stack] for stack in trace.stacks]  # shared, so that the pickle holds each once
    actions = _ACTION_OF_KIND | {
        Kind.MEM_ALLOC: ("segment_alloc", "alloc"),
        Kind.MEM_FREE: ("free_requested", "free_completed", "segment_free"),
    }
    events = trace.of_kind(*actions)
    events = events[events["device"] >= 0]  # a recorder writes others where a number does not fit its field
    traces: list[list[dict[str, Any]]] = [[] for _ in range(int(events["device"].max(initial=-1)) + 1)]
    columns = ("kind", "device", "flags", "time", "stream", "stack", "name", "address", "size", "aux0", "aux1")
    for kind, device, flags, time, stream, stack, name, address, size, aux0, aux1 in events[list(columns)].tolist():
        for action in actions[kind]:
            is_block = kind in _BLOCK_KINDS
            entry = {
                "action": action,
                "addr": address,
                "size": aux0 if is_block else size,
                "stream": handles.get(stream, 0),
                "time_us": time // 1000,
                "compile_context": "N/A",
                "user_metadata": trace.names[name] if is_block else "",
                "pool_id": pool_id(aux1),
                "frames": stacks[stack],
            }
            if kind == Kind.OOM:
                del entry["addr"]
                if not flags & FREE_UNKNOWN:
                    entry["device_free"] = aux0
            traces[device].append(entry)
    spelled = [
        {**s, "stream": handles.get(s["stream"], 0), "segment_pool_id": pool_id(s["segment_pool_id"])} for s in segments
    ]
    snapshot = {"segments": spelled, "device_traces": traces, "external_annotations": []}
    with replacing(path) as name, open(name, "wb") as file:
        pickle.dump(snapshot, file, protocol=4)


class _Reader:
    """The tables that records point into, while they grow."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.names: dict[str, int] = {"": 0}
        self.stacks: dict[tuple[int, ...], int] = {(): 0}
        self.frames: dict[Frame, int] = {}
        self.streams: dict[tuple[int, int], int] = {}
        self.pools: dict[tuple[int, int], int] = {(0, 0): 0}
        self.notes: list[str] = []
        self.settings: dict[str, Any] = dict(data.get("allocator_settings") or {})
        # Frames are shared objects in the pickle: look each one up by identity once. `data` keeps them alive.
        self._frame_by_id: dict[int, int] = {}
        self._stack_by_ids: dict[tuple[int, ...], int] = {(): 0}

    def snapshot(self, path: str, rows: Rows) -> MemorySnapshot:
        segments = [_with_addresses(segment) for segment in _list(self.data, "segments")]
        traces = [EventColumns.of(trace, rows) for trace in _list(self.data, "device_traces")]
        rows.columns.clear()  # each ring's columns go when its records are there: together they would be twice as large
        timed = any(map(len, traces)) and all(trace.has("time_us") for trace in traces if len(trace))
        recorded = any(map(len, traces))
        rings = len(traces)
        devices = sorted({int(s.get("device", 0)) for s in segments} | set(range(rings)))
        parts, prior, prior_records = [], 0, {}
        for device in devices:
            events = self._events(traces.pop(0) if device < rings else EventColumns.of([], rows), device)
            own = [s for s in segments if int(s.get("device", 0)) == device]
            self._set_pools(events, own)
            before = self._prior_state(events, own, device)
            prior_records[device] = len(before)
            prior += int(np.count_nonzero(before["kind"] == Kind.BLOCK_ALLOC))
            parts.append(np.concatenate([before, events]))
            del events
            _add_unsplit_tails(parts[-1], self.settings)
        annotations = self._annotations(_list(self.data, "external_annotations"))
        records = np.concatenate([*parts, annotations]) if len(parts) != 1 or len(annotations) else parts[0]
        del parts
        if timed:
            records = self._in_order_of_time(records, len(annotations))
        else:
            records = records[: len(records) - len(annotations)]
            records["time"] = np.arange(len(records))
        streams = self._stream_records(records)
        if prior and recorded:
            self.notes.append(
                f"recording began with {prior} blocks already allocated: they are shown from its start on"
            )
        if not recorded:
            self.notes.append("no history was recorded: only the final state is known")
        records = np.concatenate([streams, records])
        return MemorySnapshot(
            records,
            names=list(self.names),
            stacks=list(self.stacks),
            frames=list(self.frames),
            header={
                "format": "pytorch-snapshot",
                "time_axis": "clock" if timed else "index",
                "pools": [list(pool) for pool in self.pools],
                "prior_records": prior_records,  # how many of a device's first records are inferred
            },
            notes=self.notes,
            source=path,
            segments=segments,
            settings=self.settings,
        )

    def _events(self, entries: EventColumns, device: int) -> npt.NDArray[np.void]:
        """Return one device's ring as records. Sizes of blocks are what PyTorch's rules make of the request."""
        unknown: set[str] = set()

        def kind_of(action: Any) -> int:
            if action not in _ACTIONS and action != "free":
                unknown.add(str(require(action, str, "an action"))[:40])
            return int(_ACTIONS.get(action, _SINGLE_FREE if action == "free" else _NO_KIND))

        kind = entries.mapped("action", kind_of, absent=_ABSENT)
        if np.any(kind == _ABSENT):
            raise KeyError("action")
        if dropped := sorted(unknown - {"snapshot", "annotate"}):
            self.notes.append(f"events of unknown kinds were left out: {', '.join(dropped)}")
        if unknown:
            known = kind != _NO_KIND
            entries, kind = entries.select(known), kind[known]
        if np.any(kind == _SINGLE_FREE):  # old files: one event for what are two now
            both = np.repeat(np.arange(len(kind)), np.where(kind == _SINGLE_FREE, 2, 1))
            second = np.append(False, both[1:] == both[:-1])
            entries, kind = entries.select(both), kind[both]
            kind[kind == _SINGLE_FREE] = int(Kind.BLOCK_FREE_REQUESTED)
            kind[second] = int(Kind.BLOCK_FREE_COMPLETED)
        settings = self.settings
        records = np.zeros(len(entries), RECORD)
        records["kind"] = kind
        records["device"] = device
        del kind
        records["address"] = entries.numbers("addr", "an address", 1 << 63)
        records["size"] = entries.numbers("size", "a size", 1 << 63, default=None)
        ooms = records["kind"] == Kind.OOM  # may have asked for more than there is anywhere
        if int(records["size"].max(initial=0, where=~ooms)) >= _MAX_SIZE:
            raise ValueError(f"an event of {int(records['size'][~ooms].max())} bytes")
        records["stream"] = entries.mapped("stream", lambda handle: self._stream(device, handle or 0), absent=0)
        missing = records["stream"] == 0
        if np.any(missing):
            records["stream"][missing] = self._stream(device, 0)
        records["time"] = entries.numbers("time_us", "a time", _MAX_TIME_US) * np.uint64(1000)
        records["stack"] = entries.mapped("frames", lambda frames: self._stack(frames or ()), absent=0)
        records["name"] = entries.mapped("user_metadata", lambda text: self._name(text or ""), absent=0)

        blocks = np.isin(records["kind"], _BLOCK_KINDS)
        records["aux0"][blocks] = records["size"][blocks]
        records["size"][blocks] = _round_size(records["size"][blocks], settings)
        if np.any(ooms):
            failed = entries.select(ooms)
            records["aux0"][ooms] = failed.numbers("device_free", "a size", 1 << 63)
            records["flags"][ooms] = 0 if failed.has("device_free") else FREE_UNKNOWN
        segments = np.isin(records["kind"], _SEGMENT_KINDS)
        # Large segments have at least 20 MiB, or are larger than 10 MiB; mapped pages have 2 or 20 MiB.
        records["flags"][segments] = records["size"][segments] == _SMALL_SEGMENT
        mapped = np.isin(records["kind"], _MAP_KINDS)
        records["flags"][mapped] = records["size"][mapped] < _LARGE_SEGMENT
        pools = entries.mapped("pool_id", lambda pool: self._pool(pool or (0, 0)), absent=0)
        records["aux1"] = np.where(ooms, np.uint64(0), pools)
        return records

    def _set_pools(self, events: npt.NDArray[np.void], segments: list[dict[str, Any]]) -> None:
        """Write the pools that the final state names: a segment has been in its pool since it was last allocated."""
        begun = np.flatnonzero(events["kind"] == Kind.SEGMENT_ALLOC)
        last_begun = dict(zip(events["address"][begun].tolist(), begun.tolist(), strict=True))
        for segment in segments:
            pool = self._pool(segment.get("segment_pool_id") or (0, 0))
            if pool:
                start, size = segment["address"], segment["total_size"]
                since = events[last_begun.get(start, 0) :]
                since["aux1"][(since["address"] >= start) & (since["address"] < start + size)] = pool

    def _prior_state(
        self, events: npt.NDArray[np.void], segments: list[dict[str, Any]], device: int
    ) -> npt.NDArray[np.void]:
        """Return records that allocate what was there before the ring began.

        That is whatever is freed before it is allocated, and whatever is there at the end without an event.
        """
        whole = {s["address"]: s for s in segments if not s.get("is_expandable")}
        live = {b["address"]: (s, b) for s in segments for b in s["blocks"] if _is_live(b)}
        freed, kept = _prior(events, Kind.SEGMENT_ALLOC, (Kind.SEGMENT_FREE,), whole)
        segments_freed = _as_kind(Kind.SEGMENT_ALLOC, events[freed])
        segments_kept = [self._row(Kind.SEGMENT_ALLOC, device, whole[address]) for address in kept]

        freed, kept = _prior(events, Kind.BLOCK_ALLOC, (Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED), live)
        blocks_freed = events[freed]
        waiting = blocks_freed[blocks_freed["kind"] == Kind.BLOCK_FREE_COMPLETED]
        blocks_kept = [self._row(Kind.BLOCK_ALLOC, device, *live[address]) for address in kept]
        allocs = np.concatenate([_as_kind(Kind.BLOCK_ALLOC, blocks_freed), np.array(blocks_kept, RECORD)])
        allocs = allocs[np.argsort(allocs["address"])[::-1]]  # each after what limits it: see _add_unsplit_tails
        pending = [
            self._row(Kind.BLOCK_FREE_REQUESTED, device, *live[address])
            for address in kept
            if live[address][1]["state"] == "active_pending_free"
        ]
        records = np.concatenate(
            [
                segments_freed,
                np.array(segments_kept, RECORD),
                self._prior_mapped(events, segments, device),
                allocs,
                _as_kind(Kind.BLOCK_FREE_REQUESTED, waiting),
                np.array(pending, RECORD),
            ]
        )
        records["time"] = events["time"][0] if len(events) else 0
        return records

    def _prior_mapped(
        self, events: npt.NDArray[np.void], segments: list[dict[str, Any]], device: int
    ) -> npt.NDArray[np.void]:
        """Return records that map what was mapped of expandable segments before the ring began."""
        expandable = [s for s in segments if s.get("is_expandable")]
        changes = events[np.isin(events["kind"], _MAP_KINDS)]
        page, change = _pages(changes["address"], changes["size"])
        paged = changes[change]
        paged["address"] = page
        page, owner = _pages([s["address"] for s in expandable], [s["total_size"] for s in expandable])
        final = {p: expandable[i] for p, i in zip(page.tolist(), owner.tolist(), strict=True)}
        unmapped, kept = _prior(paged, Kind.SEGMENT_MAP, (Kind.SEGMENT_UNMAP,), final)
        rows = [self._row(Kind.SEGMENT_MAP, device, {**final[number], "address": number}) for number in kept]
        pages = np.concatenate([_as_kind(Kind.SEGMENT_MAP, paged[unmapped]), np.array(rows, RECORD)])
        pages = pages[np.argsort(pages["address"])]
        # Join neighbours that differ in nothing but their address.
        joined = np.diff(pages["address"]) == 1
        for column in ("stream", "aux1", "flags"):
            joined &= pages[column][1:] == pages[column][:-1]
        begin = np.flatnonzero(~np.concatenate([np.zeros(min(len(pages), 1), np.bool_), joined]))
        runs = pages[begin]
        runs["size"] = np.diff(np.append(begin, len(pages))) * _PAGE
        runs["address"] *= _PAGE
        return runs

    def _row(
        self, kind: Kind, device: int, segment: Mapping[str, Any], block: Mapping[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """Return the record of an event on a segment of the final state, or on one of its blocks."""
        what = segment if block is None else block
        record = np.zeros((), RECORD)
        record["kind"], record["device"], record["address"] = kind, device, what["address"]
        record["stream"] = self._stream(device, segment.get("stream") or 0)
        record["aux1"] = self._pool(segment.get("segment_pool_id") or (0, 0))
        record["stack"] = self._stack(what.get("frames") or ())
        if block is None:
            record["size"], record["flags"] = segment["total_size"], segment.get("segment_type") == "small"
        else:
            record["size"], record["aux0"] = block["size"], block.get("requested_size", block["size"])
        return tuple(record.item())

    def _annotations(self, annotations: list[Any]) -> npt.NDArray[np.void]:
        """Return ``external_annotations`` (the profiler's ranges) as RANGE_PUSH and RANGE_POP."""
        records = np.zeros(len(annotations), RECORD)
        for record, annotation in zip(records, annotations, strict=True):
            starts = annotation["stage"] == "START"
            record["kind"] = Kind.RANGE_PUSH if starts else Kind.RANGE_POP
            record["name"] = self._name(annotation["name"]) if starts else 0
            record["device"] = require(annotation["device"], int, "a device")
            record["time"] = require(annotation["time_us"], int, "a time") * 1000
        return records

    def _in_order_of_time(self, records: npt.NDArray[np.void], annotations: int) -> npt.NDArray[np.void]:
        """Merge devices and annotations by time. One device alone keeps its order: that is the allocator's."""
        memory = len(records) - annotations
        if len(np.unique(records["device"][:memory])) == 1 and not annotations:
            return records
        # Clocks are read outside of the allocator's lock: within a device, the ring's order is the true one.
        clock = records["time"].copy()
        for device in np.unique(records["device"][:memory]):
            own = np.flatnonzero(records["device"][:memory] == device)
            clock[own] = np.maximum.accumulate(clock[own])
        return records[np.argsort(clock, kind="stable")]

    def _stream_records(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Return the STREAM_CREATE record of every stream that was met."""
        created = np.zeros(len(self.streams), RECORD)
        for record, ((device, handle), number) in zip(created, self.streams.items(), strict=True):
            record["kind"], record["device"], record["stream"], record["address"] = (
                Kind.STREAM_CREATE,
                device,
                number,
                handle,
            )
            record["flags"] = StreamFlag.LEGACY_DEFAULT if handle == 0 else StreamFlag.NON_BLOCKING
        created["time"] = records["time"][0] if len(records) else 0
        return created

    def _stream(self, device: int, handle: int) -> int:
        return self.streams.setdefault((device, require(handle, int, "a stream")), len(self.streams) + 1)

    def _pool(self, pool_id: Sequence[int]) -> int:
        first, second = _ints(list(pool_id), "a part of a pool's id")
        return self.pools.setdefault((first, second), len(self.pools))

    def _name(self, text: str) -> int:
        text = text if isinstance(text, str | int | float) else f"({type(text).__name__})"  # never write out a list
        return self.names.setdefault(text if type(text) is str else str(text)[:200], len(self.names))

    def _stack(self, frames: Sequence[Any]) -> int:
        ids = tuple(map(id, frames))
        found = self._stack_by_ids.get(ids)
        if found is None:
            stack = tuple(self._frame(frame) for frame in frames)
            found = self._stack_by_ids[ids] = self.stacks.setdefault(stack, len(self.stacks))
        return found

    def _frame(self, frame: Mapping[str, Any]) -> int:
        found = self._frame_by_id.get(id(frame))
        if found is None:
            line = require(frame["line"], int, "a line")
            line = -1 if line == 2**64 - 1 else line  # what PyTorch writes where it knows none
            if abs(line) >= 1 << 31:
                raise ValueError(f"a frame at line {line}")
            file, name = (require(frame[key], str, f"a frame's {key}") for key in ("filename", "name"))
            value = Frame(file, name, line)
            found = self._frame_by_id[id(frame)] = self.frames.setdefault(value, len(self.frames))
        return found


def _ints(values: list[Any], what: str) -> list[int]:
    """Return `values`, all of which must be integers: NumPy would take apart whatever else a file holds."""
    for kind in set(map(type, values)) - {int, bool}:
        raise TypeError(f"{what} is a {kind.__name__}")
    return values


def _list(data: dict[str, Any], key: str) -> list[Any]:
    return list(require(data.get(key) or [], list, key))


def _is_live(block: Mapping[str, Any]) -> bool:
    return bool(block["state"] != "inactive")


def _with_addresses(segment: Any) -> dict[str, Any]:
    """Return a segment whose blocks have addresses and frames; old files have them in other places."""
    require(segment, dict, "a segment")
    address, total = require(segment["address"], int, "an address"), require(segment["total_size"], int, "a size")
    if not (0 <= address < 1 << 63 and 0 <= total < _MAX_SIZE):
        raise ValueError(f"a segment of {total} bytes at address {address}")
    device = require(segment.get("device", 0), int, "a device")
    if not 0 <= device <= _MAX_DEVICE:
        raise ValueError(f"a segment of device {device}")
    blocks = []
    for block in _list(segment, "blocks"):
        size = require(block["size"], int, "a size")
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


def _round_size(size: npt.NDArray[np.uint64], settings: Mapping[str, Any]) -> npt.NDArray[np.uint64]:
    """Return the block sizes that requests of `size` bytes are rounded to, as c10's ``round_size`` has it."""
    rounded: npt.NDArray[np.uint64] = np.maximum(
        (size + np.uint64(_MIN_BLOCK - 1)) // np.uint64(_MIN_BLOCK), 1
    ) * np.uint64(_MIN_BLOCK)
    divisions_by_class = settings.get("roundup_power2_divisions") or {}
    if not any(divisions_by_class.values()):
        return rounded
    table = [0] * 16  # by the power of two of MiB: below 2 MiB, below 4 MiB, ... 32 GiB and more
    for mebibytes, divisions in divisions_by_class.items():
        table[min(max(int(mebibytes).bit_length() - 1, 0), 15)] = int(divisions)
    safe = np.maximum(size, 1)
    floor_log2 = np.frexp(safe.astype(np.float64))[1].astype(np.int64) - 1  # sizes are below 2**48: exact
    divisions = np.array(table, np.uint64)[np.clip(floor_log2 - 20, 0, 15)]
    applies = (divisions > 1) & (size > np.uint64(_MIN_BLOCK) * divisions)
    power = np.uint64(1) << floor_log2.astype(np.uint64)
    step = power // np.maximum(divisions, 1)
    result: npt.NDArray[np.uint64] = np.where(
        applies, (size + step - np.uint64(1)) // np.maximum(step, 1) * step, rounded
    )
    return result


def _add_unsplit_tails(records: npt.NDArray[np.void], settings: Mapping[str, Any]) -> None:
    """Correct the sizes of large blocks that were handed out whole because what was left over was too small.

    A snapshot records only what was requested. But free neighbours are always merged, so the free block that an
    address was taken from reached up to the next live block or the segment's end; PyTorch splits it only if more
    than 1 MiB remains and the request is below ``max_split_size``. (Small and expandable segments always split.)
    """
    limit = settings.get("max_split_size") or -1
    limit = limit if limit > 0 else _MAX_SIZE
    kind = records["kind"]
    blocks = np.isin(kind, _BLOCK_KINDS) & (records["size"] > _LARGE_REMAINDER)
    index = np.flatnonzero(blocks | (np.isin(kind, _SEGMENT_KINDS) & (records["flags"] == 0)))
    what = _PARTS_IN_TAILS[kind[index]]
    addresses = records["address"][index].astype(np.int64)
    sizes = records["size"][index].astype(np.int64)
    _, ranks = np.unique(addresses, return_inverse=True)
    _sweep.add_tails(what, ranks.reshape(-1).astype(np.int64, copy=False), addresses, sizes, limit, _LARGE_REMAINDER)
    records["size"][index] = sizes


def _prior(
    events: npt.NDArray[np.void], born: Kind, died: Sequence[Kind], final: Mapping[int, Any]
) -> tuple[_Ints, list[int]]:
    """Return what existed before `events`: indices of deaths without a birth, and keys of `final` without any event."""
    index = np.flatnonzero(np.isin(events["kind"], [born, *died]))
    address, first = np.unique(events["address"][index], return_index=True)
    first = index[first]
    return np.sort(first[events["kind"][first] != born]), sorted(set(final) - set(address.tolist()))


def _as_kind(kind: Kind, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return copies of records as events of another kind, whose stack and name are not known."""
    records = records.copy()
    records["kind"], records["stack"], records["name"] = kind, 0, 0
    return records


def _pages(address: npt.ArrayLike, size: npt.ArrayLike) -> tuple[_Ints, _Ints]:
    """Return the number of every 2 MiB page in the ranges, and which range each belongs to."""
    begin = np.asarray(address, np.int64) // _PAGE
    count = -(-np.asarray(size, np.int64) // _PAGE)
    if count.sum() > _MAX_PAGES:
        raise ValueError("more memory mapped than any card has")
    owner = np.repeat(np.arange(len(count)), count)
    return begin[owner] + np.arange(len(owner)) - (np.cumsum(count) - count)[owner], owner
