"""initcheck and blocks of the caching allocator that are given to a new owner."""

from __future__ import annotations

import json

import pytest
from warm_process import COMMAND_LINE, run_python

_PROGRAM = '''
import numpy as np
import cudatool as ct

N = 1024
SOURCE = """
extern "C" __global__ void fill(float *p) { p[blockIdx.x * blockDim.x + threadIdx.x] = 1; }
extern "C" __global__ void copy(float *q, const float *p) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    q[i] = p[i];
}
"""
fill, copy = ct.compile(SOURCE, "fill"), ct.compile(SOURCE, "copy")
config = ct.LaunchConfig(grid=4, block=256)
one, two = ct.Stream(), ct.Stream()
y = ct.zeros(N, np.float32)
ct.synchronize()
with ct.stream(one):
    batch = ct.empty(N, np.float32)
    BEFORE
    del batch
    batch = ct.empty(N, np.float32)
    AFTER
ct.synchronize()
'''
_FILL, _COPY = "ct.launch(one, config, fill, batch)", "ct.launch(one, config, copy, y, batch)"
_READ_BESIDE = "two.wait_stream(one); ct.launch(two, config, copy, y, batch)"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (_FILL, _COPY, ["uninitialized"]),
        (_FILL, f"{_FILL}; {_COPY}", []),
        (f"{_FILL}; {_READ_BESIDE}", _FILL, ["reuse"]),
        (_READ_BESIDE, _FILL, ["reuse", "uninitialized"]),
        (f"{_FILL}; {_READ_BESIDE}", _READ_BESIDE, ["uninitialized"]),
    ],
    ids=["of new owner", "written by new owner", "of former owner, late", "of former owner, never written", "of both"],
)
def test_reads_of_a_reused_block_count_for_the_owner_that_they_were_made_for(tmp_path, before, after, expected):
    source = _PROGRAM.replace("BEFORE", before).replace("AFTER", after)
    (tmp_path / "program.py").write_text(source)
    words = ["sanitize", "--device", "sim", "--checks", "race,initcheck", "--json", "program.py"]
    report = json.loads(run_python(COMMAND_LINE, *words, folder=tmp_path).stdout)
    assert expected == sorted(one["kind"] for one in report["findings"])
    owner = source.splitlines().index("    batch = ct.empty(N, np.float32)") + 1
    line = owner if before == _READ_BESIDE else owner + 3
    assert {line} >= {one["buffer"]["stack"][0]["line"] for one in report["on_device"]}
