"""Hand-overs between host threads through Python's own classes.

While installed, wrappers report to the hooks when a thread releases an object and when another one receives it:
``threading.Thread`` (start and join), ``Event``, ``Condition``, ``Semaphore``, ``Barrier``, ``queue.Queue`` and
``concurrent.futures.Future``. Locks and simple queues are not covered: they are written in C. A thread that
waits for a condition has its lock when it goes on, and so had each that notified it: every earlier notification came
first, even if the wait timed out.

Such a call then costs some microseconds more; it costs nothing extra when not installed.
"""

from __future__ import annotations

import functools
import itertools
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["HandOvers"]

_ids = itertools.count(1)


def _id(item: Any) -> int:
    """Return a number for an object that no other object ever gets."""
    number: int = item.__dict__.setdefault("_cudatool_id", next(_ids))
    return number


def _report(kind: Kind, item: Any) -> None:
    if hooks.active:
        hooks.emit(kind, aux0=_id(item))


def _is_internal() -> bool:
    """Whether the caller of a wrapper is one of these classes itself, or cudatool.

    These classes call each other, even before a thread has started; only the outermost call is reported.
    """
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    return caller in ("threading", "queue") or caller.startswith("cudatool.")


def _releases(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_internal():
            _report(Kind.HAND_OVER, self)
        return method(self, *args, **kwargs)

    return wrapped


def _releases_and_receives(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        _report(Kind.HAND_OVER, self)
        answer = method(self, *args, **kwargs)
        _report(Kind.TAKE_OVER, self)
        return answer

    return wrapped


def _receives(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = method(self, *args, **kwargs)
        if not _is_internal():
            _report(Kind.TAKE_OVER, self)
        return answer

    return wrapped


def _may_receive(method: Callable[..., Any]) -> Callable[..., Any]:
    """Of a method that returns False if it has given up."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = method(self, *args, **kwargs)
        if answer is not False and not _is_internal():
            _report(Kind.TAKE_OVER, self)
        return answer

    return wrapped


def _task_done(method: Callable[..., Any]) -> Callable[..., Any]:
    """Of a queue: a thread that joins it receives what tasks have done; one that gets the next item does not."""

    @functools.wraps(method)
    def task_done(self: queue.Queue[Any]) -> None:
        _report(Kind.HAND_OVER, self.all_tasks_done)
        method(self)

    return task_done


def _join_queue(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def join(self: queue.Queue[Any]) -> None:
        method(self)
        _report(Kind.TAKE_OVER, self.all_tasks_done)

    return join


def _start(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def start(self: threading.Thread) -> None:
        if _is_internal():
            method(self)
            return
        run = self.run

        def reported() -> None:
            _report(Kind.TAKE_OVER, self)
            try:
                run()
            finally:
                self.__dict__.pop("run", None)  # or the thread would keep itself and all that it holds alive
                _report(Kind.HAND_OVER, self)

        self.run = reported  # type: ignore[method-assign]
        _report(Kind.HAND_OVER, self)
        method(self)

    return start


def _join(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def join(self: threading.Thread, timeout: float | None = None) -> None:
        method(self, timeout)
        if not self.is_alive() and not _is_internal():
            _report(Kind.TAKE_OVER, self)

    return join


def _submit(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        task = threading.Event()  # only identifies this hand-over

        def reported(*args: Any, **kwargs: Any) -> Any:
            _report(Kind.TAKE_OVER, task)
            return fn(*args, **kwargs)

        _report(Kind.HAND_OVER, task)
        return method(self, reported, *args, **kwargs)

    return submit


_METHODS: tuple[tuple[type, str, Callable[[Callable[..., Any]], Callable[..., Any]]], ...] = (
    (threading.Thread, "start", _start),
    (threading.Thread, "join", _join),
    (threading.Event, "set", _releases),
    (threading.Event, "wait", _may_receive),
    (threading.Event, "is_set", _may_receive),
    (threading.Condition, "notify", _releases),
    (threading.Condition, "notify_all", _releases),
    (threading.Condition, "wait", _receives),
    (threading.Condition, "wait_for", _receives),
    (threading.Semaphore, "release", _releases),
    (threading.BoundedSemaphore, "release", _releases),
    (threading.Semaphore, "__exit__", _releases),
    (threading.Semaphore, "acquire", _may_receive),
    (threading.Semaphore, "__enter__", _may_receive),
    (threading.Barrier, "wait", _releases_and_receives),
    (queue.Queue, "put", _releases),
    (queue.Queue, "put_nowait", _releases),
    (queue.Queue, "get", _receives),
    (queue.Queue, "get_nowait", _receives),
    (queue.Queue, "task_done", _task_done),
    (queue.Queue, "join", _join_queue),
    (Future, "set_result", _releases),
    (Future, "set_exception", _releases),
    (Future, "result", _receives),
    (Future, "exception", _receives),
    (ThreadPoolExecutor, "submit", _submit),
)


class HandOvers:
    """Puts wrappers around the methods, and removes them again."""

    def __init__(self) -> None:
        self._before: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """Put the wrappers around the methods."""
        for owner, name, wrap in _METHODS:
            method = owner.__dict__[name]
            self._before.append((owner, name, method))
            setattr(owner, name, wrap(method))

    def remove(self) -> None:
        """Remove the wrappers."""
        while self._before:
            setattr(*self._before.pop())
