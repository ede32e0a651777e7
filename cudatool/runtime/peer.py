"""Memory of other devices: who may use whose, and copies between devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cudatool.errors import CudaError, UsageError
from cudatool.runtime import calls, transfer
from cudatool.runtime.allocator import Layout
from cudatool.runtime.calls import check, operation
from cudatool.runtime.capture import is_capturing, relaxed
from cudatool.runtime.device import DeviceLike, can_device_access_peer, device_index
from cudatool.runtime.device import device as on_device
from cudatool.runtime.extents import Extent, emit_extents
from cudatool.runtime.stream import Stream, current_stream
from cudatool.trace import hooks
from cudatool.trace.events import AccessFlag, CopyFlag, Kind

if TYPE_CHECKING:
    from cudatool.runtime.array import DeviceArray

__all__ = ["copy_between", "enable_peer_access"]

_enabled: dict[tuple[int, int], bool] = {}  # device, peer -> whether the device can use the peer's memory now


def enable_peer_access(device: DeviceLike, peer_device: DeviceLike) -> None:
    """Let kernels and copies on `device` use the memory of `peer_device` directly, from now on.

    Copies between the two do so by themselves before the first one, where the machine can; a kernel that is given an
    array of another device needs it. Memory in expandable segments stays its own device's.

    Raises
    ------
    CudaError
        The machine does not connect the two, or the device has too many peers.
    """
    index, peer = device_index(device), device_index(peer_device)
    if index == peer:
        raise UsageError(f"device {index} is no peer of itself")
    if not _enable(index, peer):
        raise CudaError(
            f"device {index} cannot use the memory of device {peer}; copy between them instead",
            "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        )


def _enable(device: int, peer: int) -> bool:
    """Enable it if it is not yet, and return whether it is."""
    found = _enabled.get((device, peer))
    if found is None:
        found = can_device_access_peer(device, peer)
        if found:
            results = calls.driver.CUresult
            with on_device(device), operation(), relaxed():  # a captured copy may be the first
                (status,) = calls.driver.cuCtxEnablePeerAccess(_context(peer), 0)
            # Another library of this process may have done it.
            found = status in (results.CUDA_SUCCESS, results.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        _enabled[device, peer] = found
    return found


@functools.cache
def _context(device: int) -> Any:
    """Return the primary context of a device."""
    with on_device(device):
        return check(calls.driver.cuCtxGetCurrent())


def copy_between(copies: Sequence[tuple[DeviceArray, DeviceArray]]) -> None:
    """Enqueue copies between devices, each from its second to its first array, broadcast and cast.

    Each is in order with the current streams of both devices: what they were given before comes first, what they are
    given afterwards waits. Those to different devices run at the same time.

    Raises
    ------
    ShapeError
        The shapes do not fit.
    """
    from cudatool.runtime.array import empty  # arrays copy between devices, too

    moves = []
    for target, source in copies:
        transfer.broadcast(source.layout, target.shape)
        # What travels is contiguous, in the source's dtype; each device rearranges and casts what is its own.
        fits = target.is_contiguous() and (target.shape, target.dtype) == (source.shape, source.dtype)
        landing = target if fits else empty(source.shape, source.dtype, device=target.device)
        moves.append((target, landing, source.contiguous()))
    lanes = {(target.device, source.device): None for target, _, source in moves}
    streams = [(current_stream(to), current_stream(from_)) for to, from_ in lanes]
    for receiver, sender in streams:
        receiver.wait_stream(sender)
    for target, landing, packed in moves:
        _copy(landing.layout, packed.layout, current_stream(target.device), packed.device)
    for receiver, sender in streams:
        sender.wait_stream(receiver)
    for target, landing, _ in moves:
        if landing is not target:
            transfer.copy_on_device(target.layout, landing.layout, current_stream(target.device))


def _copy(target: Layout, source: Layout, stream: Stream, source_device: int) -> None:
    """Enqueue a copy of contiguous memory of another device, on a stream of the target's device."""
    size, device = target.nbytes, stream.device_index
    if not size:
        return
    _enable(device, source_device)
    handle = stream.core.handle
    to, from_ = target.ctypes.data, source.ctypes.data
    # A driver does not capture the copy that names contexts; the other one finds them by the addresses.
    name = "cuMemcpyAsync" if is_capturing(stream) else "cuMemcpyPeerAsync"
    with on_device(device), operation() as correlation:
        if name == "cuMemcpyAsync":
            check(calls.driver.cuMemcpyAsync(to, from_, size, handle))
        else:
            check(calls.driver.cuMemcpyPeerAsync(to, _context(device), from_, _context(source_device), size, handle))
    if correlation:
        hooks.emit(
            Kind.MEMCPY,
            device=device,
            stream=stream.trace_id(),
            correlation=correlation,
            name=name,
            address=to,
            size=size,
            aux0=from_,
            aux1=1 << device | 1 << source_device,
            flags=CopyFlag.ASYNC | CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE,
        )
        for address, mode in ((from_, AccessFlag.READ), (to, AccessFlag.WRITE)):
            emit_extents(Kind.ACCESS, [Extent(address, size)], mode, device=device, correlation=correlation)
