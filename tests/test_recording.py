"""`cudatool.record` from within a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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


_MISTAKEN = """
import threading
import cudatool as ct
from cudatool.errors import UsageError
from cudatool.recording import is_observing
from cudatool.trace import hooks
before = threading.Thread.start
try:
    with ct.record("t.ctrace", device="sim", measure_accesses=True, checks=["memchek"]):
        pass
except UsageError as error:
    print(error)
print(hooks.active, hooks.wants_accesses, hooks.measures_accesses, is_observing(), threading.Thread.start is before)
"""


def test_recording_that_cannot_begin_leaves_nothing_changed(tmp_path):
    done = subprocess.run([sys.executable, "-c", _MISTAKEN], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said, state = done.stdout.splitlines()
    assert said == "there is no check 'memchek' of kernels; there are memcheck, initcheck, racecheck, synccheck"
    assert "False False False False True" == state


MIDDLE = """
import json, numpy as np, cudatool as ct
from cudatool.analyze import report
from cudatool.trace import read

kept = [ct.zeros(1 << 20, np.float32) for _ in range(2)]
small = ct.zeros(100, np.float32)
side = ct.Stream()
with ct.stream(side):
    other = ct.zeros(1000, np.float32)
ct.synchronize()
with ct.record("middle.ctrace"):
    new = ct.zeros(1 << 10, np.float32)
    del kept[0]
    ct.synchronize()
    told = [ct.memory_allocated(), ct.memory_reserved()]
trace = read("middle.ctrace")
(device,) = report(trace).summary.devices
print(json.dumps([told, [device.now.allocated, device.peak_reserved], trace.notes]))
"""


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_recording_begun_in_the_middle_of_a_program_starts_with_what_lives(tmp_path, conf):
    done = subprocess.run(
        [sys.executable, "-c", MIDDLE],
        cwd=tmp_path,
        env=os.environ | {"CUDATOOL_DEVICE": "sim", "CUDATOOL_ALLOC_CONF": conf},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    told, recorded, notes = json.loads(done.stdout)
    assert (recorded, notes) == (told, [])


def test_what_lived_before_the_recording_began_is_no_leak(tmp_path):
    program = """
import numpy as np, cudatool as ct
from cudatool.sanitize import check
from cudatool.trace import read

before = [ct.empty(1000, np.float32) for _ in range(3)]
with ct.record("middle.ctrace"):
    del before[0]
    new = ct.empty(5000, np.float32)
print([(one.count, one.buffer.size) for one in check(read("middle.ctrace"), ("leak",)).on_device])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"CUDATOOL_DEVICE": "sim"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "[(1, 20480)]\n"), done.stderr
