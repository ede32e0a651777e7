from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

import cudatool
from cudatool.errors import CudaError
from cudatool.trace.events import Event, Kind, StreamFlag


def kinds(events: list[Event]) -> list[Kind]:
    return [event.kind for event in events]


def test_default_stream_is_the_legacy_one() -> None:
    assert cudatool.default_stream().cuda_stream == 0
    assert cudatool.current_stream() == cudatool.default_stream()
    assert cudatool.default_stream().__cuda_stream__() == (0, 0)


def test_stream_context_restores_what_was_current() -> None:
    outer, inner = cudatool.Stream(), cudatool.Stream()
    with cudatool.stream(outer):
        assert cudatool.current_stream() is outer
        with inner, cudatool.stream(None):
            assert cudatool.current_stream() is inner
        assert cudatool.current_stream() is outer
    assert cudatool.current_stream() == cudatool.default_stream()


def test_stream_context_restores_after_an_exception() -> None:
    with pytest.raises(KeyError), cudatool.stream(cudatool.Stream()):
        raise KeyError
    assert cudatool.current_stream() == cudatool.default_stream()


def test_one_stream_can_be_entered_twice() -> None:
    stream = cudatool.Stream()
    with stream, stream:
        assert cudatool.current_stream() is stream
    assert cudatool.current_stream() == cudatool.default_stream()


def test_threads_that_enter_one_stream_each_get_back_their_own(shared_by_threads: Callable[..., list[object]]) -> None:
    shared, outer = cudatool.Stream(), cudatool.Stream()
    assert [cudatool.default_stream(), outer] == shared_by_threads(shared, outer, cudatool.current_stream)


def test_one_stream_context_can_be_entered_twice_and_by_two_threads() -> None:
    stream, outer = cudatool.Stream(), cudatool.Stream()
    context = cudatool.stream(stream)
    found: list[cudatool.Stream] = []

    def enter_between() -> None:
        with outer:
            with context:
                found.append(cudatool.current_stream())
            found.append(cudatool.current_stream())

    with context:
        with context:
            thread = threading.Thread(target=enter_between)
            thread.start()
            thread.join()
        found.append(cudatool.current_stream())
    found.append(cudatool.current_stream())
    assert [stream, outer, stream, cudatool.default_stream()] == found


def test_set_stream_lasts() -> None:
    stream = cudatool.Stream()
    cudatool.set_stream(stream)
    try:
        assert cudatool.current_stream() is stream
    finally:
        cudatool.set_stream(cudatool.default_stream())


def test_current_stream_is_each_threads_own() -> None:
    found: list[cudatool.Stream] = []
    with cudatool.stream(cudatool.Stream()):
        thread = threading.Thread(target=lambda: found.append(cudatool.current_stream()))
        thread.start()
        thread.join()
    assert found == [cudatool.default_stream()]


def test_live_streams_are_different() -> None:
    streams = [cudatool.Stream() for _ in range(40)]
    assert len({stream.cuda_stream for stream in streams}) == 40


def test_dropped_streams_are_used_again() -> None:
    handles = set()
    for _ in range(100):
        handles.add(cudatool.Stream(priority=-2).cuda_stream)
    assert len(handles) == 32


@pytest.mark.parametrize(("asked", "given"), [(0, 0), (-1, -1), (-100, -5), (3, 0)])
def test_priority_is_cut_to_the_drivers_range(asked: int, given: int) -> None:
    assert cudatool.Stream(priority=asked).priority == given


def test_query_and_synchronize_say_when_work_is_done(events: list[Event]) -> None:
    stream = cudatool.Stream()
    with stream:
        array = cudatool.zeros(1 << 20)
    stream.synchronize()
    assert stream.query()
    del array
    done = [event.aux1 for event in events if event.kind is Kind.STREAM_QUERY]
    assert done == [1]
    assert Kind.STREAM_SYNCHRONIZE in kinds(events)


def test_wait_stream_records_and_waits(events: list[Event]) -> None:
    first, second = cudatool.Stream(), cudatool.Stream()
    events.clear()
    second.wait_stream(first)
    assert kinds(events) == [Kind.EVENT_CREATE, Kind.EVENT_RECORD, Kind.STREAM_WAIT_EVENT, Kind.EVENT_DESTROY]
    create, record, wait, destroy = events
    assert create.aux0 == record.aux0 == wait.aux0 == destroy.aux0 > 0
    assert (record.stream, wait.stream) == (first.trace_id(), second.trace_id())
    assert 0 != record.correlation != wait.correlation != 0


def test_wait_for_an_event_never_recorded_is_told_and_does_nothing(events: list[Event]) -> None:
    stream, event = cudatool.current_stream(), cudatool.Event()
    stream.wait_event(event)
    expected = [(Kind.STREAM_WAIT_EVENT, stream.trace_id(), event.trace_id())]
    assert expected == [(e.kind, e.stream, e.aux0) for e in events]
    assert not event.cuda_event


def test_new_stream_is_recorded_with_its_flags(events: list[Event]) -> None:
    stream = cudatool.Stream(priority=-3)
    created = [event for event in events if event.kind is Kind.STREAM_CREATE]
    assert [(event.stream, event.flags, event.address) for event in created] == [
        (stream.trace_id(), StreamFlag.NON_BLOCKING, stream.cuda_stream)
    ]
    assert created[0].aux0 == (1 << 64) - 3


def test_work_runs_in_the_order_of_a_stream() -> None:
    with cudatool.stream(cudatool.Stream()):
        array = cudatool.zeros(1000)
        for value in range(5):
            array.fill_(value)
        np.testing.assert_array_equal(array.get(), np.full(1000, 4, np.float32))


def test_external_stream_is_the_same_queue() -> None:
    stream = cudatool.Stream()
    external = cudatool.Stream.from_handle(stream.cuda_stream)
    assert external == stream
    assert hash(external) == hash(stream)
    assert external.query()


def test_closed_default_stream_is_made_anew() -> None:
    cudatool.set_stream(cudatool.default_stream())
    cudatool.default_stream().close()
    assert cudatool.current_stream().query()
    assert cudatool.default_stream().query()


def test_default_stream_is_the_legacy_one_whatever_the_bindings_take_0_for() -> None:
    from cuda.bindings import driver

    assert int(cudatool.default_stream().core.handle) == driver.CU_STREAM_LEGACY


def test_streams_of_cuda_core_work() -> None:
    from cuda.core import Device

    theirs = Device(0).create_stream()
    with cudatool.stream(cudatool.ExternalStream(int(theirs.handle))):
        assert cudatool.ones(4).get().tolist() == [1, 1, 1, 1]


def test_streams_and_events_where_another_library_has_made_the_context_current() -> None:
    cudatool.init()
    from cuda.bindings import driver

    _, context = driver.cuDevicePrimaryCtxRetain(0)
    found: list[object] = []

    def program() -> None:
        driver.cuCtxSetCurrent(context)
        event = cudatool.Event()
        event.record(cudatool.Stream())
        event.synchronize()
        found.extend((event.query(), int(driver.cuCtxGetCurrent()[1])))

    thread = threading.Thread(target=program)  # cuda.core knows no device in a new thread
    thread.start()
    thread.join()
    driver.cuDevicePrimaryCtxRelease(0)
    assert found == [True, int(context)]


@pytest.mark.parametrize(
    "use",
    [
        lambda stream: stream.query(),
        lambda stream: stream.synchronize(),
        lambda stream: stream.record_event(),
        lambda stream: stream.wait_event(cudatool.default_stream().record_event()),
        lambda stream: stream.cuda_stream,
        lambda stream: cudatool.set_stream(stream),
        lambda stream: stream.__enter__(),
    ],
)
def test_closed_stream_is_refused(use: object) -> None:
    stream = cudatool.Stream()
    stream.close()
    stream.close()
    assert stream.is_closed
    with pytest.raises(CudaError, match="closed") as caught:
        use(stream)  # type: ignore[operator]
    assert caught.value.name == "CUDA_ERROR_INVALID_HANDLE"


def test_a_handle_that_the_driver_gives_again_is_a_new_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library's stream, destroyed without a word to us, may have had the handle, and other flags."""
    from cudatool.runtime import stream as module
    from cudatool.trace import hooks

    made = module.core_device(0).create_stream()
    before = hooks.stream_id(0, int(made.handle), flags=StreamFlag(0))
    monkeypatch.setattr(module, "_pools", {})
    monkeypatch.setattr(module, "core_device", lambda index: SimpleNamespace(create_stream=lambda options: made))
    again = cudatool.Stream(0)
    assert hooks.stream_id(0, again.cuda_stream) != before
