"""What ``cudatool replay`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudatool.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from cudatool.analyze import Advice, Check, Outcome

__all__ = ["print_advice", "print_check", "print_outcomes"]

_MOST_COUNTERS = 5  # that differ, to be listed
_BEGINNINGS = {
    "empty": "nothing: the recording is complete",
    "inferred": "what its events and its end show was there before",
    "ambiguous": "what was there before, of which a part is guessed",
}


def print_check(console: Console, result: Check) -> None:
    share = 100 * result.exact / result.allocs if result.allocs else 100.0
    verdict = "exact" if result.is_exact else "not exact"
    lines = [
        f"Device {result.device}: {verdict}",
        f"  addresses   {result.exact:,} of {result.allocs:,} the same ({share:.4g} %)",
        f"  segments    {result.segments_exact:,} of {result.segments:,} the same",
        f"  at the end  {result.final_blocks_differ:,} of {result.final_blocks:,} blocks differ",
        f"  peaks       {format_bytes(result.reserved_peak_bytes)} reserved, "
        f"{format_bytes(result.active_peak_bytes)} in use",
        f"  began with  {_BEGINNINGS[result.initial_state]}",
    ]
    for name, (recorded, actual) in list(result.stats_differ.items())[:_MOST_COUNTERS]:
        lines.append(f"  {name}: recorded {recorded:,}, here {actual:,}")
    if len(result.stats_differ) > _MOST_COUNTERS:
        lines.append(
            f"  ... and {len(result.stats_differ) - _MOST_COUNTERS} more counters that differ (--json has all)"
        )
    if result.first_divergence is not None:
        first = result.first_divergence
        lines.append(
            f"  first difference at event {first.event}, a {first.what} of {first.size:,} bytes: "
            f"recorded {first.expected}, here {first.actual}"
        )
        lines.append(f"  probably    {first.reason}")
    lines += [f"  {note}" for note in result.notes]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def print_outcomes(console: Console, device: int, outcomes: list[Outcome]) -> None:
    from rich.table import Table

    title = f"Device {device}: the same requests under other settings"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("Settings", overflow="fold")
    for name in ("Reserved", "In use", "Lost", "Retries", "Runs out"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        oom = outcome.oom
        table.add_row(
            outcome.conf or "(defaults)",
            format_bytes(outcome.reserved_peak_bytes),
            format_bytes(outcome.active_peak_bytes),
            f"{100 * outcome.fragmentation:.1f} %",
            f"{outcome.retries:,}",
            "no" if oom is None else f"request {oom.request:,}: {format_bytes(oom.size)}",
        )
    console.print(table)
    for outcome in outcomes:
        if outcome.survived_ooms:
            text = f"{outcome.conf or '(defaults)'} fails {outcome.survived_ooms:,} requests that it can do without"
            console.print(text, markup=False, soft_wrap=True)
        if outcome.oom is not None and outcome.oom.site:
            console.print(
                f"{outcome.conf or '(defaults)'} runs out at {outcome.oom.site}", markup=False, soft_wrap=True
            )


def print_advice(console: Console, advice: Advice) -> None:
    if advice.best is None:
        text = "No other setting makes a difference worth naming."
        if advice.recorded.oom is not None:
            text = "No setting keeps the program from running out of memory: it needs less at a time, or a larger card."
    else:
        gain = (
            "it does not run out of memory"
            if advice.recorded.oom is not None
            else f"{format_bytes(advice.gain_bytes)} less are reserved"
        )
        conf = advice.best.conf
        text = f"Best: PYTORCH_CUDA_ALLOC_CONF={conf}: {gain}." if conf else f"Best: the defaults: {gain}."
    console.print(text, markup=False, soft_wrap=True)
