"""What those who watch the driver's calls are told, and what becomes of a call that one of them fails in."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from cudatool.sim import abi
from cudatool.sim.results import Result


class Watcher:
    def __init__(self, name: str, told: list[Any], fails: str = "") -> None:
        self.name, self.told, self.fails = name, told, fails

    def enter(self, entry: abi.EntryPoint, arguments: tuple[Any, ...], correlation: int) -> None:
        self._tell("enter", entry, arguments, correlation)

    def leave(self, entry: abi.EntryPoint, arguments: tuple[Any, ...], correlation: int, result: Result) -> None:
        self._tell("leave", entry, arguments, correlation, result)

    def gives_back(
        self, entry: abi.EntryPoint, arguments: tuple[Any, ...], correlation: int, what: tuple[abi.GivenBack, Any]
    ) -> None:
        self._tell("gives_back", entry, arguments, correlation, what[0])

    def enqueued(self, operation: Any) -> None: ...

    def executed(self, operation: Any) -> None: ...

    def unlocked(self) -> None: ...

    def _tell(self, what: str, entry: abi.EntryPoint, *facts: Any) -> None:
        self.told.append((self.name, what, entry.name, *facts))
        if what == self.fails:
            raise ValueError(self.name)


@pytest.fixture
def watch():
    watching = []

    def begin(*watchers: Watcher) -> None:
        for watcher in watchers:
            abi.subscribe(watcher)
            watching.append(watcher)

    yield begin
    for watcher in watching:
        abi.unsubscribe(watcher)


def test_the_first_to_be_told_of_a_call_is_the_last_to_be_told_of_its_end(driver, watch):
    told: list[Any] = []
    watch(Watcher("a", told), Watcher("b", told))
    assert driver.cuMemFree(3)[0].name == "CUDA_ERROR_INVALID_VALUE"
    assert driver.cuDeviceGetCount()[0].name == "CUDA_SUCCESS"
    assert [(*one[:3], *one[5:]) for one in told] == [
        ("a", "enter", "cuMemFree"),
        ("b", "enter", "cuMemFree"),
        ("b", "leave", "cuMemFree", Result.INVALID_VALUE),
        ("a", "leave", "cuMemFree", Result.INVALID_VALUE),
        ("a", "enter", "cuDeviceGetCount"),
        ("b", "enter", "cuDeviceGetCount"),
        ("b", "leave", "cuDeviceGetCount", Result.SUCCESS),
        ("a", "leave", "cuDeviceGetCount", Result.SUCCESS),
    ]
    assert all(isinstance(one[5], Result) for one in told if one[1] == "leave")
    assert told[0][3] == (3,)
    assert len({one[4] for one in told[:4]}) == 1  # one correlation


@pytest.mark.parametrize("moment", ["enter", "leave"])
def test_a_call_that_a_watcher_fails_in_fails(driver, watch, caplog, moment):
    told: list[Any] = []
    watch(Watcher("a", told), Watcher("b", told, fails=moment))
    before = sys.getrefcount(abi.subscribers)
    result = driver.cuDeviceGetCount()[0]
    after = sys.getrefcount(abi.subscribers)
    assert (result.name, after) == ("CUDA_ERROR_UNKNOWN", before)
    assert "cuDeviceGetCount failed inside the software driver" in caplog.text
    assert [one[:2] for one in told][-1] == ("b", moment)  # and nobody after it


def test_a_watcher_is_told_of_memory_before_it_is_given_back(driver, ok, watch, machine):
    memory, told = ok(driver.cuMemAlloc(64)), []

    class Looks(Watcher):
        def _tell(self, what: str, entry: abi.EntryPoint, *facts: Any) -> None:
            told.append((what, machine.allocations.at(int(memory)) is not None))

    watch(Looks("a", []))
    ok(driver.cuMemFree(memory))
    assert [("enter", True), ("gives_back", True), ("leave", False)] == told


def test_memory_stays_if_a_watcher_fails_before_it_is_given_back(driver, ok, watch, caplog):
    memory, told = ok(driver.cuMemAlloc(64)), []
    watcher = Watcher("a", told, fails="gives_back")
    watch(watcher)
    assert driver.cuMemFree(memory)[0].name == "CUDA_ERROR_UNKNOWN"
    watcher.fails = ""
    ok(driver.cuMemFree(memory))
    assert ["enter", "gives_back", "enter", "gives_back", "leave"] == [what for _, what, *_ in told]
