"""Which memory of other devices kernels of a context may access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cudatool.sim.arena import Allocation
from cudatool.sim.virtual import Mapping

if TYPE_CHECKING:
    from cudatool.sim.machine import Context, Machine

__all__ = ["out_of_reach", "way_to_reach"]

# By kind of allocation: the call that lets another device access it. Memory of the host and managed memory need none.
_WAYS: Final = {
    "device": "cuCtxEnablePeerAccess",
    "module": "cuCtxEnablePeerAccess",
    "array": "cuCtxEnablePeerAccess",
    "ipc": "cuCtxEnablePeerAccess",
    "pool": "cuMemPoolSetAccess",
    "virtual": "cuMemSetAccess",
    "graph": "accessDescs of the node that allocates it",
}


def way_to_reach(allocation: Allocation) -> str:
    """Return what lets another device access memory of this kind."""
    return _WAYS[allocation.kind]


def out_of_reach(machine: Machine, context: Context) -> list[Allocation]:
    """Return the memory of other devices that kernels of a context must not access, by address."""
    own = context.device.ordinal
    if len(machine.devices) == 1:
        return []
    # Even a device's own memory is mapped for those devices only that cuMemSetAccess named.
    others = [one for one in machine.allocations if one.kind == "virtual" or one.device not in (-1, own)]
    if not others:
        return []
    found = (machine.objects.get(handle) for handle in context.peers)
    peers = {peer.device.ordinal for peer in found if peer is not None}
    return [one for one in others if one.kind in _WAYS and not _reaches(machine, context, one, peers)]


def _reaches(machine: Machine, context: Context, allocation: Allocation, peers: set[int]) -> bool:
    own = context.device.ordinal
    if allocation.kind == "pool":
        return machine.pools.live[allocation.pool].may_access(own)
    if isinstance(allocation, Mapping):
        return bool(allocation.access.get(own))
    if allocation.kind == "graph":
        slot = machine.graph_memory.at(allocation.address)
        return slot is None or slot.is_managed or own in slot.reach
    # cuIpcOpenMemHandle gives the context that opens the memory access to it.
    return allocation.device in peers or (allocation.kind == "ipc" and allocation.context == context.handle)
