"""GEMM on the software device: NumPy, run when the stream gets there.

Device memory of the software device lies in the address space of the process, so a layout can be read; but only in
stream order, which is what a host function gives.
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
from cudatool._cuda import check
from cudatool._stream import Stream

__all__ = ["address", "gemm", "repeat", "repeatable"]

repeatable = False
"""Whether products that were computed are kept, to be computed again."""

_log = logging.getLogger("cudatool.blas")
_pending: dict[int, Callable[[], object]] = {}
_done: dict[int, Callable[[], object]] = {}
_keys = itertools.count(1)


def gemm(a: Layout, b: Layout, c: Layout, stream: Stream) -> None:
    """Enqueue ``c = a @ b``."""
    # The addresses only: an operand that is dropped goes back to the allocator at once, as it does on a GPU.
    a, b, c = (_unowned(layout) for layout in (a, b, c))
    handle, key = stream.core.handle, next(_keys)
    _pending[key] = lambda: np.matmul(a, b, out=c)
    check(_cuda.driver.cuLaunchHostFunc(handle, address, key))


def _unowned(layout: Layout) -> Layout:
    interface = {**layout.__array_interface__, "strides": layout.strides}
    return np.asarray(type("Unowned", (), {"__array_interface__": interface})())


def _run(key: int) -> None:
    try:
        product = _pending.pop(key)
        if repeatable:
            _done[key] = product
        product()
    except Exception:  # must not reach the driver, which is C
        _log.exception("matmul failed on the software device")


def repeat(key: int) -> None:
    """Compute a product again, of what its operands hold now; `key` is the argument of the host function."""
    _done[key]()


_callback: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_run)
address: Final = ctypes.cast(_callback, ctypes.c_void_p).value or 0
"""Of the host function that computes products."""
