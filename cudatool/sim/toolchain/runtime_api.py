"""The few functions of the CUDA runtime API that cuda.core needs, answered by the driver API.

cuda.bindings.runtime has NVIDIA's libcudart built in, which works with NVIDIA's own libcuda only. cuda.core is written
to the driver API but for a handful of functions; those are replaced here when the module is imported. Every other
runtime function still reports libcudart's own error.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["FUNCTIONS", "install"]

_NAME = "cuda.bindings.runtime"
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
    if _NAME in sys.modules:
        _replace(sys.modules[_NAME])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _replace(module)


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
