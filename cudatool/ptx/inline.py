"""Calls of device functions replaced by their bodies.

A kernel without calls is what the rest needs: barriers and warp collectives inside device functions then need no care
of their own.
"""

from __future__ import annotations

from dataclasses import replace

from cudatool.limits import INLINED_SIZE
from cudatool.ptx.model import (
    Address,
    Function,
    Instruction,
    Module,
    Operand,
    PtxError,
    Register,
    Symbol,
    Variable,
    type_bytes,
)
from cudatool.ptx.operands import call_parts, elements, renamed

__all__ = ["Inliner"]

_CALL = 4  # instructions that take a call's place, beside the body
_DEEPEST = 200  # calls within calls: inlining them calls itself


class Inliner:
    """Appends functions to `result` with their calls replaced by the bodies of what they call.

    Calls of functions without a body (``vprintf``), of those in `framed` and of function pointers stay.

    Raises
    ------
    PtxError
        The result is unreasonably large, or a call does not fit what it calls.
    """

    def __init__(self, module: Module, result: Function, framed: frozenset[str]) -> None:
        self.module = module
        self.result = result
        self.framed = framed
        self.calls = 0
        self._sizes: dict[str, tuple[int, int]] = {}

    def check(self, function: Function) -> None:
        """Refuse a function that would come to too much with its calls inlined, before any of it is made.

        A few functions that call each other come to any number of instructions. Each is looked at once; those that
        call themselves are framed, so that this ends.
        """
        waiting = [function]
        while waiting:
            one = waiting[-1]
            inlined = [callee for i in one.instructions if i.opcode == "call" and (callee := self._inlined(i))]
            unknown = [callee for callee in inlined if callee.name not in self._sizes]
            if unknown and one.name not in self._sizes:
                waiting += {callee.name: callee for callee in unknown}.values()
                continue
            waiting.pop()
            own = len(one.instructions) + len(one.registers) + len(one.variables) + len(one.labels)
            within = [self._sizes[callee.name] for callee in inlined]
            size, depth = (
                own + sum(_CALL + size for size, _ in within),
                1 + max((depth for _, depth in within), default=0),
            )
            if size > INLINED_SIZE or depth > _DEEPEST:
                raise PtxError(f"{self.result.name}: too large once its calls are inlined", one.line)
            self._sizes[one.name] = size, depth

    def _inlined(self, call: Instruction) -> Function | None:
        """Return the function that takes a call's place; None if the call stays."""
        called = call_parts(call)[1]
        target = called.name if isinstance(called, Symbol) else ""
        callee = self.module.functions.get(target)
        return None if callee is None or not callee.has_body or target in self.framed else callee

    def copy(
        self,
        source: Function,
        names: dict[str, str],
        prefix: str,
        end: str | None,
    ) -> None:
        """Append the instructions of `source` with its names changed; ``ret`` becomes a jump to the label `end`."""
        at: dict[int, list[str]] = {}
        for label, index in source.labels.items():
            at.setdefault(index, []).append(prefix + label)
        out = self.result.instructions
        for index, instruction in enumerate(source.instructions):
            for label in at.get(index, ()):
                self.result.labels[label] = len(out)
            copied = instruction
            if names:
                guard = instruction.guard and replace(
                    instruction.guard, name=names.get(instruction.guard.name, instruction.guard.name)
                )
                operands = tuple(renamed(operand, names) for operand in instruction.operands)
                copied = replace(instruction, guard=guard, operands=operands)
            if end is not None and instruction.opcode == "ret":
                out.append(replace(copied, opcode="bra", modifiers=(), operands=(Symbol(end),)))
            elif instruction.opcode == "call":
                self.call(copied)
            else:
                out.append(copied)
        for label in at.get(len(source.instructions), ()):
            self.result.labels[label] = len(out)

    def call(self, call: Instruction) -> None:
        callee = self._inlined(call)
        if callee is None:
            self.result.instructions.append(call)
            return
        results, _, arguments = call_parts(call)
        target = callee.name
        self.calls += 1
        prefix = f"{target}.{self.calls}."
        names = self.declare(callee, prefix)
        formals: tuple[Variable, ...] = (*callee.returns, *callee.params)
        actuals = (*results, *arguments)
        if len(formals) != len(actuals):
            raise PtxError(f"{target} takes {len(formals)} parameters, {len(actuals)} given", call.line)
        for formal, actual in zip(formals, actuals, strict=True):
            if formal.space == "param" and isinstance(actual, Symbol):
                names[formal.name] = actual.name
            elif formal.space == "param":
                names[formal.name] = prefix + formal.name
                self.result.variables[prefix + formal.name] = replace(formal, name=prefix + formal.name)
        after, beyond = f"{prefix}return", f"{prefix}beyond"
        out = self.result.instructions
        if call.guard is not None:
            skip = replace(call.guard, negated=not call.guard.negated)
            out.append(replace(call, opcode="bra", modifiers=(), operands=(Symbol(beyond),), guard=skip))
        for formal, actual in zip(callee.params, arguments, strict=True):
            self.transfer(call, formal, prefix, actual, back=False)
        keep = Register(f"{prefix}stack")
        allocates = any(i.opcode == "alloca" for i in callee.instructions)
        if allocates:  # what a function takes from the stack it gives back when it ends
            self.result.registers[keep.name] = "b64"
            out.append(replace(call, opcode="stacksave", modifiers=("u64",), operands=(keep,), guard=None))
        self.copy(callee, names, prefix, after)
        self.result.labels[after] = len(out)
        if allocates:
            out.append(replace(call, opcode="stackrestore", modifiers=("u64",), operands=(keep,), guard=None))
        for formal, actual in zip(callee.returns, results, strict=True):
            self.transfer(call, formal, prefix, actual, back=True)
        self.result.labels[beyond] = len(out)

    def transfer(self, call: Instruction, formal: Variable, prefix: str, actual: Operand, *, back: bool) -> None:
        """Append what copies an argument to its parameter, or a result `back`, where either is a register."""
        size = type_bytes(formal.type)
        places: list[Operand] = [Register(prefix + name) for name in formal.registers]
        given = list(elements(actual))
        if not places and isinstance(actual, Symbol):
            return  # they are the same variable
        if not places:
            places = [Address(Symbol(prefix + formal.name), size * n) for n in range(len(given))]
        elif isinstance(actual, Symbol):
            given = [Address(actual, size * n) for n in range(len(places))]
        if len(places) != len(given):
            raise PtxError(f"{call.name}: {formal.name} has {len(places)} elements, {len(given)} given", call.line)
        for place, value in zip(places, given, strict=True):
            target, source = (value, place) if back else (place, value)
            opcode = "st" if isinstance(target, Address) else "ld" if isinstance(source, Address) else "mov"
            kind = formal.type if formal.type == "pred" else f"b{8 * size}"
            modifiers = (kind,) if opcode == "mov" else ("param", kind)
            move = replace(call, opcode=opcode, modifiers=modifiers, operands=(target, source), guard=None)
            self.result.instructions.append(move)

    def declare(self, callee: Function, prefix: str) -> dict[str, str]:
        """Enter the names of a function in the result, with `prefix`; return the new name of each."""
        names = {name: prefix + name for name in (*callee.registers, *callee.labels, *callee.branch_targets)}
        for name, variable in callee.variables.items():
            if variable.space == "shared":  # one for the block, for all callers
                self.result.variables[name] = variable
            else:
                names[name] = prefix + name
                self.result.variables[prefix + name] = replace(variable, name=prefix + name)
        for name, type_name in callee.registers.items():
            self.result.registers[prefix + name] = type_name
        for name, labels in callee.branch_targets.items():
            self.result.branch_targets[prefix + name] = tuple(prefix + label for label in labels)
        return names
