"""Video instructions and byte dot products against Python integers."""

from __future__ import annotations

import numpy as np
import pytest

EDGES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x01FF7F80]


def columns(count=3, size=400):
    random = np.random.default_rng(8)
    pairs = [[x, y] for x in EDGES for y in EDGES]
    first = np.array(pairs, np.uint32).T
    third = random.choice(EDGES, len(pairs)).astype(np.uint32)
    edges = [*first, third][:count]
    return [np.concatenate([e, random.integers(0, 2**32, size, np.uint32)]) for e in edges]


def extend(value, bits, signed):
    value &= 2**bits - 1
    return value - 2**bits if signed and value >> (bits - 1) else value


def clamp(value, bits, signed):
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return max(low, min(high, value))


OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "absdiff": lambda a, b: abs(a - b),
    "min": min,
    "max": max,
    "avrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
}
COMPARE = {"lt": lambda a, b: a < b, "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b}
PARTS = {"": (32, 0), "b0": (8, 0), "b3": (8, 24), "h0": (16, 0), "h1": (16, 16)}


def part(word, selector, kind):
    bits, position = PARTS[selector]
    return extend(word >> position, bits, kind[0] == "s")


def dotted(*names):
    return ".".join(filter(None, names))


def run(elementwise, code, arrays):
    return elementwise(code, arrays, {"d": "u4"})["d"].tolist()


@pytest.mark.parametrize("selectors", [("", ""), ("b3", "h1"), ("h0", "")])
@pytest.mark.parametrize("kinds", [("s32", "s32", "s32"), ("u32", "u32", "s32"), ("s32", "u32", "u32")])
@pytest.mark.parametrize("opcode", ["add", "sub", "absdiff", "min", "max"])
def test_scalar_operations(elementwise, opcode, kinds, selectors):
    a, b, c = columns()
    operands = f"{dotted('%a', selectors[0])}, {dotted('%b', selectors[1])}"
    code = f"v{opcode}.{'.'.join(kinds)}"
    found = elementwise(
        f"""{code} %d, {operands}; {code}.sat %e, {operands}; {code}.sat.add %f, {operands}, %c;
        {code}.sat %g.b3, {operands}, %c; {code}.max %h, {operands}, %c;""",
        {"a": a, "b": b, "c": c},
        dict.fromkeys("defgh", "u4"),
    )
    signed = kinds[0][0] == "s"
    for x, y, z, *results in zip(*(v.tolist() for v in (a, b, c)), *(found[n].tolist() for n in "defgh"), strict=True):
        value = OPERATIONS[opcode](part(x, selectors[0], kinds[1]), part(y, selectors[1], kinds[2]))
        third = extend(z, 32, signed)
        merged = clamp(value, 8, signed) << 24 & 0xFF000000 | z & 0xFFFFFF
        expected = [value, clamp(value, 32, signed), clamp(value, 32, signed) + third, merged, max(value, third)]
        assert [word & 0xFFFFFFFF for word in expected] == results


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("opcode", ["vshl", "vshr"])
def test_shifts(elementwise, opcode, kind, mode):
    a, b = columns(2)
    b[::2] %= 40
    expected = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        count = y & 31 if mode == "wrap" else min(y, 32)
        value = extend(x, 32, kind[0] == "s")
        expected.append((value << count if opcode == "vshl" else value >> count) & 0xFFFFFFFF)
    assert expected == run(elementwise, f"{opcode}.{kind}.{kind}.u32.{mode} %d, %a, %b;", {"a": a, "b": b})


@pytest.mark.parametrize("modifiers", ["", "sat", "shr7", "sat.shr15", "po"])
@pytest.mark.parametrize("kinds", [("u32", "u32", "u32"), ("s32", "s32", "u32")])
def test_multiply_and_add(elementwise, kinds, modifiers):
    a, b, c = columns()
    signed = "s" in (kinds[1][0], kinds[2][0])
    expected = []
    for x, y, z in zip(*(v.tolist() for v in (a, b, c)), strict=True):
        value = part(x, "h0", kinds[1]) * part(y, "", kinds[2]) + extend(z, 32, signed) + ("po" in modifiers)
        value >>= 7 if "shr7" in modifiers else 15 if "shr15" in modifiers else 0
        expected.append((clamp(value, 32, signed) if "sat" in modifiers else value) & 0xFFFFFFFF)
    code = f"{dotted('vmad', *kinds, modifiers)} %d, %a.h0, %b, %c;"
    assert expected == run(elementwise, code, {"a": a, "b": b, "c": c})


@pytest.mark.parametrize("how", COMPARE)
def test_set(elementwise, how):
    a, b, c = columns()
    expected = [
        COMPARE[how](extend(x, 32, True), y) + z & 0xFFFFFFFF
        for x, y, z in zip(*(v.tolist() for v in (a, b, c)), strict=True)
    ]
    assert expected == run(elementwise, f"vset.s32.u32.{how}.add %d, %a, %b, %c;", {"a": a, "b": b, "c": c})


@pytest.mark.parametrize("kinds", [("s32", "s32", "s32"), ("u32", "u32", "u32"), ("s32", "u32", "s32")])
@pytest.mark.parametrize("opcode", OPERATIONS)
@pytest.mark.parametrize("lanes", [2, 4])
def test_packed_operations(elementwise, lanes, opcode, kinds):
    a, b, c = columns()
    bits = 32 // lanes
    letter, pick, mask = ("h", "h31", "h1") if lanes == 2 else ("b", "b7024", "b320")
    code = f"v{opcode}{lanes}.{'.'.join(kinds)}"
    found = elementwise(
        f"""{code}.sat %d, %a, %b, %c; {code}.add %e, %a, %b, %c; {code}.sat %f.{mask}, %a.{pick}, %b, %c;
        {code}.add %g.{mask}, %a, %b, %c;""",
        {"a": a, "b": b, "c": c},
        dict.fromkeys("defg", "u4"),
    )
    signed = kinds[0][0] == "s"
    chosen = [str(lane) in mask[1:] for lane in range(lanes)]
    assert letter == mask[0]
    for x, y, z, *results in zip(*(v.tolist() for v in (a, b, c)), *(found[n].tolist() for n in "defg"), strict=True):
        both = x | y << 32
        own = [extend(x >> lane * bits, bits, kinds[1][0] == "s") for lane in range(lanes)]
        other = [extend(y >> lane * bits, bits, kinds[2][0] == "s") for lane in range(lanes)]
        picked = [extend(both >> int(digit) * bits, bits, kinds[1][0] == "s") for digit in reversed(pick[1:])]
        plain = [OPERATIONS[opcode](p, q) for p, q in zip(own, other, strict=True)]
        mixed = [OPERATIONS[opcode](p, q) for p, q in zip(picked, other, strict=True)]
        old = [z >> lane * bits & 2**bits - 1 for lane in range(lanes)]

        def packed(values):
            return sum((value & 2**bits - 1) << lane * bits for lane, value in enumerate(values))

        merged = [clamp(v, bits, signed) if use else o for v, o, use in zip(mixed, old, chosen, strict=True)]
        expected = [
            packed([clamp(value, bits, signed) for value in plain]),
            z + sum(plain),
            packed(merged),
            z + sum(value for value, use in zip(plain, chosen, strict=True) if use),
        ]
        assert [word & 0xFFFFFFFF for word in expected] == results


@pytest.mark.parametrize("lanes", [2, 4])
def test_packed_set(elementwise, lanes):
    a, b, c = columns()
    bits = 32 // lanes
    expected = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        parts = [[extend(v >> lane * bits, bits, True) for v in (x, y)] for lane in range(lanes)]
        expected.append(sum((p < q) << lane * bits for lane, (p, q) in enumerate(parts)))
    code = f"vset{lanes}.s32.s32.lt %d, %a, %b, %c;"
    assert expected == run(elementwise, code, {"a": a, "b": b, "c": c})


@pytest.mark.parametrize("first", ["u32", "s32"])
@pytest.mark.parametrize("second", ["u32", "s32"])
def test_dot_products(elementwise, first, second):
    a, b, c = columns()
    code = f"""dp4a.{first}.{second} %d, %a, %b, %c; dp2a.lo.{first}.{second} %e, %a, %b, %c;
    dp2a.hi.{first}.{second} %f, %a, %b, %c;"""
    found = elementwise(code, {"a": a, "b": b, "c": c}, dict.fromkeys("def", "u4"))
    for x, y, z, *results in zip(*(v.tolist() for v in (a, b, c)), *(found[n].tolist() for n in "def"), strict=True):
        p = [extend(x >> 8 * n, 8, first == "s32") for n in range(4)]
        h = [extend(x >> 16 * n, 16, first == "s32") for n in range(2)]
        q = [extend(y >> 8 * n, 8, second == "s32") for n in range(4)]
        expected = [
            z + sum(u * v for u, v in zip(p, q, strict=True)),
            z + h[0] * q[0] + h[1] * q[1],
            z + h[0] * q[2] + h[1] * q[3],
        ]
        assert [word & 0xFFFFFFFF for word in expected] == results
