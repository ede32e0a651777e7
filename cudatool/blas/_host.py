"""Products on the software device: NumPy, run when the stream gets there.

Device memory of the software device lies in the address space of the process, so a layout can be read; but only in
stream order, which is what a host function gives. It is called once for a product that was enqueued, and at every
launch of a graph for one that was captured: then the graph keeps what it calls.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable
from typing import Final

import numpy as np

from cudatool import _cuda
from cudatool._allocator import Layout
from cudatool._array import DeviceArray
from cudatool._capture import is_capturing
from cudatool._cuda import check
from cudatool._extents import emit_extents
from cudatool._stream import Stream
from cudatool.blas._gemm import Gemm, accesses
from cudatool.blas._numerics import apply_epilogue, product, store
from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["address", "gemm", "repeat", "repeatable"]

repeatable = False
"""Whether products that were computed are kept, to be computed again."""

_log = logging.getLogger("cudatool.blas")
_once: dict[int, Callable[[], object]] = {}
_captured: dict[int, Callable[[], object]] = {}
_done: dict[int, Callable[[], object]] = {}
_keys = itertools.count(1)


def gemm(gemm: Gemm, stream: Stream) -> None:
    """Enqueue a product."""
    call = _computation(gemm)
    handle, key = stream.core.handle, next(_keys)
    if is_capturing(stream):
        _captured[key] = _telling(call, gemm, stream)
        _let_graph_keep(check(_cuda.driver.cuStreamGetCaptureInfo(handle))[2], key)
    else:
        _once[key] = call
    check(_cuda.driver.cuLaunchHostFunc(handle, address, key))


def _telling(call: Callable[[], object], gemm: Gemm, stream: Stream) -> Callable[[], object]:
    """Return a function that tells, for the node of the graph that calls it, what the product touches."""
    touched, device = accesses(gemm), stream.device_index

    def tell_and_call() -> None:
        call()
        correlation, node = hooks.running_function()
        if correlation and hooks.active:
            for parts, mode in touched:
                emit_extents(Kind.ACCESS, parts, mode, device=device, correlation=correlation, stream=node)

    return tell_and_call


def _let_graph_keep(graph: object, key: int) -> None:
    """Forget a captured product when nothing can launch it any more: the graph, and what was made of it."""
    driver = _cuda.driver
    no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    owner = check(driver.cuUserObjectCreate(key, driver.CUhostFn(_forget_address), 1, no_sync))
    moved = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    check(driver.cuGraphRetainUserObject(graph, owner, 1, moved))


def _computation(gemm: Gemm) -> Callable[[], object]:
    """Return what computes a product of what its operands hold by then.

    It has their addresses only: an operand that is dropped goes back to the allocator at once, as it does on a GPU.
    """
    a, b, out = _unowned(gemm.a), _unowned(gemm.b), _unowned(gemm.out)
    bias = None if gemm.bias is None else _unowned(gemm.bias)
    aux = None if gemm.aux is None else _unowned(gemm.aux)
    factors = [_unowned(scale).reshape(()) for scale in gemm.scales or () if scale is not None]
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


def _unowned(array: DeviceArray) -> Layout:
    layout = array.layout
    # As bytes, because the interface has no name for the types of ml_dtypes.
    interface = {
        "version": 3,
        "shape": layout.shape,
        "typestr": f"|V{layout.itemsize}",
        "data": (array.data_ptr(), False),
        "strides": layout.strides,
    }
    return np.asarray(type("Unowned", (), {"__array_interface__": interface})()).view(layout.dtype)


def _run(key: int) -> None:
    try:
        compute = _captured[key] if key in _captured else _once.pop(key)
        if repeatable:
            _done[key] = compute
        compute()
    except Exception:  # must not reach the driver, which is C
        _log.exception("a product failed on the software device")


def repeat(key: int) -> None:
    """Compute a product again, of what its operands hold now; `key` is the argument of the host function."""
    _done[key]()


def _forget(key: int) -> None:
    _captured.pop(key, None)


_Callback: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_callback: Final = _Callback(_run)
address: Final = ctypes.cast(_callback, ctypes.c_void_p).value or 0
"""Of the host function that computes products."""
_forget_callback: Final = _Callback(_forget)
_forget_address: Final = ctypes.cast(_forget_callback, ctypes.c_void_p).value or 0
