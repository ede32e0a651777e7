"""What the software device's checkers are told of the caching allocator's blocks, when threads run the device."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from cudatool.collect.sim_blocks import BlockWatcher
from cudatool.trace.events import Event, Kind


def event(kind, address, size, requested=None, stream=1):
    return Event(0, kind, 0, 0, 0, stream, 0, 0, "", address, size, size if requested is None else requested, 0)


class Shadow:
    """Notes what it is told; the first time that memory is freed, another thread allocates it meanwhile."""

    def __init__(self):
        self.told = []
        self.meanwhile = None

    def freed(self, address, size):
        if self.meanwhile is not None:
            thread, self.meanwhile = threading.Thread(target=self.meanwhile), None
            thread.start()
            thread.join(0.1)  # without a lock it would be done by now
            self.thread = thread
        self.told.append(("freed", address, size))

    def allocated(self, address, size):
        self.told.append(("allocated", address, size))

    def usable(self, address, size):
        self.told.append(("usable", address, size))


def test_a_block_that_is_allocated_while_a_thread_runs_the_work_before_stays_usable():
    shadow = Shadow()
    watcher = BlockWatcher(SimpleNamespace(shadow=shadow))
    work = SimpleNamespace(kind="kernel", launch=None, sequence=1)
    watcher.enqueued(work, 1, 7)
    watcher(event(Kind.BLOCK_FREE_COMPLETED, 4096, 512))
    shadow.meanwhile = lambda: watcher(event(Kind.BLOCK_ALLOC, 4096, 512))
    watcher.executed(work, 1, 7)
    shadow.thread.join()
    assert [("freed", 4096, 512), ("allocated", 4096, 512)] == shadow.told


def test_what_rounding_adds_to_a_block_is_unusable_once_the_work_of_the_one_before_has_run():
    shadow = Shadow()
    watcher = BlockWatcher(SimpleNamespace(shadow=shadow))
    work = SimpleNamespace(kind="kernel", launch=None, sequence=1)
    watcher.enqueued(work, 1, 7)
    watcher(event(Kind.BLOCK_FREE_COMPLETED, 4096, 512))
    watcher(event(Kind.BLOCK_ALLOC, 4096, 512, requested=500))
    watcher.executed(work, 1, 7)
    assert [("usable", 4096, 500), ("allocated", 4096, 500), ("freed", 4596, 12)] == shadow.told
