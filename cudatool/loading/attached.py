"""What is attached to a room from above: it uses these, but imports nothing of what makes them.

``cudatool/__init__.py`` names the homes, so that all that reaches up stands in one table.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["HOMES", "attached"]

HOMES: dict[str, str] = {}  # what is attached -> its module and its name there


@cache
def attached(name: str) -> Any:
    """Return what was attached under `name`. Its module is imported at the first use."""
    module, _, member = HOMES[name].rpartition(".")
    return getattr(import_module(module), member)
