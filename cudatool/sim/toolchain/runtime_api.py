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

_NOT_INITIALIZED, _INVALID_CONTEXT, _NOT_READY = 3, 201, 600
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

_WITHOUT_CONTEXT: Final = frozenset(
    {
        "cudaDeviceCanAccessPeer",
        "cudaDeviceGetAttribute",
        "cudaDeviceGetPCIBusId",
        "cudaGetDevice",
        "cudaGetDeviceCount",
        "cudaGetDeviceProperties",
        "cudaSetDevice",
    }
)
"""Functions that use no device by themselves."""

# By cudaMemcpyKind. The driver finds out the direction of others by their addresses.
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


def _may_be_empty(function: _Function) -> _Function:
    """Return a function that takes memory, for which no memory is no error, unlike for its counterpart."""

    def call(driver: _Driver, size: int, *flags: Any) -> tuple[Any, ...]:
        return function(driver, size, *flags) if size else (driver.CUresult.CUDA_SUCCESS, 0)

    return call


FUNCTIONS |= {name: _may_be_empty(FUNCTIONS[name]) for name in ("cudaMalloc", "cudaMallocHost", "cudaHostAlloc")}


def _address(memory: Any) -> Any:
    """Return the address of what a copy takes: a number, or a buffer of Python."""
    if isinstance(memory, int):
        return memory
    try:
        import numpy as np

        return np.frombuffer(memory, np.uint8).ctypes.data
    except TypeError:  # a handle of the bindings
        return memory


@_replacement
def _cudaMemcpy(driver: _Driver, to: Any, source: Any, size: int, kind: Any) -> tuple[Any, ...]:
    name = f"cuMemcpy{_DIRECTIONS.get(int(kind), '')}"
    result: tuple[Any, ...] = getattr(driver, name)(_address(to), _address(source), size)
    return result


@_replacement
def _cudaMemcpyAsync(driver: _Driver, to: Any, source: Any, size: int, kind: Any, stream: Any) -> tuple[Any, ...]:
    name = f"cuMemcpy{_DIRECTIONS.get(int(kind), '')}Async"
    result: tuple[Any, ...] = getattr(driver, name)(_address(to), _address(source), size, stream)
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
    # Both APIs number the attributes alike.
    result: tuple[Any, ...] = driver.cuDeviceGetAttribute(driver.CUdevice_attribute(int(attribute)), device)
    return result


@_replacement
def _cudaGetDeviceCount(driver: _Driver) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuDeviceGetCount()
    return result


@_replacement
def _cudaGetDevice(driver: _Driver) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuCtxGetDevice()
    return (type(result[0])(0), 0) if int(result[0]) == _INVALID_CONTEXT else (result[0], int(result[1]))


@_replacement
def _cudaSetDevice(driver: _Driver, device: int) -> tuple[Any, ...]:
    status, context = driver.cuDevicePrimaryCtxRetain(device)
    result: tuple[Any, ...] = (status,) if int(status) else driver.cuCtxSetCurrent(context)
    return result


@_replacement
def _cudaGetDeviceProperties(driver: _Driver, device: int) -> tuple[Any, ...]:
    from cuda.bindings import runtime

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
    calls |= {name: _bound(runtime, name, getattr(runtime, name), function) for name, function in FUNCTIONS.items()}

    # libcudart's own last error is always that it cannot use this driver.
    def last_error() -> tuple[Any, ...]:
        status, _last.status = _last.status, 0
        return (runtime.cudaError_t(status),)

    def peeked_error() -> tuple[Any, ...]:
        return (runtime.cudaError_t(_last.status),)

    for name, call in {**calls, "cudaGetLastError": last_error, "cudaPeekAtLastError": peeked_error}.items():
        setattr(runtime, name, call)


def _bound(runtime: ModuleType, name: str, original: Callable[..., Any], function: _Function) -> _Function:
    """Return a function of the runtime that the driver answers, as `function` says; it is called as the original is."""
    from cuda.bindings import driver

    types = {driver.CUdeviceptr: int, driver.CUstream: runtime.cudaStream_t, driver.CUevent: runtime.cudaEvent_t}

    @wraps(original)
    def call(*arguments: Any, **named: Any) -> tuple[Any, ...]:
        if named:
            from inspect import signature

            arguments = signature(original).bind(*arguments, **named).args
        if name in _WITHOUT_CONTEXT:
            driver.cuInit(0)
        else:
            _use_device(driver)
        status, *values = function(driver, *arguments)
        _note(name, int(status))
        values = [types[type(value)](int(value)) if type(value) in types else value for value in values]
        return runtime.cudaError_t(int(status)), *values  # both APIs number their errors alike

    return call


def _use_device(driver: _Driver) -> None:
    """Use the primary context of device 0 in a thread that uses none, as the runtime does by itself."""
    status, context = driver.cuCtxGetCurrent()
    if int(status) == _NOT_INITIALIZED:
        driver.cuInit(0)
    if int(status) == _NOT_INITIALIZED or not int(context):
        _cudaSetDevice(driver, 0)


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
    """Keep the error of a call for cudaGetLastError(); name a function that is not there."""
    if status not in (0, _NOT_READY):  # "not ready" is an answer, no error (CUDA C++ Programming Guide, Error Checking)
        _last.status = status
    if status == _NEWER_DRIVER:
        logger().warning("%s of the runtime API is not on the software device: use the driver API", name)
