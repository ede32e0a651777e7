"""A recording that begins in the middle of a program on a GPU: what PyTorch and CuPy held before is in it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cudatool import analyze
from cudatool._driver import gpu_names
from cudatool.trace import reader
from cudatool.trace.events import LIVED, Kind
from cudatool.trace.frames import user_frames
from cudatool.trace.model import Ending, Trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

MIB = 1 << 20

_TORCH = """
import json, sys, threading, torch
import cudatool
HISTORY = {history}
if HISTORY:
    torch.cuda.memory._record_memory_history(stacks="python")

def load():
    return [torch.empty(n << 20, dtype=torch.uint8, device="cuda") for n in (1, 3, 12, 40)]

held = load()
small = [torch.ones(100, device="cuda") for _ in range(50)]
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    of_side = torch.ones(5 << 20, device="cuda")
del small[::2]

def counted(name):
    return torch.cuda.memory_stats()[name + "_bytes.all.current"]

before = {{name: counted(name) for name in ("allocated", "reserved")}}
stop = threading.Event()

def churn():
    while not stop.is_set():
        x = torch.empty(3000, device="cuda"); del x

threads = [threading.Thread(target=churn) for _ in range({threads})]
for thread in threads: thread.start()
with cudatool.record("t.ctrace"):
    more = torch.empty(7 << 20, dtype=torch.uint8, device="cuda")
    del held[1]
    stop.set()
    for thread in threads: thread.join()
    torch.cuda.synchronize()
    now = {{name: counted(name) for name in ("allocated", "reserved")}}
    print(json.dumps([before, now]), flush=True)
"""


def _run(folder: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=os.environ | {"CUDATOOL_DEVICE": "cuda"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def _recorded(folder: Path, program: str, **environment: str) -> tuple[Trace, Any]:
    done = _run(folder, program, **environment)
    assert done.returncode == 0, done.stderr
    return reader.read(folder / "t.ctrace"), json.loads(done.stdout.splitlines()[-1])


def _needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"], ids=["segments", "expandable"])
@pytest.mark.parametrize("threads", [0, 3], ids=["alone", "beside threads"])
def test_what_pytorch_held_before_is_in_the_trace_and_what_was_freed_since_is_not(tmp_path, threads, conf):
    _needs("torch")
    program = _TORCH.format(history=False, threads=threads)
    trace, (before, now) = _recorded(tmp_path, program, PYTORCH_CUDA_ALLOC_CONF=conf)
    assert "unknown_before" not in trace.header, trace.header["unknown_before"]
    (device,) = analyze.report(trace).summary.devices
    # A block whose remainder was too small to split counts whole in PyTorch, and as requested in events.
    assert abs(now["allocated"] - device.now.allocated) <= MIB
    assert now["reserved"] == device.now.reserved
    prior = trace.header["prior_bytes"]
    assert before["allocated"] <= prior <= before["allocated"] + threads * 16384
    opened = trace.records[trace.records["kind"] == Kind.BLOCK_ALLOC]
    assert 40 * MIB in opened["aux0"].tolist()
    freed = trace.records[trace.records["kind"] == Kind.BLOCK_FREE_REQUESTED]
    assert 3 * MIB in freed["aux0"].tolist()


def test_blocks_from_before_have_the_stacks_that_pytorch_kept(tmp_path):
    _needs("torch")
    trace, _ = _recorded(tmp_path, _TORCH.format(history=True, threads=0))
    (row,) = trace.records[(trace.records["kind"] == Kind.BLOCK_ALLOC) & (trace.records["aux0"] == 40 * MIB)]
    functions = [frame.function for frame in user_frames(trace.stack(int(row["stack"])))]
    assert "load" in functions, functions


def test_blocks_from_before_without_stacks_say_why(tmp_path):
    _needs("torch")
    _recorded(tmp_path, _TORCH.format(history=False, threads=0))
    done = subprocess.run(
        [sys.executable, "-m", "cudatool", "snapshot", "t.ctrace"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "allocated before the recording" in done.stdout


_LOOP = """
import json, os, resource, sys, threading, time, torch
from cudatool.recording import attached
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()
optimizer = torch.optim.Adam(model.parameters())
steps, stop, losses = 0, threading.Event(), []

def train():
    global steps
    while not stop.is_set():
        optimizer.zero_grad()
        loss = model(torch.ones(64, 512, device="cuda")).square().mean()
        loss.backward(); optimizer.step()
        losses.append(float(loss)); steps += 1

def grown():
    maps = sum(1 for _ in open("/proc/self/maps"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), maps, rss()

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

loop = threading.Thread(target=train); loop.start()
while steps < 20: time.sleep(0.01)
took, figures, counts = [], [], []
for cycle in range(50):
    begin = time.monotonic()
    said = attached.answer({"what": "begin", "path": os.path.abspath(f"{cycle}.ctrace"), "options": {"level": "memory"}})
    assert said["code"] == "begun", said
    took.append(time.monotonic() - begin)
    seen = steps
    while steps < seen + 3: time.sleep(0.005)
    said = attached.answer({"what": "end"})
    assert said["code"] == "ended", said
    figures.append(grown()); counts.append(torch.cuda.memory_reserved())
seen = steps
while steps < seen + 20: time.sleep(0.01)
stop.set(); loop.join()
print(json.dumps([took, figures, counts, losses[-1] == losses[-1]]))
"""


def test_fifty_cycles_of_attach_and_detach_leave_a_training_loop_as_it_was(tmp_path):
    _needs("torch")
    done = _run(tmp_path, _LOOP)
    assert done.returncode == 0, done.stderr
    took, figures, reserved, is_number = json.loads(done.stdout.splitlines()[-1])
    print(f"begin: first {took[0]:.2f} s, later at most {max(took[1:]):.2f} s; figures {figures[0]} to {figures[-1]}")
    assert is_number
    traces = [reader.read(tmp_path / f"{cycle}.ctrace") for cycle in range(50)]
    assert {Ending.CLOSED} == {trace.ending for trace in traces}
    assert all("unknown_before" not in trace.header for trace in traces)
    # The model's parameters are there in each, from before.
    assert all(trace.header["prior_bytes"] >= 2 * 512 * 512 * 4 for trace in traces)
    files, threads, maps, size = zip(*figures, strict=True)
    assert files[5] == files[-1]
    assert threads[5] == threads[-1]
    assert maps[-1] <= maps[5] + 20
    assert size[-1] <= size[10] + 40 * (1 << 20)  # less than 1 MiB for each cycle
    assert reserved[5] == reserved[-1]


_CUPY = """
import json, cupy as cp
import cudatool
pool = cp.get_default_memory_pool()
a, b = cp.ones(3 << 20, cp.uint8), cp.ones(10 << 20, cp.uint8)
view = a[100:]
gone = cp.ones(6 << 20, cp.uint8); del gone
before = [pool.used_bytes(), pool.total_bytes()]
with cudatool.record("t.ctrace"):
    del b
    pool.free_all_blocks()
    c = cp.ones(20 << 20, cp.uint8)
    cp.cuda.Device().synchronize()
    print(json.dumps([before, [pool.used_bytes(), pool.total_bytes()]]), flush=True)
"""


def test_memory_that_cupys_arrays_lie_in_is_in_the_trace_and_the_rest_is_said(tmp_path):
    _needs("cupy")
    trace, (before, _) = _recorded(tmp_path, _CUPY)
    rows = trace.records
    lived = rows[(rows["kind"] == Kind.MEM_ALLOC) & (rows["flags"] & LIVED != 0)]
    assert before[0] <= lived["size"].sum() <= before[1]
    pooled = rows[(rows["kind"] == Kind.POOL_ALLOC) & (rows["flags"] & LIVED != 0)]
    assert before[0] == pooled["size"].sum()  # `a`, once although it has a view, and `b`
    rest = before[1] - int(lived["size"].sum())
    assert ("unknown_before" in trace.header) == (rest > 0)
    if rest:
        assert "CuPy's pool held on device 0" in trace.header["unknown_before"][0]
    freed = rows[rows["kind"] == Kind.MEM_FREE]
    assert set(freed["address"].tolist()) & set(lived["address"].tolist())  # what `b` lay in
