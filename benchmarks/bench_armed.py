"""What being armed, or recorded, costs steps of a PyTorch program on a GPU, by switching it every few steps.

    python benchmarks/bench_armed.py [torch torch_gpt2] [--seconds 25]

Loops of half a second differ by 10 % on a shared machine, whatever runs in them. So here each pair of neighbouring
groups of four steps has the thing on in one of them, in an order of chance, and a line has the median of the ratios
within pairs, with the interval in which it lies with a probability of 95 %:

nothing
    Nothing is switched: what the other lines are worth.
history
    PyTorch's history of its allocator, as `cudatool.arm()` turns it on.
blocks
    The recording of PyTorch's blocks, within a recording with ``--level memory``; its reader runs all the time.

Then the program runs armed, and a line says for which part of the time the history was on: being armed costs that part
of what the history costs, and the look of a thread five times a second.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

from bench_record import PROGRAMS, median_interval

import cudatool

_GROUP = 4  # steps


def alternate(
    name: str, step: Callable[[], None], wait: Callable[[], None], turn: Callable[[bool], None], seconds: float
) -> None:
    """Print the median ratio of the time with and without."""
    ratios = []
    gc.collect()
    gc.freeze()  # a collection takes as long as several steps
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        took = {}
        for on in random.sample((True, False), 2):
            turn(on)
            step()
            wait()
            begin = time.perf_counter()
            for _ in range(_GROUP):
                step()
            wait()
            took[on] = time.perf_counter() - begin
        ratios.append(took[True] / took[False])
    turn(False)
    gc.unfreeze()
    low, high = median_interval(ratios)
    print(f"    {name:8} {statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}), {len(ratios)} pairs", flush=True)


def measure(name: str, step: Callable[[], None], wait: Callable[[], None], seconds: float) -> None:
    """Print the lines of one program."""
    import torch

    def allocations() -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    for _ in range(30):
        step()
    wait()
    before, begin = allocations(), time.perf_counter()
    for _ in range(30):
        step()
    wait()
    took = (time.perf_counter() - begin) / 30
    print(f"{name}: {took * 1e3:.2f} ms and {(allocations() - before) / 30:.0f} allocations a step", flush=True)
    alternate("nothing", step, wait, lambda on: None, seconds)
    record = torch.cuda.memory._record_memory_history
    history = {"max_entries": 100_000, "stacks": "python", "context": "alloc", "global_record_annotations": True}
    alternate("history", step, wait, lambda on: record(**history) if on else record(enabled=None), seconds)
    with cudatool.record("armed.ctrace", level="memory", force=True):
        for _ in range(30):
            step()
        wait()
        from cudatool.collect import _cupti
        from cudatool.recording import gpu

        assert gpu._blocks is not None
        extension = gpu._blocks._extension
        alternate("blocks", step, wait, lambda on: extension.start(_cupti.log) if on else extension.stop(), seconds)
    with cudatool.arm(on_signal=False) as armed:
        assert armed._report is not None
        history_of_armed = armed._report._torch._history
        begin, on = time.perf_counter(), [0.0]
        for after in (seconds, 3 * seconds):
            while time.perf_counter() < begin + after:
                step()
            wait()
            on.append(history_of_armed.kept * (time.perf_counter() - begin))
    share = (on[2] - on[1]) / (2 * seconds)
    print(
        f"    armed: the history was on for {on[1]:.1f} of {seconds:.0f} s, then for {share:.3f} of the time",
        flush=True,
    )
    os.unlink("armed.ctrace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=["torch", "torch_gpt2"], choices=[*PROGRAMS])
    parser.add_argument("--seconds", type=float, default=25)
    options = parser.parse_args()
    os.environ["CUDATOOL_DEVICE"] = "cuda"
    for name in options.programs:
        with contextlib.suppress(ImportError):
            exec(
                PROGRAMS[name],
                {"timed": lambda step, wait, count, name=name: measure(name, step, wait, options.seconds)},
            )


if __name__ == "__main__":
    sys.exit(main())
