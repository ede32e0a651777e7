"""Products on the software device: NumPy, run when the stream gets there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cudatool.blas._gemm import Gemm, accesses
from cudatool.blas._numerics import apply_epilogue, product, store
from cudatool.runtime.host_function import enqueue, unowned
from cudatool.runtime.stream import Stream

__all__ = ["gemm"]


def gemm(gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product."""
    enqueue(_computation(gemm), stream, lambda: accesses(gemm))


def _computation(gemm: Gemm) -> Callable[[], object]:
    """Return what computes a product of what its operands hold by then.

    It has their addresses only: an operand that is dropped goes back to the allocator at once, as it does on a GPU.
    """
    a, b, out = unowned(gemm.a.layout), unowned(gemm.b.layout), unowned(gemm.out.layout)
    bias = None if gemm.bias is None else unowned(gemm.bias.layout)
    aux = None if gemm.aux is None else unowned(gemm.aux.layout)
    factors = [unowned(scale.layout).reshape(()) for scale in gemm.scales or () if scale is not None]
    conjugate_a, conjugate_b = gemm.conjugate
    alpha, beta, compute, epilogue = gemm.alpha, gemm.beta, gemm.compute, gemm.epilogue

    @np.errstate(all="ignore")  # a GPU computes infinities and NaN without a word
    def compute_now() -> None:
        values = product(a.conj() if conjugate_a else a, b.conj() if conjugate_b else b, compute)
        for factor in factors[:2]:
            values = values * factor
        if alpha != 1:
            values = values * values.dtype.type(alpha)
        if beta:
            values = values + values.dtype.type(beta) * out.astype(values.dtype)
        values = apply_epilogue(values, epilogue, bias, aux)
        for factor in factors[2:]:
            values = values * factor
        store(out, values)

    return compute_now
