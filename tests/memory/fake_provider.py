"""A provider of segments that the test controls."""

from __future__ import annotations

from cudatool.errors import OutOfMemoryError

__all__ = ["FakeProvider"]


class FakeProvider:
    """A device of `total` bytes whose streams are done when the test says so. Refuses what it did not give."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.total = total
        self.segments: dict[int, int] = {}
        self.next_address = 0x7000_0000_0000
        self.tokens: dict[int, int] = {}  # token -> stream
        self.passed: set[int] = set()
        self.synchronized: list[int] = []
        self.next_token = 1

    def allocate(self, size: int, stream: int) -> int:
        if size > self.memory_info()[0]:
            raise OutOfMemoryError(f"{size} bytes")
        address, self.next_address = self.next_address, self.next_address + size + (2 << 20)
        self.segments[address] = size
        return address

    def free(self, address: int) -> None:
        del self.segments[address]

    def record_event(self, stream: int) -> int:
        token, self.next_token = self.next_token, self.next_token + 1
        self.tokens[token] = stream
        return token

    def event_passed(self, token: int) -> bool:
        passed = self.tokens[token] in self.passed
        if passed:
            del self.tokens[token]
        return passed

    def synchronize_event(self, token: int) -> None:
        self.synchronized.append(self.tokens.pop(token))

    def memory_info(self) -> tuple[int, int]:
        return self.total - sum(self.segments.values()), self.total
