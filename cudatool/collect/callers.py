"""Finds the library through which the program made the current call of the software driver.

Libraries written in Python are found in the frames of this thread. cuda.core and cuda.bindings are compiled, and both
call the driver through functions of cuda.bindings: which one the program called is found in the native stack.
"""

from __future__ import annotations

import ctypes
import sys
from types import FrameType
from typing import Final

from cudatool.trace import hooks
from cudatool.trace.events import Api

__all__ = ["calling_api"]

_IN_PYTHON: Final = {"numba": Api.NUMBA, "numba_cuda": Api.NUMBA, "torch": Api.TORCH}
"""By the top-level package of a frame's module."""
_NATIVE: Final = (("/cuda/core/", Api.CUDA_CORE), ("/cuda/bindings/", Api.CUDA_BINDINGS))
_STUB: Final = "/_libcuda."
_FORWARDS: Final = "/cuda/bindings/cydriver."
_DEPTH: Final = 64  # native frames


class _Found(ctypes.Structure):
    """Dl_info."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def calling_api() -> Api:
    """Return the library whose function the program called. This takes about 0.2 ms: call it once per stream."""
    if hooks.current_operation():
        return Api.CUDATOOL
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _IN_PYTHON:
            return _IN_PYTHON[package]
        frame = frame.f_back
    return _native_api()


def _native_api() -> Api:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "backtrace"):  # not every C library has it
        return Api.UNKNOWN
    stack, found = (ctypes.c_void_p * _DEPTH)(), _Found()
    below = True  # the driver's own frames
    for address in stack[: libc.backtrace(stack, _DEPTH)]:
        if not libc.dladdr(ctypes.c_void_p(address), ctypes.byref(found)) or not found.file:
            continue
        file = found.file.decode("utf-8", "replace")
        if _STUB in file:
            below = False
        elif not below and _FORWARDS not in file:
            return next((api for part, api in _NATIVE if part in file), Api.UNKNOWN)
    return Api.UNKNOWN
