"""Result files: written whole or not at all, and known to be writable before the work that fills them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from cudatool.errors import OutputError

__all__ = ["check_writable", "replacing", "write_whole"]


def check_writable(path: str) -> None:
    """Raise :class:`OutputError` if :func:`replacing` could not write `path`; changes nothing."""
    if os.path.isdir(path):
        raise OutputError(f"cannot write {path}: it is a directory")
    temporary = _temporary(path)
    try:
        if _is_special(path):
            open(path, "ab").close()
        else:
            open(temporary, "wb").close()
    except OSError as error:
        raise OutputError(f"cannot write {path}: {_why(path, error)}") from error
    finally:
        _remove(temporary)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Name the file to write, which takes the place of `path` when the block ends; a device or pipe is written itself.

    Raises
    ------
    OutputError
        It could not be written, and what was there before still is.
    """
    path = os.fspath(path)
    temporary = _temporary(path)
    _remove(temporary)  # of a process that was killed
    try:
        if _is_special(path):
            yield path
        else:
            yield temporary
            os.replace(temporary, os.path.realpath(path))  # through a link to the file that it names
    except OSError as error:
        raise OutputError(f"cannot write {path}: {_why(path, error)}") from error
    finally:
        _remove(temporary)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Replace a file with `text` in UTF-8; see :func:`replacing`."""
    with replacing(path) as name, open(name, "wb") as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))
        if name != os.fspath(path):
            file.flush()
            os.fsync(file.fileno())


def _why(path: str, error: OSError) -> str:
    folder = os.path.dirname(path) or os.curdir
    return str(error.strerror or error) if os.path.isdir(folder) else "its directory does not exist"


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
