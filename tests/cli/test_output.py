"""Where results go: stdout that is full, closed, narrow or plain ASCII, and a user who loses patience."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from warm_process import COMMAND_LINE, run_python

COMMAND = [sys.executable, "-c", COMMAND_LINE]
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


RACE = """
import cudatool as ct
x, side = ct.zeros(64), ct.Stream()
side.wait_stream(ct.current_stream())
with ct.stream(side):
    x.fill_(1)
y = x + 1
"""


_FULL = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
_MUTE = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
_GONE = "import os; ours, theirs = os.pipe(); os.close(ours); os.dup2(theirs, 1)\n"


def run(folder, *words, before="", **variables):
    """Run ``cudatool WORDS`` in `folder`, after a line of Python that changes where its output goes."""
    return run_python(before + COMMAND_LINE, *words, folder=folder, environment={**ENVIRONMENT, **variables})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("output")
    (made / "leak.py").write_text(LEAK, encoding="utf-8")
    done = run(made, "run", "-o", "t.ctrace", "leak.py")
    assert done.returncode == 0, done.stderr
    return made


READERS = (["leaks", "t.ctrace"], ["leaks", "--json", "t.ctrace"], ["diff", "t.ctrace", "t.ctrace"], ["snapshot"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("words", READERS)
def test_full_disk_under_stdout_is_one_line_and_status_2(folder, words):
    done = run(folder, *words, before=_FULL)
    assert done.returncode == 2
    assert done.stderr == "cudatool: error: cannot write the output: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["leaks", "{folder}/t.ctrace"], 1),
        (["leaks", "nowhere.ctrace"], 2),
        (["run", "works.py"], 0),
        (["run", "speaks.py"], 1),
        (["sanitize", "works.py"], 0),
        (["sanitize", "speaks.py"], 3),
        (["sanitize", "--explore", "1", "works.py"], 0),
    ],
)
def test_messages_that_stderr_has_no_room_for_change_no_status(folder, tmp_path, words, status):
    (tmp_path / "works.py").write_text("import cudatool as ct; ct.ones(8); ct.synchronize()")
    (tmp_path / "speaks.py").write_text("import sys; print(1, file=sys.stderr)")
    done = run(tmp_path, *(word.format(folder=folder) for word in words), before=_MUTE)
    assert (done.returncode, done.stderr) == (status, "")
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("words", READERS)
def test_reader_that_goes_away_is_no_finding(folder, words):
    done = run(folder, *words, before=_GONE)
    assert (done.returncode, done.stderr) == (2, "")


def test_files_are_written_although_the_reader_has_gone(folder):
    run(folder, "snapshot", "t.ctrace", "--html", "gone.html", before=_GONE)
    run(folder, "sanitize", "--html", "found.html", "--format", "sarif=found.sarif", "t.ctrace", before=_GONE)
    for name in ("gone.html", "found.html", "found.sarif"):
        assert (folder / name).stat().st_size > 1000


@pytest.mark.parametrize("columns", ["20", "40"])
def test_narrow_terminal_loses_no_text(folder, columns):
    done = run(folder, "leaks", "t.ctrace", COLUMNS=columns)
    assert "leak.py:5 (grünt)  +3 MiB   6 of 6  +18 MiB" in done.stdout


@pytest.mark.parametrize(("columns", "longest"), [("60", 60), ("80", 80), ("300", 120)])
def test_lines_of_the_report_are_as_long_as_columns_says(folder, columns, longest):
    (folder / "race.py").write_text(RACE)
    done = run(folder, "sanitize", "race.py", COLUMNS=columns)
    assert done.returncode == 1
    assert longest - 20 < max(map(len, done.stdout.splitlines())) <= longest


@pytest.mark.parametrize(
    ("variables", "on_terminal", "expected"),
    [
        ({}, True, True),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
        ({"FORCE_COLOR": "1"}, False, True),
    ],
)
def test_the_report_has_colours_where_a_terminal_shows_them_and_no_one_forbids_it(
    folder, variables, on_terminal, expected
):
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "NO_COLOR"}
    ours, theirs = os.openpty() if on_terminal else os.pipe()
    command = [*COMMAND, "sanitize", "t.ctrace"]
    with subprocess.Popen(
        command, cwd=folder, env=environment | {"TERM": "xterm"} | variables, stdout=theirs, stderr=subprocess.DEVNULL
    ):
        os.close(theirs)
        text = b""
        with suppress(OSError):  # a terminal that no one writes to any more
            while piece := os.read(ours, 1 << 16):
                text += piece
    os.close(ours)
    assert text
    assert expected == (b"\x1b[" in text)


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
