"""The cost of each checker: thirteen kernels on one thread of the software device, as multiples of the plain run.

    python benchmarks/bench_checkers.py [KERNEL ...]

Each time is the processor time of the best of several launches after the first, which translates. Every result is
compared with NumPy's.

Multiples of the plain run on a busy machine, before launches of which nothing need be looked at ran the code of those
that are not checked, and blocks' reads of a word stood for further ones; and now::

    kernel        memcheck     initcheck    racecheck
    vecadd        1.5 -> 0.9   1.5 -> 1.0    1.6 -> 1.1
    saxpy         4.0 -> 1.1   3.8 -> 1.1    3.9 -> 1.1
    matmul        0.9 -> 1.2   0.9 -> 1.1    1.3 -> 1.1
    transpose     3.7 -> 1.1   3.1 -> 1.0    3.8 -> 1.2
    stencil       1.4 -> 1.3   1.3 -> 1.2    1.9 -> 1.4
    reduce        1.5 -> 1.4   1.6 -> 1.4    1.6 -> 1.3
    histogram     1.2 -> 1.1   1.0 -> 1.0    2.7 -> 2.3
    scan          1.3 -> 1.3   0.6 -> 0.5    1.0 -> 0.5
    spmv          1.9 -> 1.7   2.2 -> 2.0    3.0 -> 2.7
    nbody         1.2 -> 1.1   1.1 -> 1.1    1.1 -> 1.0
    lookup               0.9          0.9     36 -> 5.9
    lookup_plain         0.8          0.9     13 -> 6.1
    ring                 0.8          0.9    4.8 -> 3.6

Once more on a machine that did nothing else: racecheck lookup 4.1, lookup_plain 3.7, ring 2.7, spmv 2.6, histogram 2.3,
others at most 1.3; memcheck scan 2.5, others at most 1.8; initcheck at most 1.8.

Memory lies elsewhere in each run, which alone makes a factor of up to 2 for transpose and vecadd: the figures before
are of one process for each checker, those after the best of three.
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

SOURCE = "".join((Path(__file__).parent / name).read_text() for name in ("kernels.cu", "checked_kernels.cu"))
CHECKERS = ("memcheck", "initcheck", "synccheck", "racecheck")


ROUNDS = 3  # of processes, one for each checker: where memory lies in the caches differs from one to the next
LAUNCHES, LONG_ENOUGH_S = 12, 0.2  # of each kernel, unless so many seconds are over after four


def best(launch: Callable[[], None], synchronize: Callable[[], None]) -> tuple[float, int]:
    """Return the least processor time of a launch, in ms, and the number of launches."""
    times: list[float] = []
    while len(times) < 4 or (len(times) < LAUNCHES and sum(times) < LONG_ENOUGH_S):
        start = time.process_time()
        launch()
        synchronize()
        times.append(time.process_time() - start)
    return min(times[1:]) * 1e3, len(times)


def measure(checker: str, names: list[str]) -> dict[str, float]:
    """Return each kernel's time in ms under `checker`, or under none for ``plain``."""
    import cudatool as ct

    if checker == "plain":
        return _measure(names)
    with (
        tempfile.TemporaryDirectory() as folder,
        ct.record(f"{folder}/x.ctrace", measure_accesses=False, checks=[checker], with_stacks=False),
    ):
        return _measure(names)


def _measure(names: list[str]) -> dict[str, float]:
    import cudatool as ct

    rng = np.random.default_rng(0)
    n, side, small, bodies = 1 << 22, 1024, 256, 1024
    x, y = rng.random(n, np.float32), rng.random(n, np.float32)
    a, b, c = ct.asarray(x), ct.asarray(y), ct.zeros(n, np.float32)
    p, q = (rng.random((small, small), np.float32) for _ in range(2))
    dp, dq, dr = ct.asarray(p), ct.asarray(q), ct.zeros((small, small), np.float32)
    square = x[: side * side].reshape(side, side)
    data = rng.integers(0, 256, n, np.uint8)
    values, counts, total = ct.asarray(data), ct.zeros(256, np.uint32), ct.zeros(1, np.float32)
    lengths = rng.integers(0, 17, 1 << 17)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = rng.integers(0, len(lengths), starts[-1]).astype(np.int32)
    d_starts, d_columns = ct.asarray(starts), ct.asarray(columns)
    places = rng.random((bodies, 4), np.float32)
    d_bodies, d_forces = ct.asarray(places), ct.zeros((bodies, 4), np.float32)
    few = 1 << 18
    order, table = rng.permutation(few).astype(np.int32), rng.random(few, np.float32)
    d_order, d_table, d_sums = ct.asarray(order), ct.asarray(table), ct.zeros(few, np.float32)

    launches: dict[str, tuple[object, object, tuple[object, ...]]] = {
        "vecadd": (n // 256, 256, (a, b, c, n)),
        "saxpy": (250, 256, (np.float32(0), a, b, n)),
        "matmul": ((small // 16, small // 16), (16, 16), (dp, dq, dr, small)),
        "transpose": ((side // 32, side // 32), (32, 8), (a, c, side)),
        "stencil": ((side // 32, side // 8), (32, 8), (a, c, side)),
        "reduce": (256, 256, (a, total, n)),
        "histogram": (256, 256, (values, counts, n)),
        "scan": (n // 256, 256, (a, c)),
        "spmv": (len(lengths) // 256, 256, (d_starts, d_columns, b, a, c, len(lengths))),
        "nbody": (bodies // 128, 128, (d_bodies, d_forces, bodies)),
        **{name: (few // 256, 256, (d_order, d_table, d_sums, few)) for name in ("lookup", "lookup_plain", "ring")},
    }
    sums = np.concatenate([[0], np.cumsum(y[: starts[-1]].astype(np.float64) * x[columns])])
    apart = places[None, :, :3].astype(np.float64) - places[:, None, :3]
    weight = places[:, 3] * ((apart**2).sum(2) + 0.01) ** -1.5
    inner = square[1:-1, 1:-1] + square[1:-1, :-2] + square[1:-1, 2:] + square[:-2, 1:-1] + square[2:, 1:-1]

    def top(rows: int) -> np.ndarray:
        return c.get()[: rows * rows].reshape(rows, rows)

    hashes, looked_up, around = np.arange(few, dtype=np.uint32), np.zeros(few), np.zeros(few)
    for k in range(32):
        hashes = hashes * np.uint32(1664525) + np.uint32(1013904223)
        looked_up += table[hashes % few]
        around += np.roll(table, -33 * k)
    found = {"lookup": looked_up, "lookup_plain": looked_up, "ring": around}

    launched = 0
    right: dict[str, Callable[[], object]] = {
        "vecadd": lambda: np.array_equal(c.get(), x + y),
        "saxpy": lambda: np.array_equal(b.get(), y),
        "matmul": lambda: np.allclose(dr.get(), p @ q, rtol=1e-3),
        "transpose": lambda: np.array_equal(top(side), square.T),
        "stencil": lambda: np.allclose(top(side)[1:-1, 1:-1], 0.2 * inner, rtol=1e-3),
        "reduce": lambda: np.isclose(total.get()[0], launched * x.sum(dtype=np.float64), rtol=1e-2),
        "histogram": lambda: np.array_equal(counts.get(), launched * np.bincount(data, minlength=256)),
        "scan": lambda: np.allclose(c.get().reshape(-1, 256), x.reshape(-1, 256).cumsum(1), rtol=1e-3),
        "spmv": lambda: np.allclose(c.get()[: len(lengths)], np.diff(sums[starts]), rtol=1e-2, atol=1e-3),
        "nbody": lambda: np.allclose(d_forces.get()[:, :3], (weight[:, :, None] * apart).sum(1), rtol=1e-2, atol=1e-1),
        **{name: lambda e=e: np.allclose(d_sums.get()[order], e, rtol=1e-3) for name, e in found.items()},
    }
    result = {}
    for name, (grid, block, arguments) in launches.items():
        if names and name not in names:
            continue
        kernel = ct.compile(SOURCE, name)
        result[name], launched = best(lambda k=kernel[(grid, block)], args=arguments: k(*args), ct.synchronize)
        assert right[name](), name  # do not time wrong results
    return result


def main() -> None:
    description = __doc__ or ""
    parser = argparse.ArgumentParser(description=description.partition("Multiples")[0])
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--checker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.checker:
        for name, ms in measure(arguments.checker, arguments.kernels).items():
            print(name, ms)
        return
    columns: dict[str, dict[str, float]] = {}
    for checker in ("plain", *CHECKERS) * ROUNDS:
        command = [sys.executable, __file__, *arguments.kernels, "--checker", checker]
        environment = {**os.environ, "CUDATOOL_DEVICE": "sim:threads=1,memory=2GiB"}
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
        times = {name: float(ms) for name, ms in map(str.split, lines.splitlines())}
        columns[checker] = {name: min(ms, columns.get(checker, times)[name]) for name, ms in times.items()}
    print(f"{'kernel':<12}{'plain, ms':>10}" + "".join(f"{checker:>12}" for checker in CHECKERS))
    for name, plain in columns["plain"].items():
        cells = "".join(f"{columns[checker][name] / plain:>12.1f}" for checker in CHECKERS)
        print(f"{name:<12}{plain:>10.2f}{cells}")


if __name__ == "__main__":
    main()
