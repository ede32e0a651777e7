"""What a recording on a GPU has of programs with PyTorch, against what PyTorch and NVML say of the same run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from gpu_recordings import CUPY, JAX, record

from cudatool import analyze
from cudatool._driver import gpu_names
from cudatool.trace.events import Kind
from cudatool.trace.frames import user_frame

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

ENCODER = """
import torch
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.randn(8, 64, 64, device="cuda")
def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
for _ in range(3):
    step()
"""
CONVOLUTIONS = """
import torch
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3)
).cuda().to(memory_format=torch.channels_last)
scaler = torch.amp.GradScaler("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
def step():
    data = torch.randn(8, 3, 64, 64).pin_memory().to("cuda", non_blocking=True, memory_format=torch.channels_last)
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = model(data).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
for _ in range(3):
    step()
"""
STREAMS = """
import torch
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
kept = []
def step():
    x = torch.randn(1 << 20, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        y = x * 2
    x.record_stream(side)
    kept.append(y[:10].clone())
for _ in range(20):
    step()
torch.cuda.synchronize()
"""
GRAPH = """
import torch
weights = torch.randn(512, 512, device="cuda")
x = torch.randn(512, 512, device="cuda")
def work():
    return (x @ weights).relu() @ weights
work()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = work()
for _ in range(5):
    graph.replay()
    z = y.clone()
torch.cuda.synchronize()
"""
_STATE = """
import json, time
live = [
    (block["address"], block["requested_size"])
    for segment in torch.cuda.memory._snapshot()["segments"] if tuple(segment["segment_pool_id"]) == (0, 0)
    for block in segment["blocks"]
    # But for two of 8 bytes, which a capture makes for its random numbers.
    if block["state"] == "active_allocated" and block["requested_size"] > 8
]
print("STATE", json.dumps([sorted(live), torch.cuda.memory_reserved(), time.monotonic_ns()]), flush=True)
"""
PROGRAMS = {"encoder": ENCODER, "convolutions": CONVOLUTIONS, "streams": STREAMS, "graph": GRAPH}


def said(done, word: str):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(word + " ")]
    return json.loads(line.removeprefix(word))


@pytest.mark.parametrize("name", PROGRAMS)
def test_live_memory_is_pytorchs_own_snapshot_block_for_block(tmp_path, name):
    trace, done = record(tmp_path, PROGRAMS[name] + _STATE, "torch")
    live, reserved, time = said(done, "STATE")
    told: dict[int, int] = {}  # what lives when the program says what does
    for row in trace.of_kind(Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED):
        if row["time"] > time:
            break
        if row["kind"] == Kind.BLOCK_ALLOC:
            told[int(row["address"])] = int(row["aux0"])
        else:
            told.pop(int(row["address"]), None)
    told = {address: size for address, size in told.items() if size > 8}
    assert told.items() >= {tuple(block) for block in live}
    assert told.keys() == {address for address, _ in live}
    segments = {Kind.SEGMENT_ALLOC: 1, Kind.SEGMENT_FREE: -1}
    rows = trace.of_kind(*segments)
    assert sum(segments[Kind(row["kind"])] * int(row["size"]) for row in rows if row["time"] <= time) == reserved


@pytest.mark.parametrize("name", PROGRAMS)
def test_times_do_not_run_backwards_and_blocks_have_the_programs_line(tmp_path, name):
    trace, _ = record(tmp_path, PROGRAMS[name], "torch")
    late = np.isin(trace.records["kind"], (Kind.KERNEL_LAUNCH, Kind.EXECUTION))  # told when they are known
    assert np.all(np.diff(trace.records["time"][~late].astype(np.int64)) >= 0)
    made = trace.of_kind(Kind.BLOCK_ALLOC)
    owns = [user_frame(trace.stack(int(stack))) for stack in made["stack"]]
    assert Counter(own is not None and own.file.endswith("program.py") for own in owns)[True] >= 0.98 * len(made)
    ran = trace.of_kind(Kind.EXECUTION)
    assert len(ran) > 10 and np.all(ran["aux1"] >= ran["aux0"])


@pytest.mark.parametrize(
    ("program", "needs"),
    [*((program, "torch") for program in PROGRAMS.values()), (CUPY, "cupy"), (JAX, "jax")],
    ids=[*PROGRAMS, "cupy", "jax"],
)
def test_ledger_names_what_nvml_charges(tmp_path, program, needs):
    trace, _ = record(tmp_path, program, needs)
    (ledger,) = analyze.report(trace).ledgers
    print([(*line.words, line.size) for line in ledger.lines], ledger.unknown)
    assert ledger.process is not None
    assert ledger.named >= 0.98
    owners = {line.owner for line in ledger.lines}
    assert {"torch": "PyTorch", "cupy": "CuPy", "jax": "JAX"}[needs] in owners
    assert any("context" in line.owner for line in ledger.lines)


PROFILED = (
    ENCODER.replace("for _ in range(3):", "for _ in range(2):")
    + """
torch.cuda.synchronize()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
    step()
    torch.cuda.synchronize()
ran = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
kernels = [e for e in ran if not e.name.startswith(("Memcpy", "Memset"))]
import json
print("PROFILE", json.dumps([len(kernels), sum(e.device_time for e in kernels)]))
"""
)


def test_kernels_are_those_of_torchs_profiler(tmp_path):
    (tmp_path / "profiled.py").write_text(PROFILED)
    done = subprocess.run([sys.executable, "profiled.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    count, time = said(done, "PROFILE")
    assert count > 50
    trace, _ = record(tmp_path, ENCODER, "torch")
    launches, ran = trace.of_kind(Kind.KERNEL_LAUNCH), trace.of_kind(Kind.EXECUTION)
    ran = ran[np.isin(ran["correlation"], launches["correlation"])]
    ran = ran[np.argsort(ran["aux0"])]
    last, before = ran[-count:], ran[-2 * count : -count]
    assert last["name"].tolist() == before["name"].tolist()  # so many are one step
    # Other tests use the GPU at the same time, so that times are alike only.
    assert float((last["aux1"] - last["aux0"]).sum()) / 1e3 == pytest.approx(time, rel=0.5)


def test_steps_that_load_nothing_do_not_ask_what_memory_is_used(tmp_path):
    steps = "\nfor _ in range(200):\n    step()\ntorch.cuda.synchronize()\n"
    trace, _ = record(tmp_path, ENCODER + steps, "torch")
    made = trace.of_kind(Kind.BLOCK_ALLOC)["time"]
    begin, end = int(made[len(made) // 2]), int(made[-1])
    asked = trace.of_kind(Kind.DEVICE_USE)["time"]
    most = 3 + 11 * (end - begin) / 1e9  # ten times a second, by a thread of its own
    assert np.count_nonzero((asked > begin) & (asked < end)) <= most
