"""``cudatool replay``: the recorded requests again, as they were or under other settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cudatool.analyze import Advice, Check, Outcome
    from cudatool.memory import Settings
    from cudatool.trace.model import Trace

__all__ = ["replay"]

_MOST_COUNTERS = 5  # that differ, to be listed


@click.command()
@click.argument("source", required=False, type=click.Path(path_type=Path))
@click.option(
    "--check", "checks", is_flag=True, help="Compare every address, segment and counter. Exit 1 if any differs."
)
@click.option(
    "--conf", "confs", multiple=True, metavar="SETTINGS", help="Settings to try, in PyTorch's syntax; repeatable."
)
@click.option("--advise", "advises", is_flag=True, help="Search the settings that matter, and name the best.")
@click.option("--memory", metavar="SIZE", help="Memory of the card to model, such as 40GiB.")
@click.option("--card", metavar="SIZE", help="Memory of the card that was recorded. Default: what the file says.")
@click.option("--recorded-conf", metavar="SETTINGS", help="Settings that were in force. Default: what the file says.")
@click.option(
    "--device", "only", type=int, metavar="ORDINAL", help="Only this device. Default: every device with events."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list, bytes.")
def replay(
    source: Path | None,
    checks: bool,
    confs: tuple[str, ...],
    advises: bool,
    memory: str | None,
    card: str | None,
    recorded_conf: str | None,
    only: int | None,
    as_json: bool,
) -> None:
    """Run the requests of a recording through the allocator again.

    SOURCE is a trace that `cudatool run` wrote, or a pickle from torch.cuda.memory._dump_snapshot(). Default: the
    newest trace in this directory. With --conf it says what the same requests would have cost under other settings
    or, with --memory, on another card; with --check, whether this allocator does what the recorded one did. Without
    any of them it does as with --advise.
    """
    from cudatool import analyze
    from cudatool.cli._sources import newest, read_trace, say_notes
    from cudatool.cli._text import messages, results
    from cudatool.errors import UsageError
    from cudatool.memory import Settings
    from cudatool.units import format_bytes, parse_bytes

    if checks and (confs or advises):
        raise UsageError("--check replays what was recorded; it does not go with --conf or --advise")
    source = source or newest()
    trace = read_trace(source)
    say_notes(trace)
    devices = _devices(trace, only)
    if not devices:
        raise UsageError(f"{source} has no allocations{'' if only is None else f' on device {only}'} to replay")
    if recorded_conf is None:
        settings, origin = analyze.recorded_settings(trace)
    else:
        settings, origin = Settings.parse(recorded_conf), ""
    facts = _beside(source)
    settings = _with_fraction(settings, facts) if recorded_conf is None else settings
    total = parse_bytes(card) if card else facts.get("device_total_bytes") or _card(trace, devices[0])
    said = messages()
    if origin and not as_json:
        said.print(f"{source}: {origin}", markup=False)
    console = results()

    if checks:
        with _progress(said):
            checked = [
                analyze.check(
                    trace,
                    device,
                    settings,
                    total_memory=total,
                    final=getattr(trace, "segments", None),
                    stats=facts.get("stats") if len(devices) == 1 else None,
                )
                for device in devices
            ]
        if as_json:
            click.echo(json.dumps([asdict(result) for result in checked], indent=2))
        else:
            for result in checked:
                _print_check(console, result)
        if not all(result.is_exact for result in checked):
            raise SystemExit(1)
        return

    wanted = parse_bytes(memory) if memory else None
    for device in devices if not (wanted or total or as_json) else ():
        if limit := analyze.recorded_limit(trace, device):
            said.print(f"device {device} ran out of memory: {format_bytes(limit)} are taken to be all it could have")
    with _progress(said) as progress:
        if confs:
            rows = [
                (device, outcome)
                for device in devices
                for outcome in analyze.what_if(
                    trace, device, confs, recorded=settings, recorded_memory=total, memory=wanted, progress=progress
                )
            ]
            advice = []
        else:
            advice = [
                (
                    device,
                    analyze.advise(
                        trace, device, recorded=settings, recorded_memory=total, memory=wanted, progress=progress
                    ),
                )
                for device in devices
            ]
            rows = [(device, outcome) for device, found in advice for outcome in found.tried]
    if as_json:
        best = {device: found.best.conf if found.best else None for device, found in advice}
        listed = [{"device": device, **asdict(outcome)} for device, outcome in rows]
        for row in listed if advice else ():
            row["best"] = best[row["device"]] == row["conf"]
        click.echo(json.dumps(listed, indent=2))
        return
    for device in devices:
        _print_outcomes(console, device, [outcome for own, outcome in rows if own == device])
    for _, found in advice:
        _print_advice(console, found)


def _devices(trace: Trace, only: int | None) -> list[int]:
    from cudatool.trace.events import Kind

    found = sorted(set(trace.of_kind(Kind.BLOCK_ALLOC, Kind.OOM)["device"].tolist()))
    return [device for device in found if only in (None, device)]


def _card(trace: Trace, device: int) -> int | None:
    """Return the memory of the card, which our own traces of the software device have."""
    cards = trace.header.get("total_memory") or []
    return int(cards[device]) if device < len(cards) else None


def _beside(source: Path) -> dict[str, Any]:
    """Return NAME.stats.json beside NAME.pickle, as far as it is what `--check` can compare with."""
    name = source.name.split(".pickle")[0]
    try:
        facts = json.loads((source.parent / f"{name}.stats.json").read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _with_fraction(settings: Settings, facts: dict[str, Any]) -> Settings:
    """Add the memory fraction that the program set, which no snapshot has."""
    from dataclasses import replace

    fraction = facts.get("memory_fraction")
    if not fraction or settings.per_process_memory_fraction is not None:
        return settings
    text = f"{settings.text},per_process_memory_fraction:{fraction}".strip(",")
    return replace(settings, per_process_memory_fraction=float(fraction), text=text)


@contextmanager
def _progress(messages: Any) -> Iterator[Callable[[int], None]]:
    """Show that something happens and how many settings have been tried, on a terminal and after two seconds."""
    from threading import Timer

    if not messages.is_terminal:
        yield lambda done: None
        return
    status = messages.status("replaying")
    timer = Timer(2, status.start)
    timer.start()
    try:
        yield lambda done: status.update(f"replaying: {done} settings tried")
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _print_check(console: Any, result: Check) -> None:
    from cudatool.units import format_bytes

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


_BEGINNINGS = {
    "empty": "nothing: the recording is complete",
    "inferred": "what its events and its end show was there before",
    "ambiguous": "what was there before, of which a part is guessed",
}


def _print_outcomes(console: Any, device: int, outcomes: list[Outcome]) -> None:
    from rich.table import Table

    from cudatool.units import format_bytes

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


def _print_advice(console: Any, advice: Advice) -> None:
    from cudatool.units import format_bytes

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
