"""Recorded requests through our allocator: what PyTorch recorded is reproduced, and what differs is found."""

from __future__ import annotations

import cProfile
import json
import lzma
import pickle
import pstats
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from recordings import in_turn, path_of

from cudatool.analyze import ReplayCheck, advise, check, recorded_settings
from cudatool.analyze.calls import Verb, call_time, change_time
from cudatool.analyze.replay_pass import ReplayPass
from cudatool.analyze.requests import requests
from cudatool.collect import torch_snapshot
from cudatool.errors import FileFormatError
from cudatool.memory import Settings
from cudatool.trace.events import Kind

NAMES = [
    "convnet__default",
    "convnet__frac0.03",
    "gpt_default",
    "gpt_expandable",
    "graphs__default",
    "kvcache__round4",
    "llm__default",
    "llm__expandable",
    "prefetch__default",
    "prefetch__expandable",
    "resnet_default",
    "streams_default",
]

Change = Callable[[dict[str, Any]], None]


def facts_of(name: str) -> dict[str, Any]:
    path = path_of(name)
    facts: dict[str, Any] = json.loads((path.parent / f"{name}.stats.json").read_text())
    return facts


def checked(path: Path, name: str, *, with_stats: bool = True) -> ReplayCheck:
    facts = facts_of(name)
    snapshot = torch_snapshot.read(path)
    settings, _ = recorded_settings(snapshot)
    settings = replace(settings, per_process_memory_fraction=float(facts["memory_fraction"] or 1))
    return check(
        snapshot,
        0,
        settings,
        total_memory=facts["device_total_bytes"],
        final=snapshot.segments,
        stats=facts["stats"] if with_stats else None,
    )


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, Change], Path]:
    """Write a recording with something changed."""

    def write(name: str, change: Change) -> Path:
        with lzma.open(path_of(name)) as file:
            snapshot = pickle.load(file)
        change(snapshot)
        path = tmp_path / "changed.pickle"
        path.write_bytes(pickle.dumps(snapshot))
        return path

    return write


@in_turn(NAMES)
def test_recording_is_reproduced_exactly(name: str) -> None:
    result = checked(path_of(name), name)
    assert (None, {}) == (result.first_divergence, result.stats_differ)
    assert (result.allocs, result.segments, 0) == (result.exact, result.segments_exact, result.final_blocks_differ)
    assert ("empty", True) == (result.initial_state, result.is_exact)
    stats = facts_of(name)["stats"]
    assert stats["reserved_bytes.all.peak"] == result.reserved_peak_bytes
    assert stats["active_bytes.all.peak"] == result.active_peak_bytes


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9])
@in_turn([name for name in NAMES if name != "kvcache__round4"])
def test_recording_whose_beginning_is_lost_is_reproduced_from_there(
    name: str, cut: float, changed: Callable[[str, Change], Path]
) -> None:
    def lose(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        del entries[: int(cut * len(entries))]

    result = checked(changed(name, lose), name, with_stats=False)
    assert (result.allocs, None) == (result.exact, result.first_divergence)
    assert result.is_exact
    assert result.initial_state in ("inferred", "ambiguous")


@pytest.mark.parametrize("name", ["graphs__default", "prefetch__default", "streams_default"])
def test_beginning_may_be_lost_in_the_middle_of_a_free(name: str, changed: Callable[[str, Change], Path]) -> None:
    def lose(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        half = len(entries) // 2
        free = next(i for i, e in enumerate(entries) if i > half and e["action"] == "free_requested")
        assert "free_completed" == entries[free + 1]["action"]
        del entries[: free + 1]

    assert checked(changed(name, lose), name, with_stats=False).is_exact


def give_back(snapshot: dict[str, Any], segments: list[dict[str, Any]]) -> None:
    """Free the blocks in segments, then the segments."""
    entries = snapshot["device_traces"][0]
    in_use = [(s, b) for s in segments for b in s["blocks"] if b["state"] != "inactive"]
    entries += [
        {"action": action, "addr": block["address"], "size": block["requested_size"], "stream": segment["stream"]}
        for segment, block in in_use
        for action in ("free_requested", "free_completed")
    ]
    entries += [
        {"action": "segment_free", "addr": s["address"], "size": s["total_size"], "stream": s["stream"]}
        for s in segments
    ]
    for entry in entries:
        entry.pop("time_us", None)
    snapshot["segments"] = [segment for segment in snapshot["segments"] if segment not in segments]


@pytest.mark.parametrize("name", ["graphs__default", "streams_default"])
def test_private_pools_that_are_gone_at_the_end_are_told_by_what_they_did(
    name: str, changed: Callable[[str, Change], Path]
) -> None:
    def empty(snapshot: dict[str, Any]) -> None:
        whole = [s for s in snapshot["segments"] if [b["state"] for b in s["blocks"]] == ["inactive"]]
        private = [s for s in snapshot["segments"] if s["segment_pool_id"] != (0, 0)]

        def order(segment: dict[str, Any]) -> tuple[Any, ...]:
            # The default pool begins with large segments, private ones with small.
            is_private, is_large = segment["segment_pool_id"] != (0, 0), segment["segment_type"] == "large"
            where = segment["stream"], segment["total_size"], segment["address"]
            return segment["segment_pool_id"], is_private == is_large, *where

        give_back(snapshot, sorted([s for s in whole if s not in private] + private, key=order))

    result = checked(changed(name, empty), name, with_stats=False)
    assert result.is_exact
    assert "private pools" in result.notes[-1]


@pytest.mark.parametrize("action", ["alloc", "free_requested", "free_completed", "segment_alloc"])
def test_file_that_contradicts_itself_is_replayed_as_far_as_possible(
    action: str, changed: Callable[[str, Change], Path]
) -> None:
    def contradict(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        found = [i for i, entry in enumerate(entries) if entry["action"] == action]
        entries[found[len(found) // 2]]["addr"] = 1 << 50
        entries.insert(found[-1], entries[found[0]])

    result = checked(changed("streams_default", contradict), "streams_default", with_stats=False)
    assert result.allocs // 2 < result.exact <= result.allocs


def test_events_that_the_policy_cannot_follow_are_refused_in_a_line(changed: Callable[[str, Change], Path]) -> None:
    def contradict(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0][-3000:]
        assert "free_completed" == entries[620]["action"]
        entries[620] = {**entries[620], "action": "segment_free"}
        snapshot["device_traces"][0] = entries

    trace = torch_snapshot.read(changed("prefetch__default", contradict))
    with pytest.raises(FileFormatError, match=r"contradict each other \(0x[0-9a-f]+ is not a block in use"):
        advise(trace, 0, ["expandable_segments:True"], recorded=Settings())


def test_contradiction_without_words_of_its_own_names_the_address(changed: Callable[[str, Change], Path]) -> None:
    def contradict(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        del entries[: len(entries) // 3]
        lose_allocations(snapshot)

    trace = torch_snapshot.read(changed("convnet__default", contradict))
    with pytest.raises(FileFormatError, match=r"its events contradict each other \(at 0x[0-9a-f]+\)$"):
        check(trace, 0, Settings())


def test_guess_that_makes_the_replay_worse_is_dropped(changed: Callable[[str, Change], Path]) -> None:
    def contradict(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0][-3000:]
        entries[1071] = {**entries[1071], "action": "alloc"}  # of a block in use, which is then freed only at its end
        snapshot["device_traces"][0] = entries

    trace = torch_snapshot.read(changed("prefetch__default", contradict))
    result = check(trace, 0, Settings(), final=trace.segments)
    assert result.first_divergence is not None
    assert (1378, 950) == (result.first_divergence.event, result.exact)  # with guesses they were 285 and 676


def test_address_that_differs_is_found_and_the_rest_goes_on(changed: Callable[[str, Change], Path]) -> None:
    def move(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        small = next(e for e in entries if e["action"] == "alloc" and 512 < e["size"] < 2**20)
        address = small["addr"]
        for entry in entries:
            if entry.get("addr") == address and entry["action"] in ("alloc", "free_requested", "free_completed"):
                entry["addr"] = address + 2**20

    result = checked(changed("streams_default", move), "streams_default", with_stats=False)
    assert not result.is_exact
    assert result.first_divergence is not None
    assert 0 < result.exact < result.allocs


def test_settings_that_were_not_in_force_do_not_reproduce_it() -> None:
    snapshot = torch_snapshot.read(path_of("prefetch__default"))
    settings = Settings.parse("roundup_power2_divisions:4")
    result = check(snapshot, 0, settings, final=snapshot.segments)
    assert not result.is_exact


@pytest.mark.parametrize("conf", ["roundup_power2_divisions:8", "expandable_segments:True", "max_split_size_mb:32"])
@pytest.mark.parametrize("name", ["llm__default", "prefetch__default", "convnet__default"])
def test_inexact_recording_costs_three_exact_ones_at_most(
    name: str, conf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = costs_of_passes(monkeypatch)
    snapshot = torch_snapshot.read(path_of(name))
    assert check(snapshot, 0, recorded_settings(snapshot)[0]).is_exact
    (exact,) = costs
    costs.clear()
    assert not check(snapshot, 0, Settings.parse(conf), final=snapshot.segments).is_exact
    assert sum(costs) <= max(3 * exact, costs[0] + 2500)


def costs_of_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each pass of a replay from now on adds its cost."""
    costs: list[int] = []
    run = ReplayPass.run

    def noted(self: ReplayPass, **options: Any) -> bool:
        finished = run(self, **options)
        costs.append(self.cost)
        return finished

    monkeypatch.setattr(ReplayPass, "run", noted)
    return costs


def lose_allocations(snapshot: dict[str, Any]) -> None:
    entries = snapshot["device_traces"][0]
    snapshot["device_traces"][0] = [e for i, e in enumerate(entries) if e["action"] != "alloc" or i % 7]


def lose_allocations_and_pools(snapshot: dict[str, Any]) -> None:
    give_back(snapshot, [s for s in snapshot["segments"] if [b["state"] for b in s["blocks"]] == ["inactive"]])
    lose_allocations(snapshot)


def calls_of_check(path: Path) -> int:
    """Return how many functions Python calls for a check: a measure of time that is the same each time."""
    snapshot = torch_snapshot.read(path)
    profile = cProfile.Profile()
    profile.runcall(check, snapshot, 0, recorded_settings(snapshot)[0], final=snapshot.segments)
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined, no-any-return]


@cache
def calls_of_whole(name: str) -> int:
    return calls_of_check(path_of(name))


@pytest.mark.parametrize("damage", [lose_allocations, lose_allocations_and_pools])
@pytest.mark.some_of("name", ["convnet__default", "convnet__frac0.03", "llm__expandable", "streams_default"], 1)
def test_damaged_recording_takes_three_times_the_python_calls_of_a_whole_one_at_most(
    name: str, damage: Change, changed: Callable[[str, Change], Path]
) -> None:
    assert calls_of_check(changed(name, damage)) <= 3 * calls_of_whole(name)


def test_guesses_that_never_explain_anything_end(
    changed: Callable[[str, Change], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every segment that is given back could have been a private pool's: each is a guess."""

    def disturb(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        whole = [s for s in snapshot["segments"] if [b["state"] for b in s["blocks"]] == ["inactive"]]
        give_back(snapshot, whole)
        snapshot["device_traces"][0] = [e for i, e in enumerate(entries) if e["action"] != "alloc" or i % 7]

    costs = costs_of_passes(monkeypatch)
    result = checked(changed("convnet__default", disturb), "convnet__default", with_stats=False)
    assert not result.is_exact
    assert len(costs) > 1
    assert sum(costs) <= 3 * 2 * result.calls
    assert len(costs) <= 1 + 2 * 9  # each costs an eighth of a pass at least, to prepare it


def test_guesses_about_a_short_recording_end_soon(
    changed: Callable[[str, Change], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass costs what it takes to prepare one, however few calls it makes."""

    def disturb(snapshot: dict[str, Any]) -> None:
        give_back(snapshot, [s for s in snapshot["segments"] if s["segment_pool_id"] != (0, 0)])
        entries = snapshot["device_traces"][0]
        late = len(entries) // 2
        snapshot["device_traces"][0] = [e for i, e in enumerate(entries) if e["action"] != "alloc" or i < late or i % 7]

    costs = costs_of_passes(monkeypatch)
    result = checked(changed("graphs__default", disturb), "graphs__default", with_stats=False)
    assert not result.is_exact
    assert len(costs) > 3
    assert sum(costs[1:]) + 100 * len(costs[1:]) <= 2500


def test_pools_that_are_guessed_are_those_of_calls_at_their_place_and_time() -> None:
    """The columns say the same as a walk over the calls."""
    asked = requests(torch_snapshot.read(path_of("graphs__default")), 0)
    calls = asked.calls
    segment = next(change for change in calls.changes() if change.kind is Kind.SEGMENT_ALLOC)
    place, last = range(segment.address, segment.address + segment.size), call_time(calls[len(calls) // 2])
    moved = calls.with_pool(7, place, 0, last)
    assert len(calls) == len(moved)
    for before, after in zip(calls, moved, strict=True):
        is_there = before.verb is Verb.MALLOC and before.address in place and call_time(before) <= last
        assert (7 if is_there else before.pool) == after.pool
        expected = [
            7 if change.address in place and change_time(change, before) <= last else change.pool
            for change in before.changes
        ]
        assert expected == [change.pool for change in after.changes]
        assert before._replace(pool=0, changes=()) == after._replace(pool=0, changes=())
    assert any(call.pool == 7 for call in moved)


def test_lost_segment_event_counts_as_difference(changed: Callable[[str, Change], Path]) -> None:
    def lose(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        last = max(i for i, e in enumerate(entries) if e["action"] == "segment_alloc")
        entries[last]["size"] += 2 << 20

    result = checked(changed("prefetch__default", lose), "prefetch__default", with_stats=False)
    assert (result.segments - 1, False) == (result.segments_exact, result.is_exact)


def test_segments_that_share_addresses_are_refused(changed: Callable[[str, Change], Path]) -> None:
    def overlap(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        first = next(entry for entry in entries if entry["action"] == "segment_alloc")
        entries.insert(entries.index(first) + 1, {**first, "addr": first["addr"] + 512})

    with pytest.raises(FileFormatError, match=r"two segments at 0x[0-9a-f]+ at the same time"):
        checked(changed("streams_default", overlap), "streams_default")


def test_settings_of_an_odd_type_are_refused(changed: Callable[[str, Change], Path]) -> None:
    def set_it(snapshot: dict[str, Any]) -> None:
        snapshot["allocator_settings"]["garbage_collection_threshold"] = (0, 1)

    snapshot = torch_snapshot.read(changed("streams_default", set_it))
    with pytest.raises(FileFormatError, match="settings make no sense"):
        recorded_settings(snapshot)
