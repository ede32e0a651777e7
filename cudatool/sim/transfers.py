"""Copies and fills of boxes of bytes: what every copy and memset outside of graphs comes to.

What "synchronous" means is in the CUDA driver API reference, "API synchronization behavior"; each rule stands beside
the code that follows it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from cudatool.sim import abi, profile, signals
from cudatool.sim import machine as state
from cudatool.sim.allocations import Allocation
from cudatool.sim.machine import stream_of
from cudatool.sim.queue import Operation, StreamState
from cudatool.sim.results import DriverError, Result

__all__ = ["Box", "CopyExtent", "copy", "copy_box", "fill", "fill_row", "need_device"]

_READ: Final = 1  # flags of Operation.footprint
_WRITE: Final = 2
# What pinned memory holds while a copy to it is pending: zeros if it is watched who touches it.
_POISON: Final = 0xA5
_WATCHED: Final = 0


class CopyExtent(NamedTuple):
    """Bytes of a row, rows of a slice, slices."""

    width: int
    height: int = 1
    depth: int = 1

    @property
    def size(self) -> int:
        """Bytes that are copied."""
        return self.width * self.height * self.depth


class Box(NamedTuple):
    """Where a copy's bytes are: rows, `pitch` bytes apart, in slices, `slice` bytes apart."""

    address: int
    pitch: int = 0
    slice: int = 0

    def rows(self, extent: CopyExtent) -> Iterable[int]:
        """Return the address of each row."""
        if extent.height == extent.depth == 1:  # most copies
            return (self.address,)
        return self._rows(extent)

    def _rows(self, extent: CopyExtent) -> Iterator[int]:
        for z in range(extent.depth):
            start = self.address + z * self.slice
            for y in range(extent.height):
                yield start + y * self.pitch

    def span(self, extent: CopyExtent) -> int:
        """Return the bytes from the first to the last."""
        return (extent.depth - 1) * self.slice + (extent.height - 1) * self.pitch + extent.width

    def is_dense(self, extent: CopyExtent) -> bool:
        """Return whether there are no gaps between the rows."""
        return self.span(extent) == extent.size


def _check_access(allocations: list[Allocation | None], stream: StreamState) -> None:
    """Fail with CUDA_ERROR_INVALID_VALUE if no device that could do it has access to the pools (cuMemPoolSetAccess).

    That is the stream's device, or another one that has all of the memory within its reach without it.
    """
    known = [found for found in allocations if found is not None and found.device >= 0]
    pools = [state.machine.pools.live[found.pool] for found in known if found.pool]
    if not pools:
        return
    own = stream.context.device.ordinal
    others = {found.device for found in known} - {own}
    # Managed memory was made for one device, and is in the reach of the stream's.
    others -= {device for device in others for found in known if found.kind == "managed" and found.device != device}
    if not any(all(pool.may_access(device) for pool in pools) for device in {own, *others}):
        raise DriverError(Result.INVALID_VALUE, "no device has access to the memory pools of both sides")


def need_device(address: int, size: int) -> None:
    """Fail with CUDA_ERROR_INVALID_VALUE if the driver does not know the memory at an address."""
    if size and state.machine.locate(address, size) is None:
        raise _unknown(address)


def _unknown(address: int) -> DriverError:
    return DriverError(Result.INVALID_VALUE, f"{address:#x} is not a device address", address=address)


def copy(
    dst: int,
    src: int,
    size: int,
    hStream: int | None,
    name: str,
    *,
    known: tuple[bool, bool] = (False, False),
    peer: bool = False,
    now: bool = False,
    footprint: bool = False,
) -> None:
    """Enqueue a copy of `size` bytes; the keywords are those of :func:`copy_box`."""
    copy_box(Box(dst), Box(src), CopyExtent(size), hStream, name, known=known, peer=peer, now=now, footprint=footprint)


def copy_box(
    to: Box,
    source: Box,
    extent: CopyExtent,
    hStream: int | None,
    name: str,
    *,
    known: tuple[bool, bool] = (False, False),
    peer: bool = False,
    now: bool = False,
    footprint: bool = True,
) -> None:
    """Enqueue a copy.

    Parameters
    ----------
    hStream
        None is a synchronous call on the default stream.
    known
        Whether the destination, and the source, must be memory that the driver knows: the call takes a CUdeviceptr.
    peer
        Whether the two contexts were named, so that no access need have been given.
    now
        Whether the source is read before the call returns (CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL).
    footprint
        Whether the operation says what it touches, for who cannot see it from the call's arguments.
    """
    stream = stream_of(hStream or 0)
    if not extent.size:
        return
    if not to.address or not source.address:
        raise DriverError(Result.INVALID_VALUE)
    operation = Operation(stream, "memcpy", name, abi.call.correlation)
    move = _Move(operation, to, source, extent)
    move.check(known, peer=peer)
    operation.host_memory = [move.read, move.written]
    if (watch := state.machine.scheduler.watch) is not None:
        watch.look(operation.host_memory)  # before the driver itself writes there, below
    if hStream is not None:
        move.keep_apart(now=now)
    elif move.origin is not None and not move.from_device:
        operation.host_source = move.read
    if footprint:
        operation.footprint = move.footprint()
    operation.run = move.run
    on_device = move.to_device and move.from_device
    cost = profile.copy_cost(extent.size, on_device=on_device)
    state.machine.scheduler.enqueue(operation, cost=cost, engine=move.engine)
    # Synchronous calls return when done, except device to device, and so do all from host to host ("Memcpy"). An
    # asynchronous one to pageable memory waits too, as the driver may, and as this one must: it cannot know how long
    # that memory lives.
    promised = (hStream is None and not on_device) or not (move.to_device or move.from_device)
    if promised or move.target is None:
        _wait(operation, promised=promised)


def _wait(operation: Operation, *, promised: bool) -> None:
    """Wait for a copy; Ctrl-C takes it back."""
    scheduler = state.machine.scheduler
    try:
        scheduler.wait(operation, promised=promised)
    except signals.Interrupted:
        scheduler.drop([operation])
        raise
    scheduler.check(operation.stream.context)


class _Move:
    """The bytes of one copy, from its call until it has run; an allocation is None where memory is pageable."""

    def __init__(self, operation: Operation, to: Box, source: Box, extent: CopyExtent) -> None:
        self._operation = operation
        self._to = to
        self._source = source
        to_span, source_span = to.span(extent), source.span(extent)
        self.target = state.machine.locate(to.address, to_span, to_write=True)
        self.origin = state.machine.locate(source.address, source_span)
        self.read, self.written = (source.address, source_span), (to.address, to_span)
        # Without gaps on either side, the box is one row.
        is_dense = extent.width < to_span == source_span == extent.size
        self._lines = CopyExtent(extent.size) if is_dense else extent
        self._staged: list[bytes] = []
        self.to_device = self.target is not None and self.target.device >= 0
        self.from_device = self.origin is not None and self.origin.device >= 0

    @property
    def engine(self) -> str:
        """What copies: ``"h2d"`` and ``"d2h"`` beside kernels, else the stream itself."""
        return "" if self.to_device == self.from_device else "h2d" if self.to_device else "d2h"

    def check(self, known: tuple[bool, bool], *, peer: bool) -> None:
        """Fail as :func:`copy_box` does for memory that the driver must know, or that no device may access."""
        if known[0] and self.target is None:
            raise _unknown(self._to.address)
        if known[1] and self.origin is None:
            raise _unknown(self._source.address)
        if not peer:
            _check_access([self.target, self.origin], self._operation.stream)

    def keep_apart(self, *, now: bool) -> None:
        """Let the host's memory be, until an asynchronous copy runs, what a GPU could make of it.

        `now`: the source is read before the call returns, as pageable memory always is.
        """
        is_staged = self.origin is None or now
        if is_staged:  # later changes to it are not seen
            self._staged = [ctypes.string_at(row, self._lines.width) for row in self._source.rows(self._lines)]
        if self.target is not None and self.from_device and not self.to_device:
            # Until the copy runs, its destination holds neither the old nor the new bytes; unless something earlier is
            # still going to read the old ones, as it may.
            if not state.machine.scheduler.may_read_host(*self.written):
                self._poison()
        elif not is_staged and not self.from_device:
            self._operation.host_source = self.read

    def _poison(self) -> None:
        """Let the destination hold what is neither its old nor its new bytes."""
        machine, width = state.machine, self._lines.width
        poison = _POISON if machine.scheduler.watch is None else _WATCHED
        rows = list(self._to.rows(self._lines))
        for row in rows:
            if machine.tape is not None:
                machine.tape.poisoned(row, width, poison)
            ctypes.memset(row, poison, width)
        self._operation.host_target = [(row, width) for row in rows]
        if machine.scheduler.watch is not None:
            machine.scheduler.watch.wrote([self.written])

    def footprint(self) -> list[tuple[int, int, int]]:
        """Return each row that it reads or writes."""
        sides = (self._source, _READ), (self._to, _WRITE)
        return [(row, self._lines.width, flag) for box, flag in sides for row in box.rows(self._lines)]

    def run(self, _: Operation) -> None:
        """Copy.

        Raises
        ------
        DriverError
            ILLEGAL_ADDRESS: memory of either side was freed since the call.
        """
        machine, lines = state.machine, self._lines
        for allocation in (self.target, self.origin):
            if allocation is not None and machine.allocations.at(allocation.address) is not allocation:
                raise DriverError(
                    Result.ILLEGAL_ADDRESS, f"{self._operation.name} accesses memory that was freed before it ran"
                )
        if machine.tape is not None:
            rows = self._to.rows(lines), self._source.rows(lines)
            machine.tape.copying(self._operation, *rows, lines.width, self._staged)
        data: Iterable[bytes | int] = self._staged or self._source.rows(lines)
        for row, before in zip(self._to.rows(lines), data, strict=True):
            ctypes.memmove(row, before, lines.width)
        if machine.checkers is not None:
            rows = self._to.rows(lines), self._source.rows(lines)
            machine.checkers.copied(self._operation, *rows, lines.width)


def fill(
    box: Box,
    value: int,
    width: int,
    count: int,
    height: int,
    hStream: int | None,
    name: str,
    *,
    footprint: bool = False,
) -> None:
    """Enqueue setting `height` rows of `count` elements of `width` bytes to a value. `footprint` as in `copy_box`."""
    machine = state.machine
    stream = stream_of(hStream or 0)
    extent = CopyExtent(count * width, height)
    if not extent.size:
        return
    if box.address % width or (height > 1 and (box.pitch % width or box.pitch < extent.width)):
        raise DriverError(
            Result.INVALID_VALUE, f"{box.address:#x} with a pitch of {box.pitch} does not fit elements of {width} bytes"
        )
    need_device(box.address, box.span(extent))
    operation = Operation(stream, "memset", name, abi.call.correlation)
    target = machine.locate(box.address, box.span(extent), to_write=True)
    _check_access([target], stream)
    lines = CopyExtent(extent.size) if box.is_dense(extent) else extent

    def run(_: Operation) -> None:
        if target is not None and machine.allocations.at(target.address) is not target:
            raise DriverError(Result.ILLEGAL_ADDRESS, f"{name} accesses memory that was freed before it ran")
        if machine.tape is not None:
            machine.tape.filling(operation, box.rows(lines), value.to_bytes(width, "little"), lines.width)
        if machine.checkers is not None:
            machine.checkers.filled(operation, box.rows(lines), lines.width)
        for row in box.rows(lines):
            fill_row(row, lines.width, value.to_bytes(width, "little"))

    operation.host_memory = [(box.address, box.span(extent))]
    if footprint:
        operation.footprint = [(row, lines.width, _WRITE) for row in box.rows(lines)]
    operation.run = run
    # Asynchronous with respect to the host when the target is device memory ("Memset").
    machine.scheduler.enqueue(operation, cost=profile.memset_cost(extent.size))
    if hStream is None and target is not None and target.device < 0:
        machine.scheduler.wait(operation)


def fill_row(row: int, size: int, pattern: bytes) -> None:
    """Set `size` bytes to a pattern again and again."""
    if len(set(pattern)) == 1:
        ctypes.memset(row, pattern[0], size)
        return
    # Fill by doubling: each copy moves what was filled so far.
    filled = len(pattern)
    ctypes.memmove(row, pattern, filled)
    while filled < size:
        step = min(filled, size - filled)
        ctypes.memmove(row + filled, row, step)
        filled += step
