"""What recording costs on a GPU: the same program plain and under ``cudatool run``, in turns.

    python benchmarks/bench_record.py [--rounds 5] [--only cupy]

Each program says how long its own loop took; what is printed is the median of the rounds, and their quotient. Kernels,
copies and memory are recorded of CuPy, JAX and graphs; of PyTorch its operators, and other libraries' memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_TIMED = """
import time
def timed(step, synchronize, count):
    for _ in range(max(count // 10, 3)):
        step()
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    print("TIME", (time.perf_counter() - start) / count)
"""
PROGRAMS = {
    "cupy": """
import cupy as cp
x = cp.zeros(1000, cp.float32)
def step():
    global x
    x += 1
timed(step, cp.cuda.Device().synchronize, 50000)
""",
    "cupy_graph": """
import cupy as cp
stream = cp.cuda.Stream(non_blocking=True)
x = cp.zeros(1000, cp.float32)
with stream:
    x += 1
    stream.begin_capture()
    for _ in range(20):
        x += 1
    graph = stream.end_capture()
    timed(graph.launch, stream.synchronize, 5000)
""",
    "jax": """
import os
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax, jax.numpy as jnp
f = jax.jit(lambda x, w: jnp.tanh(x @ w))
x = w = jnp.ones((1024, 1024)) * 1e-3
def step():
    global x
    x = f(x, w)
timed(step, lambda: x.block_until_ready(), 5000)
""",
    "torch": """
import torch
layer = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = torch.randn(8, 64, 256, device="cuda")
def step():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
timed(step, torch.cuda.synchronize, 100)
""",
}


def time_of(command: list[str], folder: str) -> float:
    """Return the seconds that the program says for a step."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("TIME ")]
    if done.returncode or not found:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stderr[-2000:]}")
    return float(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ["CUDATOOL_DEVICE"] = "cuda"
    recorded = [sys.executable, "-m", "cudatool", "run", "-f", "-o", "t.ctrace"]
    print(f"{'program':12} {'plain':>12} {'recorded':>12} {'times':>7}")
    for name, program in PROGRAMS.items():
        if options.only not in name:
            continue
        if importlib.util.find_spec(name.partition("_")[0]) is None:
            print(f"{name:12} not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "program.py").write_text(_TIMED + program)
            pairs = [
                (time_of([sys.executable, "program.py"], folder), time_of([*recorded, "program.py"], folder))
                for _ in range(options.rounds)
            ]
        plain, under = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:12} {plain * 1e6:9.2f} us {under * 1e6:9.2f} us {under / plain:7.3f}", flush=True)


if __name__ == "__main__":
    main()
