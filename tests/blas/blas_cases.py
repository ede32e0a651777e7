"""Matrices for the tests of products."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["exact", "values"]


def values(rng: np.random.Generator, shape: Any, dtype: Any) -> Any:
    """Return normally distributed numbers, complex ones in both parts."""
    found = rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * rng.normal(size=shape)
    return found.astype(dtype)


def exact(array: Any) -> Any:
    """Return host values in a type whose products need no care."""
    return array.astype("c16" if array.dtype.kind == "c" else "f8")
