"""What streams and threads are called, the same in all reports and exports."""

from __future__ import annotations

from collections import Counter

from cudatool.trace.distinct import distinct
from cudatool.trace.events import Kind, StreamFlag
from cudatool.trace.model import Trace

__all__ = ["stream_names", "thread_names"]


class _Threads(dict[int, str]):
    def __missing__(self, thread: int) -> str:
        return f"thread {thread}"


def thread_names(trace: Trace) -> dict[int, str]:
    """Return the name of each thread of a trace, with its number in the trace where several are called so."""
    same = Counter(trace.threads)
    return _Threads(
        {i: name if same[name] == 1 else f"{name} (thread {i})" for i, name in enumerate(trace.threads) if name}
    )


class _Names(dict[int, str]):
    def __missing__(self, stream: int) -> str:
        return f"stream {stream}" if stream else "no stream"


def stream_names(trace: Trace, *, in_sentences: bool = False) -> dict[int, str]:
    """Return the name of each stream of a trace, also of those whose creation was not recorded.

    A stream is called by its number in the trace, which no other stream has: handles are used again. A default stream
    is called so, with its thread if there are per-thread ones of several, and with its number where that is not enough.
    If streams are of several devices, each name says which. `in_sentences`, a default stream is "the default stream".
    """
    names, article, of_thread = _Names(), "the " if in_sentences else "", thread_names(trace)
    created = trace.of_kind(Kind.STREAM_CREATE)
    threads = dict(zip(created["stream"].tolist(), created["thread"].tolist(), strict=True))
    of_threads = distinct(created["thread"][created["flags"] & StreamFlag.PER_THREAD_DEFAULT != 0])
    devices = dict(zip(created["stream"].tolist(), created["device"].tolist(), strict=True))
    of_several = len(set(devices.values())) > 1
    legacy, per_thread = int(StreamFlag.LEGACY_DEFAULT), int(StreamFlag.PER_THREAD_DEFAULT)  # far faster than members
    for stream, flags in zip(created["stream"].tolist(), created["flags"].tolist(), strict=True):
        if flags & legacy:
            names[stream] = f"{article}default stream"
        elif flags & per_thread:
            names[stream] = f"{article}per-thread default stream"
            if len(of_threads) > 1:
                names[stream] += f" of thread {of_thread[threads[stream]]}"
        elif of_several:
            names[stream] = f"stream {stream}"
        if of_several:
            names[stream] += f" of device {devices[stream]}"
    same = Counter(names.values())
    return _Names({stream: name if same[name] == 1 else f"{name} (stream {stream})" for stream, name in names.items()})
