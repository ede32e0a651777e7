"""``cudatool replay``: runs the recorded requests again, under the recorded or other settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cudatool import analyze
from cudatool.cli._command import Listed, command, option
from cudatool.cli._options import range_options, size_of, source_argument
from cudatool.cli._part import part_of
from cudatool.cli._recording_files import newest
from cudatool.cli._replay_text import print_advice, print_check, print_outcomes
from cudatool.cli._sources import read_trace, say_notes
from cudatool.cli._text import echo_json, messages, results
from cudatool.errors import UsageError
from cudatool.memory import Settings
from cudatool.progress import step
from cudatool.trace.events import Kind

if TYPE_CHECKING:
    from cudatool.analyze import Advice
    from cudatool.trace.model import Trace

__all__ = ["replay"]

_SETTINGS: Final = (  # offered by completion
    "expandable_segments:True",
    "garbage_collection_threshold:0.8",
    "max_split_size_mb:128",
    "roundup_power2_divisions:4",
)


@command(
    examples=[
        ("Which setting would have helped?", "cudatool replay run.ctrace"),
        ("One setting, on a smaller GPU", "cudatool replay --conf expandable_segments:True --memory 24GiB run.ctrace"),
    ],
)
@source_argument()
@option(
    "--check",
    "checks",
    is_flag=True,
    help="Compare every address, segment and counter. Exit 1 if any differs, 2 if there is nothing to compare.",
)
@option(
    "--conf",
    "confs",
    multiple=True,
    type=Listed(lambda: _SETTINGS, separator=","),
    metavar="SETTINGS",
    help="Settings to try, in PyTorch's syntax; repeatable.",
)
@option("--advise", "advises", is_flag=True, help="Search the settings that matter, and name the best.")
@option("--memory", metavar="SIZE", help="Memory of the GPU to model, such as 40GiB.")
@option("--recorded-memory", metavar="SIZE", help="Memory of the recorded GPU. Default: from the file.")
@option("--recorded-conf", metavar="SETTINGS", help="Settings of the recorded program. Default: from the file.")
@option("--device", "only", type=int, metavar="ORDINAL", help="Only this device. Default: every device with events.")
@option("--json", "as_json", is_flag=True, help="Print JSON: a list, bytes.")
@range_options
def replay(
    source: Path | None,
    checks: bool,
    confs: tuple[str, ...],
    advises: bool,
    memory: str | None,
    recorded_memory: str | None,
    recorded_conf: str | None,
    only: int | None,
    as_json: bool,
    events: str | None,
    time: str | None,
) -> None:
    """Run the requests of a recording through the allocator again.

    SOURCE is a trace that `cudatool run` wrote, or a pickle from torch.cuda.memory._dump_snapshot(). Default: the
    newest trace in this directory. With --conf it says what the same requests would have cost under other settings
    or, with --memory, on another GPU; with --check, whether this allocator does what the recorded one did. Without
    any of them it does as with --advise.
    """

    if checks and (confs or advises):
        raise UsageError("--check replays what was recorded; it does not go with --conf or --advise")
    source = source or newest()
    recording = _recording(source, only, recorded_memory, recorded_conf, (events, time))
    if recording.origin and not as_json:
        messages().print(f"{source}: {recording.origin}", markup=False)
    if checks:
        if recording.trace.header.get("requests_to") == "rmm":
            raise UsageError("an RMM log says nothing of what its allocator did: there is nothing to compare with")
        if recording.trace.header.get("requests_to") == "driver":
            raise UsageError(analyze.NoAdvice.ALSO_DRIVER.why)
        _check(recording, as_json)
    else:
        _try(recording, confs, memory, as_json)


class _Recording(NamedTuple):
    """The recording to replay."""

    trace: Trace
    devices: list[int]
    settings: Settings  # that were in force
    origin: str  # of them, in words
    total_memory: dict[int, int | None]  # of each device, if known
    stats: dict[str, int] | None  # at the end, if known


def _recording(
    source: Path,
    only: int | None,
    recorded_memory: str | None,
    recorded_conf: str | None,
    part: tuple[str | None, str | None],
) -> _Recording:

    trace = part_of(read_trace(source), *part)
    say_notes(trace)
    devices = _devices(trace, only)
    if not devices:
        where = "" if only is None else f" on device {only}"
        raise UsageError(f"{source} has no requests to a caching allocator{where} to replay")
    if recorded_conf is None:
        settings, origin = analyze.recorded_settings(trace)
    else:
        settings, origin = Settings.parse(recorded_conf), ""
    given = size_of(recorded_memory, "--recorded-memory")
    total = {device: given or _memory_of_gpu(trace, device) for device in devices}
    stats = trace.header.get("memory_stats") if len(devices) == 1 and "window" not in trace.header else None
    return _Recording(trace, devices, settings, origin, total, stats)


def _check(recording: _Recording, as_json: bool) -> None:
    """Print how the replay compares, and exit with status 1 if it differs."""

    with step("cudatool replay"):
        checked = [
            analyze.check(
                recording.trace,
                device,
                recording.settings,
                total_memory=recording.total_memory[device],
                # A part of a recording has no final state.
                final=None if "window" in recording.trace.header else getattr(recording.trace, "segments", None),
                stats=recording.stats,
            )
            for device in recording.devices
        ]
    if as_json:
        rows = [{**asdict(result), "is_exact": None if result.is_empty else result.is_exact} for result in checked]
        echo_json(rows)
    else:
        console = results()
        for result in checked:
            print_check(console, result)
    if not all(result.is_exact or result.is_empty for result in checked):
        raise SystemExit(1)
    if any(result.is_empty for result in checked):
        raise SystemExit(2)


def _try(recording: _Recording, confs: tuple[str, ...], memory: str | None, as_json: bool) -> None:
    """Print the cost of the same requests under these settings, or under those that matter, and the best ones."""

    trace, devices, settings, _, total, _ = recording
    advice: dict[int, Advice] = {}
    with step("cudatool replay"):  # progress shows two seconds from here
        options: Any = {"recorded": settings, "memory": size_of(memory, "--memory")}
        for device in devices:
            advice[device] = found = analyze.advise(trace, device, confs, recorded_memory=total[device], **options)
            if found.withheld is not None and not found.tried:
                where = f"device {device}: " if len(devices) > 1 else ""
                raise UsageError(f"{where}{found.why_not()}")
    if as_json:
        echo_json([row for device in devices for row in _rows(device, advice[device], bool(confs))])
        return
    console = results()
    for device, found in advice.items():
        print_outcomes(console, device, found)
        print_advice(console, found, chosen=bool(confs))


def _rows(device: int, advice: Advice, chosen: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each settings string that was tried; if `chosen`, the user named them and wants no advice."""
    for outcome in advice.tried:
        row = {"device": device, **asdict(outcome), "recorded": asdict(advice.record) if advice.record else None}
        row["replay_of_recorded"] = asdict(advice.recorded) if advice.recorded else None
        if not chosen:
            row["best"] = advice.best is not None and advice.best.conf == outcome.conf
            row["gain_bytes"] = advice.gain_bytes if row["best"] else None
            row["withheld"] = advice.withheld
            row["left_out"] = [asdict(left_out) for left_out in advice.left_out]
        yield row


def _devices(trace: Trace, only: int | None) -> list[int]:

    found = sorted(set(trace.of_kind(Kind.BLOCK_ALLOC, Kind.OOM)["device"].tolist()))
    return [device for device in found if only in (None, device)]


def _memory_of_gpu(trace: Trace, device: int) -> int | None:
    """Return the device's memory, if the recording or a file next to it has it."""
    totals = trace.header.get("total_memory") or []
    return int(totals[device]) if 0 <= device < len(totals) else None
