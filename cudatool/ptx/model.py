"""What a PTX module consists of: plain data, as the parser found it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cudatool.ptx.errors import PtxError
from cudatool.ptx.isa import TYPE_BYTES

__all__ = [
    "PROGRAMS",
    "Address",
    "Function",
    "Immediate",
    "Instruction",
    "Location",
    "Module",
    "Operand",
    "Pair",
    "PtxError",
    "Register",
    "Relocation",
    "Symbol",
    "Variable",
    "VectorOperand",
    "register_names",
    "type_bytes",
]

PROGRAMS: Final = "cudatool.programs"
"""The pragma of a kernel whose language gives a block one thread, as Triton does. The order of the threads that its
compiler makes of that one is the compiler's affair."""


def type_bytes(name: str) -> int:
    """Return the size of a fundamental type such as ``"f32"`` or ``"b8"``.

    >>> type_bytes("u64")
    8
    """
    return TYPE_BYTES[name]


# Elements of a vector register. ``.r .g .b .a`` mean the same as the first four (PTX ISA, "Vectors as Operands"); the
# ISA names no more, and an eight-wide vector is only used whole.
_ELEMENTS = (".x", ".y", ".z", ".w", ".4", ".5", ".6", ".7")


def register_names(name: str, count: int) -> tuple[str, ...]:
    """Return the registers that a vector register of `count` elements consists of; itself if it is none."""
    return tuple(name + element for element in _ELEMENTS[:count]) if count > 1 else (name,)


@dataclass(frozen=True, slots=True)
class Location:
    """A place in the CUDA source, from ``.loc``.

    Attributes
    ----------
    callers
        File and line of the calls that were inlined there, the innermost first; of many, the first ones.
    """

    file: int
    line: int
    column: int
    callers: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Register:
    """A register, declared or special (``%tid.x``), or the sink ``_``.

    Attributes
    ----------
    negated
        The ``!`` of a predicate.
    selector
        The part that a video instruction names: ``"h1"`` of ``%r1.h1``.
    """

    name: str
    negated: bool = False
    selector: str = ""


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. `bits` is the pattern of a hexadecimal float literal, whose width `width` is 32 or 64."""

    value: int | float
    width: int = 0
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable or parameter, a label or a function."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """``[base+offset]``. `base` is None for an absolute address.

    `coordinates` are what follows it in ``[texture, {x, y}]`` and ``[texture, sampler, {x, y}]``, in order.
    """

    base: Register | Symbol | None
    offset: int = 0
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class VectorOperand:
    """``{a, b, c, d}``."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: two destinations."""

    first: Register
    second: Register


Operand = Register | Immediate | Symbol | Address | VectorOperand | Pair


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes
    ----------
    opcode
        The first word: ``"ld"``.
    modifiers
        The rest, in order: ``("global", "nc", "f32")``. Most are a set; where order counts (``cvt``) it is kept.
    guard
        The predicate of ``@p`` or ``@!p``.
    line, location
        Where it stands in the PTX text, and in the CUDA source if the PTX says so.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    location: Location | None

    @property
    def name(self) -> str:
        """The instruction as PTX spells it: ``"ld.global.nc.f32"``."""
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Relocation:
    """8 bytes at `offset` of a variable hold the address of `symbol` plus `addend`."""

    offset: int
    symbol: str
    addend: int


@dataclass(slots=True)
class Variable:
    """A variable or parameter.

    Attributes
    ----------
    space
        ``"global"``, ``"const"``, ``"shared"``, ``"local"`` or ``"param"``; ``"reg"`` for a function's parameter that
        is a register.
    size
        Bytes; 0 for ``[]``, an array whose size the launch decides.
    initial
        Its first bytes; the rest is zero.
    pointer
        Whether a parameter is declared ``.ptr``.
    linkage
        ``"visible"``, ``"extern"``, ``"weak"``, ``"common"``; empty if only its module sees it.
    """

    name: str
    space: str
    type: str
    size: int
    align: int
    initial: bytes = b""
    relocations: tuple[Relocation, ...] = ()
    external: bool = False
    pointer: bool = False
    managed: bool = False
    linkage: str = ""

    @property
    def registers(self) -> tuple[str, ...]:
        """The registers of a parameter that is one, or that is a vector of them; none for what is in memory."""
        return register_names(self.name, self.size // type_bytes(self.type)) if self.space == "reg" else ()


@dataclass(slots=True)
class Function:
    """A kernel (``.entry``) or device function (``.func``).

    Attributes
    ----------
    registers
        Type of each register. A name that an inner scope declares again is made unique.
    variables
        Shared, local and call-parameter variables declared inside.
    labels
        Index into `instructions` at which each label stands.
    directives
        Performance directives: ``{"maxntid": (256, 1, 1)}``.
    pragmas
        The strings of its pragmas before its body. A compiler of PTX ignores those that it does not know.
    text
        Its PTX text, to key caches with.
    linkage
        As a variable's.
    """

    name: str
    is_kernel: bool
    params: tuple[Variable, ...]
    returns: tuple[Variable, ...]
    line: int
    registers: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    pragmas: tuple[str, ...] = ()
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    text: str = ""
    has_body: bool = True
    linkage: str = ""


@dataclass(slots=True)
class Module:
    """A PTX file.

    Attributes
    ----------
    files
        Path of each number that a :class:`Location` may name.
    preamble
        The text outside of all function bodies, to key caches with.
    register_counts
        Registers that a thread of a kernel takes as machine code, where a linker has said so.
    """

    version: tuple[int, int] = (0, 0)
    target: str = ""
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    preamble: str = ""
    register_counts: dict[str, int] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, Function]:
        """The ``.entry`` functions."""
        return {name: function for name, function in self.functions.items() if function.is_kernel}

    def kernel(self, name: str) -> Function:
        """Return a kernel that is defined here.

        Raises
        ------
        PtxError
            There is none of that name.
        """
        function = self.functions.get(name)
        if function is None or not function.is_kernel or not function.has_body:
            raise PtxError(f"the module has no kernel {name!r}")
        return function
