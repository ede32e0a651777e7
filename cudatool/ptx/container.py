"""PTX inside the containers that toolchains put it in: fatbins, object files and archives of them.

A fatbin holds the same device code several times: as PTX, as machine code of one architecture, as LTO-IR. An object
file made by nvcc carries fatbins in its section ``.nv_fatbin`` or ``__nv_relfatbin``, an archive holds object files.
The layout of a fatbin is not documented; what is read here was found by looking at what nvFatbin writes, and the tests
compare with it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from cudatool.limits import PTX_BYTES, PTX_FEW, PTX_RATIO
from cudatool.ptx.errors import PtxError

__all__ = ["Data", "DeviceCode", "device_code", "is_container", "ptx_for", "register_counts"]

_FATBIN = 0xBA55ED50
_KINDS = {1: "ptx", 2: "machine code", 8: "ltoir"}
_LZ4, _ZSTD = 0x2000, 0x8000
_ELF, _ARCHIVE = b"\x7fELF", b"!<arch>\n"
_EM_CUDA = 190
_REGISTER_COUNT = 0x2F
_FATBIN_HEADER, _FORM_HEADER = 16, 64  # bytes, at least
_SECTION_HEADER = 64  # bytes
_ZEROS = bytes(1 << 16)


Data = bytes | memoryview
"""A container's bytes: a library of gigabytes need not be read into memory."""


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """One form of one unit of device code.

    Attributes
    ----------
    unit
        Which of the units in the container; the forms of one unit are alternatives.
    kind
        ``"ptx"``, ``"machine code"`` or ``"ltoir"``.
    arch
        Compute capability it was made for, times ten; 0 where the container does not say.
    """

    unit: int
    kind: str
    arch: int
    _payload: Data
    _size: int
    _compression: int

    def text(self) -> bytes:
        """Return the PTX, decompressed.

        Raises
        ------
        PtxError
            It cannot be decompressed, or this is not PTX.
        """
        if self.kind != "ptx":
            raise PtxError(f"{self.kind} has no text")
        data = bytes(self._payload)
        most = min(PTX_FEW + PTX_RATIO * len(data), PTX_BYTES) if self._compression else PTX_BYTES
        if max(self._size, len(data)) > most:
            raise PtxError(f"PTX of {self._size} bytes, compressed to {len(data)}, in a fatbin")
        if self._compression == _LZ4:
            data = _lz4(data, self._size)
        elif self._compression == _ZSTD:
            data = _zstd(data, self._size)
        return data.rstrip(b"\0")


def is_container(data: Data) -> bool:
    """Return whether `data` begins like a fatbin, an object file or an archive."""
    return data[:4] in (_ELF, _FATBIN.to_bytes(4, "little")) or data[:8] == _ARCHIVE


def device_code(data: Data) -> list[DeviceCode]:
    """Return all device code in a container; PTX text counts as one.

    Raises
    ------
    PtxError
        It is damaged.
    """
    if not is_container(data):
        return [DeviceCode(0, "ptx", 0, data, len(data), 0)]
    try:
        return [DeviceCode(unit, *form) for unit, forms in enumerate(_units(data)) for form in forms]
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise PtxError(f"a damaged container of device code: {error}") from None


def ptx_for(data: Data, arch: int) -> list[bytes]:
    """Return the PTX of each unit in a container, in the newest form not newer than `arch`.

    Units without PTX for `arch` are left out.

    Raises
    ------
    PtxError
        The container is damaged.
    """
    best: dict[int, DeviceCode] = {}
    for code in device_code(data):
        if code.kind == "ptx" and code.arch <= arch and (code.unit not in best or best[code.unit].arch < code.arch):
            best[code.unit] = code
    texts, room = [], PTX_FEW + PTX_RATIO * len(data)
    for code in best.values():
        texts.append(code.text())
        room -= len(texts[-1])
        if room < 0:
            raise PtxError(f"PTX of more than {PTX_RATIO} times the {len(data)} bytes that hold it")
    return texts


_Form = tuple[str, int, Data, int, int]


def _units(data: Data) -> Iterator[list[_Form]]:
    """Yield the forms of each unit of device code."""
    if data[:8] == _ARCHIVE:
        for member in _members(data):
            if is_container(member) and member[:8] != _ARCHIVE:
                yield from _units(member)
    elif data[:4] == _ELF:
        if struct.unpack_from("<H", data, 18)[0] == _EM_CUDA:
            yield [("machine code", 0, data, len(data), 0)]
        else:
            for name in (b".nv_fatbin", b"__nv_relfatbin"):
                yield from _fatbins(_section(data, name))
    else:
        yield from _fatbins(data)


def _fatbins(data: Data) -> Iterator[list[_Form]]:
    """Yield the forms in each of the fatbins that follow each other, zeros between them."""
    at = 0
    while at + _FATBIN_HEADER <= len(data):
        magic, _version, header, size = struct.unpack_from("<IHHQ", data, at)
        if magic != _FATBIN:
            at += 8
            while data[at : at + len(_ZEROS)] == _ZEROS:  # a hole in a sparse file takes no room
                at += len(_ZEROS)
            continue
        begin, end = at + header, at + header + size
        if header < _FATBIN_HEADER:
            raise ValueError(f"a fatbin whose header has {header} bytes")
        if end > len(data):
            raise ValueError(f"a fatbin of {header + size} bytes, of which there are {len(data) - at}")
        yield list(_forms(data[begin:end]))
        at = end


def _forms(data: Data) -> Iterator[_Form]:
    at = 0
    while at + _FORM_HEADER <= len(data):
        kind, _version, header, size = struct.unpack_from("<HHIQ", data, at)
        if header < _FORM_HEADER:
            raise ValueError(f"an entry of a fatbin whose header has {header} bytes")
        (compressed,) = struct.unpack_from("<I", data, at + 16)
        (arch,) = struct.unpack_from("<I", data, at + 28)
        (flags,) = struct.unpack_from("<Q", data, at + 40)
        (original,) = struct.unpack_from("<Q", data, at + 56)
        compression = flags & (_LZ4 | _ZSTD)
        if compression and compressed > size:  # forms that share bytes could be more than the file
            raise ValueError(f"{compressed} compressed bytes in {size}")
        payload = data[at + header : at + header + (compressed if compression else size)]
        yield _KINDS.get(kind, "unknown"), arch, payload, original if compression else size, compression
        at += header + size


def register_counts(cubin: bytes) -> dict[str, int]:
    """Return the registers that a thread of each function takes, from machine code.

    Raises
    ------
    PtxError
        It is damaged.
    """
    found = {}
    try:
        info, symbols, names = (bytes(_section(cubin, name)) for name in (b".nv.info", b".symtab", b".strtab"))
        at = 0
        while at + 4 <= len(info):  # format, attribute, then a value of 2 bytes or, in format 4, its size
            form, attribute, size = struct.unpack_from("<BBH", info, at)
            if (form, attribute, size) == (4, _REGISTER_COUNT, 8):
                symbol, count = struct.unpack_from("<II", info, at + 4)
                (start,) = struct.unpack_from("<I", symbols, symbol * 24)
                found[names[start : names.index(b"\0", start)].decode()] = count
            at += 4 + (size if form == 4 else 0)
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise PtxError(f"damaged machine code: {error}") from None
    return found


def _section(data: Data, name: bytes) -> Data:
    """Return a section of a 64-bit ELF file, empty if there is none."""
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names = struct.unpack_from("<HHH", data, 58)
    if count and entry_size < _SECTION_HEADER:
        raise ValueError(f"section headers of {entry_size} bytes")
    headers = [struct.unpack_from("<IIQQQQ", data, table + index * entry_size) for index in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        if data[start : start + len(name) + 1] == name + b"\0":
            return data[header[4] : header[4] + header[5]]
    return b""


def _members(data: Data) -> Iterator[Data]:
    """Yield the files in an ``ar`` archive."""
    at = 8
    while at + 60 <= len(data):
        size = int(bytes(data[at + 48 : at + 58]))
        if size < 0:
            raise ValueError(f"a file of {size} bytes in an archive")
        yield data[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def _lz4(data: bytes, size: int) -> bytes:
    """Decompress an LZ4 block (its format is on lz4.org) of `size` bytes."""
    out = bytearray()
    at = 0

    def length(at: int, nibble: int) -> tuple[int, int]:
        if nibble == 15:
            while data[at] == 255:
                nibble += 255
                at += 1
            nibble += data[at]
            at += 1
        return at, nibble

    try:
        while len(out) < size:
            token = data[at]
            at, literals = length(at + 1, token >> 4)
            out += data[at : at + literals]
            at += literals
            if len(out) >= size:
                break
            distance = data[at] | data[at + 1] << 8
            at, matched = length(at + 2, token & 15)
            start = len(out) - distance
            if not distance or start < 0:
                raise PtxError("damaged LZ4 data in a fatbin")
            wanted = min(matched + 4, size - len(out))
            repeated = bytes(out[start : start + wanted])
            while len(repeated) < wanted:  # it reads what it has just written
                repeated += repeated
            out += repeated[:wanted]
    except IndexError:
        raise PtxError("damaged LZ4 data in a fatbin") from None
    return bytes(out[:size])


def _zstd(data: bytes, size: int) -> bytes:
    library = _libzstd()
    out = ctypes.create_string_buffer(size)
    written = library.ZSTD_decompress(out, size, data, len(data))
    if written != size:
        raise PtxError("damaged Zstandard data in a fatbin")
    return out.raw


@cache
def _libzstd() -> Any:
    """Return the system's Zstandard library; Python has none before 3.14."""
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        raise PtxError("the PTX in this fatbin is compressed with Zstandard, which needs libzstd.so.1") from None
    library.ZSTD_decompress.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    library.ZSTD_decompress.restype = ctypes.c_size_t
    return library
