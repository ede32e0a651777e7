from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool.errors import OutOfMemoryError, UsageError
from cudatool.trace.events import AccessFlag, CopyFlag, Event, Kind

MIB = 1 << 20


def test_memory_goes_back_when_the_last_view_is_gone() -> None:
    before = cudatool.memory_allocated()
    array = cudatool.empty((1024, 1024))
    view = array[3:5].T
    del array
    assert cudatool.memory_allocated() == before + 4 * MIB
    del view
    assert cudatool.memory_allocated() == before


def test_memory_in_a_reference_cycle_goes_back() -> None:
    before = cudatool.memory_allocated()
    cycle: list[object] = [cudatool.empty(1000)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert cudatool.memory_allocated() == before


def test_freed_block_is_handed_out_again_on_its_stream() -> None:
    address = cudatool.empty(1000).data_ptr()
    assert cudatool.empty(1000).data_ptr() == address
    with cudatool.stream(cudatool.Stream()):
        assert cudatool.empty(1000).data_ptr() != address


def test_recorded_block_rests_until_the_other_stream_is_done(device: str) -> None:
    other, array = cudatool.Stream(), cudatool.empty(1000)
    address = array.data_ptr()
    with cudatool.stream(other):
        array.fill_(1)
    array.record_stream(other)
    del array
    if device == "sim":  # there, nothing runs before somebody looks
        assert cudatool.memory_stats()["active.all.current"] > cudatool.memory_stats()["allocation.all.current"]
    other.synchronize()
    assert cudatool.empty(1000).data_ptr() == address


def test_peaks_are_kept_until_they_are_reset() -> None:
    cudatool.reset_peak_memory_stats()
    before = cudatool.memory_allocated()
    cudatool.empty(MIB)  # dropped at once
    assert cudatool.max_memory_allocated() == before + 4 * MIB
    assert cudatool.max_memory_reserved() >= cudatool.memory_reserved() >= before
    cudatool.reset_peak_memory_stats()
    assert cudatool.max_memory_allocated() == before


@pytest.mark.whole_device
def test_empty_cache_gives_memory_back_to_the_driver() -> None:
    cudatool.empty_cache()
    free, total = cudatool.mem_get_info()
    array = cudatool.empty(100 * MIB, np.uint8)
    del array
    assert cudatool.memory_reserved() >= 100 * MIB
    cudatool.empty_cache()
    assert cudatool.mem_get_info() == (free, total)


def test_too_much_is_an_out_of_memory_error() -> None:
    with pytest.raises(OutOfMemoryError):
        cudatool.empty(cudatool.mem_get_info()[1] + MIB, np.uint8)
    assert cudatool.ones(3).get().sum() == 3


def test_raw_memory_can_be_taken_and_given_back() -> None:
    before = cudatool.memory_allocated()
    address = cudatool.caching_allocator_alloc(1000)
    assert cudatool.memory_allocated() == before + 1024
    cudatool.caching_allocator_delete(address)
    assert cudatool.memory_allocated() == before
    with pytest.raises(UsageError, match="freed before"):
        cudatool.caching_allocator_delete(address)


def test_snapshot_shows_the_block_in_its_segment() -> None:
    array = cudatool.empty(1000)
    blocks = [
        (block["address"], block["requested_size"])
        for segment in cudatool.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert (array.data_ptr(), 4000) in blocks


def test_summary_is_a_table() -> None:
    assert "memory in use by the program" in cudatool.memory_summary()
    assert "small pool" not in cudatool.memory_summary(abbreviated=True)


def test_threads_can_allocate_at_the_same_time() -> None:
    wrong: list[int] = []

    def work(value: int) -> None:
        with cudatool.stream(cudatool.Stream()):
            for _ in range(20):
                if not (cudatool.full(5000, value, np.int32).get() == value).all():
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def of_kind(events: list[Event], *kinds: Kind) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def test_fill_is_recorded_with_what_it_writes(events: list[Event]) -> None:
    array = cudatool.empty(100, np.uint16)
    array.fill_(258)
    memset, access = of_kind(events, Kind.MEMSET, Kind.ACCESS)
    assert (memset.address, memset.size, memset.aux0, memset.aux1) == (array.data_ptr(), 200, 258, 2)
    assert (access.address, access.size, access.flags) == (array.data_ptr(), 200, AccessFlag.WRITE)
    assert memset.correlation == access.correlation != 0


@pytest.mark.parametrize(("dtype", "width"), [("u1", 1), ("f2", 2), ("f4", 4), ("i8", 4)])
def test_a_fill_is_the_same_call_whatever_the_value(events: list[Event], dtype: str, width: int) -> None:
    array = cudatool.empty(100, dtype)
    for value in (0, -1 if dtype == "i8" else 1):
        array.fill_(value)
    calls = {(event.name, event.aux1) for event in of_kind(events, Kind.MEMSET)}
    assert {(f"cuMemsetD{8 * width}Async", width)} == calls


def test_copy_from_pageable_memory_touches_the_device_only(events: list[Event]) -> None:
    array = cudatool.asarray(np.zeros(10))
    copy, access, wait = of_kind(events, Kind.MEMCPY, Kind.ACCESS, Kind.STREAM_SYNCHRONIZE)
    assert copy.flags == CopyFlag.ASYNC | CopyFlag.DESTINATION_DEVICE | CopyFlag.SOURCE_PAGEABLE
    assert (copy.address, copy.size) == (array.data_ptr(), 80)
    assert (access.address, access.flags, access.correlation) == (array.data_ptr(), AccessFlag.WRITE, copy.correlation)
    assert wait.stream == copy.stream


def test_copy_to_pinned_memory_touches_both(events: list[Event]) -> None:
    array, out = cudatool.zeros(10), cudatool.empty_pinned(10)
    events.clear()
    array.get(out, blocking=False)
    copy, read, write = of_kind(events, Kind.MEMCPY, Kind.ACCESS, Kind.STREAM_SYNCHRONIZE)
    assert copy.flags == CopyFlag.ASYNC | CopyFlag.SOURCE_DEVICE
    assert (read.address, read.size, read.flags) == (array.data_ptr(), 40, AccessFlag.READ)
    assert (write.address, write.size, write.flags) == (out.ctypes.data, 40, AccessFlag.WRITE)
    cudatool.synchronize()


def test_life_of_pinned_memory_is_recorded(events: list[Event]) -> None:
    pinned = cudatool.empty_pinned(10, np.uint8)
    address = pinned.ctypes.data
    del pinned
    found = [event for event in of_kind(events, Kind.HOST_ALLOC, Kind.HOST_FREE) if event.flags]  # not the driver's
    assert [(event.kind, event.address, event.size) for event in found] == [
        (Kind.HOST_ALLOC, address, 10),
        (Kind.HOST_FREE, address, 10),
    ]


def test_life_of_a_block_is_recorded(events: list[Event]) -> None:
    array = cudatool.empty(1000)
    address = array.data_ptr()
    del array
    found = of_kind(events, Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED)
    assert [event.kind for event in found] == [
        Kind.BLOCK_ALLOC,
        Kind.BLOCK_FREE_REQUESTED,
        Kind.BLOCK_FREE_COMPLETED,
    ]
    assert {(event.address, event.size, event.aux0) for event in found} == {(address, 4096, 4000)}
    assert {event.stream for event in found} == {cudatool.default_stream().trace_id()}


def test_ranges_are_recorded_in_pairs(events: list[Event]) -> None:
    with cudatool.range("outer"), pytest.raises(KeyError), cudatool.range("inner"):
        raise KeyError
    assert [(event.kind, event.name) for event in events] == [
        (Kind.RANGE_PUSH, "outer"),
        (Kind.RANGE_PUSH, "inner"),
        (Kind.RANGE_POP, ""),
        (Kind.RANGE_POP, ""),
    ]


def test_nothing_is_emitted_without_subscribers(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudatool.trace import hooks

    calls: list[object] = []
    monkeypatch.setattr(hooks, "emit", lambda *_, **__: calls.append(None))
    if hooks.active:
        pytest.skip("something outside this test listens")
    with cudatool.range("r"), cudatool.stream(cudatool.Stream()):
        cudatool.ones((4, 4)).T.get()
        cudatool.current_stream().record_event().synchronize()
    assert calls == []


def test_no_bytes_are_freed_as_often_as_they_are_had() -> None:
    addresses = [cudatool.caching_allocator_alloc(0) for _ in range(2)]
    for address in addresses:
        cudatool.caching_allocator_delete(address)
    assert addresses == [0, 0]


_SNAPSHOT = """
import cudatool
from cuda.bindings import driver
array = cudatool.ones(3)
print({segment["device"] for segment in cudatool.memory_snapshot()})
print(driver.cuDevicePrimaryCtxGetState(1)[2])
"""


def test_a_snapshot_starts_no_device_that_was_not_used() -> None:
    done = run_python(_SNAPSHOT, environment={"CUDATOOL_DEVICE": "sim:count=2"})
    assert done.returncode == 0, done.stderr
    assert "{0}\n0\n" == done.stdout
