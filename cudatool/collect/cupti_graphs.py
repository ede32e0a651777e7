"""Graphs on a GPU: which streams are captured, and the numbers by which a trace knows graphs.

A graph is known if all of it was captured. Calls that add nodes or change them are not read: a graph gets a new number
with each, of which the trace says nothing.
"""

from __future__ import annotations

from cudatool.trace import hooks

__all__ = ["GpuGraphs"]


class _Capture:
    """A capture in progress. If it `adds` to a graph that is there, what it captures is not all of the graph."""

    def __init__(self, *, adds: bool) -> None:
        self.adds = adds


class GpuGraphs:
    """Follows captures, graphs and executable graphs. Streams are given by id, all else by handle."""

    def __init__(self) -> None:
        self._captures: dict[int, _Capture] = {}  # by stream that takes part
        self._events: dict[int, _Capture] = {}  # that were recorded in one of these streams
        self._graphs: dict[int, int] = {}  # handle -> number
        self._executables: dict[int, int] = {}

    @property
    def captures(self) -> bool:
        """Whether any stream is captured."""
        return bool(self._captures)

    def is_captured(self, stream: int) -> bool:
        return stream in self._captures

    def begin(self, stream: int, *, adds: bool = False) -> None:
        self._captures[stream] = _Capture(adds=adds)

    def end(self, stream: int, graph: int) -> int:
        """Return the number of the graph that was captured from this stream on; 0 if it failed or is not known."""
        ended = self._captures.get(stream)
        self._captures = {key: value for key, value in self._captures.items() if value is not ended}
        self._events = {key: value for key, value in self._events.items() if value is not ended}
        if not graph:
            return 0
        self.changed(graph)
        return 0 if ended is None or ended.adds else self._graphs[graph]

    def event_recorded(self, stream: int, event: int) -> None:
        if stream in self._captures:
            self._events[event] = self._captures[stream]
        else:
            self._events.pop(event, None)

    def event_waited(self, stream: int, event: int) -> None:
        """A stream that waits for a captured event takes part in the capture."""
        if event in self._events:
            self._captures[stream] = self._events[event]

    def event_destroyed(self, event: int) -> None:
        self._events.pop(event, None)

    def changed(self, graph: int | None) -> None:
        """Forget what a graph consists of; None: of every graph."""
        for handle in list(self._graphs) if graph is None else [graph]:
            self._graphs[handle] = hooks.new_graph()

    def cloned(self, graph: int, original: int) -> None:
        self._graphs[graph] = self._graphs.get(original) or hooks.new_graph()

    def instantiated(self, executable: int, graph: int) -> tuple[int, int]:
        """Return the number of a new executable graph, and of the graph."""
        self._executables[executable] = number = hooks.new_graph()
        return number, self._number_of_graph(graph)

    def updated(self, executable: int, graph: int | None) -> tuple[int, int]:
        """Return the number of an executable graph, and of that whose nodes it has now; None: of no known one."""
        return self.executable(executable), hooks.new_graph() if graph is None else self._number_of_graph(graph)

    def executable(self, handle: int) -> int:
        """Return the number of an executable graph; its handle if it was not seen to be instantiated."""
        return self._executables.get(handle, handle)

    def _number_of_graph(self, handle: int) -> int:
        if handle not in self._graphs:
            self._graphs[handle] = hooks.new_graph()
        return self._graphs[handle]
