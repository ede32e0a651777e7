"""The cost of an event without subscribers, with an empty subscriber and with the recorder; and the speed of reading.

Prints nanoseconds, each the smallest of several rounds, without the loop around them. For scale, it also prints a plain
call of an empty function and Python's own ``traceback.extract_stack``.

    python benchmarks/bench_emit.py [EVENTS]
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from cudatool.trace import Event, Kind, Recorder, hooks, read, stacks

DEPTH = 10
ROUNDS = 7


def nothing() -> None:
    pass


def guard() -> None:
    if hooks.active:
        hooks.emit(Kind.MEM_ALLOC, address=0x1000, size=512, name="cuMemAlloc")


def emit() -> None:
    hooks.emit(Kind.MEM_ALLOC, address=0x1000, size=512, name="cuMemAlloc")


def ignore(event: Event) -> None:
    pass


def nanoseconds(call: Callable[[], object], count: int, depth: int = DEPTH) -> float:
    """Return the time of one `call` made from `depth` frames down."""
    if depth > 1:
        return nanoseconds(call, count, depth - 1)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(count):
            call()
        called = time.perf_counter_ns() - start
        start = time.perf_counter_ns()
        for _ in range(count):
            pass
        looped = time.perf_counter_ns() - start
        best = min(best, (called - looped) / count)
    return best


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    rows = [
        ("call of an empty function", nanoseconds(nothing, count)),
        ("call with an emit guard, no subscribers", nanoseconds(guard, count)),
        (f"stacks.capture(), {DEPTH} frames", nanoseconds(stacks.capture, count)),
        (f"traceback.extract_stack(), {DEPTH} frames", nanoseconds(traceback.extract_stack, count // 100)),
    ]
    for with_stacks in (False, True):
        stacks.enable(with_stacks)
        suffix = f"stacks of {DEPTH} frames" if with_stacks else "no stacks"
        hooks.subscribe(ignore)
        rows.append((f"emit to a subscriber that does nothing, {suffix}", nanoseconds(emit, count)))
        hooks.unsubscribe(ignore)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.ctrace"
            with Recorder(path, header={}):
                rows.append((f"emit to the recorder, {suffix}", nanoseconds(emit, count)))
            start = time.perf_counter_ns()
            trace = read(path)
            taken = time.perf_counter_ns() - start
    for label, time_ns in rows:
        print(f"{label:60} {time_ns:10,.0f} ns")
    rate = len(trace.records) / taken * 1e9
    print(f"{'read back, checksums verified':60} {rate / 1e6:10,.1f} million events/s ({len(trace.records):,} events)")


if __name__ == "__main__":
    main()
