"""What a program really costs under some settings, and what a recording of it under others predicts.

A program is a list of operations. It runs on the allocator itself, whose decisions are PyTorch's address for address,
over a device that is laid out in another way than the model's. What happens is written as PyTorch writes it, whole or
with its beginning lost. From that file the cost under other settings is predicted and compared with a real run.

    python tests/analyze/whatif_truth.py [PROGRAMS [FIRST]] [--unknown-card]
"""

from __future__ import annotations

import pickle
import random
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from cudatool.analyze import Advice, Caveat, WhatIfOutcome, advise, recorded_settings, what_if
from cudatool.analyze.modeled_device import ModeledDevice
from cudatool.analyze.requests import Requests
from cudatool.collect import torch_snapshot
from cudatool.collect.torch_snapshot import MemorySnapshot
from cudatool.errors import OutOfMemoryError
from cudatool.memory import CachingAllocator, Settings
from cudatool.trace import hooks
from cudatool.trace.events import Event, Kind, unpack_pool

__all__ = ["CONFS", "Op", "Pair", "Program", "Run", "pairs", "program", "record", "run", "total_for"]

MIB = 1 << 20
CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:128",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
    "garbage_collection_threshold:0.8,max_split_size_mb:64,per_process_memory_fraction:0.95",
    "expandable_segments:True,roundup_power2_divisions:8",
)
_ACTIONS = {
    Kind.BLOCK_ALLOC: "alloc",
    Kind.BLOCK_FREE_REQUESTED: "free_requested",
    Kind.BLOCK_FREE_COMPLETED: "free_completed",
    Kind.SEGMENT_ALLOC: "segment_alloc",
    Kind.SEGMENT_FREE: "segment_free",
    Kind.SEGMENT_MAP: "segment_map",
    Kind.SEGMENT_UNMAP: "segment_unmap",
    Kind.OOM: "oom",
}
_PAGE = 2 * MIB


@dataclass
class Op:
    """``malloc`` and ``free`` a numbered block, ``use`` it on a stream, let a stream ``pass``, ``empty`` the cache."""

    what: str
    block: int = 0
    size: int = 0
    stream: int = 0
    pool: int = 0
    site: int = 0


@dataclass
class Program:
    """Operations, and whether the program goes on when a request fails."""

    ops: list[Op]
    survives: bool


@dataclass
class Run:
    """What a run left, and what it cost."""

    events: list[tuple[Event, int]] = field(default_factory=list)  # each with the index of its operation
    reserved: list[int] = field(default_factory=list)  # after each operation
    segments: list[dict[str, Any]] = field(default_factory=list)
    peak: int = 0
    retries: int = 0
    ooms: int = 0
    died: bool = False


def program(seed: int) -> Program:
    """Return a program like those that train and serve networks."""
    draw = random.Random(seed)
    ops: list[Op] = []
    numbers = count(1)
    sizes = [draw.choice((3, 9, 40, 200, 700)) * 1024 for _ in range(3)]
    sizes += [int(draw.uniform(1.1, 9) * MIB) for _ in range(2)] + [int(draw.uniform(10, 80) * MIB) for _ in range(3)]
    sizes += [int(draw.uniform(80, 700) * MIB) for _ in range(3)]
    varies = draw.random() < 0.6
    empties = draw.choice((0, 0, 0.05, 0.3, 1))
    side = draw.random() < 0.4
    pool = draw.random() < 0.3
    trials = draw.random() < 0.2

    def malloc(size: int, site: int, stream: int = 0, pool: int = 0) -> int:
        block = next(numbers)
        ops.append(Op("malloc", block, size, stream, pool, site))
        return block

    def free(block: int, site: int) -> None:
        ops.append(Op("free", block, site=site))

    kept = [malloc(draw.choice(sizes), 1) for _ in range(draw.randrange(5, 40))]
    if pool:
        held = [malloc(draw.choice(sizes), 2, pool=1) for _ in range(draw.randrange(3, 12))]
        for block in held[::2]:
            free(block, 2)
    for step in range(draw.randrange(4, 14)):
        scale = draw.choice((1.0, 1.0, 0.5, 0.75, 1.3)) if varies else 1.0
        live: list[int] = []
        if side:
            data = malloc(int(draw.choice(sizes[3:]) * scale), 10, stream=7)
            ops.append(Op("use", data, stream=0))
        for layer in range(draw.randrange(6, 25)):
            size = max(int(sizes[layer % len(sizes)] * scale), 1)
            live.append(malloc(size, 20 + layer))
            if draw.random() < 0.6:
                workspace = malloc(draw.choice(sizes), 50)
                free(workspace, 50)
                if trials and step == 0:
                    ops.append(Op("empty", site=51))
            if draw.random() < 0.1 * empties:
                ops.append(Op("empty", site=52))
        if side:
            free(data, 11)
            if draw.random() < 0.7:
                ops.append(Op("pass"))
        if draw.random() < 0.2 and kept:
            free(kept.pop(draw.randrange(len(kept))), 60)
            kept.append(malloc(draw.choice(sizes), 61))
        order = list(reversed(live))
        if draw.random() < 0.3:
            draw.shuffle(order)
        for layer, block in enumerate(order):
            if draw.random() < 0.5:
                gradient = malloc(max(int(draw.choice(sizes) * scale), 1), 70 + layer)
                free(block, 100)
                free(gradient, 101)
            else:
                free(block, 100)
        if step == 0:
            kept += [malloc(draw.choice(sizes), 110) for _ in range(len(kept) // 2)]
        ops.append(Op("pass"))
        if draw.random() < empties:
            ops.append(Op("empty", site=120))
    return Program(ops, survives=draw.random() < 0.5)


class _Device(ModeledDevice):
    """Memory of a size, given out from the lowest free address up."""

    def __init__(self, total: int) -> None:
        super().__init__(total, Requests(0))
        self.holes: list[tuple[int, int]] = [(1 << 40, 1 << 45)]
        self.sizes: dict[int, int] = {}
        self.tokens = count()
        self.last_passed = -1  # the last token whose event has passed
        self.last = -1

    def allocate(self, size: int, stream: int) -> int:
        self._take(size)
        room = -(-size // _PAGE) * _PAGE
        index = next(i for i, (start, end) in enumerate(self.holes) if end - start >= room)
        start, end = self.holes[index]
        self.holes[index : index + 1] = [(start + room, end)] if end - start > room else []
        self.sizes[start] = size
        return start

    def free(self, address: int) -> None:
        size = self.sizes.pop(address)
        self.used -= size
        joined: list[tuple[int, int]] = []
        for start, end in sorted([*self.holes, (address, address + -(-size // _PAGE) * _PAGE)]):
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self.holes = joined

    def reserve(self, size: int, stream: int) -> int:
        start, end = self.holes[-1]
        size = -(-size // _PAGE) * _PAGE
        self.holes[-1] = start, end - size
        return end - size

    def record_event(self, stream: int) -> int:
        self.last = next(self.tokens)
        return self.last

    def event_passed(self, token: int) -> bool:
        return token <= self.last_passed

    def synchronize_event(self, token: int) -> None:
        pass


def run(program: Program, conf: str, total: int) -> Run:
    """Run a program on a device with `total` bytes."""
    done = Run()
    device = _Device(total)
    settings = Settings.parse(conf)
    allocator = CachingAllocator(device, device=0, settings=settings)
    addresses: dict[int, int] = {}
    index = 0

    def listen(event: Event) -> None:
        done.events.append((event, index))

    hooks.subscribe(listen)
    try:
        for index, op in enumerate(program.ops):  # noqa: B007  (events are given it)
            if op.what == "malloc":
                try:
                    if op.pool:
                        allocator.begin_allocate_to_pool((op.pool, 0), lambda stream: True)
                    addresses[op.block] = allocator.malloc(op.size, op.stream)
                except OutOfMemoryError:
                    done.ooms += 1
                    if not program.survives:
                        done.died = True
                        break
                finally:
                    if op.pool:
                        allocator.end_allocate_to_pool((op.pool, 0))
            elif op.what == "pass":
                device.last_passed = device.last
            elif op.what == "empty":
                allocator.empty_cache()
            elif op.block in addresses and op.what == "free":
                allocator.free(addresses.pop(op.block))
            elif op.block in addresses:
                allocator.record_stream(addresses[op.block], op.stream)
            done.reserved.append(allocator.statistics.all.reserved_bytes.current)
    finally:
        hooks.unsubscribe(listen)
    stats = allocator.stats()
    done.peak, done.retries = stats["reserved_bytes.all.peak"], stats["num_alloc_retries"]
    done.segments = allocator.snapshot_segments()
    return done


def write(path: Path, made: Program, done: Run, conf: str, *, lost: float, stacks: bool) -> int:
    """Write a run as PyTorch does, without the first part of its events; return the first operation that is in it."""
    entries: list[dict[str, Any]] = []
    own = [i for i, (event, _) in enumerate(done.events) if event.kind in _ACTIONS]
    dropped = int(lost * len(own))
    for i in own[dropped:]:
        event, op = done.events[i]
        of_block = event.kind in (Kind.BLOCK_ALLOC, Kind.BLOCK_FREE_REQUESTED, Kind.BLOCK_FREE_COMPLETED)
        entry: dict[str, Any] = {
            "action": _ACTIONS[Kind(event.kind)],
            "addr": event.address,
            "size": event.aux0 if of_block else event.size,
            "stream": event.stream,
        }
        if event.kind == Kind.OOM:
            entry["device_free"] = event.aux0
        if stacks:
            entry["frames"] = [{"filename": "train.py", "name": "step", "line": made.ops[op].site}]
            entry["pool_id"] = unpack_pool(event.aux1)
        entries.append(entry)
    settings = Settings.parse(conf)
    stated = {
        "PYTORCH_CUDA_ALLOC_CONF": conf,
        "max_split_size": settings.max_split_size if settings.max_split_size < 1 << 60 else -1,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {1 << i: n for i, n in enumerate(settings.roundup_power2_divisions)},
    }
    snapshot = {"segments": done.segments, "device_traces": [entries], "allocator_settings": stated}
    path.write_bytes(pickle.dumps(snapshot))
    return done.events[own[dropped]][1]


def record(
    path: Path, made: Program, done: Run, conf: str, *, lost: float = 0, stacks: bool = False
) -> tuple[MemorySnapshot, Settings, int]:
    """Write a run and read it; return what was read, the settings, and the first operation that is in it."""
    first = write(path, made, done, conf, lost=lost, stacks=stacks)
    snapshot = torch_snapshot.read(path)
    settings, _ = recorded_settings(snapshot)
    return snapshot, replace(settings, text=conf), first


@dataclass
class Pair:
    """A prediction for the settings `conf` from a recording under `recorded`, and the truth."""

    seed: int
    recorded: str
    conf: str
    lost: float
    stacks: bool
    advice: Advice
    predicted: WhatIfOutcome
    truth: Run
    peak: int  # of the truth, from where the recording begins
    total: int  # bytes of the device

    @property
    def shown_limit(self) -> int | None:
        """How many bytes the recording shows the device to have, if it does."""
        return self.advice.record.limit_bytes if self.advice.record else None

    @property
    def limited(self) -> bool:
        """Whether a memory fraction was in force when it was recorded."""
        return "fraction" in self.recorded

    @property
    def is_inside(self) -> bool:
        """Whether the true peak lies in the predicted range, which is widened by 1 %."""
        least, most = self.predicted.reserved_least_bytes, self.predicted.reserved_most_bytes
        return 0.99 * least <= self.peak and (most is None or self.peak <= 1.01 * most)

    @property
    def width(self) -> float:
        """The width of the predicted range as a share of its least; infinite if it has no end."""
        least, most = self.predicted.reserved_least_bytes, self.predicted.reserved_most_bytes
        return inf if most is None else most / least - 1

    @property
    def error(self) -> float:
        """By what share the predicted peak differs from the true one."""
        return self.predicted.reserved_peak_bytes / self.peak - 1


def total_for(seed: int, done: Run) -> int:
    """Return the bytes of the device: with plenty, or less than the program reserved when it had plenty."""
    return int(done.peak * random.Random(seed).choice((10, 10, 1.02, 0.9, 0.8, 0.7)))


def pairs(seed: int, *, card_known: bool = True) -> Iterator[Pair]:
    """Yield the predictions for one program from each of two recordings, whole and cut, for all other settings."""
    draw = random.Random(seed)
    made = program(seed)
    total = total_for(seed, run(made, "", 1 << 44))
    truths = {conf: run(made, conf, total) for conf in CONFS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "snapshot.pickle")
        for recorded in draw.sample(CONFS, 2):
            lost, stacks = draw.choice((0.0, 0.0, 0.3, 0.7)), draw.random() < 0.5
            done = truths[recorded]
            trace, settings, first = record(path, made, done, recorded, lost=lost, stacks=stacks)
            others = [conf for conf in CONFS if conf != recorded]
            options: dict[str, Any] = {"recorded": settings, "recorded_memory": total if card_known else None}
            advice = advise(trace, 0, **options)
            for conf, outcome in zip(others, what_if(trace, 0, others, **options), strict=True):
                truth = truths[conf]
                if first >= len(truth.reserved):
                    continue  # it ran out of memory in the part that is lost: nothing of it was recorded
                peak = max(truth.reserved[first:])
                yield Pair(seed, recorded, conf, lost, stacks, advice, outcome, truth, peak, total)


def _share(found: Iterable[bool]) -> str:
    flags = list(found)
    return f"{sum(flags) / len(flags):7.1%}" if flags else "      -"


def print_table(found: list[Pair]) -> None:
    """Print how far predictions are off, and what the caveats say of that.

    After that: the pairs whose range has the truth, the median width of the ranges, and the share without an end. The
    last columns: of the pairs with a caveat the share that is off by more than 1 %, and of the pairs that are off
    by more than 1 % and 5 % the share that has one.
    """
    print(f"{'':24}pairs  <=1 %   <=5 %   worst   in range  width   no end  marked  right   of >1 % of >5 %")
    groups = {
        "all": found,
        "whole recordings": [pair for pair in found if not pair.lost],
        "cut recordings": [pair for pair in found if pair.lost],
        "without caveat": [pair for pair in found if not pair.predicted.caveats],
        **{caveat.value: [pair for pair in found if caveat in pair.predicted.caveats] for caveat in Caveat},
    }
    for name, some in groups.items():
        errors = [abs(pair.error) for pair in some]
        marked = [pair for pair in some if pair.predicted.caveats]
        cells = [_share(error <= limit for error in errors) for limit in (0.01, 0.05)]
        cells += [f"{max(errors, default=0):7.1%}", f"{_share(pair.is_inside for pair in some)[-7:]:>9}"]
        cells += [f"{median(pair.width for pair in some):7.1%}" if some else "      -"]
        cells += [_share(pair.width == inf for pair in some), _share(bool(pair.predicted.caveats) for pair in some)]
        cells += [_share(abs(pair.error) > 0.01 for pair in marked)]
        cells += [
            _share(bool(pair.predicted.caveats) for pair in some if abs(pair.error) > limit) for limit in (0.01, 0.05)
        ]
        print(f"{name:22}{len(some):7} {' '.join(cells)}")


def print_limits(found: list[Pair]) -> None:
    """Print how far the limit that recordings show is from the bytes of the device."""
    limits = {(pair.seed, pair.recorded): pair for pair in found if pair.advice.record and not pair.limited}
    shown = [pair.shown_limit / pair.total - 1 for pair in limits.values() if pair.shown_limit is not None]
    print(
        f"{len(shown)} of {len(limits)} recordings show a limit; {_share(abs(e) <= 0.01 for e in shown)} of them"
        f" within 1 % of the card, {_share(abs(e) <= 0.05 for e in shown)} within 5 %, worst {max(map(abs, shown), default=0):.1%}"
    )


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("programs", type=int, nargs="?", default=20)
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("--unknown-card", action="store_true", help="do not say how much memory the device had")
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.programs)
    found = [pair for seed in seeds for pair in pairs(seed, card_known=not options.unknown_card)]
    found.sort(key=lambda pair: -abs(pair.error))
    off = [pair for pair in found if not pair.predicted.caveats and abs(pair.error) > 0.01]
    for pair in off + [pair for pair in found if pair.predicted.caveats and not pair.is_inside]:
        least, most = pair.predicted.reserved_least_bytes, pair.predicted.reserved_most_bytes
        print(
            f"{100 * pair.error:+8.2f} % seed {pair.seed} {pair.recorded or 'defaults'} -> {pair.conf or 'defaults'}"
            f" retries {pair.predicted.retries}/{pair.truth.retries}"
            f" fails {pair.predicted.failures}/{pair.truth.ooms} lost {pair.lost} {pair.peak / MIB:.0f} MiB, said"
            f" {least / MIB:.0f} to {'any' if most is None else f'{most / MIB:.0f}'}"
            f" {' '.join(pair.predicted.caveats)}"
        )
    print_table(found)
    if options.unknown_card:
        print_limits(found)


if __name__ == "__main__":
    main()
