"""Kernels for the programs of this directory, and short ways to launch them and to call the driver.

``fill(stream, x, 1.0)`` and the like take a stream of cudatool, of cuda.core or a driver's handle, and memory as a
device array, a buffer of cuda.core or an address. What is launched on a stream of cudatool goes through cudatool's
runtime, everything else through cuda.core.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda import core
from cuda.bindings import driver

import cudatool as ct

N = 1024
"""Elements of the arrays that the programs use, float32."""
BYTES = 4 * N

_SOURCE = """
extern "C" __global__ void fill(float *x, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = value;
}
extern "C" __global__ void copy(float *y, const float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}
extern "C" __global__ void add_one(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += 1.0f;
}
extern "C" __global__ void add_atomically(float *x, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&x[i], value);
}
extern "C" __global__ void fill_every(float *x, float value, int n, int step) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * step;
    if (i < n) x[i] = value;
}
"""


@functools.cache
def _kernel(name: str) -> ct.Kernel:
    return ct.compile(_SOURCE, name)


def _launch(name: str, stream: Any, n: int, *arguments: Any) -> None:
    kernel, config = _kernel(name), ct.LaunchConfig(grid=-(-n // 128), block=128)
    arguments = tuple(np.uint64(a) if isinstance(a, int) and a >= 1 << 31 else a for a in arguments)
    if isinstance(stream, ct.Stream):
        ct.launch(stream, config, kernel, *arguments)
        return
    if isinstance(stream, int | driver.CUstream):
        stream = core.Stream.from_handle(int(stream) or 1)
    types = {float: np.float32, int: np.int32}
    values = (a.data_ptr() if isinstance(a, ct.DeviceArray) else types.get(type(a), lambda v: v)(a) for a in arguments)
    core.launch(stream, config, kernel.core, *values)


def _elements(x: Any) -> int:
    if isinstance(x, ct.DeviceArray):
        return x.size
    return x.size // 4 if isinstance(x, core.Buffer) else N


def fill(stream: Any, x: Any, value: float = 1.0, n: int | None = None) -> None:
    """Launch ``x[:n] = value``."""
    n = _elements(x) if n is None else n
    _launch("fill", stream, n, x, value, n)


def copy(stream: Any, y: Any, x: Any, n: int | None = None) -> None:
    """Launch ``y[:n] = x[:n]``."""
    n = _elements(y) if n is None else n
    _launch("copy", stream, n, y, x, n)


def add_one(stream: Any, x: Any, n: int | None = None) -> None:
    """Launch ``x[:n] += 1``."""
    n = _elements(x) if n is None else n
    _launch("add_one", stream, n, x, n)


def add_atomically(stream: Any, x: Any, value: float = 1.0) -> None:
    """Launch an atomic ``x[:] += value``."""
    _launch("add_atomically", stream, _elements(x), x, value, _elements(x))


def fill_every(stream: Any, x: Any, step: int, first: int = 0, value: float = 1.0, n: int = N) -> None:
    """Launch ``x[first:n:step] = value``, where `x` has `n` elements."""
    address = (x.data_ptr() if isinstance(x, ct.DeviceArray) else int(x)) + 4 * first
    _launch("fill_every", stream, -(-(n - first) // step), address, value, n - first, step)


def ok(answer: tuple[Any, ...]) -> Any:
    """Return the result of a call of ``cuda.bindings``."""
    status, *results = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return results[0] if results else None


def blocking_stream(device: int = 0) -> ct.Stream:
    """Return a new stream that waits for the legacy default stream, and it for the new one."""
    with ct.device(device):
        made = core.Device(device).create_stream(options=core.StreamOptions(nonblocking=False))
    stream = ct.ExternalStream(int(made.handle), device)
    stream.owner = made  # destroyed with it
    return stream


_callbacks: list[Any] = []


def host_function(stream: Any, function: Callable[[], None]) -> None:
    """Enqueue a call of `function` by a thread of the driver, in stream order."""
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: function())
    _callbacks.append(callback)  # the driver knows its address alone
    address = ctypes.cast(callback, ctypes.c_void_p).value
    ok(driver.cuLaunchHostFunc(int(getattr(stream, "cuda_stream", stream)), driver.CUhostFn(address), 0))


def array_at(address: int) -> np.ndarray:
    """Return the N numbers at a host address."""
    return np.frombuffer((ctypes.c_float * N).from_address(address), np.float32)
