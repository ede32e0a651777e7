"""A file that is damaged, empty or of the wrong kind is never taken for a clean result."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

RECORDING = Path(__file__).parents[1] / "data" / "streams_default.pickle.xz"
LEAK = """
import cudatool as ct
kept = [ct.empty(3 << 20, "u1") for _ in range(2000)]
"""


@pytest.fixture
def trace(run_warm, tmp_path) -> Path:
    (tmp_path / "leak.py").write_text(LEAK)
    assert run_warm("run", "-o", "whole.ctrace", "leak.py").returncode == 0
    return tmp_path / "whole.ctrace"


COMMANDS = (["leaks"], ["snapshot"], ["replay"], ["diff", "whole.ctrace"], ["export", "--to", "sqlite", "-o", "x.db"])


def test_trace_of_which_nothing_can_be_read_is_an_error(run_warm, trace):
    content = bytearray(trace.read_bytes())
    for at in range(4096, len(content), 64):
        content[at] ^= 0x55
    trace.with_name("bad.ctrace").write_bytes(content)
    for words in (*COMMANDS, ["sanitize"]):
        done = run_warm(*words, "bad.ctrace")
        assert (2, "") == (done.returncode, done.stdout), words
        assert "bad.ctrace: holds no events: The file is damaged at byte" in done.stderr


def test_trace_that_was_cut_is_read_with_a_warning(run_warm, trace):
    content = trace.read_bytes()
    trace.with_name("cut.ctrace").write_bytes(content[: len(content) * 2 // 3])
    for words in COMMANDS:
        done = run_warm(*words, "cut.ctrace")
        assert done.returncode in (0, 1, 4)
        assert "warning: The file is cut after" in done.stdout + done.stderr, words


@pytest.mark.parametrize("command", ["run", "sanitize"])
def test_recording_is_not_run_as_a_program(run_warm, tmp_path, command):
    (tmp_path / "x.pickle").write_bytes(lzma.decompress(RECORDING.read_bytes()))
    done = run_warm(command, "x.pickle")
    assert (2, "") == (done.returncode, done.stdout)
    assert "x.pickle is a memory snapshot, not a program; try `cudatool snapshot x.pickle`" in done.stderr


def test_trace_is_not_run_as_a_program(run_warm, trace):
    done = run_warm("run", trace.name)
    assert done.returncode == 2
    assert "whole.ctrace is a trace, not a program" in done.stderr


def test_pickle_that_was_cut_says_so(run_warm, tmp_path):
    (tmp_path / "cut.pickle").write_bytes(lzma.decompress(RECORDING.read_bytes())[:5000])
    done = run_warm("snapshot", "cut.pickle")
    assert done.returncode == 2
    assert done.stderr == "cudatool: error: cut.pickle: truncated after 5000 bytes\n"
