"""Reference for narrow floating-point formats: exact fractions, rounded as IEEE 754 and the PTX ISA define it."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

__all__ = ["BFLOAT16", "E4M3", "E5M2", "FLOAT32", "HALF", "TF32", "Format", "edge_patterns", "values_of"]


@dataclass(frozen=True)
class Format:
    """A binary format: width, exponent bits, fraction bits; `has_infinity` is false for e4m3."""

    name: str
    bits: int
    exponent: int
    fraction: int
    has_infinity: bool = True

    @cached_property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @cached_property
    def largest(self) -> int:
        """Pattern of the largest finite number."""
        return self.nan - 1 if not self.has_infinity else self.infinity - 1

    @cached_property
    def infinity(self) -> int:
        return (2**self.exponent - 1) << self.fraction

    @cached_property
    def nan(self) -> int:
        """The pattern that a GPU makes: all ones."""
        return 2 ** (self.bits - 1) - 1

    def value(self, pattern: int) -> float:
        """Return what a pattern stands for."""
        pattern = int(pattern)
        sign = -1.0 if pattern >> (self.bits - 1) else 1.0
        magnitude = pattern & 2 ** (self.bits - 1) - 1
        if magnitude > self.largest:
            return sign * math.inf if self.has_infinity and magnitude == self.infinity else math.nan
        field, fraction = magnitude >> self.fraction, magnitude & 2**self.fraction - 1
        if field:
            fraction += 2**self.fraction
        return sign * math.ldexp(fraction, max(field, 1) - self.bias - self.fraction)

    def round(self, exact: Fraction | float, mode: str = "rn", *, finite: bool = False) -> int:
        """Return the pattern that a number rounds to. A float may be an infinity, NaN or a zero with a sign."""
        if isinstance(exact, float) and math.isnan(exact):
            return self.nan
        negative = math.copysign(1.0, exact) < 0 if isinstance(exact, float) else exact < 0
        sign = negative << (self.bits - 1)
        beyond = self.largest if finite else self.infinity if self.has_infinity else self.nan
        if isinstance(exact, float) and math.isinf(exact):
            return sign | beyond
        magnitude = abs(Fraction(exact))
        if not magnitude:
            return sign
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        while magnitude >= Fraction(2) ** (exponent + 1):
            exponent += 1
        while magnitude < Fraction(2) ** exponent:
            exponent -= 1
        step = Fraction(2) ** (max(exponent, 1 - self.bias) - self.fraction)
        down = math.floor(magnitude / step)
        rest = magnitude - down * step
        away = {
            "rn": rest * 2 > step or (rest * 2 == step and down % 2 == 1),
            "rna": rest * 2 >= step,
            "rz": False,
            "rm": bool(rest) and negative,
            "rp": bool(rest) and not negative,
        }[mode]
        result = (down + away) * step
        if result > Fraction(self.value(self.largest)):
            outward = mode in ("rn", "rna") or (mode == "rm" and negative) or (mode == "rp" and not negative)
            return sign | (beyond if outward else self.largest)
        return sign | self._encode(result)

    def _encode(self, magnitude: Fraction) -> int:
        number = float(magnitude)
        assert number == magnitude  # a float has more bits than any of these formats
        return bisect_left(range(self.largest), number, key=self.value)  # patterns of positive numbers are in order


HALF = Format("f16", 16, 5, 10)
BFLOAT16 = Format("bf16", 16, 8, 7)
TF32 = Format("tf32", 19, 8, 10)
FLOAT32 = Format("f32", 32, 8, 23)
E4M3 = Format("e4m3", 8, 4, 3, has_infinity=False)
E5M2 = Format("e5m2", 8, 5, 2)


def edge_patterns(form: Format, count: int, seed: int) -> np.ndarray:
    """Return patterns of a 16-bit format: zeros, subnormals, the ends of the range, infinities, NaN, and random ones."""
    positive = [0, 1, 2, 3, (1 << form.fraction) - 1, 1 << form.fraction, form.largest, form.largest - 1]
    positive += [form.infinity, form.nan, form.bias << form.fraction, (form.bias << form.fraction) + 1]
    both = [*positive, *(pattern | 1 << (form.bits - 1) for pattern in positive)]
    random = np.random.default_rng(seed).integers(0, 2**form.bits, max(count - len(both), 0))
    return np.array([*both, *random.tolist()][:count], np.uint16)


def values_of(form: Format, patterns: np.ndarray) -> list[float]:
    return [form.value(int(pattern)) for pattern in patterns]
