"""Calls of device functions replaced by their bodies.

A kernel without calls is what the rest needs: barriers and warp collectives inside device functions then need no care
of their own.
"""

from __future__ import annotations

from dataclasses import replace

from cudatool.ptx.model import (
    Address,
    Function,
    Instruction,
    Module,
    Operand,
    Pair,
    PtxError,
    Register,
    Symbol,
    Variable,
    VectorOperand,
)

__all__ = ["inline_calls"]

_MAX_INSTRUCTIONS = 200_000


def inline_calls(module: Module, kernel: Function) -> Function:
    """Return `kernel` with every call of a function that `module` defines replaced by that function's body.

    Calls of functions without a body (``vprintf``) stay.

    Raises
    ------
    PtxError
        A function calls itself, or the result is unreasonably large.
    """
    result = replace(
        kernel,
        registers=dict(kernel.registers),
        variables=dict(kernel.variables),
        instructions=[],
        labels={},
        branch_targets=dict(kernel.branch_targets),
    )
    _Inliner(module, result).copy(kernel, {}, "", None, (kernel.name,))
    return result


class _Inliner:
    def __init__(self, module: Module, result: Function) -> None:
        self.module = module
        self.result = result
        self.calls = 0

    def copy(
        self,
        source: Function,
        names: dict[str, str],
        prefix: str,
        end: str | None,
        active: tuple[str, ...],
    ) -> None:
        """Append the instructions of `source` with its names changed; ``ret`` becomes a jump to the label `end`."""
        at: dict[int, list[str]] = {}
        for label, index in source.labels.items():
            at.setdefault(index, []).append(prefix + label)
        out = self.result.instructions
        for index, instruction in enumerate(source.instructions):
            for label in at.get(index, ()):
                self.result.labels[label] = len(out)
            if len(out) > _MAX_INSTRUCTIONS:
                raise PtxError(f"{self.result.name}: too large once its calls are inlined", instruction.line)
            guard = instruction.guard and replace(
                instruction.guard, name=names.get(instruction.guard.name, instruction.guard.name)
            )
            operands = tuple(_rename(operand, names) for operand in instruction.operands)
            copied = replace(instruction, guard=guard, operands=operands)
            if end is not None and instruction.opcode == "ret":
                out.append(replace(copied, opcode="bra", modifiers=(), operands=(Symbol(end),)))
            elif instruction.opcode == "call":
                self.call(copied, active)
            else:
                out.append(copied)
        for label in at.get(len(source.instructions), ()):
            self.result.labels[label] = len(out)

    def call(self, call: Instruction, active: tuple[str, ...]) -> None:
        results, target, arguments = _call_parts(call)
        callee = self.module.functions.get(target)
        if callee is None or not callee.has_body:
            self.result.instructions.append(call)
            return
        if target in active:
            raise PtxError(f"{target} calls itself, which is not supported", call.line)
        self.calls += 1
        prefix = f"{target}.{self.calls}."
        names = {name: prefix + name for name in (*callee.registers, *callee.labels, *callee.branch_targets)}
        for name, variable in callee.variables.items():
            if variable.space == "shared":  # one for the block, whoever calls
                self.result.variables[name] = variable
            else:
                names[name] = prefix + name
                self.result.variables[prefix + name] = replace(variable, name=prefix + name)
        formals: tuple[Variable, ...] = (*callee.returns, *callee.params)
        actuals = (*results, *arguments)
        if len(formals) != len(actuals):
            raise PtxError(f"{target} takes {len(formals)} parameters, {len(actuals)} given", call.line)
        for formal, actual in zip(formals, actuals, strict=True):
            if not isinstance(actual, Symbol):
                raise PtxError("call arguments that are not .param variables are not supported", call.line)
            names[formal.name] = actual.name
        for name, type_name in callee.registers.items():
            self.result.registers[prefix + name] = type_name
        for name, labels in callee.branch_targets.items():
            self.result.branch_targets[prefix + name] = tuple(prefix + label for label in labels)
        after = f"{prefix}return"
        out = self.result.instructions
        if call.guard is not None:
            skip = replace(call.guard, negated=not call.guard.negated)
            out.append(replace(call, opcode="bra", modifiers=(), operands=(Symbol(after),), guard=skip))
        self.copy(callee, names, prefix, after, (*active, target))
        self.result.labels[after] = len(out)


def _call_parts(call: Instruction) -> tuple[tuple[Operand, ...], str, tuple[Operand, ...]]:
    """Return results, name and arguments of a direct call."""
    operands = list(call.operands)
    results: tuple[Operand, ...] = ()
    if operands and isinstance(operands[0], VectorOperand):
        results = operands.pop(0).elements  # type: ignore[union-attr]
    target = operands.pop(0)
    if not isinstance(target, Symbol):
        raise PtxError("indirect calls are not supported", call.line)
    arguments: tuple[Operand, ...] = ()
    if operands and isinstance(operands[0], VectorOperand):
        arguments = operands[0].elements
    return results, target.name, arguments


def _rename(operand: Operand, names: dict[str, str]) -> Operand:
    if not names:
        return operand
    if isinstance(operand, Register | Symbol):
        return replace(operand, name=names.get(operand.name, operand.name))
    if isinstance(operand, Address):
        base = operand.base and replace(operand.base, name=names.get(operand.base.name, operand.base.name))
        return replace(operand, base=base, coordinates=tuple(_rename(one, names) for one in operand.coordinates))
    if isinstance(operand, VectorOperand):
        return VectorOperand(tuple(_rename(element, names) for element in operand.elements))
    if isinstance(operand, Pair):
        first, second = _rename(operand.first, names), _rename(operand.second, names)
        assert isinstance(first, Register) and isinstance(second, Register)
        return Pair(first, second)
    return operand
