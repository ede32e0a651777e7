"""Memory that other processes borrow: the lender keeps it until they have released it, or have ended.

A loan is a pipe. The borrower has the end that can be written to; when no process has it, the lender's end says
so. Thus the kernel counts, also what is on its way in a queue, and borrowers that were killed.
"""

from __future__ import annotations

import itertools
import os
import select
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_sharer
from typing import Any, Final

from cudatool.errors import CudatoolError, UsageError
from cudatool.files import KeptDescriptor
from cudatool.runtime.allocator import Memory, allocator
from cudatool.runtime.capture import is_capturing
from cudatool.runtime.device import get_device_properties, synchronize
from cudatool.runtime.ipc import ImportedSegment, device_of_uuid, segment_handle
from cudatool.runtime.stream import Stream, current_stream

__all__ = ["Borrowed", "Loan", "borrow", "collect", "ipc_collect", "lend"]


@dataclass(frozen=True, slots=True)
class Loan:
    """A block for a borrower. It can be pickled, to be borrowed once.

    Attributes
    ----------
    lender, number
        Id of the process, and which loan of it.
    device
        UUID of the device.
    segment, offset, size
        The driver's handle of the segment, and which bytes of it are the block.
    end
        The end of the pipe, as :mod:`multiprocessing` passes on file descriptors.
    """

    lender: int
    number: int
    device: str
    segment: bytes
    offset: int
    size: int
    end: Any


@dataclass(frozen=True, slots=True)
class _Lent:
    memory: Memory
    pipe: KeptDescriptor


_lent: dict[int, _Lent] = {}
_numbers: Final = itertools.count(1)
_lock = threading.Lock()
_watched: set[int] = set()  # devices whose allocators collect when they need memory


def lend(memory: Memory, device: int) -> Loan:
    """Keep a block for a borrower, even if no array of this process is left in it.

    Waits for the device: the caller may be the thread of a queue, which cannot tell on which stream it was written.

    Raises
    ------
    UsageError
        The driver cannot share it.
    """
    collect()
    segment, native = segment_handle(memory.address, device)
    if device not in _watched:
        _watched.add(device)
        allocator(device).add_free_memory_callback(collect)
    synchronize(device)
    mine, theirs = os.pipe()
    end = resource_sharer.DupFd(theirs)
    os.close(theirs)
    number = next(_numbers)
    with _lock:
        _lent[number] = _Lent(memory, KeptDescriptor(mine))
    uuid = get_device_properties(device).uuid
    return Loan(os.getpid(), number, uuid, native, memory.address - segment, memory.size, end)


def borrow(loan: Loan) -> tuple[Memory | Borrowed, int]:
    """Return the block and its device.

    Raises
    ------
    UsageError
        The loan was borrowed already, or the lender has ended.
    DeviceUnavailableError
        This process does not have the device.
    """
    device = device_of_uuid(loan.device)
    try:
        end: int = loan.end.detach()
    except (EOFError, OSError):
        raise UsageError(
            f"process {loan.lender} does not lend this array any more: what it sent can be received once, while it runs"
        ) from None
    if loan.lender != os.getpid():
        return Borrowed(loan.segment, loan.offset, loan.size, device, end), device
    memory = _lent[loan.number].memory  # back where it came from
    os.close(end)
    return memory, device


def collect() -> bool:
    """Take back what was given back, and return whether that is anything."""
    with _lock:
        poll = select.poll()
        pipes = {pipe: number for number, lent in _lent.items() if (pipe := lent.pipe.number) is not None}
        for pipe in pipes:
            poll.register(pipe, 0)  # a closed other end is always reported
        ended = [pipes[pipe] for pipe, _ in poll.poll(0)]
        returned = [_lent.pop(number) for number in ended]
    for lent in returned:
        lent.pipe.close()
    return bool(returned)  # the blocks are free when this process does not use them, either


def ipc_collect() -> None:
    """Let the memory be used again that other processes borrowed and do not need any more.

    That happens by itself when something else is lent, and before the allocator asks the driver for more.
    """
    collect()


class Borrowed(ImportedSegment):
    """Memory of another process that this one has borrowed: it is given back when what may use it has completed.

    That is what is on the current stream by then, and on the streams of :meth:`record_stream`. A stream that is being
    captured executes nothing that could be waited for.
    """

    __slots__ = ("_end", "_streams")

    def __init__(self, segment: bytes, offset: int, size: int, device: int, end: int) -> None:
        self._end = KeptDescriptor(end)
        self._streams: set[Stream] = set()
        super().__init__(segment, offset, size, device)

    def record_stream(self, stream: Stream) -> None:
        """Wait for what is on `stream` by then, too."""
        self._streams.add(stream)

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if _finalizing():
            return  # the end of the process gives everything back
        with suppress(CudatoolError):
            for stream in (*self._streams, current_stream(self._device)):
                if not is_capturing(stream):
                    stream.synchronize()
        super().__del__()
        self._end.close()
