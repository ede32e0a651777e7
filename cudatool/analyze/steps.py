"""The steps of a program that repeats itself: training iterations, generated tokens, requests served."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from cudatool.progress import advance
from cudatool.text import quoted
from cudatool.trace.events import Kind
from cudatool.trace.lifetimes import Ints, Lifetimes, distinct_pairs
from cudatool.trace.model import Trace, recorded_from
from cudatool.units import format_share

__all__ = ["PARTS_OF_STEPS", "Confidence", "Steps", "find_steps"]


class Confidence(StrEnum):
    """How sure an inference is."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Steps:
    """Where the steps of a trace begin.

    Attributes
    ----------
    bounds
        Records: step ``i`` goes from ``bounds[i]`` to ``bounds[i + 1]``. Empty if no steps were found. A range begins a
        step, which the next range ends: after the last one begins no whole step.
    source
        The source of the steps, in words; if there are none, the reason.
    confidence
        High for ranges of PyTorch's profiler and for ranges named as steps; low for any other range that repeats.
    ranges
        Name of the ranges that are the steps, with N for numbers; empty if the steps have another source.
    """

    bounds: Ints
    source: str
    confidence: Confidence
    ranges: str = ""

    def __len__(self) -> int:
        return max(len(self.bounds) - 1, 0)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: how many steps there are, not where."""
        return {"count": len(self), "source": self.source, "confidence": str(self.confidence)}


PARTS_OF_STEPS: Final = 2
"""How often :func:`find_steps` advances the progress."""

_FEWEST: Final = 3  # ranges of one name, or periods, that make steps


def find_steps(trace: Trace, blocks: Lifetimes, device: int) -> Steps:
    """Return the steps that ranges name, else those that the sequence of allocations in `blocks` shows.

    Parameters
    ----------
    blocks
        Of this device.
    """
    recorded = blocks[blocks.start >= recorded_from(trace, device)]
    _, like = distinct_pairs(recorded.stack, recorded.requested)
    advance()
    found = [s for s in (_from_ranges(trace, device), _from_period(trace, recorded, like)) if s is not None]
    advance()
    return min(found, key=lambda steps: _SURE.index(steps.confidence), default=_NONE)


_SURE: Final = tuple(Confidence)
_NONE: Final = Steps(
    np.zeros(0, np.int64),
    "no repeated steps found",
    Confidence.LOW,
)
_NAMED_AS_STEP: Final = re.compile(r"step|iteration|\biter\b|batch|token|request", re.IGNORECASE)
_COMPILER: Final = "(dynamo_timed)"  # torch.compile's own ranges


def _from_ranges(trace: Trace, device: int) -> Steps | None:
    """Return the steps of the best family of ranges: those whose names differ at most in numbers."""
    marks = trace.records
    index = np.flatnonzero((marks["kind"] == Kind.RANGE_PUSH) | (marks["kind"] == Kind.RANGE_POP))
    index = index[np.isin(marks["device"][index], (device, -1))]
    families: dict[str, list[int]] = {}
    depths: dict[str, int] = {}
    depth = 0
    columns = zip(index.tolist(), marks["kind"][index].tolist(), marks["name"][index].tolist(), strict=True)
    for i, kind, name in columns:
        if kind == Kind.RANGE_PUSH:
            family = re.sub(r"\d+", "N", trace.names[name])
            if not family.endswith(_COMPILER):
                families.setdefault(family, []).append(i)
                depths.setdefault(family, depth)
        depth = max(depth + (1 if kind == Kind.RANGE_PUSH else -1), 0)
    found = [family for family, pushes in families.items() if len(pushes) >= _FEWEST]
    if not found:
        return None

    def rank(family: str) -> tuple[int, int]:
        named = 0 if family.startswith("ProfilerStep") else 1 if _NAMED_AS_STEP.search(family) else 2
        return named, depths[family]

    best = min(found, key=rank)
    confidence = Confidence.HIGH if rank(best)[0] < 2 else Confidence.LOW
    source = f"from each of the ranges named {quoted(best)} to the next"
    return Steps(np.array(families[best], np.int64), source, confidence, best)


_CANDIDATES: Final = 32  # periods to try
_ALIKE: Final = 0.8  # share of allocations that are those of one period earlier


def _from_period(trace: Trace, blocks: Lifetimes, key: Ints) -> Steps | None:
    """Return the steps of a sequence of allocations that repeats with a constant period.

    Allocations of one `key` are alike. A repetition inside of a module's forward is its layers, not steps.
    """
    count = len(blocks)
    if count < 2 * _FEWEST:
        return None
    order = np.argsort(key, kind="stable")
    gap = np.diff(order)[key[order[1:]] == key[order[:-1]]]  # from one allocation to the next that matches it
    often = np.bincount(gap[gap <= count // _FEWEST])
    candidates = np.argsort(-often, kind="stable")[:_CANDIDATES]
    candidates = np.sort(candidates[often[candidates] > 0])
    if not len(candidates):
        return None
    begin = count // 4  # the first steps differ, and set-up comes before them
    alike = np.array([np.mean(key[begin + p :] == key[begin:-p]) for p in candidates.tolist()])
    if alike.max() < _ALIKE:
        return None
    period = int(candidates[np.argmax(alike >= 0.95 * alike.max())])
    # The repeating part: where a whole period equals the previous one.
    matches = np.append(0, np.cumsum(key[period:] == key[:-period]))
    repeats = np.flatnonzero(matches[period:] - matches[:-period] >= _ALIKE * period)
    if not len(repeats):
        return None
    rows = np.arange(repeats[0], repeats[-1] + 2 * period + 1, period)
    bounds = np.append(blocks.start, blocks.end.max(initial=0))[rows[rows <= count]]
    if len(bounds) <= _FEWEST or _within_forward(trace, blocks.stack[rows[0] : rows[-1]], len(rows) - 1):
        return None
    every = f"allocations repeat every {period:,}" if period > 1 else "each allocation is like the last"
    source = f"{every} ({format_share(alike.max())} alike)"
    return Steps(bounds, source, Confidence.MEDIUM if alike.max() >= 0.95 and period > 1 else Confidence.LOW)


def _within_forward(trace: Trace, stacks: Ints, steps: int) -> bool:
    """Return whether the stacks that repeat with the steps all go through one line of a module's forward.

    Then the loop is on that line. In traces with C++ frames the order of frames is not reliable.
    """
    stack, count = np.unique(stacks[stacks > 0], return_counts=True)
    returning = stack[2 * count > steps].tolist()
    if len(returning) < 2:
        return False
    common = set.intersection(*(set(trace.stacks[stack]) for stack in returning))
    return any(trace.frames[frame].function == "forward" for frame in common)
