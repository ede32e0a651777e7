"""Why an allocation failed: what was requested, what held the memory, why the free memory did not serve it, and what
would have.

The reason is derived from three numbers at the failed request, after the allocator has given back all that it could::

    needed      bytes that the driver would have had to give, a whole segment
    free        bytes that the driver had
    unused      reserved bytes in no live block

    size > the device's       LARGER       it would not fit if nothing else lived
    free >= needed            LIMITED      the driver had enough: a memory fraction forbade it
    unused + free >= size     FRAGMENTED   together it would have been enough, in one piece it was not
    else                      FULL         not even all of it together was enough
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from cudatool.analyze.categories import Categories, categorize
from cudatool.analyze.diagnosis import Remedy, Topic, advice
from cudatool.analyze.fragmentation import Fragmentation, fragmentation
from cudatool.analyze.leak_verdicts import Leaks
from cudatool.analyze.leaks import leaks
from cudatool.analyze.modules import Modules, modules
from cudatool.analyze.outside import Outside, outside
from cudatool.analyze.recorded import recorded_settings
from cudatool.analyze.settings_advice import Advice, NoAdvice
from cudatool.analyze.steps import find_steps
from cudatool.analyze.whatif import advise
from cudatool.errors import ConfigError, FileFormatError
from cudatool.memory.blocks import segment_size
from cudatool.memory.settings import Settings
from cudatool.overview.ledger import Ledger, ledger
from cudatool.overview.library_blocks import LibraryBlocks, library_blocks
from cudatool.overview.moments import CallSite, by_call_site
from cudatool.trace import lifetimes
from cudatool.trace.events import FAILED_REQUESTS, FREE_UNKNOWN, Kind
from cudatool.trace.frames import call_site, user_frames
from cudatool.trace.model import Frame, Trace, is_of_kind
from cudatool.trace.module_tensors import block_modules
from cudatool.units import format_bytes

__all__ = ["Failure", "Shortage", "failure"]


class Shortage(StrEnum):
    """Why a request found no memory."""

    FULL = "full"
    """All free memory together was less than the request."""
    LARGER = "larger"
    """The request alone was more than the device's memory."""
    FRAGMENTED = "fragmented"
    """There was enough free memory, but not in one piece, or not where this request could use it."""
    LIMITED = "limited"
    """The driver had enough, and a memory fraction did not allow it."""
    UNKNOWN = "unknown"
    """The recording lacks the allocator's segments or the driver's free memory."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed allocation, explained; sizes in bytes.

    Attributes
    ----------
    device, index, time
        Whose memory; the record, and its time in ns.
    library
        Whose allocator failed, such as CuPy; empty for PyTorch's and ours.
    thread
        The name of the thread that made the request.
    size, needed
        The requested block, and what the driver would have had to give.
    site, frames
        The line that made the request, in words, and the user's own frames, innermost first.
    free, total
        Of the device, None where the recording does not have it.
    why, missing
        The reason; and for ``full``, by how much all free memory together was too small.
    split
        Reserved memory at that moment by cause; None where no segments are known.
    held
        Live memory by call site, the largest first.
    categories
        What live blocks were for, where it can be inferred.
    modules
        What each module of PyTorch held; None if the recording knows no module.
    ledger
        What all the process's memory was, where NVML was read.
    library_blocks
        What libraries (JAX) say that call sites hold, of all moments when that was most.
    settings
        Other allocator settings, replayed up to this request; None if the file's own settings cannot be read.
    remedies
        What to do, the most bytes first.
    later
        How many more allocations failed on any device after this one.
    """

    device: int
    index: int
    time: int
    library: str
    thread: str
    size: int
    needed: int
    site: str
    frames: tuple[Frame, ...]
    free: int | None
    total: int | None
    why: Shortage
    missing: int
    split: Fragmentation | None
    held: tuple[CallSite, ...]
    categories: Categories
    modules: Modules | None
    leaks: Leaks
    ledger: Ledger | None
    library_blocks: tuple[LibraryBlocks, ...]
    settings: Advice | None
    remedies: tuple[Remedy, ...]
    later: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; bytes and ns."""
        names = "device index time library thread size needed site free total missing later"
        return {name: getattr(self, name) for name in names.split()} | {
            "why": str(self.why),
            "frames": [frame._asdict() for frame in self.frames],
            "split": None if self.split is None else self.split.as_dict(),
            "held": [asdict(site) for site in self.held],
            "categories": self.categories.as_dict(),
            "modules": None if self.modules is None else self.modules.as_dict(),
            "leaks": self.leaks.as_dict(),
            "ledger": None if self.ledger is None else self.ledger.as_dict(),
            "library_blocks": [asdict(blocks) for blocks in self.library_blocks],
            "settings": None if self.settings is None else asdict(self.settings),
            "remedies": [asdict(remedy) for remedy in self.remedies],
        }


def failure(trace: Trace, *, total: int | None = None, enough: Callable[[], bool] = lambda: False) -> Failure | None:
    """Explain the first failed allocation of a trace, from what was recorded until then; None if none failed.

    Parameters
    ----------
    total
        The device's memory in bytes, if the caller knows it.
    enough
        Asked before each replay of another setting: once it returns True, no more are tried.
    """
    failed = np.flatnonzero(is_of_kind(trace.records, *FAILED_REQUESTS))
    if not len(failed):
        return None
    index = int(failed[0])
    part = trace.selecting(trace.records[: index + 1], np.arange(index + 1))
    record = part.records[index]
    of_library = bool(record["kind"] == Kind.LIBRARY_OOM)
    settings = None if of_library else _settings(part)
    device, size = int(record["device"]), int(record["size"])
    memory = _memory(part, device, settings or Settings(), total)
    total = memory.outside.total
    is_larger = total is not None and size > total  # than the device's memory: no advice helps
    tried = None if settings is None or is_larger else _tried(part, device, settings, total, enough)
    free = None if record["flags"] & FREE_UNKNOWN else int(record["aux0"])
    needed = size if of_library else _needed(size, settings or Settings())
    if is_larger:
        why, missing = Shortage.LARGER, 0
    elif of_library:
        why, missing = _reason_of_library(size, free, is_limited=bool(record["aux1"]))
    else:
        why, missing = _reason(size, needed, free, memory.unused)
    stack = part.stack(int(record["stack"]))
    return Failure(
        device=device,
        index=index,
        time=int(record["time"]),
        library=part.names[int(record["name"])] if of_library else "",
        thread=part.threads[int(record["thread"])] if int(record["thread"]) < len(part.threads) else "",
        size=size,
        needed=needed,
        site=call_site(stack),
        frames=user_frames(stack),
        free=free,
        total=total,
        why=why,
        missing=missing,
        split=None if of_library else memory.last,
        held=memory.held,
        categories=memory.categories,
        modules=memory.modules,
        leaks=memory.leaks,
        ledger=memory.ledger,
        library_blocks=tuple(one for one in library_blocks(trace) if one.device == device),
        settings=tried,
        remedies=() if is_larger else _remedies(memory, tried),
        later=len(failed) - 1,
    )


@dataclass(frozen=True, slots=True)
class _Memory:
    """What held a device's memory when a trace ends; for the rest see :class:`Failure`."""

    split: tuple[Fragmentation, ...]  # at the peak, and at the request that failed
    outside: Outside
    has_segments: bool
    knows_reserved: bool
    held: tuple[CallSite, ...]
    categories: Categories
    modules: Modules | None
    leaks: Leaks
    ledger: Ledger | None

    @property
    def last(self) -> Fragmentation | None:
        return self.split[-1] if self.split else None

    @property
    def unused(self) -> int | None:
        """Reserved bytes in no live block; None if that is not known."""
        if self.last is not None:
            return self.last.reserved - self.last.active
        return 0 if self.knows_reserved and not self.has_segments else None  # 0: nothing was ever reserved


def _memory(part: Trace, device: int, settings: Settings, total: int | None) -> _Memory:
    index = len(part.records) - 1
    blocks = lifetimes.blocks(part).of_device(device)
    segments = lifetimes.segments(part).of_device(device)
    curve = lifetimes.timeline(part, blocks, segments)
    steps = find_steps(part, blocks, device)
    in_modules = block_modules(part, blocks)
    categories = categorize(part, blocks, curve, steps, device, index, in_modules)
    return _Memory(
        split=fragmentation(part, blocks, segments, curve, device, settings),
        outside=outside(part, segments, curve, device, index, total),
        has_segments=bool(len(segments)),
        knows_reserved=curve.knows_reserved,
        held=by_call_site(part, blocks.at(index), blocks),
        categories=categories,
        modules=modules(part, blocks, in_modules, categories, index),
        leaks=leaks(part, blocks, device, steps),
        ledger=ledger(part, blocks, segments, device),
    )


def _settings(trace: Trace) -> Settings | None:
    try:
        return recorded_settings(trace)[0]
    except FileFormatError:
        return None


def _tried(
    trace: Trace, device: int, settings: Settings, total: int | None, enough: Callable[[], bool]
) -> Advice | None:
    if enough():
        return Advice(None, None, None, 0, (), NoAdvice.TOO_LONG)
    try:
        return advise(trace, device, recorded=settings, recorded_memory=total, enough=enough)
    except ConfigError:  # an allocator that is not modelled
        return None
    except FileFormatError:  # events that contradict each other
        return Advice(None, None, None, 0, (), NoAdvice.CONTRADICTION)


def _needed(size: int, settings: Settings) -> int:
    """Return what the driver would have had to give to the caching allocator."""
    return size if settings.expandable_segments else segment_size(size, settings)


def _reason_of_library(size: int, free: int | None, *, is_limited: bool) -> tuple[Shortage, int]:
    """Return why a library's request failed, after it gave back what it cached, and how much the driver lacked."""
    if free is None or not size:
        return Shortage.UNKNOWN, 0
    if free < size:
        return Shortage.FULL, size - free
    return (Shortage.LIMITED if is_limited else Shortage.UNKNOWN), 0


def _reason(size: int, needed: int, free: int | None, unused: int | None) -> tuple[Shortage, int]:
    """Return why a request failed, and how much was missing in all; see the top of this module.

    None stands for what is not known.
    """
    if free is not None and free >= needed:
        return Shortage.LIMITED, 0
    if unused is None:
        return Shortage.UNKNOWN, 0
    if unused + (free or 0) >= size:
        return Shortage.FRAGMENTED, 0
    if free is None:
        return Shortage.UNKNOWN, 0
    return Shortage.FULL, size - unused - free


def _remedies(memory: _Memory, tried: Advice | None) -> tuple[Remedy, ...]:
    """Return what to do, the most bytes first."""
    found = advice(memory.split, memory.categories, memory.leaks, memory.outside, memory.held, tried)
    return tuple(sorted([*found, *_of_others(memory.outside, memory.ledger)], key=lambda remedy: -remedy.size))


def _of_others(beside: Outside, of_device: Ledger | None) -> Iterator[Remedy]:
    """Yield what others than this program hold, if it is much."""
    total = beside.total
    reading = beside.readings[-1] if beside.readings else None
    if of_device is not None and of_device.process is not None:
        size, whose = of_device.beside, "by other processes"
    elif reading is not None and reading.outside is not None:
        size, whose = reading.outside, "outside of the recorded memory: by other processes, contexts or libraries"
    else:
        return
    if total is not None and size >= _WORTH * total:
        text = f"{format_bytes(size)} of {format_bytes(total)} are held {whose}; nvidia-smi lists the processes, end "
        yield Remedy(Topic.OTHERS, size, f"{text}those that are not needed, or use another device")


_WORTH: Final = 0.05  # share of the device's memory
