"""What the parts of a recording on a GPU cost steps of a program, by switching each every few steps.

    python benchmarks/bench_parts.py [cupy jax torch torch_gpt2] [--seconds 12] [--armed]

Loops of half a second differ by 10 % on a shared machine, whatever runs in them; neighboring groups of a few steps do
not. So a round has one group each way, in an order of chance, and a line the median of the ratios to the group of the
same round without anything, with the interval in which it lies with a probability of 95 %:

again
    Nothing, once more: what the other lines are worth.
callbacks
    CUPTI's callbacks at the calls of the driver that `--level memory` notes.
activity
    These, and CUPTI's records of kernels, copies and fills, as with `--level kernels`.
launches
    The callbacks, those that find the code of kernels, and each launch with its arguments, as under `sanitize`. Not of
    PyTorch, whose launches `sanitize` leaves out.
blocks
    The callbacks, PyTorch's blocks with their stacks, and which forward operator each node of autograd is of. PyTorch
    makes its events of blocks in the other ways, too, since it cannot stop: `alloc` says what they take.
history
    PyTorch's history of its allocator, as `cudatool.arm()` turns it on.

The log is dropped, not written: what its reader costs the program, `bench_reader.py` measures.

`alloc` is the time of an allocation and its release before anything is watched; with PyTorch's events; and with ours.
With --armed the program then runs armed, and a line says for which part of the time the history was on: being armed
costs that part of what the history costs, and the look of a thread five times a second.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench_record import PROGRAMS, median_interval

import cudatool
from cudatool.collect import _cupti
from cudatool.collect.cupti import CALLS, CALLS_OF_CODE, CALLS_OF_MEMORY, _Noted, _start

# CUPTI ends a process that launches a graph which was instantiated before it reports kernels.
_SWITCHED = [name for name in PROGRAMS if not name.endswith("_graph")]
_GROUP = 0.03  # seconds; four steps at least
Way = Callable[[], None]


@contextmanager
def _dropped() -> Iterator[None]:
    """Read the log ten times a second, as a recording does."""
    over = threading.Event()

    def drop() -> None:
        while not over.wait(0.1):
            _cupti.flush()
            _cupti.drain()

    reader = threading.Thread(target=drop)
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def compare(step: Way, wait: Way, ways: dict[str, Way], seconds: float) -> None:
    """Print a line for each way but the first, which the others are compared with."""
    for _ in range(2):  # the first time compiles and loads
        begin = time.perf_counter()
        for _ in range(30):
            step()
        wait()
    group = max(4, int(30 * _GROUP / (time.perf_counter() - begin)))
    took: dict[str, list[float]] = {way: [] for way in ways}
    gc.collect()
    gc.freeze()  # a collection takes as long as several steps
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for way in random.sample(list(ways), len(ways)):
            ways[way]()
            step()
            wait()
            begin = time.perf_counter()
            for _ in range(group):
                step()
            wait()
            took[way].append(time.perf_counter() - begin)
    gc.unfreeze()
    plain, *others = took
    for way in others:
        ratios = [one / other for one, other in zip(took[way], took[plain], strict=True)]
        low, high = median_interval(ratios)
        print(
            f"    {way:10} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), {len(ratios)} rounds", flush=True
        )


def _callbacks() -> None:
    _cupti.stop()
    _start(CALLS_OF_MEMORY)


def _activity() -> None:
    _cupti.stop()
    _start(CALLS)
    _cupti.watch_activity(False)


def _launches() -> None:
    _cupti.stop()
    _start(CALLS | CALLS_OF_CODE)
    _cupti.watch_launches(_Noted.WITH_ARGUMENTS)


def _of_pytorch(step: Way, wait: Way, seconds: float) -> None:
    import torch

    from cudatool.collect.torch_build import load
    from cudatool.collect.torch_modules import TorchModules

    def alloc() -> float:
        best = 1.0
        for _ in range(9):
            begin = time.perf_counter()
            for _ in range(5000):
                torch.empty(1000, device="cuda")
            best = min(best, (time.perf_counter() - begin) / 5000)
        return best * 1e6

    blocks: Any = load(torch, "torch_blocks")
    taken = [alloc()]
    _start(CALLS_OF_MEMORY)
    modules = TorchModules(torch, lambda records, names: None, was_imported=True)
    blocks.watch_memory()
    taken.append(alloc())
    blocks.start(_cupti.log)
    taken.append(alloc())
    print("    alloc      {:.2f} us, with PyTorch's events {:.2f}, with ours {:.2f}".format(*taken), flush=True)
    record = torch.cuda.memory._record_memory_history
    history = {"max_entries": 100_000, "stacks": "python", "context": "alloc", "global_record_annotations": True}

    def plain() -> None:
        blocks.stop()
        record(enabled=None)

    def with_blocks() -> None:
        plain()
        blocks.start(_cupti.log)

    def with_history() -> None:
        plain()
        record(**history)

    ways = {"plain": plain, "again": plain, "blocks": with_blocks, "history": with_history}
    compare(step, wait, ways, seconds)
    plain()
    modules.stop()
    _cupti.stop()


def _armed(step: Way, wait: Way, seconds: float) -> None:
    with cudatool.arm(on_signal=False) as armed:
        assert armed._report is not None
        history = armed._report._torch._history
        begin, on = time.perf_counter(), [0.0]
        for after in (seconds, 3 * seconds):
            while time.perf_counter() < begin + after:
                step()
            wait()
            on.append(history.kept * (time.perf_counter() - begin))
    share = (on[2] - on[1]) / (2 * seconds)
    print(
        f"    armed: the history was on for {on[1]:.1f} of {seconds:.0f} s, then for {share:.3f} of the time",
        flush=True,
    )


def measure(name: str, step: Way, wait: Way, seconds: float, *, armed: bool) -> None:
    """Print the lines of one program."""
    print(name, flush=True)
    with _dropped():
        ways = {"plain": _cupti.stop, "again": _cupti.stop, "callbacks": _callbacks, "activity": _activity}
        of_pytorch = name.startswith("torch")
        compare(step, wait, ways if of_pytorch else ways | {"launches": _launches}, seconds)
        _cupti.stop()
        if of_pytorch:
            _of_pytorch(step, wait, seconds)
    if armed and name.startswith("torch"):
        _armed(step, wait, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=["cupy", "jax", "torch"], choices=_SWITCHED)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--armed", action="store_true")
    options = parser.parse_args()
    os.environ["CUDATOOL_DEVICE"] = "cuda"
    for name in options.programs:
        if importlib.util.find_spec(name.partition("_")[0]) is None:
            print(f"{name}: not installed")
            continue

        def timed(step: Way, wait: Way, count: int, name: str = name) -> None:
            measure(name, step, wait, options.seconds, armed=options.armed)

        exec(PROGRAMS[name], {"timed": timed})


if __name__ == "__main__":
    sys.exit(main())
