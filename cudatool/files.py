"""Result files: written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cudatool.errors import OutputError

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give the ``with`` block a temporary name beside `path`, and rename what it wrote there if it did not raise.

    A file that is there already is replaced; a link leads to the file that it names.

    Raises
    ------
    OutputError
        It could not be written, and what was there before still is.
    """
    target = os.path.realpath(path)
    temporary = Path(f"{target}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"cannot write {os.fspath(path)}: {error.strerror}") from error
    finally:
        with suppress(OSError):  # it is not there any more, or never was
            temporary.unlink()
