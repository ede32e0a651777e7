"""Damaged PTX is refused with an error that says so, never with a traceback."""

from __future__ import annotations

import random
import re

import pytest

from cudatool.ptx import PtxError, infer_accesses, parse, summarize

TEXT = """.version 8.3
.target sm_90
.address_size 64
.global .align 8 .b8 table[64];
.func (.param .b64 r) next(.param .b64 at) { .reg .b64 %d<3>; ld.param.b64 %d1, [at]; add.s64 %d2, %d1, 8; st.param.b64 [r], %d2; ret; }
.visible .entry k(.param .u64 p, .param .align 8 .b8 s[24]) .maxntid 128 {
.reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .f32 %f<5>; .shared .align 8 .b8 tile[64];
ld.param.u64 %d1, [p]; ld.param.u64 %d2, [s+8]; mov.u32 %r1, %tid.x; mad.wide.u32 %d3, %r1, 4, %d1;
ld.global.v2.f32 {%f1, %f2}, [%d3+8]; setp.lt.u32 %p1, %r1, 32; @%p1 bra DONE; selp.b64 %d4, %d2, %d3, %p1;
{ .param .b64 a; .param .b64 v; st.param.b64 [a], %d4; call (v), next, (a); ld.param.b64 %d5, [v]; }
st.shared.u64 [tile+8], %d5; atom.shared.exch.b64 %d6, [tile], %d5; mov.b64 {%r2, %r3}, %d6; shl.b64 %d7, %d6, 2;
and.b64 %d8, %d5, 7; shfl.sync.idx.b32 %r4|%p2, %r2, 0, 31, -1; red.global.add.u32 [%d5], %r4;
cp.async.ca.shared.global [%r1], [%d3], 16; DONE: st.global.f32 [%d2], %f1; ret;
}
"""
TOKENS = re.findall(r"[\w.%$]+|\s+|.", TEXT)


def damaged(generator: random.Random) -> str:
    """Return the text with some words missing, repeated, replaced or exchanged, and perhaps cut short."""
    tokens = list(TOKENS)
    for _ in range(generator.randrange(1, 4)):
        at, other = generator.randrange(len(tokens)), generator.randrange(len(tokens))
        match generator.randrange(5):
            case 0:
                del tokens[at]
            case 1:
                tokens[at] = tokens[other]
            case 2:
                tokens.insert(at, tokens[other])
            case 3:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 4 if generator.random() < 0.2:
                del tokens[at:]
    return "".join(tokens)


@pytest.mark.some_of("seed", range(30), 10)
def test_damaged_text(seed):
    generator = random.Random(seed)
    for _ in range(100):
        try:
            module = parse(damaged(generator))
            for name in module.kernels:
                infer_accesses(module, name)
                summarize(module, name)
        except PtxError as error:
            assert str(error)


@pytest.mark.parametrize(
    "code",
    [
        *("ld.global.u32 %r1, %d1;", "st.global.u32 %d1, %r1;", "ld.global.u32 %r1;", "mov.u32 %r1;", "call;"),
        *("call (%r1);", "add.s32;", "mad.lo.s32 %r1, %r2, 1;", "atom.add.u32 %r1, %d1, 1;", "red.add.u32 [%d1];"),
    ],
)
def test_instruction_without_its_operands(code):
    module = parse(
        f".version 8.3\n.target sm_90\n.address_size 64\n.entry k() {{\n.reg .b32 %r<3>; .reg .b64 %d<3>;\n{code}\n}}"
    )
    with pytest.raises(PtxError, match=rf"operands of {code.split()[0].rstrip(';')}.*line 6"):
        infer_accesses(module, "k")
