"""What calls of the software driver that allocate, map, share or free memory are reported as."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cudatool.collect.sim_calls import CallsInProgress, EmitCall, pointed
from cudatool.memory import observers
from cudatool.trace import hooks
from cudatool.trace.events import ENDED_WITH_CONTEXT, Kind, WarningCode, WarningFlag
from cudatool.trace.libraries import Library
from cudatool.trace.physical import reset_text

if TYPE_CHECKING:
    from cudatool.sim.allocations import Allocation

__all__ = ["ALLOCATE", "REPORTS", "given_back", "out_of_memory"]

# Calls that ask for memory of a device.
ALLOCATE = frozenset(
    [
        *("cuMemAlloc", "cuMemAllocPitch", "cuMemAllocManaged", "cuMemAllocAsync", "cuMemAllocFromPoolAsync"),
        *("cuMemCreate", "cuArrayCreate", "cuArray3DCreate", "cuMipmappedArrayCreate"),
    ]
)


def _mem_alloc(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    address = pointed(values["dptr"])
    found = calls.allocation_at(address)
    if found is None:
        return  # captured: graphs allocate when they are launched
    if found.device < 0:  # from a pool of pinned memory
        hooks.emit(Kind.HOST_ALLOC, address=address, size=found.size, name=name)
        return
    # A pool may be of another device than the stream; and any context may be current when memory is freed.
    _, _, stream = calls.owner()
    hooks.emit(Kind.MEM_ALLOC, device=found.device, stream=stream, address=address, size=found.size, name=name)


def given_back(calls: CallsInProgress, values: dict[str, Any], name: str, kind: str, what: Any) -> None:
    """Report what the call is about to give back (:meth:`cudatool.sim.Subscriber.gives_back`)."""
    if kind == "allocation":
        _free(calls, values, name, what)
    elif kind == "mapping":
        hooks.emit(Kind.MEM_UNMAP, device=calls.device, address=what[0], size=what[1], name=name)
    elif kind == "physical":
        hooks.emit(Kind.PHYSICAL_FREE, device=what.device.ordinal, aux0=what.handle, size=what.size, name=name)
    elif name == "cuDevicePrimaryCtxReset":
        _reset(calls, values, name)
    else:
        for found in what:
            if found.kind != "module":  # which nothing reported
                _free(calls, values, name, found, flags=ENDED_WITH_CONTEXT)


def _free(calls: CallsInProgress, values: dict[str, Any], name: str, found: Allocation, *, flags: int = 0) -> None:
    if found.device < 0:
        hooks.emit(Kind.HOST_FREE, address=found.address, size=found.size, name=name)
        return
    _, stream = calls.stream(values["hStream"]) if "hStream" in values else (found.device, 0)
    where = {"device": found.device, "stream": stream, "address": found.address}
    hooks.emit(Kind.MEM_FREE, **where, size=found.size, flags=flags, name=name)


def out_of_memory(calls: CallsInProgress, values: dict[str, Any]) -> None:
    """Report that the program asked the driver for memory and did not get it."""
    pool = calls.machine.objects.get(values.get("pool", 0))
    if pool is not None and pool.device < 0:
        return  # of the host
    device = calls.stream(values["hStream"])[0] if "hStream" in values else calls.device
    size = values.get("bytesize", values.get("size", 0)) or values.get("WidthInBytes", 0) * values.get("Height", 0)
    limit = pool.max_size if pool is not None else 0
    memory = calls.machine.devices[device].memory
    free = memory.size - memory.used
    hooks.emit(Kind.LIBRARY_OOM, device=device, size=size, aux0=free, aux1=limit, name=Library.DRIVER)
    observers.notify(device, size, limit, free)


def _physical_alloc(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    physical = calls.machine.objects[pointed(values["handle"])]
    device = physical.device.ordinal
    hooks.emit(Kind.PHYSICAL_ALLOC, device=device, aux0=physical.handle, size=physical.size, name=name)


def _mem_map(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    mapping = calls.machine.virtual.mapping_at(values["ptr"])
    assert mapping is not None  # the call has just made it
    other = calls.machine.virtual.mapped_elsewhere(mapping)
    elsewhere = other.address if other is not None else 0
    device = mapping.device
    hooks.emit(Kind.MEM_MAP, device=device, address=values["ptr"], size=values["size"], aux0=elsewhere, name=name)


def _array_create(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    array = calls.machine.objects[pointed(values["pHandle"])]
    found = array.allocation
    hooks.emit(Kind.MEM_ALLOC, device=found.device, address=found.address, size=found.size, name=name)


def _host_alloc(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    hooks.emit(Kind.HOST_ALLOC, address=pointed(values["pp"]), size=values["bytesize"], name=name)


def _host_register(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    hooks.emit(Kind.HOST_ALLOC, address=values["p"], size=values["bytesize"], name=name)


def _share(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    opened = values.get("pdptr") or values.get("ptr_out")
    address = pointed(opened) if opened else values["dptr" if "dptr" in values else "ptr"]
    found = calls.allocation_at(address)
    size = found.size if found is not None else 0
    hooks.emit(Kind.WARNING, name=name, device=calls.device, address=address, size=size, flags=WarningFlag.SHARED)


def _share_physical(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    handle = pointed(values["handle"]) if "osHandle" in values else values["handle"]
    size = calls.machine.objects[handle].size
    hooks.emit(Kind.WARNING, name=name, device=calls.device, size=size, flags=WarningFlag.SHARED)


def _reset(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    hooks.emit(Kind.WARNING, name=reset_text(values["dev"]), aux0=WarningCode.DEVICE_RESET)


REPORTS: Final[dict[str, EmitCall]] = {
    "cuDevicePrimaryCtxReset": _reset,
    "cuIpcGetMemHandle": _share,
    "cuIpcOpenMemHandle": _share,
    "cuMemPoolExportPointer": _share,
    "cuMemPoolImportPointer": _share,
    "cuMemExportToShareableHandle": _share_physical,
    "cuMemImportFromShareableHandle": _share_physical,
    "cuMemAlloc": _mem_alloc,
    "cuMemAllocPitch": _mem_alloc,
    "cuMemAllocManaged": _mem_alloc,
    "cuMemAllocAsync": _mem_alloc,
    "cuMemAllocFromPoolAsync": _mem_alloc,
    "cuMemCreate": _physical_alloc,
    "cuMemMap": _mem_map,
    "cuArrayCreate": _array_create,
    "cuArray3DCreate": _array_create,
    "cuMipmappedArrayCreate": _array_create,
    "cuMemAllocHost": _host_alloc,
    "cuMemHostAlloc": _host_alloc,
    "cuMemHostRegister": _host_register,
}
