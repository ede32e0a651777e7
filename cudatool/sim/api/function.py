"""Driver entry points: what can be asked of a kernel, and set.

Grouped as in the CUDA driver API reference: the part of "Library Management" and "Execution Control" that is about
kernels and functions, which are the same here, and "Occupancy".
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_size_t

from cudatool.sim import machine as state
from cudatool.sim import profile
from cudatool.sim.abi import entry, write
from cudatool.sim.api.module import some_device
from cudatool.sim.kernels import Function, active_blocks, examined, max_dynamic_shared, prepared, registers
from cudatool.sim.launch_config import LaunchConfig, cluster_of
from cudatool.sim.machine import Device, current_context
from cudatool.sim.results import DriverError, Result


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
    prepared(state.machine.get(function, Function), current_context().device)


@entry("cuFuncIsLoaded(int *state_out, CUfunction function)")
def cuFuncIsLoaded(state_out: int, function: int) -> None:
    state.machine.get(function, Function)
    write(state_out, c_int, 1)


@entry("cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t *paramOffset, size_t *paramSize)")
def cuKernelGetParamInfo(kernel: int, paramIndex: int, paramOffset: int, paramSize: int) -> None:
    parameters = state.machine.get(kernel, Function).on(current_context().device).params
    if paramIndex >= len(parameters):
        raise DriverError(Result.INVALID_VALUE)  # no entry in the log: programs ask until this is returned
    write(paramOffset, c_size_t, parameters[paramIndex].offset)
    if paramSize:
        write(paramSize, c_size_t, parameters[paramIndex].size)


@entry("cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t *paramOffset, size_t *paramSize)")
def cuFuncGetParamInfo(func: int, paramIndex: int, paramOffset: int, paramSize: int) -> None:
    cuKernelGetParamInfo(func, paramIndex, paramOffset, paramSize)


@entry("cuKernelGetParamCount(CUkernel kernel, size_t *paramCount)")
def cuKernelGetParamCount(kernel: int, paramCount: int) -> None:
    write(paramCount, c_size_t, len(state.machine.get(kernel, Function).on(some_device()).params))


@entry("cuFuncGetParamCount(CUfunction func, size_t *paramCount)")
def cuFuncGetParamCount(func: int, paramCount: int) -> None:
    cuKernelGetParamCount(func, paramCount)


def _attribute(function: Function, attribute: int, device: Device) -> int:
    kernel = examined(function, device)
    values = {
        0: kernel.max_threads,
        1: kernel.static_shared,
        2: function.library.source.facts.constant_bytes,
        3: kernel.local_bytes,
        4: registers(function),
        5: 90,  # PTX version
        6: 90,  # binary version
        7: 0,
        8: max_dynamic_shared(function, kernel),
        9: -1,
    }
    if not 0 <= attribute <= 17:
        raise DriverError(Result.INVALID_VALUE)
    return values.get(attribute, 0)


@entry("cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)")
def cuFuncGetAttribute(pi: int, attrib: int, hfunc: int) -> None:
    write(pi, c_int, _attribute(state.machine.get(hfunc, Function), attrib, current_context().device))


@entry("cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)")
def cuKernelGetAttribute(pi: int, attrib: int, kernel: int, dev: int) -> None:
    write(pi, c_int, _attribute(state.machine.get(kernel, Function), attrib, state.machine.device(dev)))


@entry("cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)")
def cuFuncSetAttribute(hfunc: int, attrib: int, value: int) -> None:
    cuKernelSetAttribute(attrib, value, hfunc, some_device().ordinal)


@entry("cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)")
def cuKernelSetAttribute(attrib: int, val: int, kernel: int, dev: int) -> None:
    function = state.machine.get(kernel, Function)
    if attrib == 8:
        static = examined(function, state.machine.device(dev)).static_shared
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


# ---- Occupancy ----

_SHARED_RESERVED = profile.ATTRIBUTES[111]  # RESERVED_SHARED_MEMORY_PER_BLOCK
_SHARED_UNIT = 128  # bytes


def _occupancy(func: int, block: int, dynamic: int) -> int:
    function = state.machine.get(func, Function)
    return active_blocks(function, prepared(function, current_context().device), block, dynamic)


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
    if flags > 1:
        raise DriverError(Result.INVALID_VALUE)
    write(numBlocks, c_int, _occupancy(func, blockSize, dynamicSMemSize))


_BlockToShared = ctypes.CFUNCTYPE(c_size_t, c_int)


@entry(
    "cuOccupancyMaxPotentialBlockSize(int *minGridSize, int *blockSize, CUfunction func, "
    "CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize, int blockSizeLimit)"
)
def cuOccupancyMaxPotentialBlockSize(
    minGridSize: int,
    blockSize: int,
    func: int,
    blockSizeToDynamicSMemSize: int,
    dynamicSMemSize: int,
    blockSizeLimit: int,
) -> None:
    function = state.machine.get(func, Function)
    kernel = prepared(function, current_context().device)
    shared_of = _BlockToShared(blockSizeToDynamicSMemSize) if blockSizeToDynamicSMemSize else None
    if blockSizeLimit < 0:
        raise DriverError(Result.INVALID_VALUE)
    largest = min(blockSizeLimit or kernel.max_threads, kernel.max_threads)
    # Whole warps, and the limit itself: the most threads of a multiprocessor, then the largest block.
    best_threads, best_block, best_blocks = 0, 0, 0
    for block in sorted({*range(32, largest + 1, 32), largest}):
        blocks = active_blocks(function, kernel, block, shared_of(block) if shared_of else dynamicSMemSize)
        if blocks * block >= best_threads and blocks:
            best_threads, best_block, best_blocks = blocks * block, block, blocks
    write(minGridSize, c_int, best_blocks * profile.ATTRIBUTES[16])
    write(blockSize, c_int, best_block)


@entry(
    "cuOccupancyMaxPotentialBlockSizeWithFlags(int *minGridSize, int *blockSize, CUfunction func, "
    "CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize, int blockSizeLimit, unsigned int flags)"
)
def cuOccupancyMaxPotentialBlockSizeWithFlags(
    minGridSize: int,
    blockSize: int,
    func: int,
    blockSizeToDynamicSMemSize: int,
    dynamicSMemSize: int,
    blockSizeLimit: int,
    flags: int,
) -> None:
    if flags > 1:
        raise DriverError(Result.INVALID_VALUE)
    cuOccupancyMaxPotentialBlockSize(
        minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit
    )


@entry(
    "cuOccupancyAvailableDynamicSMemPerBlock(size_t *dynamicSmemSize, CUfunction func, int numBlocks, int blockSize)"
)
def cuOccupancyAvailableDynamicSMemPerBlock(dynamicSmemSize: int, func: int, numBlocks: int, blockSize: int) -> None:
    function = state.machine.get(func, Function)
    kernel = prepared(function, current_context().device)
    if numBlocks <= 0 or numBlocks > active_blocks(function, kernel, blockSize, 0):
        raise DriverError(
            Result.INVALID_VALUE, f"{numBlocks} blocks of {blockSize} threads do not fit on the device at the same time"
        )
    each = profile.ATTRIBUTES[81] // numBlocks // _SHARED_UNIT * _SHARED_UNIT
    room = each - _SHARED_RESERVED - kernel.static_shared
    write(dynamicSmemSize, c_size_t, min(room, max_dynamic_shared(function, kernel)))


@entry("cuOccupancyMaxPotentialClusterSize(int *clusterSize, CUfunction func, const CUlaunchConfig *config)")
def cuOccupancyMaxPotentialClusterSize(clusterSize: int, func: int, config: int) -> None:
    state.machine.get(func, Function)
    if not config:
        raise DriverError(Result.INVALID_VALUE)
    write(clusterSize, c_int, 1)  # the software device has no clusters of several blocks


@entry("cuOccupancyMaxActiveClusters(int *numClusters, CUfunction func, const CUlaunchConfig *config)")
def cuOccupancyMaxActiveClusters(numClusters: int, func: int, config: int) -> None:
    if not config:
        raise DriverError(Result.INVALID_VALUE)
    launch = LaunchConfig.from_address(config)
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    together = _occupancy(func, threads, launch.sharedMemBytes) * profile.ATTRIBUTES[16]
    write(numClusters, c_int, together if cluster_of(launch) == (1, 1, 1) else 0)
