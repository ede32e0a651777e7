"""Pure functions from a trace to results: columns in, frozen dataclasses out.

:func:`report` is the whole way; the modules hold its parts. Nothing here prints, draws or touches a device.
"""

from __future__ import annotations

from cudatool.analyze.execution import Copies, Kernel, Operations, Stream, copies, kernels, operations, streams
from cudatool.analyze.lifetimes import Lifetimes, blocks, segments
from cudatool.analyze.memory import (
    Block,
    CallSite,
    Segment,
    Timeline,
    by_call_site,
    call_site,
    index_at,
    segments_at,
    timeline,
    torch_segments,
)
from cudatool.analyze.summary import DeviceMemory, Moment, Report, Summary, report

__all__ = [
    "Block",
    "CallSite",
    "Copies",
    "DeviceMemory",
    "Kernel",
    "Lifetimes",
    "Moment",
    "Operations",
    "Report",
    "Segment",
    "Stream",
    "Summary",
    "Timeline",
    "blocks",
    "by_call_site",
    "call_site",
    "copies",
    "index_at",
    "kernels",
    "operations",
    "report",
    "segments",
    "segments_at",
    "streams",
    "timeline",
    "torch_segments",
]
