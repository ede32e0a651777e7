"""PTX that a stranger wrote: each text ends in a result or a typed error, within stated time and memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ptx_fuzz import SOURCES, bases, fault_of, fuzz, look_at

from cudatool.ptx import PtxError, infer_accesses, parse

HEAD = ".version 8.3\n.target sm_90\n.address_size 64\n"
KERNEL = ".visible .entry k(.param .u64 a) {{\n.reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %d<{registers}>;\nld.param.u64 %d1, [a];\n{body}\nret;\n}}\n"


def kernel(body: str, *, registers: int = 9, before: str = "") -> str:
    return HEAD + before + KERNEL.format(body=body, registers=registers)


def chain(number: int, call: str) -> str:
    functions = [f".func f{i}(.param .b64 a) {{ {call.format(next=i + 1)} ret; }}\n" for i in range(number)]
    return "".join(functions) + f".func f{number}(.param .b64 a) {{ ret; }}\n"


# Each took minutes, or memory without end, or ended in a traceback.
TEXTS: dict[str, Callable[[], str]] = {
    "braces in a body": lambda: kernel("{" * 20_000 + "}" * 20_000),
    "braces in an operand": lambda: kernel("mov.b64 " + "{" * 20_000),
    "brackets in an operand": lambda: kernel("ld.global.u32 %r1, " + "[a, " * 20_000),
    "braces in an initializer": lambda: kernel("", before=".global .b32 a[] = " + "{" * 20_000 + ";\n"),
    "elements of elements": lambda: kernel("add.s32 %r1, a" + ".x" * 20_000 + ", 1;"),
    "registers": lambda: kernel(".reg .b32 %q<100000000000>;"),
    "registers, often": lambda: kernel("".join(f".reg .v8 .b32 %q{i}_<100000>;\n" for i in range(500))),
    "dimensions": lambda: kernel("", before=".global .b8 a[2][100000000000] = {{1}, {2}};\n"),
    "initializers": lambda: kernel("", before="".join(f".global .b8 a{i}[2][9000000] = {{{{1}},{{2}}}};\n" for i in range(99))),
    "digits": lambda: kernel("add.s32 %r1, %r1, " + "9" * 5000 + ";"),
    "hexadecimal digits": lambda: kernel("add.s32 %r1, %r1, 0x" + "f" * 50_000 + ";"),
    "an alignment of 0": lambda: kernel("", before=".global .align 0 .b8 a[8];\n"),
    "an alignment that is none": lambda: kernel("", before=".global .align -3 .b8 a[8];\n"),
    "a number that is none": lambda: kernel("", before=".global .b32 a = 1e999;\n"),
    "a number that is too large": lambda: kernel("", before=".global .f32 a = 1e300;\n"),
    "comments without an end": lambda: kernel("/* " * 20_000),
    "a long word": lambda: kernel("x" * 50_000 + ";"),
    "a large parameter": lambda: HEAD + ".visible .entry k(.param .b8 a[100000000000]) { .reg .b64 %d<3>; ld.param.u64 %d1, [%d2]; ret; }",
    "many parameters": lambda: HEAD
    + f".visible .entry k({','.join(f'.param .u64 p{i}' for i in range(900))}) {{ .reg .b64 %d<3>;"
    + "".join(f"ld.param.u64 %d1, [p{i}]; st.global.u32 [%d1], 1;\n" for i in range(900))
    + "ret; }",
    "values from the end to the beginning": lambda: kernel(
        "".join(f"mov.b64 %d{i + 1}, %d{i};\n" for i in reversed(range(1, 3000))), registers=3002
    ),
    "values in any order": lambda: kernel(
        "".join(f"mov.b64 %d{i + 1}, %d{i};\n" for i in sorted(range(1, 4000), key=lambda i: i * 997 % 4001)), registers=4002
    ),
    "calls in calls": lambda: kernel("call f0, (%d1);", before=chain(400, "call f{next}, (a);")),
    "calls that double": lambda: kernel("call f0, (%d1);", before=chain(40, "call f{next}, (a); call f{next}, (a);")),
    "large frames": lambda: HEAD
    + ".func f(.param .align 8 .b8 a[200000]) { .param .align 8 .b8 q[200000]; call f, (q); ret; }\n"
    + ".visible .entry k(.param .u64 a) { .param .align 8 .b8 q[200000]; "
    + "call f, (q);\n" * 2000
    + "ret; }",
    "blocks that all lead to each other": lambda: kernel(
        f"T: .branchtargets {','.join(f'L{i}' for i in range(600))};\n"
        + "".join(f"L{i}: brx.idx %r1, T;\n" for i in range(600))
    ),
    "barriers": lambda: kernel("bar.sync 0;\n" * 5000),
    "barriers with the same code after them": lambda: kernel("bar.sync 0; @%p1 bra E;\n" * 1000 + "E:" + "add.s32 %r1, %r1, 1;\n" * 1000),
    "more barriers than are written out": lambda: kernel("bar.sync 0;\n" * 25_000),
    "registers in braces": lambda: kernel("mov.b64 {" + "%r1," * 20_000 + "%r1}, %d1;"),
    "polls in a loop": lambda: kernel("L:" + "ld.volatile.global.u32 %r1, [%d1]; setp.eq.u32 %p1, %r1, 0;\n" * 900 + "@%p1 bra L;"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_text_ends_in_time_and_in_memory(name: str) -> None:
    assert fault_of(TEXTS[name]()) is None


# NVRTC takes as long to make what is changed as 200 changes take: one slice, of as many as two workers had.
@pytest.mark.some_of("first", range(0, 600, 100), 1)
def test_a_slice_of_the_mutations_ends_in_results_or_errors(first: int) -> None:
    _, found = fuzz(range(first, first + 100), bases(SOURCES[:6]))
    assert {} == found


def test_what_compilers_write_is_within_the_limits() -> None:
    for text in bases(SOURCES[:3]):
        assert look_at(text)


def test_a_message_quotes_a_line_at_most() -> None:
    with pytest.raises(PtxError) as caught:
        parse(kernel("bra " + "x" * 50_000 + ";"))
    assert len(str(caught.value)) < 300


def test_values_that_depend_on_each_other_without_end_are_refused() -> None:
    body = "".join(f"mov.b64 %d{i + 1}, %d{i};\n" for i in sorted(range(1, 9000), key=lambda i: i * 4793 % 9001))
    module = parse(kernel(body, registers=9002))
    with pytest.raises(PtxError, match="k: its values depend on each other in too many ways"):
        infer_accesses(module, "k")
