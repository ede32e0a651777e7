"""The text of ``cudatool oom``, and of the report that a program leaves when its memory runs out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cudatool.analyze import Cause, Shortage
from cudatool.cli._snapshot_text import (
    print_advice,
    print_categories,
    print_ledger,
    print_library_blocks,
    print_modules,
    print_sites,
    print_split,
)
from cudatool.cli._text import counted, new_table, plain
from cudatool.trace.family import process_name
from cudatool.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import Advice, Failure
    from cudatool.trace.model import Trace

__all__ = ["print_failure"]

_MOST_FRAMES: Final = 6


def print_failure(console: Console, trace: Trace, failure: Failure) -> None:
    """Print one failed allocation of a trace at the console's width, the most important part first."""
    site = failure.site or "a thread without Python frames"
    what = format_bytes(failure.size) if failure.size else "memory"
    source = f" of {failure.library}" if failure.library else ""
    text = f"Out of memory: {site} requested {what}{source} on device {failure.device}"
    console.print(plain(text), style="bold")
    console.print(plain(_why(failure)))
    _print_facts(console, trace, failure)
    print_advice(console, failure.remedies)
    if failure.settings is not None and failure.settings.withheld is None and (tried := _settings(failure.settings)):
        console.print(tried, markup=False)
    print_sites(console, "Held when memory ran out", failure.held)
    print_categories(console, "Held when memory ran out, by purpose (inferred)", failure.categories)
    print_modules(console, "Held when memory ran out, by module", failure.modules)
    for blocks in failure.library_blocks:
        print_library_blocks(console, blocks)
    if failure.split is not None:
        print_split(console, failure.split)
    if failure.ledger is not None:
        print_ledger(console, failure.ledger, int(trace.records["time"][0]))
    if failure.later:
        console.print(f"\n{counted(failure.later, 'more allocation')} failed later.", markup=False)


def _why(failure: Failure) -> str:
    """Return the reason in a sentence."""
    size, total = format_bytes(failure.size), failure.total
    free = "" if failure.free is None else f", the driver had {format_bytes(failure.free)} free"
    if failure.why is Shortage.LARGER and total is not None:
        return f"The request is larger than the device, which has {format_bytes(total)}: request less at a time."
    if failure.why is Shortage.LIMITED:
        limit = f"The limit of {failure.library}'s pool" if failure.library else "A memory fraction"
        return (
            f"{limit} limits this program{free}, and {format_bytes(failure.needed)} were needed.{_in_pieces(failure)}"
        )
    if failure.library and failure.why is Shortage.FULL:
        return f"The memory is full{free}; {format_bytes(failure.missing)} more were needed for {size}."
    if failure.why is Shortage.UNKNOWN:
        return f"The recording does not show why: it lacks the allocator's segments or the driver's free memory{free}."
    split = failure.split
    both = f"nothing was reserved{free}"
    if split is not None:
        both = f"{format_bytes(split.reserved - split.active)} of the reserved memory were free{free}"
    if failure.why is Shortage.FULL or split is None:
        return f"The memory is full: {both}; {format_bytes(failure.missing)} more were needed for {size}."
    causes = [share for share in split.causes if share.cause in _FREE and share.size]
    most = max(causes, key=lambda share: share.size, default=None)
    where = "" if most is None else f", most of it {most.cause}"
    piece = f"the largest piece that this request could use had {format_bytes(split.largest_usable)}"
    return f"The free memory is fragmented: {both}{where}; {piece}."


def _in_pieces(failure: Failure) -> str:
    """Return in what pieces the reserved memory was free, if together they would have been enough."""
    split = failure.split
    if split is None or (unused := split.reserved - split.active) < failure.size:
        return ""
    most = format_bytes(split.largest_usable)
    return (
        f" {format_bytes(unused)} of the reserved memory were free, in pieces of which this request could use {most}."
    )


_FREE: Final = (Cause.OTHER_POOL, Cause.OTHER_STREAM, Cause.OTHER_SIZE, Cause.LIBRARY, Cause.HOLE, Cause.WHOLE_SEGMENT)


def _print_facts(console: Console, trace: Trace, failure: Failure) -> None:
    table = new_table("", "")
    table.show_header = False
    thread = f"thread {failure.thread}" if failure.thread else ""
    if "pid" in trace.header:  # a snapshot of PyTorch does not name its process
        thread = f"{process_name(trace)}, {thread}".removesuffix(", ")
    if thread:
        table.add_row("In", plain(thread))
    for number, frame in enumerate(failure.frames[:_MOST_FRAMES]):
        table.add_row("Requested by" if not number else "", plain(f"{frame.file}:{frame.line} ({frame.function})"))
    if len(failure.frames) > _MOST_FRAMES:
        table.add_row("", f"and {counted(len(failure.frames) - _MOST_FRAMES, 'more caller')}")
    if failure.split is not None:
        split = failure.split
        text = f"{format_bytes(split.reserved)}, of which blocks have {format_bytes(split.active)}"
        table.add_row("Reserved", f"{text} and the program requested {format_bytes(split.requested)}")
    if failure.free is not None:
        total = "" if failure.total is None else f" of {format_bytes(failure.total)}"
        table.add_row("Driver", f"{format_bytes(failure.free)}{total} free")
    console.print(table)


def _settings(tried: Advice) -> str:
    """Return what the replays of other settings showed, beyond the remedy."""
    used = "" if tried.recorded is None else tried.recorded.conf
    names = [outcome.conf or "the defaults" for outcome in tried.tried if outcome.conf != used]
    later = [conf or "the defaults" for conf in tried.untried]
    others = f" Not tried for lack of time: {'; '.join(later)}." if later else ""
    if tried.best is not None:
        return others.strip()
    if not names:
        return "No other allocator setting was tried." + others
    return f"Replayed up to this request, none of these settings is sure to avoid it: {'; '.join(names)}.{others}"
