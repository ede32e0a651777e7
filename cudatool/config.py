"""The environment variables of cudatool, each once, with its default and what it is for; and the checks by default.

docs/command-line.md lists :data:`TABLE`; tests compare the two, and find names that the code has elsewhere. Options of
commands, and settings of a project, are declared where the commands are (``cli/_options.py``).
"""

from __future__ import annotations

import os
from typing import Final

__all__ = [
    "ALLOC_CONF",
    "CACHE_DIR",
    "CACHE_SIZE",
    "CHILD",
    "COMPLETE",
    "DEBUG",
    "DEFAULT_CHECKS",
    "DEVICE",
    "DOCS",
    "KERNEL_CHECKS",
    "QUIET",
    "TABLE",
    "TUNABLEOP",
    "TUNABLEOP_PREFIXES",
    "EnvironmentVariable",
]


class EnvironmentVariable:
    """An environment variable that people set.

    Attributes
    ----------
    name
        With a ``*`` at its end, that of several.
    default
        What its being empty or not set stands for.
    meaning
        In Markdown.
    """

    def __init__(self, name: str, default: str, meaning: str) -> None:
        self.name = name
        self.default = default
        self.meaning = meaning

    def given(self) -> str:
        """Return what it is set to, empty if it is not."""
        return os.environ.get(self.name, "")

    def value(self) -> str:
        """Return what it is set to, else the default."""
        return self.given() or self.default

    def is_on(self) -> bool:
        """Return whether it is set to anything but 0."""
        return self.given() not in ("", "0")


DEVICE: Final = EnvironmentVariable("CUDATOOL_DEVICE", "auto", "the device where no `--device` is given")
ALLOC_CONF: Final = EnvironmentVariable(
    "CUDATOOL_ALLOC_CONF",
    "",
    "settings of the caching allocator, in the syntax of `PYTORCH_ALLOC_CONF` and `PYTORCH_CUDA_ALLOC_CONF`, which are "
    "read where it is not set",
)
CACHE_DIR: Final = EnvironmentVariable(
    "CUDATOOL_CACHE_DIR", "", "where compiled code is kept; else in `XDG_CACHE_HOME`, else in `~/.cache/cudatool`"
)
CACHE_SIZE: Final = EnvironmentVariable("CUDATOOL_CACHE_SIZE", "1GiB", "how much of it is kept; 0 keeps nothing")
TUNABLEOP: Final = EnvironmentVariable(
    "CUDATOOL_TUNABLEOP_*",
    "",
    "the switches of `cudatool.tunable`, such as `CUDATOOL_TUNABLEOP_ENABLED=1`; else PyTorch's, `PYTORCH_TUNABLEOP_*`",
)
DOCS: Final = EnvironmentVariable("CUDATOOL_DOCS", "", "address of the folder `docs`, to which reports link")
DEBUG: Final = EnvironmentVariable("CUDATOOL_DEBUG", "0", "1 shows the traceback of an internal error")

TUNABLEOP_PREFIXES: Final = (TUNABLEOP.name.removesuffix("*"), "PYTORCH_TUNABLEOP_")
"""What the names of these switches begin with, ours first."""

TABLE: Final = (DEVICE, ALLOC_CONF, CACHE_DIR, CACHE_SIZE, TUNABLEOP, DOCS, DEBUG)
"""Those that people set."""

KERNEL_CHECKS: Final = ("memcheck", "initcheck", "racecheck", "synccheck")
"""The checkers that the software device runs kernels under."""
DEFAULT_CHECKS: Final = "race,memcheck,synccheck"
"""What ``sanitize``, ``%%cudatool sanitize`` and the pytest plugin look for unless told otherwise."""

# ---- what our own processes tell each other, and a shell ----

CHILD: Final = "CUDATOOL_CHILD"
"""Of processes that a recorded one starts: the journal's path and identity, and the settings of
:mod:`cudatool.recording.children`, a line each. They are empty if the process is not to be recorded.
``cudatool_child.pth`` looks for it whenever Python starts."""
QUIET: Final = "_CUDATOOL_QUIET"
"""Of processes whose stderr belongs to the program alone: cudatool announces nothing there."""
COMPLETE: Final = "_CUDATOOL_COMPLETE"
"""Set by a shell that asks for completions, as click names it."""
