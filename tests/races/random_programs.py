"""What the two kinds of random programs share: which of them run under which schedule, and how one that differs is shown."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

__all__ = ["SCHEDULES", "arguments", "listing", "seeded"]

SCHEDULES = ("fifo", "lifo", "late", "random")


class _Line(Protocol):
    @property
    def text(self) -> str: ...


_Step = TypeVar("_Step", bound=_Line)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command line that says how many programs to run, and from which seed on."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def seeded(draw: Callable[[int], list[_Step]], seed: int, count: int) -> Iterator[tuple[int, list[_Step], str]]:
    """Yield the seeds, each with its program and a schedule."""
    for own in range(seed, seed + count):
        yield own, draw(own), SCHEDULES[own % 4]


def listing(steps: Sequence[_Line]) -> str:
    """Return the numbered lines of a program."""
    return "".join(f"{line:3} {step.text}\n" for line, step in enumerate(steps, 1))
