"""Memory and events that processes share: what a handle says, and what of other processes is open in this one.

What is shared lies in an anonymous file. A handle names the process that has the file and its descriptor there, by
which other processes of the same user open it (``/proc/PID/fd``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cudatool.loading.late_dataclasses import dataclass
from cudatool.sim.abi import IpcHandleStruct
from cudatool.sim.allocations import Allocation
from cudatool.sim.arena import PAGE, READ_WRITE, SharedFile, Store, unmap
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.machine import Context, Machine

__all__ = ["EventHandle", "Handle", "Imports", "SharedEvent"]


class Handle(ctypes.Structure):
    """What a CUipcMemHandle holds. The rest of its 64 bytes is not passed on to an entry point (_libcuda.c)."""

    _fields_ = (
        ("process", ctypes.c_uint32),
        ("file", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("inode", ctypes.c_uint64),  # of the file: a descriptor is used again when its file is closed
        ("offset", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("serial", ctypes.c_uint64),  # of the allocation: addresses are used again, too
    )


assert ctypes.sizeof(Handle) <= ctypes.sizeof(IpcHandleStruct)


@dataclass()
class _Import:
    key: tuple[int, int]  # inode and serial
    allocation: Allocation
    start: int  # of the addresses that the file is mapped to
    size: int
    count: int = 1


class Imports:
    """The memory of other processes that is mapped in this one."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._by_address: dict[int, _Import] = {}
        self._by_key: dict[tuple[int, int], _Import] = {}

    def open(self, handle: Handle, context: Context) -> Allocation:
        """Return the memory, mapped in the same place as before if it is open already."""
        if handle.process == os.getpid():
            raise DriverError(Result.INVALID_CONTEXT, "a handle cannot be opened in the process that created it")
        key = handle.inode, handle.serial
        found = self._by_key.get(key)
        if found is None:
            found = self._by_key[key] = self._map(key, handle, context)
            self._by_address[found.allocation.address] = found
        elif found.allocation.context != context.handle:
            raise DriverError(Result.INVALID_HANDLE, "the handle is open in another context of this process")
        else:
            found.count += 1
        return found.allocation

    def close(self, address: int) -> None:
        """Take one opening back, and with the last the mapping. What is pending runs first."""
        found = self._by_address.get(address)
        if found is None or not found.count:
            raise DriverError(Result.INVALID_VALUE, f"{address:#x} is not open memory of another process")
        found.count -= 1
        if not found.count:
            self._machine.scheduler.drain()
            # Other threads may have opened it again, or closed that too, during the wait.
            if not found.count and self._by_address.get(address) is found:
                self._unmap(found)

    def close_all(self, context: Context) -> None:
        """Take back what a context has open."""
        for found in list(self._by_key.values()):
            if found.allocation.context == context.handle:
                self._unmap(found)

    def _map(self, key: tuple[int, int], handle: Handle, context: Context) -> _Import:
        machine = self._machine
        device = machine.device(handle.device)
        try:
            file = _open_shared(handle.process, handle.file, handle.inode)
        except OSError as error:
            raise DriverError(
                Result.INVALID_HANDLE, "the process that exported the handle freed the memory, or has ended"
            ) from error
        space = machine.arena.ranges
        try:
            length = os.fstat(file.opened).st_size
            if handle.offset + handle.size > length:
                raise DriverError(Result.INVALID_HANDLE, "the handle describes more memory than its process exported")
            start = space.reserve(length, PAGE)
            space.map(start, length, file, 0)
            space.protect(start, length, READ_WRITE)
        finally:
            file.close()
        address = start + handle.offset
        allocation = Allocation(address, handle.size, "ipc", device.ordinal, context.handle, machine.new_serial())
        machine.allocations.add(allocation)
        return _Import(key, allocation, start, length)

    def _unmap(self, found: _Import) -> None:
        space = self._machine.arena.ranges
        self._machine.allocations.remove(found.allocation)
        space.unmap(found.start, found.size)
        space.unreserve(found.start, found.size)
        del self._by_key[found.key], self._by_address[found.allocation.address]


# ---- Events ----


class EventHandle(ctypes.Structure):
    """What a CUipcEventHandle holds."""

    _fields_ = (
        ("process", ctypes.c_uint32),
        ("file", ctypes.c_int32),
        ("inode", ctypes.c_uint64),
    )


class _EventState(ctypes.Structure):
    _fields_ = (("recorded", ctypes.c_uint64), ("done", ctypes.c_uint64), ("recorder", ctypes.c_uint64))


class SharedEvent:
    """What several processes know of an event: how often it was recorded, by whom last, and which records are done."""

    _POLL_S = 0.001

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._address = file.map_all(mmap.PAGESIZE)
        self._state = _EventState.from_address(self._address)
        self._last = 0  # record of this process
        self._is_closing = False

    @classmethod
    def create(cls) -> SharedEvent:
        """Return the state of a new event."""
        return cls(Store.new_file(mmap.PAGESIZE))

    @classmethod
    def open(cls, handle: EventHandle) -> SharedEvent:
        """Return the state of an event of another process; CUDA_ERROR_INVALID_HANDLE if it is there no more."""
        try:
            return cls(_open_shared(handle.process, handle.file, handle.inode))
        except OSError as error:
            raise DriverError(
                Result.INVALID_HANDLE, "the process that exported the event destroyed it, or has ended"
            ) from error

    def handle(self) -> EventHandle:
        """Return what other processes open it by."""
        return EventHandle(os.getpid(), self._file.opened, self._file.inode)

    def record(self) -> int:
        """Say that this process records the event, and return the record's number."""
        self._state.recorded += 1
        self._state.recorder = os.getpid()
        self._last = self._state.recorded
        return self._last

    def finish(self, record: int) -> None:
        """Say that a record of this process, and so every earlier one, is done."""
        self._state.done = max(self._state.done, record)
        if self._is_closing:
            self.close()

    @property
    def is_pending_elsewhere(self) -> bool:
        """Whether another process recorded it last, and that is not done. The work of a process ends with it."""
        if self._state.done >= self._state.recorded or self._state.recorder == os.getpid():
            return False
        return _is_running(self._state.recorder)

    def wait(self) -> None:
        """Wait for what other processes recorded last. Call it without the driver's lock."""
        while self.is_pending_elsewhere:
            time.sleep(self._POLL_S)

    def close(self) -> None:
        """Take it out of this process, as soon as its records are done."""
        self._is_closing = True
        if self._state.done >= self._last:
            del self._state
            unmap(self._address, mmap.PAGESIZE)
            self._file.close()


def _open_shared(process: int, file: int, inode: int) -> SharedFile:
    """Return a file that another process of this user shares.

    A handle can say anything. So only a file that :class:`Store` made is opened, and it must be the one that is meant:
    process ids and descriptors are used again.

    Raises
    ------
    OSError
        There is no such file.
    """
    path = f"/proc/{process}/fd/{file}"
    if not os.readlink(path).startswith(f"/memfd:{Store.NAME}"):
        raise FileNotFoundError(path)
    opened = SharedFile(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    if opened.inode != inode or os.fstat(opened.opened).st_uid != os.geteuid():
        opened.close()
        raise FileNotFoundError(path)
    return opened


def _is_running(process: int) -> bool:
    """Return whether a process can still do something: it exists, and is not one that only waits to be reaped."""
    try:
        text = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return False
    return text.rpartition(b") ")[2][:1] not in (b"Z", b"X")
