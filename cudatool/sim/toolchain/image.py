"""What modules are loaded and linked from: PTX text, fatbins, files; and the options given with them (CUjit_option)."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int, c_size_t
from pathlib import Path

from cudatool import ptx
from cudatool.ptx.errors import PtxError
from cudatool.sim import profile
from cudatool.sim.abi import read_name, read_string
from cudatool.sim.results import DriverError, Result

__all__ = ["jit_options", "ptx_at", "read_file", "write_error_log"]

_ELF, _FATBIN, _FATBIN_WRAPPER = b"\x7fELF", (0xBA55ED50).to_bytes(4, "little"), (0x466243B1).to_bytes(4, "little")
_ERROR_LOG_BUFFER, _ERROR_LOG_SIZE = 5, 6


def ptx_at(image: int) -> bytes:
    """Return the PTX that the image at this address is or, as a fatbin, holds."""
    if not image:
        raise DriverError(Result.INVALID_VALUE)
    head = ctypes.string_at(image, 4)
    if head == _FATBIN_WRAPPER:  # what nvcc leaves in a program: magic, version, address of the fatbin
        image = c_size_t.from_address(image + 8).value
        head = ctypes.string_at(image, 4)
    if head not in (_ELF, _FATBIN):
        return read_string(image)
    texts: list[bytes] = []
    if head == _FATBIN:
        header, size = struct.unpack("<HQ", ctypes.string_at(image + 6, 10))
        try:
            texts = ptx.ptx_for(ctypes.string_at(image, header + size), profile.ARCH)
        except PtxError as error:
            raise DriverError(Result.INVALID_IMAGE, str(error)) from error
    if not texts:
        raise DriverError(
            Result.NO_BINARY_FOR_GPU, "this image is GPU machine code; the software device runs PTX (compile to PTX)"
        )
    return ptx.join(texts)


def read_file(name: int) -> bytes:
    """Return the contents of the file whose name is at this address."""
    path = read_name(name)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DriverError(Result.FILE_NOT_FOUND, f"{path}: {error.strerror}") from error


def jit_options(count: int, options: int, values: int) -> dict[int, int]:
    """Return the values of CUjit_options, as numbers or addresses."""
    if not count:
        return {}
    if not options or not values:
        raise DriverError(Result.INVALID_VALUE)
    return dict(zip((c_int * count).from_address(options), (c_size_t * count).from_address(values), strict=True))


def write_error_log(options: dict[int, int], text: str) -> None:
    """Put `text` into the caller's error log, if there is one; what has no room is cut."""
    room = options.get(_ERROR_LOG_SIZE, 0) & 0xFFFFFFFF  # an unsigned int in the space of a pointer
    if room and (buffer := options.get(_ERROR_LOG_BUFFER)):
        encoded = text.encode(errors="backslashreplace")[: room - 1] + b"\0"
        ctypes.memmove(buffer, encoded, len(encoded))
