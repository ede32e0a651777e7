"""PyTorch's recordings: three that lie here, and larger ones where a machine has them."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import left_to_workers
import numpy as np
import pytest

from cudatool import analyze
from cudatool.collect import torch_snapshot
from cudatool.trace.events import RECORD
from cudatool.trace.model import Trace

__all__ = ["HERE", "SHARED", "all_of_them", "converted", "in_turn", "path_of", "read", "report_of"]

HERE = Path(__file__).resolve().parent / "data"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "torch_snapshots"
"""What lies beside the checkout, if anything does."""


def path_of(name: str) -> Path:
    """Return the file of a recording; skip the test where it is not on this machine."""
    for folder in (HERE, SHARED):
        path = folder / f"{name}.pickle.xz"
        if path.exists():
            return path
    pytest.skip(f"no recording {name} on this machine")


def all_of_them() -> list[Path]:
    """Return the recordings there are on this machine."""
    return sorted({path.name: path for place in (SHARED, HERE) for path in place.glob("*.pickle.xz")}.values())


_LARGE = ("convnet__default", "kvcache__round4", "llm__default", "llm__expandable")
"""These have 40,000 to 350,000 events, all others together 78,000."""


def in_turn(names: Sequence[str]) -> pytest.MarkDecorator:
    """Give a test as `name` each of the recordings, but of the large ones another one in each run."""
    return _in_turn("name", {name: name for name in names})


def converted() -> pytest.MarkDecorator:
    """Give a test as `path` each recording that is on this machine, of the large ones another one in each run."""
    return _in_turn("path", {path.name.removesuffix(".pickle.xz"): path for path in all_of_them()})


def _in_turn(argument: str, values: Mapping[str, object]) -> pytest.MarkDecorator:
    """All tests of a run have the same large one, which is read and analyzed once.

    What an event may be is in the smaller ones, too: freed, mapped and failed segments, pools, marks.
    """
    small = [pytest.param(value, id=name) for name, value in values.items() if name not in _LARGE]
    large = [pytest.param(values[name], id=name) for name in _LARGE if name in values]
    return pytest.mark.some_of(argument, large, 1, always=small, alike="the large recording")


@lru_cache(maxsize=16)
def read(path: Path) -> torch_snapshot.MemorySnapshot:
    """Return what :func:`torch_snapshot.read` does, once for all tests: do not change it."""
    snapshot = torch_snapshot.read(path)
    gc.freeze()  # it stays: no collection of garbage need look at its events and stacks
    return snapshot


@lru_cache(maxsize=16)
def report_of(path: Path) -> analyze.MemoryReport:
    """Return the report of a recording, once for all tests and workers: of the largest one, it takes seconds."""

    def made() -> analyze.MemoryReport:
        return replace(analyze.report(read(path)), trace=Trace(np.zeros(0, RECORD)))  # the recording is not copied

    report = replace(left_to_workers.found_or_made(f"report-{path.name}", made), trace=read(path))
    gc.freeze()
    return report
