"""What stands for a value that a graph is guarded by: equal for two values if a function cannot tell them apart."""

from __future__ import annotations

import array
import enum
import pickle
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import numpy as np

__all__ = ["LARGEST", "cannot_be_guarded", "content", "fact", "is_constant", "restorer"]

LARGEST: Final = 1 << 20
"""Bytes of a NumPy array that is guarded by its content."""

_CONSTANTS: Final = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), np.generic, np.dtype, enum.Enum)
_PLAIN: Final = frozenset((int, str, bytes, bool, type(None)))
_BY_DIGITS: Final = (float, complex, np.generic)  # -0.0 is equal to 0.0, and NaN to nothing


def is_constant(value: Any) -> bool:
    """Return whether a value is guarded by its type and value."""
    return isinstance(value, _CONSTANTS)


def fact(value: Any) -> Any:
    """Return what stands for a value."""
    if type(value) in _PLAIN:
        return type(value).__name__, value
    if is_constant(value):
        return type(value).__name__, repr(value) if isinstance(value, _BY_DIGITS) else value
    if isinstance(value, slice):
        return repr(value)
    if isinstance(value, frozenset | range):
        return content(value)
    if isinstance(value, np.ndarray) and (found := content(value)) is not None:
        return found
    return _Identity(value)


def content(value: Any) -> Any:
    """Return what stands for what a mutable value of Python or NumPy holds itself; None if that is not to be asked."""
    if isinstance(value, set | frozenset):
        return "set", frozenset(map(fact, value))
    if isinstance(value, range):
        return "range", value.start, value.stop, value.step
    if isinstance(value, bytearray | array.array):
        return type(value).__name__, bytes(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.nbytes > LARGEST:
            return None
        return "numpy", value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return pickle.dumps(value.get_state())  # a repr may leave numbers out, and takes 15 ms
    if isinstance(value, ContextVar):
        return fact(value.get(None))
    return None


def cannot_be_guarded(value: Any) -> str:
    """Return why nothing can stand for a value; empty if something can."""
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return "its elements are Python objects"
    if isinstance(value, np.ndarray) and value.nbytes > LARGEST:
        return f"it has more than {LARGEST >> 20} MiB, and the function may read it"
    if isinstance(value, Iterator):
        return "an iterator gives something else each time"
    return ""


def restorer(value: Any) -> Callable[[], None] | None:
    """Return what puts the content of a mutable value back as it is now; None if there is nothing to put back."""
    if isinstance(value, set):
        return partial(_refill, value, set(value), value.update)
    if isinstance(value, bytearray | array.array):
        return partial(value.__setitem__, slice(None), value[:])
    if isinstance(value, np.ndarray) and value.flags.writeable and not cannot_be_guarded(value):
        return partial(np.copyto, value, value.copy())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None


def _refill(value: set[Any], copy: set[Any], fill: Callable[[set[Any]], None]) -> None:
    value.clear()
    fill(copy)


class _Identity:
    """An object, equal to itself alone; it keeps the object, so that no other can have its place."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"
