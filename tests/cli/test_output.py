"""Where results go: stdout that is full, closed, narrow or plain ASCII, and a user who loses patience."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time

import pytest

COMMAND = [sys.executable, "-c", "from cudatool.cli import main; main()"]
ENVIRONMENT = {**os.environ, "CUDATOOL_DEVICE": "sim", "COLUMNS": "80", "NO_COLOR": "1"}
LEAK = """
import cudatool as ct
kept = []
def grünt():
    kept.append(ct.empty(3 << 20, "u1"))
for _ in range(8):
    with ct.range("step"):
        grünt()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("output")
    (made / "leak.py").write_text(LEAK, encoding="utf-8")
    done = subprocess.run([*COMMAND, "run", "-o", "t.ctrace", "leak.py"], cwd=made, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0
    return made


READERS = (["leaks", "t.ctrace"], ["leaks", "--json", "t.ctrace"], ["diff", "t.ctrace", "t.ctrace"], ["snapshot"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("words", READERS)
def test_full_disk_under_stdout_is_one_line_and_status_2(folder, words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *words], cwd=folder, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240
        )
    assert done.returncode == 2
    assert done.stderr == "cudatool: error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("words", READERS)
def test_reader_that_goes_away_is_no_finding(folder, words):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *words], cwd=folder, env=ENVIRONMENT, stdout=write, stderr=subprocess.PIPE, text=True, timeout=240
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (2, "")


def test_files_are_written_although_the_reader_has_gone(folder):
    read, write = os.pipe()
    os.close(read)
    snapshot = [*COMMAND, "snapshot", "t.ctrace", "--html", "gone.html"]
    sanitize = [*COMMAND, "sanitize", "--html", "found.html", "--format", "sarif=found.sarif", "t.ctrace"]
    for command in (snapshot, sanitize):
        subprocess.run(command, cwd=folder, env=ENVIRONMENT, stdout=write, stderr=subprocess.DEVNULL, timeout=240)
    os.close(write)
    for name in ("gone.html", "found.html", "found.sarif"):
        assert (folder / name).stat().st_size > 1000


@pytest.mark.parametrize("columns", ["20", "40"])
def test_narrow_terminal_loses_no_text(folder, columns):
    environment = {**ENVIRONMENT, "COLUMNS": columns}
    done = subprocess.run(
        [*COMMAND, "leaks", "t.ctrace"], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert "leak.py:5 (grünt)  +3 MiB  6 of 6  +18 MiB" in done.stdout


def test_names_that_the_terminal_cannot_show_are_spelled_out(folder):
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    for words in READERS:
        done = subprocess.run([*COMMAND, *words], cwd=folder, env=environment, capture_output=True, timeout=240)
        assert b"Traceback" not in done.stderr
    assert b"gr\\xfcnt" in done.stdout


def test_interrupt_is_status_130_and_no_finding(folder):
    command = [*COMMAND, "snapshot", "--json", "t.ctrace"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, **pipes) as process:
        try:
            fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # the command has more to say, and waits
            select.select([process.stdout], [], [], 60)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, error.strip()) == (130, b"cudatool: interrupted")
