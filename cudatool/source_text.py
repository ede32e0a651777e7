"""The text of programs that are in no file: kept under a name, so that messages can quote the lines that they name."""

from __future__ import annotations

import hashlib
import linecache
import os

__all__ = ["keep"]


def keep(name: str, source: str, *, folder: str = "") -> str:
    """Keep the lines of a program for :mod:`linecache`; return the name under which they are found.

    Programs of one name have a name each: a line of another's text would say what is not true. A file `name` in
    `folder`, if that is given, has its own text, and nothing is kept.
    """
    lines = source.splitlines(keepends=True)
    stem, suffix = os.path.splitext(name)
    for one in (name, f"{stem}.{hashlib.sha256(source.encode()).hexdigest()[:8]}{suffix}"):
        path = os.path.join(folder, one)
        if folder and os.path.exists(path):
            return name
        known = linecache.cache.setdefault(path, (len(source), None, lines, path))
        if len(known) == 4 and known[2] == lines:
            break
    linecache.cache[os.path.basename(one)] = known  # as findings name it, if no such file could be
    return one
