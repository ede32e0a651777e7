"""Virtual memory management: ranges of addresses, physical memory, and what is mapped where.

Physical memory is a part of an anonymous file, because that can be mapped at several addresses, and by several
processes. A mapping is one of the machine's allocations while the device may access it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from cudatool.loading.late_dataclasses import dataclass
from cudatool.sim import abi
from cudatool.sim.allocations import AddressRanges, Allocation
from cudatool.sim.arena import PAGE, READ_ONLY, READ_WRITE, SharedFile, Store
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.machine import Device, Machine

__all__ = ["Mapping", "Physical", "Reservation", "VirtualMemory"]


@dataclass(eq=False)
class Physical:
    """Memory without an address: what a generic allocation handle names."""

    handle: int
    device: Device
    size: int
    file: SharedFile
    offset: int
    handle_types: int
    references: int = 1  # handles held by the program
    mappings: int = 0
    is_imported: bool = False  # another process has it, and counts it

    @property
    def identity(self) -> tuple[int, int]:
        """What is the same for all handles of the same memory: it may have been exported, and imported again."""
        return self.file.inode, self.offset


@dataclass(frozen=True)
class Reservation:
    """A range of addresses."""

    address: int
    size: int


class Mapping(Allocation):
    """Physical memory at an address.

    `flags` are its CUmemAccess_flags, 0 while no device may access it; `access` are those of each device, by ordinal.
    """

    __slots__ = ("access", "physical")

    def __init__(self, address: int, size: int, device: int, serial: int, physical: Physical) -> None:
        super().__init__(address, size, "virtual", device, 0, serial)
        self.physical = physical
        self.access: dict[int, int] = {}


class VirtualMemory:
    """All reserved ranges and mappings of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._space = machine.arena.ranges
        # A process can have few files open, so all memory that is not for other processes is in one.
        self._store = Store()
        self._reservations: AddressRanges[Reservation] = AddressRanges()
        self._mappings: AddressRanges[Mapping] = AddressRanges()

    def reserve(self, size: int, alignment: int) -> int:
        """Return the start of `size` addresses."""
        address = self._space.reserve(size, max(alignment, PAGE))
        self._reservations.add(Reservation(address, size))
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Give back a whole range without mappings."""
        found = self._reservations.at(address)
        if found is None or found.size != size:
            raise DriverError(Result.INVALID_VALUE, f"{size} bytes at {address:#x} are not a reserved range")
        if self._mappings.overlapping(address, size):
            raise DriverError(Result.INVALID_VALUE, f"the range at {address:#x} has mappings; unmap them first")
        self._reservations.remove(found)
        self._space.unreserve(address, size)

    def create(self, device: Device, size: int, handle_types: int) -> Physical:
        """Return new physical memory, which counts as used from now on."""
        device.memory.take(size)
        try:
            # What other processes import is a whole file.
            file, offset = (Store.new_file(size), 0) if handle_types else self._store.take(size)
        except DriverError:
            device.memory.give_back(size)
            raise
        return self._register(Physical(self._machine.new_handle(), device, size, file, offset, handle_types))

    def adopt(self, device: Device, file: int) -> Physical:
        """Return physical memory of another process, from a file descriptor that is copied."""
        try:
            size = os.fstat(file).st_size
            if not size or size % PAGE:
                raise OSError(f"it has {size} bytes")
            own = SharedFile(os.dup(file))
        except OSError as error:
            raise DriverError(Result.INVALID_VALUE, f"{file} is not a file descriptor of shared memory") from error
        return self._register(Physical(self._machine.new_handle(), device, size, own, 0, 1, is_imported=True))

    def _register(self, physical: Physical) -> Physical:
        self._machine.objects[physical.handle] = physical
        return physical

    def release(self, physical: Physical) -> None:
        """Drop one handle. The memory goes when it has neither handles nor mappings."""
        physical.references -= 1
        self._drop_unused(physical)

    def map(self, address: int, physical: Physical) -> None:
        """Put memory at an address inside a reserved range; nothing may access it yet."""
        size = physical.size
        if self._reservations.holding(address, size) is None:
            raise DriverError(Result.INVALID_VALUE, f"{size} bytes at {address:#x} are not inside a reserved range")
        if self._mappings.overlapping(address, size):
            raise DriverError(Result.INVALID_VALUE, f"something is mapped at {address:#x} already")
        self._space.map(address, size, physical.file, physical.offset)
        ordinal, serial = physical.device.ordinal, self._machine.new_serial()
        self._mappings.add(Mapping(address, size, ordinal, serial, physical))
        physical.mappings += 1

    def unmap(self, address: int, size: int) -> None:
        """Take whole mappings away. What is pending runs first."""
        self._exactly(address, size)
        self._machine.scheduler.drain()
        mappings = self._exactly(address, size)  # again: other threads may have unmapped it during the wait
        for mapping in mappings:
            mapping.is_given_back = True
        abi.gives_back("mapping", (address, size))
        for mapping in mappings:
            if mapping.flags:
                self._machine.allocations.remove(mapping)
            self._space.unmap(mapping.address, mapping.size)
            self._mappings.remove(mapping)
            mapping.physical.mappings -= 1
            self._drop_unused(mapping.physical)

    def set_access(self, address: int, size: int, device: Device, access: int) -> None:
        """Say how a device may access whole mappings. If that is less than before, what is pending runs first.

        All devices use the same addresses, so memory that one of them may access is in the reach of all.
        """
        for mapping in self._exactly(address, size):
            before, mapping.access[device.ordinal] = mapping.flags, access
            flags = max(mapping.access.values())
            if flags == before:
                continue
            if flags < before:
                self._machine.scheduler.drain()
            self._space.protect(mapping.address, mapping.size, flags)
            mapping.flags = flags
            if not before:
                self._machine.allocations.add(mapping)
            elif not flags:
                self._machine.allocations.remove(mapping)
            elif self._machine.checkers is not None:
                self._machine.checkers.protected(mapping)

    def reachable(self, address: int, size: int, *, to_write: bool) -> Mapping | None:
        """Return the first of the neighbouring mappings that hold the range, if it may be accessed so."""
        mappings, end = self._mappings.overlapping(address, size), address
        needed = READ_WRITE if to_write else READ_ONLY
        for mapping in mappings:
            if mapping.address > end or mapping.flags < needed:
                return None
            end = mapping.address + mapping.size
        return mappings[0] if mappings and address + size <= end else None

    def mapping_at(self, address: int) -> Mapping | None:
        """Return the mapping that holds an address."""
        return self._mappings.holding(address)

    def mapped_elsewhere(self, mapping: Mapping) -> Mapping | None:
        """Return the oldest other mapping of the same memory."""
        if mapping.physical.mappings < 2 and not mapping.physical.handle_types:
            return None
        others = [other for other in self._mappings if other is not mapping and other.size == mapping.size]
        same = [other for other in others if other.physical.identity == mapping.physical.identity]
        return min(same, key=lambda other: other.serial, default=None)

    def reservation_at(self, address: int) -> Reservation | None:
        """Return the range that holds an address."""
        return self._reservations.holding(address)

    def _exactly(self, address: int, size: int) -> list[Mapping]:
        """Return the mappings that a range is made of, else fail."""
        found, end = self._mappings.overlapping(address, size), address + size
        for mapping in found:
            if mapping.address != address or mapping.is_given_back:
                break
            address += mapping.size
        if not found or address != end:
            raise DriverError(Result.INVALID_VALUE, f"the {size} bytes up to {end:#x} are not made of whole mappings")
        return found

    def _drop_unused(self, physical: Physical) -> None:
        if physical.references or physical.mappings:
            return
        abi.gives_back("physical", physical)
        if physical.handle_types:
            physical.file.close()
        else:
            self._store.give_back(physical.offset, physical.size)
        del self._machine.objects[physical.handle]
        if not physical.is_imported:
            physical.device.memory.give_back(physical.size)
