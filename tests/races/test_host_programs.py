"""Random programs whose host touches what the device uses: the sanitizer finds the races that there are, and no others.

``python tests/races/host_programs.py --programs 5000`` runs more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from warm_process import SCRIPT, run_python


@pytest.mark.some_of("seed", range(0, 60, 20), 1)
@pytest.mark.parametrize("more", [[], ["--tape"]], ids=["recorded", "recorded for a replay"])
def test_accesses_of_the_host_race_where_nothing_orders_them_and_nowhere_else(more: list[str], seed: int) -> None:
    drawn = ["--programs", "20", "--seed", str(seed)]
    words = [str(Path(__file__).with_name("host_programs.py")), *drawn, *more]
    ran = run_python(SCRIPT, *words, environment={"CUDATOOL_DEVICE": "sim"})
    assert (0, "0 differ") == (ran.returncode, ran.stdout.split(";")[0]), ran.stdout + ran.stderr
