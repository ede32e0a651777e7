"""Where one device's memory went, why so much is reserved, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import reduce
from typing import Any, Final

from cudatool.analyze.categories import Categories, Category, categorize
from cudatool.analyze.fragmentation import Cause, Fragmentation, Occasion, fragmentation
from cudatool.analyze.leak_verdicts import Leaks
from cudatool.analyze.leaks import PARTS_OF_LEAKS, leaks
from cudatool.analyze.modules import Modules, modules
from cudatool.analyze.outside import FreeReading, Outside, outside
from cudatool.analyze.recorded import recorded_settings
from cudatool.analyze.settings_advice import Advice, NoAdvice
from cudatool.analyze.sites import SiteTree, site_tree
from cudatool.analyze.steps import PARTS_OF_STEPS, find_steps
from cudatool.analyze.usage import Usage, usage_by_pool, usage_by_stream
from cudatool.analyze.whatif import advise
from cudatool.analyze.whatif_model import Caveat
from cudatool.errors import ConfigError, FileFormatError
from cudatool.memory.settings import LARGE_SEGMENT, UNLIMITED, Settings, setting_texts
from cudatool.overview.moments import CallSite, by_call_site
from cudatool.progress import advance
from cudatool.trace.lifetimes import Lifetimes, Timeline
from cudatool.trace.model import Trace, recorded_from
from cudatool.trace.module_tensors import block_modules
from cudatool.units import counted, format_bytes

__all__ = ["PARTS_OF_DIAGNOSIS", "Diagnosis", "Remedy", "Topic", "advice", "diagnose", "with_setting"]


class Topic(StrEnum):
    """What a :class:`Remedy` is about, if not a :class:`Cause` of unused reserved bytes."""

    LEAK = "leak"
    """A call site that grows."""
    LIMIT = "limit"
    """Memory ran out although the device had some."""
    NEED = "need"
    """Memory ran out because the program needs what it has."""
    OTHERS = "others"
    """Memory ran out because others than this program hold much of the device's."""
    SETTING = "setting"
    """Another allocator setting saves memory, or why none is named."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do.

    Attributes
    ----------
    topic
        What it is about.
    size
        The bytes that it concerns.
    text
        One sentence.
    conf
        The allocator settings that it recommends and that a replay has tried; empty if there are none.
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
        What blocks are for, where it can be inferred.
    modules
        What each module of PyTorch holds at the peak of active bytes; None if the recording knows no module.
    by_stream, by_pool
        How much each stream, or pool, held.
    fragmentation
        At the peak of reserved, then at failed allocations; empty where no segments are known.
    leaks
        What grows step after step.
    outside
        Memory outside of the allocator.
    settings
        Other allocator settings, measured by a replay; None if none would make a difference.
    advice
        What to do, the most bytes first.
    """

    device: int
    tree: SiteTree
    categories: Categories
    modules: Modules | None
    by_stream: tuple[Usage, ...]
    by_pool: tuple[Usage, ...]
    fragmentation: tuple[Fragmentation, ...]
    leaks: Leaks
    outside: Outside
    settings: Advice | None
    advice: tuple[Remedy, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; bytes and ns."""
        return {
            "tree": self.tree.as_dict(),
            "categories": self.categories.as_dict(),
            "modules": None if self.modules is None else self.modules.as_dict(),
            "by_stream": [asdict(usage) for usage in self.by_stream],
            "by_pool": [asdict(usage) for usage in self.by_pool],
            "fragmentation": [moment.as_dict() for moment in self.fragmentation],
            "leaks": self.leaks.as_dict(),
            "outside": asdict(self.outside),
            "settings": None if self.settings is None else asdict(self.settings),
            "advice": [remedy.text for remedy in self.advice],
            "remedies": [asdict(remedy) for remedy in self.advice],
        }


PARTS_OF_DIAGNOSIS: Final = PARTS_OF_STEPS + PARTS_OF_LEAKS + 6
"""How often :func:`diagnose` advances the progress."""


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
        The device's memory in bytes, if the caller knows it.
    """
    row = curve.peak()
    peak = int(curve.index[row]) if row >= 0 else -1
    steps = find_steps(trace, blocks, device)
    split = fragmentation(trace, blocks, segments, curve, device, settings)
    advance()
    in_modules = block_modules(trace, blocks)
    categories = categorize(trace, blocks, curve, steps, device, peak, in_modules)
    advance()
    grows = leaks(trace, blocks, device, steps)
    beside = outside(trace, segments, curve, device, peak, total)
    held = by_call_site(trace, blocks.at(split[-1].index), blocks) if split else ()
    tried = _try_settings(trace, device, split, beside.total)
    advance()
    tree = site_tree(trace, blocks, device, peak)
    advance()
    by_stream = usage_by_stream(trace, blocks, segments, peak)
    advance()
    by_pool = usage_by_pool(trace, blocks, segments, peak)
    advance()
    has_history = recorded_from(trace, device) < len(trace.records)
    return Diagnosis(
        device=device,
        tree=tree,
        categories=categories,
        modules=modules(trace, blocks, in_modules, categories, peak),
        by_stream=by_stream,
        by_pool=by_pool,
        fragmentation=split,
        leaks=grows,
        outside=beside,
        settings=tried,
        # A final state alone does not show when most was in use.
        advice=advice(
            split if has_history else (),
            categories,
            grows,
            beside,
            held,
            tried,
            most_active=int(curve.active.max(initial=0)),
            rounds_up=_rounds_up(settings),
        ),
    )


_SCATTERED: Final = (Cause.OTHER_POOL, Cause.OTHER_STREAM, Cause.OTHER_SIZE, Cause.HOLE, Cause.WHOLE_SEGMENT)
_FREE: Final = (*_SCATTERED, Cause.LIBRARY)  # causes of memory that no block has
_LONGEST: Final = 500_000  # largest recording replayed here, in events: about 4 s for each setting


def _try_settings(trace: Trace, device: int, split: tuple[Fragmentation, ...], total: int | None) -> Advice | None:
    """Return, from a replay, what settings against the causes of `split` would have saved."""
    try:
        recorded, _ = recorded_settings(trace)
    except FileFormatError:
        return None
    causes = [*_SCATTERED, *[Cause.ROUNDING] * _rounds_up(recorded), *[Cause.UNSPLIT] * _limits_splits(recorded)]
    is_worth_it = any(sum(map(moment.size_of, causes)) >= _WORTH * moment.reserved for moment in _that_count(split))
    confs = _to_try(recorded) if is_worth_it else []
    if not confs:
        return None
    if len(trace.records) > _LONGEST:
        return Advice(None, None, None, 0, (), NoAdvice.TOO_LONG)
    try:
        return advise(trace, device, confs, recorded=recorded, recorded_memory=total)
    except ConfigError:  # an allocator that is not modelled
        return None
    except FileFormatError:  # events that contradict each other
        return Advice(None, None, None, 0, (), NoAdvice.CONTRADICTION)


def _to_try(recorded: Settings) -> list[str]:
    """Return the recorded settings with expandable segments, without what rounds up or limits splits, and with all."""
    changes: list[Callable[[str], str]] = []
    if _limits_splits(recorded):
        changes.append(lambda conf: _without_setting(conf, "max_split_size_mb"))
    if _rounds_up(recorded):
        changes.append(lambda conf: with_setting(conf, "roundup_power2_divisions:1"))
    if not recorded.expandable_segments:
        changes.append(lambda conf: with_setting(conf, "expandable_segments:True"))
    found = [change(recorded.text) for change in changes]
    found.append(reduce(lambda conf, change: change(conf), changes, recorded.text))
    # Advice names a setting: the defaults alone are none.
    return [conf for conf in dict.fromkeys(found) if conf not in ("", recorded.text)]


def _without_setting(conf: str, name: str) -> str:
    return ",".join(text for own, text in setting_texts(conf).items() if own != name)


def with_setting(conf: str, setting: str) -> str:
    """Return a settings string with one setting added or its value replaced."""
    added = setting_texts(setting)
    kept = {name: text for name, text in setting_texts(conf).items() if name not in added}
    return ",".join([*kept.values(), *added.values()])


def _rounds_up(settings: Settings) -> bool:
    """Return whether a setting rounds requests up by more than the allocator itself does."""
    return max(settings.roundup_power2_divisions) > 1


def _limits_splits(settings: Settings) -> bool:
    """Return whether large blocks are not cut for smaller requests."""
    return settings.max_split_size != UNLIMITED


def _that_count(split: tuple[Fragmentation, ...]) -> tuple[Fragmentation, ...]:
    """Return the first moment and the last: the peak, and the failure that may have ended the program."""
    return (split[0], split[-1]) if len(split) > 1 else split


_WORTH: Final = 0.05  # share of the reserved bytes below which a cause is not reported, nor a setting tried


def advice(
    split: tuple[Fragmentation, ...],
    categories: Categories,
    grows: Leaks,
    beside: Outside,
    held: tuple[CallSite, ...],
    settings: Advice | None,
    *,
    most_active: int = 0,
    rounds_up: bool = False,
) -> tuple[Remedy, ...]:
    """Return what to do, the most bytes first. The first four are parts of one :class:`Diagnosis`.

    A setting is recommended only with the bytes that it saved in a replay of the recording.

    Parameters
    ----------
    held
        Memory by call site at the last of `split`, the largest first.
    settings
        Settings that were tried.
    most_active
        The most bytes in use at any time: no use of the memory takes less.
    rounds_up
        Whether a setting of the recorded program rounds sizes up.
    """
    found: list[Remedy] = []
    for leak in grows.found:
        more = f"{format_bytes(leak.per_step)} more after each step" if leak.per_step else "more and more"
        text = f"{leak.compiled.described(leak.label)} keeps {more}: drop what it returns"
        found.append(Remedy(Topic.LEAK, leak.growth, text))
    worst: dict[Cause, int] = {}
    for moment in _that_count(split):
        for share in moment.causes:
            if share.cause == Cause.NEW_SEGMENT or (share.cause == Cause.HOLE and not moment.releasable):
                continue  # needed by every program
            size = share.size - (moment.never_used if share.cause == Cause.HOLE else 0)
            if share.cause in _FREE and moment.moment is Occasion.PEAK:
                # The rest was needed when most was in use.
                size = min(size, moment.reserved - most_active)
            if size >= _WORTH * moment.reserved:
                worst[share.cause] = max(worst.get(share.cause, 0), size)
    remedies = _REMEDIES | ({Cause.ROUNDING: _ROUNDED_UP} if rounds_up else {})
    for cause, size in worst.items():
        # How much less is reserved then depends on how what is left fits together.
        bound = "up to " if cause in _FREE else ""
        more = _before_request(split[0]) if cause == Cause.HOLE else ""
        found.append(Remedy(cause, size, f"{bound}{format_bytes(size)}: {remedies[cause]}{more}"))
    found += _kept(split[:1], most_active, worst)
    found += _unfilled(_that_count(split), most_active)
    if beside.readings:
        found += _after_failure(split[-1:], categories, beside.readings[-1], held)
    if settings is not None:
        found += _of_settings(settings)
    return tuple(sorted(found, key=lambda remedy: (-remedy.size, remedy.text)))


def _before_request(moment: Fragmentation) -> str:
    """Return what it takes for the request that needed new memory to use that of segments with holes, if it is too
    large for one of them: free segments are then only of use once they are given back."""
    largest = max((hole.segment_size for hole in moment.holes if hole.cause == Cause.HOLE), default=0)
    if moment.wanted is None or moment.wanted.size <= largest:
        return ""
    return f", and call empty_cache before {format_bytes(moment.wanted.size)} are asked for"


def _kept(split: tuple[Fragmentation, ...], most_active: int, worst: dict[Cause, int]) -> Iterator[Remedy]:
    """Yield what is cached since more was in use, where no other use of the memory would have taken less."""
    for moment in split:
        size = moment.size_of(Cause.WHOLE_SEGMENT)
        if Cause.WHOLE_SEGMENT not in worst and size >= _WORTH * moment.reserved:
            text = f"{format_bytes(size)}: cached since {format_bytes(most_active)} were in use; call empty_cache "
            yield Remedy(Cause.WHOLE_SEGMENT, size, text + "after that, if others need the memory")


def _unfilled(moments: tuple[Fragmentation, ...], most_active: int) -> Iterator[Remedy]:
    """Yield what segments have beyond the blocks that ever were in them, where that is most."""
    found = 0
    for moment in moments:
        size = moment.never_used if moment.releasable else 0
        if moment.moment is Occasion.PEAK:
            size = min(size, moment.reserved - most_active)
        if size >= _WORTH * moment.reserved:
            found = max(found, size)
    if found:
        text = (
            "in segments of 2 or 20 MiB that no block filled; sizes that divide these, or are above 10 MiB, leave less"
        )
        yield Remedy(Cause.HOLE, found, f"up to {format_bytes(found)}: {text}")


def _of_settings(tried: Advice) -> Iterator[Remedy]:
    """Yield the best setting with the bytes that it saved in a replay; or why none is recommended."""
    if tried.withheld is not None:
        yield Remedy(Topic.SETTING, 0, f"no other allocator setting is recommended: {tried.why_not()}")
    elif tried.best is not None:
        conf = tried.best.conf
        bound = "at least " if tried.best.caveats else ""
        saved = f"{bound}{format_bytes(tried.gain_bytes)} less would be reserved with"
        if not tried.gain_bytes:
            saved = "memory would not run out where it did with"
        text = f"{saved} {tried.variable}={conf}, as a replay of this recording shows"
        if not tried.gain_bytes or Caveat.OTHER_COURSE in tried.best.caveats:
            text += "; what the program would do after that is not known"
        yield Remedy(Topic.SETTING, tried.gain_bytes or tried.best.reserved_peak_bytes, text, conf)


def _after_failure(
    split: tuple[Fragmentation, ...], categories: Categories, reading: FreeReading, held: tuple[CallSite, ...]
) -> list[Remedy]:
    """Return what to do about a failed allocation that better use of the reserved memory would not have avoided."""
    found = []
    for moment in split:
        if moment.wanted is not None and reading.free > moment.wanted.size + LARGE_SEGMENT:
            text = f"memory ran out with {format_bytes(reading.free)} free on the GPU: a limit on this program's share "
            text += f"holds it to about {format_bytes(reading.reserved)}; raise set_per_process_memory_fraction"
            found.append(Remedy(Topic.LIMIT, reading.free, text))
        needed = next(iter(categories.sizes().items()), None)
        if needed is not None and needed[0] in _NEED and moment.requested >= (1 - 2 * _WORTH) * moment.reserved:
            category, size = needed
            text = f"{format_bytes(size)} {category} (inferred) are needed: {_NEED[category]}"
            found.append(Remedy(Topic.NEED, size, text))
        elif held and held[0].size >= moment.reserved // 2:
            most = held[0]
            text = f"memory ran out with {format_bytes(most.size)} of {format_bytes(moment.reserved)} held by "
            text += f"{most.described}, in {counted(most.count, 'block')}: "
            text += "free what is not needed, or work on less at a time"
            found.append(Remedy(Topic.NEED, most.size, text))
    return found


_NEED: Final = {
    Category.ACTIVATIONS: "a smaller batch or activation checkpointing takes less",
    Category.PARAMETERS: "sharding or a lower precision takes less",
    Category.GRADIENTS: "zero_grad(set_to_none=True) earlier, or sharding, takes less",
    Category.OPTIMIZER_STATE: "sharding it or an optimizer with less state takes less",
    Category.WORKSPACE: "smaller CUBLAS_WORKSPACE_CONFIG or fewer streams take less",
}


_ROUNDED_UP: Final = "lost to rounding, which roundup_power2_divisions increases"
_REMEDIES: Final = {
    Cause.ROUNDING: "lost to rounding; pack small tensors into large ones",
    Cause.UNSPLIT: "in blocks larger than requested; sizes that are whole MiB waste less",
    Cause.PENDING: "freed, but another stream may still use them; synchronize sooner, or record_stream less",
    Cause.OTHER_POOL: "cached in another pool, which keeps it for its graph or MemPool; capture graphs with one "
    "pool, and delete those that are no longer needed",
    Cause.OTHER_STREAM: "cached on other streams; allocate on one stream, or call empty_cache between phases",
    Cause.OTHER_SIZE: "free, but in the other size class (blocks up to 1 MiB and larger ones are kept apart); "
    "pack small tensors into large ones",
    Cause.LIBRARY: "cached by another library; CuPy gives back what is whole with "
    "cupy.get_default_memory_pool().free_all_blocks()",
    Cause.HOLE: "holes between live blocks; allocate what lives long before what lives short",
    Cause.WHOLE_SEGMENT: "cached segments that later requests could not use; allocate the largest sizes first",
}
