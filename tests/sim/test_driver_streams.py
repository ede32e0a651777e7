"""Streams, events, host functions and virtual time."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest
from warm_process import run_python

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Log:
    """Host functions that note their name in the order in which they run."""

    def __init__(self, driver, ok):
        self.order = []
        self._driver, self._ok, self._keep = driver, ok, []

    def enqueue(self, stream, name):
        function = HostFunction(lambda _: self.order.append(name))
        self._keep.append(function)
        pointer = ctypes.cast(function, ctypes.c_void_p).value
        self._ok(self._driver.cuLaunchHostFunc(stream, self._driver.CUhostFn(pointer), 0))


@pytest.fixture
def log(driver, ok):
    return Log(driver, ok)


def test_nothing_runs_before_it_is_observed(driver, ok, log, streams):
    log.enqueue(streams[0], "a")
    assert log.order == []
    ok(driver.cuStreamSynchronize(streams[0]))
    assert log.order == ["a"]


def test_work_of_one_stream_runs_in_order(driver, ok, log, streams):
    for name in "abc":
        log.enqueue(streams[0], name)
    ok(driver.cuCtxSynchronize())
    assert log.order == ["a", "b", "c"]


def test_query_becomes_done_after_finitely_many_calls(driver, ok, log, streams):
    ok(driver.cuStreamSynchronize(streams[0]))
    assert driver.cuStreamQuery(streams[0])[0].name == "CUDA_SUCCESS"
    log.enqueue(streams[0], "a")
    answers = []
    while not answers or answers[-1] != "CUDA_SUCCESS":
        answers.append(driver.cuStreamQuery(streams[0])[0].name)
        assert len(answers) < 100
    assert answers[0] == "CUDA_ERROR_NOT_READY"
    assert log.order == ["a"]


def test_query_of_the_legacy_stream_covers_the_blocking_streams(driver, ok, log):
    """It reports what cuStreamSynchronize would wait for: the sanitizer counts its success as such."""
    legacy, blocking = driver.CUstream(driver.CU_STREAM_LEGACY), ok(driver.cuStreamCreate(0))
    log.enqueue(blocking, "a")
    answers = []
    while not answers or answers[-1] != "CUDA_SUCCESS":
        answers.append(driver.cuStreamQuery(legacy)[0].name)
        assert len(answers) < 100
    assert answers[0] == "CUDA_ERROR_NOT_READY"
    assert log.order == ["a"]
    ok(driver.cuStreamDestroy(blocking))


def test_query_of_the_legacy_stream_leaves_other_streams_out(driver, ok, log, streams):
    log.enqueue(streams[0], "a")
    assert driver.cuStreamQuery(driver.CUstream(driver.CU_STREAM_LEGACY))[0].name == "CUDA_SUCCESS"
    assert log.order == []


def test_wait_on_an_event_never_recorded_is_no_wait(driver, ok, log, streams):
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuStreamWaitEvent(streams[0], event, 0))
    assert driver.cuEventQuery(event)[0].name == "CUDA_SUCCESS"
    ok(driver.cuEventDestroy(event))


def test_wait_keeps_the_record_it_saw_when_the_event_is_recorded_again(driver, ok, log, streams):
    event = ok(driver.cuEventCreate(2))
    log.enqueue(streams[0], "first")
    ok(driver.cuEventRecord(event, streams[0]))
    ok(driver.cuStreamWaitEvent(streams[1], event, 0))
    log.enqueue(streams[0], "second")
    ok(driver.cuEventRecord(event, streams[0]))
    ok(driver.cuEventDestroy(event))  # destroying undoes no wait
    log.enqueue(streams[1], "waiter")
    ok(driver.cuStreamSynchronize(streams[1]))
    assert log.order.index("first") < log.order.index("waiter")


def test_event_times_cover_the_work_between_them(driver, ok, streams):
    stream = streams[0]
    start, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    address = ok(driver.cuMemAlloc(64 << 20))
    ok(driver.cuEventRecord(start, stream))
    ok(driver.cuMemsetD8Async(address, 0, 64 << 20, stream))
    ok(driver.cuEventRecord(end, stream))
    ok(driver.cuEventSynchronize(end))
    milliseconds = ok(driver.cuEventElapsedTime(start, end))
    assert 0.03 < milliseconds < 0.1  # 64 MiB at 2 TB/s and a latency, in virtual time
    for event in (start, end):
        ok(driver.cuEventDestroy(event))
    ok(driver.cuMemFree(address))


def test_priorities_are_clamped(driver, ok):
    stream = ok(driver.cuStreamCreateWithPriority(1, -100))
    assert ok(driver.cuStreamGetPriority(stream)) == -5
    assert ok(driver.cuCtxGetStreamPriorityRange()) == (0, -5)
    ok(driver.cuStreamDestroy(stream))


def test_each_host_thread_has_its_own_per_thread_default_stream(driver, ok):
    context = ok(driver.cuCtxGetCurrent())
    ids = [ok(driver.cuStreamGetId(2))]

    def other():
        ok(driver.cuCtxSetCurrent(context))
        ids.append(ok(driver.cuStreamGetId(2)))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert ids[0] != ids[1]
    assert ok(driver.cuStreamGetId(2)) == ids[0]


def test_host_function_may_wait_for_another_thread_that_uses_the_driver(driver, ok, streams):
    context = ok(driver.cuCtxGetCurrent())
    entered, released = threading.Event(), threading.Event()

    def wait(_):
        entered.set()
        assert released.wait(30)

    function = HostFunction(wait)
    pointer = ctypes.cast(function, ctypes.c_void_p).value
    ok(driver.cuLaunchHostFunc(streams[0], driver.CUhostFn(pointer), 0))

    def other():
        ok(driver.cuCtxSetCurrent(context))
        assert entered.wait(30)
        ok(driver.cuMemGetInfo())  # must not block on the running host function
        released.set()

    thread = threading.Thread(target=other)
    thread.start()
    ok(driver.cuStreamSynchronize(streams[0]))
    thread.join()
    assert released.is_set()


_ORDER = """
import ctypes, sys
from cudatool import _driver
_driver.choose(sys.argv[1])
_driver.initialize()
from cuda.bindings import driver
def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else None
ok(driver.cuInit(0))
ok(driver.cuCtxCreate(None, 0, 0))
T = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
keep = []
def enqueue(stream, name):
    f = T(lambda _: print(name, end=" "))
    keep.append(f)
    ok(driver.cuLaunchHostFunc(stream, driver.CUhostFn(ctypes.cast(f, ctypes.c_void_p).value), 0))
flags = int(sys.argv[2])
a, b = ok(driver.cuStreamCreate(flags)), ok(driver.cuStreamCreate(flags))
enqueue(a, "a1"); enqueue(b, "b1"); enqueue(0, "legacy"); enqueue(a, "a2"); enqueue(b, "b2")
ok(driver.cuCtxSynchronize())
"""


def _order(device, flags):
    done = run_python(_ORDER, device, str(flags))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "late", "random"])
@pytest.mark.parametrize("seed", [0, 1])
def test_legacy_stream_orders_blocking_streams_under_every_schedule(schedule, seed):
    order = _order(f"sim:schedule={schedule},seed={seed}", 0)
    assert sorted(order[:2]) == ["a1", "b1"]
    assert order[2] == "legacy"
    assert sorted(order[3:]) == ["a2", "b2"]


def test_legacy_stream_does_not_order_non_blocking_streams():
    assert _order("sim:schedule=fifo", 1) == ["a1", "b1", "legacy", "a2", "b2"]
    assert _order("sim:schedule=lifo", 1) == ["legacy", "b1", "b2", "a1", "a2"]


def test_the_same_seed_gives_the_same_order():
    assert _order("sim:schedule=random,seed=5", 1) == _order("sim:schedule=random,seed=5", 1)


def test_random_schedule_changes_the_order_of_a_kernels_blocks():
    source = (
        "import sys, numpy as np, cudatool as ct\n"
        "ticket = ct.compile('extern \"C\" __global__ void ticket(int *next, int *of)'\n"
        "                    '{ of[blockIdx.x] = atomicAdd(next, 1); }', 'ticket')\n"
        "for launch in range(2):\n"
        "    of = ct.zeros(8, np.int32)\n"
        "    ticket[8, 1](ct.zeros(1, np.int32), of)\n"
        "    print(*of.get())\n"
    )

    def orders(device: str) -> list[str]:
        done = run_python(source, environment={"CUDATOOL_DEVICE": f"{device},threads=1"})
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    by_number = "0 1 2 3 4 5 6 7"
    assert orders("sim:schedule=fifo") == [by_number, by_number]
    first, second = orders("sim:schedule=random,seed=1")
    assert len({by_number, first, second}) == 3
    assert orders("sim:schedule=random,seed=1") == [first, second]
    assert sorted(first) == sorted(by_number)


def test_process_that_leaves_everything_open_ends_cleanly():
    source = (
        "from cudatool import _driver; _driver.choose('sim'); _driver.initialize()\n"
        "from cuda.core import Device\n"
        "d = Device(); d.set_current(); s = d.create_stream(); e = s.record()\n"
        "b = d.memory_resource.allocate(1 << 20, stream=s); b.fill(b'x', stream=s)\n"
        "import sys; sys.modules['keep'] = (d, s, e, b)\n"
    )
    done = subprocess.run([sys.executable, "-X", "dev", "-c", source], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_runtime_functions_that_cuda_core_uses_are_answered(driver, ok, log, streams):
    from cuda.bindings import runtime

    log.enqueue(streams[0], "a")
    assert runtime.cudaDeviceSynchronize() == (runtime.cudaError_t.cudaSuccess,)
    assert log.order == ["a"]
    assert runtime.cudaDeviceGetPCIBusId(13, 0) == (runtime.cudaError_t.cudaSuccess, b"0000:01:00.0\0")
    assert runtime.cudaGetDeviceCount()[1] == ok(driver.cuDeviceGetCount())
    assert runtime.cudaDeviceGetPCIBusId(13, 7)[0] == runtime.cudaError_t.cudaErrorInvalidDevice


def test_attributes_of_streams_are_kept_and_copied(driver, ok):
    one, other = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
    kinds = driver.CUlaunchAttributeID
    value = driver.CUstreamAttrValue()
    value.priority = -9
    ok(driver.cuStreamSetAttribute(one, kinds.CU_LAUNCH_ATTRIBUTE_PRIORITY, value))
    value = driver.CUstreamAttrValue()
    value.memSyncDomain = driver.CUlaunchMemSyncDomain.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE
    ok(driver.cuStreamSetAttribute(one, kinds.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, value))
    ok(driver.cuStreamCopyAttributes(other, one))
    assert -5 == ok(driver.cuStreamGetPriority(other))
    assert -5 == ok(driver.cuStreamGetAttribute(other, kinds.CU_LAUNCH_ATTRIBUTE_PRIORITY)).priority
    found = ok(driver.cuStreamGetAttribute(other, kinds.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN))
    assert driver.CUlaunchMemSyncDomain.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE == found.memSyncDomain
    refused = driver.cuStreamGetAttribute(other, kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)[0]
    assert refused.name == "CUDA_ERROR_INVALID_VALUE"
    for stream in (one, other):
        ok(driver.cuStreamDestroy(stream))


def test_device_is_found_by_its_bus(driver, ok):
    bus = ok(driver.cuDeviceGetPCIBusId(20, 0)).split(b"\0")[0]
    assert 0 == int(ok(driver.cuDeviceGetByPCIBusId(bus)))
    assert 0 == int(ok(driver.cuDeviceGetByPCIBusId(b"01:00.0")))
    assert driver.cuDeviceGetByPCIBusId(b"0000:7f:00.0")[0].name == "CUDA_ERROR_INVALID_DEVICE"
    assert driver.cuDeviceGetByPCIBusId(b"the first")[0].name == "CUDA_ERROR_INVALID_VALUE"
