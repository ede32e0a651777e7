"""Public functions appear in traces under their own names.

A function in a public package is decorated where it is defined::

    @traced
    def mm(a, b): ...                     # cudatool/blas/_products.py: "cudatool.blas.mm"

The names of ``cudatool`` itself are wrapped when they are first looked up (``cudatool/__init__.py``), so that the
runtime's own use of them, which goes by their private modules, is not recorded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, ParamSpec, TypeVar

from cudatool.trace import hooks
from cudatool.trace.events import Kind

__all__ = ["is_traced", "public_name", "record_call", "traced"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Depth(threading.local):
    calls = 0  # public functions open on this thread


_open = _Depth()


def traced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Record each call of `function` as one :data:`~cudatool.trace.events.Kind.CALL`, when it ends."""
    name = public_name(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not hooks.active:
            return function(*args, **kwargs)
        return record_call(name, function, args, kwargs)

    # So that it is found, and pickled, as what programs see.
    call.__module__ = name.removesuffix(f".{call.__qualname__}")
    call.__traced__ = True  # type: ignore[attr-defined]
    return call


def record_call(name: str, function: Callable[..., _R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _R:
    """Call `function` and record it as a call of the public function `name`."""
    start, depth = monotonic_ns(), _open.calls
    _open.calls = depth + 1
    try:
        return function(*args, **kwargs)
    finally:
        _open.calls = depth
        if hooks.active:
            hooks.emit(Kind.CALL, name=name, aux0=monotonic_ns() - start, aux1=depth)


def is_traced(function: object) -> bool:
    """Return whether calls of it are recorded."""
    return getattr(function, "__traced__", False)


def public_name(function: Callable[..., object]) -> str:
    """Return what programs call a function: ``cudatool.blas._products.mm`` is ``cudatool.blas.mm``."""
    public = []
    for part in function.__module__.split("."):
        if part.startswith("_") or part == "runtime":  # private modules, and the room that `cudatool` opens
            break
        public.append(part)
    return ".".join([*public, function.__qualname__])
