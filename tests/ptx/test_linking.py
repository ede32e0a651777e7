"""Several PTX modules become one: declarations find definitions, private names stay private."""

from __future__ import annotations

import pytest

from cudatool.ptx import LinkError, PtxError, Symbol, join, parse, parse_image, split, undefined

HEADER = b".version 8.3\n.target sm_90\n.address_size 64\n"
CALLER = (
    HEADER + b".extern .func (.param .b32 r) f(.param .b32 a);\n.visible .entry k() { call (%r1), f, (%r2); ret; }\n"
)
CALLEE = HEADER + b".visible .func (.param .b32 r) f(.param .b32 a) { .reg .b32 %x; ret; }\n"


def linked(*texts: bytes):
    return parse_image(join(texts))


def test_declaration_finds_its_definition_in_either_order():
    for module in (linked(CALLER, CALLEE), linked(CALLEE, CALLER)):
        assert module.functions["f"].has_body
        assert [] == undefined(module)
        assert ["k"] == list(module.kernels)


def test_undefined_symbol_is_named():
    other = (
        HEADER + b".extern .global .align 4 .u32 counter;\n.extern .func vprintf();\n.extern .shared .b8 dynamic[];\n"
    )
    assert ["counter", "f"] == undefined(linked(CALLER, other))


def test_two_definitions_are_an_error():
    with pytest.raises(LinkError, match="'f' is defined more than once"):
        linked(CALLEE, CALLER, CALLEE)


def test_weak_definitions_give_way():
    weak = HEADER + b".weak .func (.param .b32 r) f(.param .b32 a) { .reg .b64 %weak; ret; }\n"
    for module in (linked(weak, CALLEE), linked(CALLEE, weak), linked(weak, CALLEE, weak)):
        assert {"%x": "b32"} == module.functions["f"].registers
    assert {"%weak": "b64"} == linked(weak, weak).functions["f"].registers


def test_largest_common_variable_stays():
    small, large = (HEADER + b".common .global .align 4 .b8 c[%d];\n" % size for size in (4, 64))
    assert 64 == linked(small, large).variables["c"].size == linked(large, small).variables["c"].size


def test_private_symbols_of_the_same_name_stay_apart():
    def unit(kernel: bytes, value: int) -> bytes:
        return (
            HEADER
            + b".global .align 8 .u64 pointer = state;\n.global .align 4 .u32 state = %d;\n" % value
            + b".visible .entry %s() { .reg .b64 %%a; mov.u64 %%a, state; ld.global.u32 %%r, [state+4]; ret; }\n"
            % kernel
        )

    module = linked(unit(b"one", 1), unit(b"two", 2))
    values = {}
    for kernel in ("one", "two"):
        move, load = module.kernels[kernel].instructions[:2]
        assert isinstance(move.operands[1], Symbol)
        assert move.operands[1].name == load.operands[1].base.name
        values[kernel] = module.variables[move.operands[1].name].initial[0]
    assert {"one": 1, "two": 2} == values
    pointed = {v.relocations[0].symbol for name, v in module.variables.items() if name.startswith("pointer")}
    assert {name for name in module.variables if name.startswith("state")} == pointed


def test_a_local_name_hides_the_module_s():
    one = HEADER + b".global .align 4 .u32 x = 1;\n.visible .entry one() { ret; }\n"
    two = HEADER + b".global .align 4 .u32 x = 2;\n.visible .entry two() { .shared .b32 x; mov.u64 %a, x; ret; }\n"
    kernel = linked(one, two).kernels["two"]
    assert kernel.instructions[0].operands[1].name in kernel.variables


def test_source_files_keep_their_lines():
    def unit(kernel: bytes, file: bytes) -> bytes:
        return HEADER + b'.file 1 "%s"\n.visible .entry %s() { .loc 1 7 0\n ret; }\n' % (file, kernel)

    module = linked(unit(b"one", b"one.cu"), unit(b"two", b"two.cu"))
    places = {name: k.instructions[0].location for name, k in module.kernels.items()}
    assert {"one": ("one.cu", 7), "two": ("two.cu", 7)} == {
        name: (module.files[place.file], place.line) for name, place in places.items()
    }


def test_lines_of_a_linked_image_are_counted_through():
    image = join([CALLER, CALLEE, HEADER + b".visible .entry last() { ret; }"])
    lines = image.split(b"\n")
    at = {name: f.line for name, f in parse_image(image).functions.items()}
    for name in ("k", "f", "last"):
        assert f" {name}(".encode() in lines[at[name] - 1]


def test_linked_images_can_be_linked_again():
    assert [CALLER, CALLEE, HEADER] == split(join([join([CALLER, CALLEE + b"\0"]), HEADER]))


def test_one_module_is_itself():
    assert parse(CALLEE).functions.keys() == linked(CALLEE).functions.keys()
    with pytest.raises(PtxError):
        linked(CALLEE, b"no PTX")
