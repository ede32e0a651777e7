"""What the allocator says about an operation: its events, held back until the operation is done."""

from __future__ import annotations

from collections.abc import Callable

from cudatool.memory.blocks import Block, BlockPool
from cudatool.trace import hooks, stacks
from cudatool.trace.events import Kind, float_bits, pack_pool

__all__ = ["Journal"]

_SMALL_POOL_FLAG = 1  # of SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP and SEGMENT_UNMAP


class Journal:
    """The events of the operation in progress.

    Attributes
    ----------
    active
        Whether hooks have subscribers in this operation.
    stack
        Where the operation was called; 0 without a subscriber.
    """

    __slots__ = ("_device", "_events", "_stream_id", "active", "stack")

    def __init__(self, device: int, stream_id: Callable[[int], int] | None) -> None:
        self._device = device
        self._stream_id = stream_id
        self._events: list[tuple[Kind, int, int, int, int, int, int, int]] = []
        self.active = False
        self.stack = 0

    def start(self) -> None:
        """Begin an operation while hooks have subscribers."""
        self.active = True
        self.stack = stacks.capture()

    def emit(self) -> None:
        """Emit what has happened, and be ready for the next operation."""
        events, self._events, self.active, self.stack = self._events, [], False, 0
        for kind, stream, address, size, flags, aux0, aux1, stack in events:
            hooks.emit(
                kind,
                device=self._device,
                stream=self._stream_id(stream) if self._stream_id and kind != Kind.MEMORY_FRACTION else stream,
                address=address,
                size=size,
                flags=flags,
                aux0=aux0,
                aux1=aux1,
                stack=stack,
            )

    # The events. Each needs `active`.

    def block(self, kind: Kind, block: Block, stack: int) -> None:
        """Note a block that is handed out or freed."""
        pool = pack_pool(block.pool.id)
        self._events.append((kind, block.stream, block.address, block.size, 0, block.requested_size, pool, stack))

    def stream_use(self, block: Block, stream: int) -> None:
        """Note that another stream uses a block."""
        self._events.append((Kind.BLOCK_RECORD_STREAM, stream, block.address, block.size, 0, 0, 0, self.stack))

    def segment(self, kind: Kind, address: int, size: int, stream: int, pool: BlockPool) -> None:
        """Note memory that comes from the provider or goes back."""
        flags = _SMALL_POOL_FLAG if pool.is_small else 0
        self._events.append((kind, stream, address, size, flags, 0, pack_pool(pool.id), self.stack))

    def memory_fraction(self, fraction: float, total: int) -> None:
        """Note how much may be reserved from now on."""
        self._events.append((Kind.MEMORY_FRACTION, 0, 0, total, 0, float_bits(fraction), 0, self.stack))

    def out_of_memory(self, size: int, stream: int, pool: BlockPool, free: int) -> None:
        """Note a request that could not be served."""
        self._events.append((Kind.OOM, stream, 0, size, 0, free, pack_pool(pool.id), self.stack))
