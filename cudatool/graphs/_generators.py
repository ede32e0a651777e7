"""What a CUDA graph asks of a random number generator, so that each replay draws new numbers.

::

    graph.capture_begin():  generator.begin_capture(graph)      before the driver's capture begins, on its stream:
                                                                seed and offset get a place in device memory
    kernels captured:       read seed and offset from there, and add how many numbers the graph drew before them
    graph.capture_end():    drawn = generator.end_capture(graph)
    graph.replay():         generator.begin_replay(graph, drawn)    if any: seed and offset as they are now are
                                                                written there; then the generator advances by `drawn`
    graph.reset():          generator.forget(graph)

The device's default generator takes part in every capture; others are registered before it
(:meth:`cudatool.CUDAGraph.register_generator_state`).

A generator finds out by ``cudatool.graphs.capturing_graph(stream)`` which graph a kernel is captured into, if any. One
that the graph does not know cannot be used in its capture.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["CapturableGenerator"]


class CapturableGenerator(Protocol):
    """A generator that CUDA graphs can use. Calls name the graph by an object, compared by identity."""

    def begin_capture(self, graph: object) -> None:
        """Give seed and offset of `graph` a place on the device, for as long as the graph lives.

        The capturing stream is current and does not capture yet, so that the place is memory of the ordinary pool.
        """

    def end_capture(self, graph: object) -> int:
        """Return by how much the kernels captured into `graph` move the offset; also after a capture that failed."""

    def begin_replay(self, graph: object, drawn: int) -> None:
        """Write seed and offset to their place, on the current stream, and advance the generator by `drawn`."""

    def forget(self, graph: object) -> None:
        """Give the place back; the graph is not replayed any more. Nothing happens if it is not known."""
