"""A few programs of the suites of kernels that others wrote; the scripts beside this file run all of them.

``CUDATOOL_KERNEL_SUITES`` names a folder with checkouts ``gpuverify`` (mc-imperial/gpuverify), ``ScoR`` (csl-iisc/ScoR),
``faial`` (elliotsayes/faial) and ``gpu-rodinia`` (yuhc/gpu-rodinia): they are not part of this project.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("CUDATOOL_KERNEL_SUITES", "")


@pytest.mark.parametrize(
    ("script", "suite", "options"),
    [
        ("gpuverify_suite.py", "gpuverify", ["--every", "45"]),
        ("scor_suite.py", "ScoR", ["--only", "interwarp-block_fence", "--schedules", "4"]),
        ("faial_suite.py", "faial", ["--only", "alias"]),
        ("rodinia_suite.py", "gpu-rodinia", ["--only", "nw"]),
    ],
)
def test_a_part_of_a_suite_gives_what_it_should(script: str, suite: str, options: list[str]) -> None:
    if not (Path(FOLDER) / suite).is_dir() or not FOLDER:
        pytest.skip(f"CUDATOOL_KERNEL_SUITES names no folder with a checkout of {suite}")
    command = [sys.executable, str(Path(__file__).with_name(script)), str(Path(FOLDER) / suite), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
