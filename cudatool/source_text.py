"""Lines of source text, and the text of programs that are in no file: kept, so that messages can quote their lines."""

from __future__ import annotations

import hashlib
import linecache
import os
from typing import NamedTuple

__all__ = ["SourceLine", "keep"]


class SourceLine(NamedTuple):
    """A line of a source file; of a kernel's PTX where `file` is empty."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"PTX line {self.line}"


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
