"""Special registers, state spaces, cache hints, votes without masks, wide and narrow atomics, bit searches."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from float_formats import BFLOAT16, HALF

from cudatool.sim import jit
from cudatool.sim.jit import collective
from cudatool.sim.jit.table import TABLE

HALVES = {"f16": HALF, "bf16": BFLOAT16}


def test_lane_masks(elementwise):
    names = {"d": "eq", "e": "lt", "f": "le", "g": "gt", "h": "ge"}
    code = " ".join(f"mov.u32 %{register}, %lanemask_{which};" for register, which in names.items())
    found = elementwise(code, {"a": np.zeros(70, np.uint32)}, dict.fromkeys(names, "u4"))
    lanes = [thread % 32 for thread in range(70)]
    assert [1 << lane for lane in lanes] == found["d"].tolist()
    assert [(1 << lane) - 1 for lane in lanes] == found["e"].tolist()
    assert [(2 << lane) - 1 for lane in lanes] == found["f"].tolist()
    assert [2**32 - (2 << lane) for lane in lanes] == found["g"].tolist()
    assert [2**32 - (1 << lane) for lane in lanes] == found["h"].tolist()


def test_machine_registers(ptx_kernel, launch):
    names = ["warpid", "nwarpid", "smid", "nsmid", "envreg2", "pm0", "dynamic_smem_size", "total_smem_size", "laneid"]
    reads = "\n".join(f"mov.u32 %x, %{name}; st.global.u32 [%p+{4 * n}], %x;" for n, name in enumerate(names))
    body = f""".reg .b32 %x; .reg .b64 %p; .reg .pred %q; .shared .align 16 .b8 s[32];
    mov.u32 %x, s; ld.param.u64 %p, [p]; mov.u32 %x, %tid.x; setp.ne.u32 %q, %x, 40; @%q ret; {reads} ret;"""
    result = np.full(len(names), 99, np.uint32)
    launch(ptx_kernel(".param .u64 p", body), 1, 64, result, shared_bytes=16)
    found = dict(zip(names, result.tolist(), strict=True))
    assert (1, 8, 0, 0, 16) == tuple(found[n] for n in ("warpid", "laneid", "envreg2", "pm0", "dynamic_smem_size"))
    assert found["smid"] < found["nsmid"]
    assert found["total_smem_size"] >= 16


def test_global_timer_counts_nanoseconds(ptx_kernel, launch):
    result = np.zeros(1, np.uint64)
    body = ".reg .b64 %p, %x; ld.param.u64 %p, [p]; mov.u64 %x, %globaltimer; st.global.u64 [%p], %x; ret;"
    kernel = ptx_kernel(".param .u64 p", body)
    before = time.monotonic_ns()
    launch(kernel, 1, 1, result)
    assert before <= result[0] <= time.monotonic_ns()


def test_clock_runs_forward(ptx_kernel, launch):
    result = np.zeros(2, np.uint64)
    body = """.reg .b64 %p, %x, %y; ld.param.u64 %p, [p]; mov.u64 %x, %clock64; nanosleep.u32 10; membar.gl;
    mov.u64 %y, %clock64; st.global.u64 [%p], %x; st.global.u64 [%p+8], %y; ret;"""
    launch(ptx_kernel(".param .u64 p", body), 1, 1, result)
    assert result[0] <= result[1]


def test_every_address_is_in_one_space(ptx_kernel, launch, place_variables):
    spaces = ["global", "shared", "local", "const", "param"]
    taken = {
        "global": "mov.u64 %a, g; cvta.global.u64 %a, %a;",
        "shared": "mov.u64 %a, s; cvta.shared.u64 %a, %a;",
        "local": "mov.u64 %a, l; cvta.local.u64 %a, %a;",
        "const": "mov.u64 %a, c; cvta.const.u64 %a, %a;",
        "param": "mov.u64 %a, p; cvta.param.u64 %a, %a;",
    }
    code = "\n".join(
        f"{taken[row]} isspacep.{column} %q, %a; selp.u32 %x, 1, 0, %q; st.global.u32 [%p+{4 * (5 * r + k)}], %x;"
        for r, row in enumerate(spaces)
        for k, column in enumerate(spaces)
    )
    text = f""".version 8.3\n.target sm_90\n.address_size 64\n.global .align 4 .b32 g = 1; .const .align 4 .b32 c = 2;
    .visible .entry k(.param .u64 p) {{ .reg .b32 %x; .reg .b64 %a, %p; .reg .pred %q;
    .shared .align 4 .b8 s[16]; .local .align 4 .b8 l[16]; ld.param.u64 %p, [p]; {code} ret; }}"""
    module = jit.load(text.encode())
    place_variables(module)
    result = np.zeros((5, 5), np.uint32)
    launch(module.kernels["k"], 1, 1, result)
    assert np.eye(5, dtype=int).tolist() == result.tolist()


@pytest.mark.parametrize("space", ["shared", "local", "const", "param"])
def test_generic_addresses_convert_back(ptx_kernel, launch, place_variables, space):
    name = {"shared": "s", "local": "l", "const": "c", "param": "p"}[space]
    text = f""".version 8.3\n.target sm_90\n.address_size 64\n.const .align 4 .b32 c = 2;
    .visible .entry k(.param .u64 p) {{ .reg .b64 %a, %b, %p; .shared .align 4 .b8 s[16]; .local .align 4 .b8 l[16];
    ld.param.u64 %p, [p]; mov.u64 %a, {name}; cvta.{space}.u64 %b, %a; cvta.to.{space}.u64 %b, %b;
    st.global.u64 [%p], %a; st.global.u64 [%p+8], %b; ret; }}"""
    module = jit.load(text.encode())
    place_variables(module)
    result = np.zeros(2, np.uint64)
    launch(module.kernels["k"], 1, 1, result)
    assert result[0] == result[1]


def test_cache_hints_change_nothing(ptx_kernel, launch):
    body = """.reg .b32 %x; .reg .b64 %p, %q, %policy; ld.param.u64 %p, [p]; ld.param.u64 %q, [q];
    createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %policy, 1.0;
    createpolicy.range.L2::evict_last.b64 %policy, [%p], 64, 64; createpolicy.cvt.L2.b64 %policy, 1;
    prefetch.global.L2 [%p]; prefetchu.L1 [%p]; applypriority.global.L2::evict_normal [%p], 128; griddepcontrol.wait;
    ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %x, [%p], %policy;
    st.global.L1::evict_last.L2::cache_hint.u32 [%q], %x, %policy;
    ld.global.L1::evict_last.L2::128B.u32 %x, [%p]; red.global.add.L2::cache_hint.u32 [%q], %x, %policy;
    fence.acq_rel.gpu; fence.sc.sys; fence.proxy.async; membar.sys; griddepcontrol.launch_dependents; ret;"""
    data, result = np.full(1, 21, np.uint32), np.zeros(1, np.uint32)
    launch(ptx_kernel(".param .u64 p, .param .u64 q", body), 1, 1, data, result)
    assert [42] == result.tolist()


def test_votes_without_a_mask(elementwise):
    a = np.array([3, 5, 0, 1], np.uint32)
    code = """setp.ne.u32 %p, %a, 0; vote.ballot.b32 %d, %p; vote.any.pred %q, %p; selp.u32 %e, 1, 0, %q;
    vote.all.pred %q, %p; selp.u32 %f, 1, 0, %q;"""
    found = elementwise(code, {"a": a}, dict.fromkeys("def", "u4"))
    assert [[0b1011] * 4, [1] * 4, [0] * 4] == [found[name].tolist() for name in "def"]


def test_elect_picks_one_of_the_mask(elementwise):
    code = "elect.sync %d|%p, 0xFFFFFFFF; selp.u32 %e, 1, 0, %p;"
    found = elementwise(code, {"a": np.zeros(32, np.uint32)}, {"d": "u4", "e": "u4"})
    (leader,) = set(found["d"].tolist())
    assert [int(lane == leader) for lane in range(32)] == found["e"].tolist()


def test_cluster_barrier_of_one_block(ptx_kernel, launch):
    result = np.zeros(64, np.uint32)
    body = """.reg .b32 %t, %x, %s, %y; .reg .b64 %p, %o; .shared .align 4 .b8 s[256];
    mov.u32 %t, %tid.x; ld.param.u64 %p, [p]; mov.u32 %s, s; mad.lo.u32 %x, %t, 4, %s; st.shared.u32 [%x], %t;
    barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
    xor.b32 %y, %t, 63; mad.lo.u32 %x, %y, 4, %s; ld.shared.u32 %x, [%x];
    mul.wide.u32 %o, %t, 4; add.u64 %p, %p, %o; st.global.u32 [%p], %x; ret;"""
    launch(ptx_kernel(".param .u64 p", body), 1, 64, result)
    assert [63 - thread for thread in range(64)] == result.tolist()


# ---- atomics ----


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("operation", ["add", "min", "max"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
def test_atomics_of_16_bit_floats(ptx_kernel, launch, kind, operation, space):
    form = HALVES[kind.removesuffix("x2")]
    size = 4 if kind.endswith("x2") else 2
    memory = np.array([form.round(x) for x in (1.5, -2.25)], np.uint16)[: size // 2]
    operand = [form.round(x) for x in (0.75, 100.0)][: size // 2]
    packed = sum(pattern << 16 * n for n, pattern in enumerate(operand))
    move = f"ld.global.b{8 * size} %o, [%p]; st.shared.b{8 * size} [s], %o;" if space == "shared" else ""
    back = f"ld.shared.b{8 * size} %v, [s]; st.global.b{8 * size} [%p], %v;" if space == "shared" else ""
    body = f""".reg .b{8 * size} %v, %o; .reg .b64 %p, %q; .shared .align 4 .b8 s[4];
    ld.param.u64 %p, [p]; ld.param.u64 %q, [q]; {move} mov.b{8 * size} %v, {packed};
    atom.{space}.{operation}.noftz.{kind} %o, [{"s" if space == "shared" else "%p"}], %v; {back}
    st.global.b{8 * size} [%q], %o; ret;"""
    before, old = memory.copy(), np.zeros_like(memory)
    launch(ptx_kernel(".param .u64 p, .param .u64 q", body), 1, 1, memory, old)
    change = {"add": lambda x, y: Fraction(x) + Fraction(y), "min": min, "max": max}[operation]
    assert [
        form.round(change(form.value(x), form.value(y))) for x, y in zip(before, operand, strict=True)
    ] == memory.tolist()
    assert before.tolist() == old.tolist()


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_no_packed_update_is_lost(ptx_kernel, launch, kind):
    form = HALVES[kind.removesuffix("x2")]
    memory = np.zeros(2, np.uint16)
    body = f""".reg .b32 %v; .reg .b64 %p; ld.param.u64 %p, [p]; mov.b32 %v, {form.round(1.0) * 0x10001};
    red.global.add.noftz.{kind} [%p], %v; ret;"""
    launch(ptx_kernel(".param .u64 p", body), 64, 4, memory, threads=2)
    assert [256.0, 256.0] == [form.value(pattern) for pattern in memory.tolist()]


@pytest.mark.parametrize("lanes", [2, 4])
def test_vector_atomics_update_each_element(ptx_kernel, launch, lanes):
    names = [f"%v{n}" for n in range(lanes)]
    olds = [f"%o{n}" for n in range(lanes)]
    stores = "\n".join(f"st.global.f32 [%q+{4 * n}], {old};" for n, old in enumerate(olds))
    body = f""".reg .f32 {", ".join(names + olds)}; .reg .b64 %p, %q; ld.param.u64 %p, [p]; ld.param.u64 %q, [q];
    {" ".join(f"mov.f32 {name}, 0f{0x3F800000 + (n << 22):08X};" for n, name in enumerate(names))}
    atom.global.v{lanes}.f32.add {{{", ".join(olds)}}}, [%p], {{{", ".join(names)}}}; {stores} ret;"""
    values = np.array([0x3F800000 + (n << 22) for n in range(lanes)], np.uint32).view(np.float32)
    memory = np.arange(lanes, dtype=np.float32)
    old = np.zeros(lanes, np.float32)
    launch(ptx_kernel(".param .u64 p, .param .u64 q", body), 1, 1, memory, old)
    assert (np.arange(lanes) + values).tolist() == memory.tolist()
    assert list(range(lanes)) == old.tolist()


def aligned(count):
    """Return a zeroed u64 array at a multiple of 16."""
    data = np.zeros(count + 2, np.uint64)
    return data[data.ctypes.data // 8 % 2 :][:count]


def test_128_bit_values(ptx_kernel, launch):
    data, result = aligned(4), aligned(6)
    data[:] = [1, 2, 3, 4]
    body = """.reg .b64 %p, %q, %a, %b; .reg .b128 %x, %y, %o; ld.param.u64 %p, [p]; ld.param.u64 %q, [q];
    ld.global.b128 %x, [%p]; ld.global.b128 %y, [%p+16]; st.global.b128 [%q], %y;
    atom.global.cas.b128 %o, [%p], %x, %y; st.global.b128 [%q+16], %o;
    mov.b128 {%a, %b}, %x; add.u64 %a, %a, 7; mov.b128 %x, {%b, %a};
    atom.global.exch.b128 %o, [%p], %x; st.global.b128 [%q+32], %o; ret;"""
    launch(ptx_kernel(".param .u64 p, .param .u64 q", body), 1, 1, data, result)
    assert [3, 4, 1, 2, 3, 4] == result.tolist()
    assert [2, 8, 3, 4] == data.tolist()


# ---- bits ----


def find_nth_set(mask, base, offset):
    """Return what the pseudo-code of ``fns`` in the PTX ISA does."""
    if offset == 0:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    place, count, step = base, abs(offset) - 1, 1 if offset > 0 else -1
    while 0 <= place < 32:
        if mask >> place & 1:
            if not count:
                return place
            count -= 1
        place += step
    return 0xFFFFFFFF


def test_find_nth_set(elementwise):
    random = np.random.default_rng(6)
    a = random.integers(0, 2**32, 900, np.uint32)
    b = random.integers(0, 34, 900).astype(np.uint32)
    c = random.integers(-6, 7, 900).astype(np.int32)
    expected = [find_nth_set(*row) for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert expected == elementwise("fns.b32 %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": "u4"})["d"].tolist()


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_sign_or_zero_extension(elementwise, kind, mode):
    random = np.random.default_rng(7)
    a, b = random.integers(0, 2**32, 500, np.uint32), np.arange(500, dtype=np.uint32) % 70
    expected = []
    for x, n in zip(a.tolist(), b.tolist(), strict=True):
        width = n & 31 if mode == "wrap" else min(n, 32)
        value = x & 2**width - 1
        if kind == "s32" and width and width < 32 and value >> (width - 1):
            value |= 0xFFFFFFFF << width
        expected.append(value & 0xFFFFFFFF)
    found = elementwise(f"szext.{mode}.{kind} %d, %a, %b;", {"a": a, "b": b}, {"d": "u4"})["d"]
    assert expected == found.tolist()


@pytest.mark.parametrize("how", ["and", "or", "xor"])
def test_lop3_with_a_predicate(elementwise, how):
    a = np.array([0, 0, 5, 5], np.uint32)
    code = f"""and.b32 %e, %index, 1; setp.ne.u32 %q, %e, 0;
    lop3.{how}.b32 %d|%p, %a, %a, %a, 0x80, %q; selp.u32 %e, 1, 0, %p;"""
    found = elementwise(code, {"a": a}, {"d": "u4", "e": "u4"})
    combine = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}[how]
    assert a.tolist() == found["d"].tolist()
    assert [combine(int(x != 0), n & 1) for n, x in enumerate(a.tolist())] == found["e"].tolist()


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_fma_of_doubles(elementwise, mode):
    random = np.random.default_rng(11)
    a, b, c = (random.normal(size=600) * 2.0 ** random.integers(-30, 30, 600) for _ in range(3))
    c[::2] = -(a * b)[::2] * (1 + random.integers(-2, 3, 300) * 2.0**-53)
    found = elementwise(f"fma.{mode}.f64 %d, %a, %b, %c;", {"a": a, "b": b, "c": c}, {"d": "f8"})["d"]
    for x, y, z, result in zip(*(v.tolist() for v in (a, b, c)), found.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        nearest = exact.numerator / exact.denominator
        down = nearest if Fraction(nearest) <= exact else float(np.nextafter(nearest, -np.inf))
        up = nearest if Fraction(nearest) >= exact else float(np.nextafter(nearest, np.inf))
        inward = down if exact > 0 else up
        assert {"rm": down, "rp": up, "rz": inward}[mode] == result


def test_instructions_that_need_the_same_function_stand_in_one_kernel(elementwise):
    a, b = np.array([1, 12, 255], np.uint32), np.array([0, 7, 3], np.uint32)
    code = "fns.b32 %d, %a, %b, 1; max.u32 %e, %a, %b; min.u32 %f, %a, %b; abs.s32 %g, %a; popc.b32 %h, %a;"
    names = dict.fromkeys("defgh", "u4")
    found = elementwise(code, {"a": a, "b": b}, names)
    assert [find_nth_set(mask, base, 1) for mask, base in zip(a.tolist(), b.tolist(), strict=True)] == found[
        "d"
    ].tolist()
    assert np.maximum(a, b).tolist() == found["e"].tolist()
    assert np.minimum(a, b).tolist() == found["f"].tolist()
    assert [1, 2, 8] == found["h"].tolist()


@pytest.mark.parametrize("instrument", [jit.Instrument.NONE, jit.Instrument.FOOTPRINT | jit.Instrument.RACECHECK])
def test_code_that_llvm_refuses_is_blamed_on_its_instruction(ptx_kernel, monkeypatch, instrument):
    def broken(e, i):
        e.emit("call void @nothing.of.the.kind(i32 0)")

    monkeypatch.setitem(TABLE, "popc", broken)
    kernel = ptx_kernel("", ".reg .b32 %x; mov.u32 %x, 1;\nbar.sync 0;\npopc.b32 %x, %x;\nret;")
    with pytest.raises(jit.UnsupportedInstruction) as refused:
        kernel.prepare(instrument)
    said = str(refused.value)
    assert "cannot translate popc.b32 (PTX line " in said and "nothing.of.the.kind" in said
    assert pickle.loads(pickle.dumps(refused.value)).args == refused.value.args


@pytest.mark.parametrize("place", ["plain", "collective"])
def test_a_failure_of_the_translator_names_the_instruction(ptx_kernel, monkeypatch, place):
    """Whatever an instruction's translation raises: the driver says which instruction, not "unknown error"."""

    def fails(*_: object) -> None:
        raise ArithmeticError("a form that was not thought of")

    if place == "plain":
        monkeypatch.setitem(TABLE, "popc", fails)
        code, name = "popc.b32 %r, %r;", "popc.b32"
    else:
        monkeypatch.setattr(
            collective, "SUSPENSIONS", [("vote", "", replace(collective.SUSPENSIONS[0][2], extra=fails))]
        )
        code, name = "vote.sync.ballot.b32 %r, 1, -1;", "vote.sync.ballot.b32"
    kernel = ptx_kernel("", f".reg .b32 %r; {code} ret;")
    with pytest.raises(jit.UnsupportedInstruction, match=rf"k: the software device cannot translate {name} .*Arithm"):
        kernel.llvm_ir()
