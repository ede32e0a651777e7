"""One product, ready to be enqueued: what it is, who computes it, and what traces say of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from typing import Any, Final, NamedTuple

import ml_dtypes
import numpy as np

from cudatool import _driver
from cudatool.backends._settings import settings
from cudatool.blas._layout import Product
from cudatool.config import TUNABLEOP_PREFIXES
from cudatool.loading.attached import attached
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.calls import operation
from cudatool.runtime.device import device as on_device
from cudatool.runtime.device import is_current
from cudatool.runtime.extents import Extent, emit_extents, extents
from cudatool.runtime.stream import Stream
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, Kind, pack_product

__all__ = [
    "Again",
    "BFLOAT16",
    "FP8",
    "ROUTINES",
    "Compute",
    "Epilogue",
    "Gemm",
    "Implementation",
    "Scales",
    "accesses",
    "compute_type",
    "default_implementation",
    "enqueue",
    "full_reduction",
    "like",
    "perform",
    "products_watched",
    "tuner",
]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FP8: Final = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
ROUTINES: Final = {
    # dtype of the operands -> what the product is called in traces
    np.dtype(np.float32): "sgemm",
    np.dtype(np.float64): "dgemm",
    np.dtype(np.float16): "hgemm",
    BFLOAT16: "bfgemm",
    np.dtype(np.complex64): "cgemm",
    np.dtype(np.complex128): "zgemm",
    np.dtype(np.int8): "igemm",
    **dict.fromkeys(FP8, "fp8gemm"),
}


class Compute(StrEnum):
    """In what precision the products are summed, and what is done to the inputs before."""

    SINGLE = "float32"
    TF32 = "tf32"
    """float32 inputs rounded to TF32's ten bits, sums in float32."""
    DOUBLE = "float64"
    INTEGER = "int32"


class Epilogue(StrEnum):
    """What is done to each element of a product before it is stored, in cuBLASLt's names.

    An `aux` epilogue also stores what the backward pass needs: of ReLU one bit an element, of GELU (approximated
    with tanh) its input. A `d` epilogue multiplies with the derivative, read from there.
    """

    NONE = ""
    RELU = "relu"
    GELU = "gelu"
    BIAS = "bias"
    RELU_BIAS = "relu_bias"
    GELU_BIAS = "gelu_bias"
    RELU_AUX = "relu_aux"
    GELU_AUX = "gelu_aux"
    RELU_AUX_BIAS = "relu_aux_bias"
    GELU_AUX_BIAS = "gelu_aux_bias"
    DRELU = "drelu"
    DGELU = "dgelu"
    DRELU_BGRAD = "drelu_bgrad"
    DGELU_BGRAD = "dgelu_bgrad"

    @property
    def reads_bias(self) -> bool:
        """Whether a vector is added to each row."""
        return self.endswith("bias")

    @property
    def writes_bias(self) -> bool:
        """Whether the sums of the columns are stored, which are the gradient of a bias."""
        return self.endswith("bgrad")

    @property
    def reads_aux(self) -> bool:
        """Whether it is a derivative."""
        return self.startswith("d")

    @property
    def writes_aux(self) -> bool:
        """Whether something is stored for the backward pass."""
        return "aux" in self


class Scales(NamedTuple):
    """Factors of 8-bit elements, each one float32 in device memory."""

    a: DeviceArray
    b: DeviceArray
    out: DeviceArray | None


class Gemm(NamedTuple):
    """``out = epilogue(alpha * (a @ b) + beta * out)``.

    Attributes
    ----------
    a, b, out
        All of two dimensions, or of three with the same batch in front. `out` overlaps neither.
    product
        How cuBLAS is asked to compute it.
    bias, aux
        What the epilogue takes besides.
    full_reduction
        Sums must not be rounded to the result's dtype on the way.
    """

    a: DeviceArray
    b: DeviceArray
    out: DeviceArray
    product: Product
    compute: Compute
    alpha: complex = 1
    beta: complex = 0
    conjugate: tuple[bool, bool] = (False, False)
    epilogue: Epilogue = Epilogue.NONE
    bias: DeviceArray | None = None
    aux: DeviceArray | None = None
    scales: Scales | None = None
    fast_accumulation: bool = False
    full_reduction: bool = False


Implementation = Callable[[Gemm, Stream], None]
_IMPLEMENTATIONS: Final = {
    # kind of device -> module with a function gemm, and perhaps a function like
    "cuda": "cudatool.blas._cublas",
    "sim": "cudatool.blas._host",
}
Again = Callable[[int, int, int, int, Stream], None]
"""Enqueues the same product of matrices at other addresses: of `a`, `b`, `out`, and the bias if there is one."""

_default: Implementation | None = None
_like: Callable[[Gemm], Again | None] | None = None
tuner: Callable[[Gemm, Stream], bool] | None = None
"""Enqueues a product in another way, and says whether it did (:mod:`cudatool.tunable`), while that is enabled."""


def compute_type(dtype: np.dtype[Any]) -> Compute:
    """Return in what precision products of `dtype` are summed now."""
    if dtype.char in "dD":
        return Compute.DOUBLE
    if dtype.char in "fF" and settings.float32_matmul_precision != "highest":
        return Compute.TF32
    return Compute.INTEGER if dtype.char == "b" else Compute.SINGLE


def full_reduction(dtype: np.dtype[Any]) -> bool:
    """Return whether sums of products of `dtype` must not be rounded on the way now."""
    if dtype == BFLOAT16:
        return not settings.allow_bf16_reduced_precision_reduction
    return dtype.char == "e" and not settings.allow_fp16_reduced_precision_reduction


def enqueue(gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product, and report it."""
    if _default is None:
        _start()
    if tuner is None or not tuner(gemm, stream):
        perform(_default or default_implementation(), gemm, stream)


def default_implementation() -> Implementation:
    """Return what computes products on this device."""
    if _default is None:
        _start()
    assert _default is not None
    return _default


def like(gemm: Gemm) -> Again | None:
    """Return what enqueues products like one that was enqueued; None if that must be decided for each."""
    return None if _like is None or tuner is not None or gemm.out.dtype != gemm.a.dtype else _like(gemm)


def _start() -> None:
    global _default, _like
    module = import_module(_IMPLEMENTATIONS[_driver.initialize().kind])
    _default, _like = module.gemm, getattr(module, "like", None)
    if any(f"{prefix}ENABLED" in os.environ for prefix in TUNABLEOP_PREFIXES):
        attached("tune_products")()


class _Watched(threading.local):
    begins: Callable[[], None] | None = None


_watched = _Watched()


@contextmanager
def products_watched(begins: Callable[[], None]) -> Iterator[None]:
    """Call `begins` before the calling thread enqueues a product, which may be several kernels and fills.

    It is called while there is a subscriber of events.
    """
    before, _watched.begins = _watched.begins, begins
    try:
        yield
    finally:
        _watched.begins = before


def perform(implementation: Implementation, gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product by one implementation, and report it."""
    if not hooks.active and is_current(stream.device_index):
        implementation(gemm, stream)
        return
    if _watched.begins is not None:
        _watched.begins()
    with on_device(stream.device_index), operation() as correlation:
        implementation(gemm, stream)
    if correlation:
        _emit(gemm, stream, correlation)


def _emit(gemm: Gemm, stream: Stream, correlation: int) -> None:
    out, device = gemm.out, stream.device_index
    name = ROUTINES[gemm.a.dtype] + ("_strided_batched" if out.ndim == 3 else "")
    aux0, aux1 = pack_product(out.shape[-2], out.shape[-1], gemm.a.shape[-1])
    hooks.emit(
        Kind.GEMM,
        device=device,
        stream=stream.trace_id(),
        correlation=correlation,
        name=f"{name}_{gemm.epilogue}" if gemm.epilogue else name,
        address=out.data_ptr(),
        size=out.nbytes,
        aux0=aux0,
        aux1=aux1,
    )
    for parts, mode in accesses(gemm):
        emit_extents(Kind.ACCESS, parts, mode, device=device, correlation=correlation)


def accesses(gemm: Gemm) -> list[tuple[list[Extent], AccessFlag]]:
    """Return the bytes that a product reads and writes."""
    out = gemm.out
    read, write, epilogue = AccessFlag.READ, AccessFlag.WRITE, gemm.epilogue
    touched = [(gemm.a, read), (gemm.b, read), (out, read | write if gemm.beta else write)]
    if gemm.bias is not None:
        touched.append((gemm.bias, write if epilogue.writes_bias else read))
    if gemm.aux is not None:
        touched.append((gemm.aux, read if epilogue.reads_aux else write))
    touched += [(scale, read) for scale in gemm.scales or () if scale is not None]
    return [(extents(array.layout), mode) for array, mode in touched]
