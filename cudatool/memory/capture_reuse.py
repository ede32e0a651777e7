"""Reuse of memory that several streams have used, while all of them are being captured into a graph.

No event can tell there when a stream is done with a block, but the graph can: the uses come before the nodes that the
streams had reached when the block was freed. Once all of these come before what is next in the block's own stream, the
block can be handed out again::

    free(block):     markers = the nodes at the ends of the block's streams
    malloc(stream):  walk back from the ends of this stream; free its blocks all of whose markers were met

Without the setting ``graph_capture_record_stream_reuse`` such blocks wait for the end of the capture.
"""

from __future__ import annotations

from cudatool.memory.blocks import Block
from cudatool.memory.provider import SegmentProvider

__all__ = ["CaptureReuse"]


class CaptureReuse:
    """The blocks that were freed in captures in progress, and where in the graph that was.

    Parameters
    ----------
    provider
        Knows the graphs that are being captured.
    """

    def __init__(self, provider: SegmentProvider) -> None:
        self._provider = provider
        self._markers: dict[Block, frozenset[int]] = {}
        self._met: dict[tuple[int, int], set[int]] = {}  # by capture and stream: nodes that come before what is next

    def freed(self, block: Block) -> None:
        """Note where a block was freed that other streams have used; nothing if one of them is not captured."""
        captures: set[int] = set()
        markers: set[int] = set()
        for stream in (block.stream, *(block.stream_uses or ())):
            tail = self._provider.captured_tail(stream)
            if tail is None:
                return
            captures.add(tail[0])
            markers |= tail[1]
        if len(captures) == 1 and markers:
            self._markers[block] = frozenset(markers)

    def take_reusable(self, stream: int) -> list[Block]:
        """Return, and forget, the blocks of a stream whose last uses come before what is captured in it next."""
        tail = self._provider.captured_tail(stream) if self._markers else None
        if tail is None:
            return []
        capture, nodes = tail
        met = self._met.setdefault((capture, stream), set())
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in met:
                met.add(node)
                waiting += self._provider.nodes_before(node)
        found = [block for block, markers in self._markers.items() if block.stream == stream and markers <= met]
        for block in found:
            del self._markers[block]
        return found

    def clear(self) -> None:
        """Forget everything: the captures are over."""
        self._markers.clear()
        self._met.clear()
