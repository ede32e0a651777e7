"""A part of a recording begins with the state that its first event found."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from records import BASE, MIB, alloc, free, freed, of_segment, trace

from cudatool import analyze
from cudatool.cli.snapshot import snapshot
from cudatool.collect import torch_snapshot
from cudatool.trace.events import LIVED, HostFlag, Kind
from cudatool.trace.model import Trace
from cudatool.trace.physical import physical_memory

DATA = Path(__file__).resolve().parents[1] / "data"
RECORDINGS = sorted(DATA.glob("*.pickle.xz"))


def state(of: Trace, index: int) -> list[dict[str, Any]]:
    at = analyze.segments_at(analyze.blocks(of), analyze.segments(of), index)
    return [asdict(segment) for segment in at]


def same_states(whole: Trace, start: int, stop: int, step: int = 1) -> None:
    part = analyze.window(whole, start, stop)
    before = len(part.records) - (stop - start)
    for index in [start - 1, *range(start, stop, step)]:
        assert state(whole, index) == state(part, before + index - start)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
@pytest.mark.parametrize("share", [0, 0.3, 0.9])
def test_every_moment_of_a_part_is_that_of_the_whole(path: Path, share: float) -> None:
    whole = torch_snapshot.read(path)
    count = len(whole.records)
    same_states(whole, int(count * share), min(int(count * share) + 200, count), step=20)


_kinds = st.sampled_from(["alloc", "free", "freed", "map", "unmap"])


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(_kinds, st.integers(0, 5), st.integers(1, 3)), max_size=25), st.data())
def test_parts_of_any_sequence_have_its_states(events: list[tuple[str, int, int]], data: st.DataObject) -> None:
    make = {
        "alloc": lambda page, _: alloc(2 * MIB * page, MIB),
        "free": lambda page, _: free(2 * MIB * page),
        "freed": lambda page, _: freed(2 * MIB * page),
        "map": lambda page, count: of_segment(Kind.SEGMENT_MAP, 2 * MIB * page, 2 * MIB * count),
        "unmap": lambda page, count: of_segment(Kind.SEGMENT_UNMAP, 2 * MIB * page, 2 * MIB * count),
    }
    mapped: set[int] = set()
    sound = []  # pages are not mapped twice
    for kind, page, count in events:
        pages = set(range(page, page + count))
        if kind == "map" and pages & mapped:
            continue
        mapped = mapped | pages if kind == "map" else mapped - pages if kind == "unmap" else mapped
        sound.append(make[kind](page, count))
    whole = trace(*sound)
    count = len(whole.records)
    start = data.draw(st.integers(0, count))
    same_states(whole, start, data.draw(st.integers(start, count)))


def test_what_was_there_before_is_no_part_of_what_happened() -> None:
    whole = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 20 * MIB),
        alloc(0, 2 * MIB),
        alloc(2 * MIB, 2 * MIB),
        free(0),
        alloc(4 * MIB, 2 * MIB),
        freed(0),
    )
    part = analyze.window(whole, 4, 6)
    assert 4 == analyze.recorded_from(part, 0)
    assert [4, 6, 6] == part.header["window"]
    assert [1040] * 5 + [1050] == part.records["time"].tolist()
    (summary,) = analyze.report(part).summary.devices
    assert (4 * MIB, 6 * MIB) == (summary.now.active, summary.peak_active)


def test_what_waited_for_a_stream_already_is_not_allocated_in_the_part() -> None:
    """The events in front of the part allocate it, and free it after all others are allocated: at no time was so much
    allocated."""
    whole = trace(
        of_segment(Kind.SEGMENT_ALLOC, 0, 20 * MIB),
        alloc(0, 8 * MIB),
        free(0),
        alloc(8 * MIB, 2 * MIB, aux0=MIB),
        alloc(10 * MIB, 2 * MIB, aux0=MIB),
        free(10 * MIB),
        freed(0),
    )
    report = analyze.report(analyze.window(whole, 4, 7))
    (summary,) = report.summary.devices
    assert (12 * MIB, 4 * MIB) == (summary.peak_active, summary.peak_allocated)
    assert (4 * MIB, 2 * MIB) == (summary.peak.allocated, summary.peak.requested)
    (early,) = analyze.report(analyze.window(whole, 5, 7)).summary.devices  # the most is there from the start
    assert (12 * MIB, 4 * MIB, 2 * MIB) == (early.peak.active, early.peak.allocated, early.peak.requested)


def test_a_request_to_free_what_is_gone_changes_no_earlier_moment() -> None:
    whole = trace(alloc(0, MIB), freed(0), of_segment(Kind.SEGMENT_MAP, 0, 2 * MIB), free(0))
    same_states(whole, 0, 3)
    found = analyze.blocks(whole)
    assert ([1], [1]) == (found.freed.tolist(), found.end.tolist())


def test_ranges_that_are_open_stay_open() -> None:
    whole = trace(
        (Kind.RANGE_PUSH, {"name": "step"}), (Kind.RANGE_PUSH, {"name": "over"}), (Kind.RANGE_POP, {}), alloc(0, 512)
    )
    part = analyze.window(whole, 3, 4)
    assert [Kind.RANGE_PUSH, Kind.BLOCK_ALLOC] == part.records["kind"].tolist()
    assert "step" == part.names[part.records["name"][0]]


@pytest.mark.parametrize("flags", [0, LIVED])
def test_pinned_memory_that_was_freed_is_not_there(flags: int) -> None:
    block = {"address": BASE, "size": 512, "aux0": 512, "flags": HostFlag.BLOCK}
    whole = trace(
        (Kind.HOST_ALLOC, {"address": BASE, "size": MIB, "name": "cuMemHostAlloc", "flags": flags}),
        (Kind.HOST_ALLOC, block),
        (Kind.HOST_FREE, block),
        alloc(0, 512),
        (Kind.HOST_FREE, {"address": BASE, "size": MIB, "name": "cuMemFreeHost"}),
        free(0),
    )
    assert [Kind.HOST_ALLOC, Kind.BLOCK_ALLOC] == analyze.window(whole, 3, 4).records["kind"].tolist()
    assert [Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED] == analyze.window(whole, 5, 6).records["kind"].tolist()


def test_memory_without_an_address_is_there_until_it_is_given_back() -> None:
    def physical(kind: Kind, handle: int, device: int = 0) -> tuple[Kind, dict[str, int]]:
        return kind, {"aux0": handle, "size": MIB * handle, "device": device}

    whole = trace(
        physical(Kind.PHYSICAL_ALLOC, 1),
        physical(Kind.PHYSICAL_ALLOC, 2),
        physical(Kind.PHYSICAL_ALLOC, 2, device=1),
        physical(Kind.PHYSICAL_FREE, 2),
        alloc(0, 512),
        physical(Kind.PHYSICAL_FREE, 1),
    )
    found = {device: (held.peak, held.now) for device, held in physical_memory(analyze.window(whole, 4, 6)).items()}
    assert {0: (MIB, 0), 1: (2 * MIB, 2 * MIB)} == found


def test_what_events_say_goes_with_them(tmp_path: Path) -> None:
    import pickle

    ring = [
        {"action": "alloc", "addr": BASE + 512 * i, "size": 512, "stream": 0, "time_us": i, "compile_context": f"{i}/0"}
        for i in range(4)
    ]
    (tmp_path / "x").write_bytes(pickle.dumps({"segments": [], "device_traces": [ring]}))
    part = analyze.window(torch_snapshot.read(tmp_path / "x"), 3, 4)  # after the stream's record
    fact = part.facts["compile_context"]  # type: ignore[attr-defined]
    numbers = np.asarray(fact.number)[part.records["kind"] == Kind.BLOCK_ALLOC].tolist()
    assert ["0/0", "1/0", "2/0"] == [fact.values[number - 1] for number in numbers]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(snapshot, [str(RECORDINGS[0]), *arguments])
    return done.exit_code, done.stdout or str(done.exception)


def test_the_command_shows_the_part_that_was_asked_for() -> None:
    count = len(torch_snapshot.read(RECORDINGS[0]).records)
    status, text = run("--events", "100:300")
    assert 0 == status
    assert f"200 events (numbers 100 to 299 of {count:,})" in text
    status, text = run("--time", "0s:1h")
    assert f"{count:,} events (numbers 0 to {count - 1:,} of {count:,})" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--events", "5"], "write a range such as 1000:2000"),
        (["--events", "9:9"], "no event is in that range"),
        (["--events", "a:5"], "'a' is not a whole number"),
        (["--time", "1:2"], "'1' is not a time; write for example 1.5s"),
        (["--time", "9h:"], "no event is in that range"),
    ],
)
def test_what_is_no_range_is_refused(arguments: list[str], reason: str) -> None:
    status, text = run(*arguments)
    assert status
    assert reason in text
