"""What _walk.c offers."""

from collections.abc import Callable
from types import FrameType
from typing import Any

def capture(skip: int = 0) -> int:
    """Return the id of the caller's Python stack; equal stacks have equal ids, 0 is the empty stack.

    Frames of cudatool itself, of NumPy, contextlib, ``runpy`` and the import system are left out, and so is everything
    outside the program that ``cudatool run`` started or the test that pytest called. At most 256 frames are kept, the
    innermost ones.

    Parameters
    ----------
    skip
        Number of innermost frames to leave out, on top of those.
    """

def install(
    names: dict[str, Any],
    places: dict[int, int],
    stack_ids: dict[tuple[int, ...], int],
    add_place: Callable[[FrameType], int],
    add_stack: Callable[[tuple[int, ...]], int],
    /,
) -> None:
    """Give the tables of stacks.py and what adds to them; `names` is its namespace, for ``_enabled``.

    The place of a frame is in `places`, under ``id(frame.f_code) + frame.f_lasti``, or `add_place` tells it. Places of
    0 are left out; one below 0 ends the walk, and so do 256 places.
    """
