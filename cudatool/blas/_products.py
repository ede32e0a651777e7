"""Products of matrices and vectors, with PyTorch's names and rules of shapes. All are one GEMM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from cudatool.blas._again import again, linear_again
from cudatool.blas._conjugate import Conjugate, Operand, conj, plain
from cudatool.blas._gemm import BFLOAT16, Epilogue
from cudatool.blas._multiply import check_operands, check_types, multiply, room_for
from cudatool.errors import UsageError
from cudatool.ops._dispatch import op
from cudatool.runtime.allocator import Layout
from cudatool.runtime.array import DeviceArray, check_array, empty
from cudatool.runtime.dtypes import is_number

__all__ = ["added", "addmm", "addmv", "baddbmm", "bmm", "dot", "linear", "matmul", "mm", "mv", "vdot"]

mm = op("cudatool.blas.mm")
bmm = op("cudatool.blas.bmm")
mv = op("cudatool.blas.mv")
dot = op("cudatool.blas.dot")
vdot = op("cudatool.blas.vdot")
matmul = op("cudatool.blas.matmul")
addmm = op("cudatool.blas.addmm")
baddbmm = op("cudatool.blas.baddbmm")
addmv = op("cudatool.blas.addmv")
linear = op("cudatool.blas.linear")

_FUSED_BIAS: Final = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))


@mm.implementation("cuda", "sim")
def _mm(input: Operand, mat2: Operand, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the product of two matrices, computed on the current stream.

    Parameters
    ----------
    input, mat2
        Shapes ``(m, k)`` and ``(k, n)``; float16, bfloat16, float32, float64, complex64 or complex128, the same in
        both. Any strides; a copy is made only of what cuBLAS cannot read: where neither rows nor columns are
        contiguous, or which is conjugated (:func:`conj`) but not transposed.
    out
        Where the result goes, of any strides; must not overlap an operand. Default: a new array.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    if (found := again(input, mat2, out, ndim=2)) is not None:
        return found
    check_operands("mm", input, mat2, 2, 2)
    shape = (input.shape[0], mat2.shape[1])
    return multiply(input, mat2, room_for("mm", out, shape, input.dtype, input.device, input, mat2))


@bmm.implementation("cuda", "sim")
def _bmm(input: Operand, mat2: Operand, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the products of two batches of matrices, ``(b, m, k)`` and ``(b, k, n)``; the rest is as in :func:`mm`.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    if (found := again(input, mat2, out, ndim=3)) is not None:
        return found
    check_operands("bmm", input, mat2, 3, 3)
    shape = (*input.shape[:2], mat2.shape[2])
    return multiply(input, mat2, room_for("bmm", out, shape, input.dtype, input.device, input, mat2))


@mv.implementation("cuda", "sim")
def _mv(input: Operand, vec: Operand, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the product of a matrix, ``(m, k)``, and a vector, ``(k)``; the rest is as in :func:`mm`.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    check_operands("mv", input, vec, 2, 1)
    found = room_for("mv", out, input.shape[:1], input.dtype, input.device, input, vec)
    multiply(input, _column(vec), found[:, None])
    return found


@dot.implementation("cuda", "sim")
def _dot(input: Operand, tensor: Operand, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the sum of the products of two vectors' elements, as an array of no dimensions.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    check_operands("dot", input, tensor, 1, 1)
    found = room_for("dot", out, (), input.dtype, input.device, input, tensor)
    multiply(_row(input), _column(tensor), found[None, None])
    return found


@vdot.implementation("cuda", "sim")
def _vdot(input: Operand, other: Operand, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return :func:`dot` of the conjugate of `input` and `other`.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    return _dot(conj(input), other, out=out)


@matmul.implementation("cuda", "sim")
def _matmul(input: Operand, other: Operand, *, out: DeviceArray | None = None) -> DeviceArray:
    """Return the matrix product of arrays of any number of dimensions, as NumPy's and PyTorch's ``matmul`` do.

    A vector on the left is a row, on the right a column, which is gone from the result. Dimensions in front of the
    last two are batches, which are broadcast.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    if (known := again(input, other, out)) is not None:
        return known
    check_types("matmul", input, other)
    x, y = input.shape, other.shape
    if not x or not y or x[-1] != y[-2 if len(y) > 1 else 0]:
        raise UsageError(f"cannot multiply shapes {x} and {y}: pass (..., m, k) and (..., k, n), or vectors of k")
    try:
        batch = np.broadcast_shapes(x[:-2], y[:-2])
    except ValueError:
        raise UsageError(f"the batches of shapes {x} and {y} do not fit each other") from None
    shape = batch + x[-2:-1] + (y[-1:] if len(y) > 1 else ())
    found = room_for("matmul", out, shape, input.dtype, input.device, input, other)
    left, right = (_row(input) if len(x) == 1 else input), (_column(other) if len(y) == 1 else other)
    rows, columns = left.shape[-2], right.shape[-1]
    if len(right.shape) == 2:  # all matrices on the left are one tall one, if they lie so
        tall = math.prod(left.shape[:-1])
        flat, flat_out = _viewed(left, (tall, x[-1])), _viewed(found, (tall, columns))
        if flat is not None and flat_out is not None:
            multiply(flat, right, plain(flat_out)[0])
            return found
    whole = (math.prod(batch), rows, columns)
    target = _viewed(found, whole)
    product = empty(whole, found.dtype, device=found.device) if target is None else plain(target)[0]
    multiply(_batched(left, batch), _batched(right, batch), product)
    return found if target is not None else found.copy_(product.reshape(shape))


@addmm.implementation("cuda", "sim")
def _addmm(
    input: DeviceArray,
    mat1: Operand,
    mat2: Operand,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return ``beta * input + alpha * (mat1 @ mat2)``.

    Parameters
    ----------
    input
        What is added, broadcast to ``(m, n)``. A row of ``n`` with `beta` 1 is added by the product's own kernel.
    beta
        If 0, `input` is not read.
    out
        May be `input` itself. The rest is as in :func:`mm`.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    check_operands("addmm", mat1, mat2, 2, 2)
    return added("addmm", input, mat1, mat2, (mat1.shape[0], mat2.shape[1]), beta, alpha, out)


@baddbmm.implementation("cuda", "sim")
def _baddbmm(
    input: DeviceArray,
    batch1: Operand,
    batch2: Operand,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return ``beta * input + alpha * (batch1 @ batch2)`` of two batches of matrices; see :func:`addmm`.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    check_operands("baddbmm", batch1, batch2, 3, 3)
    return added("baddbmm", input, batch1, batch2, (*batch1.shape[:2], batch2.shape[2]), beta, alpha, out)


@addmv.implementation("cuda", "sim")
def _addmv(
    input: DeviceArray,
    mat: Operand,
    vec: Operand,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    out: DeviceArray | None = None,
) -> DeviceArray:
    """Return ``beta * input + alpha * (mat @ vec)`` of a matrix and a vector; see :func:`addmm`.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    check_operands("addmv", mat, vec, 2, 1)
    _check_factors("addmv", mat.dtype, alpha, beta)
    _check_added("addmv", input, mat)
    found = _with_input("addmv", input, out, mat.shape[:1], mat, vec, copy=beta != 0)
    multiply(mat, _column(vec), found[:, None], alpha=alpha, beta=beta)
    return found


@linear.implementation("cuda", "sim")
def _linear(input: Operand, weight: Operand, bias: DeviceArray | None = None) -> DeviceArray:
    """Return ``input @ weight.T + bias``, in one product.

    Parameters
    ----------
    input
        Shape ``(..., in)``.
    weight
        Shape ``(out, in)``.
    bias
        Shape ``(out)``.

    Raises
    ------
    UsageError
        The shapes, dtypes or devices do not fit each other.
    """
    if bias is not None and (known := linear_again(input, weight, bias)) is not None:
        return known
    plain(input), plain(weight)  # raise for what is no array of ours
    if len(weight.shape) != 2 or not input.shape or input.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"linear takes an input of shape (..., in) and a weight of (out, in), not {input.shape} and {weight.shape}"
        )
    if bias is not None:
        check_array("linear: the bias", bias)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"linear: the bias must have shape {weight.shape[:1]}, not {bias.shape}")
    flat = input if len(input.shape) == 2 else _matrix(input)
    found = _mm(flat, weight.T) if bias is None else _addmm(bias, flat, weight.T)
    return found if flat is input else found.reshape((*input.shape[:-1], weight.shape[0]))


def added(
    name: str,
    input: DeviceArray,
    a: Operand,
    b: Operand,
    shape: tuple[int, ...],
    beta: complex,
    alpha: complex,
    out: DeviceArray | None,
    epilogue: Epilogue = Epilogue.NONE,
) -> DeviceArray:
    """Return ``epilogue(beta * input + alpha * (a @ b))``: a row is the epilogue's, all else is there beforehand."""
    _check_factors(name, a.dtype, alpha, beta)
    _check_added(name, input, a)
    if beta == 1 and a.shape[-1] and _can_be_bias(input, shape, a.dtype):
        found = room_for(name, out, shape, a.dtype, a.device, a, b, input)
        bias = (input if input.ndim == 1 else input[0]).contiguous()
        with_bias = Epilogue(f"{epilogue}_bias" if epilogue else "bias")
        return multiply(a, b, found, alpha=alpha, epilogue=with_bias, bias=bias)
    found = _with_input(name, input, out, shape, a, b, copy=beta != 0)
    return multiply(a, b, found, alpha=alpha, beta=beta, epilogue=epilogue)


def _check_factors(name: str, dtype: np.dtype[np.generic], *factors: complex) -> None:
    if not all(map(is_number, factors)):
        raise UsageError(f"{name}: alpha and beta are numbers on the host, not {factors}")
    if dtype.kind != "c" and any(map(np.iscomplexobj, factors)):
        raise UsageError(f"{name}: alpha and beta must be real for {dtype}")


def _check_added(name: str, input: object, a: Operand) -> None:
    if not isinstance(input, DeviceArray):
        raise UsageError(f"{name} adds to a DeviceArray, not to {type(input).__name__}")
    if input.dtype != a.dtype or input.device != a.device:
        raise UsageError(
            f"{name}: what is added must be {a.dtype} on device {a.device}, as the operands are; it is {input!r}"
        )


def _can_be_bias(input: DeviceArray, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> bool:
    """Return whether cuBLASLt can add `input` to each row of a result of `shape`."""
    return len(shape) == 2 and min(shape) > 1 and input.shape in (shape[1:], (1, shape[1])) and dtype in _FUSED_BIAS


def _with_input(
    name: str,
    input: DeviceArray,
    out: DeviceArray | None,
    shape: tuple[int, ...],
    a: Operand,
    b: Operand,
    *,
    copy: bool,
) -> DeviceArray:
    """Return where the result goes, with `input` in it."""
    try:
        np.broadcast_to(input.layout, shape)
    except ValueError:
        raise UsageError(f"{name}: shape {input.shape} of what is added does not broadcast to {shape}") from None
    found = room_for(name, out, shape, a.dtype, a.device, a, b)
    return found.copy_(input) if copy and found is not input else found


# Views.


def _changed(operand: Operand, change: Callable[[DeviceArray], DeviceArray]) -> Operand:
    array, conjugated = plain(operand)
    return Conjugate(change(array)) if conjugated else change(array)


def _column(vector: Operand) -> Operand:
    return _changed(vector, lambda array: array[:, None])


def _row(vector: Operand) -> Operand:
    return _changed(vector, lambda array: array[None])


def _matrix(operand: Operand) -> Operand:
    return _changed(operand, lambda array: array.reshape(math.prod(array.shape[:-1]), array.shape[-1]))


def _viewed(operand: Operand, shape: tuple[int, ...]) -> Operand | None:
    """Return the elements in another shape, None if that is no view."""
    try:
        return _changed(operand, lambda array: _with_layout(array, array.layout.reshape(shape, copy=False)))
    except ValueError:
        return None


def _batched(operand: Operand, batch: tuple[int, ...]) -> Operand:
    """Return a batch with one dimension, of matrices that are broadcast to one with the dimensions `batch`."""

    def change(array: DeviceArray) -> DeviceArray:
        matrix = array.shape[-2:]
        whole = _with_layout(array, np.broadcast_to(array.layout, (*batch, *matrix)))
        return whole.reshape(math.prod(batch), *matrix)

    return _changed(operand, change)


def _with_layout(array: DeviceArray, layout: Layout) -> DeviceArray:
    return DeviceArray(layout, None, array.device)  # the layout keeps the memory
