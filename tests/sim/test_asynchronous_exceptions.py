"""PyThreadState_SetAsyncExc raises an exception in another thread: never in the middle of a driver call."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import pytest

from cudatool.sim.abi import ENTRIES


class Stopped(Exception):
    pass


def stop(thread: int) -> int:
    return ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))


@pytest.fixture
def thread_in_a_call(driver, monkeypatch):
    """A thread that is in the middle of a driver call, until `go_on` is set."""
    inside, go_on, caught, after = threading.Event(), threading.Event(), [], []

    def handler(_pointer: int) -> None:
        inside.set()
        while not go_on.wait(0.01):  # many bytecodes, and Python's lock given away between them
            pass
        after.append("whole")

    monkeypatch.setattr(ENTRIES["cuDeviceGetCount"], "handler", handler)

    def work() -> None:
        try:
            after.append(driver.cuDeviceGetCount()[0].name)
            for _ in range(1000):
                pass
        except Stopped:
            caught.append("in the program")

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    yield thread, go_on, caught, after
    go_on.set()
    thread.join()


def test_an_exception_for_a_thread_in_a_call_comes_when_the_call_has_returned(thread_in_a_call):
    thread, go_on, caught, after = thread_in_a_call
    assert stop(thread.ident) == 1
    go_on.set()
    thread.join(30)
    assert after[0] == "whole"
    assert caught == ["in the program"]


def test_an_exception_that_is_taken_back_during_the_call_does_not_come(thread_in_a_call):
    thread, go_on, caught, after = thread_in_a_call
    assert stop(thread.ident) == 1
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), None) == 1
    go_on.set()
    thread.join(30)
    assert (after, caught) == (["whole", "CUDA_SUCCESS"], [])


def test_the_frames_of_threads_are_their_own(thread_in_a_call):
    thread, *_ = thread_in_a_call
    frames = sys._current_frames()
    assert 0 not in frames and frames.keys() >= {one.ident for one in threading.enumerate()}
    names = []
    frame = frames[thread.ident]
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "handler" in names


def test_exceptions_at_any_moment_leave_no_operation_half_done(driver, ok, machine):
    context = ok(driver.cuCtxGetCurrent())
    a, b = ok(driver.cuMemAlloc(64)), ok(driver.cuMemAlloc(64))
    done, failures, caught = threading.Event(), [], [0]

    def work() -> None:
        ok(driver.cuCtxSetCurrent(context))
        stream = None
        while not done.is_set():
            try:
                stream = stream or ok(driver.cuStreamCreate(0))
                for _ in range(20):
                    for result in (
                        driver.cuMemcpyDtoDAsync(a, b, 64, stream),
                        driver.cuMemsetD8Async(b, 1, 64, stream),
                        driver.cuStreamSynchronize(stream),
                    ):
                        if int(result[0]):
                            failures.append(result[0].name)
            except Stopped:
                caught[0] += 1

    def shielded_work() -> None:
        while True:
            try:
                work()
                return
            except Stopped:
                continue

    thread = threading.Thread(target=shielded_work)
    thread.start()
    while caught[0] < 100 and thread.is_alive():
        stop(thread.ident)
        threading.Event().wait(0.0005)
    done.set()
    thread.join(60)
    assert not thread.is_alive() and caught[0] >= 100
    assert failures == []
    ok(driver.cuCtxSynchronize())
    assert not machine.scheduler.is_busy
    assert machine.scheduler._running == 0 and not machine.scheduler._ready
    for one in (a, b):
        ok(driver.cuMemFree(one))


def test_a_forked_child_goes_on(driver, ok):
    ok(driver.cuCtxGetCurrent())
    read, write = os.pipe()
    child = os.fork()
    if not child:
        number = int(driver.cuCtxSynchronize()[0])  # CUDA cannot be used in a forked child
        try:
            stop(threading.get_ident())
            for _ in range(1000):
                pass
        except Stopped:
            os.write(write, str(number).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert answer.read() == "3"
    os.waitpid(child, 0)
