"""Builds traces for the engine's tests: one method for each thing a program can do, one call per line of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatool.sanitize import check
from cudatool.trace.events import RECORD, AccessFlag, CopyFlag, Kind, StreamFlag
from cudatool.trace.model import Frame, Trace

R, W, RW, ATOMIC = AccessFlag.READ, AccessFlag.WRITE, AccessFlag.READ | AccessFlag.WRITE, AccessFlag.ATOMIC
BUFFER, SIZE = 0x10000, 1024  # of an allocation that programs access


class Program:
    """A program under construction. Every call is another line of ``program.py`` unless `line` says otherwise."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._names = [""]
        self._lines: list[int] = []
        self._streams = 0
        self._events = 0
        self._correlation = 0
        self._thread = 0
        self._line = 0
        self.header: dict[str, Any] = {"device": "sim: cudatool software device"}
        self.notes: list[str] = []

    # Everything ends here.
    def emit(self, kind: Kind, *, line: int | None = None, name: str = "", **fields: Any) -> None:
        if line is None:
            line = self._line = self._line + 1
        if line not in self._lines:
            self._lines.append(line)
        if name and name not in self._names:
            self._names.append(name)
        self._rows.append(
            {
                "time": len(self._rows),
                "kind": kind,
                "thread": self._thread,
                "stack": self._lines.index(line) + 1,
                "name": self._names.index(name),
                **fields,
            }
        )

    def trace(self) -> Trace:
        records = np.zeros(len(self._rows), RECORD)
        for record, row in zip(records, self._rows, strict=True):
            for field, value in row.items():
                record[field] = value
        frames = [Frame("program.py", "main", line) for line in self._lines]
        stacks = [(), *((index,) for index in range(len(frames)))]
        threads = [f"thread {index}" for index in range(4)]
        return Trace(records, self._names, stacks, frames, threads, self.header, self.notes)

    def __len__(self) -> int:
        """Number of records so far."""
        return len(self._rows)

    def on_thread(self, thread: int) -> Program:
        self._thread = thread
        return self

    # Streams and events.
    def stream(self, flags: StreamFlag = StreamFlag.NON_BLOCKING, device: int = 0) -> int:
        self._streams += 1
        self.emit(Kind.STREAM_CREATE, stream=self._streams, flags=flags, device=device)
        return self._streams

    def event(self) -> int:
        self._events += 1
        self.emit(Kind.EVENT_CREATE, aux0=self._events)
        return self._events

    def record(self, event: int, stream: int) -> None:
        self.emit(Kind.EVENT_RECORD, stream=stream, aux0=event)

    def wait(self, stream: int, event: int) -> None:
        self.emit(Kind.STREAM_WAIT_EVENT, stream=stream, aux0=event)

    def order(self, earlier: int, later: int) -> None:
        """``later.wait_stream(earlier)``"""
        event = self.event()
        self.record(event, earlier)
        self.wait(later, event)

    def synchronize(self, *, stream: int = 0, event: int = 0, device: int = 0) -> None:
        if stream:
            self.emit(Kind.STREAM_SYNCHRONIZE, stream=stream)
        elif event:
            self.emit(Kind.EVENT_SYNCHRONIZE, aux0=event)
        else:
            self.emit(Kind.DEVICE_SYNCHRONIZE, device=device)

    def query(self, *, stream: int = 0, event: int = 0, done: bool = True) -> None:
        if stream:
            self.emit(Kind.STREAM_QUERY, stream=stream, aux1=int(done))
        else:
            self.emit(Kind.EVENT_QUERY, aux0=event, aux1=int(done))

    # Work. `accesses` are (mode, address, size) or (mode, address, size, stride, rows).
    def kernel(
        self, stream: int, *accesses: tuple[int, ...], name: str = "k", line: int | None = None, flags: int = 0
    ) -> None:
        self._correlation += 1
        self.emit(Kind.KERNEL_LAUNCH, stream=stream, correlation=self._correlation, name=name, line=line, flags=flags)
        for access in accesses:
            self.access(*access, line=line)

    def access(
        self,
        mode: int,
        address: int,
        size: int,
        stride: int = 0,
        rows: int = 0,
        *,
        node: int = 0,
        line: int | None = None,
    ) -> None:
        """What the latest operation touches."""
        self.emit(
            Kind.ACCESS,
            correlation=self._correlation,
            stream=node,
            flags=mode,
            address=address,
            size=size,
            aux0=stride % 2**64,
            aux1=rows,
            line=line or self._line,
        )

    # Graphs.
    def node(self, graph: int, stream: int = 0, name: str = "k") -> int:
        """A node is captured in a stream, or added by hand. Returns its number for `instantiate`."""
        self._correlation += 1
        self.emit(Kind.GRAPH_NODE_ADDED, aux0=graph, correlation=self._correlation, stream=stream, name=name)
        return self._correlation

    def instantiate(self, executable: int, graph: int, nodes: list[int], *edges: tuple[int, int]) -> None:
        """`nodes` are what :meth:`node` returned; edges are positions in it, from 1 on."""
        self.emit(Kind.GRAPH_INSTANTIATE, aux0=executable, aux1=graph)
        self.emit_nodes(executable, nodes)
        for first, second in edges:
            self.emit(Kind.GRAPH_EDGE, aux0=executable, address=first, aux1=second)

    def emit_nodes(self, executable: int, nodes: list[int]) -> None:
        for number, correlation in enumerate(nodes, 1):
            self.emit(Kind.GRAPH_NODE, aux0=executable, aux1=number, correlation=correlation)

    def point(self, executable: int, node: int, address: int) -> None:
        self.emit(Kind.GRAPH_POINTER, aux0=executable, aux1=node, address=address)

    def launch(self, executable: int, stream: int, *accesses: tuple[int, ...], line: int | None = None) -> None:
        """`accesses` are (node, mode, address, size)."""
        self._correlation += 1
        self.emit(Kind.GRAPH_LAUNCH, stream=stream, correlation=self._correlation, aux0=executable, line=line)
        for node, *access in accesses:
            self.access(*access, node=node, line=line)

    def copy(
        self, stream: int, to: int, source: int, size: int, flags: int = 0, *, name: str = "cuMemcpy", devices: int = 0
    ) -> None:
        self._correlation += 1
        self.emit(
            Kind.MEMCPY,
            stream=stream,
            correlation=self._correlation,
            address=to,
            aux0=source,
            size=size,
            aux1=devices,
            flags=flags,
            name=name,
        )

    def fill(self, stream: int, address: int, size: int, flags: CopyFlag = CopyFlag.DESTINATION_DEVICE) -> None:
        self._correlation += 1
        self.emit(Kind.MEMSET, stream=stream, correlation=self._correlation, address=address, size=size, flags=flags)

    def host(self, mode: int, address: int, size: int) -> None:
        self.emit(Kind.HOST_ACCESS, flags=mode, address=address, size=size)

    # Memory.
    def alloc(self, address: int, size: int, stream: int = 0) -> None:
        self.emit(Kind.MEM_ALLOC, address=address, size=size, stream=stream)

    def free(self, address: int, size: int, stream: int = 0) -> None:
        self.emit(Kind.MEM_FREE, address=address, size=size, stream=stream)

    def block(self, address: int, size: int, stream: int, line: int | None = None) -> None:
        self.emit(Kind.BLOCK_ALLOC, address=address, size=size, aux0=size, stream=stream, line=line)

    def record_stream(self, address: int, size: int, stream: int) -> None:
        self.emit(Kind.BLOCK_RECORD_STREAM, address=address, size=size, stream=stream)

    def request_free(self, address: int, size: int, stream: int) -> None:
        self.emit(Kind.BLOCK_FREE_REQUESTED, address=address, size=size, aux0=size, stream=stream)

    def complete_free(self, address: int, size: int, stream: int) -> None:
        self.emit(Kind.BLOCK_FREE_COMPLETED, address=address, size=size, aux0=size, stream=stream)

    def free_block(self, address: int, size: int, stream: int) -> None:
        self.request_free(address, size, stream)
        self.complete_free(address, size, stream)


def write(program: Program, stream: int) -> None:
    program.kernel(stream, (W, BUFFER, SIZE), name="write")


def read(program: Program, stream: int) -> None:
    program.kernel(stream, (R, BUFFER, SIZE), name="read")


def kinds(program: Program) -> list[str]:
    return [finding.kind.value for finding in check(program.trace()).findings]
