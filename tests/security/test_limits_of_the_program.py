"""What a program does to its own process, such as limits and timers, stays after it, and spoils no status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool.workload import signals_undone


def test_handlers_and_timers_end_with_the_program() -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with signals_undone():
        signal.signal(signal.SIGVTALRM, print)
        signal.signal(signal.SIGUSR1, print)
        signal.setitimer(signal.ITIMER_VIRTUAL, 3600)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


@pytest.mark.parametrize(
    ("limit", "stderr"),
    [
        ("resource.RLIMIT_NOFILE, (3, 3)", "/dev/null"),
        ("resource.RLIMIT_FSIZE, (0, 0)", "file"),
        ("resource.RLIMIT_FSIZE, (0, 0)", "/dev/full"),
    ],
)
def test_limit_that_keeps_the_report_from_being_written_is_status_2(tmp_path: Path, limit: str, stderr: str) -> None:
    (tmp_path / "program.py").write_text(f"import resource; resource.setrlimit({limit})")
    (tmp_path / "temporary").mkdir()
    with open(tmp_path / "report", "w") as report, open(tmp_path / stderr, "w") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "cudatool", "sanitize", "program.py"],
            cwd=tmp_path,
            env={**os.environ, "CUDATOOL_DEVICE": "sim", "TMPDIR": str(tmp_path / "temporary")},
            stdout=report,
            stderr=errors,
            timeout=240,
        )
    assert done.returncode == 2
    assert not list((tmp_path / "temporary").iterdir())
