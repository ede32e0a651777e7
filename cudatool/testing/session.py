"""One recording for all tests of a process, and the verdict on each.

::

    start of the process     the device's events go to one log; the checkers are on
    before a test's set-up   what the log has goes to the past, as shared; the log is emptied
    fixtures                 of a wider scope than a function: their stretch of the log is shared
    after its call           pending work runs; past + log are checked; what is new is the test's
    after its tear-down      again, if the tear-down did anything that could be wrong
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, Final

import numpy as np

from cudatool.recording import drain, is_observing, narrow, release_caches, sources
from cudatool.sanitize import (
    DeviceFinding,
    Finding,
    Gap,
    GapKind,
    Report,
    accepted,
    accepts_races,
    check,
    known,
    render_text,
)
from cudatool.sanitize.coverage import LeftOpen, find_gaps, merged_gaps
from cudatool.sanitize.device import leaks
from cudatool.testing.allocations import MemoryUse, describe, memory_of
from cudatool.testing.past import Past, Records
from cudatool.testing.settings import SessionOptions
from cudatool.testing.totals import packed
from cudatool.trace import hooks
from cudatool.trace.events import WORK, Kind
from cudatool.trace.log import EventLog
from cudatool.trace.model import Trace
from cudatool.units import format_bytes

__all__ = ["CudaTrace", "Session", "Test"]

_ON_TRACES: Final = {"race", "leak"}  # the other checks are compiled into kernels
_SECOND_SIDES: Final = (
    *WORK,
    Kind.HOST_ACCESS,
    Kind.FINDING,
    Kind.BLOCK_ALLOC,
    Kind.MEM_ALLOC,
    Kind.MEM_FREE,
    Kind.CHILD_PROCESS,
    Kind.WARNING,
)  # records that a finding can be about, the later of its two sides

_OF_ORDER: Final = (GapKind.STREAMS, GapKind.WAITS, GapKind.THREADS, GapKind.FLAGS)
"""Gaps that only a look at a test's operations together with their past can show."""


@dataclass(slots=True)
class Test:
    """What is known of the test that runs.

    Attributes
    ----------
    name
        pytest's node id.
    checks
        What it is checked for; empty: nothing.
    shared
        Stretches of the log that fixtures of a wider scope wrote.
    call
        Where in the log its call began.
    judged
        Up to where the log has been checked; -1 if the test has not come to an end of its own.
    unchecked
        Launches up to there that could not be checked.
    """

    name: str
    checks: tuple[str, ...]
    shared: list[tuple[int, int]] = field(default_factory=list)
    call: int = 0
    judged: int = -1
    unchecked: int = 0


class Session:
    """The recording of this process.

    Parameters
    ----------
    options
        What sets findings aside.
    checks
        What tests ask for.

    Raises
    ------
    ConfigError, DeviceUnavailableError
        See :mod:`cudatool._driver`.
    """

    def __init__(self, options: SessionOptions, checks: Iterable[str]) -> None:
        self.options = options
        self._checks = frozenset(checks)
        self._sources = ExitStack()
        self._narrows = not is_observing()  # else `cudatool sanitize` runs this, with checks of its own
        header = self._observe()
        self.device = str(header["device"])
        self.log = EventLog(header)
        hooks.subscribe(self.log)
        self._past = Past()
        self._outside: Report | None = None  # on what was done outside of tests, until a test reports it
        self.test: Test | None = None

    def _observe(self) -> dict[str, Any]:
        in_kernels = sorted(self._checks - _ON_TRACES)
        return self._sources.enter_context(sources(measure_accesses=True, checks=in_kernels))

    def widen(self, checks: Iterable[str]) -> None:
        """Run kernels under these checks too."""
        if not self._checks.issuperset(checks):
            self._checks |= frozenset(checks)
            drain()
            self._sources.close()
            self.log.header = self._observe()

    def close(self) -> None:
        """Stop recording."""
        drain()
        hooks.unsubscribe(self.log)
        self._sources.close()

    def begin(self, name: str, checks: tuple[str, ...]) -> None:
        """The set-up of a test starts: pytest's node id, and what the test is checked for."""
        if self.test is None:
            self._judge_outside()
        self._close_test()
        self.test = Test(name, checks)
        if self._narrows:
            narrow(set(checks) - _ON_TRACES)

    def _judge_outside(self) -> None:
        """Check what was done since the last test, such as the import of its module: the next test reports it."""
        drain()
        records = self.log.records()
        if np.isin(records["kind"], _SECOND_SIDES).any():
            checks = sorted(self._checks)
            found = self._check(records, checks)
            found = replace(found, gaps=self._gaps(found, records, checks))
            self._outside = found if self._outside is None else _with(self._outside, found)

    def call(self, test: Test) -> None:
        """A test's own code starts."""
        test.call = len(self.log)

    def end(self) -> None:
        """A test's tear-down is over."""
        drain()
        self._close_test()

    def _close_test(self) -> None:
        """Let the log be past: as the test's, or as shared if there is none."""
        records, test = self.log.records(), self.test
        self.log.clear()
        shared = np.full(len(records), test is None)
        for start, stop in test.shared if test is not None else ():
            shared[start:stop] = True
        self._past.add(records, shared)
        self.test = None

    @contextmanager
    def shared_fixture(self) -> Iterator[None]:
        """What is recorded inside belongs to a fixture that other tests use too."""
        test, start = self.test, len(self.log)
        try:
            yield
        finally:
            if test is not None:
                test.shared.append((start, len(self.log)))

    def judge(self, test: Test) -> Report | None:
        """Return what is new since the last verdict, None if nothing happened that could be wrong."""
        if "leak" in test.checks:
            gc.collect()
            release_caches()
        drain()
        records = self.log.records()
        left = self._left_behind(test, records) if "leak" in test.checks else ()
        since, test.judged = max(test.judged, 0), len(records)
        kinds = records["kind"][since:]
        if not test.checks or not (left or self._outside or np.isin(kinds, _SECOND_SIDES).any()):
            return None
        report = self._check(records, test.checks, since)
        report = replace(report, on_device=report.on_device + left)
        report = replace(
            report,
            operations=int(np.isin(kinds, WORK).sum()),
            unchecked_launches=report.unchecked_launches - test.unchecked,
        )
        test.unchecked += report.unchecked_launches
        report = replace(report, gaps=self._gaps(report, records[since:], test.checks))
        if self._outside is not None:
            report, self._outside = _with(report, self._outside), None
        today, options = date.today(), self.options
        return replace(known(accepted(report, options.rules), options.baseline, test.checks, today), stale=())

    def _check(self, records: Records, checks: Sequence[str], since: int = 0) -> Report:
        """Check the past and `records`; return what `records` from number `since` on are to blame for."""
        first = len(self._past) + since
        trace = self.log.trace(np.concatenate([self._past.records, records]))
        options = self.options

        def accepts(report: Report) -> bool:
            judged = report, options.rules, options.baseline, checks, date.today()
            return options.updates_baseline or accepts_races(*judged)

        report = check(trace, [check_ for check_ in checks if check_ != "leak"], since=first, accepts=accepts)
        edges = Counter(report.edges)
        edges["device synchronize"] -= self._past.settled
        return replace(
            report,
            edges=dict(+edges),
            on_device=tuple(one for one in report.on_device if one.check in checks),
            warnings=tuple(one for one in report.warnings if one.check in checks),
        )

    def _gaps(self, report: Report, records: Records, checks: Sequence[str]) -> tuple[Gap, ...]:
        """Return what of `records` was not checked, of a report on the past, too."""
        names = [name for gap in report.gaps if gap.kind is GapKind.LAUNCHES for name in gap.names]
        gaps = find_gaps(
            self.log.trace(records),
            checks,
            operations=int(np.isin(records["kind"], WORK).sum()),
            left_open=LeftOpen(launches=report.unchecked_launches, kernels=names),
        )
        own = (gap for gap in gaps if gap.kind is not GapKind.OPERATIONS)  # which is said of all tests together
        return (*own, *(gap for gap in report.gaps if gap.kind in _OF_ORDER))

    def _left_behind(self, test: Test, records: Records) -> tuple[DeviceFinding, ...]:
        """Return the device memory that the call has left or, after the tear-down, the test's own fixtures."""
        considered = records["kind"] != Kind.HOST_ALLOC
        if test.judged < 0:
            return leaks(self.log.trace(records[test.call :][considered[test.call :]]))
        for start, stop in (*test.shared, (test.call, test.judged)):
            allocations = (Kind.BLOCK_ALLOC, Kind.MEM_ALLOC, Kind.PHYSICAL_ALLOC)
            considered[start:stop] &= ~np.isin(records["kind"][start:stop], allocations)
        return leaks(self.log.trace(records[considered]))

    def findings(self, checks: Sequence[str]) -> Report:
        """Return the report on the test so far."""
        drain()
        return self._check(self.log.records(), checks)

    def memory(self, test: Test) -> MemoryUse:
        """Return what the call of the test allocated."""
        return memory_of(self.log.records(test.call))

    def result(self, test: Test, report: Report | None) -> dict[str, Any]:
        """Return what a test's report carries; see :class:`cudatool.testing.totals.Totals`."""
        return {
            "device": self.device,
            "checked": bool(test.checks),
            "peak": self.memory(test).peak,
            "report": "" if report is None else packed(report),
        }

    def text(self, report: Report) -> str:
        """Return a report as a failed test shows it."""
        return render_text(report, width=100)

    def looks(self, checks: Sequence[str]) -> CudaTrace:
        """Return the fixture ``cuda_trace`` of the test that runs."""
        return CudaTrace(self, checks)

    def over_limit(self, test: Test, most: int) -> str:
        """Return who held the memory at the peak of the test's call if that was more than `most` bytes, else ``""``."""
        records = self.log.records(test.call)
        found = memory_of(records)
        if found.peak <= most:
            return ""
        return (
            f"the test allocated {format_bytes(found.peak)} of device memory at its peak; "
            f"the limit is {format_bytes(most)}\n" + describe(self.log.trace(records), found.at_peak)
        )

    def leaked(self, test: Test, most: int) -> str:
        """Return who allocated what the test's call did not free if that is more than `most` bytes, else ``""``."""
        gc.collect()
        release_caches()
        drain()
        records = self.log.records(test.call)
        found = memory_of(records)
        if found.left_bytes <= most:
            return ""
        return (
            f"the test left {format_bytes(found.left_bytes)} of device memory allocated; "
            f"the limit is {format_bytes(most)}\n" + describe(self.log.trace(records), found.left)
        )


def _with(report: Report, more: Report) -> Report:
    """Return a report with the findings and the gaps of another one, too."""
    return replace(
        report,
        gaps=merged_gaps([more.gaps, report.gaps], add=True),
        findings=(*more.findings, *report.findings),
        possible=(*more.possible, *report.possible),
        on_device=(*more.on_device, *report.on_device),
        warnings=(*more.warnings, *report.warnings),
        dependent=(*more.dependent, *report.dependent),
    )


class CudaTrace:
    """The fixture ``cuda_trace``: what the test has done on the device so far, its fixtures included.

    Every look runs what is pending on the software device first, so that it is complete.
    """

    def __init__(self, session: Session, checks: Sequence[str]) -> None:
        self._session = session
        self._checks = checks

    def trace(self) -> Trace:
        """Return the trace, as :mod:`cudatool.analyze` and :mod:`cudatool.sanitize` take it."""
        drain()
        return self._session.log.trace(self._session.log.records())

    def events(self, *kinds: Kind) -> Records:
        """Return the records of these kinds, of all if none is given (:data:`cudatool.trace.events.RECORD`)."""
        records = self.trace().records
        return records[np.isin(records["kind"], kinds)] if kinds else records

    @property
    def peak_memory(self) -> int:
        """The most bytes of device memory that the test and its fixtures had allocated at one time."""
        return memory_of(self.events()).peak

    @property
    def memory(self) -> int:
        """Bytes of device memory that the test and its fixtures have allocated now."""
        return memory_of(self.events()).left_bytes

    def report(self) -> Report:
        """Return the sanitizer's report."""
        return self._session.findings(self._checks)

    def findings(self) -> tuple[Finding | DeviceFinding, ...]:
        """Return what the sanitizer has to say; empty if all is well."""
        report = self.report()
        return (*report.findings, *report.on_device)
