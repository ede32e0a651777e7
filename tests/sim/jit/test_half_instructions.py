"""f16 and bf16 arithmetic, single and packed, against exact fractions rounded once."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from float_formats import BFLOAT16, HALF, edge_patterns, values_of

FORMATS = {"f16": HALF, "bf16": BFLOAT16}
OPERANDS = {"add": "%a, %b", "sub": "%a, %b", "mul": "%a, %b", "fma": "%a, %b, %c"}


def operands(form, count=1000, seed=1):
    """Return three columns of patterns: edges with each other first, then random ones, some close to each other."""
    edges = edge_patterns(form, 24, 0)
    a, b = (np.array(c, np.uint16) for c in zip(*itertools.product(edges, edges), strict=True))
    random = np.random.default_rng(seed)
    more = [random.integers(0, 2**16, count).astype(np.uint16) for _ in range(3)]
    more[1][::2] = more[0][::2] ^ random.integers(0, 8, len(more[0][::2])).astype(np.uint16)  # cancels
    more[2][::3] = 1 << 15 | 1  # a tiny number that breaks ties
    c = random.choice(edges, len(a))
    return [np.concatenate([x, y])[:1000] for x, y in zip((a, b, c), more, strict=True)]


def exact(opcode, a, b, c):
    """Return the exact result; a float where it is not a number other than zero."""
    if opcode == "fma":
        rough = a * b + c if not (math.isnan(a) or math.isnan(b) or math.isnan(c)) else math.nan
    else:
        rough = {"add": a + b, "sub": a - b, "mul": a * b}[opcode]
    if not all(map(math.isfinite, (a, b, c if opcode == "fma" else 0.0))):
        return rough
    x, y, z = Fraction(a), Fraction(b), Fraction(c if opcode == "fma" else 0.0)
    result = {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}[opcode]
    return result if result else rough


def finish(form, pattern, modifier):
    value = form.value(pattern)
    if modifier == "sat":
        return form.round(0.0 if math.isnan(value) or value <= 0 else min(value, 1.0))
    if modifier == "relu":
        return pattern if math.isnan(value) or value > 0 else 0
    return pattern


CASES = [
    *((opcode, "f16", modifier) for opcode in OPERANDS for modifier in ("", "sat")),
    ("fma", "f16", "relu"),
    *((opcode, "bf16", "") for opcode in OPERANDS),
    ("fma", "bf16", "relu"),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("opcode", "kind", "modifier"), CASES)
def test_arithmetic_rounds_once(elementwise, opcode, kind, modifier, packed):
    form = FORMATS[kind]
    columns = operands(form)
    values = [values_of(form, column) for column in columns]
    expected = [finish(form, form.round(exact(opcode, *row)), modifier) for row in zip(*values, strict=True)]
    name = ".".join(filter(None, [opcode, "rn", modifier, kind + ("x2" if packed else "")]))
    arrays = {x: column.view(np.uint32) if packed else column for x, column in zip("abc", columns, strict=True)}
    found = elementwise(f"{name} %d, {OPERANDS[opcode]};", arrays, {"d": arrays["a"].dtype})["d"].view(np.uint16)
    assert expected == found.tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_flush_to_zero(elementwise, packed):
    form, kind = HALF, "f16"
    a, b, _ = operands(form)

    def flushed(value):
        return math.copysign(0.0, value) if abs(value) < 2.0 ** (1 - form.bias) else value

    expected = []
    for x, y in zip(values_of(form, a), values_of(form, b), strict=True):
        result = form.value(form.round(exact("mul", flushed(x), flushed(y), 0.0)))
        expected.append(form.round(flushed(result)))
    arrays = {x: column.view(np.uint32) if packed else column for x, column in (("a", a), ("b", b))}
    code = f"mul.ftz.{kind}{'x2' if packed else ''} %d, %a, %b;"
    assert expected == elementwise(code, arrays, {"d": arrays["a"].dtype})["d"].view(np.uint16).tolist()


def least(form, opcode, x, y, modifiers):
    """Return the pattern of min or max of two patterns."""
    a, b = form.value(x), form.value(y)
    sign = (x ^ y) >> 15 << 15
    if "xorsign" in modifiers:
        x, y, a, b = x & 0x7FFF, y & 0x7FFF, abs(a), abs(b)
    if math.isnan(a) or math.isnan(b):
        if "NaN" in modifiers or (math.isnan(a) and math.isnan(b)):
            return None
        result = y if math.isnan(a) else x
    else:
        key = [(a, math.copysign(1, a), x), (b, math.copysign(1, b), y)]
        result = (min if opcode == "min" else max)(key)[2]
    return result | sign if "xorsign" in modifiers else result


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("modifiers", ["", "NaN", "NaN.xorsign.abs", "xorsign.abs"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("opcode", ["min", "max"])
def test_min_and_max(elementwise, opcode, kind, modifiers, packed):
    form = FORMATS[kind]
    a, b, _ = operands(form)
    arrays = {x: column.view(np.uint32) if packed else column for x, column in (("a", a), ("b", b))}
    name = ".".join(filter(None, [opcode, modifiers, kind + ("x2" if packed else "")]))
    found = elementwise(f"{name} %d, %a, %b;", arrays, {"d": arrays["a"].dtype})["d"].view(np.uint16).tolist()
    for x, y, result in zip(a.tolist(), b.tolist(), found, strict=True):
        expected = least(form, opcode, x, y, modifiers)
        if expected is None:
            assert math.isnan(form.value(result))
        else:
            assert (x, y, expected) == (x, y, result)


@pytest.mark.parametrize("kind", FORMATS)
def test_signs(elementwise, kind):
    a = edge_patterns(FORMATS[kind], 500, 2)
    a = a[[not math.isnan(value) for value in values_of(FORMATS[kind], a)]]
    found = elementwise(f"neg.{kind} %d, %a; abs.{kind} %e, %a;", {"a": a}, {"d": "u2", "e": "u2"})
    assert (a ^ 0x8000).tolist() == found["d"].tolist()
    assert (a & 0x7FFF).tolist() == found["e"].tolist()
    b = a[: len(a) // 2 * 2].view(np.uint32)
    packed = elementwise(f"neg.{kind}x2 %d, %a; abs.{kind}x2 %e, %a;", {"a": b}, {"d": "u4", "e": "u4"})
    assert (b ^ 0x80008000).tolist() == packed["d"].tolist()
    assert (b & 0x7FFF7FFF).tolist() == packed["e"].tolist()


COMPARE = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y and not (math.isnan(x) or math.isnan(y)),
    "lt": lambda x, y: x < y,
    "ge": lambda x, y: x >= y,
    "equ": lambda x, y: x == y or math.isnan(x) or math.isnan(y),
    "neu": lambda x, y: x != y,
    "gtu": lambda x, y: not x <= y,
    "num": lambda x, y: not (math.isnan(x) or math.isnan(y)),
    "nan": lambda x, y: math.isnan(x) or math.isnan(y),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("how", COMPARE)
def test_comparisons(elementwise, how, kind):
    form = FORMATS[kind]
    one = form.round(1.0)
    a, b, _ = operands(form)
    expected = [COMPARE[how](x, y) for x, y in zip(values_of(form, a), values_of(form, b), strict=True)]
    code = f"""setp.{how}.{kind} %p, %a, %b; selp.b16 %d, 1, 0, %p; set.{how}.{kind}.{kind} %e, %a, %b;
    set.{how}.u32.{kind} %f, %a, %b;"""
    found = elementwise(code, {"a": a, "b": b}, {"d": "u2", "e": "u2", "f": "u4"})
    assert [int(flag) for flag in expected] == found["d"].tolist()
    assert [one * flag for flag in expected] == found["e"].tolist()
    assert [0xFFFFFFFF * flag for flag in expected] == found["f"].tolist()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("how", COMPARE)
def test_packed_comparisons_judge_each_half(elementwise, how, kind):
    form = FORMATS[kind]
    one = form.round(1.0)
    a, b, _ = operands(form)
    expected = [COMPARE[how](x, y) for x, y in zip(values_of(form, a), values_of(form, b), strict=True)]
    code = f"""set.{how}.{kind}x2.{kind}x2 %d, %a, %b; set.{how}.u32.{kind}x2 %e, %a, %b;
    setp.{how}.{kind}x2 %p|%q, %a, %b; selp.b32 %f, 1, 0, %p; @%q or.b32 %f, %f, 0x10000;"""
    found = elementwise(code, {"a": a.view("u4"), "b": b.view("u4")}, dict.fromkeys("def", "u4"))
    assert [one * flag for flag in expected] == found["d"].view("u2").tolist()
    assert [0xFFFF * flag for flag in expected] == found["e"].view("u2").tolist()
    assert [int(flag) for flag in expected] == found["f"].view("u2").tolist()


def test_packed_set_combines_both_halves_with_the_predicate(elementwise):
    a = np.array([0x3C003C00, 0x00003C00], np.uint32)
    code = "setp.eq.u32 %p, %index, 0; set.eq.and.u32.f16x2 %d, %a, %a, %p; set.ne.or.u32.f16x2 %e, %a, %a, %p;"
    found = elementwise(code, {"a": a}, {"d": "u4", "e": "u4"})
    assert [0xFFFFFFFF, 0] == found["d"].tolist() == found["e"].tolist()


@pytest.mark.parametrize("kind", ["f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize(("opcode", "reference"), [("tanh", math.tanh), ("ex2", lambda x: 2.0**x)])
def test_approximations_are_within_one_unit(elementwise, opcode, reference, kind):
    """PTX allows an absolute error of 2**-10.987 (f16) and 2**-8 (bf16) for tanh, 2**-9.9 and 2**-7 relative for ex2."""
    form = FORMATS[kind.removesuffix("x2")]
    a = np.array([form.round(x) for x in np.linspace(-8, 8, 64)], np.uint16)
    expected = np.array([reference(value) for value in values_of(form, a)])
    name = f"{opcode}.approx{'.ftz' if opcode == 'ex2' and kind[0] == 'b' else ''}.{kind}"
    array = a.view(np.uint32) if kind.endswith("x2") else a
    found = elementwise(f"{name} %d, %a;", {"a": array}, {"d": array.dtype})["d"].view(np.uint16)
    np.testing.assert_allclose(expected, values_of(form, found), rtol=2.0**-form.fraction, atol=2.0**-20)


@pytest.mark.parametrize("kind", ["u16x2", "s16x2"])
def test_packed_integers(elementwise, kind):
    random = np.random.default_rng(4)
    a, b = (random.integers(0, 2**16, 512).astype(np.uint16) for _ in range(2))
    code = f"add.{kind} %d, %a, %b; min.{kind} %e, %a, %b; max.{kind} %f, %a, %b;"
    found = elementwise(code, {"a": a.view("u4"), "b": b.view("u4")}, dict.fromkeys("def", "u4"))
    x, y = (column.view(f"{'i' if kind[0] == 's' else 'u'}2") for column in (a, b))
    for expected, name in ((x + y, "d"), (np.minimum(x, y), "e"), (np.maximum(x, y), "f")):
        assert expected.tolist() == found[name].view(x.dtype).tolist()


def test_packed_integer_relu_clamps_at_zero(elementwise):
    a, b = np.array([0xFFFE0003, 0x7FFF8000], np.uint32), np.array([0xFFFF0001, 0x0001FFFF], np.uint32)
    found = elementwise("min.relu.s16x2 %d, %a, %b; max.relu.s32 %e, %a, %b;", {"a": a, "b": b}, {"d": "u4", "e": "u4"})
    assert [0x00000001, 0x00010000] == found["d"].tolist()
    assert [0, 0x7FFF8000] == found["e"].tolist()
