"""Numbers for the values of a table that a reader builds: equal values get one number, in order of appearance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["Interned"]

_Value = TypeVar("_Value")


class Interned(dict[_Value, int]):
    """Numbers by value; ``table[value]`` gives a new value the next number.

    Parameters
    ----------
    values
        Those that have a number from the start.
    first
        The number of the first value.
    """

    def __init__(self, values: Iterable[_Value] = (), *, first: int = 0) -> None:
        super().__init__()
        self._first = first
        for value in values:
            self[value]

    def __missing__(self, value: _Value) -> int:
        number = self[value] = self._first + len(self)
        return number
