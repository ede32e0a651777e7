"""What PyTorch's own tests ask of devices, asked of ours. docs/torch-tests.md has the table."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

import cudatool
from cudatool.errors import CudaError, UsageError

Delay = Callable[[], None]


# What a device is.


@pytest.mark.parametrize(
    "ask", [cudatool.get_device_name, cudatool.get_device_capability, cudatool.get_device_properties]
)
def test_the_current_device_is_meant_when_none_is_named(ask: Callable[..., object]) -> None:
    """
    Source: test_cuda.py::test_cuda_get_device_name
    Source: test_cuda.py::test_cuda_get_device_capability
    Source: test_cuda.py::test_cuda_get_device_properties
    """
    assert ask(cudatool.current_device()) == ask(None) == ask()


def test_a_device_has_a_unique_id() -> None:
    """Source: test_cuda.py::test_uuid"""
    uuid = cudatool.get_device_properties(0).uuid
    assert [8, 4, 4, 4, 12] == [len(part) for part in uuid.removeprefix("GPU-").split("-")]


@pytest.mark.parametrize("name", ["cuda0", "cpu", "cuda:", "gpu:0", 1.5])
def test_what_is_no_device_is_refused(name: object) -> None:
    """
    Source: test_cuda.py::test_get_device_index
    Source: test_cuda.py::test_specify_improper_device_name
    """
    with pytest.raises(UsageError, match="is not a device"):
        cudatool.empty(1, device=name)


def _output(program: str, **environment: str) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_asks_nothing_of_the_driver(device: str) -> None:
    """Source: test_cuda.py::test_lazy_init"""
    hidden = "import os, cudatool; os.environ['CUDA_VISIBLE_DEVICES'] = ''; print(cudatool.device_count())"
    assert "0" == _output(hidden, CUDATOOL_DEVICE="cuda")
    if device == "cuda":
        asked = (
            "import ctypes, cudatool; print(ctypes.CDLL('libcuda.so.1').cuDeviceGetCount(ctypes.byref(ctypes.c_int())))"
        )
        assert "3" == _output(asked)  # CUDA_ERROR_NOT_INITIALIZED


def test_threads_can_start_the_driver_at_the_same_time() -> None:
    """Source: test_cuda_multigpu.py::test_cuda_init_race"""
    program = """
import threading, cudatool
found = []
def work(value):
    found.append(cudatool.full(1, value).get().tolist())
threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sorted(found))
"""
    assert "[[0.0], [1.0], [2.0], [3.0]]" == _output(program)


def test_the_device_context_changes_nothing_for_none() -> None:
    """Source: test_cuda.py::test_device_context_manager"""
    before = cudatool.current_device()
    for wanted in (None, 0):
        with cudatool.device(wanted):
            assert before == cudatool.current_device()
        assert before == cudatool.current_device()


def test_a_device_is_one_key_of_a_dictionary() -> None:
    """Source: test_cuda_multigpu.py::test_grad_scaling_device_as_key"""
    array = cudatool.empty(1, device="cuda:0")
    assert {array.device: "found"}[cudatool.ones(1, device=0).device] == "found"


# Several devices.


def test_the_device_context_switches_the_device(second: int) -> None:
    """Source: test_cuda.py::test_multi_device_context_manager"""
    cudatool.set_device(0)
    with cudatool.device(second):
        assert second == cudatool.current_device()
    assert 0 == cudatool.current_device()


def test_arrays_are_made_on_the_device_that_is_current(second: int) -> None:
    """
    Source: test_cuda_multigpu.py::test_cuda_set_device
    Source: test_cuda_multigpu.py::test_tensor_device
    """
    made: list[int] = []
    with cudatool.device(second):
        made.append(cudatool.empty(1).device)
        cudatool.set_device(0)
        made.append(cudatool.empty(1).device)
        with cudatool.device(second):
            made.append(cudatool.empty(1).device)
            made.append(cudatool.empty(1, device=0).device)
        made.append(cudatool.empty(1).device)
        cudatool.set_device(second)
    made.append(cudatool.empty(1).device)
    assert [1, 0, 1, 0, 0, 0] == made


def test_a_copy_of_an_array_that_is_there_already_is_the_array(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_copy_device"""
    values = np.arange(25, dtype=np.float32).reshape(5, 5)
    for source in (cudatool.asarray(values), values):
        with cudatool.device(second):
            there = cudatool.asarray(source, device="cuda")
            assert second == there.device
            assert cudatool.asarray(there, device=second) is there
            back = cudatool.asarray(there, device=0)
            assert 0 == back.device
            assert cudatool.asarray(back, device=0) is back
        np.testing.assert_array_equal(values, back.get())


def test_results_are_on_the_device_of_what_they_come_from(second: int) -> None:
    """
    Source: test_cuda_multigpu.py::test_autogpu
    Source: test_cuda_multigpu.py::test_new
    """
    here = cudatool.ones((5, 5))
    with cudatool.device(second):
        assert second == cudatool.ones((5, 5)).device
        assert 0 == here.clone().device
        assert 0 == cudatool.matmul(here, here).device
        assert 0 == here[1:].T.contiguous().device


@pytest.mark.parametrize("other", [0, 1])
def test_a_copy_between_devices_waits_for_the_current_streams_of_both(second: int, other: int, delay: Delay) -> None:
    """Source: test_cuda_multigpu.py::test_copy_streams"""
    x, y = cudatool.zeros((5, 5), device=0), cudatool.zeros((5, 5), device=other)
    one_more = cudatool.ones((5, 5), device=0)
    cudatool.synchronize(0)
    cudatool.synchronize(other)
    s0, s1, s2 = cudatool.Stream(0), cudatool.Stream(other), cudatool.Stream(0)
    with cudatool.stream(s0):
        delay()
        with cudatool.stream(s1):
            y.copy_(one_more)
    with cudatool.stream(s2), cudatool.stream(s1):
        y.copy_(x)
    s1.synchronize()
    assert not y.get().any()  # the later copy, though it was ready first


# Streams of several devices.


def test_a_stream_context_switches_device_and_stream_and_restores_both(second: int) -> None:
    """
    Source: test_cuda_multigpu.py::test_stream_context
    Source: test_cuda.py::test_multi_device_stream_context_manager
    """
    default, there, here = cudatool.current_stream(), cudatool.Stream(second), cudatool.Stream(0)
    before = cudatool.current_stream(second)

    def now() -> tuple[int, cudatool.Stream]:
        return cudatool.current_device(), cudatool.current_stream()

    with cudatool.stream(there):
        assert (second, there) == now()
        assert default == cudatool.current_stream(0)
        with here:
            assert (0, here) == now()
            with cudatool.stream(default):
                assert (0, default) == now()
            assert (0, here) == now()
        assert (second, there) == now()
    assert (0, default) == now()
    assert before == cudatool.current_stream(second)


@pytest.mark.parametrize("ask", [cudatool.current_stream, cudatool.default_stream])
def test_every_device_has_its_current_and_its_default_stream(second: int, ask: Callable[..., cudatool.Stream]) -> None:
    """
    Source: test_cuda_multigpu.py::test_current_stream
    Source: test_cuda_multigpu.py::test_default_stream
    """
    here, there = ask(), ask(device=second)
    assert [0, second] == [here.device, there.device]
    assert here == ask(0)
    with cudatool.device(second):
        assert there == ask()
        assert here == ask(0)
    with pytest.raises(UsageError, match="'cpu' is not a device"):
        ask("cpu")


def test_streams_of_two_devices_are_different(second: int) -> None:
    """
    Source: test_cuda_multigpu.py::test_streams_multi_gpu
    Source: test_cuda_multigpu.py::test_streams_multi_gpu_eq
    """
    here, again = cudatool.current_stream(), cudatool.current_stream()
    with cudatool.device(second):
        there, there_again = cudatool.current_stream(), cudatool.current_stream()
    assert here == again and there == there_again
    assert here != there
    assert here.cuda_stream == again.cuda_stream
    assert {here, again, there, there_again} == {here, there}
    assert hash(here) == hash(again) != hash(there) == hash(there_again)
    assert second == cudatool.Stream(second).device


def test_a_stream_has_the_priority_asked_for(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_streams_priority"""
    lowest, highest = cudatool.Stream.priority_range()
    assert lowest > highest
    low, high = cudatool.Stream(0, priority=lowest), cudatool.Stream(second, priority=highest)
    assert [(0, lowest), (second, highest)] == [(low.device, low.priority), (high.device, high.priority)]


def test_streams_and_events_are_asked_from_any_device(second: int, delay: Delay) -> None:
    """
    Source: test_cuda_multigpu.py::test_streams_multi_gpu_query
    Source: test_cuda_multigpu.py::test_events_multi_gpu_query
    """
    cudatool.synchronize(0)
    cudatool.synchronize(second)
    here = cudatool.current_stream()
    done = here.record_event()
    here.synchronize()
    with cudatool.device(second):
        there = cudatool.current_stream()
        delay()
        pending = there.record_event()
    with cudatool.device(0):
        assert (done.query(), here.query(), pending.query()) == (True, True, False)
        pending.synchronize()  # from the other device
    with cudatool.device(second):
        assert (done.query(), pending.query()) == (True, True)
        assert (here.query(), there.query()) == (True, True)


def test_an_event_lives_on_the_device_that_records_it(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_stream_event_device"""
    event = cudatool.Event()
    assert event.device is None
    cudatool.current_stream().record_event(event)
    with cudatool.device(second):
        other = cudatool.Stream().record_event()
    assert [0, second] == [event.device, other.device]


def test_a_stream_waits_for_an_event_of_another_device(second: int, delay: Delay) -> None:
    """Source: test_cuda_multigpu.py::test_events_wait"""
    cudatool.synchronize(0)
    cudatool.synchronize(second)
    here, event = cudatool.current_stream(), cudatool.Event()
    delay()
    here.record_event(event)
    there = cudatool.current_stream(second)
    assert (here.query(), there.query()) == (False, True)
    there.wait_event(event)
    there.synchronize()
    assert (event.query(), here.query(), there.query()) == (True, True, True)


def test_elapsed_time_is_measured_on_one_device(second: int, delay: Delay) -> None:
    """Source: test_cuda_multigpu.py::test_events_multi_gpu_elapsed_time"""
    start, end, other = (cudatool.Event(enable_timing=True) for _ in range(3))
    start.record()
    other.record(cudatool.current_stream(second))
    delay()
    end.record()
    end.synchronize()
    other.synchronize()
    for device in (0, second):
        with cudatool.device(device):
            with pytest.raises(CudaError):
                start.elapsed_time(other)
            assert start.elapsed_time(end) > 0


def test_a_stream_of_the_drivers_is_used_on_its_device(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_external_streams_multi_device"""
    from cuda.bindings import driver

    with cudatool.device(second) as _:
        cudatool.synchronize()
        status, handle = driver.cuStreamCreate(0)
        assert not status
    device = cudatool.device(second)
    streams = [cudatool.ExternalStream(int(handle), device), cudatool.get_stream_from_external(int(handle), device)]
    assert [(int(handle), second)] * 2 == [(stream.cuda_stream, stream.device) for stream in streams]
    with streams[0]:
        assert [1.0, 1.0] == cudatool.ones(2).get().tolist()
    assert not driver.cuStreamDestroy(handle)[0]


def test_pinned_memory_rests_until_the_copy_on_the_other_device_is_done(second: int, delay: Delay) -> None:
    """Source: test_cuda_multigpu.py::test_caching_pinned_memory_multi_gpu"""
    pinned = cudatool.pin_memory(np.ones(1, np.float32))
    address = pinned.ctypes.data
    there, here = cudatool.zeros(1, device=second), cudatool.zeros(1)
    with cudatool.device(second):
        delay()
        there.copy_(pinned, non_blocking=True)
    del pinned
    other = cudatool.pin_memory(np.full(1, 2, np.float32))
    assert address != other.ctypes.data
    here.copy_(other, non_blocking=True)
    assert [1.0, 2.0] == [there.get()[0], here.get()[0]]


def test_memory_is_counted_for_the_device_it_is_on(second: int) -> None:
    """Source: test_cuda_multigpu.py::test_cuda_device_memory_allocated"""
    before = [cudatool.memory_allocated(index) for index in range(cudatool.device_count())]
    array = cudatool.ones(10, device="cuda:0")
    after = [cudatool.memory_allocated(cudatool.device(index)) for index in range(cudatool.device_count())]
    assert [512, *[0] * (len(before) - 1)] == [now - then for now, then in zip(after, before, strict=True)]
    assert 0 == array.device


def test_each_thread_has_a_current_device_of_its_own(second: int) -> None:
    """Source: test_cuda.py::test_device_context_manager"""
    found: list[int] = []
    with cudatool.device(second):
        thread = threading.Thread(target=lambda: found.append(cudatool.current_device()))
        thread.start()
        thread.join()
    assert [0] == found


def test_the_number_of_devices_is_not_fixed_before_the_driver_starts() -> None:
    """The software device's number is its option; a GPU's are those that are visible when the driver starts.

    Source: test_cuda.py::test_device_count_not_cached_pre_init
    """
    program = (
        "import os, cudatool; cudatool.is_initialized(); os.environ['CUDATOOL_DEVICE'] = 'sim:count=3';"
        "print(cudatool.device_count())"
    )
    assert "3" == _output(program)
