"""What is written does not lie in memory as a whole, and a user sees how far it is."""

from __future__ import annotations

import io
import itertools
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cudatool import progress
from cudatool.export import perfetto, sqlite
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.model import Trace

WRITERS = pytest.mark.parametrize("write", [perfetto.write, sqlite.write], ids=["perfetto", "sqlite"])


def allocations(count: int) -> Trace:
    """Return a trace of `count` blocks, each freed before the next is allocated."""
    records = np.zeros(3 * count, RECORD)
    records["kind"] = np.tile([Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED], count)
    records["time"] = np.arange(len(records)) * 1000
    records["address"] = np.repeat(np.arange(count) % 7 + 1, 3) << 21
    records["size"] = 512
    return Trace(records)


@WRITERS
def test_memory_for_an_event_is_bounded(write: Callable[[Path, Trace], None], tmp_path: Path) -> None:
    def peak(count: int) -> int:
        trace = allocations(count)
        tracemalloc.start()
        try:
            write(tmp_path / "out", trace)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak(10_000), peak(30_000)
    assert (many - few) / 60_000 < 150


@WRITERS
def test_progress_is_shown_while_a_file_is_written(
    write: Callable[[Path, Trace], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=terminal))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=itertools.count(0, 3).__next__))
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: SimpleNamespace(columns=1000))
    monkeypatch.setenv("TERM", "xterm")
    write(tmp_path / "out", allocations(10_000))
    assert f"writing {tmp_path / 'out'}: allocations: 81 %" in terminal.getvalue()  # 8192 of 10,000
    assert terminal.getvalue().endswith("\r\x1b[K")
