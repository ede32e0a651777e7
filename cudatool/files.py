"""Result files: written whole or not at all, and known to be writable before the work that fills them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cudatool.errors import OutputError

__all__ = ["check_writable", "whole_file", "write_whole"]


def check_writable(path: str) -> None:
    """Raise :class:`OutputError` if :func:`whole_file` could not write `path`; changes nothing."""
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


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the ``with`` block a temporary name beside `path`, and rename what it wrote there if it did not raise.

    A file that is there already is replaced; a link leads to the file that it names. A device or pipe keeps its name
    and is just written to.

    Raises
    ------
    OutputError
        It could not be written, and what was there before still is.
    """
    path = os.fspath(path)
    temporary = _temporary(path)
    try:
        if _is_special(path):
            yield Path(path)
        else:
            _remove(temporary)  # of a process that was killed
            yield Path(temporary)
            os.replace(temporary, os.path.realpath(path))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        _remove(temporary)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` in UTF-8 as a :func:`whole_file`."""
    with whole_file(path) as name, name.open("wb") as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))
        if not _is_special(name):
            file.flush()
            os.fsync(file.fileno())


def _remove(path: str) -> None:
    with suppress(OSError):  # it is not there any more, or never was
        os.unlink(path)


def _temporary(path: str) -> str:
    return f"{os.path.realpath(path)}.{os.getpid()}.tmp"


def _is_special(path: str | os.PathLike[str]) -> bool:
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
