"""What the same requests would have cost under other allocator settings, or on another card.

The recorded calls go through the allocator's policy over a model of a card: memory is a number of bytes, and addresses
are counted up. What the program asked for stays as it was, down to the point at which other streams are done with a
block that was freed. What is not known is what a program would have done had it not run out of memory: a recording
that ends so has only the requests until then.

The recorded settings are replayed first. Where that does not cost what was recorded, every other prediction is in
doubt, and there is no advice. What a setting gains is counted from what was recorded, and is the least that it gains
over everything that the recording leaves open: both settings are replayed from each start that may have been, and with
each course that the program may have taken. A setting that gains nothing in one of these is not recommended.

A prediction that may be off has a range. It spans the replays of everything that may have been; and since a recording
that begins late may have begun in more ways than can be replayed, it then reaches from the bytes in use, below which no
allocator reserves, to a beginning with as much cached as was seen and none of it of use. Where the recording does not
bound what was cached, or a request may fail, only the memory of the card bounds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import itemgetter

from cudatool.analyze.in_use import InUse
from cudatool.analyze.refused import likely_frees, with_smallest_sizes
from cudatool.analyze.replay import requests_with_pools
from cudatool.analyze.replay_start import with_start_in
from cudatool.analyze.requests import RELEASES, Requests, Verb
from cudatool.analyze.whatif_model import Caveat, Course, Outcome, OutOfMemory, check_model, run_model, run_model_up_to
from cudatool.errors import ConfigError
from cudatool.memory.blocks import round_size, segment_size
from cudatool.memory.settings import UNLIMITED, Settings
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
_WORTH_NAMING = 0.01  # of what is reserved: less is no gain, and no error either
_WORTH_IF_UNSURE = 0.05  # by which a prediction with a caveat is often off
_ABOUT_FAILURES = (Caveat.CALLS_UNSEEN, Caveat.CALLS_UNCLEAR, Caveat.LIMIT_UNCLEAR)  # which change where memory ends
_ABOUT_CHECK = {Caveat.PEAK_DIFFERS, Caveat.RETRIES_DIFFER, Caveat.FAILURES_DIFFER}
_PLAIN = Course()  # as it was recorded
_TOO_WRONG = 0.02  # by which the replay of the recorded settings may be off before there is no advice


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


@dataclass(frozen=True, slots=True)
class Record:
    """What was recorded.

    Attributes
    ----------
    reserved_peak_bytes
        The most at a time from the first request on. What was cached before and given back until then is left out.
    retries
        How often the allocator released all that was cached to make room.
    failures
        Requests that failed.
    limit_bytes
        How many bytes could be reserved, according to requests that failed or needed a retry: at most so many. None
        if there were none.
    """

    reserved_peak_bytes: int
    retries: int
    failures: int
    limit_bytes: int | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Settings under which at least so many bytes are reserved, which is too much to be the best."""

    conf: str
    reserved_least_bytes: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The best of some settings.

    Attributes
    ----------
    record
        What was recorded; None if it was not looked at.
    recorded
        What a replay of the recorded settings costs.
    best
        None if nothing is better than what was used, or if `withheld` says why there is no advice.
    gain_bytes
        By how much less is reserved than was recorded, at the least over all that the recording leaves open; 0 if the
        gain is that memory does not run out.
    tried
        All settings that were tried; of those that were asked for, or that matter for these requests.
    withheld
        Why there is no advice; None if nothing stands in its way.
    left_out
        Settings that were not tried to the end, because others are sure to gain as much as these can.
    """

    record: Record | None
    recorded: Outcome | None
    best: Outcome | None
    gain_bytes: int
    tried: tuple[Outcome, ...]
    withheld: NoAdvice | None = None
    left_out: tuple[LeftOut, ...] = ()

    def why_not(self) -> str:
        """Return in words why there is no advice; nothing if `withheld` is None."""
        record, check = self.record, self.recorded
        if self.withheld is NoAdvice.OTHER_ALLOCATOR:
            return "these requests were made to RMM, whose allocators follow other rules than PyTorch's"
        if self.withheld is NoAdvice.NO_REQUESTS:
            text = "the file has no history of requests, so their order is not known; record it with "
            return f"{text}torch.cuda.memory._record_memory_history()"
        if self.withheld is NoAdvice.CONTRADICTION:
            return "events of the recording contradict each other"
        if self.withheld is NoAdvice.TOO_LONG:
            return "the recording is long; cudatool replay takes the time to try some"
        if record is None or check is None:
            return ""
        if self.withheld is NoAdvice.FAILURES_DIFFER:
            text = f"{counted(record.failures, 'request')} failed when it was recorded, {check.failures:,} in a replay "
            return f"{text}of the recorded settings; pass the memory of the recorded GPU with --card"
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
        The settings that were in force, and bytes of the card they were recorded on, if known. They tell the program's
        requests from what the allocator did by itself.
    memory
        Bytes of the card to model; default: what the recorded one had, where that is known or shows.
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
) -> Advice:
    """Try some settings, and name the best. The parameters are those of :func:`what_if`.

    Without `confs`, those are tried that can matter: first each by itself, then the best with another one. Better is
    what does not run out of memory, then what reserves less; of about equal ones the one named first, which is the
    simpler one. Each costs one to four replays, so those are left out, before their replay or in it, that reserve so
    much that they cannot gain more than others are sure to gain, by as much as is worth naming.
    """
    model = _Experiment(trace, device, recorded, recorded_memory, memory, progress)
    record = model.record
    if model.impossible is not None:
        return Advice(record, None, None, 0, (), model.impossible)
    used = model.outcome(recorded.text)
    withheld = _withheld(record, model.check)
    left_out: tuple[LeftOut, ...] = ()
    if confs:
        tried = tuple(model.outcome(conf) for conf in confs)
    else:
        search = _Search(model, used, can_leave_out=withheld is None)
        limit = _limit_of(recorded)
        alone = [
            (conf, outcome)
            for conf in _candidates(model.asked, recorded)
            if (outcome := search.outcome(_joined(conf, limit))) is not None
        ]
        if alone and "roundup" not in (least_bad := min(alone, key=lambda tried: _badness(tried[1]))[0]):
            for partner in ("roundup_power2_divisions:4", "roundup_power2_divisions:8"):
                search.outcome(_joined(least_bad, partner, limit))
        tried, left_out = tuple(model.done.values()), tuple(search.left_out)
    if withheld is not None:
        return Advice(record, model.check, None, 0, tried, withheld, left_out)
    best, gain = _best(model, used, tried)
    return Advice(record, model.check, best, gain, tried, None, left_out)


class _Search:
    """Tries one setting after the other, and leaves out those that cannot be better than what was tried before them.

    What is reserved at the peak only grows in a replay, and is never less than what the blocks in use need.
    """

    def __init__(self, model: _Experiment, used: Outcome, *, can_leave_out: bool) -> None:
        self.left_out: list[LeftOut] = []
        self._model, self._used = model, used
        self._in_use: InUse | None = None
        if can_leave_out and used.oom is None and not used.failures:  # else it matters which of them run out
            self._in_use = InUse(model.asked)
        self._sure = 0  # bytes that one of those that were tried gains

    def outcome(self, conf: str) -> Outcome | None:
        """Return what some settings cost; None if they are left out."""
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

    Of those that let as few requests fail it is the one that gains most, or a simpler one that gains about as much.
    """
    before = model.reserved_before(used)
    good: list[tuple[Outcome, int, int]] = []  # with the gain, and bytes to compare it by
    enough = 0  # bytes that are about as much as the best one's
    for found in sorted(tried, key=_badness):
        if found.oom is not None or found.failures > (good[0][0].failures if good else used.failures):
            break  # so are the others
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
    """What may have been: the requests and what they begin with, the bytes of the card and the limit, the course."""

    asked: Requests
    total: int | None
    limit: int | None
    course: Course = _PLAIN


class _Experiment:
    """Recorded requests, and what they were found to cost."""

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
            # How much may be reserved tells the allocator's garbage collection from the program's empty_cache.
            self.asked = requests_with_pools(trace, device, recorded, shown)
        self.record = _record(self.asked)
        last = self.asked.calls.last(Verb.MALLOC, Verb.FAILED_MALLOC)
        self._last_request = self.asked.calls[last].event if last >= 0 else -1
        self.done: dict[str, Outcome] = {}  # by settings string
        self._bare: Requests | None = None  # as `asked`, with nothing cached at the beginning
        self._runs: dict[tuple[str, _Scenario], Outcome] = {}
        self._card_is_known = recorded_memory is not None
        self._total, self._limit, self._limit_is_clear = _limits(self.asked, recorded, recorded_memory)
        self.impossible: NoAdvice | None = None
        if trace.header.get("format") == "rmm-log":
            self.impossible = NoAdvice.OTHER_ALLOCATOR
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
        """Return what the requests cost under some settings."""
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
        """Return how many bytes are reserved as soon as it is more than so many; 0 if it never is."""
        settings = Settings.parse(conf)
        scenario = self._first_scenario(conf)
        if (conf, scenario) in self._runs:
            return 0
        asked, total, limit, course = scenario.asked, scenario.total, scenario.limit, scenario.course
        found, is_all = run_model_up_to(
            self._trace, asked, settings, conf, total=total, limit=limit, course=course, frees=self._frees, most=most
        )
        if not is_all:
            return found.reserved_peak_bytes
        self._runs[conf, scenario] = found
        return 0

    def _first_scenario(self, conf: str) -> _Scenario:
        """Return what is replayed first: where it matters, with the calls of empty_cache that left no event."""
        plain = self._plain()
        is_other = conf != self._recorded.text
        return replace(plain, course=Course(empties=self._quiet)) if is_other and self._quiet else plain

    def _with_caveats(self, settings: Settings, conf: str) -> Outcome:
        plain = self._plain()
        if (first := self._first_scenario(conf)) != plain:
            emptied = self._run(settings, conf, first)
            if Caveat.CALLS_UNSEEN not in emptied.caveats:
                self._runs[conf, plain] = emptied  # it found nothing to give back, so it is the same
        found = self._run(settings, conf, plain)
        caveats = [*self._caveats]
        if conf != self._recorded.text and (self.asked.prior_blocks or self.asked.prior_memory):
            caveats.append(Caveat.BEGINS_LATE)
        ends = found.oom is not None and found.oom.event == self._last_request
        for caveat in found.caveats if not ends else ():  # of the model: what the program does next is not known
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
        """Return between which the peak lies over all that the recording leaves open; see ``docs/what-if.md``.

        Parameters
        ----------
        runs
            What the requests cost under these settings in each way that may have been.
        """
        begins_late, differs = Caveat.BEGINS_LATE in caveats, not _ABOUT_CHECK.isdisjoint(caveats)
        needed = min(run.active_peak_bytes for run in runs)  # an allocator that reserves less there is not
        most = 0
        if begins_late:
            starts = [self._run(settings, conf, here) for here, _ in self._other_starts(conf, settings)]
            runs = runs + starts
            # A bad beginning: as much is cached as the recording, or these settings, keep, and nothing fits.
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
            return least, limit
        return least, most

    def _starts_with_any(self, settings: Settings) -> bool:
        """Return whether more may have been cached when the recording began than it had then.

        So it is if the recorded allocator gave memory back by itself, if it split larger blocks than these do, and if
        it could give back pages around a block in use, where these keep the whole segment.
        """
        recorded = self._recorded
        keeps_segments = recorded.expandable_segments and not settings.expandable_segments
        return self._gave_back or keeps_segments or settings.max_split_size < recorded.max_split_size

    def _largest_segment(self, settings: Settings) -> int:
        """Return the bytes that the largest request needs from the driver."""
        largest = int(self.asked.calls.sizes(Verb.MALLOC, Verb.FAILED_MALLOC).max())
        return segment_size(round_size(largest, settings), settings)

    def _sure_limit(self, settings: Settings) -> int | None:
        """Return how many bytes can be reserved at most, if that is known."""
        plain = self._plain()
        if self._memory is not None:
            return _lowest_limit(settings, plain.total, plain.limit)
        # What requests that failed or were retried show depends on the replay of the recorded settings being right.
        shows = self.asked.otherwise is None and not self._caveats
        limit = plain.limit if shows and (self._limit_is_clear or self._card_is_known) else None
        return _lowest_limit(settings, plain.total if self._card_is_known or limit is not None else None, limit)

    def reserved_before(self, used: Outcome) -> int:
        """Return the bytes that a gain is counted from: those recorded, or on another card those of a replay."""
        replayed = used.reserved_peak_bytes
        return min(replayed, self.record.reserved_peak_bytes) if self._memory is None else replayed

    def least_gain(self, found: Outcome, used: Outcome) -> int | None:
        """Return by how much less is reserved than under the settings that were `used`, in every scenario.

        It is 0 if requests failed and none does in any scenario, and None if one is worse or not worth naming.
        """
        settings = Settings.parse(found.conf)
        before = self.reserved_before(used)
        plain = self._plain()
        pairs = [(plain, plain), *self._other_starts(found.conf, settings)]
        for caveat, scenario in self._alternatives(found, settings):
            # Under the recorded settings and on the recorded card the program did what was recorded.
            is_open = self._memory is not None and caveat in (Caveat.CALLS_UNSEEN, Caveat.CALLS_UNCLEAR)
            pairs.append((scenario, scenario if is_open else plain))
        least = before
        avoids = found.failures < used.failures
        if self._start_is_open(found, settings):
            return None
        for here, there in pairs:
            one = self._run(settings, found.conf, here)
            other = self._run(self._recorded, self._recorded.text, there)
            # How often a program fails that goes on with what it was refused does not show: only that it never would.
            if one.oom is not None or one.failures > (0 if avoids else other.failures):
                return None
            least = min(least, min(before, other.reserved_peak_bytes) - one.reserved_peak_bytes)
        if avoids:
            return 0
        # Calls that left no event only make the true gain larger; everything else may make it smaller.
        unsure = set(found.caveats) - {Caveat.CALLS_UNSEEN}
        if Caveat.BEGINS_LATE in unsure:
            # Where the blocks lie that were there before is not known, either: no start that is replayed shows that.
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
        """Whether the recorded allocator gave memory back by itself, or may have before the recording began."""
        record, recorded = self.record, self._recorded
        if recorded.garbage_collection_threshold or record.retries or record.failures:
            return True
        # While there is room for the largest request, none makes the allocator give back what is cached.
        limit = _lowest_limit(recorded, self._total, self._limit) if self._card_is_known else None
        return limit is not None and record.reserved_peak_bytes + self._largest_segment(recorded) > limit

    def _plain(self) -> _Scenario:
        if self._memory:
            return _Scenario(self.asked, self._memory, self._memory)
        return _Scenario(self.asked, self._total, self._limit)

    def _other_starts(self, conf: str, settings: Settings) -> Iterator[tuple[_Scenario, _Scenario]]:
        """Yield what else a recording may have begun with, under some settings and under the recorded ones.

        Either with nothing cached, or with as much in the same places, in the kind of memory that the settings lead to.
        """
        plain = self._plain()
        if conf != self._recorded.text and self.asked.prior_memory:
            if self._bare is None:
                self._bare = replace(self.asked, prior_memory=[])
            yield replace(plain, asked=self._bare), replace(plain, asked=self._bare)
            yield replace(plain, asked=with_start_in(self.asked, settings)), plain

    def _alternatives(self, found: Outcome, settings: Settings) -> Iterator[tuple[Caveat, _Scenario]]:
        """Yield what may have been otherwise and may change an outcome."""
        plain = self._plain()
        total, limit = plain.total, plain.limit
        is_other = found.conf != self._recorded.text
        if Caveat.RUNS_OUT in found.caveats:
            yield Caveat.RUNS_OUT, replace(plain, course=Course(goes_on=True))
            yield Caveat.RUNS_OUT, replace(plain, course=Course(gives_up=True))
        if Caveat.OTHER_COURSE in found.caveats:
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
            # The card may have more than could be had of it; or nothing shows how much.
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
            asked, total, limit, course = scenario.asked, scenario.total, scenario.limit, scenario.course
            self._runs[conf, scenario] = run_model(
                self._trace, asked, settings, conf, total=total, limit=limit, course=course, frees=self._frees
            )
        return self._runs[conf, scenario]


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


def _limits(asked: Requests, recorded: Settings, card: int | None) -> tuple[int | None, int | None, bool]:
    """Return the bytes of the recorded card, how many could be reserved on it, and whether that is sure.

    A request that failed or needed a retry shows the limit: it lies between the most that was ever reserved and what
    could not be. It may be that of a memory fraction.
    """
    fraction, ceiling = recorded.per_process_memory_fraction, asked.ceiling
    if asked.available is not None:
        return card or asked.available, asked.available, True
    if fraction and card is None and ceiling is not None:
        card = int(ceiling / fraction)
    if ceiling is None or (fraction and card and int(fraction * card) <= ceiling):
        return card, card, False
    limit = min(ceiling, card) if card else ceiling
    return card, limit, limit <= asked.peak_reserved * (1 + _WORTH_NAMING)


def _most_growth(settings: Settings) -> float:
    """Return by what factor rounding lets a request grow at most: from just above a power of two to the next step."""
    return max((1 + 1 / divisions for divisions in settings.roundup_power2_divisions if divisions > 1), default=1.0)


def _lowest_limit(settings: Settings, total: int | None, limit: int | None) -> int | None:
    """Return how many bytes can be reserved, given the bytes of the card and what can be had of it."""
    fraction = settings.per_process_memory_fraction or 1.0
    limits = [int(fraction * total)] if total else []
    return min(limits + ([limit] if limit is not None else []), default=None)


def recorded_limit(
    trace: Trace, device: int, recorded: Settings | None = None, recorded_memory: int | None = None
) -> int | None:
    """Return how many bytes a program could reserve at most, according to its failed requests and retries.

    When a request fails, everything cached has been given back: what is reserved then and what is free on the device
    is all there is. If that should have been enough, a memory fraction stood in the way, and all that is known is that
    the request was too much for it. None if nothing failed.
    """
    return requests_with_pools(trace, device, recorded or Settings(), recorded_memory).ceiling


def _badness(outcome: Outcome) -> tuple[int, int, int]:
    if outcome.oom is not None:
        return 1, -outcome.oom.request, 0
    return 0, outcome.failures, outcome.reserved_peak_bytes


def _joined(*confs: str) -> str:
    return ",".join(conf for conf in confs if conf)


def _limit_of(settings: Settings) -> str:
    """Return the part of settings that is not a choice but a limit."""
    fraction = settings.per_process_memory_fraction
    return "" if fraction is None else f"per_process_memory_fraction:{fraction}"


def _candidates(asked: Requests, recorded: Settings) -> list[str]:
    """Return the settings worth trying: the defaults, and those that this program's sizes make a difference to."""
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
