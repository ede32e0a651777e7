"""What the workers of one run (pytest-xdist) leave to each other, in the run's temporary folder."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["folder", "found_or_made"]

T = TypeVar("T")

folder: Path | None = None  # None where there is one process alone


def found_or_made(name: str, make: Callable[[], T]) -> T:
    """Return what another worker has left under `name`; else what `make` returns, which is left there."""
    if folder is None:
        return make()
    path = folder / f"{name}.pickle"
    if path.exists():
        found: T = pickle.loads(path.read_bytes())
        return found
    made, unfinished = make(), path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(pickle.dumps(made))
    unfinished.rename(path)
    return made
