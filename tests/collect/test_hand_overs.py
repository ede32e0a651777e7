"""Watching how threads hand work to each other leaves the program as it is."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from cudatool.collect.hand_overs import HandOvers
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind


@pytest.fixture
def watched() -> Iterator[None]:
    hand_overs = HandOvers()
    hand_overs.install()
    gc.disable()
    yield
    gc.enable()
    hand_overs.remove()


@pytest.mark.usefixtures("watched")
def test_a_thread_that_has_ended_goes_with_its_last_reference() -> None:
    ran: list[str] = []

    class Worker(threading.Thread):
        def run(self) -> None:
            ran.append(self.name)

    worker = Worker(name="worker")
    worker.start()
    worker.join()
    gone = weakref.ref(worker)
    del worker
    assert (["worker"], None) == (ran, gone())


def _with(what: Any, do: Callable[[], object]) -> None:
    with what:
        do()


def _entered(semaphore: threading.Semaphore) -> None:
    with semaphore:
        pass


_CONDITION = threading.Condition
WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], object]]] = {
    "event": (threading.Event, lambda one: one.set(), lambda one: one.wait()),
    "notify": (_CONDITION, lambda one: _with(one, one.notify), lambda one: _with(one, lambda: one.wait(0))),
    "notify_all": (_CONDITION, lambda one: _with(one, one.notify_all), lambda one: _with(one, lambda: one.wait(0))),
    "wait_for": (_CONDITION, lambda one: _with(one, one.notify), lambda one: _with(one, lambda: one.wait_for(bool, 0))),
    "semaphore": (lambda: threading.Semaphore(0), lambda one: one.release(), lambda one: one.acquire()),
    "with semaphore": (threading.Semaphore, _entered, _entered),
    "bounded": (lambda: threading.BoundedSemaphore(2), lambda one: (one.acquire(), one.release()), _entered),
    "with bounded": (lambda: threading.BoundedSemaphore(2), _entered, lambda one: one.acquire()),
    "queue": (queue.Queue, lambda one: one.put(1), lambda one: one.get()),
    "no wait": (queue.Queue, lambda one: one.put_nowait(1), lambda one: one.get_nowait()),
    "false item": (queue.Queue, lambda one: one.put(False), lambda one: one.get()),
    "false result": (Future, lambda one: one.set_result(False), lambda one: one.result()),
}


@pytest.fixture
def reported() -> Iterator[list[tuple[Kind, int]]]:
    """The hand-overs: what happened, and to which object."""
    seen: list[tuple[Kind, int]] = []

    def note(event: Event) -> None:
        if event.kind in (Kind.HAND_OVER, Kind.TAKE_OVER):
            seen.append((Kind(event.kind), event.aux0))

    hooks.subscribe(note)
    yield seen
    hooks.unsubscribe(note)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("way", WAYS)
def test_what_one_thread_releases_another_one_receives(reported: list[tuple[Kind, int]], way: str) -> None:
    make, release, receive = WAYS[way]
    one = make()
    release(one)
    released = {number for kind, number in reported if kind is Kind.HAND_OVER}
    reported.clear()
    receive(one)
    assert released & {number for kind, number in reported if kind is Kind.TAKE_OVER}


@pytest.mark.usefixtures("watched")
def test_a_thread_that_joins_a_queue_receives_what_its_tasks_have_done(reported: list[tuple[Kind, int]]) -> None:
    items: queue.Queue[int] = queue.Queue()
    for _ in range(2):
        items.put(1)
    for _ in range(2):
        items.get()
        items.task_done()
    items.join()
    done = reported[-1][1]
    assert [Kind.HAND_OVER, Kind.HAND_OVER, Kind.TAKE_OVER] == [kind for kind, number in reported if number == done]
    assert done != reported[0][1]  # a task's end is nothing to who gets the next item


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("wait", [threading.Event.is_set, lambda event: event.wait(0)])
def test_a_thread_that_waits_in_vain_receives_nothing(
    reported: list[tuple[Kind, int]], wait: Callable[[threading.Event], bool]
) -> None:
    assert not wait(threading.Event())
    assert [] == reported
