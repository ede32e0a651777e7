"""Where the values of a kernel's registers come from, followed through its device functions.

Flow-insensitive within a function: a register's value joins whatever any instruction writes to it, which costs little,
as compilers emit registers that are written once. A device function is looked at once for each distinct set of
argument values, so that two calls of it are not mixed up; of very many, the rest share one. Everything is repeated
until nothing changes::

    repeat
        for each function and its arguments
            for each instruction: join what it computes into its destination
    until no register, memory cell, result or set of arguments has changed

Local and shared memory are kept in cells by variable, offset and width: pointers wait there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cudatool.limits import VALUE_ROUNDS, VALUE_SCOPES, VALUE_STEPS
from cudatool.ptx import provenance
from cudatool.ptx.effects import MemoryOperand, has_result, memory_operands, value_type
from cudatool.ptx.flow import writes
from cudatool.ptx.isa import Passes, opcode_of
from cudatool.ptx.model import (
    Address,
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    VectorOperand,
    type_bytes,
)
from cudatool.ptx.operands import GENERIC, call_parts, elements, space_of
from cudatool.ptx.provenance import ANYWHERE, LITERAL, NULL, NUMBER, UNDEFINED, Origin, OriginKind, Sum, Value

__all__ = ["HARMLESS", "Dataflow", "Scope"]

HARMLESS: Final = frozenset({"vprintf", "__assertfail", "malloc", "free"})
"""Functions of CUDA's device runtime that touch no memory that a program handed to a kernel."""

_SMALL = 1 << 32  # a literal below is no address
_LOW_BITS = 0xFFFF  # what a mask up to this leaves of an address is none

_Cells = dict[tuple[int, int], Value]  # (offset, width) -> value
_Arguments = tuple[frozenset[tuple[tuple[int, int], Value]], ...]


@dataclass(slots=True)
class Scope:
    """A function with one set of argument values.

    Attributes
    ----------
    arguments
        Cells of each parameter; empty for a kernel.
    registers
        What each register may hold.
    passed
        Cells of the ``.param`` variables that the function declares for its calls.
    results
        Cells of the function's return parameters.
    """

    function: Function
    arguments: dict[str, _Cells] = field(default_factory=dict)
    registers: dict[str, Value] = field(default_factory=dict)
    passed: dict[str, _Cells] = field(default_factory=dict)
    results: dict[str, _Cells] = field(default_factory=dict)
    steps: list[Instruction] = field(default_factory=list)


def _read(cells: _Cells, offset: int, width: int) -> Value:
    value = UNDEFINED
    for (start, size), held in cells.items():
        if ANYWHERE in (offset, start) or (start < offset + width and offset < start + size):
            value = provenance.join(value, held)
    return value


class Dataflow:
    """The values of all registers of `kernel` and of what it calls.

    Attributes
    ----------
    pointers
        Name and offset of the parameters and fields that the PTX treats as pointers: declared ``.ptr``, or converted
        between address spaces by the compiler, which knows their type.
    """

    def __init__(self, module: Module, kernel: Function) -> None:
        self.module = module
        self.kernel = kernel
        self.memory: dict[tuple[OriginKind, str], _Cells] = {}
        self._scopes: dict[tuple[str, _Arguments | None], Scope] = {}
        self._count: dict[str, int] = {}
        self._changed = False
        self._work_left = VALUE_STEPS
        self._undefined = UNDEFINED
        self._parameter_bytes = {parameter.name: parameter.size for parameter in kernel.params}
        root = self._enter(kernel, ())
        self.pointers = _known_pointers(kernel)
        self._solve()
        self._forget_all_but(root)
        # What is read but never written, such as shared memory that only atomics fill, holds numbers.
        self._undefined = NUMBER
        self._solve()

    @property
    def scopes(self) -> list[Scope]:
        """Each function that the kernel reaches, with each set of arguments."""
        return list(self._scopes.values())

    def _solve(self) -> None:
        self._changed, forward = True, True
        while self._changed:
            self._changed = False
            waiting = self.scopes if forward else self.scopes[::-1]
            for scope in waiting:
                known = len(self._scopes)
                self.spend(len(scope.steps))
                for instruction in scope.steps if forward else reversed(scope.steps):
                    _STEPS[opcode_of(instruction.opcode).passes](self, scope, instruction)
                if len(self._scopes) > known:
                    waiting += self.scopes[known:]  # what is called is looked at in the same round
            forward = not forward  # what is computed from the end to the beginning takes no round for each step

    def spend(self, work: int) -> None:
        """Count `work` steps.

        Raises
        ------
        PtxError
            They are far more than a compiler's code of this size needs: a few rounds.
        """
        self._work_left -= work
        if self._work_left < 0:
            raise PtxError(f"{self.kernel.name}: its values depend on each other in too many ways")

    # ---- functions ----

    def _enter(self, function: Function, arguments: _Arguments) -> Scope:
        key: tuple[str, _Arguments | None] = (function.name, arguments)
        if key not in self._scopes and self._count.get(function.name, 0) >= VALUE_SCOPES:
            key = (function.name, None)
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = Scope(function)
            self._count[function.name] = self._count.get(function.name, 0) + 1
            self._changed = True
            for instruction in function.instructions:
                self._work_left += VALUE_ROUNDS
                if opcode_of(instruction.opcode).passes is not Passes.NOTHING:
                    _check_operands(instruction)
                    scope.steps.append(instruction)
                else:
                    scope.registers.update(dict.fromkeys(writes(instruction), NUMBER))
        for parameter, cells in zip(function.params, arguments, strict=False):
            held = scope.arguments.setdefault(parameter.name, {})
            for (offset, width), value in cells:
                self._put(held, offset, width, value)
            for register in parameter.registers:
                self._set_register(scope, register, _read(held, ANYWHERE, 0))
        return scope

    def _forget_all_but(self, root: Scope) -> None:
        """Forget the functions with arguments that were only preliminary: what `root` does not reach."""
        reached, waiting = {id(root)}, [root]
        while waiting:
            scope = waiting.pop()
            for i in scope.steps:
                inner = self._callee(scope, i) if i.opcode == "call" else None
                if inner is not None and id(inner) not in reached:
                    reached.add(id(inner))
                    waiting.append(inner)
        self._scopes = {key: scope for key, scope in self._scopes.items() if id(scope) in reached}

    def _callee(self, scope: Scope, call: Instruction) -> Scope | None:
        _, target, arguments = call_parts(call)
        callee = self.module.functions.get(target.name) if isinstance(target, Symbol) else None
        if callee is None or not callee.has_body:
            return None
        return self._enter(callee, tuple(frozenset(self.argument(scope, a).items()) for a in arguments))

    def _call(self, scope: Scope, i: Instruction) -> None:
        results, target, _ = call_parts(i)
        inner = self._callee(scope, i)
        if inner is None:
            fresh = provenance.of(Origin(OriginKind.HEAP)) if getattr(target, "name", "") == "malloc" else NUMBER
            for result in results:
                self._receive(scope, result, {(0, 16): fresh})
            return
        for formal, actual in zip(inner.function.returns, results, strict=False):
            self._receive(scope, actual, inner.results.get(formal.name, {}))
            if formal.name in inner.registers:
                self._receive(scope, actual, {(0, 16): inner.registers[formal.name]})

    def argument(self, scope: Scope, argument: Operand) -> _Cells:
        """Return what a call passes: the cells of a ``.param`` variable, or a register's value."""
        if isinstance(argument, Symbol):
            return scope.passed.get(argument.name, {})
        return {(0, 16): self.value(scope, argument)}

    def _receive(self, scope: Scope, result: Operand, cells: _Cells) -> None:
        if isinstance(result, Symbol):
            held = scope.passed.setdefault(result.name, {})
            for (offset, width), value in list(cells.items()):
                self._put(held, offset, width, value)
        else:
            self._set(scope, result, _read(cells, ANYWHERE, 0))

    # ---- values ----

    def value(self, scope: Scope, operand: Operand) -> Value:
        """Return what an operand that is not a memory access may be."""
        if isinstance(operand, Register):
            if operand.name in scope.function.registers or operand.name in scope.registers:
                return scope.registers.get(operand.name, self._undefined)
            # A special register: a number, but for where the driver keeps what cooperative groups synchronize by.
            return provenance.of(Origin(OriginKind.HEAP)) if operand.name.startswith("%envreg") else NUMBER
        if isinstance(operand, Immediate):
            return NULL if operand.value == 0 else LITERAL if abs(operand.value) < _SMALL else NUMBER
        if isinstance(operand, Symbol):
            return self._address_of(scope, operand.name, operand.offset)
        if isinstance(operand, Address):
            return self.address(scope, operand)
        if isinstance(operand, VectorOperand):
            value = LITERAL
            for element in operand.elements:
                value = provenance.add(value, self.value(scope, element))
            return value
        return NUMBER

    def address(self, scope: Scope, address: Address) -> Value:
        """Return where ``[address]`` may point."""
        if address.base is None:
            return LITERAL if abs(address.offset) < _SMALL else NUMBER
        return provenance.shift(self.value(scope, address.base), address.offset)

    def _address_of(self, scope: Scope, name: str, offset: int) -> Value:
        function = scope.function
        if function is self.kernel and name in self._parameter_bytes:
            return provenance.of(Origin(OriginKind.ENTRY, name, offset))
        if name in scope.arguments:
            # The address of a device function's parameter: from here on it is local memory.
            held = self.memory.setdefault((OriginKind.LOCAL, f"{function.name}:{name}"), {})
            for (start, width), value in scope.arguments[name].items():
                self._put(held, start, width, value)
            return provenance.of(Origin(OriginKind.LOCAL, f"{function.name}:{name}", offset))
        variable = function.variables.get(name) or self.module.variables.get(name)
        if variable is None or variable.space == "param":
            return NUMBER  # a function, a label
        if variable.space in ("global", "const"):
            return provenance.of(Origin(OriginKind.VARIABLE, name))
        if variable.space == "shared":
            name = name if variable.size else "[]"  # all arrays whose size the launch decides begin at one place
            return provenance.of(Origin(OriginKind.SHARED, name, offset))
        return provenance.of(Origin(OriginKind.LOCAL, f"{function.name}:{name}", offset))

    def _set(self, scope: Scope, operand: Operand, value: Value) -> None:
        if isinstance(operand, Register):
            self._set_register(scope, operand.name, value)
        elif isinstance(operand, VectorOperand):
            for element in operand.elements:
                self._set(scope, element, value)
        elif isinstance(operand, Pair):
            self._set_register(scope, operand.first.name, value)
            self._set_register(scope, operand.second.name, NUMBER)

    def _set_register(self, scope: Scope, name: str, value: Value) -> None:
        old = scope.registers.get(name, UNDEFINED)
        new = provenance.join(old, value)
        if new != old:
            scope.registers[name] = new
            self._changed = True

    def _put(self, cells: _Cells, offset: int, width: int, value: Value) -> None:
        old = cells.get((offset, width), UNDEFINED)
        new = provenance.join(old, value)
        if new != old:
            cells[offset, width] = new
            self._changed = True

    # ---- memory ----

    def _load(self, scope: Scope, i: Instruction) -> None:
        space, address, target = space_of(i), i.operands[1], i.operands[0]
        assert isinstance(address, Address)
        kind = value_type(i)
        size = type_bytes(kind) if kind else 8
        for lane, register in enumerate(elements(target)):
            at = Address(address.base, address.offset + lane * size)
            if kind in ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2"):
                self._set(scope, register, NUMBER)
            else:
                self._set(scope, register, self._loaded(scope, space, at, size))

    def _loaded(self, scope: Scope, space: str, address: Address, size: int) -> Value:
        base = address.base
        if isinstance(base, Symbol) and space in ("param", GENERIC):
            function = scope.function
            if function is self.kernel and base.name in self._parameter_bytes:
                return self._parameter(base.name, base.offset + address.offset, size)
            cells = scope.arguments.get(base.name)
            if cells is None:
                cells = scope.passed.get(base.name)
            if cells is not None or base.name in function.variables:
                return _read(cells or {}, base.offset + address.offset, size) or self._undefined
        where = provenance.whole(self.address(scope, address))
        if space in ("shared", "local"):
            kind = OriginKind.SHARED if space == "shared" else OriginKind.LOCAL
            return self._held(kind, where, size) or self._undefined
        value = UNDEFINED
        for terms in where:
            value = provenance.join(value, self._through(terms, address.offset, size))
        return value

    def _held(self, kind: OriginKind, where: list[Sum], size: int) -> Value:
        """Return what may lie in shared or local memory; where the variable is not known, in any of it."""
        value = UNDEFINED
        for terms in where:
            named = [term for term in terms if term.kind is kind]
            for term in named:
                value = provenance.join(value, _read(self.memory.get((kind, term.name), {}), term.offset, size))
            if not named:
                for (other, _), cells in self.memory.items():
                    if other is kind:
                        value = provenance.join(value, _read(cells, ANYWHERE, size))
        return value

    def _through(self, terms: Sum, offset: int, size: int) -> Value:
        """Return what a load through a generic or global address may give."""
        value = UNDEFINED
        for term in self.bases(terms):
            if term.kind is OriginKind.ENTRY:
                loaded = self._parameter(term.name, term.offset, size)
            elif term.kind in (OriginKind.SHARED, OriginKind.LOCAL):
                loaded = self._held(term.kind, [frozenset({term})], size) or self._undefined
            elif size >= 8:
                loaded = provenance.of(_loaded_from(term))
            elif size == 4:
                loaded = provenance.of(_loaded_from(term)._replace(kind=OriginKind.LOADED_PIECE, part=offset % 8))
            else:
                loaded = NUMBER
            value = provenance.join(value, loaded)
        return value or NUMBER

    def _parameter(self, name: str, offset: int, size: int) -> Value:
        total = self._parameter_bytes[name]
        if total < 8:
            return NUMBER
        if offset == ANYWHERE:
            return provenance.of(Origin(OriginKind.PARAMETER, name, ANYWHERE))
        if size >= 8:
            return provenance.of(*(Origin(OriginKind.PARAMETER, name, at) for at in range(offset, offset + size, 8)))
        return provenance.of(Origin(OriginKind.PIECE, name, offset & ~7, offset & 7))

    def bases(self, terms: Sum) -> list[Origin]:
        """Return the terms of an address that it may be based on; the rest is an index.

        A variable, or a parameter that is known to be a pointer, is a base; only without one may any 64-bit parameter
        or loaded value be.
        """
        known = [t for t in terms if t.kind not in (OriginKind.LITERAL, OriginKind.NULL, OriginKind.MANY)]
        sure = [t for t in known if t.kind in _CERTAIN or (t.kind is OriginKind.PARAMETER and t[1:3] in self.pointers)]
        return sure or known

    def _store(self, scope: Scope, i: Instruction) -> None:
        accesses = memory_operands(i)
        if accesses:
            size = accesses[0].width // max(len(elements(i.operands[1])), 1) or 8
            for lane, source in enumerate(elements(i.operands[1])):
                self._stored(scope, accesses[0], lane * size, size, self.value(scope, source))

    def _stored(self, scope: Scope, access: MemoryOperand, lane: int, size: int, value: Value) -> None:
        base = access.address.base
        offset = access.address.offset + lane
        if isinstance(base, Symbol) and access.space == "param":
            function = scope.function
            held = scope.passed if base.name in function.variables else scope.results
            self._put(held.setdefault(base.name, {}), base.offset + offset, size, value)
            return
        if access.space in ("global", "const"):
            return
        for terms in provenance.whole(self.address(scope, Address(base, offset))):
            inside = [t for t in terms if t.kind in (OriginKind.SHARED, OriginKind.LOCAL)]
            if not inside and access.space != GENERIC:
                kind = OriginKind.SHARED if access.space == "shared" else OriginKind.LOCAL
                inside = [Origin(kind, "", ANYWHERE), *(Origin(k, n, ANYWHERE) for k, n in self.memory if k is kind)]
            for term in inside:
                self._put(self.memory.setdefault((term.kind, term.name), {}), term.offset, size, value)

    def _atomic(self, scope: Scope, i: Instruction) -> None:
        access = memory_operands(i)[0]
        target = i.operands[0] if has_result(i) else None
        size = max(access.width, 1)
        for source in i.operands[i.operands.index(access.address) + 1 :]:
            self._stored(scope, access, 0, size, self.value(scope, source))
        if target is not None:
            self._set(scope, target, self._loaded(scope, access.space, access.address, size))

    def _copy_to_shared(self, scope: Scope, i: Instruction) -> None:
        accesses = memory_operands(i)
        if len(accesses) == 2 and accesses[0].space == "shared" and accesses[1].space == "global":
            value = self._loaded(scope, "global", accesses[1].address, 8)
            for terms in provenance.whole(self.address(scope, accesses[0].address)):
                for term in terms:
                    if term.kind is OriginKind.SHARED:
                        self._put(self.memory.setdefault((term.kind, term.name), {}), ANYWHERE, 8, value)

    # ---- arithmetic ----

    def _copies(self, scope: Scope, i: Instruction) -> None:
        self._set(scope, i.operands[0], NUMBER if _is_float(i) else self.value(scope, i.operands[1]))

    def _moves(self, scope: Scope, i: Instruction) -> None:
        self._set(scope, i.operands[0], self.value(scope, i.operands[1]))

    def _sums(self, scope: Scope, i: Instruction) -> None:
        value = self.value(scope, i.operands[1])
        for operand in i.operands[2:]:
            if isinstance(operand, Immediate) and i.opcode in ("add", "sub") and isinstance(operand.value, int):
                value = provenance.shift(value, operand.value if i.opcode == "add" else -operand.value)
            else:
                value = provenance.add(value, self.value(scope, operand))
        self._set(scope, i.operands[0], NUMBER if _is_float(i) else value)

    def _masks(self, scope: Scope, i: Instruction) -> None:
        low_bits = isinstance(i.operands[2], Immediate) and 0 <= i.operands[2].value <= _LOW_BITS
        if low_bits:  # how an address is aligned
            self._set(scope, i.operands[0], NUMBER)
        else:
            self._sums(scope, i)

    def _products(self, scope: Scope, i: Instruction) -> None:
        self._set(scope, i.operands[0], provenance.add(NUMBER, self.value(scope, i.operands[3])))

    def _chooses(self, scope: Scope, i: Instruction) -> None:
        value = provenance.join(self.value(scope, i.operands[1]), self.value(scope, i.operands[2]))
        self._set(scope, i.operands[0], NUMBER if _is_float(i) and i.opcode != "selp" else value)

    def _shifts(self, scope: Scope, i: Instruction) -> None:
        self._set(scope, i.operands[0], provenance.pieces_only(self.value(scope, i.operands[1])))

    def _allocates(self, scope: Scope, i: Instruction) -> None:
        name = f"{scope.function.name}:alloca:{i.line}"
        self._set(scope, i.operands[0], provenance.of(Origin(OriginKind.LOCAL, name, 0)))


_CERTAIN = (OriginKind.VARIABLE, OriginKind.SHARED, OriginKind.LOCAL, OriginKind.ENTRY, OriginKind.HEAP)

_Step = Callable[[Dataflow, Scope, Instruction], None]

_STEPS: dict[Passes, _Step] = {
    Passes.MOVE: Dataflow._moves,
    Passes.COPY: Dataflow._copies,
    Passes.MASK: Dataflow._masks,
    Passes.SUM: Dataflow._sums,
    Passes.PRODUCT: Dataflow._products,
    Passes.CHOICE: Dataflow._chooses,
    Passes.SHIFT: Dataflow._shifts,
    Passes.LOAD: Dataflow._load,
    Passes.STORE: Dataflow._store,
    Passes.UPDATE: Dataflow._atomic,
    Passes.COPY_TO_SHARED: Dataflow._copy_to_shared,
    Passes.CALL: Dataflow._call,
    Passes.STACK: Dataflow._allocates,
}


def _check_operands(i: Instruction) -> None:
    row = opcode_of(i.opcode)
    at = row.address
    if len(i.operands) < row.operands or (at is not None and not isinstance(i.operands[at], Address)):
        raise PtxError(f"these are no operands of {i.name}", i.line)


def _known_pointers(kernel: Function) -> set[tuple[str, int]]:
    found = {(parameter.name, 0) for parameter in kernel.params if parameter.pointer}
    times_written = Counter(name for i in kernel.instructions for name in writes(i))
    loaded: dict[str, tuple[str, int]] = {}
    for i in kernel.instructions:
        if i.opcode == "ld" and isinstance(i.operands[1], Address) and isinstance(i.operands[1].base, Symbol):
            base = i.operands[1].base
            for lane, target in enumerate(elements(i.operands[0])):
                if isinstance(target, Register) and times_written[target.name] == 1:
                    loaded[target.name] = (base.name, base.offset + i.operands[1].offset + 8 * lane)
        elif i.opcode == "cvta" and isinstance(i.operands[1], Register) and i.operands[1].name in loaded:
            found.add(loaded[i.operands[1].name])
    return found


def _is_float(i: Instruction) -> bool:
    return any(m in ("f16", "f32", "f64", "bf16", "f16x2", "bf16x2", "tf32") for m in i.modifiers)


def _loaded_from(term: Origin) -> Origin:
    if term.kind is OriginKind.LOADED:
        return term
    if term.kind is OriginKind.PARAMETER:
        return Origin(OriginKind.LOADED, term.name, term.offset)
    return Origin(OriginKind.LOADED, term.name, ANYWHERE)
