"""What the driver says about calls that fail, kept for programs that ask for it (cuLogs*)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["DriverLog", "Listener"]

_ROOM: Final = 25_600  # bytes: "The maximum size of the buffer is 25600 bytes" (cuLogsDumpToMemory)
_TRUNCATED: Final = "older messages are lost"

Listener = Callable[[str], None]


class DriverLog:
    """The latest messages, and who hears of new ones.

    Attributes
    ----------
    end
        The number of the next message: an iterator at the end of the log.
    listeners
        By handle.
    """

    def __init__(self) -> None:
        self._messages: deque[str] = deque()
        self._bytes = 0
        self.end = 0
        self.listeners: dict[int, Listener] = {}

    def add(self, text: str) -> None:
        """Keep a message, at the expense of the oldest."""
        self._messages.append(text)
        self._bytes += _size(text)
        self.end += 1
        while self._bytes > _ROOM and len(self._messages) > 1:
            self._bytes -= _size(self._messages.popleft())
        for listener in list(self.listeners.values()):
            listener(text)

    def lines(self, start: int = 0, room: int | None = None) -> list[str]:
        """Return the messages from number `start` on: the last ones, after a line that says so, if some are lost.

        `room` is how many bytes they may take, with a newline each. If not even the last fits, there are none.
        """
        first = self.end - len(self._messages)
        found = list(self._messages)[max(start - first, 0) :]
        is_truncated = start < first
        while room is not None and found and sum(map(_size, found)) + is_truncated * _size(_TRUNCATED) > room:
            del found[0]
            is_truncated = True
        return [_TRUNCATED, *found] if is_truncated and found else found


def _size(text: str) -> int:
    return len(text.encode()) + 1
