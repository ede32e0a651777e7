"""Running a kernel's native code over a grid: workers, their scratch memory, and what can go wrong."""

from __future__ import annotations

import ctypes
import math
import mmap
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from cudatool.loading.late_dataclasses import dataclass
from cudatool.sim import signals
from cudatool.sim.jit.code import STOP_SIGNAL, guarded_call
from cudatool.sim.jit.context import EXIT, IN_STEP, MAX_THREADS, PASSES, ROW, SHARED_STEP, Context, Stop, array_offset
from cudatool.sim.jit.footprint import MAP_NORESERVE, PAGE, Footprint
from cudatool.sim.jit.host_places import HostPlaces

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor
    from random import Random

    from cudatool.sim.jit.shadow import Found

__all__ = [
    "KernelAssert",
    "KernelBadFree",
    "KernelDeadlock",
    "KernelError",
    "KernelFault",
    "KernelStackOverflow",
    "KernelTimeout",
    "KernelTrap",
    "LaunchRun",
    "NativeLaunch",
    "Stopped",
    "Wait",
    "Worker",
    "count_rounds",
    "run",
    "take_message",
    "workers_for",
]

_WINDOW = 1 << 32  # of shared memory: what a 32-bit offset can reach, so that no such access leaves it
_WORTH_SHARING = 2048  # threads of a grid; for less, waking another host thread takes longer than running them
_MAX_PARKED = 4224  # blocks that a worker has begun and that wait for others: what a GPU has room for
_KEPT_MEMORIES = 64
_NEVER = (1 << 64) - 1
_SHARED_IN_STEP = 16384  # bytes: shared memory of the blocks that run in step, so that the host's caches hold it
_STALLED_S, _STALLED_ROUNDS = 5.0, 100  # without progress before the launch counts as deadlocked
_CHANGING_S = 60.0  # the same while threads hold other values each time: they may work, or count how often they asked
_REPORTED_BLOCKS = 4
_PROT_NONE, _PROT_READ, _PROT_READ_WRITE = 0, mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE


class KernelError(Exception):
    """A kernel did not run to its end.

    Attributes
    ----------
    found
        What the checkers had found until then.
    what
        The message without who and where.
    block, thread, line
        Who ended it, and where in the PTX; empty and 0 if it is not one thread that did.
    """

    found: Sequence[Found] = ()
    what = ""
    block: tuple[int, ...] = ()
    thread = line = 0


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


class KernelBadFree(KernelTrap):
    """A kernel gave ``free`` what is no live block of the device's heap."""


class KernelAssert(KernelTrap):
    """An ``assert`` in a kernel failed."""


class KernelDeadlock(KernelError):
    """Threads wait for each other, and none can go on."""


class KernelStackOverflow(KernelError):
    """Calls went deeper than a thread's stack allows."""


class KernelTimeout(KernelError):
    """A kernel ran longer than it may."""


class NativeLaunch(NamedTuple):
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
    stack_bytes
        Stack of a thread.
    parks
        Whether blocks may wait for other blocks.
    steps
        Whether several blocks may run in step.
    cooperative, workspace
        Whether all blocks run at the same time, and the address of what they synchronize with.
    timeout_s
        After which the launch is ended; 0 for never.
    host
        The host's memory that instrumented code may meet.
    rounds
        What code that counts the rounds of loops adds them to.
    spent
        What code that is not optimized adds its time to, in ns.
    most_rounds
        After which a worker begins no more blocks in such code; None for never.
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
    stack_bytes: int = 1024
    parks: bool = False
    steps: bool = False
    cooperative: bool = False
    workspace: int = 0
    timeout_s: float = 0
    host: HostPlaces | None = None
    rounds: ctypes.c_uint64 | None = None
    spent: ctypes.c_uint64 | None = None
    most_rounds: int | None = None

    @property
    def in_step(self) -> int:
        """How many blocks run each region before any runs the next one."""
        return max(1, min(IN_STEP, _SHARED_IN_STEP // self.shared_step)) if self.steps else 1

    @property
    def shared_step(self) -> int:
        """How far the shared memory of such a block is from that of the one before."""
        return max(-(-self.shared_bytes // SHARED_STEP), 1) * SHARED_STEP

    @property
    def slots_step(self) -> int:
        """How far its slots are."""
        return -(-self.slot_bytes // 64) * 64


@dataclass(frozen=True)
class Wait:
    """A thread that waits: at which suspension (from 1, in the order of the code), and what it left there.

    `mask` is the member mask of a warp operation, `number` and `count` are a barrier's number and thread count.
    """

    thread: int
    suspension: int
    mask: int
    number: int
    count: int


@dataclass(frozen=True)
class Stopped:
    """Why a launch did not run to its end.

    Attributes
    ----------
    context
        Of the worker that was stopped.
    reason
        One of :class:`Stop`.
    waiting
        For each of the first blocks that wait: its coordinates, and its threads.
    """

    context: Context
    reason: int
    waiting: list[tuple[tuple[int, int, int], list[Wait]]]


class _Region:
    """Zeroed memory that only ever grows, at an address that is a multiple of the page size.

    `reserve` bytes of address space follow from its start; touching them beyond what is in use is a fault, and so is
    writing to the page before it. That one may be read: a vector of loads whose lanes before the start are masked would
    take a hundred times as long if none of them could be made.
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
            before = PAGE if self.reserve else 0
            self._map = mmap.mmap(-1, before + total, flags=flags, prot=_PROT_READ_WRITE)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + before
        if self.reserve:
            libc = _libc()
            ctypes.string_at(self.address - PAGE, 1)  # it is there from now on, not only once a thread has read it
            libc.mprotect(self.address - PAGE, PAGE, _PROT_READ)
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


class _Memory:
    """What one block needs while it runs: shared and local memory, and what its threads keep across suspensions."""

    def __init__(self) -> None:
        self.shared = _Region(_WINDOW + PAGE)
        self.local = _Region()
        self.slots = _Region()
        self.current = 0  # the block, in execution order

    def prepare(self, launch: NativeLaunch) -> None:
        others = launch.in_step - 1
        self.shared.need(others * launch.shared_step + launch.shared_bytes)
        self.local.need(launch.local_bytes * MAX_THREADS)
        if self.slots.need(others * launch.slots_step + launch.slot_bytes + 64):
            # In pages that have never been written, stores whose lanes are all masked take a hundred times as long.
            ctypes.memset(self.slots.address, 0, self.slots.size)
            # Threads that a partial warp lacks have ended.
            (ctypes.c_uint32 * ROW).from_address(self.slots.address)[:] = [EXIT] * ROW
        # Lanes that the last warp lacks, for a block whose size is not a multiple of 32.
        threads = math.prod(launch.block)
        tail = min(-threads % 32, ROW - threads)
        (ctypes.c_uint32 * tail).from_address(self.slots.address + 4 * threads)[:] = [EXIT] * tail

    def checksum(self, start: int) -> int:
        """Return a checksum of all that the block's threads hold; `start` is that of what comes before."""
        # How often its threads were let go on is no part of it.
        ctypes.c_uint32.from_address(self.slots.address + PASSES).value = 0
        for region in (self.slots, self.shared, self.local):
            start = zlib.crc32((ctypes.c_char * region.size).from_address(region.address), start)
        return start

    def waits(self, threads: int) -> list[Wait]:
        """Return where each thread of the block waits."""
        rows = {
            name: (ctypes.c_uint32 * threads).from_address(self.slots.address + offset)
            for name, offset in (("region", 0), *((name, array_offset(name)) for name in ("mask", "a", "b")))
        }
        columns = zip(*(rows[name] for name in ("region", "mask", "a", "b")), strict=True)
        return [Wait(t, *values) for t, values in enumerate(columns) if values[0] != EXIT]


class Worker:
    """One host thread's context, and the memory of the block that it runs."""

    def __init__(self) -> None:
        self.context = Context()
        self.memory = _Memory()
        self.fault = ctypes.c_uint64()
        self.thread = 0  # the host thread, while it works

    def use(self, memory: _Memory) -> None:
        self.memory = memory
        context = self.context
        context.shared, context.local = memory.shared.address, memory.local.address
        context.slots = memory.slots.address


@cache
def _pool() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # takes a while to load, and plain launches need none

    return ThreadPoolExecutor(thread_name_prefix="cudatool-sim")


_workers: list[Worker] = []
_memories: list[_Memory] = []
_workers_lock = threading.Lock()


def _take_workers(count: int) -> list[Worker]:
    with _workers_lock:
        taken = [_workers.pop() for _ in range(min(count, len(_workers)))]
    return taken + [Worker() for _ in range(count - len(taken))]


def _take_memory() -> _Memory:
    with _workers_lock:
        return _memories.pop() if _memories else _Memory()


def _random(seed: int) -> Random:
    from random import Random  # takes a while to load, and only the random schedule needs it

    return Random(seed)


def _order(blocks: int, seed: int | None) -> tuple[int, int]:
    """Return multiplier and offset that permute block numbers; without a seed they keep their order."""
    if seed is None or blocks == 1:
        return 1, 0
    generator = _random(seed)
    multiplier = generator.randrange(1, blocks)
    while math.gcd(multiplier, blocks) != 1:
        multiplier += 1
    return multiplier, generator.randrange(blocks)


class LaunchRun:
    """A launch while it runs: what its workers share."""

    def __init__(self, launch: NativeLaunch, workers: list[Worker], seed: int | None) -> None:
        self.launch = launch
        self.blocks = math.prod(launch.grid)
        self.order = _order(self.blocks, seed)
        # Of any two warps, each one is the first for some seed.
        warps = -(-math.prod(launch.block) // 32)
        self.first_thread = 32 * _random(seed).randrange(warps) if seed is not None else 0
        self.counter = ctypes.c_uint64(0)
        self.workers = workers
        self.spare: list[_Memory] = []
        self.asleep: dict[Worker, deque[_Memory]] = {worker: deque() for worker in self.workers}
        self._ended = False
        self.reason = Stop.NONE
        self.started = time.monotonic()
        self.seen = (0, self.started, 0)  # progress, when it was made or sought last, and how many rounds ago
        self.moved = self.started  # when it was made
        self.active: set[Worker] = set()  # that may still do something
        self.states: dict[Worker, int] = {}  # what was last seen of those whose blocks all wait
        self.still: set[Worker] = set()  # whose blocks were the same when they were looked at again

    def prepare(self, worker: Worker, footprint: Footprint | None) -> None:
        launch, context = self.launch, worker.context
        worker.memory.prepare(launch)
        worker.use(worker.memory)
        context.grid_x, context.grid_y, context.grid_z = launch.grid
        context.block_x, context.block_y, context.block_z = launch.block
        context.threads = math.prod(launch.block)
        context.dynamic_shared = launch.dynamic_bytes
        context.blocks = self.blocks
        one_by_one = launch.parks or launch.most_rounds is not None  # a block that is taken has begun
        context.chunk = 1 if one_by_one else max(1, min(self.blocks // (8 * len(self.workers)), 1024))
        context.most_rounds = _NEVER if launch.most_rounds is None else launch.most_rounds
        context.order_multiplier, context.order_offset = self.order
        context.first_thread = self.first_thread
        context.next_block = ctypes.addressof(self.counter)
        context.params, context.globals = launch.params, launch.table
        context.shared_bytes = launch.shared_bytes
        context.in_step, context.shared_step, context.slots_step = launch.in_step, launch.shared_step, launch.slots_step
        context.heap = launch.heap
        context.workspace, context.stack_bytes = launch.workspace, launch.stack_bytes
        context.status = context.message = context.progress = context.rounds = 0
        context.arena_base = context.arena_bytes = 0
        if launch.host is not None:
            context.host_ranges, context.host_count = launch.host.address, launch.host.count
        if footprint is not None:
            context.arena_base, context.arena_bytes = footprint.base, footprint.size
            context.shadow_read, context.shadow_write, context.shadow_atomic, context.shadow_pages = footprint.addresses

    def ended(self) -> bool:
        """Return whether all blocks are to stop."""
        return self._ended

    def stop(self, reason: int = Stop.NONE) -> None:
        """Let no worker begin another block."""
        self.reason = self.reason or reason
        self._ended = True
        self.counter.value = self.blocks

    def work(self, worker: Worker) -> int:
        """Run blocks until there are none; return the signal that ended native code, 0 if none did."""
        worker.thread = threading.get_ident()
        self.active.add(worker)
        try:
            return self._run_blocks(worker)
        finally:
            self.active.discard(worker)

    def _run_blocks(self, worker: Worker) -> int:
        asleep = self.asleep[worker]
        fresh = True  # whether there may be blocks that no worker has begun
        while not self.ended():
            if signals.is_interrupted():
                self.stop()
                break
            # As many new blocks as there are parked ones, so that each is looked at often, but not too often.
            begin = self.blocks if self.launch.cooperative else max(1, len(asleep))
            while fresh and begin and len(asleep) < _MAX_PARKED and not self.ended():
                if number := self._call(worker, None):
                    return number
                fresh = bool(worker.context.parked)
                begin -= 1
            if not asleep:
                return 0
            if number := self._resume_all(worker, asleep):
                return number
            fresh = fresh and bool(worker.context.parked)
            self._watch(worker)
        return 0

    def _resume_all(self, worker: Worker, asleep: deque[_Memory]) -> int:
        """Let each parked block go on once. One that ends is followed by new ones."""
        for _ in range(len(asleep)):
            if self.ended():
                break
            if number := self._call(worker, asleep.popleft()):
                return number
        return 0

    def _call(self, worker: Worker, parked: _Memory | None) -> int:
        """Enter native code, to continue a parked block or to begin new ones."""
        context = worker.context
        if parked is not None:
            self.spare.append(worker.memory)
            worker.use(parked)
            context.current = parked.current
        context.resume, context.parked = parked is not None, 0
        left_ns = 0
        if self.launch.timeout_s:
            left_ns = max(int((self.started + self.launch.timeout_s - time.monotonic()) * 1e9), 1)
        number = guarded_call(self.launch.entry, ctypes.addressof(context), ctypes.addressof(worker.fault), left_ns)
        worker.memory.current = context.current
        if number or context.status:
            self.stop(Stop.TIMEOUT if number == STOP_SIGNAL and self.launch.timeout_s else Stop.NONE)
        elif context.parked:
            self.asleep[worker].append(worker.memory)
            memory = self.spare.pop() if self.spare else _take_memory()
            memory.prepare(self.launch)
            worker.use(memory)
        else:
            context.progress += 1  # the block ended, and there was no other to begin, which `counter` would show
        return number

    def _watch(self, worker: Worker) -> None:
        """End the launch if nothing but waiting has happened for a long time."""
        progress = self.counter.value + sum(worker.context.progress for worker in self.workers)
        before, when, rounds = self.seen
        now = time.monotonic()
        if progress != before:
            self.moved = now
            self._look_again(progress)
            return
        self.seen = (before, when, rounds + 1)
        if rounds > _STALLED_ROUNDS and now - when > _STALLED_S:
            self._stop_if_still(worker)
        if rounds > 3:
            time.sleep(min(1e-6 * 2 ** min(rounds, 20), 1e-3))  # others may need the processor to go on

    def _stop_if_still(self, worker: Worker) -> None:
        """End the launch if all blocks wait and none has changed since it was last looked at.

        Threads that do more than wait come back to their poll with other values, as in a loop that follows links; so do
        those that count how often they asked, which ends the launch later. And a worker that is not seen here runs a
        block, for which the others may be waiting.
        """
        state = 0
        for memory in self.asleep[worker]:
            state = memory.checksum(state)
        seen = self.states.get(worker)
        if seen is not None and seen != state:
            if self.states.keys() >= self.active and time.monotonic() - self.moved > _CHANGING_S:
                self.stop(Stop.STALLED)
            self._look_again(self.seen[0])
            return
        if seen is not None:
            self.still.add(worker)
        self.states[worker] = state
        if self.still >= self.active:
            self.stop(Stop.STALLED)

    def _look_again(self, progress: int) -> None:
        """Begin to wait for a deadlock anew."""
        self.seen = (progress, time.monotonic(), 0)
        self.states, self.still = {}, set()

    def coordinates(self, current: int) -> tuple[int, int, int]:
        multiplier, offset = self.order
        number = (current * multiplier + offset) % self.blocks
        x, y, _ = self.launch.grid
        return number % x, number // x % y, number // x // y

    def stopped(self) -> Stopped | None:
        """Return why the launch ended early, if it did."""
        found = next((worker for worker in self.workers if worker.context.status), None)
        if found is None and not self.reason:
            return None
        worker = found or self.workers[0]
        context = Context.from_buffer_copy(worker.context)
        memories = [worker.memory] if found else [memory for asleep in self.asleep.values() for memory in asleep]
        if not found and not memories:
            memories = [worker.memory]
        threads = math.prod(self.launch.block)
        waiting = [(self.coordinates(m.current), m.waits(threads)) for m in memories[:_REPORTED_BLOCKS]]
        return Stopped(context, context.status or self.reason, waiting)

    def release(self) -> None:
        with _workers_lock:
            _workers.extend(self.workers)
            _memories.extend([*self.spare, *(memory for asleep in self.asleep.values() for memory in asleep)])
            del _memories[_KEPT_MEMORIES:]


def workers_for(grid: tuple[int, int, int], block: tuple[int, int, int], threads: int) -> int:
    """Return how many host threads, of so many that there are, run the blocks of a grid."""
    blocks = math.prod(grid)
    return max(1, min(threads, blocks)) if blocks * math.prod(block) >= _WORTH_SHARING else 1


def run(
    launch: NativeLaunch,
    threads: int,
    seed: int | None,
    footprint: Footprint | None = None,
    watch: Callable[[list[Context]], None] | None = None,
) -> Stopped | None:
    """Run all blocks; return why not, if the launch was stopped.

    `watch` gets the workers' contexts before they start.

    Raises
    ------
    KernelFault
        The code touched memory that does not exist.
    """
    going = LaunchRun(launch, _take_workers(workers_for(launch.grid, launch.block, threads)), seed)
    for worker in going.workers:
        going.prepare(worker, footprint)
    if watch is not None:
        watch([worker.context for worker in going.workers])
    begin = time.monotonic_ns()
    try:
        jobs = [_start(going, worker) for worker in going.workers[1:]]
        ended_by: list[int] = []  # the signal that ended each worker's native code, 0 for none
        try:
            ended_by.append(going.work(going.workers[0]))
        finally:
            if not ended_by:  # Ctrl-C
                going.stop()
            ended_by += [_finish(going, worker, job) for worker, job in zip(going.workers[1:], jobs, strict=True)]
        signals.check()
        count_rounds(launch, going.workers)
        if launch.spent is not None:
            launch.spent.value += time.monotonic_ns() - begin
        for worker, number in zip(going.workers, ended_by, strict=True):
            if number and number != STOP_SIGNAL:
                raise KernelFault(number, worker.fault.value)
        return going.stopped()
    finally:
        going.release()


def count_rounds(launch: NativeLaunch, workers: Iterable[Worker]) -> None:
    """Add the rounds of loops that workers have counted to those of the launch, if it counts them."""
    if launch.rounds is not None:
        for worker in workers:
            launch.rounds.value += worker.context.rounds
            worker.context.rounds = 0


def _start(going: LaunchRun, worker: Worker) -> Future[int] | None:
    try:
        return _pool().submit(going.work, worker)
    except RuntimeError:  # the interpreter is ending and starts nothing: the calling thread runs all blocks
        return None


def _finish(going: LaunchRun, worker: Worker, job: Future[int] | None) -> int:
    """Wait for a worker; if all are to stop, or Ctrl-C comes, end what it does after a moment."""
    if job is None:
        return 0
    while True:
        try:
            return job.result(timeout=0.2)
        except TimeoutError:
            if signals.is_interrupted():
                going.stop()
            if going.ended() and worker.thread and not job.done():
                signal.pthread_kill(worker.thread, STOP_SIGNAL)
