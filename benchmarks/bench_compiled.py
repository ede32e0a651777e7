"""Steps of training eagerly, traced, and traced with fused kernels, on the software device.

    python benchmarks/bench_compiled.py [--json]

Kernels of a step; bytes that the allocator gives a step and what it trains (weights included), and the planned peak;
processor time of a step, the least of several turns. The three ways take turns.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDATOOL_DEVICE", "sim")

import numpy as np

import cudatool as ct
from cudatool import blas, ops
from cudatool.compiler import CompiledFunction, compile
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind

TURNS, CALLS = 5, 10
SAMPLES = Path(__file__).parents[1] / "samples"
WAYS: dict[str, dict[str, int] | None] = {"eager": None, "traced": {"max_fusion_size": 1}, "fused": {}}


def transformer() -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """The step of samples/transformer.py."""
    spec = importlib.util.spec_from_file_location("transformer", SAMPLES / "transformer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    training, rng = module.Training(), np.random.default_rng(0)

    def run(step: Callable[..., Any]) -> Any:
        training.load(rng)
        return step()

    return training.step, run


def perceptron() -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """A perceptron of two layers made of cudatool.ops, with its gradient and gradient descent."""
    rng = np.random.default_rng(0)
    w1, b1, w2, x, y = (
        ct.asarray((rng.normal(size=shape) / 8).astype(np.float32))
        for shape in ((64, 256), (256,), (256, 16), (512, 64), (512, 16))
    )

    def step(x: Any, y: Any) -> Any:
        before = blas.mm(x, w1) + b1
        hidden = ops.gelu(before)
        error = (blas.mm(hidden, w2) - y) * (1 / len(x))
        gradient = ops.gelu_backward(blas.mm(error, w2.T), before)
        w2.sub_(blas.mm(hidden.T, error) * 0.1)
        w1.sub_(blas.mm(x.T, gradient) * 0.1)
        b1.sub_(ops.sum(gradient, 0) * 0.1)
        return ops.sum(error * error)

    return step, lambda step: step(x, y)


def measure(make: Callable[[], Any], options: dict[str, int] | None) -> Callable[[], dict[str, float]]:
    """Return a function that measures a turn, and what it has found by then."""
    gc.collect()
    ct.empty_cache()
    before = ct.memory_allocated()
    step, run = make()
    if options is not None:
        step = compile(step, fullgraph=True, options=options)
    for _ in range(3):
        run(step).get()
    gc.collect()
    ct.reset_peak_memory_stats()
    found = {"kernels": _kernels(step, run), "peak_bytes": ct.max_memory_allocated() - before, "ms": float("inf")}
    if isinstance(step, CompiledFunction):
        found["planned_bytes"] = step.plans[0].peak

    def turn() -> dict[str, float]:
        start = time.process_time()
        for _ in range(CALLS):
            result = run(step)
        result.get()
        found["ms"] = min(found["ms"], (time.process_time() - start) / CALLS * 1e3)
        return found

    return turn


def _kernels(step: Any, run: Callable[[Any], Any]) -> int:
    count = 0

    def listen(event: Event) -> None:
        nonlocal count
        count += event.kind is Kind.KERNEL_LAUNCH

    hooks.subscribe(listen)
    run(step).get()
    hooks.unsubscribe(listen)
    return sum(node.kind == "kernel" for node in step.graphs[0].nodes) if isinstance(step, CompiledFunction) else count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for make in (transformer, perceptron):
        turns = {way: measure(make, options) for way, options in WAYS.items()}
        for _ in range(TURNS):
            found[make.__name__] = {way: turn() for way, turn in turns.items()}
    if parser.parse_args().json:
        print(json.dumps(found))
        return
    print(f"{'':12}{'':8}{'kernels':>9}{'peak KiB':>10}{'planned KiB':>13}{'ms a step':>11}")
    for name, ways in found.items():
        for way, row in ways.items():
            planned = f"{row['planned_bytes'] / 1024:13,.1f}" if "planned_bytes" in row else " " * 13
            print(f"{name:12}{way:8}{row['kernels']:9}{row['peak_bytes'] / 1024:10,.1f}{planned}{row['ms']:11.2f}")


if __name__ == "__main__":
    main()
