"""The same program under several schedules of the software device, and one report of all of them.

What CUDA's rules leave unordered is found under any schedule. Other schedules show what depends on results: code that
runs only then, kernels that go out of bounds only then, and output that differs.
"""

from __future__ import annotations

import json
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from cudatool.config import DEVICE
from cudatool.errors import UsageError
from cudatool.sanitize.coverage import merged_gaps
from cudatool.sanitize.findings import DeviceFinding, Finding, Report, ScheduleRun
from cudatool.units import counted

__all__ = [
    "ScheduleOutcome",
    "SeededSchedule",
    "device_for",
    "joined",
    "report_from_json",
    "schedule_lines",
    "schedules",
]

_Some = typing.TypeVar("_Some", Finding, DeviceFinding)


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """What a schedule gave: a report, the program's exit status (negative: the signal that ended it), its output."""

    schedule: str
    report: Report
    status: int
    output: tuple[str, ...]


class SeededSchedule(NamedTuple):
    """An order of the work on the software device; one by chance has a seed."""

    order: str
    seed: int | None = None

    def __str__(self) -> str:
        return self.order if self.seed is None else f"{self.order} {self.seed}"


def schedules(number: int) -> list[SeededSchedule]:
    """Return the first `number` schedules: fifo, lifo, late, then by chance."""
    fixed = map(SeededSchedule, ("fifo", "lifo", "late"))
    return [*fixed, *(SeededSchedule("random", seed) for seed in range(1, number - 2))][:number]


def device_for(device: str | None, schedule: SeededSchedule) -> str:
    """Return the specification of the software device `device` with another schedule.

    Raises
    ------
    UsageError
        `device` is a GPU.
    """
    kind, _, text = (device or DEVICE.value()).partition(":")
    if kind == "cuda":
        raise UsageError("--explore needs the software device: the order of work on a GPU cannot be chosen")
    options = {item.partition("=")[0]: item for item in text.split(",") if item}
    options = {name: item for name, item in options.items() if name not in ("schedule", "seed")}
    options.setdefault("threads", "threads=1")  # schedules run side by side, and the order of atomics is to be the same
    options["schedule"] = f"schedule={schedule.order}"
    if schedule.seed is not None:
        options["seed"] = f"seed={schedule.seed}"
    return f"sim:{','.join(options.values())}"


# ---- one report of several ----


def joined(runs: Sequence[ScheduleOutcome], again: ScheduleOutcome) -> Report:
    """Return the report of the first run with what the others found added, and who saw what.

    `again` is another run under the first one's schedule: what it prints differently says nothing.
    """
    first = runs[0]
    reports = [(run.schedule, run.report) for run in runs]
    listed = tuple(ScheduleRun(run.schedule, run.status, _unlike(first, again, run)) for run in runs)
    return replace(
        reports[0][1],
        findings=_union((schedule, report.findings) for schedule, report in reports),
        possible=_union((schedule, report.possible) for schedule, report in reports),
        on_device=_union((schedule, report.on_device) for schedule, report in reports),
        warnings=_union((schedule, report.warnings) for schedule, report in reports),
        notes=tuple(dict.fromkeys(note for _, report in reports for note in report.notes)),
        schedules=listed,
        gaps=merged_gaps([report.gaps for _, report in reports], add=False),
        dependent=_union((schedule, report.dependent) for schedule, report in reports),
    )


def _union(found: Iterable[tuple[str, Sequence[_Some]]]) -> tuple[_Some, ...]:
    """Return each finding once, by fingerprint, as the first schedule had it; one with a proof goes before."""
    kept: dict[str, _Some] = {}
    seen: dict[str, list[str]] = {}
    for schedule, findings in found:
        for finding in findings:
            known = kept.setdefault(finding.fingerprint, finding)
            if isinstance(finding, Finding) and finding.witness and isinstance(known, Finding) and not known.witness:
                kept[finding.fingerprint] = finding
            seen.setdefault(finding.fingerprint, []).append(schedule)
    return tuple(replace(finding, seen_in=tuple(seen[name])) for name, finding in kept.items())


def _unlike(first: ScheduleOutcome, again: ScheduleOutcome, run: ScheduleOutcome) -> str:
    """Say in which line the output of `run` begins to differ from that of `first`; nothing if it does not."""
    if len(first.output) != len(again.output):
        return "" if run.output == first.output else "the program prints other lines each time: not compared"
    for number, (mine, same, other) in enumerate(zip(first.output, again.output, run.output, strict=False), 1):
        if mine == same and mine != other:
            return f"line {number} of the output is {_quoted(other)}, under {first.schedule} {_quoted(mine)}"
    if len(first.output) != len(run.output):
        longer, verb = (run, "goes on") if len(run.output) > len(first.output) else (first, "ends before")
        number = min(len(first.output), len(run.output))
        return (
            f"the output {verb}, unlike under {first.schedule}: line {number + 1} is {_quoted(longer.output[number])}"
        )
    return ""


def _quoted(line: str) -> str:
    return repr(textwrap.shorten(line, 100, placeholder=" ..."))


def schedule_lines(report: Report) -> list[str]:
    """Return what the runs of a joined report gave, as lines of a report."""
    lines = []
    if report.schedules:
        names = ", ".join(run.schedule for run in report.schedules)
        lines.append(f"ran under: {counted(len(report.schedules), 'schedule')}: {names}")
    for run in report.schedules:
        if run.status:
            ended = f"was ended by signal {-run.status}" if run.status < 0 else f"failed with exit status {run.status}"
            lines.append(f"under {run.schedule}: the program {ended}")
        if run.difference:
            lines.append(f"under {run.schedule}: {run.difference}")
    return lines


# ---- from JSON ----


def report_from_json(text: str) -> Report:
    """Return the report that :func:`cudatool.sanitize.render_json` wrote.

    Raises
    ------
    ValueError
        It is no such report.
    """
    try:
        data = json.loads(text)
        found = [one for one in data["findings"] if _fits(Finding, one)]  # the others are in `on_device`, too
        report = _restored(Report, {**data, "findings": found})
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"this is no report of cudatool sanitize: {error}") from error
    assert isinstance(report, Report)
    return report


def _restored(kind: Any, value: Any) -> Any:
    """Return a value of type `kind` from what JSON keeps of it."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _restored(next(one for one in of if one is not types.NoneType and _fits(one, value)), value)
    if origin is tuple:
        kinds = [of[0]] * len(value) if of[1:] == (...,) else of
        return tuple(_restored(one, item) for one, item in zip(kinds, value, strict=True))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return dict(value)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return typing.cast(type, kind)(
            **{f.name: _restored(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value}
        )
    if isinstance(kind, type) and issubclass(kind, tuple):  # a NamedTuple
        return kind(**value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


def _fits(kind: Any, value: Any) -> bool:
    return set(value) <= ({field.name for field in fields(kind)} if is_dataclass(kind) else set(kind._fields))
