"""Kernel names as a C++ programmer writes them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

__all__ = ["kernel_name"]


@cache
def kernel_name(symbol: str) -> str:
    """Return the name behind a mangled symbol, without return type and parameters: ``"saxpy<float>"``.

    A symbol that is not mangled, or that this machine's C++ library cannot read, is returned as it is.
    """
    library = _library() if symbol.startswith("_Z") else None
    if library is None:
        return symbol
    status = ctypes.c_int()
    text = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return symbol
    name = ctypes.string_at(text).decode("utf-8", "replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return _without_signature(name)


@cache
def _library() -> Any:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    return library


def _without_signature(name: str) -> str:
    """Cut ``void f<int (*)(int)>(float*)`` to what stands before the parameters and after the return type."""
    depth, start, end = 0, 0, len(name)
    for index, character in enumerate(name):
        if character in "<(":
            if character == "(" and depth == 0 and not name.startswith("(anonymous namespace)", index):
                end = index
                break
            depth += 1
        elif character in ">)":
            depth -= 1
        elif character == " " and depth == 0:
            start = index + 1
    return name[start:end]
