"""Which files of this process are of installed packages, where their path alone does not tell.

``pip install --target FOLDER`` makes a folder that programs have in ``sys.path``. Each distribution in there has a list
of its files (``NAME.dist-info/RECORD``). What else lies in the folder may be the user's own.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = ["is_part", "package_of"]

_FIRST_PART = re.compile(r'^"?([^/",\n]+)', re.MULTILINE)


@cache
def package_of(file: str) -> str:
    """Return the path of the installed package, or the module, that a file is part of; empty if there is none."""
    for entry in sys.path:
        folder = os.path.join(os.path.abspath(entry), "") if isinstance(entry, str) else ""
        if folder and file.startswith(folder):
            name = file[len(folder) :].partition(os.sep)[0]
            if name in _installed_in(folder):
                return folder + name
    return ""


@cache
def _installed_in(folder: str) -> frozenset[str]:
    """Return the names of the files and folders directly in a folder that distributions list."""
    names: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError, UnicodeDecodeError):
            names.update(_FIRST_PART.findall(record.read_text("utf-8")))
    return frozenset(names)


def is_part(file: str, packages: tuple[str, ...]) -> bool:
    """Return whether a file is, or lies in, one of these packages; paths may be another system's."""
    return file.startswith(packages) and any(
        file == package or (file.startswith(package) and file[len(package)] in "/\\") for package in packages
    )
