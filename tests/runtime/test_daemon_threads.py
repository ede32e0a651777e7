"""Daemon threads that use the device when the program ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import threading, time, numpy as np, cudatool as ct
a = ct.asarray(np.arange(100, dtype=np.float32))
kept = []
def work():
    while True:
        b = a + 1
        kept[:] = [b.get(), b]
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
print("end")
"""


@pytest.mark.parametrize("attempt", range(3))
def test_daemon_threads_that_use_the_device_let_the_process_end(attempt: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"CUDATOOL_DEVICE": "sim"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert "terminate" not in done.stderr
