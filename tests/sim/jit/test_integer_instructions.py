"""Integer and bit instructions against Python's integers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

EDGES_32 = [0, 1, 2, 3, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678, 0x00FF00FF]
EDGES_64 = [0, 1, 7, 63, 64, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x123456789ABCDEF0, 1 << 32]
EDGES_16 = [0, 1, 2, 15, 16, 17, 0x7FFF, 0x8000, 0xFFFF, 0x1234]
EDGES = {16: EDGES_16, 32: EDGES_32, 64: EDGES_64}


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> bits - 1 else value


def as_type(value: int, kind: str) -> int:
    bits = int(kind[1:])
    return signed(value, bits) if kind[0] == "s" else value & ((1 << bits) - 1)


def truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def divide(a: int, b: int) -> int:
    return -1 if b == 0 else truncated(a, b)


def remainder(a: int, b: int) -> int:
    return a if b == 0 else a - b * truncated(a, b)


TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]
BINARY = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul.lo": lambda a, b, n: a * b,
    "mul.hi": lambda a, b, n: a * b >> n,
    "div": lambda a, b, n: divide(a, b),
    "rem": lambda a, b, n: remainder(a, b),
    "min": lambda a, b, n: min(a, b),
    "max": lambda a, b, n: max(a, b),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("opcode", BINARY)
def test_binary(elementwise, opcode, kind):
    bits = int(kind[1:])
    pairs = list(itertools.product(EDGES[bits], repeat=2))
    a, b = (np.array(column, f"u{bits // 8}") for column in zip(*pairs, strict=True))
    found = elementwise(f"{opcode}.{kind} %d, %a, %b;", {"a": a, "b": b}, {"d": a.dtype})["d"]
    expected = [BINARY[opcode](as_type(x, kind), as_type(y, kind), bits) & ((1 << bits) - 1) for x, y in pairs]
    assert expected == found.tolist()


LOGIC = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("opcode", LOGIC)
def test_logic(elementwise, opcode, bits):
    pairs = list(itertools.product(EDGES[bits], repeat=2))
    a, b = (np.array(column, f"u{bits // 8}") for column in zip(*pairs, strict=True))
    found = elementwise(f"{opcode}.b{bits} %d, %a, %b;", {"a": a, "b": b}, {"d": a.dtype})["d"]
    assert [LOGIC[opcode](x, y) for x, y in pairs] == found.tolist()


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_wide_and_mad(elementwise, kind):
    bits = int(kind[1:])
    if bits == 64:
        pytest.skip("there is no 128-bit product")
    pairs = list(itertools.product(EDGES[bits], repeat=2))
    a, b = (np.array(column, f"u{bits // 8}") for column in zip(*pairs, strict=True))
    c = np.arange(len(pairs), dtype=f"u{bits // 4}") * 0x1F3
    code = f"mul.wide.{kind} %d, %a, %b; mad.wide.{kind} %e, %a, %b, %c;"
    found = elementwise(code, {"a": a, "b": b, "c": c}, {"d": c.dtype, "e": c.dtype})
    mask = (1 << 2 * bits) - 1
    products = [as_type(x, kind) * as_type(y, kind) for x, y in pairs]
    assert [p & mask for p in products] == found["d"].tolist()
    assert [(p + int(z)) & mask for p, z in zip(products, c, strict=True)] == found["e"].tolist()


@pytest.mark.parametrize("kind", ["u32", "s32", "u64"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_mad_halves(elementwise, kind, half):
    bits = int(kind[1:])
    pairs = list(itertools.product(EDGES[bits], repeat=2))
    a, b = (np.array(column, f"u{bits // 8}") for column in zip(*pairs, strict=True))
    found = elementwise(f"mad.{half}.{kind} %d, %a, %b, %a;", {"a": a, "b": b}, {"d": a.dtype})["d"]
    shift = bits if half == "hi" else 0
    expected = [((as_type(x, kind) * as_type(y, kind) >> shift) + x) & ((1 << bits) - 1) for x, y in pairs]
    assert expected == found.tolist()


def test_saturating_add_and_sub(elementwise):
    pairs = list(itertools.product(EDGES_32, repeat=2))
    a, b = (np.array(column, "u4") for column in zip(*pairs, strict=True))
    code = "add.sat.s32 %d, %a, %b; sub.sat.s32 %e, %a, %b;"
    found = elementwise(code, {"a": a, "b": b}, {"d": np.int32, "e": np.int32})
    low, high = -(2**31), 2**31 - 1
    numbers = [(signed(x, 32), signed(y, 32)) for x, y in pairs]
    assert [max(low, min(high, x + y)) for x, y in numbers] == found["d"].tolist()
    assert [max(low, min(high, x - y)) for x, y in numbers] == found["e"].tolist()


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("opcode", ["shl.b", "shr.u", "shr.s"])
def test_shift_counts_beyond_the_width_are_clamped(elementwise, opcode, bits):
    counts = [0, 1, bits - 1, bits, bits + 1, 255, 256, 0xFFFFFFFF]
    pairs = list(itertools.product(EDGES[bits], counts))
    a = np.array([x for x, _ in pairs], f"u{bits // 8}")
    b = np.array([y for _, y in pairs], "u4")
    found = elementwise(f"{opcode}{bits} %d, %a, %b;", {"a": a, "b": b}, {"d": a.dtype})["d"]
    mask = (1 << bits) - 1

    def reference(x: int, n: int) -> int:
        n = min(n, bits)
        return x << n if opcode == "shl.b" else (signed(x, bits) if opcode == "shr.s" else x) >> n

    assert [reference(x, n) & mask for x, n in pairs] == found.tolist()


@pytest.mark.parametrize("count", [0, 5, 31, 32, 40])
def test_shift_by_a_literal(elementwise, count):
    a = np.array(EDGES_32, "u4")
    found = elementwise(f"shl.b32 %d, %a, {count}; shr.s32 %e, %a, {count};", {"a": a}, {"d": "u4", "e": "i4"})
    assert [x << count & 0xFFFFFFFF for x in EDGES_32] == found["d"].tolist()
    assert [signed(x, 32) >> count for x in EDGES_32] == found["e"].tolist()


@pytest.mark.parametrize("direction", ["l", "r"])
@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shift(elementwise, direction, mode):
    cases = list(itertools.product([0x89ABCDEF, 1, 0xFFFFFFFF], [0x01234567, 0x80000000], [0, 1, 31, 32, 33, 64]))
    a, b, c = (np.array(column, "u4") for column in zip(*cases, strict=True))
    found = elementwise(f"shf.{direction}.{mode}.b32 %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": "u4"})["d"]

    def reference(low: int, high: int, n: int) -> int:
        n = min(n, 32) if mode == "clamp" else n & 31
        both = high << 32 | low
        return (both << n >> 32 if direction == "l" else both >> n) & 0xFFFFFFFF

    assert [reference(*case) for case in cases] == found.tolist()


UNARY = {
    "neg.s": lambda x, n: -x,
    "abs.s": lambda x, n: abs(signed(x, n)),
    "not.b": lambda x, n: ~x,
    "cnot.b": lambda x, n: int(x == 0),
    "brev.b": lambda x, n: int(f"{x:0{n}b}"[::-1], 2),
}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("opcode", UNARY)
def test_unary(elementwise, opcode, bits):
    a = np.array(EDGES[bits], f"u{bits // 8}")
    found = elementwise(f"{opcode}{bits} %d, %a;", {"a": a}, {"d": a.dtype})["d"]
    assert [UNARY[opcode](x, bits) & ((1 << bits) - 1) for x in EDGES[bits]] == found.tolist()


def highest(value: int, bits: int, kind: str) -> int:
    if kind == "s" and signed(value, bits) < 0:
        value ^= (1 << bits) - 1
    return value.bit_length() - 1


COUNTS = {
    "popc.b": lambda x, n: x.bit_count(),
    "clz.b": lambda x, n: n - x.bit_length(),
    "bfind.u": lambda x, n: highest(x, n, "u") & 0xFFFFFFFF,
    "bfind.s": lambda x, n: highest(x, n, "s") & 0xFFFFFFFF,
    "bfind.shiftamt.u": lambda x, n: n - 1 - highest(x, n, "u") if x else 0xFFFFFFFF,
}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("opcode", COUNTS)
def test_bit_counts(elementwise, opcode, bits):
    a = np.array(EDGES[bits], f"u{bits // 8}")
    found = elementwise(f"{opcode}{bits} %d, %a;", {"a": a}, {"d": "u4"})["d"]
    assert [COUNTS[opcode](x, bits) for x in EDGES[bits]] == found.tolist()


def extract(a: int, position: int, length: int, bits: int, kind: str) -> int:
    """The loop of the PTX ISA's description of bfe."""
    position, length = position & 255, length & 255
    msb = bits - 1
    sign = 0 if kind == "u" or length == 0 else a >> min(position + length - 1, msb) & 1
    result = 0
    for i in range(bits):
        bit = a >> position + i & 1 if i < length and position + i <= msb else sign
        result |= bit << i
    return result


def insert(a: int, b: int, position: int, length: int, bits: int) -> int:
    position, length = position & 255, length & 255
    for i in range(length):
        if position + i < bits:
            b = b & ~(1 << position + i) | (a >> i & 1) << position + i
    return b


FIELDS = list(itertools.product([0, 1, 7, 31, 32, 60, 63, 64, 255], [0, 1, 5, 31, 32, 33, 64, 255]))


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(elementwise, kind):
    bits = int(kind[1:])
    for value in EDGES[bits][-4:]:
        a = np.full(len(FIELDS), value, f"u{bits // 8}")
        b, c = (np.array(column, "u4") for column in zip(*FIELDS, strict=True))
        found = elementwise(f"bfe.{kind} %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": a.dtype})["d"]
        assert [extract(value, p, n, bits, kind[0]) for p, n in FIELDS] == found.tolist()


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_field_insert(elementwise, bits):
    value, target = 0xA5A5A5A5A5A5A5A5 & ((1 << bits) - 1), 0x0F0F0F0F12345678 & ((1 << bits) - 1)
    a, t = (np.full(len(FIELDS), v, f"u{bits // 8}") for v in (value, target))
    b, c = (np.array(column, "u4") for column in zip(*FIELDS, strict=True))
    code = f"bfi.b{bits} %d, %a, %t, %b, %c;"
    found = elementwise(code, {"a": a, "t": t, "b": b, "c": c}, {"d": a.dtype})["d"]
    assert [insert(value, target, p, n, bits) for p, n in FIELDS] == found.tolist()


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_bit_mask(elementwise, mode):
    b, c = (np.array(column, "u4") for column in zip(*FIELDS, strict=True))
    found = elementwise(f"bmsk.{mode}.b32 %d, %b, %c;", {"b": b, "c": c}, {"d": "u4"})["d"]

    def reference(p: int, n: int) -> int:
        if mode == "wrap":
            p, n = p & 31, n & 31
        return ((1 << min(n, 32)) - 1 << p) & 0xFFFFFFFF if p < 32 else 0

    assert [reference(p, n) for p, n in FIELDS] == found.tolist()


@pytest.mark.parametrize("mode", ["", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"])
def test_permute_bytes(elementwise, mode):
    selectors = [0x3210, 0x7654, 0x0123, 0xFEDC, 0x8888, 0x0, 0x1, 0x2, 0x3, 0x40C8]
    low, high = 0x8899AABB, 0x11F3D577
    a, b = np.full(len(selectors), low, "u4"), np.full(len(selectors), high, "u4")
    found = elementwise(
        f"prmt.b32{mode} %d, %a, %b, %c;", {"a": a, "b": b, "c": np.array(selectors, "u4")}, {"d": "u4"}
    )

    def reference(c: int) -> int:
        n = c & 3
        picks = {
            "": [c >> 4 * k & 15 for k in range(4)],
            ".f4e": [n, n + 1, n + 2, n + 3],
            ".b4e": [n, (n + 7) % 8, (n + 6) % 8, (n + 5) % 8],
            ".rc8": [n] * 4,
            ".ecl": [max(n, k) for k in range(4)],
            ".ecr": [min(n, k) for k in range(4)],
            ".rc16": [0, 1, 0, 1] if n % 2 == 0 else [2, 3, 2, 3],
        }[mode]
        result = 0
        for k, pick in enumerate(picks):
            byte = (high << 32 | low) >> 8 * (pick & 7) & 255
            if pick & 8:
                byte = 255 if byte & 128 else 0
            result |= byte << 8 * k
        return result

    assert [reference(c) for c in selectors] == found["d"].tolist()


@pytest.mark.parametrize("table", [0x00, 0x1B, 0x80, 0x96, 0xE8, 0xFE, 0xFF])
def test_three_input_logic(elementwise, table):
    cases = [(0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA), (0x12345678, 0x9ABCDEF0, 0x0F1E2D3C)]
    a, b, c = (np.array(column, "u4") for column in zip(*cases, strict=True))
    found = elementwise(f"lop3.b32 %d, %a, %b, %c, {table};", {"a": a, "b": b, "c": c}, {"d": "u4"})["d"]

    def reference(x: int, y: int, z: int) -> int:
        return sum((table >> ((x >> k & 1) << 2 | (y >> k & 1) << 1 | z >> k & 1) & 1) << k for k in range(32))

    assert [reference(*case) for case in cases] == found.tolist()


def test_carries_chain_through_128_bits(elementwise):
    cases = list(itertools.product([0, 1, 2**64 - 1, 2**127, 2**128 - 1, 0x0123456789ABCDEF << 60], repeat=2))
    words = {
        f"{name}{k}": np.array([case[n] >> 32 * k & 0xFFFFFFFF for case in cases], "u4")
        for n, name in enumerate("ab")
        for k in range(4)
    }
    for opcode, operation in (("add", int.__add__), ("sub", int.__sub__)):
        code = f"{opcode}.cc.u32 %d0, %a0, %b0; {opcode}c.cc.u32 %d1, %a1, %b1; {opcode}c.cc.u32 %d2, %a2, %b2;"
        found = elementwise(f"{code} {opcode}c.u32 %d3, %a3, %b3;", words, {f"d{k}": "u4" for k in range(4)})
        totals = [sum(int(found[f"d{k}"][n]) << 32 * k for k in range(4)) for n in range(len(cases))]
        assert [operation(x, y) % 2**128 for x, y in cases] == totals


def test_the_carry_after_a_subtraction_says_that_nothing_was_borrowed(elementwise):
    a, b = np.array([5, 5, 5], "u4"), np.array([4, 5, 6], "u4")
    code = "sub.cc.u32 %d, %a, %b; addc.u32 %d, 0, 0; add.cc.u32 %e, %b, -6; subc.u32 %e, 10, 0;"
    found = elementwise(code, {"a": a, "b": b}, dict.fromkeys("de", "u4"))
    assert [1, 1, 0] == found["d"].tolist()
    assert [9, 9, 10] == found["e"].tolist()


def test_mad_with_carry_multiplies_64_bits(elementwise):
    cases = list(itertools.product([0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x123456789ABCDEF0], repeat=2))
    words = {
        f"{name}{k}": np.array([case[n] >> 32 * k & 0xFFFFFFFF for case in cases], "u4")
        for n, name in enumerate("ab")
        for k in range(2)
    }
    code = """
    mul.lo.u32 %d0, %a0, %b0;  mul.hi.u32 %d1, %a0, %b0;
    mad.lo.cc.u32 %d1, %a0, %b1, %d1;  madc.hi.u32 %d2, %a0, %b1, 0;
    mad.lo.cc.u32 %d1, %a1, %b0, %d1;  madc.hi.cc.u32 %d2, %a1, %b0, %d2;  addc.u32 %d3, 0, 0;
    mad.lo.cc.u32 %d2, %a1, %b1, %d2;  madc.hi.u32 %d3, %a1, %b1, %d3;
    """
    found = elementwise(code, words, {f"d{k}": "u4" for k in range(4)})
    totals = [sum(int(found[f"d{k}"][n]) << 32 * k for k in range(4)) for n in range(len(cases))]
    assert [x * y for x, y in cases] == totals


def test_24_bit_products(elementwise):
    cases = [(0xFFFFFF, 0xFFFFFF), (0x800000, 3), (0x7FFFFF, 0x7FFFFF), (0xFF000002, 0x01000003)]
    a, b = (np.array(column, "u4") for column in zip(*cases, strict=True))
    code = "mul24.lo.u32 %d, %a, %b; mul24.hi.u32 %e, %a, %b; mul24.lo.s32 %f, %a, %b; mad24.lo.u32 %g, %a, %b, 5;"
    found = elementwise(code, {"a": a, "b": b}, dict.fromkeys("defg", "u4"))
    unsigned = [(x & 0xFFFFFF) * (y & 0xFFFFFF) for x, y in cases]
    signed_ = [signed(x, 24) * signed(y, 24) for x, y in cases]
    assert [p & 0xFFFFFFFF for p in unsigned] == found["d"].tolist()
    assert [p >> 16 & 0xFFFFFFFF for p in unsigned] == found["e"].tolist()
    assert [p & 0xFFFFFFFF for p in signed_] == found["f"].tolist()
    assert [p + 5 & 0xFFFFFFFF for p in unsigned] == found["g"].tolist()


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_sum_of_absolute_differences(elementwise, kind):
    pairs = list(itertools.product(EDGES_32, repeat=2))
    a, b = (np.array(column, "u4") for column in zip(*pairs, strict=True))
    found = elementwise(f"sad.{kind} %d, %a, %b, 7;", {"a": a, "b": b}, {"d": "u4"})["d"]
    assert [abs(as_type(x, kind) - as_type(y, kind)) + 7 & 0xFFFFFFFF for x, y in pairs] == found.tolist()


INTEGER_COMPARE = {
    "eq": int.__eq__,
    "ne": int.__ne__,
    "lt": int.__lt__,
    "le": int.__le__,
    "gt": int.__gt__,
    "ge": int.__ge__,
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("how", INTEGER_COMPARE)
def test_integer_compare(elementwise, kind, how):
    bits = int(kind[1:])
    pairs = list(itertools.product(EDGES[bits], repeat=2))
    a, b = (np.array(column, f"u{bits // 8}") for column in zip(*pairs, strict=True))
    code = f"setp.{how}.{kind} %p, %a, %b; selp.u32 %d, 1, 0, %p;"
    found = elementwise(code, {"a": a, "b": b}, {"d": "u4"})["d"]
    assert [int(INTEGER_COMPARE[how](as_type(x, kind), as_type(y, kind))) for x, y in pairs] == found.tolist()


@pytest.mark.parametrize("how", ["and", "or", "xor"])
def test_comparison_combined_with_a_predicate(elementwise, how):
    cases = list(itertools.product([1, 2], [1, 2], [0, 1]))
    a, b, c = (np.array(column, "u4") for column in zip(*cases, strict=True))
    code = f"""setp.ne.u32 %p, %c, 0; setp.lt.{how}.u32 %p|%q, %a, %b, %p;
    selp.u32 %d, 1, 0, %p; selp.u32 %e, 1, 0, %q;"""
    found = elementwise(code, {"a": a, "b": b, "c": c}, {"d": "u4", "e": "u4"})
    operation = LOGIC[how]
    assert [operation(int(x < y), z) for x, y, z in cases] == found["d"].tolist()
    assert [operation(int(x >= y), z) for x, y, z in cases] == found["e"].tolist()


def test_set_gives_all_ones_or_one(elementwise):
    a, b = np.array([1, 2, 3], "u4"), np.array([2, 2, 2], "u4")
    code = "set.lt.u32.u32 %d, %a, %b; set.ge.f32.u32 %e, %a, %b;"
    found = elementwise(code, {"a": a, "b": b}, {"d": "u4", "e": "f4"})
    assert [0xFFFFFFFF, 0, 0] == found["d"].tolist()
    assert [0.0, 1.0, 1.0] == found["e"].tolist()


def test_guards_leave_the_old_value(elementwise):
    a = np.arange(8, dtype="u4")
    code = "mov.u32 %d, 100; setp.gt.u32 %p, %a, 3; @%p add.u32 %d, %a, 1; @!%p add.u32 %d, %d, 1;"
    assert [101] * 4 + [5, 6, 7, 8] == elementwise(code, {"a": a}, {"d": "u4"})["d"].tolist()


def test_pack_and_unpack(elementwise):
    a = np.array([0x1122334455667788], "u8")
    code = """mov.b64 {%lo, %hi}, %a; mov.b64 %d, {%hi, %lo};
    mov.b32 {%h0, %h1}, %lo; mov.b32 %e, {%h1, %h0};"""
    found = elementwise(code, {"a": a}, {"d": "u8", "e": "u4"}, declare=".reg .b32 %lo, %hi; .reg .b16 %h0, %h1;")
    assert [0x5566778811223344] == found["d"].tolist()
    assert [0x77885566] == found["e"].tolist()


CONVERSIONS = list(itertools.product(["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"], repeat=2))


@pytest.mark.parametrize(("target", "source"), CONVERSIONS)
def test_integer_conversion(elementwise, target, source):
    values = np.array(EDGES_64, "u8")
    wide = elementwise(
        f"cvt.{target}.{source} %d, %a;",
        {"a": values.astype(f"u{max(int(source[1:]) // 8, 2)}")},
        {"d": f"{'i' if target[0] == 's' else 'u'}{max(int(target[1:]) // 8, 2)}"},
    )
    assert [as_type(as_type(int(v), source), target) for v in values] == wide["d"].tolist()


@pytest.mark.parametrize(
    ("target", "source"), [("u8", "s32"), ("s8", "s32"), ("s16", "u32"), ("u32", "s64"), ("s32", "u64")]
)
def test_saturating_integer_conversion(elementwise, target, source):
    values = np.array(EDGES_64, "u8")
    found = elementwise(
        f"cvt.sat.{target}.{source} %d, %a;",
        {"a": values.astype(f"u{int(source[1:]) // 8}")},
        {"d": f"{'i' if target[0] == 's' else 'u'}{max(int(target[1:]) // 8, 2)}"},
    )
    bits = int(target[1:])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if target[0] == "s" else (0, 2**bits - 1)
    assert [max(low, min(high, as_type(int(v), source))) for v in values] == found["d"].tolist()
