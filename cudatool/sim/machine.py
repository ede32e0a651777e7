"""The machine that the software driver drives: devices, contexts, handles, and the options that shape them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cudatool.sim import abi
from cudatool.sim.allocations import Allocation, Allocations, ModuleVariable
from cudatool.sim.arena import PAGE, Arena, DeviceMemory, HostMemory
from cudatool.sim.graph.allocations import GraphMemory
from cudatool.sim.graph.capture import Captures
from cudatool.sim.green import GreenContext
from cudatool.sim.ipc import Imports
from cudatool.sim.pool import Pools
from cudatool.sim.queue import EventState, Operation, Schedule, Scheduler, StreamState
from cudatool.sim.results import DriverError, Result
from cudatool.sim.toolchain import nvrtc
from cudatool.sim.virtual import VirtualMemory

if TYPE_CHECKING:
    from cudatool.sim.abi import EntryPoint
    from cudatool.sim.device_runtime import Heap
    from cudatool.sim.graph.model import Condition
    from cudatool.sim.jit import Footprint, Shadow
    from cudatool.sim.jit.code import NativeCache
    from cudatool.sim.observe.checkers import Checkers
    from cudatool.sim.observe.host_watch import HostWatch, ReportHostAccess
    from cudatool.sim.observe.tape import Tape

__all__ = [
    "LEGACY_STREAM",
    "PER_THREAD_STREAM",
    "Context",
    "Device",
    "Machine",
    "MachineOptions",
    "clamped_priority",
    "context_behind",
    "create",
    "current_context",
    "current_green",
    "machine",
    "stream_of",
]

_T = TypeVar("_T")

# Addresses that can be reserved: a multiple of the memory, and less than a process has.
_RANGES_PER_BYTE: Final = 64
_MAX_RANGES: Final = 1 << 45
_OF_CONTEXT: Final = ("array", "device", "managed", "module")  # kinds of memory that end with their context
# Bytes between allocations that are checked, so that a step beyond one does not reach the next; few if memory is short.
_GAP: Final = 64 << 10
_SMALL_GAP: Final = 512
_NEED_NO_INIT: Final = ("cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString", "cuInit")
LEGACY_STREAM: Final = 1
PER_THREAD_STREAM: Final = 2


class MachineOptions:
    """What the software machine looks like.

    Attributes
    ----------
    memory
        Bytes of memory of each device.
    count
        Number of devices.
    seed
        Of the ``random`` schedule.
    schedule
        In which legal order deferred work executes.
    threads
        Host threads that run the blocks of a kernel; 0 is one for each processor. 1 makes also the order of atomics
        reproducible.
    timeout
        Seconds after which a kernel is ended with CUDA_ERROR_LAUNCH_TIMEOUT; 0 is never.
    launch_blocking
        Whether a launch returns when the kernel has run, as NVIDIA's driver has it with ``CUDA_LAUNCH_BLOCKING=1``.
    code_cache
        Keeps native code of kernels between processes.
    """

    def __init__(
        self,
        *,
        memory: int = 8 << 30,
        count: int = 1,
        seed: int = 0,
        schedule: Schedule = Schedule.FIFO,
        threads: int = 0,
        timeout: int = 0,
        launch_blocking: bool = False,
        code_cache: NativeCache | None = None,
    ) -> None:
        self.memory, self.count, self.seed, self.schedule = memory, count, seed, schedule
        self.threads, self.timeout, self.launch_blocking = threads, timeout, launch_blocking
        self.code_cache = code_cache


class Device:
    """One software GPU."""

    def __init__(self, ordinal: int, base: int, memory: int) -> None:
        self.ordinal = ordinal
        self.memory = DeviceMemory(base, memory)
        self.primary: Context | None = None
        self.primary_references = 0
        self.primary_flags = 0


class Context:
    """A context: the streams that synchronize with each other, and the error that ends it.

    Attributes
    ----------
    heap
        Of ``malloc`` in kernels, made when the first kernel is launched that needs it.
    called
        The system calls that the kernels launched so far contain.
    barrier
        What all work that is enqueued in streams to come has to wait for (cuCtxWaitEvent).
    """

    def __init__(self, device: Device, handle: int, serial: int, flags: int) -> None:
        self.device, self.handle, self.serial, self.flags = device, handle, serial, flags
        self.error: DriverError | None = None
        self.streams: dict[int, StreamState] = {}
        self.limits: dict[int, int] = {}
        self.peers: set[int] = set()
        self.heap: Heap | None = None
        self.called = frozenset[str]()
        self.legacy_stream = StreamState(self, LEGACY_STREAM, 0, 0, 1)
        self.per_thread: dict[int, StreamState] = {}
        self.barrier: Operation | None = None

    @property
    def primary(self) -> Context:
        """The context that objects made while it is current belong to: itself, as it is no green context."""
        return self


class _Thread(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Context | GreenContext] = []  # the thread's stack of current contexts


class Machine:
    """All state of the software driver in this process."""

    def __init__(self, options: MachineOptions) -> None:
        self.options = options
        self.initialized = False
        self.measure_accesses = False
        """Whether kernels that run from now on are measured: which bytes each reads, writes and updates."""
        self.scheduler = Scheduler(options.schedule, options.seed)
        self.scheduler.timeout_s = options.timeout
        # Handles look like pointers and are never used twice, so that a stale one is recognized.
        self._handles = itertools.count(0x5100_0000_0000, 0x40)
        self._serials = itertools.count(3)
        self.objects: dict[int, Any] = {}
        self.allocations = Allocations()
        self.checkers: Checkers | None = None
        self.shadow: Shadow | None = None  # the checkers' maps, kept from one to the next
        self.footprint: Footprint | None = None  # maps of what a launch accesses; None while in use, too
        self.heaps: list[tuple[Context, Heap]] = []  # of all contexts, those that are gone among them
        self.tape: Tape | None = None  # while what happens is kept, to be done again
        self.host = HostMemory()
        span = -(-3 * options.memory // PAGE) * PAGE
        self.arena = Arena(span * options.count, min(_RANGES_PER_BYTE * options.memory * options.count, _MAX_RANGES))
        self.imports = Imports(self)
        self.virtual = VirtualMemory(self)
        self.graph_memory = GraphMemory(self)
        self.captures = Captures()
        self.conditions: dict[int, Condition] = {}  # of conditional nodes of graphs, by handle
        self.pools = Pools(self)
        self.devices = [Device(n, self.arena.base + n * span, options.memory) for n in range(options.count)]
        self.thread = _Thread()

    @property
    def runs_plainly(self) -> bool:
        """Whether kernels run unobserved, their blocks in order, for as long as it takes."""
        return (
            self.checkers is None
            and not self.measure_accesses
            and self.tape is None
            and self.options.schedule is not Schedule.RANDOM
            and not self.options.timeout
        )

    @property
    def null_stream(self) -> int:
        """What stream handle 0 means in the call in progress: one of the two default streams' own handles."""
        return abi.call.null_stream

    @property
    def is_inner_call(self) -> bool:
        """Whether the call in progress is made inside of another one, as by a finalizer."""
        return abi.call.depth > 1

    def new_handle(self) -> int:
        """Return a handle value that was never used before."""
        return next(self._handles)

    def new_serial(self) -> int:
        """Return a number unique to an object of this process (stream, context and buffer ids)."""
        return next(self._serials)

    @staticmethod
    def last_message() -> str:
        """Return why this thread's last driver call failed, where more is known than its error code says."""
        return abi.call.message

    def get(self, handle: int, kind: type[_T]) -> _T:
        """Return the live object of `handle`, else fail with CUDA_ERROR_INVALID_HANDLE."""
        found = self.objects.get(handle)
        if not isinstance(found, kind):
            raise DriverError(Result.INVALID_HANDLE)
        return found

    def device(self, ordinal: int) -> Device:
        """Return a device, else fail with CUDA_ERROR_INVALID_DEVICE."""
        if not 0 <= ordinal < len(self.devices):
            raise DriverError(Result.INVALID_DEVICE)
        return self.devices[ordinal]

    def new_context(self, device: Device, flags: int) -> Context:
        """Make a context and register its handle."""
        context = Context(device, self.new_handle(), self.new_serial(), flags)
        self.objects[context.handle] = context
        return context

    def retain_primary(self, device: Device) -> Context:
        """Return a device's primary context, made if need be, which is held once more from now on."""
        if device.primary is None:
            device.primary = self.new_context(device, device.primary_flags)
        device.primary_references += 1
        return device.primary

    def release_primary(self, device: Device) -> None:
        """Undo :meth:`retain_primary`; the last time ends the context."""
        if not device.primary_references:
            raise DriverError(Result.INVALID_CONTEXT)
        device.primary_references -= 1
        if not device.primary_references:
            self.end_primary(device)

    def end_primary(self, device: Device) -> None:
        """Destroy a device's primary context, if it has one; another thread that retains it gets a new one at once."""
        context, device.primary = device.primary, None
        if context is not None:
            self.destroy_context(context)

    def new_stream(self, context: Context, flags: int, priority: int, green: GreenContext | None = None) -> StreamState:
        """Make a stream and register its handle."""
        priority = clamped_priority(priority)
        stream = StreamState(context, self.new_handle(), flags, priority, self.new_serial(), green)
        stream.last = (green or context).barrier
        self.objects[stream.handle] = context.streams[stream.handle] = stream
        return stream

    @staticmethod
    def streams_of(context: Context | GreenContext) -> list[StreamState]:
        """Return the streams of a context; those of a primary context include those of its green contexts."""
        if isinstance(context, GreenContext):
            return [stream for stream in context.primary.streams.values() if stream.green is context]
        return [context.legacy_stream, *context.streams.values()]

    def memory_of(self, context: Context) -> list[Allocation]:
        """Return the memory that ends with a context."""
        return [
            allocation
            for allocation in self.allocations
            if allocation.context == context.handle and allocation.kind in _OF_CONTEXT and not allocation.pool
        ]

    def destroy_context(self, context: Context) -> None:
        """Run what is pending, then drop the context with everything in it."""
        # First the handles: other threads may use them, or destroy the context, during the wait.
        del self.objects[context.handle]
        inside = {
            handle: item
            for handle, item in self.objects.items()
            if isinstance(item, StreamState | EventState) and item.context is context
        }
        for handle in inside:
            del self.objects[handle]
        self.scheduler.wait_context(context)
        self.captures.forget(context)
        abi.gives_back("context", self.memory_of(context))
        for allocation in self.memory_of(context):
            self.release(allocation)
        if context.heap is not None:
            context.heap.close()
        self.imports.close_all(context)
        for item in inside.values():
            if isinstance(item, EventState):
                item.close()

    # ---- checkers ----

    def check(self, checks: Iterable[str]) -> None:
        """Check everything that happens from now on with these :data:`~cudatool.config.KERNEL_CHECKS`; none ends it."""
        from cudatool.sim.observe.checkers import Checkers  # only a run under the sanitizer asks

        if self.checkers is not None:
            self.checkers.release_held()
            self.allocations.watchers.remove(self.checkers)
        checks = tuple(checks)
        self.checkers = Checkers(self, checks) if checks else None
        nvrtc.watch(bool(checks))
        if self.checkers is not None:
            self.allocations.watchers.append(self.checkers)

    def share(self, allocation: Allocation) -> None:
        """Other processes can use an allocation of this one from now on."""
        allocation.is_shared = True
        self.scheduler.share()
        if self.checkers is not None:
            self.checkers.shared(allocation)

    def watch_host(self, report: ReportHostAccess) -> HostWatch:
        """Let `report` receive what the host does to memory that operations use."""
        from cudatool.sim.observe.host_watch import HostWatch  # loads NumPy, which no other start of the device needs

        watch = HostWatch(self.allocations, report)
        self.scheduler.begin_watch(watch)
        self.allocations.watchers.append(watch)
        return watch

    def unwatch_host(self) -> None:
        """Undo :meth:`watch_host`."""
        if self.scheduler.watch is not None:
            self.allocations.watchers.remove(self.scheduler.watch)
            self.scheduler.watch.close()
            self.scheduler.watch = None

    # ---- memory ----

    def allocate(
        self,
        device: Device,
        size: int,
        kind: str,
        *,
        context: Context | None,
        pool: int = 0,
        variables: Sequence[ModuleVariable] = (),
    ) -> Allocation:
        """Take device memory, for the `variables` of a module if there are any.

        Fails with CUDA_ERROR_OUT_OF_MEMORY.
        """
        gap = 0
        if self.checkers is not None and self.checkers.quarantines:
            gap = _GAP if device.memory.used < device.memory.size // 2 else _SMALL_GAP
        if kind == "module":
            address = device.memory.allocate_for_module(size)
        else:
            try:
                address = device.memory.allocate(size, gap)
            except DriverError:
                if self.checkers is None or not self.checkers.release_held():
                    raise
                address = device.memory.allocate(size, gap)
        handle = context.handle if context else 0
        serial = self.new_serial()
        parts = tuple(variables)
        allocation = Allocation(address, size, kind, device.ordinal, handle, serial, pool, gap=gap, variables=parts)
        self.allocations.add(allocation)
        return allocation

    def allocate_host(self, size: int, *, context: Context, flags: int = 0, pool: int = 0) -> Allocation:
        """Take pinned host memory."""
        address = self.host.allocate(size)
        allocation = Allocation(address, size, "host", -1, context.handle, self.new_serial(), pool, flags)
        self.allocations.add(allocation)
        return allocation

    def will_release(self, allocation: Allocation) -> None:
        """Notify the subscribers that the call in progress is about to release an allocation, unless it is gone."""
        if self.allocations.at(allocation.address) is allocation:
            abi.gives_back("allocation", allocation)

    def release(self, allocation: Allocation) -> None:
        """Give an allocation's memory back at once, to its pool if it has one.

        Nothing happens if that was done before: while a call waits, the end of a context may free what is in it.
        """
        if self.allocations.at(allocation.address) is not allocation:
            return
        if allocation.kind == "graph" and (slot := self.graph_memory.at(allocation.address)):
            self.graph_memory.release(slot)
        elif allocation.pool:
            self.pools.live[allocation.pool].release(allocation)
        else:
            self.release_memory(allocation)

    def release_memory(self, allocation: Allocation) -> None:
        """Give back what :meth:`allocate` or :meth:`allocate_host` took."""
        self.allocations.remove(allocation)
        if allocation.kind == "host":
            self.host.free(allocation.address)
        elif allocation.kind == "module":
            self.devices[allocation.device].memory.free_of_module(allocation.address, allocation.size)
        elif allocation.kind != "registered":
            memory = self.devices[allocation.device].memory
            give_back = partial(memory.free, allocation.address, allocation.size, allocation.gap)
            if self.checkers is not None and self.checkers.quarantines:
                self.checkers.hold(allocation, give_back)
            else:
                give_back()

    def locate(self, address: int, size: int, *, to_write: bool = False) -> Allocation | None:
        """Return the allocation that holds the range, or its beginning if it lies in several neighbouring mappings.

        Raises
        ------
        DriverError
            CUDA_ERROR_INVALID_VALUE if the range starts in device memory, but is not all allocated or accessible.
        """
        found = self.allocations.holding(address, size)
        if not self.arena.base <= address < self.arena.base + self.arena.size:
            return found
        if found is None or found.kind == "virtual":
            found = self.virtual.reachable(address, size, to_write=to_write)
            if found is None:
                text = f"{size} bytes at {address:#x} are not inside one allocation"
                raise DriverError(Result.INVALID_VALUE, text, address=address)
        return found


machine: Machine = None  # type: ignore[assignment]  # set once by create(), before any entry point can be called


def create(options: MachineOptions) -> Machine:
    """Make the machine of this process."""
    global machine
    machine, abi.guard = Machine(options), _before_init
    return machine


def _before_init(entry: EntryPoint, arguments: tuple[Any, ...]) -> None:
    """Carry out a driver call before cuInit: all but a few need it, whatever else is wrong with them."""
    if entry.name not in _NEED_NO_INIT and not entry.name.startswith("cuLogs"):
        raise DriverError(Result.NOT_INITIALIZED)
    entry.handler(*arguments)


def clamped_priority(priority: int) -> int:
    """Return the priority that a stream gets which asks for this one (cuStreamCreateWithPriority)."""
    return max(-5, min(0, priority))


def current_context() -> Context:
    """Return this thread's current context.

    Raises
    ------
    DriverError
        INVALID_CONTEXT if none is current; CONTEXT_IS_DESTROYED; or the sticky error
        that an earlier kernel left, which ends the context as on a GPU.
    """
    stack = machine.thread.contexts
    if not stack:
        raise DriverError(Result.INVALID_CONTEXT)
    context = stack[-1].primary
    if stack[-1].handle not in machine.objects or context.handle not in machine.objects:
        raise DriverError(Result.CONTEXT_IS_DESTROYED)
    machine.scheduler.check(context)
    return context


def current_green() -> GreenContext | None:
    """Return this thread's current green context, None if it has none or another context."""
    stack = machine.thread.contexts
    return stack[-1] if stack and isinstance(stack[-1], GreenContext) else None


def context_behind(handle: int) -> Context | GreenContext:
    """Return what a CUcontext stands for, else fail with CUDA_ERROR_INVALID_CONTEXT."""
    found = machine.objects.get(handle)
    if isinstance(found, Context) or (isinstance(found, GreenContext) and found.handle == handle):
        return found
    raise DriverError(Result.INVALID_CONTEXT)


def stream_of(handle: int, context: Context | None = None) -> StreamState:
    """Return the stream that `handle` means in the current (or given) context, default streams included."""
    if handle == 0:
        handle = abi.call.null_stream
    if handle == LEGACY_STREAM:
        return (context or current_context()).legacy_stream
    if handle == PER_THREAD_STREAM:
        context = context or current_context()
        thread = threading.get_ident()
        found = context.per_thread.get(thread)
        if found is None:
            found = StreamState(context, PER_THREAD_STREAM, 0, 0, machine.new_serial())
            context.per_thread[thread] = context.streams[-thread] = found
        return found
    stream = machine.get(handle, StreamState)
    if stream.green is not None and stream.green.is_destroyed:
        raise DriverError(Result.STREAM_DETACHED)
    machine.scheduler.check(stream.context)
    return stream
