"""What a run takes of data that are interchangeable, as the seeds of random programs are: none stands for a rule.

The run's seed decides, which the header names; a run without one (``-p no:randomly``) takes all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["examples", "seed", "some_of"]

T = TypeVar("T")

seed: int | None = None
"""The run's (tests/conftest.py)."""


def some_of(values: Sequence[T], count: int, of_whom: str) -> list[T]:
    """Return so many of the values, in a row: what tests choose by the remainder of a seed is there in each run.

    Where they begin differs by `of_whom`, too.
    """
    if seed is None or len(values) <= count:
        return list(values)
    start = random.Random(f"{seed} {of_whom}").randrange(len(values))
    return [values[(start + index) % len(values)] for index in range(count)]


def examples(most: int) -> int:
    """Return how many examples hypothesis draws where it draws `most` without a seed: half, other ones in each run."""
    return most if seed is None else most // 2
