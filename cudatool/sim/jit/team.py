"""Plain launches, which need little: nothing is checked or measured, and no block waits for another.

A *team* is the workers of one launch after the other. What their contexts hold is found out once for each plan, so that
another launch of it only has other arguments; C code lets the workers run, each on a host thread (``_workers.c``).
"""

from __future__ import annotations

import ctypes

from cudatool.sim import _calls, signals
from cudatool.sim.jit.context import Context
from cudatool.sim.jit.launch import KernelFault, NativeLaunch, Run, Stopped, Worker, count_rounds
from cudatool.sim.jit.native import STOP_SIGNAL

__all__ = ["run_plain"]

_KEPT = 4


class _Calls(ctypes.Structure):
    """What C code needs of a launch (``struct cudatool_calls`` of ``_workers.c``)."""

    _fields_ = (
        ("function", ctypes.c_uint64),
        ("arguments", ctypes.c_void_p),
        ("addresses", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("next_block", ctypes.c_void_p),
        ("blocks", ctypes.c_uint64),
        ("count", ctypes.c_uint32),
        ("status", ctypes.c_uint32),
    )


class _Team:
    """Workers whose contexts are filled for a plan."""

    def __init__(self, plan: NativeLaunch, count: int) -> None:
        self.plan = plan
        self.workers = [Worker() for _ in range(count)]
        self.next_block = ctypes.c_uint64()
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
        )
        self.calls = ctypes.addressof(self._calls)
        self.fill(plan)

    def fill(self, plan: NativeLaunch) -> None:
        """Fill the contexts for a plan."""
        self.plan = plan
        going = Run(plan, self.workers, None)
        for worker in self.workers:
            going.prepare(worker, None)
            worker.context.next_block = ctypes.addressof(self.next_block)
            worker.context.resume = worker.context.parked = 0
        self._calls.function, self._calls.blocks = plan.entry, going.blocks

    def stopped(self) -> Stopped | None:
        """Return why a launch ended early; raise KernelFault if that was a fault."""
        for number, address in zip(self.numbers, self.addresses, strict=True):
            if number and number != STOP_SIGNAL:
                raise KernelFault(number, address)
        for worker in self.workers:
            worker.memory.current = worker.context.current
        return Run(self.plan, self.workers, None).stopped()


_teams: list[_Team] = []


def _take(plan: NativeLaunch, count: int) -> _Team:
    """Return a team for a plan that nothing else uses."""
    found = next((team for team in _teams if team.plan is plan), None)
    if found is None and len(_teams) >= _KEPT:
        found = next((team for team in _teams if len(team.workers) == count), None)
    if found is None:
        return _Team(plan, count)
    try:
        _teams.remove(found)
    except ValueError:  # another thread was faster
        return _Team(plan, count)
    if found.plan is not plan:
        found.fill(plan)
    return found


def run_plain(plan: NativeLaunch, count: int, params: int) -> Stopped | None:
    """Do as :func:`.launch.run` on `count` host threads, for a launch that has the packed arguments at `params`.

    Raises
    ------
    KernelFault
        The code touched memory that does not exist.
    """
    team = _take(plan, count)
    for worker in team.workers:
        worker.context.params = params
    team.next_block.value = 0
    if not _calls.guarded_calls(team.calls, signals.interrupts()):
        count_rounds(plan, team.workers)
        _teams.append(team)
        return None
    signals.check()
    return team.stopped()
