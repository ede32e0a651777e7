"""Products on a GPU: cuBLAS, through nvmath-python's bindings."""

from __future__ import annotations

import functools
import threading
from typing import Any, Final

import numpy as np

from cudatool import _cuda
from cudatool._allocator import Layout, Memory
from cudatool._cuda import check
from cudatool._stream import Stream
from cudatool.backends._settings import settings
from cudatool.blas import _workspace
from cudatool.blas._gemm import BFLOAT16, FP8, Compute, Gemm
from cudatool.errors import CudaError, DeviceUnavailableError

__all__ = [
    "COMPUTE_TYPES",
    "DATA_TYPES",
    "Handle",
    "address_of",
    "bindings",
    "gemm",
    "handle_for",
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
        # cublasCreate takes memory from the driver, which a capture by this thread would not survive.
        relaxed = _cuda.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = check(_cuda.driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            self.value: int = bindings().create()
        finally:
            check(_cuda.driver.cuThreadExchangeStreamCaptureMode(before))
        self._address = 0
        self._state: tuple[int, int] | None = None  # of the workspaces, and the stream
        self._math = _DEFAULT_MATH

    def use(self, stream: Stream) -> tuple[int, Memory | None]:
        """Let what follows run on `stream`; return where it works there, and what to hold until it is enqueued."""
        if _workspace.is_capturing(stream):
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
        cublas.set_stream(self.value, int(stream.core.handle))  # which resets the workspace
        cublas.set_workspace(self.value, address, _workspace.size_of_workspace(stream))
        self._address, self._state = address, state

    def set_math(self, mode: int) -> None:
        """Set cublasMath_t."""
        if mode != self._math:
            bindings().set_math_mode(self.value, mode)
            self._math = mode


class _Handles(threading.local):
    def __init__(self) -> None:
        self.by_device: dict[int, Handle] = {}


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
        found = _handles.by_device[stream.device_index] = Handle()
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


def scalar_type(gemm: Gemm) -> np.dtype[Any]:
    """Return the dtype of the factors of a product."""
    if gemm.a.dtype.kind == "c":
        return gemm.a.dtype
    return _SCALARS.get(gemm.compute, _SINGLE)


def gemm(gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product: what plain cuBLAS cannot do, and everything if it is preferred, is cuBLASLt's."""
    if gemm.epilogue or gemm.scales is not None or settings.blas_library == "cublaslt":
        from cudatool.blas import _cublaslt

        _cublaslt.gemm(gemm, stream)
    else:
        plain_gemm(gemm, stream)


def plain_gemm(gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product without an epilogue, by cublasGemmEx."""
    product = gemm.product
    cublas = bindings()
    handle = handle_for(stream)
    left, right = (gemm.b, gemm.a) if product.swapped else (gemm.a, gemm.b)
    first, second = (product.b, product.a) if product.swapped else (product.a, product.b)
    kind = DATA_TYPES[left.dtype]
    factor = scalar_type(gemm)
    (alpha, _alpha), (beta, _beta) = scalar(gemm.alpha, factor), scalar(gemm.beta, factor)
    out = gemm.out
    try:
        _, held = handle.use(stream)
        handle.set_math(_FULL_REDUCTION if gemm.full_reduction else _DEFAULT_MATH)
        if product.batch == 1:
            (cublas.gemm_ex_64 if product.wide else cublas.gemm_ex)(
                handle.value,
                first.operation,
                second.operation,
                product.m,
                product.n,
                product.k,
                alpha,
                address_of(left),
                kind,
                first.leading,
                address_of(right),
                kind,
                second.leading,
                beta,
                address_of(out),
                DATA_TYPES[out.dtype],
                product.out.leading,
                COMPUTE_TYPES[gemm.compute],
                _DEFAULT_ALGORITHM,
            )
        else:
            (cublas.gemm_strided_batched_ex_64 if product.wide else cublas.gemm_strided_batched_ex)(
                handle.value,
                first.operation,
                second.operation,
                product.m,
                product.n,
                product.k,
                alpha,
                address_of(left),
                kind,
                first.leading,
                first.step,
                address_of(right),
                kind,
                second.leading,
                second.step,
                beta,
                address_of(out),
                DATA_TYPES[out.dtype],
                product.out.leading,
                product.out.step,
                product.batch,
                COMPUTE_TYPES[gemm.compute],
                _DEFAULT_ALGORITHM,
            )
        del held  # a graph's memory goes back to its pool when the product is in the graph
    except cublas.cuBLASError as error:
        raise CudaError(f"cuBLAS: {error}", "CUDA_ERROR_UNKNOWN") from error


def address_of(layout: Layout) -> int:
    """Return where a layout begins."""
    address: int = layout.__array_interface__["data"][0]
    return address
