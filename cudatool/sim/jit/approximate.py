"""Functions that are approximate on a GPU, as LLVM IR without calls and branches, for loops to be vectorized."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

__all__ = ["exp2", "log2", "sine"]


def _single(value: float) -> str:
    """Return a float as LLVM spells it: as the double of the same value."""
    (nearest,) = struct.unpack("<f", struct.pack("<f", value))
    return _double(nearest)


def _double(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def _polynomial(name: str, x: str, terms: Sequence[float]) -> str:
    """Return code for ``%name``, the polynomial of `x` whose coefficients are `terms`, the constant one first."""
    lines, value = [], _single(terms[-1])
    for k in reversed(range(len(terms) - 1)):
        result = f"%{name}" if k == 0 else f"%{name}.{k}"
        lines.append(f"  {result} = call float @llvm.fma.f32(float {value}, float {x}, float {_single(terms[k])})\n")
        value = result
    return "".join(lines)


_DECLARED = """
declare float @llvm.fma.f32(float, float, float)
declare float @llvm.fabs.f32(float)
declare float @llvm.rint.f32(float)
declare double @llvm.fma.f64(double, double, double)
declare double @llvm.rint.f64(double)
"""


@cache
def exp2() -> str:
    """Return ``exp2_in_place``.

    2**x is 2**n * 2**f with n the integer nearest to x: the series of 2**f (Abramowitz and Stegun, 4.2.1), which for
    |f| <= 1/2 is within 6e-9 after eight terms, times 2**n in two steps, for results that are subnormal.
    """
    series = _polynomial("series", "%f", [math.log(2) ** k / math.factorial(k) for k in range(8)])
    return f"""{_DECLARED}
define internal float @exp2_in_place(float %x) alwaysinline {{
  %small = fcmp olt float %x, 0xC069000000000000
  %x.1 = select i1 %small, float 0xC069000000000000, float %x
  %large = fcmp ogt float %x.1, 2.000000e+02
  %x.2 = select i1 %large, float 2.000000e+02, float %x.1
  %is.number = fcmp ord float %x, 0.0
  %y = select i1 %is.number, float %x.2, float 0.0
  %n = call float @llvm.rint.f32(float %y)
  %f = fsub float %y, %n
{series}  %n.int = fptosi float %n to i32
  %n.1 = ashr i32 %n.int, 1
  %n.2 = sub i32 %n.int, %n.1
  %biased.1 = add i32 %n.1, 127
  %biased.2 = add i32 %n.2, 127
  %bits.1 = shl i32 %biased.1, 23
  %bits.2 = shl i32 %biased.2, 23
  %scale.1 = bitcast i32 %bits.1 to float
  %scale.2 = bitcast i32 %bits.2 to float
  %scaled.1 = fmul float %series, %scale.1
  %scaled.2 = fmul float %scaled.1, %scale.2
  %result = select i1 %is.number, float %scaled.2, float %x
  ret float %result
}}"""


@cache
def log2() -> str:
    """Return ``log2_in_place``.

    x is m * 2**e with m between sqrt(1/2) and sqrt(2), and the logarithm of m is twice the series of the inverse
    hyperbolic tangent of s = (m - 1) / (m + 1) (Abramowitz and Stegun, 4.1.27): |s| <= 0.172, so five terms are within
    2e-9 of s. The factor 2 / log(2) is in two parts, for logarithms of numbers near 1 to be as exact.
    """
    factor = 2 / math.log(2)
    (high,) = struct.unpack("<f", struct.pack("<f", factor))
    rest = _polynomial("rest", "%s.2", [factor - high, *(factor / k for k in (3, 5, 7, 9))])
    return f"""{_DECLARED}
define internal float @log2_in_place(float %x) alwaysinline {{
  %small = fcmp olt float %x, 0x3810000000000000
  %scaled = fmul float %x, 0x4170000000000000
  %y = select i1 %small, float %scaled, float %x
  %shift = select i1 %small, i32 -24, i32 0
  %bits = bitcast float %y to i32
  %above = sub i32 %bits, 1060439283
  %e.bits = ashr i32 %above, 23
  %down = shl i32 %e.bits, 23
  %m.bits = sub i32 %bits, %down
  %m = bitcast i32 %m.bits to float
  %e.int = add i32 %e.bits, %shift
  %e = sitofp i32 %e.int to float
  %f = fsub float %m, 1.0
  %g = fadd float %m, 1.0
  %s = fdiv float %f, %g
  %s.2 = fmul float %s, %s
{rest}  %low = fmul float %s, %rest
  %of.m = call float @llvm.fma.f32(float %s, float {_single(high)}, float %low)
  %sum = fadd float %e, %of.m
  %is.positive = fcmp ogt float %x, 0.0
  %is.finite = fcmp olt float %x, 0x7FF0000000000000
  %is.zero = fcmp oeq float %x, 0.0
  %infinite = select i1 %is.zero, float 0xFFF0000000000000, float 0x7FF8000000000000
  %large = select i1 %is.positive, float %x, float %infinite
  %is.usual = and i1 %is.positive, %is.finite
  %result = select i1 %is.usual, float %sum, float %large
  ret float %result
}}"""


_PI = Fraction("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
_LARGE = 2.0**50  # beyond it no bit of a float tells where it is between two zeros, and a GPU's result means nothing


@cache
def sine() -> str:
    """Return ``sin_in_place`` and ``cos_in_place``.

    x is q * pi/2 + r with |r| <= pi/4, in double precision with pi/2 in two parts, and the result is plus or minus the
    series of the sine or the cosine of r, by q. Arguments beyond 2**50 count as 0.
    """
    half = _PI / 2
    high = float(half)
    low = float(half - Fraction(high))
    sin = _polynomial("sin", "%r.2", [(-1) ** k / math.factorial(2 * k + 1) for k in range(1, 5)])
    cos = _polynomial("cos", "%r.2", [(-1) ** k / math.factorial(2 * k) for k in range(6)])

    def function(name: str, quarters: int, zero: str) -> str:
        return f"""
define internal float @{name}_in_place(float %x) alwaysinline {{
  %size = call float @llvm.fabs.f32(float %x)
  %is.usual = fcmp olt float %size, {_double(_LARGE)}
  %y = select i1 %is.usual, float %x, float 0.0
  %wide = fpext float %y to double
  %ratio = fmul double %wide, {_double(2 / math.pi)}
  %q = call double @llvm.rint.f64(double %ratio)
  %less = fneg double %q
  %r.high = call double @llvm.fma.f64(double %less, double {_double(high)}, double %wide)
  %r.wide = call double @llvm.fma.f64(double %less, double {_double(low)}, double %r.high)
  %r = fptrunc double %r.wide to float
  %q.long = fptosi double %q to i64
  %q.int = trunc i64 %q.long to i32
  %turns = add i32 %q.int, {quarters}
  %r.2 = fmul float %r, %r
{sin}{cos}  %r.3 = fmul float %r, %r.2
  %of.sin = call float @llvm.fma.f32(float %sin, float %r.3, float %r)
  %odd = and i32 %turns, 1
  %is.odd = icmp ne i32 %odd, 0
  %value = select i1 %is.odd, float %cos, float %of.sin
  %second = and i32 %turns, 2
  %sign = shl i32 %second, 30
  %value.bits = bitcast float %value to i32
  %turned = xor i32 %value.bits, %sign
  %found = bitcast i32 %turned to float
  %is.zero = fcmp oeq float %x, 0.0
  %known = select i1 %is.zero, float {zero}, float %found
  %is.finite = fcmp olt float %size, 0x7FF0000000000000
  %none = fsub float %x, %x
  %result = select i1 %is.finite, float %known, float %none
  ret float %result
}}"""

    return _DECLARED + function("sin", 0, "%x") + function("cos", 1, "1.0")
