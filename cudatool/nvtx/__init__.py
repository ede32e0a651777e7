"""Named ranges and marks of the program: in cudatool's traces, and for NVIDIA's profilers through NVTX.

NVTX comes from the package ``nvtx`` or from NVIDIA's library; where neither is, the traces have the ranges alone.
"""

from cudatool.nvtx._ranges import mark, range, range_end, range_pop, range_push, range_start

__all__ = ["mark", "range", "range_end", "range_pop", "range_push", "range_start"]
