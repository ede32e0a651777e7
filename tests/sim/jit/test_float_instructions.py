"""Floating-point instructions and conversions against NumPy, and against exact fractions where rounding is directed."""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest

from cudatool.sim import host_library

NAN, INF = float("nan"), float("inf")
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, 1e-40, -1e-40, 1e30, -1e30, 1 / 3, INF, -INF, NAN]
DTYPES = {"f32": np.float32, "f64": np.float64}


def same(expected: np.ndarray, found: np.ndarray) -> None:
    """Compare bit for bit, but any NaN equals any NaN."""
    nan = np.isnan(expected)
    assert nan.tolist() == np.isnan(found).tolist()
    kind = f"u{expected.dtype.itemsize}"
    assert expected[~nan].view(kind).tolist() == found[~nan].view(kind).tolist()


def pairs(dtype) -> tuple[np.ndarray, np.ndarray]:
    columns = zip(*itertools.product(EDGES, repeat=2), strict=True)
    a, b = (np.array(column).astype(dtype) for column in columns)
    return a, b


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "div"])
def test_arithmetic_rounds_to_nearest(elementwise, opcode, kind):
    a, b = pairs(DTYPES[kind])
    operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[opcode]
    with np.errstate(all="ignore"):
        expected = operation(a, b)
    same(expected, elementwise(f"{opcode}.rn.{kind} %d, %a, %b;", {"a": a, "b": b}, {"d": a.dtype})["d"])


def nearest(exact: Fraction, mode: str) -> float:
    """Return the float that `exact` rounds to."""
    guess = np.float32(float(exact))
    if Fraction(float(guess)) == exact:
        return float(guess)
    low = guess if Fraction(float(guess)) < exact else np.nextafter(guess, np.float32(-INF))
    high = np.nextafter(low, np.float32(INF))
    if mode == "rz":
        return float(low if exact > 0 else high)
    return float(low if mode == "rm" else high)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "div", "fma", "sqrt"])
def test_directed_rounding(elementwise, opcode, mode):
    values = [1.0, 3.0, -7.0, 1 / 3, -1e-3, 1e10, 123456.789, -0.1]
    a, b = (np.array(c, np.float32) for c in zip(*itertools.product(values, repeat=2), strict=True))
    x, y = ([Fraction(float(v)) for v in column] for column in (a, b))
    operands = {"fma": "%a, %b, %b", "sqrt": "%a"}.get(opcode, "%a, %b")
    if opcode == "sqrt":
        a = np.abs(a)
    found = elementwise(f"{opcode}.{mode}.f32 %d, {operands};", {"a": a, "b": b}, {"d": "f4"})["d"].tolist()
    if opcode == "sqrt":
        for value, root in zip(a.tolist(), found, strict=True):
            exact, square = Fraction(value), Fraction(root) ** 2
            above = Fraction(float(np.nextafter(np.float32(root), np.float32(INF)))) ** 2
            below = Fraction(float(np.nextafter(np.float32(root), np.float32(-INF)))) ** 2
            assert below < exact <= square if mode == "rp" else square <= exact < above
        return
    operation = {
        "add": lambda p, q: p + q,
        "sub": lambda p, q: p - q,
        "mul": lambda p, q: p * q,
        "div": lambda p, q: p / q,
        "fma": lambda p, q: p * q + q,
    }[opcode]
    assert [nearest(operation(p, q), mode) for p, q in zip(x, y, strict=True)] == found


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "fma"])
def test_directed_rounding_at_the_edges(elementwise, opcode, mode):
    """Zeros, subnormals, overflow, infinities, and random bits, against the host in its rounding modes (double)."""
    random = np.random.default_rng(8)
    edges = np.array([*EDGES, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1.1754944e-38], np.float32)
    a, b = (np.array(c, np.float32) for c in zip(*itertools.product(edges, repeat=2), strict=True))
    bits = random.integers(0, 2**32, (2, 2000), np.uint32).view(np.float32)
    a, b = np.concatenate([a, bits[0]])[:1000], np.concatenate([b, bits[1]])[:1000]
    operands = "%a, %b, %b" if opcode == "fma" else "%a, %b"
    found = elementwise(f"{opcode}.{mode}.f32 %d, {operands};", {"a": a, "b": b}, {"d": "f4"})["d"]
    library = host_library.library().cudatool_rounded_f32
    library.argtypes = [ctypes.c_int32, ctypes.c_int32, *[ctypes.c_float] * 3]
    library.restype = ctypes.c_float
    number = ["add", "sub", "mul", "fma"].index(opcode), {"rm": 1, "rp": 2, "rz": 3}[mode]
    same(np.array([library(*number, x, y, y) for x, y in zip(a, b, strict=True)], np.float32), found)


@pytest.mark.parametrize("kind", DTYPES)
def test_fma_rounds_once(elementwise, kind):
    dtype = DTYPES[kind]
    step = np.finfo(dtype).eps
    a = np.array([1 + step, 1 - step, 3, 0.1], dtype)
    c = np.array([-1, -1, INF, -0.01], dtype)
    found = elementwise(f"fma.rn.{kind} %d, %a, %a, %c;", {"a": a, "c": c}, {"d": dtype})["d"]
    exact = [INF if math.isinf(z) else Fraction(float(x)) ** 2 + Fraction(float(z)) for x, z in zip(a, c, strict=True)]
    if kind == "f64":
        assert [float(value) for value in exact] == found.tolist()
    else:
        np.testing.assert_array_equal(np.array([float(value) for value in exact]).astype(dtype), found)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("opcode", ["min", "max"])
def test_min_and_max_prefer_numbers_and_order_zeros(elementwise, opcode, kind):
    a, b = pairs(DTYPES[kind])
    found = elementwise(f"{opcode}.{kind} %d, %a, %b;", {"a": a, "b": b}, {"d": a.dtype})["d"]
    expected = (np.fmin if opcode == "min" else np.fmax)(a, b)
    zeros = (a == 0) & (b == 0)
    sign = np.signbit(a) | np.signbit(b) if opcode == "min" else np.signbit(a) & np.signbit(b)
    expected[zeros] = np.where(sign[zeros], -0.0, 0.0)
    same(expected, found)


@pytest.mark.parametrize("opcode", ["min", "max"])
def test_min_and_max_prefer_numbers_that_are_known_to_be_numbers(elementwise, opcode):
    a, b = pairs("f4")
    code = f"add.sat.f32 %c, %b, 0f00000000; {opcode}.f32 %d, %a, %c; {opcode}.f32 %e, %c, %a;"
    found = elementwise(code, {"a": a, "b": b}, dict.fromkeys("cde", "f4"))
    assert not np.isnan(found["c"]).any()
    reference = np.fmin if opcode == "min" else np.fmax
    same(reference(a, found["c"]) + 0, found["d"] + 0)
    same(reference(a, found["c"]) + 0, found["e"] + 0)


def test_min_with_nan_modifier_gives_nan(elementwise):
    a, b = pairs(np.float32)
    found = elementwise("min.NaN.f32 %d, %a, %b; max.NaN.f32 %e, %a, %b;", {"a": a, "b": b}, {"d": "f4", "e": "f4"})
    either = np.isnan(a) | np.isnan(b)
    assert either.tolist() == np.isnan(found["d"]).tolist() == np.isnan(found["e"]).tolist()


@pytest.mark.parametrize("kind", DTYPES)
def test_signs(elementwise, kind):
    a, b = pairs(DTYPES[kind])
    code = f"neg.{kind} %d, %a; abs.{kind} %e, %a; copysign.{kind} %f, %b, %a;"
    found = elementwise(code, {"a": a, "b": b}, dict.fromkeys("def", a.dtype))
    same(-a, found["d"])
    same(np.abs(a), found["e"])
    same(np.copysign(a, b), found["f"])


@pytest.mark.parametrize("kind", DTYPES)
def test_reciprocal_and_roots(elementwise, kind):
    a = np.array([*EDGES, 2.0, 10.0, 1e-10], DTYPES[kind])
    code = f"rcp.rn.{kind} %d, %a; sqrt.rn.{kind} %e, %a; rsqrt.approx.{kind} %f, %a;"
    found = elementwise(code, {"a": a}, dict.fromkeys("def", a.dtype))
    with np.errstate(all="ignore"):
        same(1 / a, found["d"])
        same(np.sqrt(a), found["e"])
        np.testing.assert_allclose(1 / np.sqrt(a), found["f"], rtol=1e-6)


@pytest.mark.parametrize(
    ("opcode", "reference"),
    [("ex2", np.exp2), ("lg2", np.log2), ("sin", np.sin), ("cos", np.cos), ("tanh", np.tanh)],
)
def test_approximations(elementwise, opcode, reference):
    a = np.array([0.0, 0.1, 1.0, 2.0, 3.5, 10.0, 100.0, INF, NAN], np.float32)
    with np.errstate(all="ignore"):
        expected = reference(a)
    found = elementwise(f"{opcode}.approx.f32 %d, %a;", {"a": a}, {"d": "f4"})["d"]
    np.testing.assert_allclose(expected, found, rtol=1e-6, atol=1e-7)


def test_powers_of_two(elementwise):
    """PTX allows a relative error of 2**-22; whole powers are exact, and so are the limits."""
    whole = np.arange(-149, 128, dtype=np.float32)
    limits = np.array([127.99999, 128, 200, 1e30, INF, -150.5, -151, -300, -1e30, -INF, NAN], np.float32)
    any_ = np.random.default_rng(9).uniform(-126, 128, 600).astype(np.float32)
    found = [elementwise("ex2.approx.f32 %d, %a;", {"a": a}, {"d": "f4"})["d"] for a in (whole, limits, any_)]
    assert [2.0**n for n in range(-149, 128)] == found[0].tolist()
    assert [INF] * 4 == found[1][1:5].tolist() and [0.0] * 5 == found[1][5:10].tolist() and np.isnan(found[1][10])
    np.testing.assert_allclose(np.exp2(any_.astype(float)), found[2], rtol=2**-22, atol=0)


def test_logarithms(elementwise):
    """PTX allows an error of 2**-22; whole powers are exact, numbers near 1 as exact as others, and limits kept."""
    whole = np.exp2(np.arange(-149, 128, dtype=np.float32))
    limits = np.array([0.0, -0.0, INF], np.float32)
    random = np.random.default_rng(9)
    any_ = np.exp2(random.uniform(-149, 128, 600)).astype(np.float32)
    near = (1 + random.uniform(-1, 1, 400) * np.exp2(random.uniform(-24, -1, 400))).astype(np.float32)
    results = (elementwise("lg2.approx.f32 %d, %a;", {"a": a}, {"d": "f4"})["d"] for a in (whole, limits, any_, near))
    found = list(results)
    assert [*range(-149, 128)] == found[0].tolist()
    assert [-INF, -INF, INF] == found[1].tolist()
    np.testing.assert_allclose(np.log2(any_.astype(float)), found[2], rtol=2**-22, atol=0)
    np.testing.assert_allclose(np.log2(near.astype(float)), found[3], rtol=2**-22, atol=0)


@pytest.mark.parametrize(("opcode", "reference"), [("sin", np.sin), ("cos", np.cos)])
def test_angles(elementwise, opcode, reference):
    """Within a few units of the last place as far as a float tells one turn from another, and always in [-1, 1]."""
    random = np.random.default_rng(10)
    usual = (random.uniform(-1, 1, 900) * np.exp2(random.uniform(-20, 50, 900))).astype(np.float32)
    quarters = (np.arange(-100, 101) * (math.pi / 2)).astype(np.float32)
    huge = np.array([2.0**50, 2.0**51, 1e30, 3e38, -3e38], np.float32)
    for a in (usual, quarters):
        found = elementwise(f"{opcode}.approx.f32 %d, %a;", {"a": a}, {"d": "f4"})["d"]
        np.testing.assert_allclose(reference(a.astype(float)), found, rtol=2**-22, atol=0)
    found = elementwise(f"{opcode}.approx.f32 %d, %a;", {"a": huge}, {"d": "f4"})["d"]
    assert (np.abs(found) <= 1).all()
    zeros = elementwise(f"{opcode}.approx.f32 %d, %a;", {"a": np.array([0.0, -0.0], np.float32)}, {"d": "f4"})["d"]
    same(np.array([0.0, -0.0] if opcode == "sin" else [1.0, 1.0], np.float32), zeros)


def test_approximations_call_nothing_that_keeps_a_loop_from_vectors(ptx_kernel):
    body = "".join(
        f"ld.global.f32 %f, [%p]; {opcode}.approx.f32 %f, %f; st.global.f32 [%p], %f;"
        for opcode in ("ex2", "lg2", "sin", "cos")
    )
    kernel = ptx_kernel(".param .u64 at", f".reg .f32 %f; .reg .b64 %p; ld.param.u64 %p, [at]; {body} ret;")
    called = set(re.findall(r"call float @([\w.]+)", kernel.llvm_ir()))
    assert {"exp2_in_place", "log2_in_place", "sin_in_place", "cos_in_place"} <= called
    in_line = {"llvm.fma.f32", "llvm.rint.f32", "llvm.fabs.f32"}
    assert {name for name in called if not name.endswith("_in_place")} <= in_line


@pytest.mark.parametrize("opcode", ["rsqrt", "sqrt", "rcp", "lg2", "ex2", "sin", "cos", "tanh"])
def test_what_is_no_number_is_known_to_be_none(elementwise, opcode):
    """The optimizer must not conclude from an operation that its result is a number."""
    a = np.array(EDGES, np.float32)
    code = f"{opcode}.approx.f32 %d, %a; testp.notanumber.f32 %p, %d; selp.u32 %e, 1, 0, %p;"
    found = elementwise(code, {"a": a}, {"d": "f4", "e": "u4"})
    invalid = {"rsqrt": a < 0, "sqrt": a < 0, "lg2": a < 0, "sin": np.isinf(a), "cos": np.isinf(a)}
    expected = np.isnan(a) | invalid.get(opcode, False)
    assert expected.tolist() == np.isnan(found["d"]).tolist() == found["e"].astype(bool).tolist()


def test_flush_to_zero_keeps_the_sign(elementwise):
    a = np.array([1e-40, -1e-40, 1.5e-38, -2e-38], np.float32)
    found = elementwise("add.ftz.f32 %d, %a, %a; mul.ftz.f32 %e, %a, 0f3F000000;", {"a": a}, {"d": "f4", "e": "f4"})
    same(np.array([0.0, -0.0, 3e-38, -4e-38], np.float32), found["d"])
    same(np.array([0.0, -0.0, 0.0, -0.0], np.float32), found["e"])


def test_saturation_clamps_and_turns_nan_into_zero(elementwise):
    a = np.array([-1.0, -0.0, 0.25, 1.0, 7.0, INF, -INF, NAN], np.float32)
    found = elementwise("add.sat.f32 %d, %a, 0f00000000; cvt.sat.f32.f32 %e, %a;", {"a": a}, {"d": "f4", "e": "f4"})
    assert [0, 0, 0.25, 1, 1, 1, 0, 0] == found["d"].tolist() == found["e"].tolist()


COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}
UNORDERED = {f"{name}u": name for name in COMPARE if name != "num"} | {"nan": None}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("how", [*COMPARE, *UNORDERED])
def test_float_compare(elementwise, how, kind):
    a, b = pairs(DTYPES[kind])
    found = elementwise(f"setp.{how}.{kind} %p, %a, %b; selp.u32 %d, 1, 0, %p;", {"a": a, "b": b}, {"d": "u4"})["d"]
    if how in COMPARE:
        expected = COMPARE[how](a, b)
    else:
        ordered = COMPARE[UNORDERED[how]](a, b) if UNORDERED[how] else False
        expected = ordered | np.isnan(a) | np.isnan(b)
    assert expected.astype(int).tolist() == found.tolist()


@pytest.mark.parametrize(
    ("which", "reference"),
    [
        ("finite", np.isfinite),
        ("infinite", np.isinf),
        ("number", lambda a: ~np.isnan(a)),
        ("notanumber", np.isnan),
        ("subnormal", lambda a: (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny)),
    ],
)
def test_classes(elementwise, which, reference):
    a = np.array(EDGES, np.float32)
    found = elementwise(f"testp.{which}.f32 %p, %a; selp.u32 %d, 1, 0, %p;", {"a": a}, {"d": "u4"})["d"]
    assert reference(a).astype(int).tolist() == found.tolist()


# ---- conversions ----

INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
VALUES = [*EDGES, 0.4, 0.6, -0.6, 126.5, 127.5, 128.5, -129.0, 300.0, 65536.5, 2147483648.0, -2147483649.0, 1e19, 1e20]


@pytest.mark.parametrize("mode", INTEGRAL)
@pytest.mark.parametrize("target", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("source", DTYPES)
def test_float_to_integer_saturates_and_nan_has_a_value_too(elementwise, target, source, mode):
    a = np.array(VALUES, DTYPES[source])
    bits = int(target[1:])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if target[0] == "s" else (0, 2**bits - 1)
    dtype = f"{'i' if target[0] == 's' else 'u'}{max(bits // 8, 2)}"

    def reference(value: float) -> int:
        if math.isnan(value):  # PTX ISA, cvt: the highest bit alone, or zero
            return (low or 1 << bits - 1) if source == "f64" or bits == 64 else 0
        if math.isinf(value):
            return low if value < 0 else high
        return max(low, min(high, int(INTEGRAL[mode](value))))

    found = elementwise(f"cvt.{mode}.{target}.{source} %d, %a;", {"a": a}, {"d": dtype})["d"]
    assert [reference(float(value)) for value in a] == found.tolist()


@pytest.mark.parametrize("mode", INTEGRAL)
@pytest.mark.parametrize("kind", DTYPES)
def test_rounding_to_integral_floats(elementwise, kind, mode):
    a = np.array(VALUES, DTYPES[kind])
    same(INTEGRAL[mode](a), elementwise(f"cvt.{mode}.{kind}.{kind} %d, %a;", {"a": a}, {"d": a.dtype})["d"])


@pytest.mark.parametrize("source", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("target", DTYPES)
def test_integer_to_float(elementwise, source, target):
    raw = np.array([0, 1, 2**24 + 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64 - 1], "u8")
    a = raw.astype(f"u{int(source[1:]) // 8}")
    values = a.view(f"i{a.itemsize}") if source[0] == "s" else a
    found = elementwise(f"cvt.rn.{target}.{source} %d, %a;", {"a": a}, {"d": DTYPES[target]})["d"]
    same(values.astype(DTYPES[target]), found)


@pytest.mark.parametrize("source", ["s32", "u64", "s64"])
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_integer_to_float_with_directed_rounding(elementwise, source, mode):
    numbers = [0, 1, 2**24 + 1, 2**31 - 1, 2**30 + 1, 2**63 - 1, 2**62 + 1]
    numbers = [n for n in numbers if n < 2 ** (int(source[1:]) - 1)]
    if source[0] == "s":
        numbers += [-n for n in numbers]
    a = np.array(numbers, f"{'i' if source[0] == 's' else 'u'}{int(source[1:]) // 8}")
    found = elementwise(f"cvt.{mode}.f32.{source} %d, %a;", {"a": a}, {"d": "f4"})["d"]
    assert [nearest(Fraction(n), mode) for n in numbers] == found.tolist()


def test_between_floats(elementwise):
    a = np.array([*EDGES, 1e300, 1e-300, 1 + 2**-30], np.float64)
    found = elementwise("cvt.rn.f32.f64 %d, %a; cvt.f64.f32 %e, %d;", {"a": a}, {"d": "f4", "e": "f8"})
    with np.errstate(over="ignore"):
        same(a.astype("f4"), found["d"])
        same(a.astype("f4").astype("f8"), found["e"])


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_narrowing_with_directed_rounding(elementwise, mode):
    a = np.array([1 + 2**-30, -1 - 2**-30, 1 - 2**-30, 0.1, -0.1, 1e-50, -1e-50, 1e10, 0.5], np.float64)
    found = elementwise(f"cvt.{mode}.f32.f64 %d, %a;", {"a": a}, {"d": "f4"})["d"]
    assert [nearest(Fraction(float(x)), mode) for x in a] == found.tolist()


def test_half_precision(elementwise):
    a = np.array([0.0, -0.0, 1.0, 0.1, 65504.0, 65520.0, 1e-8, 6e-8, INF, NAN], np.float32)
    code = "cvt.rn.f16.f32 %h, %a; add.f16 %d, %h, %h; mul.f16 %e, %h, %h; cvt.f32.f16 %f, %h;"
    found = elementwise(code, {"a": a}, {"h": "f2", "d": "f2", "e": "f2", "f": "f4"})
    with np.errstate(over="ignore"):
        h = a.astype("f2")
        same(h, found["h"])
        same(h + h, found["d"])
        same(h * h, found["e"])
        same(h.astype("f4"), found["f"])


def test_bfloat16_rounds_to_nearest_even(elementwise):
    a = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-9, 3e38, 3.4e38, INF, NAN], np.float32)
    found = elementwise("cvt.rn.bf16.f32 %h, %a; cvt.f32.bf16 %d, %h;", {"a": a}, {"h": "u2", "d": "f4"})
    bits = a[:-1].view("u4").astype("u8")
    assert (bits + 0x7FFF + (bits >> 16 & 1) >> 16).tolist() == found["h"][:-1].tolist()
    assert 0x7FFF == found["h"][-1]
    assert (found["h"].astype("u4") << 16).tolist()[:-1] == found["d"].view("u4").tolist()[:-1]


def test_packed_halves(elementwise):
    a, b = np.array([1.5, 2.0, -3.0], np.float32), np.array([0.25, 1e6, 4.0], np.float32)
    code = "cvt.rn.f16x2.f32 %d, %a, %b; fma.rn.f16x2 %e, %d, %d, %d; neg.f16x2 %f, %d;"
    found = elementwise(code, {"a": a, "b": b}, dict.fromkeys("def", "u4"))
    with np.errstate(over="ignore"):
        halves = np.stack([b, a], 1).astype("f2")
        same(halves.ravel(), found["d"].view("f2"))
        same((halves * halves + halves).ravel(), found["e"].view("f2"))
        same((-halves).ravel(), found["f"].view("f2"))
