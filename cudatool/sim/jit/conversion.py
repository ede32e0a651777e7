"""Conversions between types and address spaces (``cvt``, ``cvta``, ``isspacep``)."""

from __future__ import annotations

from cudatool.ptx import Instruction, Symbol, type_bytes
from cudatool.ptx.isa import FLOATS
from cudatool.sim.jit.arithmetic import canonical, directed, flush, intrinsic, relu, saturate
from cudatool.sim.jit.emit import Emitter, llvm_type
from cudatool.sim.jit.formats import FORMATS, narrow, widen_fp8
from cudatool.sim.jit.table import lowers, types_of

__all__: list[str] = []

# Rounding to an integral value, for float to integer as for float to float.
_INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@lowers("cvt")
def _cvt(e: Emitter, i: Instruction) -> None:
    if "pack" in i.modifiers:
        return _pack_integers(e, i)
    types = types_of(i)
    if len(types) < 2:
        raise e.unsupported()
    target, source = types[-2:]
    if target in ("e4m3x2", "e5m2x2"):
        return _to_fp8(e, i, target, source)
    if source in ("e4m3x2", "e5m2x2"):
        return _from_fp8(e, i, target, source)
    if target in ("f16x2", "bf16x2") and source == "f32":
        # The first source becomes the upper half.
        halves = [_pattern(e, i, e.get(operand, "f32"), "f32", target[:-2]) for operand in i.operands[2:0:-1]]
        return e.set(i.operands[0], e.pack([e.convert(half, "i32", "i16") for half in halves], "i16"), "b32")
    if target.endswith("x2") or source.endswith("x2"):
        raise e.unsupported()
    if source in FLOATS:
        value = e.get(i.operands[1], source)
        if "ftz" in i.modifiers and source == "f32":
            value = flush(e, value, "float")
        if target in FORMATS or target == "f64":
            return _float_to_float(e, i, value, source, target)
        return _float_to_integer(e, i, value, source, target)
    if target in FLOATS:
        return _integer_to_float(e, i, source, target)
    return _integer_to_integer(e, i, source, target)


def _mode(i: Instruction) -> str:
    return next((m for m in i.modifiers if m in ("rz", "rm", "rp", "rna")), "rn")


def _pattern(e: Emitter, i: Instruction, value: str, source: str, target: str) -> str:
    """Return the pattern (i32) of a float or double in a narrower format, rounded and clamped as `i` says."""
    kind = llvm_type(source)
    if "relu" in i.modifiers:
        value = relu(e, value, kind)
    if "sat" in i.modifiers:
        value = saturate(e, value, kind)
    mode, finite = _mode(i), "satfinite" in i.modifiers
    if mode == "rn" and kind == "float" and target == "f16" and not finite:  # hosts have this one
        half = canonical(e, e.op(f"fptrunc float {value} to half"), "half")
        return e.convert(half, "half", "i32")
    if mode == "rn" and kind == "float" and target == "bf16" and not finite:
        return e.convert(e.call("i16", "bf16_round", f"float {value}"), "i16", "i32")
    code = narrow(e, value, kind, target, mode, finite=finite)
    return e.convert(code, "i32" if kind == "float" else "i64", "i32")


def _float_to_float(e: Emitter, i: Instruction, value: str, source: str, target: str) -> None:
    have, want = llvm_type(source), llvm_type(target)
    integral = next((_INTEGRAL[m] for m in i.modifiers if m in _INTEGRAL), None)
    if integral:
        value = intrinsic(e, integral, have, value)
    if target == "tf32":
        code = _pattern(e, i, value, source, target)
        return e.set(i.operands[0], e.op(f"shl i32 {code}, 13"), "b32")
    if source == target or target == "f64" or (target == "f32" and source != "f64"):
        if have != want:
            value = e.op(f"fpext {have} {value} to {want}")
    elif target == "f32" and _mode(i) == "rn":
        value = e.op(f"fptrunc double {value} to float")
    else:
        if have == "half":
            value, source = e.op(f"fpext half {value} to float"), "f32"
        code = _pattern(e, i, value, source, target)
        if target == "f32":
            return _finish(e, i, e.op(f"bitcast i32 {code} to float"), target)
        return e.set(i.operands[0], e.convert(code, "i32", "i16"), "b16")
    return _finish(e, i, value, target)


def _finish(e: Emitter, i: Instruction, value: str, target: str) -> None:
    """Write a float to the destination, clamped as `i` says."""
    kind = llvm_type(target)
    if "ftz" in i.modifiers and target == "f32":
        value = flush(e, value, kind)
    if target == "f16":
        value = canonical(e, value, kind)
    if "sat" in i.modifiers:
        value = saturate(e, value, kind)
    if "relu" in i.modifiers:
        value = relu(e, value, kind)
    e.set(i.operands[0], value, target)


def _to_fp8(e: Emitter, i: Instruction, target: str, source: str) -> None:
    if source == "f32":
        values = [e.get(operand, "f32") for operand in i.operands[2:0:-1]]
    elif source == "f16x2":
        pair = e.get(i.operands[1], "f16x2")
        values = [e.op(f"fpext half {e.op(f'extractelement <2 x half> {pair}, i32 {n}')} to float") for n in (0, 1)]
    else:
        raise e.unsupported()
    codes = [e.convert(_pattern(e, i, value, "f32", target[:-2]), "i32", "i8") for value in values]
    e.set(i.operands[0], e.pack(codes, "i8"), "b16")


def _from_fp8(e: Emitter, i: Instruction, target: str, source: str) -> None:
    if target != "f16x2":
        raise e.unsupported()
    both = e.op(f"bitcast i16 {e.get(i.operands[1], 'b16')} to <2 x i8>")
    halves = []
    for n in (0, 1):
        half = widen_fp8(e, e.op(f"extractelement <2 x i8> {both}, i32 {n}"), source[:-2])
        if "relu" in i.modifiers:
            half = relu(e, half, "half")
        halves.append(e.op(f"bitcast half {canonical(e, half, 'half')} to i16"))
    e.set(i.operands[0], e.pack(halves, "i16"), "b32")


def _pack_integers(e: Emitter, i: Instruction) -> None:
    """``cvt.pack``: two s32 saturated to a narrow type side by side, above them the low part of a third operand."""
    narrow_type = i.modifiers[i.modifiers.index("sat") + 1]
    bits, signed = int(narrow_type[1:]), narrow_type[0] == "s"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    result = "0"
    for place, operand in enumerate((i.operands[2], i.operands[1])):
        value = intrinsic(e, "smax", "i32", e.get(operand, "s32"), str(low))
        value = e.op(f"and i32 {intrinsic(e, 'smin', 'i32', value, str(high))}, {2**bits - 1}")
        result = e.op(f"or i32 {result}, {e.op(f'shl i32 {value}, {place * bits}')}")
    if bits < 16:
        above = e.op(f"shl i32 {e.get(i.operands[3], 'b32')}, {2 * bits}")
        result = e.op(f"or i32 {result}, {above}")
    e.set(i.operands[0], result, "b32")


def _float_to_integer(e: Emitter, i: Instruction, value: str, source: str, target: str) -> None:
    have, want = llvm_type(source), llvm_type(target)
    if have == "half":
        value, have = e.op(f"fpext half {value} to float"), "float"
    integral = next((_INTEGRAL[m] for m in i.modifiers if m in _INTEGRAL), "trunc")
    if integral != "trunc":
        value = intrinsic(e, integral, have, value)
    # The result saturates, whether or not .sat is written.
    how = "fptosi" if target[0] == "s" else "fptoui"
    suffix = {"float": "f32", "double": "f64"}[have]
    result = e.call(want, f"llvm.{how}.sat.{want}.{suffix}", f"{have} {value}")
    if have == "double" or want == "i64":  # NaN gives the highest bit alone; in the other cases zero
        nan = e.op(f"fcmp uno {have} {value}, 0.0")
        result = e.op(f"select i1 {nan}, {want} {1 << int(want[1:]) - 1}, {want} {result}")
    e.set(i.operands[0], result, target)


def _integer_to_float(e: Emitter, i: Instruction, source: str, target: str) -> None:
    have, want = llvm_type(source), llvm_type(target)
    how = "sitofp" if source[0] == "s" else "uitofp"
    value = e.get(i.operands[1], source)
    if target in ("f16", "bf16") or (target == "f32" and _mode(i) != "rn"):
        if have == "i64":
            value = _fit_double(e, value, how)
        code = _pattern(e, i, e.op(f"{how} {have} {value} to double"), "f64", target)
        bits = FORMATS[target].bits
        return e.set(i.operands[0], e.convert(code, "i32", f"i{bits}"), f"b{bits}")
    value = e.op(f"{how} {have} {value} to {want}") if _mode(i) == "rn" else _directed_double(e, i, value, have, how)
    return _finish(e, i, value, target)


def _directed_double(e: Emitter, i: Instruction, value: str, have: str, how: str) -> str:
    """Return an integer as a double rounded as `i` says: the sum of two exact halves."""
    wide = e.convert(value, have, "i64", signed=how == "sitofp")
    shift = "ashr" if how == "sitofp" else "lshr"
    upper = e.op(f"{shift} i64 {wide}, 32")
    high = e.op(f"fmul double {e.op(f'{how} i64 {upper} to double')}, 4294967296.0")
    low = e.op(f"uitofp i64 {e.op(f'and i64 {wide}, 4294967295')} to double")
    return directed(e, i, "double", "add", high, low)


def _fit_double(e: Emitter, value: str, how: str) -> str:
    """Return a number that a double holds exactly and that a narrower format rounds as it would round `value`.

    Of large numbers the low bits are replaced by one that says whether any of them was set.
    """
    low = e.op(f"and i64 {value}, 4095")
    sticky = e.op(f"zext i1 {e.op(f'icmp ne i64 {low}, 0')} to i64")
    short = e.op(f"or i64 {e.op(f'and i64 {value}, -4096')}, {e.op(f'shl i64 {sticky}, 11')}")
    magnitude = e.call("i64", "llvm.abs.i64", f"i64 {value}", "i1 false") if how == "sitofp" else value
    fits = e.op(f"icmp ult i64 {magnitude}, {2**53}")
    return e.op(f"select i1 {fits}, i64 {value}, i64 {short}")


def _integer_to_integer(e: Emitter, i: Instruction, source: str, target: str) -> None:
    have, want = llvm_type(source), llvm_type(target)
    value = e.get(i.operands[1], source)
    if "sat" in i.modifiers:
        wide = "i128"
        value = e.convert(value, have, wide, signed=source[0] == "s")
        bits = 8 * type_bytes(target)
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if target[0] == "s" else (0, 2**bits - 1)
        value = intrinsic(e, "smin", wide, intrinsic(e, "smax", wide, value, str(low)), str(high))
        value = e.convert(value, wide, want)
    else:
        value = e.convert(value, have, want, signed=source[0] == "s")
    e.set(i.operands[0], value, target)


# ---- address spaces: global, constant and parameter addresses are generic addresses; shared and local are offsets ----

_WINDOWS = {"shared": "%shared", "shared::cta": "%shared", "local": "%local"}


@lowers("cvta")
def _cvta(e: Emitter, i: Instruction) -> None:
    t = types_of(i)[-1]
    value = e.get(i.operands[1], "u64")
    window = next((_WINDOWS[m] for m in i.modifiers if m in _WINDOWS), None)
    if window:
        base = e.op(f"ptrtoint ptr {window} to i64")
        value = e.op(f"{'sub' if 'to' in i.modifiers else 'add'} i64 {value}, {base}")
    e.set(i.operands[0], e.convert(value, "i64", llvm_type(t)), t)


@lowers("isspacep")
def _isspacep(e: Emitter, i: Instruction) -> None:
    value = e.get(i.operands[1], "u64")

    def within(base: str, size: str) -> str:
        return e.op(f"icmp ult i64 {e.op(f'sub i64 {value}, {base}')}, {size}")

    def window(name: str) -> str:
        return e.op(f"ptrtoint ptr {name} to i64")

    spaces = {
        "shared": within(window("%shared"), e.field("shared_bytes")),
        "local": within(window("%local"), str(e.layout.local_bytes)),
        "param": within(window("%params"), str(e.layout.param_bytes)),
        "const": "false",
    }
    for name, size in e.layout.constants.items():
        inside = within(e.address_of(Symbol(name)), str(size))
        spaces["const"] = e.op(f"or i1 {spaces['const']}, {inside}")
    which = i.modifiers[0].partition("::")[0]
    if which == "global":
        elsewhere = "false"
        for flag in spaces.values():
            elsewhere = e.op(f"or i1 {elsewhere}, {flag}")
        result = e.op(f"xor i1 {elsewhere}, true")
    else:
        result = spaces[which]
    e.set(i.operands[0], result, "pred")
