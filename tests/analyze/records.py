"""Traces for tests, written as lists of events."""

from __future__ import annotations

from typing import Any

import numpy as np
import recordings
from recordings import path_of

from cudatool import analyze
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Frame, Trace

MIB = 1 << 20
BASE = 1 << 40


def trace(*events: tuple[Kind, dict[str, Any]], **more: Any) -> Trace:
    """Return a trace of events given as (kind, fields), one every 10 ns from 1000 ns on."""
    records = np.zeros(len(events), RECORD)
    names = [""]
    for i, (kind, fields) in enumerate(events):
        records[i]["kind"], records[i]["time"] = kind, 1000 + 10 * i
        for field, value in fields.items():
            if field == "name":
                if value not in names:
                    names.append(value)
                value = names.index(value)
            records[i][field] = value
    return Trace(records, names=names, **more)


def alloc(address: int, size: int, **more: Any) -> tuple[Kind, dict[str, Any]]:
    return Kind.BLOCK_ALLOC, {"address": BASE + address, "size": size, "aux0": size, **more}


def free(address: int) -> tuple[Kind, dict[str, Any]]:
    return Kind.BLOCK_FREE_REQUESTED, {"address": BASE + address}


def freed(address: int) -> tuple[Kind, dict[str, Any]]:
    return Kind.BLOCK_FREE_COMPLETED, {"address": BASE + address}


def of_segment(kind: Kind, address: int, size: int, **more: Any) -> tuple[Kind, dict[str, Any]]:
    return kind, {"address": BASE + address, "size": size, **more}


def stacks(*stacks_of_frames: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return the tables of a trace with these stacks, numbered from 1."""
    frames = list(
        dict.fromkeys(Frame(*frame) for stack in stacks_of_frames for frame in stack)
    )  # interned, as in files
    result = [(), *(tuple(frames.index(Frame(*frame)) for frame in stack) for stack in stacks_of_frames)]
    return {"frames": frames, "stacks": result}


RECORDINGS = (
    *("convnet__default", "convnet__frac0.03", "gpt_default", "gpt_expandable", "graphs__default", "kvcache__round4"),
    *("llm__default", "llm__expandable", "prefetch__default", "prefetch__expandable", "resnet_default"),
    "streams_default",
)


def recording(name: str) -> Trace:
    """Return the trace in a recording of PyTorch; skip the test where it is not on this machine. Do not change it."""
    return recordings.read(path_of(name))


def report_of(name: str) -> analyze.MemoryReport:
    """Return the report of a recording."""
    return recordings.report_of(path_of(name))
