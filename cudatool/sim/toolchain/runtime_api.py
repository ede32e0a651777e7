"""The few functions of the CUDA runtime API that cuda.core needs, answered by the driver API.

cuda.bindings.runtime has NVIDIA's libcudart built in, which works with NVIDIA's own libcuda only. cuda.core is written
to the driver API but for a handful of functions; those are replaced here when the module is imported. Every other
runtime function still reports libcudart's own error.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from cudatool.loading.after_import import AfterImport

__all__ = ["FUNCTIONS", "install"]

_INVALID_CONTEXT = 201

_Driver = Any
FUNCTIONS: dict[str, Callable[..., tuple[Any, ...]]] = {}
"""Replacements by name. Each takes the driver bindings and the function's arguments, and returns a driver's answer."""


def _replacement(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    FUNCTIONS[function.__name__.removeprefix("_")] = function
    return function


@_replacement
def _cudaDeviceSynchronize(driver: _Driver) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuCtxSynchronize()
    if int(result[0]) == _INVALID_CONTEXT:  # the runtime uses device 0's primary context by itself
        _cudaSetDevice(driver, 0)
        result = driver.cuCtxSynchronize()
    return result


@_replacement
def _cudaDeviceGetPCIBusId(driver: _Driver, length: int, device: int) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuDeviceGetPCIBusId(length, device)
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


def install() -> None:
    """Replace the functions, now or when :mod:`cuda.bindings.runtime` is first imported."""
    AfterImport({"cuda.bindings.runtime": _replace}).start()


def _replace(runtime: ModuleType) -> None:
    from cuda.bindings import driver

    def bind(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            status, *values = function(driver, *arguments)
            return runtime.cudaError_t(int(status)), *values  # both APIs number their errors alike

        call.__name__ = function.__name__.removeprefix("_")
        return call

    for name, function in FUNCTIONS.items():
        setattr(runtime, name, bind(function))
