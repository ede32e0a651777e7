"""A provider of segments that the test controls."""

from __future__ import annotations

from cudatool.errors import OutOfMemoryError

__all__ = ["FakeProvider"]


class FakeProvider:
    """A device of `total` bytes whose streams are done when the test says so. Refuses what it did not give."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.total = total
        self.segments: dict[int, int] = {}
        self.ranges: dict[int, int] = {}  # reserved addresses
        self.pages: dict[int, int] = {}  # address -> size of every mapped page
        self.next_address = 0x7000_0000_0000
        self.tokens: dict[int, int] = {}  # token -> stream
        self.passed: set[int] = set()
        self.synchronized: list[int] = []
        self.next_token = 1
        self.tails: dict[int, tuple[int, frozenset[int]]] = {}  # stream -> its capture and the nodes at its end
        self.edges: dict[int, list[int]] = {}  # node -> those before it

    def allocate(self, size: int, stream: int) -> int:
        if size > self.memory_info()[0]:
            raise OutOfMemoryError(f"{size} bytes")
        address, self.next_address = self.next_address, self.next_address + size + (2 << 20)
        self.segments[address] = size
        return address

    def free(self, address: int) -> None:
        del self.segments[address]

    def reserve(self, size: int, stream: int) -> int:
        address, self.next_address = self.next_address, self.next_address + size + (20 << 20)
        self.ranges[address] = size
        return address

    def unreserve(self, address: int, size: int) -> None:
        assert size == self.ranges.pop(address)
        assert not [page for page in self.pages if address <= page < address + size]

    def map(self, address: int, size: int, page_size: int) -> None:
        assert any(start <= address and address + size <= start + length for start, length in self.ranges.items())
        assert size % page_size == 0 < size
        if size > self.memory_info()[0]:
            raise OutOfMemoryError(f"{size} bytes")
        for page in range(address, address + size, page_size):
            assert page not in self.pages
            self.pages[page] = page_size

    def unmap(self, address: int, size: int, page_size: int) -> None:
        for page in range(address, address + size, page_size):
            assert page_size == self.pages.pop(page)

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

    def captured_tail(self, stream: int) -> tuple[int, frozenset[int]] | None:
        return self.tails.get(stream)

    def nodes_before(self, node: int) -> list[int]:
        return self.edges.get(node, [])

    def memory_info(self) -> tuple[int, int]:
        return self.total - sum(self.segments.values()) - sum(self.pages.values()), self.total
