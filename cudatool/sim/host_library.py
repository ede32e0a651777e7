"""The C part of the software device: what native code calls, what calls native code, and the engine of racecheck."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import cache
from typing import Any

from cudatool.sim import _calls, _queue, signals

__all__ = ["library", "path_of"]


def path_of(module: str) -> str:
    """Return the file of a library of ours that is built as a Python module.

    Raises
    ------
    ImportError
        It was not built.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"{module} was not built; install cudatool with a C compiler present")
    return spec.origin


@cache
def library() -> ctypes.CDLL:
    """Return the C part (``_device.c``, ``_libcuda.c``, ``_races.c``, ``_race_order.c``, ``_workers.c``)."""
    found = ctypes.CDLL(path_of("cudatool.sim._libcuda"))
    found.cudatool_printf_resize.argtypes = [ctypes.c_size_t]
    found.cudatool_heap_create.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.cudatool_heap_create.restype = ctypes.c_void_p
    found.cudatool_heap_destroy.argtypes = found.cudatool_heap_blocks.argtypes = [ctypes.c_void_p]
    found.cudatool_heap_list.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
    found.cudatool_heap_blocks.restype = found.cudatool_heap_list.restype = ctypes.c_uint32
    _calls.set_guard(_address(found.cudatool_guarded_call))
    _queue.set_native(
        _address(found.cudatool_guarded_calls),
        _address(found.cudatool_hold_interrupts),
        _address(found.cudatool_release_interrupts),
        signals.interrupts,
    )
    return found


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
