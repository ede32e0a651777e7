"""A program that takes memory, streams and events from cuda.bindings.runtime, and launches by the driver API."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from warm_process import run_python

from cudatool.sim.toolchain.runtime_properties import ATTRIBUTES
from cudatool.trace import reader
from cudatool.trace.events import Kind

N = 1000


@pytest.fixture
def runtime(driver):
    from cuda.bindings import runtime

    runtime.cudaGetLastError()
    return runtime


@pytest.fixture
def done(runtime):
    """Returns what a call gives, once it has succeeded."""

    def check(answer):
        status, *values = answer
        assert runtime.cudaError_t.cudaSuccess == status
        return values[0] if len(values) == 1 else tuple(values)

    return check


def test_copies_go_to_the_device_and_back(runtime, done):
    kinds = runtime.cudaMemcpyKind
    there, back = np.arange(N, dtype=np.int32), np.zeros(N, np.int32)
    first, second = done(runtime.cudaMalloc(there.nbytes)), done(runtime.cudaMalloc(there.nbytes))
    assert isinstance(first, int)
    done(runtime.cudaMemcpy(first, there.ctypes.data, there.nbytes, kinds.cudaMemcpyHostToDevice))
    done(runtime.cudaMemcpy(second, first, there.nbytes, kinds.cudaMemcpyDeviceToDevice))
    done(runtime.cudaMemcpy(back.ctypes.data, second, there.nbytes, kinds.cudaMemcpyDefault))
    assert there.tolist() == back.tolist()
    done(runtime.cudaMemset(second, 0x101, there.nbytes))  # "value" is converted to a byte
    done(runtime.cudaMemcpy(back, second, there.nbytes, kinds.cudaMemcpyDeviceToHost))
    assert [0x01010101] * N == back.tolist()
    done(runtime.cudaFree(first))
    done(runtime.cudaFree(second))
    done(runtime.cudaFree(0))  # no operation


def test_copies_take_buffers_and_names_in_any_direction(runtime, done):
    kinds = runtime.cudaMemcpyKind
    there, back = np.arange(N, dtype=np.int32), np.zeros(N, np.int32)
    memory, stream = done(runtime.cudaMalloc(size=there.nbytes)), done(runtime.cudaStreamCreate())
    done(runtime.cudaMemcpy(back, there, there.nbytes, kinds.cudaMemcpyHostToHost))
    assert there.tolist() == back.tolist()
    done(runtime.cudaMemcpy(dst=memory, src=there, count=there.nbytes, kind=kinds.cudaMemcpyDefault))
    back[:] = 0
    done(runtime.cudaMemcpyAsync(back, memory, there.nbytes, kind=kinds.cudaMemcpyDefault, stream=stream))
    done(runtime.cudaStreamSynchronize(stream))
    assert there.tolist() == back.tolist()
    with pytest.raises(TypeError, match="size"):
        runtime.cudaMalloc(bytes=64)
    done(runtime.cudaStreamDestroy(stream))
    done(runtime.cudaFree(memory))


@pytest.mark.parametrize(
    ("name", "more"), [("cudaMalloc", ()), ("cudaMallocHost", ()), ("cudaHostAlloc", (0,)), ("cudaMallocAsync", (0,))]
)
def test_no_memory_is_at_address_0_and_is_freed(runtime, done, name, more):
    assert 0 == done(getattr(runtime, name)(0, *more))
    done(runtime.cudaFree(0))
    done(runtime.cudaFreeHost(0))
    assert runtime.cudaError_t.cudaErrorInvalidValue == runtime.cudaMallocManaged(0, runtime.cudaMemAttachGlobal)[0]


def test_streams_and_events_order_asynchronous_copies(runtime, done, driver):
    kinds = runtime.cudaMemcpyKind
    one, two = done(runtime.cudaStreamCreate()), done(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking))
    assert isinstance(one, runtime.cudaStream_t)
    first, last = done(runtime.cudaEventCreate()), done(runtime.cudaEventCreateWithFlags(0))
    assert isinstance(first, runtime.cudaEvent_t)
    host = done(runtime.cudaMallocHost(4 * N))
    memory = done(runtime.cudaMallocAsync(4 * N, one))
    done(runtime.cudaEventRecord(first, one))
    done(runtime.cudaMemsetAsync(memory, 7, 4 * N, one))
    done(runtime.cudaEventRecord(last, one))
    done(runtime.cudaStreamWaitEvent(two, last, 0))
    done(runtime.cudaMemcpyAsync(host, memory, 4 * N, kinds.cudaMemcpyDeviceToHost, two))
    done(runtime.cudaStreamSynchronize(two))
    done(runtime.cudaEventSynchronize(last))
    assert done(runtime.cudaEventElapsedTime(first, last)) > 0
    assert driver.CUresult.CUDA_SUCCESS == driver.cuStreamQuery(two)[0]  # the driver knows the runtime's handles
    assert (np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (4 * N)).from_address(int(host))) == 7).all()
    done(runtime.cudaFreeAsync(memory, one))
    done(runtime.cudaFreeHost(host))
    for event in (first, last):
        done(runtime.cudaEventDestroy(event))
    for stream in (one, two):
        done(runtime.cudaStreamDestroy(stream))


def test_last_error_is_kept_for_its_thread_until_asked_for(runtime, done):
    errors = runtime.cudaError_t
    assert errors.cudaErrorMemoryAllocation == runtime.cudaMalloc(1 << 60)[0]
    done(runtime.cudaDeviceSynchronize())
    others = []
    thread = threading.Thread(target=lambda: others.append(runtime.cudaGetLastError()))
    thread.start()
    thread.join()
    assert [(errors.cudaSuccess,)] == others
    assert (errors.cudaErrorMemoryAllocation,) == runtime.cudaPeekAtLastError()
    assert (errors.cudaErrorMemoryAllocation,) == runtime.cudaGetLastError()
    assert (errors.cudaSuccess,) == runtime.cudaGetLastError()


def test_not_ready_is_no_error(runtime, done):
    errors, stream = runtime.cudaError_t, done(runtime.cudaStreamCreate())
    memory = done(runtime.cudaMalloc(64))
    done(runtime.cudaMemsetAsync(memory, 7, 64, stream))
    assert (errors.cudaErrorNotReady,) == runtime.cudaStreamQuery(stream)
    assert (errors.cudaSuccess,) == runtime.cudaGetLastError()
    done(runtime.cudaStreamDestroy(stream))
    done(runtime.cudaFree(memory))


def test_first_call_of_a_thread_is_recorded_as_one_that_succeeds(tmp_path):
    path = tmp_path / "run.ctrace"
    source = (
        "import threading, cudatool\n"
        "from cuda.bindings import runtime\n"
        f"with cudatool.record({str(path)!r}, device='sim'):\n"
        "    memory = runtime.cudaMalloc(64)[1]\n"
        "    thread = threading.Thread(target=runtime.cudaMemset, args=(memory, 0, 64))\n"
        "    thread.start(); thread.join()\n"
        "    assert 0 == runtime.cudaFree(memory)[0] == runtime.cudaFreeHost(0)[0]\n"
    )
    answer = run_python(source)
    assert 0 == answer.returncode, answer.stderr
    trace = reader.read(path)
    assert [] == [trace.names[int(name)] for name in trace.of_kind(Kind.WARNING)["name"]]
    assert (1, 0) == (len(trace.of_kind(Kind.MEMSET)), len(trace.of_kind(Kind.HOST_FREE)))


@pytest.mark.parametrize("call", ["cudaMalloc(64)", "cudaStreamCreate()", "cudaEventCreate()", "cudaMemGetInfo()"])
def test_first_call_uses_the_primary_context_of_device_0(call):
    source = (
        "from cudatool import _driver; _driver.choose('sim'); _driver.initialize()\n"
        "from cuda.bindings import driver, runtime\n"
        f"assert 0 == runtime.{call}[0], runtime.{call}\n"
        "assert 0 == runtime.cudaGetDevice()[1] == int(driver.cuCtxGetDevice()[1])\n"
    )
    answer = run_python(source)
    assert 0 == answer.returncode, answer.stderr


def test_properties_of_a_device_are_its_attributes(runtime, done, driver, ok):
    properties = done(runtime.cudaGetDeviceProperties(0))
    of_driver = driver.CUdevice_attribute
    for field, names in ATTRIBUTES.items():
        values = [
            ok(driver.cuDeviceGetAttribute(getattr(of_driver, f"CU_DEVICE_ATTRIBUTE_{name}"), 0))
            for name in ([names] if isinstance(names, str) else names)
        ]
        assert (values[0] if isinstance(names, str) else values) == getattr(properties, field), field
    assert (9, 0) == (properties.major, properties.minor)
    assert (32, [1024, 1024, 64]) == (properties.warpSize, properties.maxThreadsDim)
    assert properties.name.rstrip(b"\0") == ok(driver.cuDeviceGetName(256, 0)).partition(b"\0")[0]
    assert properties.uuid.bytes == ok(driver.cuDeviceGetUuid(0)).bytes
    assert properties.totalGlobalMem == ok(driver.cuDeviceTotalMem(0))
    assert (runtime.cudaError_t.cudaErrorInvalidDevice, None) == runtime.cudaGetDeviceProperties(99)


def test_no_property_is_left_out(runtime):
    fields = {name for name in dir(runtime.cudaDeviceProp) if not name.startswith("_")} - {"getPtr"}
    assert fields == ATTRIBUTES.keys() | {"name", "uuid", "totalGlobalMem", "luid", "luidDeviceNodeMask"}


def test_function_that_is_not_there_says_so(runtime, caplog):
    errors = runtime.cudaError_t
    status, _ = runtime.cudaGraphCreate(0)
    assert errors.cudaErrorCallRequiresNewerDriver == status
    assert "cudaGraphCreate of the runtime API is not on the software device" in caplog.text
    assert (errors.cudaErrorCallRequiresNewerDriver,) == runtime.cudaGetLastError()
    assert b"driver" in runtime.cudaGetErrorString(status)[1]
    assert (errors.cudaSuccess,) == runtime.cudaGetLastError()
