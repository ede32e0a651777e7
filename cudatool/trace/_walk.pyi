"""What _walk.c offers."""

from collections.abc import Callable
from types import FrameType

def walk(places: dict[int, int], add_place: Callable[[FrameType], int], skip: int, /) -> tuple[int, ...]:
    """Return the places of the caller's frames, innermost first, without the first `skip`.

    The place of a frame is in `places`, under ``id(frame.f_code) + frame.f_lasti``, or `add_place` tells it. Places of
    0 are left out; one below 0 ends the walk, and so do 256 places.
    """
