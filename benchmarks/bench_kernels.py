"""Compares kernels on the software device with NumPy and numba's CUDA simulator, in one run.

    python benchmarks/bench_kernels.py [--threads N]

Large sizes are compared with NumPy, on one thread and on N, and under each checker; small ones with numba's simulator
(skipped where numba is not installed), which runs one Python thread for each CUDA thread.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SOURCE = (Path(__file__).parent / "kernels.cu").read_text()


def best(function: Callable[[], object], repeat: int = 5) -> float:
    """Return the shortest of `repeat` runs, in ms."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


CHECKERS = ("accesses", "memcheck", "initcheck", "synccheck", "racecheck")


def measure_checked(checker: str, repeat: int) -> dict[str, tuple[float, float]]:
    """Return :func:`measure` on one thread with kernels instrumented for one checker, or to measure their accesses."""
    os.environ["CUDATOOL_DEVICE"] = "sim:memory=2GiB"
    import cudatool as ct

    with tempfile.TemporaryDirectory() as folder:
        accesses = checker == "accesses"
        with ct.record(
            f"{folder}/x.ctrace", measure_accesses=accesses, checks=[] if accesses else [checker], with_stacks=False
        ):
            return measure(1, repeat)


def measure(threads: int, repeat: int = 5) -> dict[str, tuple[float, float]]:
    """Return, for each kernel, the first launch (with translation) and the best later one, in ms."""
    os.environ.setdefault("CUDATOOL_DEVICE", f"sim:threads={threads},memory=2GiB")
    import cudatool as ct

    n = 1 << 24
    rng = np.random.default_rng(0)
    x, y = rng.random(n, np.float32), rng.random(n, np.float32)
    a, b, c = ct.asarray(x), ct.asarray(y), ct.empty(n, np.float32)
    m = 512
    p, q = rng.random((m, m), np.float32), rng.random((m, m), np.float32)
    dp, dq, dr = ct.asarray(p), ct.asarray(q), ct.empty((m, m), np.float32)
    total = ct.zeros(1, np.float32)
    data = rng.integers(0, 256, n, np.uint8)
    bytes_, bins = ct.asarray(data), ct.zeros(256, np.uint32)

    def add() -> None:
        kernels["vecadd"][(n // 256, 256)](a, b, c, n)

    def multiply() -> None:
        kernels["matmul"][((m // 16, m // 16), (16, 16))](dp, dq, dr, m)

    def reduce() -> None:
        kernels["reduce"][(1024, 256)](a, total, n)

    def histogram() -> None:
        kernels["histogram"][(1024, 256)](bytes_, bins, n)

    kernels = {name: ct.compile(SOURCE, name) for name in ("vecadd", "matmul", "reduce", "histogram")}
    result = {}
    for name, launch in (("vecadd", add), ("matmul", multiply), ("reduce", reduce), ("histogram", histogram)):

        def once(launch: Callable[[], None] = launch) -> None:
            launch()
            ct.synchronize()

        first = best(once, 1)
        result[name] = first, best(once, repeat)
    # Do not time wrong results.
    assert np.array_equal(c.get(), x + y)
    assert np.allclose(dr.get(), p @ q, rtol=1e-3)
    total.fill_(0)
    bins.fill_(0)
    reduce()
    histogram()
    assert np.isclose(total.get()[0], x.sum(dtype=np.float64), rtol=1e-3)
    assert np.array_equal(bins.get(), np.bincount(data, minlength=256))
    return result


def with_numpy() -> dict[str, float]:
    """Return NumPy's times for the same work, in ms."""
    n, m = 1 << 24, 512
    rng = np.random.default_rng(0)
    x, y = rng.random(n, np.float32), rng.random(n, np.float32)
    z = np.empty_like(x)
    p, q = rng.random((m, m), np.float32), rng.random((m, m), np.float32)
    data = rng.integers(0, 256, n, np.uint8)
    return {
        "vecadd": best(lambda: np.add(x, y, out=z)),
        "matmul": best(lambda: p @ q),
        "reduce": best(lambda: x.sum()),
        "histogram": best(lambda: np.bincount(data, minlength=256)),
    }


_SIMULATOR = """
import sys, time, numpy as np
from numba import cuda
which = sys.argv[1]
if which == "vecadd":
    n = 16384
    @cuda.jit
    def kernel(a, b, c):
        i = cuda.grid(1)
        if i < c.size:
            c[i] = a[i] + b[i]
    a, b, c = np.ones(n, np.float32), np.ones(n, np.float32), np.zeros(n, np.float32)
    start = time.perf_counter(); kernel[n // 256, 256](a, b, c); print(time.perf_counter() - start)
    assert (c == 2).all()
else:
    n = 64
    @cuda.jit
    def kernel(a, b, c):
        sa, sb = cuda.shared.array((16, 16), np.float32), cuda.shared.array((16, 16), np.float32)
        x, y = cuda.grid(2)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        s = np.float32(0)
        for t in range(n // 16):
            sa[ty, tx] = a[y, t * 16 + tx]
            sb[ty, tx] = b[t * 16 + ty, x]
            cuda.syncthreads()
            for k in range(16):
                s += sa[ty, k] * sb[k, tx]
            cuda.syncthreads()
        c[y, x] = s
    a, b, c = np.ones((n, n), np.float32), np.ones((n, n), np.float32), np.zeros((n, n), np.float32)
    start = time.perf_counter(); kernel[(4, 4), (16, 16)](a, b, c); print(time.perf_counter() - start)
    assert (c == n).all()
"""


def with_simulator(which: str) -> float | None:
    """Return numba's CUDA simulator's time for vecadd of 16,384 or matmul of 64, in ms; None without numba."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _SIMULATOR, which], env=environment, capture_output=True, text=True, check=False
    )
    return float(done.stdout) * 1e3 if done.returncode == 0 else None


_SMALL = """
import os, time, numpy as np, pathlib
os.environ["CUDATOOL_DEVICE"] = "sim"
import cudatool as ct
source = pathlib.Path({path!r}).read_text()
k, m = ct.compile(source, "vecadd"), ct.compile(source, "matmul")
a, b, c = (ct.zeros(16384, np.float32) for _ in range(3))
p, q, r = (ct.zeros((64, 64), np.float32) for _ in range(3))
for launch in (lambda: k[(64, 256)](a, b, c, 16384), lambda: m[((4, 4), (16, 16))](p, q, r, 64)):
    times = []
    for _ in range(20):
        start = time.perf_counter(); launch(); ct.synchronize(); times.append(time.perf_counter() - start)
    print(min(times))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.checker:
        for name, times in measure_checked(arguments.checker, 2).items():
            print(name, *times)
        return
    if arguments.one:  # a process has one device: each number of threads needs its own
        for name, times in measure(arguments.threads).items():
            print(name, *times)
        return

    def run(*options: str) -> dict[str, tuple[float, float]]:
        command = [sys.executable, __file__, *options]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        return {w[0]: (float(w[1]), float(w[2])) for w in map(str.split, lines)}

    rows: dict[int, dict[str, tuple[float, float]]] = {}
    for threads in sorted({1, arguments.threads}):
        rows[threads] = run("--one", "--threads", str(threads))
    numpy_times = with_numpy()
    print("ms; 16 M elements, matmul 512x512 in tiles of 16x16; 'first' includes translation unless cached")
    header = "".join(f"{f'{t} thread' + 's' * (t > 1):>12}" for t in rows)
    print(f"{'kernel':<12}{'first':>10}{header}{'NumPy':>10}{'NumPy / ours':>14}")
    for name, reference in numpy_times.items():
        best_times = "".join(f"{rows[t][name][1]:>12.1f}" for t in rows)
        ratio = reference / min(rows[t][name][1] for t in rows)
        print(f"{name:<12}{rows[1][name][0]:>10.0f}{best_times}{reference:>10.1f}{ratio:>14.2f}")
    checked = {checker: run("--checker", checker) for checker in CHECKERS}
    print("\nunder a checker, 1 thread: ms, and times the kernel without")
    print(f"{'kernel':<12}" + "".join(f"{checker:>18}" for checker in CHECKERS))
    for name in numpy_times:
        plain = rows[1][name][1]
        cells = (f"{checked[c][name][1]:,.0f} ({checked[c][name][1] / plain:.1f})" for c in CHECKERS)
        print(f"{name:<12}" + "".join(f"{cell:>18}" for cell in cells))
    small = subprocess.run(
        [sys.executable, "-c", _SMALL.format(path=str(Path(__file__).parent / "kernels.cu"))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=Path(__file__).parent,  # a folder where no checkout hides the installed package
    ).stdout.split()
    print()
    for which, ours, size in zip(("vecadd", "matmul"), map(float, small), ("16,384", "64x64"), strict=True):
        peer = with_simulator(which)
        said = (
            f"numba's simulator {peer:.0f} ms, {peer / (ours * 1e3):,.0f} times ours"
            if peer
            else "numba: not installed"
        )
        print(f"{which} {size}: {ours * 1e3:.3f} ms; {said}")


if __name__ == "__main__":
    main()
