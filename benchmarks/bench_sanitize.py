"""Operations per second of the happens-before engine on synthetic traces of a million operations.

Three programs: one stream; a producer and a consumer stream with an event wait each way for every pair; and the
same with the waits left out, which makes it report. Each operation reads one buffer and writes another, out of
1,000 buffers. Prints seconds of the processor, operations per second, and the process's peak memory so far beside the
size of the trace.

    python benchmarks/bench_sanitize.py [OPERATIONS]
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from cudatool.sanitize import check
from cudatool.trace.events import RECORD, AccessFlag, Kind, StreamFlag
from cudatool.trace.model import Frame, Trace
from cudatool.units import format_bytes

BUFFERS, SIZE = 1000, 1 << 20


def make_trace(operations: int, *, streams: int, waits: bool) -> Trace:
    """Return a trace in which operation i writes buffer i and reads what operation i - 1 wrote."""
    per = 5 if waits else 3  # launch, two accesses, event record, event wait
    body = np.zeros((operations, per), RECORD)
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

    head = np.zeros(streams + BUFFERS, RECORD)
    head[:streams]["kind"] = Kind.STREAM_CREATE
    head[:streams]["stream"] = np.arange(streams) + 1
    head[:streams]["flags"] = StreamFlag.NON_BLOCKING
    head[streams:]["kind"] = Kind.MEM_ALLOC
    head[streams:]["address"] = (np.arange(BUFFERS) + 1) * SIZE
    head[streams:]["size"] = SIZE
    frames = [Frame("bench.py", "main", line) for line in range(41)]
    return Trace(np.concatenate([head, body.reshape(-1)]), frames=frames, stacks=[(), *((i,) for i in range(40))])


def main() -> None:
    operations = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    heads = ("program", "records", "findings", "seconds", "operations/s", "peak memory", "trace")
    print("{:28}{:>12}{:>10}{:>9}{:>14}{:>13}{:>11}".format(*heads))
    for name, streams, waits in (
        ("one stream", 1, False),
        ("two streams, event waits", 2, True),
        ("eight streams, event waits", 8, True),
        ("two streams, no waits", 2, False),
    ):
        trace = make_trace(operations, streams=streams, waits=waits)
        begin = time.process_time()
        report = check(trace)
        seconds = time.process_time() - begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"{name:28}{len(trace.records):12,}{len(report.findings):10,}{seconds:9.2f}{operations / seconds:14,.0f}"
            f"{format_bytes(peak):>13}{format_bytes(trace.records.nbytes):>11}"
        )


if __name__ == "__main__":
    main()
