"""Result files: written whole or not at all, and known to be writable before the work that fills them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cudatool.errors import OutputError

__all__ = ["check_writable", "write_whole"]


def check_writable(path: str) -> None:
    """Raise :class:`OutputError` if :func:`write_whole` could not write to `path`; changes nothing."""
    if os.path.isdir(path):
        raise OutputError(f"cannot write {path}: it is a directory")
    temporary = _temporary(path)
    try:
        if _is_special(path):
            open(path, "ab").close()
        else:
            open(temporary, "wb").close()
    except OSError as error:
        folder = os.path.dirname(path) or os.curdir
        why = error.strerror if os.path.isdir(folder) else "its directory does not exist"
        raise OutputError(f"cannot write {path}: {why}") from error
    finally:
        _remove(temporary)


def write_whole(path: str, text: str) -> None:
    """Replace a file with `text` in UTF-8, under a temporary name first; a device or pipe is just written to.

    Raises
    ------
    OutputError
        It could not be written, and what was there before still is.
    """
    data = text.encode("utf-8", errors="backslashreplace")
    temporary = _temporary(path)
    try:
        if _is_special(path):
            Path(path).write_bytes(data)
        else:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, os.path.realpath(path))  # through a link to the file that it names
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        _remove(temporary)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # it was never there


def _temporary(path: str) -> str:
    return f"{os.path.realpath(path)}.{os.getpid()}.tmp"


def _is_special(path: str) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
