"""Rows of ldmatrix and mma, which are made at one suspension, against the same instructions made one by one."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cudatool.sim.jit import kernel_text

WORDS = 16  # registers that a program works with: half of them begin as what was loaded, the rest as 0
HEAD = """.reg .b32 %t, %a, %b, %r<16>; .reg .b64 %p, %q, %o, %d<8>; .shared .align 16 .b8 s[2048];
mov.u32 %t, %tid.x; ld.param.u64 %p, [p]; ld.param.u64 %q, [q]; mul.wide.u32 %o, %t, 4; add.u64 %p, %p, %o;
add.u64 %q, %q, %o; mov.u32 %a, s; mad.lo.u32 %a, %t, 16, %a;
"""


def kernel_of(ptx_kernel, lines, threads):
    """Return a kernel: each thread loads 8 words, puts 4 in shared memory, and stores all its registers at the end.

    What is read of shared memory beyond these words is 0: what was there before is another kernel's.
    """
    body = [HEAD]
    body += [f"ld.global.b32 %r{n}, [%p+{4 * threads * n}]; mov.b32 %r{n + 8}, 0;" for n in range(8)]
    body.append(f"st.shared.v4.b32 [%a+{16 * threads}], {{%r8, %r9, %r10, %r11}};")
    body += ["st.shared.v4.b32 [%a], {%r0, %r1, %r2, %r3}; bar.sync 0;", *lines]
    body += [f"st.global.b32 [%q+{4 * threads * n}], %r{n};" for n in range(WORDS)]
    return ptx_kernel(".param .u64 p, .param .u64 q", "\n".join([*body, "ret;"]))


def result_of(ptx_kernel, launch, lines, threads=64):
    data = np.random.default_rng(0).integers(-4, 5, (8, threads, 2)).astype(np.float16)
    result = np.zeros((WORDS, threads), np.uint32)
    launch(kernel_of(ptx_kernel, lines, threads), 1, threads, data, result)
    return result.tolist()


def random_program(seed):
    """Return instructions that read and write few registers, so that they depend on each other in many ways."""
    random = np.random.default_rng(seed)

    def some(count, *, distinct=False):
        if random.random() < 0.7:
            first = random.integers(0, WORDS // count) * count
            names = range(first, first + count)
        else:
            names = random.choice(WORDS, count, replace=not distinct)
        return "{" + ", ".join(f"%r{n}" for n in names) + "}"

    lines = []
    for _ in range(random.integers(2, 24)):
        kind = random.choice(["half", "half", "single", "bytes", "load", "move"])
        if kind == "half":
            c = some(2)
            d = c if random.random() < 0.5 else some(2, distinct=True)
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {d}, {some(4)}, {some(2)}, {c};")
        elif kind == "single":
            c = some(4)
            d = c if len(set(c.split())) == 4 and random.random() < 0.7 else some(4, distinct=True)
            lines.append(f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {d}, {some(2)}, {some(1)}, {c};")
        elif kind == "bytes":
            d = some(4, distinct=True)
            lines.append(f"mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {d}, {some(2)}, {some(1)}, {{1, 2, 3, 4}};")
        elif kind == "load":
            count = random.choice([1, 2, 4])
            trans = random.choice([".trans", ""])
            place = random.choice(["[%a]", "[%a+512]"])
            to = some(count, distinct=True)
            lines.append(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {to}, {place};")
        else:
            to, source = random.integers(0, WORDS, 2)
            lines.append(f"add.u32 %r{to}, %r{source}, 1;" if random.random() < 0.5 else f"mov.b32 %r{to}, 1006648320;")
    return lines


@pytest.mark.some_of("seed", range(12), 2)
def test_what_is_joined_gives_what_it_gives_apart(ptx_kernel, launch, monkeypatch, seed):
    program = random_program(seed)
    together = result_of(ptx_kernel, launch, program)
    monkeypatch.setattr(kernel_text, "join_products", lambda function: function)
    assert result_of(ptx_kernel, launch, program) == together


def test_a_row_of_products_is_one_suspension(ptx_kernel):
    lines = []
    for n in range(8, 16, 2):  # as Triton writes it: the zeros of each sum stand before its product
        lines.append("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%a];")
        lines.append(f"mov.b32 %r{n}, 0; mov.b32 %r{n + 1}, 0;")
        d = f"{{%r{n}, %r{n + 1}}}"
        lines.append(f"mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {d}, {{%r0, %r1}}, {{%r4}}, {d};")
    text = kernel_of(ptx_kernel, lines, 32).llvm_ir()
    assert ["thread_0", "thread_1", "thread_2"] == re.findall(r"^define .*@(thread_\d+)\(", text, re.MULTILINE)


PRODUCT = (
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
    "{%r8, %r9, %r10, %r11}, {%r0, %r1}, {%r2}, {%r8, %r9, %r10, %r11};"
)


def test_a_label_ends_a_row(ptx_kernel, launch):
    loop = [".reg .pred %z; mov.u32 %b, 0;", PRODUCT, "AGAIN:", PRODUCT]
    loop += ["add.u32 %b, %b, 1; setp.lt.u32 %z, %b, 3; @%z bra AGAIN;"]
    assert result_of(ptx_kernel, launch, [PRODUCT] * 4) == result_of(ptx_kernel, launch, loop)
