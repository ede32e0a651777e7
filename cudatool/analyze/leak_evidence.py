"""The part of a recording in which growth is looked for, cut into windows: what grows in it, and what else happened.

Each :class:`~cudatool.analyze.leak_verdicts.Doubt` is one other explanation of growth, found here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from cudatool.analyze.growth import FEWEST_EVENTS, Growth, Trend, floors, may_grow, trend
from cudatool.analyze.leak_verdicts import Doubt, Leak
from cudatool.analyze.steps import Confidence, Steps
from cudatool.overview.compiled import compiled_sites
from cudatool.overview.moments import site_keys, without_stack
from cudatool.progress import advance
from cudatool.trace import lifetimes
from cudatool.trace.distinct import distinct
from cudatool.trace.events import CopyFlag, Kind
from cudatool.trace.frames import call_site, missing_stack
from cudatool.trace.lifetimes import Ints, Lifetimes, Mask, held_after
from cudatool.trace.model import Trace, recorded_from

__all__ = ["Evidence"]

_MOST_WINDOWS: Final = 64
_MOST_CELLS: Final = 1 << 22  # of sites times windows that are in memory at once
_MOST_BLOCKS: Final = 1 << 17  # the same of blocks, where sites have about as many each
_PARTS: Final = 8  # of the time of growth, for what work does in it
_RECURS: Final = 16  # times that work has to come again where no steps are named
_WITHOUT_STACKS: Final = 1000  # allocations; with fewer, sizes alone do not separate steps from the layers of one step
_NEW: Final = 1 / 3  # share of the recording before growth that began with other work: the work may be a last phase
_LARGER: Final = 1.25  # times its first size: what temporary memory reaches that grows as well
_RISES: Final = 3  # parts in which it has to grow
_NEARLY_ALL: Final = 0.9  # of the named steps: then the confidence is high
_TEARDOWN: Final = 0.05  # share of the memory that may remain after a program has freed everything
_QUANTILES: Final = (0.25, 0.5, 0.75, 0.9, 1.0)
_ALL: Final = "all call sites together"
_USES: Final = (Kind.GEMM, Kind.GRAPH_LAUNCH, Kind.COLLECTIVE)
_DOUBTS: Final = {Trend.FEW: Doubt.FEW, Trend.SLOWS: Doubt.SLOWS, Trend.RETURNS: Doubt.GAVE_BACK}
_MORE: Final = (Trend.GROWS, Trend.SLOWS, Trend.FEW)
_NEARLY_ONE: Final = 1 - 1e-9
_NORMAL_999: Final = 3.09  # a standard normal variable is larger in 1 of 1000 cases
_SEQUENCE: Final = re.compile(r"\btoken|\bdecod|generat", re.IGNORECASE)
_ENGINE: Final = "torch::autograd::Engine::"  # runs a backward pass, on threads that have no frames of Python
_ONE_CALL: Final = frozenset(("__init__", "forward", "backward", "load_state_dict", "from_pretrained", "_apply"))


@dataclass(frozen=True, slots=True)
class _Work:
    """Other work during the growth.

    Attributes
    ----------
    recurs
        It recurred until the end.
    grows
        The sizes of some of its memory also recurred, and grew.
    began_before
        Most of it also occurred before.
    stacks
        The stacks of the work.
    """

    recurs: bool
    grows: bool
    began_before: bool
    stacks: Ints


@dataclass(frozen=True)
class Evidence:
    """The examined part of a recording, cut into windows.

    Attributes
    ----------
    bounds
        Records: window ``k`` goes from ``bounds[k]`` to ``bounds[k + 1]``.
    named
        Whether windows are steps that the program names.
    site, key
        The call sites, and the site number of each block.
    """

    trace: Trace
    blocks: Lifetimes
    device: int
    steps: Steps
    bounds: Ints
    named: bool
    site: Ints
    key: Ints

    @classmethod
    def of(cls, trace: Trace, blocks: Lifetimes, device: int, steps: Steps) -> Evidence | None:
        """Return the evidence; None if the recording is too short."""
        begin = recorded_from(trace, device)
        starts = _before_teardown(blocks)
        starts = starts[starts >= begin]
        named = steps.confidence == Confidence.HIGH and len(steps) > FEWEST_EVENTS
        # Ranges that end early do not cover what comes after them.
        named = named and int(np.count_nonzero(starts >= steps.bounds[-1])) <= len(starts) // 2
        bounds = steps.bounds
        if not named:
            # What is allocated before the first block that is freed again is set-up.
            again = blocks.start[(blocks.start >= begin) & (blocks.freed <= starts.max(initial=0))]
            bounds = np.append(starts[starts >= again.min()] if len(again) else starts, starts[-1:] + 1)
        count = min(_MOST_WINDOWS, len(bounds) - 1)
        if count <= FEWEST_EVENTS:
            return None
        if named:  # whole steps; those left over are the first ones
            together = -(-len(steps) // count)
            bounds = bounds[len(steps) % together :: together]
        else:
            bounds = bounds[np.linspace(0, len(bounds) - 1, count + 1).astype(np.int64)]
        return cls(trace, blocks, device, steps, bounds, named, *site_keys(blocks))

    @property
    def end(self) -> int:
        """The record at which the last window ends."""
        return int(self.bounds[-1])

    def growing(self, among: Mask) -> Iterator[Leak]:
        """Yield what grows `among` the blocks: call sites, then those of one label together, then the rest together."""
        blocks = self.blocks
        # A site that grew in the second half holds a block from that half.
        late = (blocks.start >= self.bounds[len(self.bounds) // 2]) & (blocks.start < self.end)
        late &= blocks.freed >= self.end
        rest = among.copy()
        found = []
        for level in (self._sites, self._labels, self._together):
            group, names = level(late & rest)
            group[~rest] = -1
            for number, growth in _trends(blocks, group, len(names), self.bounds):
                if growth.trend != Trend.GROWS and level != self._sites:
                    continue  # several sites together matter only if they leak together
                own = group == number
                rest &= ~own
                found.append((own, names[number], growth))
            advance()
        for own, name, growth in found:
            yield self._leak(own, among & ~rest, *name, growth)

    def unused_growth(self) -> int:
        """Return by how much reserved memory that no block uses grew; 0 unless it does until the end.

        Blocks that a window's work needs at once are no growth of this kind: longer inputs reserve more, too.
        """
        reserved = lifetimes.segments(self.trace).of_device(self.device)
        one = np.zeros(len(reserved), np.int64)
        held = floors(one, reserved.size, reserved.start, reserved.freed, self.bounds, 1)[0]
        grown = trend(np.maximum(held - self._peaks(), 0))
        return grown.gain if grown.trend == Trend.GROWS else 0

    def _peaks(self) -> Ints:
        """Return the most bytes that blocks had at once in each window."""
        blocks, windows = self.blocks, len(self.bounds) - 1
        result = _held(blocks, np.ones(len(blocks), np.bool_), self.bounds, "size")[:-1]  # when each begins
        window = np.searchsorted(self.bounds, blocks.start, side="right") - 1
        inside = (window >= 0) & (window < windows)
        np.maximum.at(result, window[inside], held_after(blocks, blocks.end)[inside])
        return result

    def _sites(self, late: Mask) -> tuple[Ints, list[_Name]]:
        """Return for each block the group that it belongs to (-1: none), and stack, size and label of the groups."""
        candidates = distinct(self.key[late])
        group = np.full(len(self.site), -1, np.int64)
        group[candidates] = np.arange(len(candidates))
        return group[self.key], [_Name(stack, requested, "") for stack, requested in self.site[candidates].tolist()]

    def _labels(self, late: Mask) -> tuple[Ints, list[_Name]]:
        """Group the sites of one label, if it has several: a function with many callers, blocks without a stack."""
        group = np.full(len(self.site), -1, np.int64)
        wanted = distinct(self.key[late])
        if not len(wanted):
            return group[self.key], []
        label = {stack: call_site(self.trace.stack(stack)) for stack in distinct(self.site[:, 0]).tolist()}
        label[0] = f"{missing_stack(self.trace).text}, of all sizes"
        names = dict.fromkeys(label[stack] for stack in self.site[wanted, 0].tolist())
        numbers = {name: number for number, name in enumerate(names)}
        group[:] = [numbers.get(label[stack], -1) for stack in self.site[:, 0].tolist()]
        return group[self.key], [_Name(0, 0, f"{name}, all callers" if name != label[0] else name) for name in names]

    def _together(self, late: Mask) -> tuple[Ints, list[_Name]]:
        return np.zeros(len(self.blocks), np.int64), [_Name(0, 0, _ALL)] if late.any() else []

    def _leak(self, own: Mask, growing: Mask, stack: int, requested: int, label: str, growth: Growth) -> Leak:
        """Describe the growth of the blocks `own`, a part of the `growing` ones."""
        held = count = np.zeros(2, np.int64)
        if len(self.steps) > 1:
            held, count = (_held(self.blocks, own, self.steps.bounds, weight) for weight in ("size", "count"))
        live = own & (self.blocks.start < self.end) & (self.blocks.freed >= self.end)
        change, blocks = np.diff(held[1:]), np.diff(count[1:])  # of the steps but the first
        gained = int(change.sum())
        up = (change > 0) & (gained > 0)
        held_blocks = self.blocks[own]
        (compiled,) = compiled_sites(self.trace, held_blocks, np.zeros(len(held_blocks), np.int64), [stack])
        return Leak(
            stack=stack,
            requested=int(self.blocks.requested[live].sum()),
            label=label or without_stack(missing_stack(self.trace), requested),
            per_step=_of_a_step(change, up),
            blocks_per_step=_of_a_step(blocks, up),
            growth=gained if gained > 0 else growth.gain,
            live=int(self.blocks.size[live].sum()),
            grew=int(up.sum()),
            steps=len(up),
            grew_windows=growth.events,
            windows=growth.windows,
            confidence=_confidence(self.named, growth),
            doubt=Doubt.NO_SINGLE_SITE if label == _ALL else self._doubt(own, growing, growth),
            compiled=compiled,
        )

    def _doubt(self, own: Mask, growing: Mask, growth: Growth) -> Doubt | None:
        """Return the first other explanation of the growth of the blocks `own` that applies."""
        if growth.trend in _DOUBTS:
            return _DOUBTS[growth.trend]
        blocks, begin = self.blocks, int(self.bounds[growth.begin])
        if not self._holds_more_or_larger(own, begin):
            return Doubt.SIZES_VARY
        left = blocks.freed == len(self.trace.records)
        held = (blocks.start < self.end) & (blocks.freed >= self.end)
        whole_left, whole = int(blocks.size[left].sum()), int(blocks.size[held].sum())
        kept = int(blocks.size[own & left & (blocks.start >= begin)].sum())
        if kept < growth.gain // 2 and whole_left > _TEARDOWN * whole:
            return Doubt.GIVEN_BACK
        work = self.work(growth.begin, own, growing if self.named else own)
        if work.grows:
            return Doubt.WORK_GROWS
        if self.named:
            return Doubt.ONE_SEQUENCE if _SEQUENCE.search(self.steps.ranges) else None
        stacks = distinct(blocks.stack[own & (blocks.start >= begin)])
        if self._is_replaced(own, growing, begin, growth.events):
            return Doubt.ONE_SEQUENCE
        if self._within_one_call(distinct(stacks, work.stacks)):
            return Doubt.ONE_CALL
        if not work.recurs:
            return Doubt.NO_WORK
        if growth.begin > _NEW * (len(self.bounds) - 1) and not work.began_before:
            return Doubt.NEW_WORK
        if not stacks.any() and np.count_nonzero(blocks.start >= begin) < _WITHOUT_STACKS:
            return Doubt.NO_STACKS
        return None

    def _holds_more_or_larger(self, own: Mask, begin: int) -> bool:
        """Return whether the blocks `own` become more numerous, or those after record `begin` larger and larger.

        With a constant number of blocks of the same sizes the bytes fluctuate: they may rise for long, but are bounded.
        """
        blocks = self.blocks[own]
        one, ones = np.zeros(len(blocks), np.int64), np.ones(len(blocks), np.int64)
        if trend(floors(one, ones, blocks.start, blocks.freed, self.bounds, 1)[0]).trend in _MORE:
            return True
        sizes = blocks.requested[(blocks.start >= begin) & (blocks.start < self.end)].astype(np.float64)
        if len(sizes) <= FEWEST_EVENTS or not np.ptp(sizes):
            return False
        correlation = float(np.corrcoef(np.arange(len(sizes)), sizes)[0, 1])
        correlation = min(max(correlation, -_NEARLY_ONE), _NEARLY_ONE)  # atanh is infinite at 1
        return math.atanh(correlation) * math.sqrt(len(sizes) - 3) > _NORMAL_999  # Fisher's transformation

    def _is_replaced(self, own: Mask, growing: Mask, begin: int, rises: int) -> bool:
        """Return whether the blocks `own` grow because larger ones replace them, while others grow or are as large."""
        blocks = self.blocks
        held = (blocks.start < self.end) & (blocks.freed >= self.end)
        now, then = (
            np.count_nonzero(own & held),
            np.count_nonzero(own & (blocks.start < begin) & (blocks.freed >= begin)),
        )
        largest = int(blocks.requested[own & held].max(initial=0))
        as_large = np.count_nonzero(held & (blocks.requested == largest)) > 1
        return bool(now - then < rises // 2 and (as_large or (growing & ~own).any()))

    def work(self, begin: int, own: Mask, growing: Mask) -> _Work:
        """Return what recurred from window `begin` on, other than the blocks `own`: temporaries, and computing.

        The sizes of the `growing` blocks are ignored.
        """
        blocks = self.blocks
        windows = np.linspace(begin, len(self.bounds) - 1, min(_PARTS, len(self.bounds) - 1 - begin) + 1)
        edges = self.bounds[windows.astype(np.int64)]
        parts = len(edges) - 1
        temporary = ~own & (blocks.freed < self.end) & (blocks.start < self.end)
        now = np.flatnonzero(temporary & (blocks.start >= edges[0]))
        site, key = np.unique(self.key[now], return_inverse=True)
        part = np.searchsorted(edges, blocks.start[now], side="right") - 1
        count, largest = np.zeros((2, len(site), parts), np.int64)
        np.add.at(count, (key, part), 1)
        np.maximum.at(largest, (key, part), blocks.requested[now])
        regular = (count > 0).sum(axis=1) >= parts - 1
        others = ~np.isin(site, self.key[growing])
        larger = largest[regular & others & (self.site[site, 0] > 0)]
        unknown = (blocks.stack[now] == 0) & others[key]
        if unknown.any():  # sites are sizes: use the spread of these
            larger = np.concatenate([larger, _spread(blocks.requested[now[unknown]], part[unknown], parts)])
        step = np.diff(larger, axis=1)
        steady = (step >= 0).all(axis=1) & ((step > 0).sum(axis=1) >= _RISES)
        earlier = distinct(self.key[temporary & (blocks.start < edges[0])])
        before = np.isin(site[regular], earlier)
        recurs = bool((count[regular].sum(axis=1) >= _RECURS).any())
        began_before = bool(before.size and before.mean() >= 0.5)
        if not recurs:
            used = self._uses()
            each = np.histogram(used, edges)[0]
            recurs = bool(each.all() and each.sum() >= _RECURS)
            began_before = bool((used < edges[0]).any())
        return _Work(
            recurs=recurs,
            grows=bool((steady & (larger[:, -1] >= _LARGER * larger[:, 0])).any()),
            began_before=began_before,
            stacks=distinct(blocks.stack[now[regular[key]]]),
        )

    def _uses(self) -> Ints:
        """Return the records that show that the program computes: during set-up, memory is only filled."""
        records = self.trace.records
        copies = (records["kind"] == Kind.MEMCPY) & (records["device"] == self.device)
        copies &= records["flags"] & (CopyFlag.SOURCE_DEVICE | CopyFlag.DESTINATION_DEVICE) == CopyFlag.SOURCE_DEVICE
        return np.flatnonzero(
            copies | (np.isin(records["kind"], _USES) & np.isin(records["device"], (self.device, -1)))
        )

    def _within_one_call(self, stacks: Ints) -> bool:
        """Return whether all stacks lead through the same line of a function that is called once a step, or once.

        The loop is then in that function. In traces with C++ frames the order of frames is not reliable.
        """
        common = [set(self.trace.stacks[stack]) for stack in stacks.tolist() if stack]
        frames = set.intersection(*common) if common else set()
        names = [self.trace.frames[frame].function for frame in frames]
        return any(name.rpartition(".")[2] in _ONE_CALL or name.startswith(_ENGINE) for name in names)


class _Name(NamedTuple):
    stack: int
    requested: int
    label: str


def _trends(blocks: Lifetimes, group: Ints, groups: int, bounds: Ints) -> Iterator[tuple[int, Growth]]:
    """Yield the groups of blocks that grow in some way."""
    parts = max(-(-groups * len(bounds) // _MOST_CELLS), -(-len(blocks) // _MOST_BLOCKS), 1)
    for some in np.array_split(np.arange(groups), parts):
        if not len(some):
            continue
        inside = (group >= some[0]) & (group <= some[-1])
        own = slice(None) if inside.all() else np.flatnonzero(inside)
        columns = blocks.size[own], blocks.start[own], blocks.freed[own]
        table = floors(group[own] - some[0], *columns, bounds, len(some))
        for row in np.flatnonzero(may_grow(table)).tolist():
            growth = trend(table[row])
            if growth.trend != Trend.BOUNDED:
                yield int(some[row]), growth


def _before_teardown(blocks: Lifetimes) -> Ints:
    """Return the records of the allocations before the program freed everything, if it did so at its end.

    What is freed after the last allocation belongs to no window either.
    """
    before = held_after(blocks, blocks.freed) - blocks.size
    tail = len(before) - int(_TEARDOWN * len(before))
    empty = np.flatnonzero(before[tail:] <= _TEARDOWN * before.max(initial=0))
    return blocks.start[: tail + int(empty[0])] if len(empty) else blocks.start


def _held(blocks: Lifetimes, own: Mask, bounds: Ints, weight: str) -> Ints:
    """Return bytes, or number, of the blocks `own` before each of some records, which may be the first of a step's."""
    change = np.zeros(len(bounds) + 1, np.int64)
    amount = blocks.size[own] if weight == "size" else 1
    np.add.at(change, np.searchsorted(bounds, blocks.start[own], side="right"), amount)
    np.subtract.at(change, np.searchsorted(bounds, blocks.freed[own], side="right"), amount)
    result: Ints = np.cumsum(change)[:-1]
    return result


def _spread(size: Ints, part: Ints, parts: int) -> Ints:
    """Return quantiles (rows) of the sizes in each part (column)."""
    each = [size[part == number] for number in range(parts)]
    return np.array([np.quantile(own, _QUANTILES) if len(own) else [0] * len(_QUANTILES) for own in each]).T


def _confidence(named: bool, growth: Growth) -> Confidence:
    if named:
        return Confidence.HIGH if growth.events >= _NEARLY_ALL * growth.windows else Confidence.MEDIUM
    return Confidence.MEDIUM if growth.events >= _RECURS else Confidence.LOW


def _of_a_step(change: Ints, up: Mask) -> int:
    """Return what a growing step gained: the median, or its share of it all where few steps gained the most."""
    if not up.any():
        return 0
    median, share = np.median(change[up]), change.sum() / up.sum()
    return int(median if 2 * median >= share else share)
