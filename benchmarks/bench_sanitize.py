"""Operations per second of the happens-before engine on synthetic traces of a million operations.

Five programs: one stream; two and eight streams with event waits for every pair; two without the waits, which the
engine reports; and one stream with an allocation for each operation. Each operation reads one buffer and writes
another, out of 1,000 buffers; in the last program it writes its own buffer and reads that of the previous operation,
which is then freed; addresses are not reused. Prints processor seconds, operations per second, and how much memory the
check took in addition to the trace.

Then four programs of many streams: each made, used and synchronized in a loop; all forked from one stream and joined
by it with events, twice; all used between device synchronizations; and all racing on one buffer. Prints seconds for
a number of streams and for four times as many, and how much longer an operation took: 1.0 is linear.

    python benchmarks/bench_sanitize.py [OPERATIONS [STREAMS]]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import numpy as np

from cudatool.sanitize import check
from cudatool.trace.events import RECORD, AccessFlag, Kind, StreamFlag
from cudatool.trace.model import Frame, Trace
from cudatool.units import format_bytes

BUFFERS, SIZE = 1000, 1 << 20


def make_trace(operations: int, *, streams: int, waits: bool) -> Trace:
    """Return a trace in which operation i writes buffer i and reads what operation i - 1 wrote."""
    per = 5 if waits else 3  # launch, two accesses, event record, event wait
    head = streams + BUFFERS
    records = np.zeros(head + operations * per, RECORD)
    body = records[head:].reshape(operations, per)
    index = np.arange(operations)
    correlation = (index + 1)[:, None]
    stream = index % streams + 1
    body["correlation"] = correlation
    body[:, 0]["kind"] = Kind.KERNEL_LAUNCH
    body[:, 0]["stream"] = stream
    body[:, 0]["stack"] = index % 40 + 1
    for column, buffer, flags in ((1, index, AccessFlag.WRITE), (2, index - 1, AccessFlag.READ)):
        body[:, column]["kind"] = Kind.ACCESS
        body[:, column]["address"] = (buffer % BUFFERS + 1) * SIZE
        body[:, column]["size"] = SIZE
        body[:, column]["flags"] = flags
    if waits:
        body[:, 3]["kind"], body[:, 4]["kind"] = Kind.EVENT_RECORD, Kind.STREAM_WAIT_EVENT
        body[:, 3]["stream"], body[:, 4]["stream"] = stream, stream % streams + 1
        body[:, 3:]["aux0"] = (index % 16 + 1)[:, None]

    records[:streams]["kind"] = Kind.STREAM_CREATE
    records[:streams]["stream"] = np.arange(streams) + 1
    records[:streams]["flags"] = StreamFlag.NON_BLOCKING
    records[streams:head]["kind"] = Kind.MEM_ALLOC
    records[streams:head]["address"] = (np.arange(BUFFERS) + 1) * SIZE
    records[streams:head]["size"] = SIZE
    return as_trace(records)


def as_trace(records: np.ndarray) -> Trace:
    """Return records as a trace whose stack i is line i."""
    frames = [Frame("bench.py", "main", line) for line in range(41)]
    return Trace(records, frames=frames, stacks=[(), *((i,) for i in range(1, 41))])


def make_trace_of_allocations(operations: int) -> Trace:
    """Return a trace in which each operation has a new buffer, at an address of its own."""
    records = np.zeros(1 + operations * 5, RECORD)
    records[0] = (0, Kind.STREAM_CREATE, 0, StreamFlag.NON_BLOCKING, 0, 0, 1, *(0,) * 7)
    body = records[1:].reshape(operations, 5)
    index = np.arange(operations)
    kinds = (Kind.MEM_ALLOC, Kind.KERNEL_LAUNCH, Kind.ACCESS, Kind.ACCESS, Kind.MEM_FREE)
    for column, kind in enumerate(kinds):
        body[:, column]["kind"] = kind
    for column, buffer in ((0, index), (2, index), (3, np.maximum(index - 1, 0)), (4, index - 1)):
        body[:, column]["address"] = (buffer + 2) * SIZE
        body[:, column]["size"] = SIZE
    body[:, 1:4]["correlation"] = (index + 1)[:, None]
    body[:, 1]["stream"] = 1
    body[:, 1]["stack"] = index % 40 + 1
    body[:, 2]["flags"], body[:, 3]["flags"] = AccessFlag.WRITE, AccessFlag.READ
    return as_trace(records)


def in_a_loop(program: Script, streams: int) -> None:
    for stream in range(1, streams + 1):
        program.emit(Kind.STREAM_CREATE, stream=stream, flags=StreamFlag.NON_BLOCKING)
        program.kernel(stream, (AccessFlag.READ, 1), (AccessFlag.WRITE, 2))
        program.emit(Kind.STREAM_SYNCHRONIZE, stream=stream)


def forked_and_joined(program: Script, streams: int) -> None:
    for _ in range(2):
        program.kernel(1, (AccessFlag.WRITE, 1))
        program.emit(Kind.EVENT_RECORD, stream=1, aux0=1)
        for stream in range(2, streams + 1):
            program.emit(Kind.STREAM_WAIT_EVENT, stream=stream, aux0=1)
            program.kernel(stream, (AccessFlag.READ, 1), (AccessFlag.WRITE, stream))
            program.emit(Kind.EVENT_RECORD, stream=stream, aux0=stream)
        for stream in range(2, streams + 1):
            program.emit(Kind.STREAM_WAIT_EVENT, stream=1, aux0=stream)


def between_device_synchronizations(program: Script, streams: int) -> None:
    for _ in range(2):
        for stream in range(1, streams + 1):
            program.kernel(stream, (AccessFlag.READ, 1), (AccessFlag.WRITE, stream + 1))
        program.emit(Kind.DEVICE_SYNCHRONIZE)


def racing(program: Script, streams: int) -> None:
    for stream in range(1, streams + 1):
        program.kernel(stream, (AccessFlag.WRITE, 1))


class Script:
    """Records of a program of many streams, one by one."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.operations = 0

    def emit(self, kind: Kind, **columns: int) -> None:
        self.rows.append({"kind": kind, **columns})

    def kernel(self, stream: int, *accesses: tuple[AccessFlag, int]) -> None:
        self.operations += 1
        self.emit(Kind.KERNEL_LAUNCH, stream=stream, correlation=self.operations, stack=1)
        for flags, buffer in accesses:
            self.emit(Kind.ACCESS, correlation=self.operations, flags=flags, address=buffer * SIZE, size=SIZE)

    def trace(self) -> Trace:
        records = np.zeros(len(self.rows), RECORD)
        for column in {name for row in self.rows for name in row}:
            records[column] = [row.get(column, 0) for row in self.rows]
        return as_trace(records)


def seconds_of(trace: Trace) -> float:
    """Return the processor time of a check."""
    begin = time.process_time()
    check(trace)
    return time.process_time() - begin


def measured(make: Callable[[], Trace]) -> tuple[int, int, float, int, int]:
    """Return records, findings, seconds of the check, bytes that it took at its peak, and those of the trace."""
    trace = make()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # reset the peak (proc(5))
    before = status_bytes("VmRSS")
    begin = time.process_time()
    report = check(trace)
    seconds = time.process_time() - begin
    memory = status_bytes("VmHWM") - before
    return len(trace.records), len(report.findings), seconds, memory, trace.records.nbytes


def status_bytes(name: str) -> int:
    """Return a size from this process's status."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    operations = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    streams_made = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    heads = ("program", "records", "findings", "seconds", "operations/s", "memory", "trace")
    print("{:32}{:>12}{:>10}{:>9}{:>14}{:>12}{:>11}".format(*heads), flush=True)
    for name, make in (
        ("one stream", partial(make_trace, operations, streams=1, waits=False)),
        ("two streams, event waits", partial(make_trace, operations, streams=2, waits=True)),
        ("eight streams, event waits", partial(make_trace, operations, streams=8, waits=True)),
        ("two streams, no waits", partial(make_trace, operations, streams=2, waits=False)),
        ("an allocation for each operation", partial(make_trace_of_allocations, operations)),
    ):
        with ProcessPoolExecutor(1) as pool:  # a process for each: memory used by one would hide the next one's
            records, findings, seconds, memory, size = pool.submit(measured, make).result()
        print(
            f"{name:32}{records:12,}{findings:10,}{seconds:9.2f}{operations / seconds:14,.0f}"
            f"{format_bytes(memory):>12}{format_bytes(size):>11}",
            flush=True,
        )

    print(
        "\n{:36}{:>9}{:>12}{:>12}{:>12}".format("program of many streams", "streams", "seconds", "of 4 times", "growth")
    )
    for build in (in_a_loop, forked_and_joined, between_device_synchronizations, racing):
        times = []
        for factor in (1, 4):
            script = Script()
            build(script, streams_made * factor)
            times.append(seconds_of(script.trace()))
        name = build.__name__.replace("_", " ")
        print(f"{name:36}{streams_made:9,}{times[0]:12.2f}{times[1]:12.2f}{times[1] / times[0] / 4:12.2f}")


if __name__ == "__main__":
    main()
