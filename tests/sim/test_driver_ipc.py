"""Memory and events that two processes share, and the errors of misuse."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudatool.sim import Result, abi
from cudatool.sim.abi import IpcHandleStruct
from cudatool.sim.ipc import Handle, Imports, _Import

# A process that does what it reads, a line at a time, with memory or an event of its parent.
_CHILD = """
import ctypes, sys
from cudatool import _driver
_driver.choose("sim")
_driver.initialize()
from cuda.bindings import driver
from cudatool.sim import Result, abi
from cudatool.sim.abi import IpcHandleStruct
from cudatool.sim.ipc import Handle, Imports, _Import

def ok(result):
    assert result[0] == 0, result
    return result[1] if len(result) == 2 else result[1:]

def opened(name, text, *more):
    out = ctypes.c_size_t()
    handle = IpcHandleStruct.from_buffer_copy(bytes.fromhex(text))
    number = abi.invoke(abi.ENTRIES[name], (ctypes.addressof(out), handle, *more), 1)
    return Result(number).name, out.value

ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
for line in sys.stdin:
    print(eval(line), flush=True)
"""


@pytest.fixture
def child():
    """Return a function that has an expression evaluated in another process, and returns it as text."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def evaluate(text):
        print(text, file=process.stdin, flush=True)
        return process.stdout.readline().strip()

    evaluate.process = process
    with process:
        try:
            yield evaluate
            process.stdin.close()
            process.wait(timeout=60)
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def unshared(machine, monkeypatch):
    """Other tests want work to wait for them."""
    monkeypatch.setattr(machine.scheduler, "_is_shared", False)


def exported(name, what):
    """Return error and text of a handle for another process."""
    handle = IpcHandleStruct()
    number = abi.invoke(abi.ENTRIES[name], (ctypes.addressof(handle), int(what)), 1)
    return Result(number).name, bytes(handle).hex()


def opened(name, text, *more):
    out, handle = ctypes.c_size_t(), IpcHandleStruct.from_buffer_copy(bytes.fromhex(text))
    return Result(abi.invoke(abi.ENTRIES[name], (ctypes.addressof(out), handle, *more), 1)).name


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_memory_is_seen_and_written_by_another_process(driver, ok, child):
    ok(driver.cuMemAlloc(64))
    address = ok(driver.cuMemAlloc(1 << 20))
    ok(driver.cuMemsetD8(address, 5, 1 << 20))
    _, text = exported("cuIpcGetMemHandle", address)
    child(f"globals().update(a=opened('cuIpcOpenMemHandle', '{text}', 1)[1])")
    read = "(ctypes.c_ubyte * 4).from_address(a + (1 << 20) - 4)[:]"
    assert "[5, 5, 5, 5]" == child(read)
    ok(driver.cuMemsetD8Async(address, 6, 1 << 20, 0))  # runs, although no call here waits
    until(lambda: child(read) == "[6, 6, 6, 6]")
    child("ok(driver.cuMemsetD8(a, 7, 16))")
    assert "()" == child("ok(driver.cuCtxSynchronize())")
    assert [7] * 16 + [6] == (ctypes.c_ubyte * 17).from_address(int(address))[:]
    assert "True" == child(f"opened('cuIpcOpenMemHandle', '{text}', 1) == ('SUCCESS', a)")  # the same mapping
    assert "()" == child("ok(driver.cuIpcCloseMemHandle(a))")
    assert "()" == child("ok(driver.cuIpcCloseMemHandle(a))")
    assert "INVALID_VALUE" in child("driver.cuIpcCloseMemHandle(a)[0].name")
    for allocation in driver_memory(driver, ok):
        ok(driver.cuMemFree(allocation))
    assert "INVALID_HANDLE" in child(f"opened('cuIpcOpenMemHandle', '{text}', 1)")


def driver_memory(driver, ok):
    """Return the addresses that the current context allocated."""
    from cudatool.sim import machine as state

    context = int(ok(driver.cuCtxGetCurrent()))
    return [a.address for a in state.machine.allocations if a.context == context and a.kind == "device"]


def test_handles_of_memory_that_cannot_be_shared(driver, ok):
    address = ok(driver.cuMemAlloc(64))
    status, text = exported("cuIpcGetMemHandle", address)
    assert "SUCCESS" == status
    assert "INVALID_VALUE" == exported("cuIpcGetMemHandle", int(address) + 1)[0]
    assert "INVALID_CONTEXT" == opened("cuIpcOpenMemHandle", text, 1)  # in the process that it comes from
    assert "INVALID_VALUE" == opened("cuIpcOpenMemHandle", text, 0)
    ok(driver.cuMemFree(address))
    pooled = ok(driver.cuMemAllocAsync(64, 0))
    assert "INVALID_VALUE" == exported("cuIpcGetMemHandle", pooled)[0]
    ok(driver.cuMemFreeAsync(pooled, 0))
    ok(driver.cuStreamSynchronize(0))


def test_event_of_another_process_is_waited_for(driver, ok, child):
    event = ok(driver.cuEventCreate(6))  # interprocess, without times
    _, text = exported("cuIpcGetEventHandle", event)
    child(f"globals().update(e=driver.CUevent(opened('cuIpcOpenEventHandle', '{text}')[1]))")
    assert "SUCCESS" in child("driver.cuEventQuery(e)[0].name")
    stream = ok(driver.cuStreamCreate(1))
    address = ok(driver.cuMemAlloc(16))
    ok(driver.cuMemsetD8Async(address, 3, 16, stream))
    ok(driver.cuEventRecord(event, stream))
    assert "()" == child("ok(driver.cuEventSynchronize(e))")
    assert 3 == ctypes.c_ubyte.from_address(int(address)).value
    assert "INVALID_CONTEXT" == opened("cuIpcOpenEventHandle", text)
    other = ok(driver.cuEventCreate(2))
    assert "INVALID_HANDLE" == exported("cuIpcGetEventHandle", other)[0]
    for one in (event, other):
        ok(driver.cuEventDestroy(one))
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemFree(address))


def test_event_recorded_by_a_process_that_died_is_not_waited_for(driver, ok):
    event = ok(driver.cuEventCreate(6))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    until(lambda: Path(f"/proc/{dead.pid}/stat").read_text().rpartition(") ")[2][0] == "Z")
    from cudatool.sim import machine as state

    shared = state.machine.objects[int(event)].shared
    shared._state.recorded, shared._state.recorder = 1, dead.pid
    assert "CUDA_SUCCESS" == driver.cuEventQuery(event)[0].name
    shared._state.recorder = os.getppid()
    assert "CUDA_ERROR_NOT_READY" == driver.cuEventQuery(event)[0].name
    dead.wait()
    ok(driver.cuEventDestroy(event))


def test_memory_that_another_thread_opens_again_while_it_is_closed_stays_open():
    handle = Handle(os.getpid() + 1, 3, 0, 7, 0, 4096, 8)  # inode 7, serial number 8
    context = SimpleNamespace(handle=1)
    found = _Import((7, 8), SimpleNamespace(address=4096, context=1), 4096, 4096)

    def drain():  # another thread's call comes while this one waits
        assert imports.open(handle, context) is found.allocation

    imports = Imports(SimpleNamespace(scheduler=SimpleNamespace(drain=drain)))
    imports._by_key[found.key] = imports._by_address[4096] = found
    imports.close(4096)
    assert (1, found) == (found.count, imports._by_address[4096])
