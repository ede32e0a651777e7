"""Narrow floating-point formats: f16, bf16, tf32 and the 8-bit ones. Semantics: PTX ISA, 5.2.3 and 9.7.9 (``cvt``).

No host computes in all of them. Values are rounded to a format by one function of integer operations, written out for
each format, rounding and source type that a kernel uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cudatool.sim.jit.emit import Emitter

__all__ = ["FORMATS", "Format", "fma_to_odd", "narrow", "sum_error", "widen_fp8"]


@dataclass(frozen=True, slots=True)
class Format:
    """A format's bits, sign apart.

    Attributes
    ----------
    bits
        Width, sign included.
    mantissa
        Bits of the significand without the leading one.
    least
        Exponent of the smallest normal number.
    largest, overflow, nan
        Patterns: the largest finite number, what larger ones become (infinity, or NaN where there is none), and NaN.
    """

    bits: int
    mantissa: int
    least: int
    largest: int
    overflow: int
    nan: int


FORMATS = {
    "f32": Format(32, 23, -126, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
    "f16": Format(16, 10, -14, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format(16, 7, -126, 0x7F7F, 0x7F80, 0x7FFF),
    "tf32": Format(19, 10, -126, 0x3FBFF, 0x3FC00, 0x3FFFF),  # the upper bits of a 32-bit register
    "e4m3": Format(8, 3, -6, 0x7E, 0x7F, 0x7F),
    "e5m2": Format(8, 2, -14, 0x7B, 0x7C, 0x7F),
}


def narrow(e: Emitter, value: str, source: str, target: str, mode: str, *, finite: bool = False) -> str:
    """Return the pattern (i32, or i64 from a double) of `value` rounded to a format.

    Parameters
    ----------
    source
        ``"float"`` or ``"double"``.
    target
        A key of :data:`FORMATS`.
    mode
        ``"rn"`` (ties to even), ``"rna"`` (ties away from zero), ``"rz"``, ``"rm"`` or ``"rp"``.
    finite
        Whether what is too large, and infinity, becomes the largest finite number (``.satfinite``).
    """
    name = f"narrow_{source}_{target}_{mode}{'_finite' if finite else ''}"
    kind = "i32" if source == "float" else "i64"
    e.define(_narrow_function(name, source, kind, FORMATS[target], mode, finite))
    return e.op(f"call {kind} @{name}({source} {value})")


class _Rounding(NamedTuple):
    """How a mode rounds: conditions (i1) in terms of the values of :data:`_NARROW`.

    Attributes
    ----------
    up
        Whether the magnitude is rounded up.
    overflows
        Whether what is too large for the format becomes infinity; else it is the largest finite number.
    """

    up: str
    overflows: str


_ROUNDINGS = {
    "rn": _Rounding("or i1 %above, %tie", "true"),
    "rna": _Rounding("icmp uge {kind} %rest, %half", "true"),
    "rz": _Rounding("and i1 %rounded, false", "false"),
    "rm": _Rounding("and i1 %rounded, %negative", "%negative"),
    "rp": _Rounding("and i1 %rounded, %positive", "%positive"),
}

# The significand is shifted right by as many bits as the format has fewer, and by more where the number is `below` its
# least exponent, and so subnormal. What was shifted out, the `rest`, says whether the last bit goes `up`. The leading
# one of what is `kept` makes the exponent one more than `above.least`, as it should be: 0 is for subnormal numbers. A
# carry out of the fraction makes the next exponent, too; out of the largest one, a pattern of at least the limit.
_NARROW = """
define internal {kind} @{name}({source} %x) alwaysinline {{
  %u = bitcast {source} %x to {kind}
  %magnitude = and {kind} %u, {magnitude}
  %negative = icmp slt {kind} %u, 0
  %positive = xor i1 %negative, true
  %field = lshr {kind} %magnitude, {mantissa}
  %subnormal = icmp eq {kind} %field, 0
  %leading = select i1 %subnormal, {kind} 0, {kind} {leading}
  %fraction = and {kind} %magnitude, {fraction}
  %significand = or {kind} %fraction, %leading
  %exponent = select i1 %subnormal, {kind} 1, {kind} %field
  %relative = sub {kind} %exponent, {least}
  %is.small = icmp slt {kind} %relative, 0
  %below = select i1 %is.small, {kind} %relative, {kind} 0
  %above.least = select i1 %is.small, {kind} 0, {kind} %relative
  %depth = sub {kind} {cut}, %below
  %too.deep = icmp ugt {kind} %depth, {deepest}
  %shift = select i1 %too.deep, {kind} {deepest}, {kind} %depth
  %kept = lshr {kind} %significand, %shift
  %back = shl {kind} %kept, %shift
  %rest = sub {kind} %significand, %back
  %rounded = icmp ne {kind} %rest, 0
  %half.shift = sub {kind} %shift, 1
  %half = shl {kind} 1, %half.shift
  %above = icmp ugt {kind} %rest, %half
  %middle = icmp eq {kind} %rest, %half
  %odd = trunc {kind} %kept to i1
  %tie = and i1 %middle, %odd
  %up = {up}
  %up.k = zext i1 %up to {kind}
  %base = shl {kind} %above.least, {kept}
  %sum = add {kind} %base, %kept
  %code = add {kind} %sum, %up.k
  %over = icmp uge {kind} %code, {limit}
  %top = select i1 {overflows}, {kind} {overflow}, {kind} {largest}
  %bounded = select i1 %over, {kind} %top, {kind} %code
  %is.infinite = icmp eq {kind} %magnitude, {infinity}
  %finite = select i1 %is.infinite, {kind} {overflow}, {kind} %bounded
  %sign.bit = lshr {kind} %u, {sign}
  %sign = shl {kind} %sign.bit, {to_sign}
  %signed = or {kind} %finite, %sign
  %is.nan = icmp ugt {kind} %magnitude, {infinity}
  %result = select i1 %is.nan, {kind} {nan}, {kind} %signed
  ret {kind} %result
}}"""


def _narrow_function(name: str, source: str, kind: str, to: Format, mode: str, finite: bool) -> str:
    mantissa, bias = (23, 127) if source == "float" else (52, 1023)
    bits = int(kind[1:])
    rounding = _ROUNDINGS[mode]
    return _NARROW.format(
        name=name,
        source=source,
        kind=kind,
        mantissa=mantissa,
        magnitude=2 ** (bits - 1) - 1,
        leading=1 << mantissa,
        fraction=(1 << mantissa) - 1,
        infinity=(2 * bias + 1) << mantissa,
        sign=bits - 1,
        least=to.least + bias,
        cut=mantissa - to.mantissa,
        deepest=mantissa + 2,  # so far shifted, each significand is less than half of the last bit
        up=rounding.up.format(kind=kind),
        kept=to.mantissa,
        limit=to.overflow,
        overflows=rounding.overflows,
        overflow=to.largest if finite else to.overflow,
        largest=to.largest,
        to_sign=to.bits - 1,
        nan=to.nan,
    )


def widen_fp8(e: Emitter, byte: str, source: str, count: int = 1) -> str:
    """Return the value of an e4m3 or e5m2 pattern (i8) as a half, which holds all of them exactly.

    Of a vector of `count` patterns, if it is more than one.
    """

    def kind(name: str) -> str:
        return name if count == 1 else f"<{count} x {name}>"

    def constant(name: str, value: object) -> str:
        return str(value) if count == 1 else f"splat ({name} {value})"

    short, half = kind("i16"), kind("half")
    wide = e.op(f"zext {kind('i8')} {byte} to {short}")
    eight = constant("i16", 8)
    if source == "e5m2":
        return e.op(f"bitcast {short} {e.op(f'shl {short} {wide}, {eight}')} to {half}")
    magnitude = e.op(f"and {short} {wide}, {constant('i16', 127)}")
    upper = e.op(f"and {short} {wide}, {constant('i16', 128)}")
    sign = e.op(f"shl {short} {upper}, {eight}")
    lower = e.op(f"shl {short} {magnitude}, {constant('i16', 7)}")
    pattern = e.op(f"or {short} {lower}, {sign}")
    scale = constant("half", "256.0")  # the biases are 7 and 15
    value = e.op(f"fmul {half} {e.op(f'bitcast {short} {pattern} to {half}')}, {scale}")
    is_nan = e.op(f"icmp eq {short} {magnitude}, {constant('i16', 127)}")
    return e.op(f"select {kind('i1')} {is_nan}, {half} {constant('half', '0xH7FFF')}, {half} {value}")


def sum_error(e: Emitter, kind: str, a: str, b: str, total: str) -> str:
    """Return a + b - total exactly (Knuth's TwoSum)."""
    bb = e.op(f"fsub {kind} {total}, {a}")
    aa = e.op(f"fsub {kind} {total}, {bb}")
    return e.op(f"fadd {kind} {e.op(f'fsub {kind} {a}, {aa}')}, {e.op(f'fsub {kind} {b}, {bb}')}")


def fma_to_odd(e: Emitter, a: str, b: str, c: str) -> str:
    """Return a * b + c, of numbers with at most 11 significant bits, as a double rounded to odd.

    A narrower format then rounds it as it would round the exact value: what was cut off is still seen to be there.
    """
    a, b, c = (e.op(f"fpext float {value} to double") for value in (a, b, c))
    product = e.op(f"fmul double {a}, {b}")  # exact
    total = e.op(f"fadd double {product}, {c}")
    error = sum_error(e, "double", product, c, total)
    pattern = e.op(f"bitcast double {total} to i64")
    even = e.op(f"xor i1 {e.op(f'trunc i64 {pattern} to i1')}, true")
    adjust = e.op(f"and i1 {even}, {e.op(f'fcmp one double {error}, 0.0')}")
    error_bits = e.op(f"bitcast double {error} to i64")
    inward = e.op(f"icmp slt i64 {e.op(f'xor i64 {pattern}, {error_bits}')}, 0")
    step = e.op(f"select i1 {inward}, i64 -1, i64 1")
    odd = e.op(f"add i64 {pattern}, {e.op(f'select i1 {adjust}, i64 {step}, i64 0')}")
    return e.op(f"bitcast i64 {odd} to double")
