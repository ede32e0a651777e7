"""What a trace says of calls that order work in rarer ways."""

from __future__ import annotations

import pytest
from warm_process import run_python

from cudatool.trace.events import CopyFlag, Kind
from cudatool.trace.reader import read

_PROGRAM = """
import ctypes
import numpy as np
import cudatool as ct
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind
with ct.record("t.ctrace", device="sim:count=2", measure_accesses=True):
    from cuda.bindings import driver
    def call(name, *arguments):
        error, *rest = getattr(driver, name)(*arguments)
        assert error == driver.CUresult.CUDA_SUCCESS, (name, error)
        return rest[0] if rest else None
    call("cuInit", 0)
    contexts = [call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", n)) for n in (0, 1)]
    memory = []
    for context in contexts:
        call("cuCtxSetCurrent", context)
        memory.append(call("cuMemAlloc", 64))
    stream = call("cuStreamCreate", 1)
    call("cuEventCreate", 2 | 4)
    pages = np.zeros(4096, np.uint8)
    call("cuMemHostRegister", pages.ctypes.data, 4096, 0)
    call("cuMemsetD8", pages.ctypes.data, 1, 16)
    call("cuMemcpyPeer", memory[1], contexts[1], memory[0], contexts[0], 64)
    def function(_):
        hooks.emit(Kind.HOST_ACCESS, address=7, size=1, flags=AccessFlag.READ)
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    call("cuLaunchHostFunc", stream, driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value), 0)
    call("cuStreamSynchronize", stream)
    hooks.emit(Kind.HOST_ACCESS, address=8, size=1, flags=AccessFlag.READ)
    call("cuMemHostUnregister", pages.ctypes.data)
    from cuda.core import Device
    Device(0).set_current()
    ct.Stream(0).wait_event(ct.Event())
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordering")
    done = run_python(_PROGRAM, folder=folder)
    assert done.returncode == 0, done.stderr
    return read(folder / "t.ctrace")


def names(trace, kind):
    return [trace.names[int(record["name"])] for record in trace.of_kind(kind)]


def test_event_that_other_processes_can_record_says_so(trace):
    (event,) = trace.of_kind(Kind.EVENT_CREATE)
    assert 2 == event["flags"]


def test_registered_memory_is_pinned_until_it_is_unregistered(trace):
    (pinned,), (freed,) = trace.of_kind(Kind.HOST_ALLOC), trace.of_kind(Kind.HOST_FREE)
    assert (["cuMemHostRegister"], ["cuMemHostUnregister"]) == (
        names(trace, Kind.HOST_ALLOC),
        names(trace, Kind.HOST_FREE),
    )
    assert (pinned["address"], 4096, 4096) == (freed["address"], pinned["size"], freed["size"])


def test_fill_of_pinned_memory_has_no_target_on_the_device(trace):
    (fill,) = trace.of_kind(Kind.MEMSET)
    assert 0 == fill["flags"] & CopyFlag.DESTINATION_DEVICE


def test_copy_between_devices_names_both(trace):
    (copy,) = trace.of_kind(Kind.MEMCPY)
    assert (["cuMemcpyPeer"], 0b11) == (names(trace, Kind.MEMCPY), copy["aux1"])


def test_access_by_a_host_function_belongs_to_it(trace):
    (function,) = trace.of_kind(Kind.HOST_FUNCTION)
    inside, outside = trace.of_kind(Kind.HOST_ACCESS)
    assert (7, function["correlation"]) == (inside["address"], inside["correlation"])
    assert (8, 0) == (outside["address"], outside["correlation"])


def test_wait_for_an_event_that_was_never_recorded_is_seen(trace):
    (wait,) = trace.of_kind(Kind.STREAM_WAIT_EVENT)
    assert 0 != wait["aux0"]
    assert 0 == len(trace.of_kind(Kind.EVENT_RECORD))
