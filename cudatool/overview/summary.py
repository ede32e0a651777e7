"""One trace in numbers: what ``cudatool run`` and ``cudatool snapshot`` print, and what a page shows in the tiles."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cudatool.overview import execution, moments
from cudatool.overview.compiled import GeneratedShare, generated
from cudatool.overview.execution import Copies, KernelTotal, Operations, Stream
from cudatool.overview.library_blocks import LibraryBlocks, library_blocks
from cudatool.overview.moments import CallSite
from cudatool.overview.pinned import PinnedHolders, pinned_holders
from cudatool.overview.plans import MemoryPlan, plans
from cudatool.progress import advance, step
from cudatool.trace import lifetimes
from cudatool.trace.distinct import distinct
from cudatool.trace.events import FAILED_REQUESTS
from cudatool.trace.lifetimes import Ints, Lifetimes, Timeline
from cudatool.trace.model import PinnedMemory, Trace
from cudatool.trace.physical import uncounted

__all__ = ["Columns", "DeviceMemory", "Moment", "Summary", "columns_of", "summarize", "summary_of"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory right after one record.

    Attributes
    ----------
    index, time
        The record, and its time in ns.
    allocated, active, reserved, requested
        Bytes; `requested` is the requested size of the live blocks.
    largest_free
        The largest hole inside a segment, in bytes: a larger request needs a new segment.
    """

    index: int
    time: int
    allocated: int
    active: int
    reserved: int
    requested: int
    largest_free: int

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that no block occupies, 0 to 1."""
        return 1 - self.active / self.reserved if self.reserved else 0.0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device.

    Attributes
    ----------
    device
        Its ordinal.
    allocations
        The number of allocated blocks, including those from before the recording.
    peak, now
        At the first moment with the most bytes active, and after the last record.
    peak_allocated, peak_active, peak_reserved
        The peak of each; not always at the same moment.
    reserved_known
        Whether the recording says what was reserved. RMM's log does not: then `peak_reserved` and what the moments
        say of it are 0, and None in :meth:`Summary.as_dict`.
    ooms
        How often an allocation failed, even after cached blocks were given back.
    at_peak, still_live
        By call site, the largest first: the memory active at the peak, and the memory never freed.
    chosen, at_chosen
        The same of the moment that was asked for, if one was.
    generated
        Of the memory active at the peak, that which code of PyTorch's compiler allocated; None if it is none.
    """

    device: int
    allocations: int
    peak: Moment
    now: Moment
    peak_allocated: int
    peak_active: int
    peak_reserved: int
    reserved_known: bool
    ooms: int
    at_peak: tuple[CallSite, ...]
    still_live: tuple[CallSite, ...]
    chosen: Moment | None = None
    at_chosen: tuple[CallSite, ...] = ()
    generated: GeneratedShare | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A trace in numbers; `duration` in ns, `recorded_on` the kind of device in words ("" if unknown).

    `pinned` is a snapshot's pinned host memory, always of the whole recording; `pinned_holders` says who held the
    pinned memory of a trace. `library_blocks` says which call sites hold what libraries (JAX) say of their pools.
    Of a part of a recording, `window` has its first event, the one after its last, and how many the recording has.
    `plans` has the memory of the graphs of compiled functions.
    `simulated` says whether times on the device come from the software device's cost model.
    """

    source: str
    recorded_on: str
    events: int
    window: tuple[int, int, int] | None
    duration: int
    devices: tuple[DeviceMemory, ...]
    kernels: tuple[KernelTotal, ...]
    copies: tuple[Copies, ...]
    streams: tuple[Stream, ...]
    notes: tuple[str, ...]
    simulated: bool = False
    pinned: PinnedMemory | None = None
    plans: tuple[MemoryPlan, ...] = ()
    pinned_holders: PinnedHolders | None = None
    library_blocks: tuple[LibraryBlocks, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists; sizes in bytes, times in ns."""
        result = asdict(self)
        for plain, device in zip(result["devices"], self.devices, strict=True):
            plain["peak"]["fragmentation"] = device.peak.fragmentation
            plain["now"]["fragmentation"] = device.now.fragmentation
            if device.chosen is not None:
                plain["chosen"]["fragmentation"] = device.chosen.fragmentation
            if not device.reserved_known:
                plain["peak_reserved"] = None
                for moment in filter(None, (plain["peak"], plain["now"], plain["chosen"])):
                    moment.update(reserved=None, largest_free=None, fragmentation=None)
        return result


@dataclass(frozen=True, slots=True)
class Columns:
    """What a summary is made from.

    Attributes
    ----------
    blocks, segments, operations
        Of all devices.
    failed
        The device of each request for memory that failed.
    timelines
        By the ordinal of each device that has memory or failed to get some.
    """

    blocks: Lifetimes
    segments: Lifetimes
    operations: Operations
    failed: npt.NDArray[np.int8]
    timelines: dict[int, Timeline]


def columns_of(trace: Trace) -> Columns:
    """Return the columns of a trace that its summary and its analyses begin with."""
    blocks, segments = lifetimes.blocks(trace), lifetimes.segments(trace)
    failed = trace.of_kind(*FAILED_REQUESTS)["device"]
    devices = distinct(blocks.device, segments.device, failed).tolist()
    timelines = {
        device: lifetimes.timeline(trace, blocks.of_device(device), segments.of_device(device)) for device in devices
    }
    return Columns(blocks, segments, execution.operations(trace), failed, timelines)


def summarize(trace: Trace, columns: Columns, *, moment: int | None = None) -> Summary:
    """Return a trace in numbers, and :func:`cudatool.progress.advance` after each device.

    The memory right after the record `moment` is described, too, if one is given.
    """
    devices = []
    for device, curve in columns.timelines.items():
        blocks, segments = columns.blocks.of_device(device), columns.segments.of_device(device)
        failed = int(np.count_nonzero(columns.failed == device))
        devices.append(_device(trace, device, blocks, segments, curve, failed, moment))
        advance()
    start, stop, count = trace.header.get("window", (0, 0, 0))
    window = (start, stop, count) if "window" in trace.header else None
    return Summary(
        source=trace.source,
        recorded_on=str(trace.header.get("device", "")),
        events=stop - start if window else len(trace.records),
        window=window,
        duration=trace.duration if trace.header.get("time_axis") != "index" else 0,
        devices=tuple(devices),
        kernels=execution.kernels(trace, columns.operations),
        copies=execution.copies(trace, columns.operations),
        streams=execution.streams(trace, columns.operations),
        notes=(*trace.notes, *uncounted(trace)),
        pinned=getattr(trace, "pinned", None),
        plans=plans(trace),
        pinned_holders=pinned_holders(trace),
        library_blocks=library_blocks(trace),
        simulated=trace.header.get("device_kind") == "sim",
    )


def summary_of(trace: Trace) -> Summary:
    """Return a trace in numbers, with nothing else analyzed."""
    with step("analyzing", total=1) as shown:
        columns = columns_of(trace)
        shown.total = 1 + len(columns.timelines)
        advance()
        return summarize(trace, columns)


def _device(
    trace: Trace,
    device: int,
    blocks: Lifetimes,
    segments: Lifetimes,
    curve: Timeline,
    ooms: int,
    moment: int | None,
) -> DeviceMemory:
    freed = lifetimes.freed_while_recorded(trace, blocks)
    peak = _moment(blocks, freed, segments, curve, curve.peak())
    now = _moment(blocks, freed, segments, curve, len(curve.index) - 1)
    chosen = None
    if moment is not None:
        chosen = _moment(blocks, freed, segments, curve, int(np.searchsorted(curve.index, moment, side="right")) - 1)
    return DeviceMemory(
        device=device,
        allocations=len(blocks),
        peak=peak,
        now=now,
        peak_allocated=int(curve.allocated.max(initial=0)),
        peak_active=int(curve.active.max(initial=0)),
        peak_reserved=int(curve.reserved.max(initial=0)),
        reserved_known=curve.knows_reserved,
        ooms=ooms,
        at_peak=moments.by_call_site(trace, blocks.at(peak.index), blocks),
        still_live=moments.by_call_site(trace, blocks[blocks.freed == len(trace.records)], blocks),
        chosen=chosen,
        at_chosen=() if chosen is None else moments.by_call_site(trace, blocks.at(chosen.index), blocks),
        generated=generated(trace, blocks.at(peak.index)),
    )


def _moment(blocks: Lifetimes, freed: Ints, segments: Lifetimes, curve: Timeline, row: int) -> Moment:
    if row < 0:
        return Moment(-1, 0, 0, 0, 0, 0, 0)
    index = int(curve.index[row])
    held = (blocks.start <= index) & (index < freed)
    layout = moments.layout_at(blocks, segments, index)
    return Moment(
        index=index,
        time=int(curve.time[row]),
        allocated=int(curve.allocated[row]),
        active=int(curve.active[row]),
        reserved=int(curve.reserved[row]),
        requested=int(blocks.requested[held].sum()),
        largest_free=int(layout.size[layout.block < 0].max(initial=0)),
    )
