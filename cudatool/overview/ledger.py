"""Attributes the device memory that the driver charges to a process: to allocators, libraries, the driver itself.

NVML reports the total (``DEVICE_USE``) repeatedly. Memory that recorded calls took by size is attributed to the caller;
the rest by what had happened when it grew::

    for each reading:
        growth of the process - growth of the memory taken by size  ->  what happened since the previous reading

No call has the size of the memory that contexts, modules, graphs, streams and kernels' local memory take.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from cudatool.trace.distinct import distinct
from cudatool.trace.events import BY_SIZE, Kind, UseFlag
from cudatool.trace.frames import calling_library
from cudatool.trace.libraries import Library, libraries_of
from cudatool.trace.lifetimes import Ints, Lifetimes
from cudatool.trace.model import Frame, Trace

__all__ = ["Causes", "Holder", "Ledger", "LedgerLine", "ledger", "lines_by_name", "owner_of"]


class Holder(StrEnum):
    """What holds the bytes of a line."""

    BLOCKS = "blocks"
    """Blocks in use, in segments of a caching allocator, or in a library's own memory pool."""
    CACHED = "cached"
    """The rest of these segments, or of what the library took from the driver."""
    LIBRARY = "library"
    """Memory that a library, or the program itself, took from the driver."""
    DRIVER = "driver"
    """What the driver took for something that happened."""
    BEFORE = "before"
    """What was there before what was recorded, and no recorded call names."""

    @property
    def words(self) -> str:
        """What the bytes are; empty for the driver's, which have a cause."""
        return _AS.get(self, "")


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One line: the holder, the bytes, and what they are."""

    holder: Holder
    owner: str
    size: int

    @property
    def words(self) -> tuple[str, str]:
        """Who holds the bytes, and what they are."""
        if self.holder is Holder.DRIVER:
            return "the driver", self.owner
        return self.owner or "the driver and others", self.holder.words


@dataclass(frozen=True, slots=True)
class Ledger:
    """A device's memory at one reading of NVML; all in bytes.

    Attributes
    ----------
    index, time
        The record of the reading, and its time in ns.
    process
        What the driver charges to this process, None if it does not say: then the lines are compared with `used`.
    used, total
        Of the device: in use by all processes, and the total.
    lines
        The largest first. Together with `unknown` they are `process`.
    unknown
        Growth without a recorded cause; negative if the recording names more than the driver charges.
    beside
        Not charged to this process: other processes, and the driver itself.
    is_most
        Whether it is the reading with the most bytes, rather than the last one up to a chosen moment.
    """

    index: int
    time: int
    process: int | None
    used: int
    total: int
    lines: tuple[LedgerLine, ...]
    unknown: int
    beside: int
    is_most: bool = True

    @property
    def named(self) -> float:
        """The share of the process's bytes that the lines name, 0 to 1."""
        whole = self.used if self.process is None else self.process
        return 1 - abs(self.unknown) / whole if whole else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"named": self.named}


_AS: Final = {
    Holder.BLOCKS: "blocks in use",
    Holder.CACHED: "cached",
    Holder.LIBRARY: "taken from the driver",
    Holder.BEFORE: "there before the recorded part",
}
_CAUSES: Final = {
    UseFlag.CONTEXT: "context",
    UseFlag.MODULE: "modules",
    UseFlag.GRAPH: "graphs",
    UseFlag.STREAM: "streams",
    UseFlag.KERNEL: "local memory of kernels",
    UseFlag.HEAP: "limits that were set",
    UseFlag.POOL: "pools of cuMemAllocAsync",
}
_OWNERS: Final = (
    (re.compile(r"libcublas"), "cuBLAS"),
    (re.compile(r"libcudnn"), "cuDNN"),
    (re.compile(r"libcufft"), "cuFFT"),
    (re.compile(r"libcurand"), "cuRAND"),
    (re.compile(r"libcusparse"), "cuSPARSE"),
    (re.compile(r"libcusolver"), "cuSOLVER"),
    (re.compile(r"libnccl"), "NCCL"),
    (re.compile(r"libnvshmem"), "NVSHMEM"),
    (re.compile(r"xla_cuda|libjax|jaxlib"), "JAX"),
    (re.compile(r"libc10_cuda|libtorch"), Library.PYTORCH),
    (re.compile(r"^cupy|^cupy_backends"), "CuPy"),
    (re.compile(r"^rmm|librmm"), "RMM"),
    (re.compile(r"libtriton|cuda_utils"), "Triton"),
    (re.compile(r"libtensorflow"), "TensorFlow"),
)


def ledger(
    trace: Trace, blocks: Lifetimes, segments: Lifetimes, device: int, *, moment: int | None = None
) -> Ledger | None:
    """Return the ledger of the reading at which the driver charged most to the process; None if there is no reading.

    Parameters
    ----------
    blocks, segments
        Of this device.
    moment
        A record: of the last reading up to there.
    """
    records = trace.records
    readings = np.flatnonzero((records["kind"] == Kind.DEVICE_USE) & (records["device"] == device))
    if not len(readings) or (moment is not None and readings[0] > moment):
        return None
    rows = records[readings]
    knows_process = bool(rows["size"].any())
    charged = rows["size" if knows_process else "address"].astype(np.int64)
    known = _known(trace, readings, device)
    at = int(np.argmax(charged) if moment is None else np.searchsorted(readings, moment, side="right") - 1)
    causes = Causes()
    for number, rest in enumerate((charged - known)[: at + 1].tolist()):
        is_from_before = number == 0 and ("window" in trace.header or trace.header.get("driver_ran_before", False))
        causes.note(rest, _BEFORE if is_from_before else int(rows["flags"][number]))
    if at + 1 < len(rows):
        causes.note_late(int(rows["flags"][at + 1]))
    index, used = int(readings[at]), int(rows["address"][at])
    lines = [*_by_name(trace, blocks, segments, index, device), *causes.lines()]
    lines.sort(key=lambda line: -line.size)
    unknown = int(charged[at]) - sum(line.size for line in lines)
    return Ledger(
        index=index,
        time=int(records["time"][index]),
        process=int(charged[at]) if knows_process else None,
        used=used,
        total=int(rows["aux0"][at]),
        lines=tuple(line for line in lines if line.size),
        unknown=unknown,
        beside=used - int(charged[at]),
        is_most=moment is None,
    )


def _known(trace: Trace, readings: Ints, device: int) -> Ints:
    """Return the bytes that calls had taken by size at each reading."""
    records = trace.records
    sign = np.zeros(256, np.int64)
    for kind, way in BY_SIZE.items():
        sign[kind] = way
    growth = sign[records["kind"]] * records["size"].astype(np.int64) * (records["device"] == device)
    known: Ints = np.cumsum(growth)[readings]
    return known


class Causes:
    """The memory that the driver took implicitly, by what had happened, from one reading to the next."""

    def __init__(self) -> None:
        self._amounts: dict[int, int] = {}
        self._rest = self._late = 0  # the latter: growth of the reading before that had no cause

    def note(self, rest: int, cause: int) -> None:
        """Take a reading.

        Parameters
        ----------
        rest
            Bytes that the driver charges beyond what calls took by size.
        cause
            Flags (:class:`~cudatool.trace.events.UseFlag`) of what had happened since the reading before.
        """
        amounts = self._amounts
        growth, self._rest = rest - self._rest, rest
        self.note_late(cause)
        if growth > 0:
            amounts[cause] = amounts.pop(cause, 0) + growth
            self._late = 0 if cause else growth
            return
        for one in (0, cause, *reversed(list(amounts))):  # released: first bytes without cause, then the latest growth
            back = min(amounts.get(one, 0), -growth)
            growth += back
            if back:
                amounts[one] -= back
        if growth:
            amounts[0] = amounts.get(0, 0) + growth

    def note_late(self, cause: int) -> None:
        """Take the cause of the next reading: what happens at a first use is known when it is done, and the reading
        before may have its memory.
        """
        late, self._late = min(self._late, self._amounts.get(0, 0)), 0
        if cause and late:
            self._amounts[0] -= late
            self._amounts[cause] = self._amounts.pop(cause, 0) + late

    def lines(self) -> Iterator[LedgerLine]:
        """Yield a line for each cause, in the order of the last growth; what has none is in no line."""
        for cause, size in self._amounts.items():
            if cause == _BEFORE:
                yield LedgerLine(Holder.BEFORE, "", size)
            elif cause:
                owner = ", ".join(word for flag, word in _CAUSES.items() if flag & cause)
                yield LedgerLine(Holder.DRIVER, owner, size)


_BEFORE: Final = -1


def _by_name(trace: Trace, blocks: Lifetimes, segments: Lifetimes, index: int, device: int) -> Iterator[LedgerLine]:
    held, live = segments.at(index), blocks.at(index)
    of_driver = trace.records["kind"][held.start] == Kind.MEM_ALLOC
    is_pooled = held.library != 0
    taken, own = held[of_driver & ~is_pooled], held[~of_driver]
    by_stack = Counter[int]()
    for stack, size in zip(taken.stack.tolist(), taken.size.tolist(), strict=True):
        by_stack[stack] += size
    active = max(int(live.size[live.library == 0].sum()) - by_stack.total(), 0)
    pools = _pools(trace, live[live.library != 0], held[is_pooled])
    yield from lines_by_name(
        by_stack, trace.stack, active, int(own.size.sum()), libraries_of(trace), pools, _said(trace, index, device)
    )


def _pools(trace: Trace, blocks: Lifetimes, chunks: Lifetimes) -> dict[str, tuple[int, int]]:
    """Return the bytes in blocks and in chunks of each library's pool. Blocks outside of known chunks are left out."""
    order = np.argsort(chunks.address)
    begin, end = chunks.address[order], (chunks.address + chunks.size)[order]
    at = np.searchsorted(begin, blocks.address, side="right") - 1
    inside = (at >= 0) & (blocks.address < end[at]) if len(end) else np.zeros(len(blocks), np.bool_)
    found = {}
    for library in distinct(chunks.library).tolist():
        used = int(blocks.size[inside & (blocks.library == library)].sum())
        found[trace.names[library]] = used, int(chunks.size[chunks.library == library].sum())
    return found


def _said(trace: Trace, index: int, device: int) -> dict[str, int]:
    """Return the bytes in use of each library, as it said at the time nearest to a record."""
    records = trace.records
    said = np.flatnonzero((records["kind"] == Kind.POOL_USE) & (records["device"] == device))
    found = {}
    for library in distinct(records["name"][said]).tolist():
        own = said[records["name"][said] == library]
        nearest = own[np.argmin(np.abs(records["time"][own] - records["time"][index]))]
        found[trace.names[library]] = int(records["size"][nearest])
    return found


def lines_by_name(
    taken: Mapping[int, int],
    stack_of: Callable[[int], tuple[Frame, ...]],
    active: int,
    reserved: int,
    libraries: Sequence[str],
    pools: Mapping[str, tuple[int, int]],
    said: Mapping[str, int],
) -> Iterator[LedgerLine]:
    """Yield what calls took by size, in bytes.

    Parameters
    ----------
    taken
        Live, straight from the driver, by stack.
    stack_of
        Gives a stack.
    active, reserved
        In blocks, and in segments, of a caching allocator.
    libraries
        Loaded by the program.
    pools
        In blocks of libraries' own pools, and in what these pools took from the driver, which is not in `taken`.
    said
        What libraries say is in use of what they took from the driver.
    """
    owners: Counter[str] = Counter()
    for stack, size in taken.items():
        owners[owner_of(stack_of(stack))] += size
    held = dict(pools)
    held |= {owner: (said[owner], owners.pop(owner)) for owner in list(owners) if owner in said}
    if reserved:
        held[Library.PYTORCH if Library.PYTORCH in libraries else "cudatool's runtime"] = active, reserved
    for owner, size in owners.items():
        yield LedgerLine(Holder.LIBRARY, owner, size)
    for owner, (used, size) in held.items():
        in_use = min(used, size)
        yield LedgerLine(Holder.BLOCKS, owner, in_use)
        yield LedgerLine(Holder.CACHED, owner, size - in_use)


def owner_of(stack: tuple[Frame, ...]) -> str:
    """Return who took memory from the driver: a library by its name, or its file's name; else the program itself."""
    library = calling_library(stack)
    if not library:
        return "the program itself"
    return next((owner for pattern, owner in _OWNERS if pattern.search(library)), library)
