"""Random kernels, on the GPU and on the software device."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "sim" / "jit" / "random_kernels.py"
PROCESSES, SEEDS = 8, 30  # seeds for each process


@pytest.fixture(autouse=True)
def gpu():
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")


def test_random_kernels_agree_with_the_software_device(tmp_path):
    pytest.importorskip("llvmlite")
    first = random.SystemRandom().randrange(0, 10**9)
    print(f"seeds {first} to {first + PROCESSES * SEEDS - 1}")

    def start(device: str, part: int) -> subprocess.Popen[bytes]:
        seeds = f"{first + part * SEEDS}:{first + (part + 1) * SEEDS}"
        command = [sys.executable, str(SCRIPT), "--seeds", seeds, "--out", str(tmp_path / f"{device}{part}.npz")]
        return subprocess.Popen(command, env={**os.environ, "CUDATOOL_DEVICE": device})

    running = [start(device, part) for part in range(PROCESSES) for device in ("cuda", "sim")]
    assert [0] * len(running) == [process.wait() for process in running]
    for part in range(PROCESSES):
        files = [str(tmp_path / f"{device}{part}.npz") for device in ("cuda", "sim")]
        found = subprocess.run([sys.executable, str(SCRIPT), "--compare", *files], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr
