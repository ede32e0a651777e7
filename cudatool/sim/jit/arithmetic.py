"""Arithmetic. Semantics: PTX ISA, chapters 9.7.1 to 9.7.5."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from cudatool.ptx import Instruction, Register, type_bytes
from cudatool.sim.jit import approximate
from cudatool.sim.jit.emit import Emitter, llvm_type
from cudatool.sim.jit.formats import fma_to_odd, narrow
from cudatool.sim.jit.table import lowers, types_of

__all__ = ["FLOATS", "canonical", "directed", "extreme", "flush", "inputs", "intrinsic", "relu", "saturate"]

FLOATS = frozenset({"f16", "bf16", "f16x2", "bf16x2", "f32", "f64"})
_FLUSHED = frozenset({"f16", "bf16", "f16x2", "bf16x2", "f32"})
_SUFFIX = {
    "float": "f32",
    "double": "f64",
    "half": "f16",
    "<2 x half>": "v2f16",
    "<2 x float>": "v2f32",
    "<2 x i16>": "v2i16",
}
_DIRECTED = frozenset({"rz", "rm", "rp"})


def _suffix(kind: str) -> str:
    return _SUFFIX.get(kind, kind)


def intrinsic(e: Emitter, name: str, kind: str, *values: str, extra: str = "") -> str:
    """Call ``llvm.name`` on values of one type."""
    arguments = [f"{kind} {value}" for value in values] + ([extra] if extra else [])
    return e.call(kind, f"llvm.{name}.{_suffix(kind)}", *arguments)


def _zero(kind: str) -> str:
    return "zeroinitializer" if kind[0] == "<" else "0.0"


def flush(e: Emitter, value: str, kind: str) -> str:
    """Return a float value with subnormals replaced by zero of the same sign (``.ftz``)."""
    magnitude = intrinsic(e, "fabs", kind, value)
    limit = "0x3810000000000000" if kind == "float" else "0xH0400"
    if kind[0] == "<":
        limit = f"splat ({'half 0xH0400' if 'half' in kind else 'float 0x3810000000000000'})"
    zero = intrinsic(e, "copysign", kind, _zero(kind), value)
    return _select(e, kind, f"olt {kind} {magnitude}, {limit}", zero, value)


def saturate(e: Emitter, value: str, kind: str) -> str:
    """Return a float value clamped to [0, 1]; NaN becomes 0 (``.sat``)."""
    zero, one = "0.0", "1.0"
    if kind[0] == "<":
        scalar = "half" if "half" in kind else "float"
        zero, one = f"splat ({scalar} 0.0)", f"splat ({scalar} 1.0)"
    positive = _select(e, kind, f"ogt {kind} {value}, {zero}", value, zero)
    return _select(e, kind, f"olt {kind} {positive}, {one}", positive, one)


def relu(e: Emitter, value: str, kind: str) -> str:
    """Return a float value with what is not positive replaced by zero; NaN stays (``.relu``)."""
    return _select(e, kind, f"ole {kind} {value}, {_zero(kind)}", _zero(kind), value)


def _select(e: Emitter, kind: str, test: str, yes: str, no: str) -> str:
    """Return one of two values by a float comparison, for each element of a vector."""
    return e.op(f"select {'<2 x i1>' if kind[0] == '<' else 'i1'} {e.op(f'fcmp {test}')}, {kind} {yes}, {kind} {no}")


_NAN = {  # what a GPU makes
    "half": "0xH7FFF",
    "float": "0x7FFFFFFFE0000000",
    "double": "0xFFF8000000000000",
    "<2 x half>": "splat (half 0xH7FFF)",
    "<2 x float>": "splat (float 0x7FFFFFFFE0000000)",
}
_BITS = {
    "half": "i16",
    "float": "i32",
    "double": "i64",
    "<2 x half>": "<2 x i16>",
    "<2 x float>": "<2 x i32>",
}


def extreme(e: Emitter, which: str, kind: str, a: str, b: str, *, nan: bool = False) -> str:
    """Return the ``"min"`` or ``"max"`` of two float values. Zeros are ordered by their signs.

    Of a NaN and a number the number, or NaN if `nan` (``.NaN``). Comparisons, because LLVM 22's ``minimumnum`` gives
    the NaN on x86 when it knows that the other operand is a number.
    """
    bits = _BITS[kind]
    ordered = _select(e, kind, f"{'olt' if which == 'min' else 'ogt'} {kind} {a}, {b}", a, b)
    patterns = (e.op(f"bitcast {kind} {value} to {bits}") for value in (a, b))
    both = e.op(f"{'or' if which == 'min' else 'and'} {bits} {', '.join(patterns)}")
    same = _select(e, kind, f"oeq {kind} {a}, {b}", e.op(f"bitcast {bits} {both} to {kind}"), ordered)
    if nan:
        return _select(e, kind, f"uno {kind} {a}, {b}", _NAN[kind], same)
    return _select(e, kind, f"uno {kind} {b}, {b}", a, same)


def canonical(e: Emitter, value: str, kind: str) -> str:
    """Return a half, or two, with any NaN replaced by the one that a GPU makes."""
    return _select(e, kind, f"uno {kind} {value}, {value}", _NAN[kind], value)


def inputs(e: Emitter, i: Instruction, t: str, start: int = 1, stop: int | None = None) -> list[str]:
    """Return the source operands as values of type `t`, flushed if the instruction says so."""
    values = [e.get(operand, t) for operand in i.operands[start:stop]]
    if "ftz" in i.modifiers and t in _FLUSHED:
        values = [flush(e, value, llvm_type(t)) for value in values]
    return values


def _put_result(e: Emitter, i: Instruction, t: str, value: str) -> None:
    kind = llvm_type(t)
    if t in FLOATS:
        if "ftz" in i.modifiers and t in _FLUSHED:
            value = flush(e, value, kind)
        if t in ("f16", "f16x2"):
            value = canonical(e, value, kind)
        if "sat" in i.modifiers:
            value = saturate(e, value, kind)
        if "relu" in i.modifiers:
            value = relu(e, value, kind)
    e.set(i.operands[0], value, t)


_OPERATIONS = ("add", "sub", "mul", "fma", "div", "sqrt")  # as cudatool_rounded_* of _device.c counts them
_MODES = ("rn", "rm", "rp", "rz")


def directed(e: Emitter, i: Instruction, kind: str, operation: str, *values: str) -> str:
    """Return the result of an operation rounded in the direction that `i` asks for.

    A product and sum of single precision is computed in place, for loops to be vectorized: CUDA's expf has one. For the
    rest a function of the host changes its rounding mode.
    """
    mode = next(number for number, name in enumerate(_MODES) if number and name in i.modifiers)
    if kind == "float" and operation in ("add", "sub", "mul", "fma"):
        e.define(_directed_sum(_MODES[mode]))
        a, b = values[:2]
        if operation in ("add", "sub"):
            other = b if operation == "add" else e.op(f"fneg float {b}")
            a, b, c = a, "1.0", other
        else:
            # What is added to a product alone is a zero of its sign, so that the sign of a zero stays.
            zero = "" if operation == "fma" else intrinsic(e, "copysign", kind, "0.0", _sign_product(e, kind, a, b))
            c = values[2] if operation == "fma" else zero
        return e.op(f"call float @sum_{_MODES[mode]}(float {a}, float {b}, float {c})")
    suffix = "f32" if kind == "float" else "f64"
    operands = [f"{kind} {value}" for value in (*values, "0.0", "0.0")[:3]]
    return e.call(kind, f"cudatool_rounded_{suffix}", f"i32 {_OPERATIONS.index(operation)}", f"i32 {mode}", *operands)


@cache
def _directed_sum(mode: str) -> str:
    """Return ``sum_<mode>``: a * b + c in single precision, rounded down (rm), up (rp) or to zero (rz).

    In double precision the product is exact, and the sum is exactly ``%s + %e`` (Knuth, TAOCP 4.2.2, theorem B). The
    float nearest to ``%s`` is the result or its neighbor, as ``%r - %s``, which is exact too, compares with ``%e``.
    """
    down = "%over" if mode == "rm" else "%over.down" if mode == "rz" else "false"
    up = "%under" if mode == "rp" else "%under.up" if mode == "rz" else "false"
    zero = "%both" if mode == "rm" else "%r.bits"  # a zero that is the sum of two signs is negative when rounded down
    return f"""
define internal float @sum_{mode}(float %a, float %b, float %c) alwaysinline {{
  %x = fpext float %a to double
  %y = fpext float %b to double
  %z = fpext float %c to double
  %p = fmul double %x, %y
  %s = fadd double %p, %z
  %z.1 = fsub double %s, %p
  %p.1 = fsub double %s, %z.1
  %p.2 = fsub double %p, %p.1
  %z.2 = fsub double %z, %z.1
  %e = fadd double %p.2, %z.2
  %r = fptrunc double %s to float
  %r.wide = fpext float %r to double
  %d = fsub double %r.wide, %s
  %over = fcmp ogt double %d, %e
  %under = fcmp olt double %d, %e
  %positive = fcmp ogt double %s, 0.0
  %negative = fcmp olt double %s, 0.0
  %over.down = and i1 %over, %positive
  %under.up = and i1 %under, %negative
  %r.bits = bitcast float %r to i32
  %r.negative = icmp slt i32 %r.bits, 0
  %r.zero = fcmp oeq float %r, 0.0
  %toward = select i1 %r.negative, i32 1, i32 -1
  %below.1 = add i32 %r.bits, %toward
  %below = select i1 %r.zero, i32 -2147483647, i32 %below.1
  %away = sub i32 0, %toward
  %above.1 = add i32 %r.bits, %away
  %above = select i1 %r.zero, i32 1, i32 %above.1
  %p.bits = bitcast double %p to i64
  %z.bits = bitcast double %z to i64
  %signs = or i64 %p.bits, %z.bits
  %signs.high = lshr i64 %signs, 32
  %signs.word = trunc i64 %signs.high to i32
  %both = and i32 %signs.word, -2147483648
  %is.zero = fcmp oeq double %s, 0.0
  %whole = select i1 %is.zero, i32 {zero}, i32 %r.bits
  %lower = select i1 {down}, i32 %below, i32 %whole
  %result = select i1 {up}, i32 %above, i32 %lower
  %value = bitcast i32 %result to float
  ret float %value
}}"""


def _is_directed(e: Emitter, i: Instruction, t: str) -> bool:
    if not _DIRECTED.intersection(i.modifiers):
        return False
    if t not in ("f32", "f64"):
        raise e.unsupported("rounding")
    return True


# ---- integer and floating-point ----


@lowers("add sub")
def _add(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    a, b = inputs(e, i, t)
    if t in FLOATS:
        directs = _is_directed(e, i, t)
        _put_result(e, i, t, directed(e, i, kind, i.opcode, a, b) if directs else e.op(f"f{i.opcode} {kind} {a}, {b}"))
    elif "sat" in i.modifiers:
        e.set(i.operands[0], intrinsic(e, f"s{i.opcode}.sat", kind, a, b), t)
    else:
        value = e.op(f"{i.opcode} {kind} {a}, {b}")
        if "cc" in i.modifiers:
            _set_carry(e, e.op(f"icmp {f'ult {kind} {value}, {a}' if i.opcode == 'add' else f'uge {kind} {a}, {b}'}"))
        e.set(i.operands[0], value, t)


# The condition code register, declared like any other when a kernel uses it. After a subtraction it holds whether
# there was *no* borrow: a GPU subtracts by adding the complement and one.
_CARRY = "%CC"


def _set_carry(e: Emitter, value: str) -> None:
    e.function.registers.setdefault(_CARRY, "pred")
    e.write(_CARRY, value, "i1")


def _carry(e: Emitter, kind: str) -> str:
    e.function.registers.setdefault(_CARRY, "pred")
    return e.op(f"zext i1 {e.read(_CARRY)[0]} to {kind}")


@lowers("addc subc")
def _addc(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind, wide = llvm_type(t), f"i{16 * type_bytes(t)}"
    a, b = inputs(e, i, t)
    if i.opcode == "subc":
        b = e.op(f"xor {kind} {b}, -1")
    a, b = (e.op(f"zext {kind} {value} to {wide}") for value in (a, b))
    value = e.op(f"add {wide} {e.op(f'add {wide} {a}, {b}')}, {_carry(e, wide)}")
    _finish_carry(e, i, t, value, wide)


def _finish_carry(e: Emitter, i: Instruction, t: str, value: str, wide: str) -> None:
    """Write the low half of a double-width result, and the carry if asked for."""
    kind = llvm_type(t)
    if "cc" in i.modifiers:
        high = e.op(f"lshr {wide} {value}, {8 * type_bytes(t)}")
        _set_carry(e, e.op(f"trunc {wide} {high} to i1"))
    e.set(i.operands[0], e.op(f"trunc {wide} {value} to {kind}"), t)


def _product(e: Emitter, i: Instruction, t: str, a: str, b: str) -> tuple[str, str]:
    """Return the product that ``.lo``, ``.hi`` or ``.wide`` asks for, and its type."""
    kind, bits = llvm_type(t), 8 * type_bytes(t)
    if "lo" in i.modifiers:
        return e.op(f"mul {kind} {a}, {b}"), t
    wide, extend = f"i{2 * bits}", "sext" if t[0] == "s" else "zext"
    a, b = (e.op(f"{extend} {kind} {value} to {wide}") for value in (a, b))
    value = e.op(f"mul {'nsw' if t[0] == 's' else 'nuw'} {wide} {a}, {b}")
    if "wide" in i.modifiers:
        return value, f"{t[0]}{2 * bits}"
    return e.op(f"trunc {wide} {e.op(f'lshr {wide} {value}, {bits}')} to {kind}"), t


@lowers("mul")
def _mul(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    a, b = inputs(e, i, t)
    if t in FLOATS:
        directs = _is_directed(e, i, t)
        _put_result(e, i, t, directed(e, i, kind, "mul", a, b) if directs else e.op(f"fmul {kind} {a}, {b}"))
    else:
        e.set(i.operands[0], *_product(e, i, t, a, b))


@lowers("mad madc")
def _mad(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    if t in FLOATS:
        return _fma(e, i)
    a, b = (e.get(operand, t) for operand in i.operands[1:3])
    product, wide = _product(e, i, t, a, b)
    c = e.get(i.operands[3], wide)
    kind = llvm_type(wide)
    if "sat" in i.modifiers:
        e.set(i.operands[0], intrinsic(e, "sadd.sat", kind, product, c), wide)
    elif "cc" in i.modifiers or i.opcode == "madc":
        double = f"i{16 * type_bytes(wide)}"
        value = e.op(
            f"add {double} {e.op(f'zext {kind} {product} to {double}')}, {e.op(f'zext {kind} {c} to {double}')}"
        )
        if i.opcode == "madc":
            value = e.op(f"add {double} {value}, {_carry(e, double)}")
        _finish_carry(e, i, wide, value, double)
    else:
        exact = " nuw nsw" if _is_thread_index(e, i) else ""
        e.set(i.operands[0], e.op(f"add{exact} {kind} {product}, {c}"), wide)
    return None


def _is_thread_index(e: Emitter, i: Instruction) -> bool:
    """Whether `i` computes ``ctaid * ntid + tid``, which does not overflow unless the grid is large.

    Loops over threads are vectorized only where addresses are known not to wrap around.
    """
    sources = [e.indices.get(operand.name, "") for operand in i.operands[1:] if isinstance(operand, Register)]
    if len(sources) != 3 or "lo" not in i.modifiers:
        return False
    axis = sources[2][-2:]
    return sources[2] == f"%tid{axis}" and {*sources[:2]} == {f"%ctaid{axis}", f"%ntid{axis}"}


@lowers("fma")
def _fma(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    if "oob" in i.modifiers:
        raise e.unsupported("oob")
    a, b, c = inputs(e, i, t)
    if t not in ("f32", "f64"):
        return _put_result(e, i, t, _half_fma(e, t, a, b, c))
    if _is_directed(e, i, t):
        return _put_result(e, i, t, directed(e, i, kind, "fma", a, b, c))
    return _put_result(e, i, t, intrinsic(e, "fma", kind, a, b, c))


def _halves(e: Emitter, t: str, value: str) -> list[str]:
    """Return the parts of a value of a 16-bit format, packed or not, as floats."""
    kind = llvm_type(t)
    parts = [e.op(f"extractelement {kind} {value}, i32 {n}") for n in (0, 1)] if t.endswith("x2") else [value]
    return [e.op(f"fpext half {part} to float") for part in parts] if t in ("f16", "f16x2") else parts


def _join(e: Emitter, t: str, parts: list[str]) -> str:
    """Return parts of the LLVM type that `t` is computed in as one value."""
    if len(parts) == 1:
        return parts[0]
    kind, part = llvm_type(t), "half" if t[0] == "f" else "float"
    low = e.op(f"insertelement {kind} poison, {part} {parts[0]}, i32 0")
    return e.op(f"insertelement {kind} {low}, {part} {parts[1]}, i32 1")


def _half_fma(e: Emitter, t: str, a: str, b: str, c: str) -> str:
    """Fused multiply and add of 16-bit formats, rounded once."""
    target = t.removesuffix("x2")
    parts = []
    for factors in zip(*(_halves(e, t, value) for value in (a, b, c)), strict=True):
        code = narrow(e, fma_to_odd(e, *factors), "double", target, "rn")
        if target == "f16":
            parts.append(e.op(f"bitcast i16 {e.convert(code, 'i64', 'i16')} to half"))
        else:
            high = e.op(f"shl i32 {e.convert(code, 'i64', 'i32')}, 16")
            parts.append(e.op(f"bitcast i32 {high} to float"))
    return _join(e, t, parts)


@lowers("mul24 mad24")
def _mul24(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    shift = "ashr" if t[0] == "s" else "lshr"
    factors = []
    for operand in i.operands[1:3]:
        wide = e.op(f"shl i32 {e.get(operand, t)}, 8")
        extend = "sext" if t[0] == "s" else "zext"
        factors.append(e.op(f"{extend} i32 {e.op(f'{shift} i32 {wide}, 8')} to i64"))
    value = e.op(f"mul i64 {factors[0]}, {factors[1]}")
    if "hi" in i.modifiers:  # bits 16 to 47
        value = e.op(f"lshr i64 {value}, 16")
    value = e.op(f"trunc i64 {value} to i32")
    if i.opcode == "mad24":
        value = e.op(f"add i32 {value}, {e.get(i.operands[3], t)}")
    e.set(i.operands[0], value, t)


@lowers("sad")
def _sad(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    a, b, c = inputs(e, i, t)
    high, low = (intrinsic(e, f"{t[0]}{which}", kind, a, b) for which in ("max", "min"))
    e.set(i.operands[0], e.op(f"add {kind} {e.op(f'sub {kind} {high}, {low}')}, {c}"), t)


@lowers("div rem")
def _div(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    a, b = inputs(e, i, t)
    if t in FLOATS:
        directs = _is_directed(e, i, t)
        value = directed(e, i, kind, "div", a, b) if directs else e.op(f"fdiv {kind} {a}, {b}")
        return _put_result(e, i, t, value)
    # A zero divisor gives all ones, and the dividend as the remainder; neither may trap on the host.
    zero = e.op(f"icmp eq {kind} {b}, 0")
    unsafe = zero
    if t[0] == "s":  # the smallest number by -1 overflows: dividing by -1 is negation
        minus = e.op(f"icmp eq {kind} {b}, -1")
        unsafe = e.op(f"or i1 {zero}, {minus}")
    divisor = e.op(f"select i1 {unsafe}, {kind} 1, {kind} {b}")
    value = e.op(f"{t[0]}{i.opcode} {kind} {a}, {divisor}")
    if t[0] == "s" and i.opcode == "div":
        value = e.op(f"select i1 {minus}, {kind} {e.op(f'sub {kind} 0, {a}')}, {kind} {value}")
    value = e.op(f"select i1 {zero}, {kind} {'-1' if i.opcode == 'div' else a}, {kind} {value}")
    e.set(i.operands[0], value, t)
    return None


@lowers("abs neg")
def _abs(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    (a,) = inputs(e, i, t)
    if t in FLOATS:
        _put_result(e, i, t, intrinsic(e, "fabs", kind, a) if i.opcode == "abs" else e.op(f"fneg {kind} {a}"))
    else:
        negative = e.op(f"sub {kind} 0, {a}")
        if i.opcode == "abs":
            negative = e.op(f"select i1 {e.op(f'icmp slt {kind} {a}, 0')}, {kind} {negative}, {kind} {a}")
        e.set(i.operands[0], negative, t)


@lowers("min max")
def _min(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    values = inputs(e, i, t)
    xorsign = "xorsign" in i.modifiers
    value, *others = [intrinsic(e, "fabs", kind, value) for value in values] if xorsign else values
    for other in others:
        if t in FLOATS:
            value = extreme(e, i.opcode, kind, value, other, nan="NaN" in i.modifiers)
        else:
            value = intrinsic(e, f"{t[0]}{i.opcode}", kind, value, other)
    if xorsign:
        value = intrinsic(e, "copysign", kind, value, _sign_product(e, kind, *values))
    if "relu" in i.modifiers and t not in FLOATS:
        value = intrinsic(e, "smax", kind, value, "zeroinitializer" if kind[0] == "<" else "0")
    _put_result(e, i, t, value)


def _sign_product(e: Emitter, kind: str, a: str, b: str) -> str:
    """Return a number whose sign is the exclusive or of the signs of `a` and `b`."""
    bits = _BITS[kind]
    a, b = (e.op(f"bitcast {kind} {value} to {bits}") for value in (a, b))
    return e.op(f"bitcast {bits} {e.op(f'xor {bits} {a}, {b}')} to {kind}")


@lowers("rcp")
def _rcp(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    (a,) = inputs(e, i, t)
    directs = _is_directed(e, i, t)
    _put_result(e, i, t, directed(e, i, kind, "div", "1.0", a) if directs else e.op(f"fdiv {kind} 1.0, {a}"))


@lowers("sqrt")
def _sqrt(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    (a,) = inputs(e, i, t)
    directs = _is_directed(e, i, t)
    value = directed(e, i, kind, "sqrt", a) if directs else intrinsic(e, "sqrt", kind, a)
    # Said in so many words because LLVM 22 takes a root of what may be negative for a number.
    _put_result(e, i, t, _select(e, kind, f"oge {kind} {a}, 0.0", value, _NAN[kind]))


@lowers("rsqrt")
def _rsqrt(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    (a,) = inputs(e, i, t)
    _put_result(e, i, t, e.op(f"fdiv {kind} 1.0, {intrinsic(e, 'sqrt', kind, a)}"))


_APPROXIMATE: dict[str, tuple[str, Callable[[], str] | None]] = {
    "ex2": ("exp2_in_place", approximate.exp2),
    "lg2": ("log2_in_place", approximate.log2),
    "sin": ("sin_in_place", approximate.sine),
    "cos": ("cos_in_place", approximate.sine),
    "tanh": ("tanhf", None),
}


@lowers("ex2 lg2 sin cos tanh")
def _approximate(e: Emitter, i: Instruction) -> None:
    """These are approximate on a GPU; here they are as exact as the host's library, most within two units more."""
    t = types_of(i)[-1]
    (a,) = inputs(e, i, t)
    if t == "f64":
        raise e.unsupported()
    function, define = _APPROXIMATE[i.opcode]
    if define is not None:
        e.define(define())
    values = [e.call("float", function, f"float {part}") for part in _halves(e, t, a)]
    if t[0] == "f" and t != "f32":
        values = [e.op(f"fptrunc float {value} to half") for value in values]
    _put_result(e, i, t, _join(e, t, values))


@lowers("copysign")
def _copysign(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    a, b = inputs(e, i, t)
    e.set(i.operands[0], intrinsic(e, "copysign", llvm_type(t), b, a), t)  # PTX names the sign first


# What llvm.is.fpclass tests; zeros count as normal numbers.
_CLASSES = {"finite": 504, "infinite": 516, "number": 1020, "notanumber": 3, "normal": 360, "subnormal": 144}


@lowers("testp")
def _testp(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    kind = llvm_type(t)
    mask = next(_CLASSES[m] for m in i.modifiers if m in _CLASSES)
    (a,) = inputs(e, i, t)
    e.set(i.operands[0], e.call("i1", f"llvm.is.fpclass.{_suffix(kind)}", f"{kind} {a}", f"i32 {mask}"), "pred")
