"""The processes of a program on a GPU: each that uses it has a trace, with its kernels and memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudatool._driver import gpu_names
from cudatool.trace.events import Kind
from cudatool.trace.family import children_of
from cudatool.trace.model import Trace
from cudatool.trace.reader import read

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers"),
    pytest.mark.usefixtures("start_up_line"),
]

TORCH = "import torch; x = torch.ones(1000, device='cuda'); assert (x * 2).sum().item() == 2000"
CUPY = "import cupy; assert float((cupy.ones(1000) * 2).sum()) == 2000"
JAX = "import jax.numpy as jnp; assert float((jnp.ones(1000) * 2).sum()) == 2000"
RANKS = """
import os, torch, torch.distributed as dist
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.full((1000,), float(rank + 1), device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
assert x[0].item() == 3
dist.destroy_process_group()
"""
LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.zeros(1, device="cuda")  # the workers are forked off a process that uses the GPU, and cannot
    data = TensorDataset(torch.arange(64, dtype=torch.float32))
    total = 0.0
    for (batch,) in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork", pin_memory=True):
        total += (batch.to("cuda", non_blocking=True) * 2).sum().item()
    assert total == 64 * 63
"""
SPAWN = """
import multiprocessing
def work(): exec({work!r})
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start(); child.join()
    assert child.exitcode == 0
"""


def record(folder: Path, program: str, *command: str) -> tuple[Trace, list[Trace]]:
    (folder / "a.py").write_text(program)
    words = [sys.executable, "-m", "cudatool", "run", "-o", "a.ctrace", *(command or ["a.py"])]
    environment = {**os.environ, "CUDATOOL_DEVICE": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    trace = read(folder / "a.ctrace")
    return trace, children_of(trace)


def allocated(trace: Trace) -> int:
    return len(trace.of_kind(Kind.BLOCK_ALLOC, Kind.MEM_ALLOC, Kind.SEGMENT_ALLOC))


@pytest.mark.parametrize(("library", "work"), [("torch", TORCH), ("cupy", CUPY), ("jax", JAX)])
@pytest.mark.parametrize("way", ["subprocess", "spawn"])
def test_child_has_a_trace_with_its_memory_and_kernels(tmp_path, library, work, way):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {work!r}], check=True)"
    trace, children = record(tmp_path, SPAWN.format(work=work) if way == "spawn" else program)
    assert 1 == len(children), trace.notes
    assert allocated(children[0]) > 0
    assert len(children[0].of_kind(Kind.EXECUTION, Kind.KERNEL_LAUNCH)) > 0
    assert 0 == allocated(trace)


def test_ranks_of_torchrun_have_a_trace_each_of_their_gpu(tmp_path):
    pytest.importorskip("torch")
    if len(gpu_names()) < 2:
        pytest.skip("needs two GPUs")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "a.py"]
    _, children = record(tmp_path, RANKS, *launcher)
    assert {"0", "1"} == {child.header["rank"] for child in children}
    for child in children:
        used = {int(row["device"]) for row in child.of_kind(Kind.BLOCK_ALLOC)}
        assert {int(child.header["rank"])} == used


PAIR = """
import os
import cudatool
import torch
import torch.distributed as dist

rank, planted = int(os.environ["RANK"]), os.environ.get("PLANTED", "")
shared = torch.cuda.device_count() < 2  # then NCCL refuses two ranks
torch.cuda.set_device(0 if shared else rank)
dist.init_process_group("gloo" if shared else "nccl")
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
optimizer = torch.optim.Adam(model.parameters())
kept = []
for number in range(16):
    step = cudatool.range("step")
    step.__enter__()
    batch = 96 if rank and number >= 8 and planted == "batch" else 64
    model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank and number >= 8 and planted == "leak":
        kept.append(torch.ones(3 << 18, device="cuda"))
    torch.cuda.synchronize()
    step.__exit__(None, None, None)
dist.destroy_process_group()
"""
_LINES = {
    text: number for number, text in enumerate(PAIR.strip("\n").splitlines(), 2)
}  # the text begins with a newline


def _line(beginning: str) -> str:
    (number,) = (number for text, number in _LINES.items() if text.strip().startswith(beginning))
    return f"a.py:{number} (<module>)"


@pytest.mark.parametrize("planted", ["", "batch", "leak"])
def test_a_planted_difference_of_two_ranks_of_torchrun_is_described(tmp_path, monkeypatch, planted):
    """On two GPUs with NCCL; where there is one, both ranks use it, with gloo."""
    pytest.importorskip("torch")
    pytest.importorskip("duckdb")
    monkeypatch.setenv("PLANTED", planted)
    record(tmp_path, PAIR, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "a.py")
    cudatool = [sys.executable, "-m", "cudatool"]
    subprocess.run([*cudatool, "export", "a.ctrace", "--to", "parquet", "-o", "set"], cwd=tmp_path, check=True)
    done = subprocess.run([*cudatool, "fleet", "set", "--json"], cwd=tmp_path, capture_output=True, text=True)
    [run] = [run for run in json.loads(done.stdout)["runs"] if len(run["ranks"]) == 2]
    # Ranks that share a GPU wait for each other in other ways than their programs'.
    found = {one["difference"]: one for one in run["pair"]["differences"]}
    memory = {name: one for name, one in found.items() if name not in ("clock", "straggler", "awaited")}
    if planted == "batch":
        assert [_line("model(torch.randn")] * 2 == found["size"]["sites"] and [8, 8] == found["size"]["steps"], found
        assert [64 * 1024 * 4, 96 * 1024 * 4] == found["size"]["values"]
    elif planted == "leak":
        site = _line("kept.append")
        assert site == found["leak"]["sites"][1] and found["leak"]["values"][0] == 0 < found["leak"]["values"][1], found
        first = found["call-site"]
        assert (site, 3 << 20, 8) == (first["sites"][1], first["values"][1], first["steps"][1]), first
    else:
        assert {} == memory, found


def test_workers_of_a_loader_that_use_no_gpu_leave_no_trace_and_no_gap(tmp_path):
    pytest.importorskip("torch")
    trace, children = record(tmp_path, LOADER)
    assert [] == children
    assert allocated(trace) > 0
    started = trace.of_kind(Kind.CHILD_PROCESS)["aux0"].tolist()
    recorded = trace.of_kind(Kind.CHILD_RECORDED)
    assert set(started) <= set(recorded["aux0"].tolist())
    assert 2 == len(started)
    assert 0 == int(recorded["flags"].max())


def test_sanitize_checks_the_operators_of_a_child(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "a.py").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {TORCH!r}], check=True)"
    )
    words = [sys.executable, "-m", "cudatool", "sanitize", "--checks", "race", "--json", "a.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    report = json.loads(done.stdout)
    assert (0, 2) == (done.returncode, len(report["processes"])), done.stderr
    assert report["processes"][1]["operations"] > 0
    assert [] == [gap for gap in report["gaps"] if gap["kind"] in ("child-processes", "replaced", "operations")]
