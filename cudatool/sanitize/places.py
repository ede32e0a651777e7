"""Where things happened: the user's own frames of a stack, and paths as a report writes them."""

from __future__ import annotations

import linecache
import os
import re
from pathlib import PurePath

from cudatool.trace.model import Frame

__all__ = [
    "project_root",
    "relative_path",
    "shown_path",
    "source_line",
    "source_lines",
    "source_place",
    "user_frame",
    "user_frames",
]

# What `pip` or the interpreter's installation brought, judged by its path alone: a trace may be of another machine.
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib(64)?[/\\]python\d\.\d+[/\\]|^<frozen ")


def user_frames(stack: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames that are neither of the standard library nor of installed packages; all if none is left."""
    return tuple(frame for frame in stack if not _INSTALLED.search(frame.file)) or stack


def user_frame(stack: tuple[Frame, ...]) -> Frame | None:
    """Return the innermost frame of the user's own code, None for an empty stack."""
    return user_frames(stack)[0] if stack else None


def source_lines(file: str) -> list[str]:
    """Return the lines of a source file, or of a kernel's source that this process compiled from a string.

    There are none for what is no regular file here: a path comes from a trace.
    """
    return linecache.getlines(file) if file in linecache.cache or os.path.isfile(file) else []


def source_line(file: str, line: int) -> str:
    """Return one line of a source without the blanks around it, empty if it cannot be read."""
    return "".join(source_lines(file)[max(line, 1) - 1 :][:1]).strip()


def source_place(source: str) -> tuple[str, int] | None:
    """Return file and line of ``"kernels.cu:12"``, None for what is not of this form."""
    file, _, line = source.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else None


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
