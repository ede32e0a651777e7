"""Random programs whose host touches what the device uses: the sanitizer finds the races that there are, and no others.

``python tests/races/host_programs.py --programs 5000`` runs more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("more", [[], ["--tape"]], ids=["recorded", "recorded for a replay"])
def test_accesses_of_the_host_race_where_nothing_orders_them_and_nowhere_else(more: list[str]) -> None:
    command = [sys.executable, Path(__file__).with_name("host_programs.py"), "--programs", "60", *more]
    ran = subprocess.run(command, env={**os.environ, "CUDATOOL_DEVICE": "sim"}, text=True, capture_output=True)
    assert (0, "0 differ") == (ran.returncode, ran.stdout.split(";")[0]), ran.stdout + ran.stderr
