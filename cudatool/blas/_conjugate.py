"""Arrays that are to be read conjugated."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudatool.errors import UsageError
from cudatool.runtime.array import DeviceArray, check_array
from cudatool.runtime.traced_calls import traced

__all__ = ["Conjugate", "Operand", "conj", "plain"]


class Conjugate:
    """A complex array that a product reads conjugated, without a copy where cuBLAS can; made by :func:`conj`.

    Parameters
    ----------
    array
        What is to be conjugated.
    """

    __slots__ = ("array",)

    def __init__(self, array: DeviceArray) -> None:
        self.array = array

    @property
    def T(self) -> Conjugate:
        """The view with the dimensions reversed: of a matrix, its adjoint."""
        return self.transpose()

    def transpose(self, *axes: Any) -> Conjugate:
        """Return a view with the dimensions in another order, by default the reverse."""
        return Conjugate(self.array.transpose(*axes))

    @property
    def device(self) -> int:
        """Ordinal of the device."""
        return self.array.device

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dimension."""
        return self.array.shape

    def __repr__(self) -> str:
        return f"<Conjugate of {self.array!r}>"


Operand = DeviceArray | Conjugate


@traced
def conj(array: Operand) -> Operand:
    """Return an array as products read it conjugated: ``mm(conj(a).T, b)``. One of real numbers is returned itself.

    Nothing is computed. What is not a product of this package does not take it.
    """
    if isinstance(array, Conjugate):
        return array.array
    check_array("conj", array)
    return Conjugate(array) if array.dtype.kind == "c" else array


def plain(operand: Any) -> tuple[DeviceArray, bool]:
    """Return the array of an operand, and whether it is to be conjugated.

    Raises
    ------
    UsageError
        It is no array of ours.
    """
    if isinstance(operand, DeviceArray):
        return operand, False
    if isinstance(operand, Conjugate):
        return operand.array, True
    raise UsageError(f"a product takes device arrays, not {type(operand).__name__}; use cudatool.asarray")
