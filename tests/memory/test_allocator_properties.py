"""What holds after any sequence of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_provider import FakeProvider
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.memory import CachingAllocator, Settings

MIB = 1024 * 1024
CONFS = [
    "",
    "roundup_power2_divisions:4",
    "max_split_size_mb:24",
    "per_process_memory_fraction:0.7,garbage_collection_threshold:0.5",
]
SIZES = st.one_of(st.integers(1, 8192), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
STREAMS = st.integers(0, 2)


class AllocatorMachine(RuleBasedStateMachine):
    """A small device, so that memory runs out now and then."""

    @initialize(conf=st.sampled_from(CONFS))
    def start(self, conf: str) -> None:
        self.provider = FakeProvider(total=200 * MIB)
        self.allocator = CachingAllocator(self.provider, device=0, settings=Settings.parse(conf))
        self.live: dict[int, int] = {}  # address -> requested bytes
        self.highest = 0

    @rule(size=SIZES, stream=STREAMS)
    def malloc(self, size: int, stream: int) -> None:
        try:
            address = self.allocator.malloc(size, stream)
        except OutOfMemoryError:
            assert [] == [s for s in self.allocator.snapshot_segments() if s["active_size"] == 0]
            return
        assert address not in self.live
        self.live[address] = size
        self.highest = max(self.highest, sum(self.live.values()))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.live:
            address = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[address]
            self.allocator.free(address)
            with pytest.raises(UsageError):
                self.allocator.free(address)

    @rule(data=st.data(), stream=STREAMS)
    def record_stream(self, data: st.DataObject, stream: int) -> None:
        if self.live:
            self.allocator.record_stream(data.draw(st.sampled_from(sorted(self.live))), stream)

    @rule(passed=st.sets(STREAMS))
    def time_goes_by(self, passed: set[int]) -> None:
        self.provider.passed = passed

    @rule()
    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        assert [] == [s for s in self.allocator.snapshot_segments() if s["active_size"] == 0]

    @invariant()
    def segments_are_exactly_those_of_the_provider(self) -> None:
        segments = self.allocator.snapshot_segments()
        assert self.provider.segments == {s["address"]: s["total_size"] for s in segments}

    @invariant()
    def blocks_tile_their_segment_and_free_neighbours_are_merged(self) -> None:
        for segment in self.allocator.snapshot_segments():
            end = segment["address"]
            previous = ""
            for block in segment["blocks"]:
                assert end == block["address"]
                assert block["size"] % 512 == 0 < block["size"]
                assert not previous == block["state"] == "inactive"
                end, previous = end + block["size"], block["state"]
            assert end == segment["address"] + segment["total_size"]

    @invariant()
    def live_blocks_are_those_handed_out(self) -> None:
        blocks = [block for segment in self.allocator.snapshot_segments() for block in segment["blocks"]]
        allocated = [block for block in blocks if block["state"] == "active_allocated"]
        assert self.live == {block["address"]: block["requested_size"] for block in allocated}
        assert all(block["size"] >= block["requested_size"] for block in allocated)

    @invariant()
    def statistics_agree_with_the_state(self) -> None:
        stats = self.allocator.stats()
        expected: Counter[str] = Counter()
        for segment in self.allocator.snapshot_segments():
            for pool in ("all", f"{segment['segment_type']}_pool"):
                expected[f"segment.{pool}"] += 1
                expected[f"reserved_bytes.{pool}"] += segment["total_size"]
                expected[f"allocated_bytes.{pool}"] += segment["allocated_size"]
                expected[f"active_bytes.{pool}"] += segment["active_size"]
                expected[f"requested_bytes.{pool}"] += segment["requested_size"]
                for block in segment["blocks"]:
                    free = block["state"] == "inactive"
                    expected[f"allocation.{pool}"] += block["state"] == "active_allocated"
                    expected[f"active.{pool}"] += not free
                    expected[f"inactive_split.{pool}"] += free and len(segment["blocks"]) > 1
                    expected[f"inactive_split_bytes.{pool}"] += (
                        block["size"] if free and len(segment["blocks"]) > 1 else 0
                    )
        names = [
            name.removesuffix(".current") for name in stats if name.endswith(".current") and "oversize" not in name
        ]
        assert {name: expected[name] for name in names} == {name: stats[f"{name}.current"] for name in names}
        for name in names:
            assert stats[f"{name}.current"] == stats[f"{name}.allocated"] - stats[f"{name}.freed"]
            assert stats[f"{name}.current"] <= stats[f"{name}.peak"] <= stats[f"{name}.allocated"]
        assert self.highest <= stats["requested_bytes.all.peak"]
        assert len(self.live) == stats["allocation.all.current"]


AllocatorMachine.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAllocator = AllocatorMachine.TestCase
