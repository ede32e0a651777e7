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
DEVICES = ("cuda", "sim")


@pytest.fixture(autouse=True)
def gpu():
    from cudatool import _driver

    if _driver.initialize().kind != "cuda":
        pytest.skip("this process uses the software device")


def start(device: str, seeds: str, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--seeds", seeds, "--out", str(out), *options]
    environment = {**os.environ, "CUDATOOL_DEVICE": device}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def compared(files: list[Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), "--compare", *files], capture_output=True, text=True)


def test_random_kernels_agree_with_the_software_device(tmp_path):
    pytest.importorskip("llvmlite")
    first = random.SystemRandom().randrange(0, 10**9)
    print(f"seeds {first} to {first + PROCESSES * SEEDS - 1}")
    parts = [f"{first + part * SEEDS}:{first + (part + 1) * SEEDS}" for part in range(PROCESSES)]
    running = [
        (start(device, seeds, tmp_path / f"{device}-{seeds}.npz"), device, seeds)
        for seeds in parts
        for device in DEVICES
    ]
    for process, device, seeds in running:
        said = process.communicate()[1]
        # NVIDIA's compiler makes an illegal instruction of some kernels that break no rule, unless told not to optimize.
        if device == "cuda" and "CUDA_ERROR_ILLEGAL_INSTRUCTION" in said:
            process = start(device, seeds, tmp_path / f"{device}-{seeds}.npz", "--optimize", "0")
            said = process.communicate()[1]
        assert process.returncode == 0, said
    for seeds in parts:
        found = compared([tmp_path / f"{device}-{seeds}.npz" for device in DEVICES])
        assert found.returncode == 0, found.stdout + found.stderr


def test_a_kernel_that_nvidias_compiler_breaks_is_right_on_both_devices_without_optimization(tmp_path):
    """Seed 292781486 ends with an illegal instruction at level 1 and above (driver 580.159, H200); at 0 it computes."""
    pytest.importorskip("llvmlite")
    files = [tmp_path / f"{device}.npz" for device in DEVICES]
    for device, file in zip(DEVICES, files, strict=True):
        options = ["--optimize", "0"] if device == "cuda" else []
        process = start(device, "292781486:292781487", file, *options)
        said = process.communicate()[1]
        assert process.returncode == 0, said
    found = compared(files)
    assert found.returncode == 0, found.stdout + found.stderr
