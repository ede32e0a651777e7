"""A PTX module as something that can be launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cudatool.ptx import Module, function_addresses, parse_image
from cudatool.sim.jit.kernel import JitKernel
from cudatool.sim.jit.kernel_text import Image
from cudatool.sim.jit.native import NativeCache

__all__ = ["GlobalVariable", "JitModule", "load"]


@dataclass(frozen=True, slots=True)
class GlobalVariable:
    """A variable that the driver must place in device memory.

    Attributes
    ----------
    initial
        Its first bytes; the rest is zero.
    relocations
        ``(offset, symbol, addend)``: the 8 bytes at `offset` hold the address of `symbol` plus `addend`.
    """

    name: str
    size: int
    align: int
    initial: bytes
    relocations: list[tuple[int, str, int]]
    constant: bool


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
    return JitModule(parse_image(ptx), cache)


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

    def __init__(self, module: Module, cache: NativeCache | None) -> None:
        self._image = Image(module, cache)
        self.globals: dict[str, GlobalVariable] = {
            name: GlobalVariable(
                name,
                variable.size,
                variable.align,
                variable.initial,
                [(r.offset, r.symbol, r.addend) for r in variable.relocations],
                variable.space == "const",
            )
            for name in self._image.numbers
            for variable in [module.variables[name]]
        }
        self.functions = function_addresses(module)
        self.kernels: Mapping[str, JitKernel] = {
            name: JitKernel(self._image, function) for name, function in module.kernels.items() if function.has_body
        }

    def bind(self, addresses: Mapping[str, int]) -> None:
        """Say where the module's global variables lie."""
        for name, number in self._image.numbers.items():
            if name in addresses:
                self._image.table[number] = addresses[name]
