"""Driver entry points: profiler control.

They mark what a profiler shall look at. The software device needs nothing done: what watches it
(:func:`cudatool.sim.subscribe`) sees the calls themselves.
"""

from __future__ import annotations

from cudatool.sim.abi import entry
from cudatool.sim.machine import current_context

__all__: list[str] = []


@entry("cuProfilerStart()")
def cuProfilerStart() -> None:
    current_context()


@entry("cuProfilerStop()")
def cuProfilerStop() -> None:
    current_context()
