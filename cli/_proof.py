"""Options of ``cudatool sanitize`` that prove findings: other orders of the work, other schedules of the program."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cudatool.cli._command import option
from cudatool.errors import UsageError
from cudatool.runtime import host_function
from cudatool.sanitize import with_witnesses
from cudatool.sanitize.explore import explore
from cudatool.trace import reader
from cudatool.workload import Start, Workload

if TYPE_CHECKING:
    from cudatool.sanitize import Report
    from cudatool.sim.observe.tape import Tape
    from cudatool.trace.model import Trace

__all__ = ["Proof", "proof_options"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Proof:
    """What was asked for. `tape` is for the recording, None if no witnesses are wanted."""

    def __init__(self, *, witness: bool, witness_budget: float, explore: int | None) -> None:
        self._budget_s = witness_budget
        self._number = explore
        self._witness = witness
        self.tape: Tape | None = None
        if witness and explore is None:
            from cudatool.sim.observe.tape import Tape  # few runs ask for witnesses

            self.tape = Tape()

    def refuse_trace(self) -> None:
        """Complain if anything was asked for that only the program itself can give."""

        if self._witness or self._number is not None:
            option = "--witness" if self._witness else "--explore"
            raise UsageError(f"{option} needs the program: a trace does not say what its kernels compute")

    @property
    def explores(self) -> bool:
        """Whether the program is to run under several schedules."""
        return self._number is not None

    def explored(self, device: str | None, checks: str, workload: tuple[str, ...]) -> tuple[Report, int]:
        """Return one report of the program under all schedules, and its first exit status that is not 0."""

        assert self._number is not None
        program = Workload.parse(workload, "sanitize")
        if program.start is Start.SCRIPT and os.path.isfile(program.target) and reader.is_trace(program.target):
            self.refuse_trace()
        program.check()
        proof = ["--witness", "--witness-budget", f"{self._budget_s:g}"] if self._witness else []
        report = explore(
            device,
            self._number,
            ["--checks", checks, *proof, *workload],
            tell=lambda line: click.echo(line, err=True),
        )
        return report, next((run.status for run in report.schedules if run.status), 0)

    def begin(self) -> None:
        """Prepare for the recording, now that the driver is chosen and before the workload runs."""
        if self.tape is not None and not self.tape.refusal:
            host_function.repeatable = True
            self.tape.again[host_function.address] = host_function.repeat

    def proven(self, report: Report, trace: Trace) -> Report:
        """Return the report with witnesses, if they are wanted."""

        return report if self.tape is None else with_witnesses(report, trace, self.tape, budget_s=self._budget_s)


def proof_options(function: _F) -> _F:
    """Add the options to a command, which gets a :class:`Proof` for them."""

    @option("--witness", is_flag=True, group="Proof", help="Prove races: replay legal orders until the results differ.")
    @option(
        "--witness-budget",
        type=click.FloatRange(0, min_open=True),
        default=60.0,
        show_default=True,
        metavar="SECONDS",
        group="Proof",
        help="For all replays together.",
    )
    @option(
        "--explore",
        type=click.IntRange(1, 10_000),
        metavar="N",
        group="Proof",
        help="Run the program under N schedules of the software device; report what any of them showed.",
    )
    @functools.wraps(function)
    def command(*args: Any, witness: bool, witness_budget: float, explore: int | None, **kwargs: Any) -> Any:
        proof = Proof(witness=witness, witness_budget=witness_budget, explore=explore)
        return function(*args, proof=proof, **kwargs)

    return command  # type: ignore[return-value]  # it takes the place of the function for click only
