"""Named ranges: the parts of a run that the program, or PyTorch's profiler, has named."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from cudatool.trace.events import Kind
from cudatool.trace.lifetimes import Ints
from cudatool.trace.model import Trace

__all__ = ["Ranges", "ranges"]


@dataclass(frozen=True, slots=True)
class Ranges:
    """Columns, one row for each range, by start.

    Attributes
    ----------
    name
        Index into the trace's names.
    start, end
        Records that began and ended it; the number of records for one that never ended.
    lane
        The lowest lane in which no other range is open: a range inside of another lies below it.
    """

    name: Ints
    start: Ints
    end: Ints
    lane: Ints

    def __len__(self) -> int:
        return len(self.start)


_MARKS = (Kind.RANGE_PUSH, Kind.RANGE_POP, Kind.RANGE_START, Kind.RANGE_END)


def ranges(trace: Trace, device: int) -> Ranges:
    """Return the ranges of the host and of one device.

    Pushed ranges end in reverse order on the thread (and for the device) that pushed them; started ranges end by their
    id.
    """
    records = trace.records
    marks = np.flatnonzero(np.isin(records["kind"], _MARKS) & np.isin(records["device"], (device, -1)))
    open_ranges: dict[tuple[int, ...], list[int]] = {}
    starts: list[int] = []
    ends: list[int] = []
    names: list[int] = []
    columns = (records[field][marks].tolist() for field in ("kind", "name", "thread", "device", "aux0"))
    for index, kind, name, thread, own_device, number in zip(marks.tolist(), *columns, strict=True):
        is_pushed = kind in (Kind.RANGE_PUSH, Kind.RANGE_POP)
        inside = open_ranges.setdefault((0, thread, own_device) if is_pushed else (1, number), [])
        if kind in (Kind.RANGE_PUSH, Kind.RANGE_START):
            inside.append(len(starts))
            starts.append(index)
            ends.append(len(records))
            names.append(name)
        elif inside:  # else its start was not recorded
            ends[inside.pop()] = index
    return Ranges(*(np.array(column, np.int64) for column in (names, starts, ends, _lanes(starts, ends))))


def _lanes(starts: list[int], ends: list[int]) -> list[int]:
    taken: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        while taken and taken[0][0] < start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        lane = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (end, lane))
        lanes.append(lane)
    return lanes
