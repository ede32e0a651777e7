"""What holds after any sequence of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from fake_provider import FakeProvider
from generated import examples
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
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:2,per_process_memory_fraction:0.8",
    "release_lock_on_cudamalloc:True",
]
POOLS = st.sampled_from([(1, 0), (0, 1)])
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
        self.allocating: set[tuple[int, int]] = set()
        self.used: list[tuple[int, int]] = []  # a pool once for each user

    @rule(size=SIZES, stream=STREAMS)
    def malloc(self, size: int, stream: int) -> None:
        try:
            address = self.allocator.malloc(size, stream)
        except OutOfMemoryError:
            self.nothing_is_cached()
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
        self.nothing_is_cached()

    def nothing_is_cached(self) -> None:
        if not self.allocating:
            kept = [s for s in self.allocator.snapshot_segments() if s["segment_pool_id"] not in self.used]
            assert [] == [s for s in kept if s["active_size"] == 0]

    @rule(pool=POOLS, stream=STREAMS)
    def begin_allocate_to_pool(self, pool: tuple[int, int], stream: int) -> None:
        if pool in self.allocating or (pool not in self.used and self.pool_bytes(pool)):
            with pytest.raises(UsageError):
                self.allocator.begin_allocate_to_pool(pool, lambda asked: asked == stream)
            return
        self.allocator.begin_allocate_to_pool(pool, lambda asked: asked == stream)
        self.allocating.add(pool)
        self.used.append(pool)

    def pool_bytes(self, pool: tuple[int, int]) -> int:
        return sum(s["total_size"] for s in self.allocator.snapshot_segments(pool=pool))

    @rule(pool=POOLS)
    def end_allocate_to_pool(self, pool: tuple[int, int]) -> None:
        if pool in self.allocating:
            self.allocator.end_allocate_to_pool(pool)
            self.allocating.remove(pool)

    @rule(pool=POOLS)
    def release_pool(self, pool: tuple[int, int]) -> None:
        if pool in self.used and pool not in self.allocating:
            self.allocator.release_pool(pool)
            self.used.remove(pool)

    @rule(pool=POOLS)
    def go_on_from_checkpoint(self, pool: tuple[int, int]) -> None:
        if pool not in self.used:
            return
        before = self.allocator.snapshot_segments(pool=pool)
        if any(block["state"] == "active_pending_free" for segment in before for block in segment["blocks"]):
            return
        blocks = [block for segment in before for block in segment["blocks"]]
        live = {block["address"] for block in blocks if block["state"] == "active_allocated"}
        state = self.allocator.checkpoint_pool(pool)
        for address in sorted(live)[::2]:
            self.allocator.free(address)
        if any(
            block["state"] == "active_pending_free"
            for segment in self.allocator.snapshot_segments(pool=pool)
            for block in segment["blocks"]
        ):
            for address in sorted(live)[::2]:
                del self.live[address]
            return
        result = self.allocator.restore_pool(pool, state)
        assert live - set(sorted(live)[::2]) == set(result.freed)
        assert live == set(result.allocated)
        after = self.allocator.snapshot_segments(pool=pool)
        assert [(b["address"], b["size"], b["state"]) for b in blocks] == [
            (b["address"], b["size"], b["state"]) for segment in after for b in segment["blocks"]
        ]
        for address in live:  # their requested sizes are not part of a checkpoint
            self.live[address] = next(b["size"] for b in blocks if b["address"] == address)

    @rule(keep=st.integers(0, 200 * MIB))
    def trim(self, keep: int) -> None:
        before = self.allocator.stats()["reserved_bytes.all.current"]
        self.allocator.trim(keep)
        after = self.allocator.stats()["reserved_bytes.all.current"]
        assert after <= before
        if after > keep:
            self.nothing_is_cached()

    @invariant()
    def segments_are_exactly_those_of_the_provider(self) -> None:
        segments = self.allocator.snapshot_segments()
        fixed = {s["address"]: s["total_size"] for s in segments if not s["is_expandable"]}
        assert self.provider.segments == fixed
        mapped = sum(s["total_size"] for s in segments if s["is_expandable"])
        assert sum(self.provider.pages.values()) == mapped
        for page, size in self.provider.pages.items():
            assert any(s["address"] <= page and page + size <= s["address"] + s["total_size"] for s in segments)

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
                counted = not segment["is_expandable"]
                expected[f"segment.{pool}"] += counted
                expected[f"reserved_bytes.{pool}"] += segment["total_size"]
                expected[f"allocated_bytes.{pool}"] += segment["allocated_size"]
                expected[f"active_bytes.{pool}"] += segment["active_size"]
                expected[f"requested_bytes.{pool}"] += segment["requested_size"]
                for block in segment["blocks"]:
                    free = block["state"] == "inactive"
                    expected[f"allocation.{pool}"] += block["state"] == "active_allocated"
                    expected[f"active.{pool}"] += not free
                    split = free and len(segment["blocks"]) > 1 and counted
                    expected[f"inactive_split.{pool}"] += split
                    expected[f"inactive_split_bytes.{pool}"] += block["size"] if split else 0
        names = [
            name.removesuffix(".current") for name in stats if name.endswith(".current") and "oversize" not in name
        ]
        assert {name: expected[name] for name in names} == {name: stats[f"{name}.current"] for name in names}
        for name in names:
            assert stats[f"{name}.current"] == stats[f"{name}.allocated"] - stats[f"{name}.freed"]
            assert stats[f"{name}.current"] <= stats[f"{name}.peak"] <= stats[f"{name}.allocated"]
        assert self.highest <= stats["requested_bytes.all.peak"]
        assert len(self.live) == stats["allocation.all.current"]


AllocatorMachine.TestCase.settings = hypothesis_settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None
)
TestAllocator = AllocatorMachine.TestCase
