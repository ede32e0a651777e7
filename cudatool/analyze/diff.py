"""Two traces side by side: what each call site holds at the peak of one, and of the other."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from cudatool.overview import moments
from cudatool.overview.compiled import Compiled, joined
from cudatool.progress import Step, step
from cudatool.trace import lifetimes
from cudatool.trace.distinct import distinct
from cudatool.trace.frames import call_sites, file_name, site_frames
from cudatool.trace.model import Frame, Trace

__all__ = ["Diff", "DiffRow", "Match", "diff"]


class Match(StrEnum):
    """What a row's call sites have in common."""

    FUNCTIONS = "functions"
    """Files and functions of the whole stack. Lines tell sites within one function apart, by their order."""
    NAMES = "names"
    """The same, but of files only the name, not the folder."""
    FUNCTION = "function"
    """Files' names and functions of two frames: the innermost of the user's own, and the innermost of all."""
    SIZE = "size"
    """The size asked for: neither has a stack."""
    NONE = "only in one"


@dataclass(frozen=True, slots=True)
class DiffRow:
    """A call site in both traces.

    Attributes
    ----------
    label
        The site in words, as the second trace spells it if it has the site.
    matched_by
        What matched the site in both.
    before, after
        Bytes at each one's peak.
    count_before, count_after
        Blocks at each one's peak.
    stack_before, stack_after
        Innermost frame first, of the largest of its call sites; empty where there is none.
    compiled
        The compiled code of the site in either trace.
    """

    label: str
    matched_by: Match
    before: int
    after: int
    count_before: int
    count_after: int
    stack_before: tuple[Frame, ...] = ()
    stack_after: tuple[Frame, ...] = ()
    compiled: Compiled = field(default_factory=Compiled)

    @property
    def change(self) -> int:
        """Bytes gained, negative if lost."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Diff:
    """Two peaks of active bytes, by call site.

    Attributes
    ----------
    device
        Whose memory.
    before, after
        Bytes active at each one's peak.
    reserved_before, reserved_after
        Peak reserved bytes of each, perhaps at another moment than `before` and `after`; None if the trace lacks them.
    rows
        The largest difference first. Those of `before` and `after` add up to the peaks.
    """

    device: int
    before: int
    after: int
    reserved_before: int | None
    reserved_after: int | None
    rows: tuple[DiffRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; bytes."""
        result = asdict(self)
        for plain, row in zip(result["rows"], self.rows, strict=True):
            plain["change"] = row.change
        return result


@dataclass(frozen=True, slots=True)
class _Site:
    """What one call site holds at the peak."""

    stack: tuple[Frame, ...]
    requested: int  # by each block
    label: str
    size: int
    count: int
    compiled: Compiled


def diff(before: Trace, after: Trace) -> tuple[Diff, ...]:
    """Return the difference between the peaks of two traces, for each device that either has.

    Call sites are matched by the first of :class:`Match` that finds a partner, so that a changed line number or folder
    does not split a site into two.
    """
    with step("comparing", total=2 * _PHASES) as shown:
        sides = [_peaks(trace, shown, done) for trace, done in ((before, 0), (after, _PHASES))]
    nothing = _Peak(0, 0, [])
    result = []
    for device in sorted(sides[0].keys() | sides[1].keys()):
        old, new = (side.get(device, nothing) for side in sides)
        rows = sorted(_told_apart(_rows(old.sites, new.sites)), key=lambda row: (-abs(row.change), -row.after))
        result.append(Diff(device, old.active, new.active, old.reserved, new.reserved, tuple(rows)))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class _Peak:
    active: int
    reserved: int | None
    sites: list[_Site]


_PHASES: Final = 2  # for each side, of about equal length


def _peaks(trace: Trace, shown: Step, done: int) -> dict[int, _Peak]:
    shown.update(done)
    blocks, segments = lifetimes.blocks(trace), lifetimes.segments(trace)
    shown.update(done + 1)
    result = {}
    for device in distinct(blocks.device, segments.device).tolist():
        own, reserved = blocks.of_device(device), segments.of_device(device)
        curve = lifetimes.timeline(trace, own, reserved)
        row = curve.peak()
        sites = [
            _Site(
                trace.stack(site.stack), site.requested // site.count, site.label, site.size, site.count, site.compiled
            )
            for site in moments.by_call_site(trace, own.at(int(curve.index[row])))
        ]
        most = int(curve.reserved.max()) if curve.knows_reserved else None
        result[device] = _Peak(int(curve.active[row]), most, sites)
    return result


def _functions(site: _Site) -> Hashable:
    return tuple((frame.file, frame.function) for frame in site.stack) or None


def _names(site: _Site) -> Hashable:
    return tuple((file_name(frame.file), frame.function) for frame in site.stack) or None


def _function(site: _Site) -> Hashable:
    frames = site_frames(site.stack)
    return frames and tuple((file_name(frame.file), frame.function) for frame in frames)


def _size(site: _Site) -> Hashable:
    return None if site.stack else site.requested


_KEYS: Final[tuple[tuple[Match, Callable[[_Site], Hashable]], ...]] = (
    (Match.FUNCTIONS, _functions),
    (Match.NAMES, _names),
    (Match.FUNCTION, _function),
    (Match.SIZE, _size),
)


def _told_apart(rows: list[DiffRow]) -> list[DiffRow]:
    """Give rows distinct labels: the sites of both traces are in one table."""
    labels = call_sites([row.stack_after or row.stack_before for row in rows])
    return [replace(row, label=label or row.label) for row, label in zip(rows, labels, strict=True)]


def _rows(old: list[_Site], new: list[_Site]) -> list[DiffRow]:
    rows = []
    for match, key in _KEYS:
        groups: dict[Hashable, tuple[list[_Site], list[_Site]]] = {}
        for side, sites in enumerate((old, new)):
            for site in sites:
                if (common := key(site)) is not None:
                    groups.setdefault(common, ([], []))[side].append(site)
        both = {common: sides for common, sides in groups.items() if all(sides)}
        rows += [_row(match, *pair) for sides in both.values() for pair in _pairs(*sides)]
        old, new = ([site for site in sites if key(site) not in both] for sites in (old, new))
    rows += [_row(Match.NONE, [site], []) for site in old]
    rows += [_row(Match.NONE, [], [site]) for site in new]
    return rows


def _pairs(olds: list[_Site], news: list[_Site]) -> list[tuple[list[_Site], list[_Site]]]:
    """Pair sites of the same functions by the order of their lines; merge them if one trace has more."""
    if len(olds) != len(news):
        return [(olds, news)]
    by_line = [sorted(sites, key=lambda site: [frame.line for frame in site.stack]) for sites in (olds, news)]
    return [([a], [b]) for a, b in zip(*by_line, strict=True)]


def _row(match: Match, olds: list[_Site], news: list[_Site]) -> DiffRow:
    return DiffRow(
        label=(news or olds)[0].label,
        matched_by=match,
        before=sum(site.size for site in olds),
        after=sum(site.size for site in news),
        count_before=sum(site.count for site in olds),
        count_after=sum(site.count for site in news),
        stack_before=_largest_stack(olds),
        stack_after=_largest_stack(news),
        compiled=joined([site.compiled for site in (*news, *olds)]),
    )


def _largest_stack(sites: list[_Site]) -> tuple[Frame, ...]:
    return max(sites, key=lambda site: site.size).stack if sites else ()
