"""Shells that a program starts for one Python command: ``subprocess.run("python work.py", shell=True)``."""

from __future__ import annotations

import os
import sys
from typing import Final

__all__ = ["shell_of_this_alone"]

_SHELLS: Final = ("sh", "bash", "dash")


def shell_of_this_alone() -> int:
    """Return the id of the shell that started this process if it does nothing else, 0 if there is none.

    Its command has the words of this process, and no others: what a second command, an expansion or a redirection would
    add is a word more, or another word.
    """
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return 0
    if len(words) != 3 or os.path.basename(words[0]) not in _SHELLS or words[1] != "-c":
        return 0
    import shlex  # where there is a shell: it takes longer to import than the rest of this package

    try:
        command = shlex.split(words[2])
    except ValueError:
        return 0
    own = sys.orig_argv
    of_script = [os.path.basename(own[1]), *own[2:]] if len(own) > 1 else []  # by its first line: pytest tests
    return parent if command in (own, of_script, own[1:]) else 0
