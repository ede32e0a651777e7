from __future__ import annotations

import threading
import time

import pytest

import cudatool
from cudatool.errors import DeviceUnavailableError, UsageError
from cudatool.trace.events import Event, Kind


def test_properties_describe_the_device(device: str) -> None:
    properties = cudatool.get_device_properties()
    assert cudatool.is_available()
    assert cudatool.get_device_name() == properties.name
    assert cudatool.get_device_capability() == (properties.major, properties.minor)
    assert properties.total_memory == cudatool.mem_get_info()[1]
    assert properties.warp_size == 32
    assert properties.name.startswith("cudatool software device") == (device == "sim")


@pytest.mark.parametrize("name", [0, "cuda", "cuda:0", "0", None])
def test_device_can_be_named_in_several_ways(name: object) -> None:
    with cudatool.device(name):
        assert cudatool.current_device() == 0


def test_cuda_core_device_is_a_device() -> None:
    from cuda.core import Device

    assert cudatool.get_device_name(Device(0)) == cudatool.get_device_name(0)


@pytest.mark.parametrize("name", ["gpu", 1.5, object()])
def test_what_names_no_device_is_refused(name: object) -> None:
    with pytest.raises(UsageError, match="is not a device"):
        cudatool.set_device(name)


@pytest.mark.parametrize("ordinal", [-1, 99])
def test_missing_device_is_refused(ordinal: int) -> None:
    with pytest.raises(DeviceUnavailableError, match=f"no device {ordinal}"):
        cudatool.Stream(ordinal)


def test_new_thread_starts_on_device_0() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(cudatool.current_device()))
    thread.start()
    thread.join()
    assert found == [0]


def test_array_can_be_made_and_dropped_in_a_thread() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(float(cudatool.ones(3).get().sum())))
    thread.start()
    thread.join()
    assert found == [3.0]


def test_synchronize_is_recorded(events: list[Event]) -> None:
    cudatool.synchronize()
    assert [(event.kind, event.device) for event in events] == [(Kind.DEVICE_SYNCHRONIZE, 0)]


def test_each_wait_says_when_it_began(events: list[Event]) -> None:
    event, stream = cudatool.Event(), cudatool.Stream()
    event.record(stream)
    for wait in (event.synchronize, stream.synchronize, cudatool.synchronize):
        events.clear()
        before = time.monotonic_ns()
        wait()
        assert before <= events[-1].aux1 <= events[-1].time
