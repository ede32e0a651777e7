"""Memory that graphs allocate and free while they run.

The address of an allocation node is fixed when the node is made; it has memory from the first launch on, and an
allocation is there from each launch until its free. Like NVIDIA's driver this one keeps the memory when it is freed,
for the next launch, until cuDeviceGraphMemTrim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudatool.loading.late_dataclasses import dataclass, field
from cudatool.sim.allocations import AddressRanges, Allocation
from cudatool.sim.arena import PAGE, READ_WRITE
from cudatool.sim.results import DriverError, Result

if TYPE_CHECKING:
    from cudatool.sim.graph.model import Graph
    from cudatool.sim.machine import Context, Device, Machine

__all__ = ["GraphMemory", "Slot"]


@dataclass(eq=False)
class Slot:
    """The address of an allocation node.

    Attributes
    ----------
    address, size, span
        Where it is, how many bytes the program asked for, and how many addresses that takes.
    allocation
        What is there now: from the launch that allocates it to the execution of its last free.
    allocations
        Launches that allocated it and whose free did not execute.
    is_unfreed
        Whether the latest launch that allocates it was not followed by a call that frees it.
    holders
        Graphs and executable graphs with the node.
    is_managed
        Whether it is managed memory, which the host can use, too.
    freed_in
        The graphs with a node that frees it; `is_freed_by_owner` if that is the graph that allocates it.
    """

    address: int
    size: int
    span: int
    device: Device
    context: Context
    is_managed: bool = False
    allocation: Allocation | None = None
    allocations: int = 0
    is_unfreed: bool = False
    is_backed: bool = False
    holders: int = 0
    freed_in: set[Graph] = field(default_factory=set)
    is_freed_by_owner: bool = False


class GraphMemory:
    """All slots of a machine, and how much memory they hold, by device."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._space = machine.arena.ranges
        self._slots: AddressRanges[Slot] = AddressRanges()
        self._high: dict[tuple[int, str], int] = {}

    def reserve(self, size: int, context: Context, device: Device, *, is_managed: bool = False) -> Slot:
        """Return a new address for `size` bytes of `device`."""
        span = -(-size // PAGE) * PAGE
        slot = Slot(self._space.reserve(span, PAGE), size, span, device, context, is_managed)
        self._slots.add(slot)
        return slot

    def at(self, address: int) -> Slot | None:
        """Return the slot that begins at an address."""
        return self._slots.at(address)

    def holding(self, address: int, size: int = 1) -> Slot | None:
        """Return the slot that a range lies in, whether or not it is allocated now."""
        return self._slots.holding(address, size)

    def back(self, slot: Slot) -> None:
        """Map memory to a slot, as cuGraphUpload does. Fails with CUDA_ERROR_OUT_OF_MEMORY."""
        if slot.is_backed:
            return
        try:
            slot.device.memory.take(slot.span)
        except DriverError:
            self.trim(slot.device)
            slot.device.memory.take(slot.span)
        slot.is_backed = True
        for name in ("used", "reserved"):
            key = slot.device.ordinal, name
            self._high[key] = max(self._high.get(key, 0), self.amount(slot.device, name))

    def allocate(self, slot: Slot) -> None:
        """Let a launch allocate the slot."""
        self.back(slot)
        if slot.allocation is None:
            self._space.protect(slot.address, slot.span, READ_WRITE)
            context, serial = slot.context.handle, self._machine.new_serial()
            slot.allocation = Allocation(slot.address, slot.size, "graph", slot.device.ordinal, context, serial)
            self._machine.allocations.add(slot.allocation)
        slot.allocations += 1
        slot.is_unfreed = True

    def will_free(self, address: int) -> Slot:
        """Return the slot that a call, or a node of the graph that it launches, is going to free.

        Raises
        ------
        DriverError
            CUDA_ERROR_INVALID_VALUE if it is not allocated at that point.
        """
        slot = self._slots.at(address)
        if slot is None or not slot.is_unfreed:
            raise DriverError(Result.INVALID_VALUE, f"{address:#x} is not memory that a graph has allocated")
        slot.is_unfreed = False
        return slot

    def release(self, slot: Slot) -> None:
        """Free the slot: the operation that frees it is executed."""
        slot.allocations -= 1
        if slot.allocations == 0 and slot.allocation is not None:
            self._machine.allocations.remove(slot.allocation)
            slot.allocation = None
            self._space.protect(slot.address, slot.span, 0)  # what still uses it, faults

    def drop(self, slot: Slot) -> None:
        """Count one holder less."""
        slot.holders -= 1
        if not slot.holders and not slot.is_backed:
            self._forget(slot)

    def trim(self, device: Device) -> None:
        """Give back the memory of slots in which nothing is allocated (cuDeviceGraphMemTrim)."""
        for slot in self._slots:
            if slot.device is device and slot.is_backed and slot.allocation is None:
                self._space.unmap(slot.address, slot.span)
                device.memory.give_back(slot.span)
                slot.is_backed = False
                if not slot.holders:
                    self._forget(slot)

    def _forget(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._space.unreserve(slot.address, slot.span)

    # ---- statistics ----

    def amount(self, device: Device, name: str) -> int:
        """Return the bytes ``"used"`` by slots that have memory, or ``"reserved"`` for them."""
        backed = [slot for slot in self._slots if slot.device is device and slot.is_backed]
        return sum(slot.size if name == "used" else slot.span for slot in backed)

    def high(self, device: Device, name: str) -> int:
        """Return the most that :meth:`amount` was since the last :meth:`reset_high`."""
        return self._high.get((device.ordinal, name), 0)

    def reset_high(self, device: Device, name: str) -> None:
        """Set the high-water mark to the present amount."""
        self._high[device.ordinal, name] = self.amount(device, name)
