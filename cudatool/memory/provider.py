"""Where segments come from: the one thing the allocator's policy does not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["SegmentProvider"]


class SegmentProvider(Protocol):
    """Gives the allocator of one device its segments, and says when streams have caught up.

    A driver, a recording and a model can all be providers. Streams are opaque integers to the policy. The methods
    from `reserve` to `unmap` are called only where segments are expandable.
    """

    def allocate(self, size: int, stream: int) -> int:
        """Return the address of `size` new bytes.

        Raises
        ------
        OutOfMemoryError
            There are not that many. Any other error ends the allocation.
        """

    def free(self, address: int) -> None:
        """Give back a segment. No stream uses it any more, except the one it was allocated for."""

    def reserve(self, size: int, stream: int) -> int:
        """Return the start of `size` addresses that nothing else uses, without memory mapped to them."""

    def unreserve(self, address: int, size: int) -> None:
        """Give back a range of addresses; all of it is unmapped."""

    def map(self, address: int, size: int, page_size: int) -> None:
        """Map memory to a part of a reserved range, in pages that can be unmapped one by one.

        Raises
        ------
        OutOfMemoryError
            There is not that much; then none is mapped.
        """

    def unmap(self, address: int, size: int, page_size: int) -> None:
        """Give back the memory of whole pages. No stream uses it any more, except the one it was mapped for."""

    def record_event(self, stream: int) -> Any:
        """Return a token for everything enqueued on `stream` so far."""

    def event_passed(self, token: Any) -> bool:
        """Return whether the work before `token` is done. A token that has passed is not asked about again."""

    def synchronize_event(self, token: Any) -> None:
        """Wait until the work before `token` is done. The token is not used again."""

    def captured_tail(self, stream: int) -> tuple[int, frozenset[int]] | None:
        """Return the capture that a stream takes part in, and the nodes that what is next in it comes after.

        None if it is not being captured. Called only with ``graph_capture_record_stream_reuse``.
        """

    def nodes_before(self, node: int) -> Iterable[int]:
        """Return the nodes directly before one of a graph that is being captured."""

    def memory_info(self) -> tuple[int, int]:
        """Return the device's free and total bytes."""
