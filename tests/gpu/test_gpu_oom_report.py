"""The report when PyTorch's memory runs out on a GPU, with `cudatool run` and in a process that is only armed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from cudatool._driver import gpu_names

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_names(), reason="no NVIDIA GPU answers")]

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")

_HOG = """
import torch
torch.cuda.set_per_process_memory_fraction(0.05)
kept = []
def hog(n=512 << 20):
    kept.append(torch.empty(n, dtype=torch.uint8, device="cuda"))
small = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
"""
_PROGRAMS = {
    "plain": "while True: hog()",
    "caught": "try:\n    while True: hog()\nexcept torch.OutOfMemoryError: print('caught')",
    "retried": """
for attempt in range(3):
    try:
        while True: hog()
    except torch.OutOfMemoryError:
        kept.clear()
""",
    "thread": """
import threading
def work():
    while True: hog()
t = threading.Thread(target=work); t.start(); t.join()
""",
    "backward": """
class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, g):
        while True: hog()
Hungry.apply(torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
""",
    "asyncio": """
import asyncio
async def main():
    while True: hog()
asyncio.run(main())
""",
}


def _run(folder: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "big.py").write_text(_HOG + program)
    command = [sys.executable, *words, "big.py"]
    return subprocess.run(command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=300)


def _error(stderr: str) -> list[str]:
    return [line.split(" of which ")[0] for line in stderr.splitlines() if "OutOfMemoryError: " in line]


@needs_torch
@pytest.mark.parametrize("name", _PROGRAMS)
def test_recorded_program_leaves_a_report_and_ends_as_without(name, tmp_path):
    plain = _run(tmp_path, _PROGRAMS[name])
    done = _run(tmp_path, _PROGRAMS[name], "-m", "cudatool", "run", "-o", "run.ctrace")
    assert (plain.returncode, plain.stdout) == (done.returncode, done.stdout), done.stderr
    text = (tmp_path / "run.oom.txt").read_text()
    held = re.search(r"^Held when memory ran out\n.*\n(.*)$", text, re.MULTILINE)
    # In the backward pass it is the line of the forward operator.
    assert held is not None and ("(<module>)" if name == "backward" else "(hog)") in held[1], text
    assert _error(plain.stderr) == _error(done.stderr)
    assert "cudatool's runtime" not in text  # of which the program uses nothing


@needs_torch
@pytest.mark.parametrize("name", ["plain", "caught", "backward"])
def test_armed_program_leaves_a_snapshot_of_pytorch_and_a_report(name, tmp_path):
    (tmp_path / "big.py").write_text("")
    done = _run(tmp_path, f"import cudatool\ncudatool.arm()\n{_PROGRAMS[name]}")
    assert done.returncode == (0 if name == "caught" else 1), done.stderr
    (report,) = tmp_path.glob("big.*.oom.txt")
    (snapshot,) = tmp_path.glob("big.*.pickle")
    assert "(hog)" in report.read_text()
    import pickle

    assert pickle.loads(snapshot.read_bytes())["segments"]


@needs_torch
@pytest.mark.parametrize("options", ["history=False", "history_share=1", "history_share=1e-6"])
def test_armed_program_leaves_a_report_whatever_the_history_may_cost(options, tmp_path):
    """Where the history is off, the report has the failed request, and what is held by its size."""
    program = f"""
import cudatool, time
cudatool.arm({options})
begin = time.monotonic()
while time.monotonic() - begin < 4:  # it spends what a history may cost at first
    for _ in range(1000): x = torch.empty(1000, device="cuda")
print(torch._C._cuda_isHistoryEnabled())
while True: hog()
"""
    done = _run(tmp_path, program)
    assert done.returncode == 1, done.stderr
    (report,) = tmp_path.glob("big.*.oom.txt")
    assert ("True" if options == "history_share=1" else "False") in done.stdout
    text = " ".join(report.read_text().split())
    assert re.match(r"Out of memory: big\.py:\d+ \(hog\) requested 512 MiB", text), text
    assert "(hog)" in text.partition("Held when memory ran out")[2]
    assert "callback" not in done.stderr  # PyTorch says so when another thread turns its history off


@needs_torch
@pytest.mark.parametrize("words", [["-m", "cudatool", "run", "-o", "run.ctrace"], []])
def test_program_without_the_caching_allocator_runs_as_without_a_report(words, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    (tmp_path / "program.py").write_text(
        "import cudatool, torch\ncudatool.arm()\nprint(torch.ones(1000, device='cuda').sum().item())\n"
    )
    command = [sys.executable, *words, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (0, "1000.0\n") == (done.returncode, done.stdout), done.stderr


@needs_torch
def test_report_takes_two_seconds_at_most_at_a_hundred_thousand_events(tmp_path):
    program = """
import time
for _ in range(33_000): x = torch.empty(1000, device="cuda"); del x
begin = time.monotonic()
try:
    while True: hog()
except torch.OutOfMemoryError: pass
print(time.monotonic() - begin)
"""
    begin = time.monotonic()
    done = _run(tmp_path, program, "-m", "cudatool", "run", "-o", "run.ctrace")
    assert done.returncode == 0, done.stderr
    print(f"out of memory to exception: {float(done.stdout):.2f} s, all {time.monotonic() - begin:.1f} s")
    assert (tmp_path / "run.oom.txt").exists()


_OF_LIBRARIES = {
    "CuPy": ("cupy", """
import cupy as cp
kept = []
def hog(): kept.append(cp.ones(1 << 30, cp.uint8))
def take(): return cp.empty(1 << 42, cp.uint8)
hog()
for _ in range(2):
    try: take()
    except cp.cuda.memory.OutOfMemoryError: print("caught")
"""),
    "CuPy's limit": ("cupy", """
import cupy as cp
kept = []
def hog(): kept.append(cp.ones(1 << 30, cp.uint8))
def take(): return cp.empty(1 << 30, cp.uint8)
cp.get_default_memory_pool().set_limit(size=3 << 29)
hog(); take()
"""),
    "JAX": ("jax", """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp
kept = []
def hog(): kept.append(jnp.ones(1 << 30, jnp.uint8))
def take(): return jnp.ones(1 << 42, jnp.uint8).block_until_ready()
hog()
try: take()
except jax.errors.JaxRuntimeError: print("caught")
"""),
}  # fmt: skip


@pytest.mark.parametrize("name", _OF_LIBRARIES)
def test_programs_of_other_libraries_leave_a_report_and_end_as_without(name, tmp_path):
    module, program = _OF_LIBRARIES[name]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    (tmp_path / "big.py").write_text(program)
    plain, done = (
        subprocess.run([sys.executable, *words, "big.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        for words in ((), ("-m", "cudatool", "run", "-o", "run.ctrace"))
    )
    assert (plain.returncode, plain.stdout) == (done.returncode, done.stdout), done.stderr
    in_program = [
        [line for line in one.stderr.splitlines() if re.match(r' +File ".*big\.py"', line)] for one in (plain, done)
    ]
    assert in_program[0] == in_program[1]
    text = (tmp_path / "run.oom.txt").read_text()
    assert re.match(rf"Out of memory: big\.py:\d+ \(take\)( via .*)? requested .* of {module}", text, re.IGNORECASE), (
        text
    )
    held = re.search(r"^Held when memory ran out\n.*\n(.*)$", text, re.MULTILINE)
    assert held is not None and "(hog)" in held[1], text
    if "limit" in name:
        assert "The limit of CuPy's pool" in text
