"""What the stand-in for NVRTC (``_libnvrtc.c``) has done by Python.

For the checkers, findings name lines of a kernel's source. Programs are often strings, compiled without line
information. While kernels are checked they get it, and the text of their lines is kept where
:func:`cudatool.sanitize.places.source_lines` finds it.

cuda.core asks for NVRTC's version to see whether it has compiled a program before. It is kept for the file that NVRTC
is: to open that takes 10 ms.
"""

from __future__ import annotations

import ctypes
import hashlib
import os

from cudatool import source_text
from cudatool.code_cache import CodeCache

__all__ = ["install", "watch"]

_UNNAMED = "default_program"  # what NVRTC calls a program without a name
_Version = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_size_t, ctypes.c_size_t)
_Created = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_library: ctypes.CDLL | None = None


def install(library: ctypes.CDLL, real: str) -> None:
    """Use this stand-in for the library `real` from now on."""
    global _library
    library.cudatool_nvrtc_watch.argtypes = [ctypes.c_void_p]
    library.cudatool_nvrtc_watch.restype = None
    library.cudatool_nvrtc_version.argtypes = [ctypes.c_void_p, ctypes.c_void_p]

    def version(major: int, minor: int) -> int:
        try:
            return _version(library, real, major, minor)
        except Exception:  # it must not cross into C: the file is gone
            return int(library.cudatool_nvrtc_version(major, minor))

    callback = _Version(version)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))  # C may call it until the process ends
    library.cudatool_nvrtc_know(callback)
    _library = library


def _version(library: ctypes.CDLL, real: str, major: int, minor: int) -> int:
    """Do as ``nvrtcVersion`` of the library `real`, for two addresses."""
    file, kept = os.stat(real), CodeCache("nvrtc")
    identity = f"version {real} {file.st_dev} {file.st_ino} {file.st_size} {file.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()
    found = kept.get(key) if major and minor else None
    if found is None:
        status = int(library.cudatool_nvrtc_version(major, minor))
        if not status and major and minor:
            kept.put(key, ctypes.string_at(major, 4) + ctypes.string_at(minor, 4))
        return status
    ctypes.memmove(major, found, 4)
    ctypes.memmove(minor, found[4:], 4)
    return 0


def watch(on: bool) -> None:
    """Compile with line information and keep sources from now on, or no more."""
    if _library is not None:
        _library.cudatool_nvrtc_watch(ctypes.cast(_callback, ctypes.c_void_p) if on else None)


_names: dict[str, bytes] = {}  # what the library was given


def _created(name: bytes, source: bytes) -> int | None:
    try:
        given = name.decode()
        # NVRTC names a file by the directory in which the program runs.
        one = source_text.keep(given or _UNNAMED, source.decode(), folder=os.getcwd())
    except (OSError, UnicodeDecodeError):  # findings name the line without its text
        return None
    if one == (given or _UNNAMED):
        return None
    kept = _names.setdefault(one, one.encode())
    return ctypes.cast(ctypes.c_char_p(kept), ctypes.c_void_p).value


_callback = _Created(_created)
