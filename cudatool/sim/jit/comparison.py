"""Comparison, selection and ``mov``. Semantics: PTX ISA, chapters 9.7.6 to 9.7.9."""

from __future__ import annotations

from cudatool.ptx import Immediate, Instruction, Operand, Pair, Register, Symbol, VectorOperand, type_bytes
from cudatool.sim.jit.arithmetic import FLOATS, inputs
from cudatool.sim.jit.emit import Emitter, llvm_type
from cudatool.sim.jit.table import lowers, types_of

__all__: list[str] = []

_ORDERED = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_UNORDERED = {"equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge"}
_FLOAT_COMPARE = {**_ORDERED, **_UNORDERED, "num": "ord", "nan": "uno"}
_UNSIGNED_NAMES = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
_COMPARE = frozenset({*_FLOAT_COMPARE, *_UNSIGNED_NAMES})


def _compare(e: Emitter, i: Instruction, t: str) -> str:
    """Return what a comparison gives: an i1, or two for a packed type."""
    how = next(m for m in i.modifiers if m in _COMPARE)
    kind = llvm_type(t)
    values = inputs(e, i, t, 1, 3)
    if t in FLOATS:
        return e.op(f"fcmp {_FLOAT_COMPARE[how]} {kind} {values[0]}, {values[1]}")
    if how not in ("eq", "ne"):
        how = _UNSIGNED_NAMES.get(how) or f"{'s' if t[0] == 's' else 'u'}{how}"
    return e.op(f"icmp {how} {kind} {values[0]}, {values[1]}")


def _combined(e: Emitter, i: Instruction, value: str) -> str:
    """Return a comparison combined with the predicate that ``.and``, ``.or`` or ``.xor`` names."""
    how = next((m for m in i.modifiers if m in ("and", "or", "xor")), None)
    return value if how is None else e.op(f"{how} i1 {value}, {e.get(i.operands[3], 'pred')}")


@lowers("setp")
def _setp(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    value = _compare(e, i, t)
    target = i.operands[0]
    if t.endswith("x2"):  # one predicate for each half
        assert isinstance(target, Pair)
        for half, register in enumerate((target.first, target.second)):
            e.set(register, _combined(e, i, e.op(f"extractelement <2 x i1> {value}, i32 {half}")), "pred")
    elif isinstance(target, Pair):
        inverse = _combined(e, i, e.op(f"xor i1 {value}, true"))
        value = _combined(e, i, value)
        e.set(target.first, value, "pred")
        e.set(target.second, inverse, "pred")
    else:
        e.set(target, _combined(e, i, value), "pred")


@lowers("set")
def _set(e: Emitter, i: Instruction) -> None:
    target, source = types_of(i)[-2:]
    value = _compare(e, i, source)
    if source.endswith("x2"):
        one, none = {"f16x2": ("15360", "0"), "bf16x2": ("16256", "0")}.get(target, ("-1", "0"))
        halves = [_combined(e, i, e.op(f"extractelement <2 x i1> {value}, i32 {half}")) for half in (0, 1)]
        e.set(i.operands[0], e.pack([e.op(f"select i1 {x}, i16 {one}, i16 {none}") for x in halves], "i16"), "b32")
        return
    value = _combined(e, i, value)
    kind = llvm_type(target)
    if target in FLOATS:
        e.set(i.operands[0], e.op(f"select i1 {value}, {kind} 1.0, {kind} 0.0"), target)
    else:
        e.set(i.operands[0], e.op(f"sext i1 {value} to {kind}"), target)


@lowers("selp")
def _selp(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    a, b = (e.get(operand, t) for operand in i.operands[1:3])
    e.set(i.operands[0], e.op(f"select i1 {e.get(i.operands[3], 'pred')}, {kind} {a}, {kind} {b}"), t)


@lowers("slct")
def _slct(e: Emitter, i: Instruction) -> None:
    t, sign = types_of(i)[-2:]
    kind = llvm_type(t)
    a, b = (e.get(operand, t) for operand in i.operands[1:3])
    c = e.get(i.operands[3], sign)
    test = e.op(f"fcmp oge float {c}, 0.0" if sign == "f32" else f"icmp sge i32 {c}, 0")
    e.set(i.operands[0], e.op(f"select i1 {test}, {kind} {a}, {kind} {b}"), t)


@lowers("mov")
def _mov(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    target, source = i.operands
    if isinstance(source, VectorOperand) and isinstance(target, VectorOperand):
        kind = f"b{8 * type_bytes(t)}"
        values = [e.get(element, kind) for element in source.elements]  # all of them before the first is set
        for element, value in zip(target.elements, values, strict=True):
            e.set(element, value, kind)
    elif isinstance(source, VectorOperand):  # pack
        part = f"i{8 * type_bytes(t) // len(source.elements)}"
        values = [e.get(element, f"b{part[1:]}") for element in source.elements]
        e.set(target, e.pack(values, part), f"b{8 * type_bytes(t)}")
    elif isinstance(target, VectorOperand):  # unpack
        whole, count = 8 * type_bytes(t), len(target.elements)
        bits = whole // count
        parts = e.unpack(e.get(source, f"b{whole}"), f"i{bits}", count)
        for element, value in zip(target.elements, parts, strict=True):
            e.set(element, value, f"b{bits}")
    else:
        _copy(e, target, source, t)


def _copy(e: Emitter, target: Operand, source: Operand, t: str) -> None:
    # As bits: a conversion would change the NaNs of narrow floats.
    bits = t if t in ("pred", "f32", "f64") or isinstance(source, Immediate | Symbol) else f"b{8 * type_bytes(t)}"
    if isinstance(source, Register) and source.name not in e.function.registers:
        bits = f"u{8 * type_bytes(t)}" if t != "pred" else t
    e.set(target, e.get(source, bits), bits)
