"""Compiling kernels for long is said: on a terminal while it lasts, elsewhere in one line."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

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


_RUN = "from cudatool import progress; progress.DELAY_S = 0.0; from cudatool.cli import main; main()"
_PROGRAM = """
import cudatool as ct
x = ct.zeros(4, dtype="int32")
ct.compile('extern "C" __global__ void one(int *x) { x[threadIdx.x] = 1; }', "one")[1, 4](x)
print("result", x.get().sum())
"""


def _on_a_terminal(tmp_path: Path) -> str:
    """Return what a user's terminal receives of a run; the line comes at once rather than after two seconds."""
    environment = {
        **os.environ,
        "CUDATOOL_DEVICE": "sim",
        "CUDATOOL_CACHE_DIR": str(tmp_path / "cache"),
        "TERM": "xterm",
    }
    command = [sys.executable, "-c", _RUN, "run", "-f", "-o", "cold.ctrace", "program.py"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    received = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while data := os.read(ours, 4096):
            received += data
    os.close(ours)
    assert process.wait(timeout=240) == 0, received
    return received.decode()


def test_first_run_says_on_the_terminal_that_it_compiles_and_the_second_does_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    cold, warm = _on_a_terminal(tmp_path), _on_a_terminal(tmp_path)
    assert "compiling kernels, 1 so far" in cold
    assert "compiling" not in warm
    for shown in (cold, warm):
        assert "result 4" in shown
        assert "compiling" not in shown.rpartition("\x1b[K")[2], "the line is gone"
