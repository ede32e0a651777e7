"""Growth that returns at the same call site, step after step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from cudatool.analyze import lifetimes
from cudatool.analyze.lifetimes import Ints, Lifetimes
from cudatool.analyze.memory import site_keys, site_label
from cudatool.analyze.steps import Confidence, Steps, find_steps
from cudatool.trace.model import Trace

__all__ = ["Leak", "Leaks", "leaks", "leaks_of"]


@dataclass(frozen=True, slots=True)
class Leak:
    """A call site that holds more after nearly every step.

    Attributes
    ----------
    stack, requested
        The site: index into the trace's stacks, and for allocations without a stack the bytes asked for (else 0).
    label
        The site in words.
    per_step, blocks_per_step
        Median growth in bytes and in blocks of a step in which it grew.
    growth, live
        Bytes gained from the end of the first step to that of the last, and held then.
    grew, steps
        In how many steps it grew, and how many were looked at; the first is left out: caches fill in it.
    confidence
        As sure as the steps are, and less where it did not grow in each.
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
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class Leaks:
    """What grows on one device, the fastest first, and the steps that it was measured at."""

    device: int
    steps: Steps
    found: tuple[Leak, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; bytes."""
        return {
            "device": self.device,
            "steps": self.steps.as_dict(),
            "leaks": [asdict(leak) | {"confidence": str(leak.confidence)} for leak in self.found],
        }


_FEWEST_STEPS: Final = 3
_GREW: Final = 0.5  # share of the steps, of all and of the last third, in which a leak grows
_MOST_CELLS: Final = 1 << 22  # of sites times steps that are in memory at once
_FELL: Final = 0.1  # of what was gained may be lost again


def leaks(trace: Trace, blocks: Lifetimes, device: int, steps: Steps) -> Leaks:
    """Return the call sites whose live bytes grow with the steps and do not fall.

    What a program builds up once, as a model's parameters, grows before the steps or in the first of them; a cache
    of a fixed size stops growing; a sequence of another length gives back what it took. None of these is a leak.

    Parameters
    ----------
    blocks
        Of this device.
    """
    bounds = steps.bounds
    if len(steps) <= _FEWEST_STEPS:
        return Leaks(device, steps, ())
    site, key = site_keys(blocks)
    born, gone = (np.searchsorted(bounds, column, side="right") for column in (blocks.start, blocks.freed))
    # Only a site that holds more at the last bound than at the second can be one: mostly few.
    gain = np.zeros(len(site), np.int64)
    last = len(bounds) - 1
    np.add.at(gain, key, blocks.size * (_live(born, gone, last) - _live(born, gone, 1)))
    # Steps that are inferred may be the filling of a list: what is given back after them was no leak.
    kept = blocks.size * ((blocks.freed == len(trace.records)) | (steps.confidence == Confidence.HIGH))
    stays = np.zeros(len(site), np.int64)
    np.add.at(stays, key, kept * (_live(born, gone, last) - _live(born, gone, 1)))
    candidates = np.flatnonzero((gain > 0) & (2 * stays >= gain))
    found: list[Leak] = []
    for some in np.array_split(candidates, -(-candidates.size * len(bounds) // _MOST_CELLS) or 1):
        own = np.isin(key, some)
        where = np.searchsorted(some, key[own]), born[own], gone[own], (len(some), len(bounds))
        held, count = _at_bounds(blocks.size[own], *where), _at_bounds(np.ones(int(own.sum()), np.int64), *where)
        found += _growing(trace, site[some], held, count, steps)
    return Leaks(device, steps, tuple(sorted(found, key=lambda leak: -leak.growth)))


def _growing(trace: Trace, sites: Ints, held: Ints, count: Ints, steps: Steps) -> Iterator[Leak]:
    """Yield the sites that leak, given bytes and blocks of each (row) at each bound (column)."""
    change, change_count = np.diff(held[:, 1:], axis=1), np.diff(count[:, 1:], axis=1)
    up = change > 0
    gained, lost = (change * up).sum(axis=1), -(change * (change < 0)).sum(axis=1)
    recent = up[:, -(up.shape[1] // 3) :]
    grows = (up.mean(axis=1) >= _GREW) & (recent.mean(axis=1) >= _GREW)
    for i in np.flatnonzero(grows & (lost <= _FELL * gained)).tolist():
        stack, requested = sites[i].tolist()
        yield Leak(
            stack=stack,
            requested=requested,
            label=site_label(trace.stack(stack), requested),
            per_step=int(np.median(change[i][up[i]])),
            blocks_per_step=int(np.median(change_count[i][up[i]])),
            growth=int(held[i, -1] - held[i, 1]),
            live=int(held[i, -1]),
            grew=int(up[i].sum()),
            steps=up.shape[1],
            confidence=_confidence(steps.confidence, float(up[i].mean())),
        )


def leaks_of(trace: Trace) -> tuple[Leaks, ...]:
    """Return what grows on each device of a trace."""
    rows = lifetimes.blocks(trace)
    result = []
    for device in np.unique(rows.device).tolist():
        own = rows.of_device(device)
        result.append(leaks(trace, own, device, find_steps(trace, own, device)))
    return tuple(result)


def _live(born: Ints, gone: Ints, bound: int) -> Ints:
    result: Ints = ((born <= bound) & (bound < gone)).astype(np.int64)
    return result


def _at_bounds(weight: Ints, site: Ints, born: Ints, gone: Ints, shape: tuple[int, int]) -> Ints:
    """Return the weight that is live at each bound, by site."""
    delta = np.zeros((shape[0], shape[1] + 1), np.int64)
    np.add.at(delta, (site, born), weight)
    np.subtract.at(delta, (site, gone), weight)
    result: Ints = np.cumsum(delta, axis=1)[:, :-1]
    return result


def _confidence(of_steps: Confidence, share: float) -> Confidence:
    if share >= 0.9 or of_steps == Confidence.LOW:
        return of_steps
    return Confidence.MEDIUM if of_steps == Confidence.HIGH else Confidence.LOW
