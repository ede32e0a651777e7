"""Launches of kernels: what cuLaunchKernel checks, and how an operation runs one.

C code (``_launches.c``) makes and runs those that differ from an earlier one in their arguments only.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import nullcontext
from ctypes import c_size_t
from typing import TYPE_CHECKING, Any

from cudatool.processors import processors
from cudatool.ptx.errors import PtxError
from cudatool.ptx.kernel_names import kernel_name
from cudatool.sim import _queue, abi, jit, profile
from cudatool.sim import machine as state
from cudatool.sim.addresses import place_of, pointer_behind
from cudatool.sim.allocations import Allocation
from cudatool.sim.device_runtime import STACK_SIZE, limit_of, prepare_calls
from cudatool.sim.kernels import Function, active_blocks, instrument, max_dynamic_shared, prepared
from cudatool.sim.machine import Context, Device, stream_of
from cudatool.sim.observe.checkers import CheckFinding
from cudatool.sim.optimizing import ENOUGH_IF_KEPT
from cudatool.sim.queue import Operation, Schedule
from cudatool.sim.results import DriverError, Result
from cudatool.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cudatool.sim.jit import Found, JitKernel, KernelError, LaunchShape

__all__ = ["Launch", "checked_launch"]

_MOST_SHAPES = 256  # of launches of a kernel that are known to be within limits


class Launch(_queue.Launch):
    """A kernel and all that one launch of it needs, checked. An operation runs it by calling it.

    Attributes
    ----------
    shape
        What it has in common with others. `function`, `kernel`, `grid`, `block`, `shared`, `cost` and `threads` (of all
        blocks) are the shape's.
    cooperative
        Whether all blocks run at the same time.
    address, arguments
        Its arguments as they are declared, filled up with zeros: where they are, and a copy.
    """

    __slots__ = ()

    def run(self, operation: Operation) -> None:
        """Execute it, as the operation that was enqueued for it. C code has done so if it is one like many before."""
        enough = self.kernel.enough(instrument())
        optimized = self.function.optimizing.launched(self.threads, self.kernel.rounds, self.kernel.spent, enough)
        context = operation.stream.context
        plan = None
        try:
            if not self.cooperative and state.machine.runs_plainly:
                plan = self.kernel.plan(_shape_of(self, context), _threads(), optimized=optimized)
        except PtxError as error:
            raise _untranslated(error) from error
        try:
            self._run(operation, plan, optimized=optimized)
        finally:
            if not optimized and self.function.optimizing.is_part(self.kernel.rounds, self.kernel.spent, enough):
                self.kernel.note_work(instrument())

    def _run(self, operation: Operation, plan: Any, *, optimized: bool) -> None:
        """Run it by its `plan`, or as such launches run that have none."""
        if plan is None:
            _execute(self, operation, optimized=optimized)
            return
        context = operation.stream.context
        if context.heap is None and not context.limits and plan.launch.rounds is None:  # C code counts no rounds
            self.shape.plan = plan
        try:
            self.kernel.launch_planned(plan, self.address)
        except jit.KernelError as error:
            raise _failed(error, self) from error

    def repeats(self) -> bool:
        """Return whether C code may run it in the code of the one before, and note that it does."""
        plan, optimizing = self.shape.plan, self.function.optimizing
        rounds, spent, enough = self.kernel.rounds, self.kernel.spent, self.kernel.enough()
        if plan is None or plan.optimized != optimizing.pays(self.threads, rounds, spent, enough):
            return False
        if not optimizing.launched(self.threads, rounds, spent, enough) and optimizing.is_part(rounds, spent, enough):
            self.kernel.note_work()
        return True

    def ended_early(self, team: Any) -> None:
        """Raise what ended a launch that C code has run."""
        try:
            self.kernel.explain(team)
        except jit.KernelError as error:
            raise _failed(error, self) from error

    @property
    def is_optimized(self) -> bool:
        """Whether optimized code is for doing it again, in one order after the other, after all launches so far."""
        return self.function.optimizing.pays(self.threads, self.kernel.rounds, self.kernel.spent, ENOUGH_IF_KEPT)

    def host_memory(self) -> list[tuple[int, int]]:
        """Return the allocations that arguments point into, if the host's memory is watched or there is any.

        And all of the host's memory if the kernel may find other pointers in memory.
        """
        allocations, watch = state.machine.allocations, state.machine.scheduler.watch
        if watch is None and not allocations.on_host:
            return []
        arguments = self.arguments
        words = memoryview(arguments).cast("Q")
        found = {(one.address, one.size) for one in map(allocations.holding, words) if one is not None}
        managed = watch.managed if watch is not None else set()

        def place(address: int) -> tuple[int, int] | None:
            one = allocations.holding(address)
            return None if one is None else (one.address, one.size)

        if (managed or allocations.on_host) and self.kernel.follows_pointers(arguments, place):
            found.update(managed, allocations.on_host.items())
        return list(found)

    def like(self, *, cooperative: bool) -> Launch:
        """Return the same launch, cooperative or not."""
        return Launch(self.shape, self.arguments, cooperative)

    def cooperating(self) -> Launch:
        """Return the same as a cooperative launch. Fails with CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE."""
        blocks = self.grid[0] * self.grid[1] * self.grid[2]
        threads = self.block[0] * self.block[1] * self.block[2]
        room = profile.ATTRIBUTES[16] * active_blocks(self.function, self.kernel, threads, self.shared)
        if blocks > room:
            raise DriverError(
                Result.COOPERATIVE_LAUNCH_TOO_LARGE,
                f"{kernel_name(self.function.name)}: {blocks} blocks; {room} of this size run at the same time",
            )
        return self.like(cooperative=True)


def checked_launch(
    f: int,
    context: Context,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    params: int,
    extra: int,
    *,
    cooperative: bool = False,
) -> Launch:
    """Return the launch that these arguments of cuLaunchKernel describe; fail with the error it has for them."""
    machine = state.machine
    function = machine.get(f, Function)
    key = _queue.shape_key(context.serial, int(instrument()), grid, block, shared)
    shape = function.fitting.get(key)
    if shape is None:
        if function.library.context not in (None, context):
            text = f"{kernel_name(function.name)} is of a module of another context than the stream"
            raise DriverError(Result.INVALID_HANDLE, text)
        kernel = _within_limits(function, context.device, grid, block, shared)
        threads = math.prod(grid) * math.prod(block)
        cost = profile.kernel_cost(threads, function.work)
        shape = _queue.Shape(function, kernel, grid, block, shared, cost, threads)
        if len(function.fitting) >= _MOST_SHAPES:
            function.fitting.clear()
        function.fitting[key] = shape
    kernel = shape.kernel
    try:
        launch = Launch(shape, _arguments(kernel, params, extra))
    except ValueError as error:
        raise DriverError(Result.INVALID_VALUE) from error
    if cooperative:
        launch = launch.cooperating()
    if kernel.system_calls:
        prepare_calls(context, kernel_name(function.name), kernel.system_calls)
    return launch


def _arguments(kernel: JitKernel, kernelParams: int, extra: int) -> int | bytes:
    """Return the address of pointers to the kernel's arguments, or the arguments as its parameters are declared."""
    if kernelParams or not extra:
        return kernelParams
    fields = {}  # CU_LAUNCH_PARAM_BUFFER_POINTER = 1, CU_LAUNCH_PARAM_BUFFER_SIZE = 2, CU_LAUNCH_PARAM_END = 0
    while key := c_size_t.from_address(extra).value:
        fields[key] = c_size_t.from_address(extra + 8).value
        extra += 16
    if 1 not in fields or 2 not in fields:
        raise DriverError(Result.INVALID_VALUE)
    return ctypes.string_at(fields[1], min(c_size_t.from_address(fields[2]).value, kernel.param_bytes))


def _within_limits(
    function: Function, device: Device, grid: tuple[int, int, int], block: tuple[int, int, int], shared: int
) -> JitKernel:
    """Return a kernel's translation; fail as cuLaunchKernel does for a launch out of limits."""
    threads = block[0] * block[1] * block[2]
    kernel = prepared(function, device, math.prod(grid) * threads)
    limits = (1024, 1024, 64)
    if not all(0 < g <= limit for g, limit in zip(grid, profile.MAX_GRID, strict=True)):
        raise DriverError(
            Result.INVALID_VALUE, f"{kernel_name(function.name)}: the grid {grid} is not within {profile.MAX_GRID}"
        )
    if not all(0 < b <= limit for b, limit in zip(block, limits, strict=True)) or threads > 1024:
        raise DriverError(
            Result.INVALID_VALUE,
            f"{kernel_name(function.name)}: the block {block} is not within {limits} and 1024 threads",
        )
    if threads > kernel.max_threads:
        raise DriverError(
            Result.INVALID_VALUE, f"{kernel_name(function.name)} was compiled for at most {kernel.max_threads} threads"
        )
    if shared > max_dynamic_shared(function, kernel):
        raise DriverError(
            Result.INVALID_VALUE,
            f"{kernel_name(function.name)}: {shared} bytes of dynamic shared memory; "
            f"{max_dynamic_shared(function, kernel)} are allowed (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)",
        )
    return kernel


def _failed(error: KernelError, launch: Launch) -> DriverError:
    """Return what the driver says of a kernel that did not run to its end."""
    if isinstance(error, jit.KernelFault):
        allocations = state.machine.allocations
        where = allocations.holding(error.address)
        pointer = pointer_behind(launch.kernel.pointers_at(0, launch.arguments), allocations)
        place = f"inside {where.kind} memory" if where else place_of(error.address, 1, allocations, pointer)
        place = place or "outside every allocation"
        return DriverError(Result.ILLEGAL_ADDRESS, f"illegal access at {error.address:#x}, {place}")
    if isinstance(error, jit.KernelAssert):
        return DriverError(Result.ASSERT, str(error))
    if isinstance(error, jit.KernelStackOverflow):
        return DriverError(Result.HARDWARE_STACK_ERROR, str(error))
    if isinstance(error, jit.KernelTrap):
        return DriverError(Result.LAUNCH_FAILED, str(error))
    return DriverError(Result.LAUNCH_TIMEOUT, str(error))


def _order_of_blocks(operation: Operation) -> int | None:
    """Return the seed of the order in which a launch's blocks run; None is by number, as it must be on a tape."""
    machine = state.machine
    if machine.options.schedule is not Schedule.RANDOM or machine.tape is not None:
        return None
    return hash((machine.options.seed, operation.correlation))


def _threads() -> int:
    """Return how many host threads may run the blocks of a kernel."""
    return state.machine.options.threads or processors()


def _shape_of(launch: Launch, context: Context) -> LaunchShape:
    """Return what native code needs to know of a launch and of the context that it runs in."""
    heap = context.heap.handle if context.heap is not None else 0
    return jit.LaunchShape(launch.grid, launch.block, launch.shared, heap, limit_of(context, STACK_SIZE))


def _untranslated(error: PtxError) -> DriverError:
    """Return what the driver says of a launch that needs another translation than the kernel was prepared in."""
    return DriverError(Result.NOT_SUPPORTED, str(error))


def _execute(launch: Launch, operation: Operation, *, optimized: bool) -> None:
    machine = state.machine
    checkers, before = machine.checkers, machine.arena.before
    is_observed = machine.measure_accesses or checkers is not None
    host = jit.HostPlaces(machine.allocations.on_host if is_observed else {}, before)
    footprint = None
    if machine.measure_accesses:
        footprint, machine.footprint = machine.footprint, None
        # It grows with ranges that programs reserve.
        if footprint is None or footprint.size < len(before) + machine.arena.size:
            footprint = jit.Footprint(before.start, len(before) + machine.arena.size)
    if machine.tape is not None:
        machine.tape.launching(operation, launch, limit_of(operation.stream.context, STACK_SIZE))
    failure = None
    found: Sequence[Found]
    apart = _out_of_reach(launch, operation.stream.context) if checkers is not None else []
    with checkers.hidden(apart) if checkers is not None and apart else nullcontext():
        try:
            found = launch.kernel.launch(
                _shape_of(launch, operation.stream.context),
                launch.address,
                jit.LaunchOptions(
                    # One thread makes also the order of atomics the same when the tape is replayed.
                    threads=1 if machine.tape is not None else _threads(),
                    optimized=optimized,
                    seed=_order_of_blocks(operation),
                    cooperative=launch.cooperative,
                    timeout_s=machine.options.timeout,
                    footprint=footprint,
                    shadow=checkers.shadow if checkers is not None else None,
                    host=host,
                ),
            )
        except jit.KernelError as error:
            found, failure = error.found, error
        except PtxError as error:
            raise _untranslated(error) from error
        if checkers is not None:
            where = launch.kernel, launch.block, launch.shared, launch.arguments
            operation.findings = [checkers.explain(one, *where) for one in found]
    if host.had_no_room:
        operation.findings = [*operation.findings, _without_room(launch)]
    if failure is not None:
        ended = _failed(failure, launch)
        if checkers is not None:
            checkers.ended(operation, failure, str(ended), launch.kernel, launch.block)
        raise ended from failure
    if footprint is not None:
        operation.footprint = host.footprint(footprint.take())
        machine.footprint = footprint


def _out_of_reach(launch: Launch, context: Context) -> list[Allocation]:
    """Return the allocations that arguments point into, and that the launch's device has no access to."""
    machine = state.machine
    if len(machine.devices) < 2:
        return []
    own = context.device.ordinal
    peers = [machine.objects[peer].primary for peer in context.peers if peer in machine.objects]
    near = {own, *(peer.device.ordinal for peer in peers)}
    found: dict[int, Allocation] = {}
    for one in map(machine.allocations.holding, memoryview(launch.arguments).cast("Q")):
        if one is None or one.device in near or one.kind not in ("device", "pool", "module"):
            continue
        if not (one.pool and machine.pools.live[one.pool].may_access(own)):
            found[one.address] = one
    return list(found.values())


def _without_room(launch: Launch) -> CheckFinding:
    """Return that a launch used memory of the host of which its accesses are not known."""
    room = format_bytes(len(state.machine.arena.before))
    name = kernel_name(launch.function.name)
    text = f"what {name} accesses of pinned memory, of which the program has more than {room}, is not known"
    return CheckFinding("", "unmeasured", text, kernel=name)


_queue.install_launches(
    names=vars(state),
    stream_of=stream_of,
    instrument=instrument,
    function=Function,
    launch=Launch,
    operation=Operation,
    call=abi.call,
)
