"""Logic, shifts and bit fields. Semantics: PTX ISA, chapters 9.7.1 and 9.7.8."""

from __future__ import annotations

from cudatool.ptx import Instruction, Operand, Pair, type_bytes
from cudatool.sim.jit.arithmetic import inputs, intrinsic
from cudatool.sim.jit.emit import Emitter, llvm_type
from cudatool.sim.jit.table import lowers, types_of

__all__: list[str] = []


@lowers("and or xor")
def _logic(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    a, b = inputs(e, i, t)
    e.set(i.operands[0], e.op(f"{i.opcode} {llvm_type(t)} {a}, {b}"), t)


@lowers("not")
def _not(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    (a,) = inputs(e, i, t)
    e.set(i.operands[0], e.op(f"xor {llvm_type(t)} {a}, {'true' if t == 'pred' else -1}"), t)


@lowers("cnot")
def _cnot(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    (a,) = inputs(e, i, t)
    e.set(i.operands[0], e.op(f"zext i1 {e.op(f'icmp eq {llvm_type(t)} {a}, 0')} to {llvm_type(t)}"), t)


@lowers("shl shr")
def _shift(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind, bits = llvm_type(t), 8 * type_bytes(t)
    a = e.get(i.operands[1], t)
    operation = "shl" if i.opcode == "shl" else "ashr" if t[0] == "s" else "lshr"
    count = e.constant(i.operands[2])
    if count is not None and 0 <= count < bits:
        return e.set(i.operands[0], e.op(f"{operation} {kind} {a}, {count}"), t)
    # Counts beyond the width are clamped to it.
    count_value = e.get(i.operands[2], "u32")
    if operation == "ashr":
        amount = e.call("i32", "llvm.umin.i32", f"i32 {count_value}", f"i32 {bits - 1}")
        return e.set(i.operands[0], e.op(f"ashr {kind} {a}, {e.convert(amount, 'i32', kind)}"), t)
    inside = e.op(f"icmp ult i32 {count_value}, {bits}")
    amount = e.convert(e.op(f"and i32 {count_value}, {bits - 1}"), "i32", kind)
    value = e.op(f"{operation} {kind} {a}, {amount}")
    return e.set(i.operands[0], e.op(f"select i1 {inside}, {kind} {value}, {kind} 0"), t)


@lowers("shf")
def _funnel(e: Emitter, i: Instruction) -> None:
    low, high, count = (e.get(operand, "b32") for operand in i.operands[1:])
    both = e.pack([low, high], "i32")
    if "clamp" in i.modifiers:
        amount = e.call("i32", "llvm.umin.i32", f"i32 {count}", "i32 32")
    else:
        amount = e.op(f"and i32 {count}, 31")
    amount = e.convert(amount, "i32", "i64")
    if "l" in i.modifiers:
        value = e.op(f"lshr i64 {e.op(f'shl i64 {both}, {amount}')}, 32")
    else:
        value = e.op(f"lshr i64 {both}, {amount}")
    e.set(i.operands[0], e.op(f"trunc i64 {value} to i32"), "b32")


@lowers("popc clz")
def _count(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    (a,) = inputs(e, i, t)
    value = intrinsic(e, "ctpop", kind, a) if i.opcode == "popc" else intrinsic(e, "ctlz", kind, a, extra="i1 false")
    e.set(i.operands[0], e.convert(value, kind, "i32"), "u32")


@lowers("brev")
def _brev(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    (a,) = inputs(e, i, t)
    e.set(i.operands[0], intrinsic(e, "bitreverse", llvm_type(t), a), t)


@lowers("bfind")
def _bfind(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind, bits = llvm_type(t), 8 * type_bytes(t)
    (a,) = inputs(e, i, t)
    if t[0] == "s":  # of a negative number the highest zero
        a = e.op(f"xor {kind} {a}, {e.op(f'ashr {kind} {a}, {bits - 1}')}")
    leading = e.convert(intrinsic(e, "ctlz", kind, a, extra="i1 false"), kind, "i32")
    value = leading if "shiftamt" in i.modifiers else e.op(f"sub i32 {bits - 1}, {leading}")
    none = e.op(f"icmp eq {kind} {a}, 0")
    e.set(i.operands[0], e.op(f"select i1 {none}, i32 -1, i32 {value}"), "u32")


def _field_mask(e: Emitter, length: str, kind: str, bits: int) -> str:
    """Return `length` (i32) low ones; all ones from the width on."""
    inside = e.op(f"icmp ult i32 {length}, {bits}")
    amount = e.convert(e.op(f"and i32 {length}, {bits - 1}"), "i32", kind)
    ones = e.op(f"sub {kind} {e.op(f'shl {kind} 1, {amount}')}, 1")
    return e.op(f"select i1 {inside}, {kind} {ones}, {kind} -1")


def _shifted(e: Emitter, operation: str, value: str, count: str, kind: str, bits: int) -> str:
    """Return `value` shifted by `count` (i32); 0 from the width on."""
    inside = e.op(f"icmp ult i32 {count}, {bits}")
    amount = e.convert(e.op(f"and i32 {count}, {bits - 1}"), "i32", kind)
    shifted = e.op(f"{operation} {kind} {value}, {amount}")
    return e.op(f"select i1 {inside}, {kind} {shifted}, {kind} 0")


def _field_operand(e: Emitter, operand: Operand, bits: int) -> str:
    """Return a position or length. PTX names its low 8 bits; for fields of 64 bits an H200 goes by the whole value."""
    value = e.get(operand, "u32")
    if bits == 64:
        return intrinsic(e, "umin", "i32", value, "255")
    return e.op(f"and i32 {value}, 255")


@lowers("bfe")
def _bfe(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind, bits = llvm_type(t), 8 * type_bytes(t)
    a = e.get(i.operands[1], t)
    position, length = (_field_operand(e, operand, bits) for operand in i.operands[2:])
    mask = _field_mask(e, length, kind, bits)
    value = e.op(f"and {kind} {_shifted(e, 'lshr', a, position, kind, bits)}, {mask}")
    if t[0] == "s":
        # The sign is bit min(position + length - 1, width - 1); a field of no length is 0.
        top = e.op(f"sub i32 {e.op(f'add i32 {position}, {length}')}, 1")
        top = e.call("i32", "llvm.umin.i32", f"i32 {top}", f"i32 {bits - 1}")
        top = e.convert(top, "i32", kind)
        sign = e.op(f"trunc {kind} {e.op(f'lshr {kind} {a}, {top}')} to i1")
        sign = e.op(f"and i1 {sign}, {e.op(f'icmp ne i32 {length}, 0')}")
        filled = e.op(f"or {kind} {value}, {e.op(f'xor {kind} {mask}, -1')}")
        room = e.call("i32", "llvm.usub.sat.i32", f"i32 {bits}", f"i32 {position}")
        above = e.op(f"xor {kind} {_field_mask(e, room, kind, bits)}, -1")
        filled = e.op(f"or {kind} {filled}, {above}")
        value = e.op(f"select i1 {sign}, {kind} {filled}, {kind} {value}")
    e.set(i.operands[0], value, t)


@lowers("bfi")
def _bfi(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind, bits = llvm_type(t), 8 * type_bytes(t)
    a, b = (e.get(operand, t) for operand in i.operands[1:3])
    position, length = (_field_operand(e, operand, bits) for operand in i.operands[3:])
    mask = _shifted(e, "shl", _field_mask(e, length, kind, bits), position, kind, bits)
    inserted = e.op(f"and {kind} {_shifted(e, 'shl', a, position, kind, bits)}, {mask}")
    kept = e.op(f"and {kind} {b}, {e.op(f'xor {kind} {mask}, -1')}")
    e.set(i.operands[0], e.op(f"or {kind} {inserted}, {kept}"), t)


@lowers("bmsk")
def _bmsk(e: Emitter, i: Instruction) -> None:
    position, length = (e.get(operand, "u32") for operand in i.operands[1:])
    if "wrap" in i.modifiers:
        position, length = (e.op(f"and i32 {value}, 31") for value in (position, length))
    mask = _field_mask(e, length, "i32", 32)
    e.set(i.operands[0], _shifted(e, "shl", mask, position, "i32", 32), "b32")


@lowers("prmt")
def _prmt(e: Emitter, i: Instruction) -> None:
    a, b = (e.get(operand, "b32") for operand in i.operands[1:3])
    both = e.pack([a, b], "i32")
    mode = next((m for m in i.modifiers if m in _PRMT_MODES), "")
    selector = e.get(i.operands[3], "b32")
    if mode:
        low = e.op(f"and i32 {selector}, 3")
        table = sum(_PRMT_MODES[mode](n) << 16 * n for n in range(4))
        shift = e.convert(e.op(f"shl i32 {low}, 4"), "i32", "i64")
        selector = e.op(f"trunc i64 {e.op(f'lshr i64 {table}, {shift}')} to i32")
    result = "0"
    for byte in range(4):
        nibble = e.op(f"lshr i32 {selector}, {4 * byte}") if byte else selector
        shift = e.convert(e.op(f"shl i32 {e.op(f'and i32 {nibble}, 7')}, 3"), "i32", "i64")
        picked = e.op(f"trunc i64 {e.op(f'lshr i64 {both}, {shift}')} to i8")
        replicate = e.op(f"icmp ne i32 {e.op(f'and i32 {nibble}, 8')}, 0")
        picked = e.op(f"select i1 {replicate}, i8 {e.op(f'ashr i8 {picked}, 7')}, i8 {picked}")
        wide = e.op(f"zext i8 {picked} to i32")
        result = e.op(f"or i32 {result}, {e.op(f'shl i32 {wide}, {8 * byte}')}")
    e.set(i.operands[0], result, "b32")


def _nibbles(*bytes_: int) -> int:
    return sum(byte << 4 * n for n, byte in enumerate(bytes_))


# The selector that each mode stands for, given the two low bits of its third operand.
_PRMT_MODES = {
    "f4e": lambda n: _nibbles(*(n + k for k in range(4))),
    "b4e": lambda n: _nibbles(*((n - k) % 8 for k in range(4))),
    "rc8": lambda n: _nibbles(n, n, n, n),
    "ecl": lambda n: _nibbles(*(max(n, k) for k in range(4))),
    "ecr": lambda n: _nibbles(*(min(n, k) for k in range(4))),
    "rc16": lambda n: _nibbles(*(2 * (n & 1) + (k & 1) for k in range(4))),
}


@lowers("szext")
def _szext(e: Emitter, i: Instruction) -> None:
    a, width = e.get(i.operands[1], "b32"), e.get(i.operands[2], "u32")
    if "wrap" in i.modifiers:
        width = e.op(f"and i32 {width}, 31")
    mask = _field_mask(e, width, "i32", 32)
    value = e.op(f"and i32 {a}, {mask}")
    if "s32" in i.modifiers:  # the sign is the highest bit of a field narrower than the register
        top = e.op(f"and i32 {e.op(f'sub i32 {width}, 1')}, 31")
        sign = e.op(f"trunc i32 {e.op(f'lshr i32 {value}, {top}')} to i1")
        filled = e.op(f"or i32 {value}, {e.op(f'xor i32 {mask}, -1')}")
        value = e.op(f"select i1 {sign}, i32 {filled}, i32 {value}")
    e.set(i.operands[0], value, "b32")


_FNS = """
define internal i32 @find_nth_set(i32 %mask, i32 %base, i32 %offset) noinline {
entry:
  %zero = icmp eq i32 %offset, 0
  %up = icmp sgt i32 %offset, 0
  %step = select i1 %up, i32 1, i32 -1
  %distance = call i32 @llvm.abs.i32(i32 %offset, i1 false)
  %least = call i32 @llvm.umax.i32(i32 %distance, i32 1)
  %in.range = icmp ult i32 %base, 32
  br i1 %in.range, label %look, label %none
look:
  %place = phi i32 [ %base, %entry ], [ %place.next, %on ]
  %left = phi i32 [ %least, %entry ], [ %left.next, %on ]
  %shifted = lshr i32 %mask, %place
  %bit = and i32 %shifted, 1
  %left.next = sub i32 %left, %bit
  %found = icmp eq i32 %left.next, 0
  br i1 %found, label %end, label %miss
miss:
  br i1 %zero, label %none, label %on
on:
  %place.next = add i32 %place, %step
  %inside = icmp ult i32 %place.next, 32
  br i1 %inside, label %look, label %none
none:
  ret i32 -1
end:
  ret i32 %place
}
declare i32 @llvm.abs.i32(i32, i1)
declare i32 @llvm.umax.i32(i32, i32)"""


@lowers("fns")
def _fns(e: Emitter, i: Instruction) -> None:
    e.define(_FNS)
    mask, base, offset = (e.get(operand, "b32") for operand in i.operands[1:])
    e.set(i.operands[0], e.op(f"call i32 @find_nth_set(i32 {mask}, i32 {base}, i32 {offset})"), "b32")


@lowers("lop3")
def _lop3(e: Emitter, i: Instruction) -> None:
    table = e.constant(i.operands[4])
    if table is None:
        raise e.unsupported()
    values = [e.get(operand, "b32") for operand in i.operands[1:4]]
    inverse = [e.op(f"xor i32 {value}, -1") for value in values]
    result = "0"
    for row in range(8):
        if table >> row & 1:
            a, b, c = (values[n] if row >> 2 - n & 1 else inverse[n] for n in range(3))
            both = e.op(f"and i32 {a}, {b}")
            result = e.op(f"or i32 {result}, {e.op(f'and i32 {both}, {c}')}")
    target = i.operands[0]
    if isinstance(target, Pair):  # the second destination says whether any bit is set, combined with a predicate
        how = next(modifier for modifier in i.modifiers if modifier in ("and", "or", "xor"))
        flag = e.op(f"icmp ne i32 {result}, 0")
        flag = e.op(f"{how} i1 {flag}, {e.get(i.operands[5], 'pred')}")
        e.set(target.second, flag, "pred")
        target = target.first
    e.set(target, result, "b32")
