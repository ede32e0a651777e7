"""Finds call sites that hold more and more memory over the windows of a recording until its end.

Windows are the program's steps where ranges name them, else equal numbers of allocations.
:mod:`cudatool.analyze.growth` says what growth is. Growth is a leak only if nothing else explains it, because a
recording shows only a part of a program's life: a cache that fills until the recording ends looks like a leak. So each
growth is compared with the rest of the recording; each :class:`Doubt` is one other explanation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np

from cudatool.analyze.growth import FEWEST_EVENTS, Growth, Trend, floors, may_grow, trend
from cudatool.analyze.steps import PARTS_OF_STEPS, Confidence, Steps, find_steps
from cudatool.overview.compiled import Compiled, compiled_sites
from cudatool.overview.moments import site_keys, without_stack
from cudatool.overview.pinned import pinned_blocks
from cudatool.progress import advance, step
from cudatool.trace import lifetimes
from cudatool.trace.distinct import distinct
from cudatool.trace.events import CopyFlag, Kind
from cudatool.trace.frames import call_site, call_sites, missing_stack
from cudatool.trace.lifetimes import Ints, Lifetimes, Mask, held_after
from cudatool.trace.model import Trace, recorded_from

__all__ = ["PARTS_OF_LEAKS", "Doubt", "Leak", "LeakVerdict", "Leaks", "leaks", "leaks_of", "pinned_leaks"]


class LeakVerdict(StrEnum):
    """The result for one device's memory."""

    LEAKS = "leaks"
    """Call sites grow, and nothing recorded explains it."""
    UNCLEAR = "could not tell"
    """There is growth with an explanation that cannot be checked, or too little repeats."""
    NONE = "no growth"
    """Work repeats, and no call site grows with it."""


class Doubt(StrEnum):
    """Why growth, or its absence, is not conclusive."""

    NOTHING_REPEATS = "nothing-repeats"
    """No steps are named, and too little work recurs: there is nothing to compare."""
    FEW = "few-growths"
    """It grew in too few windows to tell a steady rate from one that falls."""
    SLOWS = "slows-down"
    """It grows less and less, as a cache does that fills."""
    GAVE_BACK = "gave-back-before"
    """It grew and gave back before; now it holds more than ever."""
    SIZES_VARY = "sizes-vary"
    """It holds no more blocks than before, and newer ones are no larger: a full cache of blocks of any size."""
    GIVEN_BACK = "given-back-after"
    """It grew through all steps, and gave most of that back after the last."""
    WORK_GROWS = "work-grows-too"
    """Temporary memory of other call sites grew as well: inputs get longer, or a sequence is generated."""
    ONE_SEQUENCE = "one-sequence"
    """The steps are tokens; or no steps are named, and larger and larger blocks replace each other while others grow
    along. Keys and values of a sequence, and what is computed of them, grow so by design."""
    ONE_CALL = "within-one-call"
    """All happened within one call of a constructor, a forward or backward pass, or an optimizer's step."""
    NO_WORK = "no-repeated-work"
    """Nothing but allocations that stay was recorded in that time: something may be built up."""
    NEW_WORK = "new-work"
    """It began with work of another kind, late in the recording."""
    NO_STACKS = "no-stacks"
    """Without stacks, sizes alone do not tell the steps of a program from the layers of one step."""
    NO_SINGLE_SITE = "no-single-site"
    """All memory together grows, but no call site does so steadily."""
    UNUSED = "unused-grows"
    """No call site holds more, but more and more memory is reserved that no block uses."""

    @property
    def why(self) -> str:
        """The explanation, and how to find out."""
        return _WHY[self]


_NAME_STEPS: Final = 'Wrap each iteration in `with cudatool.range("step"):`.'
_WHY: Final = {
    Doubt.NOTHING_REPEATS: f"No repeated steps found. {_NAME_STEPS}",
    Doubt.FEW: "It grew too few times to tell a rate. Record more steps.",
    Doubt.SLOWS: "It grows less and less, or not at the end, as a cache does while it fills. Record more steps.",
    Doubt.GAVE_BACK: "It grew and gave back memory before; now it holds more than ever. Record more steps.",
    Doubt.SIZES_VARY: "It holds no more blocks than before, and new ones are no larger: only their sizes vary, as in a "
    "full cache. Record more steps.",
    Doubt.GIVEN_BACK: "It grew until the last step, and the program then freed most of it. It leaks if the loop is "
    "meant to go on.",
    Doubt.WORK_GROWS: "Temporary memory of other call sites grew with it: the inputs get longer, or it caches a "
    "sequence that is being generated. Record several sequences, or inputs of one length.",
    Doubt.ONE_SEQUENCE: "It may hold the keys and values of one sequence, which grow with each token. Record several "
    'requests, each in `with cudatool.range("request"):`.',
    Doubt.ONE_CALL: "All of it lies within one call of a constructor, a forward or backward pass, or an optimizer's "
    "step. Record more steps.",
    Doubt.NO_WORK: f"Nothing else repeated in these steps: the program may be building something. {_NAME_STEPS}",
    Doubt.NEW_WORK: f"It began late in the recording, with work of another kind. Record more steps. {_NAME_STEPS}",
    Doubt.NO_STACKS: f"Without stacks, steps and the layers of one step look alike. {_NAME_STEPS}",
    Doubt.NO_SINGLE_SITE: f"All memory together grows, but no call site does so steadily. {_NAME_STEPS}",
    Doubt.UNUSED: "No call site holds more, but reserved memory grows.",
}


@dataclass(frozen=True, slots=True)
class Leak:
    """A call site that holds more and more.

    Attributes
    ----------
    stack, requested
        The site: index into the trace's stacks (0 where it has several, or none), and the bytes that were asked for
        with what it holds at the end of the last window.
    label
        The site in words, distinct from the others.
    per_step, blocks_per_step
        Median growth in bytes and in blocks of a step in which it grew; 0 where no steps were found.
    growth, live
        Bytes gained since it began to grow, and held at the end of the last window.
    grew, steps
        In how many steps it grew, and how many were looked at; the first is left out: caches fill in it.
    grew_windows, windows
        The same for the compared windows, from the one in which growth began.
    confidence
        High where ranges name the steps and it grew in nearly each; low where none do and it grew in few windows.
    doubt
        Another possible explanation; None for a leak.
    compiled
        The compiled code that allocated it.
    """

    stack: int
    requested: int
    label: str
    per_step: int
    blocks_per_step: int
    growth: int
    live: int
    grew: int
    steps: int
    grew_windows: int
    windows: int
    confidence: Confidence
    doubt: Doubt | None = None
    compiled: Compiled = field(default_factory=Compiled)


@dataclass(frozen=True, slots=True)
class Leaks:
    """The growth on one device, the most bytes first, and the steps over which it was measured.

    Attributes
    ----------
    device
        Its number, -1 for pinned host memory.
    found
        Leaks.
    unclear
        Growth that may have another cause.
    verdict, doubt
        The overall result; `doubt` says why it is undecided if `unclear` does not.
    unused_growth
        Bytes by which reserved memory that no block uses grew, until the end: what pools, graphs and streams that the
        program keeps have cached, or holes. 0 if it does not keep growing.
    """

    device: int
    steps: Steps
    found: tuple[Leak, ...]
    unclear: tuple[Leak, ...] = ()
    verdict: LeakVerdict = LeakVerdict.NONE
    doubt: Doubt | None = None
    unused_growth: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; bytes."""
        return {
            "device": self.device,
            "verdict": str(self.verdict),
            "doubt": self.doubt and str(self.doubt),
            "steps": self.steps.as_dict(),
            "leaks": [_plain(leak) for leak in self.found],
            "unclear": [_plain(leak) for leak in self.unclear],
            "unused_growth": self.unused_growth,
        }


def _plain(leak: Leak) -> dict[str, Any]:
    return asdict(leak) | {"confidence": str(leak.confidence), "doubt": leak.doubt and str(leak.doubt)}


_MOST_WINDOWS: Final = 64
_MOST_CELLS: Final = 1 << 22  # of sites times windows that are in memory at once
_MOST_BLOCKS: Final = 1 << 17  # the same of blocks, where sites have about as many each
_PARTS: Final = 8  # of the time of growth, for what work does in it
_RECURS: Final = 16  # times that work has to come again where no steps are named
_WITHOUT_STACKS: Final = 1000  # allocations; with fewer, sizes alone do not separate steps from the layers of one step
_NEW: Final = 1 / 3  # share of the recording before growth that began with other work: the work may be a last phase
_LARGER: Final = 1.25
_RISES: Final = 3
_NEARLY_ALL: Final = 0.9
_HOST: Final = -1  # in the place of a device
_TEARDOWN: Final = 0.05  # share of the memory that may remain after a program has freed everything
_QUANTILES: Final = (0.25, 0.5, 0.75, 0.9, 1.0)
_ALL: Final = "all call sites together"
_USES: Final = (Kind.GEMM, Kind.GRAPH_LAUNCH, Kind.COLLECTIVE)
_DOUBTS: Final = {Trend.FEW: Doubt.FEW, Trend.SLOWS: Doubt.SLOWS, Trend.RETURNS: Doubt.GAVE_BACK}
_MORE: Final = (Trend.GROWS, Trend.SLOWS, Trend.FEW)
_NORMAL_999: Final = 3.09  # a standard normal variable is larger in 1 of 1000 cases
_SEQUENCE: Final = re.compile(r"\btoken|\bdecod|generat", re.IGNORECASE)
_ENGINE: Final = "torch::autograd::Engine::"  # runs a backward pass, on threads that have no frames of Python
_ONE_CALL: Final = frozenset(("__init__", "forward", "backward", "load_state_dict", "from_pretrained", "_apply"))


PARTS_OF_LEAKS: Final = 4
"""How often :func:`leaks` advances the progress."""


def leaks(trace: Trace, blocks: Lifetimes, device: int, steps: Steps) -> Leaks:
    """Return the call sites of one device that hold more and more until the end of what was recorded.

    Parameters
    ----------
    blocks
        Of this device.
    """
    evidence = _Evidence.of(trace, blocks, device, steps)
    advance()
    if evidence is None:
        return Leaks(device, steps, (), verdict=LeakVerdict.UNCLEAR, doubt=Doubt.NOTHING_REPEATS)
    found, unclear = _growth(evidence, np.ones(len(blocks), np.bool_))
    unused = evidence.unused_growth()
    if found or unclear:
        verdict = LeakVerdict.LEAKS if found else LeakVerdict.UNCLEAR
        return Leaks(device, steps, found, unclear, verdict, unused_growth=unused)
    if unused:
        return Leaks(device, steps, (), (), LeakVerdict.UNCLEAR, Doubt.UNUSED, unused)
    none = np.zeros(len(blocks), np.bool_)
    if evidence.named or evidence.work((len(evidence.bounds) - 1) // 2, none, none).recurs:
        return Leaks(device, steps, ())
    return Leaks(device, steps, (), verdict=LeakVerdict.UNCLEAR, doubt=Doubt.NOTHING_REPEATS)


def pinned_leaks(trace: Trace) -> Leaks | None:
    """Return the call sites that hold more and more pinned host memory; None if the recording has none.

    Windows are those of the device that most blocks are of, and what its memory does is work of the program.
    """
    pinned, blocks = pinned_blocks(trace), lifetimes.blocks(trace)
    if not len(pinned):
        return None
    device = int(np.bincount(blocks.device + 1).argmax()) - 1 if len(blocks) else 0
    own = blocks.of_device(device)
    steps = find_steps(trace, own, device)
    both = lifetimes.joined(own, pinned)
    evidence = _Evidence.of(trace, own, device, steps) or _Evidence.of(trace, both, device, steps)
    if evidence is None:
        return Leaks(_HOST, steps, (), verdict=LeakVerdict.UNCLEAR, doubt=Doubt.NOTHING_REPEATS)
    site, key = site_keys(both)
    evidence = replace(evidence, blocks=both, site=site, key=key)
    found, unclear = _growth(evidence, np.isin(both.start, pinned.start))
    verdict = LeakVerdict.LEAKS if found else LeakVerdict.UNCLEAR if unclear else LeakVerdict.NONE
    return Leaks(_HOST, steps, found, unclear, verdict)


def _growth(evidence: _Evidence, among: Mask) -> tuple[tuple[Leak, ...], tuple[Leak, ...]]:
    """Return the leaks among some blocks, and growth that may have another cause; the most bytes first."""
    growing = sorted(_told_apart(evidence.trace, list(evidence.growing(among))), key=lambda leak: -leak.growth)
    doubtful = tuple(leak for leak in growing if leak.doubt is not None)
    return tuple(leak for leak in growing if leak.doubt is None), doubtful


def _told_apart(trace: Trace, growing: list[Leak]) -> list[Leak]:
    """Return the leaks with distinct labels."""
    labels = call_sites([trace.stack(leak.stack) for leak in growing])
    return [replace(leak, label=label or leak.label) for leak, label in zip(growing, labels, strict=True)]


def leaks_of(trace: Trace) -> tuple[Leaks, ...]:
    """Return what grows on each device of a trace."""
    with step("looking for leaks", total=1 + PARTS_OF_STEPS + PARTS_OF_LEAKS) as shown:
        rows = lifetimes.blocks(trace)
        devices = distinct(rows.device).tolist()
        shown.total = 1 + (PARTS_OF_STEPS + PARTS_OF_LEAKS) * len(devices)
        advance()
        result = []
        for device in devices:
            own = rows.of_device(device)
            result.append(leaks(trace, own, device, find_steps(trace, own, device)))
        return tuple(result)


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
class _Evidence:
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
    def of(cls, trace: Trace, blocks: Lifetimes, device: int, steps: Steps) -> _Evidence | None:
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
        change, blocks = np.diff(held[1:]), np.diff(count[1:])
        up = change > 0
        in_steps = self.named and bool(up.any())
        held_blocks = self.blocks[own]
        (compiled,) = compiled_sites(self.trace, held_blocks, np.zeros(len(held_blocks), np.int64), [stack])
        return Leak(
            stack=stack,
            requested=int(self.blocks.requested[live].sum()),
            label=label or without_stack(missing_stack(self.trace), requested),
            per_step=int(np.median(change[up])) if up.any() else 0,
            blocks_per_step=int(np.median(blocks[up])) if up.any() else 0,
            growth=int(held[-1] - held[1]) if in_steps else growth.gain,
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
        correlation = min(float(np.corrcoef(np.arange(len(sizes)), sizes)[0, 1]), 1 - 1e-9)
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
    """Return bytes, or number, of the blocks `own` right after each of some records."""
    change = np.zeros(len(bounds) + 1, np.int64)
    amount = blocks.size[own] if weight == "size" else 1
    np.add.at(change, np.searchsorted(bounds, blocks.start[own]), amount)
    np.subtract.at(change, np.searchsorted(bounds, blocks.freed[own]), amount)
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
