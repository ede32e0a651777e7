"""Pickles of plain data, read without trusting them.

A pickle is a program for a small stack machine. Three things make a hostile one dangerous, and each is met here:

- It imports and calls something. :class:`_PlainUnpickler` refuses every import, so there is nothing to call.
- It names a huge memo slot or a huge length, for which the machine then reserves memory.
- It builds tuples of tuples of ..., each used twice by the next, and has the last one hashed, which takes forever.

The last two never reach the machine. A regular expression, :func:`_tokens`, walks over the whole program first
(0.3 s for 25 MB) and knows only the opcodes that plain data needs, with lengths and memo slots bounded by the
file's size, and tuples of numbers only.
"""

from __future__ import annotations

import gc
import gzip
import io
import lzma
import pickle
import re
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from cudatool.errors import SnapshotFormatError

__all__ = ["MAX_BYTES", "load"]

MAX_BYTES: Final = 4 << 30
"""A file that unpacks to more than this is refused: some 60 million recorded events."""

_PIECE: Final = 8 << 20
_XZ, _GZIP = b"\xfd7zXZ\x00", b"\x1f\x8b"

_IMPORTS: Final = (pickle.GLOBAL, pickle.INST, pickle.STACK_GLOBAL)

# What unpickling damaged plain data raises.
_DAMAGE: Final = (
    *(pickle.UnpicklingError, EOFError, MemoryError),
    *(AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError),
)

# Opcodes with a byte count in front of their bytes, where the count may be too large for an alternative each in
# the expression: opcode -> (bytes of the count, little-endian).
_COUNTED: Final = {
    pickle.BINUNICODE: 4,
    pickle.BINUNICODE8: 8,
    pickle.BINBYTES: 4,
    pickle.BINBYTES8: 8,
    pickle.LONG4: 4,
}


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
    path = str(path)
    data = _read(path)
    end = _plain_prefix(data)
    if data[end : end + 1] not in (pickle.STOP, *_IMPORTS):
        raise SnapshotFormatError(path, _reason(data, end))
    collecting = gc.isenabled()
    gc.disable()  # a million new dicts that all stay: looking for garbage among them doubles the time
    try:
        # It ends at the first import at the latest, and says what was to be imported.
        return _PlainUnpickler(path, io.BufferedReader(io.BytesIO(data))).load()
    except SnapshotFormatError:
        raise
    except _DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        raise SnapshotFormatError(path, f"damaged pickle ({reason or type(error).__name__})") from error
    finally:
        if collecting:
            gc.enable()


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every import."""

    def __init__(self, path: str, file: io.BufferedReader) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotFormatError(
            self._path,
            f"tries to import {module[:80]}.{name[:80]} when loaded; a memory snapshot holds plain data only",
        )


def _reason(data: bytes, end: int) -> str:
    if not data:
        return "the file is empty"
    if data[:1] not in b"\x80(]})dl" or end < 2:
        return "not a pickle; a snapshot is written by torch.cuda.memory._dump_snapshot(FILE)"
    if not data.endswith(pickle.STOP):
        return f"truncated after {len(data)} bytes"
    opcode = f"pickle opcode {data[end : end + 1]!r} at byte {end}"
    return f"holds something that plain data does not need, or is damaged ({opcode})"


def _read(path: str) -> bytes:
    """Return the file's bytes, unpacked."""
    with open(path, "rb") as file:
        head = file.read(len(_XZ))
        file.seek(0)
        try:
            if head == _XZ:
                with lzma.open(file) as unpacked:
                    data = _read_all(unpacked, path)
            elif head.startswith(_GZIP):
                with gzip.open(file) as unpacked:
                    data = _read_all(unpacked, path)
            else:
                data = _read_all(file, path)
        except (lzma.LZMAError, gzip.BadGzipFile, EOFError, zlib.error, MemoryError) as error:
            # MemoryError: xz may demand a dictionary of up to 4 GiB.
            reason = str(error) or type(error).__name__
            raise SnapshotFormatError(path, f"damaged or truncated compressed file ({reason})") from error
    return data


def _read_all(file: BinaryIO | lzma.LZMAFile | gzip.GzipFile, path: str) -> bytes:
    """Read to the end, in pieces: asked for the most at once, Python would reserve that much first."""
    pieces, size = [], 0
    while piece := file.read(_PIECE):
        size += len(piece)
        if size > MAX_BYTES:
            raise SnapshotFormatError(path, f"holds more than {MAX_BYTES >> 30} GiB")
        pieces.append(piece)
    return b"".join(pieces)


def _plain_prefix(data: bytes) -> int:
    """Return the length of the longest prefix that is safe to run; the next byte is STOP or what made it end."""
    tokens, end = _tokens(len(data)), 0
    while True:
        match = tokens.match(data, end)
        assert match is not None  # the expression matches the empty string
        end = match.end()
        width = _COUNTED.get(data[end : end + 1])
        if width is None:
            return end
        following = end + 1 + width + int.from_bytes(data[end + 1 : end + 1 + width], "little")
        if following > len(data):
            return end
        end = following


def _tokens(size: int) -> re.Pattern[bytes]:
    """Return the expression that matches a run of opcodes that are safe in a file of `size` bytes."""

    def counted(opcode: bytes, width: int, limit: int) -> bytes:
        """`opcode`, a count of `width` bytes and below `limit`, and that many bytes."""
        each = (re.escape(n.to_bytes(width, "little")) + b".{%d}" % n for n in range(limit))
        return re.escape(opcode) + b"(?:" + b"|".join(each) + b")"

    # A memo slot is never more than the number of opcodes. Compared by its highest byte: within a factor of two.
    top = max(size.bit_length() - 1, 0) // 8
    slot = b".{%d}" % top + b"[\x00-" + re.escape(bytes([size >> 8 * top & 0xFF])) + b"]" + b"\x00" * (3 - top)
    digits = b"[0-9]{1,%d}\n" % len(str(size))
    number = b"|".join(
        [
            rb"K.|M..|J....",  # BININT1, BININT2, BININT
            counted(pickle.LONG1, 1, 17),  # to 128 bits
            rb"[IL]-?[0-9]{1,40}L?\n|I0[01]\n|F[-+.0-9a-z]{1,32}\n|G.{8}",
            rb"N|\x88|\x89",  # None, True, False
        ]
    )
    frame = rb"(?:\x95.{8})?"  # may begin anywhere, also between a tuple and what is in it
    number = frame + b"(?:" + number + b")"
    token = b"|".join(
        [
            rb"h.|j....|g" + digits,  # from the memo
            rb"\x94|q.|p" + digits + b"|r" + slot,  # to the memo
            rb"\((?:" + number + b")*+" + frame + b"t",  # a tuple of numbers
            rb"[()}\]sua0eld]",  # MARK, the empty tuple, dicts and lists and what fills them
            # Numbers; and where there are enough of them, TUPLE1, TUPLE2 or TUPLE3 of the last ones.
            number + b"(?:" + frame + rb"\x85|" + number + b"(?:" + frame + rb"[\x85\x86]|(?:" + number + b")++"
            b"(?:" + frame + rb"[\x85-\x87])?)?)?",
            counted(pickle.SHORT_BINUNICODE, 1, 256),
            counted(pickle.BINUNICODE, 4, 256),
            counted(pickle.SHORT_BINBYTES, 1, 256),
            rb"V[^\n]*\n",
            rb"\x80[\x00-\x05]|\x95.{8}",  # PROTO, FRAME
        ]
    )
    return re.compile(b"(?:" + token + b")*+", re.DOTALL)
