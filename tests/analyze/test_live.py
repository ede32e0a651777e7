"""The running state says at each moment what the whole analysis says of the recording up to there."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.analyze.live import LiveState
from cudatool.analyze.live_device import CURVE_NS, CURVE_POINTS
from cudatool.overview.ledger import Holder, ledger
from cudatool.trace.events import RECORD, Kind, StreamFlag, UseFlag
from cudatool.trace.lifetimes import blocks, segments, timeline
from cudatool.trace.model import Frame, Trace

_MEMORY = (
    *(Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED, Kind.MEM_ALLOC, Kind.MEM_FREE),
    *(Kind.SEGMENT_ALLOC, Kind.SEGMENT_FREE, Kind.SEGMENT_MAP, Kind.SEGMENT_UNMAP, Kind.KERNEL_LAUNCH),
)
_S = 10**9


class _Tables:
    """Names ``n1``, ``n2`` ..., and a stack of one frame, ``train.py:NUMBER``."""

    def name(self, index: int) -> str:
        return f"n{index}" if index else ""

    def stack(self, index: int) -> tuple[Frame, ...]:
        return (Frame("/home/me/train.py", "step", index),) if index else ()

    def thread(self, index: int) -> str:
        return "main" if not index else f"worker {index}"


def rows(*events: dict[str, int]) -> np.ndarray:
    found = np.zeros(len(events), RECORD)
    for row, event in zip(found, events, strict=True):
        for name, value in event.items():
            row[name] = value
    return found


@st.composite
def _recordings(draw: st.DrawFn, kinds: tuple[Kind, ...] = _MEMORY) -> tuple[np.ndarray, list[int]]:
    """Any order of events at a few addresses, as a damaged or late recording may have it, and where to cut it."""
    count = draw(st.integers(1, 60))
    # All numbers are drawn as one row of bytes: a draw of each took longer than the analyses.
    numbers = np.frombuffer(draw(st.binary(min_size=8 * count, max_size=8 * count)), np.uint8).reshape(count, 8)
    events = [
        {
            "time": (256 * late + later) * 3 * _S // 65535,
            "kind": kinds[kind % len(kinds)],
            "device": device % 2,
            "address": (1 + address % 6) * 16,
            "size": size % 41,
            "stack": stack % 4,
        }
        for late, later, kind, device, address, size, stack, _ in numbers.tolist()
    ]
    events.sort(key=lambda event: event["time"])
    events = _without_late_requests(events)
    count = len(events)
    return rows(*events), sorted(draw(st.lists(st.integers(0, count), max_size=5)))


def _without_late_requests(events: list[dict[str, int]]) -> list[dict[str, int]]:
    """Leave out the frees of blocks whose free was completed already, which no allocator gives."""
    kept, completed = [], set()
    for event in events:
        place = event["device"], event["address"]
        if event["kind"] in (Kind.BLOCK_ALLOC, Kind.MEM_ALLOC):
            completed.discard(place)
        elif event["kind"] == Kind.BLOCK_FREE_COMPLETED:
            completed.add(place)
        elif event["kind"] in (Kind.BLOCK_FREE_REQUESTED, Kind.MEM_FREE) and place in completed:
            continue
        kept.append(event)
    return kept


@given(_recordings())
@settings(deadline=None, max_examples=examples(200))
def test_the_state_is_what_the_whole_analysis_says(recording: tuple[np.ndarray, list[int]]) -> None:
    records, cuts = recording
    state = LiveState()
    for begin, end in zip([0, *cuts], [*cuts, len(records)], strict=True):
        state.fold(records[begin:end])
        if end:
            _compare(state, records[:end])


def _compare(state: LiveState, records: np.ndarray) -> None:
    trace = Trace(records)
    all_blocks, all_segments = blocks(trace), segments(trace)
    picture = state.picture(_Tables(), most=100)
    assert len(records) == picture.events
    for device in picture.devices:
        line = timeline(trace, all_blocks.of_device(device.device), all_segments.of_device(device.device))
        assert sum(line.allocated[-1:].tolist()) == device.allocated
        assert sum(line.reserved[-1:].tolist()) == device.reserved
        assert max(int(line.allocated.max(initial=0)), 0) == device.peak_allocated
        assert max(int(line.reserved.max(initial=0)), 0) == device.peak_reserved
    held: dict[int, list[int]] = {}
    live = all_blocks[all_blocks.freed == len(records)]
    for stack, size in zip(live.stack.tolist(), live.size.tolist(), strict=True):
        held.setdefault(stack, []).append(size)
    expected = {stack: (sum(sizes), len(sizes)) for stack, sizes in held.items() if sum(sizes)}
    assert expected == {site.stack: (site.bytes, site.blocks) for site in picture.sites}


_LEDGER = (*_MEMORY, *[Kind.DEVICE_USE] * 5)


@given(_recordings(_LEDGER), st.booleans(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=examples(200))
def test_the_ledger_is_at_each_reading_what_the_whole_analysis_says(
    recording: tuple[np.ndarray, list[int]], names_process: bool, chance: random.Random
) -> None:
    records, cuts = recording
    use = np.flatnonzero(records["kind"] == Kind.DEVICE_USE)
    records["address"][use] = [chance.randrange(100, 300) for _ in use]
    records["size"][use] = [names_process * chance.randrange(1, 100) for _ in use]
    records["flags"][use] = [chance.choice([0, 1, 2, 3]) for _ in use]
    records["aux0"][use] = 1000
    state, libraries = LiveState(), chance.choice([[], ["PyTorch"]])
    cuts = sorted({0, *cuts, *(use + 1).tolist()})
    for begin, end in pairwise(cuts):
        state.fold(records[begin:end])
        if records["kind"][end - 1] == Kind.DEVICE_USE:
            # Frames' numbers are those of the stacks.
            frames = [Frame("/home/me/train.py", "step", number) for number in range(4)]
            stacks = [() if not number else (number,) for number in range(4)]
            trace = Trace(records[:end], stacks=stacks, frames=frames, header={"libraries": libraries})
            number = int(records["device"][end - 1])
            of_device = segments(trace).of_device(number)
            whole = ledger(trace, blocks(trace).of_device(number), of_device, number, moment=end - 1)
            [found] = [one for one in state.picture(_Tables(), libraries=libraries).devices if one.device == number]
            assert whole is not None
            assert (whole.lines, whole.unknown, whole.process) == (found.ledger, found.unknown, found.charged)


def test_what_calls_took_since_the_last_reading_is_in_the_ledger() -> None:
    state = LiveState()
    state.fold(
        rows(
            {"kind": Kind.DEVICE_USE, "size": 100, "address": 150, "aux0": 1000, "flags": UseFlag.CONTEXT},
            {"kind": Kind.MEM_ALLOC, "address": 64, "size": 30, "stack": 1},
            {"kind": Kind.SEGMENT_ALLOC, "address": 128, "size": 50},
            {"kind": Kind.BLOCK_ALLOC, "address": 128, "size": 20},
        )
    )
    [device] = state.picture(_Tables(), libraries=["PyTorch"]).devices
    assert [(100, "the driver"), (30, "PyTorch"), (30, "the program itself"), (20, "PyTorch")] == sorted(
        ((line.size, line.words[0]) for line in device.ledger), key=lambda row: (-row[0], row[1])
    )[:4]
    assert (100, 0) == (device.charged, device.unknown)


def test_a_freed_block_that_a_stream_may_still_use_is_in_use_until_the_stream_is_done() -> None:
    state, free = LiveState(), {"address": 128, "size": 20}
    state.fold(
        rows(
            {"kind": Kind.SEGMENT_ALLOC, "address": 128, "size": 50},
            {"kind": Kind.BLOCK_ALLOC} | free,
            {"kind": Kind.DEVICE_USE, "size": 50, "address": 50, "aux0": 1000},
        )
    )
    held = []
    for kind in (Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED):
        state.fold(rows({"kind": kind} | free))
        [device] = state.picture(_Tables()).devices
        held.append((device.allocated, {line.holder: line.size for line in device.ledger}))
    assert [
        (0, {Holder.BLOCKS: 20, Holder.CACHED: 30}),
        (0, {Holder.CACHED: 50}),
    ] == held


def test_a_change_is_counted_from_the_mark() -> None:
    state = LiveState()
    state.fold(rows(*({"kind": Kind.BLOCK_ALLOC, "address": n, "size": 10, "stack": 1} for n in range(3))))
    assert [(30, 30)] == [(site.bytes, site.change) for site in state.picture(_Tables()).sites]
    state.go_on(_S)
    state.mark()
    state.fold(
        rows(
            {"time": _S, "kind": Kind.BLOCK_FREE_REQUESTED, "address": 0, "size": 10},
            {"time": 2 * _S, "kind": Kind.BLOCK_ALLOC, "address": 9, "size": 7, "stack": 200},
        )
    )  # a new stack
    picture = state.picture(_Tables(), sort="change")
    assert [(200, 7, 7), (1, 20, -10)] == [(site.stack, site.bytes, site.change) for site in picture.sites]
    assert _S == picture.marked_ns
    assert "train.py:1 (step)" == picture.sites[1].label


def test_rows_are_sorted_searched_and_counted() -> None:
    state = LiveState()
    state.fold(
        rows(*({"kind": Kind.BLOCK_ALLOC, "address": 64 * n, "size": 10 - n, "stack": 1 + n % 5} for n in range(7)))
    )
    by_bytes = state.picture(_Tables(), most=2)
    assert [1, 2] == [site.stack for site in by_bytes.sites]
    assert 5 == by_bytes.site_count
    assert [1, 2] == [site.stack for site in state.picture(_Tables(), sort="blocks").sites[:2]]
    found = state.picture(_Tables(), search="TRAIN.py:4")
    assert [4] == [site.stack for site in found.sites]
    assert 1 == found.site_count


def test_rates_are_means_of_whole_seconds() -> None:
    state = LiveState()
    launch = {"kind": Kind.KERNEL_LAUNCH, "name": 1, "stream": 1}
    other = {"kind": Kind.GEMM, "name": 2, "stream": 2}
    for second in range(8):
        events = [{**launch, "time": second * _S + n} for n in range(10)]
        state.fold(rows(*events, {**other, "time": second * _S + 11}))
    picture = state.picture(_Tables())
    assert [("n1", 80, 10.0), ("n2", 8, 1.0)] == [(k.name, k.launches, k.per_second) for k in picture.kernels]
    assert [("stream 1", 80, 10.0), ("stream 2", 8, 1.0)] == [
        (s.label, s.operations, s.per_second) for s in picture.streams
    ]
    assert 11.0 == picture.per_second
    state.go_on(10 * _S)  # the seconds 5, 6 and 7 had events, 8 and 9 had none
    assert 6.0 == state.picture(_Tables()).kernels[0].per_second
    state.go_on(20 * _S)
    assert 0.0 == state.picture(_Tables()).kernels[0].per_second
    assert 80 == state.picture(_Tables()).kernels[0].launches


def test_rates_of_the_same_events_in_one_piece_are_the_same() -> None:
    events = rows(*({"kind": Kind.KERNEL_LAUNCH, "name": 1, "stream": 1, "time": n * _S // 4} for n in range(100)))
    whole, parts = LiveState(), LiveState()
    whole.fold(events)
    for begin in range(0, 100, 7):
        parts.fold(events[begin : begin + 7])
    assert whole.picture(_Tables()) == parts.picture(_Tables())
    assert 4.0 == whole.picture(_Tables()).kernels[0].per_second


def test_device_time_and_use_and_failures_are_counted() -> None:
    state = LiveState()
    state.fold(
        rows(
            {"kind": Kind.KERNEL_LAUNCH, "name": 1},
            {"kind": Kind.EXECUTION, "name": 1, "aux0": 5, "aux1": 25},
            {"kind": Kind.EXECUTION, "name": 1, "aux0": 30, "aux1": 40},
            {"kind": Kind.DEVICE_USE, "size": 700, "address": 900, "aux0": 1000},
            {"kind": Kind.OOM, "size": 5},
        )
    )
    picture = state.picture(_Tables())
    assert 30 == picture.kernels[0].time_ns
    (device,) = picture.devices
    assert (700, 1000, 1) == (device.charged, device.total, device.ooms)
    assert 2000 == state.picture(_Tables(), totals=[2000]).devices[0].total


@pytest.mark.parametrize("cut", range(6))
def test_launches_of_a_graph_count_for_its_kernels_and_their_capture_does_not(cut: int) -> None:
    events = rows(
        {"kind": Kind.KERNEL_LAUNCH, "name": 1, "correlation": 3},
        {"kind": Kind.GRAPH_NODE_ADDED, "name": 1, "correlation": 4},
        {"kind": Kind.KERNEL_LAUNCH, "name": 1, "correlation": 4},
        {"kind": Kind.EXECUTION, "name": 1, "correlation": 5, "flags": 1},
        {"kind": Kind.EXECUTION, "name": 1, "correlation": 6, "flags": 1},
        {"kind": Kind.EXECUTION, "name": 1, "correlation": 3},
    )
    state = LiveState()
    for part in (events[:1], events[1:cut], events[max(cut, 1) :]):
        state.fold(part)
    assert [3] == [kernel.launches for kernel in state.picture(_Tables()).kernels]


@pytest.mark.parametrize("kind", [Kind.GEMM, Kind.COLLECTIVE])
@pytest.mark.parametrize("cut", range(1, 4))
def test_a_product_has_the_time_of_what_ran_for_it(kind: Kind, cut: int) -> None:
    events = rows(
        {"kind": kind, "name": 1, "correlation": 3},
        {"kind": Kind.KERNEL_LAUNCH, "name": 3, "correlation": 4},
        {"kind": Kind.EXECUTION, "name": 2, "correlation": 3, "aux0": 5, "aux1": 25},
        {"kind": Kind.EXECUTION, "name": 3, "correlation": 4, "aux0": 25, "aux1": 26},
    )
    state = LiveState()
    for part in (events[:cut], events[cut:]):
        state.fold(part)
    kernels = state.picture(_Tables()).kernels
    assert [("n1", 1, 20), ("n3", 1, 1)] == [(kernel.name, kernel.launches, kernel.time_ns) for kernel in kernels]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_graph_launches_the_products_that_became_its_nodes(cut: int) -> None:
    def ran(launch: int, node: int, time: int) -> dict[str, int]:
        return {"kind": Kind.EXECUTION, "name": 2, "correlation": launch, "address": node, "aux1": time}

    events = rows(
        {"kind": Kind.GRAPH_NODE_ADDED, "correlation": 4},
        {"kind": Kind.GEMM, "name": 1, "correlation": 4},
        {"kind": Kind.GRAPH_INSTANTIATE, "aux0": 9},
        {"kind": Kind.GRAPH_NODE, "aux0": 9, "aux1": 1, "correlation": 4},
        {"kind": Kind.GRAPH_NODE, "aux0": 9, "aux1": 2, "correlation": 4},  # a second node of the same call
        {"kind": Kind.GRAPH_NODE, "aux0": 9, "aux1": 3},  # of nothing that is known
        {"kind": Kind.GRAPH_LAUNCH, "aux0": 9, "correlation": 5},
        {"kind": Kind.GRAPH_LAUNCH, "aux0": 9, "correlation": 6},
        *(ran(5, node, 10**node) for node in (1, 2, 3)),
        *(ran(6, node, 10**node) for node in (1, 2, 3)),
    )
    state = LiveState()
    for part in (events[:cut], events[cut:]):
        state.fold(part)
    (kernel,) = state.picture(_Tables()).kernels
    assert ("n1", 2, 220) == (kernel.name, kernel.launches, kernel.time_ns)


def test_streams_are_called_as_everywhere_and_destroyed_ones_do_not_pile_up() -> None:
    state = LiveState()
    state.fold(
        rows(
            {"kind": Kind.STREAM_CREATE, "stream": 1, "flags": StreamFlag.LEGACY_DEFAULT},
            {"kind": Kind.MEMCPY, "stream": 1},
        )
    )
    assert ["default stream"] == [stream.label for stream in state.picture(_Tables()).streams]
    for number in range(2, 20_002, 100):
        events = []
        for stream in range(number, number + 100):
            events += [
                {"kind": Kind.STREAM_CREATE, "stream": stream},
                {"kind": Kind.MEMSET, "stream": stream},
                {"kind": Kind.STREAM_DESTROY, "stream": stream},
            ]
        state.fold(rows(*events))
    picture = state.picture(_Tables(), sort="operations", most=5)
    assert picture.stream_count < 5000
    assert "streams that were destroyed" == picture.streams[0].label
    everything = state.picture(_Tables(), most=10_000)
    assert 20_001 == sum(stream.operations for stream in everything.streams)


def test_a_site_grows_if_its_floor_rises_period_by_period() -> None:
    state, address = LiveState(), 0
    for second in range(75):
        address += 64
        events = [
            {"time": second * _S, "kind": Kind.BLOCK_ALLOC, "address": address, "size": 1, "stack": 1},  # stays
            {"time": second * _S, "kind": Kind.BLOCK_ALLOC, "address": 1 << 40, "size": 5 + second % 9, "stack": 2},
            {"time": second * _S + 1, "kind": Kind.BLOCK_FREE_REQUESTED, "address": 1 << 40},
            {"time": second * _S + 2, "kind": Kind.BLOCK_ALLOC, "address": 1 << 40, "size": 5, "stack": 2},
        ]
        state.fold(rows(*events))
        grows = {site.stack: site.grows for site in state.picture(_Tables()).sites}
        assert {1: second >= 50, 2: False} == grows, second


def test_the_curve_has_the_highest_level_of_each_moment() -> None:
    state = LiveState()
    quarter = CURVE_NS
    state.fold(
        rows(
            {"time": 0, "kind": Kind.BLOCK_ALLOC, "address": 1, "size": 10},
            {"time": 1, "kind": Kind.BLOCK_ALLOC, "address": 2, "size": 5},
            {"time": 2, "kind": Kind.BLOCK_FREE_REQUESTED, "address": 1},
            {"time": quarter, "kind": Kind.SEGMENT_ALLOC, "address": 64, "size": 100},
        )
    )
    assert [15] == state.curve(0, 80)[0][:1]
    state.go_on(3 * quarter)
    assert ([15, 5, 5, 5], [0, 100, 100, 100]) == state.curve(0, 80)
    assert [15, 5] == state.curve(0, 2)[0]
    assert [5, 5] == state.curve(0, 80, points=2)[0]
    early = LiveState()
    early.fold(rows({"time": 0, "kind": Kind.SEGMENT_ALLOC, "address": 64, "size": 100}))
    early.fold(rows({"time": quarter, "kind": Kind.BLOCK_ALLOC, "address": 1, "size": 10}))
    assert ([0, 10], [100, 100]) == early.curve(0, 80)
    state.go_on(10_000 * quarter)
    assert CURVE_POINTS == len(state.curve(0, CURVE_POINTS)[0])
    assert ([], []) == state.curve(7, 80)


@pytest.mark.parametrize("sizes", [[0], [1 << 47] * 3])
def test_no_number_that_a_file_may_have_stops_it(sizes: list[int]) -> None:
    state = LiveState()
    state.fold(
        rows(
            *(
                {
                    "kind": Kind.BLOCK_ALLOC,
                    "address": (1 << 62) - 1 - n,
                    "size": size,
                    "device": -1,
                    "stack": 9,
                    "time": -(1 << 61),
                }
                for n, size in enumerate(sizes)
            )
        )
    )
    state.fold(rows({"kind": 255, "time": 1 << 61}, {"kind": Kind.KERNEL_LAUNCH, "time": 0, "name": (1 << 32) - 1}))
    assert sum(sizes) == state.picture(_Tables()).devices[0].allocated


def test_state_does_not_grow_with_the_number_of_events() -> None:
    state, size = LiveState(), 500
    piece = np.zeros(2 * size, RECORD)
    piece["kind"] = np.tile([Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED], size)
    piece["address"], piece["size"], piece["stack"] = (
        np.repeat(np.arange(size), 2),
        8,
        np.repeat(np.arange(size) % 50, 2),
    )

    def fold(begin: int, end: int) -> None:
        for number in range(begin, end):
            piece["time"] = number * _S // 10
            state.fold(piece)

    fold(0, 4000 // 40)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        fold(4000 // 40, 4000 // 10)
        assert tracemalloc.get_traced_memory()[0] - before < 200_000
    finally:
        tracemalloc.stop()
    assert 400 * 2 * size == state.picture(_Tables()).events
