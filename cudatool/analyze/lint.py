"""Finds faults of a file itself that make its other numbers doubtful."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from cudatool.analyze.steps import Confidence
from cudatool.progress import advance
from cudatool.trace import _sweep
from cudatool.trace.distinct import distinct
from cudatool.trace.events import Kind
from cudatool.trace.lifetimes import Lifetimes, Timeline
from cudatool.trace.model import Trace
from cudatool.trace.physical import uncounted
from cudatool.units import counted, format_bytes, format_time

__all__ = ["PARTS_OF_LINT", "LintFinding", "Severity", "lint"]


class Severity(StrEnum):
    """What a finding means for the rest of the report."""

    ERROR = "error"
    """Numbers are wrong."""
    WARNING = "warning"
    """Numbers are incomplete."""
    INFO = "info"
    """Worth knowing; numbers hold."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Something wrong with a file.

    Attributes
    ----------
    rule
        A machine-readable name, such as ``"free-without-alloc"``.
    severity, confidence
        Its meaning for the report, and how sure it is.
    device
        Whose events, -1 for the whole file.
    count
        How often it occurs.
    index
        The first record that shows it, -1 if there is none.
    message
        One sentence with the numbers.
    """

    rule: str
    severity: Severity
    confidence: Confidence
    device: int
    count: int
    index: int
    message: str


_LARGEST_DEVICE: Final = 288 << 30  # more than any single device had when this was written (B300, MI355X)


PARTS_OF_LINT: Final = 2
"""How often :func:`lint` advances the progress, for each device."""


def lint(
    trace: Trace,
    blocks: Lifetimes,
    segments: Lifetimes,
    curves: Mapping[int, Timeline],
    *,
    final_state: Sequence[Mapping[str, Any]] = (),
    total: Mapping[int, int | None] | None = None,
) -> tuple[LintFinding, ...]:
    """Return what is wrong with a trace, errors first.

    Parameters
    ----------
    curves
        The timeline of each device.
    final_state
        The segments that a snapshot states, in PyTorch's schema: they must agree with its events.
    total
        Bytes of each device's memory, where known.
    """
    found = [*_incomplete(trace), *_times(trace)]
    for device, curve in curves.items():
        own, reserved = blocks.of_device(device), segments.of_device(device)
        found += _totals(device, curve, (total or {}).get(device))
        found += _unmatched_frees(trace, own, reserved, device)
        advance()
        found += _overlaps(trace, own, device, "block", "allocated", (Kind.BLOCK_ALLOC, Kind.MEM_ALLOC))
        found += _overlaps(trace, reserved, device, "segment", "taken from the driver", (Kind.SEGMENT_ALLOC,))
        found += _outside_segments(own, reserved, device)
        advance()
        found += _final_state(device, curve, [s for s in final_state if int(s.get("device", 0)) == device])
    order = list(Severity)
    return tuple(sorted(found, key=lambda finding: (order.index(finding.severity), finding.device)))


def _incomplete(trace: Trace) -> Iterator[LintFinding]:
    """Yield what the reader reported: a ring that lost its start, a truncated file, no history."""
    before = [f"{what} is not in the recording" for what in trace.header.get("unknown_before", ())]
    for note in (*trace.notes, *before):
        yield LintFinding("incomplete", Severity.WARNING, Confidence.HIGH, -1, 1, -1, note)
    for note in uncounted(trace):
        yield LintFinding("not-counted", Severity.WARNING, Confidence.HIGH, -1, 1, -1, note)


def _times(trace: Trace) -> Iterator[LintFinding]:
    if trace.header.get("time_axis") == "index":
        return
    devices = distinct(trace.records["device"]).tolist()
    for device in devices:
        # All records are the only device's: no copy of millions of times, nor of their numbers.
        index = slice(None) if len(devices) == 1 else np.flatnonzero(trace.records["device"] == device)
        step = np.diff(trace.records["time"][index])
        back = np.flatnonzero(step < 0)
        if len(back):
            most = -int(step.min())
            # Threads read the clock before they take the allocator's lock: small differences are normal.
            severity = Severity.INFO if most < 10_000_000 else Severity.WARNING
            message = f"times go backwards {counted(len(back), 'time')}, by up to {format_time(most)}"
            first = int(back[0] + 1 if isinstance(index, slice) else index[back[0] + 1])
            yield LintFinding("time-goes-backwards", severity, Confidence.HIGH, device, len(back), first, message)


def _totals(device: int, curve: Timeline, total: int | None) -> Iterator[LintFinding]:
    limit, confidence = (total, Confidence.HIGH) if total else (_LARGEST_DEVICE, Confidence.MEDIUM)
    for name, column in (("reserved", curve.reserved), ("active", curve.active)):
        above = np.flatnonzero(column > limit)
        if len(above):
            device_name = "the GPU" if total else "any GPU"
            message = f"{format_bytes(int(column.max()))} {name} is more than {device_name} has ({format_bytes(limit)})"
            first = int(curve.index[above[0]])
            yield LintFinding("impossible-total", Severity.ERROR, confidence, device, len(above), first, message)
    if len(curve.index) and curve.reserved.any():
        above = np.flatnonzero(curve.active > curve.reserved)
        if len(above):
            most = int((curve.active - curve.reserved).max())
            message = f"up to {format_bytes(most)} more is active than reserved: segments are missing"
            first = int(curve.index[above[0]])
            yield LintFinding(
                "active-above-reserved", Severity.ERROR, Confidence.HIGH, device, len(above), first, message
            )


def _unmatched_frees(trace: Trace, blocks: Lifetimes, segments: Lifetimes, device: int) -> Iterator[LintFinding]:
    """Find frees without a block: nothing was allocated there, or it was already freed."""
    for kinds, ends, what in (
        ((Kind.BLOCK_FREE_REQUESTED,), blocks.freed, "freed"),
        ((Kind.BLOCK_FREE_COMPLETED,), blocks.end, "given back"),
        ((Kind.MEM_FREE,), segments.end, "given back"),
    ):
        is_free = np.logical_or.reduce([trace.records["kind"] == kind for kind in kinds])
        frees = np.flatnonzero(is_free & (trace.records["device"] == device))
        ended = np.zeros(len(trace.records) + 1, np.bool_)  # the last is of what is never freed
        ended[ends] = True
        lost = frees[~ended[frees]]
        if len(lost):
            message = f"{what} although not allocated, or {what} before: {counted(len(lost), 'block')}"
            yield LintFinding(
                "free-without-alloc", Severity.ERROR, Confidence.HIGH, device, len(lost), int(lost[0]), message
            )


def _overlaps(
    trace: Trace, rows: Lifetimes, device: int, what: str, done: str, kinds: Sequence[Kind]
) -> Iterator[LintFinding]:
    """Find blocks (or segments) that overlap live ones: a free is missing, or the file is invalid."""
    own = rows[np.isin(trace.records["kind"][rows.start], kinds)]
    count, first = _count_overlaps(own)
    # If an address was allocated twice, the first block was assumed to end at the second allocation.
    ends = own.end[own.end < len(trace.records)]
    again = ends[np.isin(trace.records["kind"][ends], kinds)]
    if len(again):
        count, first = count + len(again), int(again.min() if first < 0 else min(first, again.min()))
    if count:
        message = f"{count:,} {what}s are {done} over others that were not freed"
        rule = f"overlapping-{what}s"
        yield LintFinding(rule, Severity.ERROR, Confidence.HIGH, device, count, first, message)


def _count_overlaps(rows: Lifetimes) -> tuple[int, int]:
    """Return how many rows begin inside of a live one, and the first record where one does."""
    # Allocations and frees by record; at one record, frees first. Rows that are freed at their allocation do not count.
    rows = rows[rows.end > rows.start]
    death = np.argsort(rows.end, kind="stable")
    birth = np.searchsorted(rows.end[death], rows.start, side="right") + np.arange(len(rows))
    is_birth = np.zeros(2 * len(rows), np.bool_)
    is_birth[birth] = True
    events = np.empty(2 * len(rows), np.int64)
    events[is_birth], events[~is_birth] = np.arange(len(rows)), ~death
    del death, birth, is_birth
    ranks = np.searchsorted(distinct(rows.address), rows.address)
    count, first = _sweep.overlaps(events, ranks, rows.address, rows.size)
    return count, int(rows.start[events[first]]) if count else -1


def _outside_segments(blocks: Lifetimes, segments: Lifetimes, device: int) -> Iterator[LintFinding]:
    """Find blocks that lie in no address range that was ever reserved (where segments were recorded at all)."""
    if not len(segments) or not len(blocks):
        return
    order = np.argsort(segments.address, kind="stable")
    begin, end = segments.address[order], np.maximum.accumulate((segments.address + segments.size)[order])
    gap = np.append(True, begin[1:] > end[:-1])  # ranges that touch are one, whenever they were reserved
    begin, end = begin[gap], end[np.append(gap[1:], True)]
    owner = np.searchsorted(begin, blocks.address, side="right") - 1
    lost = np.flatnonzero((owner < 0) | (blocks.address + blocks.size > end[owner]))
    if len(lost):
        message = f"in memory that was never reserved, or reaching beyond it: {counted(len(lost), 'block')}"
        first = int(blocks.start[lost[0]])
        yield LintFinding("block-outside-segments", Severity.ERROR, Confidence.HIGH, device, len(lost), first, message)


def _final_state(device: int, curve: Timeline, stated: Sequence[Mapping[str, Any]]) -> Iterator[LintFinding]:
    """Compare a snapshot's segments with their own blocks, and with what its events lead to."""
    if not stated:
        return
    wrong = sum(1 for s in stated if sum(b["size"] for b in s["blocks"]) != s["total_size"])
    if wrong:
        message = f"the blocks of {wrong:,} of {len(stated):,} segments do not add up to the segment's size"
        yield LintFinding("segment-sum", Severity.ERROR, Confidence.HIGH, device, wrong, -1, message)
    active = sum(b["size"] for s in stated for b in s["blocks"] if b["state"] != "inactive")
    reserved = sum(s["total_size"] for s in stated)
    for name, state, events in (("reserved", reserved, curve.reserved), ("active", active, curve.active)):
        now = int(events[-1]) if len(events) else 0
        if state != now:
            message = f"{format_bytes(state)} {name} in the final state, but the events lead to {format_bytes(now)}"
            yield LintFinding("state-differs-from-events", Severity.WARNING, Confidence.MEDIUM, device, 1, -1, message)
