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

from collections.abc import Callable, Sequence

from cudatool.analyze.calls import Verb
from cudatool.analyze.in_use import InUse
from cudatool.analyze.recorded import settings_variable
from cudatool.analyze.replay import requests_with_pools
from cudatool.analyze.requests import Requests
from cudatool.analyze.settings_advice import Advice, LeftOut, NoAdvice, Record
from cudatool.analyze.whatif_experiment import WORTH_NAMING, Experiment
from cudatool.analyze.whatif_model import WhatIfOutcome
from cudatool.memory.settings import Settings
from cudatool.trace.model import Trace

__all__ = ["advise", "recorded_limit", "what_if"]

_MIB = 1024 * 1024
_TOO_WRONG = 0.02  # if the replay of the recorded settings is off by more, there is no advice


def what_if(
    trace: Trace,
    device: int,
    confs: Sequence[str],
    *,
    recorded: Settings,
    recorded_memory: int | None = None,
    memory: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[WhatIfOutcome]:
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
    model = Experiment(trace, device, recorded, recorded_memory, memory, progress)
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


def _is_put_off(model: Experiment, conf: str, enough: Callable[[], bool], untried: list[str]) -> bool:
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

    def __init__(self, model: Experiment, used: WhatIfOutcome, *, can_leave_out: bool) -> None:
        self.left_out: list[LeftOut] = []
        self._model, self._used = model, used
        self._in_use: InUse | None = None
        if can_leave_out and used.oom is None and not used.failures:  # else it matters which of them run out
            self._in_use = InUse(model.asked)
        self._sure = 0  # the gain of one of the tried settings, in bytes

    def outcome(self, conf: str) -> WhatIfOutcome | None:
        """Return the cost of some settings; None if they are skipped."""
        if any(conf == left_out.conf for left_out in self.left_out):
            return None
        if self._in_use is not None and conf not in self._model.done:
            before = self._model.reserved_before(self._used)
            most = before - self._sure - int(before * WORTH_NAMING) - 1
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


def _best(model: Experiment, used: WhatIfOutcome, tried: Sequence[WhatIfOutcome]) -> tuple[WhatIfOutcome | None, int]:
    """Return the outcome to recommend, if any, and its gain.

    Of those with the fewest failed requests, this is the one with the largest gain, or a simpler one with about the
    same.
    """
    before = model.reserved_before(used)
    good: list[tuple[WhatIfOutcome, int, int]] = []  # with the gain, and bytes to compare it by
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
            enough = max(worth for _, _, worth in good) - int(before * WORTH_NAMING)
    about_as_good = [(found, gain) for found, gain, worth in good if worth >= enough]
    return min(about_as_good, key=lambda choice: choice[0].conf.count(":"), default=(None, 0))


def _withheld(record: Record, check: WhatIfOutcome) -> NoAdvice | None:
    """Return why a replay of the recorded settings is too far from what was recorded, if it is."""
    if record.failures != check.failures:
        return NoAdvice.FAILURES_DIFFER
    error = abs(check.reserved_peak_bytes - record.reserved_peak_bytes)
    return NoAdvice.PEAK_DIFFERS if error > _TOO_WRONG * record.reserved_peak_bytes else None


def recorded_limit(
    trace: Trace, device: int, recorded: Settings | None = None, recorded_memory: int | None = None
) -> int | None:
    """Return how many bytes a program could reserve at most, according to its failed requests and retries.

    When a request fails, everything cached has been released: the reserved bytes and the device's free bytes are all
    there is. If that should have been enough, a memory fraction was the limit, and all that is known is that the
    request exceeded it. None if nothing failed.
    """
    return requests_with_pools(trace, device, recorded or Settings(), recorded_memory).ceiling


def _badness(outcome: WhatIfOutcome) -> tuple[int, int, int]:
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
