"""The cost of recording on the software device: a program under `python`, `cudatool run`, `cudatool run --accesses`.

Each way runs samples in new processes, with kernels that are already compiled. Prints the processor seconds of each,
the least of several runs, start-up included, and the ratios to `python`.

    python benchmarks/bench_run.py [TURNS]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "samples"
PROGRAMS = ("vector_add.py", "pipeline_fixed.py", "mlp.py")
WAYS = {
    "python": (),
    "run": ("-m", "cudatool", "run", "-f", "-o", "bench.ctrace"),
    "run --accesses": ("-m", "cudatool", "run", "--accesses", "-f", "-o", "bench.ctrace"),
}


def seconds(way: tuple[str, ...], program: Path, folder: str) -> float:
    """Return the processor time of one run."""
    environment = {**os.environ, "CUDATOOL_DEVICE": "sim"}
    before = os.times()
    command = [sys.executable, *way, str(program)]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print(f"{'seconds':20}" + "".join(f"{way:>16}" for way in WAYS) + f"{'run':>10}{'accesses':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for name in PROGRAMS:
            for way in WAYS.values():
                seconds(way, SAMPLES / name, folder)  # compiles
            taken = {way: min(seconds(how, SAMPLES / name, folder) for _ in range(turns)) for way, how in WAYS.items()}
            plain, *recorded = taken.values()
            ratios = "".join(f"{one / plain:9.2f}x" for one in recorded)
            print(f"{name:20}" + "".join(f"{one:16.2f}" for one in taken.values()) + ratios, flush=True)


if __name__ == "__main__":
    main()
