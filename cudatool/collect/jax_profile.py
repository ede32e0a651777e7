"""Reads the device memory profile that JAX makes: which call sites hold its arrays.

``jax.profiler.device_memory_profile()`` returns a profile of pprof's format, a gzipped protocol buffer
(github.com/google/pprof, proto/profile.proto). Of its messages these fields are needed::

    Profile   2 samples   4 locations   5 functions   6 texts, to which other messages refer by their index
    Sample    1 locations, innermost first   2 values: number, bytes   3 labels: 1 key, 2 text
    Location  1 id   4 lines: 1 function, 2 line
    Function  1 id   2 name   4 file
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass

from cudatool.trace.model import Frame

__all__ = ["Held", "held"]

_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}  # of a wire type: bytes
_Fields = dict[int, list["int | bytes"]]


@dataclass(frozen=True, slots=True)
class Held:
    """What one call site holds.

    Attributes
    ----------
    device
        As JAX writes it, ``"gpu:0"``; empty for what is of no device.
    kind
        ``"buffer"``, or ``"executable"`` for compiled code.
    count, size
        The number of arrays, and their bytes.
    frames
        The stack, innermost frame first.
    """

    device: str
    kind: str
    count: int
    size: int
    frames: tuple[Frame, ...]


def held(profile: bytes) -> list[Held]:
    """Return what a profile says, by call site.

    Raises
    ------
    ValueError, IndexError, KeyError, EOFError, OSError
        It is not a profile of this format.
    """
    fields = _fields(gzip.decompress(profile))
    texts = [text.decode("utf-8", "replace") for text in _messages(fields, 6)]
    functions = {}
    for message in _messages(fields, 5):
        own = _fields(message)
        functions[_number(own, 1)] = texts[_number(own, 2)], texts[_number(own, 4)]
    frames = {}
    for message in _messages(fields, 4):
        own = _fields(message)
        lines = [_fields(line) for line in _messages(own, 4)]
        at = ((*functions[_number(line, 1)], _number(line, 2)) for line in lines)
        frames[_number(own, 1)] = [Frame(file, function, line) for function, file, line in at]
    found = []
    for message in _messages(fields, 2):
        own = _fields(message)
        count, size = _numbers(own, 2)
        labels = {texts[_number(label, 1)]: texts[_number(label, 2)] for label in map(_fields, _messages(own, 3))}
        stack = tuple(frame for place in _numbers(own, 1) for frame in frames[place])
        found.append(Held(labels.get("device", ""), labels.get("kind", ""), count, size, stack))
    return found


def _fields(message: bytes) -> _Fields:
    """Return the values of each field of a message, by its number."""
    found: _Fields = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value: int | bytes
        if key & 7 == _VARINT:
            value, at = _varint(message, at)
        else:
            length, at = _varint(message, at) if key & 7 == _BYTES else (_FIXED[key & 7], at)
            value, at = message[at : at + length], at + length
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at an offset, and where it ends."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
        if message[at - 1] < 0x80:
            return value, at


def _messages(fields: _Fields, field: int) -> Iterator[bytes]:
    for value in fields.get(field, ()):
        if not isinstance(value, bytes):
            raise ValueError("a number where a message should be")
        yield value


def _numbers(fields: _Fields, field: int) -> list[int]:
    """Return the numbers of a field, which may be packed into one value."""
    found = []
    for value in fields.get(field, ()):
        if isinstance(value, int):
            found.append(value)
        else:
            at = 0
            while at < len(value):
                number, at = _varint(value, at)
                found.append(number)
    return found


def _number(fields: _Fields, field: int) -> int:
    """Return the number of a field; 0, which is not written, if it is missing."""
    return next(iter(_numbers(fields, field)), 0)
