"""Predicts what the same requests would have cost under other allocator settings, or on another device.

The recorded calls go through the allocator's policy over a model of a device: memory is a number of bytes, and
addresses are counted up. The program's requests stay the same, and so does the point at which other streams have
finished with a freed block. What a program would have done if it had not run out of memory is unknown: such a recording
has only the requests until then.

The recorded settings are replayed first. If that does not cost what was recorded, every other prediction is in doubt,
and there is no advice. The gain of a setting is counted from the recorded cost. It is the minimum over everything that
the recording leaves open: both settings are replayed from each possible start and with each possible course of the
program. A setting that gains nothing in one of these is not recommended.

A prediction that may be off has a range, which spans the replays of all possible cases. A recording that begins late
may have more possible starts than can be replayed. Then the range reaches from the bytes in use, below which no
allocator reserves, to a start with as much cached memory as was seen, none of it usable. If the recording does not
bound the cached memory, or a request may fail, only the memory of the device bounds the range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import itemgetter
from typing import Final

from cudatool.analyze.in_use import InUse
from cudatool.analyze.recorded import settings_variable
from cudatool.analyze.refused import likely_frees, with_smallest_sizes
from cudatool.analyze.replay import requests_with_pools
from cudatool.analyze.replay_start import with_start_in
from cudatool.analyze.requests import RELEASES, Requests, Verb
from cudatool.analyze.whatif_model import Caveat, Course, Outcome, OutOfMemory, check_model, run_model
from cudatool.errors import ConfigError
from cudatool.memory.blocks import round_size, segment_size
from cudatool.memory.settings import PYTORCHS_VARIABLE, UNLIMITED, Settings
from cudatool.trace.model import Trace
from cudatool.units import counted, format_bytes

__all__ = [
    "Advice",
    "Caveat",
    "LeftOut",
    "NoAdvice",
    "Outcome",
    "OutOfMemory",
    "Record",
    "advise",
    "recorded_limit",
    "what_if",
]

_MIB = 1024 * 1024
_WORTH_NAMING = 0.01  # share of the reserved bytes: less is neither a gain nor an error
_WORTH_IF_UNSURE = 0.05  # a prediction with a caveat is often off by this much
_ABOUT_FAILURES = (Caveat.CALLS_UNSEEN, Caveat.CALLS_UNCLEAR, Caveat.LIMIT_UNCLEAR)  # which change where memory ends
_ABOUT_CHECK = {Caveat.PEAK_DIFFERS, Caveat.RETRIES_DIFFER, Caveat.FAILURES_DIFFER}
_PLAIN = Course()  # as it was recorded
_TOO_WRONG = 0.02  # if the replay of the recorded settings is off by more, there is no advice


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
    recorded: Outcome | None
    best: Outcome | None
    gain_bytes: int
    tried: tuple[Outcome, ...]
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
        text = f"a replay of the recorded settings reserves {format_bytes(check.reserved_peak_bytes)}, recorded were "
        return f"{text}{format_bytes(record.reserved_peak_bytes)}"


def what_if(
    trace: Trace,
    device: int,
    confs: Sequence[str],
    *,
    recorded: Settings,
    recorded_memory: int | None = None,
    memory: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Outcome]:
    """Return what the requests on one device cost under each of some settings.

    Parameters
    ----------
    confs
        Settings strings in PyTorch's syntax.
    recorded, recorded_memory
        The settings that were in force, and the memory of the recorded device in bytes, if known. They separate the
        program's requests from the allocator's own actions.
    memory
        The memory of the modeled device in bytes; default: that of the recorded one, if it is known or can be inferred.
    progress
        Called with the number of settings done.

    Raises
    ------
    ConfigError
        A string cannot be read, or asks for another allocator.
    """
    return list(advise(**locals()).tried)


def advise(
    trace: Trace,
    device: int,
    confs: Sequence[str] = (),
    *,
    recorded: Settings,
    recorded_memory: int | None = None,
    memory: int | None = None,
    progress: Callable[[int], None] | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> Advice:
    """Try some settings, and name the best. The parameters are those of :func:`what_if`, and `enough`.

    `enough` is asked before each setting: once it returns True, the others are not tried, and the advice names them.

    Without `confs`, the settings that can matter are tried: first each by itself, then the best with another one. A
    setting is better if it does not run out of memory, then if it reserves less; of about equal ones the first, simpler
    one wins. Each costs one to four replays. So a setting is skipped, before or during its replay, as soon as it
    reserves so much that it cannot gain noticeably more than others are sure to gain.
    """
    model = _Experiment(trace, device, recorded, recorded_memory, memory, progress)
    record, variable = model.record, settings_variable(trace)
    if model.impossible is not None:
        return Advice(record, None, None, 0, (), model.impossible, variable=variable)
    used = model.outcome(recorded.text)
    withheld = _withheld(record, model.check)
    left_out: tuple[LeftOut, ...] = ()
    untried: list[str] = []
    if confs:
        tried = tuple(model.outcome(conf) for conf in confs if not _is_put_off(model, conf, enough, untried))
    else:
        search = _Search(model, used, can_leave_out=withheld is None)
        limit = _limit_of(recorded)
        alone = [
            (conf, outcome)
            for conf in _candidates(model.asked, recorded)
            if not _is_put_off(model, _joined(conf, limit), enough, untried)
            if (outcome := search.outcome(_joined(conf, limit))) is not None
        ]
        if alone and "roundup" not in (least_bad := min(alone, key=lambda tried: _badness(tried[1]))[0]):
            for partner in ("roundup_power2_divisions:4", "roundup_power2_divisions:8"):
                if not _is_put_off(model, _joined(least_bad, partner, limit), enough, untried):
                    search.outcome(_joined(least_bad, partner, limit))
        tried, left_out = tuple(model.done.values()), tuple(search.left_out)
    if withheld is not None:
        return Advice(record, model.check, None, 0, tried, withheld, left_out, tuple(untried), variable)
    best, gain = _best(model, used, tried)
    return Advice(record, model.check, best, gain, tried, None, left_out, tuple(untried), variable)


def _is_put_off(model: _Experiment, conf: str, enough: Callable[[], bool], untried: list[str]) -> bool:
    """Return whether a setting is not to be tried any more; then it is noted."""
    if conf in untried:
        return True
    if conf not in model.done and enough():
        untried.append(conf)
        return True
    return False


class _Search:
    """Tries one setting after the other, and skips those that cannot be better than the earlier ones.

    The peak of reserved bytes only grows during a replay, and is never below the need of the blocks in use.
    """

    def __init__(self, model: _Experiment, used: Outcome, *, can_leave_out: bool) -> None:
        self.left_out: list[LeftOut] = []
        self._model, self._used = model, used
        self._in_use: InUse | None = None
        if can_leave_out and used.oom is None and not used.failures:  # else it matters which of them run out
            self._in_use = InUse(model.asked)
        self._sure = 0  # the gain of one of the tried settings, in bytes

    def outcome(self, conf: str) -> Outcome | None:
        """Return the cost of some settings; None if they are skipped."""
        if any(conf == left_out.conf for left_out in self.left_out):
            return None
        if self._in_use is not None and conf not in self._model.done:
            before = self._model.reserved_before(self._used)
            most = before - self._sure - int(before * _WORTH_NAMING) - 1
            least = self._in_use.most(Settings.parse(conf))
            if least <= most:
                least = self._model.reserves_beyond(conf, most)
            if least > most:
                self.left_out.append(LeftOut(conf, least))
                return None
        found = self._model.outcome(conf)
        if self._in_use is not None and found.oom is None and not found.failures:
            self._sure = max(self._sure, self._model.least_gain(found, self._used) or 0)
        return found


def _best(model: _Experiment, used: Outcome, tried: Sequence[Outcome]) -> tuple[Outcome | None, int]:
    """Return the outcome to recommend, if any, and its gain.

    Of those with the fewest failed requests, this is the one with the largest gain, or a simpler one with about the
    same.
    """
    before = model.reserved_before(used)
    good: list[tuple[Outcome, int, int]] = []  # with the gain, and bytes to compare it by
    enough = 0  # gains within this many bytes of the best are equal
    for found in sorted(tried, key=_badness):
        if found.oom is not None or found.failures > (good[0][0].failures if good else used.failures):
            break  # and so do the others
        most = before - found.reserved_peak_bytes
        if good and most < enough:
            break  # no replay gains more than this one
        gain = model.least_gain(found, used)
        if gain is not None:
            good.append((found, gain, gain or most))
            enough = max(worth for _, _, worth in good) - int(before * _WORTH_NAMING)
    about_as_good = [(found, gain) for found, gain, worth in good if worth >= enough]
    return min(about_as_good, key=lambda choice: choice[0].conf.count(":"), default=(None, 0))


def _withheld(record: Record, check: Outcome) -> NoAdvice | None:
    """Return why a replay of the recorded settings is too far from what was recorded, if it is."""
    if record.failures != check.failures:
        return NoAdvice.FAILURES_DIFFER
    error = abs(check.reserved_peak_bytes - record.reserved_peak_bytes)
    return NoAdvice.PEAK_DIFFERS if error > _TOO_WRONG * record.reserved_peak_bytes else None


@dataclass(frozen=True, slots=True)
class _Scenario:
    """A possible case: the requests and their initial state, the device's memory and the limit, the course."""

    asked: Requests
    total: int | None
    limit: int | None
    course: Course = _PLAIN


class _Experiment:
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
        self.done: dict[str, Outcome] = {}  # by settings string
        self._bare: Requests | None = None  # as `asked`, with nothing cached at the beginning
        self._runs: dict[tuple[str, _Scenario], Outcome] = {}
        self._card_is_known = recorded_memory is not None
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

    def outcome(self, conf: str) -> Outcome:
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

    def _with_caveats(self, settings: Settings, conf: str) -> Outcome:
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
            if most_possible is None or most_possible > (1 + _WORTH_NAMING) * found.reserved_peak_bytes:
                caveats.append(caveat)
        runs = [found]
        for caveat, scenario in self._alternatives(found, settings):
            other = self._run(settings, conf, scenario)
            runs.append(other)
            apart = abs(other.reserved_peak_bytes - found.reserved_peak_bytes)
            if apart > _WORTH_NAMING * found.reserved_peak_bytes or (
                caveat in _ABOUT_FAILURES and other.failures != found.failures
            ):
                caveats.append(caveat)
        caveats = list(dict.fromkeys(caveats))
        least, most = self._range(conf, settings, runs, caveats) if caveats else (found.reserved_peak_bytes,) * 2
        return replace(found, reserved_least_bytes=least, reserved_most_bytes=most, caveats=tuple(caveats))

    def _range(
        self, conf: str, settings: Settings, runs: list[Outcome], caveats: list[Caveat]
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
        limit = plain.limit if shows and (self._limit_is_clear or self._card_is_known) else None
        return _lowest_limit(settings, plain.total if self._card_is_known or limit is not None else None, limit)

    def reserved_before(self, used: Outcome) -> int:
        """Return the bytes that a gain is counted from: the recorded ones, or on another device those of a replay."""
        replayed = used.reserved_peak_bytes
        return min(replayed, self.record.reserved_peak_bytes) if self._memory is None else replayed

    def least_gain(self, found: Outcome, used: Outcome) -> int | None:
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
            return least if least > before * _WORTH_NAMING else None
        return least if least > before * (_WORTH_IF_UNSURE if unsure else _WORTH_NAMING) else None

    def _start_is_open(self, found: Outcome, settings: Settings) -> bool:
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
        limit = _lowest_limit(recorded, self._total, self._limit) if self._card_is_known else None
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

    def _alternatives(self, found: Outcome, settings: Settings) -> Iterator[tuple[Caveat, _Scenario]]:
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
        if settings.per_process_memory_fraction is not None and not self._card_is_known:
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
        if error > _WORTH_NAMING * record.reserved_peak_bytes:
            caveats.append(Caveat.PEAK_DIFFERS)
        if check.retries != record.retries:
            caveats.append(Caveat.RETRIES_DIFFER)
        if check.failures != record.failures:
            caveats.append(Caveat.FAILURES_DIFFER)
        return caveats

    def _run(self, settings: Settings, conf: str, scenario: _Scenario) -> Outcome:
        """Return what is reserved under some settings in one scenario."""
        if (conf, scenario) not in self._runs:
            self._runs[conf, scenario], _ = self._replay(settings, conf, scenario)
        return self._runs[conf, scenario]

    def _replay(
        self, settings: Settings, conf: str, scenario: _Scenario, most: int | None = None
    ) -> tuple[Outcome, bool]:
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
    return total, limit, limit <= asked.peak_reserved * (1 + _WORTH_NAMING)


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


def recorded_limit(
    trace: Trace, device: int, recorded: Settings | None = None, recorded_memory: int | None = None
) -> int | None:
    """Return how many bytes a program could reserve at most, according to its failed requests and retries.

    When a request fails, everything cached has been released: the reserved bytes and the device's free bytes are all
    there is. If that should have been enough, a memory fraction was the limit, and all that is known is that the
    request exceeded it. None if nothing failed.
    """
    return requests_with_pools(trace, device, recorded or Settings(), recorded_memory).ceiling


def _badness(outcome: Outcome) -> tuple[int, int, int]:
    if outcome.oom is not None:
        return 1, -outcome.oom.request, 0
    return 0, outcome.failures, outcome.reserved_peak_bytes


def _joined(*confs: str) -> str:
    return ",".join(conf for conf in confs if conf)


def _limit_of(settings: Settings) -> str:
    """Return the part of the settings that is a limit, not a choice."""
    fraction = settings.per_process_memory_fraction
    return "" if fraction is None else f"per_process_memory_fraction:{fraction}"


def _candidates(asked: Requests, recorded: Settings) -> list[str]:
    """Return the settings to try: the defaults, and those that can make a difference for this program's sizes."""
    found = ["", "expandable_segments:True"]
    largest = int(asked.calls.sizes(Verb.MALLOC).max(initial=0))
    if largest >= 20 * _MIB:
        # A limit matters only if some blocks lie above it: try those between 20 MiB and the largest, by factors of two.
        limit = 32
        while limit * _MIB < largest:
            found.append(f"max_split_size_mb:{limit}")
            limit *= 2
    found += [f"roundup_power2_divisions:{divisions}" for divisions in (2, 4, 8, 16)]
    if recorded.per_process_memory_fraction is not None:
        found += [f"garbage_collection_threshold:{threshold}" for threshold in (0.6, 0.8)]
    return found
