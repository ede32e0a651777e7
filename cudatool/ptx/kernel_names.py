"""Kernel names as a C++ programmer writes them."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

__all__ = ["kernel_name", "kernel_parameters"]

# Tags that tell the versions of a function apart, and what numba puts around the name of a Python function: its target,
# and the functions that it is defined in, where "<" and ">" are spelled in hexadecimal.
_NUMBAS = re.compile(r"\[abi:[^\]]*\]|^cudapy::|\w+::_3clocals_3e::")


@cache
def kernel_name(symbol: str) -> str:
    """Return the name of a mangled symbol, without return type and parameters: ``"saxpy<float>"``.

    A symbol that is not mangled, or that this machine's C++ library cannot read, is returned as it is.
    """
    text = _demangled(symbol)
    return _without_signature(text) if text else symbol


def kernel_parameters(symbol: str) -> list[str]:
    """Return the C++ types of the parameters that a mangled symbol names: ``["float const*", "int"]``.

    Empty if there are none, or the symbol is not mangled.
    """
    text = _demangled(symbol)
    name = _without_signature(text)
    signature = text[text.find(name) + len(name) :] if text else ""
    types, depth, start = [], 0, 1
    for index, character in enumerate(signature):
        depth += character in "(<[{"
        depth -= character in ")>]}"
        if (character == "," and depth == 1) or (character == ")" and depth == 0):
            types.append(signature[start:index].strip())
            start = index + 1
            if depth == 0:
                break
    return [one for one in types if one]


def _demangled(symbol: str) -> str:
    """Return what a mangled symbol stands for, or nothing."""
    library = _library() if symbol.startswith("_Z") else None
    if library is None:
        return ""
    status = ctypes.c_int()
    text = library.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not text:
        return ""
    name = ctypes.string_at(text).decode("utf-8", "replace")
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return _NUMBAS.sub("", name).replace("_3clambda_3e", "<lambda>")


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
