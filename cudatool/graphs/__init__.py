"""CUDA graphs: work captured from streams once and replayed with one call, in memory whose addresses stay.

Names and behaviour are those of ``torch.cuda``; what a graph asks of random number generators is in ``_generators``.
"""

from __future__ import annotations

from cudatool.graphs._generators import CapturableGenerator

__all__ = ["CapturableGenerator"]
