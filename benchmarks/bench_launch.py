"""What one call of the software driver costs through cuda.core and cuda.bindings, untraced and traced.

    python benchmarks/bench_launch.py [--json]

Processor time of the calling thread, the least of several turns, in microseconds; each includes what is executed when
the stream synchronizes at the end of a turn. An empty kernel of one thread shows the cost of a launch alone. The last
column is the ratio to a call of the driver that does nearly nothing, to compare figures of two machines.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("CUDATOOL_DEVICE", "sim")

import cudatool

cudatool.init()

from cuda.bindings import driver  # noqa: E402  it loads libcuda, which cudatool chooses first
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch  # noqa: E402

TURNS, CALLS = 9, 400


def measure(call: Callable[[], object], finish: Callable[[], object]) -> float:
    """Return the microseconds of a call, execution included."""
    call()
    finish()
    best = float("inf")
    for _ in range(TURNS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        finish()
        best = min(best, time.thread_time() - start)
    return best / CALLS * 1e6


def calls() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return what is measured, each with what waits for its work."""
    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    program = Program('extern "C" __global__ void k() {}', "c++", ProgramOptions(arch=f"sm_{device.arch}"))
    kernel, config = program.compile("ptx").get_kernel("k"), LaunchConfig(grid=1, block=1)
    event = stream.record()
    handle = driver.CUstream(int(stream.handle))
    to, source = (driver.cuMemAlloc(4096)[1] for _ in range(2))
    pinned = driver.cuMemAllocHost(4096)[1]
    found: dict[str, Callable[[], object]] = {
        "launch of an empty kernel": lambda: launch(stream, config, kernel),
        "event record": lambda: stream.record(event),
        "event query": lambda: event.is_done,
        "stream wait for an event": lambda: stream.wait(event),
        "stream synchronize": stream.sync,
        "1 KiB copy on the device": lambda: driver.cuMemcpyDtoDAsync(to, source, 1024, handle),
        "1 KiB copy to pinned memory": lambda: driver.cuMemcpyDtoHAsync(pinned, source, 1024, handle),
        "current context": driver.cuCtxGetCurrent,
    }
    return {what: (call, stream.sync) for what, call in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    what = calls()
    lines: dict[str, dict[str, float]] = {name: {} for name in what}
    with tempfile.TemporaryDirectory() as folder:
        for how, context in (("untraced", nullcontext()), ("traced", cudatool.record(Path(folder, "t.ctrace")))):
            with context:
                for name, (call, finish) in what.items():
                    lines[name][how] = measure(call, finish)
    if arguments.json:
        print(json.dumps(lines))
        return
    least = lines["current context"]["untraced"]
    for name, line in lines.items():
        untraced, traced = line["untraced"], line["traced"]
        print(f"{name:<28} {untraced:8.2f} us  traced {traced:8.2f} us   x{untraced / least:.1f}")


if __name__ == "__main__":
    main()
