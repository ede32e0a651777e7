"""Watching how threads hand work to each other leaves the program as it is."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from cudatool.collect.hand_overs import HandOvers


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
