"""What needs two devices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import cudatool
from cudatool import ops, random
from cudatool.errors import CudaError, UsageError
from cudatool.trace.events import Event, Kind


def test_device_context_switches_and_restores(second: int) -> None:
    with cudatool.device(second):
        assert cudatool.current_device() == second
        with cudatool.device(0):
            assert cudatool.current_device() == 0
        with cudatool.device(None):
            assert cudatool.current_device() == second
        assert cudatool.zeros(1).device == second
    assert cudatool.current_device() == 0


def test_threads_that_share_a_device_context_each_get_back_their_own(
    second: int, shared_by_threads: Callable[..., list[object]]
) -> None:
    shared = cudatool.device(second)
    assert [0, 0] == shared_by_threads(shared, cudatool.device(0), cudatool.current_device)


def test_stream_context_switches_the_device(second: int) -> None:
    stream = cudatool.Stream(second)
    with cudatool.stream(stream):
        assert cudatool.current_device() == second
        assert cudatool.current_stream() is stream
        assert cudatool.current_stream(0) == cudatool.default_stream(0)
    assert cudatool.current_device() == 0


def test_context_of_a_closed_stream_leaves_the_device_as_it_is(second: int) -> None:
    stream = cudatool.Stream(second)
    stream.close()
    with pytest.raises(CudaError, match="was closed"), cudatool.stream(stream):
        pass
    assert cudatool.current_device() == 0


def test_each_device_has_its_own_memory(second: int) -> None:
    before = cudatool.memory_allocated(0), cudatool.memory_allocated(second)
    array = cudatool.empty(1000, device=second)
    assert (cudatool.memory_allocated(0), cudatool.memory_allocated(second)) == (before[0], before[1] + 4096)
    del array
    assert (cudatool.memory_allocated(0), cudatool.memory_allocated(second)) == before


def test_array_is_used_on_its_own_device(second: int) -> None:
    array = cudatool.asarray(np.arange(12.0).reshape(3, 4), device=second)
    np.testing.assert_array_equal(array.T.get(), np.arange(12.0).reshape(3, 4).T)
    np.testing.assert_array_equal(cudatool.matmul(array, array.T).get(), array.get() @ array.get().T)


@pytest.mark.parametrize("view", [lambda a: a, lambda a: a.T, lambda a: a[::2]])
def test_copy_between_devices_is_in_order_with_both(second: int, view: object) -> None:
    expected = np.arange(36, dtype=np.float32).reshape(6, 6)
    with cudatool.stream(cudatool.Stream(second)), cudatool.stream(cudatool.Stream(0)):
        source = cudatool.asarray(expected)
        target = cudatool.zeros((6, 6), device=second)
        view(target).copy_(view(source))  # type: ignore[operator]
        source.fill_(-1)
        wanted = np.zeros_like(expected)
        view(wanted)[...] = view(expected)  # type: ignore[operator]
        np.testing.assert_array_equal(target.get(), wanted)


def test_operations_like_one_before_stay_on_their_device(second: int) -> None:
    for _ in range(2):
        for device in (0, second):
            a, out = (cudatool.ones(8, device=device) for _ in range(2))
            found = a + a
            assert (device, [2.0] * 8) == (found.device, found.get().tolist())
            assert [3.0] * 8 == ops.mul(a, 3, out=out).get().tolist()
        other = cudatool.ones(8)
        with pytest.raises(UsageError, match="devices"):
            _ = a + other
        with pytest.raises(UsageError, match="device"):
            ops.add(a, a, out=other)


def test_asarray_moves_to_the_device_it_is_given(second: int) -> None:
    array = cudatool.ones(3)
    moved = cudatool.asarray(array, device=second)
    assert (moved.device, moved.get().tolist()) == (second, [1, 1, 1])


def test_event_of_one_device_can_be_waited_for_on_the_other(second: int, events: list[Event]) -> None:
    event = cudatool.Stream(0).record_event()
    waiting = cudatool.Stream(second)
    waiting.wait_event(event)
    waiting.synchronize()
    assert event.query()
    (wait,) = [found for found in events if found.kind is Kind.STREAM_WAIT_EVENT]
    assert (wait.device, wait.stream) == (second, waiting.trace_id())


def test_event_cannot_be_recorded_on_another_device(second: int) -> None:
    event = cudatool.Stream(0).record_event()
    with pytest.raises(CudaError):
        event.record(cudatool.Stream(second))


def test_peer_access_is_known(second: int) -> None:
    assert isinstance(cudatool.can_device_access_peer(0, second), bool)


def test_each_device_has_a_generator_of_its_own(second: int) -> None:
    with random.fork_rng():
        random.manual_seed_all(3)
        expected = random.rand(50, device=0).get()
        assert [4, 0] == [generator.get_offset() for generator in random.default_generators[:2]]
        np.testing.assert_array_equal(expected, random.rand(50, device=second).get())
        with cudatool.device(second):
            random.manual_seed(4)
            assert (4, second) == (random.initial_seed(), random.Generator().device)
        assert 3 == random.initial_seed()
    with pytest.raises(UsageError, match="this generator is for device 1, the array is on 0"):
        random.uniform_(cudatool.empty(3, device=0), generator=random.Generator(second))
    with pytest.raises(UsageError, match="on devices 0 and 1"):
        random.bernoulli_(cudatool.empty(3, device=0), cudatool.ones(3, device=second))
