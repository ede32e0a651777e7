"""Where things happened: source lines, and paths as a report writes them."""

from __future__ import annotations

import errno
import functools
import io
import linecache
import math
import os
import stat
import tokenize
from datetime import datetime
from pathlib import PurePath
from typing import Final

from cudatool.limits import QUOTED_SOURCE
from cudatool.trace.model import Trace

__all__ = [
    "NOT_PYTHON",
    "project_root",
    "recorded_at",
    "relative_path",
    "shown_path",
    "source_line",
    "source_lines",
]

NOT_PYTHON: Final = (".cu", ".cuh", ".ptx", ".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".inl")
"""Endings of sources in CUDA, C++ and PTX, whose comments begin with ``//``."""
_SOURCES: Final = (".py", ".pyw", ".pyx", *NOT_PYTHON)


def source_lines(file: str, *, recorded_at: float = math.inf) -> list[str]:
    """Return the lines of a source file, or of a kernel's source that this process compiled from a string.

    The path comes from a trace, which a stranger may have written, and the report may be sent to anyone. So there are
    none but of a regular file of at most :data:`~cudatool.limits.QUOTED_SOURCE` bytes that is Python, C++, CUDA or PTX
    by its name (with all links followed), or a Python script by its first line; and none of a file that has changed
    since the recording.

    Parameters
    ----------
    recorded_at
        When the trace was recorded (:func:`recorded_at`).
    """
    kept = linecache.cache.get(file)
    if kept is not None and len(kept) == 4 and kept[1] is None:  # from a string: there is no time of change
        return kept[2]
    try:
        found = os.stat(file)
        if found.st_mtime > recorded_at:
            return []
        return _lines(file, found.st_mtime_ns)
    except (OSError, ValueError):
        return []


@functools.lru_cache(maxsize=32)
def _lines(file: str, changed_ns: int) -> list[str]:
    """Return the lines of a source file; `changed_ns` is for the cache alone."""
    with open(file, "rb", opener=_open_source) as source:
        data = source.read(QUOTED_SOURCE)
        name = os.readlink(f"/proc/self/fd/{source.fileno()}")
    first = data.split(b"\n", 1)[0]
    if not name.endswith(_SOURCES) and not (first.startswith(b"#!") and b"python" in first):
        return []
    encoding = "utf-8"
    if not name.endswith(NOT_PYTHON):
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        except SyntaxError:  # an encoding that does not exist
            return []
    return io.TextIOWrapper(io.BytesIO(data), encoding, errors="replace").readlines()


def _open_source(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe does not block
    found = os.fstat(descriptor)
    # What /proc has says that it is a regular file of no bytes, and may be endless.
    if not stat.S_ISREG(found.st_mode) or not 0 < found.st_size <= QUOTED_SOURCE:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a source file", path)
    return descriptor


def source_line(file: str, line: int, *, recorded_at: float = math.inf) -> str:
    """Return one line of a source without the blanks around it, empty if it cannot be read: :func:`source_lines`."""
    return "".join(source_lines(file, recorded_at=recorded_at)[max(line, 1) - 1 :][:1]).strip()


def recorded_at(trace: Trace) -> float:
    """Return when the recording ended, in seconds since the epoch; 0 where that is not known."""
    try:
        if "start_time" in trace.header:
            return datetime.fromisoformat(trace.header["start_time"]).timestamp() + trace.duration / 1e9
        return os.stat(trace.source).st_mtime
    except (OSError, ValueError):
        return 0


def shown_path(file: str, root: str) -> str:
    """Return a path as a report writes it: relative to `root` if it lies there."""
    return relative_path(file, root) or file


def project_root() -> str:
    """Return the directory that paths in a report are relative to.

    The checkout of a CI system (``GITHUB_WORKSPACE``, ``CI_PROJECT_DIR``) if the current directory lies in it, else
    the current directory.
    """
    here = os.path.realpath(os.getcwd())
    for variable in ("GITHUB_WORKSPACE", "CI_PROJECT_DIR"):
        root = os.path.realpath(os.environ.get(variable) or os.sep)
        if root != os.sep and os.path.commonpath([root, here]) == root:
            return root
    return here


def relative_path(file: str, root: str) -> str | None:
    """Return `file` relative to `root`, with slashes; None if it lies elsewhere, or can be no file (``"<string>"``)."""
    if not file or file.startswith("<") or "\0" in file:
        return None
    relative = os.path.relpath(os.path.join(root, file), root)
    if relative.split(os.sep)[0] == os.pardir:
        relative = os.path.relpath(os.path.realpath(os.path.join(root, file)), root)
    return None if relative.split(os.sep)[0] == os.pardir else PurePath(relative).as_posix()
