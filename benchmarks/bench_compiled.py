"""Steps of training eagerly, traced, and traced with fused kernels; on a GPU also PyTorch's, compiled and not.

    python benchmarks/bench_compiled.py [--json] [--only transformer|perceptron] [--kernels]

On the software device (the default; CUDATOOL_DEVICE=cuda for a GPU): kernels of a step; bytes that the allocator gives
a step and what it trains (weights included), and the planned peak; processor time of a step, the least of several
turns. On a GPU models are larger, float32 products are TF32's on both sides, and the time is that of one step after the
other until the device has done them. The ways take turns. "numbers": the largest relative difference of a loss of the
first steps from the eager one of the same library (PyTorch's compiled dropout draws other numbers).

``--kernels`` prints which kernels take the time, by PyTorch's profiler, which sees those of both libraries.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDATOOL_DEVICE", "sim")

import numpy as np
import torch_steps

import cudatool as ct
from cudatool import _driver, blas, ops
from cudatool.compiler import CompiledFunction, compile
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind

ON_GPU = _driver.initialize().kind == "cuda"
TURNS, CALLS, COMPARED = (7, 40, 8) if ON_GPU else (5, 10, 5)
SAMPLES = Path(__file__).parents[1] / "samples"
WAYS: dict[str, dict[str, int] | None] = {"eager": None, "traced": {"max_fusion_size": 1}, "fused": {}}
TORCH_WAYS = {"torch eager": None, "torch compiled": "default", "torch reduce-overhead": "reduce-overhead"}

Row = dict[str, float]
Step = Callable[[], Any]


def sample() -> Any:
    """The module of samples/transformer.py, larger on a GPU."""
    if "transformer" in sys.modules:
        return sys.modules["transformer"]
    spec = importlib.util.spec_from_file_location("transformer", SAMPLES / "transformer.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["transformer"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if ON_GPU:
        module.WIDTH, module.HEADS, module.LAYERS, module.CONTEXT, module.BATCH = 512, 8, 4, 256, 16
    return module


def transformer() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step of samples/transformer.py, and no arguments."""
    training = sample().Training()
    training.load(np.random.default_rng(0))
    return training.step, ()


def perceptron_arrays() -> dict[str, np.ndarray]:
    inputs, width, outputs, batch = (1024, 4096, 1024, 8192) if ON_GPU else (64, 256, 16, 512)
    shapes = {
        "w1": (inputs, width),
        "b1": (width,),
        "w2": (width, outputs),
        "x": (batch, inputs),
        "y": (batch, outputs),
    }
    rng = np.random.default_rng(0)
    return {name: (rng.normal(size=shape) / inputs**0.5).astype(np.float32) for name, shape in shapes.items()}


def perceptron() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A perceptron of two layers made of cudatool.ops, with its gradient and gradient descent; its arguments."""
    w1, b1, w2, x, y = map(ct.asarray, perceptron_arrays().values())

    def step(x: Any, y: Any) -> Any:
        before = blas.mm(x, w1) + b1
        hidden = ops.gelu(before)
        error = (blas.mm(hidden, w2) - y) * (1 / len(x))
        gradient = ops.gelu_backward(blas.mm(error, w2.T), before)
        w2.sub_(blas.mm(hidden.T, error) * 0.1)
        w1.sub_(blas.mm(x.T, gradient) * 0.1)
        b1.sub_(ops.sum(gradient, 0) * 0.1)
        return ops.sum(error * error)

    return step, (x, y)


class Way:
    """One way to do the steps of a model: what was found of it."""

    def __init__(self, step: Step, synchronize: Step) -> None:
        self.step, self.synchronize = step, synchronize
        self.row: Row = {"ms": float("inf")}
        self.losses: list[float] = []

    def turn(self) -> None:
        """Do some steps, and keep the time if it is the least so far."""
        clock = time.perf_counter if ON_GPU else time.process_time
        self.synchronize()
        start = clock()
        for _ in range(CALLS):
            self.step()
        self.synchronize()
        self.row["ms"] = min(self.row["ms"], (clock() - start) / CALLS * 1e3)


def ours(make: Callable[[], Any], options: dict[str, int] | None) -> Way:
    gc.collect()
    ct.empty_cache()
    before = ct.memory_allocated()
    function, arguments = make()
    if options is not None:
        function = compile(function, fullgraph=True, options=options)
    way = Way(lambda: function(*arguments), ct.synchronize)
    way.losses = [float(way.step().get()) for _ in range(COMPARED)]
    gc.collect()
    ct.reset_peak_memory_stats()
    way.row["kernels"] = _kernels(function, way.step)
    way.row["peak_bytes"] = ct.max_memory_allocated() - before
    if isinstance(function, CompiledFunction):
        way.row |= {"planned_bytes": function.plans[0].peak, "ran_bytes": function.peaks[0]}
    return way


def _kernels(function: Any, step: Step) -> int:
    count = 0

    def listen(event: Event) -> None:
        nonlocal count
        count += event.kind is Kind.KERNEL_LAUNCH

    hooks.subscribe(listen)
    step().get()
    hooks.unsubscribe(listen)
    if isinstance(function, CompiledFunction):
        return sum(node.kind == "kernel" for node in function.graphs[0].nodes)
    return count


def of_torch(torch: Any, name: str, mode: str | None) -> Way:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    if name == "transformer":
        step = torch_steps.transformer(torch, sample(), mode)
    else:
        step = torch_steps.perceptron(torch, perceptron_arrays(), mode)
    way = Way(step, torch.cuda.synchronize)
    way.losses = [float(way.step()) for _ in range(COMPARED)]
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    way.step()
    torch.cuda.synchronize()
    way.row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return way


def compare(ways: dict[str, Way]) -> None:
    """Note how far each way's losses are from those of the eager way of the same library."""
    for name, way in ways.items():
        eager = ways.get("torch eager" if name.startswith("torch") else "eager", way)
        pairs = zip(way.losses, eager.losses, strict=True)
        way.row["numbers"] = max(abs(own - other) / abs(other) for own, other in pairs)


def print_kernels(torch: Any, name: str, way: Way, most: int = 24) -> None:
    """Print what takes the time of a step on the device."""
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            way.step()
        way.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 3
    print(f"{name}: {total:.0f} us on the device a step, {sum(row.count for row in rows) // 3} operations")
    for row in rows[:most]:
        print(f"  {row.self_device_time_total / 3:8.1f} us {row.count // 3:4} x {row.key[:100]}", flush=True)


@contextmanager
def alone(path: str) -> Iterator[None]:
    """Let no other process that names this file measure at the same time; all may compile."""
    if not path:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made(make: Callable[[], Any], torch: Any, chosen: list[str]) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    for name in chosen:
        start = time.perf_counter()
        if name in WAYS:
            ways[name] = ours(make, WAYS[name])
        elif torch is None:
            continue
        else:
            ways[name] = of_torch(torch, make.__name__, TORCH_WAYS[name])
        print(f"{make.__name__}, {name}: made in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    compare(ways)
    return ways


def print_rows(name: str, ways: dict[str, Way]) -> None:
    """Print a line for each way."""
    for label, way in ways.items():
        row = way.row
        sizes = [f"{row[key] / 1024:13,.1f}" if key in row else " " * 13 for key in ("planned_bytes", "ran_bytes")]
        kernels, peak = f"{row.get('kernels', '')!s:>8}", f"{row['peak_bytes'] / 1024:13,.1f}"
        print(f"{name:12}{label:22}{kernels}{peak}{''.join(sizes)}{row['ms']:11.3f}  {row['numbers']:.1e}", flush=True)


def _torch() -> Any:
    if not ON_GPU:
        return None
    try:
        import torch
        import torch._dynamo
    except ImportError:
        return None
    torch.set_float32_matmul_precision("high")
    return torch if torch.cuda.is_available() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["transformer", "perceptron"])
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--ways", nargs="*", choices=[*WAYS, *TORCH_WAYS], default=[*WAYS, *TORCH_WAYS])
    parser.add_argument(
        "--lock", default="", help="a file; processes that name the same one measure one after the other"
    )
    options = parser.parse_args()
    torch = _torch() if options.kernels or not WAYS.keys() >= set(options.ways) else None
    if ON_GPU:
        ct.set_float32_matmul_precision("high")
    makes = [make for make in (transformer, perceptron) if options.only in (None, make.__name__)]
    found: dict[str, dict[str, Way]] = {}
    if not options.json:
        heads = f"{'kernels':>8}{'peak KiB':>13}{'planned KiB':>13}{'ran KiB':>13}{'ms a step':>11}  numbers"
        print(f"{'':12}{'':22}{heads}", flush=True)
    for make in makes:
        ways = found[make.__name__] = made(make, torch, options.ways)
        with alone(options.lock):
            for _ in range(TURNS):
                for way in ways.values():
                    way.turn()
            if options.json:
                continue
            print_rows(make.__name__, ways)
            for label, way in ways.items() if options.kernels and torch is not None else ():
                print_kernels(torch, f"{make.__name__}, {label}", way)
    if options.json:
        print(json.dumps({name: {way: of.row for way, of in ways.items()} for name, ways in found.items()}))


if __name__ == "__main__":
    main()
