"""The part of a device's memory outside of the allocator: contexts, libraries, other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cudatool.trace.events import FREE_UNKNOWN, Kind
from cudatool.trace.lifetimes import Lifetimes, Timeline
from cudatool.trace.model import Trace

__all__ = ["DeviceUse", "FreeReading", "Outside", "device_use", "outside"]


@dataclass(frozen=True, slots=True)
class FreeReading:
    """The free memory that the driver reported at one record, and what the allocator had reserved.

    Attributes
    ----------
    index, time
        The record (a failed allocation), and its time in ns.
    free, reserved
        Bytes.
    outside
        Bytes of the device that are neither free nor reserved; None where its size is not known.
    """

    index: int
    time: int
    free: int
    reserved: int
    outside: int | None


@dataclass(frozen=True, slots=True)
class Outside:
    """What a trace shows of memory outside of the allocator.

    Attributes
    ----------
    total
        Bytes of the device, None if unknown.
    taken_by_program, taken_peak
        Bytes that the program allocated directly from the driver, at the peak of active bytes and at most. They count
        as reserved.
    readings
        One for each failed allocation whose record has it: only then does the allocator query the driver.
    """

    total: int | None
    taken_by_program: int
    taken_peak: int
    readings: tuple[FreeReading, ...]


def outside(
    trace: Trace, segments: Lifetimes, curve: Timeline, device: int, index: int, total: int | None = None
) -> Outside:
    """Return what the trace shows of memory outside of the allocator.

    Parameters
    ----------
    segments, curve
        Of this device.
    index
        The record of the peak.
    total
        Bytes of the device, where the caller knows; else what the trace's header says under ``total_memory``, or NVML.
    """
    if total is None:
        total = _stated_total(trace.header.get("total_memory"), device) or _total_by_nvml(trace, device)
    taken = segments[trace.records["kind"][segments.start] == Kind.MEM_ALLOC]
    readings = []
    failed = np.flatnonzero((trace.records["kind"] == Kind.OOM) & (trace.records["device"] == device))
    failed = failed[trace.records["flags"][failed] & FREE_UNKNOWN == 0]
    for i in failed.tolist():
        row = int(np.searchsorted(curve.index, i, side="right")) - 1
        free, reserved = int(trace.records["aux0"][i]), int(curve.reserved[row]) if row >= 0 else 0
        beyond = None if total is None else total - free - reserved
        readings.append(FreeReading(i, int(trace.records["time"][i]), free, reserved, beyond))
    delta = np.concatenate([-taken.size, taken.size])
    order = np.argsort(np.concatenate([taken.end, taken.start]), kind="stable")
    most = int(np.cumsum(delta[order]).max(initial=0))
    return Outside(total, int(taken.at(index).size.sum()), most, tuple(readings))


def _stated_total(stated: object, device: int) -> int | None:
    if isinstance(stated, int):
        return stated
    if isinstance(stated, list) and 0 <= device < len(stated) and isinstance(stated[device], int):
        return int(stated[device])
    return None


def _total_by_nvml(trace: Trace, device: int) -> int | None:
    said = trace.of_kind(Kind.DEVICE_USE)
    said = said[said["device"] == device]
    return int(said["aux0"][-1]) or None if len(said) else None


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """A device's used memory, split by holder; all in bytes.

    ``used == allocator + beside_allocator + other_processes + unexplained``.

    Attributes
    ----------
    used
        Bytes that the driver does not report as free.
    allocator
        Reserved by the caching allocator of the process in question.
    beside_allocator
        Other bytes that the driver charges to that process: its context, its kernels, libraries.
    other_processes
        Bytes that the driver charges to all other processes.
    unexplained
        Bytes that are charged to no listed process: the driver's own use, and processes that it does not list.
    """

    used: int
    allocator: int
    beside_allocator: int
    other_processes: int
    unexplained: int


def device_use(used: int, by_process: Mapping[int, int], process: int, reserved: int) -> DeviceUse:
    """Split a device's use.

    Parameters
    ----------
    used
        Bytes of the device that are not free.
    by_process
        Bytes that the driver charges to each process, by its id.
    process, reserved
        The process in question, and what its allocator has reserved. If the driver does not list it, `beside_allocator`
        is 0.
    """
    others = sum(size for pid, size in by_process.items() if pid != process)
    own = by_process.get(process, reserved)
    return DeviceUse(used, reserved, own - reserved, others, used - own - others)
