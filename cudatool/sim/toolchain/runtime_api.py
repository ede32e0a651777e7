"""The functions of the CUDA runtime API that have a counterpart in the driver API, answered by it.

cuda.bindings.runtime has NVIDIA's libcudart built in, which works with NVIDIA's own libcuda only. Functions for
devices, memory, streams and events are replaced here when the module is imported: what cuda.core calls, and what
programs need that launch kernels by the driver API. Every other runtime function still reports libcudart's own error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any, Final

from cudatool.loading.after_import import AfterImport
from cudatool.sim.abi import logger
from cudatool.sim.toolchain.runtime_properties import device_properties

__all__ = ["FUNCTIONS", "install"]

_NOT_INITIALIZED, _INVALID_CONTEXT = 3, 201
_NEWER_DRIVER = 36  # libcudart's error

_Driver = Any
_Function = Callable[..., tuple[Any, ...]]
FUNCTIONS: dict[str, _Function] = {}
"""Replacements by name. Each takes the driver bindings and the function's arguments, and returns a driver's answer."""

_SAME: Final = {
    "cudaMalloc": "cuMemAlloc",
    "cudaFree": "cuMemFree",
    "cudaMallocAsync": "cuMemAllocAsync",
    "cudaFreeAsync": "cuMemFreeAsync",
    "cudaMallocManaged": "cuMemAllocManaged",
    "cudaMallocHost": "cuMemAllocHost",
    "cudaHostAlloc": "cuMemHostAlloc",
    "cudaFreeHost": "cuMemFreeHost",
    "cudaHostRegister": "cuMemHostRegister",
    "cudaHostUnregister": "cuMemHostUnregister",
    "cudaHostGetDevicePointer": "cuMemHostGetDevicePointer",
    "cudaMemGetInfo": "cuMemGetInfo",
    "cudaDeviceCanAccessPeer": "cuDeviceCanAccessPeer",
    "cudaDeviceGetPCIBusId": "cuDeviceGetPCIBusId",
    "cudaDeviceSynchronize": "cuCtxSynchronize",
    "cudaStreamCreateWithFlags": "cuStreamCreate",
    "cudaStreamCreateWithPriority": "cuStreamCreateWithPriority",
    "cudaStreamDestroy": "cuStreamDestroy",
    "cudaStreamSynchronize": "cuStreamSynchronize",
    "cudaStreamQuery": "cuStreamQuery",
    "cudaStreamWaitEvent": "cuStreamWaitEvent",
    "cudaEventCreateWithFlags": "cuEventCreate",
    "cudaEventDestroy": "cuEventDestroy",
    "cudaEventRecord": "cuEventRecord",
    "cudaEventSynchronize": "cuEventSynchronize",
    "cudaEventQuery": "cuEventQuery",
    "cudaEventElapsedTime": "cuEventElapsedTime",
}
"""Functions whose counterpart takes the same arguments and means the same by them."""

# By cudaMemcpyKind: these take buffers of Python. The driver finds out the direction of others by their addresses.
_DIRECTIONS: Final = {1: "HtoD", 2: "DtoH"}


class _Last(threading.local):
    """The last error of a host thread, for cudaGetLastError()."""

    status = 0


_last = _Last()


def _replacement(function: _Function) -> _Function:
    FUNCTIONS[function.__name__.removeprefix("_")] = function
    return function


def _same(name: str) -> _Function:
    def call(driver: _Driver, *arguments: Any) -> tuple[Any, ...]:
        result: tuple[Any, ...] = getattr(driver, name)(*arguments)
        return result

    return call


FUNCTIONS |= {name: _same(counterpart) for name, counterpart in _SAME.items()}


@_replacement
def _cudaStreamCreate(driver: _Driver) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuStreamCreate(0)
    return result


@_replacement
def _cudaEventCreate(driver: _Driver) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuEventCreate(0)
    return result


@_replacement
def _cudaMemcpy(driver: _Driver, to: Any, source: Any, size: int, kind: Any) -> tuple[Any, ...]:
    result: tuple[Any, ...] = getattr(driver, f"cuMemcpy{_DIRECTIONS.get(int(kind), '')}")(to, source, size)
    return result


@_replacement
def _cudaMemcpyAsync(driver: _Driver, to: Any, source: Any, size: int, kind: Any, stream: Any) -> tuple[Any, ...]:
    name = f"cuMemcpy{_DIRECTIONS.get(int(kind), '')}Async"
    result: tuple[Any, ...] = getattr(driver, name)(to, source, size, stream)
    return result


@_replacement
def _cudaMemset(driver: _Driver, to: Any, value: int, size: int) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuMemsetD8(to, value & 255, size)
    return result


@_replacement
def _cudaMemsetAsync(driver: _Driver, to: Any, value: int, size: int, stream: Any) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuMemsetD8Async(to, value & 255, size, stream)
    return result


@_replacement
def _cudaDeviceGetAttribute(driver: _Driver, attribute: Any, device: int) -> tuple[Any, ...]:
    driver.cuInit(0)  # both APIs number the attributes alike
    result: tuple[Any, ...] = driver.cuDeviceGetAttribute(driver.CUdevice_attribute(int(attribute)), device)
    return result


@_replacement
def _cudaGetDeviceCount(driver: _Driver) -> tuple[Any, ...]:
    driver.cuInit(0)
    result: tuple[Any, ...] = driver.cuDeviceGetCount()
    return result


@_replacement
def _cudaGetDevice(driver: _Driver) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuCtxGetDevice()
    return (type(result[0])(0), 0) if int(result[0]) == _INVALID_CONTEXT else (result[0], int(result[1]))


@_replacement
def _cudaSetDevice(driver: _Driver, device: int) -> tuple[Any, ...]:
    driver.cuInit(0)
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    result: tuple[Any, ...] = (status,) if int(status) else driver.cuCtxSetCurrent(context)
    return result


@_replacement
def _cudaGetDeviceProperties(driver: _Driver, device: int) -> tuple[Any, ...]:
    from cuda.bindings import runtime

    driver.cuInit(0)
    return device_properties(driver, runtime, device)


def install() -> None:
    """Replace the functions, now or when :mod:`cuda.bindings.runtime` is first imported."""
    AfterImport({"cuda.bindings.runtime": _replace}).start()


def _replace(runtime: ModuleType) -> None:
    calls = {
        name: _watched(runtime, name, function)
        for name, function in vars(runtime).items()
        if name.startswith("cuda") and callable(function) and not isinstance(function, type)
    }
    calls |= {name: _bound(runtime, name, function) for name, function in FUNCTIONS.items()}

    # libcudart's own last error is always that it cannot use this driver.
    def last_error() -> tuple[Any, ...]:
        status, _last.status = _last.status, 0
        return (runtime.cudaError_t(status),)

    def peeked_error() -> tuple[Any, ...]:
        return (runtime.cudaError_t(_last.status),)

    for name, call in {**calls, "cudaGetLastError": last_error, "cudaPeekAtLastError": peeked_error}.items():
        setattr(runtime, name, call)


def _bound(runtime: ModuleType, name: str, function: _Function) -> _Function:
    """Return a function of the runtime that the driver answers, as `function` says."""
    from cuda.bindings import driver

    types = {driver.CUdeviceptr: int, driver.CUstream: runtime.cudaStream_t, driver.CUevent: runtime.cudaEvent_t}

    def call(*arguments: Any) -> tuple[Any, ...]:
        status, *values = function(driver, *arguments)
        if int(status) in (_NOT_INITIALIZED, _INVALID_CONTEXT):
            _cudaSetDevice(driver, 0)  # the runtime uses device 0's primary context by itself
            status, *values = function(driver, *arguments)
        _note(name, int(status))
        values = [types[type(value)](int(value)) if type(value) in types else value for value in values]
        return runtime.cudaError_t(int(status)), *values  # both APIs number their errors alike

    call.__name__ = name
    return call


def _watched(runtime: ModuleType, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of libcudart whose errors are kept."""

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        answer = function(*arguments, **named)
        if isinstance(answer, tuple) and answer and isinstance(answer[0], runtime.cudaError_t):
            _note(name, int(answer[0]))
        return answer

    return call


def _note(name: str, status: int) -> None:
    """Keep the status of a call for cudaGetLastError(), unless it succeeded; name a function that is not there."""
    _last.status = status or _last.status
    if status == _NEWER_DRIVER:
        logger().warning("%s of the runtime API is not on the software device: use the driver API", name)
