"""PyTorch programs whose memory runs out: each leaves one report with the right culprit, and ends as it would without.

How long the program waited is the time from the failed request, in the trace, to the report's file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_oom_programs import CONF, CULPRITS, HOGS, IN_CHILD, PROGRAMS, REASON

from cudatool._driver import gpu_names
from cudatool.trace import reader
from cudatool.trace.events import Kind

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers"),
    pytest.mark.usefixtures("start_up_line"),  # some programs start others
]

_MOST_S = 2.0  # that a program waits for its report


def _run(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = (
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:benchmark", "test_big.py"]
        if name == "pytest"
        else ["big.py"]
    )
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": CONF.get(name, ""), "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, *words, *program], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def _of_program(stderr: str) -> list[str]:
    """Return the lines of tracebacks in the program's files, and the errors up to the bytes that vary."""
    lines = stderr.splitlines()
    return [
        re.sub(r"0x[0-9a-f]+", "0x", line.split(" of which ")[0])
        for line in lines
        if re.match(r' +File ".*(big|hogs)\.py"|[\w.]*(Error|Exception|SystemExit)\b', line)
    ]


def _without_times(stdout: str) -> list[str]:
    """Return the lines that a program wrote, without the durations and the bytes free that pytest prints.

    Nor with what pytest caught of stderr, where a failed test has the line that names the report.
    """
    stdout = re.sub(r"^-+ Captured stderr call -+\ncudatool: memory ran out: .*\n", "", stdout, flags=re.MULTILINE)
    return re.sub(r" of which .*|in \d+\.\d+s|0x[0-9a-f]+", "", stdout).splitlines()


def _waited_s(report: Path) -> float:
    trace = reader.read(report.with_name(report.name.removesuffix(".oom.txt") + ".ctrace"))
    failed_ns = int(trace.of_kind(Kind.OOM)["time"][0])
    header = trace.header
    return (report.stat().st_mtime_ns - (failed_ns - header["start_time_ns"] + header["start_unix_ns"])) / 1e9


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_leaves_one_report_of_what_held_most_and_ends_as_without(name, tmp_path):
    (tmp_path / "hogs.py").write_text(HOGS)
    (tmp_path / ("test_big.py" if name == "pytest" else "big.py")).write_text(PROGRAMS[name])
    plain = _run(tmp_path, name)
    done = _run(tmp_path, name, "-m", "cudatool", "run", "-o", "run.ctrace")
    assert plain.returncode == done.returncode, done.stderr
    assert _without_times(plain.stdout) == _without_times(done.stdout)
    assert _of_program(plain.stderr) == _of_program(done.stderr)
    (report,) = tmp_path.glob("*.oom.txt")
    assert (report.name == "run.oom.txt") == (name not in IN_CHILD)
    text = report.read_text()
    held = re.search(r"^Held when memory ran out\n.*\n(.*)$", text, re.MULTILINE)
    assert held is not None and f"({CULPRITS.get(name, 'hog')})" in held[1], text
    assert REASON in " ".join(text.split()), text
    waited = _waited_s(report)
    print(f"{name}: {waited:.2f} s")
    assert waited <= _MOST_S
