"""Plain launches, which need little: nothing is checked or measured, and no block waits for another.

A *team* is the workers of one launch after the other. What their contexts hold is found out once for each plan, so that
another launch of it only has other arguments; C code lets the workers run, each on a host thread (``_workers.c``).
"""

from __future__ import annotations

import ctypes

from cudatool.sim import _queue, signals
from cudatool.sim.jit.code import STOP_SIGNAL
from cudatool.sim.jit.context import Context
from cudatool.sim.jit.launch import KernelFault, LaunchRun, NativeLaunch, Stopped, Worker, count_rounds
from cudatool.sim.jit.launch_options import LaunchShape

__all__ = ["Team", "TeamPlan", "run_plain", "why_ended"]

_KEPT = 16  # idle teams


class TeamPlan:
    """What plain launches of one shape need, but for their arguments, in code that is optimized or not.

    Attributes
    ----------
    threads
        Of the host that run them.
    """

    __slots__ = ("launch", "optimized", "shape", "threads")

    def __init__(self, launch: NativeLaunch, shape: LaunchShape, threads: int, optimized: bool) -> None:
        self.launch, self.shape, self.threads, self.optimized = launch, shape, threads, optimized


class _Calls(ctypes.Structure):
    """What C code needs of a launch (``struct cudatool_calls`` of ``_workers.h``)."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("arguments", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("next_block", ctypes.c_void_p),
        ("blocks", ctypes.c_uint64),
        ("spent", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
        ("params", ctypes.c_uint32),
    )


class Team:
    """Workers whose contexts are filled for a plan. C code reads `plan` and `calls`, an address."""

    def __init__(self, plan: TeamPlan) -> None:
        self.workers = [Worker() for _ in range(plan.threads)]
        self.next_block = ctypes.c_uint64()
        count = len(self.workers)
        self._arguments = (ctypes.c_void_p * count)(*(ctypes.addressof(worker.context) for worker in self.workers))
        self.addresses = (ctypes.c_uint64 * count)()
        self.numbers = (ctypes.c_int * count)()
        self._calls = _Calls(
            arguments=ctypes.addressof(self._arguments),
            addresses=ctypes.addressof(self.addresses),
            numbers=ctypes.addressof(self.numbers),
            next_block=ctypes.addressof(self.next_block),
            count=count,
            status=Context.status.offset,
            params=Context.params.offset,
        )
        self.calls = ctypes.addressof(self._calls)
        self.fill(plan)

    def fill(self, plan: TeamPlan) -> None:
        """Fill the contexts for a plan."""
        self.plan = plan
        going = LaunchRun(plan.launch, self.workers, None)
        for worker in self.workers:
            going.prepare(worker, None)
            worker.context.next_block = ctypes.addressof(self.next_block)
            worker.context.resume = worker.context.parked = 0
        self._calls.function, self._calls.blocks = plan.launch.entry, going.blocks
        spent = plan.launch.spent
        self._calls.spent = None if spent is None else ctypes.addressof(spent)

    def stopped(self) -> Stopped | None:
        """Return why a launch ended early; raise KernelFault if that was a fault."""
        for number, address in zip(self.numbers, self.addresses, strict=True):
            if number and number != STOP_SIGNAL:
                raise KernelFault(number, address)
        for worker in self.workers:
            worker.memory.current = worker.context.current
        return LaunchRun(self.plan.launch, self.workers, None).stopped()


def _make(plan: TeamPlan) -> Team:
    """Return a team for a plan for which none is ready: an idle one that was not used for long, if there are many."""
    if len(_queue.teams) >= _KEPT:
        found = next((team for team in _queue.teams if len(team.workers) == plan.threads), None)
        try:
            if found is not None:
                _queue.teams.remove(found)
                found.fill(plan)
                return found
        except ValueError:  # another thread was faster
            pass
    return Team(plan)


def run_plain(plan: TeamPlan, params: int, first: int = 0) -> tuple[Stopped | None, int]:
    """Do as :func:`.launch.run` for a launch that has the packed arguments at `params`.

    It begins with the block `first`, and may leave blocks (:attr:`.NativeLaunch.most_rounds`). Returns, beside why it
    was stopped, the first of these.

    Raises
    ------
    KernelFault
        The code touched memory that does not exist.
    """
    team = _queue.take_team(plan) or _make(plan)
    if _queue.run_team(team, params, first):
        return why_ended(team), first
    begun = team.next_block.value
    count_rounds(plan.launch, team.workers)
    _queue.teams.append(team)
    return None, begun


def why_ended(team: Team) -> Stopped | None:
    """Return why a team's launch ended early; raise KernelFault if that was a fault."""
    signals.check()
    return team.stopped()
