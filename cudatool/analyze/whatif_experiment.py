"""Replays of one program's requests under other settings, in each case that the recording leaves open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

from cudatool.analyze.calls import RELEASES, Verb
from cudatool.analyze.refused import likely_frees, with_smallest_sizes
from cudatool.analyze.replay import requests_with_pools
from cudatool.analyze.replay_start import with_start_in
from cudatool.analyze.requests import Requests
from cudatool.analyze.settings_advice import NoAdvice, Record
from cudatool.analyze.whatif_model import Caveat, Course, WhatIfOutcome, check_model, run_model
from cudatool.errors import ConfigError
from cudatool.memory.blocks import round_size, segment_size
from cudatool.memory.settings import UNLIMITED, Settings
from cudatool.trace.model import Trace

__all__ = ["WORTH_NAMING", "Experiment"]

WORTH_NAMING = 0.01  # share of the reserved bytes: less is neither a gain nor an error
_WORTH_IF_UNSURE = 0.05  # a prediction with a caveat is often off by this much
_ABOUT_FAILURES = (Caveat.CALLS_UNSEEN, Caveat.CALLS_UNCLEAR, Caveat.LIMIT_UNCLEAR)  # which change where memory ends
_ABOUT_CHECK = {Caveat.PEAK_DIFFERS, Caveat.RETRIES_DIFFER, Caveat.FAILURES_DIFFER}
_PLAIN = Course()  # as it was recorded


@dataclass(frozen=True, slots=True)
class _Scenario:
    """A possible case: the requests and their initial state, the device's memory and the limit, the course."""

    asked: Requests
    total: int | None
    limit: int | None
    course: Course = _PLAIN


class Experiment:
    """Recorded requests, and their costs so far."""

    def __init__(
        self,
        trace: Trace,
        device: int,
        recorded: Settings,
        recorded_memory: int | None,
        memory: int | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._trace = trace
        self._recorded = recorded
        self._memory = memory
        self._progress = progress
        self.asked = requests_with_pools(trace, device, recorded, recorded_memory)
        shown = self.asked.available
        if recorded_memory is None and shown is not None and recorded.per_process_memory_fraction is not None:
            # The limit separates the allocator's garbage collection from the program's empty_cache.
            self.asked = requests_with_pools(trace, device, recorded, shown)
        self.record = _record(self.asked)
        last = self.asked.calls.last(Verb.MALLOC, Verb.FAILED_MALLOC)
        self._last_request = self.asked.calls[last].event if last >= 0 else -1
        # Whether the one request that failed is the end of the recording: no course of the program follows it.
        self._ends_with_failure = last == len(self.asked.calls) - 1 and self.record.failures == 1
        self._ends_with_failure &= last >= 0 and self.asked.calls[last].verb is Verb.FAILED_MALLOC
        self.done: dict[str, WhatIfOutcome] = {}  # by settings string
        self._bare: Requests | None = None  # as `asked`, with nothing cached at the beginning
        self._runs: dict[tuple[str, _Scenario], WhatIfOutcome] = {}
        self._total_is_known = recorded_memory is not None
        self._total, self._limit, self._limit_is_clear = _limits(self.asked, recorded, recorded_memory)
        self.impossible: NoAdvice | None = None
        if trace.header.get("requests_to") == "rmm":
            self.impossible = NoAdvice.OTHER_ALLOCATOR
        elif trace.header.get("requests_to") == "driver":
            self.impossible = NoAdvice.ALSO_DRIVER
        elif last < 0:
            self.impossible = NoAdvice.NO_REQUESTS
        else:
            as_recorded = _Scenario(self.asked, self._total, self._limit)
            self.check, self._quiet = check_model(trace, self.asked, recorded, total=self._total, limit=self._limit)
            self._runs[recorded.text, as_recorded] = self.check
            self._caveats = tuple(self._caveats_of_check())
            self._smaller = with_smallest_sizes(self.asked, recorded)
            self._frees = likely_frees(self.asked.calls, recorded)

    def outcome(self, conf: str) -> WhatIfOutcome:
        """Return the cost of the requests under some settings."""
        if conf not in self.done:
            settings = Settings.parse(conf)
            if settings.backend != "native":
                raise ConfigError(
                    f"backend:{settings.backend} is the driver's own allocator, whose rules are not public"
                )
            self.done[conf] = self._with_caveats(settings, conf)
            if self._progress is not None:
                self._progress(len(self.done))
        return self.done[conf]

    def reserves_beyond(self, conf: str, most: int) -> int:
        """Return the reserved bytes as soon as they exceed a bound; 0 if they never do."""
        settings = Settings.parse(conf)
        scenario = self._first_scenario(conf)
        if (conf, scenario) in self._runs:
            return 0
        found, is_all = self._replay(settings, conf, scenario, most)
        if not is_all:
            return found.reserved_peak_bytes
        self._runs[conf, scenario] = found
        return 0

    def _first_scenario(self, conf: str) -> _Scenario:
        """Return the case to replay first: if it matters, with the calls of empty_cache that left no event."""
        plain = self._plain()
        is_other = conf != self._recorded.text
        return replace(plain, course=Course(empties=self._quiet)) if is_other and self._quiet else plain

    def _with_caveats(self, settings: Settings, conf: str) -> WhatIfOutcome:
        plain = self._plain()
        if (first := self._first_scenario(conf)) != plain:
            emptied = self._run(settings, conf, first)
            if Caveat.CALLS_UNSEEN not in emptied.caveats:
                self._runs[conf, plain] = emptied  # it found nothing to release, so it is the same
        found = self._run(settings, conf, plain)
        caveats = [*self._caveats]
        if conf != self._recorded.text and (self.asked.prior_blocks or self.asked.prior_memory):
            caveats.append(Caveat.BEGINS_LATE)
        ends = found.oom is not None and found.oom.event == self._last_request
        for caveat in found.caveats if not ends else ():  # out of the model's memory: what follows is not known
            # It may reserve anything up to the limit.
            most_possible = _lowest_limit(settings, plain.total, plain.limit)
            if most_possible is None or most_possible > (1 + WORTH_NAMING) * found.reserved_peak_bytes:
                caveats.append(caveat)
        runs = [found]
        for caveat, scenario in self._alternatives(found, settings):
            other = self._run(settings, conf, scenario)
            runs.append(other)
            apart = abs(other.reserved_peak_bytes - found.reserved_peak_bytes)
            if apart > WORTH_NAMING * found.reserved_peak_bytes or (
                caveat in _ABOUT_FAILURES and other.failures != found.failures
            ):
                caveats.append(caveat)
        caveats = list(dict.fromkeys(caveats))
        least, most = self._range(conf, settings, runs, caveats) if caveats else (found.reserved_peak_bytes,) * 2
        return replace(found, reserved_least_bytes=least, reserved_most_bytes=most, caveats=tuple(caveats))

    def _range(
        self, conf: str, settings: Settings, runs: list[WhatIfOutcome], caveats: list[Caveat]
    ) -> tuple[int, int | None]:
        """Return the bounds of the peak over all that the recording leaves open; see ``docs/what-if.md``.

        Parameters
        ----------
        runs
            The cost of the requests under these settings in each possible case.
        """
        begins_late, differs = Caveat.BEGINS_LATE in caveats, not _ABOUT_CHECK.isdisjoint(caveats)
        needed = min(run.active_peak_bytes for run in runs)  # no allocator reserves less
        most = 0
        if begins_late:
            starts = [self._run(settings, conf, here) for here, _ in self._other_starts(conf, settings)]
            runs = runs + starts
            # A bad start: as much is cached as the recording, or these settings, keep, and none of it fits.
            cached = sum(change.size for change in self.asked.prior_memory) - sum(self.asked.prior_sizes)
            bare = starts[0] if starts else runs[0]
            most = bare.reserved_peak_bytes + max(int(cached * _most_growth(settings)), bare.unused_bytes)
        peaks = [run.reserved_peak_bytes for run in runs]
        least = min([*peaks, needed] if begins_late or differs or Caveat.CALLS_UNSEEN in caveats else peaks)
        most = max([*peaks, most])
        limit = self._sure_limit(settings)
        hits = any(run.retries or run.failures for run in runs) or (limit is not None and most >= limit)
        if begins_late and (hits or Caveat.LIMIT_UNCLEAR in caveats):
            # Another request may be the first to fail: none can while there is room for the largest one.
            smallest = self.record.reserved_peak_bytes * (settings.per_process_memory_fraction or 1.0)
            room = limit if limit is not None else int(smallest)
            least = min(least, max(room - self._largest_segment(settings), 0))
        ends = self.asked.calls[-1].verb is Verb.FAILED_MALLOC and Caveat.OTHER_COURSE in caveats
        if hits or ends or differs or (begins_late and self._starts_with_any(settings)):
            return least, None if limit is None else limit + _beyond(settings)
        return least, most

    def _starts_with_any(self, settings: Settings) -> bool:
        """Return whether these settings may have had more cached at the start of the recording than the recorded ones.

        So it is if the recorded allocator gave memory back by itself, if it split larger blocks than these do, and if
        it could give back pages around a block in use, where these keep the whole segment.
        """
        recorded = self._recorded
        keeps_segments = recorded.expandable_segments and not settings.expandable_segments
        return self._gave_back or keeps_segments or settings.max_split_size < recorded.max_split_size

    def _largest_segment(self, settings: Settings) -> int:
        """Return how many bytes the largest request needs from the driver."""
        largest = int(self.asked.calls.sizes(Verb.MALLOC, Verb.FAILED_MALLOC).max())
        return segment_size(round_size(largest, settings), settings)

    def _sure_limit(self, settings: Settings) -> int | None:
        """Return the maximum of reserved bytes, if it is known."""
        plain = self._plain()
        if self._memory is not None:
            return _lowest_limit(settings, plain.total, plain.limit)
        # A limit from failed or retried requests is valid only if the replay of the recorded settings is right.
        shows = self.asked.otherwise is None and not self._caveats
        limit = plain.limit if shows and (self._limit_is_clear or self._total_is_known) else None
        return _lowest_limit(settings, plain.total if self._total_is_known or limit is not None else None, limit)

    def reserved_before(self, used: WhatIfOutcome) -> int:
        """Return the bytes that a gain is counted from: the recorded ones, or on another device those of a replay."""
        replayed = used.reserved_peak_bytes
        return min(replayed, self.record.reserved_peak_bytes) if self._memory is None else replayed

    def least_gain(self, found: WhatIfOutcome, used: WhatIfOutcome) -> int | None:
        """Return the least reduction of reserved bytes against the settings that were `used`, over every scenario.

        It is 0 if requests failed and none fails in any scenario, and None if a scenario is worse or the gain too
        small.
        """
        settings = Settings.parse(found.conf)
        before = self.reserved_before(used)
        plain = self._plain()
        pairs = [(plain, plain), *self._other_starts(found.conf, settings)]
        for caveat, scenario in self._alternatives(found, settings):
            # Under the recorded settings and on the recorded device the program did what was recorded.
            is_open = self._memory is not None and caveat in (Caveat.CALLS_UNSEEN, Caveat.CALLS_UNCLEAR)
            pairs.append((scenario, scenario if is_open else plain))
        least = before
        avoids = found.failures < used.failures
        if self._start_is_open(found, settings):
            return None
        for here, there in pairs:
            one = self._run(settings, found.conf, here)
            other = self._run(self._recorded, self._recorded.text, there)
            # The number of failures is unknown if the program continues after one: only their absence is certain.
            if one.oom is not None or one.failures > (0 if avoids else other.failures):
                return None
            least = min(least, min(before, other.reserved_peak_bytes) - one.reserved_peak_bytes)
        if avoids:
            return 0
        # Calls that left no event only make the true gain larger; everything else may make it smaller.
        unsure = set(found.caveats) - {Caveat.CALLS_UNSEEN}
        if Caveat.BEGINS_LATE in unsure:
            # The addresses of earlier blocks are not known either: no replayed start shows them.
            least -= int(before * _WORTH_IF_UNSURE)
            return least if least > before * WORTH_NAMING else None
        return least if least > before * (_WORTH_IF_UNSURE if unsure else WORTH_NAMING) else None

    def _start_is_open(self, found: WhatIfOutcome, settings: Settings) -> bool:
        """Return whether any amount may have been cached when the recording began, had these settings been in force.

        Besides what the range says of it, what was cached is neither more nor less than it would have been if the
        recorded allocator did not split large blocks.
        """
        if found.conf == self._recorded.text or not (self.asked.prior_memory or self.asked.prior_blocks):
            return False
        return self._starts_with_any(settings) or self._recorded.max_split_size != UNLIMITED

    @property
    def _gave_back(self) -> bool:
        """Whether the recorded allocator released memory by itself, or may have done so before the recording began."""
        record, recorded = self.record, self._recorded
        if recorded.garbage_collection_threshold or record.retries or record.failures:
            return True
        # While there is room for the largest request, no request makes the allocator release cached memory.
        limit = _lowest_limit(recorded, self._total, self._limit) if self._total_is_known else None
        return limit is not None and record.reserved_peak_bytes + self._largest_segment(recorded) > limit

    def _plain(self) -> _Scenario:
        if self._memory:
            return _Scenario(self.asked, self._memory, self._memory)
        return _Scenario(self.asked, self._total, self._limit)

    def _other_starts(self, conf: str, settings: Settings) -> Iterator[tuple[_Scenario, _Scenario]]:
        """Yield the other possible starts of a recording, under some settings and under the recorded ones.

        Either nothing is cached, or the same amount at the same places, in the kind of memory that the settings use.
        """
        plain = self._plain()
        if conf != self._recorded.text and self.asked.prior_memory:
            if self._bare is None:
                self._bare = replace(self.asked, prior_memory=[])
            yield replace(plain, asked=self._bare), replace(plain, asked=self._bare)
            yield replace(plain, asked=with_start_in(self.asked, settings)), plain

    def _alternatives(self, found: WhatIfOutcome, settings: Settings) -> Iterator[tuple[Caveat, _Scenario]]:
        """Yield the other possible cases that may change an outcome."""
        plain = self._plain()
        total, limit = plain.total, plain.limit
        is_other = found.conf != self._recorded.text
        is_at_the_end = found.oom is not None and found.oom.event == self._last_request and self._ends_with_failure
        if Caveat.RUNS_OUT in found.caveats and not is_at_the_end:
            yield Caveat.RUNS_OUT, replace(plain, course=Course(goes_on=True))
            yield Caveat.RUNS_OUT, replace(plain, course=Course(gives_up=True))
        if Caveat.OTHER_COURSE in found.caveats:
            if not self._ends_with_failure:
                yield Caveat.OTHER_COURSE, replace(plain, course=Course(keeps=True))
                yield Caveat.OTHER_COURSE, replace(plain, course=Course(frees_at_once=True))
            yield Caveat.OTHER_COURSE, replace(plain, course=Course(does_without=True))
        if is_other and self._quiet:
            yield Caveat.CALLS_UNSEEN, replace(plain, course=Course(empties=self._quiet))
        if is_other and self._smaller is not None:
            yield Caveat.SIZES_ROUNDED, replace(plain, asked=self._smaller)
        if self.asked.otherwise is not None:
            yield Caveat.CALLS_UNCLEAR, replace(plain, asked=self.asked.otherwise)
        if is_other and not settings.expandable_segments:
            yield Caveat.ADDRESSES_UNSEEN, replace(plain, course=Course(lowest_first=True))
        if self._memory is not None or not is_other:
            return
        most = self.record.reserved_peak_bytes
        if settings.per_process_memory_fraction is not None and not self._total_is_known:
            # The device may have more memory than was available; or nothing shows how much.
            smallest = None if total else most
            yield Caveat.LIMIT_UNCLEAR, replace(plain, total=smallest, limit=smallest or limit)
        lowest = _lowest_limit(settings, total, limit)
        by_fraction = lowest is not None and (limit is None or lowest < limit)
        needs_more = found.reserved_peak_bytes > (most if self.asked.ceiling is not None or limit is None else limit)
        hits = needs_more or found.retries > 0 or found.failures > 0
        if hits and not self._limit_is_clear and not by_fraction:
            yield Caveat.LIMIT_UNCLEAR, replace(plain, limit=most)

    def _caveats_of_check(self) -> list[Caveat]:
        record, check = self.record, self.check
        caveats = []
        error = abs(check.reserved_peak_bytes - record.reserved_peak_bytes)
        if error > WORTH_NAMING * record.reserved_peak_bytes:
            caveats.append(Caveat.PEAK_DIFFERS)
        if check.retries != record.retries:
            caveats.append(Caveat.RETRIES_DIFFER)
        if check.failures != record.failures:
            caveats.append(Caveat.FAILURES_DIFFER)
        return caveats

    def _run(self, settings: Settings, conf: str, scenario: _Scenario) -> WhatIfOutcome:
        """Return what is reserved under some settings in one scenario."""
        if (conf, scenario) not in self._runs:
            self._runs[conf, scenario], _ = self._replay(settings, conf, scenario)
        return self._runs[conf, scenario]

    def _replay(
        self, settings: Settings, conf: str, scenario: _Scenario, most: int | None = None
    ) -> tuple[WhatIfOutcome, bool]:
        asked, total, limit, course = scenario.asked, scenario.total, scenario.limit, scenario.course
        return run_model(
            self._trace, asked, settings, conf, total=total, limit=limit, course=course, frees=self._frees, most=most
        )


def _record(asked: Requests) -> Record:
    level = sum(change.size for change in asked.prior_memory)
    most, calls = 0, asked.calls
    begin = calls.first_but(Verb.EMPTY_CACHE)
    changed = list(calls.with_changes())
    first = [(begin, calls[begin])] if begin < len(calls) and not calls[begin].changes else []
    for index, call in sorted(changed + first, key=itemgetter(0)):
        for change in call.changes:
            level += -change.size if change.kind in RELEASES else change.size
            most = max(most, level) if index >= begin else most
        if index >= begin and not most:
            most = level
    return Record(most, asked.retries, asked.calls.number_of(Verb.FAILED_MALLOC), asked.ceiling)


def _limits(asked: Requests, recorded: Settings, total: int | None) -> tuple[int | None, int | None, bool]:
    """Return the memory of the recorded device, how much of it could be reserved, and whether that is sure.

    A request that failed or needed a retry shows the limit: it lies between the peak of reserved bytes and the amount
    that could not be reserved. A memory fraction may have caused it.
    """
    fraction, ceiling = recorded.per_process_memory_fraction, asked.ceiling
    if asked.available is not None:
        return total or asked.available, asked.available, True
    if fraction and total is None and ceiling is not None:
        total = int(ceiling / fraction)
    if ceiling is None or (fraction and total and int(fraction * total) <= ceiling):
        return total, total, False
    limit = min(ceiling, total) if total else ceiling
    return total, limit, limit <= asked.peak_reserved * (1 + WORTH_NAMING)


def _most_growth(settings: Settings) -> float:
    """Return the maximum factor of rounding up a request: from just above a power of two to the next step."""
    return max((1 + 1 / divisions for divisions in settings.roundup_power2_divisions if divisions > 1), default=1.0)


def _lowest_limit(settings: Settings, total: int | None, limit: int | None) -> int | None:
    """Return how many bytes can be reserved, given the device's memory and the available part of it."""
    fraction = settings.per_process_memory_fraction or 1.0
    limits = [int(fraction * total)] if total else []
    return min(limits + ([limit] if limit is not None else []), default=None)


def _beyond(settings: Settings) -> int:
    """Return by how many bytes the reserved ones can exceed a memory fraction.

    Like PyTorch's, the allocator compares what a request needs with the limit. An expandable segment then grows by
    whole pages.
    """
    is_limited = settings.per_process_memory_fraction is not None
    return settings.large_segment_size if is_limited and settings.expandable_segments else 0
