"""The ring keeps the last events in bounded memory, and every moment of what it writes is that of the whole."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudatool import analyze
from cudatool.trace import hooks
from cudatool.trace.events import RECORD, Event, Kind
from cudatool.trace.log import EventLog
from cudatool.trace.model import Trace
from cudatool.trace.reader import read
from cudatool.trace.recorder import Recorder
from cudatool.trace.ring import Ring

_CHUNK = 4096  # events: what the ring may keep beyond its bound


def _program(count: int, seed: int = 0) -> list[Event]:
    """Return events of an allocator that goes on for ever, with ranges whose names never repeat."""
    rng, events, live, now = random.Random(seed), [], [], 0
    page = 1 << 21

    def event(kind: Kind, address: int = 0, size: int = 0, name: str = "", flags: int = 0) -> None:
        nonlocal now
        now += 1000
        device = -1 if kind in (Kind.RANGE_PUSH, Kind.RANGE_POP) else 0
        events.append(Event(now, kind, device, flags, hooks.thread_id(), 1, 0, 0, name, address, size, size, 0))

    for segment in range(64):
        event(Kind.SEGMENT_ALLOC, (1 << 40) + segment * page, page)
    free = [(1 << 40) + number * (1 << 19) for number in range(256)]
    step = 0
    while len(events) < count:
        if rng.random() < 0.1:
            step += 1
            event(Kind.RANGE_PUSH, name=f"step {step}")
            event(Kind.RANGE_POP)
        elif free and (not live or rng.random() < 0.5):
            live.append(free.pop(rng.randrange(len(free))))
            event(Kind.BLOCK_ALLOC, live[-1], 1 << 19)
        else:
            address = live.pop(rng.randrange(len(live)))
            event(Kind.BLOCK_FREE_REQUESTED, address, 1 << 19)
            event(Kind.BLOCK_FREE_COMPLETED, address, 1 << 19)
            free.append(address)
    return events[:count]


def _state(trace: Trace, index: int) -> list[dict[str, Any]]:
    at = analyze.segments_at(analyze.blocks(trace), analyze.segments(trace), index)
    return [asdict(segment) for segment in at]


def _whole(events: list[Event]) -> Trace:
    log = EventLog({})
    for event in events:
        log(event)
    return log.trace(log.records())


@pytest.mark.parametrize("count", [1, 500, 4096, 4097, 20_000, 50_001])
def test_what_is_written_has_the_last_events_and_their_every_state(tmp_path: Path, count: int) -> None:
    events = _program(count)
    ring = Ring({"argv": ["x.py"]}, most_bytes=8192 * RECORD.itemsize)
    for event in events:
        ring(event)
    written = ring.write(tmp_path / "ring.ctrace")
    trace, whole = read(tmp_path / "ring.ctrace"), _whole(events)
    assert min(count, 8192) <= written <= min(count, 8192 + 2 * _CHUNK)
    assert trace.header["window"] == [count - written, count, count]
    before = len(trace.records) - written
    for shown in range(0, written, max(written // 7, 1)):
        assert _state(whole, count - written + shown) == _state(trace, before + shown)
    last = trace.records[before:]
    own = whole.records[count - written :]
    for name in ("time", "kind", "address", "size", "aux0"):
        assert np.array_equal(last[name], own[name])
    assert [trace.names[i] for i in last["name"]] == [whole.names[i] for i in own["name"]]
    assert ("unknown_before" in trace.header) == (written < count)


def test_memory_stays_bounded_however_many_events_and_names_come() -> None:
    ring = Ring({}, most_bytes=4096 * RECORD.itemsize)
    most_bytes = most_names = 0
    for event in _program(300_000):
        ring(event)
        most_bytes, most_names = max(most_bytes, ring.kept_bytes), max(most_names, ring.names)
    assert ring.events == 300_000
    assert most_bytes <= (4096 + 2 * _CHUNK + 64 + 256) * RECORD.itemsize
    assert most_names <= 2 * 4096


def test_rows_of_a_library_are_kept_as_single_events_are(tmp_path: Path) -> None:
    events = _program(9000)
    log = EventLog({})
    for event in events:
        log(event)
    rows, names = log.records().copy(), log.trace(log.records()).names
    rows["thread"] = hooks.thread_id()
    one, many = (Ring({}, most_bytes=1 << 30) for _ in range(2))
    for event in events:
        one(event)
    many.write_rows(rows[:5000], names)
    for event in events[5000:]:
        many(event)
    for name, ring in (("one", one), ("many", many)):
        assert ring.write(tmp_path / f"{name}.ctrace") == 9000
    first, second = (read(tmp_path / f"{name}.ctrace") for name in ("one", "many"))
    for name in ("time", "kind", "address", "size"):
        assert np.array_equal(first.records[name], second.records[name])


def test_events_older_than_the_limit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10_000_000_000
    monkeypatch.setattr("cudatool.trace.ring.time.monotonic_ns", lambda: now)
    ring = Ring({}, most_bytes=1 << 30, most_age_ns=2_000_000_000)
    for second in range(1, 11):
        ring(Event(second * 10**9, Kind.MARK, -1, 0, 1, 0, 0, 0, f"second {second}", 0, 0, 0, 0))
    assert ring.write(tmp_path / "ring.ctrace") == 3
    trace = read(tmp_path / "ring.ctrace")
    assert [trace.names[i] for i in trace.records["name"]] == ["second 8", "second 9", "second 10"]


def test_what_is_after_a_time_is_left_out_but_not_of_work_before_it(tmp_path: Path) -> None:
    ring = Ring({}, most_bytes=1 << 30)
    late = [Kind.EXECUTION, Kind.ACCESS]
    rows = [(1, Kind.KERNEL_LAUNCH, 7), (3, Kind.KERNEL_LAUNCH, 8), (2, Kind.MARK, 0)]  # a source may come late
    rows += [(4, kind, correlation) for kind in late for correlation in (7, 8)]
    for time, kind, correlation in rows:
        ring(Event(time, kind, 0, 0, 1, 1, correlation, 0, "", 0, 0, 0, 0))
    assert 4 == ring.write(tmp_path / "ring.ctrace", until_ns=2)
    records = read(tmp_path / "ring.ctrace").records
    kept = [(int(record["kind"]), int(record["correlation"])) for record in records]
    assert [(Kind.KERNEL_LAUNCH, 7), (Kind.MARK, 0), (Kind.EXECUTION, 7), (Kind.ACCESS, 7)] == kept


def test_trace_of_a_stranger_with_an_impossible_window_is_read_without_it(tmp_path: Path) -> None:
    for number, window in enumerate(([1, 2], [3, 2, 1], "x", [-1, 2, 3])):
        Recorder(tmp_path / f"{number}.ctrace", header={"window": window}).close()
        trace = read(tmp_path / f"{number}.ctrace")
        assert "window" not in trace.header
        assert any("window" in note for note in trace.notes)
        analyze.report(trace)
