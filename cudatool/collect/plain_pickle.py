"""Reads untrusted pickles of plain data.

A pickle is a program for a small stack machine. A hostile one can do harm in three ways. The machine in
:file:`_unpickle.c`, which replaces Python's, prevents each:

- It imports and calls something. The machine has no opcode for that.
- It names a huge memo slot or a huge length. The machine reserves memory only for bytes that it has read.
- It builds tuples of tuples of ..., each used twice by the next, and makes Python hash the last one, which takes
  forever. The machine makes tuples of numbers only, and dicts whose keys are text and integers.

It reads a file piece by piece, unpacked as it goes, and stores millions of dicts with the same keys as columns.
"""

from __future__ import annotations

import gc
import gzip
import lzma
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from cudatool.collect._unpickle import Unpickler
from cudatool.errors import SnapshotFormatError
from cudatool.files import open_input
from cudatool.limits import OBJECT_MEMORY, PICKLE_BYTES, PICKLE_FEW, PICKLE_MEMORY, PICKLE_RATIO, PICKLE_TEXT
from cudatool.progress import step
from cudatool.text import printable

if TYPE_CHECKING:
    from cudatool.collect._unpickle import Words

__all__ = ["MISSING", "Rows", "is_packed", "load", "load_rows", "starts_as_pickle"]


MISSING: Final = -(1 << 63)
"""In a column: the row does not have the key. A number is ``number << 1 | 1`` there, an object ``its index << 1``."""


_PIECE: Final = 1 << 20
_XZ, _GZIP = b"\xfd7zXZ\x00", b"\x1f\x8b"

# What unpacking a damaged file raises; xz may demand a dictionary of up to 4 GiB, which is a MemoryError.
_DAMAGED_PACKING: Final = (lzma.LZMAError, gzip.BadGzipFile, EOFError, zlib.error, MemoryError)


@dataclass
class Rows:
    """Dicts with a certain key, as columns.

    Attributes
    ----------
    count
        Number of rows.
    size
        Bytes of the pickle, unpacked.
    columns
        For each key that a row has: one word for each row, or one for all of them; see :data:`MISSING`.
    objects
        What the words of columns refer to. Equal texts, and lists of the same dicts, are there once.
    """

    count: int
    size: int
    columns: dict[str, npt.NDArray[np.int64] | int]
    objects: list[Any]


def load(path: str | Path) -> Any:
    """Return the plain data in a pickle of any protocol, also one compressed with xz or gzip.

    Raises
    ------
    SnapshotFormatError
        The file is not a pickle, is damaged or too large, or holds anything but dicts, lists, strings, bytes,
        numbers and tuples of numbers. The message names what it tried to import.
    OSError
        The file cannot be read.
    """
    value, _ = load_rows(path, None)
    return value


def load_rows(path: str | Path, row_key: str | None) -> tuple[Any, Rows]:
    """Return the plain data in a pickle; dicts with the key `row_key` as rows, and lists of them as ranges of rows.

    A dict to which pickle added its keys one by one (protocol 0 does) is a row if `row_key` is the first of them.

    Raises
    ------
    SnapshotFormatError, OSError
        As :func:`load` does.
    """
    path = str(path)
    machine = Unpickler(row_key)
    collecting = gc.isenabled()
    gc.disable()  # a million new objects, none of them garbage: collecting would double the time
    try:
        size = _feed(machine, path, PICKLE_MEMORY if row_key else OBJECT_MEMORY)
        value = machine.value()
    except ImportError as error:
        reason = f"tries to import {printable(str(error))} when loaded; a memory snapshot holds plain data only"
        raise SnapshotFormatError(path, reason) from error
    except (ValueError, OverflowError, MemoryError) as error:
        reason = printable(" ".join(str(error).split())[:200])
        raise SnapshotFormatError(path, f"damaged pickle ({reason or type(error).__name__})") from error
    finally:
        if collecting:
            gc.enable()
    columns = {key: _column(words) for key, words in machine.take_columns().items()}
    return value, Rows(machine.rows, size, columns, machine.objects)


def _column(words: Words | int) -> npt.NDArray[np.int64] | int:
    return words if isinstance(words, int) else np.frombuffer(memoryview(words), np.int64)


def _feed(machine: Unpickler, path: str, most_memory: int) -> int:
    """Run the whole pickle and return how many bytes it has, unpacked."""
    with open_input(path) as file, step(f"reading {path}", os.fstat(file.fileno()).st_size) as shown:
        packed = os.fstat(file.fileno()).st_size
        most, memory = PICKLE_FEW + PICKLE_RATIO * packed, PICKLE_FEW + most_memory * packed
        unpacked = _unpacked(file)
        rest, size, head = b"", 0, b""
        while not machine.done and (piece := _read(unpacked, path)):
            head = head or piece[:1]
            size += len(piece)
            if size > min(most, PICKLE_BYTES):
                raise SnapshotFormatError(
                    path, f"holds more than {min(most, PICKLE_BYTES) >> 20} MiB in {packed} bytes"
                )
            rest += piece
            try:
                rest = rest[machine.feed(rest, memory) :]
            except ValueError as error:
                if head not in b"\x80(]})dl":
                    raise SnapshotFormatError(path, _NOT_A_PICKLE) from error
                raise
            if len(rest) > PICKLE_TEXT:
                raise SnapshotFormatError(path, f"holds a text or number of more than {PICKLE_TEXT >> 20} MiB")
            shown.update(file.tell())
    if not size:
        raise SnapshotFormatError(path, "the file is empty")
    if not machine.done:
        raise SnapshotFormatError(path, f"truncated after {size} bytes" if head in b"\x80(]})dl" else _NOT_A_PICKLE)
    return size


_NOT_A_PICKLE: Final = "not a pickle; a snapshot is written by torch.cuda.memory._dump_snapshot(FILE)"


def starts_as_pickle(path: str | Path) -> bool:
    """Say whether a file looks like a pickle, also one compressed with xz or gzip, by its first bytes."""
    with open_input(path) as file:
        try:
            head = _unpacked(file).read(2)
        except _DAMAGED_PACKING:
            return True  # probably; reading it names the damage
    return head.startswith((b"\x80", b"(d", b"}", b"]", b"(l"))


def is_packed(path: str | Path) -> bool:
    """Say whether a file is compressed: with xz or gzip, which are read, or with zstd or bzip2, which are not."""
    with open_input(path) as file:
        return file.read(len(_XZ)).startswith((_XZ, _GZIP, b"\x28\xb5\x2f\xfd", b"BZh"))


def _unpacked(file: BinaryIO) -> BinaryIO | lzma.LZMAFile | gzip.GzipFile:
    head = file.read(len(_XZ))
    file.seek(0)
    if head == _XZ:
        return lzma.open(file)
    return gzip.open(file) if head.startswith(_GZIP) else file


def _read(file: BinaryIO | lzma.LZMAFile | gzip.GzipFile, path: str) -> bytes:
    """Return the next piece of the unpacked file: never all at once, since Python would reserve the maximum first."""
    try:
        return file.read(_PIECE)
    except _DAMAGED_PACKING as error:
        reason = str(error) or type(error).__name__
        raise SnapshotFormatError(path, f"damaged or truncated compressed file ({reason})") from error
