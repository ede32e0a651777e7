"""Compiling kernels for long is said: on a terminal while it lasts, elsewhere in one line."""

from __future__ import annotations

import io

import pytest

from cudatool import progress
from cudatool.sim.jit import native


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_earlier_pieces_of_the_work_count_for_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress.step("compiling kernels, 1 so far"):
        pass
    assert terminal.getvalue() == ""
    with progress.step("compiling kernels, 2 so far", before_s=progress.DELAY_S):
        assert "compiling kernels, 2 so far" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K"), "the line is gone"


def test_a_line_comes_once_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io.StringIO()
    monkeypatch.setattr("sys.stderr", plain)
    compiling = native._Compiling()
    for _ in range(9):
        compiling.add(1.2)
    assert plain.getvalue().count("\n") == 1
    assert plain.getvalue().startswith("cudatool: compiling kernels has taken 11 s so far")
    compiling.add(50)
    assert plain.getvalue().count("\n") == 1
