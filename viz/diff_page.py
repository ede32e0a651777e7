"""The page that compares two recordings, in the style of the memory page, for :func:`cudatool.analyze.diff`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cudatool import analyze
from cudatool.analyze import Diff, DiffRow
from cudatool.files import write_whole
from cudatool.trace.model import Frame, Trace
from cudatool.viz.page import assembled, packed
from cudatool.viz.payload import Columns, framed

__all__ = ["SCRIPTS", "diff_page", "diff_payload", "write_diff"]

SCRIPTS = ("words.js", "colours.js", "payload.js", "state.js", "keys.js", "canvas.js", "diff.js")


def write_diff(before: Trace, after: Trace, found: Sequence[Diff], path: str | Path) -> None:
    """Write the page that compares two recordings, whole or not at all; `found` is the result of :func:`analyze.diff`.

    Raises
    ------
    OutputError
        The file cannot be written.
    """
    write_whole(path, diff_page(before, after, found))


def diff_page(before: Trace, after: Trace, found: Sequence[Diff]) -> str:
    """Return the page that compares two recordings."""
    return assembled(
        "diff.html",
        SCRIPTS,
        title=f"{_name(before)} and {_name(after)} - cudatool",
        payload=packed(diff_payload(before, after, found)),
    )


def diff_payload(before: Trace, after: Trace, found: Sequence[Diff]) -> bytes:
    """Return the page's data in the format of :mod:`cudatool.viz.payload`; sizes are bytes, times ns."""
    columns = Columns()
    curves = {"before": _curves(before, columns), "after": _curves(after, columns)}
    nothing = {name: columns.add([]) for name in ("time", "active", "reserved")}
    document = {
        "before": _name(before),
        "after": _name(after),
        "notes": [f"{_name(trace)}: {note}" for trace in (before, after) for note in trace.notes],
        "devices": [
            {
                "device": one.device,
                "active": {"before": one.before, "after": one.after},
                "reserved": {"before": one.reserved_before, "after": one.reserved_after},
                "curves": {side: curve.get(one.device, nothing) for side, curve in curves.items()},
                "rows": [_row(row) for row in one.rows],
            }
            for one in found
        ],
    }
    return framed(document, columns)


def _name(trace: Trace) -> str:
    return trace.source.rsplit("/", 1)[-1]


def _curves(trace: Trace, columns: Columns) -> dict[int, dict[str, Any]]:
    """Return each device's bytes over time, times from its first change on."""
    blocks, segments = analyze.blocks(trace), analyze.segments(trace)
    result = {}
    for device in sorted({*blocks.device.tolist(), *segments.device.tolist()}):
        curve = analyze.timeline(trace, blocks.of_device(device), segments.of_device(device))
        result[device] = {
            "time": columns.add(curve.time - curve.time.min(initial=curve.time[0] if len(curve.time) else 0)),
            "active": columns.add(curve.active),
            "reserved": columns.add(curve.reserved),
        }
    return result


def _row(row: DiffRow) -> dict[str, Any]:
    return {
        "label": row.compiled.described(row.label),
        "before": row.before,
        "after": row.after,
        "change": row.change,
        "count_before": row.count_before,
        "count_after": row.count_after,
        "stack_before": _lines(row.stack_before),
        "stack_after": _lines(row.stack_after),
    }


def _lines(stack: tuple[Frame, ...]) -> list[str]:
    return [f"{frame.file}:{frame.line} {frame.function}" for frame in stack]
