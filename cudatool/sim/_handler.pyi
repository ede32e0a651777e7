"""What _handler.c offers: a handler of a signal that may be put off, and that no traceback has a frame of."""

from collections.abc import Callable
from types import FrameType
from typing import Any

_Own = Callable[[int, FrameType | None], Any]

class Handler:
    """Calls ``own(number, frame)`` unless ``puts_off(own, number, frame)``."""

    own: _Own

    def __init__(self, own: _Own, puts_off: Callable[[_Own, int, FrameType | None], bool], /) -> None: ...
    def __call__(self, number: int, frame: FrameType | None, /) -> Any: ...
