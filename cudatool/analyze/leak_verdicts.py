"""What is said of memory that grows: the verdict, the call sites, and why growth may not be a leak."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from cudatool.analyze.steps import Confidence, Steps
from cudatool.overview.compiled import Compiled

__all__ = ["Doubt", "Leak", "LeakVerdict", "Leaks"]


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
        Growth in bytes and in blocks of a step in which it grew: the median, or a share of all that was gained where
        few steps gained the most; 0 where no steps were found, or it did not grow over them.
    growth
        Bytes gained over these steps; over the compared windows since it began to grow, where `per_step` is 0.
    live
        Bytes held at the end of the last window.
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
