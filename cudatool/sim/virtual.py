"""Virtual memory management: address ranges, physical memory, and which of it is mapped where.

Physical memory is an anonymous file, so that it can be mapped at several addresses and by several processes. What is
mapped and accessible shows among the machine's allocations as runs, one for each stretch of neighbouring mappings
within a reserved range, because that is what copies and kernels may touch in one go.
"""

from __future__ import annotations

import bisect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cudatool.sim.memory import PAGE, AddressSpace, Allocation
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.machine import Device, Machine

__all__ = ["READ_WRITE", "Mapping", "Physical", "Reservation", "VirtualMemory"]

READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_KIND: Final = "virtual"


@dataclass(eq=False, slots=True)
class Physical:
    """Memory without an address: what a generic allocation handle names."""

    handle: int
    device: Device
    size: int
    file: int
    handle_types: int
    references: int = 1  # handles held by the program
    mappings: int = 0
    is_imported: bool = False  # another process has it, and counts it


@dataclass(frozen=True, slots=True)
class Reservation:
    """A range of addresses."""

    address: int
    size: int


@dataclass(eq=False, slots=True)
class Mapping:
    """Physical memory at an address."""

    address: int
    size: int
    physical: Physical
    access: int = 0


class VirtualMemory:
    """All reserved ranges and mappings of a machine."""

    def __init__(self, machine: Machine, space: AddressSpace) -> None:
        self._machine = machine
        self._space = space
        self._reservations: dict[int, Reservation] = {}
        self._starts: list[int] = []  # of mappings, sorted
        self._mappings: dict[int, Mapping] = {}

    def reserve(self, size: int, alignment: int) -> int:
        """Return the start of `size` addresses."""
        address = self._space.reserve(size, max(alignment, PAGE))
        self._reservations[address] = Reservation(address, size)
        return address

    def unreserve(self, address: int, size: int) -> None:
        """Give back a whole range without mappings."""
        found = self._reservations.get(address)
        if found is None or found.size != size:
            raise DriverError(Result.INVALID_VALUE, f"{size} bytes at {address:#x} are not a reserved range")
        if self._within(address, size):
            raise DriverError(Result.INVALID_VALUE, f"the range at {address:#x} has mappings; unmap them first")
        del self._reservations[address]
        self._space.unreserve(address, size)

    def create(self, device: Device, size: int, handle_types: int) -> Physical:
        """Return new physical memory, which counts as used from now on."""
        device.memory.take(size)
        file = os.memfd_create("cudatool")
        try:
            os.ftruncate(file, size)
        except OSError as error:
            os.close(file)
            device.memory.give_back(size)
            raise DriverError(Result.OUT_OF_MEMORY, "the host has no memory left for the software device") from error
        return self._register(Physical(self._machine.new_handle(), device, size, file, handle_types))

    def adopt(self, device: Device, file: int) -> Physical:
        """Return physical memory of another process, from a file descriptor that is copied."""
        try:
            own = os.dup(file)
            size = os.fstat(own).st_size
        except OSError as error:
            raise DriverError(Result.INVALID_VALUE, f"{file} is no file descriptor of shared memory") from error
        physical = Physical(self._machine.new_handle(), device, size, own, 1, is_imported=True)
        return self._register(physical)

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
        reservation = self._reservation(address, size)
        if reservation is None:
            raise DriverError(Result.INVALID_VALUE, f"{size} bytes at {address:#x} are not inside a reserved range")
        if self._within(address, size):
            raise DriverError(Result.INVALID_VALUE, f"something is mapped at {address:#x} already")
        self._space.map(address, size, physical.file)
        bisect.insort(self._starts, address)
        self._mappings[address] = Mapping(address, size, physical)
        physical.mappings += 1

    def unmap(self, address: int, size: int) -> None:
        """Take whole mappings away. What is pending runs first."""
        mappings = self._exactly(address, size)
        self._machine.scheduler.drain()
        for mapping in mappings:
            if mapping.access:
                self._forbid(mapping)
            self._space.unmap(mapping.address, mapping.size)
            self._starts.remove(mapping.address)
            del self._mappings[mapping.address]
            mapping.physical.mappings -= 1
            self._drop_unused(mapping.physical)

    def set_access(self, address: int, size: int, access: int) -> None:
        """Allow or forbid all access to whole mappings. (Read-only access is not told apart from full access.)"""
        for mapping in self._exactly(address, size):
            if access and not mapping.access:
                self._space.protect(mapping.address, mapping.size, accessible=True)
                mapping.access = access
                self._allow(mapping)
            elif not access and mapping.access:
                self._machine.scheduler.drain()
                self._forbid(mapping)
                self._space.protect(mapping.address, mapping.size, accessible=False)
            mapping.access = access

    def mapping_at(self, address: int) -> Mapping | None:
        """Return the mapping that holds an address."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        mapping = self._mappings[self._starts[index]]
        return mapping if address < mapping.address + mapping.size else None

    # Which mappings.

    def _reservation(self, address: int, size: int) -> Reservation | None:
        for found in self._reservations.values():
            if found.address <= address and address + size <= found.address + found.size:
                return found
        return None

    def _within(self, address: int, size: int) -> list[Mapping]:
        """Return the mappings that overlap a range."""
        first = max(bisect.bisect_right(self._starts, address) - 1, 0)
        found = []
        for start in self._starts[first:]:
            if start >= address + size:
                break
            if start + self._mappings[start].size > address:
                found.append(self._mappings[start])
        return found

    def _exactly(self, address: int, size: int) -> list[Mapping]:
        """Return the mappings that a range is made of, else fail."""
        found = self._within(address, size)
        if (
            not found
            or found[0].address != address
            or found[-1].address + found[-1].size != address + size
            or sum(mapping.size for mapping in found) != size
        ):
            raise DriverError(Result.INVALID_VALUE, f"{size} bytes at {address:#x} are not made of whole mappings")
        return found

    def _drop_unused(self, physical: Physical) -> None:
        if physical.references or physical.mappings:
            return
        os.close(physical.file)
        self._machine.objects.pop(physical.handle, None)
        if not physical.is_imported:
            physical.device.memory.give_back(physical.size)

    # Runs of accessible mappings, as allocations. A pending operation knows its allocation by identity, so that what
    # is pending runs before a run gets another beginning.

    def _allow(self, mapping: Mapping) -> None:
        runs = self._machine.allocations
        reservation = self._reservation(mapping.address, mapping.size)
        before, after = runs.holding(mapping.address - 1), runs.at(mapping.address + mapping.size)
        if before is not None and not self._is_run_in(before, reservation):
            before = None
        if after is not None and not self._is_run_in(after, reservation):
            after = None
        size = mapping.size
        if after is not None:
            self._machine.scheduler.drain()
            runs.remove(after)
            size += after.size
        if before is not None:
            before.size += size
        else:
            self._add_run(mapping.address, size, mapping.physical.device)

    def _forbid(self, mapping: Mapping) -> None:
        runs = self._machine.allocations
        run = runs.holding(mapping.address, mapping.size)
        assert run is not None
        end, after = run.address + run.size, mapping.address + mapping.size
        if run.address < mapping.address:
            run.size = mapping.address - run.address
        else:
            runs.remove(run)
        if after < end:
            self._add_run(after, end - after, mapping.physical.device)

    def _add_run(self, address: int, size: int, device: Device) -> None:
        serial = self._machine.new_serial()
        self._machine.allocations.add(Allocation(address, size, _KIND, device.ordinal, 0, serial))

    @staticmethod
    def _is_run_in(run: Allocation, reservation: Reservation | None) -> bool:
        return (
            run.kind == _KIND
            and reservation is not None
            and reservation.address <= run.address < reservation.address + reservation.size
        )
