"""Settings that come from the environment and that more than one module reads."""

from __future__ import annotations

import os
from pathlib import Path

from cudatool.errors import ConfigError

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """Return where compiled code is kept between processes.

    ``CUDATOOL_CACHE_DIR``, else ``cudatool`` in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    Raises
    ------
    ConfigError
        None of these is set, and the user has no home directory.
    """
    chosen = os.environ.get("CUDATOOL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cudatool"
    except RuntimeError:
        raise ConfigError("the user has no home directory to keep compiled code in; set CUDATOOL_CACHE_DIR") from None
