"""The page's data: one JSON document, followed by columns of numbers.

The payload is ``length of the JSON (4 bytes) | JSON | padding to 8 bytes | columns``. In the JSON a column is
``{"at": offset, "d": type, "n": length, "base": a, "scale": s}``: little-endian values v of the smallest type that
holds them ("u8", "u16", "u32" or "f64"), which stand for ``a + s * v``. Two more keys say how it was transformed to
compress well: ``"delta": [first, lowest]`` (v are differences, less the lowest of them) and ``"planes": true`` (all
first bytes of the values, then all second bytes ...). ``payload.js`` decodes it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool import sanitize
from cudatool.analyze import (
    RULES,
    Compiled,
    Diagnosis,
    Doubt,
    Ledger,
    Lifetimes,
    MemoryReport,
    Operations,
    PinnedHolders,
    Timeline,
    Usage,
    before_recording,
    calls,
    compiled_sites,
    is_private_pool,
    merged_layers,
    range_at,
    ranges,
    site_keys,
    site_labels,
)
from cudatool.sanitize.coverage import gap_why
from cudatool.sanitize.places import recorded_at, source_line
from cudatool.sanitize.report.views import verdict_words
from cudatool.trace.events import FAILED_REQUESTS, Kind, StreamFlag
from cudatool.trace.frames import missing_stack
from cudatool.trace.lifetimes import freed_while_recorded
from cudatool.trace.model import Trace, is_of_kind
from cudatool.units import exact_bytes
from cudatool.viz.defects import LONGEST_LINE, defects

__all__ = ["Columns", "framed", "idle_share", "payload"]

_Ints = npt.NDArray[np.int64]
_TYPES: Final = (("u8", 1 << 8), ("u16", 1 << 16), ("u32", 1 << 32))
_DTYPES: Final = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "f64": "<f8"}
_SIZED: Final = (Kind.MEMCPY, Kind.MEMSET, Kind.COLLECTIVE)  # operations whose accessed bytes are shown
_LONG_GAP: Final = 10  # multiples of the mean
_SAMPLE: Final = 1 << 14  # number of values from which the best form of a column is chosen


class Columns:
    """The columns of one payload, one after another."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._size = 0

    def add(self, values: npt.ArrayLike, *, less: int = 0) -> dict[str, Any]:
        """Append integers, each reduced by `less`, and return their entry in the document."""
        numbers = np.asarray(values).astype(np.int64)
        base = int(numbers.min()) if len(numbers) else 0
        numbers -= base
        shifted, base = numbers, base - less
        scale = int(np.gcd.reduce(shifted)) or 1
        if scale > 1:
            shifted //= scale
        middle = shifted[max(0, len(shifted) - _SAMPLE) // 2 :][:_SAMPLE]
        forms = [(delta, planes) for delta in (False, True) for planes in (False, True)]
        best = min(forms, key=lambda form: len(zlib.compress(_form(middle, *form)[1], 1)))
        how, data = _form(shifted, *best)
        column = {"at": self._size, "n": len(numbers), "base": base, "scale": scale, **how}
        padding = bytes(-len(data) % 8)  # typed arrays begin at multiples of their item's size
        self._data += data, padding
        self._size += len(data) + len(padding)
        return column

    def bytes(self) -> bytes:
        """Return all columns."""
        return b"".join(self._data)


def _form(values: _Ints, delta: bool, planes: bool) -> tuple[dict[str, Any], bytes]:
    """Return non-negative numbers in one form: the entry about it, and the bytes."""
    how: dict[str, Any] = {}
    if delta and len(values):
        steps = np.zeros(len(values), np.int64)
        np.subtract(values[1:], values[:-1], out=steps[1:])
        low = int(steps.min())
        how["delta"] = [int(values[0]), low]
        steps -= low
        values = steps
    largest = int(values.max(initial=0))
    how["d"] = next((name for name, limit in _TYPES if largest < limit), "f64")
    stored = values.astype(_DTYPES[how["d"]])
    if planes and stored.itemsize > 1:
        how["planes"] = True
        return how, stored.view(np.uint8).reshape(-1, stored.itemsize).T.tobytes()
    return how, stored.tobytes()


def _devices(report: MemoryReport, start: int, columns: Columns) -> Iterator[dict[str, Any]]:
    """Yield what the page has of each device; `start` is the time of the first event."""
    of_devices = zip(report.summary.devices, report.timelines, report.diagnoses, report.ledgers, strict=True)
    for device, curve, diagnosis, ledger in of_devices:
        rows = _Rows(curve, len(report.trace.records))
        yield {
            "device": device.device,
            "allocations": device.allocations,
            "peak": {
                "row": int(rows.of(device.peak.index)) if device.peak.index >= 0 else -1,
                "fragmentation": device.peak.fragmentation,
                "requested": device.peak.requested,
            },
            "peak_reserved": device.peak_reserved if device.reserved_known else None,
            "generated": None if device.generated is None else device.generated.sentences(),
            "still_live": sum(site.size for site in device.still_live),
            "time": columns.add(curve.time, less=start),
            "idle": idle_share(curve.time),
            **_memory(report, diagnosis, rows, columns),
            "ledger": None if ledger is None else _ledger(ledger, start),
            "ranges": _ranges(report.trace, device.device, rows, start, columns),
            "ooms": _ooms(report.trace, device.device, rows),
            "diagnosis": _diagnosis(diagnosis, rows),
        }


def payload(report: MemoryReport, found: sanitize.Report | None = None) -> bytes:
    """Return the page's payload, with what the sanitizer found. Times are ns since the first event, sizes bytes."""
    summary, columns = report.summary, Columns()
    # If the device was not timed, operations are drawn at the time of their calls.
    drawn = report.operations if len(report.operations) else calls(report.trace)
    start = int(report.trace.records["time"].min(initial=np.iinfo(np.int64).max)) if summary.events else 0
    document = {
        "source": summary.source.rsplit("/", 1)[-1],
        "recorded_on": summary.recorded_on,
        "events": summary.events,
        "duration": summary.duration,
        "simulated": summary.simulated,
        "clock": report.trace.header.get("time_axis", "clock"),
        "findings": [
            {"severity": f.severity, "confidence": f.confidence, "device": f.device, "message": f.message}
            for f in report.findings
        ],
        "devices": list(_devices(report, start, columns)),
        "rules": [{"category": r.category, "confidence": r.confidence, "reason": r.reason} for r in RULES],
        "plans": [asdict(plan) for plan in summary.plans],
        "pinned": None if summary.pinned is None else asdict(summary.pinned),
        "library_blocks": [asdict(one) | {"time": one.time - start} for one in summary.library_blocks],
        "pinned_holders": None if summary.pinned_holders is None else _pinned_holders(summary.pinned_holders, start),
        "streams": [{"device": s.device, "id": s.id, "label": s.label, "busy": s.busy} for s in summary.streams],
        "kernels": [{"name": k.name, "launches": k.launches, "time": k.time} for k in summary.kernels],
        "copies": [{"name": c.direction, "count": c.count, "size": c.size, "time": c.time} for c in summary.copies],
        "operations": {**_operations(drawn, report.trace, columns), "timed": len(report.operations) > 0},
        "defects": None if found is None else defects(found, drawn, recorded_at(report.trace)),
        "verdict": None if found is None else {"outcome": found.outcome, "words": verdict_words(found.outcome)},
        "gaps": [] if found is None else [gap_why(gap) for gap in found.gaps],
        "names": report.trace.names,
        "missing_stack": missing_stack(report.trace).text,
        **_stacks(report.trace, columns),
    }
    return framed(document, columns)


def framed(document: dict[str, Any], columns: Columns) -> bytes:
    """Return a document and the columns that it names as one payload."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-(len(text) + 4) % 8)
    return struct.pack("<I", len(text)) + text + columns.bytes()


def idle_share(times: _Ints) -> float:
    """Return the share of the time that passes in gaps at least ten times as long as the mean gap between two events.

    Evenly spaced events give 0. Where it is large, most of a time axis would show nothing.
    """
    gaps = np.diff(times).clip(min=0)
    total = int(gaps.sum())
    return float(gaps[gaps * len(gaps) >= _LONG_GAP * total].sum() / total) if total else 0.0


class _Rows:
    """Rows of a timeline: a moment of the page is the state from one row until the next."""

    def __init__(self, curve: Timeline, records: int) -> None:
        self.count, self._never = len(curve.index), records
        self._index = curve.index

    def of(self, index: Any) -> Any:
        """Return the last row at or before each record; 0 where there is none yet."""
        return np.maximum(np.searchsorted(self._index, index, side="right") - 1, 0)

    def ends(self, index: _Ints) -> _Ints:
        """Return the row of each record that ended something; for what never ended, the number of rows."""
        result: _Ints = np.where(index < self._never, self.of(index), self.count)
        return result


def _memory(report: MemoryReport, diagnosis: Diagnosis, rows: _Rows, columns: Columns) -> dict[str, Any]:
    """Return one device's blocks and segments, and the tables that they point into."""
    device, trace = diagnosis.device, report.trace
    blocks, segments = report.blocks.of_device(device), report.segments.of_device(device)
    keys, site = site_keys(blocks)
    before = np.ones(len(keys), np.bool_)
    np.logical_and.at(before, site, before_recording(trace, blocks))
    compiled = compiled_sites(trace, blocks, site, keys[:, 0].tolist())
    labels = site_labels(trace, keys, before)
    modules = diagnosis.modules
    if not keys[:, 0].any():  # only the sizes distinguish these sites, and chips are short
        labels = [f"{exact_bytes(requested)} each" for requested in keys[:, 1].tolist()]
    return {
        "blocks": {
            **_lifetimes(blocks, freed_while_recorded(trace, blocks), diagnosis, rows, columns),
            "slack": columns.add(blocks.size - blocks.requested),
            "site": columns.add(site),
            "rule": columns.add(diagnosis.categories.rule),
            "range": columns.add(range_at(trace, blocks.start)),
            "module": columns.add(np.zeros(len(blocks), np.int64) if modules is None else modules.path),
        },
        "modules": [""] if modules is None else modules.paths,
        "segments": {
            **_lifetimes(segments, segments.freed, diagnosis, rows, columns),
            "small": columns.add(segments.small),
            "expandable": columns.add(segments.expandable),
        },
        "sites": {
            "stack": columns.add(keys[:, 0]),
            "requested": columns.add(keys[:, 1]),
            "label": [one.described(label) for one, label in zip(compiled, labels, strict=True)],
        },
        "streams": [usage.label for usage in diagnosis.by_stream],
        "is_side": _side_streams(trace, [usage.id for usage in diagnosis.by_stream]),
        "pools": [usage.label for usage in diagnosis.by_pool],
        "is_private": [is_private_pool(trace, usage.id) for usage in diagnosis.by_pool],
    }


def _side_streams(trace: Trace, streams: list[int]) -> list[bool]:
    """Return which streams are not the main one: a default stream, else the one with most memory, the first."""
    created = trace.of_kind(Kind.STREAM_CREATE)
    flags = StreamFlag.LEGACY_DEFAULT | StreamFlag.PER_THREAD_DEFAULT
    defaults = set(created["stream"][created["flags"] & flags != 0].tolist())
    main = next((stream for stream in streams if stream in defaults), streams[0] if streams else None)
    return [stream != main for stream in streams]


def _ranges(trace: Trace, device: int, rows: _Rows, start: int, columns: Columns) -> dict[str, Any]:
    """Return named ranges with their times, and as rows for the axis of events."""
    found = ranges(trace, device)
    time = np.append(trace.records["time"].astype(np.int64) - start, 0)  # ranges that never ended get a row at the end
    return {
        "name": columns.add(found.name),
        "lane": columns.add(found.lane),
        "start": columns.add(rows.of(found.start)),
        "end": columns.add(rows.ends(found.end)),
        "time": columns.add(time[found.start]),
        "until": columns.add(time[found.end]),
    }


def _lifetimes(
    lives: Lifetimes, freed_at: _Ints, diagnosis: Diagnosis, rows: _Rows, columns: Columns
) -> dict[str, Any]:
    start, freed, end = rows.of(lives.start), rows.ends(freed_at), rows.ends(lives.end)
    return {
        "start": columns.add(start),
        "lived": columns.add(freed - start),
        "waited": columns.add(end - freed),
        "address": columns.add(lives.address),
        "size": columns.add(lives.size),
        "stream": columns.add(_position(lives.stream, diagnosis.by_stream)),
        "pool": columns.add(_position(lives.pool, diagnosis.by_pool)),
    }


def _position(ids: _Ints, usage: Sequence[Usage]) -> _Ints:
    """Return the position of each id in `usage`, which has all of them."""
    known = np.array([row.id for row in usage], np.int64)
    order = np.argsort(known)
    result: _Ints = order[np.searchsorted(known[order], ids)]
    return result


def _ooms(trace: Trace, device: int, rows: _Rows) -> list[dict[str, Any]]:
    """Return the failed allocations; `row` is the state before them."""
    found = np.flatnonzero(is_of_kind(trace.records, *FAILED_REQUESTS) & (trace.records["device"] == device))
    columns = (trace.records[found][name].tolist() for name in ("size", "aux0", "stack"))
    return [
        {"row": row, "size": size, "free": free, "stack": stack}
        for row, size, free, stack in zip(rows.of(found).tolist(), *columns, strict=True)
    ]


def _diagnosis(diagnosis: Diagnosis, rows: _Rows) -> dict[str, Any]:
    """Return a diagnosis as plain data, without the tree: the page builds it from the stacks for any moment."""
    plain = diagnosis.as_dict()
    del plain["tree"]
    if diagnosis.modules is not None:
        merged = [asdict(row) for row in merged_layers(diagnosis.modules.held)]
        plain["modules"] |= {"merged": merged, "sentences": diagnosis.modules.sentences()}
    for moment in plain["fragmentation"]:
        moment["row"] = int(rows.of(moment["index"]))
    pins = [pin for moment in plain["fragmentation"] for hole in moment["holes"] for pin in hole["pins"]]
    for site in (*plain["leaks"]["leaks"], *plain["leaks"]["unclear"], *pins):
        site["label"] = Compiled(**site.pop("compiled")).described(site["label"])
    plain["leaks"]["why"] = _why(diagnosis.leaks.doubt)
    for said, leak in zip(plain["leaks"]["unclear"], diagnosis.leaks.unclear, strict=True):
        said["why"] = _why(leak.doubt)
    return plain


def _ledger(ledger: Ledger, start: int) -> dict[str, Any]:
    lines = [(*line.words, line.size) for line in ledger.lines]
    whole = ledger.used if ledger.process is None else ledger.process
    return ledger.as_dict() | {"time": ledger.time - start, "whole": whole, "lines": lines}


def _pinned_holders(pinned: PinnedHolders, start: int) -> dict[str, Any]:
    sites = [asdict(site) | {"words": site.holder.words} for site in pinned.sites]
    return asdict(pinned) | {"time": pinned.time - start, "sites": sites}


def _why(doubt: Doubt | None) -> str | None:
    return doubt and doubt.why


def _operations(ran: Operations, trace: Trace, columns: Columns) -> dict[str, Any]:
    """Return executions as columns, with the stack of the call; times from the first execution on."""
    records = trace.records
    known = ran.call >= 0
    call = np.where(known, ran.call, 0)
    used = records[call] if len(records) else records[:0]
    first = int(ran.start.min()) if len(ran) else 0
    return {
        "stream": columns.add(ran.stream),
        "start": columns.add(ran.start - first),
        "end": columns.add(ran.end - first),
        "kind": columns.add(np.where(known, used["kind"], 0)),
        "size": columns.add(np.where(known & np.isin(used["kind"], _SIZED), used["size"], 0)),
        "stack": columns.add(np.where(known, used["stack"], 0)),
        "name": columns.add(ran.name),
    }


def _code(trace: Trace) -> Iterator[str]:
    """Return the line of source of each frame, empty if the file is missing or has changed since.

    For code that torch.compile generated, which is in no file: the node of its graph, and the node's source line.
    """
    recorded = recorded_at(trace)
    said = getattr(trace, "frame_facts", {})  # from a PyTorch snapshot with augment_with_fx_traces
    for i, frame in enumerate(trace.frames):
        code = source_line(frame.file, frame.line, recorded_at=recorded)
        yield (code or _fx_node(said.get(i, {})))[:LONGEST_LINE]


def _fx_node(said: dict[str, Any]) -> str:
    """Return the node of an FX graph that a frame names, empty if there is none."""
    name, what, origin = (said.get(f"fx_{key}") for key in ("node_name", "node_target", "original_trace"))
    if not isinstance(name, str):
        return ""
    line = origin.strip().splitlines()[-1].strip() if isinstance(origin, str) and origin.strip() else ""
    return f"FX node {name}" + (f" ({what})" if isinstance(what, str) else "") + (f": {line}" if line else "")


def _stacks(trace: Trace, columns: Columns) -> dict[str, Any]:
    """Return the stacks as one run of frame numbers with offsets, and frames as indices into a string table."""
    strings: dict[str, int] = {}

    def number(texts: Iterable[str]) -> list[int]:
        return [strings.setdefault(text, len(strings)) for text in texts]

    files, functions = number(f.file for f in trace.frames), number(f.function for f in trace.frames)
    offsets = np.cumsum([0, *(len(stack) for stack in trace.stacks)])
    return {
        "frames": {
            "file": columns.add(files),
            "function": columns.add(functions),
            "line": columns.add([frame.line for frame in trace.frames]),
            "code": columns.add(number(_code(trace))),
        },
        "stacks": {"offset": columns.add(offsets), "frame": columns.add([i for stack in trace.stacks for i in stack])},
        "strings": list(strings),
    }
