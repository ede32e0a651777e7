"""Active captures of CUDA graphs and what they forbid.

A call is captured or not by the stream that it works in. What the driver forbids during one it forbids by thread, in
the mode of each capture (cuThreadExchangeStreamCaptureMode); what is known to be harmless is done in :class:`relaxed`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from cudatool import _driver
from cudatool.runtime import calls
from cudatool.runtime._native import call
from cudatool.runtime.calls import check, entry, operation, raise_status
from cudatool.runtime.traced_calls import traced

if TYPE_CHECKING:
    from cudatool.graphs import CUDAGraph
    from cudatool.runtime.stream import Stream

__all__ = [
    "Capture",
    "beside_captures",
    "capture_id",
    "capture_of",
    "captured_nodes",
    "captures",
    "capturing_graph",
    "is_capturing",
    "is_current_stream_capturing",
    "relaxed",
]


class Capture:
    """A capture that one of our graphs has begun and not ended.

    Attributes
    ----------
    graph
        Whose it is; None once the program has dropped it, which gives the capture up.
    stream, handle
        Where it began, and must end; the driver's handle is known here even if the program closes the stream.
    pool
        Where memory for the streams that take part comes from.
    thread
        The host thread that began it.
    id
        The driver's; 0 before the driver has begun.
    held
        Blocks of pinned memory that captured copies use.
    """

    __slots__ = ("_graph", "handle", "held", "id", "pool", "stream", "thread")

    def __init__(self, graph: CUDAGraph, stream: Stream, pool: tuple[int, int]) -> None:
        self._graph = weakref.ref(graph)
        self.stream = stream
        self.handle = stream.native
        self.pool = pool
        self.thread = threading.get_ident()
        self.id = 0
        self.held: list[int] = []

    @property
    def graph(self) -> CUDAGraph | None:
        return self._graph()

    def has(self, handle: int) -> bool:
        """Return whether the stream with this handle takes part."""
        return self.id != 0 and capture_id(handle) == self.id


captures: dict[int, Capture] = {}
"""All of them, by id."""

_LEGACY = (0, 1)  # handles of the legacy default stream, which cannot be captured and must not be asked


def capture_id(handle: int) -> int:
    """Return the driver's id of the capture that a stream takes part in, 0 if in none, or in one that has failed."""
    if handle in _LEGACY:
        return 0
    status, state, number, *_ = calls.driver.cuStreamGetCaptureInfo(handle)
    active = calls.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(number) if not status and state == active else 0


def capture_of(stream: Stream) -> Capture | None:
    """Return which of our captures a stream takes part in."""
    return captures.get(capture_id(stream.cuda_stream)) if captures else None


def capturing_graph(stream: Stream) -> CUDAGraph | None:
    """Return the graph that what is enqueued on a stream is captured into, None if that is executed."""
    capture = capture_of(stream)
    return None if capture is None else capture.graph


def captured_nodes(stream: Stream) -> int:
    """Return how many nodes the graph has by now that what is enqueued on a stream is captured into.

    Raises
    ------
    CudaError
        The capture has failed.
    """
    with operation():
        graph = check(calls.driver.cuStreamGetCaptureInfo(stream.cuda_stream))[2]
        return int(check(calls.driver.cuGraphGetNodes(graph))[1])


_NOT_CAPTURING: Final = 0  # CU_STREAM_CAPTURE_STATUS_NONE


def is_capturing(stream: Stream) -> bool:
    """Return whether what is enqueued on a stream is captured."""
    if stream.cuda_stream in _LEGACY:
        return False
    answer = ctypes.c_int()
    status = call(entry("cuStreamIsCapturing"), stream.native, ctypes.addressof(answer))
    if status:
        raise_status(status)
    return answer.value != _NOT_CAPTURING


@traced
def is_current_stream_capturing() -> bool:
    """Return whether the current stream is being captured into a graph; before a device is used, it is not."""
    from cudatool.runtime.stream import current_stream  # streams ask about captures, too

    return _driver.chosen() is not None and is_capturing(current_stream())


class relaxed:  # noqa: N801 - reads as a statement
    """Let the calling thread do what it could not while something is captured, because the capture cannot see it.

    For calls that no captured work depends on: new memory, events outside of the capture, loading of kernels.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        driver = calls.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._before: Any = check(driver.cuThreadExchangeStreamCaptureMode(mode))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        check(calls.driver.cuThreadExchangeStreamCaptureMode(self._before))


_NOTHING: Final = nullcontext()


def beside_captures() -> AbstractContextManager[None]:
    """Return the context of a call about work that is not captured: relaxed while one of our captures is in progress.

    What is captured cannot be waited for or asked about in any mode.
    """
    return relaxed() if captures else _NOTHING
