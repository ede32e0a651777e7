"""Whose a card's memory is, from what NVML said and what was recorded by name."""

from __future__ import annotations

import numpy as np
import pytest

from cudatool.analyze import Holder, LedgerLine, report
from cudatool.trace import reader, stacks
from cudatool.trace.events import Event, Kind, UseFlag
from cudatool.trace.model import Frame
from cudatool.trace.recorder import Recorder

MIB = 1 << 20


def use(process: int, flags: int = 0, *, beside: int = 10) -> tuple[Kind, dict[str, int]]:
    sizes = {"size": process * MIB, "address": (process + beside) * MIB, "aux0": 1000 * MIB}
    return Kind.DEVICE_USE, {**sizes, "flags": flags}


def taken(address: int, size: int, library: str = "", name: str = "cuMemAlloc_v2") -> tuple[Kind, dict[str, object]]:
    called = [Frame("/home/train.py", "step", 7)]
    if library:
        called.insert(0, Frame(f"/usr/lib/{library}", library, 0))
    return Kind.MEM_ALLOC, {
        "address": address * MIB,
        "size": size * MIB,
        "name": name,
        "stack": stacks.intern(called),
    }


@pytest.fixture
def ledger_of(tmp_path):
    def ledger(*events, moment=None, **header):
        path = tmp_path / "t.ctrace"
        with Recorder(path, header={"libraries": ["PyTorch"], **header}, force=True) as recorder:
            for time, (kind, fields) in enumerate(events, start=1):
                row = dict.fromkeys(Event._fields, 0) | {"name": "", "time": time, "kind": kind} | fields
                recorder(Event(**row))
        trace = reader.read(path)
        if moment is not None:  # the recorder tells the streams of the process first
            moment += len(trace.records) - len(events)
        (found,) = report(trace, moment=moment).ledgers
        return found

    return ledger


def segment(address: int, size: int, kind: Kind = Kind.SEGMENT_ALLOC) -> tuple[Kind, dict[str, int]]:
    return kind, {"address": address * MIB, "size": size * MIB}


def block(address: int, size: int) -> tuple[Kind, dict[str, int]]:
    return Kind.BLOCK_ALLOC, {"address": address * MIB, "size": size * MIB, "aux0": size * MIB}


def test_what_the_driver_took_before_the_recording_has_a_line_of_its_own(ledger_of):
    found = ledger_of(segment(100, 20), use(320), use(330, UseFlag.GRAPH), driver_ran_before=True)
    lines = {(line.holder, line.owner): line.size for line in found.lines}
    assert 300 * MIB == lines[Holder.BEFORE, ""]
    assert 0 == found.unknown


def test_every_byte_is_named_by_who_took_it_or_what_had_happened(ledger_of):
    found = ledger_of(
        use(500, UseFlag.CONTEXT),
        segment(0, 20),
        block(0, 12),
        taken(100, 64, "libcublas.so.13"),
        use(586, UseFlag.MODULE),  # 2 more than the 84 that have a name
        taken(300, 8),
        use(600, UseFlag.GRAPH | UseFlag.STREAM),
    )
    assert {(line.holder, *line.words): line.size // MIB for line in found.lines} == {
        (Holder.DRIVER, "the driver", "context"): 500,
        (Holder.LIBRARY, "cuBLAS", "taken from the driver"): 64,
        (Holder.BLOCKS, "PyTorch", "blocks in use"): 12,
        (Holder.CACHED, "PyTorch", "cached"): 8,
        (Holder.LIBRARY, "the program itself", "taken from the driver"): 8,
        (Holder.DRIVER, "the driver", "graphs, streams"): 6,
        (Holder.DRIVER, "the driver", "modules"): 2,
    }
    assert (found.process, found.used, found.total) == (600 * MIB, 610 * MIB, 1000 * MIB)
    assert (found.unknown, found.beside, found.named) == (0, 10 * MIB, 1.0)


def test_growth_while_nothing_happened_is_unknown(ledger_of):
    found = ledger_of(use(500, UseFlag.CONTEXT), segment(0, 20), use(530), use(520))
    assert found.unknown == 10 * MIB
    assert found.named == pytest.approx(1 - 10 / 530)


@pytest.mark.parametrize("grows_on", [0, 3])
def test_memory_that_is_read_before_its_cause_is_known_has_that_cause(ledger_of, grows_on):
    """A module is loaded at its first use, and a reading falls into that."""
    found = ledger_of(segment(0, 20), use(520, UseFlag.CONTEXT), use(616), use(616 + grows_on, UseFlag.MODULE))
    driver = {line.owner: line.size // MIB for line in found.lines if line.holder is Holder.DRIVER}
    assert driver == {"context": 500, "modules": 96 + grows_on}
    assert found.unknown == 0


def test_growth_of_earlier_readings_does_not_get_a_later_cause(ledger_of):
    found = ledger_of(segment(0, 20), use(520, UseFlag.CONTEXT), use(616), use(617), use(620, UseFlag.MODULE))
    driver = {line.owner: line.size // MIB for line in found.lines if line.holder is Holder.DRIVER}
    assert driver == {"context": 500, "modules": 4}
    assert found.unknown == 96 * MIB


def test_what_is_given_back_leaves_the_ledger(ledger_of):
    found = ledger_of(
        use(500, UseFlag.CONTEXT),
        use(540, UseFlag.GRAPH),
        use(500),
        segment(0, 100),
        use(600),
    )
    assert [(line.words[1], line.size // MIB) for line in found.lines] == [("context", 500), ("cached", 100)]


@pytest.mark.parametrize(("moment", "process", "cached"), [(3, 520, 20), (4, 520, 20), (5, 660, 160), (9, 600, 100)])
def test_ledger_of_a_chosen_moment_is_of_the_last_reading_before_it(ledger_of, moment, process, cached):
    steps = [use(500, UseFlag.CONTEXT), segment(0, 20), block(0, 1), use(520), segment(20, 140), use(660)]
    steps += [segment(0, 20, Kind.SEGMENT_FREE), segment(20, 140, Kind.SEGMENT_FREE), segment(400, 100), use(600)]
    found = ledger_of(*steps, moment=moment)
    held = sum(line.size for line in found.lines if line.holder in (Holder.BLOCKS, Holder.CACHED))
    assert (process, cached, 0) == (found.process // MIB, held // MIB, found.unknown)
    assert not found.is_most
    assert found.time <= moment + 1  # the first event is at 1
    assert ledger_of(*steps).is_most


def test_moment_before_any_reading_has_no_ledger(ledger_of):
    assert ledger_of(segment(0, 20), block(0, 1), use(520), moment=1) is None


def test_the_drivers_pool_counts_with_what_it_keeps(ledger_of):
    freed = Kind.MEM_FREE, {"address": 0, "size": MIB, "name": "cuMemFreeAsync"}
    pool = UseFlag.POOL
    found = ledger_of(
        use(500, UseFlag.CONTEXT), taken(0, 1, name="cuMemAllocAsync"), use(532, pool), freed, use(532, pool)
    )
    lines = {line.words: line.size // MIB for line in found.lines}
    assert lines[("the driver", "pools of cuMemAllocAsync")] == 31
    assert lines[("the program itself", "taken from the driver")] == 1
    assert found.unknown == 0


def test_where_nvml_names_no_process_the_whole_card_is_told(ledger_of):
    found = ledger_of(use(0, UseFlag.CONTEXT, beside=500), segment(0, 20), use(0, beside=520))
    assert found.process is None
    assert [(line.words[1], line.size // MIB) for line in found.lines] == [("context", 500), ("cached", 20)]
    assert found.beside == 0


def test_without_readings_there_is_no_ledger(ledger_of):
    assert ledger_of(segment(0, 20)) is None


@pytest.mark.some_of("seed", range(30), 10)
def test_lines_and_the_unknown_are_always_the_whole(ledger_of, seed):
    draw = np.random.default_rng(seed)
    events, address = [use(400, UseFlag.CONTEXT)], 0
    for _ in range(60):
        size = int(draw.integers(1, 30))
        match draw.integers(0, 4):
            case 0:
                events += [segment(address, size), block(address, max(size // 2, 1))]
            case 1:
                events.append(taken(address, size, draw.choice(["", "libcublas.so.13", "libnccl.so.2"])))
            case _:
                events.append(use(int(draw.integers(300, 900)), int(draw.integers(0, 128))))
        address += size
    found = ledger_of(*events)
    assert sum(line.size for line in found.lines) + found.unknown == found.process
    assert all(isinstance(line, LedgerLine) and line.size > 0 for line in found.lines)
