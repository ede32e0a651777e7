"""Memory pools of libraries in every analysis: whose the bytes are, what is cached, and that nothing is counted twice."""

from __future__ import annotations

import random

import numpy as np
import pytest
from records import MIB, alloc, of_segment, trace

from cudatool import analyze
from cudatool.analyze import Cause, Holder, LedgerLine
from cudatool.analyze.live import LiveState
from cudatool.collect import torch_snapshot
from cudatool.export import torch_pickle
from cudatool.trace.events import RECORD, Kind, UseFlag
from cudatool.trace.libraries import Library
from cudatool.trace.lifetimes import blocks, segments, timeline
from cudatool.trace.model import Frame, Trace


def taken(address: int, size: int, **more):
    return of_segment(Kind.MEM_ALLOC, address, size, **more)


def given_back(address: int):
    return of_segment(Kind.MEM_FREE, address, 0)


def pooled(address: int, size: int, **more):
    return of_segment(Kind.POOL_ALLOC, address, size, aux0=size, name=Library.CUPY, **more)


def returned(address: int):
    return of_segment(Kind.POOL_FREE, address, 0, name=Library.CUPY)


def reading(process: int, cause: int = 0):
    return Kind.DEVICE_USE, {"size": process, "address": process + MIB, "aux0": 1 << 30, "flags": cause}


def said(in_use: int, library: str = Library.JAX):
    return Kind.POOL_USE, {"size": in_use, "aux0": in_use, "name": library}


def ledger(found: Trace):
    (one,) = analyze.report(found).ledgers
    return one


def wrong_with(found: Trace):
    rows, reserved = blocks(found), segments(found)
    return analyze.lint(found, rows, reserved, {0: timeline(found, rows, reserved)})


BESIDE_PYTORCH = (
    taken(0, 8 * MIB),
    pooled(0, 3 * MIB),
    pooled(3 * MIB, MIB),
    of_segment(Kind.SEGMENT_ALLOC, 100 * MIB, 20 * MIB),
    alloc(100 * MIB, 5 * MIB),
    taken(200 * MIB, 2 * MIB),
    returned(0),
)


def test_the_ledger_has_what_is_in_use_and_cached_of_each_allocator():
    found = ledger(trace(*BESIDE_PYTORCH, reading(40 * MIB, UseFlag.CONTEXT), header={"libraries": ["PyTorch"]}))
    assert {
        LedgerLine(Holder.CACHED, "PyTorch", 15 * MIB),
        LedgerLine(Holder.DRIVER, "context", 10 * MIB),
        LedgerLine(Holder.CACHED, "CuPy", 7 * MIB),
        LedgerLine(Holder.BLOCKS, "PyTorch", 5 * MIB),
        LedgerLine(Holder.LIBRARY, "the program itself", 2 * MIB),
        LedgerLine(Holder.BLOCKS, "CuPy", MIB),
    } == set(found.lines)
    assert 0 == found.unknown


def test_blocks_in_a_chunk_from_before_the_recording_are_in_no_line():
    found = ledger(trace(pooled(0, MIB), taken(8 * MIB, MIB), pooled(8 * MIB, MIB), reading(2 * MIB)))
    assert (LedgerLine(Holder.BLOCKS, "CuPy", MIB),) == found.lines
    assert MIB == found.unknown


JAX = {"frames": [Frame("/x/xla_cuda_plugin.so", "xla_cuda_plugin.so", 0)], "stacks": [(), (0,)]}


@pytest.mark.parametrize(("in_use", "used"), [(0, 0), (3 * MIB, 3 * MIB), (8 * MIB, 8 * MIB), (9 * MIB, 8 * MIB)])
def test_what_jax_says_is_in_use_splits_what_it_took(in_use: int, used: int):
    found = ledger(trace(taken(0, 8 * MIB, stack=1), said(in_use), reading(8 * MIB), **JAX))
    lines = {(Holder.BLOCKS, used), (Holder.CACHED, 8 * MIB - used)}
    assert {line for line in lines if line[1]} == {(line.holder, line.size) for line in found.lines}
    assert {"JAX"} == {line.owner for line in found.lines}


def test_jax_is_taken_at_its_word_of_the_nearest_moment():
    near = trace(taken(0, 8 * MIB, stack=1), said(MIB), reading(8 * MIB), reading(8 * MIB), said(2 * MIB), **JAX)
    near.records["time"] = [0, 10, 50, 60, 70]
    assert [2 * MIB] == [line.size for line in ledger(near).lines if line.holder is Holder.BLOCKS]


def test_without_a_word_of_jax_its_memory_is_what_it_took():
    found = ledger(trace(taken(0, 8 * MIB, stack=1), reading(8 * MIB), **JAX))
    assert (LedgerLine(Holder.LIBRARY, "JAX", 8 * MIB),) == found.lines


def test_what_a_pool_caches_has_a_cause_of_its_own_and_a_remedy():
    found = trace(taken(0, 40 * MIB), pooled(0, 40 * MIB), returned(0), pooled(0, MIB))
    (diagnosis,) = analyze.report(found).diagnoses
    shares = {share.cause: share.size for share in diagnosis.fragmentation[0].causes if share.size}
    assert {} == shares  # all was in use at the peak
    late = trace(taken(0, 40 * MIB), pooled(0, MIB), pooled(MIB, MIB))
    (diagnosis,) = analyze.report(late).diagnoses
    assert {Cause.LIBRARY: 38 * MIB} == {s.cause: s.size for s in diagnosis.fragmentation[0].causes if s.size}
    assert [Cause.LIBRARY] == [remedy.topic for remedy in diagnosis.advice]
    assert diagnosis.settings is None  # settings of PyTorch's allocator change nothing here


def test_pytorchs_free_memory_is_not_explained_by_cupys():
    found = trace(*BESIDE_PYTORCH, of_segment(Kind.SEGMENT_ALLOC, 300 * MIB, 20 * MIB), alloc(300 * MIB, 16 * MIB))
    (diagnosis,) = analyze.report(found).diagnoses
    shares = {share.cause: share.size for share in diagnosis.fragmentation[0].causes if share.size}
    assert 7 * MIB == shares.pop(Cause.LIBRARY)
    assert 15 * MIB + 4 * MIB == sum(shares.values())


def test_lint_finds_nothing_wrong_with_a_pool():
    found = trace(*BESIDE_PYTORCH, returned(3 * MIB), given_back(0), given_back(200 * MIB))
    assert () == wrong_with(found)


def test_a_snapshot_for_pytorchs_viewer_has_the_blocks_in_their_chunk(tmp_path):
    unseen = (pooled(3 * MIB, MIB), pooled(3 * MIB, 2 * MIB))  # the free between them was not recorded
    found = trace(*BESIDE_PYTORCH, *unseen, given_back(0))
    index = len(found.records) - 1
    state = analyze.torch_segments(found, analyze.segments_at(blocks(found), segments(found), index))
    torch_pickle.write(tmp_path / "s.pickle", found, state)
    again = torch_snapshot.read(tmp_path / "s.pickle")
    expected = [
        (address, size, found.records["time"][start] // 1000)
        for address, size, start in zip(
            *(getattr(blocks(found), name).tolist() for name in ("address", "size", "start")), strict=True
        )
    ]
    rows = blocks(again)
    times = again.records["time"][rows.start] // 1000
    assert expected == list(zip(rows.address.tolist(), rows.size.tolist(), times.tolist(), strict=True))
    assert 0 == timeline(again, rows, segments(again)).active[-1] - 5 * MIB - 2 * MIB
    assert () == wrong_with(again)


class _Tables:
    def name(self, index: int) -> str:
        return ["", "CuPy"][index]

    def stack(self, index: int) -> tuple[Frame, ...]:
        return (Frame("/home/me/train.py", "step", index),) if index else ()

    def thread(self, index: int) -> str:
        return "main"


def _random(draw: random.Random) -> Trace:
    """Return what a program does with a pool whose hook misses some frees, beside memory of its own."""
    records, next_address, chunks, held = [], 0x1000, {}, {}
    for _ in range(draw.randrange(60)):
        row = np.zeros(1, RECORD)
        choice = draw.random()
        if choice < 0.2:
            size = draw.choice([64, 256])
            row["kind"], row["address"], row["size"] = Kind.MEM_ALLOC, next_address, size
            chunks[next_address] = size
            next_address += size
        elif choice < 0.3 and chunks:
            address = draw.choice(list(chunks))
            row["kind"], row["address"], row["size"] = Kind.MEM_FREE, address, chunks.pop(address)
        elif choice < 0.7 and chunks:
            address = draw.choice(list(chunks))
            row["kind"], row["address"], row["name"] = Kind.POOL_ALLOC, address + draw.randrange(0, 60, 4), 1
            row["size"] = draw.randrange(1, 20)
            held[int(row["address"][0])] = int(row["size"][0])
        elif held:
            address = draw.choice(list(held))
            row["kind"], row["address"], row["size"], row["name"] = Kind.POOL_FREE, address, held.pop(address), 1
        else:
            row["kind"], row["size"], row["address"], row["aux0"] = Kind.DEVICE_USE, 10_000, 20_000, 1 << 20
        row["stack"] = draw.randrange(4) if row["kind"] != Kind.DEVICE_USE else 0
        records.append(row)
    last = np.zeros(1, RECORD)
    last["kind"], last["size"], last["address"], last["aux0"] = Kind.DEVICE_USE, 10_000, 20_000, 1 << 20
    frames = [Frame("/home/me/train.py", "step", number) for number in range(4)]
    whole = np.concatenate([*records, last])
    return Trace(whole, names=["", "CuPy"], frames=frames, stacks=[(), (1,), (2,), (3,)])


@pytest.mark.some_of("seed", range(60), 20)
def test_the_live_view_is_in_the_end_what_the_whole_analysis_says(seed: int):
    draw = random.Random(seed)
    found = _random(draw)
    state, at = LiveState(), 0
    while at < len(found.records):
        step = draw.randrange(1, 9)
        state.fold(found.records[at : at + step])
        at += step
    (device,) = state.picture(_Tables(), most=99).devices
    rows, reserved = blocks(found), segments(found)
    live = rows[rows.end == len(found.records)]
    assert (int(live.size.sum()), int(reserved.at(len(found.records) - 1).size.sum())) == (
        device.allocated,
        device.reserved,
    )
    held = {stack: int(live.size[live.stack == stack].sum()) for stack in np.unique(live.stack).tolist()}
    shown = {site.stack: site.bytes for site in state.picture(_Tables(), most=99).sites if site.bytes}
    assert held == shown
    whole = analyze.ledger(found, rows, reserved, 0, moment=len(found.records) - 1)
    assert (set(whole.lines), whole.unknown) == (set(device.ledger), device.unknown)


@pytest.mark.some_of("seed", range(20), 6)
def test_the_live_views_peak_has_no_chunk_whose_first_block_came_with_it(seed: int):
    found = _random(random.Random(seed))
    state = LiveState()
    state.fold(found.records)
    (device,) = state.picture(_Tables()).devices
    assert int(timeline(found, blocks(found), segments(found)).allocated.max(initial=0)) == device.peak_allocated


def test_a_chunk_taken_earlier_is_no_block_from_its_first_block_on():
    state = LiveState()
    state.fold(trace(taken(0, 8 * MIB, stack=1)).records)
    state.fold(trace(taken(16 * MIB, 4 * MIB), pooled(MIB, MIB), pooled(16 * MIB, 2 * MIB)).records)
    (device,) = state.picture(_Tables()).devices
    assert (3 * MIB, 12 * MIB, 8 * MIB) == (device.allocated, device.reserved, device.peak_allocated)


def test_growth_in_a_pool_is_a_leak_of_its_call_site():
    events = [taken(0, 512 * MIB)]
    for step in range(12):
        events += [(Kind.RANGE_PUSH, {"name": "step"}), pooled(8 * MIB * step, MIB, stack=1)]
        events += [pooled(8 * MIB * step + MIB, 2 * MIB), returned(8 * MIB * step + MIB), (Kind.RANGE_POP, {})]
    site = {"frames": [Frame("/home/me/train.py", "step", 7)], "stacks": [(), (0,)]}
    (diagnosis,) = analyze.report(trace(*events, **site)).diagnoses
    assert ["train.py:7 (step)"] == [leak.label for leak in diagnosis.leaks.found]
