"""One graph: capture, instantiation, replay."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from cudatool import _driver
from cudatool.errors import CudaError, UsageError
from cudatool.graphs._generators import CapturableGenerator
from cudatool.memory import CachingAllocator
from cudatool.random._generator import default_generator
from cudatool.runtime import calls
from cudatool.runtime._native import call
from cudatool.runtime.allocator import allocator, current_allocator, require_pool_id
from cudatool.runtime.calls import check, entry, operation, raise_status
from cudatool.runtime.capture import Capture, capture_id, captures, is_capturing, relaxed
from cudatool.runtime.device import call_on
from cudatool.runtime.device import device as on_device
from cudatool.runtime.handles import Owner
from cudatool.runtime.mempool import MemPool
from cudatool.runtime.pinned import release
from cudatool.runtime.stream import ExternalStream, Stream, current_stream, default_stream
from cudatool.runtime.traced_calls import traced
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["CUDAGraph", "PoolLike", "refuse_nested"]

PoolLike = tuple[int, int] | MemPool | None

_MODES: Final = {
    # capture_error_mode -> CUstreamCaptureMode
    "global": "CU_STREAM_CAPTURE_MODE_GLOBAL",
    "thread_local": "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL",
    "relaxed": "CU_STREAM_CAPTURE_MODE_RELAXED",
}
# Memory that a captured program takes from the driver in stream order, and keeps, is freed before the next launch; and
# priorities of captured streams are those of the nodes. As PyTorch instantiates.
_INSTANTIATE: Final = 1 | 8  # CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, _USE_NODE_PRIORITY
_VERBOSE: Final = 1  # CU_GRAPH_DEBUG_DOT_FLAGS_VERBOSE

_private_pools = itertools.count(1)


class CUDAGraph(Owner):
    """Work that was captured from a stream, and that each :meth:`replay` does again, at the same addresses.

    Usually captured by :class:`cudatool.graph`. Memory that the capture allocates comes from a pool of the graph's own,
    which keeps it until the graph is gone. Memory allocated before, of inputs for instance, has to be kept by the
    program as long as the graph is replayed; pinned host memory that captured copies use is kept by the graph.

    Nothing is executed while it is captured, so nothing captured can be waited for, and no result be looked at.
    Kernels may be compiled and loaded during a capture, memory be allocated and freed.

    Parameters
    ----------
    keep_graph
        Keep the driver's CUgraph beside the executable one, for :meth:`raw_cuda_graph` and :meth:`debug_dump`; it is
        instantiated by :meth:`instantiate` or by the first replay, not at the end of the capture.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        self._keep_graph = keep_graph
        self._generators: list[CapturableGenerator] = []  # the program's, not the default one
        self._clear()

    def _clear(self) -> None:
        self._capture: Capture | None = None
        self._graph: Any = None
        self._executable = 0
        self._pool: tuple[int, int] | None = None  # set while it has one user more for us
        self._device = -1
        self._known: list[CapturableGenerator] = []  # that have taken part in the capture
        self._open: list[CapturableGenerator] = []  # those of them that still do
        self._drawing: list[tuple[CapturableGenerator, int]] = []  # how much each replay draws, if anything
        self._held: list[int] = []  # blocks of pinned memory
        self._last_stream: Stream | None = None  # of a replay
        self._trace_id = self._executable_trace_id = 0

    # Capture.

    @traced
    def capture_begin(self, pool: PoolLike = None, capture_error_mode: str = "global") -> None:
        """Begin to capture what is enqueued on the current stream, and on streams that wait for it.

        Parameters
        ----------
        pool
            Where memory comes from: another graph's :meth:`pool`, a :func:`cudatool.graph_pool_handle` or a
            :class:`cudatool.MemPool`; default: a pool of its own. Graphs that share a pool must be replayed in the
            order of their captures, and never at the same time.
        capture_error_mode
            ``"global"``: what the capture cannot see, for instance cuMemAlloc by another library, is an error in every
            thread; ``"thread_local"``: in this thread; ``"relaxed"``: nowhere.

        Raises
        ------
        UsageError
            The current stream is the default stream, this thread captures already, the graph was captured already, or
            memory is not cached.
        """
        mode = _MODES.get(capture_error_mode) if isinstance(capture_error_mode, str) else None
        if mode is None:
            raise UsageError(f"{capture_error_mode!r} is not a capture_error_mode; choose one of {', '.join(_MODES)}")
        if self._capture is not None or self._pool is not None:
            raise UsageError("this CUDAGraph has been captured already; make a new one, or reset() it before")
        refuse_nested()
        stream = current_stream()
        if stream == default_stream(stream.device_index):
            raise UsageError(
                "CUDA graphs must be captured on a non-default stream: capture in `with cudatool.graph(g):`, or make "
                "another stream current; a graph can be replayed on the default stream"
            )
        if is_capturing(stream):
            raise UsageError("the current stream is being captured already; end that capture before")
        self._begin(stream, _pool_id(pool), getattr(calls.driver.CUstreamCaptureMode, mode))

    def _begin(self, stream: Stream, pool: tuple[int, int], mode: Any) -> None:
        policy = _caching_allocator(stream.device_index)
        capture = Capture(self, stream, pool)
        try:
            for generator in dict.fromkeys([default_generator(stream.device_index), *self._generators]):
                generator.begin_capture(self)
                self._known.append(generator)
                self._open.append(generator)
            # Before the driver begins: another thread that frees a block now must not record an event in this stream.
            policy.begin_allocate_to_pool(pool, capture.has, capturing=True)
            self._pool, self._device = pool, stream.device_index
            with on_device(self._device), _operation() as correlation:
                check(calls.driver.cuStreamBeginCapture(capture.handle, mode))
            capture.id = capture_id(capture.handle)
            captures[capture.id] = self._capture = capture
        except BaseException:
            if self._pool is not None:
                policy.end_allocate_to_pool(pool)
            self._release_blocks()
            raise
        if correlation:
            hooks.emit(Kind.GRAPH_CAPTURE_BEGIN, device=self._device, stream=stream.trace_id())

    @traced
    def capture_end(self) -> None:
        """End the capture, on the stream it began on; then the graph can be replayed.

        Raises
        ------
        UsageError
            There is no capture; or it began on another stream than the current one, or on another thread.
        CudaError
            Something in the capture was not allowed, or a stream that takes part was not waited for. The capture is
            over nevertheless, and the object can capture again.
        """
        capture = self._capture
        if capture is None:
            raise UsageError("capture_end() without capture_begin(): nothing is being captured")
        if current_stream() != capture.stream:
            raise UsageError(f"the capture must end on the stream it began on; make {capture.stream!r} current")
        result = self._end(capture)
        try:
            self._graph = check(result)
            while self._open:
                generator = self._open.pop()
                if drawn := generator.end_capture(self):
                    self._drawing.append((generator, drawn))
            if not check(calls.driver.cuGraphGetNodes(self._graph))[1]:
                warnings.warn(
                    "the CUDA graph is empty: nothing was enqueued on the captured stream; was another stream or "
                    "another device meant?",
                    stacklevel=3,
                )
            if not self._keep_graph:
                self.instantiate()
        except BaseException:
            self._release_blocks()
            raise

    def _end(self, capture: Capture) -> tuple[Any, ...]:
        """End the driver's capture, and the use of its pool for new memory; return what the driver said."""
        if threading.get_ident() != capture.thread:
            raise UsageError("the capture must end on the thread it began on")
        with on_device(self._device), _operation() as correlation:
            result: tuple[Any, ...] = calls.driver.cuStreamEndCapture(capture.handle)
        self._capture, self._held = None, capture.held
        del captures[capture.id]
        allocator(self._device).end_allocate_to_pool(capture.pool)
        if correlation:
            if not result[0]:
                self._trace_id = hooks.new_graph()
            stream = capture.stream.trace_id()
            hooks.emit(Kind.GRAPH_CAPTURE_END, device=self._device, stream=stream, aux0=self._trace_id)
        return result

    def _abandon(self) -> None:
        """Drop whatever was captured, also if the capture is still in progress."""
        if self._capture is not None:
            _, self._graph = self._end(self._capture)
        self._release_blocks()

    def register_generator_state(self, generator: CapturableGenerator) -> None:
        """Let the capture to come use a random number generator beside the device's default one.

        Raises
        ------
        UsageError
            It is no generator, or the capture has begun already.
        """
        if not hasattr(generator, "begin_capture"):
            raise UsageError(f"a Generator is registered, not {type(generator).__name__}")
        if self._capture is not None or self._pool is not None:
            raise UsageError("a generator must be registered before the capture begins")
        if generator not in self._generators:
            self._generators.append(generator)

    # What was captured.

    @traced
    def instantiate(self) -> None:
        """Make the graph executable, as it is now. Only with `keep_graph` there is a reason to call it.

        Raises
        ------
        UsageError
            Nothing was captured, or the graph was not kept.
        """
        graph = self._captured()
        if self._executable:
            self._destroy_executable()
        with on_device(self._device), _operation() as correlation:
            self._executable = int(check(calls.driver.cuGraphInstantiate(graph, _INSTANTIATE)))
        if correlation:
            self._executable_trace_id = hooks.new_graph()
            hooks.emit(Kind.GRAPH_INSTANTIATE, aux0=self._executable_trace_id, aux1=self._trace_id)
        if not self._keep_graph:
            self._destroy_graph()

    @traced
    def replay(self) -> None:
        """Enqueue the captured work on the current stream. It comes after earlier replays, on whatever stream.

        Raises
        ------
        UsageError
            Nothing was captured.
        CudaError
            The current stream is being captured into another graph.
        """
        if not self._executable:
            self.instantiate()
        stream = current_stream(self._device)
        if self._drawing:
            self._prepare_generators(stream)
        self._last_stream = stream
        correlation = hooks.begin() if hooks.active and not hooks.reports_graphs else 0
        try:
            status = call_on(self._device, call, entry("cuGraphLaunch"), self._executable, stream.native)
        finally:
            if correlation:
                hooks.end()
        if status:
            _refuse_in_capture(stream)
            raise_status(status)
        if correlation:
            hooks.emit(
                Kind.GRAPH_LAUNCH,
                device=self._device,
                stream=stream.trace_id(),
                correlation=correlation,
                aux0=self._executable_trace_id,
                name="cuGraphLaunch",
            )

    def _prepare_generators(self, stream: Stream) -> None:
        _refuse_in_capture(stream)
        last = self._last_stream
        if last is not None and last != stream:
            if last.is_closed:  # by the program; the driver's stream goes on
                last = ExternalStream(last._handle, self._device)
            stream.wait_stream(last)  # what is written now must have been read by then
        for generator, drawn in self._drawing:
            generator.begin_replay(self, drawn)

    @traced
    def reset(self) -> None:
        """Drop what was captured, and the graph's use of its pool; a capture in progress is given up.

        Raises
        ------
        UsageError
            A capture is in progress that began on another thread.
        """
        self._abandon()
        self._generators = []

    def pool(self) -> tuple[int, int]:
        """Return the id of the pool that the graph's memory is in, for other captures to share it.

        Raises
        ------
        UsageError
            Nothing was captured.
        """
        if self._pool is None or self._capture is not None:
            raise UsageError("there is no pool before a capture has ended")
        return self._pool

    def raw_cuda_graph(self) -> int:
        """Return the driver's handle of the CUgraph. It may be changed; instantiate() then takes the change over.

        Raises
        ------
        UsageError
            Nothing was captured, or the graph was not kept (``keep_graph=True``).
        """
        return int(self._captured())

    def raw_cuda_graph_exec(self) -> int:
        """Return the driver's handle of the CUgraphExec, valid until the next instantiate() or reset().

        Raises
        ------
        UsageError
            It was not instantiated.
        """
        if not self._executable:
            raise UsageError("the graph is not instantiated; end its capture, and call instantiate() if it is kept")
        return self._executable

    def enable_debug_mode(self) -> None:
        """Keep the captured graph from now on, as with ``keep_graph=True``, for :meth:`debug_dump`."""
        self._keep_graph = True

    @traced
    def debug_dump(self, debug_path: str | os.PathLike[str], *, verbose: bool = True) -> None:
        """Write the captured graph to a file in Graphviz's DOT language.

        Parameters
        ----------
        verbose
            With the parameters of each node that the driver shows.

        Raises
        ------
        UsageError
            Nothing was captured, or the graph was not kept (:meth:`enable_debug_mode`).
        CudaError
            The file cannot be written.
        """
        graph = self._captured()
        path = os.fsencode(debug_path)
        check(calls.driver.cuGraphDebugDotPrint(graph, path, _VERBOSE if verbose else 0))

    def _captured(self) -> Any:
        if self._capture is not None:
            raise UsageError("the capture has not ended yet")
        if self._graph is None:
            what = "was not kept; make it with keep_graph=True, or call enable_debug_mode() before the capture"
            raise UsageError(f"the captured graph {what}" if self._pool else "nothing has been captured")
        return self._graph

    # The end of it.

    def _release_blocks(self) -> None:
        """Give back everything that a capture has left, whether it failed or not."""
        pool, device, held, stream = self._pool, self._device, self._held, self._last_stream
        self._destroy_graph()
        self._destroy_executable()
        for generator in self._open:
            generator.end_capture(self)
        for generator in self._known:
            generator.forget(self)
        self._clear()
        release(held, stream)
        if pool is not None:
            allocator(device).release_pool(pool)

    def _destroy_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None and int(graph):
            with relaxed(), operation():
                check(calls.driver.cuGraphDestroy(graph))

    def _destroy_executable(self) -> None:
        """A replay that is still running is not disturbed: the driver destroys the graph when it is done."""
        executable, self._executable = self._executable, 0
        if executable:
            with relaxed(), operation():
                check(calls.driver.cuGraphExecDestroy(executable))

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_pool", None) is not None and not _finalizing() and _driver.started():
            capturing = self._capture is not None
            self._abandon()
            if capturing:
                warnings.warn(
                    "a CUDAGraph was dropped before its capture_end(): the capture is discarded", stacklevel=2
                )

    def __repr__(self) -> str:
        state = "capturing" if self._capture is not None else "captured" if self._pool is not None else "empty"
        return f"<CUDAGraph {state}>"


def _operation() -> AbstractContextManager[int]:
    """Return the context of a call about graphs, which gives 0 if we have nothing to report about it.

    A source of driver calls that knows the nodes of graphs reports these calls itself.
    """
    return nullcontext(0) if hooks.reports_graphs else operation()


def _refuse_in_capture(stream: Stream) -> None:
    if is_capturing(stream):
        raise CudaError(
            "a graph cannot be replayed inside of another capture; call the functions that it was captured from",
            "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        )


def refuse_nested() -> None:
    """Raise UsageError if the calling thread is capturing."""
    if any(capture.thread == threading.get_ident() for capture in list(captures.values())):
        raise UsageError("this thread is capturing a graph already; captures cannot be nested")


def _pool_id(pool: PoolLike) -> tuple[int, int]:
    if isinstance(pool, MemPool):
        return pool.id
    # Their first number tells the pools of single graphs from those that programs have asked for.
    return (next(_private_pools), 0) if pool is None or require_pool_id(pool) == (0, 0) else pool


def _caching_allocator(device: int) -> CachingAllocator:
    found = current_allocator(device)
    if not isinstance(found, CachingAllocator):
        raise UsageError(
            "graphs need the caching allocator, which keeps their memory; it is turned off, or the program's own is in "
            "its place (change_current_allocator; a MemPool may have an allocator of its own)"
        )
    return found
