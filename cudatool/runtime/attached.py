"""What is attached to the runtime from above: it uses these, but imports nothing of what makes them.

``cudatool/__init__.py`` names the homes. What an array can compute comes from :mod:`cudatool.array_methods`; a copy
that is a kernel, from :mod:`cudatool.ops`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["HOMES", "attached"]

HOMES: dict[str, str] = {}  # what is attached -> the module that has it


@cache
def attached(name: str) -> Any:
    """Return what was attached under `name`. Its module is imported at the first use."""
    return getattr(import_module(HOMES[name]), name)
