"""The same random requests through PyTorch's allocator and through ours, on the same GPU, do the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("allocator_requests.py")
ACTIONS = {
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
}
RANGE = 160 << 30  # of an expandable segment, more than the card's memory


@pytest.fixture(autouse=True)
def torch_and_gpu() -> None:
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")


def run(side: str, seed: int, count: int, conf: str, fraction: float, folder: Path) -> dict[str, Any]:
    out = folder / f"{side}.json"
    command = [sys.executable, str(PROGRAM), side, str(seed), str(count), str(fraction), str(out)]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf}
    environment.pop("CUDATOOL_ALLOC_CONF", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


class Places:
    """Addresses as the number of a segment, in the order of allocation, and the offset in it."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.segments: dict[int, tuple[int, int]] = {}  # start -> number, size
        self.count = 0

    def begin(self, address: int, size: int) -> None:
        insort(self.starts, address)
        self.segments[address] = self.count, size
        self.count += 1

    def end(self, address: int) -> None:
        self.starts.remove(address)
        del self.segments[address]

    def of(self, address: int) -> tuple[int, int]:
        index = bisect_right(self.starts, address) - 1
        start = self.starts[index] if index >= 0 else 0
        number, size = self.segments.get(start, (-1, 0))
        return (number, address - start) if address < start + size else (-1, address)


def events_of(found: dict[str, Any]) -> tuple[list[tuple[Any, ...]], Places]:
    """Return what happened, without absolute addresses and handles."""
    streams = {handle: number for number, handle in enumerate(found["streams"])}
    places = Places()
    events: list[tuple[Any, ...]] = []
    for event in found["events"]:
        action = event["action"]
        if action not in ACTIONS:
            continue
        address = event.get("addr") or 0
        if action == "segment_alloc":
            places.begin(address, event["size"])
        elif action == "segment_map" and places.of(address)[0] < 0:
            places.begin(address, RANGE)
        where = (0, 0) if action == "oom" else places.of(address)
        events.append((action, where, event["size"], streams[event["stream"]]))
        if action == "segment_free":
            places.end(address)
    return [event for run in _runs(events) for event in run], places


def _runs(events: list[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Group what happens in an order that means nothing: PyTorch goes through a hash table, or by stream handles."""
    for action, run in groupby(events, key=lambda event: event[0]):
        found = list(run)
        yield sorted(found) if action in ("free_completed", "segment_free", "segment_unmap") else found


def blocks_of(found: dict[str, Any], places: Places) -> list[tuple[Any, ...]]:
    # What a free block was last asked for depends on the order in which its parts became free.
    return sorted(
        (
            places.of(block["address"]),
            block["size"],
            0 if block["state"] == "inactive" else block["requested_size"],
            block["state"],
        )
        for segment in found["segments"]
        for block in segment["blocks"]
    )


CASES = [
    ("", 0.0),
    ("", 0.008),
    ("expandable_segments:True", 0.0),
    ("expandable_segments:True", 0.008),
    ("max_split_size_mb:32", 0.01),
    ("max_split_size_mb:100,max_non_split_rounding_mb:40", 0.0),
    ("roundup_power2_divisions:4", 0.0),
    ("roundup_power2_divisions:[1:2,64:8,>:4]", 0.01),
    ("garbage_collection_threshold:0.5", 0.01),
    ("expandable_segments:True,roundup_power2_divisions:8", 0.01),
    ("release_lock_on_cudamalloc:True", 0.01),
]
SEEDS = [1, 2]

Key = tuple[str, int, str, float]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Key], dict[str, Any]]]:
    """Return what a side, a seed, settings and a fraction lead to. All are run at once, some at a time."""
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    futures: dict[Key, Future[dict[str, Any]]] = {}
    with ThreadPoolExecutor(8) as pool:
        for seed in SEEDS:
            for conf, fraction in CASES:
                for side in ("torch", "cudatool"):
                    folder = tmp_path_factory.mktemp("requests")
                    futures[side, seed, conf, fraction] = pool.submit(run, side, seed, 2000, conf, fraction, folder)
        yield lambda key: futures[key].result()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("conf", "fraction"), CASES)
def test_same_requests_have_the_same_events_blocks_and_statistics(
    result: Callable[[Key], dict[str, Any]], conf: str, fraction: float, seed: int
) -> None:
    theirs, ours = (result((side, seed, conf, fraction)) for side in ("torch", "cudatool"))
    expected, their_places = events_of(theirs)
    actual, our_places = events_of(ours)
    first = next((i for i, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1]), None)
    assert first is None, (
        f"event {first}: {expected[first]} != {actual[first]} after {actual[max(first - 3, 0) : first]}"
    )
    assert len(expected) == len(actual)
    assert blocks_of(theirs, their_places) == blocks_of(ours, our_places)
    assert theirs["stats"] == ours["stats"]
