"""Thirty kernels on the software device, on PoCL and as C with OpenMP, in one run.

    python benchmarks/bench_processors.py [--samples] [--rounds N] [--json] [KERNEL ...]

Needs gcc; PoCL is left out where it or pyopencl is not installed (``apt-get install pocl-opencl-icd``, ``pip install
pyopencl``). Each kernel of processor_kernels.py is compiled by each of the three and run, and the results are compared;
then the three take turns. A figure is the least processor time of a turn, of all threads, in ms: what else runs on the
machine changes it little. `first` is the software device's first launch, with compilation unless it is in the cache, as
wall time. Before the turns the software device's code runs for a second: it is optimized once it has run for about as
long as that takes. The ratio is that to the faster of the other two. With --samples it is the ten kernels of
sample_kernels.py.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import processor_kernels
import sample_kernels
from processor_kernels import CUDA, OPENCL, OPENMP, Array, Case

THREADS = os.cpu_count() or 1
WARM_UP = 1.0  # seconds of processor time
os.environ.setdefault("CUDATOOL_DEVICE", f"sim:threads={THREADS},memory=2GiB")
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting is no work

import cudatool as ct  # noqa: E402

Launch = Callable[[tuple[Any, ...]], None]
Peer = tuple[list[Any], Launch, Callable[[], None], Callable[[int], Array]]
"""Its arrays; a launch; waiting for all launches; an array as the host sees it."""


def on_the_software_device(case: Case) -> Peer:
    arrays = [ct.asarray(each) for each in case.arrays]
    kernel = ct.compile(case.source(CUDA), case.name)[case.grid, case.block]
    return (
        arrays,
        lambda numbers: kernel(*arrays, *map(_word, numbers)),
        ct.synchronize,
        lambda i: arrays[i].get(),
    )


def on_pocl(queue: Any, case: Case) -> Peer:
    import pyopencl as cl

    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
    arrays = [cl.Buffer(queue.context, flags, hostbuf=each) for each in case.arrays]
    kernel = cl.Kernel(cl.Program(queue.context, case.source(OPENCL)).build(), case.name)
    size = tuple(g * b for g, b in zip(case.grid, case.block, strict=True))

    def launch(numbers: tuple[Any, ...]) -> None:
        kernel(queue, size, case.block, *arrays, *map(_word, numbers))

    def back(i: int) -> Array:
        out = np.empty_like(case.arrays[i])
        cl.enqueue_copy(queue, out, arrays[i])
        return out

    return arrays, launch, queue.finish, back


def with_openmp(library: ctypes.CDLL, case: Case) -> Peer:
    arrays = [each.copy() for each in case.arrays]
    function = getattr(library, case.name)
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in arrays]
    return (
        arrays,
        lambda numbers: function(*pointers, *(ctypes.c_float(n) if isinstance(n, float) else n for n in numbers)),
        lambda: None,
        lambda i: arrays[i],
    )


def _word(number: float) -> Any:
    return np.float32(number) if isinstance(number, float) else np.int32(number)


def compiled_by_gcc(every: list[Case], folder: str, *, native: bool) -> ctypes.CDLL:
    source = Path(folder, "kernels.c")
    source.write_text(OPENMP + "\n".join(case.c_source() for case in every))
    library = source.with_suffix(".so")
    flags = ["-O3", *(["-march=native"] if native else []), "-fopenmp", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, "-o", library, source, "-lm"], check=True)
    return ctypes.CDLL(str(library))


def pocl_queue() -> Any:
    """Return a queue of PoCL, None where there is no such device."""
    try:
        import pyopencl as cl

        (device,) = (d for p in cl.get_platforms() if "Portable" in p.name for d in p.get_devices())
    except (ImportError, ValueError):
        return None
    return cl.CommandQueue(cl.Context([device]))


def turn(case: Case, peer: Peer) -> float:
    """Return the processor time of all steps, in ms."""
    _, launch, finish, _ = peer
    start = time.process_time()
    for numbers in case.steps:
        launch(numbers)
    finish()
    return (time.process_time() - start) * 1e3


def measure(case: Case, library: ctypes.CDLL, queue: Any, rounds: int) -> dict[str, float]:
    """Return the times by the names of the columns, after the results were compared."""
    start = time.perf_counter()
    peers = {"ours": on_the_software_device(case)}
    turn(case, peers["ours"])
    times = {"first": (time.perf_counter() - start) * 1e3}
    peers["openmp"] = with_openmp(library, case)
    if queue is not None:
        peers["pocl"] = on_pocl(queue, case)
    for name, peer in peers.items():
        if name != "ours":
            turn(case, peer)
    for i in case.results:
        expected = peers["openmp"][3](i)
        for name, peer in peers.items():
            found = peer[3](i)
            near = np.isclose(found, expected, rtol=case.tolerance, atol=case.tolerance)
            assert near.mean() > 0.999, f"{case.name}: wrong results by {name}"  # a pixel may round the other way
    end = time.process_time() + WARM_UP
    while time.process_time() < end:
        turn(case, peers["ours"])
    for _ in range(rounds):
        for name, peer in peers.items():
            times[name] = min(times.get(name, math.inf), turn(case, peer))
    times["ratio"] = times["ours"] / min(times["openmp"], times.get("pocl", math.inf))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", action="store_true", help="run kernels as NVIDIA's samples have them instead")
    parser.add_argument("--native", action="store_true", help="let gcc use all that this machine has (-march=native)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("kernels", nargs="*", metavar="KERNEL")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # pyopencl's, of caches and of compilers that say something
    suite = sample_kernels if arguments.samples else processor_kernels
    every = [case for case in suite.cases() if not arguments.kernels or case.name in arguments.kernels]
    queue = pocl_queue()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = compiled_by_gcc(every, folder, native=arguments.native)
        for case in every:
            rows[case.name] = measure(case, library, queue, arguments.rounds)
            if not arguments.json:
                if len(rows) == 1:
                    print(f"{'kernel':<16}" + "".join(f"{column:>10}" for column in rows[case.name]))
                print(f"{case.name:<16}" + "".join(f"{time:10.2f}" for time in rows[case.name].values()), flush=True)
    if arguments.json:
        print(json.dumps(rows))
        return
    ratios = [row["ratio"] for row in rows.values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(
        f"{len(rows)} kernels on {THREADS} threads: geometric mean {mean:.2f}, "
        f"worst {max(ratios):.2f}, {sum(ratio > 1.5 for ratio in ratios)} above 1.5"
    )


if __name__ == "__main__":
    main()
