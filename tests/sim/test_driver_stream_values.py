"""Streams that write values to memory and wait for them (CUDA driver API, "Stream Memory Operations")."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from warm_process import run_python

WAIT_32, WRITE_32, WAIT_64, WRITE_64, BARRIER, FLUSH = 1, 2, 4, 5, 6, 3  # CUstreamBatchMemOpType


@pytest.fixture
def word(driver, ok):
    """Eight bytes of device memory, zero."""
    address = ok(driver.cuMemAlloc(8))
    ok(driver.cuMemsetD8(address, 0, 8))
    ok(driver.cuCtxSynchronize())
    yield address
    ok(driver.cuMemFree(address))


@pytest.fixture
def flag(driver, ok):
    """Pinned memory: what the host sees, and its address on the device."""
    pointer = ok(driver.cuMemHostAlloc(8, 2))  # CU_MEMHOSTALLOC_DEVICEMAP
    yield (
        np.ctypeslib.as_array((ctypes.c_uint32 * 2).from_address(pointer)),
        ok(driver.cuMemHostGetDevicePointer(pointer, 0)),
    )
    ok(driver.cuMemFreeHost(pointer))


def value(driver, ok, address, kind=np.uint32):
    found = np.zeros(1, kind)
    ok(driver.cuMemcpyDtoH(found, address, found.nbytes))
    return int(found[0])


@pytest.mark.parametrize("schedule", ["fifo", "lifo", "late", "random"])
def test_a_stream_waits_for_the_value_that_another_one_writes(
    machine, driver, ok, streams, word, schedule, monkeypatch
):
    from cudatool.sim.queue import Schedule

    monkeypatch.setattr(machine.scheduler, "schedule", Schedule(schedule))
    data = ok(driver.cuMemAlloc(4))
    ok(driver.cuStreamWaitValue32(streams[0], word, 1, 0))  # before anybody has enqueued the write
    ok(driver.cuMemcpyDtoDAsync(data, word, 4, streams[0]))
    ok(driver.cuMemsetD32Async(int(word) + 4, 7, 1, streams[1]))
    ok(driver.cuStreamWriteValue32(streams[1], word, 5, 0))
    ok(driver.cuStreamSynchronize(streams[0]))
    assert 5 == value(driver, ok, data)
    assert 7 == value(driver, ok, int(word) + 4)
    ok(driver.cuMemFree(data))


@pytest.mark.parametrize(
    ("flags", "before", "after", "wanted"),
    [
        (0, 2, 3, 3),
        (0, 0xFFFFFFF0, 4, 2),  # cyclically
        (1, 4, 3, 3),
        (2, 0b0101, 0b0110, 0b0010),
        (3, 0xFFFFFFFF, 0x0FFFFFFF, 0xF0000000 - (1 << 31)),
    ],
)
def test_each_condition_is_met_by_one_value_and_not_by_the_other(
    driver, ok, streams, word, flags, before, after, wanted
):
    ok(driver.cuStreamWriteValue32(streams[1], word, before, 0))
    ok(driver.cuStreamSynchronize(streams[1]))
    ok(driver.cuStreamWaitValue32(streams[0], word, wanted, flags))
    answers = [driver.cuStreamQuery(streams[0])[0].name for _ in range(10)]
    assert {"CUDA_ERROR_NOT_READY"} == set(answers)
    ok(driver.cuStreamWriteValue32(streams[1], word, after, 1))
    ok(driver.cuStreamSynchronize(streams[0]))


def test_values_of_64_bits(driver, ok, streams, word):
    ok(driver.cuStreamWriteValue64(streams[0], word, 1 << 40, 0))
    ok(driver.cuStreamWaitValue64(streams[1], word, 1 << 40, 1))
    ok(driver.cuStreamSynchronize(streams[1]))
    assert 1 << 40 == value(driver, ok, word, np.uint64)


def test_the_host_lets_a_stream_go_on(driver, ok, streams, flag):
    host, address = flag
    host[:] = 0
    ok(driver.cuStreamWaitValue32(streams[0], address, 1, 1))
    ok(driver.cuStreamWriteValue32(streams[0], int(address) + 4, 9, 0))
    assert ["CUDA_ERROR_NOT_READY"] * 5 == [driver.cuStreamQuery(streams[0])[0].name for _ in range(5)]
    assert [0, 0] == host.tolist()
    host[0] = 1
    ok(driver.cuStreamSynchronize(streams[0]))
    assert [1, 9] == host.tolist()


def test_another_host_thread_lets_it_go_on_while_one_waits(driver, ok, streams, flag):
    host, address = flag
    host[:] = 0
    ok(driver.cuStreamWaitValue32(streams[0], address, 1, 0))
    timer = threading.Timer(0.1, lambda: host.__setitem__(0, 1))
    timer.start()
    ok(driver.cuStreamSynchronize(streams[0]))
    timer.join()


def test_a_batch_is_done_in_its_order(driver, ok, streams, word):
    batch = [driver.CUstreamBatchMemOpParams() for _ in range(4)]
    for one, (kind, number) in zip(batch, [(WRITE_32, 3), (BARRIER, 0), (WAIT_32, 3), (WRITE_32, 4)], strict=True):
        one.operation = driver.CUstreamBatchMemOpType(kind)
        if kind == WAIT_32:
            one.waitValue.address, one.waitValue.value, one.waitValue.flags = word, number, 1
        elif kind == WRITE_32:
            one.writeValue.address, one.writeValue.value = word, number
    ok(driver.cuStreamBatchMemOp(streams[0], 4, batch, 0))
    ok(driver.cuStreamSynchronize(streams[0]))
    assert 4 == value(driver, ok, word)


def test_what_cannot_be_done_is_refused_and_nothing_is_enqueued(driver, ok, streams, word):
    stream, managed = streams[0], ok(driver.cuMemAllocManaged(8, 1))
    refused = [
        driver.cuStreamWaitValue32(stream, word, 0, 4),
        driver.cuStreamWriteValue32(stream, word, 0, 2),
        driver.cuStreamWriteValue32(stream, int(word) + 2, 0, 0),
        driver.cuStreamWriteValue64(stream, int(word) + 4, 0, 0),
        driver.cuStreamWaitValue32(stream, managed, 0, 0),
        driver.cuStreamWriteValue32(stream, 0x1000, 0, 0),
        driver.cuStreamBatchMemOp(stream, 256, [driver.CUstreamBatchMemOpParams()] * 256, 0),
    ]
    assert ["CUDA_ERROR_INVALID_VALUE"] * 7 == [result.name for (result,) in refused]
    assert "CUDA_ERROR_NOT_SUPPORTED" == driver.cuStreamWaitValue32(stream, word, 0, 1 << 30)[0].name
    batch = [driver.CUstreamBatchMemOpParams() for _ in range(2)]
    batch[0].operation, batch[1].operation = map(driver.CUstreamBatchMemOpType, (WRITE_32, FLUSH))
    batch[0].writeValue.address, batch[0].writeValue.value = word, 3
    assert "CUDA_ERROR_NOT_SUPPORTED" == driver.cuStreamBatchMemOp(stream, 2, batch, 0)[0].name
    assert 0 == value(driver, ok, word)
    ok(driver.cuMemFree(managed))


def test_virtual_time_does_not_run_ahead_of_the_writer(driver, ok, streams, word):
    size = 64 << 20
    big, start, end = ok(driver.cuMemAlloc(size)), ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
    ok(driver.cuEventRecord(start, streams[1]))
    ok(driver.cuMemsetD8Async(big, 0, size, streams[1]))
    ok(driver.cuStreamWriteValue32(streams[1], word, 1, 0))
    ok(driver.cuStreamWaitValue32(streams[0], word, 1, 0))
    ok(driver.cuEventRecord(end, streams[0]))
    ok(driver.cuEventSynchronize(end))
    assert ok(driver.cuEventElapsedTime(start, end)) > 0.01
    for event in (start, end):
        ok(driver.cuEventDestroy(event))
    ok(driver.cuMemFree(big))


NEVER_WRITTEN = """
import threading
from cuda.bindings import driver
from cudatool import _driver
_driver.initialize()
from cudatool.sim import queue
queue._STALLED_S = 0.2
driver.cuInit(0)
context = driver.cuCtxCreate(None, 0, 0)[1]
stream, address = driver.cuStreamCreate(1)[1], driver.cuMemAlloc(4)[1]
driver.cuMemsetD8(address, 0, 4)
{other}
driver.cuStreamWaitValue32(stream, address, 1, 0)
print(driver.cuStreamSynchronize(stream)[0].name, driver.cuMemAlloc(4)[0].name)
"""
LATE_WRITE = """
def write():
    driver.cuCtxSetCurrent(context)
    driver.cuMemsetD32(address, 1, 1)
timer = threading.Timer(1, write)
timer.start()
"""
OTHER_THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(
    ("device", "other", "status"),
    [
        ("sim", "", "CUDA_ERROR_LAUNCH_TIMEOUT"),
        ("sim", LATE_WRITE, "CUDA_SUCCESS"),
        ("sim:timeout=1", OTHER_THREAD, "CUDA_ERROR_LAUNCH_TIMEOUT"),
        ("sim", OTHER_THREAD + "\nqueue._STALLED_BESIDE_OTHERS_S = 0.5", "CUDA_ERROR_LAUNCH_TIMEOUT"),
    ],
    ids=["no other thread", "a thread that writes late", "a timeout", "a thread that never writes"],
)
def test_wait_for_a_value_ends_once_it_is_written_or_nothing_is_going_to_write_it(device, other, status):
    done = run_python(NEVER_WRITTEN.format(other=other), environment={"CUDATOOL_DEVICE": device})
    assert [status] * 2 == done.stdout.split(), done.stderr
