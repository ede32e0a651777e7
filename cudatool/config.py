"""Settings that come from the environment and that more than one module reads."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """Return where compiled code is kept between processes.

    ``CUDATOOL_CACHE_DIR``, else ``cudatool`` in ``XDG_CACHE_HOME``, else in ``~/.cache``; if that cannot be written, as
    in a container whose user has no home, a directory for temporary files that this user alone can write.
    """
    chosen = os.environ.get("CUDATOOL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cudatool"
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: nobody knows the user's home
        return _temporary()
    return path if os.access(path, os.W_OK) else _temporary()


def _temporary() -> Path:
    path = Path(tempfile.gettempdir()) / f"cudatool-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700:
        return path
    return _of_this_process()  # somebody else made that one, and code that is run must not come from there


@functools.cache
def _of_this_process() -> Path:
    path = Path(tempfile.mkdtemp(prefix="cudatool-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
