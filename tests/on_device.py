"""Fixtures of the rooms that use a device, whatever this process has: CUDATOOL_DEVICE, else a GPU, else the software device.

The conftest.py of each such room takes them all from here.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import cudatool
from cudatool import _driver
from cudatool.blas import clear_workspaces
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    """The kind of the device: ``"cuda"`` or ``"sim"``."""
    kind = _driver.initialize().kind
    gc.collect()
    gc.freeze()  # what is there now stays: the collections around each test need not go through it
    return kind


@pytest.fixture
def second() -> int:
    """The second device: there is one on GPUs, if the machine has two, and on the software device as tests choose it."""
    if cudatool.device_count() < 2:
        pytest.skip("there is one device")
    return 1


Looked = Callable[[AbstractContextManager[Any], AbstractContextManager[Any], Callable[[], object]], list[object]]


@pytest.fixture
def shared_by_threads() -> Looked:
    """Enter `shared` here and, inside of `outer`, on another thread, which leaves it last; what both see afterwards."""

    def run(
        shared: AbstractContextManager[Any], outer: AbstractContextManager[Any], look: Callable[[], object]
    ) -> list[object]:
        entered, left = threading.Event(), threading.Event()
        seen: list[object] = []

        def enter_between() -> None:
            with outer:
                with shared:
                    entered.set()
                    left.wait(10)
                seen.append(look())

        thread = threading.Thread(target=enter_between)
        with shared:
            thread.start()
            entered.wait(10)
        seen.append(look())
        left.set()
        thread.join()
        return seen

    return run


@pytest.fixture(autouse=True)
def nothing_leaks(device: str) -> Iterator[None]:
    clear_workspaces()
    gc.collect()
    gc.freeze()  # parsed kernels and the like need not be looked through after every test
    before = cudatool.memory_allocated()
    yield
    cudatool.synchronize()
    clear_workspaces()
    gc.collect()
    assert cudatool.memory_allocated() <= before  # less, if an earlier failed test has freed memory
    assert cudatool.current_stream() == cudatool.default_stream()


_SPIN = """
extern "C" __global__ void spin(long long cycles) {
    for (long long start = clock64(); clock64() - start < cycles;) {}
}
"""


@pytest.fixture
def delay(device: str) -> Callable[[], None]:
    """Enqueues on the current stream what has not completed when the program looks next.

    A GPU spins for some 50 ms; on the software device any kernel takes longer than the host does to ask.
    """
    cycles = 100_000_000 if device == "cuda" else 1
    kernels = []
    for index in range(cudatool.device_count()):
        with cudatool.device(index):
            kernels.append(cudatool.compile(_SPIN, "spin"))
    return lambda: kernels[cudatool.current_device()][1, 1](cycles)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """What is emitted during the test, except which public functions were called."""
    yield from _recorded(monkeypatch, lambda event: event.kind != Kind.CALL)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """Which public functions were called during the test."""
    yield from _recorded(monkeypatch, lambda event: event.kind == Kind.CALL)


def _recorded(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[Event], bool]) -> Iterator[list[Event]]:
    cudatool.synchronize()
    monkeypatch.setattr(hooks, "strict", True)
    recorded: list[Event] = []

    def record(event: Event) -> None:
        if wanted(event):
            recorded.append(event)

    hooks.subscribe(record)
    cudatool.default_stream().trace_id()
    recorded.clear()  # the streams that were there already
    yield recorded
    hooks.unsubscribe(record)
