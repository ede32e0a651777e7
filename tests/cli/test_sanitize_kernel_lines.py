"""Findings in kernels that a program compiled from a string name its lines, whatever it asked NVRTC for."""

from __future__ import annotations

import pytest

_PROGRAM = '''
import sys
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

SOURCE = """
extern "C" __global__ void NAME(int *a) {
    __shared__ int part[64];
    part[threadIdx.x] = a[threadIdx.x];
    a[threadIdx.x] = part[63 - threadIdx.x];  // of NAME
}"""
device = Device()
device.set_current()
stream = device.create_stream()
_, a = driver.cuMemAlloc(256)
driver.cuMemsetD32(a, 0, 64)
device.sync()
for name in ("one", "other"):
    program = Program(SOURCE.replace("NAME", name) + chr(10) * len(name), "c++", ProgramOptions(arch=f"sm_{device.arch}"))
    launch(stream, LaunchConfig(grid=1, block=64), program.compile(sys.argv[1]).get_kernel(name), int(a))
    stream.sync()
driver.cuMemFree(a)
'''


@pytest.mark.parametrize("target", ["cubin", "ptx"])
def test_programs_of_one_name_are_each_quoted(run_warm, tmp_path, target):
    (tmp_path / "prog.py").write_text(_PROGRAM)
    done = run_warm("sanitize", "--checks", "racecheck", "prog.py", target)
    assert 1 == done.returncode, done.stderr
    for text in ("at default_program:5", "// of one", "// of other", "part[threadIdx.x] = a[threadIdx.x];"):
        assert text in done.stdout, done.stdout
    assert "PTX line" not in done.stdout
