"""Libraries and their kernels on the software device.

The driver's entry points for them are in :mod:`cudatool.sim.api.module` and :mod:`cudatool.sim.api.function`. Launches
are in :mod:`cudatool.sim.launches`.
"""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import TYPE_CHECKING

from cudatool.ptx.errors import PtxError
from cudatool.sim import jit, profile
from cudatool.sim import machine as state
from cudatool.sim.allocations import Allocation, ModuleVariable
from cudatool.sim.machine import Context, Device
from cudatool.sim.optimizing import Optimizing
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim import _queue
    from cudatool.sim.jit import Instrument, JitKernel, JitModule

__all__ = [
    "Function",
    "Library",
    "active_blocks",
    "examined",
    "instrument",
    "max_dynamic_shared",
    "modeled_ns",
    "prepared",
    "registers",
]

_BETWEEN_VARIABLES = 64  # bytes that no variable of a module has, so that what is beyond an array is seen


class Library:
    """A loaded image. Its module exists once for each device, because its globals do."""

    def __init__(self, handle: int, image: bytes, context: Context | None) -> None:
        self.handle = handle
        self.image = image
        self.context = context  # set for a module, which belongs to one; a library belongs to none
        self.modules: dict[int, JitModule] = {}
        self.globals: dict[tuple[int, str], tuple[int, int]] = {}
        self.blocks: list[Allocation] = []
        self.kernels: dict[str, Function] = {}
        self.source = jit.Source(image, state.machine.options.code_cache)
        _check_shared(self.source)
        self.names = tuple(self.source.facts.names)

    def module(self, device: Device) -> JitModule:
        """Return the module on `device`, with its global variables allocated and initialized."""
        found = self.modules.get(device.ordinal)
        if found is not None:
            return found
        module = jit.JitModule(self.source)
        variables, end = [], 0
        for name, variable in module.globals.items():
            start = -(-end // variable.align) * variable.align
            variables.append(ModuleVariable(name, start, max(variable.size, 1), variable.constant))
            end = start + variables[-1].size + _BETWEEN_VARIABLES
        addresses = {}
        if variables:
            end -= _BETWEEN_VARIABLES
            block = state.machine.allocate(device, end, "module", context=self.context, variables=variables)
            self.blocks.append(block)
            addresses = {variable.name: block.address + variable.offset for variable in variables}
        for name, variable in module.globals.items():
            self.globals[device.ordinal, name] = (addresses[name], variable.size)
        for name, variable in module.globals.items():
            initial = variable.initial
            ctypes.memmove(addresses[name], initial, len(initial))
            for offset, symbol, addend in variable.relocations:
                ctypes.c_uint64.from_address(addresses[name] + offset).value = (
                    addresses.get(symbol) or module.functions[symbol]
                ) + addend
        if variables and state.machine.tape is not None:
            state.machine.tape.initialized(block.address, end)
        module.bind(addresses)
        self.modules[device.ordinal] = module
        return module

    def function(self, name: str) -> Function:
        if name not in self.names:
            raise DriverError(Result.NOT_FOUND, f"the image has no kernel {name!r}; it has {', '.join(self.names)}")
        found = self.kernels.get(name)
        if found is None:
            found = self.kernels[name] = Function(self, name, state.machine.new_handle())
            state.machine.objects[found.handle] = found
        return found

    def variable(self, name: str, device: Device) -> tuple[int, int]:
        """Return address and size of a global variable."""
        self.module(device)
        found = self.globals.get((device.ordinal, name))
        if found is None:
            raise DriverError(Result.NOT_FOUND, f"the image has no global variable {name!r}")
        return found

    def unload(self) -> None:
        del state.machine.objects[self.handle]  # first: other threads may unload it again during the wait
        state.machine.scheduler.drain()
        for block in self.blocks:
            state.machine.release(block)
        for function in self.kernels.values():
            state.machine.objects.pop(function.handle, None)


def _check_shared(source: jit.Source) -> None:
    """Raise PtxError if a kernel declares more shared memory than it may: the driver compiles PTX as it loads it."""
    if source.facts.shared_bytes <= profile.MAX_SHARED:
        return
    for name, kernel in jit.JitModule(source).kernels.items():  # which also knows what functions it calls
        if kernel.static_shared > profile.MAX_SHARED:
            raise PtxError(
                f"{name} declares {kernel.static_shared} bytes of shared memory; a kernel may have "
                f"{profile.MAX_SHARED}, and more as dynamic shared memory",
                source.parsed.kernels[name].line,
            )


class Function:
    """A kernel of a library: what both CUkernel and CUfunction name."""

    def __init__(self, library: Library, name: str, handle: int) -> None:
        self.library = library
        self.name = name
        self.handle = handle
        self._max_dynamic_shared: int | None = None
        self.fitting: dict[bytes, _queue.Shape] = {}
        """What is known of launches that were found to be within all limits, by context (its serial), instrumentation
        and shape (``shape_key``)."""

    @property
    def max_dynamic_shared(self) -> int | None:
        """The limit that the program has set."""
        return self._max_dynamic_shared

    @max_dynamic_shared.setter
    def max_dynamic_shared(self, limit: int) -> None:
        self._max_dynamic_shared = limit
        self.fitting.clear()

    @cached_property
    def work(self) -> profile.ThreadWork:
        """What a thread of it is taken to do."""
        return profile.ThreadWork(*self._conduct.work)

    @cached_property
    def optimizing(self) -> Optimizing:
        """When its code is optimized."""
        return Optimizing(self.library.source.facts.kernels[self.name].instructions)

    @cached_property
    def orders_others(self) -> tuple[bool, bool, bool]:
        """How it takes part in the order of work: :func:`cudatool.ptx.orders_others`."""
        waits, releases, uses_flags = self._conduct.orders_others
        return waits, releases, uses_flags

    @cached_property
    def _conduct(self) -> jit.Conduct:
        return self.library.source.conduct(self.name)

    def on(self, device: Device) -> JitKernel:
        return self.library.module(device).kernels[self.name]


def registers(function: Function) -> int:
    """Return the registers of a thread: what the linker found, else a common number so that occupancy makes sense."""
    return function.library.source.facts.registers.get(function.name, 32)


def max_dynamic_shared(function: Function, kernel: JitKernel) -> int:
    """Return the bytes of dynamic shared memory that a launch may ask for."""
    if function.max_dynamic_shared is not None:
        return function.max_dynamic_shared
    return profile.MAX_SHARED - kernel.static_shared


def examined(function: Function, device: Device) -> JitKernel:
    """Return a kernel that may be asked for its attributes; native code is made when it is launched.

    Fails with CUDA_ERROR_NOT_SUPPORTED for PTX whose calls cannot be followed.
    """
    kernel = function.on(device)
    try:
        _ = kernel.sizes
    except PtxError as error:
        raise DriverError(Result.NOT_SUPPORTED, str(error)) from error
    return kernel


def modeled_ns(f: int, threads: int) -> int:
    """Return the virtual ns that a launch of a function takes with as many threads in all."""
    return profile.kernel_cost(threads, state.machine.get(f, Function).work)


def prepared(function: Function, device: Device, threads: int = 1) -> JitKernel:
    """Return a kernel's native code for a launch of so many threads in all.

    Fails with CUDA_ERROR_NOT_SUPPORTED for PTX that has no translation.
    """
    kernel, now = function.on(device), instrument()
    try:
        pays = function.optimizing.pays(threads, kernel.rounds, kernel.spent, kernel.enough(now))
        kernel.prepare(now, optimized=pays)
    except PtxError as error:
        raise DriverError(Result.NOT_SUPPORTED, str(error)) from error
    return kernel


def instrument() -> Instrument:
    """Return what kernels are instrumented for now."""
    machine = state.machine
    kinds = jit.Instrument.NONE
    if machine.measure_accesses:
        kinds |= jit.Instrument.FOOTPRINT
    return kinds | machine.checkers.shadow.kinds if machine.checkers is not None else kinds


def active_blocks(function: Function, kernel: JitKernel, block: int, dynamic: int) -> int:
    """Return how many blocks of `block` threads a multiprocessor runs at the same time."""
    attributes = profile.ATTRIBUTES
    if block <= 0:
        raise DriverError(Result.INVALID_VALUE)
    shared = kernel.static_shared + dynamic
    warps = -(-block // 32)
    taken = warps * -(-32 * registers(function) // 256) * 256  # warps take them in units of 256
    blocks = min(attributes[106], attributes[39] // (warps * 32), attributes[82] // taken)
    return min(blocks, attributes[81] // (shared + 1024)) if block <= 1024 else 0
