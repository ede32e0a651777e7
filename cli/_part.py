"""Reads the part of a recording that a command works on; a separate module, since it imports the analysis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cudatool import analyze
from cudatool.cli._sources import read_trace
from cudatool.cli._text import messages
from cudatool.errors import UsageError
from cudatool.text import printable, quoted
from cudatool.trace.family import children_of, unread_children
from cudatool.units import format_time, parse_count, parse_time

if TYPE_CHECKING:
    from cudatool.trace.model import Trace

__all__ = ["moment_of", "part_of", "read_family"]


def read_family(source: Path, events: str | None, time: str | None) -> list[Trace]:
    """Return the requested part of a trace, followed by the traces of the processes that its program started.

    A part is one of the program's own process. Which processes have no trace that can be read is said on stderr.

    Raises
    ------
    UsageError, FileFormatError
        See :func:`read_trace`.
    """
    trace = read_trace(source)
    if events or time:
        return [part_of(trace, events, time)]
    children = children_of(trace)
    for what in unread_children(trace, children):
        messages().print(f"warning: not looked at: {printable(what)}", markup=False)
    return [trace, *children]


def part_of(trace: Trace, events: str | None, time: str | None) -> Trace:
    """Return the part of a trace that ``--events A:B`` and ``--time A:B`` name; if both are given, their overlap.

    Times count from the first event.

    Raises
    ------
    UsageError
        They are not ranges, end before they begin, contain no event, or the trace has no times.
    """

    if (events, time) == (None, None):
        return trace
    count = len(trace.records)
    start, stop = 0, count
    if events is not None:
        start, last = _bounds(events, "--events", "1000:2000", parse_count)
        stop = count if last is None else min(last, count)
    if time is not None:
        first, last = _bounds(time, "--time", "1.5s:2s", parse_time)
        if trace.header.get("time_axis") == "index":
            raise UsageError("--time: this recording has no times; use --events")
        zero = int(trace.records["time"].min()) if count else 0
        start = max(start, analyze.index_at(trace, zero + first - 1) + 1)
        stop = stop if last is None else min(stop, analyze.index_at(trace, zero + last) + 1)
    if start >= stop:
        took = f" in {format_time(trace.duration)}" if trace.header.get("time_axis") != "index" else ""
        raise UsageError(f"no event is in that range; the recording has {count:,}{took}")
    return analyze.window(trace, start, stop)


def moment_of(trace: Trace, text: str) -> int:
    """Return the last record at or before the time that ``--at TIME`` names, which counts from the first event.

    Raises
    ------
    UsageError
        It is no time, is after the last event, or the trace has no times.
    """
    if trace.header.get("time_axis") == "index":
        raise UsageError("--at: this recording has no times")
    start, after = int(trace.records["time"].min()) if len(trace.records) else 0, parse_time(text)
    if after > trace.duration:
        raise UsageError(f"--at {text}: the recording has {format_time(trace.duration)}")
    return analyze.index_at(trace, start + after)


def _bounds(text: str, option: str, example: str, parse: Callable[[str], int]) -> tuple[int, int | None]:
    """Return where a range begins, 0 unless it says so, and where it ends, None unless it says so."""
    first, colon, last = (part.strip() for part in text.partition(":"))
    if not colon:
        raise UsageError(f"{option} {quoted(text)}: write a range such as {example}; either side may be left out")
    begin, end = parse(first) if first else 0, parse(last) if last else None
    if end is not None and end < begin:
        raise UsageError(f"{option} {quoted(text)}: the range ends before it begins; write {quoted(f'{last}:{first}')}")
    return begin, end
