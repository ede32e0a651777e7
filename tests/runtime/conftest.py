"""The runtime on whatever device this process has: CUDATOOL_DEVICE, else a GPU, else the software device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

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


@pytest.fixture(autouse=True)
def nothing_leaks(device: str) -> Iterator[None]:
    clear_workspaces()
    gc.collect()
    before = cudatool.memory_allocated()
    yield
    cudatool.synchronize()
    clear_workspaces()
    gc.collect()
    assert cudatool.memory_allocated() <= before  # less, where a test that failed before has let go
    assert cudatool.current_stream() == cudatool.default_stream()


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
