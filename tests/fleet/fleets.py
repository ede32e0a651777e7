"""Fleets made of real recordings: ranks that are varied as healthy ones are, and faults put into single ranks.

``rank12.json`` says which recording, which faults and which seed; :func:`read` makes the trace of it. A healthy rank has
its own addresses, and its own time of each event by up to 2 %.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import left_to_workers
import numpy as np
from recordings import HERE, SHARED

from cudatool.cli._sources import read_trace
from cudatool.fleet.convert import Input, convert
from cudatool.fleet.report import Difference
from cudatool.trace.events import RECORD, Kind
from cudatool.trace.frames import frame_rank
from cudatool.trace.lifetimes import blocks
from cudatool.trace.model import Ending, Frame, Trace

__all__ = ["EXPECTED", "FAULTS", "Fault", "make", "read", "recordings_with_steps"]

_START = 1_790_000_000_000_000_000  # ns since 1970


@dataclass(frozen=True)
class Fault:
    """What is wrong with one rank."""

    kind: str
    rank: int


@lru_cache(4)
def _base(path: str) -> Trace:
    """Return a recording with stacks: where none has frames of libraries, each size of block gets a call site of its own."""
    trace = read_trace(Path(path))
    records = trace.records.copy()
    frames, stacks = list(trace.frames), list(trace.stacks)
    if 1 not in map(frame_rank, frames):
        frames, stacks = [], [()]
        sizes, which = np.unique(records["size"], return_inverse=True)
        for number in range(len(sizes)):
            frames += [Frame("/env/lib/python3.11/site-packages/lib/ops.py", "empty", 10 + number % 7)]
            frames += [Frame("/home/me/train.py", f"site_{number}", 100 + number)]
            stacks.append((2 * number, 2 * number + 1))
        alloc = (records["kind"] == Kind.BLOCK_ALLOC) | (records["kind"] == Kind.BLOCK_FREE_REQUESTED)
        records["stack"] = np.where(alloc, 1 + which, 0)
    # Plain facts: a snapshot's own type answers by its columns.
    header = {"format": "pytorch-snapshot", "time_axis": "clock"}
    return Trace(records, list(trace.names), stacks, frames, list(trace.threads), header, [], str(path))


def read(path: Path) -> Trace:
    """Return the trace of one rank."""
    said = json.loads(path.read_text())
    base = _base(said["recording"])
    rng = np.random.default_rng(said["seed"])
    records = base.records.copy()
    first = int(records["time"].min())
    gaps = np.diff(records["time"], prepend=first).astype(np.float64)
    memory = records["kind"] <= Kind.SEGMENT_UNMAP
    records["address"][memory] += np.uint64(int(rng.integers(1, 1000)) << 21)
    trace = replace(base, records=records, source=str(path), header=dict(base.header))
    slow = 1.4 if "straggler" in said["faults"] else 1.0
    records["time"] = _START + np.cumsum(gaps * slow * rng.uniform(0.98, 1.02)).astype(np.int64)
    if "clock" in said["faults"]:
        records["time"] += 3600 * 10**9
    for fault in said["faults"]:
        trace = _PLANTED.get(fault, lambda trace: trace)(trace)
    return trace


def _births(trace: Trace) -> Any:
    return np.flatnonzero(trace.records["kind"] == Kind.BLOCK_ALLOC)


def _leak(trace: Trace) -> Trace:
    """A block more in each step, which stays."""
    records = trace.records
    starts = np.flatnonzero(records["kind"] == Kind.RANGE_PUSH)
    names = records["name"][starts]
    step = np.bincount(names).argmax()
    at = starts[names == step] + 1
    new = np.zeros(len(at), RECORD)
    new["kind"], new["size"], new["aux0"] = Kind.BLOCK_ALLOC, 3 << 20, 3 << 20
    new["address"] = (1 << 45) + np.arange(len(at), dtype=np.uint64) * (4 << 20)
    new["time"], new["device"] = records["time"][at], records["device"][_births(trace)[0]]
    new["stack"] = len(trace.stacks)
    frames = [*trace.frames, Frame("/home/me/train.py", "keep_history", 41)]
    return replace(
        trace, records=np.insert(records, at, new), frames=frames, stacks=[*trace.stacks, (len(frames) - 1,)]
    )


def _larger(trace: Trace) -> Trace:
    """Activations, what most of the memory is, are half as large again from the middle of the recording on."""
    records = trace.records
    births = _births(trace)
    late = births[len(births) // 2 :]
    stack = np.bincount(records["stack"][late], weights=records["size"][late].astype(float)).argmax()
    chosen = late[records["stack"][late] == stack]
    for name in ("size", "aux0"):
        records[name][chosen] += records[name][chosen] // np.uint64(2) // np.uint64(512) * np.uint64(512)
    return trace


def _library(trace: Trace) -> Trace:
    """Another version of a library: its lines are elsewhere."""
    frames = [frame._replace(line=frame.line + 9) if frame_rank(frame) == 1 else frame for frame in trace.frames]
    return replace(trace, frames=frames)


def _order(trace: Trace) -> Trace:
    """Two allocations that follow each other change places."""
    records, births = trace.records, _births(trace)
    for one, two in zip(births[len(births) // 3 :].tolist(), births[len(births) // 3 + 1 :].tolist(), strict=False):
        if records["stack"][one] != records["stack"][two] and two == one + 1:
            times = records["time"][[one, two]].copy()
            records[[one, two]] = records[[two, one]]
            records["time"][[one, two]] = times
            return trace
    raise AssertionError("no two allocations in a row")


def _not_freed(trace: Trace) -> Trace:
    """The last blocks of a call site are not given back."""
    own = blocks(trace)
    never = len(trace.records)
    last = {address: row for row, address in enumerate(own.address.tolist())}
    late = never * 4 // 5  # in every step, it would be a leak
    rows = [row for row in last.values() if late < own.start[row] and own.freed[row] < never and own.size[row] >= 4096]
    stack = np.bincount(own.stack[rows]).argmax()
    lost = [row for row in rows if own.stack[row] == stack]
    gone = np.concatenate([own.freed[lost], own.end[lost]])
    return replace(trace, records=np.delete(trace.records, gone[gone < never]))


def _fragmented(trace: Trace) -> Trace:
    """Segments that nothing uses."""
    records = trace.records
    births = (records["kind"] == Kind.SEGMENT_ALLOC) | (records["kind"] == Kind.SEGMENT_MAP)
    birth = int(np.flatnonzero(births)[0])
    own = blocks(trace)
    wasted = max(int(own.size.sum() // len(own)) * 64, 1 << 30)
    new = records[birth : birth + 1].copy()
    new["address"], new["size"] = 1 << 46, wasted
    return replace(trace, records=np.insert(records, birth + 1, new))


def _oom(trace: Trace) -> Trace:
    """Memory runs out, and the process ends there."""
    records = trace.records[: len(trace.records) * 3 // 4]
    new = records[-1:].copy()
    new["kind"], new["size"], new["aux0"] = Kind.OOM, 1 << 30, 1 << 20
    return replace(trace, records=np.append(records, new), ending=Ending.KILLED)


_PLANTED = {
    "leak": _leak,
    "size": _larger,
    "library": _library,
    "order": _order,
    "not-freed": _not_freed,
    "fragmented": _fragmented,
    "oom": _oom,
}
EXPECTED = {
    "leak": Difference.LEAK,
    "size": Difference.SIZE,
    "library": Difference.LIBRARY,
    "order": Difference.ORDER,
    "not-freed": Difference.NOT_FREED,
    "fragmented": Difference.FRAGMENTED,
    "oom": Difference.OOM,
    "straggler": Difference.STRAGGLER,
    "clock": Difference.CLOCK,
}
"""Fault -> what the report has to call it first."""

FAULTS = tuple(EXPECTED)


def recordings_with_steps() -> list[Path]:
    """Return the small recordings of training whose steps have names."""
    names = ("prefetch__default", "gpt_default", "gpt_expandable", "prefetch__expandable")
    found = (folder / f"{name}.pickle.xz" for name in names for folder in (HERE, SHARED))
    return [path for path in found if path.exists()]


def make(folder: Path, recording: Path, ranks: int, faults: list[Fault], seed: int) -> Path:
    """Write a data set of a fleet, and return its folder."""
    dataset = folder / "set"
    rng = random.Random(seed)
    for rank in range(ranks):
        own = tuple(fault.kind for fault in faults if fault.rank == rank)
        for name, content in _converted(recording, rank, rng.getrandbits(32), own).items():
            (dataset / name).parent.mkdir(parents=True, exist_ok=True)
            (dataset / name).write_bytes(content)
    return dataset


@cache
def _converted(recording: Path, rank: int, seed: int, faults: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files of a rank's part: many fleets have the same healthy ranks, which are converted once."""

    def made() -> dict[str, bytes]:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "ranks" / f"rank{rank}.json"
            path.parent.mkdir()
            path.write_text(json.dumps({"recording": str(recording), "seed": seed, "faults": faults}))
            dataset = Path(folder) / "set"
            [outcome] = convert([Input(path, "")], dataset, read, jobs=1)
            assert not outcome.error, outcome
            files = (file for file in dataset.rglob("*") if file.is_file())
            return {str(file.relative_to(dataset)): file.read_bytes() for file in files}

    return left_to_workers.found_or_made("-".join((recording.name, str(rank), str(seed), *faults)), made)
