"""Segments that grow, as PyTorch's ``expandable_segments:True``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_provider import FakeProvider

from cudatool.errors import OutOfMemoryError
from cudatool.memory import CachingAllocator, Settings
from cudatool.memory.blocks import Block, BlockPool
from cudatool.memory.statistics import AllocatorStatistics
from cudatool.trace.events import Event, Kind

KIB, MIB = 1024, 1024 * 1024
Make = Callable[..., CachingAllocator]


@pytest.fixture
def allocator(make: Make) -> CachingAllocator:
    return make("expandable_segments:True", 400 * MIB)


def runs(allocator: CachingAllocator) -> list[list[tuple[int, str]]]:
    """Return size in KiB and state of all blocks, for each run of mapped pages."""
    return [
        [(block["size"] // KIB, block["state"]) for block in segment["blocks"]]
        for segment in allocator.snapshot_segments()
    ]


def test_request_maps_as_many_pages_as_it_needs(provider: FakeProvider, allocator: CachingAllocator) -> None:
    address = allocator.malloc(50 * MIB, 0)
    assert [address, address + 20 * MIB, address + 40 * MIB] == sorted(provider.pages)
    assert [[(50 * KIB, "active_allocated"), (10 * KIB, "inactive")]] == runs(allocator)


def test_small_pool_has_pages_and_addresses_of_its_own(provider: FakeProvider, allocator: CachingAllocator) -> None:
    small, large = allocator.malloc(700 * KIB, 0), allocator.malloc(2 * MIB, 0)
    assert {small: 2 * MIB, large: 20 * MIB} == provider.pages
    assert 2 == len(provider.ranges)


def test_addresses_reserved_are_an_eighth_more_than_the_memory_there_is(
    provider: FakeProvider, allocator: CachingAllocator
) -> None:
    allocator.malloc(2 * MIB, 0)
    assert [460 * MIB] == list(provider.ranges.values())  # 450 MiB, in whole pages


def test_each_stream_has_addresses_of_its_own(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first, second = allocator.malloc(2 * MIB, 1), allocator.malloc(2 * MIB, 2)
    assert [first, second] == sorted(provider.ranges)


def test_next_request_uses_what_is_left_and_maps_the_rest(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first = allocator.malloc(15 * MIB, 0)
    second = allocator.malloc(15 * MIB, 0)
    assert first + 15 * MIB == second
    assert 2 == len(provider.pages)
    assert [[(15 * KIB, "active_allocated"), (15 * KIB, "active_allocated"), (10 * KIB, "inactive")]] == runs(allocator)


def test_free_block_that_fits_is_used_before_pages_are_mapped(
    provider: FakeProvider, allocator: CachingAllocator
) -> None:
    hole, _ = allocator.malloc(20 * MIB, 0), allocator.malloc(20 * MIB, 0)
    allocator.free(hole)
    assert hole == allocator.malloc(19 * MIB, 0)
    assert 2 == len(provider.pages)


def test_block_that_could_grow_is_left_alone_if_another_fits(allocator: CachingAllocator) -> None:
    hole, _, end = allocator.malloc(39 * MIB, 0), allocator.malloc(MIB + 512, 0), allocator.malloc(30 * MIB, 0)
    allocator.free(hole)
    allocator.free(end)  # smaller than the hole, but with the rest of the addresses behind it
    assert hole == allocator.malloc(25 * MIB, 0)


def test_sizes_that_ran_out_are_not_searched_for_ever(provider: FakeProvider) -> None:
    level = AllocatorStatistics(0).small_pool
    pool = BlockPool((0, 0), provider, is_small=True, expandable=True, level=level, settings=Settings.parse(""))
    for size in range(512, 512 * KIB, 512):
        block = Block(0, size, 1, pool)
        pool.add(block)
        pool.remove(block)
    pool.add(Block(0, 512, 1, pool))
    assert pool.take(512, 1) is not None
    assert len(pool.free[1].sizes) < 10


def test_remainder_is_split_off_however_small(allocator: CachingAllocator) -> None:
    allocator.malloc(20 * MIB - 512, 0)
    assert [2, 0] == [len(segment["blocks"]) for segment in allocator.snapshot_segments()] + [0]


def test_empty_cache_unmaps_whole_pages_of_free_blocks(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first, middle, last = (allocator.malloc(size * MIB, 0) for size in (10, 60, 10))
    allocator.free(middle)
    allocator.empty_cache()
    assert [first, first + 60 * MIB] == sorted(provider.pages)
    assert [
        [(10 * KIB, "active_allocated"), (10 * KIB, "inactive")],
        [(10 * KIB, "inactive"), (10 * KIB, "active_allocated")],
    ] == runs(allocator)
    allocator.free(first)
    allocator.free(last)
    allocator.empty_cache()
    assert ({}, {}) == (provider.pages, provider.ranges)
    assert [] == allocator.snapshot_segments()


def test_hole_of_unmapped_pages_is_filled_first(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first, middle, _ = (allocator.malloc(size * MIB, 0) for size in (20, 40, 20))
    allocator.free(middle)
    allocator.empty_cache()
    assert middle == allocator.malloc(30 * MIB, 0)
    assert {first, middle, middle + 20 * MIB, middle + 40 * MIB} == set(provider.pages)


def test_retry_unmaps_what_other_streams_cache(provider: FakeProvider, allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(300 * MIB, 1))
    address = allocator.malloc(300 * MIB, 2)
    assert [address] == list(provider.ranges)
    assert 1 == allocator.stats()["num_alloc_retries"]


def test_pages_mapped_before_memory_ran_out_stay_free(provider: FakeProvider, allocator: CachingAllocator) -> None:
    first, second = allocator.malloc(20 * MIB, 0), allocator.malloc(20 * MIB, 0)
    allocator.free(first)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(390 * MIB, 0)
    assert [[(20 * KIB, "active_allocated")]] == runs(allocator)
    assert {second: 20 * MIB} == provider.pages


def test_pages_count_as_reserved_but_not_as_segments(allocator: CachingAllocator) -> None:
    allocator.free(allocator.malloc(30 * MIB, 0))
    stats = allocator.stats()
    assert (40 * MIB, 0, 1) == (
        stats["reserved_bytes.all.current"],
        stats["segment.all.peak"],
        stats["num_device_alloc"],
    )
    allocator.empty_cache()
    stats = allocator.stats()
    assert (0, 0, 1) == (
        stats["reserved_bytes.all.current"],
        stats["inactive_split_bytes.all.peak"],
        stats["num_device_free"],
    )


def test_memory_fraction_limits_pages(make: Make) -> None:
    allocator = make("expandable_segments:True,per_process_memory_fraction:0.1", 400 * MIB)
    allocator.malloc(40 * MIB, 0)
    with pytest.raises(OutOfMemoryError, match="fraction allows 40 MiB"):
        allocator.malloc(2 * MIB, 0)


def test_large_segment_size_is_that_of_pages_and_of_segments_for_middling_requests(
    provider: FakeProvider, make: Make
) -> None:
    make("expandable_segments:True,large_segment_size_mb:12").malloc(2 * MIB, 0)
    assert [12 * MIB] == list(provider.pages.values())
    make("large_segment_size_mb:12").malloc(2 * MIB, 0)
    assert [12 * MIB] == list(provider.segments.values())


def test_mapping_and_unmapping_are_events(allocator: CachingAllocator, events: list[Event]) -> None:
    address = allocator.malloc(30 * MIB, 3)
    allocator.free(address)
    allocator.empty_cache()
    pages = [(e.kind, e.address, e.size, e.stream, e.flags) for e in events if "SEGMENT" in e.kind.name]
    assert [
        (Kind.SEGMENT_MAP, address, 40 * MIB, 3, 0),
        (Kind.SEGMENT_UNMAP, address, 40 * MIB, 3, 0),
    ] == pages


def test_segment_of_a_block_is_the_whole_range(provider: FakeProvider, allocator: CachingAllocator) -> None:
    allocator.malloc(20 * MIB, 0)
    address = allocator.malloc(20 * MIB, 0)
    ((start, size),) = provider.ranges.items()
    assert (start, size, True) == allocator.segment_of(address)
