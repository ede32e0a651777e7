"""What the kernels of a module share on one device."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudatool.ptx import Module, ModuleCalls
    from cudatool.sim.jit.source import Source

__all__ = ["Image"]


class Image:
    """A module on a device.

    Attributes
    ----------
    source
        Its PTX.
    numbers
        Where each of its global variables stands in the table of their addresses, which `table` is.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.numbers = {variable.name: number for number, variable in enumerate(source.facts.variables)}
        self.table = (ctypes.c_uint64 * max(len(self.numbers), 1))()

    @property
    def ptx(self) -> Module:
        """The module as it was parsed."""
        return self.source.parsed

    @property
    def calls(self) -> ModuleCalls:
        """Which of its functions call which."""
        return self.source.calls
