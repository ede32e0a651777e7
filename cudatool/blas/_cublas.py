"""Products on a GPU: cuBLAS, through nvmath-python's bindings."""

from __future__ import annotations

import functools
import sys
import threading
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.backends._settings import settings
from cudatool.blas import _workspace
from cudatool.blas._gemm import BFLOAT16, FP8, Again, Compute, Gemm
from cudatool.blas._layout import Product
from cudatool.errors import CudaError, DeviceUnavailableError
from cudatool.runtime.allocator import Memory
from cudatool.runtime.capture import is_capturing, relaxed
from cudatool.runtime.stream import Stream

__all__ = [
    "COMPUTE_TYPES",
    "DATA_TYPES",
    "Handle",
    "bindings",
    "gemm",
    "handle_for",
    "like",
    "plain_gemm",
    "scalar",
    "scalar_type",
]

DATA_TYPES: Final = {
    # dtype -> cudaDataType
    np.dtype(np.float32): 0,
    np.dtype(np.float64): 1,
    np.dtype(np.float16): 2,
    np.dtype(np.int8): 3,
    np.dtype(np.complex64): 4,
    np.dtype(np.complex128): 5,
    np.dtype(np.int32): 10,
    BFLOAT16: 14,
    **dict(zip(FP8, (28, 29), strict=True)),
}
COMPUTE_TYPES: Final = {
    # -> cublasComputeType_t
    Compute.SINGLE: 68,
    Compute.TF32: 77,
    Compute.DOUBLE: 70,
    Compute.INTEGER: 72,
}
_DEFAULT_ALGORITHM: Final = -1  # CUBLAS_GEMM_DEFAULT
_DEFAULT_MATH: Final = 0
_FULL_REDUCTION: Final = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION


class Handle:
    """A cuBLAS handle of one thread and device: its stream must not be changed by another thread.

    It also serves as a handle of cuBLASLt.
    """

    def __init__(self) -> None:
        with relaxed():  # it takes memory from the driver
            self.value: int = bindings().create()
        self._address = 0
        self._state: tuple[int, int] | None = None  # of the workspaces, and the stream
        self.math = _DEFAULT_MATH

    def use(self, stream: Stream) -> tuple[int, Memory | None]:
        """Let what follows run on `stream`; return where it works there, and what to hold until it is enqueued."""
        if _workspace.scoped.now or is_capturing(stream):
            # What a graph works in must be the graph's: from its pool, and free for its next node at once.
            memory = _workspace.new_workspace(stream)
            self._set(stream, memory.address, None)
            return memory.address, memory
        state = (_workspace.generation, stream.cuda_stream)
        if state != self._state:
            self._set(stream, _workspace.workspace(self.value, stream).address, state)
        return self._address, None

    def _set(self, stream: Stream, address: int, state: tuple[int, int] | None) -> None:
        cublas = bindings()
        cublas.set_stream(self.value, stream.native)  # which resets the workspace
        cublas.set_workspace(self.value, address, _workspace.size_of_workspace(stream))
        self._address, self._state = address, state

    def set_math(self, mode: int) -> None:
        """Set cublasMath_t."""
        bindings().set_math_mode(self.value, mode)
        self.math = mode


_spare: dict[int, list[Handle]] = {}
"""Handles by device whose threads have ended: each holds memory of the driver's, and takes long to make."""


class _ByDevice(dict[int, Handle]):
    """A thread's handles, which others may have when it ends."""

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if not _finalizing():
            for device, handle in self.items():
                _spare.setdefault(device, []).append(handle)


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device = _ByDevice()


_handles = _Handles()


@functools.cache
def bindings() -> Any:
    """Return nvmath-python's module for cuBLAS.

    Raises
    ------
    DeviceUnavailableError
        It is not installed.
    """
    try:
        from nvmath.bindings import cublas
    except ImportError as error:
        raise DeviceUnavailableError(f"products on a GPU need cuBLAS: pip install 'cudatool[gpu]' ({error})") from error
    return cublas


def handle_for(stream: Stream) -> Handle:
    """Return this thread's handle for the stream's device."""
    if settings.deterministic:
        _workspace.check_deterministic()
    found = _handles.by_device.get(stream.device_index)
    if found is None:
        try:
            found = _spare[stream.device_index].pop()
        except LookupError:
            found = Handle()
        _handles.by_device[stream.device_index] = found
    return found


@functools.lru_cache(maxsize=256)
def scalar(value: complex, dtype: np.dtype[Any]) -> tuple[int, Any]:
    """Return the address of a factor in host memory, and what keeps it."""
    kept = np.array([value], dtype)
    return kept.ctypes.data, kept


_SCALARS: Final[dict[Compute, np.dtype[Any]]] = {
    # what a factor is
    Compute.DOUBLE: np.dtype(np.float64),
    Compute.INTEGER: np.dtype(np.int32),
}
_SINGLE: Final[np.dtype[Any]] = np.dtype(np.float32)


def scalar_type(dtype: np.dtype[Any], compute: Compute) -> np.dtype[Any]:
    """Return the dtype of the factors of a product of `dtype`."""
    return dtype if dtype.kind == "c" else _SCALARS.get(compute, _SINGLE)


def gemm(gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product: what plain cuBLAS cannot do, and everything if it is preferred, is cuBLASLt's."""
    if _is_for_lt(gemm):
        _lt().gemm(gemm, stream)
    else:
        plain_gemm(gemm, stream)


def _is_for_lt(gemm: Gemm) -> bool:
    return bool(gemm.epilogue) or gemm.scales is not None or settings.blas_library == "cublaslt"


class _Recipe(NamedTuple):
    """The arguments of cublasGemmEx that are the same for all products of one shape, layout, dtype and factors."""

    before: tuple[int, ...]  # operations, m, n, k, address of alpha
    left: tuple[int, ...]  # type, leading dimension, step if batched
    right: tuple[int, ...]  # the same, address of beta
    after: tuple[int, ...]  # type, leading dimension, step and count if batched, compute type, algorithm
    function: str
    swapped: bool  # the left operand is our b
    math: int  # cublasMath_t
    kept: tuple[Any, ...]  # what the addresses are of


@functools.lru_cache(maxsize=8192)
def _recipe(
    product: Product,
    dtype: np.dtype[Any],
    out: np.dtype[Any],
    compute: Compute,
    alpha: complex,
    beta: complex,
    math: int,
) -> _Recipe:
    first, second = (product.b, product.a) if product.swapped else (product.a, product.b)
    kind, factor = DATA_TYPES[dtype], scalar_type(dtype, compute)
    (alpha_at, kept_alpha), (beta_at, kept_beta) = scalar(alpha, factor), scalar(beta, factor)
    batched = product.batch > 1
    result = product.out
    return _Recipe(
        (first.operation, second.operation, product.m, product.n, product.k, alpha_at),
        (kind, first.leading, *((first.step,) if batched else ())),
        (kind, second.leading, *((second.step,) if batched else ()), beta_at),
        (
            DATA_TYPES[out],
            result.leading,
            *((result.step, product.batch) if batched else ()),
            COMPUTE_TYPES[compute],
            _DEFAULT_ALGORITHM,
        ),
        ("gemm_strided_batched_ex" if batched else "gemm_ex") + ("_64" if product.wide else ""),
        product.swapped,
        math,
        (kept_alpha, kept_beta),
    )


def _recipe_of(gemm: Gemm) -> _Recipe:
    math = _FULL_REDUCTION if gemm.full_reduction else _DEFAULT_MATH
    return _recipe(gemm.product, gemm.a.dtype, gemm.out.dtype, gemm.compute, gemm.alpha, gemm.beta, math)


def plain_gemm(gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product without an epilogue, by cublasGemmEx."""
    _call(_recipe_of(gemm), gemm.a.data_ptr(), gemm.b.data_ptr(), gemm.out.data_ptr(), 0, stream)


def like(gemm: Gemm) -> Again | None:
    """Return what enqueues products like this one, None if that must be decided for each."""
    if not _is_for_lt(gemm):
        return functools.partial(_call, _recipe_of(gemm))
    found: Again | None = _lt().like(gemm)
    return found


def _lt() -> ModuleType:
    from cudatool.blas import _cublaslt  # which does the rest with what is here

    return _cublaslt


def _call(recipe: _Recipe, a: int, b: int, out: int, bias: int, stream: Stream) -> None:
    cublas, handle = bindings(), handle_for(stream)
    before, left, right, after, function, swapped, math, _ = recipe
    if swapped:
        a, b = b, a
    try:
        _, held = handle.use(stream)
        if math != handle.math:
            handle.set_math(math)
        getattr(cublas, function)(handle.value, *before, a, *left, b, *right, out, *after)
        del held  # a graph's memory goes back to its pool when the product is in the graph
    except cublas.cuBLASError as error:
        raise CudaError(f"cuBLAS: {error}", "CUDA_ERROR_UNKNOWN") from error
