"""Private pools: memory that is kept apart, for a CUDA graph or because the program wants it so."""

from __future__ import annotations

from dataclasses import dataclass

from cudatool.memory.blocks import Block, BlockPool, PoolId

__all__ = ["BlockState", "PoolState", "PrivatePool", "RestoreResult", "blocks_of"]


class PrivatePool:
    """A small and a large pool of their own, and how many graphs or programs use them.

    Attributes
    ----------
    use_count
        At 0 the pool's free memory may go back to its provider.
    use_on_oom
        Whether requests that find no memory elsewhere may be served from its free blocks.
    """

    __slots__ = ("id", "large", "small", "use_count", "use_on_oom")

    def __init__(self, id: PoolId, small: BlockPool, large: BlockPool, *, use_on_oom: bool) -> None:
        self.id = id
        self.small = small
        self.large = large
        self.use_count = 1
        self.use_on_oom = use_on_oom

    @property
    def reserved(self) -> int:
        """Bytes that it has from its provider."""
        return self.small.reserved + self.large.reserved


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block as it was at a checkpoint."""

    address: int
    size: int
    allocated: bool


@dataclass(frozen=True, slots=True)
class PoolState:
    """How a private pool was cut into blocks at a checkpoint: its segments, each with all its blocks."""

    id: PoolId
    segments: tuple[tuple[BlockState, ...], ...]


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """What returning to a checkpoint did: addresses that were in use and are not any more, and the other way round."""

    freed: tuple[int, ...]
    allocated: tuple[int, ...]


def blocks_of(head: Block) -> list[Block]:
    """Return a block and all that follow it in its segment."""
    found: list[Block] = []
    block: Block | None = head
    while block is not None:
        found.append(block)
        block = block.next
    return found
