"""A kernel's PTX: as it is declared, with its calls inlined, and as it is translated; and what lines of CUDA it is."""

from __future__ import annotations

import os
import re
from functools import cached_property

from cudatool.ptx import FRAME_SCALE, Function, Instruction, PtxError, Symbol, merge_calls
from cudatool.sim.jit import asynchronous, matrix
from cudatool.sim.jit.context import MAX_STACK, block_shared_bytes
from cudatool.sim.jit.copies import separate_copies
from cudatool.sim.jit.image import Image
from cudatool.sim.jit.layout import Layout
from cudatool.sim.jit.local_arrays import in_registers
from cudatool.sim.jit.progress import insert_yields
from cudatool.sim.jit.regions import REPEATABLE, goes_by_rows
from cudatool.sim.jit.runs import join_products
from cudatool.sim.jit.steps import insert_steps
from cudatool.sim.jit.system import SYSTEM
from cudatool.sim.jit.unsupported import UnsupportedInstruction
from cudatool.sim.jit.ways import barriers_on_each_way
from cudatool.source_text import SourceLine

__all__ = ["KernelText"]

# Files of installed packages, of the system, and of NVIDIA's headers wherever they were put.
_OF_A_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|^/(?:usr|opt)/|/targets/[^/]+/include/|/(?:cccl|cub|thrust|cooperative_groups)/"
)

del asynchronous, matrix  # they add to SUSPENSIONS, which must be whole where no kernel is translated, too


class KernelText:
    """The PTX of one kernel. Nothing is looked at before it is asked for.

    Attributes
    ----------
    declared
        The kernel as it stands in the module.
    name
        As PTX spells it.
    """

    def __init__(self, image: Image, declared: Function) -> None:
        self.image = image
        self.declared = declared
        self.name = declared.name
        self._inlined: Function | None = None
        self._refused: UnsupportedInstruction | None = None
        self._layout: Layout | None = None

    @property
    def function(self) -> Function:
        """The kernel with its calls inlined.

        Raises
        ------
        UnsupportedInstruction
            It has calls that cannot be followed.
        """
        if self._refused is not None:
            raise self._refused
        if self._inlined is None:
            try:
                merged = merge_calls(self.image.ptx, self.declared, FRAME_SCALE * MAX_STACK, self.image.calls)
                self._inlined = insert_yields(merged)
            except PtxError as error:
                self._refused = UnsupportedInstruction(f"call ({error.args[0]})", self.name, None, error.line)
                raise self._refused from None
        return self._inlined

    @cached_property
    def stepping(self) -> Function:
        """What is translated: its threads step together in some loops, and make rows of matrix operations at once."""
        return join_products(insert_steps(separate_copies(self.function, REPEATABLE)))

    @cached_property
    def plain(self) -> Function:
        """What is translated if nothing is checked or measured: without steps where rows go around loops together."""
        layout = self.plain_layout
        shared = layout.param_offsets.keys() | layout.shared.keys() | layout.globals.keys()
        return barriers_on_each_way(self._with_steps(), shared, REPEATABLE)

    def _with_steps(self) -> Function:
        function = join_products(separate_copies(self._unchecked, REPEATABLE))
        if goes_by_rows(function, self.plain_layout):
            return function
        if self._unchecked is self.function:
            return self.stepping
        return join_products(insert_steps(separate_copies(self._unchecked, REPEATABLE)))

    @cached_property
    def _unchecked(self) -> Function:
        """The kernel with small local arrays in registers, where no checker looks at them."""
        return in_registers(self.function)

    @property
    def layout(self) -> Layout:
        """Where the kernel's variables lie."""
        if self._layout is None:
            self._layout = self._layout_of(self.function)
        return self._layout

    @cached_property
    def plain_layout(self) -> Layout:
        """Where the variables of :attr:`plain` lie: in local memory there are fewer."""
        return self._layout_of(self._unchecked)

    def _layout_of(self, function: Function) -> Layout:
        ptx = self.image.ptx
        layout = Layout.of(function, ptx.variables, self.image.numbers)
        layout.kernels = frozenset(ptx.kernels)
        return layout

    @cached_property
    def system_calls(self) -> frozenset[str]:
        """The functions of the system that it calls, such as ``"vprintf"``."""
        calls = (i for i in self.function.instructions if i.opcode == "call")
        named = (o.name for i in calls for o in i.operands[:2] if isinstance(o, Symbol))
        return frozenset(named) & SYSTEM.keys()

    @cached_property
    def lines(self) -> int:
        """One more than the last line of PTX that it has instructions of."""
        return 1 + max((instruction.line for instruction in self.function.instructions), default=0)

    def where(self, instruction: Instruction) -> SourceLine | None:
        """Return the line of an instruction in the CUDA source, None if the PTX does not say.

        Of code that was inlined from a library, such as CUB, it is the line of the user's code that calls it.
        """
        location = instruction.location
        if location is None:
            return None
        files = self.image.ptx.files
        places = [(files.get(file, "?"), line) for file, line in ((location.file, location.line), *location.callers)]
        file, line = next((place for place in places if not _OF_A_LIBRARY.search(place[0])), places[0])
        if os.path.isdir(os.path.dirname(file)) and not os.path.exists(file):
            # NVRTC puts the working directory in front of the names of programs that are not in files.
            file = os.path.basename(file)
        return SourceLine(file, line)

    def find_source(self, line: int) -> SourceLine | None:
        """Return the line of the CUDA source for a line of the PTX, None if the PTX does not say."""
        at = next((i for i in self.function.instructions if i.line == line), None)
        return self.where(at) if at else None

    def source_of(self, line: int) -> SourceLine:
        """Return the line of the CUDA source for a line of the PTX, that line itself if the PTX does not say."""
        return self.find_source(line) or SourceLine("", line)

    def address_of(self, symbol: Symbol) -> int | None:
        """Return the address of a variable in device memory, or where it lies in shared memory."""
        if symbol.name in self.layout.shared:
            return self.layout.shared[symbol.name] + symbol.offset
        if symbol.name in self.layout.globals:
            return self.image.table[self.layout.globals[symbol.name]] + symbol.offset
        return None

    def shared_bytes(self, dynamic: int) -> int:
        """Return the shared memory of a block that is launched with so many bytes of dynamic shared memory."""
        return block_shared_bytes(self.layout.dynamic_offset, dynamic)
