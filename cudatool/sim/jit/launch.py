"""Running a kernel's native code over a grid: workers, their scratch memory, and what can go wrong."""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

from cudatool.sim.jit.collective import ROW
from cudatool.sim.jit.context import EXIT, MAX_THREADS, Context
from cudatool.sim.jit.footprint import MAP_NORESERVE, PAGE, Footprint
from cudatool.sim.jit.native import guarded_call

__all__ = [
    "KernelAssert",
    "KernelDeadlock",
    "KernelError",
    "KernelFault",
    "KernelTrap",
    "Launch",
    "run",
    "take_message",
]

_WINDOW = 1 << 32  # of shared memory: what a 32-bit offset can reach, so that no such access leaves it
_WORTH_SHARING = 2048  # threads of a grid; for less, waking another host thread takes longer than running them
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE


class KernelError(Exception):
    """A kernel did not run to its end."""


class KernelFault(KernelError):
    """A kernel accessed memory that does not exist.

    Parameters
    ----------
    signal
        Number of the signal that the host raised.
    address
        What was accessed.
    """

    def __init__(self, signal: int, address: int) -> None:
        super().__init__(signal, address)
        self.signal = signal
        self.address = address

    def __str__(self) -> str:
        return f"the kernel was ended by signal {self.signal} at address {self.address:#x}"


class KernelTrap(KernelError):
    """A kernel executed ``trap``."""


class KernelAssert(KernelTrap):
    """An ``assert`` in a kernel failed."""


class KernelDeadlock(KernelError):
    """Threads of a block wait for each other, and none can go on."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch needs.

    Attributes
    ----------
    entry
        Address of the native code.
    params, table
        Addresses of the packed parameters and of the table of global variables' addresses.
    shared_bytes, dynamic_bytes
        Shared memory of a block: all of it, and the part that the launch asked for.
    local_bytes
        Local memory of a thread.
    slot_bytes
        What the native code keeps across suspensions.
    heap
        Of ``malloc`` in kernels (``cudatool_heap_create``), 0 for none.
    """

    entry: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: int
    table: int
    shared_bytes: int
    dynamic_bytes: int
    local_bytes: int
    slot_bytes: int
    heap: int = 0


class _Region:
    """Zeroed memory that only ever grows, at an address that is a multiple of the page size.

    `reserve` bytes of address space follow from its start; touching them beyond what is in use is a fault.
    """

    def __init__(self, reserve: int = 0) -> None:
        self.reserve = reserve
        self.size = 0
        self.address = 0
        self._map: mmap.mmap | None = None

    def need(self, size: int) -> bool:
        """Make at least `size` bytes usable; return whether the memory is new."""
        size = max(-(-size // PAGE) * PAGE, PAGE)
        if size <= self.size:
            return False
        total = max(size + PAGE, self.reserve)
        if self._map is None or not self.reserve:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
            self._map = mmap.mmap(-1, total, flags=flags, prot=_PROT_READ_WRITE)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if self.reserve:
            libc = _libc()
            libc.mprotect(self.address, size, _PROT_READ_WRITE)
            libc.mprotect(self.address + size, total - size, _PROT_NONE)
        self.size = size
        return True


def take_message(context: Context) -> str:
    """Return what an assertion left in `context`, once."""
    address, context.message = context.message, 0
    text = ctypes.string_at(address).decode("utf-8", "replace") if address else ""
    _libc().free(address)
    return text


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free.restype = None
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


class _Worker:
    """The memory with which one host thread runs blocks."""

    def __init__(self) -> None:
        self.context = Context()
        self.shared = _Region(_WINDOW + PAGE)
        self.local = _Region()
        self.slots = _Region()
        self.fault = ctypes.c_uint64()

    def prepare(self, launch: Launch) -> None:
        self.shared.need(launch.shared_bytes)
        self.local.need(launch.local_bytes * MAX_THREADS)
        if self.slots.need(launch.slot_bytes + 64):
            # Threads that a partial warp lacks have ended.
            (ctypes.c_uint32 * ROW).from_address(self.slots.address)[:] = [EXIT] * ROW


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="cudatool-sim")


_workers: list[_Worker] = []
_workers_lock = threading.Lock()


def _take_workers(count: int) -> list[_Worker]:
    with _workers_lock:
        taken = [_workers.pop() for _ in range(min(count, len(_workers)))]
    return taken + [_Worker() for _ in range(count - len(taken))]


def _order(blocks: int, seed: int | None) -> tuple[int, int]:
    """Return multiplier and offset that permute block numbers; without a seed they keep their order."""
    if seed is None or blocks == 1:
        return 1, 0
    generator = random.Random(seed)
    multiplier = generator.randrange(1, blocks)
    while math.gcd(multiplier, blocks) != 1:
        multiplier += 1
    return multiplier, generator.randrange(blocks)


def run(
    launch: Launch,
    threads: int,
    seed: int | None,
    footprint: Footprint | None = None,
    watch: Callable[[list[Context]], None] | None = None,
) -> Context | None:
    """Run all blocks; return the context of the worker that was stopped, if one was.

    `watch` gets the workers' contexts before they start.

    Raises
    ------
    KernelFault
        The code touched memory that does not exist.
    """
    blocks = math.prod(launch.grid)
    block_threads = math.prod(launch.block)
    threads = max(1, min(threads, blocks)) if blocks * block_threads >= _WORTH_SHARING else 1
    workers = _take_workers(threads)
    counter = ctypes.c_uint64(0)
    multiplier, offset = _order(blocks, seed)
    for worker in workers:
        worker.prepare(launch)
        context = worker.context
        context.grid_x, context.grid_y, context.grid_z = launch.grid
        context.block_x, context.block_y, context.block_z = launch.block
        context.threads = block_threads
        context.dynamic_shared = launch.dynamic_bytes
        context.blocks = blocks
        context.chunk = max(1, min(blocks // (8 * threads), 1024))
        context.order_multiplier, context.order_offset = multiplier, offset
        context.next_block = ctypes.addressof(counter)
        context.params, context.globals = launch.params, launch.table
        context.shared, context.shared_bytes = worker.shared.address, launch.shared_bytes
        context.local, context.slots = worker.local.address, worker.slots.address
        context.heap = launch.heap
        context.status = context.message = 0
        # Lanes that the last warp lacks, for a block whose size is not a multiple of 32.
        tail = min(-block_threads % 32, ROW - block_threads)
        first = worker.slots.address + 4 * block_threads
        (ctypes.c_uint32 * tail).from_address(first)[:] = [EXIT] * tail
        context.arena_base = context.arena_bytes = 0
        if footprint is not None:
            context.arena_base, context.arena_bytes = footprint.base, footprint.size
            context.shadow_read, context.shadow_write, context.shadow_atomic, context.shadow_pages = footprint.addresses
    if watch is not None:
        watch([worker.context for worker in workers])
    jobs = [_start(worker, launch.entry, counter, blocks) for worker in workers[1:]]
    signals = [_run_worker(workers[0], launch.entry, counter, blocks), *(job.result() if job else 0 for job in jobs)]
    try:
        for worker, signal in zip(workers, signals, strict=True):
            if signal:
                raise KernelFault(signal, worker.fault.value)
        return next((Context.from_buffer_copy(w.context) for w in workers if w.context.status), None)
    finally:
        with _workers_lock:
            _workers.extend(workers)


def _start(worker: _Worker, entry: int, counter: ctypes.c_uint64, blocks: int) -> Future[int] | None:
    try:
        return _pool().submit(_run_worker, worker, entry, counter, blocks)
    except RuntimeError:  # the interpreter is ending and starts nothing: the calling thread runs all blocks
        return None


def _run_worker(worker: _Worker, entry: int, counter: ctypes.c_uint64, blocks: int) -> int:
    signal = guarded_call(entry, ctypes.addressof(worker.context), ctypes.addressof(worker.fault))
    if signal:
        counter.value = blocks  # the others stop, too
    return signal
