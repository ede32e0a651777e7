"""The rows of a running recording's state, as :meth:`cudatool.analyze.live.LiveState.picture` returns them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cudatool.overview.ledger import LedgerLine
from cudatool.trace.model import Frame

__all__ = ["LiveDevice", "LiveKernel", "LivePicture", "LiveSite", "LiveStream", "Tables"]


class Tables(Protocol):
    """What the records' indices stand for, as :class:`cudatool.trace.follow.Follower` has it."""

    def name(self, index: int, /) -> str: ...

    def stack(self, index: int, /) -> tuple[Frame, ...]: ...

    def thread(self, index: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class LiveDevice:
    """The memory of one device now, in bytes.

    Attributes
    ----------
    device
        Its ordinal.
    allocated, peak_allocated
        In blocks that the program holds, now and at most so far.
    reserved, peak_reserved
        Taken from the driver.
    charged
        What the driver charges to the process (NVML), None if the recording does not say.
    total
        Of the device, None if that is not known.
    ooms
        How often memory ran out.
    ledger
        What all the memory is that the driver charges, the largest first, as :func:`cudatool.overview.ledger` says it:
        at the last reading of NVML, with what calls have taken and given back since. Empty without a reading.
    unknown
        Bytes of it that are in no line.
    """

    device: int
    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    charged: int | None
    total: int | None
    ooms: int
    ledger: tuple[LedgerLine, ...] = ()
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class LiveSite:
    """What one call site holds now.

    Attributes
    ----------
    stack
        Index of its stack.
    label
        The call site in words.
    bytes, blocks
        Live now.
    change
        Bytes since the mark.
    allocations
        So far.
    grows
        Whether the least that it held rose from each of the last five periods of ten seconds to the next: a leak may
        look so.
    """

    stack: int
    label: str
    bytes: int
    blocks: int
    change: int
    allocations: int
    grows: bool


@dataclass(frozen=True, slots=True)
class LiveKernel:
    """The launches of one kernel.

    Attributes
    ----------
    name
        As recorded.
    launches, per_second
        So far, and the mean of the last five whole seconds.
    time_ns
        On the device; 0 where the recording does not say.
    """

    name: str
    launches: int
    per_second: float
    time_ns: int


@dataclass(frozen=True, slots=True)
class LiveStream:
    """The work of one stream.

    Attributes
    ----------
    label
        The stream in words.
    operations, per_second
        Launches, copies and so on that were enqueued so far, and the mean of the last five whole seconds.
    """

    label: str
    operations: int
    per_second: float


@dataclass(frozen=True, slots=True)
class LivePicture:
    """A recording at one moment.

    Attributes
    ----------
    events, per_second
        Recorded so far, and the mean of the last five whole seconds.
    time_ns
        From the first event to the last.
    marked_ns
        When the mark was set, from the first event; 0 if it was not: changes are since the beginning.
    devices, sites, kernels, streams
        The rows, those asked for.
    site_count, kernel_count, stream_count
        How many there are, shown or not; of sites, those with live memory or a change.
    """

    events: int
    per_second: float
    time_ns: int
    marked_ns: int
    devices: tuple[LiveDevice, ...]
    sites: tuple[LiveSite, ...]
    kernels: tuple[LiveKernel, ...]
    streams: tuple[LiveStream, ...]
    site_count: int
    kernel_count: int
    stream_count: int
