"""Which id and which name threads have in events.

The thread that asks is known by a thread-local variable, others by the number that the operating system gave them.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
from typing import Any

from cudatool.trace import _emit

__all__ = ["is_collecting", "local", "native_thread", "native_threads", "thread_id", "thread_name", "watch_collector"]

_thread_counter = itertools.count(1)
_thread_names = {0: "(thread not known)"}
_native_threads: dict[int, int] = {}  # the system's number of a thread -> id
_unclaimed: dict[int, int] = {}  # those of them that have emitted nothing themselves yet


class _Thread(_emit.Thread):
    """What this module knows about one thread."""

    __slots__ = ()

    def __init__(self) -> None:
        number = threading.get_native_id()
        self.id = _native_threads[number] = _unclaimed.pop(number, 0) or next(_thread_counter)
        main = threading.main_thread()
        if number == main.native_id:  # it may emit nothing itself, and be named by sources of the driver's calls
            _thread_names[self.id] = main.name

    def take_name(self) -> None:
        """Note the thread's name, unless the garbage collector runs: it may before the thread can tell."""
        if not is_collecting():
            _thread_names[self.id] = threading.current_thread().name
            self.named = True


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


local = _Local()
"""What is known of the running thread: ``local.thread``."""


def thread_id() -> int:
    """Return the running thread's id in events."""
    thread = local.thread
    if not thread.named:
        thread.take_name()
    return thread.id


def thread_name(thread: int) -> str:
    """Return the name of the thread with this id, empty if there is none."""
    return _thread_names.get(thread, "")


def native_thread(number: int) -> int:
    """Return the id of the thread that the operating system gave this number, 0 for 0: of one that is not known."""
    if number == 0:
        return 0
    found = _native_threads.get(number)
    if found is None:
        found = _native_threads[number] = _unclaimed[number] = next(_thread_counter)
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        _thread_names[found] = names.get(number, f"native thread {number}")
    return found


def native_threads() -> dict[int, int]:
    """Return the ids of threads by the system's numbers: the table itself, only to be read."""
    return _native_threads


# The collector calls these with its phase, "start" or "stop", and some facts: the phase becomes the last key. They are
# C functions, since a signal handler may run in the middle of any Python function, and the collector would swallow what
# it raises.
_phases: dict[str, Any] = {}
_PHASE_CALLBACKS = (_phases.pop, _phases.__setitem__)


def watch_collector() -> None:
    """Note from now on when the garbage collector runs. A second call changes nothing."""
    if _PHASE_CALLBACKS[0] not in gc.callbacks:
        gc.callbacks.extend(_PHASE_CALLBACKS)


def is_collecting() -> bool:
    """Whether the garbage collector runs, and so finalizers may."""
    return next(reversed(_phases), "stop") == "start"


def _forked() -> None:
    """In a child, whose one thread has another number, and the id that it had."""
    _native_threads.clear()
    _unclaimed.clear()
    _native_threads[threading.get_native_id()] = local.thread.id


os.register_at_fork(after_in_child=_forked)
