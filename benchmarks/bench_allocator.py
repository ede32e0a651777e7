"""The caching allocator's speed: alloc+free from the cache, and recorded programs replayed.

    python benchmarks/bench_allocator.py [SNAPSHOT.pickle ...]

Snapshots are PyTorch's (also compressed with xz). Where PyTorch or CuPy and a GPU are there, their alloc+free is
measured beside ours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from cudatool.collect import plain_pickle
from cudatool.memory import CachingAllocator, Settings
from cudatool.trace import hooks

MIB = 1024 * 1024
DEFAULT_SNAPSHOT = Path(__file__).parents[1] / "tests" / "data" / "prefetch__default.pickle.xz"


class EndlessProvider:
    """A device that never runs out and whose streams are always done."""

    def __init__(self) -> None:
        self.next_address = 1 << 40

    def allocate(self, size: int, stream: int) -> int:
        self.next_address += size
        return self.next_address - size

    def free(self, address: int) -> None:
        pass

    def record_event(self, stream: int) -> int:
        return 0

    def event_passed(self, token: int) -> bool:
        return True

    def synchronize_event(self, token: int) -> None:
        pass

    def memory_info(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40


def new_allocator(conf: str = "") -> CachingAllocator:
    return CachingAllocator(EndlessProvider(), device=0, settings=Settings.parse(conf))


def best_ns(call: Callable[[], object], calls: int = 20_000, rounds: int = 7) -> float:
    """Return the time of one call, in the fastest round."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter_ns() - start) / calls)
    return best


def hit_paths() -> list[tuple[str, float]]:
    """Measure alloc+free of one block, with a few hundred other free blocks around."""
    rows = []
    for label, size in (
        ("a cached segment fits exactly", 30 * MIB),
        ("a cached part of a segment fits exactly", 100),
        ("a cached block is split, and merged again", 100_000),
    ):
        allocator = new_allocator()
        held = [allocator.malloc(512 * (1 + index % 100), 0) for index in range(1000)]
        for address in held[::3]:
            allocator.free(address)
        allocator.free(allocator.malloc(size, 0))
        rows.append((label, best_ns(lambda a=allocator, s=size: a.free(a.malloc(s, 0)))))  # type: ignore[misc]
    return rows


def peers() -> list[tuple[str, float]]:
    """Measure the same through PyTorch and CuPy, as far as they and a GPU are there."""
    rows = []
    try:
        import torch
    except ImportError:
        pass
    else:
        if torch.cuda.is_available():
            alloc, delete = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch.cuda.caching_allocator_delete
            torch.cuda.init()
            delete(alloc(100, 0))
            rows.append(("PyTorch, raw alloc and delete", best_ns(lambda: delete(alloc(100, 0)))))
    try:
        import cupy
    except ImportError:
        pass
    else:
        if cupy.cuda.is_available():
            pool = cupy.get_default_memory_pool()
            rows.append(("CuPy, pool.malloc and drop", best_ns(lambda: pool.malloc(100))))
    return rows


def replay(path: Path) -> tuple[int, float]:
    """Run a recording's requests; return the number of recorded events and the seconds it took."""
    snapshot = plain_pickle.load(str(path))
    entries = max(snapshot["device_traces"], key=len)
    allocator = new_allocator(snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF", ""))
    completed = {i for i, entry in enumerate(entries) if entry["action"] == "free_completed"}
    steps = [
        (entry["action"] == "alloc", entry["addr"], entry["size"], entry["stream"], i + 1 not in completed)
        for i, entry in enumerate(entries)
        if entry["action"] in ("alloc", "free_requested")
    ]
    addresses: dict[int, int] = {}
    start = time.perf_counter()
    for is_alloc, address, size, stream, is_late in steps:
        if is_alloc:
            addresses[address] = allocator.malloc(size, stream)
        elif address in addresses:
            if is_late:
                allocator.record_stream(addresses[address], stream + 1)
            allocator.free(addresses.pop(address))
    return len(entries), time.perf_counter() - start


def main() -> None:
    print(f"{'alloc + free of a cached block':<48}{'ns':>10}")
    for label, time_ns in hit_paths():
        print(f"  {label:<46}{time_ns:>10.0f}")
    hooks.subscribe(lambda event: None)
    label, time_ns = hit_paths()[1]
    print(f"  {label + ', 1 subscriber':<46}{time_ns:>10.0f}")
    hooks.reset()
    for label, time_ns in peers():
        print(f"  {label:<46}{time_ns:>10.0f}")
    print(f"\n{'replay of a recording':<36}{'events':>10}{'seconds':>10}{'events/s':>12}")
    for path in [Path(name) for name in sys.argv[1:]] or [DEFAULT_SNAPSHOT]:
        events, seconds = replay(path)
        print(f"  {path.name.split('.')[0]:<34}{events:>10}{seconds:>10.2f}{events / seconds:>12.0f}")


if __name__ == "__main__":
    main()
