"""Options of ``cudatool sanitize`` that prove findings: other orders of the work, other schedules of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cudatool.cli._command import option
from cudatool.errors import UsageError
from cudatool.runtime import host_function
from cudatool.sanitize import with_witnesses

if TYPE_CHECKING:
    from cudatool.sanitize import Report
    from cudatool.sim.observe.tape import Tape
    from cudatool.trace.model import Trace

__all__ = ["Proof", "proof_options"]

_F = TypeVar("_F", bound=Callable[..., Any])


class Proof:
    """The chosen options.

    Attributes
    ----------
    schedules
        The number of schedules to run the program under, None for the device's own schedule.
    budget_s
        Seconds for the replays that prove races, None if no witnesses are wanted.
    tape
        For the recording, None if this process searches for no witnesses.
    """

    def __init__(self, *, budget_s: float | None, schedules: int | None) -> None:
        self.budget_s = budget_s
        self.schedules = schedules
        self.tape: Tape | None = None
        if budget_s is not None and schedules is None:
            from cudatool.sim.observe.tape import Tape  # few runs need witnesses

            self.tape = Tape()

    def refuse_trace(self) -> None:
        """Raise an error for options that need the program itself, not its trace."""

        if self.budget_s is not None or self.schedules is not None:
            option = "--witness" if self.budget_s is not None else "--explore"
            raise UsageError(f"{option} needs the program: a trace does not say what its kernels compute")

    def begin(self) -> None:
        """Prepare for the recording, now that the driver is chosen and before the workload runs."""
        if self.tape is not None and not self.tape.refusal:
            host_function.repeatable = True
            self.tape.again[host_function.address] = host_function.repeat

    def proven(self, report: Report, trace: Trace) -> Report:
        """Return the report with witnesses, if requested."""

        if self.tape is None or self.budget_s is None:
            return report
        return with_witnesses(report, trace, self.tape, budget_s=self.budget_s)


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
        proof = Proof(budget_s=witness_budget if witness else None, schedules=explore)
        return function(*args, proof=proof, **kwargs)

    return command  # type: ignore[return-value]  # it takes the place of the function for click only
