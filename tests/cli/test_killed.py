"""A workload that is killed leaves a trace of everything that it had done."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

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


def test_kill_loses_nothing_that_was_done(tmp_path):
    (tmp_path / "endless.py").write_text(_WORKLOAD)
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    chooser = random.Random(20)
    for attempt in range(10):
        command = [sys.executable, "-m", "cudatool", "run", "-o", f"{attempt}.ctrace", "endless.py"]
        with subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            first = process.stdout.readline()
            time.sleep(chooser.random() * 0.3)
            process.kill()
            lines = [first, *process.stdout.readlines()]
        done = int([line for line in lines if line.endswith(b"\n")][-1])
        trace = read(tmp_path / f"{attempt}.ctrace")
        assert len(trace.of_kind(Kind.MEMSET)) >= done > 0
        assert trace.notes  # it says that the program did not end
