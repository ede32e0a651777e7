"""What is known of a program's allocator settings after others were tried: the best one, or why none is recommended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from cudatool.analyze.whatif_model import WhatIfOutcome
from cudatool.memory.settings import PYTORCHS_VARIABLE
from cudatool.units import counted, format_bytes

__all__ = ["Advice", "LeftOut", "NoAdvice", "Record"]


class NoAdvice(StrEnum):
    """Why no setting is recommended although some were tried, or why none could be tried."""

    PEAK_DIFFERS = "peak-differs"
    """A replay of the recorded settings reserves more than 2 % more or less than was recorded."""
    FAILURES_DIFFER = "failures-differ"
    """A replay of the recorded settings runs out of memory where the program did not, or the other way round."""
    NO_REQUESTS = "no-requests"
    """The file has no history of requests: in which order its blocks were allocated is not known."""
    TOO_LONG = "too-long"
    """The recording is too long to be replayed on the way."""
    CONTRADICTION = "contradiction"
    """The recording's events contradict each other: no allocator leaves such."""
    OTHER_ALLOCATOR = "other-allocator"
    """The requests were made to another allocator than PyTorch's or cudatool's."""
    ALSO_DRIVER = "also-driver"
    """Among the requests is memory that the program took from the driver itself, and the file does not say which."""

    @property
    def why(self) -> str:
        """The reason in words; empty where it has numbers, as :meth:`Advice.why_not` says it."""
        return _WHY.get(self, "")


_WHY: Final = {
    NoAdvice.OTHER_ALLOCATOR: "these requests were made to RMM, whose allocators follow other rules than PyTorch's",
    NoAdvice.ALSO_DRIVER: "the file also has memory that the program took from the driver itself, and PyTorch's format "
    "does not say which; replay the trace that it was exported from",
    NoAdvice.NO_REQUESTS: "the file has no history of requests, so their order is not known; record it with "
    "torch.cuda.memory._record_memory_history()",
    NoAdvice.CONTRADICTION: "events of the recording contradict each other",
    NoAdvice.TOO_LONG: "the recording is long; cudatool replay takes the time to try some",
}


@dataclass(frozen=True, slots=True)
class Record:
    """What was recorded.

    Attributes
    ----------
    reserved_peak_bytes
        The most at a time from the first request on. Memory that was cached before and released by then is left out.
    retries
        How often the allocator released all that was cached to make room.
    failures
        Requests that failed.
    limit_bytes
        An upper bound of the bytes that could be reserved, from requests that failed or needed a retry. None if there
        were none.
    """

    reserved_peak_bytes: int
    retries: int
    failures: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Settings under which at least this many bytes are reserved, which is too much to be the best."""

    conf: str
    reserved_least_bytes: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The best of some settings.

    Attributes
    ----------
    record
        What was recorded; None if it was not analyzed.
    recorded
        What a replay of the recorded settings costs.
    best
        None if nothing is better than the recorded settings, or if `withheld` says why there is no advice.
    gain_bytes
        The reduction of reserved bytes against the recording, the minimum over all that the recording leaves open; 0 if
        the gain is that memory does not run out.
    tried
        All settings that were tried, out of those given, or those that matter for these requests.
    withheld
        Why there is no advice; None if there may be advice.
    left_out
        Settings whose replay was skipped or stopped, because others are sure to gain as much as these can.
    untried
        Settings that the caller left no time for.
    variable
        The environment variable that the allocator of the recorded program reads.
    """

    record: Record | None
    recorded: WhatIfOutcome | None
    best: WhatIfOutcome | None
    gain_bytes: int
    tried: tuple[WhatIfOutcome, ...]
    withheld: NoAdvice | None = None
    left_out: tuple[LeftOut, ...] = ()
    untried: tuple[str, ...] = ()
    variable: str = PYTORCHS_VARIABLE

    def why_not(self) -> str:
        """Return in words why there is no advice; nothing if `withheld` is None."""
        record, check = self.record, self.recorded
        if self.withheld is not None and self.withheld.why:
            return self.withheld.why
        if record is None or check is None:
            return ""
        if self.withheld is NoAdvice.FAILURES_DIFFER:
            text = f"{counted(record.failures, 'request')} failed when it was recorded, {check.failures:,} in a replay "
            text += "of the recorded settings; pass the memory of the recorded GPU"
            return f"{text} (cudatool snapshot --memory, cudatool replay --recorded-memory)"
        text = f"a replay of the recorded settings reserves {format_bytes(check.reserved_peak_bytes)}, the recording "
        return f"{text}{format_bytes(record.reserved_peak_bytes)}"
