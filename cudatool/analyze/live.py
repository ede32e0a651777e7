"""What a running recording holds and does now: events folded piece by piece into a state of bounded size.

::

    fold(records)   pairs what is allocated and freed inside of the piece; what is left joins the blocks that live
                    -> bytes and blocks of each call site, levels of each device, their curve, work by second
    picture()       the same as rows, sorted and named, for a view

The state has an entry for each live block, 64 bytes for each stack, and one for each stream and kernel, and for each
product in a graph; it does not grow with the number of events. What a block is, is what
:mod:`cudatool.trace.lifetimes` says.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from cudatool.analyze.live_device import (
    BORN,
    CURVE_POINTS,
    ENDED,
    FREED,
    STRAIGHT,
    DriverUse,
    LiveDeviceMemory,
    PoolMemory,
)
from cudatool.analyze.live_rows import LiveDevice, LiveKernel, LivePicture, LiveSite, LiveStream, Tables
from cudatool.trace.captured import CapturedCalls
from cudatool.trace.distinct import distinct
from cudatool.trace.events import BY_SIZE, FAILED_REQUESTS, RECORD, WORK, Kind
from cudatool.trace.frames import call_sites
from cudatool.trace.lifetimes import Ints
from cudatool.trace.mapped import MappedPages
from cudatool.trace.model import Trace
from cudatool.trace.pools import LibraryPools
from cudatool.trace.streams import stream_names

__all__ = ["LiveState"]

_Records = npt.NDArray[np.void]

_SECOND_NS: Final = 10**9
_RATE_S: Final = 5  # whole seconds that a rate is the mean of
_PERIOD_NS: Final = 10 * _SECOND_NS
_PERIODS: Final = 5
_MOST_STREAMS: Final = 4096
_NO_STREAM: Final = -1  # stands for the streams that are no longer counted one by one

_MAPPED: Final = 8  # or unmapped
_BLOCKS: Final = {
    Kind.BLOCK_ALLOC: BORN,
    Kind.MEM_ALLOC: BORN,
    Kind.BLOCK_FREE_REQUESTED: FREED,
    Kind.BLOCK_FREE_COMPLETED: ENDED,
    Kind.MEM_FREE: FREED | ENDED,
    Kind.POOL_ALLOC: BORN,
    Kind.POOL_FREE: FREED | ENDED,
}
_SEGMENTS: Final = {
    Kind.SEGMENT_ALLOC: BORN,
    Kind.MEM_ALLOC: BORN,
    Kind.SEGMENT_FREE: ENDED,
    Kind.MEM_FREE: ENDED,
}
_LAUNCHES: Final = (Kind.KERNEL_LAUNCH, Kind.GEMM, Kind.COLLECTIVE)
_OF_GRAPHS: Final = (
    Kind.GRAPH_NODE_ADDED,
    Kind.GRAPH_NODE,
    Kind.GRAPH_INSTANTIATE,
    Kind.GRAPH_UPDATE,
    Kind.GRAPH_LAUNCH,
)
_MOST_CALLS: Final = 1 << 14  # that are remembered until they run
_SIGN: Final = np.zeros(256, np.int64)
_SIGN[[*BY_SIZE]] = [*BY_SIZE.values()]
_LEDGER: Final = (_SIGN != 0) | (np.arange(256) == Kind.DEVICE_USE)


class _Rate:
    """Counts by key in each of the last seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[int]]] = deque(maxlen=_RATE_S + 1)

    def add(self, second: int, keys: Ints, counts: Ints) -> None:
        if not self._seconds or self._seconds[-1][0] < second:
            self._seconds.append((second, Counter()))
        self._seconds[-1][1].update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))

    def of(self, first: int, now: int) -> Counter[int]:
        """Return the counts in the last whole seconds before the second `now`, divided by their number.

        The recording began in the second `first`.
        """
        begin = max(now - _RATE_S, first)
        total: Counter[int] = Counter()
        for second, counts in self._seconds:
            if begin <= second < now or now == first:
                total.update(counts)
        length = max(now - begin, 1)
        return Counter({key: count / length for key, count in total.items()})


class _Calls:
    """The latest products and collectives, whose executions have other names."""

    def __init__(self) -> None:
        self._latest = np.empty((0, 2), np.uint64)  # correlation and name, by correlation

    def add(self, calls: _Records) -> None:
        new = np.stack([calls["correlation"], calls["name"].astype(np.uint64)], axis=1)
        known = np.concatenate([self._latest, new])
        self._latest = known[np.argsort(known[:, 0], kind="stable")][-_MOST_CALLS:]

    def names_of(self, ran: _Records) -> Ints:
        """Return the name of each execution: its call's, or its own if the call is none of these."""
        correlation, names = self._latest.T
        own = ran["name"].astype(np.int64)
        if not len(names):
            return own
        at = np.minimum(np.searchsorted(correlation, ran["correlation"]), len(names) - 1)
        is_call = (correlation[at] == ran["correlation"]) & (ran["correlation"] > 0)
        return np.where(is_call, names[at].astype(np.int64), own)


class LiveState:
    """The state that a recording's events lead to."""

    def __init__(self) -> None:
        self.events = 0
        self._first_ns: int | None = None
        self._now_ns = 0  # of the newest event, or later
        self._devices: dict[int, LiveDeviceMemory] = {}
        self._pages, self._pools = MappedPages(), LibraryPools()
        # By stack: live bytes and blocks, allocations so far, bytes at the mark.
        self._bytes, self._blocks, self._allocations, self._marked = (np.zeros(0, np.int64) for _ in range(4))
        self._marked_ns = 0
        self._lowest = np.zeros(0, np.int64)  # of this period
        self._periods: deque[Ints] = deque(maxlen=_PERIODS)
        self._period: int | None = None
        self._kernels: Counter[int] = Counter()
        self._kernel_time: Counter[int] = Counter()
        self._calls, self._captured = _Calls(), CapturedCalls(_MOST_CALLS)
        self._streams: Counter[int] = Counter()
        self._all_rate, self._kernel_rate, self._stream_rate = _Rate(), _Rate(), _Rate()
        self._created: list[_Records] = []
        self._destroyed: set[int] = set()

    # --- events ---

    def fold(self, records: _Records) -> None:
        """Take the next events. Nothing of the array is kept."""
        if not len(records):
            return
        self.events += len(records)
        time = np.maximum.accumulate(records["time"])  # threads may emit in another order than they looked at the clock
        if self._first_ns is None:
            self._first_ns = int(time[0])
        self.go_on(int(time[-1]))
        kinds = records["kind"]
        there = np.bincount(kinds, minlength=256)
        self._fold_memory(records, kinds, time)
        self._fold_work(records, kinds, time, there)
        self._fold_streams(records, kinds, there)
        self._fold_use(records, kinds)
        if there[list(FAILED_REQUESTS)].any():
            for row in records[np.isin(kinds, FAILED_REQUESTS)]:
                self._device(int(row["device"])).ooms += 1
        self._note_lowest()

    def go_on(self, time_ns: int) -> None:
        """Note that it is a moment, in ns on the clock of events, although no event came."""
        self._now_ns = max(self._now_ns, time_ns)
        for device in self._devices.values():
            device.blocks.curve.go_on(self._now_ns)
            device.segments.curve.go_on(self._now_ns)

    def mark(self) -> None:
        """Let changes be counted from here on."""
        self._marked = self._bytes.copy()
        self._marked_ns = self._now_ns - (self._first_ns or 0)

    def _device(self, number: int) -> LiveDeviceMemory:
        return self._devices.setdefault(number, LiveDeviceMemory())

    def _fold_memory(self, records: _Records, kinds: npt.NDArray[np.uint8], time: Ints) -> None:
        as_they_are = records, kinds, time
        for roles_of, is_block in ((_BLOCKS, True), (_SEGMENTS, False)):
            records, kinds, time = as_they_are
            if is_block:
                records, number = self._pools.as_blocks(records)
                kinds, time = records["kind"], time[number]
            role_of = np.zeros(256, np.uint8)
            role_of[list(roles_of)] = list(roles_of.values())
            if not is_block:
                role_of[[Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP]] = _MAPPED
            roles = role_of[kinds]
            found = np.flatnonzero(roles)
            if not len(found):
                continue
            own, roles, when = records[found], roles[found], time[found]
            for number in distinct(own["device"]).tolist():
                chosen = own["device"] == number
                rows = slice(None) if chosen.all() else chosen
                self._fold_device(number, own[rows], roles[rows], when[rows], is_block)

    def _fold_device(
        self, number: int, own: _Records, roles: npt.NDArray[np.uint8], time: Ints, is_block: bool
    ) -> None:
        device = self._device(number)
        level = device.blocks if is_block else device.segments
        delta = np.zeros(len(own), np.int64)
        if not is_block and (roles == _MAPPED).any():
            for at in np.flatnonzero(roles == _MAPPED).tolist():
                kind, address, size = (int(own[name][at]) for name in ("kind", "address", "size"))
                maps = kind == Kind.SEGMENT_MAP
                ended = self._pages.change(number, address, size, 0, maps=maps)
                delta[at] = size * maps - sum(run.size for run in ended)
            roles = np.where(roles == _MAPPED, np.uint8(0), roles)
        whole = np.flatnonzero(roles)
        part = np.zeros(len(whole), np.int64)
        stack = own["stack"][whole].astype(np.int64)
        if not is_block:
            stack = stack << 1 | np.where(own["kind"][whole] == Kind.MEM_ALLOC, STRAIGHT, 0)
        stacks, sizes, numbers = level.pair(roles[whole], own[whole], stack, part)
        delta[whole] += part
        level.move(time, delta)
        if is_block:
            born = own["stack"][roles == BORN]
            self._widen(int(born.max(initial=0)), int(stacks.max(initial=0)))
            np.add.at(self._allocations, born, 1)
            np.add.at(self._bytes, stacks, sizes)
            np.add.at(self._blocks, stacks, numbers)
        else:
            device.take(stacks, sizes)

    def _widen(self, *stacks: int) -> None:
        """Make room for stacks."""
        size = max(stacks) + 1
        if size > len(self._bytes):
            size = max(size, 2 * len(self._bytes), 64)
            for name in ("_bytes", "_blocks", "_allocations", "_marked", "_lowest"):
                column = np.zeros(size, np.int64)
                old = getattr(self, name)
                column[: len(old)] = old
                setattr(self, name, column)

    def _note_lowest(self) -> None:
        period = self._now_ns // _PERIOD_NS
        if self._period is not None and period > self._period + 1:
            self._periods.clear()  # nothing is known of the periods in between
        if period != self._period:
            if self._period is not None:
                self._periods.append(self._lowest)
            self._period, self._lowest = period, self._bytes.copy()
        else:
            np.minimum(self._lowest, self._bytes, out=self._lowest)

    def _fold_work(self, records: _Records, kinds: npt.NDArray[np.uint8], time: Ints, there: Ints) -> None:
        seconds = time // _SECOND_NS
        self._count(self._all_rate, seconds, None, None)
        if there[list(WORK)].any():
            rows = np.flatnonzero(np.isin(kinds, np.array(WORK, np.uint8)))
            self._count(self._stream_rate, seconds[rows], records["stream"][rows], self._streams)
        if there[[*_LAUNCHES, *_OF_GRAPHS, Kind.EXECUTION]].any():
            self._fold_kernels(records, kinds, seconds)

    def _fold_kernels(self, records: _Records, kinds: npt.NDArray[np.uint8], seconds: Ints) -> None:
        """Count launches: not what a capture made a node, but what launches of graphs ran."""
        launched = np.isin(kinds, _LAUNCHES) & ~self._captured.add(records)
        names = records["name"].astype(np.int64)
        self._calls.add(records[launched & (kinds != Kind.KERNEL_LAUNCH)])
        at = np.flatnonzero(kinds == Kind.EXECUTION)
        if len(at):
            ran = records[at]
            captured, is_first = self._captured.of(ran)
            names[at] = np.where(captured > 0, captured, self._calls.names_of(ran))
            launched[at] = is_first | ((ran["flags"] & 1) != 0)
            took = np.maximum(ran["aux1"].astype(np.int64) - ran["aux0"].astype(np.int64), 0)
            found, inverse = np.unique(names[at], return_inverse=True)
            total = np.zeros(len(found), np.int64)
            np.add.at(total, inverse, took)
            self._kernel_time.update(dict(zip(found.tolist(), total.tolist(), strict=True)))
        rows = np.flatnonzero(launched)
        if len(rows):
            self._count(self._kernel_rate, seconds[rows], names[rows], self._kernels)

    @staticmethod
    def _count(rate: _Rate, seconds: Ints, keys: npt.NDArray[Any] | None, total: Counter[int] | None) -> None:
        """Count by key, in each second and in all; without keys everything counts for 0."""
        edges = [0, *(np.flatnonzero(np.diff(seconds)) + 1).tolist(), len(seconds)]
        recent = len(edges) - 1 - (_RATE_S + 1)
        for number, (begin, end) in enumerate(pairwise(edges)):
            if total is None and number < recent:
                continue
            if keys is None:
                found, counts = np.zeros(1, np.int64), np.array([end - begin])
            else:
                found, counts = np.unique(keys[begin:end], return_counts=True)
            if number >= recent:
                rate.add(int(seconds[begin]), found, counts)
            if total is not None:
                total.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def _fold_streams(self, records: _Records, kinds: npt.NDArray[np.uint8], there: Ints) -> None:
        if there[Kind.STREAM_CREATE]:
            self._created.append(records[kinds == Kind.STREAM_CREATE].copy())
        if there[Kind.STREAM_DESTROY]:
            self._destroyed.update(records["stream"][kinds == Kind.STREAM_DESTROY].tolist())
        if len(self._streams) > _MOST_STREAMS and self._destroyed:
            for stream in self._destroyed & self._streams.keys():
                self._streams[_NO_STREAM] += self._streams.pop(stream)
            created = np.concatenate(self._created)
            self._created = [created[~np.isin(created["stream"], list(self._destroyed))]]
            self._destroyed.clear()

    def _fold_use(self, records: _Records, kinds: npt.NDArray[np.uint8]) -> None:
        """Take what the ledger needs: what libraries say, NVML's readings, and what calls took by size."""
        for row in records[kinds == Kind.POOL_USE]:
            self._device(int(row["device"])).said[int(row["name"])] = int(row["size"])
        found = np.flatnonzero(_LEDGER[kinds])
        for number in distinct(records["device"][found]).tolist():
            device = self._device(number)
            own = records[found[records["device"][found] == number]]
            growth = _SIGN[own["kind"]] * own["size"].astype(np.int64)
            by_size = np.cumsum(growth) + device.by_size
            for at in np.flatnonzero(own["kind"] == Kind.DEVICE_USE).tolist():
                size, used, total, flags = (int(own[name][at]) for name in ("size", "address", "aux0", "flags"))
                device.read(DriverUse(size or used, bool(size), total, flags, int(by_size[at])))
            device.by_size = int(by_size[-1])

    # --- rows ---

    def picture(
        self,
        tables: Tables,
        *,
        most: int = 20,
        sort: str = "bytes",
        search: str = "",
        totals: Sequence[int] = (),
        libraries: Sequence[str] = (),
    ) -> LivePicture:
        """Return what there is now.

        Parameters
        ----------
        most
            Rows of each kind.
        sort
            A field of the rows with numbers, the largest first: ``bytes``, ``change``, ``blocks`` or ``allocations`` of
            sites, ``launches``, ``per_second`` or ``time_ns`` of kernels, ``operations`` or ``per_second`` of streams.
            Rows without it are sorted by their first.
        search
            Rows whose label or name contains it, in upper or lower case.
        totals
            The memory of each device, as a trace's header has it.
        libraries
            That the program loaded, as the header has them.
        """
        first = (self._first_ns or 0) // _SECOND_NS
        second = self._now_ns // _SECOND_NS
        sites, site_count = self._sites(tables, most, sort, search)
        kernels = self._kernel_rows(tables, self._kernel_rate.of(first, second), sort, search)
        streams = self._stream_rows(tables, self._stream_rate.of(first, second), sort, search)
        return LivePicture(
            self.events,
            float(self._all_rate.of(first, second)[0]),
            self._now_ns - (self._first_ns or 0),
            self._marked_ns,
            tuple(self._device_row(number, totals, tables, libraries) for number in sorted(self._devices)),
            sites,
            tuple(kernels[:most]),
            tuple(streams[:most]),
            site_count,
            len(kernels),
            len(streams),
        )

    def curve(self, device: int, columns: int, points: int = CURVE_POINTS) -> tuple[list[int], list[int]]:
        """Return allocated and reserved of a device in the last `points` of a curve, the highest in each column.

        A point is :data:`~cudatool.analyze.live_device.CURVE_NS` long. There are as many columns as points at most.
        """
        found = self._devices.get(device)
        if found is None:
            return [], []
        curves = [np.array(level.curve.points, np.int64) for level in (found.blocks, found.segments)]
        length = max(map(len, curves))  # one may have begun later, or not at all
        allocated, reserved = (np.append(np.zeros(length - len(curve), np.int64), curve) for curve in curves)
        return _thinned(allocated[-points:], columns), _thinned(reserved[-points:], columns)

    def _device_row(self, number: int, totals: Sequence[int], tables: Tables, libraries: Sequence[str]) -> LiveDevice:
        device, use = self._devices[number], self._devices[number].use
        blocks, segments = device.blocks, device.segments
        lines, unknown = device.ledger(tables, libraries, PoolMemory.of(self._pools, number))
        return LiveDevice(
            device=number,
            allocated=blocks.now,
            peak_allocated=blocks.peak,
            reserved=segments.now,
            peak_reserved=segments.peak,
            charged=use.charged if use is not None and use.names_process else None,
            total=totals[number] if 0 <= number < len(totals) else (use.total if use is not None else 0) or None,
            ooms=device.ooms,
            ledger=lines,
            unknown=unknown,
        )

    def _sites(self, tables: Tables, most: int, sort: str, search: str) -> tuple[tuple[LiveSite, ...], int]:
        change = self._bytes - self._marked
        columns = {"bytes": self._bytes, "change": change, "blocks": self._blocks, "allocations": self._allocations}
        shown = np.flatnonzero((self._bytes != 0) | (change != 0))
        by = columns.get(sort, self._bytes)[shown]
        shown = shown[np.argsort(-by, kind="stable")]
        if search:
            found = [index for index in shown.tolist() if search.lower() in _label(tables, index).lower()]
            shown = np.array(found, np.int64)
        top = shown[:most].tolist()
        labels = call_sites([tables.stack(index) for index in top])
        grows = self._growing()
        rows = [
            LiveSite(
                index,
                label or _NO_STACK,
                int(self._bytes[index]),
                int(self._blocks[index]),
                int(change[index]),
                int(self._allocations[index]),
                bool(grows[index]),
            )
            for index, label in zip(top, labels, strict=True)
        ]
        return tuple(rows), len(shown)

    def _growing(self) -> npt.NDArray[np.bool_]:
        """Return for each stack whether the least that it held rose in each of the last whole periods."""
        grows = np.zeros(len(self._bytes), np.bool_)
        if len(self._periods) < _PERIODS:
            return grows
        grows[:] = True
        width = len(self._bytes)
        periods = [np.append(one, np.zeros(width - len(one), np.int64)) for one in self._periods]
        for before, after in pairwise(periods):
            grows &= after > before
        return grows

    def _kernel_rows(self, tables: Tables, rate: Counter[int], sort: str, search: str) -> list[LiveKernel]:
        rows = [
            LiveKernel(tables.name(name), count, float(rate[name]), self._kernel_time[name])
            for name, count in self._kernels.items()
        ]
        return _sorted(rows, search, lambda row: row.name, sort, "per_second")

    def _stream_rows(self, tables: Tables, rate: Counter[int], sort: str, search: str) -> list[LiveStream]:
        created = np.concatenate(self._created) if self._created else np.empty(0, RECORD)
        threads = [tables.thread(index) for index in range(int(created["thread"].max(initial=0)) + 1)]
        labels = stream_names(Trace(created, threads=threads))
        rows = [
            LiveStream(
                "streams that were destroyed" if stream == _NO_STREAM else labels[stream], count, float(rate[stream])
            )
            for stream, count in self._streams.items()
        ]
        return _sorted(rows, search, lambda row: row.label, sort, "per_second")


_NO_STACK: Final = "(no stack)"
_Row = TypeVar("_Row", LiveKernel, LiveStream)


def _label(tables: Tables, stack: int) -> str:
    return call_sites([tables.stack(stack)])[0] or _NO_STACK


def _sorted(rows: list[_Row], search: str, words: Callable[[_Row], str], sort: str, default: str) -> list[_Row]:
    field = sort if rows and hasattr(rows[0], sort) else default
    found = [row for row in rows if search.lower() in words(row).lower()]
    return sorted(found, key=lambda row: (-getattr(row, field), words(row)))


def _thinned(values: Ints, columns: int) -> list[int]:
    if len(values) > columns:
        values = np.maximum.reduceat(values, np.linspace(0, len(values), columns, endpoint=False).astype(np.int64))
    return [int(value) for value in values]
