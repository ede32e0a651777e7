"""The job of docs/ci.md, step by step, on a project with a test suite of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

JOB = (Path(__file__).parents[1] / "docs" / "ci.md").read_text()
STEPS = re.findall(r"^ +run: (.*)$", JOB, re.MULTILINE)

SUITE = '''
import numpy as np
import pytest
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = """
extern "C" __global__ void scale(float *x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i CONDITION n) x[i] *= a;
}"""

@pytest.mark.parametrize("n", [1, 100, 1000])
def test_scale(n):
    device = Device()
    device.set_current()
    stream = device.create_stream()
    options = ProgramOptions(arch=f"sm_{device.arch}", lineinfo=True)
    kernel = Program(SOURCE, "c++", options).compile("cubin").get_kernel("scale")
    host = np.arange(n, dtype=np.float32)
    buffer = device.memory_resource.allocate(host.nbytes, stream=stream)
    driver.cuMemcpyHtoDAsync(buffer.handle, host.ctypes.data, host.nbytes, stream.handle)
    launch(stream, LaunchConfig(grid=(n + 255) // 256, block=256), kernel, buffer, np.float32(2), np.int32(n))
    stream.sync()
    back = np.empty_like(host)
    driver.cuMemcpyDtoH(back.ctypes.data, buffer.handle, back.nbytes)
    buffer.close(stream)
    stream.sync()
    assert np.array_equal(back, 2 * host)
'''


@pytest.fixture
def project(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def run(step: str, project: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CUDATOOL", "PYTEST"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    step = step.replace("cudatool ", f"{sys.executable} -m cudatool ", 1)
    return subprocess.run(step, shell=True, cwd=project, env=environment, capture_output=True, text=True, check=False)


def test_the_steps_pass_for_tests_without_mistakes(project):
    (project / "tests" / "test_scale.py").write_text(SUITE.replace("CONDITION", "<"))
    install, *checks = STEPS
    assert install.startswith("python -m pip install")
    assert 2 == len(checks)
    for step in checks:
        done = run(step, project)
        assert 0 == done.returncode, done.stdout + done.stderr
        assert "3 passed" in done.stderr
    assert [] == json.loads((project / "findings.json").read_text())["on_device"]


def test_the_steps_fail_for_a_kernel_that_writes_one_element_too_many(project):
    (project / "tests" / "test_scale.py").write_text(SUITE.replace("CONDITION", "<="))
    done = run(STEPS[1], project)
    assert 1 == done.returncode
    assert "3 passed" in done.stderr  # the tests themselves see nothing
    assert "0 bytes after the end of 4 B" in done.stdout
    assert "test_scale.py" in done.stdout
