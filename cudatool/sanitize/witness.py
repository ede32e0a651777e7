"""The proof of a race: two legal orders of the recorded work, and a byte in which their results differ.

The replay runs in a forked process, on the software device that recorded the work. What it does to memory, and to
itself, is its own affair.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from cudatool.sanitize.findings import Finding, FindingKind, Report, Witness
from cudatool.sanitize.search import Search, Tape
from cudatool.trace.model import Trace
from cudatool.units import counted

__all__ = ["apart", "with_witnesses", "witness_lines"]

_T = TypeVar("_T")
_log = logging.getLogger("cudatool.sanitize")
_GRACE_S = 15.0  # for the replay in progress when the budget ends
_RACES = (
    FindingKind.RACE_RAW,
    FindingKind.RACE_WAR,
    FindingKind.RACE_WAW,
    FindingKind.RACE_HOST,
    FindingKind.REUSE,
)


def with_witnesses(report: Report, trace: Trace, tape: Tape, *, budget_s: float) -> Report:
    """Return the report with a witness, or the reason why there is none, for each race.

    Parameters
    ----------
    report, trace
        Of the run that `tape` recorded.
    budget_s
        Seconds for all findings together.
    """
    races = [finding for finding in (*report.findings, *report.possible) if finding.kind in _RACES]
    found: dict[str, Witness | str] = {}
    if tape.refusal:
        found = {finding.fingerprint: tape.refusal for finding in races}
    elif races:
        found = _search_apart(races, trace, tape, budget_s)

    def proven(finding: Finding) -> Finding:
        if finding.kind not in _RACES:
            return dataclasses.replace(finding, no_witness="only races are replayed")
        result = found[finding.fingerprint]
        if isinstance(result, str):
            return dataclasses.replace(finding, no_witness=result)
        return dataclasses.replace(finding, witness=result)

    return dataclasses.replace(
        report,
        findings=tuple(proven(finding) for finding in report.findings),
        possible=tuple(proven(finding) for finding in report.possible),
    )


def _search_apart(races: list[Finding], trace: Trace, tape: Tape, budget_s: float) -> dict[str, Witness | str]:
    """Return what is found, by fingerprint."""
    tape.prepare()
    deadline = time.monotonic() + budget_s

    def search() -> Iterator[tuple[str, Witness | str]]:
        replays = Search(trace, tape)
        for number, finding in enumerate(races):
            now = time.monotonic()
            share = (deadline - now) / (len(races) - number)
            yield finding.fingerprint, replays.witness(finding, now + share)

    found = dict(apart(tape, search, deadline + _GRACE_S))
    missing = "the replay did not end, or crashed"
    return {finding.fingerprint: found.get(finding.fingerprint, missing) for finding in races}


def apart(tape: Tape, work: Callable[[], Iterator[_T]], until: float) -> Iterator[_T]:
    """Yield what `work` yields in a forked process, which ends then, or at the time `until`, or if it breaks."""
    from multiprocessing.connection import Pipe

    receiver, sender = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on: forking while there are threads
        process = tape.fork()
    if not process:
        try:
            gc.disable()  # no handle may be destroyed here: the driver is not for forked processes
            for result in work():
                sender.send(result)
        except Exception:
            _log.exception("the replay broke")
        finally:
            sender.close()
            os._exit(0)
    sender.close()
    try:
        while receiver.poll(max(until - time.monotonic(), 0)):
            yield receiver.recv()
    except EOFError:
        pass
    finally:
        receiver.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


# ---- telling it ----


def witness_lines(finding: Finding) -> Iterator[tuple[str, str]]:
    """Yield what a report says of the proof of a finding, each line with its label: nothing if none was looked for."""
    witness = finding.witness
    if finding.no_witness:
        yield "witness", f"none: {finding.no_witness}"
    if witness is None:
        return
    shown = len(witness.order_a)
    part = "" if shown == witness.steps else f", of which {shown} are shown,"
    operations = counted(witness.steps, "operation")
    yield "witness", f"two legal orders of {operations}{part} differ in {witness.observed_at}"
    if more := witness.also_exchanged:
        yield "", f"{counted(more, 'other racing pair')} changed places with the one that is marked"
    for number, order, held in ((1, witness.order_a, witness.bytes_a), (2, witness.order_b, witness.bytes_b)):
        label = f"order {number}"
        for step in order:
            mark = "*" if step.record in witness.exchanged else " "
            yield label, f"{mark} {step.operation} on {step.agent} ({step.location})"
            label = ""
        if held:
            yield "", f"0x{witness.address:x}: {held}{_as_numbers(held)}"


def _as_numbers(held: str) -> str:
    """Return the first word as numbers, of which one may be what the program means."""
    word = bytes.fromhex(held)[:4]
    if len(word) < 4:
        return ""
    return f" (int32 {int.from_bytes(word, 'little', signed=True)}, float32 {struct.unpack('<f', word)[0]:g})"
