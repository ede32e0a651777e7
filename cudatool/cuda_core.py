"""The caching allocator for programs written to :mod:`cuda.core`.

::

    from cuda.core import Device
    from cudatool.cuda_core import CachingMemoryResource

    device = Device()
    device.set_current()
    device.memory_resource = CachingMemoryResource(device)
    buffer = device.allocate(1024, stream=device.create_stream())

Importing this module imports :mod:`cuda.core`, but does not choose a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cuda import core

from cudatool.errors import UsageError
from cudatool.memory import CachingAllocator
from cudatool.memory.pluggable import UncachedAllocator
from cudatool.runtime.allocator import PlannedMemory, current_allocator
from cudatool.runtime.calls import operation
from cudatool.runtime.device import DeviceLike, device_index, synchronize

__all__ = ["CachingMemoryResource"]

_LEGACY_DEFAULT, _PER_THREAD_DEFAULT = 1, 2  # CU_STREAM_LEGACY, CU_STREAM_PER_THREAD
_streams: dict[tuple[int, int], Any] = {}  # by device and handle: those that memory is cached for


class _Block(NamedTuple):
    """Where a buffer's memory comes from, and the handle of the stream it was allocated on."""

    allocator: CachingAllocator | UncachedAllocator | PlannedMemory
    stream: int


class CachingMemoryResource(core.MemoryResource):  # type: ignore[misc]  # it has no published types
    """A :class:`cuda.core.MemoryResource` over the caching allocator of a device.

    It is the allocator of :func:`cudatool.empty` and all else here: one cache, one set of statistics, one limit, and
    :func:`cudatool.use_mem_pool` holds for it too. Each buffer is a block; closing it, or dropping the last reference,
    frees the block in the order of the stream named then, else of the one it was allocated on.

    Memory is cached for the stream it was allocated on, so that stream lives on when the program drops it.

    Parameters
    ----------
    device_id
        Default: the current device.
    """

    def __init__(self, device_id: DeviceLike = None) -> None:
        self._device_id = device_index(device_id)
        self._blocks: dict[int, _Block] = {}  # by address

    def allocate(self, size: int, *, stream: Any) -> Any:
        """Return a :class:`cuda.core.Buffer` of `size` bytes for use on `stream`.

        Raises
        ------
        OutOfMemoryError
            There is not that much.
        UsageError
            `stream` is capturing a graph, or is the per-thread default stream, whose memory could be handed out
            again on another thread's.
        """
        handle = _handle(stream)
        if handle == _PER_THREAD_DEFAULT:
            raise UsageError(
                "the per-thread default stream is another one on each thread, so memory cannot be cached for it; "
                "create a stream"
            )
        _keep(stream, handle, self._device_id)
        allocator = current_allocator(self._device_id)
        address = allocator.malloc(size, handle)
        if address:
            self._blocks[address] = _Block(allocator, handle)
        try:
            with operation():
                return core.Buffer.from_handle(address, size, mr=self, stream=stream)
        except BaseException:
            self.deallocate(address, size, stream=stream)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
        """Free a block. It is handed out again once what is on `stream` by now has completed.

        Raises
        ------
        UsageError
            It was freed before.
        """
        address, handle = int(ptr), _handle(stream)
        if not address:
            return
        block = self._blocks.pop(address, None)
        if block is None:
            raise UsageError(f"{address:#x} is not a buffer of this memory resource, or was freed before")
        if handle != block.stream:
            block.allocator.record_stream(address, handle)
        block.allocator.free(address)

    @property
    def device_id(self) -> int:
        """Ordinal of the device."""
        return self._device_id

    @property
    def is_device_accessible(self) -> bool:
        """True."""
        return True

    @property
    def is_host_accessible(self) -> bool:
        """False."""
        return False

    @property
    def is_managed(self) -> bool:
        """False."""
        return False

    def __repr__(self) -> str:
        return f"<CachingMemoryResource device={self._device_id}>"


def _handle(stream: Any) -> int:
    """Return the driver's handle of a stream, 0 for the legacy default stream as everywhere here."""
    if isinstance(stream, core.graph.GraphBuilder):
        raise UsageError("memory for a graph cannot come from the caching allocator; allocate before the capture")
    if isinstance(stream, core.Stream):
        handle = int(stream.handle)
    elif hasattr(stream, "__cuda_stream__"):
        handle = int(stream.__cuda_stream__()[1])
    else:
        raise UsageError(f"{stream!r} is not a stream")
    return 0 if handle == _LEGACY_DEFAULT else handle


def _keep(stream: Any, handle: int, device: int) -> None:
    """See to it that no other stream gets the handle, or if one has it already, that the closed one's work is done."""
    if isinstance(stream, core.Stream):
        known = _streams.setdefault((device, handle), stream)
        if known is not stream and known.is_closed:
            synchronize(device)
            _streams[device, handle] = stream
