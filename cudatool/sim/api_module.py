"""Driver entry points: modules, libraries, launches, grouped as in the driver API reference.

What can be asked of a kernel is in :mod:`cudatool.sim.api_function`.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_size_t, c_uint
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cudatool.ptx import PtxError, parse_image
from cudatool.sim import abi, profile
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, read_string, write
from cudatool.sim.addresses import place_of, pointer_behind
from cudatool.sim.device_library import with_device_library
from cudatool.sim.device_runtime import STACK_SIZE, limit_of, prepare_calls
from cudatool.sim.host_accesses import HostMemoryBefore
from cudatool.sim.image import jit_options, ptx_at, read_file, write_error_log
from cudatool.sim.machine import Context, Device, current_context, stream_of
from cudatool.sim.memory import Allocation
from cudatool.sim.queue import Operation
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cudatool.sim.jit import Found, Instrument, JitModule, KernelError
    from cudatool.sim.jit import Kernel as JitKernel

__all__ = [
    "COOPERATIVE",
    "Function",
    "Launch",
    "LaunchConfig",
    "Library",
    "active_blocks",
    "checked_launch",
    "cluster_of",
    "launch_attributes",
    "max_dynamic_shared",
    "prepared",
    "registers",
    "some_device",
]


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
        self.parsed = parse_image(image)
        self.names = tuple(self.parsed.kernels)

    def module(self, device: Device) -> JitModule:
        """Return the module on `device`, with its global variables allocated and initialized."""
        found = self.modules.get(device.ordinal)
        if found is not None:
            return found
        module: JitModule = _translator().load(self.image, cache=state.machine.options.code_cache)
        offsets, end = {}, 0
        for name, variable in module.globals.items():
            offsets[name] = -(-end // variable.align) * variable.align
            end = offsets[name] + max(variable.size, 1)
        addresses = {}
        if offsets:
            block = state.machine.allocate(device, end, "module", context=self.context)
            self.blocks.append(block)
            addresses = {name: block.address + offset for name, offset in offsets.items()}
        for name, variable in module.globals.items():
            self.globals[device.ordinal, name] = (addresses[name], variable.size)
        for name, variable in module.globals.items():
            ctypes.memmove(addresses[name], variable.initial, len(variable.initial))
            for offset, symbol, addend in variable.relocations:
                ctypes.c_uint64.from_address(addresses[name] + offset).value = (
                    addresses.get(symbol) or module.functions[symbol]
                ) + addend
        if offsets and state.machine.tape is not None:
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
        state.machine.scheduler.drain()
        for block in self.blocks:
            if state.machine.allocations.at(block.address) is block:  # its context may have ended before
                state.machine.release(block)
        for function in self.kernels.values():
            state.machine.objects.pop(function.handle, None)
        del state.machine.objects[self.handle]


class Function:
    """A kernel of a library: what both CUkernel and CUfunction name."""

    def __init__(self, library: Library, name: str, handle: int) -> None:
        self.library = library
        self.name = name
        self.handle = handle
        self.max_dynamic_shared: int | None = None

    @cached_property
    def work(self) -> profile.Work:
        """What a thread of it is taken to do."""
        return profile.work_of_a_thread(self.library.parsed.kernels[self.name])

    def on(self, device: Device) -> JitKernel:
        return self.library.module(device).kernels[self.name]


def _translator() -> Any:
    from cudatool.sim import jit  # llvmlite takes a while to load: only programs that use kernels pay for it

    return jit


def some_device() -> Device:
    """Return the current device, the first one if no context is current."""
    stack = state.machine.thread.contexts
    return stack[-1].device if stack else state.machine.device(0)


# ---- Loading ----


def _load(image: int, context: Context | None) -> Library:
    text = ptx_at(image)
    if b".version" not in text:
        raise DriverError(Result.INVALID_IMAGE)
    try:
        library = Library(state.machine.new_handle(), with_device_library(text), context)
    except PtxError as error:
        raise DriverError(Result.INVALID_PTX, str(error)) from error
    state.machine.objects[library.handle] = library
    return library


def _load_with_log(image: int, context: Context | None, count: int, options: int, values: int) -> Library:
    given = jit_options(count, options, values)
    try:
        return _load(image, context)
    except DriverError as error:
        write_error_log(given, str(error))
        raise


# ---- Modules ----


@entry("cuModuleLoad(CUmodule *module, const char *fname)")
def cuModuleLoad(module: int, fname: int) -> None:
    data = ctypes.create_string_buffer(read_file(fname))
    cuModuleLoadData(module, ctypes.addressof(data))


@entry("cuModuleLoadData(CUmodule *module, const void *image)")
def cuModuleLoadData(module: int, image: int) -> None:
    write(module, c_size_t, _load(image, current_context()).handle)


@entry(
    "cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, "
    "void **optionValues)"
)
def cuModuleLoadDataEx(module: int, image: int, numOptions: int, options: int, optionValues: int) -> None:
    library = _load_with_log(image, current_context(), numOptions, options, optionValues)
    write(module, c_size_t, library.handle)


@entry("cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)")
def cuModuleLoadFatBinary(module: int, fatCubin: int) -> None:
    cuModuleLoadData(module, fatCubin)


@entry("cuModuleUnload(CUmodule hmod)")
def cuModuleUnload(hmod: int) -> None:
    state.machine.get(hmod, Library).unload()


@entry("cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)")
def cuModuleGetFunction(hfunc: int, hmod: int, name: int) -> None:
    write(hfunc, c_size_t, state.machine.get(hmod, Library).function(read_string(name).decode()).handle)


@entry("cuModuleGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)")
def cuModuleGetGlobal(dptr: int, bytes: int, hmod: int, name: int) -> None:
    found = state.machine.get(hmod, Library).variable(read_string(name).decode(), current_context().device)
    for target, value in zip((dptr, bytes), found, strict=True):
        if target:
            write(target, c_size_t, value)


@entry("cuModuleGetFunctionCount(unsigned int *count, CUmodule mod)")
def cuModuleGetFunctionCount(count: int, mod: int) -> None:
    write(count, c_uint, len(state.machine.get(mod, Library).names))


@entry("cuModuleEnumerateFunctions(CUfunction *functions, unsigned int numFunctions, CUmodule mod)")
def cuModuleEnumerateFunctions(functions: int, numFunctions: int, mod: int) -> None:
    cuLibraryEnumerateKernels(functions, numFunctions, mod)


@entry("cuModuleGetLoadingMode(int *mode)")
def cuModuleGetLoadingMode(mode: int) -> None:
    write(mode, c_int, 2)  # CU_MODULE_LAZY_LOADING


# ---- Libraries and kernels ----


@entry(
    "cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues, "
    "unsigned int numJitOptions, void *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions)"
)
def cuLibraryLoadData(
    library: int,
    code: int,
    jitOptions: int,
    jitOptionsValues: int,
    numJitOptions: int,
    libraryOptions: int,
    libraryOptionValues: int,
    numLibraryOptions: int,
) -> None:
    loaded = _load_with_log(code, None, numJitOptions, jitOptions, jitOptionsValues)
    write(library, c_size_t, loaded.handle)


@entry(
    "cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, "
    "void **jitOptionsValues, unsigned int numJitOptions, void *libraryOptions, void **libraryOptionValues, "
    "unsigned int numLibraryOptions)"
)
def cuLibraryLoadFromFile(
    library: int,
    fileName: int,
    jitOptions: int,
    jitOptionsValues: int,
    numJitOptions: int,
    libraryOptions: int,
    libraryOptionValues: int,
    numLibraryOptions: int,
) -> None:
    data = ctypes.create_string_buffer(read_file(fileName))
    loaded = _load_with_log(ctypes.addressof(data), None, numJitOptions, jitOptions, jitOptionsValues)
    write(library, c_size_t, loaded.handle)


@entry("cuLibraryUnload(CUlibrary library)")
def cuLibraryUnload(library: int) -> None:
    state.machine.get(library, Library).unload()


@entry("cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)")
def cuLibraryGetKernel(pKernel: int, library: int, name: int) -> None:
    write(pKernel, c_size_t, state.machine.get(library, Library).function(read_string(name).decode()).handle)


@entry("cuLibraryGetKernelCount(unsigned int *count, CUlibrary lib)")
def cuLibraryGetKernelCount(count: int, lib: int) -> None:
    write(count, c_uint, len(state.machine.get(lib, Library).names))


@entry("cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int numKernels, CUlibrary lib)")
def cuLibraryEnumerateKernels(kernels: int, numKernels: int, lib: int) -> None:
    library = state.machine.get(lib, Library)
    for index, name in enumerate(library.names[:numKernels]):
        write(kernels + 8 * index, c_size_t, library.function(name).handle)


@entry("cuLibraryGetModule(CUmodule *pMod, CUlibrary library)")
def cuLibraryGetModule(pMod: int, library: int) -> None:
    write(pMod, c_size_t, state.machine.get(library, Library).handle)


@entry("cuLibraryGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)")
def cuLibraryGetGlobal(dptr: int, bytes: int, library: int, name: int) -> None:
    cuModuleGetGlobal(dptr, bytes, library, name)


@entry("cuLibraryGetManaged(CUdeviceptr *dptr, size_t *bytes, CUlibrary library, const char *name)")
def cuLibraryGetManaged(dptr: int, bytes: int, library: int, name: int) -> None:
    found = state.machine.get(library, Library)
    text = read_string(name).decode()
    if text not in found.parsed.variables or not found.parsed.variables[text].managed:
        raise DriverError(Result.NOT_FOUND, f"the image has no managed variable {text!r}")
    # Managed variables have one address on all devices (cuLibraryGetManaged): that on the first.
    for target, value in zip((dptr, bytes), found.variable(text, state.machine.device(0)), strict=True):
        if target:
            write(target, c_size_t, value)


# ---- Execution control ----


def registers(function: Function) -> int:
    """Return the registers of a thread: what the linker found, else a common number so that occupancy makes sense."""
    return function.library.parsed.register_counts.get(function.name, 32)


def max_dynamic_shared(function: Function, kernel: JitKernel) -> int:
    """Return the bytes of dynamic shared memory that a launch may ask for."""
    if function.max_dynamic_shared is not None:
        return function.max_dynamic_shared
    return profile.MAX_SHARED - kernel.static_shared


def prepared(function: Function, device: Device) -> JitKernel:
    """Return a kernel's native code; fail with CUDA_ERROR_NOT_SUPPORTED for PTX that has no translation."""
    kernel = function.on(device)
    try:
        kernel.prepare(_instrument())
    except PtxError as error:
        raise DriverError(Result.NOT_SUPPORTED, str(error)) from error
    return kernel


def _instrument() -> Instrument:
    """Return what kernels are instrumented for now."""
    machine = state.machine
    kinds: Instrument = _translator().Instrument.NONE
    if machine.measure_accesses:
        kinds |= _translator().Instrument.FOOTPRINT
    return kinds | machine.checkers.shadow.kinds if machine.checkers is not None else kinds


def _pack(kernel: JitKernel, kernelParams: int, extra: int) -> ctypes.Array[ctypes.c_char]:
    """Return the kernel's arguments in one buffer, laid out as its parameters are declared."""
    buffer = ctypes.create_string_buffer(max(kernel.param_bytes, 1) + 15)
    if kernelParams:
        pointers = (c_size_t * len(kernel.params)).from_address(kernelParams)
        for parameter, pointer in zip(kernel.params, pointers, strict=True):
            if not pointer:
                raise DriverError(Result.INVALID_VALUE)
            ctypes.memmove(ctypes.addressof(buffer) + parameter.offset, pointer, parameter.size)
    elif extra:
        fields = {}  # CU_LAUNCH_PARAM_BUFFER_POINTER = 1, CU_LAUNCH_PARAM_BUFFER_SIZE = 2, CU_LAUNCH_PARAM_END = 0
        while key := c_size_t.from_address(extra).value:
            fields[key] = c_size_t.from_address(extra + 8).value
            extra += 16
        if 1 not in fields or 2 not in fields:
            raise DriverError(Result.INVALID_VALUE)
        size = c_size_t.from_address(fields[2]).value
        ctypes.memmove(buffer, fields[1], min(size, kernel.param_bytes))
    elif kernel.params:
        raise DriverError(Result.INVALID_VALUE)
    return buffer


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


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel and all that one launch of it needs, checked. `params` are its arguments, as they are declared."""

    function: Function
    kernel: JitKernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    params: ctypes.Array[ctypes.c_char]
    cooperative: bool = False

    @property
    def cost(self) -> int:
        """Virtual ns that it takes."""
        grid, block = self.grid, self.block
        threads = grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2]
        return profile.kernel_cost(threads, self.function.work)

    def run(self, operation: Operation) -> None:
        """Execute it, as the operation that was enqueued for it."""
        _execute(self, operation)

    def host_memory(self) -> list[tuple[int, int]]:
        """Return the allocations that arguments point into, if somebody watches the host's memory or there is any."""
        allocations = state.machine.allocations
        if state.machine.scheduler.watch is None and not allocations.on_host:
            return []
        words = memoryview(bytes(self.params)[: len(self.params) // 8 * 8]).cast("Q")
        found = map(allocations.holding, words)
        return list({(one.address, one.size) for one in found if one is not None})

    def cooperating(self) -> Launch:
        """Return the same as a cooperative launch. Fails with CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE."""
        blocks = self.grid[0] * self.grid[1] * self.grid[2]
        threads = self.block[0] * self.block[1] * self.block[2]
        room = profile.ATTRIBUTES[16] * active_blocks(self.function, self.kernel, threads, self.shared)
        if blocks > room:
            raise DriverError(
                Result.COOPERATIVE_LAUNCH_TOO_LARGE,
                f"{self.function.name}: {blocks} blocks; {room} of this size run at the same time",
            )
        return replace(self, cooperative=True)


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
    function = state.machine.get(f, Function)
    kernel = prepared(function, context.device)
    threads = block[0] * block[1] * block[2]
    limits = (1024, 1024, 64)
    if not all(0 < g <= limit for g, limit in zip(grid, profile.MAX_GRID, strict=True)):
        raise DriverError(Result.INVALID_VALUE, f"{function.name}: the grid {grid} is not within {profile.MAX_GRID}")
    if not all(0 < b <= limit for b, limit in zip(block, limits, strict=True)) or threads > 1024:
        raise DriverError(
            Result.INVALID_VALUE, f"{function.name}: the block {block} is not within {limits} and 1024 threads"
        )
    if threads > kernel.max_threads:
        raise DriverError(
            Result.INVALID_VALUE, f"{function.name} was compiled for at most {kernel.max_threads} threads"
        )
    if shared > max_dynamic_shared(function, kernel):
        raise DriverError(
            Result.INVALID_VALUE,
            f"{function.name}: {shared} bytes of dynamic shared memory; "
            f"{max_dynamic_shared(function, kernel)} are allowed (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)",
        )
    launch = Launch(function, kernel, grid, block, shared, _pack(kernel, params, extra))
    if cooperative:
        launch = launch.cooperating()
    prepare_calls(context, kernel.system_calls)
    return launch


def _launch(
    f: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    hStream: int,
    params: int,
    extra: int,
    *,
    cooperative: bool = False,
) -> None:
    stream = stream_of(hStream)
    launch = checked_launch(f, stream.context, grid, block, shared, params, extra, cooperative=cooperative)
    operation = Operation(stream, "kernel", launch.function.name, abi.call.correlation)
    operation.run, operation.host_memory = launch.run, launch.host_memory()
    scheduler = state.machine.scheduler
    scheduler.enqueue(operation, cost=launch.cost)
    if state.machine.options.launch_blocking:
        scheduler.wait(stream.last)
        scheduler.check(stream.context)


def _failed(error: KernelError, launch: Launch) -> DriverError:
    """Return what the driver says of a kernel that did not run to its end."""
    jit = _translator()
    if isinstance(error, jit.KernelFault):
        allocations = state.machine.allocations
        where = allocations.holding(error.address)
        pointer = pointer_behind(launch.kernel.pointers_at(0, bytes(launch.params)), allocations)
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


def _execute(launch: Launch, operation: Operation) -> None:
    jit = _translator()
    machine = state.machine
    footprint = None
    if machine.measure_accesses:
        footprint, machine.footprint = machine.footprint, None
        if footprint is None or footprint.size < machine.arena.size:  # it grows with ranges that programs reserve
            footprint = jit.Footprint(machine.arena.base, machine.arena.size)
        on_host = HostMemoryBefore(launch, machine.allocations)
    checkers = machine.checkers
    if machine.tape is not None:
        machine.tape.launching(operation, launch, limit_of(operation.stream.context, STACK_SIZE))
    failure = None
    found: Sequence[Found]
    try:
        found = launch.kernel.launch(
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared,
            params=ctypes.addressof(launch.params),
            # One thread makes also the order of atomics the same when the tape is replayed.
            threads=1 if machine.tape is not None else machine.options.threads or len(os.sched_getaffinity(0)),
            footprint=footprint,
            shadow=checkers.shadow if checkers is not None else None,
            host_ranges=checkers.host_ranges() if checkers is not None else (),
            heap=heap.handle if (heap := operation.stream.context.heap) is not None else 0,
            stack_bytes=limit_of(operation.stream.context, STACK_SIZE),
            cooperative=launch.cooperative,
            timeout_s=machine.options.timeout,
        )
    except jit.KernelError as error:
        found, failure = error.found, error
    if checkers is not None:
        params = bytes(launch.params)
        operation.findings = [checkers.explain(one, launch.kernel, launch.grid, launch.block, params) for one in found]
    if failure is not None:
        raise _failed(failure, launch) from failure
    if footprint is not None:
        operation.footprint = [*footprint.take(), *on_host.accesses()]
        machine.footprint = footprint


@entry(
    "cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, "
    "unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, "
    "CUstream hStream, void **kernelParams, void **extra)"
)
def cuLaunchKernel(
    f: int,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: int,
    kernelParams: int,
    extra: int,
) -> None:
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    _launch(f, grid, block, sharedMemBytes, hStream, kernelParams, extra)


@entry(
    "cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ, "
    "unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ, unsigned int sharedMemBytes, "
    "CUstream hStream, void **kernelParams)"
)
def cuLaunchCooperativeKernel(
    f: int,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: int,
    kernelParams: int,
) -> None:
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    _launch(f, grid, block, sharedMemBytes, hStream, kernelParams, 0, cooperative=True)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("sharedMemBytes", c_uint),
        ("hStream", c_size_t),
        ("attrs", c_size_t),
        ("numAttrs", c_uint),
    )


_ATTRIBUTE_BYTES = 72  # sizeof(CUlaunchAttribute): id, padding to 8, a union of 64
COOPERATIVE, _CLUSTER_DIMENSION = 2, 4


def launch_attributes(launch: LaunchConfig) -> dict[int, bytes]:
    """Return each CUlaunchAttributeValue by its CUlaunchAttributeID; fail for what there is not on this device."""
    if cluster_of(launch) != (1, 1, 1):
        raise DriverError(Result.NOT_SUPPORTED, "the software device has no thread block clusters")
    return _attributes(launch)


def cluster_of(launch: LaunchConfig) -> tuple[int, ...]:
    """Return the dimensions of the clusters that a launch asks for."""
    value = _attributes(launch).get(_CLUSTER_DIMENSION)
    return tuple((c_uint * 3).from_buffer_copy(value)) if value is not None else (1, 1, 1)


def _attributes(launch: LaunchConfig) -> dict[int, bytes]:
    first = launch.attrs
    attributes = range(first, first + launch.numAttrs * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES)
    return {c_int.from_address(at).value: ctypes.string_at(at + 8, _ATTRIBUTE_BYTES - 8) for at in attributes}


@entry("cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)")
def cuLaunchKernelEx(config: int, f: int, kernelParams: int, extra: int) -> None:
    if not config:
        raise DriverError(Result.INVALID_VALUE)
    launch = LaunchConfig.from_address(config)
    cooperative = any(launch_attributes(launch).get(COOPERATIVE, b"")[:4])
    grid, block = tuple(launch.grid), tuple(launch.block)
    _launch(f, grid, block, launch.sharedMemBytes, launch.hStream, kernelParams, extra, cooperative=cooperative)
