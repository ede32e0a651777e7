"""A PTX module as something that can be launched."""

from __future__ import annotations

from collections.abc import Mapping

from cudatool.sim.jit.code import NativeCache
from cudatool.sim.jit.image import Image
from cudatool.sim.jit.kernel import JitKernel
from cudatool.sim.jit.source import GlobalVariable, Source

__all__ = ["JitModule", "load"]


def load(ptx: bytes, *, cache: NativeCache | None = None) -> JitModule:
    """Read a PTX module or a linked image. Nothing is translated before :meth:`JitKernel.prepare`.

    Parameters
    ----------
    ptx
        The text, with or without a terminating NUL.
    cache
        Where native code is kept between processes; None keeps none.

    Raises
    ------
    PtxError
        The text is not PTX.
    """
    return JitModule(Source(ptx, cache))


class JitModule:
    """A loaded module.

    Attributes
    ----------
    kernels
        By name, as PTX spells it.
    globals
        ``.global`` and ``.const`` variables that the module defines.
    functions
        What pointers to its device functions hold.
    """

    def __init__(self, source: Source) -> None:
        self._image = Image(source)
        facts = source.facts
        self.globals: dict[str, GlobalVariable] = {variable.name: variable for variable in facts.variables}
        self.functions = facts.functions
        self.kernels: Mapping[str, JitKernel] = {
            name: JitKernel(self._image, name, declared) for name, declared in facts.kernels.items()
        }

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Say where the module's global variables lie."""
        for name, number in self._image.numbers.items():
            if name in addresses:
                self._image.table[number] = addresses[name]
