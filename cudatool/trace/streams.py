"""What streams are called, the same in all reports."""

from __future__ import annotations

from cudatool.trace.events import Kind, StreamFlag
from cudatool.trace.model import Trace

__all__ = ["stream_names"]


class _Names(dict[int, str]):
    def __missing__(self, stream: int) -> str:
        return f"stream {stream}" if stream else "no stream"


def stream_names(trace: Trace) -> dict[int, str]:
    """Return the name of each stream of a trace, also of those whose creation was not recorded.

    A stream is called by its number in the trace, which no other stream has: handles are used again.
    """
    names = _Names()
    created = trace.of_kind(Kind.STREAM_CREATE)
    for stream, flags in zip(created["stream"].tolist(), created["flags"].tolist(), strict=True):
        if flags & StreamFlag.LEGACY_DEFAULT:
            names[stream] = "default stream"
        elif flags & StreamFlag.PER_THREAD_DEFAULT:
            names[stream] = "per-thread default stream"
    return names
