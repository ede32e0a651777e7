"""Attributes the device memory that the driver charges to a process: to allocators, libraries, the driver itself.

NVML reports the total (``DEVICE_USE``) repeatedly. Memory that recorded calls took by size is attributed to the caller;
the rest by what had happened when it grew::

    for each reading:
        growth of the process - growth of the memory taken by size  ->  what happened since the previous reading

No call has the size of the memory that contexts, modules, graphs, streams and kernels' local memory take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from cudatool.trace.events import Kind, UseFlag
from cudatool.trace.frames import calling_library
from cudatool.trace.libraries import Library, libraries_of
from cudatool.trace.lifetimes import Ints, Lifetimes, Timeline
from cudatool.trace.model import Trace

__all__ = ["Holder", "Ledger", "LedgerLine", "ledger"]


class Holder(StrEnum):
    """What holds the bytes of a line."""

    BLOCKS = "blocks"
    """Blocks in use, in segments of a caching allocator."""
    CACHED = "cached"
    """The rest of these segments."""
    LIBRARY = "library"
    """Memory that a library, or the program itself, took from the driver."""
    DRIVER = "driver"
    """What the driver took for something that happened."""
    BEFORE = "before"
    """What was there before this part of the recording, and no call of it names."""


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
        return self.owner or "the driver and others", _AS[self.holder]


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
    Holder.BEFORE: "before this part of the recording",
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
_MEMORY: Final = {
    **dict.fromkeys((Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP, Kind.MEM_ALLOC), 1),
    **dict.fromkeys((Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP, Kind.MEM_FREE), -1),
}


def ledger(
    trace: Trace, segments: Lifetimes, curve: Timeline, device: int, *, moment: int | None = None
) -> Ledger | None:
    """Return the ledger of the reading at which the driver charged most to the process; None if there is no reading.

    Parameters
    ----------
    segments, curve
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
    driver = _driver(charged[: at + 1], known[: at + 1], rows["flags"][: at + 1].tolist(), "window" in trace.header)
    index, used = int(readings[at]), int(rows["address"][at])
    lines = [*_by_name(trace, segments, curve, index), *driver]
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
    for kind, way in _MEMORY.items():
        sign[kind] = way
    growth = sign[records["kind"]] * records["size"].astype(np.int64) * (records["device"] == device)
    known: Ints = np.cumsum(growth)[readings]
    return known


def _driver(charged: Ints, known: Ints, causes: list[int], from_before: bool) -> Iterator[LedgerLine]:
    """Yield the memory that the driver took implicitly, by its cause."""
    amounts: dict[int, int] = {}
    rest_before = 0
    for number, (rest, cause) in enumerate(zip((charged - known).tolist(), causes, strict=True)):
        growth, rest_before = rest - rest_before, rest
        if number == 0 and from_before:
            cause = _BEFORE
        if growth > 0:
            amounts[cause] = amounts.pop(cause, 0) + growth
            continue
        for one in (0, cause, *reversed(list(amounts))):  # released: first bytes without cause, then the latest growth
            back = min(amounts.get(one, 0), -growth)
            growth += back
            if back:
                amounts[one] -= back
        if growth:
            amounts[0] = amounts.get(0, 0) + growth
    for cause, size in amounts.items():
        if cause == _BEFORE:
            yield LedgerLine(Holder.BEFORE, "", size)
        elif cause:
            yield LedgerLine(Holder.DRIVER, ", ".join(word for flag, word in _CAUSES.items() if flag & cause), size)


_BEFORE: Final = -1


def _by_name(trace: Trace, segments: Lifetimes, curve: Timeline, index: int) -> Iterator[LedgerLine]:
    held = segments.at(index)
    kinds = trace.records["kind"][held.start]
    taken = kinds == Kind.MEM_ALLOC
    owners: dict[str, int] = {}
    for stack, size in zip(held.stack[taken].tolist(), held.size[taken].tolist(), strict=True):
        owner = _owner(trace, stack)
        owners[owner] = owners.get(owner, 0) + size
    for owner, size in owners.items():
        yield LedgerLine(Holder.LIBRARY, owner, size)
    reserved = int(held.size[~taken].sum())
    if reserved:
        row = int(np.searchsorted(curve.index, index, side="right")) - 1
        in_use = min(max(int(curve.active[row]) - int(held.size[taken].sum()), 0), reserved)
        owner = Library.PYTORCH if Library.PYTORCH in libraries_of(trace) else "cudatool's runtime"
        yield LedgerLine(Holder.BLOCKS, owner, in_use)
        yield LedgerLine(Holder.CACHED, owner, reserved - in_use)


def _owner(trace: Trace, stack: int) -> str:
    """Return who took memory from the driver: a library by its name, or its file's name; else the program itself."""
    library = calling_library(trace.stack(stack))
    if not library:
        return "the program itself"
    return next((owner for pattern, owner in _OWNERS if pattern.search(library)), library)
