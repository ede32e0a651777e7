"""What the operations compute, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cudatool.errors import UsageError
from cudatool.nccl._calls import AVG, MAX, MIN, PROD, SUM, Name

__all__ = ["check", "perform"]

_Array = npt.NDArray[Any]
_FUNCTIONS: Final = {SUM: np.add, AVG: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum}


def check(name: Name, sent: Sequence[_Array | None], received: Sequence[_Array | None]) -> None:
    """Raise :class:`UsageError` if the ranks' arrays do not fit each other; arguments as of :func:`perform`."""
    given = [array for array in sent if array is not None]
    if len({(array.dtype, array.size) for array in given}) > 1:
        raise UsageError(f"{name}: the ranks' arrays differ: {[f'{a.size} of {a.dtype}' for a in given]}")
    (dtype, size), ranks = (given[0].dtype, given[0].size), len(received)
    expected = {Name.ALL_GATHER: size * ranks, Name.REDUCE_SCATTER: size // ranks}.get(name, size)
    for target in received:
        if target is not None and (target.dtype, target.size) != (dtype, expected):
            raise UsageError(f"{name}: {expected} elements of {dtype} are received in {target.size} of {target.dtype}")


def perform(name: Name, op: int, sent: Sequence[_Array | None], received: Sequence[_Array | None]) -> None:
    """Do an operation.

    Parameters
    ----------
    op
        Of the operations that reduce.
    sent, received
        By rank; None for what is not there, or not in this process. For send and recv, of the sender and of the
        receiver.
    """
    given = [array.reshape(-1) for array in sent if array is not None]
    values: Sequence[_Array]
    match name:
        case Name.ALL_REDUCE | Name.REDUCE:
            values = [_reduced(given, op)] * len(received)
        case Name.REDUCE_SCATTER:
            values = np.split(_reduced(given, op), len(received))
        case Name.ALL_GATHER:
            values = [np.concatenate(given)] * len(received)
        case Name.BROADCAST | Name.SEND | Name.RECV:
            values = given * len(received)
    for value, target in zip(values, received, strict=True):
        if target is not None:
            target[...] = value.reshape(target.shape)


def _reduced(arrays: Sequence[_Array], op: int) -> _Array:
    """Return the arrays reduced in the order of the ranks; small floats in float32, rounded once."""
    dtype = arrays[0].dtype
    narrow = dtype.itemsize < 4 and dtype.name.startswith(("float", "bfloat"))
    with np.errstate(all="ignore"):
        stack = np.stack(arrays).astype(np.float32) if narrow else np.stack(arrays)
        total = _FUNCTIONS[op].reduce(stack, axis=0, dtype=stack.dtype)
        if op == AVG:
            count = total.dtype.type(len(arrays))
            # Integers are cut towards zero.
            total = np.sign(total) * (np.abs(total) // count) if total.dtype.kind in "iu" else total / count
        result: _Array = total.astype(dtype)
    return result
