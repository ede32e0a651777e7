"""What the thread that reads a recording's log on a GPU costs the program's own threads. It needs no GPU.

    python benchmarks/bench_reader.py [--rounds 8]

Python code and a C function without the interpreter's lock take turns, as in a program of PyTorch's operators: 400 in
a step. Each operator notes a block of PyTorch's allocator, and its release, in the real log, and with ``kernels`` a
kernel that ran: more than a small encoder does in the same time. In one round the log is read ten times a second and
dropped, the least that any reader costs (twice, to show what the figures are worth); in another it is read as a
recording does, which writes a trace. These take turns in an order of chance. A line has the median of the ratios to the
first, with the interval in which it lies at 95 %. What is above 1 is for the most part time in which the reader has the
interpreter's lock, and the program waits.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from zlib import crc32

from bench_record import median_interval

from cudatool.collect import _cupti, cupti
from cudatool.collect.cupti_rows import What
from cudatool.collect.levels import Level
from cudatool.trace import Recorder, hooks

WAYS = ("dropped", "again", "recorded")
STEPS = 100
_Words = ctypes.c_uint64 * 8


class _Collector(cupti.CuptiCollector):
    """Reads the log when it is told to; there is no CUPTI to be asked for anything."""

    def _watch_activity(self, inside_graphs: bool) -> bool:
        return True

    def _run(self) -> None:
        pass

    def read(self) -> None:
        self._read(None)


def _notes() -> tuple[Any, Any, int]:
    """Return what notes a row, and the release of a block, in the log, as functions of C; and the number of a stack."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(pointer(_cupti.log, b"cudatool.collect._cupti.log"), ctypes.POINTER(ctypes.c_void_p))
    note = ctypes.PYFUNCTYPE(None, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint32, _Words)(table[1])
    released = ctypes.PYFUNCTYPE(None, ctypes.c_uint32, _Words)(table[4])
    return note, released, ctypes.PYFUNCTYPE(ctypes.c_uint32)(table[0])()


def measure(level: Level, rounds: int, folder: str) -> None:
    """Print a line for each way but the first."""
    cupti._start = lambda calls: (_cupti.start_alone(1 << 20), (130001, {}))[1]
    way, is_over = "recorded", threading.Event()
    with Recorder(Path(folder, f"{level.name}.ctrace"), header={}):
        collector = _Collector(lambda: False, level, lambda: True)
        note, released, stack = _notes()
        data = bytes(1 << 15)  # whose checksum takes some microseconds, without the interpreter's lock
        addresses = range(0x7F0000000000, 0x7F0000000000 + 400 * 4096, 4096)
        blocks = [tuple(_Words(action, address, 4096) for action in range(3)) for address in addresses]
        kernel = _Words(0, 0, 7, 0, 0x100001, 0x10040)

        def step() -> None:
            for allocated, requested, completed in blocks:
                crc32(data)
                note(What.BLOCK, 0, stack, allocated)
                note(What.BLOCK, 0, 0, requested)
                released(0, completed)
                if level is not Level.MEMORY:
                    kernel[0] = kernel[1] = time.monotonic_ns()
                    note(What.KERNEL, 0, 0, kernel)

        def read() -> None:
            while not is_over.wait(0.1):
                if way == "recorded":
                    collector.read()
                else:
                    _cupti.drain()

        step()
        collector.read()  # the stack is known from here on
        reader = threading.Thread(target=read)
        reader.start()
        took: dict[str, list[float]] = {one: [] for one in WAYS}
        gc.collect()
        gc.freeze()
        for _ in range(rounds):
            for way in random.sample(WAYS, len(WAYS)):
                step()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    step()
                took[way].append((time.perf_counter() - begin) / STEPS)
        is_over.set()
        reader.join()
        hooks.unsubscribe(collector)
        _cupti.stop()
    print(f"--level {level.name.lower()}: a step takes {statistics.median(took['dropped']) * 1e3:.2f} ms")
    for one in WAYS[1:]:
        ratios = [a / b for a, b in zip(took[one], took["dropped"], strict=True)]
        low, high = median_interval(ratios)
        print(f"    {one:9} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        for level in (Level.MEMORY, Level.KERNELS):
            measure(level, rounds, folder)


if __name__ == "__main__":
    main()
