from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import cudatool
from cudatool.errors import CudaError
from cudatool.trace.events import Event as TraceEvent
from cudatool.trace.events import Kind


def test_event_never_recorded_counts_as_done() -> None:
    event = cudatool.Event()
    assert event.query()
    event.synchronize()
    event.wait()
    assert event.cuda_event == 0


def test_elapsed_time_is_that_between_two_records() -> None:
    start, end = cudatool.Event(enable_timing=True), cudatool.Event(enable_timing=True)
    start.record()
    array = cudatool.zeros(1 << 20)
    array.fill_(1)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert start.elapsed_time(start) == 0


def test_elapsed_time_needs_timing() -> None:
    start, end = cudatool.Event(enable_timing=True), cudatool.Event()
    start.record()
    end.record()
    with pytest.raises(CudaError, match="enable_timing=True"):
        start.elapsed_time(end)


def test_elapsed_time_needs_both_to_be_recorded() -> None:
    start, end = cudatool.Event(enable_timing=True), cudatool.Event(enable_timing=True)
    start.record()
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)


def test_record_on_a_stream_and_wait_on_another() -> None:
    first, second = cudatool.Stream(), cudatool.Stream()
    event = first.record_event()
    assert event is first.record_event(event)
    event.wait(second)
    second.synchronize()
    assert event.query()


def test_life_of_an_event_is_recorded(events: list[TraceEvent]) -> None:
    event = cudatool.Event(enable_timing=True)
    event.record()
    event.synchronize()
    assert event.query()
    del event
    kinds = [recorded.kind for recorded in events]
    assert kinds == [
        Kind.EVENT_CREATE,
        Kind.EVENT_RECORD,
        Kind.EVENT_SYNCHRONIZE,
        Kind.EVENT_QUERY,
        Kind.EVENT_DESTROY,
    ]
    assert len({recorded.aux0 for recorded in events}) == 1
    assert events[0].flags == 1
    assert events[3].aux1 == 1


def test_handle_used_again_is_a_new_event(events: list[TraceEvent]) -> None:
    for _ in range(2):
        cudatool.current_stream().record_event()
    first, second = (event.aux0 for event in events if event.kind is Kind.EVENT_RECORD)
    assert first != second


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("kind", [cudatool.Event, cudatool.Stream, cudatool.CUDAGraph, cudatool.MemPool])
def test_what_owns_a_handle_is_not_copied(kind: type[Any], duplicate: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} cannot be copied"):
        duplicate(kind())
