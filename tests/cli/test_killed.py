"""A workload that is killed leaves a trace of everything that it had done."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from cudatool.trace.events import Kind
from cudatool.trace.reader import read

_WORKLOAD = """
from cuda.core import Device
device = Device(); device.set_current()
stream = device.create_stream()
buffer = device.memory_resource.allocate(4096, stream=stream)
for i in range(10**9):
    buffer.fill(b"x", stream=stream)
    print(i + 1, flush=True)
"""


@pytest.mark.some_of("seed", range(10), 3)
def test_kill_loses_nothing_that_was_done(tmp_path, seed):
    (tmp_path / "endless.py").write_text(_WORKLOAD)
    command = [sys.executable, "-m", "cudatool", "run", "-o", "killed.ctrace", "endless.py"]
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        first = process.stdout.readline()
        time.sleep(random.Random(seed).random() * 0.3)
        process.kill()
        lines = [first, *process.stdout.readlines()]
    done = int([line for line in lines if line.endswith(b"\n")][-1])
    trace = read(tmp_path / "killed.ctrace")
    assert len(trace.of_kind(Kind.MEMSET)) >= done > 0
    assert trace.notes  # it says that the program did not end


def test_kill_leaves_the_names_of_the_libraries(run_command, tmp_path):
    for library in ("cupy", "jax", "tensorflow"):
        (tmp_path / f"{library}.py").touch()
    program = "import os, jax\nimport cudatool as ct\nkept = ct.empty(1000)\nimport cupy\nos.kill(os.getpid(), 9)\n"
    (tmp_path / "program.py").write_text(program)
    run_command("run", "--device", "sim", "-o", "run.ctrace", "program.py", cwd=tmp_path)
    assert ["CuPy", "JAX"] == read(tmp_path / "run.ctrace").header["libraries"]


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGUSR1); time.sleep(60)", -signal.SIGUSR1),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
        ("os.abort()", -signal.SIGABRT),
    ],
)
def test_a_program_that_ends_at_once_says_where_its_trace_is(run_warm, tmp_path, ending, status):
    program = "import os, signal, time\nimport cudatool as ct\nkept = ct.empty(1000)\nct.synchronize()\n"
    program += f"assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n{ending}\n"
    (tmp_path / "program.py").write_text(program)
    done = run_warm("run", "-o", "my trace.ctrace", "program.py")
    assert status == done.returncode
    assert "cudatool: the program ended at once; its trace is my trace.ctrace" in done.stderr
    assert "(cudatool snapshot 'my trace.ctrace')" in done.stderr
    assert 1 == len(read(tmp_path / "my trace.ctrace").of_kind(Kind.BLOCK_ALLOC))


@pytest.mark.parametrize(
    "program",
    [
        "import os\nif os.fork() == 0: os._exit(0)\nos.wait()\n",
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\nos.kill(os.getpid(), signal.SIGTERM)\n",
        "import os, signal, subprocess, sys\n"
        "child = 'import os, signal; os.kill(os.getpid(), signal.SIGTERM)'\n"
        "assert subprocess.run([sys.executable, '-c', child]).returncode == -signal.SIGTERM\n",
    ],
    ids=["a forked child", "a handler of its own", "a child program"],
)
def test_what_goes_on_has_no_last_words(run_warm, tmp_path, program):
    (tmp_path / "program.py").write_text(program)
    done = run_warm("run", "-o", "t.ctrace", "program.py")
    assert (0, False) == (done.returncode, "ended at once" in done.stderr)
    assert "Wrote t.ctrace" in done.stderr
