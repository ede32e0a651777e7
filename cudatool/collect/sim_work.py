"""What calls of the software driver that enqueue kernels, copies, fills or host functions are reported as."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Final

from cudatool.collect.sim_calls import CallsInProgress, DriverCall, EmitCall, not_recorded, pointed
from cudatool.ptx.kernel_names import kernel_name
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, CopyFlag, Kind, launch_flags, pack_dims

__all__ = ["REPORTS", "REPORTS_ALIKE", "launch"]

# Copies and fills whose arguments are not one address and one size for each side.
_OF_BOXES = (
    *("cuMemcpy2D", "cuMemcpy3D", "cuMemcpyBatch", "cuMemsetD2D"),
    *("cuMemcpyHtoA", "cuMemcpyAtoH", "cuMemcpyDtoA", "cuMemcpyAtoD", "cuMemcpyAtoA"),
)


# Until Python 3.12, to look a member of an enumeration up takes 0.2 us.
_KERNEL_LAUNCH, _MEMCPY, _ACCESS = Kind.KERNEL_LAUNCH, Kind.MEMCPY, Kind.ACCESS
_READ, _WRITE = AccessFlag.READ, AccessFlag.WRITE


@lru_cache(maxsize=1024)
def _packed(grid: tuple[int, int, int], block: tuple[int, int, int]) -> tuple[int, int]:
    return pack_dims(*grid), pack_dims(*block)


def launch(calls: CallsInProgress, call: DriverCall, arguments: Sequence[int]) -> None:
    operation = call.operation
    if operation is None:
        return  # captured
    shape = call.shape
    grid, block = _packed(shape.grid, shape.block)
    correlation, stream = call.owners[operation.sequence]
    hooks.emit(
        _KERNEL_LAUNCH,
        device=operation.stream.context.device.ordinal,
        stream=stream,
        correlation=correlation,
        name=kernel_name(operation.name),
        size=shape.shared,
        aux0=grid,
        aux1=block,
        flags=launch_flags(*operation.programmatic),
    )


def _host_function(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    correlation, device, stream = calls.owner()
    if correlation:  # else captured
        hooks.emit(Kind.HOST_FUNCTION, device=device, stream=stream, correlation=correlation, name=name)


@cache  # a sum of flags takes longer than the rest of an event
def _copy_flags(is_async: bool, to_device: bool | None, from_device: bool | None) -> CopyFlag:
    """Return the flags of a copy; of pageable memory it is None whether that is on a device."""
    flags = CopyFlag.ASYNC if is_async else CopyFlag(0)
    if to_device is None:
        flags |= CopyFlag.DESTINATION_PAGEABLE
    elif to_device:
        flags |= CopyFlag.DESTINATION_DEVICE
    if from_device is None:
        flags |= CopyFlag.SOURCE_PAGEABLE
    elif from_device:
        flags |= CopyFlag.SOURCE_DEVICE
    return flags


def _copy(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    if name.startswith(_OF_BOXES):
        _boxes(calls, Kind.MEMCPY, values, name)
        return
    to = values.get("dst") or values.get("dstDevice") or values.get("dstHost") or 0
    source = values.get("src") or values.get("srcDevice") or values.get("srcHost") or 0
    size = values.get("ByteCount", values.get("size", 0))
    correlation, device, stream = calls.owner()
    if not correlation:
        return  # nothing to copy
    target, origin = calls.allocation(to), calls.allocation(source)
    devices = {found.device for found in (target, origin) if found is not None and found.device >= 0}
    hooks.emit(
        _MEMCPY,
        device=device,
        stream=stream,
        correlation=correlation,
        address=to,
        size=size,
        aux0=source,
        aux1=sum(1 << device for device in devices) if len(devices) > 1 else 0,
        flags=_copy_flags(
            "hStream" in values,
            None if target is None else target.device >= 0,
            None if origin is None else origin.device >= 0,
        ),
        name=name,
    )
    _access(correlation, device, source, size, _READ, "source")
    _access(correlation, device, to, size, _WRITE, "destination")


def _boxes(calls: CallsInProgress, kind: Kind, values: dict[str, Any], name: str) -> None:
    """Report copies or fills of several rows, or of several ranges. What each touches is reported when it runs."""
    for number, operation in enumerate(calls.thread.call.copies):
        correlation, stream = calls.thread.call.owners[operation.sequence]
        read = [(address, size) for address, size, flags in operation.footprint if flags == AccessFlag.READ]
        written = [(address, size) for address, size, flags in operation.footprint if flags == AccessFlag.WRITE]
        flags = CopyFlag.ASYNC if "hStream" in values else CopyFlag(0)
        if number:
            flags |= CopyFlag.BATCHED
        for ranges, on_device, pageable in (
            (written, CopyFlag.DESTINATION_DEVICE, CopyFlag.DESTINATION_PAGEABLE),
            (read, CopyFlag.SOURCE_DEVICE, CopyFlag.SOURCE_PAGEABLE),
        ):
            found = calls.allocation(ranges[0][0]) if ranges else None
            on_host = found is not None and found.device < 0
            # CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL: when the call returns, even pinned memory has been read.
            staged = on_host and ranges is read and CopyFlag.ASYNC in flags and not any(operation.host_source)
            if (ranges and found is None) or staged:
                flags |= pageable
            elif found is not None and found.device >= 0:
                flags |= on_device
        hooks.emit(
            kind,
            device=operation.stream.context.device.ordinal,
            stream=stream,
            correlation=correlation,
            address=written[0][0],
            size=sum(size for _, size in written),
            aux0=read[0][0] if read else 0,
            flags=flags,
            name=name,
        )


def _memset(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    if name.startswith(_OF_BOXES):
        _boxes(calls, Kind.MEMSET, values, name)
        return
    width = {"cuMemsetD8": 1, "cuMemsetD16": 2, "cuMemsetD32": 4}[name.removesuffix("Async")]
    value = next(values[key] for key in ("uc", "us", "ui") if key in values)
    size = values["N"] * width
    correlation, device, stream = calls.owner()
    if not correlation:
        return
    hooks.emit(
        Kind.MEMSET,
        device=device,
        stream=stream,
        correlation=correlation,
        address=values["dstDevice"],
        size=size,
        aux0=value,
        aux1=width,
        flags=(CopyFlag.ASYNC if "hStream" in values else 0)
        | (CopyFlag.DESTINATION_DEVICE if _is_on_device(calls, values["dstDevice"]) else 0),
        name=name,
    )
    _access(correlation, device, values["dstDevice"], size, _WRITE, "destination")


def _access(correlation: int, device: int, address: int, size: int, flags: AccessFlag, name: str) -> None:
    hooks.emit(
        _ACCESS,
        device=device,
        correlation=correlation,
        address=address,
        size=size,
        flags=flags,
        name=name,
        stack=0,
    )


def _is_on_device(calls: CallsInProgress, address: int) -> bool:
    found = calls.allocation(address)
    return found is None or found.device >= 0


def _module_load(calls: CallsInProgress, values: dict[str, Any], name: str) -> None:
    handle = pointed(values.get("library") or values["module"])
    library = calls.machine.objects[handle]
    hooks.emit(
        Kind.MODULE_LOAD,
        device=calls.device,
        name=", ".join(map(kernel_name, library.names)),
        size=len(library.image),
    )


REPORTS: Final[dict[str, EmitCall]] = {
    "cuLaunchHostFunc": _host_function,
    "cuStreamAddCallback": _host_function,
    "cuLibraryLoadData": _module_load,
    "cuModuleLoadData": _module_load,
    "cuModuleLoadDataEx": _module_load,
}
REPORTS_ALIKE: Final[dict[str, EmitCall]] = {
    # All other calls whose names begin so.
    "cuMemcpy": _copy,
    "cuMemset": _memset,
    "cuMemDiscard": not_recorded,  # what is discarded has no value after it
}
