"""Run random requests through PyTorch's allocator, or through ours, and write what happened.

    python allocator_requests.py SEED COUNT LIMIT OUT.json [PYTORCH.json]

LIMIT is how many MiB may be reserved, 0 for all of the card's. Without the last argument it is PyTorch's, with it ours,
each in a process of its own with PyTorch's streams. What is written are the events, the final segments and the
statistics, in PyTorch's schema.

Between free blocks of one size the lowest address decides, and the driver gives two processes different addresses. Ours
therefore sees its memory under the addresses, and its streams under the handles, that PyTorch's run had.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

STREAMS = 3
POOLS = 2
CAPTURING = 1  # the stream of captures
BUSY = 300_000_000  # clock ticks, about 0.15 s: longer than it takes to get to the next synchronization

Call = tuple[Any, ...]


def script(seed: int, count: int) -> Iterator[Call]:
    """Yield calls, about one for each of `count` numbers: what, then its arguments. Blocks and graphs are numbers."""
    rng = random.Random(seed)
    live: list[int] = []
    graphs: list[int] = []
    pool = graph = -1  # the private pool, or the capture, that is under way
    is_used = False  # whether blocks used by other streams may have been freed meanwhile

    def end() -> Iterator[Call]:
        nonlocal pool, graph, is_used
        if pool >= 0:
            yield "end_pool", pool
        if graph >= 0:
            yield "end_graph", graph
        if is_used:  # their events are recorded now, and on an idle stream would pass any moment
            yield ("keep_busy",)
        pool, graph, is_used = -1, -1, False

    for number in range(count):
        what = rng.random()
        if what < 0.52 or not live:
            size = int(2 ** rng.uniform(0, 28))
            yield "alloc", number, size, rng.choices(range(STREAMS), (6, 2, 1))[0]
            live.append(number)
        elif what < 0.94:
            block = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.02:
                yield "use", block, rng.randrange(STREAMS)
                is_used = True
            yield "free", block
        elif what < 0.96:
            if graph < 0:  # waiting would end a capture with an error
                yield ("synchronize",)
        elif what < 0.97:
            if graph < 0:
                yield ("empty_cache",)
        elif what < 0.985:
            if pool >= 0 or graph >= 0:
                yield from end()
            else:
                pool = rng.randrange(POOLS)
                yield "begin_pool", pool
        elif what < 0.993:
            if pool >= 0 or graph >= 0:
                yield from end()
            else:
                graph = number
                graphs.append(graph)
                yield "begin_graph", graph
        elif what < 0.996:
            if pool < 0 and graph < 0:
                yield "drop_pool", rng.randrange(POOLS)
        elif graphs and graph < 0 and pool < 0:
            yield "drop_graph", graphs.pop(rng.randrange(len(graphs)))
    yield from end()
    yield ("synchronize",)
    yield "alloc", count, 100, 0


class Torch:
    """PyTorch's own allocator."""

    def __init__(self, fraction: float, streams: list[torch.cuda.Stream]) -> None:
        if fraction:
            torch.cuda.set_per_process_memory_fraction(fraction)
        torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
        self.streams = streams
        self.blocks: dict[int, torch.Tensor] = {}
        self.pools: dict[int, torch.cuda.MemPool] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.context: Any = None
        self.begin_graph(-1)
        self.end_graph(-1)

    def alloc(self, block: int, size: int, stream: int) -> None:
        try:
            with torch.cuda.stream(self.streams[stream]):
                self.blocks[block] = torch.empty(size, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass

    def use(self, block: int, stream: int) -> None:
        if block in self.blocks:
            self.blocks[block].record_stream(self.streams[stream])

    def free(self, block: int) -> None:
        self.blocks.pop(block, None)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def begin_pool(self, pool: int) -> None:
        if pool not in self.pools:
            self.pools[pool] = torch.cuda.MemPool()
        self.context = torch.cuda.use_mem_pool(self.pools[pool])
        self.context.__enter__()

    def end_pool(self, pool: int) -> None:
        self.context.__exit__(None, None, None)
        self.context = None

    def drop_pool(self, pool: int) -> None:
        self.pools.pop(pool, None)

    def begin_graph(self, graph: int) -> None:
        self.graphs[graph] = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.streams[CAPTURING]):
            self.graphs[graph].capture_begin(capture_error_mode="relaxed")
            torch.cuda._sleep(1)  # a graph without nodes draws a warning

    def end_graph(self, graph: int) -> None:
        with torch.cuda.stream(self.streams[CAPTURING]):
            self.graphs[graph].capture_end()

    def drop_graph(self, graph: int) -> None:
        del self.graphs[graph]

    def result(self) -> dict[str, Any]:
        snapshot = torch.cuda.memory._snapshot()
        stats = {name: value for name, value in torch.cuda.memory_stats().items() if isinstance(value, int)}
        return {"events": snapshot["device_traces"][0], "segments": snapshot["segments"], "stats": stats}


class Renamed:
    """A provider's memory under the addresses that PyTorch got, one after the other: a segment provider itself."""

    def __init__(self, provider: Any, theirs: dict[str, Any], streams: list[int]) -> None:
        self.provider = provider
        self.streams = dict(zip(theirs["streams"], streams, strict=True))
        self.segments = deque(event["addr"] for event in theirs["events"] if event["action"] == "segment_alloc")
        self.ranges = deque(reserved_ranges(theirs["events"], theirs["total_memory"]))
        self.real: dict[int, int] = {}  # by PyTorch's address, of whole segments and ranges

    def allocate(self, size: int, stream: int) -> int:
        return self.rename(self.provider.allocate(size, self.streams[stream]), self.segments)

    def free(self, address: int) -> None:
        self.provider.free(self.real.pop(address))

    def reserve(self, size: int, stream: int) -> int:
        return self.rename(self.provider.reserve(size, self.streams[stream]), self.ranges)

    def unreserve(self, address: int, size: int) -> None:
        self.provider.unreserve(self.real.pop(address), size)

    def map(self, address: int, size: int, page_size: int) -> None:
        self.provider.map(self.real_address(address), size, page_size)

    def unmap(self, address: int, size: int, page_size: int) -> None:
        self.provider.unmap(self.real_address(address), size, page_size)

    def record_event(self, stream: int) -> Any:
        return self.provider.record_event(self.streams[stream])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.provider, name)

    def rename(self, real: int, names: deque[int]) -> int:
        address = names.popleft() if names else real
        self.real[address] = real
        return address

    def real_address(self, address: int) -> int:
        start = max(start for start in self.real if start <= address)
        return self.real[start] + address - start


def reserved_ranges(events: list[dict[str, Any]], size: int) -> Iterator[int]:
    """Yield where the ranges of expandable segments begin, in order. The first page of a range is mapped first.

    A range is larger than the card's memory, which is `size`.
    """
    mapped: dict[int, int] = {}  # start -> bytes
    for event in events:
        if event["action"] in ("segment_map", "segment_unmap"):
            address = event["addr"]
            start = max((start for start in mapped if start <= address < start + size), default=None)
            if start is None:
                start = address
                mapped[start] = 0
                yield start
            mapped[start] += event["size"] if event["action"] == "segment_map" else -event["size"]
            if not mapped[start]:
                del mapped[start]


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

    def __init__(self, provider: Any, streams: list[int], fraction: float, total_memory: int) -> None:
        from cudatool.errors import OutOfMemoryError
        from cudatool.memory import CachingAllocator
        from cudatool.trace import hooks

        self.out_of_memory = OutOfMemoryError
        self.events: list[dict[str, Any]] = []
        hooks.subscribe(self.record)
        self.allocator = CachingAllocator(provider, device=0, total_memory=total_memory)
        if fraction:
            self.allocator.set_memory_fraction(fraction)
        self.streams = streams
        self.addresses: dict[int, int] = {}
        self.pools: dict[int, tuple[int, int]] = {}
        self.last_pool = 0
        for _ in range(2):  # PyTorch keeps two numbers of its random generator on the device while graphs exist
            self.allocator.malloc(8, self.streams[CAPTURING])
        self.begin_graph(-1)
        self.end_graph(-1)

    def record(self, event: Any) -> None:
        action = self.ACTIONS.get(event.kind.name)
        if action is not None:
            size = event.aux0 if action in ("alloc", "free_requested", "free_completed") else event.size
            self.events.append({"action": action, "addr": event.address, "size": size, "stream": event.stream})

    def alloc(self, block: int, size: int, stream: int) -> None:
        try:
            self.addresses[block] = self.allocator.malloc(size, self.streams[stream])
        except self.out_of_memory:
            pass

    def use(self, block: int, stream: int) -> None:
        if block in self.addresses:
            self.allocator.record_stream(self.addresses[block], self.streams[stream])

    def free(self, block: int) -> None:
        self.allocator.free(self.addresses.pop(block, 0))

    def empty_cache(self) -> None:
        self.allocator.empty_cache()

    def begin_pool(self, pool: int) -> None:
        if pool not in self.pools:
            self.last_pool += 1
            self.pools[pool] = 0, self.last_pool
            self.allocator.create_or_incref_pool(self.pools[pool])
        self.allocator.begin_allocate_to_pool(self.pools[pool], lambda stream: True)

    def end_pool(self, pool: int) -> None:
        self.allocator.end_allocate_to_pool(self.pools[pool])
        self.allocator.release_pool(self.pools[pool])

    def drop_pool(self, pool: int) -> None:
        if pool in self.pools:
            id = self.pools.pop(pool)
            self.allocator.release_pool(id)
            self.allocator.empty_cache(id)

    def begin_graph(self, graph: int) -> None:
        self.allocator.begin_allocate_to_pool((graph + 2, 0), lambda stream: stream == self.streams[CAPTURING])

    def end_graph(self, graph: int) -> None:
        self.allocator.end_allocate_to_pool((graph + 2, 0))

    def drop_graph(self, graph: int) -> None:
        self.allocator.release_pool((graph + 2, 0))

    def result(self) -> dict[str, Any]:
        segments = self.allocator.snapshot_segments()
        return {"events": self.events, "segments": segments, "stats": self.allocator.stats()}


def main() -> None:
    (seed, count, limit), out = map(int, sys.argv[1:4]), sys.argv[4]
    torch.cuda.init()
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(STREAMS - 1))]
    handles = [stream.cuda_stream for stream in streams]
    total_memory = torch.cuda.get_device_properties(0).total_memory
    fraction = (limit << 20) / total_memory

    def keep_busy(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY)

    allocator: Torch | Cudatool
    if len(sys.argv) < 6:
        allocator = Torch(fraction, streams)
    else:
        from cudatool import _driver
        from cudatool.memory.driver_provider import DriverProvider

        _driver.choose("cuda")
        _driver.initialize()
        with open(sys.argv[5]) as file:
            theirs = json.load(file)
        provider = Renamed(DriverProvider(0), theirs, handles)
        handles = theirs["streams"]
        allocator = Cudatool(provider, handles, fraction, total_memory)
    for what, *arguments in script(seed, count):
        if what == "synchronize":
            torch.cuda.synchronize()
        elif what == "keep_busy":
            for stream in streams:
                keep_busy(stream)
        else:
            if what == "use":  # not over before the next synchronization
                keep_busy(streams[arguments[-1]])
            getattr(allocator, what)(*arguments)
    with open(out, "w") as file:
        json.dump(allocator.result() | {"streams": handles, "total_memory": total_memory}, file)
    os._exit(0)  # neither side frees what is left: that is not what is compared


if __name__ == "__main__":
    main()
