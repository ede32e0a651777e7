"""Stream-ordered memory pools: of a device, of pinned host memory, or managed; own, or of another process.

A pool that other processes may use has its memory in a file. The file's descriptor is the pool's shareable handle, and
an allocation in it is named by where in the file it lies. The last page of the file says what the pool is.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Final

from cudatool.sim.allocations import Allocation
from cudatool.sim.arena import PAGE, READ_WRITE, FreeList, SharedFile, Store
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.machine import Context, Machine

__all__ = [
    "DEVICE",
    "FILE_DESCRIPTOR",
    "HOST",
    "HOST_NUMA",
    "MANAGED",
    "NOWHERE",
    "PINNED",
    "PointerData",
    "Pool",
    "Pools",
    "check_location",
]

NOWHERE, DEVICE, HOST, HOST_NUMA = 0, 1, 2, 3  # CU_MEM_LOCATION_TYPE_*
PINNED, MANAGED = 1, 2  # CU_MEM_ALLOCATION_TYPE_*
FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_HOST_PAGE: Final = 4096
_MAGIC: Final = 0x6C6F_6F70_6475_6320


class _About(ctypes.Structure):
    """What the last page of a shared pool's file says."""

    _fields_ = (("magic", ctypes.c_uint64), ("location_type", ctypes.c_int32), ("location_id", ctypes.c_int32))


class PointerData(ctypes.Structure):
    """What a CUmemPoolPtrExportData holds, in its 64 bytes."""

    _fields_ = (("inode", ctypes.c_uint64), ("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _SharedMemory:
    """A file of memory, mapped as a whole; its parts are accessible while they are allocated."""

    def __init__(self, machine: Machine, file: SharedFile, size: int) -> None:
        self._space = machine.arena.ranges
        self.file = file
        self.size = size
        self.inode = file.inode
        self.start = self._space.reserve(size, PAGE)
        self._space.map(self.start, size, file, 0)
        self._free = FreeList()
        self._free.give(0, size)

    def allocate(self, size: int) -> int | None:
        offset = self._free.take(_rounded(size, _HOST_PAGE))
        if offset is None:
            return None
        self.open(offset, size)
        return self.start + offset

    def free(self, address: int, size: int) -> None:
        rounded = _rounded(size, _HOST_PAGE)
        Store.clear(self.file, address - self.start, rounded)
        self._space.protect(address, rounded, 0)
        self._free.give(address - self.start, address - self.start + rounded)

    def open(self, offset: int, size: int) -> None:
        """Make a part accessible."""
        self._space.protect(self.start + offset, _rounded(size, _HOST_PAGE), READ_WRITE)

    def close(self) -> None:
        self._space.unmap(self.start, self.size)
        self._space.unreserve(self.start, self.size)
        self.file.close()


class Pool:
    """A memory pool.

    Attributes
    ----------
    location
        CUmemLocationType and id of where its memory lies.
    used, used_high
        Bytes that are allocated now, and at most since the mark was reset.
    attributes
        The attributes that programs may set, by CUmemPool_attribute.
    access
        CUmemAccess_flags by ordinal of the device, of a pool on a device. All devices reach other pools' memory.
    """

    def __init__(
        self,
        machine: Machine,
        location: tuple[int, int],
        allocation_type: int = PINNED,
        *,
        handle_types: int = 0,
        max_size: int = 0,
    ) -> None:
        self._machine = machine
        self.handle = machine.new_handle()
        self.location = location
        self.allocation_type = allocation_type
        self.handle_types = handle_types
        self.max_size = max_size
        self.used = self.used_high = 0
        self.attributes: dict[int, int] = {1: 1, 2: 1, 3: 1, 4: 0}
        self.device = location[1] if location[0] == DEVICE else -1
        self.access: dict[int, int] = {self.device: READ_WRITE}
        self.is_imported = False
        self.is_destroyed = False
        self._shared: _SharedMemory | None = None
        self._imports: dict[int, int] = {}  # address of an allocation of another process -> how often it was imported
        if handle_types:
            size = _rounded(max_size or machine.options.memory, PAGE)
            file = Store.new_file(size + _HOST_PAGE)
            os.pwrite(file.opened, bytes(_About(_MAGIC, *location)), size)
            self._shared = _SharedMemory(machine, file, size)
        machine.objects[self.handle] = self
        machine.pools.live[self.handle] = self

    @classmethod
    def from_file(cls, machine: Machine, file: int) -> Pool:
        """Return the pool of another process, from a file descriptor that is copied.

        Raises
        ------
        DriverError
            CUDA_ERROR_INVALID_VALUE if the descriptor is not one of a pool.
        """
        try:
            size = os.fstat(file).st_size - _HOST_PAGE
            about = _About.from_buffer_copy(os.pread(file, ctypes.sizeof(_About), size))
            is_foreign_device = about.location_type == DEVICE and about.location_id >= len(machine.devices)
            if about.magic != _MAGIC or is_foreign_device:
                raise OSError
            own = SharedFile(os.dup(file))
        except (OSError, ValueError) as error:
            raise DriverError(Result.INVALID_VALUE, f"{file} is not a file descriptor of a memory pool") from error
        pool = cls(machine, (about.location_type, about.location_id))
        pool.handle_types, pool.is_imported = FILE_DESCRIPTOR, True
        pool._shared = _SharedMemory(machine, own, size)
        return pool

    def new_descriptor(self) -> int:
        """Return a new descriptor of the memory of a pool that was created to be shared."""
        assert self._shared is not None
        return self._shared.file.copied()

    def may_access(self, device: int) -> bool:
        """Return whether a device can use the pool's memory."""
        return self.device < 0 or self.allocation_type == MANAGED or bool(self.access.get(device))

    def allocate(self, size: int, context: Context) -> Allocation:
        """Return new memory.

        Raises
        ------
        DriverError
            CUDA_ERROR_OUT_OF_MEMORY, or CUDA_ERROR_INVALID_VALUE for the pool of another process.
        """
        machine = self._machine
        if self.is_imported:
            raise DriverError(Result.INVALID_VALUE, "a pool of another process cannot allocate; import its pointers")
        if self.max_size and self.used + size > self.max_size:
            raise DriverError(Result.OUT_OF_MEMORY, f"the pool holds at most {self.max_size} bytes")
        kind = "managed" if self.allocation_type == MANAGED else "pool" if self.device >= 0 else "host"
        if self._shared is not None:
            allocation = self._allocate_shared(self._shared, size, kind, context)
        elif kind == "host":
            allocation = machine.allocate_host(size, context=context, pool=self.handle)
        else:
            # Managed memory that prefers no device comes from the one that asks.
            device = machine.devices[self.device] if self.device >= 0 else context.device
            allocation = machine.allocate(device, size, kind, context=context, pool=self.handle)
        self.used += size
        self.used_high = max(self.used_high, self.used)
        return allocation

    def _allocate_shared(self, shared: _SharedMemory, size: int, kind: str, context: Context) -> Allocation:
        machine = self._machine
        if self.device >= 0:
            machine.devices[self.device].memory.take(_rounded(size, _HOST_PAGE))
        address = shared.allocate(size)
        if address is None:
            if self.device >= 0:
                machine.devices[self.device].memory.give_back(_rounded(size, _HOST_PAGE))
            raise DriverError(Result.OUT_OF_MEMORY)
        serial = machine.new_serial()
        found = Allocation(address, size, kind, self.device, context.handle, serial, self.handle, in_file=True)
        machine.allocations.add(found)
        return found

    def release(self, allocation: Allocation) -> None:
        """Take back what :meth:`allocate` or :meth:`import_pointer` gave."""
        machine = self._machine
        if self.is_imported:
            self._imports[allocation.address] -= 1
            if not self._imports[allocation.address]:
                del self._imports[allocation.address]
                machine.allocations.remove(allocation)
        else:
            self.used -= allocation.size
            if self._shared is None:
                machine.release_memory(allocation)
            else:
                machine.allocations.remove(allocation)
                self._shared.free(allocation.address, allocation.size)
                if self.device >= 0:
                    machine.devices[self.device].memory.give_back(_rounded(allocation.size, _HOST_PAGE))
        self._end_if_unused()

    def export_pointer(self, allocation: Allocation) -> PointerData:
        """Return what names an allocation in other processes."""
        if self._shared is None or self.is_imported:
            raise DriverError(Result.INVALID_VALUE, "the memory is not from a pool of this process that can be shared")
        return PointerData(self._shared.inode, allocation.address - self._shared.start, allocation.size)

    def import_pointer(self, data: PointerData) -> Allocation:
        """Return an allocation of the process that the pool is of. Importing it again gives the same."""
        shared = self._shared
        if (
            shared is None
            or not self.is_imported
            or data.inode != shared.inode
            or data.offset % _HOST_PAGE
            or not 0 < data.size <= data.offset + data.size <= shared.size
        ):
            raise DriverError(Result.INVALID_VALUE, "the data do not describe memory of this pool")
        address = shared.start + data.offset
        found = self._machine.allocations.at(address)
        if found is None:
            shared.open(data.offset, data.size)
            kind, serial = "pool" if self.device >= 0 else "host", self._machine.new_serial()
            found = Allocation(address, data.size, kind, self.device, 0, serial, self.handle, in_file=True)
            self._machine.allocations.add(found)
        self._imports[address] = self._imports.get(address, 0) + 1
        return found

    def destroy(self) -> None:
        """End the handle. Memory that is still allocated stays (cuMemPoolDestroy)."""
        del self._machine.objects[self.handle]
        self.is_destroyed = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self.is_destroyed and not self.used and not self._imports:
            del self._machine.pools.live[self.handle]
            if self._shared is not None:
                self._shared.close()


class Pools:
    """All pools of a machine: the default one, and the current one, for each place and kind of memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.live: dict[int, Pool] = {}
        """By handle, those too whose handle was destroyed while memory is allocated from them."""
        self._defaults: dict[tuple[int, int, int], Pool] = {}
        self._current: dict[tuple[int, int, int], Pool] = {}

    def default(self, location: tuple[int, int], allocation_type: int = PINNED) -> Pool:
        """Return the pool that a place has from the start."""
        key = self._key(location, allocation_type)
        if key not in self._defaults:
            self._defaults[key] = Pool(self._machine, location, allocation_type)
        return self._defaults[key]

    def current(self, location: tuple[int, int], allocation_type: int = PINNED) -> Pool:
        """Return the pool that allocations without a pool come from."""
        pool = self._current.get(self._key(location, allocation_type))
        return self.default(location, allocation_type) if pool is None or pool.is_destroyed else pool

    def set_current(self, location: tuple[int, int], allocation_type: int, pool: Pool) -> None:
        """Make `pool` the current one; it must be of that place and kind."""
        key = self._key(location, allocation_type)
        if pool.is_imported or key != self._key(pool.location, pool.allocation_type):
            raise DriverError(Result.INVALID_VALUE, "the pool belongs to another process or another location")
        self._current[key] = pool

    def is_default(self, pool: Pool) -> bool:
        """Return whether a pool is one that cannot be destroyed."""
        return pool in self._defaults.values()

    def _key(self, location: tuple[int, int], allocation_type: int) -> tuple[int, int, int]:
        kind, ordinal = location
        check_location(self._machine, location, allocation_type)
        return allocation_type, kind, ordinal if kind in (DEVICE, HOST_NUMA) else 0


def check_location(machine: Machine, location: tuple[int, int], allocation_type: int) -> None:
    """Fail with CUDA_ERROR_INVALID_VALUE where a pool cannot be, CUDA_ERROR_INVALID_DEVICE for an unknown device."""
    kinds = {PINNED: (DEVICE, HOST, HOST_NUMA), MANAGED: (NOWHERE, DEVICE, HOST, HOST_NUMA)}
    if location[0] not in kinds.get(allocation_type, ()):
        raise DriverError(Result.INVALID_VALUE, "this type of allocation is not possible at this location")
    if location[0] == DEVICE:
        machine.device(location[1])
    if location[0] == HOST_NUMA and location[1]:
        raise DriverError(Result.INVALID_VALUE, f"there is no NUMA node {location[1]}; the host counts as one")


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
