"""Which memory a kernel may read, write and update atomically, from its PTX alone.

:func:`infer_accesses` says it for each parameter, field of a by-value struct and module variable. The result errs on
one side: a kernel may touch less than it says, never more, unless an :class:`AccessDoubt` says that it may touch
anything. That rests on what C++ demands of programs, too: an address that is a pointer plus a number lies in what the
pointer points to.

:func:`accesses_of_launch` applies it to the argument values of one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import or_

from cudatool.ptx import provenance
from cudatool.ptx.dataflow import HARMLESS, Dataflow, Scope
from cudatool.ptx.effects import MemoryOperand, memory_operands
from cudatool.ptx.isa import Mode, opcode_of
from cudatool.ptx.model import Function, Instruction, Module, Operand, PtxError, Symbol
from cudatool.ptx.operands import GENERIC, call_parts, elements
from cudatool.ptx.provenance import ANYWHERE, Origin, OriginKind, Sum

__all__ = [
    "AccessDoubt",
    "AccessRange",
    "AddressAccess",
    "Base",
    "BaseKind",
    "FieldAccess",
    "KernelAccesses",
    "LaunchAccesses",
    "ParameterAccess",
    "VariableAccess",
    "accesses_of_launch",
    "infer_accesses",
    "is_number",
    "pointer_offsets",
    "pointers_at",
]


class AccessDoubt(StrEnum):
    """Why a kernel may access memory that the inference does not name."""

    UNKNOWN_ADDRESS = "unknown address"
    """An address was computed in a way that is not followed."""
    LOADED_POINTER = "loaded pointer"
    """A pointer that was read from memory is followed."""
    INDIRECT_CALL = "indirect call"
    EXTERNAL_CALL = "external call"
    """A function is called whose code the module does not contain."""
    TEXTURE = "texture or surface"
    TENSOR_MAP = "tensor map"


class BaseKind(StrEnum):
    """What an address is based on."""

    PARAMETER = "parameter"
    """A pointer among the kernel's arguments."""
    LOADED = "loaded"
    """A pointer in memory that a parameter or variable leads to."""
    VARIABLE = "variable"
    """A ``.global`` or ``.const`` variable of the module."""


@dataclass(frozen=True, slots=True, order=True)
class Base:
    """One thing that an address may be based on.

    Attributes
    ----------
    name
        Of the parameter or variable; empty for a pointer whose way into the kernel is not known.
    offset
        Where in the parameter the pointer's 8 bytes lie; None if anywhere in it.
    """

    kind: BaseKind
    name: str
    offset: int | None = 0


@dataclass(frozen=True, slots=True)
class AddressAccess:
    """One form of address, and what is done there.

    Attributes
    ----------
    bases
        The address is an index plus one of these; which one may depend on the arguments, as a 64-bit parameter can be
        a pointer or an index. Empty if nothing is known.
    widths
        Bytes that one thread's instruction accesses, ascending; 0 where the instruction does not tell.
    """

    bases: tuple[Base, ...]
    mode: Mode
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FieldAccess:
    """What a kernel does with a pointer that it is given.

    Attributes
    ----------
    offset
        Where in the parameter the pointer lies, bytes.
    mode
        What is done to the memory that it points to.
    loaded_mode
        What is done through pointers that are read from that memory.
    read_widths, write_widths, atomic_widths
        Bytes that one thread's instruction accesses, ascending; 0 where the instruction does not tell.
    escapes
        Whether the pointer itself is stored to memory, or passed to code that is not known.
    """

    offset: int
    mode: Mode
    loaded_mode: Mode
    read_widths: tuple[int, ...]
    write_widths: tuple[int, ...]
    atomic_widths: tuple[int, ...]
    escapes: bool


@dataclass(frozen=True, slots=True)
class ParameterAccess:
    """A kernel parameter and the pointers in it that the kernel uses.

    Attributes
    ----------
    offset, size
        Where it lies in the packed arguments of a launch, bytes.
    type
        As PTX spells it, without its dot; ``"b8"`` for the bytes of a struct.
    declared_pointer
        Whether PTX says ``.ptr``. Few compilers do.
    fields
        By offset. Empty if nothing in the parameter is used as an address.
    """

    name: str
    offset: int
    size: int
    type: str
    declared_pointer: bool
    fields: tuple[FieldAccess, ...]

    @property
    def mode(self) -> Mode:
        """What is done to the memory that the parameter's pointers point to."""
        return _all_of(one.mode for one in self.fields)


@dataclass(frozen=True, slots=True)
class VariableAccess:
    """What a kernel does to a variable of its module, and through the pointers in it."""

    name: str
    mode: Mode
    loaded_mode: Mode


@dataclass(frozen=True, slots=True)
class KernelAccesses:
    """What a kernel may access.

    Attributes
    ----------
    parameters
        All of them, in order.
    variables
        The ``.global`` and ``.const`` variables that it accesses, by name.
    accesses
        Every form of address once; what a launch is judged by.
    doubts
        Why it may access more than that. Empty means that it does not.
    """

    kernel: str
    parameters: tuple[ParameterAccess, ...]
    variables: tuple[VariableAccess, ...]
    accesses: tuple[AddressAccess, ...]
    doubts: frozenset[AccessDoubt]

    @property
    def may_find_pointers(self) -> bool:
        """Whether there are arguments for which it may access memory that none of them points to."""
        known = (BaseKind.PARAMETER, BaseKind.VARIABLE)
        return bool(self.doubts) or any(
            not access.bases or any(base.kind not in known for base in access.bases) for access in self.accesses
        )


def infer_accesses(module: Module, kernel: str) -> KernelAccesses:
    """Return what a kernel of a parsed module may access.

    Raises
    ------
    PtxError
        The module has no such kernel.
    """
    return _Collector(module, module.kernel(kernel)).result()


def pointers_at(module: Module, kernel: str, line: int, parameter_values: bytes) -> tuple[int, ...]:
    """Return the arguments that the address of an access may be a pointer's of, plus an index.

    Parameters
    ----------
    line
        Of the PTX: the instruction that accesses memory. 0 is any that does.
    parameter_values
        The packed arguments of a launch, as :func:`accesses_of_launch` takes them.
    """
    collector = _Collector(module, module.kernel(kernel), line)
    found: dict[int, None] = {}
    for parameter in collector.result().parameters:
        for base in sorted(collector.by_base):
            if base.kind is BaseKind.PARAMETER and base.name == parameter.name:
                found.update(dict.fromkeys(_pointers(parameter, base.offset, parameter_values)))
    return tuple(found)


_PUBLIC_KINDS = {
    OriginKind.PARAMETER: BaseKind.PARAMETER,
    OriginKind.LOADED: BaseKind.LOADED,
    OriginKind.VARIABLE: BaseKind.VARIABLE,
}


class _Collector:
    """Reads accesses, escapes and doubts off the solved data flow, of the instructions at one `line` if given."""

    def __init__(self, module: Module, kernel: Function, line: int = 0) -> None:
        self.module = module
        self.kernel = kernel
        self.flow = Dataflow(module, kernel)
        self.by_bases: dict[tuple[Base, ...], dict[Mode, set[int]]] = {}
        self.by_base: dict[Base, dict[Mode, set[int]]] = {}
        self.escaped: set[Base] = set()
        self.doubts: set[AccessDoubt] = set()
        for scope in self.flow.scopes:
            for instruction in scope.function.instructions:
                if not line or instruction.line == line:
                    self.visit(scope, instruction)

    def visit(self, scope: Scope, i: Instruction) -> None:
        if i.opcode == "call":
            self.visit_call(scope, i)
        elif opcode_of(i.opcode).uses_handle:
            self.doubts.add(AccessDoubt.TEXTURE)
        if "tensor" in i.modifiers:
            self.doubts.add(AccessDoubt.TENSOR_MAP)
        for access in memory_operands(i):
            self.visit_access(scope, access)
            if access.mode & (Mode.WRITE | Mode.ATOMIC) and access.space in ("global", GENERIC):
                for operand in i.operands:
                    if operand is not access.address:
                        self.escape(scope, operand)

    def visit_access(self, scope: Scope, access: MemoryOperand) -> None:
        if access.space not in ("global", "const", GENERIC):
            return
        alternatives = provenance.whole(self.flow.address(scope, access.address)) or [frozenset()]
        for terms in alternatives:
            bases = self.flow.bases(terms)
            self.flow.spend(len(bases))
            if not bases:
                self.doubts.add(AccessDoubt.UNKNOWN_ADDRESS)
                self.note((), access)
            # Shared and local memory, parameters and the device's heap are no memory that others see.
            public = tuple(sorted(_base(one) for one in bases if one.kind in _PUBLIC_KINDS))
            if public:
                self.note(public, access)
                if all(base.kind is BaseKind.LOADED for base in public):
                    self.doubts.add(AccessDoubt.LOADED_POINTER)

    def note(self, bases: tuple[Base, ...], access: MemoryOperand) -> None:
        for modes in (self.by_bases.setdefault(bases, {}), *(self.by_base.setdefault(base, {}) for base in bases)):
            for mode in access.mode:
                modes.setdefault(mode, set()).add(access.width)

    def visit_call(self, scope: Scope, i: Instruction) -> None:
        _, target, arguments = call_parts(i)
        if not isinstance(target, Symbol):
            self.doubts.add(AccessDoubt.INDIRECT_CALL)
        else:
            callee = self.module.functions.get(target.name)
            if (callee is not None and callee.has_body) or target.name in HARMLESS:
                return
            self.doubts.add(AccessDoubt.EXTERNAL_CALL)
        for argument in arguments:
            for value in self.flow.argument(scope, argument).values():
                self.escape_terms(provenance.whole(value))

    def escape(self, scope: Scope, operand: Operand) -> None:
        for one in elements(operand):
            self.escape_terms(provenance.whole(self.flow.value(scope, one)))

    def escape_terms(self, alternatives: list[Sum]) -> None:
        for terms in alternatives:
            self.escaped.update(_base(one) for one in self.flow.bases(terms) if one.kind is OriginKind.PARAMETER)

    # ---- the result ----

    def result(self) -> KernelAccesses:
        accesses = []
        for bases, modes in self.by_bases.items():
            widths = sorted(set().union(*modes.values()))
            accesses.append(AddressAccess(bases, _all_of(modes), tuple(widths)))
        accesses.sort(key=lambda access: [(b.kind, b.name, -1 if b.offset is None else b.offset) for b in access.bases])
        parameters, offset = [], 0
        for parameter in self.kernel.params:
            offset = -(-offset // parameter.align) * parameter.align
            fields = self.fields(parameter.name, parameter.size)
            parameters.append(
                ParameterAccess(parameter.name, offset, parameter.size, parameter.type, parameter.pointer, fields)
            )
            offset += parameter.size
        return KernelAccesses(
            self.kernel.name, tuple(parameters), self.variables(), tuple(accesses), frozenset(self.doubts)
        )

    def fields(self, name: str, size: int) -> tuple[FieldAccess, ...]:
        found = []
        offsets = {base.offset for base in (*self.by_base, *self.escaped) if base.name == name}
        if None in offsets:
            offsets.update(range(0, size - 7, 8))
        for offset in sorted(one for one in offsets if one is not None):
            modes = self.modes_of(BaseKind.PARAMETER, name, offset)
            loaded = _all_of(self.modes_of(BaseKind.LOADED, name, offset))
            escapes = not self.escaped.isdisjoint(Base(BaseKind.PARAMETER, name, at) for at in (offset, None))
            read, write, atomic = (tuple(sorted(modes.get(mode, ()))) for mode in Mode)
            found.append(FieldAccess(offset, _all_of(modes), loaded, read, write, atomic, escapes))
        return tuple(found)

    def modes_of(self, kind: BaseKind, name: str, offset: int | None) -> dict[Mode, set[int]]:
        """Return the widths by mode of all accesses that may be based on a pointer."""
        found: dict[Mode, set[int]] = {}
        for base in {Base(kind, name, offset), Base(kind, name, None)}:
            for mode, widths in self.by_base.get(base, {}).items():
                found.setdefault(mode, set()).update(widths)
        return found

    def variables(self) -> tuple[VariableAccess, ...]:
        names = {base.name for base in self.by_base if base.name in self.module.variables}
        return tuple(
            VariableAccess(
                name,
                _all_of(self.modes_of(BaseKind.VARIABLE, name, 0)),
                _all_of(self.modes_of(BaseKind.LOADED, name, None)),
            )
            for name in sorted(names)
        )


def _all_of(modes: Iterable[Mode]) -> Mode:
    return reduce(or_, modes, Mode(0))


def _base(origin: Origin) -> Base:
    return Base(_PUBLIC_KINDS[origin.kind], origin.name, None if origin.offset == ANYWHERE else origin.offset)


# ---- one launch ----

_LOWEST_ADDRESS = 1 << 32


@dataclass(frozen=True, slots=True)
class AccessRange:
    """Memory that a launch may access: a whole allocation, as an inference does not know which part."""

    address: int
    size: int
    mode: Mode


@dataclass(frozen=True, slots=True)
class LaunchAccesses:
    """What one launch may access.

    Attributes
    ----------
    ranges
        By address, one for each allocation.
    variables
        Variables of the kernel's module, with what is done to each.
    unknown
        Whether it may access more than that.
    doubts
        Why, if so.
    """

    ranges: tuple[AccessRange, ...]
    variables: tuple[tuple[str, Mode], ...]
    unknown: bool
    doubts: frozenset[AccessDoubt]


def pointer_offsets(inference: KernelAccesses) -> tuple[int, ...]:
    """Return where in the packed arguments of a launch those lie on which :func:`accesses_of_launch` depends.

    What that returns is the same for two launches of a kernel if `find_allocation` returns the same for each of these
    8-byte values, and if the same ones are numbers.
    """
    places = {parameter.name: parameter for parameter in inference.parameters}
    bases = {base for access in inference.accesses for base in access.bases if base.kind is BaseKind.PARAMETER}
    return tuple(sorted({start for base in bases for start in _offsets(places[base.name], base.offset)}))


def is_number(argument: int) -> bool:
    """Return whether an argument that may be a pointer is none: CUDA places no memory below 4 GiB."""
    return argument < _LOWEST_ADDRESS


def accesses_of_launch(
    inference: KernelAccesses,
    parameter_values: bytes,
    find_allocation: Callable[[int], tuple[int, int] | None],
) -> LaunchAccesses:
    """Return what a launch with these arguments may access.

    Parameters
    ----------
    parameter_values
        The packed arguments, laid out as :attr:`ParameterAccess.offset` says.
    find_allocation
        Given an address, returns address and size of the live allocation that it lies in, or None.

    Notes
    -----
    An address that may be based on one of several arguments counts as known when at least one of them is the address
    of an allocation, and all that are count as accessed. An argument below 4 GiB is taken for a number or a null
    pointer, which is not accessed: CUDA places no memory there. A pointer that is read from memory is not
    followed: the launch is then `unknown`. A pointer just past the end of an allocation counts as one to what begins
    there.

    Raises
    ------
    PtxError
        There are fewer argument bytes than the kernel's parameters need.
    """
    needed = max((parameter.offset + parameter.size for parameter in inference.parameters), default=0)
    if len(parameter_values) < needed:
        raise PtxError(f"{inference.kernel} takes {needed} bytes of arguments, {len(parameter_values)} given")
    places = {parameter.name: parameter for parameter in inference.parameters}
    modes: dict[tuple[int, int], Mode] = {}
    doubts = set(inference.doubts)
    doubts -= {AccessDoubt.UNKNOWN_ADDRESS, AccessDoubt.LOADED_POINTER}  # judged below, for these arguments
    for access in inference.accesses:
        hits: list[tuple[int, int]] = []
        missed = not access.bases
        for base in access.bases:
            if base.kind is BaseKind.VARIABLE:
                missed = False
            if base.kind is not BaseKind.PARAMETER:
                continue
            for value in _pointers(places[base.name], base.offset, parameter_values):
                found = find_allocation(value)
                if found is not None:
                    hits.append(found)
                elif not is_number(value):
                    missed = True
        for hit in hits:
            modes[hit] = modes.get(hit, Mode(0)) | access.mode
        if hits:
            continue
        kinds = {base.kind for base in access.bases}
        if BaseKind.LOADED in kinds:
            doubts.add(AccessDoubt.LOADED_POINTER)
        elif missed and BaseKind.VARIABLE not in kinds:
            doubts.add(AccessDoubt.UNKNOWN_ADDRESS)
    return LaunchAccesses(
        tuple(AccessRange(address, size, mode) for (address, size), mode in sorted(modes.items())),
        tuple((variable.name, variable.mode) for variable in inference.variables if variable.mode),
        bool(doubts),
        frozenset(doubts),
    )


def _pointers(parameter: ParameterAccess, offset: int | None, values: bytes) -> list[int]:
    """Return the argument value at an offset of a parameter, or all of its values where the offset is not known."""
    return [int.from_bytes(values[start : start + 8], "little") for start in _offsets(parameter, offset)]


def _offsets(parameter: ParameterAccess, offset: int | None) -> list[int]:
    offsets = range(0, parameter.size - 7, 8) if offset is None else (offset,)
    return [parameter.offset + one for one in offsets]
