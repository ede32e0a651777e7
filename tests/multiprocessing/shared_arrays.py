"""What the other processes of test_multiprocessing.py do; a module of its own, which they import."""

from __future__ import annotations

from typing import Any

import numpy as np

import cudatool

__all__ = ["captures", "doubles", "echoes", "holds", "is_killed", "records", "resends", "waits"]


def doubles(inbox: Any, outbox: Any) -> None:
    """Double what comes, in place, and tell what it was."""
    while (array := inbox.get()) is not None:
        before = array.get()
        array.copy_(2 * before)
        cudatool.synchronize()
        del array
        outbox.put(before)


def captures(inbox: Any, outbox: Any) -> None:
    """Drop what comes in the middle of a capture, and tell what that has computed."""
    array, own, graph = inbox.get(), cudatool.ones(3), cudatool.CUDAGraph()
    with cudatool.graph(graph):
        del array
        result = own + own
    graph.replay()
    outbox.put(result.get())


def echoes(inbox: Any, outbox: Any) -> None:
    while (array := inbox.get()) is not None:
        outbox.put((array.shape, str(array.dtype), array.strides, array.get()))
        del array


def holds(inbox: Any, outbox: Any) -> None:
    """Hold what comes until something else comes, then tell what it holds by then."""
    array = inbox.get()
    outbox.put("here")
    inbox.get()
    values = array.get()
    del array
    outbox.put(values)
    inbox.get()


def is_killed(inbox: Any, outbox: Any) -> None:
    array = inbox.get()
    outbox.put("here")
    inbox.get()
    del array


def resends(inbox: Any, outbox: Any) -> None:
    from multiprocessing.reduction import ForkingPickler

    array = inbox.get()
    try:
        ForkingPickler.dumps(array)
    except cudatool.CudatoolError as error:
        outbox.put(str(error))
    del array


def waits(array: Any, event: Any, outbox: Any) -> None:
    """Read on a stream that waits for an event of the other process."""
    stream = cudatool.Stream()
    stream.wait_event(event)
    with cudatool.stream(stream):
        outbox.put(array.get())


def records(array: Any, event: Any, outbox: Any) -> None:
    """Write on a stream, and record an event of the other process behind it."""
    stream = cudatool.Stream()
    with cudatool.stream(stream):
        array.copy_(np.full(array.shape, 7, array.dtype))
        event.record(stream)
    array.record_stream(stream)
    outbox.put("recorded")
    outbox.close()
    outbox.join_thread()
