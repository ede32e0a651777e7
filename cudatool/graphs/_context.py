"""The usual way to capture: a with statement."""

from __future__ import annotations

from types import TracebackType

from cudatool.errors import UsageError
from cudatool.graphs._graph import CUDAGraph, PoolLike, refuse_nested
from cudatool.runtime.capture import captures
from cudatool.runtime.device import current_device, synchronize
from cudatool.runtime.memory_statistics import empty_cache
from cudatool.runtime.pinned import empty_host_cache
from cudatool.runtime.stream import Stream, StreamContext

__all__ = ["graph"]

_streams: dict[int, Stream] = {}  # on which captures take place, by device


class graph:  # noqa: N801 - torch.cuda's name
    """Context manager that captures what is enqueued inside, on the current stream and on those that wait for it.

    ::

        g = cudatool.CUDAGraph()
        with cudatool.graph(g):
            c = a + b
        a.copy_(...)
        g.replay()                      # c is the new sum

    Beforehand it waits for the device and empties the caches, so that the graph's pool can have what is free. If the
    block raises, there is no graph: the capture is given up, and the object can capture again.

    Parameters
    ----------
    cuda_graph
        Where to capture into.
    pool, capture_error_mode
        See :meth:`cudatool.CUDAGraph.capture_begin`.
    stream
        Made current inside; by default one that all captures on a device share, so that they share cached memory of a
        common pool, too.

    Raises
    ------
    UsageError
        `cuda_graph` or `stream` is none; or another capture on the device is in progress, which waiting for the device
        would end with an error.
    """

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: PoolLike = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        if not isinstance(cuda_graph, CUDAGraph):
            raise UsageError(f"a capture goes into a CUDAGraph, not {type(cuda_graph).__name__}")
        if stream is None:
            device = current_device()
            stream = _streams.get(device)
            if stream is None:
                stream = _streams[device] = Stream(device)
        self.cuda_graph = cuda_graph
        self._context = StreamContext(stream)
        self.capture_stream = stream
        self._options = pool, capture_error_mode

    def __enter__(self) -> None:
        refuse_nested()
        index = self.capture_stream.device_index
        if any(capture.stream.device_index == index for capture in list(captures.values())):
            raise UsageError(f"another thread is capturing a graph on device {index}; wait for it")
        synchronize(index)
        empty_cache()
        empty_host_cache()
        self._context.__enter__()
        try:
            self.cuda_graph.capture_begin(*self._options)
        except BaseException as error:
            self._context.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.cuda_graph.capture_end()
            else:
                self.cuda_graph._abandon()
        finally:
            self._context.__exit__(kind, error, traceback)
