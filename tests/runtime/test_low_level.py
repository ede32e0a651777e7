"""The CUDA runtime API, sensors, hidden synchronizations, ranges, profiler control, and what a fork leaves usable."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from warm_process import run_python

import cudatool
from cudatool import _driver, gds, nvtx, profiler
from cudatool.errors import CudaError, DeviceUnavailableError, SynchronizationError, UsageError
from cudatool.nvtx import _library
from cudatool.trace.events import Event, Kind


def run(source: str, **environment: str) -> str:
    """Return what a program prints."""
    done = run_python(source, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The runtime API.


def test_errors_have_the_drivers_words() -> None:
    cudart = cudatool.cudart()
    assert "no error" == cudart.cudaGetErrorString(cudart.cudaError.success)
    assert "invalid argument" == cudart.cudaGetErrorString(1)
    assert "unrecognized error code" == cudart.cudaGetErrorString(12345)


def test_check_error_raises_what_a_status_means() -> None:
    """Source: test_cuda.py::test_check_error"""
    cudatool.check_error(cudatool.cudaStatus.SUCCESS)
    with pytest.raises(CudaError, match=r"out of memory \(2\)") as caught:
        cudatool.check_error(2)
    assert "CUDA_ERROR_OUT_OF_MEMORY" == caught.value.name


def test_memory_is_registered_and_unregistered_by_address() -> None:
    """Source: test_cuda.py::test_cudart_register"""
    cudart, array = cudatool.cudart(), np.zeros(1 << 14)
    assert not cudatool.is_pinned(array)
    assert cudart.cudaError.success == cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0)
    assert cudatool.is_pinned(array)
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" == cudart.cudaHostRegister(array.ctypes.data, 8, 0).name
    assert 0 == cudart.cudaHostUnregister(array.ctypes.data)
    assert not cudatool.is_pinned(array)
    assert "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED" == cudart.cudaHostUnregister(array.ctypes.data).name


def test_stream_of_the_runtime_api_can_be_used_and_destroyed() -> None:
    """Source: test_cuda_multigpu.py::test_external_streams"""
    cudart, handle = cudatool.cudart(), ctypes.c_void_p()
    assert 0 == cudart.cudaStreamCreate(ctypes.addressof(handle))
    with cudatool.get_stream_from_external(handle.value or 0) as stream:
        array = cudatool.ones(10)
    assert handle.value == stream.cuda_stream
    stream.synchronize()
    assert 10 == array.get().sum()
    del array
    assert 0 == cudart.cudaStreamDestroy(handle.value or 0)


def test_memory_info_is_the_devices() -> None:
    free, total = cudatool.cudart().cudaMemGetInfo(0)
    assert cudatool.mem_get_info()[1] == total == cudatool.get_device_properties().total_memory
    assert 0 < free <= total


# Devices.


def test_architectures_are_those_that_kernels_can_be_compiled_for() -> None:
    architectures = cudatool.get_arch_list()
    major, minor = cudatool.get_device_capability()
    assert f"sm_{major}{minor}" in architectures
    assert len(architectures) == cudatool.get_gencode_flags().count("-gencode compute=compute_")
    assert f"code=sm_{major}{minor}" in cudatool.get_gencode_flags()


def test_capability_says_which_formats_there_are() -> None:
    modern = cudatool.get_device_capability() >= (8, 0)
    assert (modern, modern, True) == (
        cudatool.is_tf32_supported(),
        cudatool.is_bf16_supported(including_emulation=False),
        cudatool.is_bf16_supported(),
    )


def test_device_of_an_array_is_made_current() -> None:
    with cudatool.device_of(cudatool.ones(1)):
        assert 0 == cudatool.current_device()
    with cudatool.device_of(np.ones(1)) as nothing:  # on no device
        assert nothing is None


def test_devices_are_counted_without_starting_a_driver(device: str) -> None:
    """Source: test_cuda_nvml_based_avail.py::test_cuda_is_available"""
    program = (
        "import cudatool, sys; print(cudatool.is_available(), cudatool.device_count(), cudatool.is_initialized(),"
        "'cuda.bindings.driver' in sys.modules)"
    )
    command = [sys.executable, "-c", program]  # which has imported nothing
    for specification, count in (
        (os.environ.get("CUDATOOL_DEVICE", device), cudatool.device_count()),
        ("sim:count=3", 3),
    ):
        environment = {**os.environ, "CUDATOOL_DEVICE": specification}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert f"True {count} False False\n" == done.stdout, done.stderr


def test_process_that_has_only_counted_devices_can_fork() -> None:
    """Source: test_cuda_nvml_based_avail.py::test_cuda_is_available, test_cuda.py::test_is_pinned_no_context"""
    program = (
        "import os, cudatool\n"
        "assert cudatool.is_available()\n"
        "child = os.fork()\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
        "print(cudatool.ones(3).get().sum(), flush=True)\n"
        "if not child: os._exit(0)"
    )
    assert "3.0\n3.0\n" == run(program, CUDATOOL_DEVICE="sim")


def test_process_forked_while_a_thread_loads_the_driver_is_told_so() -> None:
    program = (
        "import os, signal, threading, cudatool\n"
        "from cudatool import _driver\n"
        "from cudatool.runtime import calls\n"
        "_driver.initialize()\n"
        "held = threading.Event()\n"
        "def load():\n"
        "    with calls._loading: held.set(); threading.Event().wait()\n"
        "threading.Thread(target=load, daemon=True).start()\n"
        "held.wait()\n"
        "if child := os.fork():\n"
        "    print(os.waitpid(child, 0)[1])\n"
        "else:\n"
        "    signal.alarm(20)\n"
        "    try: cudatool.ones(3)\n"
        "    except cudatool.CudatoolError as error: print(type(error).__name__, flush=True)\n"
        "    os._exit(0)"
    )
    assert "DeviceUnavailableError\n0\n" == run(program, CUDATOOL_DEVICE="sim")


def test_process_forked_off_one_that_uses_the_device_is_told_so() -> None:
    """Source: test_multiprocessing.py::test_wrong_cuda_fork"""
    program = (
        "import os, sys, cudatool\n"
        "array, event = cudatool.ones(3), cudatool.current_stream().record_event()\n"
        "used, pinned, graph = cudatool.ones(3), cudatool.empty_pinned(3), cudatool.CUDAGraph()\n"
        "with cudatool.graph(graph): array + 1\n"
        "ranks = cudatool.nccl.init_all([0])\n"
        "used.record_stream(cudatool.Stream())\n"
        "array.copy_(cudatool.pin_memory(pinned), non_blocking=True)\n"
        "pinned[:] = 1; array.copy_(pinned, non_blocking=True)\n"
        "if os.fork():\n"
        "    assert os.wait()[1] == 0\n"
        "    print(array.get().sum())\n"
        "else:\n"
        "    assert not cudatool.is_initialized() and cudatool.device_count() == 1\n"
        "    try: cudatool.ones(3)\n"
        "    except cudatool.CudatoolError as error: print(type(error).__name__, 'spawn' in str(error), flush=True)\n"
        "    sys.unraisablehook = lambda failure: print(failure, flush=True)\n"
        "    del event, used, pinned, graph, array, ranks\n"  # without a word: they are the parent's
        "    os._exit(0)"
    )
    assert "DeviceUnavailableError True\n3.0\n" == run(program, CUDATOOL_DEVICE="sim")


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("0", [0]),
        ("1,0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("1,1", []),
        ("GPU-b", [1]),
        ("GPU-a,1", [0, 1]),
        ("GPU-", []),  # names both
        ("0,word,1", [0]),
        ("1gpu2", [1]),  # as strtol reads it
    ],
)
def test_visible_devices_are_read_as_the_driver_reads_them(setting: str, expected: list[int]) -> None:
    """
    Source: test_cuda_nvml_based_avail.py::test_env_var_parsing
    Source: test_cuda_nvml_based_avail.py::test_partial_uuid_resolver
    """
    assert expected == _driver._visible(setting, ["GPU-a123", "GPU-b456"])


def cards() -> SimpleNamespace:
    """Return a stand-in for pynvml: two cards, the second of which has a slice."""
    error = type("NVMLError", (Exception,), {})

    def by_uuid(uuid: str) -> str:
        if uuid != "MIG-1":
            raise error("not found")
        return "1, slice"

    return SimpleNamespace(
        NVMLError=error,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda handle: f"card {handle}",
        nvmlDeviceGetUUID=lambda handle: f"GPU-{'ab'[handle]}123",
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["card 0", "card 1"]),
        ("1", ["card 1"]),
        ("GPU-b,GPU-a", ["card 1", "card 0"]),
        ("MIG-1,MIG-2", ["card 1, slice"]),
        ("MIG-2", []),
        ("", []),
    ],
)
def test_gpus_are_those_that_the_environment_shows(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, expected: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", cards())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert expected == _driver.gpu_names()


def test_launches_block_where_the_environment_says_so() -> None:
    program = (
        "import cudatool\n"
        "kernel = cudatool.compile('extern \"C\" __global__ void f(int *p) { *p = 1; }', 'f')\n"
        "array = cudatool.zeros(1, 'i4'); stream = cudatool.Stream()\n"
        "cudatool.synchronize()\n"
        "cudatool.launch(stream, cudatool.LaunchConfig(grid=1, block=1), kernel, array)\n"
        "from cuda.bindings import driver\n"
        "import ctypes; print(ctypes.c_int.from_address(array.data_ptr()).value)"  # without any wait
    )
    assert "1\n" == run(program, CUDATOOL_DEVICE="sim", CUDA_LAUNCH_BLOCKING="1")
    assert "0\n" == run(program, CUDATOOL_DEVICE="sim")


def test_another_library_may_take_the_context_away(device: str) -> None:
    from cuda.bindings import driver

    event, kernel = cudatool.Event(), cudatool.compile('extern "C" __global__ void f(int *p) { *p = 2; }', "f")
    array = cudatool.zeros(1, "i4")
    cudatool.current_device()
    assert not driver.cuCtxSetCurrent(0)[0]
    kernel[1, 1](array)
    assert not driver.cuCtxSetCurrent(0)[0]
    event.record()
    assert not driver.cuCtxSetCurrent(0)[0]
    event.wait()
    assert [2] == array.get().tolist()


def test_closed_stream_takes_no_work_however_it_is_given() -> None:
    kernel, stream = cudatool.compile('extern "C" __global__ void f() {}', "f"), cudatool.Stream()
    event = cudatool.Event()
    event.record()
    stream.close()
    config = cudatool.LaunchConfig(grid=1, block=1)
    for use in (
        lambda: cudatool.launch(stream, config, kernel),
        lambda: event.record(stream),
        lambda: event.wait(stream),
        lambda: stream.wait_event(event),
        lambda: stream.record_event(),
        lambda: stream.native,
        lambda: stream.cuda_stream,
    ):
        with pytest.raises(CudaError, match="was closed"):
            use()


def test_event_of_one_device_is_not_recorded_on_another() -> None:
    program = (
        "import cudatool\n"
        "first, second = cudatool.Stream(0), cudatool.Stream(1)\n"
        "kernel = cudatool.compile('extern \"C\" __global__ void f(int *p) { *p = 5; }', 'f')\n"
        "event = cudatool.Event(); event.record(first)\n"
        "try: event.record(second)\n"
        "except cudatool.CudaError as error: print(error.name)\n"
        "event.wait(second)\n"  # but waited for everywhere
        "array = cudatool.zeros(1, 'i4', device=1)\n"
        "cudatool.synchronize(1)\n"
        "cudatool.launch(second, cudatool.LaunchConfig(grid=1, block=1), kernel, array)\n"
        "second.synchronize()\n"
        "print(array.get().tolist(), cudatool.current_device())"
    )
    assert "CUDA_ERROR_INVALID_HANDLE\n[5] 0\n" == run(program, CUDATOOL_DEVICE="sim:count=2")


# Sensors.

SENSORS = ("clock_rate", "memory_usage", "power_draw", "temperature", "utilization")


@pytest.mark.parametrize("name", SENSORS)
def test_sensors_are_a_gpus(device: str, name: str) -> None:
    """
    Source: test_cuda.py::test_temperature
    Source: test_cuda.py::test_power_draw
    Source: test_cuda.py::test_clock_speed
    Source: test_cuda.py::test_nvml_get_handler
    """
    if device == "sim":
        with pytest.raises(UsageError, match="software device has no"):
            getattr(cudatool, name)()
    else:
        assert 0 <= getattr(cudatool, name)()


def test_memory_in_use_is_known_on_every_device() -> None:
    """Source: test_cuda.py::test_device_memory_used"""
    array = cudatool.zeros(64 << 20, "u1")
    cudatool.synchronize()
    assert array.nbytes <= cudatool.device_memory_used() <= cudatool.mem_get_info()[1]
    del array
    cudatool.empty_cache()


# Hidden synchronizations.


@pytest.fixture
def strictly() -> object:
    cudatool.set_sync_debug_mode("error")
    yield
    cudatool.set_sync_debug_mode("default")


def test_mode_is_set_by_name_or_number() -> None:
    assert 0 == cudatool.get_sync_debug_mode()
    for number, name in enumerate(("default", "warn", "error")):
        cudatool.set_sync_debug_mode(name)
        assert number == cudatool.get_sync_debug_mode()
        cudatool.set_sync_debug_mode(number)
        assert number == cudatool.get_sync_debug_mode()
    cudatool.set_sync_debug_mode(0)
    for wrong in ("loud", 3, -1):
        with pytest.raises(UsageError, match="is not a mode"):
            cudatool.set_sync_debug_mode(wrong)


def test_what_waits_for_the_device_warns_where_the_program_does() -> None:
    """Source: test_torch.py::test_sync_warning"""
    array = cudatool.ones(4)
    cudatool.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing CUDA operation") as caught:
            array.get()
            cudatool.asarray(np.ones(4))
    finally:
        cudatool.set_sync_debug_mode("default")
    assert [__file__] * 2 == [warning.filename for warning in caught]


@pytest.mark.parametrize(
    "hidden",
    [
        lambda array, pinned: array.get(),
        lambda array, pinned: array.get(pinned),
        lambda array, pinned: array.get(np.empty(4, "f4"), blocking=False),  # the driver waits
        lambda array, pinned: array.copy_(pinned),
        lambda array, pinned: cudatool.asarray([1.0, 2.0]),
    ],
)
def test_hidden_synchronization_is_refused(strictly: object, hidden: object) -> None:
    array, pinned = cudatool.ones(4), cudatool.empty_pinned(4)
    with pytest.raises(SynchronizationError, match="called a synchronizing CUDA operation"):
        hidden(array, pinned)  # type: ignore[operator]


def test_what_does_not_wait_is_not_refused(strictly: object) -> None:
    array, pinned, event = cudatool.ones(4), cudatool.empty_pinned(4), cudatool.Event()
    array.copy_(pinned, non_blocking=True)
    array.fill_(2.5)
    array.get(pinned, blocking=False)
    cudatool.asarray(pinned, non_blocking=True)
    array.clone()
    event.record()
    event.synchronize()  # what says that it waits, may
    cudatool.current_stream().synchronize()
    cudatool.synchronize()
    assert [2.5] * 4 == pinned.tolist()


def test_result_that_is_not_waited_for_is_pinned() -> None:
    """Source: test_cuda.py::test_to_non_blocking"""
    result = cudatool.ones(4).get(blocking=False)
    assert cudatool.is_pinned(result)
    cudatool.synchronize()
    assert [1.0] * 4 == result.tolist()


# Host memory.


def test_registered_memory_is_pinned_until_the_block_ends(events: list[Event]) -> None:
    host = np.arange(1 << 14, dtype="f4")
    with cudatool.host_register(host) as pinned:
        assert pinned is host
        assert cudatool.is_pinned(host)
        array = cudatool.asarray(host, non_blocking=True)
        cudatool.synchronize()
    assert not cudatool.is_pinned(host)
    np.testing.assert_array_equal(host, array.get())
    pinning = [event for event in events if event.kind in (Kind.HOST_ALLOC, Kind.HOST_FREE)]
    assert [("cuMemHostRegister", host.nbytes), ("cuMemHostUnregister", host.nbytes)] == [
        (event.name, event.size) for event in pinning
    ]


def test_registration_ends_once() -> None:
    registration = cudatool.host_register(np.zeros(1000))
    assert not registration.is_closed
    registration.close()
    registration.close()
    assert registration.is_closed


def test_memory_can_be_registered_once() -> None:
    host = np.zeros(1 << 14)
    with cudatool.host_register(host), pytest.raises(CudaError) as caught:
        cudatool.host_register(host)
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" == caught.value.name


@pytest.mark.parametrize("host", [np.zeros((8, 8))[:, ::2], np.zeros(0)])
def test_what_is_not_in_one_piece_is_not_registered(host: np.ndarray) -> None:
    with pytest.raises(UsageError, match="it is not contiguous"):
        cudatool.host_register(host)


# The free mutex.


def test_no_memory_goes_back_to_the_driver_while_the_free_mutex_is_held() -> None:
    cudatool.empty_cache()
    cudatool.zeros(32 << 20, "u1")  # cached, in a segment of its own
    cudatool.synchronize()
    reserved = cudatool.memory_reserved()
    thread = threading.Thread(target=cudatool.empty_cache)
    with cudatool.free_mutex():
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join()
    assert cudatool.memory_reserved() < reserved


def test_free_mutex_lets_its_holder_free() -> None:
    cudatool.zeros(32 << 20, "u1")
    cudatool.synchronize()
    reserved = cudatool.memory_reserved()
    with cudatool.free_mutex(), cudatool.free_mutex():
        cudatool.empty_cache()
    assert cudatool.memory_reserved() < reserved


# Events of graphs, and of other processes.


def test_graph_records_an_external_event_at_each_replay() -> None:
    """Source: test_cuda.py::test_graph_timing"""
    start, end = (cudatool.Event(enable_timing=True, external=True) for _ in range(2))
    array, graph = cudatool.zeros(1 << 16), cudatool.CUDAGraph()
    cudatool.synchronize()
    with cudatool.graph(graph):
        start.record()
        array.fill_(1)
        end.record()
    graph.replay()
    end.synchronize()
    assert start.elapsed_time(end) >= 0


def test_work_outside_of_a_graph_is_ordered_with_it_by_external_events() -> None:
    """Source: test_cuda.py::test_graph_external_wait_and_record"""
    source = 'extern "C" __global__ void f(int *p) { for (int i = 0; i < 1000; ++i) atomicAdd(p, 1); }'
    kernel, count, seen = cudatool.compile(source, "f"), cudatool.zeros(1, "i4"), cudatool.zeros(1, "i4")
    begin, done = cudatool.Event(external=True), cudatool.Event(external=True)
    graph, outside = cudatool.CUDAGraph(), cudatool.Stream()
    cudatool.synchronize()
    begin.record()
    with cudatool.graph(graph):
        begin.wait()
        kernel[1, 1](count)
        done.record()
    for round_ in range(3):
        with cudatool.stream(outside):
            count.fill_(10 * round_)
            begin.record()
        graph.replay()
        with cudatool.stream(outside):
            done.wait()
            seen.copy_(count)
        outside.synchronize()
        assert [10 * round_ + 1000] == seen.get().tolist()


def test_event_is_waited_for_in_another_process() -> None:
    """Source: test_multiprocessing.py::test_event_handle_importer"""
    event = cudatool.Event(interprocess=True)
    handle = event.ipc_handle()
    event.record()
    event.synchronize()
    program = (
        "import sys, cudatool\n"
        "event = cudatool.Event.from_ipc_handle(0, bytes.fromhex(sys.argv[1]))\n"
        "event.wait(); event.synchronize(); print(event.query())"
    )
    done = run_python(program, handle.hex())
    assert "True\n" == done.stdout, done.stderr


def test_event_that_is_not_for_other_processes_has_no_handle() -> None:
    with pytest.raises(UsageError, match="interprocess=True"):
        cudatool.Event().ipc_handle()
    with pytest.raises(UsageError, match="with timing cannot be shared"):
        cudatool.Event(enable_timing=True, interprocess=True)
    with pytest.raises(UsageError, match="is 64 bytes, not b'abc'"):
        cudatool.Event.from_ipc_handle(0, b"abc")


# Ranges and profiler control.


class FakeNvtx:
    """Stands in for NVTX and notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.push = self._note("push")
        self.pop = self._note("pop")
        self.end = self._note("end")
        self.mark = self._note("mark")

    def _note(self, name: str) -> object:
        return lambda *arguments: self.calls.append((name, *arguments))

    def start(self, message: str) -> str:
        self.calls.append(("start", message))
        return f"<{message}>"


@pytest.fixture
def fake_nvtx(monkeypatch: pytest.MonkeyPatch) -> FakeNvtx:
    found = FakeNvtx()
    monkeypatch.setattr("cudatool.nvtx._ranges.nvtx", lambda: found)
    return found


def test_ranges_reach_the_trace_and_nvtx(fake_nvtx: FakeNvtx, events: list[Event]) -> None:
    """Source: test_cuda.py::test_nvtx"""
    assert 0 == nvtx.range_push("outer")
    assert 1 == nvtx.range_push("inner")
    nvtx.mark("here")
    assert 1 == nvtx.range_pop()
    assert 0 == nvtx.range_pop()
    assert [("push", "outer"), ("push", "inner"), ("mark", "here"), ("pop",), ("pop",)] == fake_nvtx.calls
    assert [
        (Kind.RANGE_PUSH, "outer"),
        (Kind.RANGE_PUSH, "inner"),
        (Kind.MARK, "here"),
        (Kind.RANGE_POP, ""),
        (Kind.RANGE_POP, ""),
    ] == [(event.kind, event.name) for event in events]


def test_range_is_a_context_manager_and_a_decorator(fake_nvtx: FakeNvtx, events: list[Event]) -> None:
    @nvtx.range("step")
    def step() -> int:
        return 7

    with nvtx.range("batch {} of {total}", 3, total=9):
        assert 7 == step()
    assert 7 == step()
    assert ["batch 3 of 9", "step", "step"] == [event.name for event in events if event.kind == Kind.RANGE_PUSH]
    assert 3 == sum(event.kind == Kind.RANGE_POP for event in events)


def test_range_ends_also_when_its_block_fails(fake_nvtx: FakeNvtx) -> None:
    with pytest.raises(ValueError, match="no"), nvtx.range("risky"):
        raise ValueError("no")
    assert [("push", "risky"), ("pop",)] == fake_nvtx.calls


def test_started_ranges_may_end_on_another_thread_in_any_order(fake_nvtx: FakeNvtx, events: list[Event]) -> None:
    """Source: test_cuda.py::test_nvtx"""
    first, second = nvtx.range_start("first"), nvtx.range_start("second")
    thread = threading.Thread(target=nvtx.range_end, args=(first,))
    thread.start()
    thread.join()
    nvtx.range_end(second)
    assert [("start", "first"), ("start", "second"), ("end", "<first>"), ("end", "<second>")] == fake_nvtx.calls
    starts = {event.aux0: event.name for event in events if event.kind == Kind.RANGE_START}
    assert ["first", "second"] == [starts[event.aux0] for event in events if event.kind == Kind.RANGE_END]
    with pytest.raises(UsageError, match="is no open range"):
        nvtx.range_end(first)


def test_pop_of_nothing_says_so_by_a_negative_number(fake_nvtx: FakeNvtx, events: list[Event]) -> None:
    assert nvtx.range_pop() < 0
    assert [] == fake_nvtx.calls == events


def test_nvtx_comes_from_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []
    package = SimpleNamespace(
        push_range=lambda message: calls.append(("push", message)),
        pop_range=lambda: calls.append(("pop", None)),
        mark=lambda message: calls.append(("mark", message)),
        start_range=lambda message: (7, 8),
        end_range=lambda started: calls.append(("end", started)),
    )
    monkeypatch.setitem(sys.modules, "nvtx", package)
    _library.nvtx.cache_clear()
    try:
        nvtx.range_end(nvtx.range_start("started"))
        with nvtx.range("inside"):
            nvtx.mark("here")
    finally:
        _library.nvtx.cache_clear()
    assert [("end", (7, 8)), ("push", "inside"), ("mark", "here"), ("pop", None)] == calls


def test_nvtx_is_not_needed(monkeypatch: pytest.MonkeyPatch, events: list[Event]) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr(_library, "_candidates", lambda: iter(["no-such-library.so", "libc.so.6"]))  # nor is libc NVTX
    _library.nvtx.cache_clear()
    try:
        assert _library.nvtx() is None
        with nvtx.range("inside"):
            nvtx.range_end(nvtx.range_start("started"))
    finally:
        _library.nvtx.cache_clear()
    assert ["inside", "started"] == [event.name for event in events if event.name]


def test_profile_is_a_range_of_the_trace(events: list[Event], calls: list[Event]) -> None:
    events.clear()
    with profiler.profile():
        cudatool.synchronize()
    kinds = [Kind.RANGE_PUSH, Kind.DEVICE_SYNCHRONIZE, Kind.RANGE_POP]
    assert kinds == [event.kind for event in events if event.kind in kinds]
    assert [name for event in calls if (name := event.name).startswith("cudatool.profiler")] == [
        "cudatool.profiler.profile",
        "cudatool.profiler.start",
        "cudatool.profiler.stop",
    ]


def test_profiler_that_the_driver_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudatool.runtime.cudart import Cudart, cudaError

    monkeypatch.setattr(Cudart, "cudaProfilerStart", staticmethod(lambda: cudaError(5)))
    with pytest.raises(CudaError, match=r"\(5\)"):
        profiler.start()


# GPUDirect Storage, where there is no GPU.


def test_files_of_arrays_need_a_gpu(device: str, tmp_path: object) -> None:
    """Source: test_cuda.py::test_gds_fails_in_ci"""
    if device != "sim":
        pytest.skip("this process uses a GPU")
    with pytest.raises(DeviceUnavailableError, match="needs an NVIDIA GPU"):
        gds.GdsFile(f"{tmp_path}/array", os.O_CREAT | os.O_RDWR)
    assert [] == os.listdir(str(tmp_path))
    with pytest.raises(DeviceUnavailableError, match="needs an NVIDIA GPU"):
        gds.gds_register_buffer(cudatool.ones(1024))


# Kernels' arguments.


def test_many_threads_can_launch_one_kernel() -> None:
    kernel = cudatool.compile('extern "C" __global__ void f(int *p, int i, int v) { p[i] = v; }', "f")
    array = cudatool.zeros(64, "i4")
    cudatool.synchronize()

    def work(part: int) -> None:
        for i in range(part, 64, 4):
            kernel[1, 1](array, i, 1000 + i)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [1000 + i for i in range(64)] == array.get().tolist()


PARAMETERS = (
    'struct S { char c; double d; }; extern "C" __global__ void f(bool, short, int, float, double, S, void *) {}'
)


def test_arguments_become_the_bytes_of_their_parameters() -> None:
    kernel, array = cudatool.compile(PARAMETERS, "f"), cudatool.ones(1)
    structure = np.zeros(1, np.dtype([("c", "i1"), ("d", "f8")], align=True))[0]
    structure["c"], structure["d"] = 3, 2.5
    packed = kernel.pack((True, -2, 0xFFFFFFFF, 1.5, np.float64(0.1), structure, array))
    values = [packed[offset : offset + size] for offset, size in kernel.parameters]
    assert values[0] == b"\1"
    assert np.int16(-2).tobytes() == values[1]
    assert b"\xff" * 4 == values[2]
    assert np.float32(1.5).tobytes() == values[3]
    assert np.float64(0.1).tobytes() == values[4]
    assert structure.tobytes() == values[5]
    assert array.data_ptr().to_bytes(8, "little") == values[6]


def test_kernel_goes_with_its_last_name() -> None:
    gone = weakref.ref(cudatool.compile('extern "C" __global__ void f() {}', "f"))
    assert gone() is None  # without the garbage collector


@pytest.mark.parametrize(
    ("index", "wrong"),
    [(0, 256), (1, 1 << 16), (1, -(1 << 15) - 1), (2, 1 << 32), (3, 1e300), (3, np.float64(1)), (5, 1.0), (6, "text")],
)
def test_what_does_not_fit_its_parameter_is_refused(index: int, wrong: object) -> None:
    kernel = cudatool.compile(PARAMETERS, "f")
    right: list[object] = [True, 1, 1, 1.0, 1.0, np.zeros(1, [("c", "i8"), ("d", "f8")])[0], cudatool.ones(1)]
    right[index] = wrong
    with pytest.raises(UsageError, match=f"argument {index} of f"):
        kernel.pack(tuple(right))


def test_kernel_with_arguments_beyond_the_stack_of_the_launcher() -> None:
    source = (
        'struct S { int v[500]; }; extern "C" __global__ void f(S s, int *p) { p[threadIdx.x] = s.v[threadIdx.x]; }'
    )
    kernel, array = cudatool.compile(source, "f"), cudatool.empty(500, "i4")
    values = np.zeros(1, [("v", "i4", 500)])
    values["v"] = np.arange(500)
    kernel[1, 500](values[0], array)
    assert list(range(500)) == array.get().tolist()


def test_warnings_of_hidden_synchronizations_can_be_silenced() -> None:
    cudatool.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert [1.0] == cudatool.ones(1).get().tolist()
    finally:
        cudatool.set_sync_debug_mode("default")
