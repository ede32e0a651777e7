"""The caching allocator of pinned memory, over a provider that the test controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from generated import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from cudatool.errors import CudaError, UsageError
from cudatool.memory import Settings
from cudatool.memory.host import CachingHostAllocator
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind

MIB = 1 << 20


class FakeHostProvider:
    """Memory by counting, and streams that have caught up when the test says so. Refuses what it did not give."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.next_address = 0x5000_0000_0000
        self.tokens: dict[int, object] = {}
        self.next_token = 1
        self.busy: set[object] = set()
        self.broken = False

    def allocate(self, size: int) -> int:
        if self.broken:
            raise CudaError("none", "CUDA_ERROR_OUT_OF_MEMORY")
        address, self.next_address = self.next_address, self.next_address + size + 4096
        self.live[address] = size
        return address

    def free(self, address: int) -> None:
        del self.live[address]

    def record_event(self, stream: object) -> int:
        if self.broken:
            raise CudaError("the context is gone", "CUDA_ERROR_ILLEGAL_ADDRESS")
        token, self.next_token = self.next_token, self.next_token + 1
        self.tokens[token] = stream
        return token

    def event_passed(self, token: int) -> bool:
        passed = self.tokens[token] not in self.busy
        if passed:
            del self.tokens[token]
        return passed


@pytest.fixture
def pinned() -> FakeHostProvider:
    return FakeHostProvider()


@pytest.fixture
def make_host(pinned: FakeHostProvider) -> Iterator[Callable[[str], CachingHostAllocator]]:
    made: list[CachingHostAllocator] = []

    def make(conf: str = "") -> CachingHostAllocator:
        made.append(CachingHostAllocator(pinned, settings=Settings.parse(conf)))
        return made[-1]

    yield make
    for allocator in made:
        allocator.close()


@pytest.fixture
def host(make_host: Callable[[str], CachingHostAllocator]) -> CachingHostAllocator:
    return make_host("")


@pytest.mark.parametrize(("size", "rounded"), [(1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), (5 * MIB, 8 * MIB)])
def test_sizes_are_rounded_to_powers_of_two(
    host: CachingHostAllocator, pinned: FakeHostProvider, size: int, rounded: int
) -> None:
    address = host.allocate(size)
    assert {address: rounded} == pinned.live


def test_nothing_has_address_zero(host: CachingHostAllocator, pinned: FakeHostProvider) -> None:
    assert 0 == host.allocate(0)
    host.free(0)
    assert {} == pinned.live


def test_negative_size_is_refused(host: CachingHostAllocator) -> None:
    with pytest.raises(UsageError, match="cannot allocate -1 bytes"):
        host.allocate(-1)


def test_block_freed_last_is_handed_out_first(host: CachingHostAllocator) -> None:
    first, second = host.allocate(1000), host.allocate(1024)
    host.free(first)
    host.free(second)
    assert [second, first] == [host.allocate(513), host.allocate(1024)]


def test_blocks_are_never_split(host: CachingHostAllocator) -> None:
    large = host.allocate(MIB)
    host.free(large)
    small = host.allocate(MIB // 2)
    assert not large <= small < large + MIB


def test_used_block_rests_until_every_stream_has_passed(host: CachingHostAllocator, pinned: FakeHostProvider) -> None:
    pinned.busy = {"a", "b"}
    address = host.allocate(100)
    assert host.record_event(address, "a")
    assert host.record_event(address + 99, "b")
    assert host.record_event(address, "a")  # the same again
    host.free(address)
    assert ["a", "b"] == list(pinned.tokens.values())
    for busy in ({"a", "b"}, {"b"}):
        pinned.busy = set(busy)
        assert address != host.allocate(100)
    pinned.busy = set()
    assert address == host.allocate(100)


def test_event_that_has_not_passed_holds_back_those_after_it(
    host: CachingHostAllocator, pinned: FakeHostProvider
) -> None:
    pinned.busy = {"slow"}
    blocks = [host.allocate(64), host.allocate(64)]
    for block, stream in zip(blocks, ("slow", "fast"), strict=True):
        host.record_event(block, stream)
        host.free(block)
    assert host.allocate(64) not in blocks
    pinned.busy = set()
    assert list(reversed(blocks)) == [host.allocate(64), host.allocate(64)]


def test_uses_belong_to_one_life_of_a_block(host: CachingHostAllocator, pinned: FakeHostProvider) -> None:
    address = host.allocate(64)
    host.record_event(address, "a")
    host.free(address)
    assert address == host.allocate(64)
    pinned.busy = {"a"}
    host.free(address)
    assert address == host.allocate(64)


def test_use_of_unknown_or_freed_memory_is_nothing_to_note(host: CachingHostAllocator) -> None:
    assert not host.record_event(1234, "a")
    address = host.allocate(64)
    assert not host.record_event(address + 64, "a")
    assert not host.record_event(address - 1, "a")
    host.free(address)
    assert not host.record_event(address, "a")


@pytest.mark.parametrize("offset", [0, 8])
def test_double_or_inner_free_is_refused(host: CachingHostAllocator, offset: int) -> None:
    address = host.allocate(64)
    if not offset:
        host.free(address)
    with pytest.raises(UsageError, match="was it freed before"):
        host.free(address + offset)


def test_empty_cache_gives_back_what_is_free(host: CachingHostAllocator, pinned: FakeHostProvider) -> None:
    kept, waiting, free = host.allocate(8), host.allocate(16), host.allocate(32)
    pinned.busy = {"a"}
    host.record_event(waiting, "a")
    host.free(waiting)
    host.free(free)
    host.empty_cache()
    assert {kept, waiting} == set(pinned.live)
    pinned.busy = set()
    host.empty_cache()
    assert {kept} == set(pinned.live)


def test_refusal_of_the_provider_leaves_everything_as_it_was(
    host: CachingHostAllocator, pinned: FakeHostProvider
) -> None:
    pinned.broken = True
    with pytest.raises(CudaError):
        host.allocate(64)
    pinned.broken = False
    before = host.stats()
    assert 0 == before["allocations.current"] == before["active_requests.current"]
    assert host.allocate(64) in pinned.live


def test_reserve_segment_serves_first_and_is_never_given_back(
    make_host: Callable[[str], CachingHostAllocator], pinned: FakeHostProvider
) -> None:
    host = make_host("pinned_reserve_segment_size_mb:1")
    small = [host.allocate(100), host.allocate(5000)]
    (reserve,) = pinned.live
    assert {reserve: MIB} == pinned.live
    assert [reserve, reserve + 4096] == small  # each takes whole pages
    large = host.allocate(MIB)  # has no room there any more
    assert [reserve, large] == list(pinned.live)
    for address in (*small, large):
        host.free(address)
    assert small[0] == host.allocate(128)
    host.free(small[0])
    host.empty_cache()
    assert {reserve: MIB} == pinned.live
    assert reserve + 4096 + 8192 == host.allocate(1)
    stats = host.stats()
    assert (4, 3) == (stats["num_host_alloc"], stats["num_host_free"])
    assert 2 == stats["host_alloc_time.count"]


def test_statistics_have_pytorchs_names() -> None:
    counters = ("allocations", "allocated_bytes", "active_requests", "active_bytes")
    expected = {f"{name}.{column}" for name in counters for column in ("current", "peak", "allocated", "freed")}
    expected |= {
        f"{name}.{column}"
        for name in ("host_alloc_time", "host_free_time")
        for column in ("total", "max", "min", "count", "avg")
    }
    assert (
        expected | {"num_host_alloc", "num_host_free"}
        == CachingHostAllocator(FakeHostProvider(), settings=Settings()).stats().keys()
    )


def test_statistics_tell_cached_blocks_from_active_ones(host: CachingHostAllocator, pinned: FakeHostProvider) -> None:
    pinned.busy = {"a"}
    used, free, kept = host.allocate(1000), host.allocate(1000), host.allocate(3000)
    host.record_event(used, "a")
    host.free(used)
    host.free(free)
    stats = host.stats()
    assert (3, 1024 + 1024 + 4096) == (stats["allocations.current"], stats["allocated_bytes.current"])
    assert (2, 1024 + 4096) == (stats["active_requests.current"], stats["active_bytes.current"])
    assert (3, 1024 + 1024 + 4096) == (stats["active_requests.peak"], stats["active_bytes.peak"])
    pinned.busy = set()
    host.empty_cache()
    stats = host.stats()
    assert (1, 4096) == (stats["allocations.current"], stats["allocated_bytes.current"])
    assert (1, 2) == (stats["active_requests.current"], stats["active_requests.freed"])
    assert (3, 2) == (stats["num_host_alloc"], stats["num_host_free"])
    assert (3, 2) == (stats["host_alloc_time.count"], stats["host_free_time.count"])
    assert kept in pinned.live


def test_peaks_and_totals_are_reset(host: CachingHostAllocator) -> None:
    addresses = [host.allocate(64) for _ in range(3)]
    host.free(addresses[0])
    host.reset_peak_stats()
    stats = host.stats()
    assert (2, 3) == (stats["active_requests.peak"], stats["allocations.peak"])
    assert 0 == stats["host_alloc_time.max"] == stats["host_alloc_time.min"]
    host.reset_accumulated_stats()
    stats = host.stats()
    assert (0, 0, 2) == (
        stats["active_requests.allocated"],
        stats["active_requests.freed"],
        stats["active_requests.current"],
    )
    assert 0 == stats["num_host_alloc"] == stats["host_alloc_time.count"] == stats["host_alloc_time.total"]


def test_failure_to_wait_for_a_stream_is_raised_and_the_block_not_used_again(
    host: CachingHostAllocator, pinned: FakeHostProvider
) -> None:
    address = host.allocate(64)
    host.record_event(address, "a")
    pinned.broken = True
    with pytest.raises(CudaError, match="the context is gone"):
        host.free(address)
    pinned.broken = False
    assert address != host.allocate(64)


def test_catch_all_logs_a_failing_free(
    make_host: Callable[[str], CachingHostAllocator], pinned: FakeHostProvider, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host("pinned_free_catch_all:True")
    address = host.allocate(64)
    host.record_event(address, "a")
    pinned.broken = True
    host.free(address)
    assert [f"pinned memory at {address:#x} was freed, but cannot be used again"] == caplog.messages


def test_free_in_the_middle_of_an_operation_is_done_after_it(
    host: CachingHostAllocator, pinned: FakeHostProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host.allocate(64)
    allocate = pinned.allocate

    def with_finalizer(size: int) -> int:
        host.free(first)
        return allocate(size)

    monkeypatch.setattr(pinned, "allocate", with_finalizer)
    second = host.allocate(64)
    assert first != second
    assert first == host.allocate(64)


def test_free_that_fails_in_the_middle_of_an_operation_is_the_next_ones_error(
    host: CachingHostAllocator, pinned: FakeHostProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host.allocate(64)
    host.record_event(first, "a")
    allocate = pinned.allocate

    def with_finalizer(size: int) -> int:
        host.free(first)
        found = allocate(size)
        pinned.broken = True
        return found

    with monkeypatch.context() as during:
        during.setattr(pinned, "allocate", with_finalizer)
        second = host.allocate(64)
    pinned.broken = False
    with pytest.raises(CudaError, match="the context is gone"):
        host.stats()
    host.free(second)
    assert second == host.allocate(64)


def test_free_while_another_thread_is_in_the_allocator_does_not_wait(
    host: CachingHostAllocator, pinned: FakeHostProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = host.allocate(64)
    inside, go_on = threading.Event(), threading.Event()
    allocate = pinned.allocate

    def slowly(size: int) -> int:
        inside.set()
        assert go_on.wait(10)
        return allocate(size)

    monkeypatch.setattr(pinned, "allocate", slowly)
    thread = threading.Thread(target=host.allocate, args=(128,))
    thread.start()
    assert inside.wait(10)
    host.free(first)  # would wait for ever
    go_on.set()
    thread.join()
    assert first == host.allocate(64)


def test_request_from_within_an_operation_is_refused(
    host: CachingHostAllocator, pinned: FakeHostProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "allocate", lambda size: host.allocate(size))
    with pytest.raises(RuntimeError, match="from within one of its own operations"):
        host.allocate(64)


def test_background_thread_frees_blocks_and_requests_do_not(
    make_host: Callable[[str], CachingHostAllocator], pinned: FakeHostProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    askers: list[str] = []
    free = threading.Event()
    passed = pinned.event_passed

    def event_passed(token: int) -> bool:
        askers.append(threading.current_thread().name)
        found = passed(token)
        if found:
            free.set()
        return found

    monkeypatch.setattr(pinned, "event_passed", event_passed)
    host = make_host("pinned_use_background_threads:True")
    pinned.busy = {"a"}
    address = host.allocate(64)
    host.record_event(address, "a")
    host.free(address)
    assert address != host.allocate(64)
    pinned.busy = set()
    assert free.wait(10)
    assert address == host.allocate(64)
    assert {"cudatool pinned memory"} == set(askers)


def test_background_thread_goes_on_after_a_block_that_cannot_be_taken_back(
    make_host: Callable[[str], CachingHostAllocator], pinned: FakeHostProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host("pinned_use_background_threads:True")
    pinned.busy = {"a"}
    waiting, lost = host.allocate(64), host.allocate(64)
    for address in (waiting, lost):
        host.record_event(address, "a")
    host.free(waiting)
    asked, go_on = threading.Event(), threading.Event()
    passed = pinned.event_passed

    def event_passed(token: int) -> bool:
        asked.set()
        assert go_on.wait(10)
        return passed(token)

    monkeypatch.setattr(pinned, "event_passed", event_passed)
    assert asked.wait(10)
    pinned.broken = True
    host.free(lost)  # the allocator is busy with the event: its thread takes the block back
    asked.clear()
    go_on.set()
    assert asked.wait(10)
    with pytest.raises(CudaError, match="context is gone"):
        host.stats()
    pinned.busy = set()
    for _ in range(10_000):
        if host.stats()["active_requests.current"] == 1:  # the block that is lost
            break
        time.sleep(0.001)
    assert waiting == host.allocate(64)


def test_blocks_and_their_reuse_are_recorded(host: CachingHostAllocator, events: list[Event]) -> None:
    address = host.allocate(1000)
    host.free(address)
    host.allocate(513)
    host.empty_cache()
    assert [
        (Kind.HOST_ALLOC, address, 1000, 3, 1024),
        (Kind.HOST_FREE, address, 1000, 3, 1024),
        (Kind.HOST_ALLOC, address, 513, 3, 1024),
    ] == [(e.kind, e.address, e.size, e.flags, e.aux0) for e in events]
    assert all(event.stack for event in events)


def test_subscriber_may_drop_pinned_memory(host: CachingHostAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "strict", True)
    dropped = [host.allocate(64)]
    address = dropped[0]

    def drop(event: Event) -> None:
        if event.kind == Kind.HOST_ALLOC:
            host.free(dropped.pop())

    hooks.subscribe(drop)
    try:
        assert address != host.allocate(64)
    finally:
        hooks.reset()
    assert address == host.allocate(64)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("allocate"), st.integers(1, 5000)),
            st.tuples(st.just("use"), st.integers(0, 20), st.sampled_from("abc")),
            st.tuples(st.just("free"), st.integers(0, 20)),
            st.tuples(st.just("busy"), st.sets(st.sampled_from("abc"))),
            st.tuples(st.just("empty")),
        ),
        max_size=80,
    )
)
def test_memory_is_never_handed_out_while_anybody_uses_it(steps: list[tuple[object, ...]]) -> None:
    pinned = FakeHostProvider()
    host = CachingHostAllocator(pinned, settings=Settings())
    in_use: dict[int, tuple[int, set[object]]] = {}
    resting: dict[int, set[object]] = {}  # freed, and the streams that had not passed since
    for name, *values in steps:
        match name, values:
            case "allocate", [int(size)]:
                address = host.allocate(size)
                assert address not in in_use
                assert not resting.pop(address, set())
                assert pinned.live[address] >= size
                in_use[address] = size, set()
            case "use", [int(index), stream] if in_use:
                address = list(in_use)[index % len(in_use)]
                assert host.record_event(address + in_use[address][0] - 1, stream)
                in_use[address][1].add(stream)
            case "free", [int(index)] if in_use:
                address = list(in_use)[index % len(in_use)]
                resting[address] = in_use.pop(address)[1] & pinned.busy
                host.free(address)
            case "busy", [set() as streams]:
                pinned.busy = streams
                for waiting in resting.values():
                    waiting &= streams
            case "empty", []:
                host.empty_cache()
                assert all(address in pinned.live for address, streams in resting.items() if streams)
        stats = host.stats()
        assert len(pinned.live) == stats["allocations.current"]
        assert sum(pinned.live.values()) == stats["allocated_bytes.current"]
        assert len(in_use) <= stats["active_requests.current"] <= len(pinned.live)


def test_block_that_a_graph_holds_rests_until_it_is_let_go_and_its_last_stream_is_done(
    pinned: FakeHostProvider, host: CachingHostAllocator
) -> None:
    address = host.allocate(1000)
    assert (address, 0) == (host.hold(address + 10), host.hold(1))
    assert address == host.hold(address)
    host.free(address)
    assert address != host.allocate(1000)
    host.release(address, None)
    assert address != host.allocate(1000)
    pinned.busy = {"stream"}
    host.release(address, "stream")
    assert address != host.allocate(1000)
    pinned.busy = set()
    assert address == host.allocate(1000)


def test_block_that_is_let_go_before_it_is_freed_is_the_programs(host: CachingHostAllocator) -> None:
    address = host.allocate(1000)
    host.hold(address)
    host.release(address, None)
    assert address != host.allocate(1000)
    host.free(address)
    assert address == host.allocate(1000)


def test_block_can_be_let_go_in_the_middle_of_an_operation(
    pinned: FakeHostProvider, host: CachingHostAllocator
) -> None:
    address = host.allocate(1000)
    host.hold(address)
    host.free(address)
    allocate = pinned.allocate

    def finalizer_runs(size: int) -> int:
        host.release(address, None)
        return allocate(size)

    pinned.allocate = finalizer_runs  # type: ignore[method-assign]
    host.allocate(5000)
    assert address == host.allocate(1000)


def test_freeing_a_block_is_told_when_the_graph_has_let_go(
    host: CachingHostAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "strict", True)
    told: list[Kind] = []

    def subscriber(event: Event) -> None:
        told.append(event.kind)

    hooks.subscribe(subscriber)
    told.clear()  # the streams of tests before
    try:
        address = host.allocate(1000)
        host.hold(address)
        host.free(address)
        assert [Kind.HOST_ALLOC] == told
        host.release(address, None)
        assert [Kind.HOST_ALLOC, Kind.HOST_FREE] == told
    finally:
        hooks.unsubscribe(subscriber)
