"""One trace in numbers: what ``cudatool snapshot`` prints and what its page shows in the tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from cudatool.analyze import execution, moments
from cudatool.analyze.compiled import GeneratedShare, generated
from cudatool.analyze.diagnosis import PARTS_OF_DIAGNOSIS, Diagnosis, diagnose
from cudatool.analyze.execution import Copies, KernelTotal, Operations, Stream
from cudatool.analyze.ledger import Ledger, ledger
from cudatool.analyze.lint import PARTS_OF_LINT, LintFinding, lint
from cudatool.analyze.moments import CallSite
from cudatool.analyze.pinned import PinnedHolders, pinned_holders
from cudatool.analyze.plans import MemoryPlan, plans
from cudatool.analyze.recorded import recorded_settings
from cudatool.errors import FileFormatError
from cudatool.memory.settings import Settings
from cudatool.progress import Step, advance, step
from cudatool.trace import lifetimes
from cudatool.trace.events import FAILED_REQUESTS
from cudatool.trace.lifetimes import Ints, Lifetimes, Timeline
from cudatool.trace.model import PinnedMemory, Trace

__all__ = ["DeviceMemory", "Moment", "Report", "Summary", "report"]


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
    pinned memory of a trace.
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
class Report:
    """Everything that the page draws: the summary and the columns that it was made from.

    `timelines`, `diagnoses` and `ledgers` have an entry for each of the summary's devices. `findings` are faults of the
    file itself.
    """

    trace: Trace
    summary: Summary
    blocks: Lifetimes
    segments: Lifetimes
    timelines: tuple[Timeline, ...]
    operations: Operations
    diagnoses: tuple[Diagnosis, ...]
    findings: tuple[LintFinding, ...]
    ledgers: tuple[Ledger | None, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary, each device's diagnosis and the findings as plain data; sizes in bytes, times in ns."""
        result = self.summary.as_dict()
        for plain, diagnosis, of_card in zip(result["devices"], self.diagnoses, self.ledgers, strict=True):
            plain["diagnosis"] = diagnosis.as_dict()
            plain["ledger"] = None if of_card is None else of_card.as_dict()
        result["findings"] = [asdict(finding) for finding in self.findings]
        return result


def report(trace: Trace, *, total: Mapping[int, int | None] | None = None, moment: int | None = None) -> Report:
    """Analyze a trace.

    Parameters
    ----------
    total
        The memory of each device in bytes, for the devices that the caller knows.
    moment
        A record: the memory right after it is described, too, and the ledgers are of the last reading up to there.
    """
    with step("analyzing", total=1 + _PARTS) as shown:
        return _report(trace, total or {}, moment, shown)


_PARTS: Final = 2 + PARTS_OF_DIAGNOSIS + PARTS_OF_LINT
"""How often :func:`cudatool.progress.advance` is called for a device, after parts of about the same length."""


def _report(trace: Trace, total: Mapping[int, int | None], moment: int | None, shown: Step) -> Report:
    settings = _settings(trace)
    blocks, segments, ran = lifetimes.blocks(trace), lifetimes.segments(trace), execution.operations(trace)
    ooms = trace.of_kind(*FAILED_REQUESTS)["device"]
    found = np.unique(np.concatenate([blocks.device, segments.device, ooms])).tolist()
    shown.total = 1 + _PARTS * len(found)
    advance()
    devices, timelines, diagnoses, ledgers = [], [], [], []
    for device in found:
        own, reserved = blocks.of_device(device), segments.of_device(device)
        curve = lifetimes.timeline(trace, own, reserved)
        timelines.append(curve)
        ledgers.append(ledger(trace, own, reserved, device, moment=moment))
        advance()
        devices.append(_device(trace, device, own, reserved, curve, int(np.count_nonzero(ooms == device)), moment))
        advance()
        diagnoses.append(diagnose(trace, own, reserved, curve, device, settings=settings, total=total.get(device)))
    start, stop, count = trace.header.get("window", (0, 0, 0))
    window = (start, stop, count) if "window" in trace.header else None
    summary = Summary(
        source=trace.source,
        recorded_on=str(trace.header.get("device", "")),
        events=stop - start if window else len(trace.records),
        window=window,
        duration=trace.duration if trace.header.get("time_axis") != "index" else 0,
        devices=tuple(devices),
        kernels=execution.kernels(trace, ran),
        copies=execution.copies(trace, ran),
        streams=execution.streams(trace, ran),
        notes=tuple(trace.notes),
        pinned=getattr(trace, "pinned", None),
        plans=plans(trace),
        pinned_holders=pinned_holders(trace),
        simulated=trace.header.get("device_kind") == "sim",
    )
    curves = {device.device: curve for device, curve in zip(devices, timelines, strict=True)}
    totals = {diagnosis.device: diagnosis.outside.total for diagnosis in diagnoses}
    state = getattr(trace, "segments", ())  # a snapshot's, the only kind of trace that states one
    findings = lint(trace, blocks, segments, curves, final_state=state, total=totals)
    return Report(trace, summary, blocks, segments, tuple(timelines), ran, tuple(diagnoses), findings, tuple(ledgers))


def _settings(trace: Trace) -> Settings:
    """Return the allocator's settings; defaults for those that the recording lacks or that make no sense."""
    try:
        return recorded_settings(trace)[0]
    except FileFormatError:
        return Settings()


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
        # Every block is in a segment: if none is known, segments were not recorded.
        reserved_known=curve.knows_reserved,
        ooms=ooms,
        at_peak=moments.by_call_site(trace, blocks.at(peak.index)),
        still_live=moments.by_call_site(trace, blocks[blocks.freed == len(trace.records)]),
        chosen=chosen,
        at_chosen=() if chosen is None else moments.by_call_site(trace, blocks.at(chosen.index)),
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
