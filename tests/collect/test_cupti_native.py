"""The log of :file:`_cupti.c` over a library that stands in for libcupti: stacks against Python's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool.collect import _cupti

_HERE = Path(__file__).with_name("native")


@pytest.fixture(scope="module")
def libcupti(tmp_path_factory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    made = tmp_path_factory.mktemp("native") / "libcupti.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, _HERE / "libcupti.c"], check=True, timeout=60)
    return made


@pytest.mark.parametrize("seed", range(3))
def test_stacks_are_pythons_own_in_functions_made_and_gone_generators_and_threads(libcupti, seed):
    command = [sys.executable, _HERE / "stacks.py", _cupti.__file__, libcupti, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", range(2))
def test_memory_of_a_backward_pass_has_the_stack_of_the_forward_operator_that_anomaly_mode_knows(libcupti, seed):
    pytest.importorskip("torch")
    command = [sys.executable, "-W", "ignore", _HERE / "torch_nodes.py", libcupti, str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
