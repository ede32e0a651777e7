"""The driver's recorded actions, as a source of segments for the replay."""

from __future__ import annotations

from collections import deque
from typing import Final

from cudatool.analyze.calls import Change
from cudatool.errors import OutOfMemoryError
from cudatool.trace.events import Kind

__all__ = ["Script"]

_FIRST_MADE_UP: Final = 1 << 60  # addresses of segments that the recording does not have


class Script:
    """A segment provider that returns the recorded memory and completes events when the recording does.

    The recording does not name the streams that used a block with a deferred free. Each gets a stream of its own.
    """

    def __init__(self, total_memory: int) -> None:
        self.total_memory = total_memory
        self.expected: deque[Change] = deque()
        self.passed: set[int] = set()
        self.exact = 0
        self.wrong: list[str] = []
        self.early: list[int] = []  # what was released too early
        self.fails = False  # whether the call in progress got no memory
        self._next = _FIRST_MADE_UP

    def allocate(self, size: int, stream: int) -> int:
        return self._gain(Kind.SEGMENT_ALLOC, size, stream)

    def free(self, address: int) -> None:
        self._release(Kind.SEGMENT_FREE, address, 0)

    def reserve(self, size: int, stream: int) -> int:
        for change in self.expected:
            if change.kind is Kind.SEGMENT_MAP and change.stream == stream:
                return change.address
        return self._made_up(size)

    def unreserve(self, address: int, size: int) -> None:
        pass

    def map(self, address: int, size: int, page_size: int) -> None:
        change = self.expected[0] if self.expected else None
        if change is not None and change.kind in (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP):
            raise OutOfMemoryError("the recording had to release memory first")
        if change is not None and change[:3] == (Kind.SEGMENT_MAP, address, size):
            self.expected.popleft()
            self.exact += 1
        elif self.fails:
            raise OutOfMemoryError("the recording got no memory")
        else:
            self.wrong.append(f"{size} bytes mapped at {address:#x}")

    def unmap(self, address: int, size: int, page_size: int) -> None:
        self._release(Kind.SEGMENT_UNMAP, address, size)

    def record_event(self, stream: int) -> int:
        return stream

    def event_passed(self, token: int) -> bool:
        return token in self.passed

    def synchronize_event(self, token: int) -> None:
        if token not in self.passed:
            self.wrong.append("a block was waited for that the recording kept in use")

    def captured_tail(self, stream: int) -> None:
        return None  # captures are not known here

    def nodes_before(self, node: int) -> tuple[int, ...]:
        return ()

    def memory_info(self) -> tuple[int, int]:
        return 0, self.total_memory

    def is_made_up(self, address: int) -> bool:
        return address >= _FIRST_MADE_UP

    def _gain(self, kind: Kind, size: int, stream: int) -> int:
        change = self.expected[0] if self.expected else None
        if change is not None and change.kind in (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP):
            raise OutOfMemoryError("the recording had to release memory first")
        if change is not None and (change.kind, change.size, change.stream) == (kind, size, stream):
            self.expected.popleft()
            self.exact += 1
            return change.address
        if self.fails:
            raise OutOfMemoryError("the recording got no memory")
        self.wrong.append(f"a segment of {size} bytes allocated")
        return self._made_up(size)

    def _release(self, kind: Kind, address: int, size: int) -> None:
        for index, change in enumerate(self.expected):
            if change.kind is kind and change.address == address and size in (0, change.size):
                del self.expected[index]
                self.exact += index == 0
                if index:
                    self.early.append(address)
                    self.wrong.append(f"memory at {address:#x} released out of turn")
                return
        if not self.is_made_up(address):
            self.early.append(address)
            self.wrong.append(f"memory at {address:#x} released")

    def _made_up(self, size: int) -> int:
        address, self._next = self._next, self._next + size
        return address
