"""Which memory a kernel may touch, from its PTX alone."""

from __future__ import annotations

import pytest

from cudatool.ptx import AccessDoubt, AddressAccess, Base, BaseKind, Mode, PtxError, infer_accesses, parse

HEADER = ".version 8.3\n.target sm_90\n.address_size 64\n"
REGISTERS = ".reg .pred %p<4>; .reg .b16 %h<8>; .reg .b32 %r<20>; .reg .b64 %d<20>; .reg .f32 %f<8>; .reg .f64 %g<4>;\n"
R, W, A = Mode.READ, Mode.WRITE, Mode.ATOMIC


def infer(params: str, body: str, before: str = "", name: str = "k"):
    text = f"{HEADER}{before}\n.visible .entry k({params}) {{\n{REGISTERS}{body}\nret;\n}}"
    return infer_accesses(parse(text), name)


def modes(result) -> dict[str, Mode]:
    """Return what is done through each parameter that is used as an address."""
    return {parameter.name: parameter.mode for parameter in result.parameters if parameter.fields}


def fields(result) -> dict[tuple[str, int], tuple[Mode, Mode]]:
    return {(p.name, f.offset): (f.mode, f.loaded_mode) for p in result.parameters for f in p.fields}


P = ".param .u64 p"
PQ = ".param .u64 p, .param .u64 q"
LOAD = "ld.param.u64 %d1, [p]; ld.param.u64 %d2, [q];"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ld.global.f32 %f1, [%d1]; st.global.f32 [%d2+4], %f1;", {"p": R, "q": W}),
        ("atom.global.add.u32 %r1, [%d1], 1; red.global.add.f32 [%d2], 0f00000000;", {"p": A, "q": A}),
        ("ld.u32 %r1, [%d1]; st.volatile.u32 [%d2], %r1;", {"p": R, "q": W}),
        ("ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%d1];", {"p": R}),
        ("cvta.to.global.u64 %d3, %d1; add.s64 %d4, %d3, 16; ld.global.u8 %h1, [%d4];", {"p": R}),
        ("mov.u32 %r1, %tid.x; mad.wide.u32 %d3, %r1, 4, %d1; st.global.u32 [%d3], 0;", {"p": W}),
        ("mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4; sub.s64 %d4, %d1, %d3; st.global.u32 [%d4], 0;", {"p": W}),
        ("selp.b64 %d3, %d1, %d2, %p1; ld.global.u32 %r1, [%d3];", {"p": R, "q": R}),
        ("and.b64 %d3, %d1, -16; or.b64 %d3, %d3, 4; ld.global.u32 %r1, [%d3];", {"p": R}),
        ("max.u64 %d3, %d1, %d2; ld.global.u32 %r1, [%d3];", {"p": R, "q": R}),
        ("mov.b64 {%r1, %r2}, %d1; mov.b64 %d3, {%r1, %r2}; ld.global.u32 %r1, [%d3];", {"p": R}),
        (
            "mov.b64 {%r1, %r2}, %d1; shfl.sync.idx.b32 %r3|%p1, %r1, 0, 31, -1; mov.b64 %d3, {%r3, %r2}; ld.u8 %h1, [%d3];",
            {"p": R},
        ),
        ("prefetch.global.L2 [%d1]; discard.global.L2 [%d2], 128;", {"q": W}),
        (
            "wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%d1], %r9;",
            {"p": R},
        ),
        (
            "wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%d2], {%f1, %f2, %f3, %f4, %f5, %f6, %f7, %f1}, %r9;",
            {"q": W},
        ),
        ("unheard.of.b32 %r1, [%d1];", {"p": R | W}),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_an_instruction_does(code, expected):
    result = infer(PQ, LOAD + code)
    assert (expected, frozenset()) == (modes(result), result.doubts)


def test_widths_are_those_of_one_instruction():
    result = infer(
        P,
        "ld.param.u64 %d1, [p]; ld.global.v2.f32 {%f1, %f2}, [%d1]; ld.global.u8 %h1, [%d1]; st.global.f64 [%d1], %g1;",
    )
    (field,) = result.parameters[0].fields
    assert ((1, 8), (8,), ()) == (field.read_widths, field.write_widths, field.atomic_widths)


def test_an_index_is_not_an_address():
    body = """ld.param.u64 %d1, [p]; ld.param.u64 %d2, [n]; shl.b64 %d3, %d2, 2; add.s64 %d4, %d1, %d3;
        mul.lo.s64 %d5, %d2, 12; add.s64 %d6, %d4, %d5; st.global.u32 [%d6], 0;"""
    assert {"p": W} == modes(infer(".param .u64 p, .param .u64 n", body))


def test_a_byte_index_is_told_apart_where_the_compiler_knows_the_pointer():
    body = "ld.param.u64 %d1, [p]; ld.param.u64 %d2, [n]; {} add.s64 %d4, %d3, %d2; st.global.u8 [%d4], 0;"
    params = ".param .u64 p, .param .u64 n"
    assert {"p": W} == modes(infer(params, body.format("cvta.to.global.u64 %d3, %d1;")))
    assert {"p": W} == modes(infer(".param .u64 .ptr .align 1 p, .param .u64 n", body.format("mov.u64 %d3, %d1;")))
    either = infer(params, body.format("mov.u64 %d3, %d1;"))
    assert {"p": W, "n": W} == modes(either)
    bases = (Base(BaseKind.PARAMETER, "n"), Base(BaseKind.PARAMETER, "p"))
    assert (AddressAccess(bases, W, (1,)),) == either.accesses


def test_pointer_that_moves_through_a_loop():
    body = "ld.param.u64 %d1, [p]; LOOP: ld.global.u32 %r1, [%d1]; add.s64 %d1, %d1, 4; setp.ne.u32 %p1, %r1, 0; @%p1 bra LOOP;"
    assert {"p": R} == modes(infer(P, body))


def test_alignment_of_one_pointer_added_to_another():
    result = infer(PQ, LOAD + "and.b64 %d3, %d1, 15; add.s64 %d4, %d2, %d3; st.global.u8 [%d4], 0;")
    assert {"q": W} == modes(result)


def test_register_that_held_an_index_before_is_not_taken_for_a_pointer():
    body = LOAD + "add.s64 %d1, %d1, %d2; cvta.to.global.u64 %d3, %d1; st.global.u8 [%d3], 0;"
    assert {"p": W, "q": W} == modes(infer(PQ, body))


@pytest.mark.parametrize("index", ["", "mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 4, %d1;", "add.s64 %d1, %d1, 8;"])
def test_null_until_it_is_assigned(index):
    body = f"mov.u64 %d1, 0; @%p1 ld.param.u64 %d1, [p]; {index} ld.global.u32 %r1, [%d1];"
    result = infer(P, body)
    assert ({"p": R}, frozenset()) == (modes(result), result.doubts)


@pytest.mark.parametrize(
    "code",
    [
        "mul.lo.u64 %d3, %d1, 1; ld.global.u32 %r1, [%d3];",
        "mov.u32 %r1, %tid.x; cvt.u64.u32 %d3, %r1; ld.global.u32 %r1, [%d3];",
        "ld.global.u32 %r1, [%d9];",
        "ld.global.u32 %r1, [140737488355328];",
        "mov.u64 %d3, 16; ld.global.u32 %r1, [%d3];",
        "mov.u64 %d3, 0; add.u64 %d3, %d3, 4; ld.global.u32 %r1, [%d3];",
        "mul.lo.u64 %d3, %d1, 1; @%p1 ld.param.u64 %d3, [p]; ld.global.u32 %r1, [%d3+4];",
    ],
)
def test_addresses_that_are_not_followed_are_said(code):
    result = infer(P, "ld.param.u64 %d1, [p];" + code)
    assert frozenset({AccessDoubt.UNKNOWN_ADDRESS}) == result.doubts


def test_pointer_to_pointers():
    body = """ld.param.u64 %d1, [p]; ld.global.u64 %d2, [%d1]; st.global.f32 [%d2+8], %f1;
        ld.global.u64 %d3, [%d2]; red.global.add.u32 [%d3], 1;"""
    result = infer(P, body)
    assert {("p", 0): (R, R | W | A)} == fields(result)
    assert frozenset({AccessDoubt.LOADED_POINTER}) == result.doubts


def test_pointer_loaded_in_halves():
    body = "ld.param.u64 %d1, [p]; ld.global.v2.u32 {%r1, %r2}, [%d1]; mov.b64 %d2, {%r1, %r2}; st.global.u8 [%d2], 0;"
    assert {("p", 0): (R, W)} == fields(infer(P, body))


def test_index_loaded_from_memory_is_no_pointer():
    body = """ld.param.u64 %d1, [p]; ld.param.u64 %d2, [q]; cvta.to.global.u64 %d3, %d1; cvta.to.global.u64 %d4, %d2;
        ld.global.u64 %d5, [%d3]; add.s64 %d6, %d4, %d5; st.global.u8 [%d6], 0;
        ld.global.u32 %r1, [%d3]; mul.wide.s32 %d7, %r1, 4; add.s64 %d8, %d4, %d7; st.global.u32 [%d8], 0;"""
    result = infer(PQ, body)
    assert {("p", 0): (R, Mode(0)), ("q", 0): (W, Mode(0))} == fields(result)
    assert not result.doubts


# ---- structs ----


def test_fields_of_a_struct():
    body = """ld.param.u64 %d1, [s]; ld.param.u64 %d2, [s+16]; ld.param.u32 %r1, [s+8]; mul.wide.u32 %d3, %r1, 4;
        add.s64 %d4, %d1, %d3; ld.global.u32 %r2, [%d4]; st.global.u32 [%d2], %r2;"""
    result = infer(".param .u32 n, .param .align 8 .b8 s[24]", body)
    assert {("s", 0): (R, Mode(0)), ("s", 16): (W, Mode(0))} == fields(result)
    assert [(0, 4), (8, 24)] == [(p.offset, p.size) for p in result.parameters]


def test_field_that_is_chosen_at_run_time():
    body = """mov.b64 %d1, s; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 8; add.s64 %d3, %d1, %d2;
        ld.param.u64 %d4, [%d3]; st.global.u32 [%d4], 0;"""
    result = infer(".param .align 8 .b8 s[24]", body)
    assert {("s", 0): (W, Mode(0)), ("s", 8): (W, Mode(0)), ("s", 16): (W, Mode(0))} == fields(result)
    known = infer(
        ".param .align 8 .b8 s[24]",
        "mov.b64 %d1, s; add.s64 %d2, %d1, 8; ld.param.u64 %d3, [%d2+8]; st.global.u32 [%d3], 0;",
    )
    assert {("s", 16): (W, Mode(0))} == fields(known)


def test_packed_struct_read_by_bytes():
    loads = "".join(
        f"ld.param.u8 %h1, [s+{8 + b}]; cvt.u64.u16 %d1, %h1; shl.b64 %d1, %d1, {8 * b}; or.b64 %d2, %d2, %d1;"
        for b in range(8)
    )
    result = infer(".param .align 1 .b8 s[16]", "mov.u64 %d2, 0;" + loads + "st.global.u8 [%d2], 0;")
    assert {("s", 8): (W, Mode(0))} == fields(result)
    assert not result.doubts


def test_two_integers_beside_a_pointer():
    body = """ld.param.u64 %d1, [s]; ld.param.v2.u32 {%r1, %r2}, [s+8]; cvt.u64.u32 %d2, %r2;
        add.s64 %d3, %d1, %d2; st.global.u8 [%d3], 0;"""
    assert {("s", 0): (W, Mode(0))} == fields(infer(".param .align 8 .b8 s[16]", body))


def test_two_fields_in_one_load():
    vector = infer(".param .align 16 .b8 s[16]", "ld.param.v2.u64 {%d1, %d2}, [s]; st.global.u8 [%d2], 0;")
    assert {("s", 8): (W, Mode(0))} == fields(vector)
    wide = ".reg .b128 %q; ld.param.b128 %q, [s]; mov.b128 {%d1, %d2}, %q; st.global.u8 [%d2], 0;"
    assert W == fields(infer(".param .align 16 .b8 s[16]", wide))["s", 8][0]


# ---- pointers that wait in memory ----


@pytest.mark.parametrize("space", ["local", "shared"])
def test_pointers_kept_in_an_array(space):
    body = f""".{space} .align 8 .b8 a[32]; {LOAD} st.{space}.u64 [a], %d1; st.{space}.u64 [a+8], %d2;
        mov.u32 %r1, a; cvt.u64.u32 %d6, %r1; ld.{space}.u64 %d3, [a+8]; ld.global.u32 %r2, [%d3];"""
    assert {"q": R} == modes(infer(PQ, body))
    indexed = (
        body
        + f"mov.u32 %r3, %tid.x; shl.b32 %r4, %r3, 3; add.s32 %r5, %r1, %r4; ld.{space}.u64 %d7, [%r5]; st.global.u32 [%d7], 0;"
    )
    assert {"p": W, "q": R | W} == modes(infer(PQ, indexed))


def test_generic_address_of_a_local_array():
    body = f""".local .align 8 .b8 a[16]; {LOAD} mov.b64 %d3, a; cvta.local.u64 %d4, %d3; st.u64 [%d4+8], %d1;
        ld.local.u64 %d5, [a+8]; st.global.u32 [%d5], 0;"""
    result = infer(PQ, body)
    assert ({"p": W}, frozenset()) == (modes(result), result.doubts)


def test_stack_memory():
    body = "ld.param.u64 %d1, [p]; alloca.u64 %d2, 16; st.local.u64 [%d2], %d1; ld.local.u64 %d3, [%d2]; st.global.u32 [%d3], 0;"
    assert {"p": W} == modes(infer(P, body))


def test_shared_memory_that_only_atomics_fill_holds_numbers():
    body = """.shared .align 8 .b8 a[8]; ld.param.u64 %d1, [p]; red.shared.add.u64 [a], 1; ld.shared.u64 %d2, [a];
        add.s64 %d3, %d1, %d2; st.global.u8 [%d3], 0;"""
    result = infer(P, body)
    assert ({"p": W}, frozenset()) == (modes(result), result.doubts)


def test_shared_arrays_without_a_size_are_one():
    before = ".extern .shared .align 8 .b8 one[]; .extern .shared .align 8 .b8 other[];"
    result = infer(
        P, "ld.param.u64 %d1, [p]; st.shared.u64 [one], %d1; ld.shared.u64 %d2, [other]; st.global.u8 [%d2], 0;", before
    )
    assert ({"p": W}, frozenset()) == (modes(result), result.doubts)


def test_atomic_exchange_of_pointers_in_shared_memory():
    body = f""".shared .align 8 .b8 a[8]; {LOAD} st.shared.u64 [a], %d1; atom.shared.exch.b64 %d3, [a], %d2;
        ld.global.u32 %r1, [%d3]; ld.shared.u64 %d4, [a]; st.global.u32 [%d4], 0;"""
    assert {"p": R | W, "q": R | W} == modes(infer(PQ, body))


def test_asynchronous_copies():
    body = """.shared .align 16 .b8 a[64]; ld.param.u64 %d1, [p]; ld.param.u64 %d2, [q]; mov.u32 %r1, a;
        cp.async.ca.shared.global [%r1], [%d1], 16; cp.async.bulk.global.shared::cta.bulk_group [%d2], [%r1], %r2;
        ld.shared.u64 %d3, [%r1]; st.global.u32 [%d3], 0;"""
    result = infer(PQ, body)
    assert {("p", 0): (R, W), ("q", 0): (W, Mode(0))} == fields(result)
    assert (16,) == result.parameters[0].fields[0].read_widths
    reduced = infer(
        P, "ld.param.u64 %d1, [p]; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d1], [%r1], %r2;"
    )
    assert {"p": A} == modes(reduced)


# ---- variables of the module ----


def test_variables():
    before = ".global .u32 counter; .const .align 4 .b8 table[64]; .global .u64 where = counter; .global .u32 idle;"
    body = """atom.global.add.u32 %r1, [counter], 1; mov.u64 %d1, table; ld.const.f32 %f1, [%d1+8];
        ld.global.u64 %d2, [where]; st.global.u32 [%d2], 0; mov.u64 %d3, idle;"""
    result = infer("", body, before)
    found = {one.name: (one.mode, one.loaded_mode) for one in result.variables}
    assert {"counter": (A, Mode(0)), "table": (R, Mode(0)), "where": (R, W)} == found
    assert frozenset({AccessDoubt.LOADED_POINTER}) == result.doubts


# ---- calls ----

STORE = """.func store(.param .b64 at) { .reg .b64 %d<2>; ld.param.b64 %d1, [at]; st.global.u32 [%d1], 0; ret; }
.func (.param .b64 r) next(.param .b64 at) { .reg .b64 %d<3>; ld.param.b64 %d1, [at]; add.s64 %d2, %d1, 4; st.param.b64 [r], %d2; ret; }
"""


def call(name: str, argument: str, result: str = "") -> str:
    if result:
        return f"{{ .param .b64 a; .param .b64 v; st.param.b64 [a], {argument}; call (v), {name}, (a); ld.param.b64 {result}, [v]; }}"
    return f"{{ .param .b64 a; st.param.b64 [a], {argument}; call {name}, (a); }}"


def test_calls_are_not_mixed_up():
    body = LOAD + call("store", "%d1") + call("next", "%d2", "%d3") + "ld.global.u32 %r1, [%d3];"
    result = infer(PQ, body, STORE)
    assert ({"p": W, "q": R}, frozenset()) == (modes(result), result.doubts)


def test_result_through_a_pointer_to_local_memory():
    before = """.func give(.param .b64 out, .param .b64 v) { .reg .b64 %d<3>; ld.param.b64 %d1, [out];
        ld.param.b64 %d2, [v]; st.b64 [%d1], %d2; ret; }"""
    body = """.local .align 8 .b8 a[8]; ld.param.u64 %d1, [p]; mov.b64 %d2, a; cvta.local.u64 %d3, %d2;
        { .param .b64 x; .param .b64 y; st.param.b64 [x], %d3; st.param.b64 [y], %d1; call give, (x, y); }
        ld.local.u64 %d4, [a]; st.global.u32 [%d4], 0;"""
    result = infer(P, body, before)
    assert ({"p": W}, frozenset()) == (modes(result), result.doubts)


def test_struct_passed_to_a_function():
    before = """.func f(.param .align 8 .b8 s[16]) { .reg .b64 %d<4>; .reg .b32 %r<2>; ld.param.b64 %d1, [s+8];
        ld.param.b64 %d2, [s]; ld.global.u32 %r1, [%d2]; st.global.u32 [%d1], %r1; ret; }"""
    body = LOAD + "{ .param .align 8 .b8 a[16]; st.param.b64 [a], %d1; st.param.b64 [a+8], %d2; call f, (a); }"
    assert {"p": R, "q": W} == modes(infer(PQ, body, before))


def test_address_of_a_functions_parameter():
    before = """.func f(.param .align 8 .b8 s[16]) { .reg .b64 %d<4>; mov.b64 %d1, s; ld.local.u64 %d2, [%d1+8];
        st.global.u32 [%d2], 0; ret; }"""
    body = LOAD + "{ .param .align 8 .b8 a[16]; st.param.b64 [a], %d1; st.param.b64 [a+8], %d2; call f, (a); }"
    result = infer(PQ, body, before)
    assert ({"q": W}, frozenset()) == (modes(result), result.doubts)


def test_recursion():
    before = """.func walk(.param .b64 at) { .reg .b64 %d<4>; .reg .b32 %r<2>; .reg .pred %p<2>; ld.param.b64 %d1, [at];
        ld.global.u32 %r1, [%d1]; add.s64 %d2, %d1, 8; setp.eq.u32 %p1, %r1, 0; @%p1 ret;
        { .param .b64 a; st.param.b64 [a], %d2; call walk, (a); } ret; }"""
    result = infer(P, "ld.param.u64 %d1, [p];" + call("walk", "%d1"), before)
    assert ({"p": R}, frozenset()) == (modes(result), result.doubts)


def test_many_different_calls_share_one_analysis():
    parameters = ", ".join(f".param .u64 p{i}" for i in range(60))
    body = "".join(f"ld.param.u64 %d1{i}, [p{i}];" + call("store", f"%d1{i}") for i in range(60))
    declared = "".join(f".reg .b64 %d1{i};" for i in range(60) if i > 9)
    result = infer(parameters, declared + body, STORE)
    assert ({f"p{i}": W for i in range(60)}, frozenset()) == (modes(result), result.doubts)


def test_indirect_call_may_touch_anything():
    body = (
        LOAD
        + "{ .param .b64 a; st.param.b64 [a], %d1; PROTO: .callprototype _ (.param .b64 _); call %d2, (a), PROTO; }"
    )
    result = infer(PQ, body)
    assert frozenset({AccessDoubt.INDIRECT_CALL}) == result.doubts
    assert result.parameters[0].fields[0].escapes


def test_external_call_may_touch_anything():
    before = ".extern .func store(.param .b64 at);"
    result = infer(P, "ld.param.u64 %d1, [p];" + call("store", "%d1"), before)
    assert frozenset({AccessDoubt.EXTERNAL_CALL}) == result.doubts
    assert result.parameters[0].fields[0].escapes


def test_memory_from_malloc_is_the_kernels_own():
    before = ".extern .func (.param .b64 r) malloc(.param .b64 n);"
    body = (
        "mov.u64 %d1, 64;" + call("malloc", "%d1", "%d2") + "st.u32 [%d2+4], 1; ld.param.u64 %d3, [p]; st.u32 [%d3], 1;"
    )
    result = infer(P, body, before)
    assert ({"p": W}, frozenset()) == (modes(result), result.doubts)


def test_grid_barriers_lie_in_the_drivers_memory():
    body = """mov.u32 %r1, %envreg2; cvt.u64.u32 %d1, %r1; mov.u32 %r2, %envreg1; cvt.u64.u32 %d2, %r2;
        shl.b64 %d3, %d2, 32; or.b64 %d4, %d3, %d1; atom.add.release.gpu.u32 %r3, [%d4+4], 1;"""
    result = infer(P, body)
    assert ({}, frozenset()) == (modes(result), result.doubts)


def test_pointer_that_is_stored_escapes():
    result = infer(PQ, LOAD + "st.global.u64 [%d1], %d2;")
    assert [False, True] == [p.fields[0].escapes for p in result.parameters]
    assert {"p": W, "q": Mode(0)} == modes(result)


def test_textures_are_said():
    result = infer(P, "ld.param.u64 %d1, [p]; suld.b.1d.b32.trap {%r1}, [%d1];")
    assert frozenset({AccessDoubt.TEXTURE}) == result.doubts


def test_values_with_very_many_origins_stay_sound():
    count = 40
    parameters = ", ".join(f".param .u64 p{i}" for i in range(count))
    declared = "".join(f".reg .b64 %x{i};" for i in range(count))
    loads = "".join(f"ld.param.u64 %x{i}, [p{i}];" for i in range(count))
    chain = "".join(f"selp.b64 %d1, %x{i}, %d1, %p1;" for i in range(count))
    sums = "mov.u64 %d2, 0;" + "".join(f"add.s64 %d2, %d2, %x{i};" for i in range(count))
    result = infer(parameters, declared + loads + chain + sums + "ld.global.u32 %r1, [%d1]; st.global.u32 [%d2], 0;")
    assert {f"p{i}": R | W for i in range(count)} == modes(result)


@pytest.mark.parametrize("count", [40, 100])
def test_index_beside_one_of_very_many_pointers(count):
    parameters = ", ".join(f".param .u64 p{i}" for i in range(count))
    body = "".join(f"ld.param.u64 %d2, [p{i}]; selp.b64 %d1, %d2, %d1, %p1;" for i in range(count))
    body += "mov.u32 %r1, %tid.x; mad.wide.u32 %d3, %r1, 4, %d1; st.global.u32 [%d3], 0;"
    result = infer(parameters, "mov.u64 %d1, 0;" + body)
    assert ({f"p{i}": W for i in range(count)}, frozenset()) == (modes(result), result.doubts)


def test_no_such_kernel():
    with pytest.raises(PtxError, match="no kernel 'x'"):
        infer("", "", name="x")
