"""Stream capture: active captures, and what they forbid.

The rules are those of the CUDA driver API reference ("Stream Management", cuStreamBeginCapture and
cuThreadExchangeStreamCaptureMode) and of the CUDA programming guide ("Graphs", prohibited and unhandled operations: an
invalid operation invalidates the captures that it has to do with).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, Final

from cudatool.loading.late_dataclasses import dataclass
from cudatool.sim.graph.model import Graph, Node
from cudatool.sim.queue import StreamState
from cudatool.sim.results import DriverError, Result

__all__ = ["Capture", "CaptureMode", "CaptureStatus", "CapturedEvent", "Captures"]


class CaptureMode(IntEnum):
    """CUstreamCaptureMode: of a capture, and of a thread."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


class CaptureStatus(IntEnum):
    """CUstreamCaptureStatus."""

    NONE = 0
    ACTIVE = 1
    INVALIDATED = 2


class Capture:
    """A capture sequence.

    Attributes
    ----------
    graph
        What it captures into; `owns_graph` unless the program gave it.
    origin
        The stream that it began in and must end in.
    thread
        The host thread that began it.
    tails
        For each stream that takes part, the nodes that the next one captured there will depend on.
    abandoned
        Such nodes of streams that were destroyed.
    """

    _ids = itertools.count(1)

    def __init__(self, origin: StreamState, mode: CaptureMode, graph: Graph, *, owns_graph: bool) -> None:
        self.id = next(self._ids)
        self.origin = origin
        self.mode = mode
        self.graph = graph
        self.owns_graph = owns_graph
        self.thread = threading.get_ident()
        self.status = CaptureStatus.ACTIVE
        self.tails: dict[StreamState, dict[Node, bytes]] = {}
        self.abandoned: set[Node] = set()
        self.is_over = False
        self.kept: dict[StreamState, Any] = {}  # C arrays that the program was given pointers to

    def invalidate(self) -> None:
        """Let its end fail: an operation that it forbids was attempted."""
        self.status = CaptureStatus.INVALIDATED

    def check_valid(self) -> None:
        """Fail with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED after :meth:`invalidate`."""
        if self.status is CaptureStatus.INVALIDATED:
            raise DriverError(Result.STREAM_CAPTURE_INVALIDATED)

    @property
    def is_joined(self) -> bool:
        """Whether all that was captured in other streams comes before what is next in the first one."""
        reached: set[Node] = set()
        waiting = list(self.tails[self.origin])
        while waiting:
            node = waiting.pop()
            if node not in reached:
                reached.add(node)
                waiting.extend(node.dependencies)
        return all(reached.issuperset(nodes) for nodes in (*self.tails.values(), self.abandoned))


@dataclass(frozen=True)
class CapturedEvent:
    """What an event stands for that was recorded in a capturing stream."""

    capture: Capture
    tail: dict[Node, bytes]


class _Thread(threading.local):
    mode = CaptureMode.GLOBAL


class Captures:
    """All captures in progress in the process."""

    def __init__(self) -> None:
        self._by_stream: dict[StreamState, Capture] = {}
        self.thread: Final = _Thread()

    def __bool__(self) -> bool:
        return bool(self._by_stream)

    def of(self, stream: StreamState) -> Capture | None:
        """Return the capture that a stream takes part in."""
        return self._by_stream.get(stream)

    def added_by(self, call: int) -> tuple[StreamState, Node] | None:
        """Return the node that the driver call with this correlation captured, and in which stream."""
        for stream, capture in self._by_stream.items():
            for node in capture.tails[stream]:
                if node.added_by == call:
                    return stream, node
        return None

    def begin(self, stream: StreamState, mode: CaptureMode, graph: Graph | None, tail: dict[Node, bytes]) -> Capture:
        """Begin to capture in a stream, into a new graph if none is given.

        Raises
        ------
        DriverError
            CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED for the legacy stream, CUDA_ERROR_ILLEGAL_STATE if it captures
            already, CUDA_ERROR_INVALID_VALUE if another stream captures into the graph.
        """
        if stream is stream.context.legacy_stream:
            raise DriverError(Result.STREAM_CAPTURE_UNSUPPORTED, "the legacy default stream cannot be captured")
        if stream in self._by_stream:
            raise DriverError(Result.ILLEGAL_STATE, "the stream is capturing already")
        if graph is not None and graph.is_capturing:
            raise DriverError(Result.INVALID_VALUE, "a stream is capturing into that graph already")
        capture = Capture(stream, mode, graph or Graph(), owns_graph=graph is None)
        capture.graph.is_capturing = True
        capture.graph.register()
        self.join(stream, capture, tail)
        return capture

    def join(self, stream: StreamState, capture: Capture, tail: dict[Node, bytes]) -> None:
        """Let a stream take part in a capture, its next node after `tail` too."""
        self._by_stream[stream] = capture
        capture.tails.setdefault(stream, {}).update(tail)

    def leave(self, stream: StreamState) -> None:
        """A stream that is destroyed leaves its capture, which ends if it began there."""
        capture = self._by_stream.pop(stream)
        capture.kept.pop(stream, None)
        if stream is capture.origin:
            self._end(capture, failed=True)
        else:
            capture.abandoned.update(capture.tails.pop(stream))

    def end(self, stream: StreamState) -> Graph:
        """End the capture in its first stream, and return the graph.

        Raises
        ------
        DriverError
            CUDA_ERROR_ILLEGAL_STATE, _STREAM_CAPTURE_UNMATCHED, _STREAM_CAPTURE_WRONG_THREAD; and once the capture
            has ended, without a graph: _STREAM_CAPTURE_INVALIDATED, _STREAM_CAPTURE_UNJOINED.
        """
        capture = self.of(stream)
        if capture is None:
            raise DriverError(Result.ILLEGAL_STATE, "the stream is not capturing")
        if capture.origin is not stream:
            capture.invalidate()
            raise DriverError(Result.STREAM_CAPTURE_UNMATCHED)
        if capture.mode is not CaptureMode.RELAXED and capture.thread != threading.get_ident():
            raise DriverError(Result.STREAM_CAPTURE_WRONG_THREAD)
        joined = capture.is_joined
        self._end(capture, failed=capture.status is not CaptureStatus.ACTIVE or not joined)
        capture.check_valid()
        if not joined:
            raise DriverError(Result.STREAM_CAPTURE_UNJOINED, "another stream's captured work was not waited for")
        return capture.graph

    def _end(self, capture: Capture, *, failed: bool) -> None:
        for stream in capture.tails:
            self._by_stream.pop(stream, None)
        capture.graph.is_capturing = False
        capture.is_over = True
        if failed and capture.owns_graph:
            capture.graph.destroy()

    def forget(self, context: Any) -> None:
        """End the captures in the streams of a context that is destroyed."""
        for stream in [stream for stream in self._by_stream if stream.context is context]:
            if stream in self._by_stream:
                self.leave(stream)

    def invalidate(self, streams: Iterable[StreamState]) -> bool:
        """Invalidate the captures in these streams; return whether there were any."""
        found = [self._by_stream[stream] for stream in streams if stream in self._by_stream]
        for capture in found:
            capture.invalidate()
        return bool(found)

    # ---- what is forbidden ----

    def check_implicit(self, stream: StreamState, *, invalidates: bool = True) -> None:
        """Fail with CUDA_ERROR_STREAM_CAPTURE_IMPLICIT for the legacy stream, if it would wait for a capturing one."""
        if stream is not stream.context.legacy_stream:
            return
        waited_for = [c for s, c in self._by_stream.items() if s.blocking and s.context is stream.context]
        if waited_for:
            self._refuse(waited_for if invalidates else [], Result.STREAM_CAPTURE_IMPLICIT)

    def check_unsafe(self) -> None:
        """Fail with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED if this thread must not call what capture cannot see."""
        if self.thread.mode is CaptureMode.RELAXED:
            return
        me = threading.get_ident()
        conflicting = [
            capture
            for capture in self._by_stream.values()
            if (capture.thread == me and capture.mode is not CaptureMode.RELAXED)
            or (capture.thread != me and capture.mode is CaptureMode.GLOBAL and self.thread.mode is CaptureMode.GLOBAL)
        ]
        if conflicting:
            self._refuse(conflicting, Result.STREAM_CAPTURE_UNSUPPORTED)

    def check_context(self, context: Any) -> None:
        """Fail with CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED if a stream of a context captures: no wait for it."""
        conflicting = [c for s, c in self._by_stream.items() if s.context is context]
        if conflicting:
            self._refuse(conflicting, Result.STREAM_CAPTURE_UNSUPPORTED)

    @staticmethod
    def _refuse(captures: list[Capture], result: Result) -> None:
        for capture in captures:
            capture.invalidate()
        raise DriverError(result)
