"""Conversions between types and address spaces (``cvt``, ``cvta``, ``isspacep``)."""

from __future__ import annotations

from cudatool.ptx import Instruction, type_bytes
from cudatool.sim.jit.arithmetic import directed, flush, intrinsic, saturate, sum_error
from cudatool.sim.jit.emit import Emitter, llvm_type
from cudatool.sim.jit.table import lowers, types_of

__all__: list[str] = []

_FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
# Rounding to an integral value, for float to integer as for float to float.
_INTEGRAL = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@lowers("cvt")
def _cvt(e: Emitter, i: Instruction) -> None:
    types = types_of(i)
    if len(types) < 2 or types[-1] == "tf32":
        raise e.unsupported()
    target, source = types[-2:]
    if target in ("f16x2", "bf16x2") and source == "f32":
        return _pack_halves(e, i, target)
    if target.endswith("x2") or source.endswith("x2"):
        raise e.unsupported()
    if source in _FLOATS:
        value = e.get(i.operands[1], source)
        if "ftz" in i.modifiers and source == "f32":
            value = flush(e, value, "float")
        if target in _FLOATS or target == "tf32":
            return _float_to_float(e, i, value, source, target)
        return _float_to_integer(e, i, value, source, target)
    if target in _FLOATS:
        return _integer_to_float(e, i, source, target)
    return _integer_to_integer(e, i, source, target)


def _pack_halves(e: Emitter, i: Instruction, target: str) -> None:
    half = target[:-2]
    halves = []
    for operand in (i.operands[2], i.operands[1]):  # the first source becomes the upper half
        value = e.get(operand, "f32")
        if "relu" in i.modifiers:
            value = intrinsic(e, "maximum", "float", value, "0.0")
        if half == "f16":
            halves.append(e.op(f"bitcast half {e.op(f'fptrunc float {value} to half')} to i16"))
        else:
            halves.append(e.call("i16", "bf16_round", f"float {value}"))
    e.set(i.operands[0], e.pack(halves, "i16"), "b32")


def _float_to_float(e: Emitter, i: Instruction, value: str, source: str, target: str) -> None:
    have, want = llvm_type(source), llvm_type(target)
    integral = next((_INTEGRAL[m] for m in i.modifiers if m in _INTEGRAL), None)
    if integral:
        value = intrinsic(e, integral, have, value)
    if target == "tf32":
        return e.set(i.operands[0], value, "f32")  # kept in full precision
    order = ("half", "float", "double")
    if order.index(have) < order.index(want):
        value = e.op(f"fpext {have} {value} to {want}")
    elif have != want:
        value = _narrow(e, i, value, have, want)
    if target == "bf16" and source == "f64":
        raise e.unsupported()
    if "ftz" in i.modifiers and target == "f32":
        value = flush(e, value, "float")
    if "sat" in i.modifiers:
        value = saturate(e, value, want)
    if "relu" in i.modifiers:
        value = intrinsic(e, "maximum", want, value, "0.0")
    return e.set(i.operands[0], value, target)


def _narrow(e: Emitter, i: Instruction, value: str, have: str, want: str) -> str:
    """Return `value` rounded to a narrower format as `i` says."""
    rounded = e.op(f"fptrunc {have} {value} to {want}")
    mode = next((m for m in i.modifiers if m in ("rz", "rm", "rp")), None)
    if mode is None:
        return rounded
    bits = {"half": "i16", "float": "i32"}[want]
    back = e.op(f"fpext {want} {rounded} to {have}")
    pattern = e.op(f"bitcast {want} {rounded} to {bits}")
    negative = e.op(f"icmp slt {bits} {pattern}, 0")
    too_high = e.op(f"fcmp ogt {have} {back}, {value}")
    too_low = e.op(f"fcmp olt {have} {back}, {value}")
    # One step of the bit pattern away from zero (+1) or towards it (-1). A result of zero only ever grows.
    outward = {
        "rz": "false",
        "rm": e.op(f"and i1 {too_high}, {negative}"),
        "rp": e.op(f"and i1 {too_low}, {e.op(f'xor i1 {negative}, true')}"),
    }[mode]
    positive = e.op(f"xor i1 {negative}, true")
    inward_low = e.op(f"and i1 {too_low}, {negative}")
    inward_high = e.op(f"and i1 {too_high}, {positive}")
    inward = {"rz": e.op(f"or i1 {inward_low}, {inward_high}"), "rm": inward_high, "rp": inward_low}[mode]
    step = e.op(f"select i1 {inward}, {bits} -1, {bits} {e.op(f'zext i1 {outward} to {bits}')}")
    return e.op(f"bitcast {bits} {e.op(f'add {bits} {pattern}, {step}')} to {want}")


def _float_to_integer(e: Emitter, i: Instruction, value: str, source: str, target: str) -> None:
    have, want = llvm_type(source), llvm_type(target)
    integral = next((_INTEGRAL[m] for m in i.modifiers if m in _INTEGRAL), "trunc")
    if integral != "trunc":
        value = intrinsic(e, integral, have, value)
    # The result saturates, and NaN gives 0, whether or not .sat is written.
    how = "fptosi" if target[0] == "s" else "fptoui"
    suffix = {"float": "f32", "double": "f64", "half": "f16"}[have]
    e.set(i.operands[0], e.call(want, f"llvm.{how}.sat.{want}.{suffix}", f"{have} {value}"), target)


def _integer_to_float(e: Emitter, i: Instruction, source: str, target: str) -> None:
    have, want = llvm_type(source), llvm_type(target)
    how = "sitofp" if source[0] == "s" else "uitofp"
    value = e.get(i.operands[1], source)
    if not {"rz", "rm", "rp"}.intersection(i.modifiers):
        value = e.op(f"{how} {have} {value} to {want}")
    elif want == "double":
        value = _directed_double(e, i, value, have, how)
    else:
        if have == "i64":
            value = _fit_double(e, value, how)
        value = _narrow(e, i, e.op(f"{how} {have} {value} to double"), "double", want)
    if "sat" in i.modifiers:
        value = saturate(e, value, want)
    e.set(i.operands[0], value, target)


def _directed_double(e: Emitter, i: Instruction, value: str, have: str, how: str) -> str:
    """Return an integer as a double rounded as `i` says: the sum of two exact halves, and its error."""
    wide = e.convert(value, have, "i64", signed=how == "sitofp")
    shift = "ashr" if how == "sitofp" else "lshr"
    upper = e.op(f"{shift} i64 {wide}, 32")
    high = e.op(f"fmul double {e.op(f'{how} i64 {upper} to double')}, 4294967296.0")
    low = e.op(f"uitofp i64 {e.op(f'and i64 {wide}, 4294967295')} to double")
    total = e.op(f"fadd double {high}, {low}")
    return directed(e, i, "double", total, sum_error(e, "double", high, low, total))


def _fit_double(e: Emitter, value: str, how: str) -> str:
    """Return a number that a double holds exactly and that a float rounds as it would round `value`.

    Of large numbers the low bits are replaced by one that says whether any of them was set.
    """
    low = e.op(f"and i64 {value}, 2047")
    sticky = e.op(f"zext i1 {e.op(f'icmp ne i64 {low}, 0')} to i64")
    short = e.op(f"or i64 {e.op(f'and i64 {value}, -2048')}, {e.op(f'shl i64 {sticky}, 10')}")
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

    def within(window: str, size: str) -> str:
        base = e.op(f"ptrtoint ptr {window} to i64")
        return e.op(f"icmp ult i64 {e.op(f'sub i64 {value}, {base}')}, {size}")

    shared, local = within("%shared", e.field("shared_bytes")), within("%local", str(e.layout.local_bytes))
    if "local" in i.modifiers:
        result = local
    elif "shared" in i.modifiers or "shared::cta" in i.modifiers or "shared::cluster" in i.modifiers:
        result = shared
    elif "global" in i.modifiers:
        result = e.op(f"xor i1 {e.op(f'or i1 {shared}, {local}')}, true")
    else:
        result = "false"
    e.set(i.operands[0], result, "pred")
