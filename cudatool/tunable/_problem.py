"""What a product is called in results: by the arguments of cuBLAS, as PyTorch's TunableOp names it.

``GemmTunableOp_float_TN,tn_64_32_128_ld_128_128_64`` is one of float32 matrices, of which cuBLAS reads the left one
transposed, with an m, n and k, and the leading dimensions of left, right and result.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.blas._gemm import BFLOAT16, Compute, Gemm
from cudatool.blas._layout import arrange
from cudatool.errors import FileFormatError
from cudatool.runtime.allocator import allocate
from cudatool.runtime.array import DeviceArray
from cudatool.runtime.stream import Stream
from cudatool.runtime.transfer import copy_to_device

__all__ = ["Problem", "example", "problem_of"]

_TYPES: Final = {
    # -> dtype, and in what precision the sums are
    "float": (np.dtype(np.float32), Compute.SINGLE),
    "tf32": (np.dtype(np.float32), Compute.TF32),
    "double": (np.dtype(np.float64), Compute.DOUBLE),
    "Half": (np.dtype(np.float16), Compute.SINGLE),
    "BFloat16": (BFLOAT16, Compute.SINGLE),
    "ComplexFloat": (np.dtype(np.complex64), Compute.SINGLE),
    "ComplexTf32": (np.dtype(np.complex64), Compute.TF32),
    "ComplexDouble": (np.dtype(np.complex128), Compute.DOUBLE),
}
_NAMES: Final = {value: name for name, value in _TYPES.items()}
_OPERATIONS: Final = "ntc"  # cublasOperation_t
_OPERATOR: Final = re.compile(r"Gemm(StridedBatched)?TunableOp_(\w+)_[NTC]{2}")
_PARAMETERS: Final = re.compile(r"([ntc])([ntc])_(\d+)_(\d+)_(\d+)(?:_B_(\d+))?_ld_(\d+)_(\d+)_(\d+)")


class Problem(NamedTuple):
    """The names of a product."""

    operator: str
    parameters: str


def problem_of(gemm: Gemm) -> Problem | None:
    """Return what a product is called, None if it is not one that is tuned: it has an epilogue, or scales."""
    if gemm.epilogue or gemm.scales is not None or (gemm.a.dtype, gemm.compute) not in _NAMES:
        return None
    product = gemm.product
    first, second = (product.b, product.a) if product.swapped else (product.a, product.b)
    operations = _OPERATIONS[first.operation] + _OPERATIONS[second.operation]
    batched, batch = ("StridedBatched", f"_B_{product.batch}") if product.batch > 1 else ("", "")
    return Problem(
        f"Gemm{batched}TunableOp_{_NAMES[gemm.a.dtype, gemm.compute]}_{operations.upper()}",
        f"{operations}_{product.m}_{product.n}_{product.k}{batch}"
        f"_ld_{first.leading}_{second.leading}_{product.out.leading}",
    )


def example(problem: Problem, stream: Stream, path: str) -> Gemm:
    """Return a product of that name, of random matrices.

    Raises
    ------
    FileFormatError
        There are no such names; `path` is where they were read.
    """
    operator = _OPERATOR.fullmatch(problem.operator)
    found = _PARAMETERS.fullmatch(problem.parameters)
    if operator is None or found is None or operator[2] not in _TYPES:
        raise FileFormatError(path, f"{','.join(problem)} is no product that can be tuned")
    dtype, compute = _TYPES[operator[2]]
    left, right = found[1], found[2]
    m, n, k, batch, *leading = (int(number or 1) for number in found.groups()[2:])
    # To cuBLAS our rows are columns: its left operand is our right one, its result ours transposed.
    b = _matrix(batch, k, m, left == "n", leading[0], dtype, stream)
    a = _matrix(batch, n, k, right == "n", leading[1], dtype, stream)
    out = _matrix(batch, n, m, True, leading[2], dtype, stream)
    conjugate = (right == "c", left == "c")
    product = arrange(a.shape, a.strides, b.shape, b.strides, out.strides, dtype.itemsize, dtype.itemsize, conjugate)
    return Gemm(a, b, out, product, compute, conjugate=conjugate)


def _matrix(
    batch: int, rows: int, columns: int, by_rows: bool, leading: int, dtype: Any, stream: Stream
) -> DeviceArray:
    lines, length = (rows, columns) if by_rows else (columns, rows)
    random = np.random.default_rng(0)
    whole, _ = allocate((batch, lines, max(leading, length)), dtype, stream)
    copy_to_device(whole, random.standard_normal(whole.shape).astype(dtype), stream)
    part = whole[:, :, :length]
    part = part if by_rows else part.swapaxes(1, 2)
    return DeviceArray(part if batch > 1 else part[0], None, stream.device_index)
