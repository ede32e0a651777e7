"""The events of a snapshot's ring as columns, whether the pickle had them as rows or as dicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from cudatool.collect.plain_pickle import MISSING, Rows

__all__ = ["EventColumns", "require"]

_Ints = npt.NDArray[np.int64]
_NUMBERS: Final = 1 << 60  # what a word can say without an object


def require(value: Any, kind: type, what: str) -> Any:
    """Return `value`, which must be of the type `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{what} is a {type(value).__name__}")
    return value


class EventColumns:
    """Some rows of a table of events, which are those of one device."""

    def __init__(self, rows: Rows, start: int, stop: int) -> None:
        self._objects = rows.objects
        self._cells = {key: c if isinstance(c, int) else c[start:stop] for key, c in rows.columns.items()}
        self._count = stop - start

    @classmethod
    def of(cls, entries: Any, rows: Rows) -> Self:
        """Return the events of one device: a range of rows, or a list of dicts.

        Raises
        ------
        TypeError
            It is neither.
        """
        if isinstance(entries, range):
            return cls(rows, entries.start, entries.stop)
        made = _rows_of(require(entries, list, "a device's trace"))
        return cls(made, 0, made.count)

    def __len__(self) -> int:
        return self._count

    def dicts(self) -> list[dict[str, Any]]:
        """Return the events as they were."""
        columns = {key: np.broadcast_to(cells, self._count).tolist() for key, cells in self._cells.items()}
        rows = zip(*columns.values(), strict=True)
        return [
            {key: self._value(cell, _same, 0) for key, cell in zip(columns, row, strict=True) if cell != MISSING}
            for row in rows
        ]

    def said(self) -> list[str]:
        """Return the keys that at least one event has."""
        return [key for key in self._cells if self.has(key)]

    def has(self, key: str) -> bool:
        """Return whether any event has `key`."""
        cells = self._cells.get(key, MISSING)
        return bool(self._count and np.any(np.asarray(cells) != MISSING))

    def select(self, rows: npt.NDArray[Any]) -> Self:
        """Return these rows only: a mask, or their numbers."""
        chosen = object.__new__(type(self))
        chosen._objects = self._objects
        chosen._cells = {key: c if isinstance(c, int) else c[rows] for key, c in self._cells.items()}
        chosen._count = len(np.arange(self._count)[rows])
        return chosen

    def drop(self, key: str) -> None:
        """Forget a column that is not needed any more: each takes 8 bytes for an event."""
        self._cells.pop(key, None)

    def numbers(self, key: str, what: str, most: int, *, default: int | None = 0) -> npt.NDArray[np.uint64]:
        """Return a column of integers from 0 to below `most`.

        Parameters
        ----------
        what
            Names a value in messages.
        default
            For events without the key, and for None; with None every event must have it.

        Raises
        ------
        KeyError
            An event has no `key`, and there is no default.
        TypeError, ValueError
            A value is no integer, or out of bounds.
        """
        if not self._count:
            return np.zeros(0, np.uint64)
        cells = np.asarray(self._cells.get(key, MISSING))
        if default is None and np.any(cells == MISSING):
            raise KeyError(key)
        values = cells >> 1
        others = np.flatnonzero(np.atleast_1d(cells & 1) == 0)
        if not len(others):
            low, high = (int(values.min(initial=0)), int(values.max(initial=0)))
            if low < 0 or high >= most:
                raise ValueError(f"{what} is out of bounds: {low if low < 0 else high}")
            return np.broadcast_to(values, self._count).astype(np.uint64)
        result = np.broadcast_to(values, self._count).astype(np.uint64)
        fill = self.mapped(key, lambda value: _bounded(value, what, most, default or 0), absent=default or 0)
        return fill if cells.ndim == 0 else np.where((cells & 1) == 0, fill, result)

    def mapped(self, key: str, function: Callable[[Any], int], absent: int) -> npt.NDArray[np.uint64]:
        """Return a column of `function` applied to each value; it is called once for each distinct one.

        The distinct values come in the order in which they appear first; texts and lists in that of the file.
        """
        cells = self._cells.get(key, MISSING)
        if isinstance(cells, int) or not self._count:
            value = absent if cells is MISSING or not self._count else self._value(int(cells), function, absent)
            return np.full(self._count, value, np.uint64)
        if not np.any(cells & 1):
            index = cells >> 1  # of what is missing: the table's last object
            used = np.zeros(len(self._objects) + 1, np.bool_)
            used[np.where(cells == MISSING, len(self._objects), index)] = True
            table = np.full(len(used), absent, np.uint64)
            for i in np.flatnonzero(used[:-1]).tolist():
                table[i] = function(self._objects[i])
            return table[np.where(cells == MISSING, len(self._objects), index)]
        # Find runs of equal values first: columns such as streams have few distinct values.
        heads = np.flatnonzero(np.append(True, cells[1:] != cells[:-1]))
        distinct, first, inverse = np.unique(cells[heads], return_index=True, return_inverse=True)
        values = np.zeros(len(distinct), np.uint64)
        for i in np.argsort(first, kind="stable").tolist():
            values[i] = self._value(int(distinct[i]), function, absent)
        return np.repeat(values[inverse.reshape(-1)], np.diff(np.append(heads, len(cells))))

    def only(self, key: str, function: Callable[[Any], int], absent: int) -> int | None:
        """Return the value of :meth:`mapped` in every row if the file has one value for all; else None."""
        cells = self._cells.get(key, MISSING)
        if not isinstance(cells, int):
            return None
        number: int = self._value(cells, function, absent)
        return number

    def _value(self, cell: int, function: Callable[[Any], Any], absent: int) -> Any:
        if cell == MISSING:
            return absent
        return function(cell >> 1 if cell & 1 else self._objects[cell >> 1])


def _same(value: Any) -> Any:
    return value


def _bounded(value: Any, what: str, most: int, default: int) -> int:
    value = default if value is None else value
    if not 0 <= require(value, int, what) < most:
        raise ValueError(f"{what} is out of bounds: {str(value)[:40]}")
    return int(value)


def _rows_of(entries: Sequence[Any]) -> Rows:
    """Return dicts as the table that :mod:`cudatool.collect.plain_pickle` would make."""
    objects: list[Any] = []
    ids: dict[Any, int] = {}
    columns: dict[str, _Ints] = {}

    def cell(value: Any) -> int:
        if type(value) is int and abs(value) < _NUMBERS:
            return value << 1 | 1
        index = ids.setdefault(value if type(value) is str else id(value), len(objects))
        if index == len(objects):
            objects.append(value)
        return index << 1

    for i, entry in enumerate(entries):
        for key, value in require(entry, dict, "an event").items():
            if key not in columns:
                columns[key] = np.full(len(entries), MISSING, np.int64)
            columns[key][i] = cell(value)
    return Rows(len(entries), 0, dict(columns), objects)
