"""Driver entry points: modules, libraries, launches, grouped as in the driver API reference.

What can be asked of a kernel is in :mod:`cudatool.sim.api.function`.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t, c_uint

from cudatool.ptx.errors import PtxError
from cudatool.sim import abi
from cudatool.sim import machine as state
from cudatool.sim._calls import launch_config
from cudatool.sim._queue import again, again_as
from cudatool.sim.abi import entry, read_name, write
from cudatool.sim.kernels import Library
from cudatool.sim.launch_config import COOPERATIVE, PROGRAMMATIC_STREAM_SERIALIZATION, LaunchConfig, launch_attributes
from cudatool.sim.launches import checked_launch
from cudatool.sim.machine import Context, Device, current_context, stream_of
from cudatool.sim.queue import Operation
from cudatool.sim.results import DriverError, Result
from cudatool.sim.toolchain.device_library import with_device_library
from cudatool.sim.toolchain.image import jit_options, ptx_at, read_file, write_error_log

__all__ = ["some_device"]


def some_device() -> Device:
    """Return the current device, the first one if no context is current."""
    stack = state.machine.thread.contexts
    return stack[-1].device if stack else state.machine.device(0)


# ---- Loading ----


def _load(target: int, image: int, context: Context | None) -> None:
    """Load an image, and store the handle of its module or library at `target`."""
    if not target:
        raise DriverError(Result.INVALID_VALUE)
    text = ptx_at(image)
    if b".version" not in text:
        raise DriverError(Result.INVALID_IMAGE)
    try:
        library = Library(state.machine.new_handle(), with_device_library(text), context)
    except PtxError as error:
        raise DriverError(Result.INVALID_PTX, str(error)) from error
    state.machine.objects[library.handle] = library
    write(target, c_size_t, library.handle)


def _load_with_log(target: int, image: int, context: Context | None, count: int, options: int, values: int) -> None:
    given = jit_options(count, options, values)
    try:
        _load(target, image, context)
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
    _load(module, image, current_context())


@entry(
    "cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, "
    "void **optionValues)"
)
def cuModuleLoadDataEx(module: int, image: int, numOptions: int, options: int, optionValues: int) -> None:
    _load_with_log(module, image, current_context(), numOptions, options, optionValues)


@entry("cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)")
def cuModuleLoadFatBinary(module: int, fatCubin: int) -> None:
    cuModuleLoadData(module, fatCubin)


@entry("cuModuleUnload(CUmodule hmod)")
def cuModuleUnload(hmod: int) -> None:
    state.machine.get(hmod, Library).unload()


@entry("cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)")
def cuModuleGetFunction(hfunc: int, hmod: int, name: int) -> None:
    write(hfunc, c_size_t, state.machine.get(hmod, Library).function(read_name(name)).handle)


@entry("cuModuleGetGlobal(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name)")
def cuModuleGetGlobal(dptr: int, bytes: int, hmod: int, name: int) -> None:
    library, context = state.machine.get(hmod, Library), current_context()
    device = (library.context or context).device  # a module has its variables in its own context, whichever is current
    found = library.variable(read_name(name), device)
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
    _load_with_log(library, code, None, numJitOptions, jitOptions, jitOptionsValues)


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
    _load_with_log(library, ctypes.addressof(data), None, numJitOptions, jitOptions, jitOptionsValues)


@entry("cuLibraryUnload(CUlibrary library)")
def cuLibraryUnload(library: int) -> None:
    state.machine.get(library, Library).unload()


@entry("cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)")
def cuLibraryGetKernel(pKernel: int, library: int, name: int) -> None:
    write(pKernel, c_size_t, state.machine.get(library, Library).function(read_name(name)).handle)


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
    text = read_name(name)
    if not any(one.managed for one in found.source.facts.variables if one.name == text):
        raise DriverError(Result.NOT_FOUND, f"the image has no managed variable {text!r}")
    # Managed variables have one address on all devices (cuLibraryGetManaged): that on the first.
    for target, value in zip((dptr, bytes), found.variable(text, state.machine.device(0)), strict=True):
        if target:
            write(target, c_size_t, value)


# ---- Execution control ----


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
    programmatic: bool = False,
) -> None:
    stream = stream_of(hStream)
    launch = checked_launch(f, stream.context, grid, block, shared, params, extra, cooperative=cooperative)
    operation = Operation(stream, "kernel", launch.function.name, abi.call.correlation)
    operation.run = launch
    operation.programmatic = programmatic, *launch.function.orders_others
    scheduler = state.machine.scheduler
    if scheduler.watch is not None:
        operation.host_memory = launch.host_memory()
    scheduler.enqueue(operation, cost=launch.cost)
    if state.machine.options.launch_blocking:
        scheduler.wait(stream.last)
        scheduler.check(stream.context)


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
    shape = gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ
    if extra or not again(f, *shape, sharedMemBytes, hStream, kernelParams):
        _launch(f, shape[:3], shape[3:], sharedMemBytes, hStream, kernelParams, extra)


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


@entry("cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)")
def cuLaunchKernelEx(config: int, f: int, kernelParams: int, extra: int) -> None:
    if not config:
        raise DriverError(Result.INVALID_VALUE)
    if not extra and again_as(config, f, kernelParams):
        return
    grid, block, shared, stream, attributes = launch_config(config)
    cooperative = programmatic = False
    if attributes:
        given = launch_attributes(LaunchConfig.from_address(config))
        cooperative = any(given.get(COOPERATIVE, b"")[:4])
        programmatic = any(given.get(PROGRAMMATIC_STREAM_SERIALIZATION, b"")[:4])
    _launch(f, grid, block, shared, stream, kernelParams, extra, cooperative=cooperative, programmatic=programmatic)
