"""The slowdown of a small transformer's training step under PyTorch's CUDA sanitizer and under ours.

It also measures an empty TorchDispatchMode: a lower bound for any sanitizer written in Python.

A transformer of 6 layers, width 512, trained by AdamW on 8 sequences of 128: a step is some hundred operators, and the
GPU waits for Python. Each way runs in a separate process. Needs a GPU and PyTorch.

    python benchmarks/bench_torch_sanitize.py [STEPS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any


def measure(steps: int) -> None:
    """Train, and print the median of a step's milliseconds."""
    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(512, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(8, 128, 512, device="cuda")
    targets = torch.randint(0, 1000, (8 * 128,), device="cuda")

    class EmptyMode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    times = []
    with EmptyMode() if "--mode" in sys.argv else nullcontext():
        for _ in range(10 + steps):
            begin = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets).backward()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    print(f"milliseconds {statistics.median(times[10:]) * 1e3:.2f}", file=sys.stderr)


def run(command: list[str], steps: int, *options: str, **environment: str) -> tuple[float, float, str]:
    """Return the milliseconds of a step, the seconds of the whole process, and what it printed."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command, os.path.abspath(__file__), str(steps), "--measure", *options],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((line for line in done.stderr.splitlines() if line.startswith("milliseconds")), "")
    if not line:
        raise SystemExit(done.stderr[-3000:])
    return float(line.split()[1]), time.perf_counter() - begin, done.stdout


def main() -> None:
    """Print the table."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    if "--measure" in sys.argv:
        measure(steps)
        return
    ours = ["-m", "cudatool", "sanitize", "--device", "cuda"]
    run(ours, 1)  # builds the extension
    ways = [
        ("none", run([], steps)),
        ("PyTorch's CUDA sanitizer", run([], min(steps, 20), TORCH_CUDA_SANITIZER="1")),
        ("cudatool sanitize", run(ours, steps)),
        ("an empty dispatch mode", run([], steps, "--mode")),
        ("none, again", run([], steps)),
    ]
    plain = statistics.mean((ways[0][1][0], ways[-1][1][0]))
    print(f"{'':28}{'ms a step':>10}{'times':>8}{'s in all':>10}   times: of the mean of both plain runs")
    for name, (milliseconds, seconds, _) in ways:
        print(f"{name:28}{milliseconds:10.2f}{milliseconds / plain:8.2f}{seconds:10.1f}")
    print(ways[2][1][2])


if __name__ == "__main__":
    main()
