"""From arrays to one product that is enqueued: checks, copies where cuBLAS cannot read, room for the result."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatool.blas._again import remember
from cudatool.blas._conjugate import Operand, plain
from cudatool.blas._gemm import FP8, ROUTINES, Compute, Epilogue, Gemm, Scales, compute_type, enqueue, full_reduction
from cudatool.blas._layout import COLUMN_MAJOR, Order, arrange
from cudatool.errors import UsageError
from cudatool.runtime.allocator import allocate
from cudatool.runtime.array import DeviceArray, check_writeable, empty, may_overlap
from cudatool.runtime.stream import Stream, current_stream
from cudatool.runtime.transfer import copy_on_device

__all__ = ["check_devices", "check_operands", "check_types", "multiply", "room_for"]


def check_types(name: str, a: Operand, b: Operand) -> None:
    """Raise unless `a` and `b` are on one device and have one dtype, which BLAS has.

    Raises
    ------
    UsageError
        They are not, or do not.
    """
    plain(a), plain(b)  # raise for what is no array of ours
    if a.dtype != b.dtype or a.dtype not in ROUTINES or a.dtype.kind == "i" or a.dtype in FP8:
        raise UsageError(
            f"{name} takes two arrays of the same dtype, one of float16, bfloat16, float32, float64, complex64 and "
            f"complex128, not {a.dtype} and {b.dtype}"
        )
    check_devices(name, a, b)


def check_devices(name: str, a: Operand, *others: Operand | None) -> None:
    """Raise unless all arrays that a product takes are on the device of the first.

    Raises
    ------
    UsageError
        They are not.
    """
    for other in others:
        if other is not None and other.device != a.device:
            raise UsageError(f"{name}: the arrays are on devices {a.device} and {other.device}; copy one to the other")


def check_operands(name: str, a: Operand, b: Operand, a_ndim: int, b_ndim: int) -> None:
    """Raise unless BLAS has the operands' dtype, and they have these numbers of dimensions and fit each other.

    Raises
    ------
    UsageError
        They do not.
    """
    check_types(name, a, b)
    x, y = a.shape, b.shape
    if len(x) != a_ndim or len(y) != b_ndim or x[-1] != y[-2 if b_ndim > 1 else 0] or x[:-2] != y[:-2]:
        shapes = {(1, 1): "(n) and (n)", (2, 1): "(m, n) and (n)", (2, 2): "(m, k) and (k, n)"}
        expected = shapes.get((a_ndim, b_ndim), "(batch, m, k) and (batch, k, n)")
        raise UsageError(f"{name} cannot multiply shapes {x} and {y}: pass {expected}")


def room_for(
    name: str,
    out: DeviceArray | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    device: int,
    *operands: Operand | None,
) -> DeviceArray:
    """Return where a result goes: `out`, if it fits and overlaps no operand, by default a new array.

    Raises
    ------
    UsageError
        `out` does not fit.
    """
    if out is None:
        return empty(shape, dtype, device=device)
    if not isinstance(out, DeviceArray) or (out.shape, out.dtype, out.device) != (shape, dtype, device):
        raise UsageError(f"{name}: out must have shape {shape} and dtype {dtype} on device {device}; it is {out!r}")
    check_writeable(out, f"{name}: out")
    for operand in operands:
        if operand is not None and may_overlap(out, plain(operand)[0]):
            raise UsageError(f"{name}: out overlaps an operand, which a product cannot be written to")
    return out


def multiply(
    a: Operand,
    b: Operand,
    out: DeviceArray,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    epilogue: Epilogue = Epilogue.NONE,
    bias: DeviceArray | None = None,
    aux: DeviceArray | None = None,
    scales: Scales | None = None,
    fast_accumulation: bool = False,
) -> DeviceArray:
    """Enqueue ``out = epilogue(alpha * (a @ b) + beta * out)`` on the current stream, and return `out`.

    `a` and `b` have shapes ``(m, k)`` and ``(k, n)``, or both the same batch in front; a batch that is one matrix
    repeated is not copied.
    """
    if not out.size:
        return out
    (left, conjugate_a), (right, conjugate_b) = plain(a), plain(b)
    x, y, z = left.layout, right.layout, out.layout
    if not x.size and not beta and not epilogue and scales is None:  # the sum over nothing
        return out.fill_(0)
    product = arrange(
        x.shape,
        x.strides,
        y.shape,
        y.strides,
        z.strides,
        x.itemsize,
        z.itemsize,
        (conjugate_a, conjugate_b),
        bool(epilogue),
        x.itemsize == 1,
    )
    stream = current_stream(out.device)
    if product.a.copy:
        left = _copy(left, product.a.copy, stream)
    if product.b.copy:
        right = _copy(right, product.b.copy, stream)
    target = out
    if product.out.copy:
        target = empty(out.shape, out.dtype, device=out.device)
        if beta:
            target.copy_(out)
    compute = compute_type(x.dtype)
    gemm = Gemm(
        left,
        right,
        target,
        product,
        compute,
        alpha,
        beta,
        (conjugate_a, conjugate_b),
        epilogue,
        bias,
        aux,
        scales,
        fast_accumulation,
        compute is Compute.SINGLE and full_reduction(x.dtype),
    )
    enqueue(gemm, stream)
    is_plain = epilogue in (Epilogue.NONE, Epilogue.BIAS) and alpha == 1 and not (beta or scales)
    if is_plain and target is out and left is a and right is b:
        remember(a, b, out, gemm)
    return out if target is out else out.copy_(target)


def _copy(array: DeviceArray, order: Order, stream: Stream) -> DeviceArray:
    """Return a copy whose rows, or columns, are contiguous; of a batch that is one matrix repeated, of that one."""
    layout = array.layout
    source = layout[0] if layout.ndim == 3 and not layout.strides[0] else layout
    shape = source.shape
    if order == COLUMN_MAJOR:
        turned, _ = allocate((*shape[:-2], shape[-1], shape[-2]), source.dtype, stream)
        copy = turned.swapaxes(-1, -2)
    else:
        copy, _ = allocate(shape, source.dtype, stream)
    copy_on_device(copy, source, stream)
    whole = copy if source is layout else np.broadcast_to(copy, layout.shape)
    return DeviceArray(whole, None, array.device)  # the layout keeps the memory
