"""What it costs to watch a recording: processor time of ``cudatool live`` while its trace grows.

::

    python benchmarks/bench_live.py [--rate 100000] [--seconds 20]

A process writes a trace at that rate: blocks of 2,000 call sites, a third of which live for longer, launches of 200
kernels in 7 streams, and when they ran. It is watched as text and as a view of 80 x 24 characters. The time that the
watching process takes to start is left out.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import numpy as np

from cudatool.trace.events import RECORD, Kind
from cudatool.trace.file import Table
from cudatool.trace.model import Frame
from cudatool.trace.recorder import Recorder

_KINDS = (
    *(Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED, Kind.KERNEL_LAUNCH, Kind.EXECUTION),
)
_PIECES_S = 0.02
_SITES, _KERNELS, _STREAMS = 2000, 200, 7
_STARTED_S = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.rate)
        return
    print(f"{options.rate:,} events/s, {options.seconds} s, {os.cpu_count()} cores")
    for what, words in (("text every second", ["--plain", "--every", "1"]), ("view", [])):
        with tempfile.TemporaryDirectory() as folder:  # a new trace: there is nothing to catch up with
            trace = os.path.join(folder, "t.ctrace")
            command = [sys.executable, __file__, "--rate", str(options.rate), "--write", trace]
            with subprocess.Popen(command) as writer:
                try:
                    while not os.path.exists(trace):
                        time.sleep(0.1)
                    share, size = watched(trace, words, options.seconds)
                finally:
                    writer.kill()
        rate = size / RECORD.itemsize
        print(f"{what:<18} {share:6.1%} of a core, {share / rate * 1e6:.2f} us/event at {rate:,.0f} events/s")


def write(path: str, rate: int) -> None:
    """Write a trace at a rate until the process is killed."""
    random = np.random.default_rng(1)
    names = ["", *(f"kernel_{n}<float>" for n in range(_KERNELS))]
    with Recorder(path, header={"device": "a benchmark"}) as recorder:
        for number in range(_SITES):
            own = Frame("/home/me/train.py", f"layer_{number}", number + 1)
            recorder._stacks[number + 1] = number + 1
            indices = [recorder._add_frame(own), *(recorder._frames.get(f) or recorder._add_frame(f) for f in _outer())]
            recorder._add_entry(Table.STACKS, number + 1, struct.pack(f"<{len(indices)}I", *indices))
        begin, written = time.monotonic(), 0
        while True:
            count = int((time.monotonic() - begin) * rate) - written
            if count:
                recorder.write_rows(_rows(random, count, written), names)
                written += count
            time.sleep(_PIECES_S)


def _outer() -> list[Frame]:
    return [Frame("/home/me/train.py", f"caller_{n}", n + 1) for n in range(20)]


def _rows(random: np.random.Generator, count: int, first: int) -> np.ndarray:
    rows = np.zeros(count, RECORD)
    number = np.arange(first, first + count)
    rows["time"] = time.monotonic_ns()
    rows["kind"] = np.array(_KINDS, np.uint8)[number % len(_KINDS)]
    rows["address"] = (1 << 30) + number // len(_KINDS) % 3000 * 512
    long = random.random(count) < 0.33
    rows["address"][long] = (1 << 33) + random.integers(0, 50_000, int(long.sum())) * 512
    rows["size"] = 512
    rows["stack"] = random.integers(1, _SITES + 1, count)
    rows["name"] = random.integers(1, _KERNELS + 1, count)
    rows["stream"] = random.integers(1, _STREAMS + 1, count)
    rows["aux0"], rows["aux1"] = number * 100, number * 100 + 90
    return rows


def watched(trace: str, words: list[str], seconds: int) -> tuple[float, float]:
    """Return the share of a core that watching takes, and by how many bytes a second the trace grew."""
    command = [sys.executable, "-m", "cudatool", "live", *words, trace]
    pid, terminal = pty.fork()
    if not pid:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.execvpe(command[0], command, os.environ | {"TERM": "xterm-256color"})
    output = threading.Thread(target=_swallow, args=(terminal,), daemon=True)
    output.start()
    time.sleep(_STARTED_S)
    before, size, begin = _cpu_s(pid), os.stat(trace).st_size, time.monotonic()
    time.sleep(seconds)
    took, spent = time.monotonic() - begin, _cpu_s(pid) - before
    grown = os.stat(trace).st_size - size
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    output.join()
    os.close(terminal)
    if not spent:
        raise SystemExit("it did nothing; is textual installed?")
    return spent / took, grown / took


def _swallow(descriptor: int) -> None:
    while True:
        try:
            os.read(descriptor, 1 << 16)
        except OSError:
            return


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
