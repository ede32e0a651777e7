"""PyThreadState_SetAsyncExc raises an exception in another thread: never in the middle of a driver call."""

from __future__ import annotations

import _thread
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import forked
import pytest

from cudatool.sim import queue
from cudatool.sim.abi import ENTRIES


class Stopped(Exception):
    pass


def stop(thread: int) -> int:
    return ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Stopped))


@pytest.fixture
def looked_for_no_more():
    """Let Python 3.11 look for such exceptions no more: with one that was taken back it goes on to, until another comes.

    Under a profiler it would then look for ever where a function begins.
    """
    yield
    with pytest.raises(Stopped):
        stop(threading.get_ident())
        wait_while(lambda: True)


def wait_while(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


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

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert inside.wait(30)
    yield thread, go_on, caught, after
    go_on.set()
    thread.join(30)


def test_an_exception_for_a_thread_in_a_call_comes_when_the_call_has_returned(thread_in_a_call):
    thread, go_on, caught, after = thread_in_a_call
    assert stop(thread.ident) == 1
    go_on.set()
    thread.join(30)
    assert after[0] == "whole"
    assert caught == ["in the program"]


def test_an_exception_that_is_taken_back_during_the_call_does_not_come(thread_in_a_call, looked_for_no_more):
    thread, go_on, caught, after = thread_in_a_call
    assert stop(thread.ident) == 1
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), None) == 1
    go_on.set()
    thread.join(30)
    assert (after, caught) == (["whole", "CUDA_SUCCESS"], [])


def test_the_frames_of_threads_are_their_own(thread_in_a_call):
    thread, *_ = thread_in_a_call
    frames = sys._current_frames()
    # Not of all that threading lists: it keeps foreign threads, such as another library's, that have ended.
    assert 0 not in frames and frames.keys() >= {thread.ident, threading.get_ident(), threading.main_thread().ident}
    names = []
    frame = frames[thread.ident]
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    assert "handler" in names


def test_an_exception_for_a_thread_that_starts_one_in_a_call_is_not_for_the_new_one(driver, ok, machine, monkeypatch):
    """Until a thread runs, Python 3.11 takes it for the one that starts it."""
    start, memory = _thread.start_new_thread, ok(driver.cuMemAlloc(64))

    def start_new_thread(*arguments: Any) -> int:
        number = start(*arguments)
        assert stop(threading.get_ident()) == 1
        return number

    monkeypatch.setattr(_thread, "start_new_thread", start_new_thread)
    monkeypatch.setattr(machine.scheduler, "_is_shared", True)  # a thread of the driver carries out what is enqueued
    monkeypatch.setattr(machine.scheduler, "_has_runner", False)
    monkeypatch.setattr(queue, "_SOON_S", 0)
    with pytest.raises(Stopped):
        driver.cuMemsetD8Async(memory, 1, 64, 0)
        wait_while(lambda: True)
    wait_while(lambda: machine.scheduler.is_busy)
    ok(driver.cuMemFree(memory))


def test_exceptions_at_any_moment_leave_no_operation_half_done(driver, ok, machine):
    context = ok(driver.cuCtxGetCurrent())
    a, b = ok(driver.cuMemAlloc(64)), ok(driver.cuMemAlloc(64))
    begun, done, failures, caught = threading.Event(), threading.Event(), [], [0]

    def copies(streams: list[Any]) -> None:
        begun.set()
        ok(driver.cuCtxSetCurrent(context))
        if not streams:
            streams.append(ok(driver.cuStreamCreate(0)))
        while not done.is_set():
            for result in (
                driver.cuMemcpyDtoDAsync(a, b, 64, streams[0]),
                driver.cuMemsetD8Async(b, 1, 64, streams[0]),
                driver.cuStreamSynchronize(streams[0]),
            ):
                if int(result[0]):
                    failures.append(result[0].name)

    def work() -> None:
        streams: list[Any] = []
        while not done.is_set():
            try:
                while not done.is_set():
                    try:
                        copies(streams)
                    except Stopped:
                        caught[0] += 1
            except Stopped:  # it came between two rounds of the inner loop
                caught[0] += 1

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(30)
    for number in range(1, 101):
        assert stop(thread.ident) == 1
        wait_while(lambda number=number: caught[0] < number)  # one at a time: what handles one cannot handle another
    done.set()
    thread.join(60)
    assert not thread.is_alive() and caught[0] == 100
    assert failures == []
    ok(driver.cuCtxSynchronize())
    assert not machine.scheduler.is_busy
    assert machine.scheduler._running == 0 and not machine.scheduler._ready
    for one in (a, b):
        ok(driver.cuMemFree(one))


def test_a_forked_child_goes_on(driver, ok):
    ok(driver.cuCtxGetCurrent())

    def in_the_child() -> int:
        number = int(driver.cuCtxSynchronize()[0])  # CUDA cannot be used in a forked child
        try:
            stop(threading.get_ident())
            for _ in range(1000):
                pass
        except Stopped:
            return number
        return 0

    assert forked.status_of(in_the_child) == 3
