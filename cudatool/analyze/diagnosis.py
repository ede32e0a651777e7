"""Where one device's memory went, why so much is reserved, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

from cudatool.analyze.categories import Categories, Category, categorize
from cudatool.analyze.fragmentation import Cause, Fragmentation, fragmentation
from cudatool.analyze.leaks import Leaks, leaks
from cudatool.analyze.lifetimes import Lifetimes
from cudatool.analyze.memory import CallSite, Timeline, by_call_site
from cudatool.analyze.outside import FreeReading, Outside, outside
from cudatool.analyze.sites import SiteTree, site_tree
from cudatool.analyze.steps import find_steps
from cudatool.analyze.usage import Usage, usage_by_pool, usage_by_stream
from cudatool.memory.settings import Settings
from cudatool.trace.model import Trace
from cudatool.units import format_bytes

__all__ = ["Diagnosis", "Remedy", "Topic", "advice", "diagnose"]

_EXPANDABLE: Final = "expandable_segments:True"


class Topic(StrEnum):
    """What a :class:`Remedy` is about, if not a :class:`Cause` of reserved bytes that are unused."""

    LEAK = "leak"
    """A call site that grows."""
    LIMIT = "limit"
    """Memory ran out although the card had some."""
    NEED = "need"
    """Memory ran out because the program needs what it has."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do.

    Attributes
    ----------
    topic
        What it is about.
    size
        Bytes that are concerned.
    text
        One sentence.
    conf
        The allocator setting that it names, which a replay can try; empty if it names none.
    """

    topic: Cause | Topic
    size: int
    text: str
    conf: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One device's memory, explained.

    Attributes
    ----------
    device
        Its ordinal.
    tree
        Live bytes at the peak of active bytes, by call stack.
    categories
        What blocks are for, as far as it can be inferred.
    by_stream, by_pool
        Who held how much.
    fragmentation
        At the peak of reserved, then at failed allocations; empty where no segments are known.
    leaks
        What grows step after step.
    outside
        Memory that the allocator does not know of.
    advice
        What to do, the most bytes first.
    """

    device: int
    tree: SiteTree
    categories: Categories
    by_stream: tuple[Usage, ...]
    by_pool: tuple[Usage, ...]
    fragmentation: tuple[Fragmentation, ...]
    leaks: Leaks
    outside: Outside
    advice: tuple[Remedy, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; bytes and ns."""
        return {
            "tree": self.tree.as_dict(),
            "categories": self.categories.as_dict(),
            "by_stream": [asdict(usage) for usage in self.by_stream],
            "by_pool": [asdict(usage) for usage in self.by_pool],
            "fragmentation": [moment.as_dict() for moment in self.fragmentation],
            "leaks": self.leaks.as_dict(),
            "outside": asdict(self.outside),
            "advice": [remedy.text for remedy in self.advice],
            "remedies": [asdict(remedy) for remedy in self.advice],
        }


def diagnose(
    trace: Trace,
    blocks: Lifetimes,
    segments: Lifetimes,
    curve: Timeline,
    device: int,
    *,
    settings: Settings,
    total: int | None = None,
) -> Diagnosis:
    """Explain one device's memory.

    Parameters
    ----------
    blocks, segments, curve
        Of this device.
    settings
        The allocator's, where known: how requests were rounded.
    total
        Bytes of the card, where the caller knows.
    """
    row = curve.peak()
    peak = int(curve.index[row]) if row >= 0 else -1
    steps = find_steps(trace, blocks, device)
    split = fragmentation(trace, blocks, segments, curve, device, settings)
    categories = categorize(trace, blocks, curve, steps, device, peak)
    grows = leaks(trace, blocks, device, steps)
    beside = outside(trace, segments, curve, device, peak, total)
    held = by_call_site(trace, blocks.at(split[-1].index)) if split else ()
    return Diagnosis(
        device=device,
        tree=site_tree(trace, blocks, device, peak),
        categories=categories,
        by_stream=usage_by_stream(trace, blocks, segments, peak),
        by_pool=usage_by_pool(trace, blocks, segments, peak),
        fragmentation=split,
        leaks=grows,
        outside=beside,
        advice=advice(split, categories, grows, beside, held, expandable=bool(segments.expandable.any())),
    )


_WORTH: Final = 0.05  # share of the reserved bytes below which a cause is not worth a word


def advice(
    split: tuple[Fragmentation, ...],
    categories: Categories,
    grows: Leaks,
    beside: Outside,
    held: tuple[CallSite, ...],
    *,
    expandable: bool,
) -> tuple[Remedy, ...]:
    """Return what to do, the most bytes first. The first four are parts of one :class:`Diagnosis`.

    Of `split`, the first moment and the last one count: the peak, and the failure that may have ended the program.

    Parameters
    ----------
    held
        By whom memory was held at the last of `split`, the largest first.
    expandable
        Whether segments are expandable already.
    """
    found: list[Remedy] = []
    for leak in grows.found:
        more = f"{format_bytes(leak.per_step)} more after each step" if leak.per_step else "more and more"
        text = f"{leak.label} keeps {more}: drop what it returns"
        found.append(Remedy(Topic.LEAK, leak.growth, text))
    worst: dict[Cause, int] = {}
    for moment in {split[0], split[-1]} if split else ():
        for share in moment.causes:
            if share.size >= _WORTH * moment.reserved and share.cause != Cause.NEW_SEGMENT:
                worst[share.cause] = max(worst.get(share.cause, 0), share.size)
    for cause, size in worst.items():
        text, conf = _remedy(cause, expandable)
        found.append(Remedy(cause, size, f"{format_bytes(size)}: {text}", conf))
    if beside.readings:
        found += _after_failure(split[-1:], categories, beside.readings[-1], held)
    return tuple(sorted(found, key=lambda remedy: (-remedy.size, remedy.text)))


def _after_failure(
    split: tuple[Fragmentation, ...], categories: Categories, reading: FreeReading, held: tuple[CallSite, ...]
) -> list[Remedy]:
    """Return what to do about a failed allocation that better use of the reserved memory would not have avoided."""
    found = []
    for moment in split:
        if moment.wanted is not None and reading.free > moment.wanted.size + _SEGMENT:
            text = (
                f"memory ran out with {format_bytes(reading.free)} free on the card: a limit on this program's share "
            )
            text += f"holds it to about {format_bytes(reading.reserved)}; raise set_per_process_memory_fraction"
            found.append(Remedy(Topic.LIMIT, reading.free, text))
        needed = next(iter(categories.sizes().items()), None)
        if needed is not None and needed[0] in _NEED and moment.requested >= (1 - 2 * _WORTH) * moment.reserved:
            category, size = needed
            text = f"{format_bytes(size)} {category} (inferred) are needed: {_NEED[category]}"
            found.append(Remedy(Topic.NEED, size, text))
        elif held and held[0].size >= moment.reserved // 2:
            most = held[0]
            blocks = "1 block" if most.count == 1 else f"{most.count:,} blocks"
            text = f"memory ran out with {format_bytes(most.size)} of {format_bytes(moment.reserved)} held by "
            text += f"{most.label}, in {blocks}: free what is not needed, or work on less at a time"
            found.append(Remedy(Topic.NEED, most.size, text))
    return found


_SEGMENT: Final = 20 << 20  # what the smallest large request is rounded up to when a segment is made for it
_NEED: Final = {
    Category.ACTIVATIONS: "a smaller batch or activation checkpointing takes less",
    Category.PARAMETERS: "sharding or a lower precision takes less",
    Category.GRADIENTS: "zero_grad(set_to_none=True) earlier, or sharding, takes less",
    Category.OPTIMIZER_STATE: "sharding it or an optimizer with less state takes less",
    Category.WORKSPACE: "smaller CUBLAS_WORKSPACE_CONFIG or fewer streams take less",
}


def _remedy(cause: Cause, expandable: bool) -> tuple[str, str]:
    """Return what to do about a cause, and the setting that this names."""
    if cause is Cause.HOLE and not expandable:
        return f"holes between live blocks; try {_EXPANDABLE}", _EXPANDABLE
    if cause is Cause.WHOLE_SEGMENT and not expandable:
        text = f"cached segments that were too small; try {_EXPANDABLE}, else allocate the largest sizes first"
        return text, _EXPANDABLE
    text = {
        Cause.ROUNDING: "lost to rounding; lower roundup_power2_divisions, or pack small tensors into large ones",
        Cause.UNSPLIT: "in blocks larger than asked for; sizes that are whole MiB waste less",
        Cause.PENDING: "freed, but another stream may still use them; synchronize sooner, or record_stream less",
        Cause.OTHER_POOL: "cached in another pool; capture graphs with one pool, or call empty_cache after capture",
        Cause.OTHER_STREAM: "cached on other streams; allocate on one stream, or call empty_cache between phases",
        Cause.OTHER_SIZE: "free, but in the other size class (blocks up to 1 MiB and larger ones are kept apart); "
        "pack small tensors into large ones",
        Cause.HOLE: "holes between live blocks; allocate what lives long before what lives short",
        Cause.WHOLE_SEGMENT: "cached and free; call empty_cache before another program needs it",
    }[cause]
    return text, ""
