"""What the stand-in for NVRTC (``_libnvrtc.c``) does for the checkers: findings name lines of a kernel's source.

Programs are often strings, compiled without line information. While kernels are checked they get it, and the text of
their lines is kept where :func:`cudatool.sanitize.places.source_lines` finds it.
"""

from __future__ import annotations

import ctypes
import os

from cudatool import source_text

__all__ = ["install", "watch"]

_UNNAMED = "default_program"  # what NVRTC calls a program without a name
_Created = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_library: ctypes.CDLL | None = None


def install(library: ctypes.CDLL) -> None:
    """Use this stand-in from now on."""
    global _library
    library.cudatool_nvrtc_watch.argtypes = [ctypes.c_void_p]
    library.cudatool_nvrtc_watch.restype = None
    _library = library


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
