"""``cudatool sanitize --explore`` runs the program under several schedules, each in a separate process.

The process of a schedule runs this module, too. It answers on stdout with one JSON object, and suppresses cudatool's
usual messages, so that its stderr is only the program's output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass

import click

from cudatool.cli._proof import Proof
from cudatool.cli._recorded import checked, trace_of
from cudatool.cli._text import say
from cudatool.config import QUIET
from cudatool.errors import CudatoolError, UsageError
from cudatool.processors import processors
from cudatool.sanitize import joined_processes, parse_checks, render_json
from cudatool.sanitize.coverage import ended
from cudatool.sanitize.explore import ScheduleOutcome, SeededSchedule, device_for, joined, report_from_json, schedules
from cudatool.sanitize.findings import Gap, GapKind, Report
from cudatool.trace import reader
from cudatool.trace.model import Ending
from cudatool.workload import Start, Workload

__all__ = ["answer", "explored"]

_PROGRAM = "from cudatool.cli._schedules import answer; answer()"


@dataclass(frozen=True, slots=True)
class _Job:
    """The job of every schedule; `budget_s` is the time for witnesses in seconds, None for no witnesses."""

    checks: str
    budget_s: float | None
    workload: tuple[str, ...]
    children: bool


def explored(
    proof: Proof, device: str | None, checks: str, workload: tuple[str, ...], *, children: bool
) -> tuple[Report, int]:
    """Return one report of the program under all schedules, and its first exit status that is not 0.

    One process per processor runs at a time. stderr gets a progress line now and then, and the program's output under
    the first schedule and under those where it failed.

    Raises
    ------
    UsageError
        The options do not allow it, or the device is a GPU.
    """
    assert proof.schedules is not None
    program = Workload.parse(workload, "sanitize")
    if program.start is Start.SCRIPT and os.path.isfile(program.target) and reader.is_trace(program.target):
        proof.refuse_trace()
    program.check()
    if program.start is Start.STDIN:
        raise UsageError("--explore runs the program several times, and standard input can be read once; name a file")
    report = _explored(device, proof.schedules, _Job(checks, proof.budget_s, workload, children))
    return report, next((run.status for run in report.schedules if run.status), 0)


def _explored(device: str | None, number: int, job: _Job) -> Report:
    devices = {schedule: device_for(device, schedule) for schedule in schedules(number)}
    runs: dict[SeededSchedule, ScheduleOutcome] = {}
    with ThreadPoolExecutor(processors()) as pool:
        waiting = {pool.submit(_run, schedule, chosen, job): schedule for schedule, chosen in devices.items()}
        try:
            for done in as_completed(waiting):
                runs[waiting[done]] = done.result()
                say(f"cudatool: {len(runs)} of {number} schedules done")
        except BaseException:  # after an error, or Ctrl-C, no other schedule begins
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    ordered = [runs[schedule] for schedule in devices]
    for run in ordered:
        if run is ordered[0] or run.status:
            for line in (f"cudatool: what the program printed under {run.schedule}:", *run.output):
                say(line)
    again = ordered[0]
    if any(run.output != again.output for run in ordered):
        again = _run(*next(iter(devices.items())), job)  # differences here do not come from the order
    return joined(ordered, again)


def _run(schedule: SeededSchedule, device: str, job: _Job) -> ScheduleOutcome:
    done = subprocess.run(  # -P: modules that lie in this directory are not ours
        [sys.executable, "-P", "-c", _PROGRAM, device, json.dumps(asdict(job))],
        env=os.environ | {QUIET: "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    name = str(schedule)
    output = tuple(done.stderr.splitlines())
    if done.returncode < 0:
        lost = Gap(GapKind.RECORDING, 1, ("it was killed",), codes=(Ending.KILLED,))
        return ScheduleOutcome(name, Report((), gaps=(lost,)), done.returncode, output)
    try:
        answered = json.loads(done.stdout)
        if "refused" in answered:
            raise UsageError(answered["refused"])
        if "failed" in answered:
            raise CudatoolError(f"schedule {name}: {answered['failed']}")
        return ScheduleOutcome(name, report_from_json(answered["report"]), int(answered["status"]), output)
    except (ValueError, KeyError, TypeError) as error:
        raise CudatoolError(f"schedule {name}: no report, exit status {done.returncode}") from error


def answer() -> None:
    """In the process of a schedule: do the job that the arguments describe, and print its result."""
    device, job = sys.argv[1], _Job(**json.loads(sys.argv[2]))
    try:
        answered = _answer(device, job)
    except UsageError as error:
        answered = {"refused": str(error)}
    except CudatoolError as error:
        answered = {"failed": str(error)}
    click.echo(json.dumps(answered))


def _answer(device: str, job: _Job) -> dict[str, object]:
    checks = parse_checks(job.checks)
    proof = Proof(budget_s=job.budget_s, schedules=None)
    traces, status, _ = trace_of(tuple(job.workload), device, checks, proof, children=job.children)
    reports = checked(traces, checks, proof, accepts=lambda report: True)  # the caller knows what is accepted
    report = joined_processes(traces, reports)
    if status:
        report = report.of_failed(ended(status))
    return {"report": render_json(report), "status": status}
