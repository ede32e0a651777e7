"""The one module through which everything emits events.

Contract, as pseudo-code of an instrumented call::

    if hooks.active:                      # the whole cost without a subscriber
        correlation = hooks.begin()       # driver calls made from here on belong to us: sources below stay silent
        try:
            driver call
        finally:
            hooks.end()
        hooks.emit(Kind.X, correlation=correlation, ...)   # subscribers run in the order they were added

Subscribers are process-wide. A subscriber's exception never reaches the workload: the subscriber is dropped, the
failure is logged once with its name (``strict=True`` raises instead, for tests), and the others receive a ``WARNING``
with ``WarningFlag.LOST``. If the subscriber has a method ``dropped(error)``, that is called.

The workload's own exceptions always reach it. Python runs signal handlers between any two instructions, so also while a
subscriber runs: what a handler raises there (KeyboardInterrupt, say) waits until every subscriber has the event, and
goes on to the workload then. The interrupted subscriber is called again with the same event.

What a subscriber does itself is not part of the program: events emitted from inside a subscriber are left out.
A finalizer that the garbage collector happens to run there is part of it: its events follow the current one.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic_ns
from types import CodeType
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.trace import _emit, handles, stacks
from cudatool.trace._emit import current_operation, emit
from cudatool.trace.events import FIELDS, Event, Kind, WarningCode, WarningFlag
from cudatool.trace.handles import (
    close_event,
    close_stream,
    device_of_stream,
    event_id,
    event_ids,
    forget_destroyed,
    stream_id,
    stream_ids,
)
from cudatool.trace.threads import (
    is_collecting,
    local,
    native_thread,
    native_threads,
    thread_id,
    thread_name,
    watch_collector,
)

__all__ = [
    "Subscriber",
    "active",
    "begin",
    "close_stream",
    "close_event",
    "current_operation",
    "deliver_waiting",
    "device_of_stream",
    "emit",
    "emitting",
    "end",
    "event_id",
    "event_ids",
    "forget_destroyed",
    "forward",
    "forward_rows",
    "host_function",
    "is_subscribed",
    "mark",
    "measures_accesses",
    "native_thread",
    "native_threads",
    "new_correlation",
    "new_correlations",
    "new_graph",
    "own_event",
    "reports_graphs",
    "reports_ranges",
    "reset",
    "running_function",
    "stream_id",
    "stream_ids",
    "strict",
    "subscribe",
    "thread_id",
    "thread_name",
    "unsubscribe",
    "wants_accesses",
]

Subscriber = Callable[[Event], None]

active: bool = False
"""True while there is a subscriber. Test this before building an event."""

wants_accesses: bool = False
"""Whether what operations and the host access is to be recorded."""

measures_accesses: bool = False
"""Whether the device itself reports what its operations access, so that it need not be inferred."""

reports_graphs: bool = False
"""Whether a source of driver calls reports graphs and their nodes, also of those that our runtime makes."""

reports_ranges: bool = False
"""Whether a source reports the ranges that are given to NVTX: then ours are not, or the trace would have them twice."""

strict: bool = False
"""Raise a subscriber's exception instead of dropping the subscriber (tests)."""

_WITH_STACK = frozenset(kind for kind, fields in FIELDS.items() if "stack" in fields)

_OF_HOST_FUNCTIONS = frozenset([Kind.HOST_ACCESS, Kind.HAND_OVER, Kind.TAKE_OVER])

_new_event = tuple.__new__  # what Event(...) ends in, without its argument handling: half the time

mark: Callable[[int], object] | None = None
"""Called with the correlation at the beginning of an operation of our runtime, and with 0 at its end, on its thread."""

_subscribers: tuple[Subscriber, ...] = ()
_lock = threading.RLock()
_correlations = itertools.count(1)
_graphs = itertools.count(1)
_log = logging.getLogger("cudatool.trace")


def subscribe(subscriber: Subscriber, *, first: bool = False) -> None:
    """Call `subscriber` with every :class:`Event` from now on. Adding it a second time changes nothing.

    It at once receives the ``STREAM_CREATE`` of each stream that is already known. With `first` it hears of each event
    before those who subscribe already.
    """
    global _subscribers, active
    with _lock:
        if subscriber in _subscribers:
            return
        watch_collector()
        _subscribers = (subscriber, *_subscribers) if first else (*_subscribers, subscriber)
        active, handles.announce = True, emit
        known = handles.known_streams()
    for fields in known:
        interruption = _deliver(own_event(Kind.STREAM_CREATE, **fields), (subscriber,))
        if interruption is not None:
            raise interruption


def is_subscribed(subscriber: Subscriber) -> bool:
    """Return whether `subscriber` is called with every event."""
    return subscriber in _subscribers


def unsubscribe(subscriber: Subscriber) -> None:
    """Stop calling `subscriber`. Removing one that is not there changes nothing."""
    global _subscribers, active
    with _lock:
        _subscribers = tuple(s for s in _subscribers if s != subscriber)
        active, handles.announce = bool(_subscribers), emit if _subscribers else None


def begin() -> int:
    """Open an operation of our runtime on this thread and return its correlation id.

    Until the matching :func:`end`, driver-level sources record none of this thread's calls, and tie what the
    device reports (execution times, accesses) to this id. Nested calls belong to the outermost operation.
    """
    thread = local.thread
    thread.depth += 1
    if thread.depth == 1:
        thread.correlation = next(_correlations)
        if mark is not None:
            mark(thread.correlation)
    return thread.correlation


def end() -> None:
    """Close the operation opened by :func:`begin`."""
    thread = local.thread
    thread.depth -= 1
    if thread.depth == 0:
        thread.correlation = 0
        if mark is not None:
            mark(0)


@contextmanager
def host_function(correlation: int, node: int = 0) -> Iterator[None]:
    """While the driver calls a host function of the program: what it does itself is work of that operation.

    Events of kinds that say so get its correlation; the others stay as they are. `node` is the number of the graph's
    node that calls it (0 outside of a graph), which those events have as their stream.
    """
    thread = local.thread
    outer = thread.host_function, thread.node
    thread.host_function, thread.node = correlation, node
    try:
        yield
    finally:
        thread.host_function, thread.node = outer


def running_function() -> tuple[int, int]:
    """Return correlation and node of the host function that the driver calls on this thread, zeros if there is none."""
    return local.thread.host_function, local.thread.node


def new_correlation() -> int:
    """Return a correlation id that was not used before (for sources below the runtime)."""
    return next(_correlations)


def new_graph() -> int:
    """Return a number for a graph or an executable graph that none had before."""
    return next(_graphs)


def new_correlations(count: int) -> range:
    """Return as many of :func:`new_correlation`, one after the other."""
    last = deque(
        itertools.islice(_correlations, count), maxlen=1
    )  # one step of the interpreter: no thread comes between
    return range(last[0] - count + 1, last[0] + 1) if last else range(0)


def _emit_with_care(
    kind: Kind,
    device: int,
    flags: int,
    stream: int,
    correlation: int,
    stack: int | None,
    name: str,
    address: int,
    size: int,
    aux0: int,
    aux1: int,
    event: Event | None,
    error: BaseException | None,
) -> None:
    """Do what :func:`emit` does, whatever happens during the call.

    Where `error` was raised in the middle of that, go on with the `event` that was made, if it was.
    """
    thread = local.thread
    thread.began = True
    if error is None and thread.emitting and not is_collecting():
        return
    outermost, thread.emitting = error is not None or not thread.emitting, True
    interruption: BaseException | None = None
    try:
        while True:
            try:
                if error is not None:
                    try:
                        raise error
                    finally:
                        error = None
                if not thread.named:
                    thread.take_name()
                if thread.lost:
                    _tell_of_loss(thread)
                if event is None:
                    if thread.host_function and kind in _OF_HOST_FUNCTIONS:
                        correlation, stream = thread.host_function, thread.node or stream
                    if stack is None:
                        stack = stacks.capture() if kind in _WITH_STACK else 0
                    # fmt: off
                    event = _new_event(Event, (monotonic_ns(), kind, device, flags, thread.id, stream, correlation,
                                               stack, name, address, size, aux0, aux1))
                    # fmt: on
                if not thread.pending or thread.pending[-1] is not event:
                    thread.pending.append(event)
                while outermost and thread.pending:
                    interruption = _deliver(thread.pending[0], _subscribers) or interruption
                    del thread.pending[0]
                break
            except BaseException as failure:  # a signal handler's, between two subscribers or before the first
                if strict or not _is_of_the_program(failure, _emit_with_care):
                    thread.pending.clear()
                    raise
                interruption = failure
    except BaseException:  # in the few instructions from one attempt to the next
        if not strict and (event is None or thread.pending[-1:] != [event]):
            thread.lost = True  # to call anything would let the handler raise again
        raise
    finally:
        if outermost:
            thread.emitting = False
    if interruption is not None:
        raise interruption


def forward(event: Event) -> None:
    """Send an event that happened earlier, as its source noted it. A subscriber may do so before the current event."""
    interruption = _deliver(event, _subscribers)
    if interruption is not None:
        raise interruption


def forward_rows(rows: npt.NDArray[np.void], names: Sequence[str], *, source: Subscriber | None = None) -> None:
    """Send many events that happened earlier. A recorder takes them as they are, which costs a hundredth of the time.

    A subscriber that takes rows has a method ``write_rows(rows, names)``. One that passes on events of its own before
    those of others has ``before_rows(rows)``, too: it passes on what happened before the first of these rows, and
    returns how many of them come before the next thing that it holds. With neither, it is called for each event.

    Parameters
    ----------
    rows
        Of :data:`~cudatool.trace.events.RECORD`, but for what is interned: `name` is an index into `names`, `stack` an
        id of :mod:`~cudatool.trace.stacks`, `thread` one of :func:`thread_id`.
    source
        The subscriber that sends them, which does not get them.

    The thread that calls this must run no signal handlers of the program, or have them wait.
    """
    while len(rows):
        part = rows
        for subscriber in _subscribers:
            before: Callable[..., int] | None = getattr(subscriber, "before_rows", None)
            if before is not None and subscriber != source:
                try:
                    part = part[: max(before(part), 1)]
                except Exception as error:
                    _drop(subscriber, error)
        _deliver_rows(part, names, source)
        rows = rows[len(part) :]


def _deliver_rows(rows: npt.NDArray[np.void], names: Sequence[str], source: Subscriber | None) -> None:
    for subscriber in _subscribers:
        if subscriber == source:
            continue
        write: Callable[..., None] | None = getattr(subscriber, "write_rows", None)
        if write is not None:
            try:
                write(rows, names)
            except Exception as error:
                _drop(subscriber, error)
            continue
        if hasattr(subscriber, "before_rows"):
            continue
        for row in rows.tolist():
            time, kind, device, flags, thread, _, stream, correlation, stack, name, *rest = row
            event = (time, Kind(kind), device, flags, thread, stream, correlation, stack, names[name], *rest)
            interruption = _deliver(Event(*event), (subscriber,))
            if interruption is not None:
                raise interruption


def _deliver(
    event: Event, subscribers: tuple[Subscriber, ...], failure: BaseException | None = None
) -> BaseException | None:
    """Give the event to each subscriber; return what a signal handler of the program raised during it, if one did.

    If `failure` is given, the first subscriber was called, and raised that.
    """
    interruption: BaseException | None = None
    for subscriber in subscribers:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if failure is not None:
                    try:
                        raise failure
                    finally:
                        failure = None
                subscriber(event)
                break
            except BaseException as error:
                of_the_program = _is_of_the_program(error, subscriber)
                if of_the_program:
                    interruption = error
                elif strict:
                    raise
                if not of_the_program or attempt == _ATTEMPTS:
                    _drop(subscriber, error)
                    break
    return interruption


def deliver_waiting() -> BaseException | None:
    """Give the subscribers what a signal handler's exception kept this thread from giving them, before its next event.

    Returns what a signal handler of the program raised during it, if one did.
    """
    thread, interruption = local.thread, None
    while (thread.pending or thread.lost) and not thread.emitting:
        thread.emitting = True
        try:
            if thread.lost:
                _tell_of_loss(thread)
            interruption = _deliver(thread.pending[0], _subscribers) or interruption
            del thread.pending[0]
        finally:
            thread.emitting = False
    return interruption


def _tell_of_loss(thread: _emit.Thread) -> None:
    text = "a signal handler's exception interrupted the recording of an operation"
    code = WarningCode.RECORDING_INTERRUPTED
    thread.pending.append(own_event(Kind.WARNING, flags=WarningFlag.LOST, name=text, aux0=code))
    thread.lost = False


def _drop(subscriber: Subscriber, error: BaseException) -> None:
    unsubscribe(subscriber)
    text = f"trace subscriber {subscriber!r} failed and was removed"
    if isinstance(error, OSError):  # no mistake of its own: a full disk, say
        _log.error("%s: %s", text, error.strerror)
    else:
        _log.error("%s", text, exc_info=error)
    # The others hear of it, after this event.
    local.thread.pending.append(
        own_event(Kind.WARNING, flags=WarningFlag.LOST, name=text, aux0=WarningCode.SUBSCRIBER_FAILED)
    )
    if callable(dropped := getattr(subscriber, "dropped", None)):
        dropped(error)


def _is_of_the_program(error: BaseException, subscriber: Callable[..., None]) -> bool:
    """Whether a signal handler of the program raised this in the middle of `subscriber`, and not `subscriber` itself.

    It did if a handler that is installed is among the frames, or, where the subscriber is cudatool's own, code that
    cudatool never calls.
    """
    if not isinstance(error, Exception):
        return True  # KeyboardInterrupt, SystemExit: never meant for a subscriber
    if threading.current_thread() is not threading.main_thread():
        return False  # signal handlers run on the main thread only
    ours = str(getattr(subscriber, "__module__", "")).startswith("cudatool.")
    handlers = _signal_handlers()
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code in handlers:
            return True
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if ours and package not in _CALLED_BY_US and package not in sys.stdlib_module_names:
            return True
        traceback = traceback.tb_next
    return False


_CALLED_BY_US = frozenset(["cudatool", "numpy"])  # by cudatool's own subscribers, beside the standard library
_ATTEMPTS = 10  # to give a subscriber an event: a signal handler does not raise in all of them


def _signal_handlers() -> set[CodeType]:
    """Return the code of the signal handlers in Python that are installed."""
    found = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # of functools.partial
        handler = getattr(handler, "__func__", handler)
        for function in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004  an instance of a class
            if isinstance(code := getattr(function, "__code__", None), CodeType):
                found.add(code)
    return found


def own_event(
    kind: Kind,
    *,
    device: int = -1,
    flags: int = 0,
    stream: int = 0,
    name: str = "",
    address: int = 0,
    size: int = 0,
    aux0: int = 0,
    aux1: int = 0,
) -> Event:
    """Return an event of a recorder itself, not of the program: it has no stack."""
    return Event(monotonic_ns(), kind, device, flags, thread_id(), stream, 0, 0, name, address, size, aux0, aux1)


def emitting() -> bool:
    """Return whether a subscriber is running on this thread."""
    return local.thread.emitting


def reset() -> None:
    """Drop every subscriber and every id (tests)."""
    global _subscribers, active, strict, _correlations
    with _lock:
        _subscribers, active, strict, handles.announce = (), False, False, None
        handles.reset()
        _correlations = itertools.count(1)


def _forked() -> None:
    """In a child: another thread may have held the lock."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)

_emit.install(
    names=globals(),
    local=local,
    event_type=Event,
    capture=stacks.capture,
    emit_with_care=_emit_with_care,
    deliver_with_care=_deliver,
    with_stacks=_WITH_STACK,
    of_host_functions=_OF_HOST_FUNCTIONS,
)
