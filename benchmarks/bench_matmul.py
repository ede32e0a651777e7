"""Compares products of cudatool and PyTorch, in the same process, with the same cuBLAS.

    python benchmarks/bench_matmul.py [--rounds N]

Prints TFLOP/s of square products at four sizes and four precisions, each library timed with its own CUDA events, in
turns; the best round counts. Products are called one after the other, where small ones wait for the host, and twenty
are captured into a graph, where none waits. Then it prints the host's time for a tiny product. Needs a GPU and PyTorch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

import cudatool
from cudatool import blas
from cudatool.graphs import CUDAGraph, graph

SIZES = (1024, 2048, 4096, 8192)
PRECISIONS = {
    # name -> dtypes of cudatool and PyTorch, whether TF32 is allowed
    "float32": (np.float32, torch.float32, False),
    "tf32": (np.float32, torch.float32, True),
    "float16": (np.float16, torch.float16, False),
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16, False),
}
SECONDS = 0.05  # of one round, about
CAPTURED = 20


def milliseconds(events: Callable[[], Any], call: Callable[[], object], count: int) -> float:
    """Return the time of one call, in a row of `count`."""
    start, end = events(), events()
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def best(calls: list[tuple[Callable[[], Any], Callable[[], object]]], count: int, rounds: int) -> list[float]:
    """Return the fastest of `rounds` for each call; they take turns, so that the clocks are the same for both."""
    for events, call in calls:
        milliseconds(events, call, 3)
    found = [[milliseconds(events, call, count) for events, call in calls] for _ in range(rounds)]
    return [min(times) for times in zip(*found, strict=True)]


def our_event() -> cudatool.Event:
    return cudatool.Event(enable_timing=True)


def torch_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def our_graph(call: Callable[[], object]) -> Callable[[], object]:
    captured = CUDAGraph()
    with graph(captured):
        for _ in range(CAPTURED):
            call()
    return captured.replay


def torch_graph(call: Callable[[], object]) -> Callable[[], object]:
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(CAPTURED):
            call()
    return captured.replay


def rates(rounds: int) -> None:
    print(f"{'TFLOP/s':<16}{'called one by one':^30}{'in a graph':^30}")
    print(f"{'precision':<10}{'size':>6}" + f"{'cudatool':>12}{'torch':>10}{'share':>8}" * 2)
    for name, (ours, theirs, tf32) in PRECISIONS.items():
        cudatool.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
        for size in SIZES:
            host = np.random.default_rng(1).normal(size=(2, size, size)).astype(ours)
            a, b = (cudatool.asarray(matrix) for matrix in host)
            x, y = (torch.as_tensor(np.asarray(matrix, np.float32)).to("cuda", theirs) for matrix in host)
            out, other = cudatool.empty((size, size), ours), torch.empty_like(x)
            operations = 2 * size**3
            count = max(3, int(SECONDS * (60e12 if name == "float32" else 600e12) / operations))

            def mine() -> None:
                blas.mm(a, b, out=out)  # noqa: B023 - called in this round

            def theirs_() -> None:
                torch.mm(x, y, out=other)  # noqa: B023

            one_by_one = best([(our_event, mine), (torch_event, theirs_)], min(count, 2000), rounds)
            graphs = (our_event, our_graph(mine)), (torch_event, torch_graph(theirs_))
            captured = best(list(graphs), max(1, min(count, 2000) // CAPTURED), rounds)
            line = f"{name:<10}{size:>6}"
            for times, products in ((one_by_one, 1), (captured, CAPTURED)):
                ours_, peer = (operations * products / (value * 1e9) for value in times)
                line += f"{ours_:>12.1f}{peer:>10.1f}{ours_ / peer:>8.1%}"
            same = np.array_equal(out.get().astype(np.float32), other.float().cpu().numpy())
            print(line, "the same bits" if same else "other bits")


def host_times(rounds: int) -> None:
    a, b = cudatool.ones((64, 64)), cudatool.ones((64, 64))
    x, y = torch.ones((64, 64), device="cuda"), torch.ones((64, 64), device="cuda")
    out, other = cudatool.empty((64, 64)), torch.empty_like(x)
    bias, their_bias = cudatool.ones((64,)), torch.ones((64,), device="cuda")
    cases = {
        "mm": (lambda: blas.mm(a, b), lambda: torch.mm(x, y)),
        "mm(out=)": (lambda: blas.mm(a, b, out=out), lambda: torch.mm(x, y, out=other)),
        "linear": (lambda: blas.linear(a, b, bias), lambda: torch.nn.functional.linear(x, y, their_bias)),
    }
    print(f"{'host time of':<16}{'cudatool':>10}{'torch':>8} us")
    for name, calls in cases.items():
        times = []
        for call in calls:
            fastest = float("inf")
            for _ in range(rounds):
                torch.cuda.synchronize()
                start = time.perf_counter_ns()
                for _ in range(500):
                    call()
                fastest = min(fastest, (time.perf_counter_ns() - start) / 500e3)
            times.append(fastest)
        print(f"{name:<16}{times[0]:>10.1f}{times[1]:>8.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    with torch.inference_mode():
        rates(rounds)
        host_times(rounds)
