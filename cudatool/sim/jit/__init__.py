"""Kernels: PTX to native code, and running it over a grid.

:func:`load` reads a module; a :class:`JitKernel` is translated when it is first prepared or launched. Device addresses
are host addresses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cudatool.sim.jit.footprint import Footprint
from cudatool.sim.jit.host_places import HostPlaces
from cudatool.sim.jit.instrument import DefectCode, Instrument
from cudatool.sim.jit.kernel import JitKernel
from cudatool.sim.jit.launch import (
    KernelAssert,
    KernelBadFree,
    KernelDeadlock,
    KernelError,
    KernelFault,
    KernelStackOverflow,
    KernelTimeout,
    KernelTrap,
)
from cudatool.sim.jit.launch_options import LaunchOptions, LaunchShape
from cudatool.sim.jit.module import JitModule, load
from cudatool.sim.jit.race_engine import RaceReason
from cudatool.sim.jit.source import Conduct, GlobalVariable, Param, Source
from cudatool.sim.jit.unsupported import UnsupportedInstruction

if TYPE_CHECKING:
    from cudatool.sim.jit.shadow import Found, Shadow

__all__ = [
    "Conduct",
    "DefectCode",
    "Footprint",
    "Found",
    "GlobalVariable",
    "HostPlaces",
    "Instrument",
    "JitKernel",
    "JitModule",
    "KernelAssert",
    "KernelBadFree",
    "KernelDeadlock",
    "KernelError",
    "KernelFault",
    "KernelStackOverflow",
    "KernelTimeout",
    "KernelTrap",
    "LaunchOptions",
    "LaunchShape",
    "Param",
    "RaceReason",
    "Shadow",
    "Source",
    "UnsupportedInstruction",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in ("Found", "Shadow"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # When it is first used: it loads NumPy, which only the checkers need.
    return getattr(import_module("cudatool.sim.jit.shadow"), name)
