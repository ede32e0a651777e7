"""Cache of launch plans for matrix products: one look-up replaces the checks of shapes, layouts and switches.

Small products take less time on a GPU than the checks and decisions that come before them. A product has a plan once
it was computed with the same layouts, and without copies, factors or epilogues. No plan is used while a subscriber
receives events or products are tuned.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.backends import _settings
from cudatool.blas import _gemm
from cudatool.blas._gemm import Again, Gemm
from cudatool.runtime.array import DeviceArray, empty, may_overlap, signature
from cudatool.runtime.device import is_current
from cudatool.runtime.plans import LaunchPlans
from cudatool.runtime.stream import stream_on
from cudatool.trace import hooks

__all__ = ["again", "linear_again", "remember"]


class _Plan(NamedTuple):
    enqueue: Again
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int


_plans = LaunchPlans[tuple[object, ...], _Plan](8192)
_MOST_ALIGNMENT: Final = 256  # bytes, that make a difference


def again(a: Any, b: Any, out: DeviceArray | None, ndim: int | None = None) -> DeviceArray | None:
    """Enqueue ``out = a @ b`` and return `out`, by default a new array; None if there is no plan for it.

    Parameters
    ----------
    ndim
        Of the result, where only one is right.
    """
    if hooks.active or _gemm.tuner is not None or type(a) is not DeviceArray or type(b) is not DeviceArray:
        return None
    seal = None
    if out is not None:
        if type(out) is not DeviceArray:
            return None
        seal = out._signature or signature(out)
    plan = _plans.get((a._signature or signature(a), b._signature or signature(b), seal, _settings.version))
    if plan is None:
        return None
    enqueue, shape, dtype, device = plan
    if not is_current(device) or (ndim and len(shape) != ndim):
        return None
    if out is None:
        out = empty(shape, dtype, device=device)
    elif may_overlap(out, a) or may_overlap(out, b):
        return None
    enqueue(a._address, b._address, out._address, 0, stream_on(device))  # known, since the signatures are
    return out


def linear_again(input: Any, weight: Any, bias: DeviceArray) -> DeviceArray | None:
    """Enqueue ``input @ weight.T + bias`` and return the result; None if there is no plan for it."""
    if hooks.active or _gemm.tuner is not None or not (type(input) is type(weight) is type(bias) is DeviceArray):
        return None
    device, shape, strides = input.device, input.shape, input.strides
    flat = shape
    if len(shape) != 2:
        if not (shape and input.is_contiguous()):
            return None
        flat = math.prod(shape[:-1]), shape[-1]
        strides = shape[-1] * input.dtype.itemsize, input.dtype.itemsize
    w, at = weight.layout, (input.data_ptr(), weight.data_ptr(), bias.data_ptr())
    plan = _plans.get(
        _key_with_bias(flat, strides, input.dtype, w.shape[::-1], w.strides[::-1], w.dtype, bias, at[0] | at[1] | at[2])
    )
    if plan is None or weight.device != device or bias.device != device or not is_current(device):
        return None
    out = empty((*shape[:-1], w.shape[0]), plan.dtype, device=device)
    plan.enqueue(at[0], at[1], out.data_ptr(), at[2], stream_on(device))
    return out


def _key_with_bias(
    a: tuple[int, ...],
    a_strides: tuple[int, ...],
    a_dtype: np.dtype[Any],
    b: tuple[int, ...],
    b_strides: tuple[int, ...],
    b_dtype: np.dtype[Any],
    bias: DeviceArray,
    addresses: int,
) -> tuple[object, ...]:
    # Which algorithm is best depends on the alignment; and it is one thread's, whose descriptor has the address.
    bits, z = addresses | _MOST_ALIGNMENT, bias.layout
    own = (z.shape, z.strides, z.dtype, bits & -bits, threading.get_ident())
    return a, a_strides, a_dtype, b, b_strides, b_dtype, _settings.version, own


def remember(a: DeviceArray, b: DeviceArray, out: DeviceArray, gemm: Gemm) -> None:
    """Keep the plan of a product that was computed, if its implementation can do the same with other matrices."""
    enqueue = _gemm.like(gemm)
    if enqueue is None:
        return
    plan = _Plan(enqueue, out.shape, out.dtype, out.device)
    if gemm.bias is not None:
        x, y, addresses = a.layout, b.layout, a.data_ptr() | b.data_ptr() | gemm.bias.data_ptr()
        if out.is_contiguous() and not out.data_ptr() % _MOST_ALIGNMENT:  # as a new one is
            key = _key_with_bias(x.shape, x.strides, x.dtype, y.shape, y.strides, y.dtype, gemm.bias, addresses)
            _plans.remember(key, plan)
        return
    if type(a) is type(b) is type(out) is DeviceArray:
        key = signature(a), signature(b), signature(out), _settings.version
        _plans.remember(key, plan)
        if out.is_contiguous():
            _plans.remember((*key[:2], None, key[3]), plan)
