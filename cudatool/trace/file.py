"""The layout of a ``.ctrace`` file, shared by the recorder and the reader. Everything is little-endian.

::

    file    = header, chunk, chunk, ...          # the header and each chunk start at a multiple of 64 bytes
    header  = MAGIC, version, length, crc, JSON  # facts about the recording
    chunk   = CHUNK_HEADER, payload, unused      # the next chunk starts after `capacity` bytes of payload
    RECORDS = array of events.RECORD
    TABLES  = ENTRY, data, ENTRY, data, ...      # additions to the tables that records point into
    FACTS   = JSON                               # merged into the header's facts
    END     = number of records                  # the recording was closed

A chunk that is being filled lies in a shared mapping of the file, so that what was written is the kernel's to keep
even if the process is killed. `length` is written last and says how much is valid. A full chunk is sealed: its CRC-32
then covers its header's first 24 bytes and its payload. One RECORDS and one TABLES chunk are open at a time. If the
recorder had to give up, `stopped` of the open RECORDS chunk is 1: there is always room for that, whatever the file
system says.

A table entry names its index, which is at most the table's length: writing one again replaces the last one. So an
exception (a KeyboardInterrupt, say) between an entry and the recorder's own book-keeping does no harm.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
from enum import IntEnum
from struct import Struct
from typing import Any, Final
from zlib import crc32

from cudatool.trace._append import Tail

__all__ = [
    "ALIGNMENT",
    "CHUNK_HEADER",
    "CHUNK_MAGIC",
    "Chunk",
    "DamageError",
    "ENTRY",
    "FILE_HEADER",
    "FRAME",
    "MAGIC",
    "OpenChunk",
    "RECORD_COUNT",
    "SEALED_BYTES",
    "Table",
    "VERSION",
    "aligned",
    "is_being_written",
    "parse_facts",
    "sealed_chunk",
]

MAGIC: Final = b"\x89CTRACE\n"  # a byte that no text has, and a line end that a careless transfer would change
VERSION: Final = 1
ALIGNMENT: Final = 64

FILE_HEADER: Final = Struct("<8sIII")  # magic, version, bytes of JSON, its CRC-32
CHUNK_HEADER: Final = Struct("<4sIQQIII28x")  # magic, Chunk, capacity, length, CRC-32, 1 if sealed, 1 if stopped
CHUNK_MAGIC: Final = b"CHNK"
SEALED_BYTES: Final = 24  # of the chunk header, under its checksum: magic, kind, capacity, length
ENTRY: Final = Struct("<BxxxII")  # Table, index, bytes of data
FRAME: Final = Struct("<III")  # index of the file's name, index of the function's name, line
RECORD_COUNT: Final = Struct("<Q")


_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_libc = ctypes.PyDLL(
    None, use_errno=True
)  # with the interpreter's lock: to get it again may take longer than these calls
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class DamageError(Exception):
    """The file says something that cannot be right."""


class Chunk(IntEnum):
    """What a chunk holds."""

    RECORDS = 1
    TABLES = 2
    FACTS = 3
    END = 4


class Table(IntEnum):
    """What a table entry adds to."""

    NAMES = 1  # UTF-8
    FRAMES = 2  # FRAME
    STACKS = 3  # u32 indices of frames, innermost first
    THREADS = 4  # UTF-8


def aligned(size: int) -> int:
    """Return `size` rounded up to the alignment of chunks."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def sealed_chunk(kind: Chunk, payload: bytes) -> bytes:
    """Return the bytes of a whole, sealed chunk."""
    capacity = aligned(len(payload))
    header = CHUNK_HEADER.pack(CHUNK_MAGIC, kind, capacity, len(payload), 0, 0, 0)
    checksum = crc32(payload, crc32(header[:SEALED_BYTES]))
    header = CHUNK_HEADER.pack(CHUNK_MAGIC, kind, capacity, len(payload), checksum, 1, 0)
    return header + payload.ljust(capacity, b"\0")


def is_being_written(descriptor: int) -> bool:
    """Return whether a recorder has the file open: it holds a lock as long as it does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def parse_facts(payload: bytes) -> dict[str, Any]:
    """Return the facts in the header, or in a chunk of them.

    Raises
    ------
    DamageError
        They are no JSON object.
    """
    try:
        facts = json.loads(payload, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise DamageError("facts are not JSON") from None
    if not isinstance(facts, dict):
        raise DamageError("facts are not a JSON object")
    return facts


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class OpenChunk(Tail):
    """A chunk that is being filled, in a shared mapping of the file.

    Attributes
    ----------
    map, start
        The bytes of the mapping, and where the payload starts in them.

    Raises
    ------
    OSError
        The file system has no room for the chunk. (It is asked now: a write into a mapping without
        room after it would end the process.)
    """

    def __init__(self, descriptor: int, offset: int, kind: Chunk, capacity: int) -> None:
        os.posix_fallocate(descriptor, offset, CHUNK_HEADER.size + capacity)
        before = offset % mmap.ALLOCATIONGRANULARITY  # a mapping starts at a page
        self._mapping = _Mapping(descriptor, offset - before, before + CHUNK_HEADER.size + capacity)
        self.map = self._mapping.bytes
        self.start = before + CHUNK_HEADER.size
        self.offset, self.kind = offset, kind
        self.map[before : self.start] = CHUNK_HEADER.pack(CHUNK_MAGIC, kind, capacity, 0, 0, 0, 0)
        # The header as 8-byte words (1: capacity, 2: length, 3: checksum and seal, 4: stopped), each stored whole or
        # not at all.
        self._words = self.map[before : self.start].cast("Q")
        super().__init__(self.map[before:], CHUNK_HEADER.size)

    @property
    def at(self) -> int:
        """Where the next byte belongs in the file: to write much there costs no page faults, as the mapping does."""
        return self.offset + CHUNK_HEADER.size + self.used

    @property
    def end(self) -> int:
        """Where the next chunk starts in the file."""
        return self.offset + CHUNK_HEADER.size + self.capacity

    def mark_stopped(self) -> None:
        """Note that more would have followed."""
        self._words[4] = 1

    def seal(self, *, shrink: bool = False) -> None:
        """Write the checksum and close the mapping; `shrink` gives unused room back to what follows."""
        if shrink:
            self.capacity = aligned(self.used)
            self._words[1] = self.capacity
        header = CHUNK_HEADER.pack(CHUNK_MAGIC, self.kind, self.capacity, self.used, 0, 0, 0)
        with self.map[self.start : self.start + self.used] as payload:
            checksum = crc32(payload, crc32(header[:SEALED_BYTES]))
        self._words[3] = 1 << 32 | checksum
        self.release()

    def release(self) -> None:
        """Close the mapping without touching the file."""
        self._release()
        self._words.release()
        self._mapping.close()


class _Mapping:
    """A shared mapping of a part of a file.

    :class:`mmap.mmap` copies the descriptor to a low number and closes that at its end: the program may have closed
    it, and opened a file of its own that got the number.

    Raises
    ------
    OSError
        The system cannot map it.
    """

    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._address, self._size = address, size
        self.bytes = memoryview((ctypes.c_char * size).from_address(address)).cast("B")

    def close(self) -> None:
        self.bytes.release()  # who still had it gets an exception, and no fault
        _libc.munmap(self._address, self._size)
