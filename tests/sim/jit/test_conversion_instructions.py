"""Conversions to and from 16-bit, 8-bit and tf32 formats, in every rounding, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from float_formats import BFLOAT16, E4M3, E5M2, FLOAT32, HALF, TF32, edge_patterns, values_of

HALVES = {"f16": HALF, "bf16": BFLOAT16}
EIGHTS = {"e4m3x2": E4M3, "e5m2x2": E5M2}


def near(form, dtype):
    """Return 1024 numbers of a wider type around those of `form`: exact, in the middle between two, just beside it."""
    random = np.random.default_rng(9)
    patterns = [0, 1, 2, form.largest, form.largest - 1, form.bias << form.fraction]
    patterns += random.integers(0, form.largest, 79).tolist()
    found = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-44, -1e-44, 3.4e38, -3.4e38]
    for pattern in patterns:
        low, high = form.value(pattern), form.value(min(pattern + 1, form.largest))
        middle = (low + high) / 2
        for value in (low, middle, high + (high - low) / 2):
            value = dtype(value)
            found += [value, -value, np.nextafter(value, dtype(math.inf)), -np.nextafter(value, dtype(0))]
    return np.array(found[:1024], dtype)


def given(value, modifiers):
    """Apply ``.relu`` or ``.sat`` to a number before it is rounded."""
    value = float(value)
    if "relu" in modifiers and not math.isnan(value) and value <= 0:
        return 0.0
    if "sat" in modifiers:
        return 0.0 if math.isnan(value) or value <= 0 else min(value, 1.0)
    return value


@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("modifiers", ["rn", "rz", "rm", "rp", "rn.relu", "rz.relu", "rn.satfinite", "rn.sat"])
@pytest.mark.parametrize("kind", HALVES)
def test_to_16_bits(elementwise, kind, modifiers, source):
    form, (mode, *rest) = HALVES[kind], modifiers.split(".")
    a = near(form, np.float32 if source == "f32" else np.float64)
    expected = [form.round(given(value, rest), mode, finite="satfinite" in rest) for value in a]
    found = elementwise(f"cvt.{modifiers}.{kind}.{source} %d, %a;", {"a": a}, {"d": "u2"})["d"]
    assert expected == found.tolist()


@pytest.mark.parametrize("modifiers", ["rn", "rz", "rn.relu", "rn.satfinite", "rz.satfinite.relu"])
@pytest.mark.parametrize("kind", HALVES)
def test_two_floats_to_a_packed_pair(elementwise, kind, modifiers):
    form, (mode, *rest) = HALVES[kind], modifiers.split(".")
    b = near(form, np.float32)
    a = b[::-1].copy()
    columns = [[form.round(given(x, rest), mode, finite="satfinite" in rest) for x in column] for column in (b, a)]
    found = elementwise(f"cvt.{modifiers}.{kind}x2.f32 %d, %a, %b;", {"a": a, "b": b}, {"d": "u4"})["d"]
    assert np.array(columns).T.ravel().tolist() == found.view(np.uint16).tolist()


@pytest.mark.parametrize("modifiers", ["rna", "rn", "rz", "rna.satfinite", "rn.relu", "rz.relu"])
def test_to_tf32(elementwise, modifiers):
    mode, *rest = modifiers.split(".")
    a = near(TF32, np.float32)
    expected = [TF32.round(given(value, rest), mode, finite="satfinite" in rest) << 13 for value in a]
    assert expected == elementwise(f"cvt.{modifiers}.tf32.f32 %d, %a;", {"a": a}, {"d": "u4"})["d"].tolist()


@pytest.mark.parametrize("source", ["f32", "f16x2"])
@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", EIGHTS)
def test_to_8_bits(elementwise, kind, relu, source):
    form = EIGHTS[kind]
    if source == "f32":
        b = near(form, np.float32)
        a = b[::-1].copy()
        pairs, arrays, operands = np.stack([b, a], 1), {"a": a, "b": b}, "%a, %b"
    else:
        with np.errstate(over="ignore"):
            pairs = near(form, np.float32).astype(np.float16)
        arrays, operands = {"a": pairs.view(np.uint32)}, "%a"
    expected = [form.round(given(x, relu[1:]), finite=True) for x in pairs.ravel()]
    found = elementwise(f"cvt.rn.satfinite{relu}.{kind}.{source} %d, {operands};", arrays, {"d": "u2"})["d"]
    assert expected == found.view(np.uint8).tolist()


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", EIGHTS)
def test_from_8_bits(elementwise, kind, relu):
    form = EIGHTS[kind]
    a = np.arange(256, dtype=np.uint8)
    expected = [HALF.round(given(form.value(byte), relu[1:])) for byte in a.tolist()]
    found = elementwise(f"cvt.rn{relu}.f16x2.{kind} %d, %a;", {"a": a.view(np.uint16)}, {"d": "u4"})["d"]
    assert expected == found.view(np.uint16).tolist()


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("kind", HALVES)
def test_integers_to_16_bits(elementwise, kind, source, mode):
    form, bits = HALVES[kind], int(source[1:])
    signed = source[0] == "s"
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    info = np.iinfo(dtype)
    numbers = [0, 1, info.max, info.min, info.max - 1, 257, 2049, 4098, 65519, 65520, 65535, 2**24 + 1, 2**53 + 1]
    numbers += [2**60 + 2**52, 2**60 + 2**52 + 1, 2**60 + 2**49 + 1, -2049, -257, -65520]
    a = np.array([n for n in numbers if info.min <= n <= info.max], dtype)
    expected = [form.round(Fraction(int(n)), mode) for n in a]
    assert expected == elementwise(f"cvt.{mode}.{kind}.{source} %d, %a;", {"a": a}, {"d": "u2"})["d"].tolist()


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("target", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("kind", HALVES)
def test_16_bits_to_integers(elementwise, kind, target, mode):
    form, bits = HALVES[kind], int(target[1:])
    a = edge_patterns(form, 1000, 3)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if target[0] == "s" else (0, 2**bits - 1)
    integral = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]

    def reference(value):
        if math.isnan(value):  # PTX ISA, cvt
            return (low or 1 << 63) if bits == 64 else 0
        return max(low, min(high, integral(value))) if math.isfinite(value) else low if value < 0 else high

    dtype = f"{'i' if target[0] == 's' else 'u'}{max(bits // 8, 2)}"
    found = elementwise(f"cvt.{mode}.{target}.{kind} %d, %a;", {"a": a}, {"d": dtype})["d"]
    assert [reference(value) for value in values_of(form, a)] == found.tolist()


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("kind", HALVES)
def test_rounding_to_integral_numbers(elementwise, kind, mode):
    form = HALVES[kind]
    a = edge_patterns(form, 1000, 5)
    integral = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    expected = [form.round(float(integral(value))) for value in values_of(form, a)]
    assert expected == elementwise(f"cvt.{mode}.{kind}.{kind} %d, %a;", {"a": a}, {"d": "u2"})["d"].tolist()


@pytest.mark.parametrize("kind", HALVES)
def test_16_bits_widen_exactly(elementwise, kind):
    form = HALVES[kind]
    a = edge_patterns(form, 1000, 7)
    found = elementwise(f"cvt.f32.{kind} %d, %a; cvt.f64.{kind} %e, %a;", {"a": a}, {"d": "f4", "e": "f8"})
    np.testing.assert_array_equal(values_of(form, a), found["d"])
    np.testing.assert_array_equal(values_of(form, a), found["e"])


def test_between_16_bit_formats(elementwise):
    a = edge_patterns(BFLOAT16, 1000, 8)
    found = elementwise("cvt.rn.f16.bf16 %d, %a; cvt.rz.bf16.f16 %e, %a;", {"a": a}, {"d": "u2", "e": "u2"})
    assert [HALF.round(value) for value in values_of(BFLOAT16, a)] == found["d"].tolist()
    assert [BFLOAT16.round(value, "rz") for value in values_of(HALF, a)] == found["e"].tolist()


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_double_to_float_with_directed_rounding(elementwise, mode):
    a = near(FLOAT32, np.float64)
    found = elementwise(f"cvt.{mode}.f32.f64 %d, %a;", {"a": a}, {"d": "f4"})["d"].view(np.uint32)
    assert [FLOAT32.round(float(value), mode) for value in a] == found.tolist()


@pytest.mark.parametrize("kind", ["s16", "u16", "s8", "u8"])
def test_pack_saturates_two_integers(elementwise, kind):
    numbers = [
        0,
        1,
        -1,
        127,
        128,
        -128,
        -129,
        255,
        256,
        32767,
        32768,
        -32768,
        -32769,
        65535,
        65536,
        2**31 - 1,
        -(2**31),
    ]
    a = np.array(numbers, np.int32)
    b = a[::-1].copy()
    info = np.iinfo(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    low, high = (np.clip(x, info.min, info.max).astype(info.dtype) for x in (b, a))
    pairs = np.stack([low, high], 1)
    if kind.endswith("16"):
        found = elementwise(f"cvt.pack.sat.{kind}.s32 %d, %a, %b;", {"a": a, "b": b}, {"d": "u4"})["d"]
        assert pairs.ravel().tolist() == found.view(info.dtype).tolist()
    else:
        found = elementwise(f"cvt.pack.sat.{kind}.s32.b32 %d, %a, %b, 0x1234ABCD;", {"a": a, "b": b}, {"d": "u4"})["d"]
        assert pairs.ravel().tolist() == found.view("u2").reshape(-1, 2)[:, 0].copy().view(info.dtype).tolist()
        assert {0xABCD} == set((found >> 16).tolist())
