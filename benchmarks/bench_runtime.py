"""Compares the runtime with PyTorch, CuPy and cuda.core, in one run.

    python benchmarks/bench_runtime.py [--json] [SECTION ...]

Sections are the functions marked with @section; by default all of them run. A peer that is not installed, or cannot use
this machine, is reported as skipped. On the software device sizes are small, and the only peer is cuda.core: both times
are those of software, and only their ratio has a meaning.

A line is one measurement: ours, each peer's, and ours as a share of the peer's (below 1 is faster for times, above 1
for rates). Everything is measured several times in turns; the best of each counts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch_steps

import cudatool as ct

ROUNDS = 5  # turns for each measurement
SECONDS = 0.08  # approximate seconds of one turn


@dataclass
class Line:
    """One measurement."""

    section: str
    what: str
    unit: str
    ours: float
    peers: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        parts = [f"{self.what:<42} {self.ours:10.4g} {self.unit:<8}"]
        parts += [f"{name} {value:.4g} (x{self.ours / value:.2f})" for name, value in self.peers.items() if value]
        return "  ".join(parts)


class Skipped(Exception):
    """A section, or a peer, that cannot be measured here; the message says why."""


Section = Callable[[], Iterator[Line]]
SECTIONS: dict[str, Section] = {}


def section(function: Section) -> Section:
    """Add a section under the function's name."""
    SECTIONS[function.__name__] = function
    return function


# Measuring.


def simulated() -> bool:
    from cudatool import _driver

    return _driver.initialize().kind == "sim"


def peer(name: str) -> Any:
    """Return the module of a peer that can use this machine's GPU, None if there is none."""
    if name in ("torch", "cupy") and simulated():
        return None
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if name == "torch" and not module.cuda.is_available():
        return None
    return module


def library(name: str) -> Any:
    """Return a part of cudatool, or leave the section out."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"{name} is not there ({error})") from None


def per_call(calls: dict[str, Callable[[], object]], *, limit: int = 10_000) -> dict[str, float]:
    """Return the host's time for each call, in us. The enqueued work finishes between turns and does not count."""
    found = dict.fromkeys(calls, math.inf)
    number = {name: _number(call, limit) for name, call in calls.items()}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            ct.synchronize()
            start = time.perf_counter()
            for _ in range(number[name]):
                call()
            found[name] = min(found[name], (time.perf_counter() - start) / number[name] * 1e6)
    ct.synchronize()
    return found


def per_run(calls: dict[str, Callable[[], object]], *, limit: int = 1000) -> dict[str, float]:
    """Return the time of each call with its enqueued work, one after the other without a pause, in us."""
    found = dict.fromkeys(calls, math.inf)
    number = {name: _number(call, limit, wait=True) for name, call in calls.items()}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            ct.synchronize()
            start = time.perf_counter()
            for _ in range(number[name]):
                call()
            ct.synchronize()
            found[name] = min(found[name], (time.perf_counter() - start) / number[name] * 1e6)
    return found


def _number(call: Callable[[], object], limit: int, *, wait: bool = False) -> int:
    """Return how many calls fill a turn; the first ones, which compile and allocate, do not count."""
    for _ in range(3):
        call()
    ct.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        call()
    if wait:
        ct.synchronize()
    return max(3, min(limit, int(SECONDS / ((time.perf_counter() - start) / 3))))


def line(
    what: str, unit: str, found: dict[str, float], convert: Callable[[float], float] = lambda value: value
) -> Line:
    values = {name: convert(value) for name, value in found.items()}
    return Line("", what, unit, values.pop("cudatool"), values)


# Sections.

_NOTHING = 'extern "C" __global__ void nothing(float *a, float *b, int n) {}'


@section
def launch() -> Iterator[Line]:
    """The host's time for one launch of a kernel that does nothing."""
    from cuda import core

    kernel, config = ct.compile(_NOTHING, "nothing"), ct.LaunchConfig(grid=1, block=32)
    array, stream = ct.empty(1000), ct.Stream()
    native, address, number = stream.core, array.data_ptr(), np.int32(1000)
    calls: dict[str, Callable[[], object]] = {
        "cudatool": lambda: ct.launch(stream, config, kernel, array, array, 1000),
        "cuda.core": lambda: core.launch(native, config, kernel.core, address, address, number),
    }
    cupy, torch = peer("cupy"), peer("torch")
    if cupy is not None:
        theirs, values = cupy.RawKernel(_NOTHING, "nothing"), cupy.empty(1000, np.float32)
        calls["cupy"] = lambda: theirs((1,), (32,), (values, values, number))
    if torch is not None:
        tensor = torch.empty(1000, device="cuda")
        calls["torch (add_)"] = lambda: tensor.add_(1)
    yield line("kernel, three arguments, stream given", "us", per_call(calls))
    kept = kernel[1, 32]
    calls = {"cudatool": lambda: kept(array, array, 1000)}
    yield line("kernel[grid, block] kept, current stream", "us", per_call(calls))
    yield line("kernel[grid, block](...)", "us", per_call({"cudatool": lambda: kernel[1, 32](array, array, 1000)}))


@section
def events() -> Iterator[Line]:
    """The host's time to record an event and let another stream wait for it."""
    first, second, event = ct.Stream(), ct.Stream(), ct.Event()

    def ours() -> None:
        event.record(first)
        second.wait_event(event)

    core_first, core_second = first.core, second.core
    core_event = core_first.record()

    def cuda_core() -> None:
        core_first.record(core_event)
        core_second.wait(core_event)

    calls: dict[str, Callable[[], object]] = {"cudatool": ours, "cuda.core": cuda_core}
    torch, cupy = peer("torch"), peer("cupy")
    if torch is not None:
        one, other, mark = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()

        def theirs() -> None:
            mark.record(one)
            other.wait_event(mark)

        calls["torch"] = theirs
    if cupy is not None:
        cupy_one, cupy_other, cupy_mark = cupy.cuda.Stream(), cupy.cuda.Stream(), cupy.cuda.Event()

        def cupys() -> None:
            cupy_mark.record(cupy_one)
            cupy_other.wait_event(cupy_mark)

        calls["cupy"] = cupys
    yield line("record and wait", "us", per_call(calls))
    yield line(
        "current_stream()", "us", per_call(_named({"cudatool": ct.current_stream}, torch, "cuda.current_stream"))
    )


def _named(calls: dict[str, Callable[[], object]], torch: Any, path: str) -> dict[str, Callable[[], object]]:
    if torch is not None:
        found = torch
        for part in path.split("."):
            found = getattr(found, part)
        calls["torch"] = found
    return calls


@section
def empty() -> Iterator[Line]:
    """The host's time to make an array from cached memory, and to drop it."""
    torch, cupy = peer("torch"), peer("cupy")
    for size in (1000, 1 << 22):
        calls: dict[str, Callable[[], object]] = {"cudatool": partial(ct.empty, size)}
        if torch is not None:
            calls["torch"] = partial(torch.empty, size, device="cuda")
        if cupy is not None:
            calls["cupy"] = partial(cupy.empty, size, np.float32)
        yield line(f"empty of {size} float32, dropped", "us", per_call(calls))


@section
def matmul() -> Iterator[Line]:
    """Rates of square products."""
    blas, switches = library("cudatool.blas"), library("cudatool.backends.cuda")
    torch, cupy = peer("torch"), peer("cupy")
    sizes = (64, 128) if simulated() else (512, 2048, 4096, 8192)
    rng = np.random.default_rng(0)
    for precision in ("float32", "tf32", "bfloat16"):
        dtype = ml_dtypes.bfloat16 if precision == "bfloat16" else np.float32
        switches.matmul.allow_tf32 = precision == "tf32"
        if torch is not None:
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        for size in sizes:
            host = [rng.standard_normal((size, size), np.float32) for _ in range(2)]
            a, b = (ct.asarray(part.astype(dtype)) for part in host)
            out = ct.empty((size, size), dtype)
            calls: dict[str, Callable[[], object]] = {"cudatool": partial(blas.mm, a, b, out=out)}
            if torch is not None:
                kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
                x, y = (torch.from_numpy(part).cuda().to(kind) for part in host)
                z = torch.empty_like(x)
                calls["torch"] = partial(torch.mm, x, y, out=z)
            if cupy is not None and precision == "float32":
                p, q = map(cupy.asarray, host)
                r = cupy.empty_like(p)
                calls["cupy"] = partial(cupy.matmul, p, q, out=r)
            work = 2 * size**3
            yield line(f"mm {precision} {size}", "TFLOP/s", per_run(calls), lambda us, work=work: work / us / 1e6)
    switches.matmul.allow_tf32 = False


@section
def elementwise() -> Iterator[Line]:
    """Bandwidth of ``out = a + b``, and of ``out = exp(a)``, beside that of a copy in device memory."""
    ops = library("cudatool.ops")
    if not hasattr(ops, "add"):
        raise Skipped("cudatool.ops has no add yet")
    torch, cupy = peer("torch"), peer("cupy")
    size = 1 << 16 if simulated() else 1 << 27
    a, b, out = ct.ones(size), ct.ones(size), ct.empty(size)
    copied = per_run({"cudatool": lambda: out.copy_(a)})["cudatool"]
    yield Line("", "copy", "GB/s", 2 * a.nbytes / copied / 1e3)
    for name, arrays in (("add", (a, b)), ("exp", (a,))):
        function, moved = getattr(ops, name), (len(arrays) + 1) * a.nbytes
        calls: dict[str, Callable[[], object]] = {"cudatool": partial(function, *arrays, out=out)}
        if torch is not None:
            tensors = [torch.ones(size, device="cuda") for _ in range(len(arrays) + 1)]
            calls["torch"] = partial(getattr(torch, name), *tensors[1:], out=tensors[0])
        if cupy is not None:
            values = [cupy.ones(size, np.float32) for _ in range(len(arrays) + 1)]
            calls["cupy"] = partial(getattr(cupy, name), *values[1:], out=values[0])
        found = line(name, "GB/s", per_run(calls), lambda us, moved=moved: moved / us / 1e3)
        found.peers["copy"] = 2 * a.nbytes / copied / 1e3
        yield found


@section
def small() -> Iterator[Line]:
    """The host's time for operations on arrays so small that only it matters."""
    ops, blas = library("cudatool.ops"), library("cudatool.blas")
    torch, cupy = peer("torch"), peer("cupy")
    a, b, out = (ct.ones((32, 32)) for _ in range(3))
    cases: dict[str, tuple[Callable[..., object], str]] = {
        "add, to a given array": (partial(ops.add, a, b, out=out), "add"),
        "mm, to a given array": (partial(blas.mm, a, b, out=out), "matmul"),
    }
    for what, (ours, name) in cases.items():
        calls: dict[str, Callable[[], object]] = {"cudatool": ours}
        if torch is not None:
            x, y, z = (torch.ones((32, 32), device="cuda") for _ in range(3))
            calls["torch"] = partial(getattr(torch, name), x, y, out=z)
        if cupy is not None:
            p, q, r = (cupy.ones((32, 32), np.float32) for _ in range(3))
            calls["cupy"] = partial(getattr(cupy, name), p, q, out=r)
        yield line(what, "us", per_call(calls, limit=500))
    calls = {"cudatool": lambda: a + b}
    if torch is not None:
        calls["torch"] = lambda: x + y
    if cupy is not None:
        calls["cupy"] = lambda: p + q
    yield line("a + b", "us", per_call(calls, limit=500))


@section
def adam() -> Iterator[Line]:
    """One step of fused Adam over many arrays of many sizes."""
    optim = library("cudatool.optim")
    torch = peer("torch")
    count, largest = (20, 2000) if simulated() else (200, 1_000_000)
    rng = np.random.default_rng(1)
    sizes = [int(size) for size in np.exp(rng.uniform(math.log(100), math.log(largest), count))]
    params, grads = [ct.ones(size) for size in sizes], [ct.full(size, 1e-3) for size in sizes]
    ours = optim.Adam(params)
    calls: dict[str, Callable[[], object]] = {"cudatool": lambda: ours.step(grads)}
    if torch is not None:
        tensors = [torch.ones(size, device="cuda") for size in sizes]
        for tensor in tensors:
            tensor.grad = torch.full_like(tensor, 1e-3)
        theirs = torch.optim.Adam(tensors, fused=True)
        calls["torch"] = theirs.step
    yield line(f"fused Adam, {count} arrays, {sum(sizes) / 1e6:.1f} M", "us", per_run(calls))


@section
def graphs() -> Iterator[Line]:
    """Replay of a graph of small kernels, and the same kernels one by one."""
    library("cudatool.graphs")
    torch = peer("torch")
    count = 20 if simulated() else 200
    kernel, config, array = ct.compile(_NOTHING, "nothing"), ct.LaunchConfig(grid=1, block=32), ct.empty(1000)
    stream = ct.Stream()

    def some() -> None:
        for _ in range(count):
            ct.launch(stream, config, kernel, array, array, 1000)

    graph = ct.CUDAGraph()
    with ct.graph(graph, stream=stream):
        some()
    calls: dict[str, Callable[[], object]] = {"cudatool": graph.replay}
    if torch is not None:
        tensor, theirs = torch.zeros(1000, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(theirs):
            for _ in range(count):
                tensor.add_(1)
        calls["torch (add_)"] = theirs.replay
    yield line(f"replay of {count} kernels", "us", per_run(calls))
    yield line("replay, the host's time alone", "us", per_call(calls, limit=200))
    yield line(f"{count} launches", "us", per_run({"cudatool": some}))


@section
def transformer() -> Iterator[Line]:
    """A step of the transformer of samples/: forward, backward, clipping and AdamW in bfloat16, eager and replayed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "samples"))
    sample = importlib.import_module("transformer")
    if not simulated():
        sample.WIDTH, sample.HEADS, sample.LAYERS, sample.CONTEXT, sample.BATCH = 512, 8, 4, 256, 16
    side, graph, training = ct.Stream(), ct.CUDAGraph(), sample.Training()
    training.load(np.random.default_rng(0))
    ct.synchronize()
    with ct.stream(side):
        for _ in range(3):
            training.step()
        with ct.graph(graph, stream=side):
            training.step()

    def eager() -> None:
        with ct.stream(side):
            training.step()

    def replay() -> None:
        with ct.stream(side):
            graph.replay()

    eager_calls, replays = {"cudatool": eager}, {"cudatool": replay}
    if torch := peer("torch"):
        step = torch_steps.transformer(torch, sample)
        eager_calls["torch"], replays["torch"] = step, torch_steps.replay(torch, step)
    yield line("a step, eager", "us", per_run(eager_calls))
    yield line("a step, replayed", "us", per_run(replays))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"there is no section {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    lines: list[Line] = []
    missing = [name for name in ("torch", "cupy") if peer(name) is None]
    print(f"device: {ct.get_device_name()}; not here: {', '.join(missing) or 'nothing'}", file=sys.stderr)
    for name in arguments.sections or SECTIONS:
        try:
            if not arguments.json:
                print(f"\n{name}: {(SECTIONS[name].__doc__ or '').strip()}")
            for found in SECTIONS[name]():
                found.section = name
                lines.append(found)
                if not arguments.json:
                    print(f"  {found.text()}", flush=True)
        except Skipped as reason:
            print(f"  {name} is left out: {reason}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"schema": "cudatool.bench_runtime/1", "lines": [asdict(one) for one in lines]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
