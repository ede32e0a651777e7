"""Plain data as a pickle that is written piece by piece, so that it need not be in memory as a whole.

The counterpart of :mod:`cudatool.collect.plain_pickle`. It uses protocol 4, and of that no more than ``pickle.dump``
does for such data: PyTorch's viewer knows few opcodes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["END", "PickleWriter", "START", "integer", "integers"]

START: Final = b"\x80\x04"
END: Final = b"."

_MARK, _MEMOIZE, _LIST, _DICT, _APPENDS, _SETITEMS = b"(", b"\x94", b"]", b"}", b"e", b"u"
_TUPLES: Final = (b")", b"\x85", b"\x86", b"\x87")
_SCALARS: Final = {None: b"N", True: b"\x88", False: b"\x89"}
_BATCH: Final = 1000  # items, as in pickle


class PickleWriter:
    """Spells values, in the order in which they are written. A text, list or dict that comes again is a reference.

    Attributes
    ----------
    known
        How many values can be referred to so far.
    """

    def __init__(self) -> None:
        self.known = 0
        self._texts: dict[str, int] = {}
        self._containers: dict[int, tuple[int, Any]] = {}  # by identity; kept, so that no other gets its id

    def value(self, value: Any) -> bytes:
        """Return the spelling of plain data: numbers, text, bytes, lists, tuples, dicts, None.

        Raises
        ------
        RecursionError
            It has lists inside of lists, and no end.
        TypeError
            It is not plain data.
        """
        if isinstance(value, str):
            return self._text(value)
        if value is None or isinstance(value, bool):
            return _SCALARS[value]
        if isinstance(value, int):
            return integer(value)
        if isinstance(value, float):
            return b"G" + struct.pack(">d", value)
        if isinstance(value, bytes):
            return b"B" + struct.pack("<I", len(value)) + value
        if found := self._containers.get(id(value)):
            return _reference(found[0])
        if isinstance(value, tuple):
            spelled = b"".join(map(self.value, value))
            head, tail = (b"", _TUPLES[len(value)]) if len(value) < len(_TUPLES) else (_MARK, b"t")
            return head + spelled + tail
        if isinstance(value, list):
            starts = range(0, len(value), _BATCH)
            return self.begin_list(value) + b"".join(
                self.appended(map(self.value, value[start : start + _BATCH])) for start in starts
            )
        if isinstance(value, dict):
            self._containers[id(value)] = self.known, value
            return _DICT + self._memoize() + _MARK + self.members(value) + _SETITEMS
        raise TypeError(f"a {type(value).__name__} is not plain data")

    def members(self, members: dict[str, Any]) -> bytes:
        """Return the keys and values of a dict."""
        return b"".join(self.value(key) + self.value(value) for key, value in members.items())

    def begin_list(self, items: list[Any] | None = None) -> bytes:
        """Return the beginning of a list; `items` is what it is known by, if it comes again."""
        items = [] if items is None else items
        self._containers[id(items)] = self.known, items
        return _LIST + self._memoize()

    def appended(self, items: Iterable[bytes]) -> bytes:
        """Return items, already spelled, that are appended to the list that was begun."""
        return _MARK + b"".join(items) + _APPENDS

    def _text(self, text: str) -> bytes:
        found = self._texts.get(text)
        if found is not None:
            return _reference(found)
        self._texts[text] = self.known
        data = text.encode("utf-8", "surrogatepass")
        head = b"\x8c" + bytes((len(data),)) if len(data) < 256 else b"X" + struct.pack("<I", len(data))
        return head + data + self._memoize()

    def _memoize(self) -> bytes:
        self.known += 1
        return _MEMOIZE


def integer(value: int) -> bytes:
    """Return the spelling of a number."""
    if 0 <= value < 1 << 8:
        return b"K" + value.to_bytes(1)
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    size = value.bit_length() // 8 + 1
    head = b"\x8a" + size.to_bytes(1) if size < 256 else b"\x8b" + size.to_bytes(4, "little")
    return head + value.to_bytes(size, "little", signed=True)


def integers(column: npt.NDArray[np.uint64]) -> list[bytes]:
    """Return the spelling of many numbers, all of the same length where they fit 63 bits."""
    most = int(column.max(initial=0))
    if most >= 1 << 63:
        return [integer(value) for value in column.tolist()]
    head, width = (b"J", 4) if most < 1 << 31 else (b"\x8a\x08", 8)
    spelled = np.empty(len(column), [("head", f"V{len(head)}"), ("value", f"<i{width}")])
    spelled["head"], spelled["value"] = np.void(head), column
    result: list[bytes] = spelled.view(f"V{len(head) + width}").tolist()
    return result


def _reference(number: int) -> bytes:
    return b"h" + number.to_bytes(1) if number < 256 else b"j" + number.to_bytes(4, "little")
