"""`cudatool.record` from within a program."""

from __future__ import annotations

import subprocess
import sys

from cudatool.trace.events import Kind
from cudatool.trace.reader import read

_PROGRAM = """
import os; os.environ["CUDATOOL_DEVICE"] = "sim"
import numpy as np
import cudatool as ct
ct.zeros(4).fill_(1)              # before: not recorded
with ct.record("t.ctrace", device="sim", measure_accesses=True):
    x = ct.zeros(16, np.float32)
    kernel = ct.compile('extern "C" __global__ void one(float *x) { x[threadIdx.x] = 1; }', "one")
    with ct.range("mine"):
        kernel[1, 16](x)
x.fill_(2)                        # after: not recorded
"""


def test_what_happens_inside_is_recorded_and_nothing_else(tmp_path):
    done = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "t.ctrace")
    (launch,) = trace.of_kind(Kind.KERNEL_LAUNCH)
    assert len(trace.of_kind(Kind.MEMSET)) == 1
    (access,) = [a for a in trace.of_kind(Kind.ACCESS) if a["correlation"] == launch["correlation"]]
    assert int(access["size"]) == 64
    (named,) = trace.of_kind(Kind.RANGE_PUSH)
    assert trace.names[int(named["name"])] == "mine"
