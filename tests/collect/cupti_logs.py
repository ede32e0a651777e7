"""Logs of CUPTI that a test makes, and what a collector reports of them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from cudatool.collect import cupti
from cudatool.collect.cupti import CuptiCollector
from cudatool.collect.cupti_rows import ROW, What
from cudatool.collect.gpu_launches import Launches
from cudatool.trace import hooks

__all__ = ["PTX", "Log", "judging_launches", "put_code", "put_launch"]

_HERE = threading.get_native_id()


class Log:
    """Stands in for the extension: rows that a test puts there are what the next reading gets."""

    def __init__(self):
        self.rows, self.names, self.frames, self.stacks, self.paths, self.lost = [], [], [], [], [], 0
        self.numbers = {}
        self.error = ""
        self.blob, self.sent, self.watched = b"", 0, []

    def open(self, path):
        return 130001

    def start(self, chosen, most_rows, kernel_errors):
        self.numbers = {name: number for number, name in enumerate(chosen, start=1)}
        return {number: name for name, number in self.numbers.items()}

    def watch_activity(self, inside_graphs):
        if self.error:
            raise OSError(self.error)

    def flush(self, forced):
        pass

    def sample_use(self):
        pass

    def mark(self, correlation):
        pass

    def is_waiting(self):
        return bool(self.rows)

    def stop(self):
        pass

    forget = stop

    def drain(self):
        if not self.rows and not self.lost:
            return None
        rows, self.rows = np.array(self.rows, ROW), []
        tables = [self.names, self.frames, self.stacks, self.paths]
        self.names, self.frames, self.stacks, self.paths = [], [], [], []
        lost, self.lost = self.lost, 0
        at, self.sent = self.sent, len(self.blob)
        return (rows.tobytes(), *tables, lost, at, self.blob[at:])

    def watch_launches(self, on):
        self.watched.append(on)

    def put(self, what, *words, time=0, result=0, correlation=0, stack=0, thread=_HERE, device=0):
        number = self.numbers[what] if isinstance(what, str) else int(what)
        padded = (*words, *[0] * (8 - len(words)))
        self.rows.append((time, number, result, thread, correlation, stack, device, 1, padded))

    def call(self, library, *frames, module=""):
        """Add a stack: the library's file, pairs of file and line, innermost first, and the path of a module."""
        keys = [(0).to_bytes(4, "little") + library.encode() + b"\0"]
        keys += [line.to_bytes(4, "little") + file.encode() + b"\0function" for file, line in frames]
        first = self.count + 1
        self.frames += keys
        if module:
            self.paths.append(module.encode())
            self.named += 1
        numbers = [first, self.named if module else 0, *range(first + 1, first + len(keys))]
        self.stacks.append(np.array(numbers, np.uint32).tobytes())
        self.count += len(keys)
        self.made += 1
        return self.made

    count = made = named = 0


PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry fill(.param .u64 to)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [to];
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], 7;
    ret;
}
"""


@contextmanager
def judging_launches(monkeypatch, *, judges=True):
    """A collector over a log, which judges launches, or with `judges` false reports them alone (level ``launches``)."""
    log, events = Log(), []
    monkeypatch.setattr(cupti, "_cupti", log)
    monkeypatch.setattr(cupti, "_PERIOD", 3600)
    monkeypatch.setattr(cupti, "find_library", lambda: "libcupti.so.13")
    pytorch = SimpleNamespace(is_watched=False, passes_on=False)
    collector = CuptiCollector(
        lambda: pytorch.is_watched,
        cupti.Level.MEMORY if judges else cupti.Level.LAUNCHES,
        launches=Launches({}.get) if judges else None,
        pytorch_passes_on=lambda: pytorch.passes_on,
    )
    hooks.subscribe(events.append)
    yield SimpleNamespace(log=log, events=events, collector=collector, pytorch=pytorch)
    hooks.unsubscribe(events.append)
    collector.stop()


def put_code(log):
    """A program loads the PTX, and finds its function."""
    log.names.append(b"fill")
    log.put("cuModuleLoadData", 0x10, 1 | len(PTX) << 8, 0, 0, time=6)
    log.blob += PTX
    log.put("cuModuleGetFunction", 0x20, 0x10, 1, time=7)


def put_launch(log, *, function=0x20, stream=0, flags=0, pointer=0x7F0000000000, time=20):
    values = pointer.to_bytes(8, "little")
    grid = 4 | 1 << 32 | 1 << 48
    log.put(What.LAUNCH, function, stream, grid, grid, 64 | flags << 32, len(log.blob), 8, 1, time=time)
    log.blob += values
