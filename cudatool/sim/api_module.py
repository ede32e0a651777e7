"""Driver entry points: modules, libraries, kernels, launches, occupancy, grouped as in the driver API reference."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_int, c_size_t, c_uint
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cudatool.ptx import PtxError, parse_image
from cudatool.sim import abi, profile
from cudatool.sim import machine as state
from cudatool.sim.abi import entry, read_string, write
from cudatool.sim.device_library import with_device_library
from cudatool.sim.device_runtime import STACK_SIZE, limit_of, prepare_calls
from cudatool.sim.image import jit_options, ptx_at, read_file, write_error_log
from cudatool.sim.machine import Context, Device, current_context, stream_of
from cudatool.sim.memory import Allocation
from cudatool.sim.queue import Operation
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.jit import Instrument, JitModule
    from cudatool.sim.jit import Kernel as JitKernel


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
        module: JitModule = _translator().load(self.image, cache_dir=state.machine.options.cache_dir)
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
        self.work = profile.work_of_a_thread(library.parsed.kernels[name])

    def on(self, device: Device) -> JitKernel:
        return self.library.module(device).kernels[self.name]


def _translator() -> Any:
    from cudatool.sim import jit  # llvmlite takes a while to load: only programs that use kernels pay for it

    return jit


def _some_device() -> Device:
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


@entry("cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)")
def cuKernelGetFunction(pFunc: int, kernel: int) -> None:
    write(pFunc, c_size_t, state.machine.get(kernel, Function).handle)


@entry("cuKernelGetLibrary(CUlibrary *pLib, CUkernel kernel)")
def cuKernelGetLibrary(pLib: int, kernel: int) -> None:
    write(pLib, c_size_t, state.machine.get(kernel, Function).library.handle)


@entry("cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)")
def cuFuncGetModule(hmod: int, hfunc: int) -> None:
    cuKernelGetLibrary(hmod, hfunc)


_names: dict[str, bytes] = {}  # what C callers hold pointers to


@entry("cuKernelGetName(const char **name, CUkernel hfunc)")
def cuKernelGetName(name: int, hfunc: int) -> None:
    function = state.machine.get(hfunc, Function)
    text = _names.setdefault(function.name, function.name.encode())
    write(name, c_size_t, ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0)


@entry("cuFuncGetName(const char **name, CUfunction hfunc)")
def cuFuncGetName(name: int, hfunc: int) -> None:
    cuKernelGetName(name, hfunc)


@entry("cuFuncLoad(CUfunction function)")
def cuFuncLoad(function: int) -> None:
    _prepare(state.machine.get(function, Function), current_context().device)


@entry("cuFuncIsLoaded(int *state_out, CUfunction function)")
def cuFuncIsLoaded(state_out: int, function: int) -> None:
    state.machine.get(function, Function)
    write(state_out, c_int, 1)


@entry("cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t *paramOffset, size_t *paramSize)")
def cuKernelGetParamInfo(kernel: int, paramIndex: int, paramOffset: int, paramSize: int) -> None:
    parameters = state.machine.get(kernel, Function).on(_some_device()).params
    if paramIndex >= len(parameters):
        raise DriverError(Result.INVALID_VALUE)
    write(paramOffset, c_size_t, parameters[paramIndex].offset)
    if paramSize:
        write(paramSize, c_size_t, parameters[paramIndex].size)


@entry("cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t *paramOffset, size_t *paramSize)")
def cuFuncGetParamInfo(func: int, paramIndex: int, paramOffset: int, paramSize: int) -> None:
    cuKernelGetParamInfo(func, paramIndex, paramOffset, paramSize)


@entry("cuKernelGetParamCount(CUkernel kernel, size_t *paramCount)")
def cuKernelGetParamCount(kernel: int, paramCount: int) -> None:
    write(paramCount, c_size_t, len(state.machine.get(kernel, Function).on(_some_device()).params))


@entry("cuFuncGetParamCount(CUfunction func, size_t *paramCount)")
def cuFuncGetParamCount(func: int, paramCount: int) -> None:
    cuKernelGetParamCount(func, paramCount)


def _function_attribute(function: Function, attribute: int, device: Device) -> int:
    kernel = _prepare(function, device)
    values = {
        0: kernel.max_threads,
        1: kernel.static_shared,
        2: sum(variable.size for variable in function.library.parsed.variables.values() if variable.space == "const"),
        3: kernel.local_bytes,
        4: _registers(function),
        5: 90,  # PTX version
        6: 90,  # binary version
        7: 0,
        8: _max_dynamic_shared(function, kernel),
        9: -1,
    }
    if not 0 <= attribute <= 17:
        raise DriverError(Result.INVALID_VALUE)
    return values.get(attribute, 0)


def _registers(function: Function) -> int:
    """Return the registers of a thread: what the linker found, else a common number so that occupancy makes sense."""
    return function.library.parsed.register_counts.get(function.name, 32)


def _max_dynamic_shared(function: Function, kernel: JitKernel) -> int:
    if function.max_dynamic_shared is not None:
        return function.max_dynamic_shared
    return profile.MAX_SHARED - kernel.static_shared


@entry("cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)")
def cuFuncGetAttribute(pi: int, attrib: int, hfunc: int) -> None:
    write(pi, c_int, _function_attribute(state.machine.get(hfunc, Function), attrib, current_context().device))


@entry("cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)")
def cuKernelGetAttribute(pi: int, attrib: int, kernel: int, dev: int) -> None:
    write(pi, c_int, _function_attribute(state.machine.get(kernel, Function), attrib, state.machine.device(dev)))


@entry("cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)")
def cuFuncSetAttribute(hfunc: int, attrib: int, value: int) -> None:
    cuKernelSetAttribute(attrib, value, hfunc, _some_device().ordinal)


@entry("cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)")
def cuKernelSetAttribute(attrib: int, val: int, kernel: int, dev: int) -> None:
    function = state.machine.get(kernel, Function)
    if attrib == 8:
        static = _prepare(function, state.machine.device(dev)).static_shared
        if not 0 <= val <= profile.MAX_SHARED_OPTIN - static:
            raise DriverError(Result.INVALID_VALUE)
        function.max_dynamic_shared = val
    elif attrib != 9:  # the carve-out is a hint
        raise DriverError(Result.INVALID_VALUE)


@entry("cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config)")
def cuFuncSetCacheConfig(hfunc: int, config: int) -> None:
    state.machine.get(hfunc, Function)


@entry("cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice dev)")
def cuKernelSetCacheConfig(kernel: int, config: int, dev: int) -> None:
    state.machine.device(dev)
    cuFuncSetCacheConfig(kernel, config)


# ---- Execution control ----


def _prepare(function: Function, device: Device) -> JitKernel:
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
        return profile.kernel_cost(threads, *self.function.work)

    def run(self, operation: Operation) -> None:
        """Execute it, as the operation that was enqueued for it."""
        _execute(self, operation)

    def cooperating(self) -> Launch:
        """Return the same as a cooperative launch. Fails with CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE."""
        blocks = self.grid[0] * self.grid[1] * self.grid[2]
        threads = self.block[0] * self.block[1] * self.block[2]
        room = profile.ATTRIBUTES[16] * _active_blocks(self.function, self.kernel, threads, self.shared)
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
    kernel = _prepare(function, context.device)
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
    if shared > _max_dynamic_shared(function, kernel):
        raise DriverError(
            Result.INVALID_VALUE,
            f"{function.name}: {shared} bytes of dynamic shared memory; "
            f"{_max_dynamic_shared(function, kernel)} are allowed (CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)",
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
    operation.run = launch.run
    state.machine.scheduler.enqueue(operation, cost=launch.cost)


def _execute(launch: Launch, operation: Operation) -> None:
    jit = _translator()
    machine = state.machine
    footprint = None
    if machine.measure_accesses:
        footprint = jit.Footprint(machine.arena.base, machine.arena.size)
    checkers = machine.checkers
    try:
        found = launch.kernel.launch(
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared,
            params=ctypes.addressof(launch.params),
            threads=machine.options.threads or len(os.sched_getaffinity(0)),
            footprint=footprint,
            shadow=checkers.shadow if checkers is not None else None,
            host_ranges=checkers.host_ranges() if checkers is not None else (),
            heap=heap.handle if (heap := operation.stream.context.heap) is not None else 0,
            stack_bytes=limit_of(operation.stream.context, STACK_SIZE),
            cooperative=launch.cooperative,
            timeout_s=machine.options.timeout,
        )
        if checkers is not None:
            operation.findings = [checkers.explain(one, launch.kernel, launch.grid, launch.block) for one in found]
    except jit.KernelFault as fault:
        where = machine.allocations.holding(fault.address)
        place = f"inside {where.kind} memory" if where else "outside every allocation"
        raise DriverError(Result.ILLEGAL_ADDRESS, f"illegal access at {fault.address:#x}, {place}") from fault
    except jit.KernelAssert as trap:
        raise DriverError(Result.ASSERT, str(trap)) from trap
    except jit.KernelStackOverflow as overflow:
        raise DriverError(Result.HARDWARE_STACK_ERROR, str(overflow)) from overflow
    except jit.KernelTrap as trap:
        raise DriverError(Result.LAUNCH_FAILED, str(trap)) from trap
    except (jit.KernelDeadlock, jit.KernelTimeout) as stuck:
        raise DriverError(Result.LAUNCH_TIMEOUT, str(stuck)) from stuck
    if footprint is not None:
        operation.footprint = footprint.ranges()


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
    found = {}
    for index in range(launch.numAttrs):
        attribute = launch.attrs + index * _ATTRIBUTE_BYTES
        kind, value = c_int.from_address(attribute).value, (c_uint * 3).from_address(attribute + 8)
        if kind == _CLUSTER_DIMENSION and tuple(value) != (1, 1, 1):
            raise DriverError(Result.NOT_SUPPORTED, "the software device has no thread block clusters")
        found[kind] = ctypes.string_at(attribute + 8, _ATTRIBUTE_BYTES - 8)
    return found


@entry("cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)")
def cuLaunchKernelEx(config: int, f: int, kernelParams: int, extra: int) -> None:
    if not config:
        raise DriverError(Result.INVALID_VALUE)
    launch = LaunchConfig.from_address(config)
    cooperative = any(launch_attributes(launch).get(COOPERATIVE, b"")[:4])
    grid, block = tuple(launch.grid), tuple(launch.block)
    _launch(f, grid, block, launch.sharedMemBytes, launch.hStream, kernelParams, extra, cooperative=cooperative)


# ---- Occupancy ----


def _active_blocks(function: Function, kernel: JitKernel, block: int, dynamic: int) -> int:
    """Return how many blocks of `block` threads a multiprocessor runs at the same time."""
    attributes = profile.ATTRIBUTES
    if block <= 0:
        raise DriverError(Result.INVALID_VALUE)
    shared = kernel.static_shared + dynamic
    warps = -(-block // 32)
    registers = warps * -(-32 * _registers(function) // 256) * 256  # warps take them in units of 256
    blocks = min(attributes[106], attributes[39] // (warps * 32), attributes[82] // registers)
    return min(blocks, attributes[81] // (shared + 1024)) if block <= 1024 else 0


def _occupancy(func: int, block: int, dynamic: int) -> int:
    function = state.machine.get(func, Function)
    return _active_blocks(function, _prepare(function, current_context().device), block, dynamic)


@entry(
    "cuOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, CUfunction func, int blockSize, "
    "size_t dynamicSMemSize)"
)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(
    numBlocks: int, func: int, blockSize: int, dynamicSMemSize: int
) -> None:
    write(numBlocks, c_int, _occupancy(func, blockSize, dynamicSMemSize))


@entry(
    "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, CUfunction func, int blockSize, "
    "size_t dynamicSMemSize, unsigned int flags)"
)
def cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    numBlocks: int, func: int, blockSize: int, dynamicSMemSize: int, flags: int
) -> None:
    write(numBlocks, c_int, _occupancy(func, blockSize, dynamicSMemSize))
