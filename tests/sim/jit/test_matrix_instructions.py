"""mma, wmma, ldmatrix, stmatrix, movmatrix against NumPy products, with the fragments of the PTX ISA.

Integers, bits and f64 agree exactly. For the other types PTX leaves the order of the sums open: numbers that single
precision adds exactly must agree exactly, random ones to a few units of the last place of the largest product.
"""

from __future__ import annotations

import numpy as np
import pytest
from float_formats import BFLOAT16, E4M3, E5M2, HALF

LANES = np.arange(32)
BITS = {"f64": 64, "f32": 32, "tf32": 32, "s32": 32, "f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8}
BITS |= {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "b1": 1}
NARROW = {"f16": HALF, "bf16": BFLOAT16, "e4m3": E4M3, "e5m2": E5M2}


@pytest.fixture(name="launch")
def launch_fixture(launch_in_turn):
    return launch_in_turn


def encode(matrix, kind):
    """Return the bits of each element as unsigned integers."""
    if kind in NARROW:
        return np.vectorize(lambda x: NARROW[kind].round(float(x)), otypes=[np.uint64])(matrix)
    if kind in ("f32", "tf32"):
        return matrix.astype(np.float32).view(np.uint32).astype(np.uint64)
    if kind == "f64":
        return matrix.astype(np.float64).view(np.uint64)
    return matrix.astype(np.int64).view(np.uint64) & np.uint64(2 ** BITS[kind] - 1)


def decode(bits, kind):
    if kind in NARROW:
        return np.vectorize(lambda x: NARROW[kind].value(int(x)), otypes=[np.float64])(bits)
    if kind in ("f32", "tf32"):
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if kind == "f64":
        return bits.view(np.float64)
    return bits.astype(np.uint32).view(np.int32).astype(np.int64)


def places(which, m, k, kind):
    """Return rows and columns, each of shape (elements of a lane, 32), as the PTX ISA gives them.

    With g = lane / 4, t = lane % 4 and e elements in a register: A has rows g and, where m is 16, g + 8 in every other
    register, and columns t * e + i % e, further on by 4 * e every two registers (every register where m is 8). B is
    alike with rows and columns exchanged and one column g. C has rows g and g + 8, columns 2 * t and 2 * t + 1.
    """
    g, t = LANES // 4, LANES % 4
    per = max(32 // BITS[kind], 1)
    if which == "a":
        index = np.arange(m * k // 32)[:, None]
        register = index // per
        low = register % 2 if m == 16 else 0 * register
        further = register // 2 if m == 16 else register
        return g + 8 * low, t * per + index % per + 4 * per * further
    if which == "b":
        index = np.arange(k * 8 // 32)[:, None]
        return t * per + index % per + 4 * per * (index // per), g + 0 * index
    index = np.arange(m * 8 // 32)[:, None]
    return g + 8 * (index // 2), 2 * t + index % 2


def spread(matrix, kind, where):
    """Return the 32-bit words that the lanes hold, of shape (words, 32)."""
    bits = encode(matrix, kind)[where]
    if kind == "f64":
        return np.stack([bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)], 1).reshape(-1, 32).astype(np.uint32)
    per = 32 // BITS[kind]
    grouped = bits.reshape(-1, per, 32) << (np.arange(per, dtype=np.uint64) * np.uint64(BITS[kind]))[:, None]
    return np.bitwise_or.reduce(grouped, 1).astype(np.uint32)


def gather(words, kind, where, shape):
    if kind == "f64":
        bits = words[0::2].astype(np.uint64) | words[1::2].astype(np.uint64) << np.uint64(32)
    else:
        per = 32 // BITS[kind]
        shifts = (np.arange(per, dtype=np.uint32) * np.uint32(BITS[kind]))[:, None]
        bits = (words[:, None, :] >> shifts & np.uint32(2 ** BITS[kind] - 1)).reshape(-1, 32).astype(np.uint64)
    result = np.zeros(shape, np.float64 if kind[0] in "fbt" else np.int64)
    result[where] = decode(bits, kind)
    return result


def run(ptx_kernel, launch, name, sources, kinds, words_out):
    """Run one instruction on a warp: words of A, B and C of shape (words, 32) in, words of D out."""
    lines = [".reg .b32 %t; .reg .b64 %p<4>, %o;", "mov.u32 %t, %tid.x;"]
    arrays = [*sources, np.zeros((words_out, 32), np.uint32)]
    vectors = []
    for n, array in enumerate(arrays):
        lines.append(f"ld.param.u64 %p{n}, [p{n}]; mul.wide.u32 %o, %t, 4; add.u64 %p{n}, %p{n}, %o;")
        double = kinds[n] == "f64"
        count = len(array) // 2 if double else len(array)
        registers = [f"%r{n}_{index}" for index in range(count)]
        vectors.append("{" + ", ".join(registers) + "}")
        lines.append(f".reg .b{64 if double else 32} {', '.join(registers)};")
        lines.append(f".reg .b32 %l{n}, %h{n};")
    for n, array in enumerate(arrays[:3]):
        for index in range(len(array) // (2 if kinds[n] == "f64" else 1)):
            if kinds[n] == "f64":
                lines.append(
                    f"ld.global.b32 %l{n}, [%p{n}+{256 * index}]; ld.global.b32 %h{n}, [%p{n}+{256 * index + 128}];"
                )
                lines.append(f"mov.b64 %r{n}_{index}, {{%l{n}, %h{n}}};")
            else:
                lines.append(f"ld.global.b32 %r{n}_{index}, [%p{n}+{128 * index}];")
    lines.append(f"{name} {vectors[3]}, {vectors[0]}, {vectors[1]}, {vectors[2]};")
    for index in range(words_out // (2 if kinds[3] == "f64" else 1)):
        if kinds[3] == "f64":
            lines.append(f"mov.b64 {{%l3, %h3}}, %r3_{index};")
            lines.append(f"st.global.b32 [%p3+{256 * index}], %l3; st.global.b32 [%p3+{256 * index + 128}], %h3;")
        else:
            lines.append(f"st.global.b32 [%p3+{128 * index}], %r3_{index};")
    kernel = ptx_kernel(", ".join(f".param .u64 p{n}" for n in range(4)), "\n".join([*lines, "ret;"]))
    launch(kernel, 1, 32, *(np.ascontiguousarray(array) for array in arrays[:3]), arrays[3])
    return arrays[3]


def numbers(kind, shape, seed, *, small=False):
    """Return random elements; `small` are whole numbers, so that sums are exact."""
    random = np.random.default_rng(seed)
    if kind == "b1":
        return random.integers(0, 2, shape)
    if kind[0] in "su":
        low, high = (-(2 ** (BITS[kind] - 1)), 2 ** (BITS[kind] - 1)) if kind[0] == "s" else (0, 2 ** BITS[kind])
        return random.integers(low, high, shape)
    values = random.integers(-8, 8, shape).astype(float) if small else random.normal(size=shape)
    if kind == "tf32":
        return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(float)
    return (
        decode(encode(values, kind), kind) if kind in NARROW else values.astype(np.float32 if kind == "f32" else float)
    )


FORMS = [
    *(("m16n8k8", d, "f16", "f16", c) for d, c in (("f16", "f16"), ("f32", "f32"))),
    *(("m16n8k16", d, "f16", "f16", c) for d, c in (("f16", "f16"), ("f32", "f32"))),
    ("m16n8k8", "f32", "bf16", "bf16", "f32"),
    ("m16n8k16", "f32", "bf16", "bf16", "f32"),
    ("m16n8k4", "f32", "tf32", "tf32", "f32"),
    ("m16n8k8", "f32", "tf32", "tf32", "f32"),
    *(("m16n8k32", "f32", a, b, "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    ("m16n8k32", "f16", "e4m3", "e5m2", "f16"),
    ("m16n8k16", "f32", "e4m3", "e4m3", "f32"),
    *((shape, "f64", "f64", "f64", "f64") for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16")),
    *(
        (shape, "s32", a, b, "s32")
        for shape in ("m8n8k16", "m16n8k16", "m16n8k32")
        for a, b in (("s8", "s8"), ("u8", "s8"))
    ),
    *(
        (shape, "s32", a, b, "s32")
        for shape in ("m8n8k32", "m16n8k32", "m16n8k64")
        for a, b in (("s4", "u4"), ("u4", "u4"))
    ),
]


def sizes(shape):
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


@pytest.mark.parametrize("form", FORMS, ids=".".join)
def test_mma(ptx_kernel, launch, form):
    for small in (True, False):
        multiply_and_compare(ptx_kernel, launch, form, small)


def multiply_and_compare(ptx_kernel, launch, form, small):
    shape, d, a, b, c = form
    m, n, k = sizes(shape)
    x, y, z = numbers(a, (m, k), 1, small=small), numbers(b, (k, n), 2, small=small), numbers(c, (m, n), 3, small=small)
    if c == "s32":
        z = z.astype(np.int32).astype(np.int64)
    sources = [
        spread(x, a, places("a", m, k, a)),
        spread(y, b, places("b", m, k, b)),
        spread(z, c, places("c", m, k, c)),
    ]
    words = m * n // 32 * BITS[d] // 32
    name = f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{c}"
    found = gather(run(ptx_kernel, launch, name, sources, [a, b, c, d], words), d, places("c", m, k, d), (m, n))
    if d == "s32":
        assert ((x @ y + z + 2**31) % 2**32 - 2**31).tolist() == found.tolist()
        return
    expected = np.float64(z) + np.float64(x) @ np.float64(y)
    if small:
        assert expected.tolist() == found.tolist()
    else:
        unit = {"f64": 2.0**-50, "f32": 2.0**-20, "f16": 2.0**-10}[d]
        np.testing.assert_allclose(expected, found, rtol=unit, atol=unit * k)


@pytest.mark.parametrize("operation", ["xor", "and"])
@pytest.mark.parametrize("shape", ["m8n8k128", "m16n8k128", "m16n8k256"])
def test_mma_of_bits_counts(ptx_kernel, launch, shape, operation):
    m, n, k = sizes(shape)
    x, y, z = numbers("b1", (m, k), 1), numbers("b1", (k, n), 2), numbers("s32", (m, n), 3) // 8
    sources = [spread(*one) for one in ((x, "b1", places("a", m, k, "b1")), (y, "b1", places("b", m, k, "b1")))]
    sources.append(spread(z, "s32", places("c", m, k, "s32")))
    name = f"mma.sync.aligned.{shape}.row.col.s32.b1.b1.s32.{operation}.popc"
    found = run(ptx_kernel, launch, name, sources, ["b1", "b1", "s32", "s32"], m * n // 32)
    both = x[:, :, None] & y[None] if operation == "and" else x[:, :, None] ^ y[None]
    assert (both.sum(1) + z).tolist() == gather(found, "s32", places("c", m, k, "s32"), (m, n)).tolist()


def test_satfinite_clamps_the_exact_sum(ptx_kernel, launch):
    x, y = np.full((16, 32), -128), np.full((32, 8), 127)
    y[:, 1] = -128
    z = np.full((16, 8), -(2**31) + 5)
    z[:, 1] = 2**31 - 1
    sources = [spread(x, "s8", places("a", 16, 32, "s8")), spread(y, "s8", places("b", 16, 32, "s8"))]
    sources.append(spread(z, "s32", places("c", 16, 32, "s32")))
    name = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"
    found = run(ptx_kernel, launch, name, sources, ["s8", "s8", "s32", "s32"], 4)
    expected = np.clip(x @ y + z, -(2**31), 2**31 - 1)
    assert expected.tolist() == gather(found, "s32", places("c", 16, 32, "s32"), (16, 8)).tolist()


@pytest.mark.parametrize("layouts", ["row.col", "row.row", "col.col", "col.row"])
@pytest.mark.parametrize("d", ["f16", "f32"])
def test_four_products_of_quad_pairs(ptx_kernel, launch, d, layouts):
    """mma.m8n8k4: threads 4 q .. 4 q + 3 and the 4 that are 16 further on compute product q."""
    first, second = layouts.split(".")
    x, y, z = (
        numbers("f16", (4, 8, 4), 1, small=True),
        numbers("f16", (4, 4, 8), 2, small=True),
        numbers(d, (4, 8, 8), 3, small=True),
    )
    quad, lane, upper = LANES % 16 // 4, LANES % 4, 4 * (LANES // 16)
    index = np.arange(4)[:, None]
    a = (lane + upper + 0 * index, index + 0 * lane) if first == "row" else (index + upper, lane + 0 * index)
    b = (lane + 0 * index, index + upper) if second == "row" else (index + 0 * lane, lane + upper + 0 * index)
    index = np.arange(8)[:, None]
    if d == "f16":
        c = (lane + upper + 0 * index, index + 0 * lane)
    else:
        c = ((LANES & 1) + (index & 2) + upper, (index & 4) + (LANES & 2) + (index & 1))
    sources = [spread(v, k, (quad + 0 * w[0], *w)) for v, k, w in ((x, "f16", a), (y, "f16", b), (z, d, c))]
    name = f"mma.sync.aligned.m8n8k4.{layouts}.{d}.f16.f16.{d}"
    found = run(ptx_kernel, launch, name, sources, ["f16", "f16", d, d], 8 * BITS[d] // 32)
    assert (x @ y + z).tolist() == gather(found, d, (quad + 0 * c[0], *c), (4, 8, 8)).tolist()


# ---- wmma ----

WMMA = [
    *(
        (s, "f16", d, c)
        for s in ("m16n16k16", "m32n8k16", "m8n32k16")
        for d, c in (("f16", "f16"), ("f32", "f32"), ("f16", "f32"))
    ),
    *((s, t, "f32", "f32") for s in ("m16n16k16", "m32n8k16", "m8n32k16") for t in ("bf16",)),
    *((s, t, "s32", "s32") for s in ("m16n16k16", "m32n8k16", "m8n32k16") for t in ("s8", "u8")),
    ("m16n16k8", "tf32", "f32", "f32"),
    ("m8n8k4", "f64", "f64", "f64"),
    ("m8n8k32", "s4", "s32", "s32"),
    ("m8n8k32", "u4", "s32", "s32"),
    ("m8n8k128", "b1", "s32", "s32"),
]
STORED = {"f16": np.float16, "f32": np.float32, "tf32": np.float32, "f64": np.float64, "s32": np.int32}


def stored(matrix, kind):
    """Return a matrix as it lies in memory, row by row."""
    if kind in STORED:
        return np.ascontiguousarray(matrix.astype(STORED[kind]))
    bits = encode(matrix, kind)
    if BITS[kind] >= 8:
        return np.ascontiguousarray(bits.astype(f"u{BITS[kind] // 8}"))
    flat = bits.reshape(len(matrix), -1, 8 // BITS[kind]) << np.arange(0, 8, BITS[kind], dtype=np.uint64)
    return np.ascontiguousarray(np.bitwise_or.reduce(flat, 2).astype(np.uint8))


def registers(which, shape, kind):
    """Return how many registers a fragment has, as the PTX ISA says."""
    m, n, k = sizes(shape)
    if kind == "f16":
        return 8 if which in "ab" else 4
    if which in "cd":
        return m * n // 32
    return max((m if which == "a" else n) * k * BITS[kind] // 1024, 1) if kind != "f64" else 1


def named(form, layouts):
    return pytest.param(form, layouts, id=f"{'.'.join(form)}-{layouts}")


NARROWEST = [form for form in WMMA if BITS[form[1]] < 8]  # which have one layout
WIDER = [form for form in WMMA if form not in NARROWEST]


# So many in a row have each of the wider forms once, in one layout or the other.
@pytest.mark.some_of(
    "form, layouts",
    [named(form, layouts) for layouts in ("row.col", "col.row") for form in WIDER],
    len(WIDER),
    always=[
        *(named(form, "row.col") for form in NARROWEST),
        *(named(WMMA[0], layouts) for layouts in ("row.row", "col.col")),
    ],
)
def test_wmma(ptx_kernel, launch, form, layouts):
    shape, kind, d, c = form
    first, second = layouts.split(".")
    m, n, k = sizes(shape)
    x, y, z = (
        numbers(kind, (m, k), 1, small=True),
        numbers(kind, (k, n), 2, small=True),
        numbers(c, (m, n), 3, small=True),
    )
    if kind in ("s8", "u8", "s4", "u4", "b1"):
        z = z // 4
    pad = 32 // BITS[kind] * 4 if BITS[kind] < 32 else 4  # elements between one line and the next
    arrays = []
    for matrix, layout in ((x, first), (y, second)):
        lines = matrix if layout == "row" else matrix.T
        arrays.append((stored(np.pad(lines, [(0, 0), (0, pad)]), kind), lines.shape[1] + pad))
    pick = "xor.popc." if kind == "b1" else ""
    types = {"f16": f"{d}.{c}"}.get(kind, f"{d}.{kind}.{kind}.{c}")
    wide = {name: ".f64" if t == "f64" else ".b32" for name, t in (("a", kind), ("b", kind), ("c", c), ("d", d))}
    vectors = {}
    declare = []
    for name, t in (("a", kind), ("b", kind), ("c", c), ("d", d)):
        names = [f"%{name}{index}" for index in range(registers(name, shape, t))]
        vectors[name] = "{" + ", ".join(names) + "}"
        declare.append(f".reg {wide[name]} {', '.join(names)};")
    body = "\n".join([
        ".reg .b64 %p<4>; .reg .b32 %s;",
        *declare,
        *(f"ld.param.u64 %p{index}, [p{index}];" for index in range(4)),
        f"mov.u32 %s, {arrays[0][1]};",
        f"wmma.load.a.sync.aligned.{first}.{shape}.global.{kind} {vectors['a']}, [%p0], %s;",
        f"wmma.load.b.sync.aligned.{second}.{shape}.{kind} {vectors['b']}, [%p1], {arrays[1][1]};",
        f"wmma.load.c.sync.aligned.row.{shape}.global.{c} {vectors['c']}, [%p2];",
        f"wmma.mma.{pick}sync.aligned.{layouts}.{shape}.{types} {vectors['d']}, {vectors['a']}, {vectors['b']}, {vectors['c']};",
        f"wmma.store.d.sync.aligned.col.{shape}.global.{d} [%p3], {vectors['d']}, {m + 4};",
        "ret;",
    ])  # fmt: skip
    result = np.zeros((n, m + 4), STORED[d])
    kernel = ptx_kernel(", ".join(f".param .u64 p{index}" for index in range(4)), body)
    launch(kernel, 1, 32, arrays[0][0], arrays[1][0], stored(z, c), result)
    expected = (x[:, :, None] ^ y[None]).sum(1) + z if kind == "b1" else x @ y + z
    assert expected.T.tolist() == result[:, :m].tolist()
    assert not result[:, m:].any()


# ---- moving 8 x 8 matrices ----

MOVE = """.reg .b32 %t, %a, %r<4>; .reg .b64 %p, %q, %o; .shared .align 16 .b8 s[1024];
mov.u32 %t, %tid.x; ld.param.u64 %p, [p]; ld.param.u64 %q, [q];
mul.wide.u32 %o, %t, 16; mov.u32 %a, s; mad.lo.u32 %a, %t, 16, %a;
"""


def halves_of_lanes(matrix):
    """Return what each lane holds of an 8 x 8 matrix: row lane / 4, columns 2 (lane % 4) and the next."""
    return np.ascontiguousarray(matrix).reshape(32, 2)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(ptx_kernel, launch, count, trans):
    data = np.arange(32 * 8, dtype=np.uint16).reshape(32, 8)
    result = np.zeros((count, 32, 2), np.uint16)
    names = ", ".join(f"%r{n}" for n in range(count))
    body = f""".reg .b32 %w<4>; {MOVE} add.u64 %p, %p, %o; ld.global.v4.b32 {{%w0, %w1, %w2, %w3}}, [%p];
    st.shared.v4.b32 [%a], {{%w0, %w1, %w2, %w3}}; bar.warp.sync 0xFFFFFFFF;
    ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 {{{names}}}, [%a];
    mul.wide.u32 %o, %t, 4; add.u64 %q, %q, %o;
    {" ".join(f"st.global.b32 [%q+{128 * n}], %r{n};" for n in range(count))} ret;"""
    launch(ptx_kernel(".param .u64 p, .param .u64 q", body), 1, 32, data, result)
    matrices = data.reshape(4, 8, 8)[:count]
    expected = [halves_of_lanes(matrix.T if trans else matrix).tolist() for matrix in matrices]
    assert expected == result.tolist()


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(ptx_kernel, launch, count, trans):
    data = np.random.default_rng(2).integers(0, 2**16, (count, 32, 2), np.uint16)
    result = np.zeros((32, 8), np.uint16)
    names = ", ".join(f"%r{n}" for n in range(count))
    body = f""".reg .b32 %w<4>; {MOVE} st.shared.v4.b32 [%a], {{0, 0, 0, 0}};
    mul.wide.u32 %o, %t, 4; add.u64 %p, %p, %o;
    {" ".join(f"ld.global.b32 %r{n}, [%p+{128 * n}];" for n in range(count))} bar.warp.sync 0xFFFFFFFF;
    stmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16 [%a], {{{names}}};
    bar.warp.sync 0xFFFFFFFF; ld.shared.v4.b32 {{%w0, %w1, %w2, %w3}}, [%a];
    mul.wide.u32 %o, %t, 16; add.u64 %q, %q, %o; st.global.v4.b32 [%q], {{%w0, %w1, %w2, %w3}}; ret;"""
    launch(ptx_kernel(".param .u64 p, .param .u64 q", body), 1, 32, data, result)
    expected = np.zeros((4, 8, 8), np.uint16)
    for n in range(count):
        matrix = data[n].reshape(8, 8)
        expected[n] = matrix.T if trans else matrix
    assert expected.reshape(32, 8).tolist() == result.tolist()


def test_movmatrix_transposes(ptx_kernel, launch):
    data = np.arange(64, dtype=np.uint16).reshape(8, 8)
    result = np.zeros((8, 8), np.uint16)
    body = f"""{MOVE} mul.wide.u32 %o, %t, 4; add.u64 %p, %p, %o; add.u64 %q, %q, %o; ld.global.b32 %r0, [%p];
    movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0; st.global.b32 [%q], %r1; ret;"""
    launch(ptx_kernel(".param .u64 p, .param .u64 q", body), 1, 32, data, result)
    assert data.T.tolist() == result.tolist()


def test_every_warp_multiplies_its_own_matrices(ptx_kernel, launch):
    count = 3
    x, y = numbers("s8", (count, 8, 16), 5), numbers("s8", (count, 16, 8), 6)
    words = [np.stack([spread(m, "s8", places(w, 8, 16, "s8"))[0] for m in v]) for v, w in ((x, "a"), (y, "b"))]
    result = np.zeros((count, 2, 32), np.uint32)
    body = """.reg .b32 %t, %w, %a, %b, %c, %d; .reg .b64 %p, %q, %r, %o;
    mov.u32 %t, %tid.x; shr.u32 %w, %t, 5;
    ld.param.u64 %p, [p]; ld.param.u64 %q, [q]; ld.param.u64 %r, [r]; mul.wide.u32 %o, %t, 4;
    add.u64 %p, %p, %o; add.u64 %q, %q, %o; ld.global.b32 %a, [%p]; ld.global.b32 %b, [%q];
    mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%c, %d}, {%a}, {%b}, {%w, %w};
    mad.wide.u32 %o, %w, 128, %o; add.u64 %r, %r, %o; st.global.b32 [%r], %c; st.global.b32 [%r+128], %d; ret;"""
    kernel = ptx_kernel(".param .u64 p, .param .u64 q, .param .u64 r", body)
    launch(kernel, 1, 32 * count, *words, result)
    for warp in range(count):
        found = gather(result[warp], "s32", places("c", 8, 16, "s32"), (8, 8))
        assert (x[warp] @ y[warp] + warp).tolist() == found.tolist()
