"""Which rows of a table keep growing until its end: a trend test for bytes that are never given back.

A *floor* is the least that a call site held during one window of the recording. What is allocated and freed within a
window does not raise it, and neither does one block that replaces another. A site leaks if its floors keep rising::

    permanent[k] = min(floors[k:])        # what is held from window k on until the end; it never falls
    an event     = a window in which `permanent` rises
    leak         = enough events, at a rate that does not decline, until the end, and next to no falls of the floors

Two tests of the events after the first one, t_1 ... t_m in a time T that begins with it, decide on the rate. Both are
those for a process of events that is watched for a fixed time:

- *Silence.* At a steady rate no event falls into the last s of T with probability (1 - s/T)^m. If that is small, the
  growth slows down; if it is very small, it has stopped: a buffer is full, a cache is warm.
- *Laplace's trend test.* At a steady rate the mean of t_i is T/2 with variance T^2/12m. If the mean is much earlier,
  the growth slows down: a workspace that grows with each new largest input. The test is repeated with the bytes as
  weights.

A few events pass both tests at any rate. So a third one asks how much more likely they are at a steady rate than at
one that falls as 1/t does, t since the first rise of all. That is the rate of new maxima among random sizes, and nearly
that of a cache's misses if some keys are rare. Less than 20 times as likely is not enough evidence::

    slows:  each event has the density 1/t, divided by the sum of all 1/t
    steady: the same share of events after t_1 as there is; there the same density everywhere, or one distance

A site may free much at long intervals and still leak a little. So the table is judged in its own windows first, then in
windows twice and four times as long: the floor of a window that contains such a free is what the free left. A queue of
random length may rise in the same way. So growth that shows only in longer windows must exceed the sum of its changes
if each had a random sign.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from cudatool.trace.distinct import distinct
from cudatool.trace.lifetimes import Ints, Mask

__all__ = ["FEWEST_EVENTS", "Growth", "Trend", "floors", "may_grow", "trend"]

FEWEST_EVENTS: Final = 5
"""Windows with growth below which no rate can be computed; the first of them only begins the time."""
_SUSPICIOUS: Final = 3  # so many are worth a word
_LEVEL: Final = 0.05  # probability below which a test rejects a steady rate
_STOPPED: Final = 0.01  # below which it is sure that growth has ended
_SLOW: Final = -1.645  # of a standard normal variable, the same level
_NOT_AT_ALL: Final = -0.5
_CONVINCING: Final = math.log(20)  # of a likelihood ratio
_DRIFTS: Final = 3.09  # 1 in 1000, of a standard normal variable
_FELL: Final = 0.1  # of what was gained may be lost again
_FAR_ABOVE: Final = 0.8  # what fell before is of interest if it never had more than this share of what it has now
_SCALES: Final = (1, 2, 4)  # windows that are taken together
_MOST_BLOCKS: Final = 1 << 17  # about; of which windows are looked at together
_BEGINS: Final = (0.0, 0.25, 0.5)  # shares of the windows that are left out as the time before the growth


class Trend(StrEnum):
    """How the floors of a call site develop."""

    GROWS = "grows"
    """At a steady or rising rate, until the end."""
    SLOWS = "slows"
    """Until the end, but less and less."""
    FEW = "few"
    """Too seldom to tell at which rate."""
    RETURNS = "returns"
    """It grows, but gave back much before."""
    BOUNDED = "bounded"
    """Not at all, no longer, or not above what it was before."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The trend of one row of floors.

    Attributes
    ----------
    trend
        How it develops.
    begin
        The window before the first significant rise.
    events, windows
        The number of windows in which it rose from then on, and of all windows after `begin`.
    gain
        Bytes by which it rose.
    """

    trend: Trend
    begin: int = 0
    events: int = 0
    windows: int = 0
    gain: int = 0


def floors(site: Ints, size: Ints, start: Ints, freed: Ints, bounds: Ints, sites: int) -> Ints:
    """Return the least bytes that each site (row) held in each window (column).

    Parameters
    ----------
    site, size, start, freed
        Of each block: its site's number, bytes, and the records at which it was allocated and freed.
    bounds
        Window ``k`` goes from record ``bounds[k]`` up to, but not including, ``bounds[k + 1]``.
    sites
        How many there are.
    """
    windows = len(bounds) - 1
    change = np.zeros((sites, windows + 2), np.int64)  # the first column is the time before the first window
    np.add.at(change, (site, np.searchsorted(bounds, start, side="right")), size)
    np.subtract.at(change, (site, np.searchsorted(bounds, freed, side="right")), size)
    result: Ints = np.cumsum(change[:, :windows], axis=1)  # held when the window begins
    del change
    parts = min(max(-(-len(start) // _MOST_BLOCKS), 1), max(windows, 1))
    begins = result.copy()
    for some in np.array_split(np.arange(windows), parts):
        if not len(some):
            continue
        born, died = (np.flatnonzero((bounds[some[0]] <= at) & (at < bounds[some[-1] + 1])) for at in (start, freed))
        index = np.concatenate([start[born], freed[died]])
        row, delta = np.concatenate([site[born], site[died]]), np.concatenate([size[born], -size[died]])
        order = np.lexsort((index, row))
        index, row, level = index[order], row[order], np.cumsum(delta[order])
        first = np.flatnonzero(np.append(True, row[1:] != row[:-1])) if len(row) else np.zeros(0, np.int64)
        before = begins[row[first], some[0]] - np.append(0, level)[first]
        level += np.repeat(before, np.diff(np.append(first, len(row))))
        np.minimum.at(result, (row, np.searchsorted(bounds, index, side="right") - 1), level)
    return result


def may_grow(table: Ints) -> Mask:
    """Return which rows rise permanently in enough windows for :func:`trend`."""
    rises = np.diff(_permanent(table), axis=1) > 0
    result: Mask = rises.sum(axis=1) >= _SUSPICIOUS
    return result


def trend(row: Ints) -> Growth:
    """Return how one row of floors develops."""
    found = Growth(Trend.BOUNDED)
    for scale in _SCALES:
        if len(row) // scale < FEWEST_EVENTS:
            break
        found, falls = _at_scale(row, scale)
        since = row[found.begin :]
        if found.trend == Trend.GROWS and scale > 1 and max(map(_drift, (since, _floors_of(since, scale)))) < _DRIFTS:
            return replace(found, trend=Trend.RETURNS)
        if not falls:
            break
    return found


def _floors_of(row: Ints, scale: int) -> Ints:
    """Return the floors in windows of `scale` of the row's own; leading ones that make no whole window are dropped."""
    result: Ints = row[len(row) % scale :].reshape(-1, scale).min(axis=1)
    return result


def _drift(held: Ints) -> float:
    """Return the gain in standard deviations of a sum of the changes with random signs, such as a queue's length."""
    change = np.diff(held).astype(np.float64)
    return float(change.sum() / max(math.sqrt((change**2).sum()), 1.0))


def _permanent(table: Ints) -> Ints:
    result: Ints = np.minimum.accumulate(table[..., ::-1], axis=-1)[..., ::-1]
    return result


def _at_scale(row: Ints, scale: int) -> tuple[Growth, bool]:
    """Return the trend in windows of `scale` of the row's own, and whether falls decided it."""
    left = len(row) % scale  # leading ones, which make no whole window
    held = _floors_of(row, scale)
    rise = np.diff(_permanent(held))
    best, falls, slow = Growth(Trend.BOUNDED), False, _SLOW
    for share in _BEGINS:
        rises = np.flatnonzero(rise)
        rises = rises[rises >= share * len(held)]
        if len(rises) < _SUSPICIOUS:
            break
        begin, time = int(rises[0]), len(rise) - int(rises[0])
        silence = len(rise) - 1 - int(rises[-1])
        still = (1 - silence / time) ** (len(rises) - 1)
        if still < _STOPPED:
            # One slightly lower floor hides all rises before it: longer windows skip it.
            end = held[-silence:]
            is_little = int(end.max() - end[-1]) <= _FELL * int(rise.sum())
            return Growth(Trend.BOUNDED), is_little and bool((np.diff(end) < 0).any())
        judged = _judge(held, rises, rise[rises], time, slow)
        if judged == Trend.GROWS and _evidence(np.flatnonzero(rise), begin, len(rise)) < _CONVINCING:
            judged = Trend.FEW
        ends = still < _LEVEL and judged in (Trend.GROWS, Trend.FEW)
        gain = int(rise[rises].sum())
        growth = Growth(Trend.SLOWS if ends else judged, left + begin * scale, len(rises), time, gain)
        if ends or judged == Trend.GROWS:
            return growth, False
        falls |= judged in (Trend.RETURNS, Trend.BOUNDED)
        # Growth that slowed down overall must not slow down at all later.
        slow = _NOT_AT_ALL if judged == Trend.SLOWS else slow
        best = growth if best.trend == Trend.BOUNDED else best
    return best, falls


def _judge(held: Ints, rises: Ints, gained: Ints, time: int, slow: float) -> Trend:
    """Return the trend from the first of `rises` on, `time` windows long; `gained` are the bytes of each rise."""
    begin = int(rises[0])
    before, gain = held[: begin + 1], int(gained.sum())
    before, now = before - before.min(), int(held[-1] - before.min())
    falls = -int(np.minimum(np.diff(held[begin:]), 0).sum())
    fell_before = -int(np.minimum(np.diff(before), 0).sum())
    if falls > gain or int(before.max()) >= (now if fell_before <= _FELL * now else _FAR_ABOVE * now):
        return Trend.BOUNDED
    if falls > _FELL * gain or fell_before > _FELL * now:
        return Trend.RETURNS if len(rises) >= FEWEST_EVENTS else Trend.BOUNDED
    since = rises[1:] - begin
    if min(_lateness(since, np.ones(len(since)), time), _lateness(since, gained[1:], time)) < slow:
        return Trend.SLOWS
    return Trend.GROWS if len(rises) >= FEWEST_EVENTS else Trend.FEW


def _lateness(since: Ints, weight: npt.NDArray[np.generic], time: int) -> float:
    """Return Laplace's statistic, standard normal at a steady rate; below 0 if the weight is early."""
    share = weight / weight.sum()
    return float(((share * since).sum() / time - 0.5) * np.sqrt(12 / (share**2).sum()))


def _evidence(rises: Ints, begin: int, end: int) -> float:
    """Return the logarithm of how much more likely the rises after `begin` are at a steady rate than at one of 1/t."""
    since, begin, time = rises[1:] - rises[0], begin - int(rises[0]), end - begin
    late = since[since > begin]
    share = len(late) / len(since)
    falling = 1 / np.arange(1, begin + time + 1)
    expected = falling[begin:].sum() / falling.sum()
    steady = -len(late) * math.log(time)
    gaps = distinct(np.diff(late, prepend=begin))
    if np.ptp(gaps) <= 1:  # at regular distances; windows differ by one step
        steady = max(steady, -math.log(time) - len(late) * math.log(len(gaps)))
    result = steady + np.log(late * falling[begin:].sum()).sum()
    if share > expected:
        result += len(late) * math.log(share / expected)
        result += (len(since) - len(late)) * math.log((1 - share) / (1 - expected)) if share < 1 else 0
    return float(result)
