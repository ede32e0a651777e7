"""What other threads do while a call waits for work, which lets them call the driver."""

from __future__ import annotations

import ctypes
import threading

import pytest

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
IMAGE = (
    b".version 8.0\n.target sm_90\n.address_size 64\n.visible .global .align 4 .u32 g;\n.visible .entry k() { ret; }\0"
)


def meanwhile(driver, ok, stream, call, other):
    """Make a call that waits for work of a stream; return what another thread's call returns during the wait."""
    context = ok(driver.cuCtxGetCurrent())
    ready, entered, results = threading.Event(), threading.Event(), []

    def work():
        ok(driver.cuCtxSetCurrent(context))
        ready.set()
        assert entered.wait(30)
        results.append(other())

    def run(_):  # the work that is waited for
        entered.set()
        thread.join(0.3)  # not for ever: the other call may wait for this, too

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(30)
    function = HostFunction(run)
    pointer = ctypes.cast(function, ctypes.c_void_p).value
    ok(driver.cuLaunchHostFunc(stream, driver.CUhostFn(pointer), 0))
    ok(call())
    thread.join()
    return results[0]


def _array(driver):
    wanted = driver.CUDA_ARRAY3D_DESCRIPTOR()
    wanted.Width, wanted.NumChannels, wanted.Format = 64, 1, driver.CUarray_format.CU_AD_FORMAT_FLOAT
    return driver.cuArray3DCreate(wanted)


def _registered(driver):
    buffer = ctypes.create_string_buffer(4096)
    return *driver.cuMemHostRegister(buffer, 4096, 0), buffer


ENDS = {
    # what ends: how it is made, what ends it, and what a second such call gives
    "device memory": (lambda driver: driver.cuMemAlloc(4096), "cuMemFree", "INVALID_VALUE"),
    "host memory": (lambda driver: driver.cuMemHostAlloc(4096, 0), "cuMemFreeHost", "INVALID_VALUE"),
    "registered memory": (_registered, "cuMemHostUnregister", "HOST_MEMORY_NOT_REGISTERED"),
    "an array": (_array, "cuArrayDestroy", "INVALID_HANDLE"),
    "a module": (lambda driver: driver.cuModuleLoadData(IMAGE), "cuModuleUnload", "INVALID_HANDLE"),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_two_threads_end_at_once_is_ended_once(driver, ok, streams, what):
    make, name, again = ENDS[what]
    end = getattr(driver, name)
    one = ok(make(driver))
    neighbour = ok(driver.cuMemAlloc(4096))
    if what == "a module":
        ok(driver.cuModuleGetGlobal(one, b"g"))
    assert f"CUDA_ERROR_{again}" == meanwhile(driver, ok, streams[0], lambda: end(one), lambda: end(one)[0].name)
    ok(driver.cuMemFree(neighbour))


def test_memory_that_two_threads_unmap_at_once_is_unmapped_once(driver, ok, streams):
    wanted, size, names = driver.CUmemAllocationProp(), 2 << 20, []
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    physical = ok(driver.cuMemCreate(size, wanted, 0))
    address = ok(driver.cuMemAddressReserve(size, 0, 0, 0))
    ok(driver.cuMemMap(address, size, 0, physical, 0))

    def unmap():  # either thread may be the one that does it
        names.append(driver.cuMemUnmap(address, size)[0].name)
        return (driver.CUresult.CUDA_SUCCESS,)

    meanwhile(driver, ok, streams[0], unmap, unmap)
    assert ["CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS"] == sorted(names)
    ok(driver.cuMemAddressFree(address, size))
    ok(driver.cuMemRelease(physical))


def test_a_context_that_two_threads_destroy_at_once_is_destroyed_once(driver, ok):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    stream = ok(driver.cuStreamCreate(1))

    def destroy():
        return driver.cuCtxDestroy(context)

    assert "CUDA_ERROR_INVALID_CONTEXT" == meanwhile(driver, ok, stream, destroy, destroy)[0].name


def test_nothing_is_enqueued_in_a_context_that_another_thread_destroys(driver, ok, machine):
    context = ok(driver.cuCtxCreate(None, 0, 0))
    stream, event = ok(driver.cuStreamCreate(1)), ok(driver.cuEventCreate(0))
    memory = ok(driver.cuMemAlloc(4096))

    def enqueue():
        calls = driver.cuMemsetD8Async(memory, 1, 4096, stream), driver.cuEventRecord(event, stream)
        return [call[0].name for call in (*calls, driver.cuMemsetD8(memory, 1, 4096))]

    found = meanwhile(driver, ok, stream, lambda: driver.cuCtxDestroy(context), enqueue)
    assert ["CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_CONTEXT_IS_DESTROYED"] == found
    assert not machine.scheduler.is_busy


@pytest.mark.parametrize("end", ["cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset"])
def test_a_primary_context_that_is_retained_while_it_ends_is_a_new_one(driver, ok, machine, end):
    ordinal = len(machine.devices) - 1
    if machine.devices[ordinal].primary_references:
        pytest.skip("the process uses the primary context")
    ok(driver.cuCtxPushCurrent(ok(driver.cuDevicePrimaryCtxRetain(ordinal))))
    stream = ok(driver.cuStreamCreate(1))
    ending, retain = (lambda: getattr(driver, end)(ordinal)), (lambda: ok(driver.cuDevicePrimaryCtxRetain(ordinal)))
    new = meanwhile(driver, ok, stream, ending, retain)
    ok(driver.cuCtxPopCurrent())
    ok(driver.cuCtxPushCurrent(new))
    ok(driver.cuMemGetInfo())
    ok(driver.cuCtxPopCurrent())
    for _ in range(machine.devices[ordinal].primary_references):
        ok(driver.cuDevicePrimaryCtxRelease(ordinal))
