"""CUDA graphs: work captured from streams once and replayed with one call, in memory whose addresses stay.

Names and behaviour are those of ``torch.cuda``; what a graph asks of random number generators is in ``_generators``.
"""

from __future__ import annotations

from cudatool.graphs._callables import make_graphed_callables
from cudatool.graphs._context import graph
from cudatool.graphs._generators import CapturableGenerator
from cudatool.graphs._graph import CUDAGraph
from cudatool.runtime.capture import capturing_graph as capturing_graph
from cudatool.runtime.capture import is_current_stream_capturing

__all__ = [
    "CUDAGraph",
    "CapturableGenerator",
    "graph",
    "is_current_stream_capturing",
    "make_graphed_callables",
]
