"""The caching allocator's speed: alloc+free from the cache, and recorded programs replayed.

    python benchmarks/bench_allocator.py [SNAPSHOT.pickle ...]

Snapshots are PyTorch's (also compressed with xz). If a GPU and PyTorch or CuPy are available, their alloc+free is
measured too. Ours is measured as installed (compiled, unless the install is editable), and uncompiled from this
checkout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

if "--source" in sys.argv:  # before the import: the checkout's modules instead of the installed ones
    sys.path.insert(0, str(Path(__file__).parents[1]))

from cudatool.collect import plain_pickle
from cudatool.memory import CachingAllocator, Settings, policy
from cudatool.trace import hooks

MIB = 1024 * 1024
DEFAULT_SNAPSHOT = Path(__file__).parents[1] / "tests" / "data" / "prefetch__default.pickle.xz"


class EndlessProvider:
    """A device with unlimited memory whose streams are always idle."""

    def __init__(self) -> None:
        self.next_address = 1 << 40

    def allocate(self, size: int, stream: int) -> int:
        self.next_address += size
        return self.next_address - size

    def free(self, address: int) -> None:
        pass

    def reserve(self, size: int, stream: int) -> int:
        return self.allocate(size, stream)

    def unreserve(self, address: int, size: int) -> None:
        pass

    def map(self, address: int, size: int, page_size: int) -> None:
        pass

    def unmap(self, address: int, size: int, page_size: int) -> None:
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
    """Measure alloc+free of one block, with a few hundred other free blocks in the cache."""
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
    """Measure the same through PyTorch and CuPy, if they and a GPU are available."""
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


def measure(snapshots: list[Path]) -> dict[str, float]:
    """Return the measurements of this process: ns, and events per second."""
    rows = dict(hit_paths())
    hooks.subscribe(lambda event: None)
    label, time_ns = hit_paths()[1]
    rows[f"{label}, 1 subscriber"] = time_ns
    hooks.reset()
    for path in snapshots:
        events, seconds = replay(path)
        rows[f"{path.name.split('.')[0]}: {events:,} events"] = events / seconds
    return rows


def in_another_process(*options: str) -> tuple[dict[str, float], bool]:
    """Return the measurements of another process, and whether its policy is compiled."""
    command = [sys.executable, __file__, "--rows", *options]
    rows, compiled = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return rows, compiled


def main() -> None:
    snapshots = [Path(name) for name in sys.argv[1:] if not name.startswith("--")] or [DEFAULT_SNAPSHOT]
    if "--rows" in sys.argv:
        print(json.dumps([measure(snapshots), policy.__file__.endswith(".so")]))
        return
    names = [str(path) for path in snapshots]
    installed, compiled = in_another_process(*names)
    source, _ = in_another_process("--source", *names)
    heads = "compiled" if compiled else "installed", "source"
    print(f"{'alloc + free of a cached block, ns':<48}{heads[0]:>12}{heads[1]:>12}")
    for label in installed:
        if "events" in label:
            continue
        print(f"  {label:<46}{installed[label]:>12.0f}{source[label]:>12.0f}")
    for label, time_ns in peers():
        print(f"  {label:<46}{time_ns:>12.0f}")
    print(f"\n{'replayed events a second':<48}{heads[0]:>12}{heads[1]:>12}")
    for label in installed:
        if "events" in label:
            print(f"  {label:<46}{installed[label]:>12,.0f}{source[label]:>12,.0f}")


if __name__ == "__main__":
    main()
