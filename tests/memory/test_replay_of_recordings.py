"""The allocator does what PyTorch did: every address, every event, the final state and the statistics."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from recordings import in_turn, path_of

from cudatool.collect import plain_pickle
from cudatool.errors import OutOfMemoryError
from cudatool.memory import CachingAllocator, Settings
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind

ACTIONS = {
    Kind.BLOCK_ALLOC: "alloc",
    Kind.BLOCK_FREE_REQUESTED: "free_requested",
    Kind.BLOCK_FREE_COMPLETED: "free_completed",
    Kind.SEGMENT_ALLOC: "segment_alloc",
    Kind.SEGMENT_FREE: "segment_free",
    Kind.OOM: "oom",
}
Entry = tuple[str, int, int, int]  # action, address (oom: free bytes), size, stream


class ReplayProvider:
    """Hands out the recorded segments in their order, and lets events pass when the recording says so.

    A block that was freed late stands in the recording without the stream that used it. Each gets a stream of its
    own here, named by its address.
    """

    def __init__(self, entries: list[Entry], total: int) -> None:
        self.total = total
        self.to_allocate = iter([entry for entry in entries if entry[0] == "segment_alloc"])
        self.live: set[int] = set()
        self.passed: set[int] = set()
        self.device_free = 0

    def allocate(self, size: int, stream: int) -> int:
        _, address, recorded_size, recorded_stream = next(self.to_allocate)
        assert (recorded_size, recorded_stream) == (size, stream)
        self.live.add(address)
        return address

    def free(self, address: int) -> None:
        self.live.remove(address)

    def record_event(self, stream: int) -> int:
        return stream

    def event_passed(self, token: int) -> bool:
        return token in self.passed

    def synchronize_event(self, token: int) -> None:
        assert token in self.passed

    def memory_info(self) -> tuple[int, int]:
        return self.device_free, self.total


def entry_of(recorded: dict[str, Any]) -> Entry:
    address = recorded["device_free"] if recorded["action"] == "oom" else recorded["addr"]
    return recorded["action"], address, recorded["size"], recorded["stream"]


def entry_of_event(event: Event) -> Entry:
    size = event.aux0 if ACTIONS[event.kind] in ("alloc", "free_requested", "free_completed") else event.size
    return ACTIONS[event.kind], event.aux0 if event.kind is Kind.OOM else event.address, size, event.stream


def operations(entries: list[Entry]) -> Iterator[tuple[Entry | None, list[Entry]]]:
    """Group the entries by the call that made them; yield the entry that names the call (None: empty_cache) and all.

    What comes before an ``alloc`` or ``oom`` belongs to it, except that no recording has a retry that succeeded: where
    segments were freed before an ``alloc``, somebody had emptied the cache.
    """
    group: list[Entry] = []
    index = 0
    while index < len(entries):
        entry = entries[index]
        index += 1
        group.append(entry)
        if entry[0] == "free_requested":
            if group[:-1]:
                yield None, group[:-1]
            group = [entry]
            if entries[index : index + 1] == [("free_completed", *entry[1:])]:
                group.append(entries[index])
                index += 1
            yield entry, group
            group = []
        elif entry[0] in ("alloc", "oom"):
            freed = [i for i, other in enumerate(group) if other[0] == "segment_free"]
            if freed and entry[0] == "alloc":
                yield None, group[: freed[-1] + 1]
                group = group[freed[-1] + 1 :]
            yield entry, group
            group = []
    if group:
        yield None, group


def replay(snapshot: dict[str, Any], facts: dict[str, Any]) -> CachingAllocator:
    """Run a recording's requests through the allocator, comparing entry by entry, and return it."""
    entries = [entry_of(recorded) for recorded in snapshot["device_traces"][0]]
    provider = ReplayProvider(entries, facts["device_total_bytes"])
    conf = facts["conf"]
    if facts["memory_fraction"]:
        conf += f"{',' if conf else ''}per_process_memory_fraction:{facts['memory_fraction']}"
    allocator = CachingAllocator(provider, device=0, settings=Settings.parse(conf))
    produced: list[Entry] = []

    def record(event: Event) -> None:
        if event.kind in ACTIONS:
            produced.append(entry_of_event(event))

    hooks.subscribe(record)
    for call, expected in operations(entries):
        provider.passed = {entry[1] for entry in expected if entry[0] == "free_completed"}
        if call is None:
            allocator.empty_cache()
        elif call[0] == "alloc":
            allocator.malloc(call[2], call[3])
        elif call[0] == "oom":
            provider.device_free = call[1]
            with pytest.raises(OutOfMemoryError):
                allocator.malloc(call[2], call[3])
        else:
            if len(expected) == 1:
                allocator.record_stream(call[1], -call[1])
            allocator.free(call[1])
        assert expected == produced
        produced.clear()
    return allocator


RECORDINGS = (
    *("resnet_default", "gpt_default", "llm__default", "convnet__default", "convnet__frac0.03", "kvcache__round4"),
    "prefetch__default",
)


@pytest.fixture(autouse=True)
def strict_hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hooks, "strict", True)
    yield
    hooks.reset()


@in_turn(RECORDINGS)
def test_recording_is_reproduced_exactly(name: str) -> None:
    path = path_of(name)
    snapshot = plain_pickle.load(str(path))
    facts = json.loads((path.parent / f"{name}.stats.json").read_text())

    allocator = replay(snapshot, facts)

    for segment in snapshot["segments"]:
        segment.pop("frames", None)
        for block in segment["blocks"]:
            block.pop("frames", None)
    assert snapshot["segments"] == allocator.snapshot_segments()
    stats = allocator.stats()
    # An empty_cache that finds nothing to release leaves no entry, so not every call is known.
    assert facts["stats"].pop("num_sync_all_streams") >= stats.pop("num_sync_all_streams")
    assert facts["stats"] == stats
