"""Run random requests through PyTorch's allocator, or through ours, and write what happened.

    python allocator_requests.py torch|cudatool SEED COUNT FRACTION OUT.json

Both run in a process of their own with PyTorch's streams. What is written are the events, the final segments and the
statistics, in PyTorch's schema.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import torch

POOL = (0, 1)
STREAMS = 3


def script(seed: int, count: int) -> list[tuple[Any, ...]]:
    """Return calls: what, then a number for the block, then size and stream."""
    rng = random.Random(seed)
    calls: list[tuple[Any, ...]] = []
    live: list[int] = []
    in_pool = False
    for number in range(count):
        what = rng.random()
        if what < 0.52 or not live:
            size = int(2 ** rng.uniform(0, 28))
            calls.append(("alloc", number, size, rng.choices(range(STREAMS), (6, 2, 1))[0]))
            live.append(number)
        elif what < 0.94:
            block = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.03:
                calls.append(("use", block, rng.randrange(STREAMS)))
            calls.append(("free", block))
        elif what < 0.96:
            calls.append(("synchronize",))
        elif what < 0.97:
            calls.append(("empty_cache",))
        elif what < 0.99:
            calls.append(("end_pool" if in_pool else "begin_pool",))
            in_pool = not in_pool
    if in_pool:
        calls.append(("end_pool",))
    calls += [("synchronize",), ("alloc", count, 100, 0)]
    return calls


class Torch:
    """PyTorch's own allocator."""

    def __init__(self, fraction: float) -> None:
        if fraction:
            torch.cuda.set_per_process_memory_fraction(fraction)
        torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
        self.blocks: dict[int, torch.Tensor] = {}
        self.pool = torch.cuda.MemPool()
        self.context: Any = None

    def alloc(self, block: int, size: int, stream: torch.cuda.Stream) -> None:
        try:
            with torch.cuda.stream(stream):
                self.blocks[block] = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass

    def use(self, block: int, stream: torch.cuda.Stream) -> None:
        if block in self.blocks:
            self.blocks[block].record_stream(stream)

    def free(self, block: int) -> None:
        self.blocks.pop(block, None)

    def begin_pool(self) -> None:
        self.context = torch.cuda.use_mem_pool(self.pool)
        self.context.__enter__()

    def end_pool(self) -> None:
        self.context.__exit__(None, None, None)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def result(self) -> dict[str, Any]:
        snapshot = torch.cuda.memory._snapshot()
        stats = {name: value for name, value in torch.cuda.memory_stats().items() if isinstance(value, int)}
        return {"events": snapshot["device_traces"][0], "segments": snapshot["segments"], "stats": stats}


class Cudatool:
    """Our allocator, on the same driver."""

    ACTIONS = {  # noqa: RUF012 - a table
        "BLOCK_ALLOC": "alloc",
        "BLOCK_FREE_REQUESTED": "free_requested",
        "BLOCK_FREE_COMPLETED": "free_completed",
        "SEGMENT_ALLOC": "segment_alloc",
        "SEGMENT_FREE": "segment_free",
        "SEGMENT_MAP": "segment_map",
        "SEGMENT_UNMAP": "segment_unmap",
        "OOM": "oom",
    }

    def __init__(self, fraction: float) -> None:
        from cudatool import _driver
        from cudatool.errors import OutOfMemoryError
        from cudatool.memory import CachingAllocator
        from cudatool.memory.driver_provider import DriverProvider
        from cudatool.trace import hooks

        _driver.choose("cuda")
        _driver.initialize()
        self.out_of_memory = OutOfMemoryError
        self.events: list[dict[str, Any]] = []
        hooks.subscribe(self.record)
        total = torch.cuda.get_device_properties(0).total_memory
        self.allocator = CachingAllocator(DriverProvider(0), device=0, total_memory=total)
        if fraction:
            self.allocator.set_memory_fraction(fraction)
        self.addresses: dict[int, int] = {}
        self.allocator.create_or_incref_pool(POOL)

    def record(self, event: Any) -> None:
        action = self.ACTIONS.get(event.kind.name)
        if action is not None:
            size = event.aux0 if action in ("alloc", "free_requested", "free_completed") else event.size
            self.events.append({"action": action, "addr": event.address, "size": size, "stream": event.stream})

    def alloc(self, block: int, size: int, stream: torch.cuda.Stream) -> None:
        try:
            self.addresses[block] = self.allocator.malloc(size, stream.cuda_stream)
        except self.out_of_memory:
            pass

    def use(self, block: int, stream: torch.cuda.Stream) -> None:
        if block in self.addresses:
            self.allocator.record_stream(self.addresses[block], stream.cuda_stream)

    def free(self, block: int) -> None:
        self.allocator.free(self.addresses.pop(block, 0))

    def begin_pool(self) -> None:
        self.allocator.begin_allocate_to_pool(POOL, lambda stream: True)

    def end_pool(self) -> None:
        self.allocator.end_allocate_to_pool(POOL)
        self.allocator.release_pool(POOL)

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def result(self) -> dict[str, Any]:
        segments = self.allocator.snapshot_segments()
        return {"events": self.events, "segments": segments, "stats": self.allocator.stats()}


def main() -> None:
    side, seed, count, fraction, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
    torch.cuda.init()
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
    allocator = Torch(fraction) if side == "torch" else Cudatool(fraction)
    for what, *arguments in script(seed, count):
        if what == "synchronize":
            torch.cuda.synchronize()
        elif what in ("alloc", "use"):
            if what == "use":  # work that is not over before the next synchronization
                with torch.cuda.stream(streams[arguments[-1]]):
                    torch.cuda._sleep(200_000_000)
            getattr(allocator, what)(*arguments[:-1], streams[arguments[-1]])
        else:
            getattr(allocator, what)(*arguments)
    result = allocator.result()
    result["streams"] = [stream.cuda_stream for stream in streams]
    with open(out, "w") as file:
        json.dump(result, file)
    os._exit(0)  # neither side frees what is left: that is not what is compared


if __name__ == "__main__":
    main()
