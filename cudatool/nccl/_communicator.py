"""Communicators, and groups of calls."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from importlib import import_module
from types import TracebackType
from typing import Any, Final, Protocol, Self

from cudatool import _driver
from cudatool.errors import CudaError, UsageError
from cudatool.nccl._calls import SUM, Name, RankPart, wire
from cudatool.runtime.array import DeviceArray, check_writeable
from cudatool.runtime.device import DeviceLike, current_device, device_count, device_indices
from cudatool.runtime.dtypes import require_int
from cudatool.runtime.extents import emit_extents
from cudatool.runtime.stream import Stream, current_stream
from cudatool.runtime.traced_calls import traced
from cudatool.trace import hooks, stacks
from cudatool.trace.events import SHARED_COMMUNICATOR, Kind, pack_dims

__all__ = ["Communicator", "Library", "group", "init_all", "init_rank", "library", "unique_id", "version"]


class Library(Protocol):
    """What implements communicators on a kind of device."""

    def version(self) -> tuple[int, ...]:
        """Return major, minor and patch version."""

    def unique_id(self) -> bytes:
        """Return 128 bytes by which ranks find each other."""

    def init_rank(self, ranks: int, uid: bytes, rank: int, device: int) -> Any:
        """Return the handle of one rank's communicator, when all ranks are there; its device is current."""

    def init_all(self, devices: Sequence[int]) -> list[Any]:
        """Return the handles of a communicator whose ranks are devices of this process."""

    def enqueue(self, calls: Sequence[tuple[Any, RankPart]]) -> list[int]:
        """Enqueue a group of calls, each with its communicator's handle; return their correlation ids."""

    def destroy(self, handle: Any) -> None:
        """Release a communicator, when what was enqueued is done."""


_LIBRARIES: Final = {
    # kind of device -> module with a `library`
    "cuda": "cudatool.nccl._library",
    "sim": "cudatool.nccl._host",
}
_ids = itertools.count(1)


def library() -> Library:
    """Return what this process's kind of device has."""
    found: Library = import_module(_LIBRARIES[_driver.initialize().kind]).library
    return found


@traced
def version() -> tuple[int, ...]:
    """Return NCCL's major, minor and patch version; on the software device, which has none, that of its interface."""
    return library().version()


@traced
def unique_id() -> bytes:
    """Return 128 bytes by which the ranks of a new communicator find each other (:func:`init_rank`).

    The process that made them must be there until all ranks have found each other.
    """
    return library().unique_id()


@traced
def init_rank(num_ranks: int, uid: bytes, rank: int) -> Communicator:
    """Return the communicator of one rank, on the current device, when all ranks have called this.

    Parameters
    ----------
    num_ranks
        How many there are; each is a process of its own, or a thread.
    uid
        From :func:`unique_id`, the same for all.
    rank
        The caller's, from 0 on.

    Raises
    ------
    UsageError
        The numbers make no sense.
    CudaError
        The ranks do not find each other.
    """
    num_ranks, rank = require_int("num_ranks", num_ranks), require_int("rank", rank)
    if not isinstance(uid, bytes | bytearray):
        raise UsageError(f"a unique id is bytes, from cudatool.nccl.unique_id(), not {type(uid).__name__}")
    if not 0 <= rank < num_ranks:
        raise UsageError(f"rank {rank} is none of {num_ranks}")
    if len(uid) != 128:
        raise UsageError(f"a unique id has 128 bytes, not {len(uid)}; take it from cudatool.nccl.unique_id()")
    device = current_device()
    handle = library().init_rank(num_ranks, bytes(uid), rank, device)
    return Communicator(handle, rank, num_ranks, device, _shared_number(uid))


def _shared_number(uid: bytes) -> int:
    """Return a communicator's number, the same on all its ranks; the id itself is a secret, and in no trace."""
    digest = blake2b(uid, digest_size=8, person=b"communicator").digest()
    return SHARED_COMMUNICATOR | int.from_bytes(digest, "little") % SHARED_COMMUNICATOR


class Communicator:
    """One rank's end of the connections between `size` ranks; made by :func:`init_rank`. Also a context manager.

    Every rank calls the same operations in the same order. Arrays are contiguous, on the communicator's device, and of
    one dtype in all ranks. Operations are enqueued on `stream`, by default the device's current one; like a kernel
    they return before they are done.

    Attributes
    ----------
    rank, size
        Which rank, of how many.
    device
        Ordinal of the device.
    id
        Number in traces: of :func:`init_rank` the same on all ranks.
    """

    def __init__(self, handle: Any, rank: int, size: int, device: int, number: int) -> None:
        self._handle = handle
        self.rank = rank
        self.size = size
        self.device = device
        self.id = number

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._handle is None

    @traced
    def close(self) -> None:
        """Close the connections, when what was enqueued is done."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library().destroy(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, _finalizing: Any = sys.is_finalizing) -> None:
        if getattr(self, "_handle", None) is not None and not _finalizing() and _driver.started():
            self.close()

    @traced
    def all_reduce(
        self, array: DeviceArray, out: DeviceArray | None = None, op: int = SUM, *, stream: Stream | None = None
    ) -> DeviceArray:
        """Reduce the arrays of all ranks, for all ranks; `out` has the shape of `array`, which is the default."""
        out = array if out is None else out
        self._same(array, out, 1, 1)
        self._enqueue(Name.ALL_REDUCE, array, out, op=op, stream=stream)
        return out

    @traced
    def reduce(
        self,
        array: DeviceArray,
        out: DeviceArray | None = None,
        root: int = 0,
        op: int = SUM,
        *,
        stream: Stream | None = None,
    ) -> DeviceArray:
        """Reduce the arrays of all ranks, for the rank `root`: into its `out`, by default its `array`."""
        target = None
        if self.rank == self._peer(root):
            target = array if out is None else out
            self._same(array, target, 1, 1)
        self._enqueue(Name.REDUCE, array, target, peer=root, op=op, stream=stream)
        return array if target is None else target

    @traced
    def broadcast(self, array: DeviceArray, root: int = 0, *, stream: Stream | None = None) -> DeviceArray:
        """Copy the array of the rank `root` into those of all ranks."""
        source, target = (array, None) if self.rank == self._peer(root) else (None, array)
        self._enqueue(Name.BROADCAST, source, target, peer=root, stream=stream)
        return array

    @traced
    def all_gather(self, array: DeviceArray, out: DeviceArray, *, stream: Stream | None = None) -> DeviceArray:
        """Copy the arrays of all ranks one after the other into `out`, which has `size` times as many elements."""
        self._same(array, out, self.size, 1)
        self._enqueue(Name.ALL_GATHER, array, out, stream=stream)
        return out

    @traced
    def reduce_scatter(
        self, array: DeviceArray, out: DeviceArray, op: int = SUM, *, stream: Stream | None = None
    ) -> DeviceArray:
        """Reduce the arrays of all ranks and give each its part: `out` has `size` times fewer elements than `array`."""
        self._same(array, out, 1, self.size)
        self._enqueue(Name.REDUCE_SCATTER, array, out, op=op, stream=stream)
        return out

    @traced
    def send(self, array: DeviceArray, peer: int, *, stream: Stream | None = None) -> None:
        """Send an array to the rank `peer`, which calls :meth:`recv`."""
        self._enqueue(Name.SEND, array, None, peer=self._peer(peer), stream=stream)

    @traced
    def recv(self, out: DeviceArray, peer: int, *, stream: Stream | None = None) -> DeviceArray:
        """Receive what the rank `peer` sends into an array of as many elements."""
        self._enqueue(Name.RECV, None, out, peer=self._peer(peer), stream=stream)
        return out

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise UsageError(f"there is no rank {rank}; the communicator has {self.size}")
        return rank

    @staticmethod
    def _same(array: DeviceArray, out: DeviceArray, more: int, fewer: int) -> None:
        """Check that `out` has `more` times, or `fewer` times fewer, elements of the same dtype."""
        if array.dtype != out.dtype or array.size * more != out.size * fewer:
            raise UsageError(
                f"out has {out.size} elements of {out.dtype}; {array.size * more // fewer} of {array.dtype} are needed"
            )

    def _enqueue(
        self,
        name: Name,
        source: DeviceArray | None,
        target: DeviceArray | None,
        *,
        peer: int = 0,
        op: int = SUM,
        stream: Stream | None,
    ) -> None:
        if self._handle is None:
            raise CudaError("the communicator was closed", "CUDA_ERROR_INVALID_HANDLE")
        if op not in range(5):
            raise UsageError(f"{op!r} is no reduction; there are SUM, PROD, MAX, MIN and AVG in cudatool.nccl")
        stream = current_stream(self.device) if stream is None else stream
        for array in (source, target):
            if array is not None and array.device != self.device:
                raise UsageError(f"{array!r} is not on device {self.device}, which is the communicator's")
        if stream.device_index != self.device:
            raise UsageError(f"the stream is of device {stream.device_index}, the communicator of device {self.device}")
        if target is not None:
            check_writeable(target)
        sent = None if source is None else wire(source.layout, name)
        received = sent if target is source else None if target is None else wire(target.layout, name)
        stack = stacks.capture() if hooks.active else 0
        with group():
            _groups.calls.append((self, RankPart(name, sent, received, self.rank, peer, op, stream), stack))

    def _emit(self, call: RankPart, correlation: int, stack: int, *, grouped: bool) -> None:
        device = call.stream.device_index
        hooks.emit(
            Kind.COLLECTIVE,
            device=device,
            stream=call.stream.trace_id(),
            correlation=correlation,
            name=call.name,
            address=call.result.ctypes.data,
            size=call.result.nbytes,
            aux0=self.id,
            aux1=pack_dims(self.rank, self.size),
            flags=int(grouped),
            stack=stack,
        )
        for parts, mode in call.accesses():
            emit_extents(Kind.ACCESS, parts, mode, device=device, correlation=correlation)

    def __repr__(self) -> str:
        return f"<Communicator rank={self.rank} size={self.size} device={self.device}>"


class _Groups(threading.local):
    def __init__(self) -> None:
        self.begins: list[int] = []  # of each open group, how many calls there were when it began
        self.calls: list[tuple[Communicator, RankPart, int]] = []  # the last is the Python stack of the call


_groups = _Groups()


class group:  # noqa: N801 - reads as a statement
    """Context manager: what the thread calls inside is enqueued together, at the end, as ncclGroupEnd does.

    Needed where one thread calls for several ranks, or a rank sends and receives at the same time.

    The operations come in no order, also those of one rank on one stream (NCCL User Guide, Group Calls): none may read
    what another one of the same group writes. End the group between the two.

    A group inside another one is a part of it. One that an exception leaves takes back what was called inside.
    """

    def __enter__(self) -> None:
        _groups.begins.append(len(_groups.calls))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        begin = _groups.begins.pop()
        if error is not None:
            del _groups.calls[begin:]
        if _groups.begins:
            return
        calls, _groups.calls = _groups.calls, []
        if calls:
            correlations = library().enqueue([(communicator._handle, call) for communicator, call, _ in calls])
            for number, ((communicator, call, stack), correlation) in enumerate(zip(calls, correlations, strict=True)):
                if correlation:
                    communicator._emit(call, correlation, stack, grouped=number > 0)


@traced
def init_all(devices: Iterable[DeviceLike] | None = None) -> list[Communicator]:
    """Return the communicators of ranks that are devices of this process, by default all, in their order.

    Put the calls of the ranks into a :class:`group`.

    Raises
    ------
    UsageError
        A device is named twice, or none.
    """
    indices = device_indices(range(device_count()) if devices is None else devices)
    if not indices or len(set(indices)) < len(indices):
        raise UsageError(f"each rank needs its own device, not {indices}")
    handles, number = library().init_all(indices), next(_ids)
    return [
        Communicator(handle, rank, len(indices), device, number)
        for rank, (handle, device) in enumerate(zip(handles, indices, strict=True))
    ]
