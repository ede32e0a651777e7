"""The C part of the software device: what native code calls, what calls native code, and the engine of racecheck."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache

__all__ = ["library"]


@cache
def library() -> ctypes.CDLL:
    """Return the C part (``_device.c``, ``_libcuda.c``, ``_races.c``)."""
    spec = importlib.util.find_spec("cudatool.sim._libcuda")
    if spec is None or spec.origin is None:
        raise ImportError("cudatool.sim._libcuda was not built; install cudatool with a C compiler present")
    found = ctypes.CDLL(spec.origin)
    found.cudatool_printf_resize.argtypes = [ctypes.c_size_t]
    found.cudatool_heap_create.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.cudatool_heap_create.restype = ctypes.c_void_p
    found.cudatool_heap_destroy.argtypes = [ctypes.c_void_p]
    return found
