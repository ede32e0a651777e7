"""What the stand-in for NVRTC (``_libnvrtc.c``) does for the checkers: findings name lines of a kernel's source.

Programs are often strings, compiled without line information. While kernels are checked they get it, and the text of
their lines is kept where :func:`cudatool.sanitize.places.source_lines` finds it.
"""

from __future__ import annotations

import ctypes
import hashlib
import linecache
import os

__all__ = ["install", "keep_source", "watch"]

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


def keep_source(name: str, source: str) -> str:
    """Keep the lines of a program; return the name to compile it under.

    That is another one if a program of the same name was different: a line of the other's text would say what is not
    true.
    """
    lines = source.splitlines(keepends=True)
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    first = name or _UNNAMED
    stem, suffix = os.path.splitext(first)
    for one in (first, f"{stem}.{digest}{suffix}"):
        path = os.path.join(os.getcwd(), one)  # as NVRTC names the file
        if os.path.exists(path):  # whose text is there
            return name
        known = linecache.cache.setdefault(path, (len(source), None, lines, path))
        if len(known) == 4 and known[2] == lines:
            break
    linecache.cache[os.path.basename(one)] = known  # as findings name it, if no such file could be
    return name if one == first else one


_names: dict[str, bytes] = {}  # what the library was given


def _created(name: bytes, source: bytes) -> int | None:
    try:
        given = name.decode()
        one = keep_source(given, source.decode())
    except (OSError, UnicodeDecodeError):  # findings name the line without its text
        return None
    if one == given:
        return None
    kept = _names.setdefault(one, one.encode())
    return ctypes.cast(ctypes.c_char_p(kept), ctypes.c_void_p).value


_callback = _Created(_created)
