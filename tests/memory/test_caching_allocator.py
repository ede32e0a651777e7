"""The rules of PyTorch's CUDACachingAllocator, one by one."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_provider import FakeProvider

from cudatool.errors import ConfigError, CudaError, OutOfMemoryError, UsageError
from cudatool.memory import CachingAllocator, Settings
from cudatool.memory.allocator import in_operation
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind

KIB, MIB = 1024, 1024 * 1024
Make = Callable[..., CachingAllocator]


def sizes(allocator: CachingAllocator) -> list[list[tuple[int, str]]]:
    """Return size and state of all blocks, segment by segment."""
    return [[(b["size"], b["state"]) for b in segment["blocks"]] for segment in allocator.snapshot_segments()]


def names(events: list[Event]) -> list[str]:
    return [event.kind.name for event in events]


# Sizes of blocks and segments.


@pytest.mark.parametrize(
    ("requested", "segment", "block"),
    [
        (1, 2 * MIB, 512),
        (512, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is left: too little to split off
        (13 * MIB - 512, 14 * MIB, 13 * MIB - 512),  # more than 1 MiB is left
    ],
)
def test_request_gets_rounded_block_in_segment_of_its_class(
    provider: FakeProvider, allocator: CachingAllocator, requested: int, segment: int, block: int
) -> None:
    address = allocator.malloc(requested, 0)
    assert {address: segment} == provider.segments
    assert block == sizes(allocator)[0][0][0]


@pytest.mark.parametrize(
    ("requested", "block"),
    [(1200, 1536), (2048, 2048), (2049, 2560), (2560, 2560), (3 * MIB + 1, 3 * MIB + MIB // 2), (700, 1024)],
)
def test_roundup_divides_the_way_between_powers_of_two(make: Make, requested: int, block: int) -> None:
    allocator = make("roundup_power2_divisions:[1:4,>:4]")
    allocator.malloc(requested, 0)
    assert block == allocator.stats()["allocated_bytes.all.current"]


@pytest.mark.parametrize(
    ("requested", "block"), [(3 * MIB + 512, 3 * MIB + 512), (5 * MIB + 512, 6 * MIB), (9 * MIB + 512, 10 * MIB)]
)
def test_roundup_is_looked_up_by_size_class(make: Make, requested: int, block: int) -> None:
    allocator = make("roundup_power2_divisions:[2:1,4:2,>:4]")
    allocator.malloc(requested, 0)
    assert block == allocator.stats()["allocated_bytes.all.current"]


def test_zero_bytes_have_address_zero_and_can_be_freed(allocator: CachingAllocator) -> None:
    assert 0 == allocator.malloc(0, 0)
    allocator.free(0)
    assert 0 == allocator.stats()["allocation.all.allocated"]


def test_negative_size_is_refused(allocator: CachingAllocator) -> None:
    with pytest.raises(UsageError, match="-1 bytes"):
        allocator.malloc(-1, 0)


# Reuse.


def test_smallest_block_that_fits_is_taken_and_the_lowest_among_equals(allocator: CachingAllocator) -> None:
    wide, _, low, _, high, _ = (allocator.malloc(size * KIB, 0) for size in (8, 1, 4, 1, 4, 1))
    for address in (high, wide, low):
        allocator.free(address)
    assert [low, high, wide] == [allocator.malloc(4 * KIB, 0) for _ in range(3)]


def test_free_block_of_another_stream_is_not_taken(allocator: CachingAllocator) -> None:
    first = allocator.malloc(100, 1)
    allocator.free(first)
    assert first != allocator.malloc(100, 2)
    assert first == allocator.malloc(100, 1)


def test_neighbours_are_merged_in_any_order_of_frees(provider: FakeProvider, allocator: CachingAllocator) -> None:
    addresses = [allocator.malloc(512, 0) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.free(addresses[index])
    assert [[(2 * MIB, "inactive")]] == sizes(allocator)


def test_small_and_large_blocks_do_not_share_segments(provider: FakeProvider, allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(MIB + 1, 0))
    allocator.malloc(MIB, 0)
    assert [20 * MIB, 2 * MIB] == list(provider.segments.values())


def test_block_of_max_split_size_is_not_split_for_a_small_request(provider: FakeProvider, make: Make) -> None:
    allocator = make("max_split_size_mb:32")
    allocator.free(allocator.malloc(32 * MIB, 0))
    allocator.malloc(12 * MIB, 0)
    assert [32 * MIB, 12 * MIB] == list(provider.segments.values())


@pytest.mark.parametrize(("wanted", "segments"), [(41 * MIB - 512, 2), (41 * MIB, 2), (41 * MIB + 512, 1)])
def test_oversize_block_serves_requests_within_the_rounding(
    provider: FakeProvider, make: Make, wanted: int, segments: int
) -> None:
    allocator = make("max_split_size_mb:32,max_non_split_rounding_mb:21")
    allocator.free(allocator.malloc(62 * MIB, 0))
    allocator.malloc(wanted, 0)
    assert segments == len(provider.segments)


# Other streams.


def test_block_used_by_another_stream_is_reused_only_after_its_event(
    provider: FakeProvider, allocator: CachingAllocator
) -> None:
    first = allocator.malloc(2 * MIB, 0)
    allocator.record_stream(first, 7)
    allocator.free(first)
    assert "active_pending_free" == allocator.snapshot_segments()[0]["blocks"][0]["state"]
    assert first != allocator.malloc(2 * MIB, 0)
    provider.passed.add(7)
    assert first == allocator.malloc(2 * MIB, 0)


def test_block_waits_for_every_stream_that_used_it(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first = allocator.malloc(2 * MIB, 0)
    for stream in (7, 8, 7):
        allocator.record_stream(first, stream)
    allocator.free(first)
    assert [7, 8] == list(provider.tokens.values())
    provider.passed.add(7)
    assert first != allocator.malloc(2 * MIB, 0)
    provider.passed.add(8)
    assert first == allocator.malloc(2 * MIB, 0)


def test_streams_do_not_wait_for_each_other(provider: FakeProvider, allocator: CachingAllocator) -> None:
    slow, fast = allocator.malloc(512, 0), allocator.malloc(512, 0)
    for address, stream in ((slow, 7), (fast, 8)):
        allocator.record_stream(address, stream)
        allocator.free(address)
    provider.passed.add(8)
    assert fast == allocator.malloc(512, 0)


def test_use_on_the_own_stream_is_not_recorded(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first = allocator.malloc(100, 3)
    allocator.record_stream(first, 3)
    allocator.free(first)
    assert first == allocator.malloc(100, 3)
    assert {} == provider.tokens


def test_stream_use_ends_with_the_allocation(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first = allocator.malloc(100, 0)
    allocator.record_stream(first, 7)
    allocator.free(first)
    provider.passed.add(7)
    assert first == allocator.malloc(100, 0)
    provider.passed.clear()
    allocator.free(first)
    assert first == allocator.malloc(100, 0)


def test_active_bytes_count_what_is_pending(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first = allocator.malloc(MIB, 0)
    allocator.record_stream(first, 7)
    allocator.free(first)
    allocator.malloc(512 * KIB, 0)
    stats = allocator.stats()
    assert (512 * KIB, MIB) == (stats["allocated_bytes.all.current"], stats["allocated_bytes.all.peak"])
    assert (1536 * KIB, 1536 * KIB) == (stats["active_bytes.all.current"], stats["active_bytes.all.peak"])
    assert (1, 1) == (stats["allocation.all.freed"], stats["allocation.all.peak"])
    assert (0, 2) == (stats["active.all.freed"], stats["active.all.peak"])


# Misuse.


@pytest.mark.parametrize("call", ["free", "record_stream"])
def test_address_that_is_not_in_use_is_refused(allocator: CachingAllocator, call: str) -> None:
    freed = allocator.malloc(512, 0)
    allocator.free(freed)
    inside = allocator.malloc(4 * KIB, 0) + 512
    for address in (freed + 8 * KIB, inside, 12345):
        with pytest.raises(UsageError, match=f"0x{address:x} is not a block in use"):
            allocator.free(address) if call == "free" else allocator.record_stream(address, 1)


def test_double_free_is_refused_also_while_pending(allocator: CachingAllocator) -> None:
    address = allocator.malloc(512, 0)
    allocator.record_stream(address, 1)
    allocator.free(address)
    with pytest.raises(UsageError, match="freed before"):
        allocator.free(address)


def test_setting_that_is_not_supported_is_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="backend:cudaMallocAsync is not supported"):
        make("backend:cudaMallocAsync")


# Giving memory back, and running out of it.


def test_empty_cache_releases_whole_segments_large_ones_first(
    provider: FakeProvider, allocator: CachingAllocator, events: list[Event]
) -> None:
    held = allocator.malloc(100, 0)
    small, large, larger = (allocator.malloc(size, 1) for size in (100, 10 * MIB, 12 * MIB))
    for address in (small, larger, large):
        allocator.free(address)
    events.clear()
    allocator.empty_cache()
    assert [held] == list(provider.segments)
    assert [large, larger, small] == [event.address for event in events]
    assert 4 * MIB + 22 * MIB - 2 * MIB == allocator.stats()["reserved_bytes.all.freed"]


def test_empty_cache_waits_for_pending_blocks(provider: FakeProvider, allocator: CachingAllocator) -> None:
    address = allocator.malloc(100, 0)
    allocator.record_stream(address, 7)
    allocator.free(address)
    allocator.empty_cache()
    assert ([7], {}) == (provider.synchronized, provider.segments)


def test_what_an_interrupted_wait_was_for_is_freed_later(
    provider: FakeProvider, allocator: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (100, 10 * MIB):
        address = allocator.malloc(size, 0)
        allocator.record_stream(address, 7)
        allocator.free(address)
    with monkeypatch.context() as patched:
        patched.setattr(provider, "synchronize_event", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            allocator.empty_cache()
    assert 2 == len(provider.segments)
    allocator.empty_cache()
    assert {} == provider.segments
    assert 0 == allocator.stats()["active_bytes.all.current"]


def test_block_whose_events_ctrl_c_kept_from_being_recorded_is_freed_later(
    provider: FakeProvider, allocator: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = allocator.malloc(2 * MIB, 0)
    for stream in (7, 8):
        allocator.record_stream(address, stream)
    with monkeypatch.context() as patched:
        patched.setattr(provider, "record_event", Mock(side_effect=[1, KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            allocator.free(address)
    assert address != allocator.malloc(2 * MIB, 0)  # but the events are recorded now
    provider.passed = {7}
    assert address != allocator.malloc(2 * MIB, 0)
    provider.passed = {7, 8}
    assert address == allocator.malloc(2 * MIB, 0)


def test_cached_segments_are_released_for_a_request_that_does_not_fit_otherwise(
    provider: FakeProvider, make: Make
) -> None:
    allocator = make(total=30 * MIB)
    allocator.free(allocator.malloc(20 * MIB, 0))
    allocator.malloc(24 * MIB, 0)
    assert [24 * MIB] == list(provider.segments.values())
    assert 1 == allocator.stats()["num_alloc_retries"]


def test_oversize_blocks_are_released_first_and_only_as_many_as_needed(provider: FakeProvider, make: Make) -> None:
    allocator = make("max_split_size_mb:20", total=100 * MIB)
    addresses = [allocator.malloc(size * MIB, 0) for size in (18, 22, 24, 36)]
    for address in addresses:
        allocator.free(address)
    allocator.malloc(58 * MIB, 0)
    assert [18 * MIB, 22 * MIB, 58 * MIB] == list(provider.segments.values())
    assert 0 == allocator.stats()["num_alloc_retries"]


def test_no_more_oversize_blocks_are_released_once_there_is_enough(provider: FakeProvider, make: Make) -> None:
    allocator = make("max_split_size_mb:20", total=72 * MIB)
    for address in [allocator.malloc(size * MIB, 0) for size in (22, 24, 26)]:
        allocator.free(address)
    allocator.malloc(50 * MIB, 0)
    assert [22 * MIB, 50 * MIB] == list(provider.segments.values())


def test_blocks_that_may_be_split_are_not_released_with_the_oversize_ones(make: Make) -> None:
    allocator = make("max_split_size_mb:20", total=60 * MIB)
    for address in [allocator.malloc(size * MIB, 0) for size in (18, 22)]:
        allocator.free(address)
    allocator.malloc(38 * MIB, 0)
    assert 1 == allocator.stats()["num_alloc_retries"]  # so that the 18 MiB went with the rest of the cache


def test_smallest_sufficient_oversize_block_is_released(provider: FakeProvider, make: Make) -> None:
    allocator = make("max_split_size_mb:20", total=150 * MIB)
    addresses = [allocator.malloc(size * MIB, 0) for size in (80, 60)]
    for address in addresses:
        allocator.free(address)
    allocator.malloc(38 * MIB, 0)
    assert [80 * MIB, 38 * MIB] == list(provider.segments.values())


def test_out_of_memory_has_the_numbers_and_leaves_the_allocator_usable(provider: FakeProvider, make: Make) -> None:
    allocator = make(total=64 * MIB)
    held = allocator.malloc(32 * MIB, 0)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(33 * MIB, 0)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (34 * MIB, 64 * MIB, 64 * MIB, 32 * MIB) == (error.wanted, error.total, error.allowed, error.free)
    assert (32 * MIB, 32 * MIB) == (error.allocated, error.reserved)
    assert "tried to allocate 34 MiB on device 0, which has 64 MiB, of which 32 MiB are free" in str(error)
    assert "CUDA_ERROR_OUT_OF_MEMORY" == error.name
    allocator.free(held)
    allocator.malloc(33 * MIB, 0)
    assert (1, 2) == (allocator.stats()["num_ooms"], allocator.stats()["num_alloc_retries"])


def test_out_of_memory_keeps_nothing_of_its_caller_alive(make: Make) -> None:
    class Array:
        pass

    def program() -> None:
        array = Array()
        alive.append(weakref.ref(array))
        allocator.malloc(2 * MIB, 0)

    alive: list[weakref.ref[Array]] = []
    allocator = make(total=MIB)
    gc.disable()
    try:
        with contextlib.suppress(OutOfMemoryError):
            program()
        assert None is alive[0]()
    finally:
        gc.enable()


def test_out_of_memory_names_the_processes_on_the_device(provider: FakeProvider) -> None:
    provider.total = 20 * MIB
    used = [(4711, 3 * MIB), (os.getpid(), 25 * MIB)]
    allocator = CachingAllocator(provider, device=0, settings=Settings(), processes=lambda: used)
    allocator.malloc(5 * MIB, 0)
    with pytest.raises(OutOfMemoryError) as error:
        allocator.malloc(30 * MIB, 0)
    assert "Process 4711 uses 3 MiB. This process uses 25 MiB, 5 MiB of it outside this allocator." in str(error.value)


def test_out_of_memory_names_the_places_that_hold_most(make: Make, events: list[Event]) -> None:
    allocator = make(total=20 * MIB)
    allocator.malloc(12 * MIB, 0)
    with pytest.raises(
        OutOfMemoryError, match=r"Most is held by test_caching_allocator\.py:\d+ \(test_out_of.*\): 12 MiB"
    ):
        allocator.malloc(12 * MIB, 0)


def test_out_of_memory_in_a_notebook_names_the_cell(
    make: Make, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name={__file__: ("Cell", "In[7]")}.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    allocator = make(total=20 * MIB)
    allocator.malloc(12 * MIB, 0)
    with pytest.raises(OutOfMemoryError, match=r"Most is held by In\[7\]:\d+ \(test_out_of_memory_in_a_notebook"):
        allocator.malloc(12 * MIB, 0)


def test_out_of_memory_says_when_memory_lies_in_pieces(make: Make) -> None:
    allocator = make(total=20 * MIB)
    addresses = [allocator.malloc(5 * MIB, 0) for _ in range(4)]
    allocator.free(addresses[0])
    allocator.free(addresses[2])
    with pytest.raises(
        OutOfMemoryError, match=r"10 MiB reserved but unallocated\. .*Unallocated memory lies in pieces"
    ):
        allocator.malloc(10 * MIB, 0)


def test_memory_fraction_limits_what_is_reserved(make: Make) -> None:
    allocator = make("per_process_memory_fraction:0.5", total=64 * MIB)
    allocator.malloc(32 * MIB, 0)
    with pytest.raises(OutOfMemoryError, match="The memory fraction allows 32 MiB"):
        allocator.malloc(1, 0)


def test_memory_fraction_outside_its_range_is_refused(allocator: CachingAllocator) -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        allocator.set_memory_fraction(1.5)


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        (0.52, [12, 14, 16]),  # 104 MiB are reserved: nothing to do
        (0.45, [16]),  # what has been idle for at least the mean time
        (0.38, []),  # not enough: a second round
    ],
)
def test_garbage_collection_releases_the_longest_idle_until_the_threshold_is_met(
    provider: FakeProvider, make: Make, threshold: float, kept: list[int]
) -> None:
    allocator = make(f"per_process_memory_fraction:0.5,garbage_collection_threshold:{threshold}", total=400 * MIB)
    first, second, third = (allocator.malloc(size * MIB, 0) for size in (12, 14, 16))
    allocator.free(first)
    allocator.malloc(30 * MIB, 0)
    allocator.free(second)
    allocator.malloc(32 * MIB, 0)
    allocator.free(third)
    allocator.malloc(60 * MIB, 0)
    assert [size * MIB for size in (*kept, 30, 32, 60)] == list(provider.segments.values())
    assert 0 == allocator.stats()["num_alloc_retries"]


def test_without_a_fraction_no_garbage_is_collected(provider: FakeProvider, make: Make) -> None:
    allocator = make("garbage_collection_threshold:0.01", total=100 * MIB)
    allocator.free(allocator.malloc(24 * MIB, 0))
    allocator.malloc(30 * MIB, 0)
    assert [24 * MIB, 30 * MIB] == list(provider.segments.values())


def test_free_memory_callback_runs_before_a_segment_is_allocated(
    provider: FakeProvider, allocator: CachingAllocator
) -> None:
    held = allocator.malloc(30 * MIB, 0)

    def release() -> bool:
        allocator.free(held)
        return True

    allocator.add_free_memory_callback(release)
    assert held == allocator.malloc(30 * MIB, 0)
    assert 1 == len(provider.segments)


def test_operation_is_traced_to_its_end_after_a_callback(allocator: CachingAllocator, events: list[Event]) -> None:
    held = allocator.malloc(100, 0)

    def release() -> bool:
        allocator.free(held)
        return True

    allocator.add_free_memory_callback(release)
    events.clear()
    allocator.malloc(30 * MIB, 0)
    assert ["BLOCK_FREE_REQUESTED", "BLOCK_FREE_COMPLETED", "SEGMENT_ALLOC", "BLOCK_ALLOC"] == names(events)
    assert 0 not in [event.stack for event in events if event.kind is not Kind.BLOCK_FREE_COMPLETED]


def test_out_of_memory_observer_is_called_without_the_lock(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    allocator = make("per_process_memory_fraction:0.5", total=64 * MIB)
    seen: list[tuple[int, ...]] = []

    def observe(*facts: int) -> None:
        other = threading.Thread(target=allocator.empty_cache)
        other.start()
        other.join(timeout=10)
        assert not other.is_alive()
        seen.append(facts)
        raise RuntimeError("observers may fail")

    allocator.add_out_of_memory_observer(observe)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(40 * MIB, 0)
    assert [(0, 40 * MIB, 32 * MIB, 64 * MIB)] == seen
    assert "observers may fail" in caplog.text


def test_other_errors_of_the_provider_pass_through(provider: FakeProvider, allocator: CachingAllocator) -> None:
    def broken(size: int, stream: int) -> int:
        raise CudaError("the context is gone", "CUDA_ERROR_ILLEGAL_ADDRESS")

    allocate, provider.allocate = provider.allocate, broken  # type: ignore[method-assign]
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        allocator.malloc(100, 0)
    provider.allocate = allocate  # type: ignore[method-assign]
    allocator.malloc(100, 0)


# Statistics.


def test_reset_peak_starts_from_the_present_level(allocator: CachingAllocator) -> None:
    first = allocator.malloc(MIB, 0)
    second = allocator.malloc(MIB, 0)
    allocator.record_stream(second, 7)
    allocator.free(first)
    allocator.free(second)
    allocator.reset_peak_stats()
    stats = allocator.stats()
    assert (0, MIB, 2 * MIB) == tuple(stats[f"{n}_bytes.all.peak"] for n in ("allocated", "active", "reserved"))


def test_reset_accumulated_starts_totals_at_zero(allocator: CachingAllocator) -> None:
    first = allocator.malloc(MIB, 0)
    allocator.malloc(MIB, 0)
    allocator.reset_accumulated_stats()
    allocator.free(first)
    stats = allocator.stats()
    assert (1, 0, 1) == tuple(stats[f"active.all.{n}"] for n in ("current", "allocated", "freed"))
    assert (0, 0) == (stats["num_device_alloc"], stats["segment.all.freed"])


def test_oversize_counters_need_a_limit(make: Make) -> None:
    for conf, expected in (("", 0), ("max_split_size_mb:32", 1)):
        allocator = make(conf)
        address = allocator.malloc(32 * MIB, 0)
        stats = allocator.stats()
        assert expected == stats["oversize_allocations.current"] == stats["oversize_segments.current"]
        allocator.free(address)
        allocator.empty_cache()
        stats = allocator.stats()
        assert expected == stats["oversize_allocations.freed"] == stats["oversize_segments.freed"]


def test_waiting_for_all_streams_is_counted(make: Make) -> None:
    allocator = make(total=MIB)
    allocator.empty_cache()
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(100, 0)
    assert 2 == allocator.stats()["num_sync_all_streams"]


# Events.


def test_operation_emits_its_events_in_order(allocator: CachingAllocator, events: list[Event]) -> None:
    address = allocator.malloc(100, 5)
    allocator.record_stream(address, 6)
    allocator.free(address)
    allocator.empty_cache()
    assert [
        "SEGMENT_ALLOC",
        "BLOCK_ALLOC",
        "BLOCK_RECORD_STREAM",
        "BLOCK_FREE_REQUESTED",
        "BLOCK_FREE_COMPLETED",
        "SEGMENT_FREE",
    ] == names(events)
    segment, block, use = events[:3]
    assert (address, 2 * MIB, 1, 5, 0) == (segment.address, segment.size, segment.flags, segment.stream, segment.device)
    assert (address, 512, 100, 5) == (block.address, block.size, block.aux0, block.stream)
    assert (address, 512, 6) == (use.address, use.size, use.stream)


def test_events_name_streams_by_id(provider: FakeProvider, events: list[Event]) -> None:
    allocator = CachingAllocator(provider, device=3, settings=Settings(), stream_id=lambda stream: stream + 100)
    allocator.malloc(100, 5)
    assert [(105, 3), (105, 3)] == [(event.stream, event.device) for event in events]


def test_out_of_memory_is_an_event_with_the_free_bytes(make: Make, events: list[Event]) -> None:
    allocator = make(total=MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(100, 4)
    (event,) = events
    assert (Kind.OOM, 512, MIB, 4) == (event.kind, event.size, event.aux0, event.stream)


def test_no_event_is_built_without_subscribers(allocator: CachingAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    def emit(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("emitted without a subscriber")

    monkeypatch.setattr(hooks, "emit", emit)
    allocator.free(allocator.malloc(100, 0))
    allocator.empty_cache()


def test_free_inside_an_operation_is_done_at_its_end(provider: FakeProvider, allocator: CachingAllocator) -> None:
    held = allocator.malloc(100, 0)
    allocate = provider.allocate

    def allocate_and_finalize(size: int, stream: int) -> int:
        allocator.free(held)  # as a finalizer would, run by the garbage collector at any point
        assert 1 == allocator.statistics.all.allocation.current
        return allocate(size, stream)

    provider.allocate = allocate_and_finalize  # type: ignore[method-assign]
    allocator.malloc(10 * MIB, 0)
    assert 1 == allocator.stats()["allocation.all.current"]
    assert 1 == allocator.stats()["allocation.all.freed"]


def test_free_by_a_subscriber_neither_blocks_nor_is_lost(allocator: CachingAllocator, events: list[Event]) -> None:
    held = allocator.malloc(100, 0)

    def subscriber(event: Event) -> None:
        if event.kind is Kind.BLOCK_ALLOC:
            allocator.free(held)
            hooks.unsubscribe(subscriber)

    hooks.subscribe(subscriber)
    events.clear()
    allocator.malloc(100, 0)
    assert ["BLOCK_ALLOC", "BLOCK_FREE_REQUESTED", "BLOCK_FREE_COMPLETED"] == names(events)
    assert held == events[-1].address


def test_malloc_inside_an_operation_is_refused(provider: FakeProvider, allocator: CachingAllocator) -> None:
    provider.allocate = allocator.malloc  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="within one of its own operations"):
        allocator.malloc(100, 0)


# Snapshots.


def test_snapshot_has_stacks_of_segments_and_of_blocks_in_use(allocator: CachingAllocator, events: list[Event]) -> None:
    allocator.malloc(100, 0)
    (segment,) = allocator.snapshot_segments(frames=lambda stack: [{"filename": "a.py", "line": stack, "name": "f"}])
    assert [events[0].stack] == [frame["line"] for frame in segment["frames"]]
    assert [[events[1].stack], []] == [[frame["line"] for frame in block["frames"]] for block in segment["blocks"]]


# Threads.


def elsewhere(work: Callable[[], object]) -> None:
    """Call `work` in another thread, which must not have to wait for this one."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_thread_that_the_device_waits_for_can_free_meanwhile() -> None:
    class Provider(FakeProvider):
        def free(self, address: int) -> None:  # waits for the device, on one of whose threads garbage is collected
            elsewhere(lambda: allocator.free(block))
            super().free(address)

    allocator = CachingAllocator(Provider(), device=0, settings=Settings())
    block, other = allocator.malloc(512, 0), allocator.malloc(20 * MIB, 0)
    allocator.free(other)
    allocator.empty_cache()
    assert allocator.stats()["allocated_bytes.all.current"] == 0
    assert allocator.malloc(512, 0) == block


def test_thread_that_the_device_waits_for_can_release_a_pool_meanwhile() -> None:
    class Provider(FakeProvider):
        def free(self, address: int) -> None:
            if released:
                elsewhere(lambda: allocator.release_pool(released.pop(), at_once=True))
            super().free(address)

    allocator = CachingAllocator(Provider(), device=0, settings=Settings())
    released = [(0, 1)]
    allocator.begin_allocate_to_pool((0, 1), lambda stream: True)
    allocator.free(allocator.malloc(512, 0))
    allocator.end_allocate_to_pool((0, 1))
    allocator.free(allocator.malloc(20 * MIB, 0))
    allocator.empty_cache()
    assert not released
    assert sizes(allocator) == []


def test_free_of_what_is_not_in_use_is_told_to_the_caller_though_another_thread_is_at_work() -> None:
    told: list[str] = []

    class Provider(FakeProvider):
        def free(self, address: int) -> None:
            elsewhere(free_nothing)
            super().free(address)

    def free_nothing() -> None:
        with pytest.raises(UsageError, match="not a block in use") as caught:
            allocator.free(4096)
        told.append(str(caught.value))

    allocator = CachingAllocator(Provider(), device=0, settings=Settings())
    allocator.free(allocator.malloc(512, 0))
    allocator.empty_cache()
    assert len(told) == 1


def test_threads_keep_their_own_blocks(allocator: CachingAllocator) -> None:
    failures: list[BaseException] = []

    def work(stream: int) -> None:
        try:
            for size in range(1, 400):
                held = [allocator.malloc(size * 100, stream) for _ in range(3)]
                assert 3 == len(set(held))
                for address in held:
                    allocator.free(address)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(stream % 2,)) for stream in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == failures
    stats = allocator.stats()
    assert (0, 4 * 399 * 3) == (stats["allocation.all.current"], stats["allocation.all.allocated"])
    assert 0 == stats["inactive_split.all.current"]


def test_allocator_holds_no_reference_to_what_is_gone(provider: FakeProvider, allocator: CachingAllocator) -> None:
    for size in (100, MIB, 3 * MIB, 30 * MIB):
        allocator.free(allocator.malloc(size, 0))
    allocator.empty_cache()
    gc.collect()
    assert ({}, []) == (provider.segments, allocator.snapshot_segments())


def test_an_allocator_is_in_operation_while_it_asks_for_memory_on_the_calling_thread_alone(
    provider: FakeProvider, allocator: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a signal handler can tell, also where the allocator is compiled and its frames are not seen."""
    seen: list[bool] = []
    allocate = provider.allocate

    def asked(size: int, stream: int) -> int:
        other = threading.Thread(target=lambda: seen.append(in_operation()))
        other.start()
        other.join()
        seen.append(in_operation())
        return allocate(size, stream)

    monkeypatch.setattr(provider, "allocate", asked)
    assert not in_operation()
    allocator.malloc(512, 0)
    assert [False, True] == seen
    assert not in_operation()
