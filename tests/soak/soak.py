"""Long runs that a test suite has no time for, with figures.

    python tests/soak/soak.py threads --minutes 10     # threads that allocate, launch, copy and free
    python tests/soak/soak.py kills --number 100       # recordings that are killed at random moments

Exit status 1 if memory or descriptors grew, a trace could not be read, or an operation that had been acknowledged is
not in its trace. `threads` needs no GPU, but runs on one, too; `kills` uses the software device.

Measured on the software device, 2 busy cores: 16 threads in 10 minutes made 458,247 rounds, resident memory 406.1 MiB,
later 406.4 MiB, descriptors 6 and 6. 110 kills: 110 traces open, 175,862 operations acknowledged, 0 of them lost.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

MIB = 1 << 20
_KERNEL = """
extern "C" __global__ void add(float *values, float number, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] += number;
}
"""
# Says after each operation how many there were: what it has said must be in the trace.
_KILLED = """
import os, threading
from cuda.core import Device

def work(number):
    device = Device()
    device.set_current()
    stream = device.create_stream()
    buffer = device.memory_resource.allocate(4096, stream=stream)
    for i in range(10**9):
        buffer.fill(b"x", stream=stream)
        os.write(1, b"%d %d\\n" % (number, i + 1))

Device().set_current()
threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
for thread in threads:
    thread.start()
"""


# ---- threads ----


def threads(minutes: float, number: int) -> bool:
    """Let threads work, and return whether memory and descriptors stayed what they were."""
    import cudatool

    kernel = cudatool.compile(_KERNEL, "add")
    until = time.monotonic() + 60 * minutes
    rounds, errors = [0] * number, []

    def work(index: int) -> None:
        chance, stream = random.Random(index), cudatool.Stream()
        with cudatool.stream(stream):
            while time.monotonic() < until and not errors:
                size = chance.choice((1, 100, 5_000, 100_000, 1_000_000))
                array = cudatool.zeros(size, np.float32)
                kernel[(size + 255) // 256, 256](array, float(index), size)
                last = array[-1:].get()[0]
                if last != index:
                    errors.append(f"thread {index} reads {last}")
                rounds[index] += 1

    started = [threading.Thread(target=work, args=(index,)) for index in range(number)]
    for thread in started:
        thread.start()
    samples: list[tuple[int, int]] = []
    while any(thread.is_alive() for thread in started):
        time.sleep(min(2.0, 60 * minutes / 60))
        samples.append((_resident(), len(os.listdir("/proc/self/fd"))))
    for thread in started:
        thread.join()
    samples = samples[len(samples) // 4 :]  # what the first quarter took is warming up
    third = max(len(samples) // 3, 1)
    before, after = samples[:third], samples[-third:]
    resident = [statistics.median(size for size, _ in part) for part in (before, after)]
    files = [max(count for _, count in part) for part in (before, after)]
    print(f"{number} threads, {minutes:g} min: {sum(rounds):,} rounds of allocate, launch, copy and free")
    print(f"resident memory {resident[0] / MIB:,.1f} MiB, later {resident[1] / MIB:,.1f} MiB")
    print(f"open descriptors {files[0]}, later {files[1]}")
    for error in errors:
        print(error)
    grew = resident[1] - resident[0] > max(8 * MIB, 0.03 * resident[0]) or files[1] > files[0]
    return not grew and not errors and min(rounds) > 0


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- kills ----


def kills(number: int, seed: int) -> bool:
    """Kill recordings, and return whether every trace opens and has all that was acknowledged."""
    from cudatool.trace.events import Kind
    from cudatool.trace.reader import read

    chance = random.Random(seed)
    opened = acknowledged = recorded = lost = 0
    with tempfile.TemporaryDirectory(prefix="cudatool-soak-") as name:
        folder = Path(name)
        (folder / "endless.py").write_text(_KILLED)
        for attempt in range(number):
            trace = folder / f"{attempt}.ctrace"
            command = [sys.executable, "-m", "cudatool", "run", "--device", "sim", "-o", str(trace), "endless.py"]
            with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                assert process.stdout is not None
                said = [process.stdout.readline()]
                if not said[0]:
                    sys.exit(f"recording {attempt} ended before its first operation, with status {process.wait()}")
                reader = threading.Thread(target=lambda p=process, s=said: s.extend(p.stdout.readlines()))
                reader.start()
                time.sleep(chance.random() * 0.5)
                process.kill()
                reader.join()
            last: dict[bytes, int] = {}
            for line in said:
                if line.endswith(b"\n"):
                    thread, count = line.split()
                    last[thread] = int(count)
            found = len(read(trace).of_kind(Kind.MEMSET))
            opened += 1
            acknowledged += sum(last.values())
            recorded += found
            lost += max(sum(last.values()) - found, 0)
            trace.unlink()
    print(f"{number} kills: {opened} traces open; {acknowledged:,} operations acknowledged, {recorded:,} recorded")
    print(f"lost: {lost}")
    return opened == number and lost == 0 and acknowledged > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    soak = commands.add_parser("threads")
    soak.add_argument("--minutes", type=float, default=10)
    soak.add_argument("--threads", type=int, default=16)
    killing = commands.add_parser("kills")
    killing.add_argument("--number", type=int, default=100)
    killing.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    kept = threads(given.minutes, given.threads) if given.command == "threads" else kills(given.number, given.seed)
    sys.exit(not kept)


if __name__ == "__main__":
    main()
