"""How much of a GPU's own work a recording has."""

from __future__ import annotations

from enum import StrEnum

from cudatool.errors import UsageError, unknown

__all__ = ["Level"]


class Level(StrEnum):
    """How much of the device's own work a recording on a GPU contains: more detail costs more time."""

    MEMORY = "memory"
    """Memory, streams and the calls that enqueue copies and graphs; no events, no kernels, no times on the device."""
    KERNELS = "kernels"
    """Also events, kernels, and when they, copies, fills and launches of graphs ran. For graphs that may have been
    instantiated earlier this is not safe: CUPTI ends the process when they are launched."""
    GRAPH_NODES = "graph-nodes"
    """Also each kernel inside of a graph's launch, in place of the launch as a whole."""
    LAUNCHES = "launches"
    """Those of KERNELS, and each launch when the program makes it, with its thread; of up to 5,000 launches a second
    the Python stack."""

    @classmethod
    def _missing_(cls, value: object) -> Level:
        raise UsageError(unknown("level of recording", str(value), cls))
