"""Traces for tests of the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cudatool.sanitize import Report, check
from cudatool.trace.events import OF_BACKWARD, OF_MODULE, RECORD, AccessFlag, CopyFlag, Kind, PlanFlag, StreamFlag
from cudatool.trace.model import Frame, Trace

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>{{payload}}"


def program(name: str = "kernel", *, repeat: int = 20) -> Trace:
    """A program of the driver API on two streams, with `name` wherever a file could put a name."""
    rows: list[dict[str, Any]] = [
        {"kind": Kind.STREAM_CREATE, "stream": 1, "address": 1, "flags": StreamFlag.LEGACY_DEFAULT},
        {"kind": Kind.STREAM_CREATE, "stream": 2, "address": 0xABC0, "flags": StreamFlag.NON_BLOCKING},
    ]
    flags = CopyFlag.DESTINATION_DEVICE
    for i in range(repeat):
        address, size, now = (1 << 40) + i * (1 << 22), (1 + i % 3) << 20, 1000 + 100 * i
        work = {"stream": 1 + i % 2, "stack": 1, "name": 1}
        rows += [
            {"kind": Kind.MEM_ALLOC, "address": address, "size": size, "stack": 1, "name": 1},
            {"kind": Kind.MEMCPY, "correlation": 2 * i + 1, "address": address, "size": size, "flags": flags, **work},
            {"kind": Kind.KERNEL_LAUNCH, "correlation": 2 * i + 2, **work},
            {"kind": Kind.EXECUTION, "correlation": 2 * i + 1, "stream": 1 + i % 2, "aux0": now, "aux1": now + 40},
            {"kind": Kind.EXECUTION, "correlation": 2 * i + 2, "stream": 1 + i % 2, "aux0": now + 40, "aux1": now + 90},
        ]
        if i % 4:
            rows.append({"kind": Kind.MEM_FREE, "address": address, "size": size, "stack": 1})
    records = np.zeros(len(rows), RECORD)
    for i, row in enumerate(rows):
        records[i]["time"] = 1000 * i
        for field, value in row.items():
            records[i][field] = value
    return Trace(
        records,
        names=["", name],
        stacks=[(), (0, 1)],
        frames=[Frame(f"/home/{name}.py", name, 3), Frame("/home/u/main.py", "<module>", 9)],
        notes=[f"a note about {name}"],
        source=f"/tmp/{name}.ctrace" if name == "kernel" else name,
    )


def racy(name: str = "kernel", *, timed: bool = True) -> tuple[Trace, Report]:
    """Two kernels that write the same bytes on streams in no order, and what the sanitizer says of them."""
    rows: list[dict[str, Any]] = [
        {"kind": Kind.STREAM_CREATE, "stream": stream, "address": stream << 8, "flags": StreamFlag.NON_BLOCKING}
        for stream in (1, 2)
    ]
    rows.append({"kind": Kind.MEM_ALLOC, "address": 1 << 40, "size": 1 << 20, "stack": 1, "name": 1})
    for stream in (1, 2):
        work = {"correlation": stream, "address": 1 << 40, "size": 4096}
        rows.append({"kind": Kind.KERNEL_LAUNCH, "stream": stream, "correlation": stream, "stack": stream, "name": 1})
        rows.append({"kind": Kind.ACCESS, "flags": AccessFlag.WRITE, **work})
        if timed:
            times = {"aux0": 1000 * stream, "aux1": 1000 * stream + 700}
            rows.append({"kind": Kind.EXECUTION, "stream": stream, "correlation": stream, **times})
    records = np.zeros(len(rows), RECORD)
    for i, row in enumerate(rows):
        records[i]["time"] = 1000 * i
        for field, value in row.items():
            records[i][field] = value
    frames = [Frame(f"/home/{name}.py", name, 3), Frame("/home/u/other.py", "consume", 9)]
    trace = Trace(records, names=["", name], stacks=[(), (0,), (1,)], frames=frames, source="racy.ctrace")
    return trace, check(trace)


def layered(name: str = "kernel") -> Trace:
    """A program of PyTorch: a layer twice, and a block of no module."""
    trace = program(name, repeat=1)
    paths = ("Net.layers.0", "Net.layers.1", "Net.layers.1", "")
    more = np.zeros(len(paths), RECORD)
    more["kind"], more["address"] = Kind.BLOCK_ALLOC, (1 << 44) + 4096 * np.arange(len(paths))
    more["size"] = more["aux0"] = 1024 * np.arange(1, 1 + len(paths))
    more["time"], more["stack"] = trace.records["time"][-1], 1
    names = [*trace.names, *dict.fromkeys(path for path in paths if path)]
    more["name"] = [names.index(path) for path in paths]
    more["flags"] = [OF_MODULE if path else 0 for path in paths]
    more["flags"][2] |= OF_BACKWARD
    return replace(trace, names=names, records=np.concatenate([trace.records, more]))


def planned(name: str = "kernel") -> Trace:
    """A program whose compiled function has two buffers in one place, and one beside them."""
    trace, start = program(name), 1 << 44
    plan = {"correlation": 900, "stack": 1, "name": 1}
    rows = [{"kind": Kind.MEMORY_PLAN, "address": start, "size": 3072, "aux0": 3072, "aux1": 4, **plan}]
    rows += [
        {"kind": Kind.PLANNED_BUFFER, "address": start + place, "size": size, "aux0": first, "aux1": end, **plan}
        for place, size, first, end in ((0, 1024, 0, 2), (1024, 2048, 1, 4), (0, 1024, 2, 4))
    ]
    kept = len(rows) - 1
    rows += [{"kind": Kind.FUSED_OPERATION, "aux0": 3, "aux1": number, **plan} for number in range(3)]
    more = np.zeros(len(rows), RECORD)
    for i, row in enumerate(rows):
        more[i]["time"] = trace.records["time"][-1]
        for field, value in row.items():
            more[i][field] = value
    more["flags"][kept] = PlanFlag.KEPT
    return replace(trace, records=np.concatenate([trace.records, more]))
