"""Finds call sites that hold more and more memory over the windows of a recording until its end.

Windows are the program's steps where ranges name them, else equal numbers of allocations.
:mod:`cudatool.analyze.growth` says what growth is. Growth is a leak only if nothing else explains it, because a
recording shows only a part of a program's life: a cache that fills until the recording ends looks like a leak. So each
growth is compared with the rest of the recording (:mod:`cudatool.analyze.leak_evidence`); each :class:`Doubt` is one
other explanation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from cudatool.analyze.leak_evidence import Evidence
from cudatool.analyze.leak_verdicts import Doubt, Leak, Leaks, LeakVerdict
from cudatool.analyze.steps import PARTS_OF_STEPS, Steps, find_steps
from cudatool.overview.moments import site_keys
from cudatool.overview.pinned import pinned_blocks
from cudatool.progress import advance, step
from cudatool.trace import lifetimes
from cudatool.trace.distinct import distinct
from cudatool.trace.frames import call_sites
from cudatool.trace.lifetimes import Lifetimes, Mask
from cudatool.trace.model import Trace

__all__ = ["PARTS_OF_LEAKS", "leaks", "leaks_of", "pinned_leaks"]

_HOST: Final = -1  # in the place of a device

PARTS_OF_LEAKS: Final = 4
"""How often :func:`leaks` advances the progress."""


def leaks(trace: Trace, blocks: Lifetimes, device: int, steps: Steps) -> Leaks:
    """Return the call sites of one device that hold more and more until the end of what was recorded.

    Parameters
    ----------
    blocks
        Of this device.
    """
    evidence = Evidence.of(trace, blocks, device, steps)
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
    devices, counts = np.unique(blocks.device, return_counts=True)
    device = int(devices[counts.argmax()]) if len(blocks) else 0
    own = blocks.of_device(device)
    steps = find_steps(trace, own, device)
    both = lifetimes.joined(own, pinned)
    evidence = Evidence.of(trace, own, device, steps) or Evidence.of(trace, both, device, steps)
    if evidence is None:
        return Leaks(_HOST, steps, (), verdict=LeakVerdict.UNCLEAR, doubt=Doubt.NOTHING_REPEATS)
    site, key = site_keys(both)
    evidence = replace(evidence, blocks=both, site=site, key=key)
    found, unclear = _growth(evidence, np.isin(both.start, pinned.start))
    verdict = LeakVerdict.LEAKS if found else LeakVerdict.UNCLEAR if unclear else LeakVerdict.NONE
    return Leaks(_HOST, steps, found, unclear, verdict)


def _growth(evidence: Evidence, among: Mask) -> tuple[tuple[Leak, ...], tuple[Leak, ...]]:
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
