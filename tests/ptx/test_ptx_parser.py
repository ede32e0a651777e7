"""The PTX parser, inlining and control flow."""

from __future__ import annotations

import pytest

from cudatool.ptx import (
    Address,
    Flow,
    Immediate,
    Location,
    Pair,
    PtxError,
    Register,
    Relocation,
    Symbol,
    VectorOperand,
    merge_calls,
    parse,
)
from cudatool.ptx.flow import reads

HEADER = ".version 8.3\n.target sm_90, debug\n.address_size 64\n"


def body(text: str, before: str = ""):
    return parse(f"{HEADER}{before}.visible .entry k() {{\n{text}\n}}").functions["k"]


def one(text: str):
    return body(f".reg .b32 %r<9>; .reg .pred %p<3>; .reg .b64 %d<4>; {text}").instructions[0]


def test_header_files_and_sections():
    module = parse(
        HEADER
        + '.file 1 "/a/b.cu", 123, 456\n.section .debug_str\n{ .b8 1,2\ninfo: .b8 3 }\n/* a\ncomment */ // another\n'
    )
    assert ((8, 3), "sm_90", {1: "/a/b.cu"}) == (module.version, module.target, module.files)


def test_terminating_nul_is_ignored():
    assert (8, 3) == parse(HEADER.encode() + b"\0").version


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("not ptx", "unexpected 'not'", 1),
        ("", "not a PTX module", 0),
        (HEADER + ".visible .entry k() { add.u32 %r1", "expected ';', found 'the end'", 4),
        (HEADER + ".visible .entry k()\n{\nbra NOWHERE; }", "unknown label 'NOWHERE'", 6),
        (HEADER + "\n.global .u33 x;", "unexpected '.u33'", 5),
        (HEADER + "\n\x01", "unexpected character", 5),
        (".version 7.0\n.address_size 32\n", "only 64-bit", 3),
    ],
)
def test_errors_name_the_line(text, message, line):
    with pytest.raises(PtxError, match=message) as error:
        parse(text)
    assert line == error.value.line


def test_operands():
    assert (Register("%r1"), Register("%r2"), Immediate(-5, 0)) == tuple(
        o if not isinstance(o, Immediate) else Immediate(o.value) for o in one("add.s32 %r1, %r2, -5;").operands
    )
    assert Immediate(1.0, 32, 0x3F800000) == one("mov.f32 %r1, 0f3F800000;").operands[1]
    assert Immediate(-2.0, 64, 0xC000000000000000) == one("mov.f64 %d1, 0dC000000000000000;").operands[1]
    assert [255, 8, 5, 10] == [one(f"mov.u32 %r1, {n};").operands[1].value for n in ("0xFF", "010", "0b101", "10U")]
    assert Address(Register("%d1"), -4) == one("ld.global.u32 %r1, [%d1+-4];").operands[1]
    assert Address(Symbol("x"), 12) == one("ld.global.u32 %r1, [x+8+4];").operands[1]
    assert Address(None, 16) == one("ld.global.u32 %r1, [16];").operands[1]
    assert Pair(Register("%p1"), Register("%p2")) == one("setp.eq.u32 %p1|%p2, %r1, %r2;").operands[0]
    assert VectorOperand((Register("%r1"), Register("_"))) == one("ld.v2.u32 {%r1, _}, [%d1];").operands[0]
    assert Register("%p1", negated=True) == one("setp.eq.and.u32 %p2, %r1, %r2, !%p1;").operands[3]


def test_guard_and_modifiers():
    instruction = one("@!%p1 ld.global.nc.L1::no_allocate.v2.f32 {%r1, %r2}, [%d1];")
    assert Register("%p1", negated=True) == instruction.guard
    assert ("ld", ("global", "nc", "L1::no_allocate", "v2", "f32")) == (instruction.opcode, instruction.modifiers)
    assert "ld.global.nc.L1::no_allocate.v2.f32" == instruction.name


def test_locations_follow_the_code():
    function = body(".loc 1 10 3\nret;\n.loc 1 11 5, function_name $L__info+8, inlined_at 1 20 2\nexit;")
    assert [Location(1, 10, 3), Location(1, 11, 5, ((1, 20),))] == [i.location for i in function.instructions]
    assert [6, 8] == [i.line for i in function.instructions]


def test_locations_of_inlined_code_name_its_callers_outwards():
    """Where a call of an inlined function was inlined is said where the function's own code begins."""
    function = body("""
        .loc 2 9 1, function_name $L__outer, inlined_at 1 14 5
        .loc 3 6 2, function_name $L__inner, inlined_at 2 9 1
        bar.warp.sync -1;
        .loc 2 9 1, function_name $L__outer, inlined_at 1 15 5
        .loc 3 6 2, function_name $L__inner, inlined_at 2 9 1
        bar.warp.sync -1;
        .loc 1 16 5
        exit;""")
    callers = [((2, 9), (1, 14)), ((2, 9), (1, 15)), ()]
    assert callers == [i.location.callers for i in function.instructions]


def test_function_directives_and_parameters():
    text = """.visible .entry k(.param .u64 .ptr .global .align 16 p, .param .align 8 .b8 s[24], .param .f32 f)
    .maxntid 128, 2, 1 .minnctapersm 2 { ret; }"""
    function = parse(HEADER + text).kernels["k"]
    assert {"maxntid": (128, 2, 1), "minnctapersm": (2,)} == function.directives
    assert [("p", 8, 8, True), ("s", 24, 8, False), ("f", 4, 4, False)] == [
        (p.name, p.size, p.align, p.pointer) for p in function.params
    ]


def test_variables():
    text = """.global .align 4 .b8 a[8] = {1, 0x2, 3};
    .visible .const .f32 c[2][2] = {{1.0, 0f40000000}, {3.0}};
    .global .u64 r[2] = {generic(a)+4, a};
    .extern .shared .align 16 .b8 dynamic[];
    .global .attribute(.managed) .s32 m = -2;
    .global .u32 x, y[3];"""
    variables = parse(HEADER + text).variables
    assert b"\1\2\3" == variables["a"].initial
    assert ("const", 16, bytes.fromhex("0000803f 00000040 00004040")) == (
        variables["c"].space,
        variables["c"].size,
        variables["c"].initial,
    )
    assert (Relocation(0, "a", 4), Relocation(8, "a", 0)) == variables["r"].relocations
    assert (0, 16, True) == (variables["dynamic"].size, variables["dynamic"].align, variables["dynamic"].external)
    assert (True, b"\xfe\xff\xff\xff") == (variables["m"].managed, variables["m"].initial)
    assert (4, 12) == (variables["x"].size, variables["y"].size)


def test_inner_scopes_get_names_of_their_own():
    function = body(
        ".reg .b32 %r<2>; { .reg .b64 %r<2>; .reg .b32 t; mov.b64 %r1, 1; L: bra L; } { .reg .b32 t; mov.u32 t, 2; L: bra L; }"
        "mov.u32 %r1, 3;"
    )
    targets = [i.operands[0].name for i in function.instructions]
    assert 5 == len(set(targets))
    assert ["b64", "b32", "b32"] == [function.registers[targets[n]] for n in (0, 2, 4)]
    assert "%r1" == targets[4]
    assert {0, 1, 3} - {0} == set(function.labels.values())


def test_blocks_and_liveness():
    function = body(""".reg .b32 %r<4>; .reg .pred %p;
    mov.u32 %r1, 0; mov.u32 %r2, 10;
    L: add.u32 %r1, %r1, 1; setp.lt.u32 %p, %r1, %r2; @%p bra L;
    @%p mov.u32 %r3, 1;
    st.global.u32 [0], %r3; ret;""")
    flow = Flow(function)
    assert [(0, 2), (2, 5), (5, 8), (8, 8)] == [(b.start, b.stop) for b in flow.blocks]
    assert [[1], [1, 2], [], []] == [b.successors for b in flow.blocks]
    # %r3 is live from the start: where the guard is off its old value is stored.
    assert [{"%r3"}, {"%r1", "%r2", "%r3"}, {"%r3", "%p"}] == [set(b.live_in) for b in flow.blocks[:3]]


def test_split_points_begin_blocks():
    function = body("bar.sync 0; bar.sync 1; ret;")
    assert [(0, 1), (1, 2), (2, 3), (3, 3)] == [(b.start, b.stop) for b in Flow(function, frozenset({1, 2})).blocks]


def test_edges_back_to_one_block_close_one_loop_and_loops_nest():
    function = body(""".reg .pred %p<9>;
    OUTER: @%p0 bra INNER; bra OUTER;
    INNER: @%p1 bra INNER; @%p2 bra INNER; @%p3 bra OUTER;
    ret;""")
    flow = Flow(function)
    at = {name: flow.at[index] for name, index in function.labels.items()}
    inner = frozenset({at["INNER"], at["INNER"] + 1})
    outer = frozenset({at["OUTER"], at["OUTER"] + 1, at["INNER"] + 2}) | inner
    assert {at["OUTER"]: outer, at["INNER"]: inner} == flow.natural_loops()


def test_a_branch_to_text_before_it_closes_a_loop_only_if_all_ways_come_through_there():
    function = body(""".reg .pred %p;
    @%p bra RARE;
    JOIN: nanosleep.u32 1; ret;
    RARE: nanosleep.u32 2; bra JOIN;""")
    assert {} == Flow(function).natural_loops()


def test_inlined_calls_have_their_own_registers():
    before = """.func (.param .b32 r) f(.param .b32 x) { .reg .b32 %v; .reg .pred %p; ld.param.b32 %v, [x];
    setp.eq.u32 %p, %v, 0; @%p ret; st.param.b32 [r], %v; ret; }"""
    text = "{ .param .b32 a; .param .b32 o; st.param.b32 [a], 1; call.uni (o), f, (a); call (o), f, (a); } ret;"
    module = parse(f"{HEADER}{before}.visible .entry k() {{ {text} }}")
    function = merge_calls(module, module.functions["k"], 1024)
    assert "call" not in {i.opcode for i in function.instructions}
    assert 4 == len(function.registers)
    assert ["exit" if i.opcode == "exit" else i.opcode for i in function.instructions][-1:] == ["ret"]
    assert 4 == sum(i.opcode == "bra" for i in function.instructions)
    Flow(function)


def test_a_function_that_calls_itself_becomes_a_part_of_the_kernel():
    module = parse(HEADER + ".func f() { call.uni f; ret; } .visible .entry k() { call.uni f; ret; }")
    function = merge_calls(module, module.functions["k"], 1024)
    assert "call" not in {i.opcode for i in function.instructions}
    assert 2 == len(function.branch_targets["%stack.calls"])
    Flow(function)


def test_text_of_functions_and_preamble_do_not_overlap():
    text = HEADER + ".global .u32 x;\n.visible .entry a() { ret; }\n.visible .entry b() { exit; }\n.global .u32 y;\n"
    module = parse(text)
    assert module.functions["a"].text.startswith(".visible .entry a() { ret; }")
    assert "exit" not in module.functions["a"].text
    assert ".global .u32 x;" in module.preamble and ".global .u32 y;" in module.preamble
    assert "entry" not in module.preamble


def test_texture_address_keeps_sampler_and_coordinates():
    r1, r2 = Register("%r1"), Register("%r2")
    plain, sampled = (
        one(f"tex.2d.v4.s32.s32 {{%r3, %r4, %r5, %r6}}, [{where}, {{%r1, %r2}}];").operands[1]
        for where in ("%d1", "image, sampler")
    )
    assert Address(Register("%d1"), 0, (VectorOperand((r1, r2)),)) == plain
    assert Address(Symbol("image"), 0, (Symbol("sampler"), VectorOperand((r1, r2)))) == sampled


def test_coordinates_are_read_and_renamed_when_a_call_is_inlined():
    module = parse(
        f"{HEADER}.func f() {{ .reg .b32 %r<3>; .reg .b64 %d; suld.b.1d.b32.trap %r1, [%d, {{%r2}}]; ret; }}\n"
        ".visible .entry k() { call f, (); ret; }"
    )
    load = merge_calls(module, module.functions["k"], 1024).instructions[0]
    assert ["f.1.%d", "f.1.%r2"] == reads(load)


def test_vector_register_is_its_elements():
    instructions = body(
        ".reg .v2 .b32 v; .reg .b32 %r; mov.b32 %r, v.y; mov.b32 v.r, %r; ld.v2.b32 v, [0];"
    ).instructions
    x, y, r = Register("v.x"), Register("v.y"), Register("%r")
    assert [(r, y), (x, r), (VectorOperand((x, y)), Address(None))] == [i.operands for i in instructions]


def test_vector_register_of_an_inner_scope_hides_the_outer_one():
    function = body(".reg .v2 .b32 v; { .reg .v4 .f32 v; mov.f32 v.a, v.x; }")
    target, source = function.instructions[0].operands
    assert ["f32", "f32"] == [function.registers[operand.name] for operand in (target, source)]
    assert {"v.x", "v.y"} < function.registers.keys() - {target.name, source.name}


def test_paths_that_are_not_ascii_are_read() -> None:
    """NVRTC writes their bytes as octal escapes."""
    module = parse(HEADER + '.file 1 "/pr\\303\\266ve/k.cu"\n')
    assert {1: "/pröve/k.cu"} == module.files
