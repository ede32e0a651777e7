"""Recorded requests through our allocator: what PyTorch recorded is reproduced, and what differs is found."""

from __future__ import annotations

import json
import lzma
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudatool.analyze import Check, check, recorded_settings
from cudatool.collect import torch_snapshot
from cudatool.memory import Settings

LOCAL = Path(__file__).parents[1] / "data"
SHARED = Path(__file__).parents[3] / "shared" / "data" / "torch_snapshots"
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


def path_of(name: str) -> Path:
    for folder in (LOCAL, SHARED):
        path = folder / f"{name}.pickle.xz"
        if path.exists():
            return path
    pytest.skip(f"the recording {name} is not on this machine")


def facts_of(name: str) -> dict[str, Any]:
    path = path_of(name)
    facts: dict[str, Any] = json.loads((path.parent / f"{name}.stats.json").read_text())
    return facts


def checked(path: Path, name: str, *, with_stats: bool = True) -> Check:
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


@pytest.mark.parametrize("name", NAMES)
def test_recording_is_reproduced_exactly(name: str) -> None:
    result = checked(path_of(name), name)
    assert (None, {}) == (result.first_divergence, result.stats_differ)
    assert (result.allocs, result.segments, 0) == (result.exact, result.segments_exact, result.final_blocks_differ)
    assert ("empty", True) == (result.initial_state, result.is_exact)
    stats = facts_of(name)["stats"]
    assert stats["reserved_bytes.all.peak"] == result.reserved_peak_bytes
    assert stats["active_bytes.all.peak"] == result.active_peak_bytes


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", ["llm__default", "prefetch__default", "gpt_expandable", "convnet__default"])
def test_recording_whose_beginning_is_lost_is_reproduced_from_there(
    name: str, cut: float, changed: Callable[[str, Change], Path]
) -> None:
    def lose(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        del entries[: int(cut * len(entries))]

    result = checked(changed(name, lose), name, with_stats=False)
    assert 0.999 <= result.exact / result.allocs
    assert result.initial_state in ("inferred", "ambiguous")
    if result.initial_state == "inferred":
        assert result.is_exact


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


def test_lost_segment_event_counts_as_difference(changed: Callable[[str, Change], Path]) -> None:
    def lose(snapshot: dict[str, Any]) -> None:
        entries = snapshot["device_traces"][0]
        last = max(i for i, e in enumerate(entries) if e["action"] == "segment_alloc")
        entries[last]["size"] += 2 << 20

    result = checked(changed("prefetch__default", lose), "prefetch__default", with_stats=False)
    assert (result.segments - 1, False) == (result.segments_exact, result.is_exact)
