"""What the page is made of: one JSON document, with string tables and columns of numbers.

A column is ``{"d": type, "n": length, "b": base64, "scale": s, "base": a}``: little-endian values v of the smallest
type that holds them ("u8", "u16", "u32" or "f64"), which stand for ``a + s * v``. ``payload.js`` decodes it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.analyze import Lifetimes, Report, Timeline, call_site
from cudatool.trace.events import Kind
from cudatool.trace.model import Trace

__all__ = ["column", "payload"]

_TYPES: Final = (("u8", 1 << 8), ("u16", 1 << 16), ("u32", 1 << 32))
_DTYPES: Final = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "f64": "<f8"}


def payload(report: Report) -> dict[str, Any]:
    """Return the page's document. Times are ns since the first event, sizes bytes."""
    summary = report.summary
    start = int(report.trace.records["time"].min(initial=np.iinfo(np.int64).max)) if summary.events else 0
    devices = []
    for device, curve in zip(summary.devices, report.timelines, strict=True):
        devices.append(
            {
                "device": device.device,
                "allocations": device.allocations,
                "ooms": device.ooms,
                "peak": _moment(curve, device.peak.index, device.peak.fragmentation, device.peak.requested),
                "peak_active": device.peak_active,
                "peak_reserved": device.peak_reserved,
                "still_live": sum(site.size for site in device.still_live),
                "time": column(curve.time - start),
                "blocks": _lifetimes(report.blocks.of_device(device.device), curve),
                "segments": _lifetimes(report.segments.of_device(device.device), curve),
                "oom_rows": column(_oom_rows(report.trace, device.device, curve)),
            }
        )
    return {
        "source": summary.source.rsplit("/", 1)[-1],
        "recorded_on": summary.recorded_on,
        "events": summary.events,
        "duration": summary.duration,
        "clock": report.trace.header.get("time_axis", "clock"),
        "notes": list(summary.notes),
        "devices": devices,
        "pools": [list(pool) for pool in report.trace.header.get("pools", [])],
        "streams": [{"device": s.device, "id": s.id, "label": s.label, "busy": s.busy} for s in summary.streams],
        "kernels": [{"name": k.name, "launches": k.launches, "time": k.time} for k in summary.kernels],
        "copies": [{"name": c.direction, "count": c.count, "size": c.size, "time": c.time} for c in summary.copies],
        "operations": _operations(report),
        **_stacks(report.trace),
    }


def column(values: npt.ArrayLike) -> dict[str, Any]:
    """Return whole numbers as a column."""
    numbers = np.asarray(values, np.int64)
    base = int(numbers.min()) if len(numbers) else 0
    shifted = numbers - base
    scale = int(np.gcd.reduce(shifted)) or 1
    shifted //= scale
    largest = int(shifted.max(initial=0))
    name = next((name for name, limit in _TYPES if largest < limit), "f64")
    data = shifted.astype(_DTYPES[name]).tobytes()
    return {"d": name, "n": len(numbers), "scale": scale, "base": base, "b": base64.b64encode(data).decode("ascii")}


def _lifetimes(rows: Lifetimes, curve: Timeline) -> dict[str, Any]:
    """Return blocks or segments as columns; their times as rows of the timeline, its length standing for never."""
    result = {name: column(getattr(rows, name)) for name in ("address", "size", "requested", "stream", "pool", "stack")}
    for name in ("start", "freed", "end"):
        result[name] = column(np.searchsorted(curve.index, getattr(rows, name)))
    result["small"] = column(rows.small)
    result["expandable"] = column(rows.expandable)
    return result


def _moment(curve: Timeline, index: int, fragmentation: float, requested: int) -> dict[str, Any]:
    return {
        "row": int(np.searchsorted(curve.index, index)) if index >= 0 else -1,
        "fragmentation": fragmentation,
        "requested": requested,
    }


def _oom_rows(trace: Trace, device: int, curve: Timeline) -> npt.NDArray[np.int64]:
    """Return the timeline rows after which an allocation found no memory."""
    found = np.flatnonzero((trace.records["kind"] == Kind.OOM) & (trace.records["device"] == device))
    return np.maximum(np.searchsorted(curve.index, found) - 1, 0)


def _operations(report: Report) -> dict[str, Any]:
    """Return executions as columns, with the name and the stack of the call; times from the first execution on."""
    ran, records = report.operations, report.trace.records
    known = ran.call >= 0
    call = np.where(known, ran.call, 0)
    used = report.trace.records[call] if len(records) else records[:0]
    names, name = np.unique(np.where(known, used["name"], 0), return_inverse=True)
    first = int(ran.start.min()) if len(ran) else 0
    return {
        "stream": column(ran.stream),
        "start": column(ran.start - first),
        "end": column(ran.end - first),
        "kind": column(np.where(known, used["kind"], 0)),
        "size": column(np.where(known & np.isin(used["kind"], (Kind.MEMCPY, Kind.MEMSET)), used["size"], 0)),
        "stack": column(np.where(known, used["stack"], 0)),
        "name": column(name),
        "names": [report.trace.names[i] or "operation" for i in names.tolist()],
    }


def _stacks(trace: Trace) -> dict[str, Any]:
    """Return the stacks as one run of frame numbers with offsets, and frames as indices into a string table."""
    strings: dict[str, int] = {}

    def number(texts: Iterable[str]) -> list[int]:
        return [strings.setdefault(text, len(strings)) for text in texts]

    files, functions = number(f.file for f in trace.frames), number(f.function for f in trace.frames)
    offsets = np.cumsum([0, *(len(stack) for stack in trace.stacks)])
    return {
        "frames": {
            "file": column(files),
            "function": column(functions),
            "line": column([frame.line for frame in trace.frames]),
        },
        "stacks": {"offset": column(offsets), "frame": column([i for stack in trace.stacks for i in stack])},
        "sites": [call_site(trace.stack(i)) for i in range(len(trace.stacks))],
        "strings": list(strings),
    }
