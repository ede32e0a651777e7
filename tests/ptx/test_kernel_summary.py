"""What a kernel consists of."""

from __future__ import annotations

import pytest

from cudatool.ptx import Feature, InstructionClass, PtxError, parse, summarize

HEADER = ".version 8.3\n.target sm_90\n.address_size 64\n"


def summary(body: str, before: str = "", directives: str = ""):
    text = f"{HEADER}{before}\n.visible .entry k(.param .u64 p) {directives} {{ .reg .pred %p<3>; .reg .b16 %h<3>; .reg .b32 %r<9>; .reg .b64 %d<5>; .reg .f32 %f<5>; .reg .f64 %g<3>; {body} }}"
    return summarize(parse(text), "k")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("add.s32 %r1, %r2, 1;", InstructionClass.INTEGER),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", InstructionClass.FLOAT),
        ("cvt.rn.f32.u32 %f1, %r1;", InstructionClass.CONVERSION),
        ("setp.lt.f32 %p1, %f1, %f2;", InstructionClass.PREDICATE),
        ("and.pred %p1, %p1, %p2;", InstructionClass.PREDICATE),
        ("mov.u32 %r1, %tid.x;", InstructionClass.MOVE),
        ("ld.param.u64 %d1, [p];", InstructionClass.PARAMETER),
        ("ld.global.nc.v2.f32 {%f1, %f2}, [%d1];", InstructionClass.GLOBAL_LOAD),
        ("st.global.u32 [%d1], %r1;", InstructionClass.GLOBAL_STORE),
        ("ld.u32 %r1, [%d1];", InstructionClass.GENERIC),
        ("st.shared.u32 [%r1], %r2;", InstructionClass.SHARED),
        ("red.global.add.u32 [%d1], 1;", InstructionClass.ATOMIC),
        ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", InstructionClass.WARP),
        ("bar.sync 0;", InstructionClass.SYNCHRONIZATION),
        ("cp.async.ca.shared.global [%r1], [%d1], 4;", InstructionClass.ASYNC_COPY),
        (
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1}, {%r1}, {%r2}, {%f1};",
            InstructionClass.TENSOR_CORE,
        ),
    ],
)
def test_class_of_an_instruction(code, expected):
    assert {expected: 1, InstructionClass.BRANCH: 1} == summary(code + "ret;").instructions


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ret;", ()),
        ("barrier.sync 0; bar.warp.sync -1;", (Feature.BARRIER, Feature.WARP_COLLECTIVE)),
        ("atom.add.u32 %r1, [%d1], 1; red.shared.add.u32 [%r1], 1;", (Feature.GLOBAL_ATOMIC, Feature.SHARED_ATOMIC)),
        ("fence.acq_rel.gpu;", (Feature.FENCE,)),
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];", (Feature.TENSOR_CORE,)),
        ("griddepcontrol.wait;", (Feature.DEPENDENCIES,)),
        ("griddepcontrol.launch_dependents;", (Feature.DEPENDENTS,)),
        ("mbarrier.init.shared.b64 [%r1], 4;", (Feature.MBARRIER,)),
        ("ld.volatile.global.u32 %r1, [%d1];", (Feature.SYSTEM_SCOPE,)),
        ("st.release.sys.u32 [%d1], %r1;", (Feature.SYSTEM_SCOPE,)),
        ("ld.volatile.shared.u32 %r1, [%r1];", ()),
        ("ld.acquire.gpu.global.u32 %r1, [%d1];", ()),
        ("add.f64 %g1, %g1, %g2; cvt.rn.f16.f32 %h1, %f1;", (Feature.DOUBLE, Feature.HALF)),
        ("alloca.u64 %d1, 16; trap;", (Feature.TRAP, Feature.ALLOCA)),
        ("suld.b.1d.b32.trap {%r1}, [%d1];", (Feature.TEXTURE,)),
    ],
)
def test_features(code, expected):
    assert expected == summary(code).features


LIBRARY = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);.extern .func other(.param .b64 a);"


def test_calls_and_what_they_reach():
    before = (
        LIBRARY
        + """.func leaf() { .reg .b32 %r; .shared .b32 one; atom.shared.inc.u32 %r, [one], 3; ret; }
        .func loop() { call leaf, (); call loop, (); ret; } .func unused() { bar.sync 0; ret; }"""
    )
    body = "call loop, (); { .param .b64 a; .param .b64 b; .param .b32 v; call (v), vprintf, (a, b); call other, (a); } ret;"
    found = summary(body, before)
    assert (("leaf", "loop"), ("other",)) == (found.calls, found.external_calls)
    assert (
        Feature.SHARED_ATOMIC,
        Feature.PRINTF,
        Feature.CALL,
        Feature.EXTERNAL_CALL,
        Feature.RECURSION,
    ) == found.features
    assert {"atom": 1, "call": 5, "ret": 3} == found.opcodes
    assert 4 == found.shared_bytes


def test_indirect_call():
    found = summary("PROTO: .callprototype _ (); call %d1, (), PROTO; ret;")
    assert ((Feature.INDIRECT_CALL,), ()) == (found.features, found.external_calls)


def test_memory_registers_and_launch_bounds():
    before = ".const .align 4 .b8 used[64]; .const .b32 unused; .extern .shared .align 4 .b8 dynamic[]; .shared .b8 tile[128];"
    body = ".local .b8 stack[40]; mov.u64 %d1, used; mov.u64 %d2, dynamic; ld.shared.u8 %h1, [tile+4]; ret;"
    found = summary(body, before, ".maxntid 16, 8, 1 .minnctapersm 2")
    assert (128, 40, 64) == (found.shared_bytes, found.local_bytes, found.constant_bytes)
    assert (128, 2) == (found.max_threads, found.min_blocks)
    assert {"pred": 3, "b16": 3, "b32": 9, "b64": 5, "f32": 5, "f64": 3} == found.registers
    assert (Feature.DYNAMIC_SHARED,) == found.features
    assert (0, 0) == (summary("ret;").max_threads, summary("ret;").min_blocks)


def test_no_such_kernel():
    with pytest.raises(PtxError, match="no kernel 'x'"):
        summarize(parse(HEADER), "x")
