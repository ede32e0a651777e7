"""Allocate in and beside captures of CUDA graphs, with PyTorch or with cudatool, and write which addresses came of it.

    python graph_requests.py SEED OUT.json [PYTORCH.json]

Without the last argument it is PyTorch's CUDAGraph, with it ours. Ours then sees its memory under the addresses that
PyTorch's run had (see allocator_requests.py), so nothing may touch it: what is captured are kernels that wait a moment.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from typing import Any

import torch
from allocator_requests import Renamed

EAGER, CAPTURING, SIDE = (0, 1), 2, 3  # numbers of streams; 0 is the default one
COUNT = 400


class Theirs:
    """PyTorch."""

    def __init__(self) -> None:
        torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
        self.streams: list[Any] = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
        self.library: Any = torch.cuda

    def empty(self, size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def sleep(self) -> None:
        torch.cuda._sleep(1)

    def segments(self) -> list[Any]:
        return list(torch.cuda.memory._snapshot()["segments"])


class Place:
    """A generator of random numbers that takes memory for its state, and has none."""

    def __init__(self) -> None:
        self.places: dict[int, Any] = {}

    def begin_capture(self, graph: object) -> None:
        import cudatool

        self.places[id(graph)] = cudatool.empty(16, "u1")

    def end_capture(self, graph: object) -> int:
        return 0

    def forget(self, graph: object) -> None:
        self.places.pop(id(graph), None)


class Ours:
    """The runtime of cudatool, on PyTorch's streams."""

    def __init__(self, theirs: dict[str, Any]) -> None:
        import cudatool
        from cudatool import _driver
        from cudatool.graphs import _graph
        from cudatool.memory import CachingAllocator
        from cudatool.memory.driver_provider import DriverProvider
        from cudatool.runtime import allocator

        _driver.choose("cuda")
        _driver.initialize()
        self.theirs = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
        self.streams = [cudatool.ExternalStream(stream.cuda_stream) for stream in self.theirs]
        handles = [stream.cuda_stream for stream in self.streams]
        provider: Any = Renamed(DriverProvider(0), theirs | {"streams": handles}, handles)
        allocator._allocators[0] = CachingAllocator(provider, device=0, total_memory=theirs["total_memory"])
        place = Place()
        _graph.default_generator = lambda device: place  # type: ignore[assignment, return-value]
        self.library = cudatool

    def empty(self, size: int) -> Any:
        return self.library.empty(size, "u1")

    def sleep(self) -> None:
        with torch.cuda.stream(self.theirs[self.streams.index(self.library.current_stream())]):
            torch.cuda._sleep(1)

    def segments(self) -> list[Any]:
        return list(self.library.memory_snapshot())


class Run:
    """One run of the random program. What it does depends on the seed alone."""

    def __init__(self, side: Theirs | Ours, seed: int) -> None:
        self.side = side
        self.library = side.library
        self.rng = random.Random(seed)
        self.live: list[Any] = []
        self.addresses: list[int] = []
        self.graphs: list[tuple[Any, int]] = []  # with the number of its pool, -1 for one of its own
        self.pools = [self.library.graph_pool_handle() for _ in range(2)]
        self.users: Counter[int] = Counter()

    def allocate(self) -> None:
        array = self.side.empty(int(2 ** self.rng.uniform(0, 27)))
        self.live.append(array)
        self.addresses.append(array.data_ptr())

    def free(self) -> None:
        if self.live:
            self.live.pop(self.rng.randrange(len(self.live)))

    def on(self, stream: int) -> Any:
        return self.library.stream(self.side.streams[stream])

    def capture(self) -> None:
        graph, pool, number = self.library.CUDAGraph(), None, -1
        how = self.rng.random()
        if how < 0.4:
            number = self.rng.randrange(len(self.pools))
            pool = self.pools[number]
            self.users[number] += 1
        elif how < 0.6 and self.graphs:
            other, number = self.rng.choice(self.graphs)
            if number >= 0:
                self.users[number] += 1
            pool = other.pool()
        with self.library.graph(graph, pool=pool, stream=self.side.streams[CAPTURING]):
            self.side.sleep()
            for _ in range(self.rng.randrange(2, 30)):
                self.captured()
        self.graphs.append((graph, number))

    def captured(self) -> None:
        what = self.rng.random()
        main, side = self.side.streams[CAPTURING], self.side.streams[SIDE]
        if what < 0.5:
            self.allocate()
        elif what < 0.6:
            side.wait_stream(main)
            with self.on(SIDE):
                self.side.sleep()
                self.allocate()
            main.wait_stream(side)
        elif what < 0.65 and self.live:
            array = self.live.pop(self.rng.randrange(len(self.live)))
            side.wait_stream(main)
            array.record_stream(side)
            main.wait_stream(side)
        else:
            self.free()

    def drop(self) -> None:
        if not self.graphs:
            return
        _, number = self.graphs.pop(self.rng.randrange(len(self.graphs)))
        if number >= 0:
            self.users[number] -= 1
            if not self.users[number]:  # a pool that has lost its last user cannot have a new one
                self.pools[number] = self.library.graph_pool_handle()

    def __call__(self) -> None:
        for _ in range(COUNT):
            what = self.rng.random()
            if what < 0.5:
                with self.on(self.rng.choice(EAGER)):
                    self.allocate()
            elif what < 0.85:
                self.free()
            elif what < 0.88:
                self.library.empty_cache()
            elif what < 0.96:
                self.capture()
            else:
                self.drop()


def main() -> None:
    seed, out = int(sys.argv[1]), sys.argv[2]
    torch.cuda.init()
    side: Theirs | Ours
    if len(sys.argv) < 4:
        side = Theirs()
    else:
        with open(sys.argv[3]) as file:
            side = Ours(json.load(file))
    run = Run(side, seed)
    run()
    handles = [stream.cuda_stream for stream in side.streams]
    result: dict[str, Any] = {
        "addresses": run.addresses,
        "graphs": [graph.pool() for graph, _ in run.graphs],
        "segments": [segment | {"stream": handles.index(segment["stream"])} for segment in side.segments()],
        "total_memory": torch.cuda.get_device_properties(0).total_memory,
    }
    if isinstance(side, Theirs):
        result["events"] = torch.cuda.memory._snapshot()["device_traces"][0]
    with open(out, "w") as file:
        json.dump(result, file)
    os._exit(0)  # neither side frees what is left: that is not what is compared


if __name__ == "__main__":
    main()
