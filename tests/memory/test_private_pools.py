"""Memory that is kept apart: pools of CUDA graphs and of programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_provider import FakeProvider

from cudatool.errors import CudaError, OutOfMemoryError, UsageError
from cudatool.memory import CachingAllocator
from cudatool.trace.events import Event, Kind, unpack_pool

KIB, MIB = 1024, 1024 * 1024
Make = Callable[..., CachingAllocator]
POOL, OTHER = (1, 0), (0, 2)


def everywhere(stream: int) -> bool:
    return True


def in_pool(allocator: CachingAllocator, size: int, stream: int = 0) -> int:
    """Allocate from POOL, which exists."""
    allocator.begin_allocate_to_pool(POOL, everywhere)
    try:
        return allocator.malloc(size, stream)
    finally:
        allocator.end_allocate_to_pool(POOL)
        allocator.release_pool(POOL)


@pytest.fixture
def with_pool(allocator: CachingAllocator) -> CachingAllocator:
    allocator.create_or_incref_pool(POOL)
    return allocator


def test_only_streams_that_the_redirection_names_are_served_from_the_pool(allocator: CachingAllocator) -> None:
    allocator.begin_allocate_to_pool(POOL, lambda stream: stream == 7)
    private, public = allocator.malloc(2 * MIB, 7), allocator.malloc(2 * MIB, 8)
    allocator.end_allocate_to_pool(POOL)
    after = allocator.malloc(2 * MIB, 7)
    pools = {s["address"]: s["segment_pool_id"] for s in allocator.snapshot_segments()}
    assert {private: POOL, public: (0, 0), after: (0, 0)} == pools


def test_last_redirection_wins(allocator: CachingAllocator) -> None:
    allocator.begin_allocate_to_pool(POOL, everywhere)
    allocator.begin_allocate_to_pool(OTHER, everywhere)
    allocator.malloc(2 * MIB, 0)
    assert [OTHER] == [s["segment_pool_id"] for s in allocator.snapshot_segments()]


def test_free_blocks_of_a_pool_serve_only_that_pool(with_pool: CachingAllocator) -> None:
    address = in_pool(with_pool, 2 * MIB)
    with_pool.free(address)
    assert address != with_pool.malloc(2 * MIB, 0)
    assert address == in_pool(with_pool, 2 * MIB)


def test_pool_in_use_keeps_its_memory_when_the_cache_is_emptied(
    provider: FakeProvider, with_pool: CachingAllocator
) -> None:
    address = in_pool(with_pool, 2 * MIB)
    with_pool.free(address)
    with_pool.empty_cache()
    with_pool.empty_cache(POOL)
    assert [address] == list(provider.segments)
    with_pool.release_pool(POOL)
    with_pool.empty_cache()
    assert {} == provider.segments


def test_pool_without_users_waits_for_its_last_block(provider: FakeProvider, with_pool: CachingAllocator) -> None:
    address = in_pool(with_pool, 2 * MIB)
    with_pool.release_pool(POOL)
    with_pool.empty_cache(POOL)
    assert [address] == list(provider.segments)
    with pytest.raises(UsageError, match="is being given back"):
        with_pool.create_or_incref_pool(POOL)
    with_pool.free(address)
    with_pool.empty_cache(POOL)
    assert {} == provider.segments
    with pytest.raises(UsageError, match="there is no private pool"):
        with_pool.pool_use_count(POOL)


def test_emptying_a_pool_that_never_had_memory_counts_a_wait_as_pytorchs_does(allocator: CachingAllocator) -> None:
    allocator.create_or_incref_pool(POOL)
    allocator.release_pool(POOL)
    before = allocator.stats()["num_sync_all_streams"]
    allocator.empty_cache(POOL)
    allocator.empty_cache(POOL)  # it is forgotten by now
    assert before + 1 == allocator.stats()["num_sync_all_streams"]


def test_id_of_an_unused_pool_without_memory_can_be_used_again(allocator: CachingAllocator) -> None:
    for _ in range(2):
        allocator.create_or_incref_pool(POOL)
        assert 1 == allocator.pool_use_count(POOL)
        allocator.release_pool(POOL)


def test_retry_releases_unused_pools(make: Make) -> None:
    allocator = make("", 40 * MIB)
    allocator.create_or_incref_pool(POOL)
    allocator.free(in_pool(allocator, 30 * MIB))
    with pytest.raises(OutOfMemoryError, match="30 MiB cached in other memory pools"):
        allocator.malloc(30 * MIB, 0)
    allocator.release_pool(POOL)
    allocator.malloc(30 * MIB, 0)


def test_cache_is_not_emptied_while_requests_are_redirected(make: Make) -> None:
    allocator = make("", 40 * MIB)
    allocator.free(allocator.malloc(30 * MIB, 0))
    allocator.begin_allocate_to_pool(POOL, everywhere)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(30 * MIB, 0)
    assert 0 == allocator.stats()["num_alloc_retries"]
    allocator.end_allocate_to_pool(POOL)
    allocator.malloc(30 * MIB, 5)


def test_events_wait_until_requests_are_not_redirected_any_more(
    provider: FakeProvider, allocator: CachingAllocator
) -> None:
    address = allocator.malloc(2 * MIB, 0)
    allocator.record_stream(address, 1)
    allocator.begin_allocate_to_pool(POOL, everywhere)
    allocator.free(address)
    allocator.malloc(512, 0)
    assert {} == provider.tokens
    allocator.end_allocate_to_pool(POOL)
    provider.passed = {1}
    assert address == allocator.malloc(2 * MIB, 0)


def test_destroyed_stream_keeps_only_the_block_it_used_from_being_reused_after_a_capture(
    provider: FakeProvider, allocator: CachingAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [allocator.malloc(2 * MIB, 0) for _ in range(3)]
    for stream, address in enumerate(addresses, 1):
        allocator.record_stream(address, stream)
    allocator.begin_allocate_to_pool(POOL, everywhere)
    for address in addresses:
        allocator.free(address)
    allocator.end_allocate_to_pool(POOL)
    record = provider.record_event

    def record_unless_destroyed(stream: int) -> int:
        if stream == 2:
            raise CudaError("cuEventRecord failed", "CUDA_ERROR_INVALID_HANDLE")
        return record(stream)

    monkeypatch.setattr(provider, "record_event", record_unless_destroyed)
    with pytest.raises(CudaError):
        allocator.malloc(2 * MIB, 0)
    provider.passed = {1, 2, 3}
    assert addresses[1] not in {allocator.malloc(2 * MIB, 0) for _ in range(9)} > {addresses[0], addresses[2]}


def test_uses_while_redirected_are_over_when_that_ends(provider: FakeProvider, allocator: CachingAllocator) -> None:
    address = allocator.malloc(2 * MIB, 0)
    allocator.begin_allocate_to_pool(POOL, everywhere)
    allocator.record_stream(address, 1)
    allocator.free(address)
    allocator.end_allocate_to_pool(POOL)
    assert address == allocator.malloc(2 * MIB, 0)
    assert {} == provider.tokens


@pytest.mark.parametrize("seen", [(3,), (3, 4)], ids=["one", "both"])
def test_block_is_had_again_during_a_capture_when_all_its_uses_come_before(
    provider: FakeProvider, make: Make, seen: tuple[int, ...]
) -> None:
    allocator = make("graph_capture_record_stream_reuse:True")
    allocator.begin_allocate_to_pool(POOL, everywhere)
    address = allocator.malloc(2 * MIB, 0)
    for stream in (1, 2):
        allocator.record_stream(address, stream)
    provider.tails = {0: (9, frozenset([1])), 1: (9, frozenset([3])), 2: (9, frozenset([4]))}
    provider.edges = {2: [1], 3: [2], 4: [2], 5: [*seen, 1]}
    allocator.free(address)
    assert address != allocator.malloc(2 * MIB, 0)
    provider.tails[0] = 9, frozenset([5])
    assert (address == allocator.malloc(2 * MIB, 0)) == (seen == (3, 4))
    allocator.end_allocate_to_pool(POOL)
    assert {} == provider.tokens


def test_block_that_a_stream_outside_of_the_capture_used_waits_for_its_end(provider: FakeProvider, make: Make) -> None:
    allocator = make("graph_capture_record_stream_reuse:True")
    allocator.begin_allocate_to_pool(POOL, everywhere)
    address = allocator.malloc(2 * MIB, 0)
    allocator.record_stream(address, 1)
    provider.tails = {0: (9, frozenset([1]))}
    allocator.free(address)
    assert address != allocator.malloc(2 * MIB, 0)
    allocator.end_allocate_to_pool(POOL)
    allocator.malloc(512, 0)
    allocator.begin_allocate_to_pool(POOL, everywhere)
    assert address == allocator.malloc(2 * MIB, 0)


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_pool_that_loses_its_last_user_during_a_capture_is_given_back_without_waiting(
    provider: FakeProvider, make: Make, conf: str
) -> None:
    allocator, other = make(conf), (2, 0)
    allocator.create_or_incref_pool(other)
    allocator.begin_allocate_to_pool(other, everywhere)
    free, used = allocator.malloc(30 * MIB, 0), allocator.malloc(30 * MIB, 5)
    allocator.end_allocate_to_pool(other)
    allocator.free(free)
    allocator.record_stream(used, 1)
    allocator.free(used)
    allocator.begin_allocate_to_pool(POOL, everywhere, capturing=True)
    for _ in range(2):
        allocator.release_pool(other)
    allocator.empty_cache(other)
    assert [] == provider.synchronized
    assert (1 if not conf else 2) == len([s for s in allocator.snapshot_segments() if s["segment_pool_id"] == other])
    allocator.end_allocate_to_pool(POOL)
    allocator.empty_cache()
    assert [] == [s for s in allocator.snapshot_segments() if s["segment_pool_id"] == other]


def test_pool_can_have_a_provider_of_its_own(provider: FakeProvider, make: Make) -> None:
    allocator, own = make("expandable_segments:True"), FakeProvider()
    allocator.create_or_incref_pool(POOL, provider=own)
    address = in_pool(allocator, 2 * MIB)
    assert ([address], {}) == (list(own.segments), provider.ranges)
    allocator.free(address)
    allocator.release_pool(POOL)
    allocator.empty_cache()
    assert {} == own.segments


def test_spare_pool_serves_what_would_find_no_memory(make: Make) -> None:
    allocator = make("", 40 * MIB)
    allocator.create_or_incref_pool(POOL, use_on_oom=True)
    address = in_pool(allocator, 30 * MIB)
    allocator.free(address)
    assert address == allocator.malloc(25 * MIB, 0)
    assert 1 == allocator.pool_use_count(POOL)


def test_pool_may_refuse_to_split(allocator: CachingAllocator) -> None:
    allocator.create_or_incref_pool(POOL, splits=False)
    in_pool(allocator, 512)
    assert [[2 * MIB]] == [[b["size"] for b in s["blocks"]] for s in allocator.snapshot_segments()]


def test_redirection_is_refused_twice_and_ended_once(allocator: CachingAllocator) -> None:
    allocator.begin_allocate_to_pool(POOL, everywhere)
    with pytest.raises(UsageError, match="already"):
        allocator.begin_allocate_to_pool(POOL, everywhere)
    allocator.end_allocate_to_pool(POOL)
    with pytest.raises(UsageError, match="not being allocated to"):
        allocator.end_allocate_to_pool(POOL)


def test_users_of_a_pool_are_counted(with_pool: CachingAllocator) -> None:
    with_pool.create_or_incref_pool(POOL)
    assert 2 == with_pool.pool_use_count(POOL)
    in_pool(with_pool, 512)
    assert 2 == with_pool.pool_use_count(POOL)
    with_pool.release_pool(POOL)
    with_pool.release_pool(POOL)
    with pytest.raises(UsageError, match="no user"):
        with_pool.release_pool(POOL)


def test_events_name_the_pool(with_pool: CachingAllocator, events: list[Event]) -> None:
    with_pool.create_or_incref_pool(OTHER)
    with_pool.begin_allocate_to_pool(OTHER, everywhere)
    with_pool.free(with_pool.malloc(2 * MIB, 0))
    assert {OTHER} == {unpack_pool(event.aux1) for event in events}
    kinds = [Kind.SEGMENT_ALLOC, Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED]
    assert kinds == [event.kind for event in events]


def test_checkpoint_brings_back_blocks_in_use_and_free(with_pool: CachingAllocator) -> None:
    kept, gone, last = (in_pool(with_pool, size) for size in (4 * MIB, 5 * MIB, 6 * MIB))
    with_pool.free(gone)
    state = with_pool.checkpoint_pool(POOL)
    with_pool.free(kept)
    new = in_pool(with_pool, 3 * MIB)
    assert new > last  # in the rest of the segment
    result = with_pool.restore_pool(POOL, state)
    assert ({new, last}, {kept, last}) == (set(result.freed), set(result.allocated))
    assert [(4, "active_allocated"), (5, "inactive"), (6, "active_allocated"), (5, "inactive")] == [
        (b["size"] // MIB, b["state"]) for s in with_pool.snapshot_segments() for b in s["blocks"]
    ]
    with_pool.free(kept)
    with_pool.free(last)


def test_checkpoint_of_another_pool_is_refused(with_pool: CachingAllocator) -> None:
    with_pool.create_or_incref_pool(OTHER)
    with pytest.raises(UsageError, match="does not fit"):
        with_pool.restore_pool(OTHER, with_pool.checkpoint_pool(POOL))
