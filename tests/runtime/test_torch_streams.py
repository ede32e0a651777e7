"""What PyTorch's own tests ask of streams, events and copies, asked of ours. docs/torch-tests.md has the table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import cudatool
from cudatool.errors import CudaError, DeviceUnavailableError, UsageError

MIB = 1 << 20
Delay = Callable[[], None]


@pytest.fixture
def streams_restored() -> Iterator[None]:
    yield
    cudatool.set_stream(cudatool.default_stream())


# Streams.


def test_a_stream_is_not_the_default_and_is_current_inside_its_context() -> None:
    """Source: test_cuda.py::test_streams"""
    default, own = cudatool.current_stream(), cudatool.Stream()
    assert default != own
    assert 0 == default.cuda_stream != own.cuda_stream
    with cudatool.stream(own):
        assert own == cudatool.current_stream()
    assert default == cudatool.current_stream()
    assert own.query()
    default.synchronize()
    assert default.query()


def test_a_stream_is_a_context_manager_of_its_own() -> None:
    """Source: test_cuda.py::test_stream_context_manager"""
    before = cudatool.current_stream()
    with cudatool.Stream() as stream:
        assert stream == cudatool.current_stream()
    assert before == cudatool.current_stream()


def test_streams_and_events_say_what_they_are() -> None:
    """Source: test_cuda.py::test_stream_event_repr"""
    stream, event = cudatool.Stream(), cudatool.Event()
    assert f"<Stream device=0 cuda_stream={stream.cuda_stream:#x}>" == repr(stream)
    assert "<Event device=-1 cuda_event=0x0>" == repr(event)
    stream.record_event(event)
    assert f"<Event device=0 cuda_event={event.cuda_event:#x}>" == repr(event)


@pytest.mark.parametrize("external", [False, True])
def test_streams_follow_the_cuda_stream_protocol(external: bool) -> None:
    """Source: test_cuda.py::test_cuda_stream_protocol"""
    stream = cudatool.Stream()
    shown = cudatool.ExternalStream(stream.cuda_stream) if external else stream
    assert (0, stream.cuda_stream) == shown.__cuda_stream__()


def test_the_stream_that_was_set_last_is_current(streams_restored: None) -> None:
    """Source: test_cuda.py::test_stream_compatibility"""
    for stream in (cudatool.Stream(), cudatool.Stream()):
        cudatool.set_stream(stream)
        assert stream.cuda_stream == cudatool.current_stream().cuda_stream
    with pytest.raises(DeviceUnavailableError, match=f"there is no device {cudatool.device_count()}"):
        cudatool.current_stream(cudatool.device_count())


def test_a_stream_of_another_library_is_used_like_ours() -> None:
    """PyTorch's generic ``torch.Stream`` is, for us, a stream of cuda.core.

    Source: test_cuda.py::test_generic_stream_event
    """
    from cuda.core import Device

    cudatool.init()
    Device(0).set_current()
    generic = Device(0).create_stream()
    stream = cudatool.Stream.from_handle(int(generic.handle))
    first, second = cudatool.Event(enable_timing=True), cudatool.Event(enable_timing=True)
    values = np.arange(1000, dtype=np.float32)
    with cudatool.stream(stream):
        array = cudatool.asarray(cudatool.pin_memory(values))
        assert int(generic.handle) == cudatool.current_stream().cuda_stream
    first.record(stream)
    cudatool.current_stream().wait_event(first)
    doubled = cudatool.empty(1000).copy_(array)
    second.record()
    second.synchronize()
    assert first.query() and second.query()
    assert first.cuda_event != second.cuda_event
    np.testing.assert_array_equal(doubled.get(), values)
    assert first.elapsed_time(second) > 0


def test_a_stream_that_the_driver_made_is_used_by_its_handle() -> None:
    """Source: test_cuda_multigpu.py::test_external_streams"""
    from cuda.bindings import driver

    cudatool.init()
    with cudatool.device(0):
        cudatool.synchronize()
        status, handle = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        assert not status
    try:
        for stream in (cudatool.ExternalStream(int(handle)), cudatool.get_stream_from_external(int(handle), 0)):
            assert (int(handle), 0) == (stream.cuda_stream, stream.device_index)
            with stream:
                assert cudatool.ones(3).get().tolist() == [1, 1, 1]
    finally:
        assert not driver.cuStreamDestroy(handle)[0]


def test_synchronize_takes_every_name_of_a_device() -> None:
    """Source: test_cuda_multigpu.py::test_cuda_synchronize"""
    for device in (None, "cuda", "cuda:0", 0, cudatool.device(0)):
        cudatool.synchronize(device)
    with pytest.raises(UsageError, match="'cpu' is not a device"):
        cudatool.synchronize("cpu")


# Events.


def test_an_event_is_over_when_the_work_before_it_is(delay: Delay) -> None:
    """Source: test_cuda.py::test_events"""
    stream = cudatool.current_stream()
    start, end = cudatool.Event(enable_timing=True), cudatool.Event(enable_timing=True)
    assert (end.query(), end.cuda_event) == (True, 0)
    stream.record_event(start)
    delay()
    stream.record_event(end)
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0
    assert end.cuda_event != 0


@pytest.mark.parametrize(
    ("timing", "message"), [(False, "both events must be created with"), (True, "both events must be recorded before")]
)
def test_elapsed_time_needs_events_with_timing_that_were_recorded(timing: bool, message: str) -> None:
    """Source: test_cuda.py::test_events_elapsedtime"""
    first, second = cudatool.Event(enable_timing=timing), cudatool.Event(enable_timing=timing)
    with pytest.raises(CudaError, match=message):
        first.elapsed_time(second)
    if not timing:
        with pytest.raises(CudaError, match=message):
            cudatool.Event().elapsed_time(cudatool.Event())


_WAIT_FOR_THE_HOST = """
extern "C" __global__ void wait_for_the_host(volatile int *flag) { while (!*flag) {} }
"""


@pytest.mark.parametrize("wait", ["stream", "event", "other stream"])
def test_other_threads_run_while_one_waits_for_the_device(wait: str) -> None:
    """The kernel ends when another thread sets a flag, which it could not while waiting held the interpreter's lock.

    Source: test_cuda_multigpu.py::test_stream_event_nogil
    """
    kernel = cudatool.compile(_WAIT_FOR_THE_HOST, "wait_for_the_host")
    flag = cudatool.pin_memory(np.zeros(1, np.int32))
    waits = threading.Event()

    def set_flag() -> None:
        waits.wait(60)
        flag[0] = 1

    setter = threading.Thread(target=set_flag)
    setter.start()
    stream = cudatool.Stream()
    with stream:
        kernel[1, 1](flag.ctypes.data)
        event = stream.record_event(cudatool.Event(blocking=True))
    waits.set()
    if wait == "stream":
        stream.synchronize()
    elif wait == "event":
        event.synchronize()
    else:
        other = cudatool.Stream()
        event.wait(other)
        other.synchronize()
    setter.join()
    assert event.query() and stream.query()


def test_graphs_wait_for_each_other_by_external_events() -> None:
    """Source: test_cuda.py::test_graph_external_wait_and_record"""
    kernel = cudatool.compile(_WAIT_FOR_THE_HOST, "wait_for_the_host")
    array, flag = cudatool.ones(4), cudatool.pin_memory(np.zeros(1, np.int32))
    out = cudatool.pin_memory(np.zeros(4, np.float32))
    started, ended = cudatool.Event(external=True), cudatool.Event(external=True)
    signal, work = cudatool.CUDAGraph(), cudatool.CUDAGraph()
    with cudatool.graph(signal, capture_error_mode="relaxed"):
        kernel[1, 1](flag.ctypes.data)
        started.record()
    assert started.query()  # what is captured is not recorded yet
    with cudatool.graph(work, capture_error_mode="relaxed"):
        started.wait()
        array.get(out, blocking=False)
        ended.record()
    signals, works = cudatool.Stream(), cudatool.Stream()
    try:
        with signals:
            signal.replay()
        with works:
            work.replay()
        assert (False, [0, 0, 0, 0]) == (ended.query(), out.tolist())
    finally:
        flag[0] = 1  # now the kernel ends
    ended.synchronize()
    assert ([1, 1, 1, 1], True) == (out.tolist(), works.query())


# Copies.


@pytest.mark.parametrize("direction", ["to the device", "to the host", "to a view in pinned memory"])
def test_a_copy_that_does_not_block_is_done_when_an_event_after_it_is(direction: str) -> None:
    """Source: test_cuda.py::test_copy_non_blocking"""
    event, size = cudatool.Event(), 10_000_000
    pinned = cudatool.pin_memory(np.full(size, 7, np.uint8))
    if direction == "to the device":
        array = cudatool.ones(size, np.uint8).copy_(pinned, non_blocking=True)
        event.record()
        event.synchronize()
        assert (array.get() == 7).all()
        return
    out = pinned[1:] if direction == "to a view in pinned memory" else pinned
    cudatool.ones(out.shape, np.uint8).get(out, blocking=False)
    event.record()
    event.synchronize()
    assert (out == 1).all()
    assert pinned[0] == (7 if out is not pinned else 1)


def test_copies_that_do_not_block_are_in_order_with_those_that_cast(delay: Delay) -> None:
    """Source: test_cuda.py::test_copy_non_blocking_type_conversion"""
    source, pinned = cudatool.ones(1), cudatool.pin_memory(np.zeros(1, np.float32))
    target = cudatool.zeros(1, np.int64)
    delay()
    source.get(pinned, blocking=False)
    landed = cudatool.empty(1).copy_(pinned, non_blocking=True)
    target.copy_(landed)
    assert target.get().tolist() == [1]


@pytest.mark.parametrize("non_blocking", [True, False])
def test_a_copy_to_the_device_blocks_unless_told_not_to(delay: Delay, non_blocking: bool) -> None:
    """Source: test_cuda.py::test_to_non_blocking"""
    stream, source = cudatool.current_stream(), cudatool.pin_memory(np.arange(MIB, dtype=np.float32))
    target = cudatool.empty(MIB)
    cudatool.synchronize()
    delay()
    target.copy_(source, non_blocking=non_blocking)
    assert (not non_blocking) == stream.query()
    np.testing.assert_array_equal(target.get(), source)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_copy_to_the_host_blocks_unless_told_not_to(delay: Delay, blocking: bool) -> None:
    """Source: test_cuda.py::test_to_non_blocking, test_cuda.py::test_to_cpu_blocking_by_default"""
    stream, source, out = cudatool.current_stream(), cudatool.ones(MIB), cudatool.empty_pinned(MIB)
    cudatool.synchronize()
    delay()
    if blocking:
        source.get(out)
    else:
        source.get(out, blocking=False)
    assert blocking == stream.query()
    stream.synchronize()
    assert (out == 1).all()


def test_the_dtype_changes_on_either_side() -> None:
    """Source: test_cuda.py::test_type_conversions"""
    values = np.linspace(-3, 3, 25, dtype=np.float32).reshape(5, 5)
    assert cudatool.asarray(values).dtype == np.float32
    doubled = cudatool.asarray(values, np.float64)
    assert doubled.dtype == np.float64
    singled = cudatool.asarray(doubled, np.float32)
    np.testing.assert_array_equal(singled.get(), values)
    whole = cudatool.asarray(singled, np.int32)
    np.testing.assert_array_equal(whole.get(), values.astype(np.int32))


def test_an_array_is_never_read_by_numpy_behind_its_back() -> None:
    """Source: test_cuda.py::test_to_numpy"""
    with pytest.raises(TypeError, match=r"call its get\(\)"):
        np.asarray(cudatool.empty(1))
